//! Chunked coding (RFC 9112, section 7.1): where a message ends, and what of it is payload.
//!
//! Takes bytes as they arrive, gives counts and ranges. Never buffers and never looks ahead: the state is a few
//! words, and any split of the input gives the same result.

use super::head::{is_tchar, is_value_byte};
use crate::limits::{MAX_CHUNK_LINE_BYTES, MAX_TRAILER_BYTES};
use std::fmt;
use std::ops::Range;

/// Hexadecimal digits of a chunk size: as many as a `u64` takes.
const MAX_SIZE_DIGITS: u32 = 16;

/// The coding is malformed; nothing after this point can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadChunk;

impl fmt::Display for BadChunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("malformed chunked coding")
    }
}

impl std::error::Error for BadChunk {}

/// What [`Chunked::skim`] saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Skim {
    /// Bytes of the input that belong to this message; less than all only when `done`.
    pub consumed: usize,
    /// Payload bytes among them.
    pub payload: u64,
    /// Whether the message ended.
    pub done: bool,
}

/// What [`Chunked::next`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Bytes of the input that are dealt with, the payload included.
    pub consumed: usize,
    /// Where the piece lies in the input; empty when the input (or the message) ended first.
    pub payload: Range<usize>,
    /// Whether the message ended.
    pub done: bool,
}

/// What [`Chunked::squeeze`] left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Squeezed {
    /// Payload bytes, now at the beginning of the buffer.
    pub payload: usize,
    /// Bytes of the input that belonged to this message; what follows them stays where it was.
    pub consumed: usize,
    /// Whether the message ended.
    pub done: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum At {
    /// Before or in the digits of a size.
    #[default]
    Size,
    /// White space after the size; an extension must follow.
    Blank,
    Extension,
    SizeLf,
    Data,
    DataCr,
    DataLf,
    /// At the beginning of a trailer line.
    Trailer,
    TrailerName,
    TrailerValue,
    TrailerLf,
    EndLf,
    Done,
}

/// The decoder's state between two inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chunked {
    at: At,
    /// In `Size`: digits seen.
    digits: u32,
    /// Bytes of the chunk-size line, or of the trailer section, seen so far.
    seen: u32,
    /// The size so far; in `Data`: what is left of the chunk.
    left: u64,
    /// Payload of the newest chunk that has begun.
    chunk: u64,
    /// Bytes so far that were no payload.
    framing: u64,
    /// Those of them that were extensions, or white space before them.
    extensions: u64,
}

impl Chunked {
    /// Before the first chunk.
    pub fn new() -> Self {
        Chunked::default()
    }

    /// Payload bytes that are left of the current chunk; 0 outside of payload.
    pub fn remaining(&self) -> u64 {
        if self.at == At::Data { self.left } else { 0 }
    }

    /// Payload bytes of the newest chunk that has begun, whole; 0 before the first.
    pub fn chunk(&self) -> u64 {
        self.chunk
    }

    /// Whether the message ended.
    pub fn done(&self) -> bool {
        self.at == At::Done
    }

    /// Bytes of framing so far, over all chunks.
    pub fn framing(&self) -> u64 {
        self.framing
    }

    /// Bytes of chunk extensions so far, over all chunks.
    pub fn extensions(&self) -> u64 {
        self.extensions
    }

    /// Notes that `n` payload bytes of the current chunk were moved past the decoder.
    ///
    /// # Panics
    /// When fewer are [`remaining`](Self::remaining): a bug of ours.
    pub fn pass(&mut self, n: u64) {
        assert!(n <= self.remaining(), "only payload of the current chunk can be passed");
        if n > 0 {
            self.left -= n;
            if self.left == 0 {
                self.at = At::DataCr;
            }
        }
    }

    /// Checks framing and says how much of the input belongs to this message, for relays that pass it on as it came.
    ///
    /// # Errors
    /// [`BadChunk`]; the state is of no use afterwards.
    pub fn skim(&mut self, input: &[u8]) -> Result<Skim, BadChunk> {
        let (mut consumed, mut payload) = (0, 0);
        loop {
            let piece = self.next(&input[consumed..])?;
            consumed += piece.consumed;
            payload += piece.payload.len() as u64;
            if piece.done || piece.payload.is_empty() {
                return Ok(Skim { consumed, payload, done: piece.done });
            }
        }
    }

    /// The next piece of payload. An empty one means that the input or the message ended.
    ///
    /// # Errors
    /// [`BadChunk`]; the state is of no use afterwards.
    #[allow(clippy::should_implement_trait, reason = "not an iterator: every call takes input")]
    pub fn next(&mut self, input: &[u8]) -> Result<Piece, BadChunk> {
        let mut i = 0;
        while self.at != At::Done {
            if self.at == At::Data {
                let here = usize::try_from(self.left).unwrap_or(usize::MAX).min(input.len() - i);
                self.pass(here as u64);
                self.framing += i as u64;
                return Ok(Piece { consumed: i + here, payload: i..i + here, done: false });
            }
            let Some(b) = input.get(i) else { break };
            self.frame(*b)?;
            i += 1;
        }
        self.framing += i as u64;
        Ok(Piece { consumed: i, payload: i..i, done: self.done() })
    }

    /// Takes the framing out in place: the payload moves to the front of `buf`.
    ///
    /// # Errors
    /// [`BadChunk`]; state and buffer are of no use afterwards.
    pub fn squeeze(&mut self, buf: &mut [u8]) -> Result<Squeezed, BadChunk> {
        let (mut consumed, mut payload) = (0, 0);
        loop {
            let piece = self.next(&buf[consumed..])?;
            let found = consumed + piece.payload.start..consumed + piece.payload.end;
            consumed += piece.consumed;
            if piece.done || found.is_empty() {
                return Ok(Squeezed { payload, consumed, done: piece.done });
            }
            let len = found.len();
            buf.copy_within(found, payload);
            payload += len;
        }
    }

    /// One byte of framing.
    fn frame(&mut self, b: u8) -> Result<(), BadChunk> {
        self.at = match (self.at, b) {
            (At::Size, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => self.digit(b)?,
            (At::Size, b'\r') if self.digits > 0 => At::SizeLf,
            (At::Size, b';') if self.digits > 0 => self.extension(At::Extension)?,
            (At::Size, b' ' | b'\t') if self.digits > 0 => self.extension(At::Blank)?,
            (At::Blank, b' ' | b'\t') => self.extension(At::Blank)?,
            (At::Blank, b';') => self.extension(At::Extension)?,
            (At::Extension, b'\r') => At::SizeLf,
            (At::Extension, b) if is_value_byte(b) => self.extension(At::Extension)?,
            (At::SizeLf, b'\n') => {
                self.digits = 0;
                self.seen = 0;
                if self.left == 0 {
                    At::Trailer
                } else {
                    self.chunk = self.left;
                    At::Data
                }
            }
            (At::DataCr, b'\r') => At::DataLf,
            (At::DataLf, b'\n') => At::Size,
            (At::Trailer, b'\r') => At::EndLf,
            (At::Trailer | At::TrailerName, b) if is_tchar(b) => self.trailer(At::TrailerName)?,
            (At::TrailerName, b':') => self.trailer(At::TrailerValue)?,
            (At::TrailerValue, b'\r') => self.trailer(At::TrailerLf)?,
            (At::TrailerValue, b) if is_value_byte(b) => self.trailer(At::TrailerValue)?,
            (At::TrailerLf, b'\n') => self.trailer(At::Trailer)?,
            (At::EndLf, b'\n') => At::Done,
            _ => return Err(BadChunk),
        };
        Ok(())
    }

    fn digit(&mut self, b: u8) -> Result<At, BadChunk> {
        if self.digits == MAX_SIZE_DIGITS {
            return Err(BadChunk);
        }
        let value = match b {
            b'0'..=b'9' => b - b'0',
            _ => (b | 0x20) - b'a' + 10,
        };
        self.digits += 1;
        self.left = self.left << 4 | u64::from(value);
        self.size_line(At::Size)
    }

    fn extension(&mut self, at: At) -> Result<At, BadChunk> {
        self.extensions += 1;
        self.size_line(at)
    }

    fn size_line(&mut self, at: At) -> Result<At, BadChunk> {
        self.seen += 1;
        if self.seen as usize > MAX_CHUNK_LINE_BYTES { Err(BadChunk) } else { Ok(at) }
    }

    fn trailer(&mut self, at: At) -> Result<At, BadChunk> {
        self.seen += 1;
        if self.seen as usize > MAX_TRAILER_BYTES { Err(BadChunk) } else { Ok(at) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn squeeze_all(input: &[u8]) -> Result<(Vec<u8>, usize, bool), BadChunk> {
        let mut buf = input.to_vec();
        let s = Chunked::new().squeeze(&mut buf)?;
        buf.truncate(s.payload);
        Ok((buf, s.consumed, s.done))
    }

    #[test]
    fn a_message_is_decoded_and_its_end_found() {
        let wire = b"5\r\nhello\r\n6;a=\"b\"\r\n world\r\n0\r\nX-T: 1\r\n\r\nGET /";
        assert_eq!(squeeze_all(wire), Ok((b"hello world".to_vec(), wire.len() - 5, true)));
        let skim = Chunked::new().skim(wire).unwrap();
        assert_eq!(skim, Skim { consumed: wire.len() - 5, payload: 11, done: true });
    }

    #[test]
    fn passing_payload_by_is_the_same_as_showing_it() {
        let mut c = Chunked::new();
        assert_eq!(c.next(b"10\r\nab").unwrap().payload, 4..6);
        assert_eq!((c.remaining(), c.chunk()), (14, 16));
        c.pass(14);
        assert_eq!((c.remaining(), c.chunk()), (0, 16));
        assert!(c.skim(b"\r\n0\r\n\r\n").unwrap().done);
        assert!(c.done());
        assert_eq!(c.skim(b"more").unwrap(), Skim { consumed: 0, payload: 0, done: true });
    }

    #[test]
    fn framing_and_extensions_are_counted_over_all_chunks() {
        let wire = b"5\r\nhello\r\n6 ;a=1\r\n world\r\n0;b\r\nX-T: 1\r\n\r\nGET /";
        for cut in 0..wire.len() {
            let mut c = Chunked::new();
            let skim = c.skim(&wire[..cut]).unwrap();
            let rest = c.skim(&wire[skim.consumed..]).unwrap();
            let payload = skim.payload + rest.payload;
            assert_eq!((c.extensions(), c.framing()), (7, (wire.len() - 5) as u64 - payload), "cut at {cut}");
        }
    }

    #[test]
    fn limits_hold_at_their_edges() {
        let size_line = |n: usize| [b"0;".to_vec(), vec![b'x'; n - 2], b"\r\n\r\n".to_vec()].concat();
        assert!(squeeze_all(&size_line(MAX_CHUNK_LINE_BYTES)).unwrap().2);
        assert!(squeeze_all(&size_line(MAX_CHUNK_LINE_BYTES + 1)).is_err());
        let trailer = |n: usize| [b"0\r\na:".to_vec(), vec![b'x'; n - 4], b"\r\n\r\n".to_vec()].concat();
        assert!(squeeze_all(&trailer(MAX_TRAILER_BYTES)).unwrap().2);
        assert!(squeeze_all(&trailer(MAX_TRAILER_BYTES + 1)).is_err());
        assert!(!squeeze_all(b"ffffffffffffffff\r\n").unwrap().2);
        assert!(squeeze_all(b"00000000000000001\r\n").is_err());
    }
}
