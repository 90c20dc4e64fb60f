//! In-flight count and processed work of every worker, and the guard that keeps them honest.
//!
//! Takes reservations from every lane, gives guards whose drop releases them. Never counts below zero,
//! never loses a release, never carries from one count into the other.
//!
//! Work is what a selection knew of it: one for the request, and one for every [`WORK_BYTES`] that the worker has not
//! seen before. It decides between workers with equally many in flight, so that the next request goes to whoever has
//! computed least, and equal requests take turns. Leads fade ([`super::roster::Snapshot::fade`]): a worker that was
//! fed by one hot conversation for an hour is not starved for the next.
//!
//! Every `Ordering` here is relaxed: a word publishes nothing but itself, and the modification order of the one
//! atomic is all that reserving and releasing need. The one decision that does join a word with something else, the
//! reuse of a slot, gets its order from [`super::roster::Roster::saw`] and `oldest_seen`.

use std::fmt;
use std::sync::OnceLock;

use super::atomic::{AtomicU32, AtomicU64, Ordering};
use super::roster::Slot;
use super::vitals::{Trial, Vitals};
use crate::limits::{IN_FLIGHT_BITS, MAX_WORKERS, PROCESSED_BITS, WORK_BYTES};

/// One request in flight, as it stands in the packed word.
const ONE_IN_FLIGHT: u64 = 1 << PROCESSED_BITS;
pub(super) const PROCESSED_MASK: u64 = ONE_IN_FLIGHT - 1;
/// Most requests in flight that the word can hold; a worker there is full.
pub(super) const MOST_IN_FLIGHT: u32 = (1 << IN_FLIGHT_BITS) - 1;

/// The work of a request of which a worker has to compute so many bytes.
#[inline]
pub const fn work(bytes: usize) -> u64 {
    1 + (bytes / WORK_BYTES) as u64
}

/// The packed counts of one worker: in-flight in the high 24 bits, processed in the low 40, so that the
/// word compares as (in-flight, processed).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Word(pub u64);

impl Word {
    /// The word of these counts; processed is taken modulo 2^40.
    ///
    /// # Panics
    /// In debug builds when `in_flight` needs more than 24 bits.
    pub const fn new(in_flight: u32, processed: u64) -> Word {
        debug_assert!(in_flight <= MOST_IN_FLIGHT);
        Word((in_flight as u64) << PROCESSED_BITS | processed & PROCESSED_MASK)
    }

    /// Requests that hold a guard on the worker now.
    pub const fn in_flight(self) -> u32 {
        (self.0 >> PROCESSED_BITS) as u32
    }

    /// Work that was given to the worker, with its starting credit and without what has faded; modulo 2^40.
    pub const fn processed(self) -> u64 {
        self.0 & PROCESSED_MASK
    }

    /// Whether the in-flight count cannot grow any more.
    pub const fn is_full(self) -> bool {
        self.in_flight() == MOST_IN_FLIGHT
    }

    /// The word as choices take it where a worker may have `most` requests: a full one when it has them.
    #[inline]
    pub const fn within(self, most: u32) -> Word {
        if self.in_flight() < most { self } else { Word(self.0 | (MOST_IN_FLIGHT as u64) << PROCESSED_BITS) }
    }

    /// The word after one more reservation that brings so much work; `None` when it is full. Processed wraps without a
    /// carry.
    #[inline]
    pub const fn reserved(self, work: u64) -> Option<Word> {
        if self.is_full() { None } else { Some(Word::new(self.in_flight() + 1, self.processed().wrapping_add(work))) }
    }

    /// The word after one release; `None` when nothing is in flight.
    pub const fn released(self) -> Option<Word> {
        if self.in_flight() == 0 { None } else { Some(Word(self.0 - ONE_IN_FLIGHT)) }
    }
}

/// Counts by slot.
pub struct Load {
    // Dense, eight to a cache line: a selection reads all of them, and reading is what there is most of.
    pub(super) words: Box<[AtomicU64]>,
    /// Most requests in flight that a worker may have. Writers: boot, then control.
    most: AtomicU32,
    /// Where guards give their trials back; known from the first one on.
    vitals: OnceLock<&'static Vitals>,
}

impl Load {
    /// Every slot idle, and no limit but that of the word.
    pub fn new() -> Self {
        let words = (0..MAX_WORKERS).map(|_| AtomicU64::new(0)).collect();
        Load { words, most: AtomicU32::new(MOST_IN_FLIGHT), vitals: OnceLock::new() }
    }

    /// Sets how many requests in flight a worker may have; 0: as many as the word holds. One that has more gets none
    /// until enough have ended.
    pub fn limit(&self, most: u32) {
        self.most.store(if most == 0 { MOST_IN_FLIGHT } else { most.min(MOST_IN_FLIGHT) }, Ordering::Relaxed);
    }

    /// Most requests in flight that a worker may have.
    #[inline]
    pub fn most(&self) -> u32 {
        self.most.load(Ordering::Relaxed)
    }

    /// The current word of a slot as choices take it: a full one when its worker has as many requests as it may.
    #[inline]
    pub fn offer(&self, slot: Slot) -> Word {
        self.word(slot).within(self.most())
    }

    /// The current word of a slot.
    #[inline]
    pub fn word(&self, slot: Slot) -> Word {
        Word(self.words[slot as usize].load(Ordering::Relaxed))
    }

    /// Reserves a place on the slot's worker, for so much work, if its word still is `expected`.
    ///
    /// # Errors
    /// The current word, when it is another or full: choose again with it.
    #[inline]
    pub fn reserve(&'static self, slot: Slot, era: u32, expected: Word, work: u64) -> Result<LoadGuard, Word> {
        let Some(next) = expected.within(self.most()).reserved(work) else { return Err(self.word(slot)) };
        match self.words[slot as usize].compare_exchange(expected.0, next.0, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Ok(LoadGuard { load: self, slot, is_trial: false, era }),
            Err(current) => Err(Word(current)),
        }
    }

    /// Reserves a place on the slot's worker whatever its word is; `None` only when the worker is full.
    pub fn reserve_unconditional(&'static self, slot: Slot, era: u32, work: u64) -> Option<LoadGuard> {
        // Not a bare add: that would carry from one count into the other at either one's end.
        let most = self.most();
        let step = self.step(slot, |word| word.within(most).reserved(work));
        step.ok().map(|_| LoadGuard { load: self, slot, is_trial: false, era })
    }

    /// Sets the processed work (modulo 2^40) and leaves the in-flight count as it is: the starting credit of a
    /// worker that joins or comes back, see [`super::roster::Snapshot::welcome`].
    pub fn seed(&self, slot: Slot, processed: u64) {
        let seeded = self.step(slot, |word| Some(Word::new(word.in_flight(), processed)));
        debug_assert!(seeded.is_ok());
    }

    /// Takes work off what the slot's worker has processed, at most all of it.
    pub fn forget(&self, slot: Slot, work: u64) {
        let forgotten = |word: Word| Some(Word::new(word.in_flight(), word.processed().saturating_sub(work)));
        let done = self.step(slot, forgotten);
        debug_assert!(done.is_ok());
    }

    pub(super) fn release(&self, slot: Slot) {
        let released = self.step(slot, Word::released);
        debug_assert!(released.is_ok(), "slot {slot} was released without a reservation");
    }

    /// One transition of a slot's word; lock-free. Gives the old word, as an error when there is no transition.
    fn step(&self, slot: Slot, transition: impl Fn(Word) -> Option<Word>) -> Result<Word, Word> {
        self.words[slot as usize]
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| transition(Word(word)).map(|next| next.0))
            .map(Word)
            .map_err(Word)
    }
}

impl Default for Load {
    fn default() -> Self {
        Self::new()
    }
}

/// One reservation. Born at selection, dies when the leg has ended; its drop subtracts the in-flight part only.
/// It may end on another thread than the one that made it, and it cannot be copied.
#[must_use = "a dropped guard releases the reservation"]
pub struct LoadGuard {
    // The counts live as long as the process, so no reference count is touched here.
    load: &'static Load,
    slot: Slot,
    /// Holds a place among the worker's trials. A flag: with more in it than two words can hold, a guard would be given
    /// from hand to hand in memory, which every decision would pay for.
    is_trial: bool,
    era: u32,
}

const _: () = assert!(size_of::<Option<LoadGuard>>() == 16);

impl LoadGuard {
    /// The guard, with the trial that its request is.
    #[cold]
    pub fn on_trial(mut self, trial: Trial) -> Self {
        debug_assert!(!self.is_trial);
        let (vitals, slot) = trial.into_parts();
        let known = *self.load.vitals.get_or_init(|| vitals);
        debug_assert!(std::ptr::eq(known, vitals) && slot == self.slot);
        self.is_trial = true;
        self
    }

    #[cold]
    fn end_trial(&self) {
        if let Some(vitals) = self.load.vitals.get() {
            vitals.end_trial(self.slot);
        }
    }

    /// The reserved worker's slot.
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// The reserved worker's era.
    pub fn era(&self) -> u32 {
        self.era
    }
}

impl Drop for LoadGuard {
    #[inline]
    fn drop(&mut self) {
        // First: once nothing is in flight, the slot may get another tenant.
        if self.is_trial {
            self.end_trial();
        }
        self.load.release(self.slot);
    }
}

impl fmt::Debug for LoadGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadGuard").field("slot", &self.slot).field("era", &self.era).finish()
    }
}

const _: () = {
    const fn may_travel<T: Send>() {}
    may_travel::<LoadGuard>();
};
