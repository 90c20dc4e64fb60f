//! Bodies as the legs of a pair get them: members taken out, members put in, every other byte as it came.
//!
//! Takes a body, its object's bounds and the marked members, gives the bytes to send. Never parses the body again,
//! never reorders or respells what stays, never does I/O.
//!
//! Whatever replaces a member of the client's is put in at the object's end, so that one rule does for all: members
//! are cut out where they stand, new ones come last.

mod bootstrap;
mod rooms;
mod transfer;

pub use bootstrap::Bootstrap;
pub use rooms::{Draw, Rooms};
pub use transfer::{mooncake_decode, mooncake_prefill, nixl_decode, nixl_prefill, transfer_params};

use crate::flow::passage::{Mark, Marked};
use crate::span::Span;

/// The members that are cut out of every body: those that are never forwarded.
pub fn private(marks: &[Mark]) -> impl Iterator<Item = Span> + Clone {
    marks.iter().filter(|mark| mark.field == Marked::Private).map(|mark| mark.span)
}

/// The members that are cut out of the body of a vLLM prefill leg: all that are marked.
pub fn marked(marks: &[Mark]) -> impl Iterator<Item = Span> + Clone {
    marks.iter().map(|mark| mark.span)
}

/// Appends `body` without the members `cuts`, each with one comma beside it, and with `add` as the last members.
///
/// `object` is the body's object, `cuts` are members of it in order, from key to end of value, `add` is
/// `"key":value,…` or empty. What stays is copied byte for byte, whitespace included, also before and behind the object.
///
/// # Panics
/// When `object` is empty: a bug of ours, only bodies that were read as JSON can be patched.
pub fn cut_and_add(out: &mut Vec<u8>, body: &[u8], object: Span, cuts: impl Iterator<Item = Span>, add: &[u8]) {
    let close = object.end() - 1;
    let mut pos = 0;
    for cut in cuts {
        out.extend_from_slice(&body[pos..cut.start as usize]);
        pos = cut.end();
        let gap = space(&body[pos..]);
        out.extend_from_slice(&body[pos..pos + gap]);
        pos += gap;
        if body[pos] == b',' {
            pos += 1;
            continue;
        }
        // The last one: the comma before it goes, which what stays before it has left behind, if anything stays.
        let kept = filled(out);
        if out[kept - 1] == b',' {
            out.remove(kept - 1);
        }
    }
    out.extend_from_slice(&body[pos..close]);
    let last = out[filled(out) - 1];
    end(out, last, body, object, add);
}

/// Appends what follows `body[..object.end() - 1]`, all before the closing brace, when `add` comes last. So that a
/// large body to which members are only added need not be copied.
///
/// # Panics
/// Like [`cut_and_add`].
pub fn tail(out: &mut Vec<u8>, body: &[u8], object: Span, add: &[u8]) {
    let before = &body[..object.end() - 1];
    end(out, before[filled(before) - 1], body, object, add);
}

/// Appends the end of the object, whose last byte so far is `last`, whitespace aside, and what lies behind it.
fn end(out: &mut Vec<u8>, last: u8, body: &[u8], object: Span, add: &[u8]) {
    if last != b'{' && !add.is_empty() {
        out.push(b',');
    }
    out.extend_from_slice(add);
    out.extend_from_slice(&body[object.end() - 1..]);
}

/// Bytes up to the last one that is no whitespace; an open object has at least its brace.
fn filled(json: &[u8]) -> usize {
    json.iter().rposition(|byte| !is_space(*byte)).map_or(0, |at| at + 1)
}

fn space(json: &[u8]) -> usize {
    json.iter().take_while(|byte| is_space(**byte)).count()
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\n' | b'\r' | b'\t')
}

/// Appends a value as JSON.
fn put(out: &mut Vec<u8>, value: &(impl serde::Serialize + ?Sized)) {
    serde_json::to_writer(out, value).expect("writing plain values to a Vec cannot fail");
}

#[cfg(test)]
mod tests;
