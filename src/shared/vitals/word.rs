//! The word of a worker and its transitions: what the probes think, how its requests went, where its breaker stands.
//!
//! Takes a word, an [`Event`] and the user's [`Breaker`] rules, gives the next word and what that means to others.
//! Pure: no clock (seconds are events), no atomics; `tuning/breaker.md` is the printed table of it.
//!
//! ```text
//!          failures in a row, or a bad window             half of a pool is open already: it waits for its turn
//! closed ────────────────────────────────────▶ held ──┐
//!    ▲                   a success               │    │ there is room
//!    ├◀──────────────────────────────────────────┘    ▼
//!    │  enough successes          time is up
//!    └──────────────────── half-open ◀─────────────── open
//!                              └─────────────────────▶
//!                                   one failure
//! ```

use super::Health;
use crate::config::Breaker;
use crate::config::options::MOST_OPEN_S;
use crate::limits::MAX_TRIALS;

/// Where a worker's breaker stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// Takes requests.
    Closed = 0,
    /// Takes a few at a time, to find out.
    HalfOpen = 1,
    /// Would be open, but too much of its pool is: takes requests.
    Held = 2,
    /// Takes none.
    Open = 3,
}

impl State {
    /// All of them, in the order of their discriminants.
    pub const ALL: [State; 4] = [State::Closed, State::HalfOpen, State::Held, State::Open];

    /// Lower-case name, as in labels and the admin API.
    pub const fn name(self) -> &'static str {
        match self {
            State::Closed => "closed",
            State::HalfOpen => "half_open",
            State::Held => "held",
            State::Open => "open",
        }
    }
}

/// What happens to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A request that it had ended well.
    Succeeded,
    /// A request failed, and that is its fault.
    Failed,
    /// Too many of its requests in the window have failed.
    BadWindow,
    /// It may open: its pools have room for that.
    MayOpen,
    /// It may not stay open: a pool has shrunk, or breakers were switched off.
    MustYield,
    /// A request wants to be a trial.
    TrialBegins,
    /// A trial has ended, in whatever way.
    TrialEnds,
    /// A second has passed.
    Second,
    /// The probes think something else.
    Judged(Health),
    /// What its engine says of its load begins, or ceases, to speak against it.
    Shed(bool),
}

/// What a transition means to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It would open: somebody has to see whether it may.
    Trips,
    /// Its breaker has opened, half-opened or closed.
    Moves(State),
    /// The request is a trial.
    OnTrial,
}

/// One reading of a worker's word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Vital(pub(super) u64);

/// A field of the word: its lowest bit, and its greatest value.
type Field = (u32, u64);

const HEALTH: Field = (0, 0b11);
/// Set while the breaker lets nobody in. Beside the health, so that one comparison answers "usable?".
const SHUT: Field = (2, 1);
/// Failures in a row.
const FAILURES: Field = (3, 0xff);
/// Seconds until failures in a row weigh less.
const PAUSE: Field = (11, 0xff);
const STATE: Field = (19, 0b11);
/// Trials that have not ended.
const TRIALS: Field = (21, 0xf);
/// Successes since it half-opened.
const SUCCESSES: Field = (25, 0xff);
/// Seconds until it half-opens, plus one: the first pulse may come at once.
const LEFT: Field = (33, 0x1_ffff);

/// Set while it is left out for what its engine says of its load, where another one can be had.
const SHED: Field = (50, 1);

const USABLE_MASK: u64 = HEALTH.1 | SHUT.1 << SHUT.0;
/// The lowest bit of the state: set when it is half-open or open.
const OUT_MASK: u64 = 1 << STATE.0;
const _: () = assert!(State::HalfOpen as u64 & State::Open as u64 & 1 == 1);
const _: () = assert!((State::Closed as u64 | State::Held as u64) & 1 == 0);

const _: () = assert!(MOST_OPEN_S < LEFT.1);
const _: () = assert!(LEFT.1 << LEFT.0 < SHED.1 << SHED.0);
const _: () = assert!(MAX_TRIALS >= 1 && MAX_TRIALS as u64 <= TRIALS.1);

/// How far a choice goes. The discriminant is the part of the word that has to be 0 besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Reach {
    /// To workers against which their engines' load does not speak.
    Unshed = 1 << SHED.0,
    /// To whoever is usable.
    Usable = 0,
}

/// What the first failure weighs, in requests in flight.
pub const FIRST_WEIGHT: u32 = 16;
/// Doublings of the weight: with all of them a worker stands behind every other one.
const MOST_DOUBLINGS: u32 = 16;
/// Longest pause between trials by weight, in seconds.
const MOST_PAUSE_S: u64 = 60;

impl Vital {
    const fn get(self, (shift, most): Field) -> u64 {
        self.0 >> shift & most
    }

    const fn with(self, (shift, most): Field, value: u64) -> Vital {
        Vital(self.0 & !(most << shift) | (if value < most { value } else { most }) << shift)
    }

    /// What the probes think of the worker.
    #[inline]
    pub const fn health(self) -> Health {
        match self.get(HEALTH) {
            0 => Health::Pending,
            1 => Health::Ready,
            2 => Health::Unhealthy,
            _ => Health::Draining,
        }
    }

    /// Whether the worker may be given a request: it is ready, and its breaker lets one more in.
    #[inline]
    pub const fn usable(self) -> bool {
        self.0 & USABLE_MASK == Health::Ready as u64
    }

    /// Whether the worker may be given a request by a choice that goes so far.
    #[inline]
    pub const fn open_to(self, reach: Reach) -> bool {
        self.0 & (USABLE_MASK | reach as u64) == Health::Ready as u64
    }

    /// Whether what its engine says of its load speaks against the worker.
    #[inline]
    pub const fn is_shed(self) -> bool {
        self.get(SHED) != 0
    }

    /// Where its breaker stands.
    #[inline]
    pub const fn state(self) -> State {
        State::ALL[self.get(STATE) as usize]
    }

    /// Whether the worker may be given a request that is no trial.
    #[inline]
    pub const fn takes_all(self) -> bool {
        self.0 & (HEALTH.1 | OUT_MASK) == Health::Ready as u64
    }

    /// Whether its breaker is open or half-open: such workers count against the half of a pool.
    pub const fn is_out(self) -> bool {
        self.0 & OUT_MASK != 0
    }

    /// Failures in a row.
    #[inline]
    pub const fn failures(self) -> u32 {
        self.get(FAILURES) as u32
    }

    /// Trials that have not ended.
    pub const fn trials(self) -> u32 {
        self.get(TRIALS) as u32
    }

    /// Successes since it half-opened.
    pub const fn successes(self) -> u32 {
        self.get(SUCCESSES) as u32
    }

    /// Seconds until it half-opens, rounded up; 0 when it is not open.
    pub const fn open_left_s(self) -> u32 {
        self.get(LEFT) as u32
    }

    /// Whether the next second changes anything.
    pub const fn counts_down(self) -> bool {
        self.get(PAUSE) != 0 || self.get(LEFT) != 0
    }

    /// What the failures weigh, in requests in flight, while the worker has `in_flight` of them.
    #[inline]
    pub const fn weight(self, in_flight: u32) -> u32 {
        if self.0 >> FAILURES.0 == 0 { 0 } else { self.heavy(in_flight) }
    }

    #[cold]
    const fn heavy(self, in_flight: u32) -> u32 {
        let failures = self.failures();
        let on_trial = self.get(PAUSE) == 0 && in_flight == 0;
        // Half-open, its trials are counted and need no weight.
        if failures == 0 || on_trial || matches!(self.state(), State::HalfOpen) {
            return 0;
        }
        let doublings = if failures > MOST_DOUBLINGS { MOST_DOUBLINGS } else { failures - 1 };
        FIRST_WEIGHT << doublings
    }

    /// The word after an event, and what that means to others.
    pub const fn after(self, event: Event, rules: &Breaker) -> (Vital, Option<Effect>) {
        let (next, effect) = self.moved(event, rules);
        let full = next.trials() >= MAX_TRIALS;
        let shut = match next.state() {
            State::Closed | State::Held => false,
            State::HalfOpen => full,
            State::Open => true,
        };
        (next.with(SHUT, shut as u64), effect)
    }

    const fn moved(self, event: Event, rules: &Breaker) -> (Vital, Option<Effect>) {
        match (event, self.state()) {
            (Event::Succeeded, State::HalfOpen) => {
                let next = self.well();
                let successes = next.get(SUCCESSES) + 1;
                if successes >= rules.successes as u64 {
                    next.to(State::Closed)
                } else {
                    (next.with(SUCCESSES, successes), None)
                }
            }
            (Event::Succeeded, State::Held) => (self.well().with(STATE, State::Closed as u64), None),
            (Event::Succeeded, State::Closed | State::Open) => (self.well(), None),
            (Event::Failed, State::Closed) => {
                let next = self.ill();
                if rules.on && next.failures() >= rules.failures as u32 { next.held() } else { (next, None) }
            }
            (Event::Failed, State::HalfOpen) => self.ill().opened(rules),
            (Event::Failed, State::Open | State::Held) => (self.ill(), None),
            (Event::BadWindow, State::Closed) if rules.on => self.held(),
            (Event::MayOpen, State::Held) => self.opened(rules),
            // Nobody is out any more where no breaker may open.
            (Event::MustYield, State::Open | State::HalfOpen) if !rules.on => self.with(LEFT, 0).to(State::Closed),
            (Event::MustYield, State::Held) if !rules.on => (self.with(STATE, State::Closed as u64), None),
            (Event::MustYield, State::Open | State::HalfOpen) => {
                (self.with(LEFT, 0).with(SUCCESSES, 0).with(STATE, State::Held as u64), None)
            }
            (Event::TrialBegins, State::HalfOpen) if self.trials() < MAX_TRIALS => {
                (self.with(TRIALS, self.get(TRIALS) + 1), Some(Effect::OnTrial))
            }
            (Event::TrialEnds, _) => (self.with(TRIALS, self.get(TRIALS).saturating_sub(1)), None),
            (Event::Second, state) => {
                let left = self.get(LEFT).saturating_sub(1);
                let next = self.with(PAUSE, self.get(PAUSE).saturating_sub(1)).with(LEFT, left);
                match state {
                    State::Open if left == 0 => next.to(State::HalfOpen),
                    _ => (next, None),
                }
            }
            (Event::Judged(health), _) => (self.with(HEALTH, health as u64), None),
            (Event::Shed(is), _) => (self.with(SHED, is as u64), None),
            (Event::BadWindow | Event::MayOpen | Event::MustYield | Event::TrialBegins, _) => (self, None),
        }
    }

    const fn well(self) -> Vital {
        self.with(FAILURES, 0).with(PAUSE, 0)
    }

    const fn ill(self) -> Vital {
        let failures = self.get(FAILURES);
        let pause = if failures >= 6 { MOST_PAUSE_S } else { 1 << failures };
        self.with(FAILURES, failures + 1).with(PAUSE, pause)
    }

    const fn held(self) -> (Vital, Option<Effect>) {
        (self.with(STATE, State::Held as u64), Some(Effect::Trips))
    }

    const fn opened(self, rules: &Breaker) -> (Vital, Option<Effect>) {
        self.with(LEFT, rules.open_s as u64 + 1).to(State::Open)
    }

    const fn to(self, state: State) -> (Vital, Option<Effect>) {
        (self.with(SUCCESSES, 0).with(STATE, state as u64), Some(Effect::Moves(state)))
    }
}
