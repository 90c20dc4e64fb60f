//! Which workers exist: an immutable snapshot behind one pointer, with a generation.
//!
//! Takes worker lists from the control thread (the only writer), gives lanes a snapshot and a cheap way
//! to see that it moved. Never reuses a slot whose in-flight count is not zero, nor one that some lane may
//! still know under its old tenant. A stale snapshot is legal for one request.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use crossbeam::utils::CachePadded;

/// Index of a worker in the load and vitals arrays; below [`crate::limits::MAX_WORKERS`].
pub type Slot = u16;

pub use crate::config::Role;

/// One worker as lanes see it. Immutable: a change makes a new value in a new snapshot.
#[derive(Clone, Debug)]
pub struct Worker {
    /// Where its counts live.
    pub slot: Slot,
    /// Which tenant of the slot this is; grows with every reuse.
    pub era: u32,
    pub role: Role,
    /// Base URL as configured, without a trailing slash: `http://host:port`.
    pub url: Box<str>,
    /// Path prefix of the URL, empty or starting with `/` and not ending in one; put before every forwarded target.
    pub prefix: Box<str>,
    /// Resolved addresses, in the resolver's order; empty while the name does not resolve (then it is not usable).
    pub addrs: Box<[SocketAddr]>,
    /// Replaces the client's Authorization when present (`Bearer …` is added in front).
    pub api_key: Option<Box<str>>,
    /// Model names it serves; empty while not known.
    pub models: Box<[Box<str>]>,
    /// The worker's `/get_server_info` (or `/server_info`), reduced to harmless fields; JSON.
    pub server_info: Option<Box<str>>,
}

/// An immutable list of workers.
#[derive(Debug, Default)]
pub struct Snapshot {
    /// Grows by one with every publication; 0 is the empty list at start.
    pub generation: u64,
    /// In slot order.
    pub workers: Box<[Arc<Worker>]>,
}

/// The published snapshot and who has seen it.
pub struct Roster {
    current: ArcSwap<Snapshot>,
    generation: AtomicU64,
    /// Newest generation each lane has adopted; `u64::MAX` for a lane that has ended.
    seen: Box<[CachePadded<AtomicU64>]>,
}

impl Roster {
    /// An empty roster for `lanes` lanes.
    pub fn new(lanes: usize) -> Self {
        Roster {
            current: ArcSwap::from_pointee(Snapshot::default()),
            generation: AtomicU64::new(0),
            seen: (0..lanes).map(|_| CachePadded::new(AtomicU64::new(0))).collect(),
        }
    }

    /// Generation of the newest snapshot. Relaxed: a late view of it is legal for one request.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// The newest snapshot. Clones an `Arc`: for the control thread, and for lanes when the generation moved.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }

    /// Publishes a new list (control thread only); returns its generation.
    pub fn publish(&self, workers: Vec<Arc<Worker>>) -> u64 {
        let generation = self.generation.load(Ordering::Relaxed) + 1;
        self.current.store(Arc::new(Snapshot { generation, workers: workers.into_boxed_slice() }));
        // Release pairs with the acquire of `current` only by way of arc-swap itself; readers of the bare
        // generation need no order, they go through `snapshot` next.
        self.generation.store(generation, Ordering::Release);
        generation
    }

    /// A lane says which generation it routes by from now on.
    pub fn saw(&self, lane: usize, generation: u64) {
        // Release pairs with the acquire in `oldest_seen`: guards taken under older views happen before.
        self.seen[lane].store(generation, Ordering::Release);
    }

    /// The oldest generation that some lane may still route by.
    pub fn oldest_seen(&self) -> u64 {
        self.seen.iter().map(|s| s.load(Ordering::Acquire)).min().unwrap_or(u64::MAX)
    }
}
