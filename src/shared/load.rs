//! In-flight and processed counts of every worker, and the guard that keeps them honest.
//!
//! Takes reservations from every lane, gives guards whose drop releases them. Never counts below zero,
//! never loses a release, never is reset. (First form; see `reserve`.)

use std::sync::atomic::{AtomicU64, Ordering};

use super::roster::Slot;
use crate::limits::{MAX_WORKERS, PROCESSED_BITS};

/// The packed counts of one worker: in-flight in the high 24 bits, processed in the low 40, so that the
/// word compares as (in-flight, processed).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Word(pub u64);

impl Word {
    /// Requests that hold a guard on the worker now.
    pub const fn in_flight(self) -> u32 {
        (self.0 >> PROCESSED_BITS) as u32
    }
    /// Requests that were ever given to the worker, plus its starting credit; modulo 2^40.
    pub const fn processed(self) -> u64 {
        self.0 & ((1 << PROCESSED_BITS) - 1)
    }
}

/// Counts by slot.
pub struct Load {
    words: Box<[AtomicU64]>,
}

impl Load {
    pub fn new() -> Self {
        Load { words: (0..MAX_WORKERS).map(|_| AtomicU64::new(0)).collect() }
    }

    /// The current word of a slot.
    pub fn word(&self, slot: Slot) -> Word {
        Word(self.words[slot as usize].load(Ordering::Relaxed))
    }
}

impl Default for Load {
    fn default() -> Self {
        Self::new()
    }
}

/// One reservation. Born at selection, dies when the leg has ended; its drop subtracts the in-flight part only.
#[must_use = "a dropped guard releases the reservation"]
#[derive(Debug)]
pub struct LoadGuard {
    // filled in by the routing work: &'static AtomicU64 of the slot, slot, era
    slot: Slot,
    era: u32,
}

impl LoadGuard {
    /// The reserved worker's slot.
    pub fn slot(&self) -> Slot {
        self.slot
    }
    /// The reserved worker's era.
    pub fn era(&self) -> u32 {
        self.era
    }
}
