//! Byte vectors that go round within a lane.
//!
//! Takes vectors back, gives them out empty. Never keeps a large one: what grew for one long prompt is freed.

use std::cell::RefCell;

/// Vectors up to this capacity are kept.
const KEEP_BYTES: usize = 64 * 1024;
/// Vectors that are kept at most.
const KEEP: usize = 256;

/// A lane's stock of vectors.
#[derive(Default)]
pub struct Buffers(RefCell<Vec<Vec<u8>>>);

impl Buffers {
    /// An empty vector, with capacity if one is in stock.
    pub fn take(&self) -> Vec<u8> {
        self.0.borrow_mut().pop().unwrap_or_default()
    }

    /// Takes a vector back.
    pub fn give(&self, mut v: Vec<u8>) {
        let mut stock = self.0.borrow_mut();
        if v.capacity() > 0 && v.capacity() <= KEEP_BYTES && stock.len() < KEEP {
            v.clear();
            stock.push(v);
        }
    }
}
