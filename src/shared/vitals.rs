//! Health of every worker, one atomic word a slot.
//!
//! Takes verdicts from control (probes) and settle (outcomes), gives route a one-load answer to "usable?".
//! Never changes a word but through a compare-and-swap over a pure transition function.

use std::sync::atomic::{AtomicU64, Ordering};

use super::roster::Slot;
use crate::limits::MAX_WORKERS;

/// What the probes think of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Health {
    /// Not probed successfully yet.
    Pending = 0,
    /// Takes requests.
    Ready = 1,
    /// Failed its probes.
    Unhealthy = 2,
    /// Finishes what it has, takes nothing new.
    Draining = 3,
}

impl Health {
    /// Lower-case name, as in labels and the admin API.
    pub const fn name(self) -> &'static str {
        match self {
            Health::Pending => "pending",
            Health::Ready => "ready",
            Health::Unhealthy => "unhealthy",
            Health::Draining => "draining",
        }
    }
}

/// Health by slot.
pub struct Vitals {
    words: Box<[AtomicU64]>,
}

impl Vitals {
    /// Every slot pending.
    pub fn new() -> Self {
        Vitals { words: (0..MAX_WORKERS).map(|_| AtomicU64::new(0)).collect() }
    }

    /// What the probes think of the slot's worker.
    pub fn health(&self, slot: Slot) -> Health {
        match self.words[slot as usize].load(Ordering::Relaxed) & 3 {
            0 => Health::Pending,
            1 => Health::Ready,
            2 => Health::Unhealthy,
            _ => Health::Draining,
        }
    }

    /// Whether the slot's worker may be given a request.
    pub fn usable(&self, slot: Slot) -> bool {
        self.health(slot) == Health::Ready
    }

    /// Sets what the probes think (control only); returns what they thought before.
    pub fn set_health(&self, slot: Slot, health: Health) -> Health {
        let old = self.health(slot);
        self.words[slot as usize].store(health as u64, Ordering::Relaxed);
        old
    }
}

impl Default for Vitals {
    fn default() -> Self {
        Self::new()
    }
}
