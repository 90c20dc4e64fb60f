//! Answers that the gateway gives itself.
//!
//! Takes a fault or a body, appends a whole response. Never lets an input break the JSON or the head.

use super::head::Version;
use super::write::{connection, field, length, number, put};
use crate::fault::Fault;

/// The interim answer to `Expect: 100-continue`.
pub const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// What an answer depends on besides its content.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extra<'a> {
    /// Echoed as `x-request-id`.
    pub request_id: Option<&'a [u8]>,
    /// Whether the connection lives on.
    pub keep_alive: bool,
    /// Methods of the route, for 405.
    pub allow: &'a [&'a str],
    /// Whether the request was HEAD: the head says how long the body would have been.
    pub head_only: bool,
    /// The client's version.
    pub version: Version,
}

/// Appends the answer to a fault, in the OpenAI shape. A fault without a status has no answer: nothing is appended.
pub fn error(out: &mut Vec<u8>, fault: &Fault, extra: &Extra<'_>) {
    let row = fault.row();
    if row.status == 0 {
        return;
    }
    let start = out.len();
    put(out, b"{\"error\":{\"message\":\"");
    escape(out, row.text);
    if !fault.detail.is_empty() {
        put(out, b" ");
        escape(out, &fault.detail);
    }
    put(out, b"\",\"type\":\"");
    put(out, error_type(row.status).as_bytes());
    put(out, b"\",\"code\":\"");
    put(out, fault.prefix().as_bytes());
    put(out, row.code.as_bytes());
    put(out, b"\",\"param\":null}}");
    let body = out.len() - start;
    begin(out, row.status, "application/json", body, extra);
    put(out, b"x-corelane-error: ");
    put(out, fault.prefix().as_bytes());
    put(out, row.code.as_bytes());
    put(out, b"\r\n");
    match row.status {
        401 => put(out, b"www-authenticate: Bearer\r\n"),
        429 | 503 => put(out, b"retry-after: 1\r\n"),
        _ => {}
    }
    put(out, b"\r\n");
    // The body came first because the head states its length: now it changes places with the head.
    out[start..].rotate_left(body);
    if extra.head_only {
        out.truncate(out.len() - body);
    }
}

/// Appends an answer with a body of the gateway's own.
pub fn local(out: &mut Vec<u8>, status: u16, content_type: &str, body: &[u8], extra: &Extra<'_>) {
    begin(out, status, content_type, body.len(), extra);
    put(out, b"\r\n");
    if !extra.head_only {
        put(out, body);
    }
}

/// The head up to, not including, the empty line.
fn begin(out: &mut Vec<u8>, status: u16, content_type: &str, body: usize, extra: &Extra<'_>) {
    put(out, b"HTTP/1.1 ");
    number(out, u64::from(status));
    put(out, b" ");
    put(out, reason(status).as_bytes());
    put(out, b"\r\n");
    field(out, "content-type", content_type.as_bytes());
    length(out, body as u64);
    if let Some(id) = extra.request_id {
        field(out, "x-request-id", id);
    }
    if status == 405 {
        put(out, b"allow: ");
        for (i, method) in extra.allow.iter().enumerate() {
            put(out, if i == 0 { b"" } else { b", " });
            put(out, method.as_bytes());
        }
        put(out, b"\r\n");
    }
    connection(out, extra.keep_alive, extra.version);
}

/// `error.type` by status, as the OpenAI API has it.
const fn error_type(status: u16) -> &'static str {
    match status {
        429 => "rate_limit_error",
        500.. => "server_error",
        _ => "invalid_request_error",
    }
}

/// The reason phrase of a status; empty where this gateway never gives it.
const fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        206 => "Partial Content",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        413 => "Content Too Large",
        414 => "URI Too Long",
        417 => "Expectation Failed",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        _ => "",
    }
}

/// Appends text as the inside of a JSON string.
fn escape(out: &mut Vec<u8>, text: &str) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    for b in text.bytes() {
        match b {
            b'"' | b'\\' => out.extend_from_slice(&[b'\\', b]),
            b'\n' => put(out, b"\\n"),
            0..0x20 | 0x7f => {
                put(out, b"\\u00");
                out.extend_from_slice(&[HEX[usize::from(b >> 4)], HEX[usize::from(b & 15)]]);
            }
            _ => out.push(b),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::What;

    #[test]
    fn every_fault_with_a_status_has_a_reason_phrase() {
        for what in What::ALL.iter().filter(|w| w.row().status != 0) {
            assert_ne!(reason(what.row().status), "", "{what:?}");
        }
    }
}
