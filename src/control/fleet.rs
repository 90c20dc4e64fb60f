//! The workers that the process knows: the only writer of the roster.
//!
//! Takes workers and news about them, gives lanes snapshots, seeds and health. Never publishes more than once
//! for a batch of news; never lets a worker in before the snapshot that describes it is out; never gives a
//! slot's old count to its new tenant.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tokio::task::AbortHandle;

use super::resolve::Endpoint;
use crate::config::{WorkerSpec, Wrong};
use crate::limits::MAX_WORKERS;
use crate::metrics::{WORKER_STATUSES, worker_status_index};
use crate::shared::Shared;
use crate::shared::roster::{Slot, Slots, Worker};
use crate::shared::vitals::Health;

/// What each slot's counters said when its present tenant moved in: what the tenant's own counts start from.
/// Read by scrapes, written at registration; atomics because the admin listener's handlers must be `Send`.
#[derive(Clone, Debug)]
pub struct Bases(Arc<[Base]>);

#[derive(Debug, Default)]
struct Base {
    selected: AtomicU64,
    responses: [AtomicU64; WORKER_STATUSES.len()],
}

impl Bases {
    fn new() -> Self {
        Bases((0..MAX_WORKERS).map(|_| Base::default()).collect())
    }

    /// Times the slot's present tenant was chosen, summed over all lanes.
    pub fn selected(&self, shared: &Shared, slot: Slot) -> u64 {
        // Relaxed: one thread writes and reads it.
        selections(shared, slot).saturating_sub(self.0[slot as usize].selected.load(Ordering::Relaxed))
    }

    /// Answers of the slot's present tenant by class of status, summed over all lanes.
    pub fn responses(&self, shared: &Shared, slot: Slot) -> [u64; WORKER_STATUSES.len()] {
        let (now, base) = (responses(shared, slot), &self.0[slot as usize].responses);
        // Relaxed: one thread writes and reads it.
        std::array::from_fn(|class| now[class].saturating_sub(base[class].load(Ordering::Relaxed)))
    }

    /// A new tenant moves in.
    fn begin(&self, shared: &Shared, slot: Slot) {
        let base = &self.0[slot as usize];
        // Relaxed: see `selected`.
        base.selected.store(selections(shared, slot), Ordering::Relaxed);
        for (cell, n) in base.responses.iter().zip(responses(shared, slot)) {
            cell.store(n, Ordering::Relaxed);
        }
    }
}

fn selections(shared: &Shared, slot: Slot) -> u64 {
    shared.tallies.lanes().iter().map(|lane| lane.selections(slot)).sum()
}

fn responses(shared: &Shared, slot: Slot) -> [u64; WORKER_STATUSES.len()] {
    shared.tallies.lanes().iter().fold([0; WORKER_STATUSES.len()], |sum, lane| {
        let of_lane = lane.worker_responses(slot);
        std::array::from_fn(|class| sum[class] + of_lane[class])
    })
}

/// What operators are told of a worker beyond its health.
#[derive(Clone, Debug, Default)]
pub struct Note {
    /// Why its health flipped last; `None` before the first flip.
    pub reason: Option<Box<str>>,
    /// When its newest probe ended.
    pub probed: Option<Instant>,
}

/// Notes by slot: written by the fleet, read by the admin listener.
#[derive(Clone, Debug, Default)]
pub struct Notes(Arc<Mutex<Vec<Note>>>);

impl Notes {
    /// The note of a slot's present tenant.
    pub fn of(&self, slot: Slot) -> Note {
        self.change(slot, |note| note.clone())
    }

    fn change<T>(&self, slot: Slot, change: impl FnOnce(&mut Note) -> T) -> T {
        let mut notes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if notes.len() <= slot as usize {
            notes.resize_with(slot as usize + 1, Note::default);
        }
        change(&mut notes[slot as usize])
    }
}

/// Requests that were answered well by the slot's workers, all tenants together.
pub fn successes(shared: &Shared, slot: Slot) -> u64 {
    responses(shared, slot)[worker_status_index(200)]
}

/// Which worker: its slot and the slot's tenancy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Id {
    pub slot: Slot,
    pub era: u32,
}

/// What a worker's task found out.
#[derive(Debug)]
pub enum News {
    /// Its name resolves to these.
    Addrs(Box<[SocketAddr]>),
    /// A probe has ended.
    Probed,
    /// Its health flipped, and why.
    Health(Health, String),
    /// It serves these models.
    Models(Box<[Box<str>]>),
    /// What it says of itself, filtered.
    ServerInfo(Option<Box<str>>),
}

/// Why a worker was not registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The URL cannot be used.
    BadUrl(Wrong),
    /// The same URL already has this role.
    Known,
    /// No free slot; some may become free when their last requests have ended.
    Full,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refusal::BadUrl(why) => write!(f, "{why}"),
            Refusal::Known => f.write_str("the worker is already known"),
            Refusal::Full => write!(f, "no slot is free ({MAX_WORKERS} in all)"),
        }
    }
}

/// Seconds in which all sticky keys are looked at once.
const FORGET_PARTS: usize = 64;

struct Member {
    worker: Arc<Worker>,
    probed: bool,
    task: Option<AbortHandle>,
}

/// All workers, in slot order, and what has yet to be told to the lanes.
pub struct Fleet {
    shared: &'static Shared,
    bases: Bases,
    notes: Notes,
    members: Vec<Member>,
    slots: Slots,
    /// The roster no longer says what `members` says.
    stale: bool,
    /// Changes of health that wait for the next publication.
    flips: Vec<(Id, Health, String)>,
    /// Slots whose workers were removed since the last publication.
    leavers: Vec<Slot>,
    /// The start has waited long enough for first probes.
    waited: bool,
}

impl Fleet {
    /// No workers yet.
    pub fn new(shared: &'static Shared) -> Self {
        Fleet {
            shared,
            bases: Bases::new(),
            notes: Notes::default(),
            members: Vec::new(),
            slots: Slots::new(),
            stale: false,
            flips: Vec::new(),
            leavers: Vec::new(),
            waited: false,
        }
    }

    /// The counts' starting points, for whoever exposes them.
    pub fn bases(&self) -> Bases {
        self.bases.clone()
    }

    /// What is noted of the workers, for whoever lists them.
    pub fn notes(&self) -> Notes {
        self.notes.clone()
    }

    /// Takes a worker in, pending and without addresses; lanes learn of it with the next [`settle`](Self::settle).
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn register(&mut self, spec: &WorkerSpec) -> Result<Id, Refusal> {
        let endpoint = Endpoint::parse(&spec.url).map_err(Refusal::BadUrl)?;
        if self.members.iter().any(|m| *m.worker.url == *spec.url && m.worker.role == spec.role) {
            return Err(Refusal::Known);
        }
        let (slot, era) = self.slots.take(self.shared).ok_or(Refusal::Full)?;
        let id = Id { slot, era };
        self.bases.begin(self.shared, id.slot);
        self.notes.change(id.slot, |note| *note = Note::default());
        self.shared.vitals.set_health(id.slot, Health::Pending);
        let worker = Worker {
            slot: id.slot,
            era: id.era,
            role: spec.role,
            url: spec.url.as_str().into(),
            addrs: endpoint.literal().into_iter().collect(),
            prefix: endpoint.prefix,
            api_key: spec.api_key.as_deref().map(Into::into),
            models: spec.models.iter().map(|m| m.as_str().into()).collect(),
            server_info: None,
        };
        let place = self.members.partition_point(|m| m.worker.slot < id.slot);
        self.members.insert(place, Member { worker: Arc::new(worker), probed: false, task: None });
        self.stale = true;
        Ok(id)
    }

    /// Ties a worker's task to its membership: it ends when the worker is removed.
    pub fn assign(&mut self, id: Id, task: AbortHandle) {
        match self.member(id) {
            Some(member) => member.task = Some(task),
            None => task.abort(),
        }
    }

    /// Removes a worker and ends its task; requests that it has are finished by whoever holds their guards.
    pub fn remove(&mut self, id: Id) -> bool {
        let Some(place) = self.place(id) else { return false };
        let member = self.members.remove(place);
        if let Some(task) = member.task {
            task.abort();
        }
        tracing::info!(worker = %member.worker.url, role = member.worker.role.name(), "worker removed");
        self.shared.vitals.set_health(id.slot, Health::Draining);
        self.shared.prefix.purge(id.slot, id.era);
        self.leavers.push(id.slot);
        self.stale = true;
        true
    }

    /// Takes in one piece of news; what lanes should see of it waits for [`settle`](Self::settle). News about
    /// workers that are gone is dropped.
    pub fn apply(&mut self, id: Id, news: News) {
        let shared = self.shared;
        let Some(member) = self.member(id) else { return };
        match news {
            News::Probed => {
                member.probed = true;
                self.notes.change(id.slot, |note| note.probed = Some(Instant::now()));
            }
            News::Health(health, reason) => self.flips.push((id, health, reason)),
            News::Addrs(addrs) => {
                Arc::make_mut(&mut member.worker).addrs = addrs;
                self.stale = true;
            }
            News::Models(models) if member.worker.models == models => {}
            News::Models(models) => {
                let (worker, names) = (&member.worker.url, models.join(", "));
                // A worker that is about to come in is logged once, with its models.
                match shared.vitals.health(id.slot) {
                    Health::Pending => tracing::debug!(%worker, models = names, "models of the worker are known"),
                    _ => tracing::info!(%worker, models = names, "models of the worker are known"),
                }
                Arc::make_mut(&mut member.worker).models = models;
                self.stale = true;
            }
            News::ServerInfo(info) if member.worker.server_info == info => {}
            News::ServerInfo(info) => {
                Arc::make_mut(&mut member.worker).server_info = info;
                self.stale = true;
            }
        }
    }

    /// Tells lanes what has changed: one snapshot, then the flips, then the counts of readiness.
    pub fn settle(&mut self) {
        if std::mem::take(&mut self.stale) {
            let workers = self.members.iter().map(|m| m.worker.clone()).collect();
            let generation = self.shared.roster.publish(workers);
            super::prefix::release(self.shared, &self.shared.roster.snapshot());
            for slot in std::mem::take(&mut self.leavers) {
                self.slots.retire(slot, generation);
            }
            for lane in 0..self.shared.tallies.lanes().len() {
                self.shared.handover.ring(lane);
            }
        }
        for (id, health, reason) in std::mem::take(&mut self.flips) {
            self.flip(id, health, &reason);
        }
        self.recount();
    }

    /// Says that the start has waited long enough for first probes.
    pub fn stop_waiting(&mut self) {
        self.waited = true;
        self.recount();
    }

    /// What is done every second: pauses of failing workers run, sticky keys of workers that are gone or that were not
    /// used for `idle_s` are forgotten, a share of them at a time.
    pub fn second(&self, now_s: u64, idle_s: u32) {
        for member in &self.members {
            self.shared.vitals.second(member.worker.slot);
        }
        let gone = |(slot, era), used_s: u32| {
            self.place(Id { slot, era }).is_none() || now_s.saturating_sub(used_s.into()) > idle_s.into()
        };
        self.shared.sticky.forget(now_s as usize, FORGET_PARTS, gone);
        self.recount();
    }

    /// Counts anew what readiness shows; health also changes without this thread's doing.
    pub fn recount(&self) {
        let probed = self.members.iter().filter(|m| m.probed).count();
        let usable = self.members.iter().filter(|m| usable(self.shared, &m.worker)).count();
        self.shared.readiness.set(self.members.len(), probed, usable, self.waited);
    }

    fn place(&self, id: Id) -> Option<usize> {
        let place = self.members.binary_search_by_key(&id.slot, |m| m.worker.slot).ok()?;
        (self.members[place].worker.era == id.era).then_some(place)
    }

    fn member(&mut self, id: Id) -> Option<&mut Member> {
        self.place(id).map(|place| &mut self.members[place])
    }

    fn flip(&self, id: Id, health: Health, reason: &str) {
        let Some(place) = self.place(id) else { return };
        let worker = &self.members[place].worker;
        let old = self.shared.vitals.health(id.slot);
        // Draining is somebody's decision; probes do not overrule it.
        if old == health || old == Health::Draining {
            return;
        }
        if health == Health::Ready {
            self.shared.roster.snapshot().welcome(worker, &self.shared.load, &self.shared.vitals);
        }
        self.shared.vitals.set_health(id.slot, health);
        self.notes.change(id.slot, |note| note.reason = Some(reason.into()));
        match health {
            Health::Unhealthy => tracing::warn!(
                worker = %worker.url, role = worker.role.name(), from = old.name(), to = health.name(), reason,
                "worker is out"
            ),
            _ => tracing::info!(
                worker = %worker.url, role = worker.role.name(), from = old.name(), to = health.name(), reason,
                models = worker.models.join(", "), "worker is in"
            ),
        }
    }
}

/// Whether lanes may give the worker requests.
pub fn usable(shared: &Shared, worker: &Worker) -> bool {
    !worker.addrs.is_empty() && shared.vitals.usable(worker.slot)
}
