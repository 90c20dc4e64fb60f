//! What the gateway does at the moment, for the page and for `corelane top`.
//!
//! Takes what lanes have counted, gives one value that both write and read as JSON. Only counts and levels: rates are
//! differences of two readings, and up to who reads. Never costs a lane anything, never shows a worker that is gone.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::fleet::{Bases, usable};
use crate::config::routes::ROUTES;
use crate::fault::What;
use crate::metrics::{STATUSES, Scale, Tally, Time, WORKER_STATUSES, status_label};
use crate::shared::Shared;
use crate::shared::drain::Phase;
use crate::shared::roster::Worker;
use crate::shared::tallies::{Lane, Observed};

/// Bytes that a reader of the JSON allows for: more than it has with the most workers and lanes that there can be.
pub const MAX_STATS_BYTES: usize = 4 << 20;

/// One reading. Counts are of all since the start, unless they say otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    pub version: String,
    /// Milliseconds since the start, when this was read.
    pub up_ms: u64,
    /// What `/readiness` says.
    pub ready: bool,
    /// On its way to its end.
    pub draining: bool,
    pub lanes: Vec<LaneStats>,
    /// Finished requests by status, as in `corelane_requests_total`; only what happened.
    pub statuses: BTreeMap<String, u64>,
    /// Faults by code; only what happened.
    pub faults: BTreeMap<String, u64>,
    /// Decisions of cache_aware by reason, all of them.
    pub decisions: BTreeMap<String, u64>,
    pub latency: Latency,
    pub queue: Queue,
    pub traffic: Traffic,
    pub prefix: Prefix,
    /// What the places of [`WorkerStats::answers`] mean.
    pub answer_classes: Vec<String>,
    pub workers: Vec<WorkerStats>,
}

/// A lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneStats {
    /// CPU time of its thread in microseconds, as of the last half second.
    pub cpu_us: u64,
    /// Part of it in which the lane looked for work in vain.
    pub spun_us: u64,
    /// Client connections now.
    pub connections: u64,
    /// Finished requests.
    pub requests: u64,
    /// Tasks, as of the last half second.
    pub tasks: u64,
}

/// How long requests took, over all routes and lanes: observations by bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latency {
    /// Upper bounds of the buckets in microseconds; each histogram has one more bucket for what is above.
    pub bounds_us: Vec<u64>,
    /// From a request's first byte to its answer's last.
    pub total: Vec<u64>,
    /// To the answer's first byte.
    pub first_byte: Vec<u64>,
    /// To the first bytes of the body of a stream.
    pub first_token: Vec<u64>,
    /// Between two things that a stream's client was given.
    pub event_gap: Vec<u64>,
    /// In the queue.
    pub queue: Vec<u64>,
}

/// Permits and the queue for them, now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queue {
    /// Requests that wait.
    pub waiting: u64,
    /// Requests that were let in.
    pub in_use: u64,
    /// How many may be; 0: no limit.
    pub permits: u64,
}

/// What passed through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Bytes from clients.
    pub bytes_in: u64,
    /// Bytes to clients.
    pub bytes_out: u64,
    /// Payload bytes of answers that were copied.
    pub copied: u64,
    /// Payload bytes of answers that were moved within the kernel.
    pub spliced: u64,
    /// Connections to workers that were opened, or tried to.
    pub connects: u64,
    /// Requests on a connection that was kept.
    pub reuses: u64,
    /// Connections to workers that are kept, as of the last half second.
    pub idle: u64,
    /// Further attempts.
    pub retries: u64,
}

/// The prefix trees, now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prefix {
    pub bytes: u64,
    /// Bytes that they may have.
    pub budget: u64,
    pub nodes: u64,
    /// Workers noted at nodes.
    pub owners: u64,
}

/// A worker. Its counts are of all since it was registered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStats {
    /// Slot and tenancy, as in `/workers`: names this worker and no later one.
    pub id: String,
    pub url: String,
    pub role: String,
    /// What its probes say.
    pub state: String,
    /// State of its breaker.
    pub breaker: String,
    /// May be given requests.
    pub usable: bool,
    /// Requests that it has now.
    pub in_flight: u64,
    /// Times that it was chosen.
    pub selected: u64,
    /// Its answers by class (see [`Stats::answer_classes`]).
    pub answers: Vec<u64>,
    /// Requests that failed by its fault.
    pub failures: u64,
}

/// Reads the process's shared state.
#[derive(Clone)]
pub struct Gauge {
    shared: &'static Shared,
    bases: Bases,
    began: Instant,
}

impl Gauge {
    /// A gauge that counts its time from now.
    pub fn new(shared: &'static Shared, bases: Bases) -> Self {
        Gauge { shared, bases, began: Instant::now() }
    }

    /// What there is to say now.
    pub fn read(&self) -> Stats {
        let shared = self.shared;
        let serving = shared.drain.phase() == Phase::Serving;
        Stats {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            up_ms: self.began.elapsed().as_millis() as u64,
            ready: serving && shared.readiness.snapshot().ready,
            draining: !serving,
            lanes: self.lanes().iter().enumerate().map(|(at, lane)| self.lane(at, lane)).collect(),
            statuses: self.statuses(),
            faults: happened(What::ALL.iter().map(|w| (w.row().code.to_owned(), self.sum(|lane| lane.faults(*w))))),
            decisions: self.decisions(),
            latency: self.latency(),
            queue: Queue {
                waiting: shared.admission.waiting().into(),
                in_use: shared.admission.in_use().into(),
                permits: shared.admission.permits().into(),
            },
            traffic: self.traffic(),
            prefix: self.prefix(),
            answer_classes: WORKER_STATUSES.map(str::to_owned).into(),
            workers: shared.roster.snapshot().workers.iter().map(|w| self.worker(w)).collect(),
        }
    }

    fn lanes(&self) -> &'static [Lane] {
        self.shared.tallies.lanes()
    }

    fn sum(&self, of: impl Fn(&Lane) -> u64) -> u64 {
        self.lanes().iter().map(of).fold(0, u64::wrapping_add)
    }

    fn lane(&self, at: usize, lane: &Lane) -> LaneStats {
        let by_status = |route| (0..STATUSES.len()).map(move |status| lane.requests(route, status)).sum::<u64>();
        LaneStats {
            cpu_us: lane.cpu_us.get(),
            spun_us: lane.spun_us.get(),
            connections: self.shared.handover.connections(at).into(),
            requests: (0..=ROUTES.len()).map(by_status).sum(),
            tasks: lane.tasks.get(),
        }
    }

    fn statuses(&self) -> BTreeMap<String, u64> {
        let all_routes = |lane: &Lane, status| (0..=ROUTES.len()).map(|route| lane.requests(route, status)).sum();
        happened(STATUSES.iter().enumerate().map(|(at, s)| (status_label(*s), self.sum(|lane| all_routes(lane, at)))))
    }

    fn decisions(&self) -> BTreeMap<String, u64> {
        let all = [
            Tally::DecisionHit,
            Tally::DecisionSpill,
            Tally::DecisionMiss,
            Tally::DecisionShort,
            Tally::DecisionImbalanced,
        ];
        let reason = |tally: Tally| tally.labels().map(|(_, value)| value.to_owned()).collect();
        all.iter().map(|&tally| (reason(tally), self.sum(|lane| lane.get(tally)))).collect()
    }

    fn latency(&self) -> Latency {
        let bounds = Scale::Latency.bounds();
        let of = |time| {
            let routes = |lane: &'static Lane| (0..=ROUTES.len()).map(move |route| lane.times(route, time));
            let all: Observed = self.lanes().iter().flat_map(routes).sum();
            all.counts()[..=bounds.len()].to_vec()
        };
        Latency {
            bounds_us: bounds.to_vec(),
            total: of(Time::Total),
            first_byte: of(Time::FirstByte),
            first_token: of(Time::FirstToken),
            event_gap: of(Time::Gap),
            queue: of(Time::Queue),
        }
    }

    fn traffic(&self) -> Traffic {
        let of = |tally| self.sum(|lane| lane.get(tally));
        Traffic {
            bytes_in: of(Tally::ClientBytesIn),
            bytes_out: of(Tally::ClientBytesOut),
            copied: of(Tally::RelayCopied),
            spliced: of(Tally::RelaySpliced),
            connects: of(Tally::Connects),
            reuses: of(Tally::Reuses),
            idle: self.sum(|lane| lane.pool_idle.get()),
            retries: of(Tally::Retries),
        }
    }

    fn prefix(&self) -> Prefix {
        let counts = self.shared.prefix.counts();
        Prefix { bytes: counts.bytes, budget: self.shared.prefix.budget(), nodes: counts.nodes, owners: counts.owners }
    }

    fn worker(&self, worker: &Worker) -> WorkerStats {
        let (shared, slot) = (self.shared, worker.slot);
        let vital = shared.vitals.vital(slot);
        WorkerStats {
            id: format!("{slot}-{}", worker.era),
            url: worker.url.to_string(),
            role: worker.role.name().to_owned(),
            state: vital.health().name().to_owned(),
            breaker: vital.state().name().to_owned(),
            usable: usable(shared, worker),
            in_flight: shared.load.word(slot).in_flight().into(),
            selected: self.bases.selected(shared, slot),
            answers: self.bases.responses(shared, slot).into(),
            failures: shared.vitals.failed(slot),
        }
    }
}

/// Counts without those that are 0.
fn happened(all: impl Iterator<Item = (String, u64)>) -> BTreeMap<String, u64> {
    all.filter(|(_, n)| *n > 0).collect()
}
