//! A stream of events, taken apart at the empty lines.
//!
//! Takes pieces that are cut anywhere, gives whole events to merge into. Never keeps more than
//! [`MAX_EVENT_BYTES`]: a longer event passes as it came, because an answer without the prompt's log probabilities is
//! better than none.

use super::Prefilled;
use crate::limits::{MAX_EVENT_BYTES, MERGED_TURN_BYTES};
use crate::span::Span;

/// A decode's stream on its way to the client.
pub struct Stream {
    prefilled: Prefilled,
    ends: Ends,
    /// The event at hand, as far as it came in earlier pieces.
    held: Vec<u8>,
    /// Whether the event at hand is too long, and passes.
    passes: bool,
}

impl Stream {
    /// A stream into which this is to be merged.
    pub fn new(prefilled: Prefilled) -> Self {
        Stream { prefilled, ends: Ends::default(), held: Vec::new(), passes: false }
    }

    /// Takes the next bytes of the stream, appends every event that is complete by now. Gives how many bytes it took:
    /// all, unless there are [`MERGED_TURN_BYTES`] in `out` before.
    pub fn push(&mut self, piece: &[u8], out: &mut Vec<u8>) -> usize {
        let mut rest = piece;
        while out.len() < MERGED_TURN_BYTES
            && let Some(end) = self.ends.next(rest)
        {
            let (event, next) = rest.split_at(end);
            rest = next;
            if std::mem::take(&mut self.passes) || self.held.len() + event.len() > MAX_EVENT_BYTES {
                out.append(&mut self.held);
                out.extend_from_slice(event);
            } else if self.held.is_empty() {
                self.prefilled.merge_event(event, out);
            } else {
                self.held.extend_from_slice(event);
                self.prefilled.merge_event(&self.held, out);
                self.held.clear();
            }
        }
        if out.len() >= MERGED_TURN_BYTES {
            return piece.len() - rest.len();
        }
        if self.passes || self.held.len() + rest.len() > MAX_EVENT_BYTES {
            self.passes = true;
            out.append(&mut self.held);
            out.extend_from_slice(rest);
        } else {
            self.held.extend_from_slice(rest);
        }
        piece.len()
    }

    /// The stream has ended: appends what is left of it, an event that nothing completed.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        out.append(&mut self.held);
    }
}

/// What has been seen of the line at hand.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Line {
    #[default]
    Nothing,
    /// A carriage return, which belongs to the line's end if a line feed follows.
    Return,
    Text,
}

impl Line {
    fn and(self, bytes: &[u8]) -> Line {
        match (self, bytes) {
            (line, []) => line,
            (Line::Nothing, b"\r") => Line::Return,
            _ => Line::Text,
        }
    }
}

/// Finds the ends of events: empty lines.
#[derive(Default)]
struct Ends {
    line: Line,
}

impl Ends {
    /// Where the first event ends, if it does. What was looked at is not to be shown again.
    fn next(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut pos = 0;
        while let Some(len) = memchr::memchr(b'\n', &bytes[pos..]) {
            let line = self.line.and(&bytes[pos..pos + len]);
            self.line = Line::Nothing;
            pos += len + 1;
            if line != Line::Text {
                return Some(pos);
            }
        }
        self.line = self.line.and(&bytes[pos..]);
        None
    }
}

/// The events of a whole stream, the last one with or without its empty line.
pub(super) fn split(mut stream: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let end = Ends::default().next(stream).unwrap_or(stream.len());
        let (event, rest) = stream.split_at(end);
        stream = rest;
        Some(event).filter(|event| !event.is_empty())
    })
}

/// Where the data of an event lies. `None` when it has none, or several lines of it (no engine writes so).
pub(super) fn data(event: &[u8]) -> Option<Span> {
    let mut found = None;
    let mut pos = 0;
    for line in event.split_inclusive(|byte| *byte == b'\n') {
        if line.starts_with(DATA) {
            if found.is_some() {
                return None;
            }
            found = Some(Span::new(pos + DATA.len(), pos + line.trim_ascii_end().len()));
        }
        pos += line.len();
    }
    found
}

const DATA: &[u8] = b"data:";
