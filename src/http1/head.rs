//! What request and response heads have in common: lines, fields, what a field means here.
//!
//! Takes bytes as they arrive, gives line ends and classified fields. Never looks at a byte twice while a
//! head is incomplete, so a client that drips one costs no more than one that sends it at once.

use crate::span::Span;

/// Most fields that a head can have, whatever [`HeadLimits::fields`] says: the tokenizer's table lies on the stack.
pub const MAX_FIELDS: usize = 256;
/// Empty lines tolerated before a request line (RFC 9112, section 2.2: old clients send one after a POST).
pub(super) const MAX_LEADING_LINES: u32 = 4;
/// Options that all Connection fields of a head may list together; each is compared with every field.
const MAX_CONNECTION_OPTIONS: usize = 32;

/// How much head is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLimits {
    /// Bytes of the whole head, the empty line included.
    pub bytes: usize,
    /// Field lines; capped at [`MAX_FIELDS`].
    pub fields: usize,
}

/// Field lines that a head has room for before it has to grow.
pub(super) const USUAL_FIELDS: usize = 16;

/// Where the parser stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// More bytes are needed; nothing of the head may be read yet.
    Partial,
    /// The head is whole and this many bytes long; what follows is the body.
    Complete(usize),
}

/// Protocol version of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    /// HTTP/1.0.
    H10,
    /// HTTP/1.1.
    #[default]
    H11,
}

/// Request methods that this gateway knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    #[default]
    Get,
    Head,
    Post,
    Put,
    Patch,
    Delete,
    Options,
    /// Anything else; a request with it is refused, so no parsed head has it.
    Other,
}

impl Method {
    /// The method of a token; methods are case-sensitive.
    pub fn of(token: &[u8]) -> Self {
        match token {
            b"GET" => Method::Get,
            b"HEAD" => Method::Head,
            b"POST" => Method::Post,
            b"PUT" => Method::Put,
            b"PATCH" => Method::Patch,
            b"DELETE" => Method::Delete,
            b"OPTIONS" => Method::Options,
            _ => Method::Other,
        }
    }

    /// The token on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Method::Get => "GET",
            Method::Head => "HEAD",
            Method::Post => "POST",
            Method::Put => "PUT",
            Method::Patch => "PATCH",
            Method::Delete => "DELETE",
            Method::Options => "OPTIONS",
            Method::Other => "OTHER",
        }
    }
}

/// What the gateway does with a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldKind {
    /// Passes as it came.
    Pass,
    /// Meant for this connection only (Keep-Alive, Proxy-*, TE, Trailer, or named by Connection): dropped.
    HopByHop,
    /// Connection: read here, dropped.
    Connection,
    /// Transfer-Encoding: read here, dropped; framing is written anew.
    TransferEncoding,
    /// Upgrade: dropped.
    Upgrade,
    /// `x-corelane-*`: ours alone, dropped in both directions.
    Own,
    /// Content-Length: read here, framing is written anew.
    ContentLength,
    /// Host: passes; an absolute-form target outranks it.
    Host,
    /// Authorization: passes, or is replaced by the worker's key.
    Authorization,
    /// `x-api-key`: passes, unless clients show the gateway's own keys.
    ApiKey,
    /// Expect: answered here.
    Expect,
    /// A request id: 0 `x-request-id`, 1 `x-correlation-id`, 2 `x-trace-id`, 3 `request-id`. The first is replaced,
    /// the others pass.
    RequestId(u8),
    /// X-Forwarded-For: the client's address is appended.
    ForwardedFor,
    /// X-Forwarded-Proto: passes, or is added.
    ForwardedProto,
    /// Content-Type: passes.
    ContentType,
    /// `x-smg-routing-key` or `x-corelane-key`, the sticky routing key. The former passes, the latter is ours and dropped.
    RoutingKey,
    /// `x-smg-target-worker`: dropped from requests.
    TargetWorker,
    /// `x-data-parallel-rank`, `x-override-*`: would steer the engine from the public side, dropped from requests.
    DpRank,
}

/// A field line: spans into the buffer that was parsed, the value without surrounding white space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    pub name: Span,
    pub value: Span,
    pub kind: FieldKind,
}

/// The kind of a field by its name alone.
fn classify(name: &[u8]) -> FieldKind {
    let is = |known: &str| name.eq_ignore_ascii_case(known.as_bytes());
    let begins = |prefix: &str| name.get(..prefix.len()).is_some_and(|p| p.eq_ignore_ascii_case(prefix.as_bytes()));
    match name.len() {
        2 if is("te") => FieldKind::HopByHop,
        4 if is("host") => FieldKind::Host,
        6 if is("expect") => FieldKind::Expect,
        7 if is("upgrade") => FieldKind::Upgrade,
        7 if is("trailer") => FieldKind::HopByHop,
        9 if is("x-api-key") => FieldKind::ApiKey,
        10 if is("connection") => FieldKind::Connection,
        10 if is("keep-alive") => FieldKind::HopByHop,
        10 if is("x-trace-id") => FieldKind::RequestId(2),
        10 if is("request-id") => FieldKind::RequestId(3),
        12 if is("content-type") => FieldKind::ContentType,
        12 if is("x-request-id") => FieldKind::RequestId(0),
        13 if is("authorization") => FieldKind::Authorization,
        14 if is("content-length") => FieldKind::ContentLength,
        14 if is("x-corelane-key") => FieldKind::RoutingKey,
        15 if is("x-forwarded-for") => FieldKind::ForwardedFor,
        16 if is("x-correlation-id") => FieldKind::RequestId(1),
        17 if is("transfer-encoding") => FieldKind::TransferEncoding,
        17 if is("x-forwarded-proto") => FieldKind::ForwardedProto,
        17 if is("x-smg-routing-key") => FieldKind::RoutingKey,
        19 if is("x-smg-target-worker") => FieldKind::TargetWorker,
        20 if is("x-data-parallel-rank") => FieldKind::DpRank,
        _ if begins("proxy-") => FieldKind::HopByHop,
        _ if begins(OWN_PREFIX) => FieldKind::Own,
        _ if begins("x-override-") => FieldKind::DpRank,
        _ => FieldKind::Pass,
    }
}

/// Names that begin so are ours, and never forwarded.
const OWN_PREFIX: &str = "x-corelane-";

/// Whether a name is ours, whatever its kind (the sticky routing key has a kind of its own).
pub(super) fn is_own(name: &[u8]) -> bool {
    name.get(..OWN_PREFIX.len()).is_some_and(|p| p.eq_ignore_ascii_case(OWN_PREFIX.as_bytes()))
}

/// Fills `fields` from the tokenizer's table.
pub(super) fn collect(fields: &mut Vec<Field>, buf: &[u8], headers: &[httparse::Header<'_>]) {
    fields.clear();
    for header in headers {
        let name = span_in(buf, header.name.as_bytes());
        let value = span_in(buf, header.value);
        fields.push(Field { name, value, kind: classify(header.name.as_bytes()) });
    }
}

/// Where `part`, a piece of `buf`, lies in it.
fn span_in(buf: &[u8], part: &[u8]) -> Span {
    let start = part.as_ptr() as usize - buf.as_ptr() as usize;
    debug_assert!(start + part.len() <= buf.len(), "the tokenizer gives pieces of its input");
    Span::new(start, start + part.len())
}

/// What the Connection fields said.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Options {
    pub close: bool,
    pub keep_alive: bool,
    pub upgrade: bool,
}

/// Reads all Connection fields and marks what they name as hop-by-hop.
///
/// Only plain fields can be named away. Naming what frames, addresses or authorises the message is an error (it has no
/// honest use and would make the worker see another message than this gateway), other known fields keep their kind.
pub(super) fn connection(fields: &mut [Field], buf: &[u8]) -> Result<Options, &'static str> {
    let mut options = Options::default();
    let mut seen = 0;
    for i in 0..fields.len() {
        if fields[i].kind != FieldKind::Connection {
            continue;
        }
        for option in fields[i].value.of(buf).split(|b| *b == b',') {
            let option = option.trim_ascii();
            seen += 1;
            if seen > MAX_CONNECTION_OPTIONS {
                return Err("Connection lists too many options.");
            }
            if option.is_empty() {
                continue;
            }
            if !is_token(option) {
                return Err("Connection is not a list of tokens.");
            }
            if option.eq_ignore_ascii_case(b"close") {
                options.close = true;
            } else if option.eq_ignore_ascii_case(b"keep-alive") {
                options.keep_alive = true;
            } else if option.eq_ignore_ascii_case(b"upgrade") {
                options.upgrade = true;
            } else {
                name_away(fields, buf, option)?;
            }
        }
    }
    Ok(options)
}

fn name_away(fields: &mut [Field], buf: &[u8], option: &[u8]) -> Result<(), &'static str> {
    for field in fields.iter_mut().filter(|f| f.name.of(buf).eq_ignore_ascii_case(option)) {
        match field.kind {
            FieldKind::Pass => field.kind = FieldKind::HopByHop,
            FieldKind::Host | FieldKind::ContentLength | FieldKind::Authorization => {
                return Err("Connection names a field that is not hop-by-hop.");
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether the bytes are a token (RFC 9110, section 5.6.2).
pub(super) fn is_token(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.iter().all(|b| is_tchar(*b))
}

pub(super) const fn is_tchar(b: u8) -> bool {
    matches!(b, b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'!' | b'#' | b'$' | b'%' | b'&' | b'\'' | b'*' | b'+'
        | b'-' | b'.' | b'^' | b'_' | b'`' | b'|' | b'~')
}

/// Whether a byte may stand in a field value or a reason phrase (RFC 9110, section 5.5).
pub(super) const fn is_value_byte(b: u8) -> bool {
    matches!(b, b'\t' | 0x20..=0x7e | 0x80..)
}

/// A Content-Length value: digits only, at most 2^63 − 1 (peers with signed lengths must read the same number).
pub(super) fn decimal(value: &[u8]) -> Option<u64> {
    if value.is_empty() {
        return None;
    }
    let mut n: u64 = 0;
    for b in value {
        if !b.is_ascii_digit() {
            return None;
        }
        n = n.checked_mul(10)?.checked_add(u64::from(b - b'0'))?;
    }
    (n <= i64::MAX as u64).then_some(n)
}

/// The search for the end of a head; remembers how far it got.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Scan {
    /// Bytes searched for line ends.
    searched: usize,
    /// Where the line that is being searched begins.
    line: usize,
    /// Empty lines before the first line.
    leading: u32,
    /// Field lines seen.
    fields: usize,
    /// Whether the first line was seen.
    begun: bool,
}

/// What the search met next.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// The request or status line is complete, without its line end.
    FirstLine(Span),
    /// Not even the first line is complete: what there is of it so far.
    PartOfFirst(Span),
    /// The first line is complete, the head is not.
    PartOfFields,
    /// The head ends before this offset.
    End(usize),
}

/// Why the search gave up.
#[derive(Clone, Copy, Debug)]
pub(super) enum Flaw {
    /// The first line ends without CR (what stands before its LF), or too many empty lines lead.
    FirstLine(Span),
    /// A field line that ends without CR.
    FieldLine,
    TooManyFields,
    TooLarge,
}

impl Scan {
    /// Searches on in `buf`, which holds what it held at the last call and perhaps more.
    pub fn step(&mut self, buf: &[u8], limits: &HeadLimits) -> Result<Step, Flaw> {
        let end = buf.len().min(limits.bytes);
        while let Some(at) = memchr::memchr(b'\n', buf.get(self.searched..end).unwrap_or_default()) {
            let lf = self.searched + at;
            let line = self.line;
            self.searched = lf + 1;
            self.line = lf + 1;
            if lf == line || buf[lf - 1] != b'\r' {
                return Err(if self.begun { Flaw::FieldLine } else { Flaw::FirstLine(Span::new(line, lf)) });
            }
            let empty = lf - 1 == line;
            match (self.begun, empty) {
                (false, true) => {
                    self.leading += 1;
                    if self.leading > MAX_LEADING_LINES {
                        return Err(Flaw::FirstLine(Span::new(line, lf)));
                    }
                }
                (false, false) => {
                    self.begun = true;
                    return Ok(Step::FirstLine(Span::new(line, lf - 1)));
                }
                (true, true) => return Ok(Step::End(lf + 1)),
                (true, false) => {
                    self.fields += 1;
                    if self.fields > limits.fields.min(MAX_FIELDS) {
                        return Err(Flaw::TooManyFields);
                    }
                }
            }
        }
        self.searched = end.max(self.searched);
        if !self.begun {
            return Ok(Step::PartOfFirst(Span::new(self.line.min(end), end)));
        }
        if end == limits.bytes { Err(Flaw::TooLarge) } else { Ok(Step::PartOfFields) }
    }

    /// Whether a head is under way.
    pub fn under_way(&self) -> bool {
        self.searched > 0
    }

    /// Bytes searched so far.
    pub fn searched(&self) -> usize {
        self.searched
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_classified_in_any_case() {
        for (name, kind) in [
            ("Host", FieldKind::Host),
            ("CONTENT-LENGTH", FieldKind::ContentLength),
            ("Transfer-encoding", FieldKind::TransferEncoding),
            ("te", FieldKind::HopByHop),
            ("Proxy-Authorization", FieldKind::HopByHop),
            ("proxy-connection", FieldKind::HopByHop),
            ("Keep-Alive", FieldKind::HopByHop),
            ("Trailer", FieldKind::HopByHop),
            ("X-Corelane-Error", FieldKind::Own),
            ("x-corelane-key", FieldKind::RoutingKey),
            ("X-SMG-Routing-Key", FieldKind::RoutingKey),
            ("X-SMG-Target-Worker", FieldKind::TargetWorker),
            ("X-Data-Parallel-Rank", FieldKind::DpRank),
            ("X-Override-Foo", FieldKind::DpRank),
            ("X-Request-Id", FieldKind::RequestId(0)),
            ("Request-Id", FieldKind::RequestId(3)),
            ("traceparent", FieldKind::Pass),
            ("content_length", FieldKind::Pass),
            ("x-corelane", FieldKind::Pass),
        ] {
            assert_eq!(classify(name.as_bytes()), kind, "{name}");
        }
    }

    #[test]
    fn lengths_are_digits_that_fit() {
        assert_eq!(decimal(b"0"), Some(0));
        assert_eq!(decimal(b"007"), Some(7));
        assert_eq!(decimal(b"9223372036854775807"), Some(i64::MAX as u64));
        for bad in [
            &b""[..],
            b"+1",
            b"-1",
            b"1 ",
            b"0x10",
            b"1,1",
            b"1e3",
            b"9223372036854775808",
            b"18446744073709551616",
            b"99999999999999999999999",
        ] {
            assert_eq!(decimal(bad), None, "{bad:?}");
        }
    }
}
