//! The head of a request, as strict as a gateway must be in front of other parsers.
//!
//! Takes a client's bytes as they arrive, gives spans, framing and what the connection does afterwards, or the
//! fault to answer with. Never accepts a message whose length or target another parser could read differently.

use super::head::{
    self, Field, FieldKind, Flaw, HeadLimits, MAX_FIELDS, Method, Parsed, Scan, Step, USUAL_FIELDS, Version, decimal,
    is_tchar,
};
use crate::fault::{Fault, What};
use crate::limits::{MAX_REQUEST_ID_BYTES, MAX_TARGET_BYTES};
use crate::span::Span;
use std::mem::MaybeUninit;

/// Longest method token that is looked at; no registered one comes near.
const MAX_METHOD_BYTES: usize = 32;
/// `HTTP/1.1`.
const VERSION_BYTES: usize = 8;

/// How a request's body is framed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BodyLength {
    /// No body.
    #[default]
    None,
    /// Content-Length bytes; 0 was said explicitly.
    Length(u64),
    /// Chunked coding.
    Chunked,
}

/// A request head; reused from request to request so that its table of fields is allocated once.
#[derive(Clone, Debug, Default)]
pub struct RequestHead {
    pub method: Method,
    /// The whole request target as it came.
    pub target: Span,
    /// The target's path, from its `/` on (or `*`); compared and forwarded raw.
    pub path: Span,
    /// What follows the `?`, if there is one.
    pub query: Option<Span>,
    /// `host[:port]` of an absolute-form target; it outranks the Host field (RFC 9112, section 3.2.2).
    pub authority: Option<Span>,
    pub version: Version,
    pub fields: Vec<Field>,
    pub body: BodyLength,
    /// Whether the client expects the connection to live on after this exchange.
    pub keep_alive: bool,
    /// Whether the client waits for `100 Continue` before it sends its body.
    pub expect_continue: bool,
    scan: Scan,
}

impl RequestHead {
    /// An empty head.
    pub fn new() -> Self {
        RequestHead { fields: Vec::with_capacity(USUAL_FIELDS), ..RequestHead::default() }
    }

    /// Forgets everything, so that the next [`parse`](Self::parse) begins a new head. Needed only where a head was left
    /// incomplete; `parse` begins anew by itself after it gave `Complete` or a fault.
    pub fn reset(&mut self) {
        let mut fields = std::mem::take(&mut self.fields);
        fields.clear();
        *self = RequestHead { fields, ..RequestHead::default() };
    }

    /// Parses the head at the beginning of `buf`. After `Partial` call it again with the same bytes and more behind
    /// them (the buffer may have moved): the search for the end goes on where it stopped.
    ///
    /// # Errors
    /// The fault to answer with; the connection cannot be used further.
    pub fn parse(&mut self, buf: &[u8], limits: &HeadLimits) -> Result<Parsed, Fault> {
        if !self.scan.under_way() || buf.len() < self.scan.searched() {
            self.reset();
        }
        let parsed = self.resume(buf, limits);
        if !matches!(parsed, Ok(Parsed::Partial)) {
            self.scan = Scan::default();
        }
        parsed
    }

    /// The value of the first field of a kind.
    pub fn first(&self, kind: FieldKind) -> Option<Span> {
        self.fields.iter().find(|f| f.kind == kind).map(|f| f.value)
    }

    /// The value of the first field with this name, in any case.
    pub fn named(&self, buf: &[u8], name: &str) -> Option<Span> {
        let is = |f: &&Field| f.name.of(buf).eq_ignore_ascii_case(name.as_bytes());
        self.fields.iter().find(is).map(|f| f.value)
    }

    fn resume(&mut self, buf: &[u8], limits: &HeadLimits) -> Result<Parsed, Fault> {
        loop {
            match self.scan.step(buf, limits).map_err(|flaw| fault_of(flaw, buf))? {
                Step::FirstLine(line) => self.request_line(buf, line)?,
                Step::PartOfFirst(part) => {
                    part_of_request_line(part.of(buf))?;
                    if part.end() >= limits.bytes {
                        return Err(What::HeadTooLarge.into());
                    }
                    return Ok(Parsed::Partial);
                }
                Step::PartOfFields => return Ok(Parsed::Partial),
                Step::End(end) => {
                    self.head_fields(&buf[..end])?;
                    return Ok(Parsed::Complete(end));
                }
            }
        }
    }

    fn request_line(&mut self, buf: &[u8], line: Span) -> Result<(), Fault> {
        let bytes = line.of(buf);
        let Split { method, target, version } = split(bytes)?;
        let (Some(target), Some(version)) = (target, version) else {
            return Err(Fault::with(What::BadRequestLine, "It needs a method, a target and a version."));
        };
        self.version = version_of(version)?;
        self.method = Method::of(method);
        if self.method == Method::Other {
            return Err(What::MethodUnknown.into());
        }
        let start = line.start as usize + method.len() + 1;
        self.target = Span::new(start, start + target.len());
        self.target_parts(buf)
    }

    /// Splits the target into authority, path and query.
    fn target_parts(&mut self, buf: &[u8]) -> Result<(), Fault> {
        let bad = |why: &str| Err(Fault::with(What::BadRequestLine, why));
        let target = self.target.of(buf);
        if !target.iter().all(|b| matches!(b, 0x21..=0x7e) && *b != b'#') {
            return bad("The target holds bytes that must be percent-encoded.");
        }
        let mut path = self.target.start as usize;
        let end = self.target.end();
        if target == b"*" {
            if self.method != Method::Options {
                return bad("Only OPTIONS may have the target `*`.");
            }
            self.path = self.target;
            return Ok(());
        }
        if target[0] != b'/' {
            let Some(scheme) = scheme_bytes(target) else {
                return bad("The target is neither a path nor an http URL.");
            };
            let start = path + scheme;
            let len = target[scheme..].iter().position(|b| matches!(b, b'/' | b'?')).unwrap_or(target.len() - scheme);
            if !is_host(&buf[start..start + len]) {
                return bad("The target's host is not valid.");
            }
            self.authority = Some(Span::new(start, start + len));
            path = start + len;
        }
        let query = memchr::memchr(b'?', &buf[path..end]).map(|at| path + at);
        self.query = query.map(|at| Span::new(at + 1, end));
        self.path = Span::new(path, query.unwrap_or(end));
        if self.path.is_empty() {
            // `http://host` and `http://host?query` mean the path `/`: the second slash of the scheme serves as one.
            let slash = self.authority.map_or(path, |a| a.start as usize) - 1;
            self.path = Span::new(slash, slash + 1);
        }
        Ok(())
    }

    fn head_fields(&mut self, head: &[u8]) -> Result<(), Fault> {
        let mut table = [const { MaybeUninit::<httparse::Header<'_>>::uninit() }; MAX_FIELDS];
        let mut tokens = httparse::Request::new(&mut []);
        match tokens.parse_with_uninit_headers(head, &mut table) {
            Ok(httparse::Status::Complete(len)) if len == head.len() => {}
            Err(httparse::Error::HeaderName) => return Err(Fault::with(What::BadHeader, "A field name is not valid.")),
            Err(httparse::Error::HeaderValue) => {
                return Err(Fault::with(What::BadHeader, "A field value is not valid."));
            }
            Err(httparse::Error::TooManyHeaders) => return Err(What::TooManyHeaders.into()),
            _ => return Err(What::BadHeader.into()),
        }
        head::collect(&mut self.fields, head, tokens.headers);
        let options = head::connection(&mut self.fields, head).map_err(|why| Fault::with(What::BadHeader, why))?;
        self.keep_alive = !options.close && (self.version == Version::H11 || options.keep_alive);
        self.host(head)?;
        self.framing(head)?;
        self.expectation(head)?;
        if options.upgrade && self.wants_websocket(head) {
            return Err(What::UpgradeRefused.into());
        }
        Ok(())
    }

    fn host(&self, head: &[u8]) -> Result<(), Fault> {
        let mut hosts = self.fields.iter().filter(|f| f.kind == FieldKind::Host);
        match (hosts.next(), hosts.next()) {
            (Some(host), None) if is_host(host.value.of(head)) => Ok(()),
            (None, None) if self.version == Version::H10 => Ok(()),
            _ => Err(What::BadHost.into()),
        }
    }

    fn framing(&mut self, head: &[u8]) -> Result<(), Fault> {
        let mut lengths = self.fields.iter().filter(|f| f.kind == FieldKind::ContentLength);
        let mut codings = self.fields.iter().filter(|f| f.kind == FieldKind::TransferEncoding);
        let bad = |why: &str| Err(Fault::with(What::BadFraming, why));
        self.body = match (lengths.next(), codings.next()) {
            (None, None) => BodyLength::None,
            (Some(_), Some(_)) => return bad("Content-Length and Transfer-Encoding exclude each other."),
            (Some(length), None) => {
                if lengths.next().is_some() {
                    return bad("Content-Length is repeated.");
                }
                match decimal(length.value.of(head)) {
                    Some(n) => BodyLength::Length(n),
                    None => return bad("Content-Length is not a number."),
                }
            }
            (None, Some(coding)) => {
                if self.version == Version::H10 {
                    return bad("HTTP/1.0 has no Transfer-Encoding.");
                }
                if codings.next().is_some() {
                    return bad("Transfer-Encoding is repeated.");
                }
                if !coding.value.of(head).eq_ignore_ascii_case(b"chunked") {
                    return Err(What::CodingUnknown.into());
                }
                BodyLength::Chunked
            }
        };
        Ok(())
    }

    fn expectation(&mut self, head: &[u8]) -> Result<(), Fault> {
        let mut wanted = false;
        for field in self.fields.iter().filter(|f| f.kind == FieldKind::Expect) {
            if !field.value.of(head).eq_ignore_ascii_case(b"100-continue") {
                return Err(What::ExpectationUnknown.into());
            }
            wanted = true;
        }
        // An HTTP/1.0 client knows no interim answers, and without a body there is nothing to wait for.
        let body = !matches!(self.body, BodyLength::None | BodyLength::Length(0));
        self.expect_continue = wanted && body && self.version == Version::H11;
        Ok(())
    }

    fn wants_websocket(&self, head: &[u8]) -> bool {
        let mut upgrades = self.fields.iter().filter(|f| f.kind == FieldKind::Upgrade);
        upgrades.any(|f| {
            f.value.of(head).split(|b| *b == b',').any(|protocol| {
                let name = protocol.split(|b| *b == b'/').next().unwrap_or_default();
                name.trim_ascii().eq_ignore_ascii_case(b"websocket")
            })
        })
    }
}

/// The id that the client gave its request: the first of `names` that is present with a usable value (visible ASCII,
/// at most [`MAX_REQUEST_ID_BYTES`]).
pub fn request_id(head: &RequestHead, buf: &[u8], names: &[String]) -> Option<Span> {
    let usable = |value: &[u8]| {
        !value.is_empty() && value.len() <= MAX_REQUEST_ID_BYTES && value.iter().all(|b| matches!(b, 0x21..=0x7e))
    };
    names.iter().find_map(|name| {
        let is = |f: &&Field| f.name.of(buf).eq_ignore_ascii_case(name.as_bytes()) && usable(f.value.of(buf));
        head.fields.iter().find(is).map(|f| f.value)
    })
}

/// The pieces of a request line; what is not there yet is `None`.
struct Split<'a> {
    method: &'a [u8],
    target: Option<&'a [u8]>,
    version: Option<&'a [u8]>,
}

/// Splits a request line, complete or not, at its two spaces. The faults it gives depend only on bytes that no later
/// byte can change, and the method and the target are looked at no further than their limits.
fn split(line: &[u8]) -> Result<Split<'_>, Fault> {
    let shown = &line[..line.len().min(MAX_METHOD_BYTES + 1)];
    let method_end = shown.iter().position(|b| !is_tchar(*b)).unwrap_or(shown.len());
    let method = &line[..method_end];
    let rest = match line.get(method_end) {
        Some(b' ') if (1..=MAX_METHOD_BYTES).contains(&method_end) => &line[method_end + 1..],
        None if method_end <= MAX_METHOD_BYTES => return Ok(Split { method, target: None, version: None }),
        _ => return Err(Fault::with(What::BadRequestLine, "It does not begin with a method.")),
    };
    let shown = &rest[..rest.len().min(MAX_TARGET_BYTES + 1)];
    match memchr::memchr(b' ', shown) {
        Some(0) => Err(Fault::with(What::BadRequestLine, "The target is empty.")),
        Some(at) => Ok(Split { method, target: Some(&rest[..at]), version: Some(&rest[at + 1..]) }),
        None if shown.len() > MAX_TARGET_BYTES => Err(What::TargetTooLong.into()),
        None => Ok(Split { method, target: Some(rest), version: None }),
    }
}

/// Early refusal of what cannot become a request line, at a cost that does not depend on how often it is called: the
/// target is only searched when there are enough bytes to decide.
fn part_of_request_line(line: &[u8]) -> Result<(), Fault> {
    if line.first() == Some(&b'\r') {
        let alone = line.len() > 1;
        return if alone { Err(Fault::with(What::BadRequestLine, "CR without LF.")) } else { Ok(()) };
    }
    let known = if line.len() > MAX_TARGET_BYTES { line } else { &line[..line.len().min(MAX_METHOD_BYTES + 1)] };
    let overlong = |v: &[u8]| v.len() > VERSION_BYTES + 1;
    if split(known)?.version.is_some_and(overlong) && line.len() > MAX_TARGET_BYTES {
        return Err(Fault::with(What::BadRequestLine, "The version is not valid."));
    }
    Ok(())
}

fn version_of(version: &[u8]) -> Result<Version, Fault> {
    match version {
        b"HTTP/1.1" => Ok(Version::H11),
        b"HTTP/1.0" => Ok(Version::H10),
        [b'H', b'T', b'T', b'P', b'/', major, b'.', minor] if major.is_ascii_digit() && minor.is_ascii_digit() => {
            Err(What::VersionUnknown.into())
        }
        _ => Err(Fault::with(What::BadRequestLine, "The version is not valid.")),
    }
}

/// Length of `http://` or `https://` at the beginning of a target.
fn scheme_bytes(target: &[u8]) -> Option<usize> {
    ["http://", "https://"].into_iter().find_map(|scheme| {
        let begins = target.get(..scheme.len())?.eq_ignore_ascii_case(scheme.as_bytes());
        begins.then_some(scheme.len())
    })
}

/// Whether a Host value or an authority is `host[:port]`: a name, an IPv4 address or an IPv6 one in brackets. Narrower
/// than the grammar (no userinfo, no percent-encoding, no sub-delims, not empty): what is left cannot be misread.
fn is_host(value: &[u8]) -> bool {
    let port = match value {
        [b'[', rest @ ..] => {
            let Some(end) = memchr::memchr(b']', rest) else { return false };
            let inside = &rest[..end];
            let address = std::str::from_utf8(inside).ok().and_then(|s| s.parse::<std::net::Ipv6Addr>().ok());
            if address.is_none() {
                return false;
            }
            &rest[end + 1..]
        }
        _ => {
            let end = memchr::memchr(b':', value).unwrap_or(value.len());
            let name = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b'~');
            if end == 0 || !value[..end].iter().all(name) {
                return false;
            }
            &value[end..]
        }
    };
    match port {
        [] => true,
        [b':', digits @ ..] => digits.is_empty() || decimal(digits).is_some_and(|n| n <= u64::from(u16::MAX)),
        _ => false,
    }
}

fn fault_of(flaw: Flaw, buf: &[u8]) -> Fault {
    match flaw {
        // Where the bytes came one by one, what is wrong with the line itself was met before its end.
        Flaw::FirstLine(line) => {
            let met = part_of_request_line(line.of(buf)).err();
            met.unwrap_or_else(|| Fault::with(What::BadRequestLine, "Lines end in CRLF."))
        }
        Flaw::FieldLine => Fault::with(What::BadHeader, "Lines end in CRLF."),
        Flaw::TooManyFields => What::TooManyHeaders.into(),
        Flaw::TooLarge => What::HeadTooLarge.into(),
    }
}
