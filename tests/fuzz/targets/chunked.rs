//! Chunked coding: decoded in pieces, by three methods, and by a plain reading of the grammar.
//!
//! Takes a message body and what follows it, gives nothing. Never accepts what the plain reading refuses, nor the
//! other way round.

use corelane::http1::{BadChunk, Chunked, LAST_CHUNK, chunk};
use corelane::limits::{MAX_CHUNK_LINE_BYTES, MAX_TRAILER_BYTES};

use super::cuts::cuts;

/// What a body turned out to be.
#[derive(Debug, PartialEq, Eq)]
struct Decoded {
    payload: Vec<u8>,
    /// Bytes of the input that belong to it.
    consumed: usize,
    extensions: u64,
    done: bool,
}

/// Checks one input.
pub fn chunked(data: &[u8]) {
    let whole = decode(data, &[]);
    for cuts in cuts(data) {
        assert_eq!(decode(data, &cuts), whole, "cut at {cuts:?}");
    }
    assert_eq!(whole, plain(data).map_err(|()| BadChunk));
    if let Ok(Decoded { payload, done: true, .. }) = whole {
        let mut again = Vec::new();
        for piece in payload.chunks(7) {
            chunk(&mut again, piece);
        }
        again.extend_from_slice(LAST_CHUNK);
        let decoded = decode(&again, &[]);
        assert_eq!(decoded, Ok(Decoded { payload, consumed: again.len(), extensions: 0, done: true }));
    }
}

/// The decoder's result when the input arrives in pieces; its three methods must agree.
fn decode(data: &[u8], cuts: &[usize]) -> Result<Decoded, BadChunk> {
    let (mut by_piece, mut by_skim, mut by_squeeze) = (Chunked::new(), Chunked::new(), Chunked::new());
    let (mut payload, mut squeezed) = (Vec::new(), Vec::new());
    let (mut consumed, mut begin) = (0, 0);
    for end in cuts.iter().copied().chain([data.len()]) {
        let part = &data[begin..end];
        begin = end;
        let pieces = pieces(&mut by_piece, part, &mut payload);
        let skim = by_skim.skim(part);
        let mut copy = part.to_vec();
        let squeeze = by_squeeze.squeeze(&mut copy);
        let (Ok(taken), Ok(skim), Ok(squeeze)) = (pieces, skim, squeeze) else {
            assert_eq!((pieces.is_err(), skim.is_err(), squeeze.is_err()), (true, true, true));
            return Err(BadChunk);
        };
        squeezed.extend_from_slice(&copy[..squeeze.payload]);
        assert_eq!((skim.consumed, squeeze.consumed), (taken, taken));
        assert_eq!(copy[taken..], part[taken..], "what follows the message stays where it was");
        assert_eq!((by_piece, by_piece), (by_skim, by_squeeze));
        assert!(taken == part.len() || by_piece.done(), "all is taken, but for what follows the message");
        consumed += taken;
    }
    assert_eq!(payload, squeezed);
    assert_eq!(by_piece.framing() + payload.len() as u64, consumed as u64);
    Ok(Decoded { payload, consumed, extensions: by_piece.extensions(), done: by_piece.done() })
}

fn pieces(state: &mut Chunked, part: &[u8], payload: &mut Vec<u8>) -> Result<usize, BadChunk> {
    let mut at = 0;
    loop {
        let piece = state.next(&part[at..])?;
        payload.extend_from_slice(&part[at..][piece.payload.clone()]);
        at += piece.consumed;
        if piece.payload.is_empty() {
            return Ok(at);
        }
    }
}

/// The same from the grammar of RFC 9112, section 7.1, line by line.
fn plain(data: &[u8]) -> Result<Decoded, ()> {
    let mut body = Decoded { payload: Vec::new(), consumed: 0, extensions: 0, done: false };
    loop {
        let (line, next) = match line(data, body.consumed, size_line)? {
            Ok(at) => at,
            Err(part) => {
                body.extensions += extension(part) as u64;
                return Ok(Decoded { consumed: data.len(), ..body });
            }
        };
        body.extensions += extension(line) as u64;
        body.consumed = next;
        let digits = std::str::from_utf8(&line[..line.len() - extension(line)]).map_err(drop)?;
        let size = u64::from_str_radix(digits, 16).map_err(drop)?;
        if size == 0 {
            break;
        }
        let here = data.len().saturating_sub(body.consumed).min(usize::try_from(size).unwrap_or(usize::MAX));
        body.payload.extend_from_slice(&data[body.consumed..][..here]);
        body.consumed += here;
        let end = &data[body.consumed..];
        if (here as u64) < size || end.len() < 2 {
            let fine = end.is_empty() || (here as u64 == size && end == b"\r");
            return if fine { Ok(Decoded { consumed: data.len(), ..body }) } else { Err(()) };
        }
        if !end.starts_with(b"\r\n") {
            return Err(());
        }
        body.consumed += 2;
    }
    let begin = body.consumed;
    loop {
        let found = line(data, body.consumed, trailer_line)?;
        let end = found.map_or(data.len(), |(_, next)| next);
        let empty = found.is_ok_and(|(line, _)| line.is_empty());
        // The line end of the empty line is not counted.
        let counted = end - begin - if empty { 2 } else { usize::from(data[body.consumed..end] == *b"\r") };
        if counted > MAX_TRAILER_BYTES {
            return Err(());
        }
        body.consumed = end;
        if empty || found.is_err() {
            return Ok(Decoded { done: empty, ..body });
        }
    }
}

/// What a line may be: whether it is whole, or the beginning of one.
type Check = fn(&[u8], bool) -> bool;

/// A whole line and where the next one begins, or what there is of it.
type Line<'a> = Result<(&'a [u8], usize), &'a [u8]>;

/// The line that begins at `at`, without its end, and where the next one begins; or what there is of it.
fn line(data: &[u8], at: usize, check: Check) -> Result<Line<'_>, ()> {
    let rest = &data[at..];
    let end = rest.iter().position(|byte| *byte == b'\r').unwrap_or(rest.len());
    let whole = rest.len() > end;
    if !check(&rest[..end], whole) {
        return Err(());
    }
    match rest.get(end + 1) {
        None => Ok(Err(&rest[..end])),
        Some(b'\n') => Ok(Ok((&rest[..end], at + end + 2))),
        Some(_) => Err(()),
    }
}

/// Bytes of the line that are white space and extensions.
fn extension(line: &[u8]) -> usize {
    line.iter().position(|byte| !byte.is_ascii_hexdigit()).map_or(0, |at| line.len() - at)
}

fn size_line(line: &[u8], whole: bool) -> bool {
    let (digits, rest) = line.split_at(line.len() - extension(line));
    let blank = rest.iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
    let named = match rest[blank..] {
        [] => blank == 0 || !whole,
        [b';', ref text @ ..] => text.iter().all(is_text),
        _ => false,
    };
    let counted = line.len() <= MAX_CHUNK_LINE_BYTES;
    named && counted && digits.len() <= 16 && (!digits.is_empty() || (line.is_empty() && !whole))
}

fn trailer_line(line: &[u8], whole: bool) -> bool {
    let name = line.iter().take_while(|byte| is_token(byte)).count();
    match line[name..] {
        [] => line.is_empty() || !whole,
        [b':', ref value @ ..] => name > 0 && value.iter().all(is_text),
        _ => false,
    }
}

fn is_text(byte: &u8) -> bool {
    !byte.is_ascii_control() || *byte == b'\t'
}

/// Whether a byte may stand in a field name.
pub fn is_token(byte: &u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte)
}
