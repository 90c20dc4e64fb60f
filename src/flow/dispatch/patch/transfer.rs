//! What the legs of a vLLM pair are told, by NIXL or Mooncake.
//!
//! Takes the members that were marked and what is known of the other leg, gives members for the end of a body; and
//! takes a prefill's answer, gives what it says to the decode. Never looks into what one worker says to the other.
//!
//! A prefill leg is the client's body without the members [`marked`](super::marked), a decode leg without those that
//! are [`private`](super::private).

use super::put;
use crate::flow::passage::{Mark, Marked};
use crate::json;

/// Appends the members for a NIXL prefill leg. `responses`: the route is `/v1/responses`, whose limit has a name of
/// its own.
pub fn nixl_prefill(add: &mut Vec<u8>, marks: &[Mark], responses: bool) {
    one_token(add, marks, responses);
    add.extend_from_slice(
        b",\"kv_transfer_params\":{\"do_remote_decode\":true,\"do_remote_prefill\":false,\"remote_engine_id\":null,\
          \"remote_block_ids\":null,\"remote_host\":null,\"remote_port\":null}",
    );
}

/// Appends the members for a NIXL decode leg: what [`transfer_params`] found, if anything.
pub fn nixl_decode(add: &mut Vec<u8>, params: Option<&[u8]>) {
    if let Some(params) = params {
        add.extend_from_slice(b"\"kv_transfer_params\":");
        add.extend_from_slice(params);
    }
}

/// Appends the members for a Mooncake prefill leg; the transfer is named by the request's id.
pub fn mooncake_prefill(add: &mut Vec<u8>, marks: &[Mark], responses: bool, request_id: &[u8]) {
    one_token(add, marks, responses);
    add.extend_from_slice(b",\"kv_transfer_params\":{\"do_remote_decode\":true,\"do_remote_prefill\":false");
    transfer_id(add, request_id);
    add.push(b'}');
}

/// Appends the members for a Mooncake decode leg. `bootstrap` is `http://host:port` of the prefill.
pub fn mooncake_decode(add: &mut Vec<u8>, request_id: &[u8], engine_id: &str, bootstrap: &str) {
    add.extend_from_slice(b"\"kv_transfer_params\":{\"do_remote_decode\":false,\"do_remote_prefill\":true");
    transfer_id(add, request_id);
    add.extend_from_slice(b",\"remote_engine_id\":");
    put(add, engine_id);
    add.extend_from_slice(b",\"remote_bootstrap_addr\":");
    put(add, bootstrap);
    add.push(b'}');
}

fn transfer_id(add: &mut Vec<u8>, request_id: &[u8]) {
    add.extend_from_slice(b",\"transfer_id\":");
    put(add, &format_args!("xfer-{}", String::from_utf8_lossy(request_id)));
}

/// A prefill leg makes one token, of one sample, and doesn't stream it.
fn one_token(add: &mut Vec<u8>, marks: &[Mark], responses: bool) {
    let has = |field| marks.iter().any(|mark| mark.field == field);
    add.extend_from_slice(b"\"stream\":false,\"max_tokens\":1");
    if has(Marked::MaxCompletionTokens) {
        add.extend_from_slice(b",\"max_completion_tokens\":1");
    }
    if responses || has(Marked::MaxOutputTokens) {
        add.extend_from_slice(b",\"max_output_tokens\":1");
    }
    if has(Marked::N) {
        add.extend_from_slice(b",\"n\":1");
    }
}

/// What a NIXL prefill's answer has for the decode: the raw JSON of its `kv_transfer_params`, the last where there are
/// several. `None` when it is missing or null, or the answer is no JSON object.
pub fn transfer_params(answer: &[u8]) -> Option<&[u8]> {
    let [params] = json::members(answer, ["kv_transfer_params"])?;
    params.map(|params| params.of(answer)).filter(|params| *params != b"null")
}
