//! What the trees weigh: bytes against the budget, and counters.
//!
//! Takes every allocation and release, gives sums. Never lets two lanes write one cache line per request: each
//! thread has a shard, and moves it to the total when it has grown by a batch.
//!
//! Bytes are sizes of allocations rounded up to the classes of the binary's allocator (mimalloc), so that what is
//! counted is what is taken. What was unlinked counts until the collector has freed it.

use std::cell::Cell;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};

use crossbeam::utils::CachePadded;

const SHARDS: usize = 16;

#[derive(Default)]
struct Shard {
    bytes: AtomicI64,
    nodes: AtomicI64,
    owners: AtomicI64,
}

/// Every ordering here is relaxed: sums guard no other data.
pub(super) struct Meter {
    pub budget: u64,
    batch: i64,
    total: AtomicI64,
    /// Bytes that are unlinked and not yet freed; part of the total.
    garbage: AtomicI64,
    shards: [CachePadded<Shard>; SHARDS],
    pub trimmed: AtomicU64,
    pub merged: AtomicU64,
    pub refused: AtomicU64,
}

/// What the trees hold and what has happened to them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bytes allocated, unlinked ones that wait for the collector included.
    pub bytes: u64,
    /// Part of `bytes` that waits for the collector.
    pub garbage: u64,
    /// Nodes, unlinked ones included.
    pub nodes: u64,
    /// Entries of owners in nodes.
    pub owners: u64,
    /// Nodes that were removed for age, memory, or because nobody owned them any more.
    pub trimmed: u64,
    /// Nodes that were merged with their only child.
    pub merged: u64,
    /// Insertions that were given up for want of memory.
    pub refused: u64,
}

thread_local! {
    static SHARD: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Threads get shards in turn: with up to 16 lanes each has its own.
fn shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    // A thread that is being torn down (the collector runs then, too) takes the first.
    SHARD
        .try_with(|mine| {
            if mine.get() == usize::MAX {
                mine.set(NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS);
            }
            mine.get()
        })
        .unwrap_or(0)
}

/// The size class of mimalloc that serves `bytes`.
pub(super) const fn class(bytes: usize) -> i64 {
    let words = bytes.div_ceil(8);
    if words <= 8 {
        return (words.next_multiple_of(2) * 8) as i64;
    }
    // Four classes an octave.
    let step = 1 << ((words - 1).ilog2() - 2);
    (words.next_multiple_of(step) * 8) as i64
}

impl Meter {
    pub fn new(budget: u64) -> Self {
        Meter {
            budget,
            batch: (budget / 4096).clamp(256, 64 << 10) as i64,
            total: AtomicI64::new(0),
            garbage: AtomicI64::new(0),
            shards: Default::default(),
            trimmed: AtomicU64::new(0),
            merged: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    fn move_bytes(&self, by: i64) {
        let shard = &self.shards[shard()].bytes;
        let now = shard.fetch_add(by, Ordering::Relaxed) + by;
        if now.abs() > self.batch {
            shard.fetch_sub(now, Ordering::Relaxed);
            self.total.fetch_add(now, Ordering::Relaxed);
        }
    }

    pub fn allocated(&self, size: usize) {
        self.move_bytes(class(size));
    }

    pub fn freed(&self, size: usize) {
        self.move_bytes(-class(size));
    }

    pub fn discarded(&self, bytes: i64) {
        self.garbage.fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn bump(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub fn nodes(&self, by: i64) {
        self.shards[shard()].nodes.fetch_add(by, Ordering::Relaxed);
    }

    pub fn owners(&self, by: i64) {
        self.shards[shard()].owners.fetch_add(by, Ordering::Relaxed);
    }

    /// Bytes, within a 256th of the budget.
    #[inline]
    pub fn bytes_about(&self) -> u64 {
        self.total.load(Ordering::Relaxed).max(0) as u64
    }

    /// As above, without what waits for the collector.
    pub fn live_about(&self) -> u64 {
        self.bytes_about().saturating_sub(self.garbage.load(Ordering::Relaxed).max(0) as u64)
    }

    pub fn counts(&self) -> Counts {
        let sum = |of: fn(&Shard) -> &AtomicI64| -> i64 {
            self.shards.iter().map(|shard| of(shard).load(Ordering::Relaxed)).sum()
        };
        let whole = |n: i64| n.max(0) as u64;
        Counts {
            bytes: whole(self.total.load(Ordering::Relaxed) + sum(|s| &s.bytes)),
            garbage: whole(self.garbage.load(Ordering::Relaxed)),
            nodes: whole(sum(|s| &s.nodes)),
            owners: whole(sum(|s| &s.owners)),
            trimmed: self.trimmed.load(Ordering::Relaxed),
            merged: self.merged.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_mimallocs() {
        let classes =
            [(1, 16), (24, 32), (56, 64), (64, 64), (65, 80), (81, 96), (129, 160), (1040, 1280), (1281, 1536)];
        for (bytes, expected) in classes {
            assert_eq!(class(bytes), expected, "{bytes}");
        }
    }

    #[test]
    fn sums_are_exact_and_the_estimate_is_near() {
        let meter = Meter::new(1 << 20);
        (0..1000).for_each(|_| meter.allocated(1000));
        let all = 1000 * class(1000) as u64;
        assert_eq!(meter.counts().bytes, all);
        assert!(meter.bytes_about().abs_diff(all) <= (1 << 20) / 256);
        (0..1000).for_each(|_| meter.freed(1000));
        assert_eq!(meter.counts().bytes, 0);
    }
}
