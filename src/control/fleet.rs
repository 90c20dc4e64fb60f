//! The workers that the process knows: the only writer of the roster.
//!
//! Takes workers and news about them, gives lanes snapshots, seeds and health. Never publishes more than once
//! for a batch of news; never lets a worker in before the snapshot that describes it is out; never gives a
//! slot's old count to its new tenant.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::task::AbortHandle;

use super::resolve::Endpoint;
use crate::config::WorkerSpec;
use crate::limits::MAX_WORKERS;
use crate::shared::Shared;

use crate::shared::roster::{Slot, Slots, Worker};
use crate::shared::vitals::Health;

/// Selections that each slot had when its present tenant moved in: what the tenant's own count starts from.
/// Read by scrapes, written at registration; atomics because the admin listener's handlers must be `Send`.
#[derive(Clone, Debug)]
pub struct Bases(Arc<[AtomicU64]>);

impl Bases {
    fn new() -> Self {
        Bases((0..MAX_WORKERS).map(|_| AtomicU64::new(0)).collect())
    }

    /// Times the slot's present tenant was chosen, summed over all lanes.
    pub fn selected(&self, shared: &Shared, slot: Slot) -> u64 {
        // Relaxed: one thread writes and reads it.
        selections(shared, slot).saturating_sub(self.0[slot as usize].load(Ordering::Relaxed))
    }
}

fn selections(shared: &Shared, slot: Slot) -> u64 {
    shared.tallies.lanes().iter().map(|lane| lane.selections(slot)).sum()
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The URL cannot be used.
    BadUrl(&'static str),
    /// The same URL already has this role.
    Known,
    /// No free slot; some may become free when their last requests have ended.
    Full,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refusal::BadUrl(why) => f.write_str(why),
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
        // Relaxed: see `Bases::selected`.
        self.bases.0[id.slot as usize].store(selections(self.shared, id.slot), Ordering::Relaxed);
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
        let Some(member) = self.member(id) else { return };
        match news {
            News::Probed => member.probed = true,
            News::Health(health, reason) => self.flips.push((id, health, reason)),
            News::Addrs(addrs) => {
                Arc::make_mut(&mut member.worker).addrs = addrs;
                self.stale = true;
            }
            News::Models(models) if member.worker.models == models => {}
            News::Models(models) => {
                tracing::info!(worker = %member.worker.url, models = ?models, "models of the worker are known");
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
        match health {
            Health::Unhealthy => tracing::warn!(
                worker = %worker.url, role = worker.role.name(), from = old.name(), to = health.name(), reason,
                "worker is out"
            ),
            _ => tracing::info!(
                worker = %worker.url, role = worker.role.name(), from = old.name(), to = health.name(), reason,
                "worker is in"
            ),
        }
    }
}

/// Whether lanes may give the worker requests.
pub fn usable(shared: &Shared, worker: &Worker) -> bool {
    !worker.addrs.is_empty() && shared.vitals.usable(worker.slot)
}
