//! Multipart forms: the `model` and `stream` parts.
//!
//! Takes a growing body, gives an [`Ask`]. Never looks into other parts: files are skipped by searching for the
//! delimiter that ends them, once, as they arrive. Never allocates (but for a fault's text).

use super::Ask;
use crate::fault::{Fault, What};
use crate::span::Span;
use memchr::memmem;

/// Longest boundary (RFC 2046, section 5.1.1).
const MAX_BOUNDARY_BYTES: usize = 70;
/// Most bytes of one part's header fields.
const MAX_PART_HEAD_BYTES: usize = 16 * 1024;
/// What stands before the boundary in a delimiter.
const BEFORE: &[u8] = b"\r\n--";

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The Content-Type gives no usable boundary.
    NoBoundary,
    /// The first delimiter, for which the line break before it is optional.
    Preamble,
    /// The end of a delimiter's line, `--` after the last.
    Line,
    /// A part's header fields.
    Head,
    /// A part's contents.
    Contents,
    /// Anything, after the last delimiter.
    Epilogue,
}

/// The parts that are read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Model,
    Stream,
    Other,
}

pub(super) struct Multipart {
    state: State,
    /// The delimiter: line break, two hyphens, boundary.
    delimiter: [u8; BEFORE.len() + MAX_BOUNDARY_BYTES],
    delimiter_len: usize,
    /// The next byte to look at; what lies between `from` and it belongs to the state at hand.
    pos: usize,
    from: usize,
    part: Part,
    /// Where the part's contents began, while the line after a delimiter in them is being read.
    contents_at: Option<usize>,
    model: Option<Span>,
    stream: Option<Span>,
}

impl Multipart {
    pub(super) fn new() -> Self {
        Multipart {
            state: State::NoBoundary,
            delimiter: [0; BEFORE.len() + MAX_BOUNDARY_BYTES],
            delimiter_len: 0,
            pos: 0,
            from: 0,
            part: Part::Other,
            contents_at: None,
            model: None,
            stream: None,
        }
    }

    /// Starts over with the boundary that the Content-Type names.
    pub(super) fn begin(&mut self, content_type: &[u8]) {
        *self = Multipart::new();
        let Some(boundary) = boundary(content_type) else { return };
        self.delimiter_len = BEFORE.len() + boundary.len();
        self.delimiter[..BEFORE.len()].copy_from_slice(BEFORE);
        self.delimiter[BEFORE.len()..self.delimiter_len].copy_from_slice(boundary);
        self.state = State::Preamble;
    }

    /// Reads what is new in `body`.
    pub(super) fn feed(&mut self, body: &[u8]) -> Result<(), Fault> {
        loop {
            let on = match self.state {
                State::NoBoundary => {
                    return Err(Fault::with(What::BadMultipart, "The Content-Type must name a boundary."));
                }
                State::Preamble => self.preamble(body),
                State::Line => self.line(body),
                State::Head => self.head(body)?,
                State::Contents => self.search(body),
                State::Epilogue => false,
            };
            if !on {
                return Ok(());
            }
        }
    }

    /// What the form, now complete, asks for.
    pub(super) fn finish(&self, body: &[u8]) -> Result<Ask, Fault> {
        if self.state != State::Epilogue {
            return Err(fault(body.len(), "the boundary that ends the form"));
        }
        let stream = match self.stream.map(|span| span.of(body)) {
            None => false,
            Some(text) => flag(text).ok_or_else(|| Fault::with(What::BadField, "`stream` must be true or false."))?,
        };
        Ok(Ask { model: self.model, stream, ..Ask::default() })
    }

    /// Looks for the first delimiter.
    fn preamble(&mut self, body: &[u8]) -> bool {
        let bare = &self.delimiter[2..self.delimiter_len];
        if self.pos == 0 {
            if body.starts_with(bare) {
                return self.enter(State::Line, bare.len());
            }
            if bare.starts_with(body) {
                return false;
            }
        }
        self.search(body)
    }

    /// Looks for the next delimiter; without one, keeps as much of the end as may begin one.
    fn search(&mut self, body: &[u8]) -> bool {
        let delimiter = &self.delimiter[..self.delimiter_len];
        match memmem::find(&body[self.pos..], delimiter) {
            Some(at) => {
                let end = self.pos + at;
                self.contents_at = (self.state == State::Contents).then_some(self.from);
                self.enter(State::Line, end + delimiter.len())
            }
            None => {
                self.pos = self.pos.max(body.len().saturating_sub(delimiter.len() - 1));
                false
            }
        }
    }

    fn enter(&mut self, state: State, pos: usize) -> bool {
        self.state = state;
        self.from = pos;
        self.pos = pos;
        true
    }

    /// Reads the rest of a delimiter's line. What turns out to be none, being longer, is contents.
    fn line(&mut self, body: &[u8]) -> bool {
        let rest = &body[self.from..];
        if rest.starts_with(b"--") {
            self.close(self.from);
            return self.enter(State::Epilogue, self.from + 2);
        }
        let padding = rest[self.pos - self.from..].iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
        self.pos += padding;
        match &body[self.pos..] {
            [] | [b'\r'] => false,
            [b'-'] if self.pos == self.from => false,
            [b'\r', b'\n', ..] => {
                self.close(self.from);
                // The head begins with this line break, so that an empty head ends like any other.
                self.enter(State::Head, self.pos)
            }
            _ => {
                let (state, from) = match self.contents_at.take() {
                    Some(at) => (State::Contents, at),
                    None => (State::Preamble, 0),
                };
                self.state = state;
                self.from = from;
                true
            }
        }
    }

    /// The delimiter whose line goes on at `line` ends the part before it.
    fn close(&mut self, line: usize) {
        let Some(at) = self.contents_at.take() else { return };
        let span = Span::new(at, line - self.delimiter_len);
        match self.part {
            Part::Model => self.model = Some(span),
            Part::Stream => self.stream = Some(span),
            Part::Other => {}
        }
    }

    /// Reads a part's header fields; `from` is the line break before them.
    fn head(&mut self, body: &[u8]) -> Result<bool, Fault> {
        let Some(at) = memmem::find(&body[self.pos..], b"\r\n\r\n") else {
            self.pos = self.pos.max(body.len().saturating_sub(3));
            if body.len() - self.from > MAX_PART_HEAD_BYTES {
                return Err(fault(self.from, "shorter header fields of the part"));
            }
            return Ok(false);
        };
        let end = self.pos + at;
        if end + 4 - self.from > MAX_PART_HEAD_BYTES {
            return Err(fault(self.from, "shorter header fields of the part"));
        }
        let Some(part) = part_of(&body[self.from..end]) else {
            return Err(fault(self.from, "a Content-Disposition with the part's name"));
        };
        self.part = part;
        Ok(self.enter(State::Contents, end + 4))
    }
}

/// Which part the header fields name; none without a name.
fn part_of(head: &[u8]) -> Option<Part> {
    for line in lines(head) {
        let Some(colon) = memchr::memchr(b':', line) else { continue };
        if !line[..colon].eq_ignore_ascii_case(b"content-disposition") {
            continue;
        }
        let mut params = Params::of(&line[colon + 1..]);
        if !params.kind().eq_ignore_ascii_case(b"form-data") {
            return None;
        }
        let mut part = None;
        let mut file = false;
        for (name, value) in params {
            if name.eq_ignore_ascii_case(b"name") {
                part = Some(match value {
                    b"model" => Part::Model,
                    b"stream" => Part::Stream,
                    _ => Part::Other,
                });
            }
            file |= name.eq_ignore_ascii_case(b"filename") || name.eq_ignore_ascii_case(b"filename*");
        }
        return if file { part.map(|_| Part::Other) } else { part };
    }
    None
}

fn lines(head: &[u8]) -> impl Iterator<Item = &[u8]> {
    head.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line))
}

/// The boundary that a `multipart/form-data` Content-Type names.
fn boundary(content_type: &[u8]) -> Option<&[u8]> {
    let mut params = Params::of(content_type);
    if !params.kind().eq_ignore_ascii_case(b"multipart/form-data") {
        return None;
    }
    let (_, boundary) = params.find(|(name, _)| name.eq_ignore_ascii_case(b"boundary"))?;
    let fits = !boundary.is_empty() && boundary.len() <= MAX_BOUNDARY_BYTES;
    (fits && boundary.iter().all(|byte| matches!(byte, b' '..=b'~')) && !boundary.ends_with(b" ")).then_some(boundary)
}

/// The truth of a form field, as the engines' form parser reads it.
fn flag(text: &[u8]) -> Option<bool> {
    let is = |words: &[&str]| words.iter().any(|word| text.eq_ignore_ascii_case(word.as_bytes()));
    if is(&["true", "1", "on", "t", "y", "yes"]) {
        Some(true)
    } else if text.is_empty() || is(&["false", "0", "off", "f", "n", "no"]) {
        Some(false)
    } else {
        None
    }
}

/// The parameters of a header field's value: `kind; name=value; name="value"`.
///
/// Backslashes in quoted values are left as they are: no name that matters has any.
struct Params<'a> {
    rest: &'a [u8],
}

impl<'a> Params<'a> {
    fn of(value: &'a [u8]) -> Self {
        Params { rest: value }
    }

    /// What stands before the first semicolon.
    fn kind(&mut self) -> &'a [u8] {
        let end = memchr::memchr(b';', self.rest).unwrap_or(self.rest.len());
        let (kind, rest) = self.rest.split_at(end);
        self.rest = rest;
        kind.trim_ascii()
    }
}

impl<'a> Iterator for Params<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let start = self.rest.iter().position(|byte| !matches!(byte, b';' | b' ' | b'\t'))?;
        let rest = &self.rest[start..];
        let end = memchr::memchr2(b'=', b';', rest).unwrap_or(rest.len());
        let name = rest[..end].trim_ascii();
        if rest.get(end) != Some(&b'=') {
            self.rest = &rest[end..];
            return Some((name, b""));
        }
        let rest = rest[end + 1..].trim_ascii_start();
        let (value, end) = match rest.strip_prefix(b"\"") {
            Some(text) => {
                let len = quoted_len(text);
                (&text[..len], (len + 2).min(rest.len()))
            }
            None => {
                let len = memchr::memchr(b';', rest).unwrap_or(rest.len());
                (rest[..len].trim_ascii_end(), len)
            }
        };
        self.rest = &rest[end..];
        Some((name, value))
    }
}

/// Bytes before the closing quote.
fn quoted_len(text: &[u8]) -> usize {
    let mut pos = 0;
    while let Some(at) = memchr::memchr2(b'"', b'\\', &text[pos..]) {
        pos += at;
        if text[pos] == b'"' {
            return pos;
        }
        pos = (pos + 2).min(text.len());
    }
    text.len()
}

#[cold]
fn fault(at: usize, expected: &str) -> Fault {
    Fault::with(What::BadMultipart, format!("At byte {at}: expected {expected}."))
}
