//! Memory for buffered bodies of the whole process.
//!
//! Takes claims of those that hold bodies of requests or answers, gives shares that are returned when dropped. Never
//! grants more than the limit.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that are claimed at the moment. Writers: every lane, for bodies above 64 KiB.
#[derive(Default)]
pub struct Memory {
    claimed: AtomicU64,
}

/// A share of it.
pub struct Held {
    memory: &'static Memory,
    bytes: u64,
}

impl Memory {
    /// A share of nothing, to grow.
    pub fn none(&'static self) -> Held {
        Held { memory: self, bytes: 0 }
    }

    /// Bytes claimed at the moment.
    pub fn claimed(&self) -> u64 {
        self.claimed.load(Ordering::Relaxed)
    }
}

impl Held {
    /// Grows the share to `bytes`; false, and nothing changed, when all shares would exceed `most`.
    pub fn grow(&mut self, bytes: u64, most: u64) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        // Relaxed: the number guards no other data.
        let granted = self
            .memory
            .claimed
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |c| c.checked_add(more).filter(|c| *c <= most))
            .is_ok();
        if granted {
            self.bytes += more;
        }
        granted
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.memory.claimed.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_grow_to_the_limit_and_come_back() {
        let memory: &'static Memory = Box::leak(Box::default());
        let (mut a, mut b) = (memory.none(), memory.none());
        assert!(a.grow(60, 100) && b.grow(40, 100));
        assert!(!b.grow(41, 100), "beyond the limit");
        assert!(a.grow(10, 100), "a smaller size is held already");
        assert_eq!(memory.claimed(), 100);
        drop(a);
        assert!(b.grow(100, 100));
        drop(b);
        assert_eq!(memory.claimed(), 0);
    }
}
