//! Counters, one cache-padded block a lane.
//!
//! Takes increments from the owning lane only (a relaxed load and store, no read-modify-write), gives sums
//! to the control thread. Never resets.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::config::routes::ROUTES;
use crate::fault::What;
use crate::limits::{MAX_MODEL_LABELS, MAX_WORKERS};
use crate::metrics::{
    MOST_BOUNDS, STATUSES, Scale, TIMES, Tally, Time, WORKER_STATUSES, status_index, worker_status_index,
};

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

/// Cells of a histogram: its buckets, the one above the last bound, the sum.
pub const HISTOGRAM_CELLS: usize = MOST_BOUNDS + 2;
const SUM: usize = MOST_BOUNDS + 1;

/// A histogram with one writer; not cumulative, the exposition sums up. Its scale is its row's.
#[derive(Default)]
pub struct Histogram([Counter; HISTOGRAM_CELLS]);

impl Histogram {
    /// Counts one observation.
    #[inline]
    pub fn observe(&self, scale: Scale, value: u64) {
        self.observe_at(scale.place(value), value);
    }

    #[inline]
    fn observe_at(&self, place: usize, value: u64) {
        self.0[place].add(1);
        self.0[SUM].add(value);
    }

    /// Puts what is counted elsewhere: observations by bucket, and their sum. Only the owning lane may call this.
    pub fn set(&self, counts: impl IntoIterator<Item = u64>, sum: u64) {
        self.0[..SUM].iter().zip(counts).for_each(|(cell, n)| cell.set(n));
        self.0[SUM].set(sum);
    }

    /// What it says now.
    pub fn read(&self) -> Observed {
        Observed(self.0.each_ref().map(Counter::get))
    }
}

/// What a histogram said, or several together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observed([u64; HISTOGRAM_CELLS]);

impl Default for Observed {
    /// Nothing.
    fn default() -> Self {
        Observed([0; HISTOGRAM_CELLS])
    }
}

impl Observed {
    /// Observations by bucket; the last of the scale's is everything above its highest bound.
    pub fn counts(&self) -> &[u64] {
        &self.0[..SUM]
    }

    /// Observations in all.
    pub fn count(&self) -> u64 {
        self.counts().iter().sum()
    }

    /// Sum of all observations, as they were counted.
    pub fn sum(&self) -> u64 {
        self.0[SUM]
    }

    /// The cells, for [`Observed::since`].
    pub fn cells(&self) -> &[u64; HISTOGRAM_CELLS] {
        &self.0
    }

    /// This without what an earlier reading said.
    pub fn since(&self, earlier: &[u64; HISTOGRAM_CELLS]) -> Observed {
        Observed(std::array::from_fn(|i| self.0[i].saturating_sub(earlier[i])))
    }
}

impl std::iter::Sum for Observed {
    fn sum<I: Iterator<Item = Observed>>(all: I) -> Observed {
        all.fold(Observed::default(), |a, b| Observed(std::array::from_fn(|i| a.0[i].wrapping_add(b.0[i]))))
    }
}

/// How long the requests of a route or a model took.
type Times = [Histogram; TIMES];

/// What is counted by model.
#[derive(Default)]
struct Model {
    times: Times,
    /// By class of status.
    requests: [Counter; WORKER_STATUSES.len()],
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
    /// By slot: microseconds from requests to the first bytes of answers, summed up.
    waited_us: Box<[Counter]>,
    /// By route, as `requests`.
    times: Box<[Times]>,
    /// By the model's label; the first is everything that has none.
    models: Box<[Model]>,
    /// Share of prompts in percent that some worker had.
    pub matched: Histogram,
    /// Completions of one turn of the ring.
    pub batches: Histogram,
    /// Signs of life: rounds of the lane's chores.
    pub beats: Counter,
    /// CPU time of the lane's thread in microseconds.
    pub cpu_us: Counter,
    /// Part of it in which the lane looked for work in vain.
    pub spun_us: Counter,
    /// Tasks of the lane.
    pub tasks: Counter,
    /// Idle connections to workers.
    pub pool_idle: Counter,
    /// Pipes in use at the moment.
    pub pipes_used: Counter,
    /// Pipes that wait to be used.
    pub pipes_resting: Counter,
}

impl Lane {
    fn new() -> Self {
        Lane {
            plain: std::array::from_fn(|_| Counter::default()),
            requests: (0..ROUTES.len() + 1).map(|_| Default::default()).collect(),
            faults: std::array::from_fn(|_| Counter::default()),
            selected: (0..MAX_WORKERS).map(|_| Counter::default()).collect(),
            responses: (0..MAX_WORKERS).map(|_| Default::default()).collect(),
            waited_us: (0..MAX_WORKERS).map(|_| Counter::default()).collect(),
            times: (0..ROUTES.len() + 1).map(|_| Times::default()).collect(),
            models: (0..=MAX_MODEL_LABELS).map(|_| Model::default()).collect(),
            matched: Histogram::default(),
            batches: Histogram::default(),
            beats: Counter::default(),
            cpu_us: Counter::default(),
            spun_us: Counter::default(),
            tasks: Counter::default(),
            pool_idle: Counter::default(),
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

    /// Counts a finished request of a model; status 0 for one that was cut.
    pub fn model_request(&self, model: usize, status: u16) {
        self.models[model].requests[worker_status_index(status)].add(1);
    }

    /// Counts what a request of a route and a model took, in microseconds.
    #[inline]
    pub fn took(&self, route: usize, model: usize, time: Time, us: u64) {
        let place = Scale::Latency.place(us);
        self.times[route][time as usize].observe_at(place, us);
        self.models[model].times[time as usize].observe_at(place, us);
    }

    /// Counts the time from the end of a request to the first bytes of the worker's answer.
    pub fn waited(&self, slot: Slot, us: u64) {
        self.waited_us[slot as usize].add(us);
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

    /// What requests of a route took.
    pub fn times(&self, route: usize, time: Time) -> Observed {
        self.times[route][time as usize].read()
    }

    /// What requests of a model took, all models that had the label.
    pub fn model_times(&self, model: usize, time: Time) -> Observed {
        self.models[model].times[time as usize].read()
    }

    /// Requests of a model by class of status, all models that had the label.
    pub fn model_requests(&self, model: usize) -> [u64; WORKER_STATUSES.len()] {
        self.models[model].requests.each_ref().map(Counter::get)
    }

    /// Time in microseconds that requests waited for a worker's first bytes, all tenants of the slot.
    pub fn waits_us(&self, slot: Slot) -> u64 {
        self.waited_us[slot as usize].get()
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
