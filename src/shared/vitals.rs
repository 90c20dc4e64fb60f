//! Health of every worker, one atomic word a slot.
//!
//! Takes verdicts from control (probes, pauses) and from lanes (outcomes of requests and of attempts), gives route a one-load answer to "usable?" and to "how
//! much does it weigh?". Never changes a word but through a compare-and-swap over a pure transition function.
//!
//! A worker that fails fast looks idle. So failures in a row weigh like requests in flight, [`FIRST_WEIGHT`] for the
//! first and twice as much with each further one, until the worker has succeeded again. To find out whether it would,
//! it is on trial after a pause that grows with its failures: then it counts as what it is while it is idle, which
//! gives it one request at a time. The pause is counted down by the control thread, since lanes have no common clock.

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

/// Bits of the word that hold the health, which only control sets; what stands above them it keeps.
const HEALTH_MASK: u64 = 0b11;
/// Then eight bits with the failures in a row, and eight with the seconds until the next trial.
const FAILURES_SHIFT: u32 = 2;
const PAUSE_SHIFT: u32 = 10;
const BYTE: u64 = 0xff;

/// What the first failure weighs, in requests in flight.
pub const FIRST_WEIGHT: u32 = 16;
/// Doublings of the weight: with all of them a worker stands behind every other one.
const MOST_DOUBLINGS: u32 = 16;
/// Longest pause between trials, in seconds.
const MOST_PAUSE_S: u64 = 60;

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

    /// The word of a slot, for a decision that asks more than one thing of it.
    #[inline]
    pub fn vital(&self, slot: Slot) -> Vital {
        Vital(self.words[slot as usize].load(Ordering::Relaxed))
    }

    /// A request that the slot's worker had has ended well or badly. Writes only if that changes anything.
    #[inline]
    pub fn ended(&self, slot: Slot, well: bool) {
        if !well {
            self.step(slot, failed);
        } else if self.vital(slot).failures() != 0 {
            self.step(slot, succeeded);
        }
    }

    /// A second has passed (control only).
    pub fn second(&self, slot: Slot) {
        if self.words[slot as usize].load(Ordering::Relaxed) >> PAUSE_SHIFT & BYTE != 0 {
            self.step(slot, second);
        }
    }

    /// A new tenant moves in, pending and without a past (control only).
    pub fn vacate(&self, slot: Slot) {
        self.step(slot, |_| Health::Pending as u64);
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

/// One reading of a worker's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vital(u64);

impl Vital {
    /// Whether the worker may be given a request.
    #[inline]
    pub const fn usable(self) -> bool {
        self.0 & HEALTH_MASK == Health::Ready as u64
    }

    /// Failures in a row.
    pub const fn failures(self) -> u32 {
        (self.0 >> FAILURES_SHIFT & BYTE) as u32
    }

    /// What the failures weigh, in requests in flight, while the worker has `in_flight` of them.
    #[inline]
    pub const fn weight(self, in_flight: u32) -> u32 {
        if self.0 >> FAILURES_SHIFT == 0 { 0 } else { self.heavy(in_flight) }
    }

    #[cold]
    const fn heavy(self, in_flight: u32) -> u32 {
        let failures = self.failures();
        let on_trial = self.0 >> PAUSE_SHIFT & BYTE == 0;
        if failures == 0 || on_trial && in_flight == 0 {
            return 0;
        }
        let doublings = if failures > MOST_DOUBLINGS { MOST_DOUBLINGS } else { failures - 1 };
        FIRST_WEIGHT << doublings
    }
}

const fn failed(word: u64) -> u64 {
    let failures = word >> FAILURES_SHIFT & BYTE;
    let failures = if failures == BYTE { BYTE } else { failures + 1 };
    let pause = if failures > 6 { MOST_PAUSE_S } else { 1 << (failures - 1) };
    word & !(BYTE << FAILURES_SHIFT | BYTE << PAUSE_SHIFT) | failures << FAILURES_SHIFT | pause << PAUSE_SHIFT
}

const fn succeeded(word: u64) -> u64 {
    word & !(BYTE << FAILURES_SHIFT | BYTE << PAUSE_SHIFT)
}

const fn second(word: u64) -> u64 {
    if word >> PAUSE_SHIFT & BYTE == 0 { word } else { word - (1 << PAUSE_SHIFT) }
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
    fn failures_weigh_until_a_success_and_pause_before_a_trial() {
        let vitals = Vitals::new();
        vitals.set_health(3, Health::Ready);
        let weight = |in_flight| vitals.vital(3).weight(in_flight);
        assert_eq!(weight(0), 0);
        for failures in 1..=300u32 {
            vitals.ended(3, false);
            assert_eq!(vitals.vital(3).failures(), failures.min(255));
            assert_eq!(weight(0), FIRST_WEIGHT << (failures - 1).min(16), "{failures}");
        }
        for _ in 0..59 {
            vitals.second(3);
            assert_ne!(weight(0), 0);
        }
        vitals.second(3);
        assert_eq!((weight(0), weight(1)), (0, FIRST_WEIGHT << 16), "one request on trial");
        vitals.second(3);
        vitals.ended(3, false);
        assert_ne!(weight(0), 0);
        assert!(vitals.usable(3) && vitals.vital(3).usable());
        vitals.ended(3, true);
        assert_eq!((weight(0), weight(1), vitals.vital(3).failures()), (0, 0, 0));
        vitals.ended(3, false);
        vitals.second(3);
        assert_eq!(weight(0), 0, "the first pause is a second");
        vitals.vacate(3);
        assert_eq!((vitals.vital(3).failures(), vitals.health(3)), (0, Health::Pending));
    }

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
