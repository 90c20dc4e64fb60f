//! The head of a worker's answer.
//!
//! Takes a worker's bytes as they arrive, gives status, spans and framing. Never trusts a worker more than a client:
//! what is ambiguous is [`What::BadAnswer`], because a misread length would hand one client another's bytes.

use super::head::{
    self, Field, FieldKind, Flaw, HeadLimits, MAX_FIELDS, Method, Parsed, Scan, Step, USUAL_FIELDS, Version, decimal,
    is_value_byte,
};
use crate::fault::{Fault, What};
use crate::span::Span;
use std::mem::MaybeUninit;

/// How an answer's body is framed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AnswerBody {
    /// No body: 1xx, 204, 304, or the answer to HEAD.
    #[default]
    None,
    /// Content-Length bytes.
    Length(u64),
    /// Chunked coding.
    Chunked,
    /// Until the worker closes the connection.
    UntilClose,
}

/// An answer's head; reused so that its table of fields is allocated once.
#[derive(Clone, Debug, Default)]
pub struct ResponseHead {
    pub version: Version,
    /// 100 … 599, never 101.
    pub status: u16,
    /// The worker's reason phrase; may be empty.
    pub reason: Span,
    pub fields: Vec<Field>,
    pub body: AnswerBody,
    /// Whether the worker keeps the connection open after this answer.
    pub keep_alive: bool,
    scan: Scan,
}

impl ResponseHead {
    /// An empty head.
    pub fn new() -> Self {
        ResponseHead { fields: Vec::with_capacity(USUAL_FIELDS), ..ResponseHead::default() }
    }

    /// Forgets everything; see [`RequestHead::reset`](super::RequestHead::reset).
    pub fn reset(&mut self) {
        let mut fields = std::mem::take(&mut self.fields);
        fields.clear();
        *self = ResponseHead { fields, ..ResponseHead::default() };
    }

    /// Whether this is an interim answer (1xx): the final one follows.
    pub fn interim(&self) -> bool {
        self.status < 200
    }

    /// Parses the head at the beginning of `buf`, resumable like [`RequestHead::parse`](super::RequestHead::parse).
    ///
    /// # Errors
    /// [`What::BadAnswer`] with a reason; the connection cannot be used further.
    pub fn parse(&mut self, buf: &[u8], limits: &HeadLimits, request_method: Method) -> Result<Parsed, Fault> {
        if !self.scan.under_way() || buf.len() < self.scan.searched() {
            self.reset();
        }
        let parsed = self.resume(buf, limits, request_method);
        if !matches!(parsed, Ok(Parsed::Partial)) {
            self.scan = Scan::default();
        }
        parsed.map_err(|why| Fault::with(What::BadAnswer, why))
    }

    /// The value of the first field of a kind.
    pub fn first(&self, kind: FieldKind) -> Option<Span> {
        self.fields.iter().find(|f| f.kind == kind).map(|f| f.value)
    }

    fn resume(&mut self, buf: &[u8], limits: &HeadLimits, method: Method) -> Result<Parsed, &'static str> {
        loop {
            match self.scan.step(buf, limits).map_err(reason_of)? {
                Step::FirstLine(line) => self.status_line(buf, line)?,
                Step::PartOfFirst(part) => {
                    const BEGIN: &[u8] = b"HTTP/1.";
                    let shown = &part.of(buf)[..(part.len as usize).min(BEGIN.len())];
                    if part.start != 0 || !BEGIN.starts_with(shown) {
                        return Err("It does not begin with a status line.");
                    }
                    if part.end() >= limits.bytes {
                        return Err("Its head is too large.");
                    }
                    return Ok(Parsed::Partial);
                }
                Step::PartOfFields => return Ok(Parsed::Partial),
                Step::End(end) => {
                    self.head_fields(&buf[..end], method)?;
                    return Ok(Parsed::Complete(end));
                }
            }
        }
    }

    fn status_line(&mut self, buf: &[u8], line: Span) -> Result<(), &'static str> {
        if line.start != 0 {
            return Err("It does not begin with a status line.");
        }
        let bytes = line.of(buf);
        self.version = match bytes.get(..9) {
            Some(b"HTTP/1.1 ") => Version::H11,
            Some(b"HTTP/1.0 ") => Version::H10,
            _ => return Err("Its version is not HTTP/1.1 or HTTP/1.0."),
        };
        let Some(([a @ b'1'..=b'5', b @ b'0'..=b'9', c @ b'0'..=b'9'], [] | [b' ', ..])) =
            bytes[9..].split_at_checked(3)
        else {
            return Err("Its status is not a number from 100 to 599.");
        };
        self.status = u16::from(a - b'0') * 100 + u16::from(b - b'0') * 10 + u16::from(c - b'0');
        if self.status == 101 {
            return Err("It switches protocols, which nobody asked for.");
        }
        let reason = line.end().min(line.start as usize + 13);
        self.reason = Span::new(reason, line.end());
        if !self.reason.of(buf).iter().all(|b| is_value_byte(*b)) {
            return Err("Its reason phrase holds control bytes.");
        }
        Ok(())
    }

    fn head_fields(&mut self, head: &[u8], method: Method) -> Result<(), &'static str> {
        let mut table = [const { MaybeUninit::<httparse::Header<'_>>::uninit() }; MAX_FIELDS];
        let mut tokens = httparse::Response::new(&mut []);
        let config = httparse::ParserConfig::default();
        match config.parse_response_with_uninit_headers(&mut tokens, head, &mut table) {
            Ok(httparse::Status::Complete(len)) if len == head.len() => {}
            _ => return Err("A header field is not valid."),
        }
        head::collect(&mut self.fields, head, tokens.headers);
        let options = head::connection(&mut self.fields, head)?;
        self.body = match self.framing(head)? {
            _ if self.interim() || matches!(self.status, 204 | 304) || method == Method::Head => AnswerBody::None,
            framing => framing,
        };
        let lives = !options.close && (self.version == Version::H11 || options.keep_alive);
        self.keep_alive = lives && self.body != AnswerBody::UntilClose;
        Ok(())
    }

    fn framing(&self, head: &[u8]) -> Result<AnswerBody, &'static str> {
        let mut length = None;
        for field in self.fields.iter().filter(|f| f.kind == FieldKind::ContentLength) {
            let n = decimal(field.value.of(head)).ok_or("Its Content-Length is not a number.")?;
            if length.is_some_and(|before| before != n) {
                return Err("Its Content-Length fields disagree.");
            }
            length = Some(n);
        }
        let mut codings = self.fields.iter().filter(|f| f.kind == FieldKind::TransferEncoding);
        match (length, codings.next()) {
            (None, None) => Ok(AnswerBody::UntilClose),
            (Some(n), None) => Ok(AnswerBody::Length(n)),
            (Some(_), Some(_)) => Err("It has both Content-Length and Transfer-Encoding."),
            (None, Some(coding)) => {
                let chunked = coding.value.of(head).eq_ignore_ascii_case(b"chunked");
                if !chunked || codings.next().is_some() || self.version == Version::H10 {
                    return Err("Its transfer coding is not chunked.");
                }
                Ok(AnswerBody::Chunked)
            }
        }
    }
}

fn reason_of(flaw: Flaw) -> &'static str {
    match flaw {
        Flaw::FirstLine(_) | Flaw::FieldLine => "Its lines do not end in CRLF.",
        Flaw::TooManyFields => "It has too many header fields.",
        Flaw::TooLarge => "Its head is too large.",
    }
}
