//! How the requests of each worker ended of late.
//!
//! Takes running totals, now and then, gives whether too many of the window have failed. Never looks further back than
//! the window, and never less far than three quarters of it, once it is full.

use std::collections::VecDeque;

use crate::limits::{MAX_WORKERS, MIN_OUTCOMES};
use crate::shared::roster::Slot;

/// Marks in a window: what is older than the oldest one is forgotten.
const MARKS: u32 = 8;

/// Running totals of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    pub well: u64,
    pub failed: u64,
}

/// Totals at the marks of the window, by slot, oldest first.
pub struct Windows {
    marks: Vec<VecDeque<Outcomes>>,
    /// Marks that are kept.
    most: usize,
    /// Seconds between two marks.
    apart_s: u32,
    /// Seconds until the next one.
    next_s: u32,
}

impl Windows {
    /// Empty windows of so many seconds.
    pub fn new(window_s: u32) -> Self {
        let apart_s = (window_s / MARKS).max(1);
        Windows {
            marks: vec![VecDeque::new(); MAX_WORKERS],
            most: (window_s / apart_s).max(1) as usize,
            apart_s,
            next_s: apart_s,
        }
    }

    /// A second has passed; whether all windows are to be looked at, because a mark is due.
    pub fn second(&mut self) -> bool {
        self.next_s -= 1;
        let due = self.next_s == 0;
        if due {
            self.next_s = self.apart_s;
        }
        due
    }

    /// The window begins now.
    pub fn restart(&mut self, slot: Slot, now: Outcomes) {
        let marks = &mut self.marks[slot as usize];
        marks.clear();
        marks.push_back(now);
    }

    /// Whether so many failed in the window that it is worth a look; cheap.
    pub fn has_failures(&self, slot: Slot, failed: u64) -> bool {
        self.marks[slot as usize].front().is_some_and(|first| 2 * failed.saturating_sub(first.failed) >= MIN_OUTCOMES)
    }

    /// Whether at least half of the window's outcomes have failed, of enough; then makes a mark, if one is due.
    pub fn look(&mut self, slot: Slot, now: Outcomes, due: bool) -> bool {
        let marks = &mut self.marks[slot as usize];
        let first = marks.front().copied().unwrap_or(now);
        let failed = now.failed.saturating_sub(first.failed);
        let all = failed + now.well.saturating_sub(first.well);
        if due {
            marks.push_back(now);
            while marks.len() > self.most {
                marks.pop_front();
            }
        }
        all >= MIN_OUTCOMES && 2 * failed >= all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One outcome after the other against a list of all of them.
    #[test]
    fn windows_agree_with_a_list_of_all_outcomes() {
        let mut rng = fastrand::Rng::with_seed(3);
        for window_s in [1, 2, 3, 8, 9, 60, 120] {
            let mut windows = Windows::new(window_s);
            let mut totals = Outcomes::default();
            windows.restart(5, totals);
            let mut all: Vec<(u32, bool)> = Vec::new();
            let mut bad = 0;
            let mut share = 0;
            for now_s in 1..1000 {
                if rng.u8(..20) == 0 {
                    share = rng.u8(..=100);
                }
                for _ in 0..rng.u8(..9) {
                    let failed = rng.u8(..100) < share;
                    all.push((now_s, failed));
                    if failed { totals.failed += 1 } else { totals.well += 1 }
                }
                let due = windows.second();
                let worth_it = windows.has_failures(5, totals.failed);
                let says = (due || worth_it) && windows.look(5, totals, due);
                assert!(!says || worth_it, "what is cheap to see does not hide what is bad");
                // What it looks back on is between these, whole seconds.
                let longest = window_s;
                let shortest = (window_s * 3 / 4).max(1);
                let is_bad = |seconds: u32| {
                    let of = all.iter().filter(|(at, _)| at + seconds > now_s);
                    let (count, failed) = of.fold((0, 0), |(n, f), (_, failed)| (n + 1, f + u64::from(*failed)));
                    count >= MIN_OUTCOMES && 2 * failed >= count
                };
                let any = (shortest..=longest).any(is_bad);
                let every = (shortest..=longest).all(is_bad);
                assert!(!says || any, "{window_s} s, at {now_s}");
                assert!(says || !every, "{window_s} s, at {now_s}");
                bad += u32::from(says);
            }
            assert!(window_s < 8 || bad > 20, "{window_s}: {bad}");
        }
    }

    #[test]
    fn few_outcomes_and_older_ones_say_nothing() {
        let mut windows = Windows::new(120);
        windows.restart(0, Outcomes { well: 500, failed: 0 });
        let mut look = |well: u64, failed: u64| windows.look(0, Outcomes { well: 500 + well, failed }, false);
        assert!(!look(0, 19));
        assert!(look(0, 20) && look(10, 10) && !look(11, 10) && !look(21, 20));
    }
}
