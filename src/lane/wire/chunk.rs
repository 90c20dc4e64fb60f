//! Bytes on their way: received chunks and outgoing buffers.
//!
//! Takes buffers from the ring or the heap, gives slices. Never copies; a chunk of the ring goes back to it on drop.

use std::ops::Deref;
use std::rc::Rc;

use super::bufring::Lent;

enum Store {
    Ring(Lent),
    Heap(Vec<u8>),
    Empty,
}

/// Bytes that were received. Dropping it gives its buffer back.
pub struct Chunk {
    store: Store,
    start: usize,
    end: usize,
}

impl Chunk {
    /// The end of a stream.
    pub const fn empty() -> Self {
        Chunk { store: Store::Empty, start: 0, end: 0 }
    }

    /// The first `len` bytes of a buffer lent by the ring.
    pub(super) fn lent(buffer: Lent, len: usize) -> Self {
        Chunk { store: Store::Ring(buffer), start: 0, end: len }
    }

    /// Bytes on the heap: from scripted wires, and when the ring's buffers were all lent.
    pub fn heap(bytes: Vec<u8>) -> Self {
        let end = bytes.len();
        Chunk { store: Store::Heap(bytes), start: 0, end }
    }

    /// Drops the first `n` bytes.
    pub fn advance(&mut self, n: usize) {
        assert!(n <= self.end - self.start);
        self.start += n;
    }

    /// Keeps the first `n` bytes only.
    pub fn truncate(&mut self, n: usize) {
        self.end = self.end.min(self.start + n);
    }

    /// The bytes as a vector; copies unless it is one already.
    pub fn into_vec(self) -> Vec<u8> {
        match self.store {
            Store::Heap(mut v) if self.start == 0 => {
                v.truncate(self.end);
                v
            }
            _ => self.to_vec(),
        }
    }

    /// Whether it occupies one of the ring's buffers, of which there are few.
    pub fn is_lent(&self) -> bool {
        matches!(self.store, Store::Ring(_))
    }
}

impl Deref for Chunk {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.store {
            Store::Ring(lent) => &lent.bytes()[self.start..self.end],
            Store::Heap(v) => &v[self.start..self.end],
            Store::Empty => &[],
        }
    }
}

/// Bytes to be sent, owned until the kernel has them all.
pub enum Outgoing {
    /// A buffer of the lane's.
    Heap(Vec<u8>),
    /// The same, when more will be sent as soon as this is taken: the kernel may wait for that and send both as one.
    Ahead(Vec<u8>),
    /// What was received, sent on from where it lies.
    Chunk(Chunk),
    /// A piece of a buffer that is kept for another attempt.
    Shared(Rc<Vec<u8>>, usize, usize),
    /// Canned bytes.
    Static(&'static [u8]),
}

impl Deref for Outgoing {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Outgoing::Heap(v) | Outgoing::Ahead(v) => v,
            Outgoing::Chunk(c) => c,
            Outgoing::Shared(v, start, end) => &v[*start..*end],
            Outgoing::Static(s) => s,
        }
    }
}
