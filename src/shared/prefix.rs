//! Which worker has which prefix: lock-free radix trees over block symbols, shared by all lanes.
//!
//! Takes paths (sequences of 64-bit symbols) with the worker that was chosen for them, gives the workers that have
//! the longest part of another path. Never blocks: a thread that stops in the middle of an operation stops nobody
//! else's (it does keep memory from being freed, see below). Matching never writes, waits or allocates.
//!
//! One tree a (model, role, kind of key), all of them under one budget of bytes. Symbols must be hashes: their
//! highest bits choose the way through the tables of a node with many children.
//!
//! # How it stays whole
//!
//! A node is an immutable edge (a run of symbols) that leads to a body (owners, and a link to the children). Whoever
//! owns a node owns all nodes above it.
//!
//! * A *split* makes two new edges around a new upper body and the same lower body. Who was writing into the lower
//!   body writes into it still. Owners that came late are copied upwards after the split; until that is done the new
//!   body is *young*: every insertion that passes completes it, and matching looks one node further.
//! * To take a body or a table *out*, its links are frozen first. A frozen link never changes again, so what replaces
//!   the container can be computed by anybody, at leisure, and is published by one compare-and-swap on the link that
//!   leads to it. A writer that meets a frozen link does that itself and starts again.
//! * Who adds an owner checks afterwards that the node is in its place and not frozen, else starts again; who splits
//!   or merges reads owners afterwards. Both sides are SeqCst, so one of them sees the other.
//! * What was unlinked is freed by crossbeam-epoch when no guard of that time is left. A thread that stops for ever
//!   while pinned keeps garbage from being freed; garbage counts against the budget, so memory stays bounded, and
//!   insertions that need memory are then refused while everything else goes on.
//!
//! # Age
//!
//! Last use is kept a node and owner, in ticks. [`Forest::trim`] walks the trees, a bounded number of nodes a call,
//! and removes what is older than a cut that comes from the ages seen in the round before: least recently used
//! within a quarter of an age. An insertion near the budget removes the oldest of a few random leaves itself.

mod ages;
mod evict;
mod heap;
mod insert;
mod meter;
mod node;
mod pause;
mod replace;
mod sweep;
mod walk;
mod word;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub use crossbeam::epoch::{Guard, pin};

pub use meter::Counts;
pub use node::MAX_OWNERS;
pub use pause::{Never, Pause, Point};
pub use sweep::{Trim, Trimmed, Trimmer};

pub use walk::{Found, Holder, MAX_FOUND};
pub use word::MAX_ERA;

use crate::config::Role;
use crate::limits::MAX_WORKERS;
use meter::Meter;
use node::Link;
use word::Word;

/// Budget when none is configured.
pub const DEFAULT_BYTES: u64 = 1 << 30;
/// Trees with a place of their own.
pub const MAX_TREES: usize = 1024;
/// Index of the tree that all keys share that found no place.
const OVERFLOW: usize = MAX_TREES;
/// Longest run of symbols of one edge; longer paths are several nodes, so that a split copies at most 4 KiB.
pub const MAX_RUN: usize = 512;

/// What the symbols of a tree stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Hashes of 64 bytes of text.
    Text,
    /// Hashes of 16 token ids.
    Tokens,
    /// Blocks named by the engine.
    Blocks,
}

/// Name of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeKey(u64);

impl TreeKey {
    /// The tree of a model's (`None`: of all models) workers of a role, for a kind of symbols. Two names with one
    /// 64-bit hash would share a tree (about 1 in 10^13 for 1024 trees).
    pub fn new(model: Option<&str>, role: Role, kind: Kind) -> Self {
        // DefaultHasher::new has fixed keys, so that every lane finds the same tree.
        let mut hasher = DefaultHasher::new();
        (model, role, kind).hash(&mut hasher);
        TreeKey(hasher.finish().max(FIRST_KEY))
    }
}

/// Key of a free place.
const FREE: u64 = 0;
/// Key of a place whose tree is being taken down.
const DYING: u64 = 1;
const FIRST_KEY: u64 = 2;

/// A tree as lanes know it: resolved when a lane reads a new roster, not for every request. A stale one is legal: it
/// finds nothing, and inserts nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeId {
    place: u16,
    key: u64,
}

/// Place of one tree.
#[derive(Default)]
struct Tree {
    key: AtomicU64,
    top: Link,
}

/// What became of an insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// The worker owns the whole path.
    Whole,
    /// It owns as many symbols of it; there was no memory for the rest.
    Refused(usize),
    /// Nothing was inserted: the tree has been released or the worker purged.
    Gone,
}

/// All trees of the process.
pub struct Forest<P: Pause = Never> {
    trees: Box<[Tree]>,
    /// Newest era that was purged, by slot: entries up to it are dead.
    purged: Box<[AtomicU32]>,
    /// Grows with everything that a sweep should find: purges and releases.
    chores: AtomicU64,
    meter: Arc<Meter>,
    pause: P,
}

impl Forest {
    /// No trees, and at most `budget` bytes for all that come.
    pub fn new(budget: u64) -> Self {
        Forest::with_pause(budget, Never)
    }
}

impl<P: Pause> Forest<P> {
    /// As [`Forest::new`], with something to happen between the steps of operations: for tests.
    pub fn with_pause(budget: u64, pause: P) -> Self {
        heap::share_pages();
        let trees: Box<[Tree]> = (0..=MAX_TREES).map(|_| Tree::default()).collect();
        // Relaxed: nobody else knows the forest yet.
        trees[OVERFLOW].key.store(FIRST_KEY, Ordering::Relaxed);
        Forest {
            trees,
            purged: (0..MAX_WORKERS).map(|_| AtomicU32::new(0)).collect(),
            chores: AtomicU64::new(0),
            meter: Arc::new(Meter::new(budget)),
            pause,
        }
    }

    /// The tree of a key; made at the first call. Not for the request path.
    ///
    /// Any thread may call it. Two first calls at once may give two trees when a place before them becomes free at
    /// that moment; the next call of either finds the first.
    pub fn tree(&self, key: TreeKey) -> TreeId {
        loop {
            if let Some(id) = self.find(key) {
                return id;
            }
            let free = self.places().position(|tree| tree.key.load(Ordering::Relaxed) == FREE);
            let Some(place) = free else { return TreeId { place: OVERFLOW as u16, key: FIRST_KEY } };
            // Acquire pairs with the release in `finish_release`: the tree of the tenant before is gone. Relaxed on
            // failure: everything is looked at again.
            let _ = self.trees[place].key.compare_exchange(FREE, key.0, Ordering::Acquire, Ordering::Relaxed);
        }
    }

    /// The tree of a key, if it has one.
    pub fn find(&self, key: TreeKey) -> Option<TreeId> {
        // Relaxed: the key is the whole message; the tree below is reached through its own links.
        let place = self.places().position(|tree| tree.key.load(Ordering::Relaxed) == key.0)?;
        Some(TreeId { place: place as u16, key: key.0 })
    }

    fn places(&self) -> impl Iterator<Item = &Tree> {
        self.trees[..OVERFLOW].iter()
    }

    /// Releases every tree whose key is not among `keep` (control thread, after a publication). They find nothing
    /// from now on; [`Forest::trim`] takes them down.
    pub fn release_except(&self, keep: &[TreeKey]) {
        for tree in self.places() {
            let key = tree.key.load(Ordering::Relaxed);
            if key >= FIRST_KEY && !keep.contains(&TreeKey(key)) {
                // Relaxed: a late reader or writer does no harm, the sweep finds what it leaves.
                let _ = tree.key.compare_exchange(key, DYING, Ordering::Relaxed, Ordering::Relaxed);
                self.chores.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Forgets a worker: its entries of this era and earlier ones count as dead at once, and [`Forest::trim`] clears
    /// them away. A worker that returns has a new era and starts with nothing.
    pub fn purge(&self, slot: u16, era: u32) {
        if let Some(purged) = self.purged.get(slot as usize) {
            // Relaxed: lanes that read it late are told apart by their own view's eras.
            purged.fetch_max(era, Ordering::Relaxed);
            self.chores.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[inline]
    fn is_dead(&self, slot: u16, era: u32) -> bool {
        self.purged.get(slot as usize).is_none_or(|purged| era <= purged.load(Ordering::Relaxed))
    }

    /// The tree of an id that is not stale.
    #[inline]
    fn live(&self, id: TreeId) -> Option<&Tree> {
        self.trees.get(id.place as usize).filter(|tree| tree.key.load(Ordering::Relaxed) == id.key)
    }

    /// Finds who has the longest part of `symbols`, among the workers (slot, era) that `usable` accepts; deepest
    /// first, each worker once. What was in `found` is forgotten.
    #[inline]
    pub fn matched(&self, id: TreeId, symbols: &[u64], usable: impl FnMut(u16, u32) -> bool, found: &mut Found) {
        self.matched_in(id, symbols, usable, found, &pin());
    }

    /// As [`Forest::matched`], under a guard of the caller's.
    pub fn matched_in(
        &self,
        id: TreeId,
        symbols: &[u64],
        mut usable: impl FnMut(u16, u32) -> bool,
        found: &mut Found,
        guard: &Guard,
    ) {
        found.clear();
        let Some(tree) = self.live(id) else { return };
        let usable = |slot, era| !self.is_dead(slot, era) && usable(slot, era);
        walk::matched(&tree.top, symbols, usable, found, guard, || self.pause.at(Point::Step));
    }

    /// Makes a worker an owner of all of `symbols`, last used at `tick` (any coarse clock that does not run
    /// backwards; 24 bits of it count). `era` is at most [`MAX_ERA`] and not 0.
    #[inline]
    pub fn insert(&self, id: TreeId, symbols: &[u64], slot: u16, era: u32, tick: u32) -> Inserted {
        self.insert_in(id, symbols, slot, era, tick, &pin())
    }

    /// As [`Forest::insert`], under a guard of the caller's.
    pub fn insert_in(&self, id: TreeId, symbols: &[u64], slot: u16, era: u32, tick: u32, guard: &Guard) -> Inserted {
        let Some(tree) = self.live(id).filter(|_| !self.is_dead(slot, era)) else { return Inserted::Gone };
        self.work(guard).insert(&tree.top, symbols, Word::new(slot, era, tick))
    }

    /// What the trees hold, and what has happened to them.
    pub fn counts(&self) -> Counts {
        self.meter.counts()
    }

    /// Bytes, within a 256th of the budget, at the cost of one load.
    pub fn bytes(&self) -> u64 {
        self.meter.bytes_about()
    }

    /// The budget in bytes.
    pub fn budget(&self) -> u64 {
        self.meter.budget
    }

    /// Counts that outlive the forest: for tests of its drop.
    pub fn counter(&self) -> impl Fn() -> Counts + Send + use<P> {
        let meter = Arc::clone(&self.meter);
        move || meter.counts()
    }

    fn work<'g>(&'g self, guard: &'g Guard) -> replace::Work<'g, P> {
        replace::Work { meter: &self.meter, pause: &self.pause, guard, forest: &self.trees }
    }
}

impl<P: Pause> Drop for Forest<P> {
    fn drop(&mut self) {
        for tree in &self.trees {
            // SAFETY: `&mut self`: no other thread works on the trees, so all that is linked is ours alone.
            unsafe { replace::free_all(&tree.top, &self.meter) };
        }
    }
}
