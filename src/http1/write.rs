//! Writing heads: a request for the worker, an answer for the client.
//!
//! Takes parsed heads and the few things that change, appends bytes. Never writes a field that it was not told of or
//! that the other side did not send, and never a CR or LF that comes from an input.

use super::head::{Field, FieldKind, Version, is_own};
use super::request::{BodyLength, RequestHead};
use super::response::{AnswerBody, ResponseHead};
use std::io::Write;
use std::net::IpAddr;

/// What changes between the client's request head and the worker's.
#[derive(Clone, Copy, Debug)]
pub struct Forward<'a> {
    /// Path prefix of the worker's URL, without a trailing slash; empty for none.
    pub prefix: &'a str,
    /// The client's address, appended to X-Forwarded-For.
    pub client: IpAddr,
    /// A worker's key: replaces the client's Authorization with `Bearer KEY`; `None`: the client's passes.
    pub authorization: Option<&'a str>,
    /// The client's Authorization and `x-api-key` are for the gateway: neither passes.
    pub own_keys: bool,
    /// Written as `x-request-id`, in place of the client's.
    pub request_id: &'a [u8],
    /// How the body will be framed.
    pub length: BodyLength,
    /// Written as `x-data-parallel-rank`, for an engine that has ranks and was not told one in the body.
    pub dp_rank: Option<u32>,
}

/// What changes between the worker's answer head and the client's.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'a> {
    /// Written as `x-request-id`, in place of the worker's.
    pub request_id: &'a [u8],
    /// How the body will be framed. `Chunked` for an HTTP/1.0 client is a bug of ours.
    pub framing: AnswerBody,
    /// Whether the client's connection lives on.
    pub keep_alive: bool,
    pub client_version: Version,
}

/// Appends the head of the request for the worker, always HTTP/1.1 and in origin form.
///
/// Repeated fields stay repeated, in order, names and values byte for byte.
pub fn request_head(out: &mut Vec<u8>, head: &RequestHead, buf: &[u8], f: &Forward<'_>) {
    let path = head.path.of(buf);
    put(out, head.method.as_str().as_bytes());
    put(out, b" ");
    if path != b"*" {
        put_line(out, f.prefix.as_bytes());
    }
    put(out, path);
    if let Some(query) = head.query {
        put(out, b"?");
        put(out, query.of(buf));
    }
    put(out, b" HTTP/1.1\r\n");
    field(out, "host", host(head, buf));
    if let Some(key) = f.authorization {
        put(out, b"authorization: Bearer ");
        put_line(out, key.as_bytes());
        put(out, b"\r\n");
    }
    for line in &head.fields {
        if passes_up(line, buf, f) {
            copy(out, line, buf);
        }
    }
    forwarded(out, head, buf, f.client);
    field(out, "x-request-id", f.request_id);
    if let Some(rank) = f.dp_rank {
        put(out, b"x-data-parallel-rank: ");
        number(out, u64::from(rank));
        put(out, b"\r\n");
    }
    match f.length {
        BodyLength::None => {}
        BodyLength::Length(n) => length(out, n),
        BodyLength::Chunked => put(out, b"transfer-encoding: chunked\r\n"),
    }
    put(out, b"\r\n");
}

/// Appends the head of the answer for the client.
///
/// Repeated fields stay repeated, in order, names and values byte for byte; so does the worker's reason phrase.
pub fn response_head(out: &mut Vec<u8>, head: &ResponseHead, buf: &[u8], f: &Answer<'_>) {
    put(out, b"HTTP/1.1 ");
    number(out, u64::from(head.status));
    put(out, b" ");
    put(out, head.reason.of(buf));
    put(out, b"\r\n");
    for line in &head.fields {
        if passes_down(line, buf) {
            copy(out, line, buf);
        }
    }
    field(out, "x-request-id", f.request_id);
    let old = f.client_version == Version::H10;
    let framing = if old && f.framing == AnswerBody::Chunked { AnswerBody::UntilClose } else { f.framing };
    debug_assert_eq!(framing, f.framing, "HTTP/1.0 clients know no chunked coding");
    match framing {
        AnswerBody::None => length_of_nothing(out, head, buf),
        AnswerBody::UntilClose => {}
        AnswerBody::Length(n) => length(out, n),
        AnswerBody::Chunked => put(out, b"transfer-encoding: chunked\r\n"),
    }
    if !head.interim() {
        connection(out, f.keep_alive && framing != AnswerBody::UntilClose, f.client_version);
    }
    put(out, b"\r\n");
}

/// What ends a chunked body that has no trailers.
pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// Appends `payload`, which is not empty, as one chunk.
pub fn chunk(out: &mut Vec<u8>, payload: &[u8]) {
    debug_assert!(!payload.is_empty(), "an empty chunk would end the body");
    let _ = write!(out, "{:x}\r\n", payload.len());
    put(out, payload);
    put(out, b"\r\n");
}

/// The answer to HEAD and 304 say how long the body would have been; 1xx and 204 must not.
fn length_of_nothing(out: &mut Vec<u8>, head: &ResponseHead, buf: &[u8]) {
    if !head.interim()
        && head.status != 204
        && let Some(value) = head.first(FieldKind::ContentLength)
    {
        field(out, "content-length", value.of(buf));
    }
}

/// Appends what the client must know about its connection.
pub(super) fn connection(out: &mut Vec<u8>, keep_alive: bool, client: Version) {
    match (keep_alive, client) {
        (false, _) => put(out, b"connection: close\r\n"),
        (true, Version::H10) => put(out, b"connection: keep-alive\r\n"),
        (true, Version::H11) => {}
    }
}

pub(super) fn length(out: &mut Vec<u8>, n: u64) {
    put(out, b"content-length: ");
    number(out, n);
    put(out, b"\r\n");
}

/// Appends a line with a name of ours.
#[inline]
pub(super) fn field(out: &mut Vec<u8>, name: &'static str, value: &[u8]) {
    put(out, name.as_bytes());
    end_of_field(out, value);
}

fn end_of_field(out: &mut Vec<u8>, value: &[u8]) {
    put(out, b": ");
    put_line(out, value);
    put(out, b"\r\n");
}

pub(super) fn number(out: &mut Vec<u8>, n: u64) {
    // By hand: std's formatting costs ten times as much, and every head has a number.
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    let mut rest = n;
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    put(out, &digits[at..]);
}

pub(super) fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(bytes);
}

/// Appends an input that must stay within its line. The parsers and the configuration see to that; should they ever
/// not, the line ends where the input would have ended it, which is safe if not right.
fn put_line(out: &mut Vec<u8>, bytes: &[u8]) {
    let end = memchr::memchr3(b'\r', b'\n', 0, bytes);
    debug_assert_eq!(end, None, "a line end in an input");
    put(out, &bytes[..end.unwrap_or(bytes.len())]);
}

fn copy(out: &mut Vec<u8>, line: &Field, buf: &[u8]) {
    let (name, value) = (line.name, line.value);
    if buf[name.end()..].starts_with(b": ") && value.start as usize == name.end() + 2 {
        // As nearly everybody writes it: one piece.
        put_line(out, &buf[name.start as usize..value.end()]);
        put(out, b"\r\n");
    } else {
        put_line(out, name.of(buf));
        end_of_field(out, value.of(buf));
    }
}

/// The Host for the worker. Empty only for an HTTP/1.0 client that sent none (RFC 9110, section 7.2).
fn host<'a>(head: &RequestHead, buf: &'a [u8]) -> &'a [u8] {
    head.authority.or_else(|| head.first(FieldKind::Host)).map(|h| h.of(buf)).unwrap_or_default()
}

fn passes_up(line: &Field, buf: &[u8], f: &Forward<'_>) -> bool {
    match line.kind {
        FieldKind::Pass | FieldKind::ContentType | FieldKind::ForwardedProto => true,
        FieldKind::Authorization => f.authorization.is_none() && !f.own_keys,
        FieldKind::ApiKey => !f.own_keys,
        FieldKind::RequestId(place) => place != 0,
        FieldKind::RoutingKey => !is_own(line.name.of(buf)),
        FieldKind::Host | FieldKind::ForwardedFor => false, // written anew
        FieldKind::ContentLength | FieldKind::TransferEncoding | FieldKind::Expect => false,
        FieldKind::HopByHop | FieldKind::Connection | FieldKind::Upgrade => false,
        FieldKind::Own | FieldKind::TargetWorker | FieldKind::DpRank => false,
    }
}

fn passes_down(line: &Field, buf: &[u8]) -> bool {
    match line.kind {
        FieldKind::HopByHop | FieldKind::Connection | FieldKind::Upgrade | FieldKind::Own => false,
        FieldKind::TransferEncoding | FieldKind::ContentLength => false, // written anew
        FieldKind::RequestId(place) => place != 0,
        FieldKind::RoutingKey => !is_own(line.name.of(buf)),
        _ => true,
    }
}

/// X-Forwarded-For as one field, the client at its end, and X-Forwarded-Proto where there is none.
fn forwarded(out: &mut Vec<u8>, head: &RequestHead, buf: &[u8], client: IpAddr) {
    put(out, b"x-forwarded-for: ");
    for line in head.fields.iter().filter(|l| l.kind == FieldKind::ForwardedFor && !l.value.is_empty()) {
        put_line(out, line.value.of(buf));
        put(out, b", ");
    }
    match client.to_canonical() {
        IpAddr::V4(v4) => put_dotted(out, v4.octets()),
        IpAddr::V6(v6) => write!(out, "{v6}").expect("writing to a Vec cannot fail"),
    }
    put(out, b"\r\n");
    if head.first(FieldKind::ForwardedProto).is_none() {
        put(out, b"x-forwarded-proto: http\r\n");
    }
}

/// Appends an IPv4 address. By hand, and in one piece: nearly every request has one.
fn put_dotted(out: &mut Vec<u8>, octets: [u8; 4]) {
    let mut text = [0u8; 16];
    let mut len = 0;
    for octet in octets {
        for digit in [octet / 100, octet / 10 % 10, octet % 10].into_iter().skip(match octet {
            0..10 => 2,
            10..100 => 1,
            _ => 0,
        }) {
            text[len] = b'0' + digit;
            len += 1;
        }
        text[len] = b'.';
        len += 1;
    }
    put(out, &text[..len - 1]);
}
