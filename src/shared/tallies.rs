//! Counters, one cache-padded block a lane.
//!
//! Takes increments from the owning lane only (a relaxed load and store, no read-modify-write), gives sums
//! to the control thread. Never resets.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::config::routes::ROUTES;
use crate::fault::What;
use crate::limits::MAX_WORKERS;
use crate::metrics::{LATENCY_BUCKETS, STATUSES, Tally, WORKER_STATUSES, status_index, worker_status_index};

use super::roster::Slot;

/// A counter with one writer.
#[derive(Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only the owning lane may call this: load and store are two steps.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Puts a value that is worked out elsewhere. Only the owning lane may call this.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The value; a little late on other cores.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A histogram with one writer; not cumulative, the exposition sums up.
#[derive(Default)]
pub struct Histogram {
    buckets: [Counter; LATENCY_BUCKETS.len() + 1],
    sum_us: Counter,
}

impl Histogram {
    /// Counts one observation in microseconds.
    pub fn observe_us(&self, us: u64) {
        let seconds = us as f64 / 1e6;
        let i = LATENCY_BUCKETS.iter().position(|b| seconds <= *b).unwrap_or(LATENCY_BUCKETS.len());
        self.buckets[i].add(1);
        self.sum_us.add(us);
    }

    /// Counts per bucket; the last is everything above the highest bound.
    pub fn counts(&self) -> [u64; LATENCY_BUCKETS.len() + 1] {
        std::array::from_fn(|i| self.buckets[i].get())
    }

    /// Sum of all observations in seconds.
    pub fn sum_seconds(&self) -> f64 {
        self.sum_us.get() as f64 / 1e6
    }
}

/// The counters of one lane.
#[repr(align(128))]
pub struct Lane {
    plain: [Counter; Tally::ALL.len()],
    /// By route (see [`ROUTES`]; the last row is every configured extra route and whatever is unknown) and status.
    requests: Box<[[Counter; STATUSES.len()]]>,
    faults: [Counter; What::ALL.len()],
    selected: Box<[Counter]>,
    /// By slot and class of status.
    responses: Box<[[Counter; WORKER_STATUSES.len()]]>,
    /// Time from the request's first byte to the answer's first byte to the client.
    pub first_byte: Histogram,
    /// Time from the request's first byte to the answer's last byte.
    pub total: Histogram,
    /// Time that requests spent in the queue of the admission, let in or not.
    pub queued: Histogram,
    /// Pipes that answers have at the moment.
    pub pipes_used: Counter,
    /// Pipes that wait for an answer.
    pub pipes_resting: Counter,
}

impl Lane {
    fn new() -> Self {
        Lane {
            plain: Default::default(),
            requests: (0..ROUTES.len() + 1).map(|_| Default::default()).collect(),
            faults: std::array::from_fn(|_| Counter::default()),
            selected: (0..MAX_WORKERS).map(|_| Counter::default()).collect(),
            responses: (0..MAX_WORKERS).map(|_| Default::default()).collect(),
            first_byte: Histogram::default(),
            total: Histogram::default(),
            queued: Histogram::default(),
            pipes_used: Counter::default(),
            pipes_resting: Counter::default(),
        }
    }

    /// Adds to a plain counter.
    #[inline]
    pub fn add(&self, tally: Tally, n: u64) {
        self.plain[tally as usize].add(n);
    }

    /// Counts a finished request. `route` is its index in [`ROUTES`], or `ROUTES.len()`.
    pub fn request(&self, route: usize, status: u16) {
        self.requests[route][status_index(status)].add(1);
    }

    /// Counts a fault.
    pub fn fault(&self, what: What) {
        self.faults[what as usize].add(1);
    }

    /// Counts a selection of a worker.
    pub fn selected(&self, slot: Slot) {
        self.selected[slot as usize].add(1);
    }

    /// Counts an answer of a worker; status 0 for one that was cut.
    pub fn worker_response(&self, slot: Slot, status: u16) {
        self.responses[slot as usize][worker_status_index(status)].add(1);
    }

    /// Value of a plain counter.
    pub fn get(&self, tally: Tally) -> u64 {
        self.plain[tally as usize].get()
    }

    /// Requests of a route that ended with the status at `status` of [`STATUSES`].
    pub fn requests(&self, route: usize, status: usize) -> u64 {
        self.requests[route][status].get()
    }

    /// Count of a fault.
    pub fn faults(&self, what: What) -> u64 {
        self.faults[what as usize].get()
    }

    /// Selections of a worker by this lane since the slot's counters were made (all tenants).
    pub fn selections(&self, slot: Slot) -> u64 {
        self.selected[slot as usize].get()
    }

    /// Answers of a worker through this lane, by class (see [`WORKER_STATUSES`]), since the slot's counters were made
    /// (all tenants).
    pub fn worker_responses(&self, slot: Slot) -> [u64; WORKER_STATUSES.len()] {
        self.responses[slot as usize].each_ref().map(Counter::get)
    }
}

/// All lanes' counters.
pub struct Tallies {
    lanes: Box<[Lane]>,
}

impl Tallies {
    pub fn new(lanes: usize) -> Self {
        Tallies { lanes: (0..lanes).map(|_| Lane::new()).collect() }
    }

    /// The block of one lane.
    pub fn lane(&self, lane: usize) -> &Lane {
        &self.lanes[lane]
    }

    /// All blocks.
    pub fn lanes(&self) -> &[Lane] {
        &self.lanes
    }
}
