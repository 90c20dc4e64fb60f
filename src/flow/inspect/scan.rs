//! The JSON scanner: one pass, resumable at any byte.
//!
//! Takes a growing body, gives [`Fields`] the members that it watches, or the fault with its offset. Never
//! recurses, never allocates (but for a fault's text), never keeps a reference to the body.
//!
//! Text outside strings is ASCII or a fault, so UTF-8 is checked string by string, and only in strings that
//! have a byte above 0x7F.

use super::block;
use super::fields::Fields;
use crate::fault::{Fault, What};
use crate::limits::MAX_JSON_DEPTH;
use crate::span::Span;

/// What the next byte must be part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The object that the body is.
    Start,
    /// A key, or the end of an object that has just begun.
    FirstKey,
    /// A key, after a comma.
    Key,
    Colon,
    /// A value, or the end of an array that has just begun.
    FirstItem,
    /// A value, after a colon or a comma.
    Value,
    /// The inside of a string.
    Text,
    /// What follows a backslash.
    Escape,
    /// The digits of `\u`; `left` of them are missing.
    Hex,
    // Numbers, by what has been read last.
    Minus,
    Zero,
    Int,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
    /// The rest of `true`, `false` or `null`; `left` of its bytes are missing.
    Word,
    /// A comma or an end, after a value.
    After,
    /// Nothing but whitespace.
    End,
}

/// Bytes by which an integer list must get on for the wide path to be tried again at once.
const INTS_WORTH_BYTES: usize = 64;
/// Bytes for which the wide path is left alone after it got nowhere.
const INTS_PAUSE_BYTES: usize = 256;

pub(super) struct Scanner {
    /// The next byte to look at.
    pos: usize,
    state: State,
    /// Open objects and arrays.
    depth: usize,
    /// Whether the innermost is an object.
    in_object: bool,
    /// One bit a level: whether it is an object.
    objects: [u64; MAX_JSON_DEPTH.div_ceil(64)],
    /// Whether the string at hand is a key.
    is_key: bool,
    /// Where its contents begin.
    text_at: usize,
    /// From where on its UTF-8 is unchecked, and whether there is anything but ASCII since (not 0).
    utf8_at: usize,
    high: u64,
    /// Missing bytes of the word or the escape at hand.
    left: u8,
    word: &'static [u8],
    /// Where the last value ended.
    value_end: usize,
    /// Where the wide path for integers may be tried again.
    ints_at: usize,
    /// Where the body's object begins, and where it ended.
    object_at: usize,
    object_end: usize,
}

/// The bytes ran out, or a fault.
type Stop = Result<(), Fault>;

impl Scanner {
    pub(super) fn new() -> Self {
        Scanner {
            pos: 0,
            state: State::Start,
            depth: 0,
            in_object: false,
            objects: [0; MAX_JSON_DEPTH.div_ceil(64)],
            is_key: false,
            text_at: 0,
            utf8_at: 0,
            high: 0,
            left: 0,
            word: b"",
            value_end: 0,
            ints_at: 0,
            object_at: 0,
            object_end: 0,
        }
    }

    /// Starts over. Only what a scan reads before it writes is reset.
    pub(super) fn begin(&mut self) {
        self.pos = 0;
        self.state = State::Start;
        self.depth = 0;
        self.ints_at = 0;
    }

    /// Scans what is new in `body`.
    pub(super) fn feed(&mut self, body: &[u8], fields: &mut Fields) -> Stop {
        let mut pos = self.pos;
        while pos < body.len() {
            pos = self.step(body, pos, fields)?;
        }
        self.pos = pos;
        if matches!(self.state, State::Text | State::Escape | State::Hex) && self.high != 0 {
            self.check_utf8(body, whole_chars(body, self.utf8_at))?;
        }
        Ok(())
    }

    /// Up to where bytes have been read, less the last one of a value that has just ended (a closing bracket, perhaps).
    pub(super) fn reached(&self) -> usize {
        if self.state == State::After { self.value_end - 1 } else { self.pos }
    }

    /// The body's object, once it has ended.
    pub(super) fn object(&self) -> Span {
        if self.state == State::End { Span::new(self.object_at, self.object_end) } else { Span::default() }
    }

    /// Checks that the body has come to its end.
    pub(super) fn finish(&self, body: &[u8]) -> Stop {
        match self.state {
            State::End => Ok(()),
            _ => Err(self.expected(body, body.len())),
        }
    }

    /// Reads one token or what there is of it; gives where to go on.
    #[inline(always)]
    fn step(&mut self, body: &[u8], mut pos: usize, fields: &mut Fields) -> Result<usize, Fault> {
        let byte = body[pos];
        match self.state {
            State::After => match byte {
                b',' => {
                    if self.depth <= fields.watch() {
                        fields.ends(self.depth, self.value_end, body);
                    }
                    pos += 1;
                    self.state = if self.in_object { State::Key } else { State::Value };
                }
                b'}' | b']' if self.in_object == (byte == b'}') => {
                    if self.depth <= fields.watch() {
                        fields.ends(self.depth, self.value_end, body);
                    }
                    pos += 1;
                    self.close(pos);
                }
                _ => return self.space(body, pos),
            },
            State::FirstKey | State::Key => match byte {
                b'"' => return self.text_from(body, pos + 1, true, fields),
                b'}' if self.state == State::FirstKey => {
                    pos += 1;
                    self.close(pos);
                }
                _ => return self.space(body, pos),
            },
            State::Colon => match byte {
                b':' => {
                    pos += 1;
                    self.state = State::Value;
                }
                _ => return self.space(body, pos),
            },
            State::FirstItem | State::Value => {
                if self.state == State::FirstItem && byte == b']' {
                    pos += 1;
                    self.close(pos);
                } else {
                    return self.value(body, pos, byte, fields);
                }
            }
            State::Text => return self.text(body, pos, fields),
            State::Escape => match byte {
                b'u' => {
                    pos += 1;
                    self.state = State::Hex;
                    self.left = 4;
                }
                byte if is_escape(byte) => {
                    pos += 1;
                    self.state = State::Text;
                }
                _ => return Err(self.expected(body, pos)),
            },
            State::Hex => {
                if !byte.is_ascii_hexdigit() {
                    return Err(self.expected(body, pos));
                }
                pos += 1;
                self.left -= 1;
                if self.left == 0 {
                    self.state = State::Text;
                }
            }
            State::Word => {
                if byte != self.word[self.word.len() - usize::from(self.left)] {
                    return Err(self.expected(body, pos));
                }
                pos += 1;
                self.left -= 1;
                if self.left == 0 {
                    self.after(pos);
                }
            }
            State::Start => match byte {
                b'{' => {
                    self.object_at = pos;
                    self.open(body, pos, true)?;
                    pos += 1;
                }
                _ => return self.space(body, pos),
            },
            State::End => return self.space(body, pos),
            _ => return self.number(body, pos),
        }
        Ok(pos)
    }

    /// A value begins at `pos`, or whitespace before it.
    #[inline(always)]
    fn value(&mut self, body: &[u8], pos: usize, byte: u8, fields: &mut Fields) -> Result<usize, Fault> {
        if !matches!(byte, b'"' | b'{' | b'[' | b'0'..=b'9' | b'-' | b't' | b'f' | b'n') {
            return self.space(body, pos);
        }
        if self.depth <= fields.watch() {
            fields.begins(self.depth, pos, byte);
        }
        match byte {
            b'"' => self.text_from(body, pos + 1, false, fields),
            b'{' | b'[' => {
                self.open(body, pos, byte == b'{')?;
                Ok(pos + 1)
            }
            b't' => Ok(self.word(body, pos, b"true")),
            b'f' => Ok(self.word(body, pos, b"false")),
            b'n' => Ok(self.word(body, pos, b"null")),
            b'-' => {
                self.state = State::Minus;
                Ok(pos + 1)
            }
            _ => {
                if !self.in_object && pos >= self.ints_at && self.depth > fields.watch() {
                    let end = integers(body, pos);
                    if end - pos < INTS_WORTH_BYTES {
                        self.ints_at = pos + INTS_PAUSE_BYTES;
                    }
                    if end > pos {
                        self.state = State::Value;
                        return Ok(end);
                    }
                }
                self.state = if byte == b'0' { State::Zero } else { State::Int };
                self.number(body, pos + 1)
            }
        }
    }

    /// Skips whitespace at `pos`; anything else is a fault.
    #[inline(always)]
    fn space(&self, body: &[u8], pos: usize) -> Result<usize, Fault> {
        if !is_space(body[pos]) {
            return Err(self.expected(body, pos));
        }
        Ok(pos + 1 + body[pos + 1..].iter().take_while(|byte| is_space(**byte)).count())
    }

    /// Reads on in a number, of which at least a byte has been read.
    #[inline]
    fn number(&mut self, body: &[u8], mut pos: usize) -> Result<usize, Fault> {
        while let Some(&byte) = body.get(pos) {
            let digit = byte.is_ascii_digit();
            self.state = match self.state {
                State::Int | State::Fraction | State::ExponentDigits if digit => self.state,
                State::Minus if byte == b'0' => State::Zero,
                State::Minus if digit => State::Int,
                State::Zero | State::Int if byte == b'.' => State::Point,
                State::Point if digit => State::Fraction,
                State::Zero | State::Int | State::Fraction if byte | 0x20 == b'e' => State::Exponent,
                State::Exponent if byte == b'-' || byte == b'+' => State::ExponentSign,
                State::Exponent | State::ExponentSign if digit => State::ExponentDigits,
                State::Zero | State::Int | State::Fraction | State::ExponentDigits => {
                    self.after(pos);
                    return Ok(pos);
                }
                _ => return Err(self.expected(body, pos)),
            };
            pos += 1;
        }
        Ok(pos)
    }

    /// Reads `word`, whose first byte stands at `pos`, if it is there as a whole.
    #[inline(always)]
    fn word(&mut self, body: &[u8], pos: usize, word: &'static [u8]) -> usize {
        if body[pos..].starts_with(word) {
            self.after(pos + word.len());
            return pos + word.len();
        }
        self.state = State::Word;
        self.word = word;
        self.left = word.len() as u8 - 1;
        pos + 1
    }

    /// A string's contents begin at `pos`.
    #[inline(always)]
    fn text_from(&mut self, body: &[u8], pos: usize, is_key: bool, fields: &mut Fields) -> Result<usize, Fault> {
        self.state = State::Text;
        self.is_key = is_key;
        self.text_at = pos;
        self.utf8_at = pos;
        self.high = 0;
        self.text(body, pos, fields)
    }

    /// Reads on in a string.
    #[inline(always)]
    fn text(&mut self, body: &[u8], mut pos: usize, fields: &mut Fields) -> Result<usize, Fault> {
        loop {
            // Escapes come in runs: `\n\n`, or a text that is written in ASCII throughout.
            if body.get(pos) != Some(&b'\\') {
                pos = plain(body, pos, &mut self.high);
            }
            match body.get(pos) {
                None => return Ok(pos),
                Some(b'"') => break,
                Some(b'\\') => match body.get(pos + 1) {
                    Some(&byte) if is_escape(byte) => pos += 2,
                    Some(b'u') if is_hex(&body[pos + 2..]) => pos += 6,
                    _ => {
                        self.state = State::Escape;
                        return Ok(pos + 1);
                    }
                },
                Some(_) => return Err(self.expected(body, pos)),
            }
        }
        if self.high != 0 {
            self.check_utf8(body, pos)?;
        }
        if self.is_key {
            if self.depth <= fields.watch() {
                fields.key(self.depth, self.text_at - 1, &body[self.text_at..pos]);
            }
            self.state = State::Colon;
        } else {
            self.after(pos + 1);
        }
        Ok(pos + 1)
    }

    /// A value ended before `pos`.
    #[inline(always)]
    fn after(&mut self, pos: usize) {
        self.value_end = pos;
        self.state = State::After;
    }

    /// An object or array begins at `pos`.
    #[inline(always)]
    fn open(&mut self, body: &[u8], pos: usize, object: bool) -> Stop {
        if self.depth == MAX_JSON_DEPTH {
            return Err(self.fault(body, pos, format_args!("at most {MAX_JSON_DEPTH} levels of nesting")));
        }
        let (at, bit) = (self.depth / 64, 1 << (self.depth % 64));
        self.objects[at] = if object { self.objects[at] | bit } else { self.objects[at] & !bit };
        self.depth += 1;
        self.in_object = object;
        self.state = if object { State::FirstKey } else { State::FirstItem };
        Ok(())
    }

    /// The innermost object or array ended before `pos`.
    #[inline(always)]
    fn close(&mut self, pos: usize) {
        self.depth -= 1;
        if self.depth == 0 {
            self.state = State::End;
            self.object_end = pos;
            return;
        }
        let outer = self.depth - 1;
        self.in_object = self.objects[outer / 64] >> (outer % 64) & 1 == 1;
        self.after(pos);
    }

    /// Checks the UTF-8 of the string at hand up to `end`.
    #[inline(never)]
    fn check_utf8(&mut self, body: &[u8], end: usize) -> Stop {
        let text = &body[self.utf8_at..end];
        if simdutf8::basic::from_utf8(text).is_err() {
            return Err(self.expected(body, end));
        }
        self.utf8_at = end;
        self.high = if end == body.len() { 0 } else { self.high };
        Ok(())
    }

    /// The fault of meeting, at `at`, a byte that the state does not allow, or the end of the body.
    ///
    /// Bad UTF-8 further ahead goes first, so that the fault does not depend on how the body was cut.
    #[cold]
    #[inline(never)]
    fn expected(&self, body: &[u8], at: usize) -> Fault {
        if matches!(self.state, State::Text | State::Escape | State::Hex) {
            let end = if at == body.len() { whole_chars(body, self.utf8_at) } else { at };
            if let Err(bad) = simdutf8::compat::from_utf8(&body[self.utf8_at..end]) {
                return self.fault(body, self.utf8_at + bad.valid_up_to(), format_args!("UTF-8"));
            }
        }
        let what = match self.state {
            State::Start => "an object",
            State::FirstKey => "a key in quotes or `}`",
            State::Key => "a key in quotes",
            State::Colon => "`:` after the key",
            State::FirstItem => "a value or `]`",
            State::Value => "a value",
            State::Text if at == body.len() => "the string's closing quote",
            State::Text => "no control character in a string",
            State::Escape => "one of `\"\\/bfnrtu` after the backslash",
            State::Hex => "four hexadecimal digits after `\\u`",
            State::Exponent => "a digit or a sign",
            State::Word => "`true`, `false` or `null`",
            State::Minus | State::Point | State::ExponentSign => "a digit",
            State::Zero | State::Int | State::Fraction | State::ExponentDigits | State::After => {
                if self.in_object {
                    "`,` or `}`"
                } else {
                    "`,` or `]`"
                }
            }
            State::End => "nothing after the object",
        };
        self.fault(body, at, format_args!("{what}"))
    }

    #[cold]
    fn fault(&self, body: &[u8], at: usize, expected: std::fmt::Arguments<'_>) -> Fault {
        let end = if at == body.len() { ", the end of the body" } else { "" };
        Fault::with(What::BadJson, format!("At byte {at}{end}: expected {expected}."))
    }
}

/// Where the plain run of a string at `pos` ends: at a byte that stops it, or at the end of the body.
#[inline(always)]
fn plain(body: &[u8], mut pos: usize, high: &mut u64) -> usize {
    // Keys and words end within the first words; a longer text is worth the wide blocks.
    for _ in 0..4 {
        let Some(word) = body[pos..].first_chunk() else {
            return plain_tail(body, pos, high);
        };
        match block::first_stop(word, high) {
            Some(at) => return pos + at,
            None => pos += 8,
        }
    }
    plain_long(body, pos, high)
}

#[inline(never)]
fn plain_long(body: &[u8], mut pos: usize, high: &mut u64) -> usize {
    while let Some(block) = body[pos..].first_chunk() {
        if block::any_stop(block, high) {
            break;
        }
        pos += 64;
    }
    while let Some(word) = body[pos..].first_chunk() {
        match block::first_stop(word, high) {
            Some(at) => return pos + at,
            None => pos += 8,
        }
    }
    plain_tail(body, pos, high)
}

/// The same for the last few bytes of the body.
fn plain_tail(body: &[u8], mut pos: usize, high: &mut u64) -> usize {
    while let Some(&byte) = body.get(pos) {
        if block::stops(byte) {
            break;
        }
        *high |= u64::from(byte & 0x80);
        pos += 1;
    }
    pos
}

/// Where to go on after as many whole blocks of a list of integers as there are: after the last comma in them, where
/// a value is due. Gives `pos` itself, where an integer begins, when there is no such place.
#[inline(never)]
fn integers(body: &[u8], pos: usize) -> usize {
    let mut end = pos;
    // The two bytes before are at hand, because a list stands in an object.
    while let Some(window) = body[end - 2..].first_chunk() {
        if !block::all_integers(window) {
            break;
        }
        end += 64;
    }
    pos + memchr::memrchr(b',', &body[pos..end]).map_or(0, |comma| comma + 1)
}

/// The end of the body's last whole UTF-8 sequence, not before `from`: a sequence whose rest may still come is left out.
fn whole_chars(body: &[u8], from: usize) -> usize {
    let end = body.len();
    for back in 1..=3.min(end - from) {
        let needs = match body[end - back] {
            0..0x80 => return end,
            0x80..0xC0 => continue,
            0xC0..0xE0 => 2,
            0xE0..0xF0 => 3,
            0xF0..=0xFF => 4,
        };
        return if needs > back { end - back } else { end };
    }
    end
}

#[inline(always)]
fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\n' | b'\r' | b'\t')
}

/// Whether the byte makes a whole escape with the backslash before it.
#[inline(always)]
fn is_escape(byte: u8) -> bool {
    matches!(byte, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't')
}

/// Whether four hexadecimal digits come first.
#[inline(always)]
fn is_hex(bytes: &[u8]) -> bool {
    bytes.first_chunk::<4>().is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
}
