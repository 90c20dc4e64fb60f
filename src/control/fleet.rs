//! The workers that the process knows: the only writer of the roster.
//!
//! Takes workers, what is to become of them, and news about them; gives lanes snapshots, seeds and health. Never
//! publishes more than once for a batch of news; never lets a worker in before the snapshot that describes it is out;
//! never gives a slot's old count to its new tenant.

mod drain;
mod list;
mod update;

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::bootstrap::EngineIds;
use super::resolve::{Endpoint, same_addrs};
use super::window::{Outcomes, Windows};
use crate::config::{Backend, Role, WorkerSpec, Wrong};
use crate::limits::{MAX_MODEL_LABELS, MAX_WORKERS};
use crate::metrics::{TIMES, Time, WORKER_STATUSES, worker_status_index};
use crate::shared::Shared;
use crate::shared::readiness::{Standing, TeamStanding};
use crate::shared::roster::{DpRank, Pairing, Slot, Slots, Snapshot, Team, Worker};
use crate::shared::tallies::{HISTOGRAM_CELLS, Observed};
use crate::shared::vitals::{Health, State, Vital, Vitals};
pub use drain::After;
use drain::Draining;
pub use list::{Leaving, Listed, Rank};
pub use update::Change;

/// What each slot's counters said when its present tenant moved in: what the tenant's own counts start from.
/// Read by scrapes, written at registration; atomics because the admin listener's handlers must be `Send`.
#[derive(Clone, Debug)]
pub struct Bases {
    slots: Arc<[Base]>,
    /// The same by place of a model's label.
    models: Arc<[ModelBase]>,
}

#[derive(Debug, Default)]
struct Base {
    selected: AtomicU64,
    waited_us: AtomicU64,
    responses: [AtomicU64; WORKER_STATUSES.len()],
}

#[derive(Debug, Default)]
struct ModelBase {
    requests: [AtomicU64; WORKER_STATUSES.len()],
    times: [[AtomicU64; HISTOGRAM_CELLS]; TIMES],
}

impl Bases {
    fn new() -> Self {
        Bases {
            slots: (0..MAX_WORKERS).map(|_| Base::default()).collect(),
            models: (0..=MAX_MODEL_LABELS).map(|_| ModelBase::default()).collect(),
        }
    }

    /// Times the slot's present tenant was chosen, summed over all lanes.
    pub fn selected(&self, shared: &Shared, slot: Slot) -> u64 {
        // Relaxed: one thread writes and reads it.
        selections(shared, slot).saturating_sub(self.slots[slot as usize].selected.load(Ordering::Relaxed))
    }

    /// Microseconds that requests waited for first bytes of the slot's present tenant, summed over all lanes.
    pub fn waited_us(&self, shared: &Shared, slot: Slot) -> u64 {
        // Relaxed: see `selected`.
        waits_us(shared, slot).saturating_sub(self.slots[slot as usize].waited_us.load(Ordering::Relaxed))
    }

    /// Requests of the model that has a label's place, by class of status, summed over all lanes.
    pub fn model_requests(&self, shared: &Shared, place: usize) -> [u64; WORKER_STATUSES.len()] {
        let (now, base) = (model_requests(shared, place), &self.models[place].requests);
        // Relaxed: see `selected`.
        std::array::from_fn(|class| now[class].saturating_sub(base[class].load(Ordering::Relaxed)))
    }

    /// What they took, summed over all lanes.
    pub fn model_times(&self, shared: &Shared, place: usize, time: Time) -> Observed {
        let base = &self.models[place].times[time as usize];
        // Relaxed: see `selected`.
        model_times(shared, place, time).since(&base.each_ref().map(|cell| cell.load(Ordering::Relaxed)))
    }

    /// A model moves in at a label's place.
    fn begin_model(&self, shared: &Shared, place: usize) {
        let base = &self.models[place];
        // Relaxed: see `selected`.
        for (cell, n) in base.requests.iter().zip(model_requests(shared, place)) {
            cell.store(n, Ordering::Relaxed);
        }
        for (cells, time) in base.times.iter().zip(Time::ALL) {
            for (cell, n) in cells.iter().zip(model_times(shared, place, time).cells()) {
                cell.store(*n, Ordering::Relaxed);
            }
        }
    }

    /// Answers of the slot's present tenant by class of status, summed over all lanes.
    pub fn responses(&self, shared: &Shared, slot: Slot) -> [u64; WORKER_STATUSES.len()] {
        let (now, base) = (responses(shared, slot), &self.slots[slot as usize].responses);
        // Relaxed: one thread writes and reads it.
        std::array::from_fn(|class| now[class].saturating_sub(base[class].load(Ordering::Relaxed)))
    }

    /// A new tenant moves in.
    fn begin(&self, shared: &Shared, slot: Slot) {
        let base = &self.slots[slot as usize];
        // Relaxed: see `selected`.
        base.selected.store(selections(shared, slot), Ordering::Relaxed);
        base.waited_us.store(waits_us(shared, slot), Ordering::Relaxed);
        for (cell, n) in base.responses.iter().zip(responses(shared, slot)) {
            cell.store(n, Ordering::Relaxed);
        }
    }
}

fn selections(shared: &Shared, slot: Slot) -> u64 {
    shared.tallies.lanes().iter().map(|lane| lane.selections(slot)).sum()
}

fn waits_us(shared: &Shared, slot: Slot) -> u64 {
    shared.tallies.lanes().iter().map(|lane| lane.waits_us(slot)).sum()
}

fn model_requests(shared: &Shared, place: usize) -> [u64; WORKER_STATUSES.len()] {
    shared.tallies.lanes().iter().fold([0; WORKER_STATUSES.len()], |sum, lane| {
        let of_lane = lane.model_requests(place);
        std::array::from_fn(|class| sum[class] + of_lane[class])
    })
}

fn model_times(shared: &Shared, place: usize, time: Time) -> Observed {
    shared.tallies.lanes().iter().map(|lane| lane.model_times(place, time)).sum()
}

fn responses(shared: &Shared, slot: Slot) -> [u64; WORKER_STATUSES.len()] {
    shared.tallies.lanes().iter().fold([0; WORKER_STATUSES.len()], |sum, lane| {
        let of_lane = lane.worker_responses(slot);
        std::array::from_fn(|class| sum[class] + of_lane[class])
    })
}

/// What operators are told of a worker beyond its health.
#[derive(Clone, Debug, Default)]
struct Note {
    /// Why its health is what it is: what made it flip, or why it did not; `None` before anything is known.
    reason: Option<Box<str>>,
    /// When its newest probe ended.
    probed: Option<Instant>,
}

/// Requests that were answered well by the slot's workers, all tenants together.
pub fn successes(shared: &Shared, slot: Slot) -> u64 {
    responses(shared, slot)[worker_status_index(200)]
}

/// Which configured worker: slot and tenancy that its first member got when it was registered. Stays the same when its
/// members are replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Id {
    pub slot: Slot,
    pub era: u32,
}

impl std::fmt::Display for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.slot, self.era)
    }
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
    /// Why it is not let in, or not let in again: what its newest probe, or its name, came to.
    Waits(String),
    /// It serves these models.
    Models(Box<[Box<str>]>),
    /// What it says of itself, filtered.
    ServerInfo(Option<Box<str>>),
    /// It has so many data-parallel ranks, each of which is chosen on its own.
    Ranks(u32),
    /// Mooncake's ids of its engine, by rank.
    EngineIds(EngineIds),
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
    /// The same URL is known in another role.
    OtherRole(Role),
    /// Its settings do not go together.
    Wrong(Wrong),
    /// This setting of a worker cannot be changed while it is known.
    Fixed(&'static str),
    /// There is no such worker, or not any more.
    Unknown,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refusal::BadUrl(why) | Refusal::Wrong(why) => write!(f, "{why}"),
            Refusal::OtherRole(role) => {
                write!(f, "the worker is known, or drains still, as {}: one address has one role", role.name())
            }
            Refusal::Known => f.write_str("the worker is already known"),
            Refusal::Full => write!(f, "no slot is free ({MAX_WORKERS} in all)"),
            Refusal::Fixed(what) => write!(f, "{what} of a worker cannot be changed: remove it and add it anew"),
            Refusal::Unknown => f.write_str("there is no such worker"),
        }
    }
}

/// Who has given a worker, and takes it away again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The configuration.
    Config,
    /// The admin listener.
    Admin,
}

impl Source {
    /// Lower-case name, as in the admin API.
    pub const fn name(self) -> &'static str {
        match self {
            Source::Config => "config",
            Source::Admin => "admin",
        }
    }
}

/// Seconds in which all sticky keys are looked at once.
const FORGET_PARTS: usize = 64;

/// A configured worker: one member of the roster, or one for each of its data-parallel ranks.
struct Engine {
    spec: WorkerSpec,
    source: Source,
    /// In rank order.
    members: Vec<Arc<Worker>>,
    /// Number of ranks; `None` while it is being asked for.
    size: Option<u32>,
    engine_ids: EngineIds,
    probed: bool,
    /// What the probes said last, and why.
    verdict: Option<(Health, String)>,
    /// Slots of the members, for the worker's task.
    slots: watch::Sender<Box<[Slot]>>,
    task: Option<AbortHandle>,
    draining: Option<Draining>,
}

impl Engine {
    fn change(&mut self, mut change: impl FnMut(&mut Worker)) {
        for member in &mut self.members {
            change(Arc::make_mut(member));
        }
    }

    /// What has to be learnt before it can be given requests.
    fn lacks(&self) -> Option<&'static str> {
        if self.size.is_none() {
            return Some("its data-parallel size is not known yet");
        }
        let lacks_id = self.members.iter().any(|m| needs_engine_id(&self.spec) && m.pairing.engine_id.is_none());
        lacks_id.then_some("Mooncake's id of its engine is not known yet")
    }
}

/// Whether decode workers have to be told Mooncake's id of this worker's engine.
pub(super) fn needs_engine_id(spec: &WorkerSpec) -> bool {
    spec.role == Role::Prefill && spec.backend == Backend::VllmMooncake
}

/// All workers, in the order of their first slots, and what has yet to be told to the lanes.
pub struct Fleet {
    shared: &'static Shared,
    /// Engines are asked for their data-parallel size where it is not configured.
    dp_aware: bool,
    bases: Bases,
    /// By slot.
    notes: Box<[Note]>,
    engines: BTreeMap<Id, Engine>,
    /// Workers by URL and role.
    names: HashMap<(String, Role), Id>,
    /// Those that drain.
    drains: Vec<Id>,
    slots: Slots,
    /// The roster no longer says what `engines` says.
    stale: bool,
    /// Workers whose verdict may have to be carried out after the next publication.
    judged: Vec<Id>,
    /// Slots whose workers were removed since the last publication.
    leavers: Vec<Slot>,
    /// The start has waited long enough for first probes.
    waited: bool,
    /// How the requests of each slot's tenant ended of late.
    windows: Windows,
    /// Where each slot's breaker stood when that was last told.
    told: Vec<State>,
}

impl Fleet {
    /// No workers yet, and none is asked for its data-parallel size.
    pub fn new(shared: &'static Shared) -> Self {
        Fleet {
            shared,
            dp_aware: false,
            bases: Bases::new(),
            notes: vec![Note::default(); MAX_WORKERS].into(),
            engines: BTreeMap::new(),
            names: HashMap::new(),
            drains: Vec::new(),
            slots: Slots::new(),
            stale: false,
            judged: Vec::new(),
            leavers: Vec::new(),
            waited: false,
            windows: Windows::new(shared.vitals.rules().window_s),
            told: vec![State::Closed; MAX_WORKERS],
        }
    }

    /// Workers that are registered from now on wait for [`News::Ranks`] where no size is configured.
    pub fn dp_aware(mut self, on: bool) -> Self {
        self.dp_aware = on;
        self
    }

    /// The counts' starting points, for whoever exposes them.
    pub fn bases(&self) -> Bases {
        self.bases.clone()
    }

    /// Takes a worker of the configuration in, see [`register_from`](Self::register_from).
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn register(&mut self, spec: &WorkerSpec) -> Result<Id, Refusal> {
        self.register_from(Source::Config, spec)
    }

    /// Takes a worker in, pending and without addresses; lanes learn of it with the next [`settle`](Self::settle).
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn register_from(&mut self, source: Source, spec: &WorkerSpec) -> Result<Id, Refusal> {
        let endpoint = Endpoint::parse(&spec.url).map_err(Refusal::BadUrl)?;
        let name = (spec.url.clone(), spec.role);
        if self.names.contains_key(&name) {
            return Err(Refusal::Known);
        }
        let size = spec.dp_size.or((!self.dp_aware).then_some(1));
        let places = self.take(size.unwrap_or(1)).ok_or(Refusal::Full)?;
        let (slot, era) = places[0];
        let id = Id { slot, era };
        let whole = Worker {
            slot,
            era,
            role: spec.role,
            url: spec.url.as_str().into(),
            addrs: endpoint.literal().into_iter().collect(),
            api_key: spec.api_key.as_deref().map(Into::into),
            models: spec.models.iter().map(|m| m.as_str().into()).collect(),
            server_info: None,
            pairing: Pairing {
                backend: spec.backend,
                group: spec.group.as_str().into(),
                bootstrap_host: endpoint.bracketed().into(),
                bootstrap_port: spec.bootstrap_port,
                engine_id: None,
                dp: None,
            },
            prefix: endpoint.prefix,
        };
        let members = ranks(spec, &whole, &places);
        let engine = Engine {
            slots: watch::Sender::new(members.iter().map(|m| m.slot).collect()),
            spec: spec.clone(),
            source,
            members,
            size,
            engine_ids: EngineIds::default(),
            probed: false,
            verdict: None,
            task: None,
            draining: None,
        };
        self.engines.insert(id, engine);
        self.names.insert(name, id);
        self.stale = true;
        Ok(id)
    }

    /// Slots and eras for so many new members; `None`, and nothing taken, if there are not so many.
    fn take(&mut self, count: u32) -> Option<Vec<(Slot, u32)>> {
        let mut taken = Vec::new();
        while taken.len() < count as usize {
            match self.slots.take(self.shared) {
                Some(place) => taken.push(place),
                None => {
                    self.leavers.extend(taken.iter().map(|&(slot, _)| slot));
                    self.stale = true;
                    return None;
                }
            }
        }
        for &(slot, _) in &taken {
            self.bases.begin(self.shared, slot);
            self.windows.restart(slot, outcomes(self.shared, slot));
            self.told[slot as usize] = State::Closed;
            self.notes[slot as usize] = Note::default();
        }
        Some(taken)
    }

    /// Gives up the slots of members that leave.
    fn leave(&mut self, members: &[Arc<Worker>]) {
        for member in members {
            self.shared.vitals.set_health(member.slot, Health::Draining);
            self.shared.prefix.purge(member.slot, member.era);
            self.leavers.push(member.slot);
        }
        self.stale = true;
    }

    /// Slots of a worker's members as they change, for its task.
    pub fn members(&self, id: Id) -> Option<watch::Receiver<Box<[Slot]>>> {
        self.engines.get(&id).map(|engine| engine.slots.subscribe())
    }

    /// Ties a worker's task to its membership: it ends when the worker is removed, or gets another task.
    pub fn assign(&mut self, id: Id, task: AbortHandle) {
        let old = match self.engines.get_mut(&id) {
            Some(engine) => engine.task.replace(task),
            None => Some(task),
        };
        if let Some(old) = old {
            old.abort();
        }
    }

    /// What a worker was registered as, with what was changed since.
    pub fn spec(&self, id: Id) -> Option<&WorkerSpec> {
        self.engines.get(&id).map(|engine| &engine.spec)
    }

    /// The addresses that it has; `None` while there are none.
    pub fn addrs(&self, id: Id) -> Option<Arc<[SocketAddr]>> {
        let known = &self.engines.get(&id)?.members[0].addrs;
        (!known.is_empty()).then(|| known.iter().copied().collect())
    }

    /// What its probes have come to so far.
    pub fn verdict(&self, id: Id) -> Health {
        let verdict = self.engines.get(&id).and_then(|engine| engine.verdict.as_ref());
        verdict.map_or(Health::Pending, |(health, _)| *health)
    }

    /// Workers, those that drain among them.
    pub fn len(&self) -> usize {
        self.engines.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.engines.is_empty()
    }

    /// The worker of a URL, in its canonical spelling, and a role.
    pub fn named(&self, url: &str, role: Role) -> Option<Id> {
        self.names.get(&(url.to_owned(), role)).copied()
    }

    /// Removes a worker with all its ranks at once and ends its task; requests that it has are finished by whoever holds
    /// their guards. Whether there was one.
    pub fn remove(&mut self, id: Id) -> bool {
        let Some(engine) = self.engines.remove(&id) else { return false };
        self.names.remove(&(engine.spec.url.clone(), engine.spec.role));
        self.drains.retain(|known| *known != id);
        if let Some(task) = engine.task {
            task.abort();
        }
        tracing::info!(worker = %engine.spec.url, role = engine.spec.role.name(), "worker removed");
        self.leave(&engine.members);
        true
    }

    /// Takes in one piece of news; what lanes should see of it waits for [`settle`](Self::settle). News about
    /// workers that are gone is dropped.
    pub fn apply(&mut self, id: Id, news: News) {
        let shared = self.shared;
        let Some(engine) = self.engines.get_mut(&id) else { return };
        let first = &engine.members[0];
        match news {
            News::Probed => {
                engine.probed = true;
                for member in &engine.members {
                    self.notes[member.slot as usize].probed = Some(Instant::now());
                }
            }
            News::Health(health, reason) => {
                if health == Health::Unhealthy && !engine.engine_ids.is_empty() {
                    // It may come back as another engine: its id is asked for anew before it is let in.
                    self.identify(id, EngineIds::default());
                }
                if let Some(engine) = self.engines.get_mut(&id) {
                    engine.verdict = Some((health, reason));
                    self.judged.push(id);
                }
            }
            News::Waits(why) => {
                let waits = |slot| !matches!(shared.vitals.health(slot), Health::Ready | Health::Draining);
                for member in engine.members.iter().filter(|member| waits(member.slot)) {
                    self.notes[member.slot as usize].reason = Some(why.as_str().into());
                }
            }
            News::Addrs(addrs) if same_addrs(&first.addrs, &addrs) => {}
            News::Addrs(addrs) => {
                engine.change(|worker| worker.addrs = addrs.clone());
                self.stale = true;
            }
            News::Models(models) if first.models == models => {}
            News::Models(models) => {
                let (worker, names) = (&engine.spec.url, models.join(", "));
                // A worker that is about to come in is logged once, with its models.
                match shared.vitals.health(first.slot) {
                    Health::Pending => tracing::debug!(%worker, models = names, "models of the worker are known"),
                    _ => tracing::info!(%worker, models = names, "models of the worker are known"),
                }
                engine.change(|worker| worker.models = models.clone());
                self.stale = true;
            }
            News::ServerInfo(info) if first.server_info == info => {}
            News::ServerInfo(info) => {
                engine.change(|worker| worker.server_info = info.clone());
                self.stale = true;
            }
            News::Ranks(size) if engine.size == Some(size) => {}
            News::Ranks(size) => self.resize(id, size),
            News::EngineIds(ids) if engine.engine_ids == ids => {}
            News::EngineIds(ids) => self.identify(id, ids),
        }
    }

    /// Gives a worker as many members as its engine has ranks. The one that waited for the size becomes the first; a
    /// later change means another engine, so all are replaced.
    fn resize(&mut self, id: Id, size: u32) {
        let Some(engine) = self.engines.get(&id) else { return };
        let kept = u32::from(engine.size.is_none());
        let (url, was) = (engine.spec.url.clone(), engine.size);
        let Some(fresh) = self.take(size.max(1) - kept) else {
            tracing::error!(worker = %url, dp_size = size, "no slots for the worker's ranks ({MAX_WORKERS} in all)");
            return;
        };
        let Some(engine) = self.engines.get_mut(&id) else { return };
        let old = std::mem::take(&mut engine.members);
        let (kept, left) = old.split_at(kept as usize);
        let places: Vec<(Slot, u32)> = kept.iter().map(|m| (m.slot, m.era)).chain(fresh).collect();
        engine.members = ranks(&engine.spec, &old[0], &places);
        engine.size = Some(size);
        for member in &mut engine.members {
            let member = Arc::make_mut(member);
            member.pairing.engine_id = id_of(&engine.engine_ids, member.pairing.dp);
            if engine.draining.is_some() {
                self.shared.vitals.set_health(member.slot, Health::Draining);
            }
        }
        engine.slots.send_replace(engine.members.iter().map(|m| m.slot).collect());
        match was {
            None => tracing::info!(worker = %url, dp_size = size, "data-parallel size of the worker is known"),
            Some(was) => {
                tracing::warn!(worker = %url, dp_size = size, was, "data-parallel size of the worker has changed")
            }
        }
        self.leave(left);
        self.judged.push(id);
    }

    /// Notes Mooncake's ids of an engine.
    fn identify(&mut self, id: Id, ids: EngineIds) {
        let Some(engine) = self.engines.get_mut(&id) else { return };
        engine.change(|worker| worker.pairing.engine_id = id_of(&ids, worker.pairing.dp));
        engine.engine_ids = ids;
        self.stale = true;
        self.judged.push(id);
    }

    /// Tells lanes what has changed: one snapshot, then the flips, then what readiness goes by.
    pub fn settle(&mut self) {
        if std::mem::take(&mut self.stale) {
            let workers = self.workers().cloned().collect();
            let begin = |place| self.bases.begin_model(self.shared, usize::from(place));
            let generation = self.shared.roster.publish_with(workers, begin);
            super::prefix::release(self.shared, &self.shared.roster.snapshot());
            self.shared.keep_half();
            for slot in std::mem::take(&mut self.leavers) {
                self.slots.retire(slot, generation);
            }
            self.drains_published(generation);
            for lane in 0..self.shared.tallies.lanes().len() {
                self.shared.handover.ring(lane);
            }
        }
        for id in std::mem::take(&mut self.judged) {
            self.carry_out(id);
        }
        self.recount();
    }

    /// The roster is to be published although nothing of it has changed.
    pub fn publish_anew(&mut self) {
        self.stale = true;
    }

    /// Ids of all workers.
    pub fn ids(&self) -> Vec<Id> {
        self.engines.keys().copied().collect()
    }

    /// The breakers have other rules: windows begin anew, and where no breaker may open any more, none stays open.
    pub fn judge_breakers_anew(&mut self) {
        let rules = self.shared.vitals.rules();
        self.windows = Windows::new(rules.window_s);
        for slot in self.engines.values().flat_map(|engine| &engine.members).map(|member| member.slot) {
            self.windows.restart(slot, outcomes(self.shared, slot));
        }
        if !rules.on {
            self.shared.close_breakers();
        }
    }

    /// Says that the start has waited long enough for first probes.
    pub fn stop_waiting(&mut self) {
        self.waited = true;
        self.recount();
    }

    /// What is done every second: breakers and pauses of failing workers run, leads in work fade, sticky keys of
    /// workers that are gone or that were not used for `idle_s` are forgotten, a share of them at a time.
    pub fn second(&mut self, now_s: u64, idle_s: u32) {
        self.run_breakers();
        let snapshot = self.shared.roster.snapshot();
        snapshot.fade(&self.shared.load, &self.shared.vitals);
        let gone = |(slot, era), used_s: u32| {
            snapshot.worker(slot, era).is_none() || now_s.saturating_sub(used_s.into()) > idle_s.into()
        };
        self.shared.sticky.forget(now_s as usize, FORGET_PARTS, gone);
        self.recount();
    }

    /// A second of every breaker: those that are open count down, those with a bad window would open, those that would
    /// and may do.
    fn run_breakers(&mut self) {
        let shared = self.shared;
        let due = self.windows.second();
        for member in self.engines.values().flat_map(|engine| &engine.members) {
            let (slot, vital) = (member.slot, shared.vitals.vital(member.slot));
            if vital.state() == State::Open && vital.open_left_s() == 1 {
                // It has done no work meanwhile, and would win every tie.
                shared.roster.snapshot().welcome(member, &shared.load, &shared.vitals);
            }
            shared.vitals.second(slot);
            if vital.is_out() {
                // What opened it is judged; when it closes it begins anew.
                self.windows.restart(slot, outcomes(shared, slot));
            } else if (due || self.windows.has_failures(slot, shared.vitals.failed(slot)))
                && self.windows.look(slot, outcomes(shared, slot), due)
            {
                shared.vitals.bad_window(slot);
            }
            if shared.vitals.vital(slot).state() == State::Held {
                shared.try_open(slot);
            }
            tell(member, &mut self.told[slot as usize], shared.vitals.vital(slot));
        }
    }

    /// Works out anew what readiness goes by; health also changes without this thread's doing.
    pub fn recount(&self) {
        let mut standing = Standing { waited: self.waited, ..Standing::default() };
        let mut teams: BTreeMap<(Role, Team), TeamStanding> = BTreeMap::new();
        for engine in self.engines.values() {
            for member in &engine.members {
                let usable = usize::from(usable(self.shared, member));
                standing.configured += 1;
                standing.probed += usize::from(engine.probed);
                standing.usable += usable;
                if member.role != Role::Regular {
                    let (backend, group) = member.pairing.team();
                    let team = teams.entry((member.role, (backend, group))).or_insert_with(|| TeamStanding {
                        role: member.role,
                        group: group.into(),
                        backend,
                        configured: 0,
                        usable: 0,
                        dp_ranks: 0,
                    });
                    team.configured += 1;
                    team.usable += usable;
                    team.dp_ranks += usize::from(member.pairing.dp.is_some());
                }
            }
        }
        standing.teams = teams.into_values().collect();
        if !standing.teams.is_empty() {
            standing.lacks = lacks(&self.shared.roster.snapshot(), &self.shared.vitals);
        }
        self.shared.readiness.set(standing);
    }

    fn workers(&self) -> impl Iterator<Item = &Arc<Worker>> {
        self.engines.values().flat_map(|engine| &engine.members)
    }

    /// Brings the members' health in line with the worker's newest verdict, unless something has to be learnt first.
    fn carry_out(&mut self, id: Id) {
        let Some(engine) = self.engines.get(&id) else { return };
        let Some((health, reason)) = &engine.verdict else { return };
        // Draining is somebody's decision; probes do not overrule it.
        if engine.draining.is_some() {
            return;
        }
        if let Some(lack) = engine.lacks().filter(|_| *health == Health::Ready) {
            tracing::debug!(worker = %engine.spec.url, reason = lack, "worker is not let in yet");
            for member in &engine.members {
                self.notes[member.slot as usize].reason = Some(lack.into());
            }
            return;
        }
        for member in &engine.members {
            if flip(self.shared, member, *health, reason) {
                self.notes[member.slot as usize].reason = Some(reason.as_str().into());
            }
        }
    }
}

/// Sets a worker's health; whether that changed it.
fn flip(shared: &Shared, worker: &Worker, health: Health, reason: &str) -> bool {
    let old = shared.vitals.health(worker.slot);
    if old == health || old == Health::Draining {
        return false;
    }
    if health == Health::Ready {
        shared.roster.snapshot().welcome(worker, &shared.load, &shared.vitals);
    }
    shared.vitals.set_health(worker.slot, health);
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
    true
}

/// How the requests of a slot's workers ended, all tenants' successes and the present one's failures.
fn outcomes(shared: &Shared, slot: Slot) -> Outcomes {
    let well = responses(shared, slot)[..=worker_status_index(400)].iter().sum();
    Outcomes { well, failed: shared.vitals.failed(slot) }
}

/// Logs where a breaker stands, if it has moved.
fn tell(worker: &Worker, told: &mut State, vital: Vital) {
    let now = vital.state();
    let (was, failures) = (std::mem::replace(told, now), vital.failures());
    if was == now {
        return;
    }
    let (from, to, worker, role) = (was.name(), now.name(), &*worker.url, worker.role.name());
    match now {
        State::Open => tracing::warn!(worker, role, from, to, failures, "breaker of the worker has opened"),
        State::Held => {
            tracing::warn!(worker, role, from, to, failures, "breaker would open, but half of the pool is out")
        }
        State::HalfOpen | State::Closed => tracing::info!(worker, role, from, to, "breaker of the worker"),
    }
}

/// The members of a worker at these places; but for place, name and rank they are like `like`.
fn ranks(spec: &WorkerSpec, like: &Worker, places: &[(Slot, u32)]) -> Vec<Arc<Worker>> {
    let size = places.len() as u32;
    let member = |(rank, &(slot, era)): (usize, &(Slot, u32))| {
        let mut worker = Worker { slot, era, url: spec.url.as_str().into(), ..like.clone() };
        worker.pairing.dp = (size > 1).then_some(DpRank { rank: rank as u32, size });
        if size > 1 {
            worker.url = format!("{}@{rank}", spec.url).into();
        }
        Arc::new(worker)
    };
    places.iter().enumerate().map(member).collect()
}

/// The engine's id as the worker of a rank is known by: its own, else that of rank 0.
fn id_of(ids: &EngineIds, dp: Option<DpRank>) -> Option<Box<str>> {
    let of = |rank: u32| ids.iter().find(|(r, _)| *r == rank).map(|(_, id)| id.clone());
    of(dp.map_or(0, |dp| dp.rank)).or_else(|| of(0))
}

/// What keeps pairs from serving, a sentence a model that they serve; while no model is known, one for all of them.
fn lacks(snapshot: &Snapshot, vitals: &Vitals) -> Vec<String> {
    let mut known = false;
    let mut all = Vec::new();
    for (at, pool) in snapshot.pools.iter().enumerate().filter(|(_, pool)| pool.role == Role::Prefill) {
        known = true;
        if let (Some(lack), Some(model)) = (snapshot.lacks(at, vitals), &pool.model) {
            all.push(format!("model {model}: {lack}"));
        }
    }
    if !known {
        all.extend(snapshot.pairs(None).and_then(|at| snapshot.lacks(at, vitals)).map(str::to_owned));
    }
    all
}

/// Whether lanes may give the worker requests.
pub fn usable(shared: &Shared, worker: &Worker) -> bool {
    !worker.addrs.is_empty() && shared.vitals.usable(worker.slot)
}
