//! Health and circuit breaker of every worker, one atomic word a slot.
//!
//! Takes verdicts from control (probes, seconds, windows, engines' load) and from lanes (outcomes of requests and of
//! attempts), gives route a one-load answer to "usable?" and to "how much does it weigh?". Never changes a word but
//! through a compare-and-swap over a pure transition function ([`Vital::after`]).
//!
//! A worker that fails fast looks idle. So failures in a row weigh like requests in flight, [`FIRST_WEIGHT`] for the
//! first and twice as much with each further one, until the worker has succeeded again. To find out whether it would,
//! it is on trial after a pause that grows with its failures: then it counts as what it is while it is idle, which
//! gives it one request at a time. That works from the first failure on, before the breaker opens, and where it may not.
//!
//! An open breaker lets nobody in; a half-open one a few at a time, each of which holds a [`Trial`] that gives its place
//! back when it is dropped. Whether a breaker may open, [`crate::shared::Shared::try_open`] decides: at most half of a
//! pool may be out. Seconds are counted by the control thread, since lanes have no common clock.

mod word;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::roster::Slot;
use crate::config::Breaker;
use crate::config::options::MOST_OPEN_S;
use crate::limits::MAX_WORKERS;
pub use word::{Effect, Event, FIRST_WEIGHT, Reach, State, Vital};

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
    /// All of them, in the order of their discriminants.
    pub const ALL: [Health; 4] = [Health::Pending, Health::Ready, Health::Unhealthy, Health::Draining];

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

/// What happened to a slot's tenant so far.
#[derive(Default)]
struct Counts {
    /// Requests that failed.
    failures: AtomicU64,
    /// Times its breaker came to a state.
    breaker: [AtomicU64; State::ALL.len()],
    /// Times its health came to a state.
    health: [AtomicU64; Health::ALL.len()],
}

impl Counts {
    fn all(&self) -> impl Iterator<Item = &AtomicU64> {
        [&self.failures].into_iter().chain(&self.breaker).chain(&self.health)
    }
}

/// Words and counts by slot.
pub struct Vitals {
    words: Box<[AtomicU64]>,
    /// Touched only where something failed or changed.
    counts: Box<[Counts]>,
    /// A packed [`Breaker`], by [`pack`]; 0: [`Breaker::DEFAULT`].
    rules: AtomicU64,
    /// Somebody decides whether a breaker may open.
    deciding: AtomicBool,
}

impl Vitals {
    /// Every slot pending.
    pub fn new() -> Self {
        Vitals {
            words: (0..MAX_WORKERS).map(|_| AtomicU64::new(0)).collect(),
            counts: (0..MAX_WORKERS).map(|_| Counts::default()).collect(),
            rules: AtomicU64::new(0),
            deciding: AtomicBool::new(false),
        }
    }

    /// Sets the breakers' rules (boot, then control); until then [`Breaker::DEFAULT`] counts. Breakers that are open
    /// stay so for as long as they were going to.
    pub fn set_rules(&self, rules: Breaker) {
        // Relaxed: the rules are one word, and whichever a transition finds are good.
        self.rules.store(pack(rules), Ordering::Relaxed);
    }

    /// The breakers' rules.
    pub fn rules(&self) -> Breaker {
        match self.rules.load(Ordering::Relaxed) {
            0 => Breaker::DEFAULT,
            word => unpack(word),
        }
    }

    /// What the probes think of the slot's worker.
    #[inline]
    pub fn health(&self, slot: Slot) -> Health {
        self.vital(slot).health()
    }

    /// Whether the slot's worker may be given a request.
    #[inline]
    pub fn usable(&self, slot: Slot) -> bool {
        self.vital(slot).usable()
    }

    /// The word of a slot, for a decision that asks more than one thing of it.
    #[inline]
    pub fn vital(&self, slot: Slot) -> Vital {
        // Relaxed, here and below: a word publishes nothing but itself, and a verdict that arrives one request late
        // is legal. (What must not be late, who is out of a pool, is ordered by `Turn`.)
        Vital(self.words[slot as usize].load(Ordering::Relaxed))
    }

    /// A request that the slot's worker had has ended well or badly. Writes only if that changes anything. Whether its
    /// breaker would open: then [`crate::shared::Shared::try_open`] is to be asked.
    #[inline]
    pub fn ended(&self, slot: Slot, well: bool) -> bool {
        if !well {
            self.counts[slot as usize].failures.fetch_add(1, Ordering::Relaxed);
            self.step(slot, Event::Failed) == Some(Effect::Trips)
        } else {
            let vital = self.vital(slot);
            // A closed breaker has nothing to learn from a success, but that a row of failures has ended.
            if vital.failures() != 0 || vital.state() != State::Closed {
                self.step(slot, Event::Succeeded);
            }
            false
        }
    }

    /// Makes a request a trial, if the slot's worker is half-open and has a place for one.
    pub fn try_trial(&'static self, slot: Slot) -> Option<Trial> {
        (self.step(slot, Event::TrialBegins) == Some(Effect::OnTrial)).then(|| Trial { vitals: self, slot })
    }

    /// A trial has ended.
    pub(super) fn end_trial(&self, slot: Slot) {
        self.step(slot, Event::TrialEnds);
    }

    /// A second has passed (control only).
    pub fn second(&self, slot: Slot) -> Option<Effect> {
        if self.vital(slot).counts_down() { self.step(slot, Event::Second) } else { None }
    }

    /// Too many requests of the window have failed (control only).
    pub fn bad_window(&self, slot: Slot) {
        self.step(slot, Event::BadWindow);
    }

    /// A new tenant moves in, pending and without a past (control only).
    pub fn vacate(&self, slot: Slot) {
        self.words[slot as usize].store(0, Ordering::Relaxed);
        self.counts[slot as usize].all().for_each(|count| count.store(0, Ordering::Relaxed));
    }

    /// Sets what the probes think (control only); returns what they thought before.
    pub fn set_health(&self, slot: Slot, health: Health) -> Health {
        // No other thread writes the health, so nothing changes it between the two.
        let before = self.health(slot);
        if before != health {
            self.counts[slot as usize].health[health as usize].fetch_add(1, Ordering::Relaxed);
            self.step(slot, Event::Judged(health));
        }
        before
    }

    /// Sets whether the slot's worker is shed for what its engine says of its load (control only); whether that changed
    /// anything.
    pub fn shed(&self, slot: Slot, is: bool) -> bool {
        let changes = self.vital(slot).is_shed() != is;
        if changes {
            self.step(slot, Event::Shed(is));
        }
        changes
    }

    /// Requests of the slot's tenant that failed.
    pub fn failed(&self, slot: Slot) -> u64 {
        self.counts[slot as usize].failures.load(Ordering::Relaxed)
    }

    /// Times that the breaker of the slot's tenant came to a state; never to `Held`, which is no change to anybody.
    pub fn moves(&self, slot: Slot, to: State) -> u64 {
        self.counts[slot as usize].breaker[to as usize].load(Ordering::Relaxed)
    }

    /// Times that the health of the slot's tenant came to a state.
    pub fn flips(&self, slot: Slot, to: Health) -> u64 {
        self.counts[slot as usize].health[to as usize].load(Ordering::Relaxed)
    }

    /// The right to open breakers or to make them yield; `None` while somebody else has it. Whoever gets it sees all
    /// that was done with it before.
    pub(super) fn turn(&self) -> Option<Turn<'_>> {
        // Acquire pairs with the Release of the drop: words that were written in an earlier turn are seen in this one.
        let taken = self.deciding.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        taken.then(|| Turn(self))
    }

    /// One transition of a slot's word; lock-free.
    fn step(&self, slot: Slot, event: Event) -> Option<Effect> {
        let (word, rules) = (&self.words[slot as usize], self.rules());
        let mut now = self.vital(slot);
        let effect = loop {
            let (next, effect) = now.after(event, &rules);
            match word.compare_exchange_weak(now.0, next.0, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => break effect,
                Err(other) => now = Vital(other),
            }
        };
        if let Some(Effect::Moves(to)) = effect {
            self.counts[slot as usize].breaker[to as usize].fetch_add(1, Ordering::Relaxed);
        }
        effect
    }
}

/// Rules as one word, which is never 0: a breaker needs at least one failure to open.
const fn pack(rules: Breaker) -> u64 {
    let Breaker { on, failures, successes, open_s, window_s } = rules;
    on as u64 | (failures as u64) << 1 | (successes as u64) << 9 | (open_s as u64) << 17 | (window_s as u64) << 40
}

const fn unpack(word: u64) -> Breaker {
    Breaker {
        on: word & 1 == 1,
        failures: (word >> 1) as u8,
        successes: (word >> 9) as u8,
        open_s: (word >> 17 & RULE_SECONDS) as u32,
        window_s: (word >> 40 & RULE_SECONDS) as u32,
    }
}

/// Most seconds that the packed rules hold.
const RULE_SECONDS: u64 = (1 << 23) - 1;
const _: () = assert!(MOST_OPEN_S <= RULE_SECONDS);

impl Default for Vitals {
    fn default() -> Self {
        Self::new()
    }
}

/// The right to say who is out (see [`Vitals::turn`]). Only its holder opens breakers, so that what it has counted
/// cannot grow before it acts.
pub(super) struct Turn<'a>(&'a Vitals);

impl Turn<'_> {
    /// Opens a breaker that would.
    pub fn open(&self, slot: Slot) -> bool {
        self.0.step(slot, Event::MayOpen).is_some()
    }

    /// Closes a breaker that may not stay open.
    pub fn make_yield(&self, slot: Slot) {
        self.0.step(slot, Event::MustYield);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // Pairs with the Acquire of `turn`.
        self.0.deciding.store(false, Ordering::Release);
    }
}

/// A place among the trials of a half-open worker. Its drop gives it back, however the request ended.
#[must_use = "a dropped trial gives its place back"]
pub struct Trial {
    vitals: &'static Vitals,
    slot: Slot,
}

impl Trial {
    /// For who gives the place back otherwise, through [`Vitals::end_trial`].
    pub(super) fn into_parts(self) -> (&'static Vitals, Slot) {
        let parts = (self.vitals, self.slot);
        std::mem::forget(self);
        parts
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        self.vitals.end_trial(self.slot);
    }
}

#[cfg(test)]
mod tests;
