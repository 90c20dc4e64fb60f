//! A piece of a buffer that somebody else owns: spans, not strings.

/// `len` bytes from `start`. Offsets are 32 bits because no buffered message may exceed 4 GiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Span {
    pub start: u32,
    pub len: u32,
}

impl Span {
    /// The span of `start..end`.
    ///
    /// # Panics
    /// When `end` lies before `start` or beyond 4 GiB: a bug of ours, limits keep messages below.
    pub fn new(start: usize, end: usize) -> Self {
        Span {
            start: u32::try_from(start).expect("messages stay below 4 GiB"),
            len: u32::try_from(end - start).expect("messages stay below 4 GiB"),
        }
    }

    /// One past the last byte.
    pub fn end(self) -> usize {
        self.start as usize + self.len as usize
    }

    /// The bytes, in the buffer that the span was made for.
    pub fn of(self, buf: &[u8]) -> &[u8] {
        &buf[self.start as usize..self.end()]
    }

    /// Whether there is nothing in it.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }
}
