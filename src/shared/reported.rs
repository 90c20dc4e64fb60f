//! What engines say of their load, one atomic word a slot, and what that comes to for the choice among a pool's workers.
//!
//! Takes readings and findings from the control thread (the only writer), gives lanes a flag a pool and operators the
//! readings. Never keeps a reading that is too old: control wipes it, so that whoever finds one may believe it. That a
//! worker is shed stands in its word of [`super::vitals`], which a choice reads anyway.
//!
//! Every `Ordering` here is relaxed: a word publishes nothing but itself, and a finding that arrives one request late is
//! legal.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::roster::Slot;
use super::rotation::{OVERFLOW, PLACES};
use crate::limits::MAX_WORKERS;

/// What a full KV cache is in readings.
pub const WHOLE: u32 = 1 << 16;

/// What an engine, or one of its ranks, has said of its load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    /// Used part of its KV cache, in parts of [`WHOLE`], at most that; `None`: not said.
    pub usage: Option<u32>,
    /// Requests that wait in the engine; more than [`MOST_WAITING`] are that many.
    pub waiting: u32,
    /// Second of the reading, of a clock that starts with the process; below 2^31.
    pub at_s: u32,
}

/// Most waiting requests that a word can hold.
pub const MOST_WAITING: u32 = (1 << 15) - 1;

const USAGE_SHIFT: u32 = 32;
const WAITING_SHIFT: u32 = 49;
const NOT_SAID: u64 = (1 << (WAITING_SHIFT - USAGE_SHIFT)) - 1;
const _: () = assert!((WHOLE as u64) < NOT_SAID);

impl Said {
    /// Used part of the KV cache, from 0 to 1.
    pub fn kv_usage(self) -> Option<f64> {
        self.usage.map(|usage| f64::from(usage) / f64::from(WHOLE))
    }

    /// The word: waiting in the high 15 bits, then 17 of usage, then the second plus one. Never 0.
    const fn pack(self) -> u64 {
        let usage = match self.usage {
            Some(usage) if usage < WHOLE => usage as u64,
            Some(_) => WHOLE as u64,
            None => NOT_SAID,
        };
        let waiting = if self.waiting < MOST_WAITING { self.waiting } else { MOST_WAITING } as u64;
        waiting << WAITING_SHIFT | usage << USAGE_SHIFT | (self.at_s as u64 + 1)
    }

    const fn unpack(word: u64) -> Option<Said> {
        if word == 0 {
            return None;
        }
        let usage = word >> USAGE_SHIFT & NOT_SAID;
        Some(Said {
            usage: if usage == NOT_SAID { None } else { Some(usage as u32) },
            waiting: (word >> WAITING_SHIFT) as u32,
            at_s: word as u32 - 1,
        })
    }
}

/// Readings by slot, and findings by place (see [`super::roster::Pool::place`]).
pub struct Reported {
    words: Box<[AtomicU64]>,
    uneven: Box<[AtomicBool]>,
}

impl Reported {
    /// Nothing said.
    pub fn new() -> Self {
        Reported {
            words: (0..MAX_WORKERS).map(|_| AtomicU64::new(0)).collect(),
            uneven: (0..=PLACES).map(|_| AtomicBool::new(false)).collect(),
        }
    }

    /// What the slot's worker has said, if that is known and not too old.
    pub fn said(&self, slot: Slot) -> Option<Said> {
        Said::unpack(self.words[slot as usize].load(Ordering::Relaxed))
    }

    /// Notes what the slot's worker says, or forgets what it has said (control only).
    pub fn note(&self, slot: Slot, said: Option<Said>) {
        self.words[slot as usize].store(said.map_or(0, Said::pack), Ordering::Relaxed);
    }

    /// Whether the KV caches of a pool's workers are so unevenly used that what is cached where must not decide.
    #[inline]
    pub fn is_uneven(&self, place: usize) -> bool {
        self.uneven[place].load(Ordering::Relaxed)
    }

    /// Says so, or the contrary (control only). Pools without a place of their own are never uneven.
    pub fn set_uneven(&self, place: usize, is: bool) {
        if place != OVERFLOW {
            self.uneven[place].store(is, Ordering::Relaxed);
        }
    }
}

impl Default for Reported {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_come_back_as_they_were() {
        let reported = Reported::new();
        assert_eq!(reported.said(7), None);
        for (usage, waiting, at_s) in [
            (Some(0), 0, 0),
            (Some(WHOLE), MOST_WAITING, (1 << 31) - 1),
            (None, 0, 0),
            (None, 5, 9),
            (Some(WHOLE / 2), 1, 77),
        ] {
            let said = Said { usage, waiting, at_s };
            reported.note(7, Some(said));
            assert_eq!(reported.said(7), Some(said));
        }
        reported.note(7, Some(Said { usage: Some(u32::MAX), waiting: u32::MAX, at_s: 1 }));
        assert_eq!(reported.said(7), Some(Said { usage: Some(WHOLE), waiting: MOST_WAITING, at_s: 1 }));
        assert_eq!((reported.said(6), reported.said(8)), (None, None));
        reported.note(7, None);
        assert_eq!(reported.said(7), None);
    }

    #[test]
    fn pools_without_a_place_are_never_uneven() {
        let reported = Reported::new();
        for place in [0, PLACES - 1, OVERFLOW] {
            reported.set_uneven(place, true);
            assert_eq!(reported.is_uneven(place), place != OVERFLOW);
        }
        reported.set_uneven(0, false);
        assert!(!reported.is_uneven(0) && reported.is_uneven(PLACES - 1));
    }
}
