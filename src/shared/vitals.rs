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

/// Bits of the word that hold the health; what stands above them belongs to other writers and is kept.
const HEALTH_MASK: u64 = 0b11;

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
    #[inline]
    pub fn health(&self, slot: Slot) -> Health {
        // Relaxed, here and below: a word publishes nothing but itself, and a verdict that arrives one request late
        // is legal.
        health(self.words[slot as usize].load(Ordering::Relaxed))
    }

    /// Whether the slot's worker may be given a request.
    #[inline]
    pub fn usable(&self, slot: Slot) -> bool {
        self.health(slot) == Health::Ready
    }

    /// Sets what the probes think (control only); returns what they thought before.
    pub fn set_health(&self, slot: Slot, health: Health) -> Health {
        self.step(slot, |word| word & !HEALTH_MASK | health as u64)
    }

    /// One transition of a slot's word; lock-free. Gives the health before it.
    fn step(&self, slot: Slot, transition: impl Fn(u64) -> u64) -> Health {
        let word = &self.words[slot as usize];
        let (Ok(old) | Err(old)) =
            word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| Some(transition(word)));
        health(old)
    }
}

const fn health(word: u64) -> Health {
    match word & HEALTH_MASK {
        0 => Health::Pending,
        1 => Health::Ready,
        2 => Health::Unhealthy,
        _ => Health::Draining,
    }
}

impl Default for Vitals {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ready_is_usable_and_other_bits_stay() {
        let vitals = Vitals::new();
        vitals.words[9].store(0xabc0, Ordering::Relaxed);
        let all = [Health::Unhealthy, Health::Ready, Health::Draining, Health::Pending];
        let mut before = Health::Pending;
        for health in all {
            assert_eq!(vitals.set_health(9, health), before);
            assert_eq!(vitals.health(9), health);
            assert_eq!(vitals.usable(9), health == Health::Ready);
            assert_eq!(vitals.words[9].load(Ordering::Relaxed) & !HEALTH_MASK, 0xabc0);
            before = health;
        }
    }
}
