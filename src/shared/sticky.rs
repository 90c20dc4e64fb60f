//! Which worker a routing key was given to, for all lanes together.
//!
//! Takes a key's hash and the worker that was chosen for it, gives that worker until the key was idle for too long.
//! Never grows: [`STICKY_KEYS`] keys are remembered, then the longest unused of a few makes room. Never holds a lock
//! for longer than a look at eight entries.
//!
//! Keys are told apart by 64-bit hashes; two with one hash would share a worker.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::roster::Slot;
use crate::limits::{MAX_WORKERS, STICKY_KEYS};

/// Entries that a key may stand in.
const WAYS: usize = 8;
const SETS: usize = STICKY_KEYS / WAYS;
const _: () = assert!(SETS.is_power_of_two());

/// A worker: slot and era.
pub type Tenant = (Slot, u32);

#[derive(Clone, Copy, Default)]
struct Entry {
    key: u64,
    slot: Slot,
    /// 0 while the entry is free.
    era: u32,
    used_s: u32,
}

type Set = Mutex<[Entry; WAYS]>;

/// Keys and their workers.
pub struct Sticky {
    /// Made at the first use: few processes need it.
    sets: OnceLock<Box<[Set]>>,
    /// Keys by the slot of their worker.
    groups: Box<[AtomicU32]>,
}

impl Sticky {
    /// No keys.
    pub fn new() -> Self {
        Sticky { sets: OnceLock::new(), groups: (0..MAX_WORKERS).map(|_| AtomicU32::new(0)).collect() }
    }

    /// The worker of a key that was used within the last `idle_s` seconds; it counts as used now.
    pub fn find(&self, key: u64, now_s: u32, idle_s: u32) -> Option<Tenant> {
        let mut set = lock(self.set(key));
        let entry = set.iter_mut().find(|entry| entry.era != 0 && entry.key == key)?;
        if now_s.saturating_sub(entry.used_s) > idle_s {
            return None;
        }
        entry.used_s = now_s;
        Some((entry.slot, entry.era))
    }

    /// Gives a key to a worker, if it still has the one that [`Sticky::find`] gave (`None`: none that counts).
    ///
    /// # Errors
    /// The worker that somebody else has given it to meanwhile.
    pub fn assign(&self, key: u64, known: Option<Tenant>, to: Tenant, now_s: u32, idle_s: u32) -> Result<(), Tenant> {
        let mut set = lock(self.set(key));
        let at = match set.iter().position(|entry| entry.era != 0 && entry.key == key) {
            Some(at) => {
                let entry = set[at];
                let has = Some((entry.slot, entry.era));
                let counts = now_s.saturating_sub(entry.used_s) <= idle_s;
                if counts && has != known {
                    return Err((entry.slot, entry.era));
                }
                at
            }
            // A free entry was used at 0.
            None => (0..WAYS).min_by_key(|&at| (set[at].era != 0, set[at].used_s)).unwrap_or(0),
        };
        self.leave(&set[at]);
        set[at] = Entry { key, slot: to.0, era: to.1, used_s: now_s };
        // Relaxed, here and below: a count that is late by a request is good enough to balance by.
        self.groups[usize::from(to.0)].fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Keys that a slot's worker has.
    #[inline]
    pub fn group(&self, slot: Slot) -> u32 {
        self.groups[usize::from(slot)].load(Ordering::Relaxed)
    }

    /// Forgets the keys for which `gone` says so of (slot, era, last use), in a share of the sets: the `part`-th of
    /// `parts` (control only).
    pub fn forget(&self, part: usize, parts: usize, gone: impl Fn(Tenant, u32) -> bool) {
        let Some(sets) = self.sets.get() else { return };
        let share = SETS.div_ceil(parts);
        for set in sets.iter().skip(part % parts * share).take(share) {
            for entry in lock(set).iter_mut().filter(|e| e.era != 0 && gone((e.slot, e.era), e.used_s)) {
                self.leave(entry);
                *entry = Entry::default();
            }
        }
    }

    fn leave(&self, entry: &Entry) {
        if entry.era != 0 {
            self.groups[usize::from(entry.slot)].fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn set(&self, key: u64) -> &Set {
        let sets = self.sets.get_or_init(|| (0..SETS).map(|_| Set::default()).collect());
        &sets[key as usize & (SETS - 1)]
    }
}

impl Default for Sticky {
    fn default() -> Self {
        Self::new()
    }
}

fn lock(set: &Set) -> MutexGuard<'_, [Entry; WAYS]> {
    // Entries are whole at any time, whoever panicked.
    set.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_keep_their_worker_until_they_were_idle() {
        let sticky = Sticky::new();
        assert_eq!(sticky.find(7, 0, 10), None);
        assert_eq!(sticky.assign(7, None, (3, 1), 0, 10), Ok(()));
        assert_eq!(sticky.find(7, 10, 10), Some((3, 1)));
        assert_eq!(sticky.find(7, 20, 10), Some((3, 1)), "use counts");
        assert_eq!(sticky.find(7, 31, 10), None);
        assert_eq!(sticky.assign(7, None, (4, 1), 31, 10), Ok(()));
        assert_eq!((sticky.group(3), sticky.group(4)), (0, 1));
    }

    #[test]
    fn the_first_of_two_that_assign_wins() {
        let sticky = Sticky::new();
        assert_eq!(sticky.assign(7, None, (3, 1), 0, 10), Ok(()));
        assert_eq!(sticky.assign(7, None, (4, 1), 0, 10), Err((3, 1)));
        assert_eq!(sticky.assign(7, Some((3, 1)), (4, 1), 0, 10), Ok(()), "who knew it may move it");
        assert_eq!(sticky.find(7, 0, 10), Some((4, 1)));
    }

    #[test]
    fn the_longest_unused_makes_room() {
        let sticky = Sticky::new();
        let key = |i: usize| (i * SETS) as u64;
        for i in 0..=WAYS {
            assert_eq!(sticky.assign(key(i), None, (1, 1), 1 + i as u32, 100), Ok(()));
        }
        assert_eq!(sticky.find(key(0), 20, 100), None);
        assert!((1..=WAYS).all(|i| sticky.find(key(i), 20, 100).is_some()));
        assert_eq!(sticky.group(1), WAYS as u32);
    }

    #[test]
    fn what_is_gone_is_forgotten() {
        let sticky = Sticky::new();
        for key in 0..1000 {
            sticky.assign(key, None, ((key % 2) as Slot, 1), 0, 10).unwrap();
        }
        (0..4).for_each(|part| sticky.forget(part, 4, |tenant, _| tenant == (0, 1)));
        assert_eq!((sticky.group(0), sticky.group(1)), (0, 500));
        assert_eq!((sticky.find(2, 0, 10), sticky.find(3, 0, 10)), (None, Some((1, 1))));
    }
}
