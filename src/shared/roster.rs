//! Which workers exist: an immutable snapshot behind one pointer, with a generation, and the book of slots.
//!
//! Takes worker lists from the control thread (the only writer), gives lanes a snapshot and a cheap way
//! to see that it moved. Never reuses a slot whose in-flight count is not zero, nor one that some lane may
//! still know under its old tenant. A stale snapshot is legal for one request.

mod labels;
mod pairs;
mod places;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arc_swap::ArcSwap;
use crossbeam::utils::CachePadded;

use super::Shared;
use super::load::Load;
use super::ring::{self, Ring};
use super::rotation::OVERFLOW;
use super::vitals::{Health, Vitals};
use crate::limits::{MAX_MODEL_LABELS, MAX_WORKERS, MOST_WORK, WORK_FADE};
use labels::Labels;
pub use labels::{Label, Labelled, OTHER};
use pairs::Pairs;
use places::Places;

/// Index of a worker in the load and vitals arrays; below [`crate::limits::MAX_WORKERS`].
pub type Slot = u16;

pub use crate::config::{Backend, Role};

/// All roles, in the order of their discriminants.
pub const ROLES: [Role; 3] = Role::ALL;

/// One worker as lanes see it. Immutable: a change makes a new value in a new snapshot.
#[derive(Clone, Debug)]
pub struct Worker {
    /// Where its counts live.
    pub slot: Slot,
    /// Which tenant of the slot this is; grows with every reuse.
    pub era: u32,
    pub role: Role,
    /// Its name: the base URL as configured, without a trailing slash (`http://host:port`), and `@rank` behind it where
    /// it stands for one data-parallel rank. Requests go to `addrs` and `prefix`.
    pub url: Box<str>,
    /// Path prefix of the URL, empty or starting with `/` and not ending in one; put before every forwarded target.
    pub prefix: Box<str>,
    /// Resolved addresses, in the resolver's order; empty while the name does not resolve (then it is not usable).
    pub addrs: Box<[SocketAddr]>,
    /// Replaces the client's Authorization when present (`Bearer …` is added in front).
    pub api_key: Option<Box<str>>,
    /// Model names it serves; empty while not known.
    pub models: Box<[Box<str>]>,
    /// The worker's `/get_server_info` (or `/server_info`), reduced to harmless fields; JSON.
    pub server_info: Option<Box<str>>,
    /// What it needs to be one of a pair.
    pub pairing: Pairing,
}

/// What pairing needs to know of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pairing {
    pub backend: Backend,
    /// Only workers of one group and backend are paired.
    pub group: Box<str>,
    /// Host of the URL as the other worker is told it; IPv6 in brackets.
    pub bootstrap_host: Box<str>,
    /// `None`: the engine's own default.
    pub bootstrap_port: Option<u16>,
    /// Mooncake's id of the engine; `None` while it is not known.
    pub engine_id: Option<Box<str>>,
    /// Which data-parallel rank of the engine this worker stands for; `None`: the engine as a whole.
    pub dp: Option<DpRank>,
}

/// Port of Mooncake's bootstrap server in vLLM, where none is configured.
pub const MOONCAKE_PORT: u16 = 8998;

impl Pairing {
    /// Port of Mooncake's bootstrap server.
    pub fn mooncake_port(&self) -> u16 {
        self.bootstrap_port.unwrap_or(MOONCAKE_PORT)
    }

    /// Whose workers may be paired with each other.
    pub fn team(&self) -> Team<'_> {
        (self.backend, &self.group)
    }
}

/// Backend and group: only workers in which both agree are paired.
pub type Team<'a> = (Backend, &'a str);

/// A data-parallel rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DpRank {
    /// From 0, below `size`.
    pub rank: u32,
    /// How many ranks the engine has; at least 1.
    pub size: u32,
}

/// The workers of one role that serve one model, or all workers of the role; of decode workers also those of one
/// group and backend. Who of them is usable stands in [`Vitals`], not here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// `None`: every worker of the role, whatever it serves.
    pub model: Option<Box<str>>,
    pub role: Role,
    /// Backend and group that all members share because others were left out.
    pub team: Option<(Backend, Box<str>)>,
    /// Members that have an address, in slot order.
    pub slots: Box<[Slot]>,
    /// Their eras, in the same order.
    pub eras: Box<[u32]>,
    /// Hashes of their URLs, in the same order.
    names: Box<[u64]>,
    /// Members without an address, which cannot be chosen.
    pub unresolved: usize,
    /// Where its shared positions and tables live (see [`super::rotation`]); [`OVERFLOW`] before it is published.
    pub place: usize,
    ring: OnceLock<Ring>,
}

impl Pool {
    fn of<'a>(model: Option<&str>, role: Role, members: impl Iterator<Item = &'a Worker> + Clone) -> Pool {
        let resolved = members.clone().filter(|w| !w.addrs.is_empty());
        Pool {
            model: model.map(Box::from),
            role,
            team: None,
            slots: resolved.clone().map(|w| w.slot).collect(),
            eras: resolved.clone().map(|w| w.era).collect(),
            names: resolved.map(|w| ring::hash(w.url.as_bytes())).collect(),
            ring: OnceLock::new(),
            place: OVERFLOW,
            unresolved: members.filter(|w| w.addrs.is_empty()).count(),
        }
    }
}

impl Pool {
    /// Whether it has members at all, with or without an address.
    pub fn is_peopled(&self) -> bool {
        !self.slots.is_empty() || self.unresolved > 0
    }

    /// The members on the ring of consistent hashing: made by control where a policy wants it, else at first use.
    pub fn ring(&self) -> &Ring {
        self.ring.get_or_init(|| Ring::new(&self.names))
    }

    /// Place of a worker among the members.
    #[inline]
    pub fn place(&self, slot: Slot, era: u32) -> Option<usize> {
        self.slots.binary_search(&slot).ok().filter(|&at| self.eras[at] == era)
    }
}

/// An immutable list of workers, and the pools they form. Pools are laid out here, once a publication, so that
/// lanes need not.
#[derive(Debug)]
pub struct Snapshot {
    /// Grows by one with every publication; 0 is the empty list at start.
    pub generation: u64,
    /// In slot order.
    pub workers: Box<[Arc<Worker>]>,
    /// One a (model, role) that some worker serves, sorted by model (as bytes) and role. A model that has decode
    /// workers has a pool of prefill workers too, be it empty.
    pub pools: Box<[Pool]>,
    /// Every worker of a role, by role (see [`Snapshot::everyone`]).
    everyone: [Pool; ROLES.len()],
    /// Whom the prefill workers of a pool are paired with, and the pools that it takes.
    pairs: Pairs,
    /// Place in `workers` by slot; `NOBODY` where the slot is free.
    by_slot: Box<[u16]>,
    /// Models that are counted by name, sorted.
    labels: Box<[Labelled]>,
    /// Who has each place of a label; 0: nobody.
    tenants: Box<[u32]>,
}

const NOBODY: u16 = u16::MAX;
const _: () = assert!(MAX_WORKERS <= NOBODY as usize);

/// A snapshot that its reader keeps until it takes the next one.
pub type Published = Arc<Snapshot>;

impl Snapshot {
    /// A list of workers in any order.
    pub fn new(generation: u64, mut workers: Vec<Arc<Worker>>) -> Self {
        workers.sort_unstable_by_key(|w| w.slot);
        debug_assert!(workers.is_sorted_by(|a, b| a.slot < b.slot), "two workers have one slot");
        let mut by_slot = vec![NOBODY; workers.last().map_or(0, |w| w.slot as usize + 1)];
        for (place, worker) in workers.iter().enumerate() {
            by_slot[worker.slot as usize] = place as u16;
        }
        let everyone = ROLES.map(|role| Pool::of(None, role, workers.iter().map(|w| &**w).filter(|w| w.role == role)));
        let mut snapshot = Snapshot {
            generation,
            pools: pools(&workers),
            everyone,
            pairs: Pairs::default(),
            by_slot: by_slot.into(),
            labels: Box::default(),
            tenants: Box::default(),
            workers: workers.into_boxed_slice(),
        };
        if snapshot.pairs(None).is_some() {
            snapshot.pairs = Pairs::of(&snapshot);
        }
        snapshot
    }

    /// All pools, in the order of their indices: those of [`Snapshot::pools`], everyone by role, decode workers by group
    /// and backend.
    pub fn all_pools(&self) -> impl Iterator<Item = &Pool> {
        self.pools.iter().chain(&self.everyone).chain(&self.pairs.teams)
    }

    /// Those of everyone first: if there are more than can be told apart, it is not they that cannot.
    fn all_pools_mut(&mut self) -> impl Iterator<Item = &mut Pool> {
        self.everyone.iter_mut().chain(&mut self.pools).chain(&mut self.pairs.teams)
    }

    /// The pool of an index.
    ///
    /// # Panics
    /// For an index that no method of this snapshot gave.
    #[inline]
    pub fn pool_at(&self, index: usize) -> &Pool {
        match self.pools.get(index) {
            Some(pool) => pool,
            None => self.beyond(index - self.pools.len()),
        }
    }

    #[inline]
    fn beyond(&self, index: usize) -> &Pool {
        match self.everyone.get(index) {
            Some(pool) => pool,
            None => &self.pairs.teams[index - self.everyone.len()],
        }
    }

    /// Index of the pool of all workers of a role.
    #[inline]
    pub fn everyone_at(&self, role: Role) -> usize {
        self.pools.len() + role as usize
    }

    /// The worker at a slot, if it still is the tenant of that era.
    #[inline]
    pub fn worker(&self, slot: Slot, era: u32) -> Option<&Worker> {
        let place = *self.by_slot.get(slot as usize)?;
        self.workers.get(place as usize).map(|w| &**w).filter(|w| w.era == era)
    }

    /// All workers of a role, whatever they serve.
    pub fn everyone(&self, role: Role) -> &Pool {
        &self.everyone[role as usize]
    }

    /// Place in `pools` of the workers of a role that serve a model.
    #[inline]
    pub fn pool(&self, model: &[u8], role: Role) -> Option<usize> {
        self.pools.binary_search_by(|p| name(p).cmp(model).then(p.role.cmp(&role))).ok()
    }

    /// Names of all models that some worker serves, sorted, each once.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        self.pools.chunk_by(|a, b| a.model == b.model).filter_map(|pools| pools[0].model.as_deref())
    }

    /// Models that are counted by name, sorted: all, if they are not too many.
    pub fn labels(&self) -> &[Labelled] {
        &self.labels
    }

    /// Where a model is counted.
    #[inline]
    pub fn label(&self, model: &[u8]) -> Label {
        let found = self.labels.binary_search_by(|known| known.model.as_bytes().cmp(model));
        found.map_or(Label::default(), |at| self.labels[at].label)
    }

    /// The place of a label, 0 when its model is gone.
    #[inline]
    pub fn label_place(&self, label: Label) -> usize {
        let place = usize::from(label.place);
        if self.tenants.get(place) == Some(&label.tenant) { place } else { 0 }
    }

    /// Gives a worker that joins or comes back its starting credit: as much processed work as the usable peer
    /// with the least has, else it would win every tie until it had caught up. Peers serve the same model in the
    /// same role, decode workers in the same group; of several models' minima the highest counts, so that no pool is
    /// flooded. Without a usable peer
    /// the whole role is asked, and without anybody there the count stays.
    ///
    /// Control calls this before it sets the worker [`super::vitals::Health::Ready`].
    pub fn welcome(&self, worker: &Worker, load: &Load, vitals: &Vitals) {
        let least = |pool: &Pool| {
            // Prefill workers of all groups are chosen among, decode workers within one.
            let is_mate = |slot, era| {
                let team = self.worker(slot, era).map(|peer| peer.pairing.team());
                worker.role != Role::Decode || team == Some(worker.pairing.team())
            };
            let peers = pool
                .slots
                .iter()
                .zip(&pool.eras)
                .filter(|&(&slot, &era)| slot != worker.slot && vitals.usable(slot) && is_mate(slot, era));
            peers.map(|(&slot, _)| load.word(slot).processed()).min()
        };
        let served = worker.models.iter().filter_map(|model| self.pool(model.as_bytes(), worker.role));
        let credit = served.filter_map(|at| least(&self.pools[at])).max().or_else(|| least(self.everyone(worker.role)));
        if let Some(processed) = credit {
            load.seed(worker.slot, processed);
        }
    }

    /// Whether one more worker may be out for its breaker: at most half of each of its pools, and at most half of those
    /// of a pool that the probes have let in. Not if the roster does not have the slot.
    pub fn has_room_out(&self, slot: Slot, vitals: &Vitals) -> bool {
        let mut pools = self.all_pools().filter(|pool| pool.slots.binary_search(&slot).is_ok()).peekable();
        pools.peek().is_some()
            && pools.all(|pool| {
                let words = || pool.slots.iter().map(|&slot| vitals.vital(slot));
                let ready = || words().filter(|vital| vital.health() == Health::Ready);
                let out = words().filter(|vital| vital.is_out()).count() + 1;
                let ready_out = ready().filter(|vital| vital.is_out()).count() + 1;
                2 * out <= pool.slots.len() && 2 * ready_out <= ready().count()
            })
    }

    /// A worker whose breaker has to yield because more than half of a pool is out: the one nearest to its end.
    pub fn too_many_out(&self, vitals: &Vitals) -> Option<Slot> {
        self.all_pools().find_map(|pool| {
            let out = || pool.slots.iter().copied().filter(|&slot| vitals.vital(slot).is_out());
            let too_many = 2 * out().count() > pool.slots.len();
            out().filter(|_| too_many).min_by_key(|&slot| vitals.vital(slot).open_left_s())
        })
    }

    /// Lets leads in processed work fade: of what a worker has processed more than the usable peer with the least, a
    /// [`WORK_FADE`]th is forgotten. Small leads stay, so equal requests go on taking turns. When a count has come half
    /// the way to where it would wrap, all are taken back by half of that.
    ///
    /// Control calls this every second.
    pub fn fade(&self, load: &Load, vitals: &Vitals) {
        // By role, not by model: a worker that serves several would lose as many times.
        for pool in ROLES.map(|role| self.everyone(role)) {
            let processed = |&slot: &Slot| load.word(slot).processed();
            let usable = pool.slots.iter().filter(|&&slot| vitals.usable(slot));
            let Some(least) = usable.map(processed).min() else { continue };
            for slot in &pool.slots {
                let faded = processed(slot).saturating_sub(least) / WORK_FADE;
                if faded > 0 {
                    load.forget(*slot, faded);
                }
            }
        }
        if self.workers.iter().any(|worker| load.word(worker.slot).processed() >= MOST_WORK) {
            self.workers.iter().for_each(|worker| load.forget(worker.slot, MOST_WORK / 2));
        }
    }
}

impl Default for Snapshot {
    fn default() -> Self {
        Snapshot::new(0, Vec::new())
    }
}

const _: () = assert!(ROLES[Role::Prefill as usize] as usize == 1 && ROLES[Role::Decode as usize] as usize == 2);

fn name(pool: &Pool) -> &[u8] {
    pool.model.as_deref().unwrap_or_default().as_bytes()
}

fn pools(workers: &[Arc<Worker>]) -> Box<[Pool]> {
    let mut served: Vec<(&str, Role, u16)> = Vec::new();
    for (place, worker) in workers.iter().enumerate() {
        served.extend(worker.models.iter().map(|model| (&**model, worker.role, place as u16)));
    }
    // str compares as bytes do; places are in slot order.
    served.sort_unstable();
    served.dedup();
    let mut pools = Vec::new();
    for of_model in served.chunk_by(|a, b| a.0 == b.0) {
        let paired = of_model.iter().any(|m| m.1 == Role::Decode);
        for role in ROLES {
            let members = of_model.iter().filter(|m| m.1 == role).map(|m| &*workers[m.2 as usize]);
            if members.clone().next().is_some() || role == Role::Prefill && paired {
                pools.push(Pool::of(Some(of_model[0].0), role, members));
            }
        }
    }
    pools.into()
}

/// The published snapshot and who has seen it.
pub struct Roster {
    current: ArcSwap<Snapshot>,
    generation: AtomicU64,
    /// Whether pools come with their rings.
    rings: AtomicBool,
    /// Newest generation each lane has adopted; `u64::MAX` for a lane that has ended.
    seen: Box<[CachePadded<AtomicU64>]>,
    /// Which model is counted where. For the writer alone.
    labels: Mutex<Labels>,
    /// Which pool has which place. For the writer alone.
    places: Mutex<Places>,
}

impl Roster {
    /// An empty roster for `lanes` lanes.
    pub fn new(lanes: usize) -> Self {
        Roster {
            current: ArcSwap::from_pointee(Snapshot::default()),
            generation: AtomicU64::new(0),
            rings: AtomicBool::new(false),
            seen: (0..lanes).map(|_| CachePadded::new(AtomicU64::new(0))).collect(),
            labels: Mutex::default(),
            places: Mutex::default(),
        }
    }

    /// Generation of the newest snapshot; a late view of it is legal for one request.
    #[inline]
    pub fn generation(&self) -> u64 {
        // Acquire pairs with the release in `publish`: who sees a generation finds a snapshot at least as new.
        self.generation.load(Ordering::Acquire)
    }

    /// The newest snapshot. Clones an `Arc`: for the control thread, and for lanes when the generation moved.
    pub fn snapshot(&self) -> Published {
        self.current.load_full()
    }

    /// From now on pools are published with their rings, so that no lane has to make one: at 2048 workers that takes
    /// tens of milliseconds. For boot, when a policy wants rings.
    pub fn make_rings(&self) {
        self.rings.store(true, Ordering::Relaxed);
    }

    /// Publishes a new list (control thread only); returns its generation. Ring the lanes' bells afterwards: a lane
    /// that is idle adopts it only when woken.
    pub fn publish(&self, workers: Vec<Arc<Worker>>) -> u64 {
        self.publish_with(workers, |_| {})
    }

    /// The same; `begin` is told each place of [`Label`]s that will have a new tenant, before anybody counts there.
    pub fn publish_with(&self, workers: Vec<Arc<Worker>>, begin: impl FnMut(u16)) -> u64 {
        // Relaxed: this thread is the only writer.
        let generation = self.generation.load(Ordering::Relaxed) + 1;
        let mut snapshot = Snapshot::new(generation, workers);
        let mut labels = self.labels.lock().unwrap_or_else(PoisonError::into_inner);
        let settled = self.oldest_seen();
        let known = labels.assign(snapshot.models(), generation, settled, begin);
        snapshot.labels = known.into();
        drop(labels);
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.assign(snapshot.all_pools_mut(), generation, settled);
        drop(places);
        let mut tenants = vec![0; MAX_MODEL_LABELS + 1];
        snapshot.labels.iter().for_each(|known| tenants[usize::from(known.label.place)] = known.label.tenant);
        snapshot.tenants = tenants.into();
        if self.rings.load(Ordering::Relaxed) {
            for pool in snapshot.all_pools() {
                pool.ring();
            }
        }
        self.current.store(Arc::new(snapshot));
        // Release pairs with the acquire in `generation`.
        self.generation.store(generation, Ordering::Release);
        generation
    }

    /// A lane says which generation it routes by from now on.
    pub fn saw(&self, lane: usize, generation: u64) {
        // Release pairs with the acquire in `oldest_seen`: guards taken under older views happen before.
        self.seen[lane].store(generation, Ordering::Release);
    }

    /// A lane says that it will never choose a worker again.
    pub fn ended(&self, lane: usize) {
        self.saw(lane, u64::MAX);
    }

    /// The oldest generation that some lane may still route by.
    pub fn oldest_seen(&self) -> u64 {
        // Acquire pairs with the release in `saw`.
        self.seen.iter().map(|s| s.load(Ordering::Acquire)).min().unwrap_or(u64::MAX)
    }
}

/// Which slots are taken and by which tenant: the control thread's book, never shared.
#[derive(Debug, Default)]
pub struct Slots {
    /// Era of the newest tenant of every slot that ever had one.
    eras: Vec<u32>,
    /// Slots whose tenant has vanished, each with the generation in which it did; oldest first.
    vacated: VecDeque<(Slot, u64)>,
}

impl Slots {
    /// A book in which every slot is free.
    pub fn new() -> Self {
        Self::default()
    }

    /// A slot and an era for a new worker; `None` when every slot is taken or not safe to reuse yet. The slot's
    /// health is pending. The first era of a slot is 1, so that 0 means no tenant.
    pub fn take(&mut self, shared: &Shared) -> Option<(Slot, u32)> {
        // In this order: a lane that has seen the vanishing has made its last reservation on the slot, and the acquire
        // in `oldest_seen` makes that reservation visible to the load of the word.
        let oldest = shared.roster.oldest_seen();
        let free = self
            .vacated
            .iter()
            .position(|&(slot, vanished)| vanished <= oldest && shared.load.word(slot).in_flight() == 0);
        let slot = match free.and_then(|at| self.vacated.remove(at)) {
            Some((slot, _)) => slot,
            None if self.eras.len() < MAX_WORKERS => {
                self.eras.push(0);
                (self.eras.len() - 1) as Slot
            }
            None => return None,
        };
        shared.vitals.vacate(slot);
        shared.reported.note(slot, None);
        let era = &mut self.eras[slot as usize];
        *era += 1;
        Some((slot, *era))
    }

    /// Notes that the slot's worker is missing from generation `vanished` (what [`Roster::publish`] returned) on.
    pub fn retire(&mut self, slot: Slot, vanished: u64) {
        debug_assert!((slot as usize) < self.eras.len(), "slot {slot} was never taken");
        debug_assert!(self.vacated.iter().all(|&(known, _)| known != slot), "slot {slot} was retired twice");
        self.vacated.push_back((slot, vanished));
    }

    /// Slots that wait for their last guard or for a lane.
    pub fn waiting(&self) -> usize {
        self.vacated.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::load::Word;

    fn worker(slot: Slot, role: Role, models: &[&str], resolved: bool) -> Arc<Worker> {
        Arc::new(Worker {
            slot,
            era: 1,
            role,
            url: format!("http://10.0.0.1:{slot}").into(),
            prefix: "".into(),
            addrs: if resolved { [([10, 0, 0, 1], 80).into()].into() } else { [].into() },
            api_key: None,
            models: models.iter().map(|&m| m.into()).collect(),
            server_info: None,
            pairing: Pairing::default(),
        })
    }

    #[test]
    fn pools_are_sorted_and_leave_out_who_has_no_address() {
        let snapshot = Snapshot::new(
            1,
            vec![
                worker(9, Role::Regular, &["b", "a", "b"], true),
                worker(2, Role::Regular, &["b"], true),
                worker(4, Role::Regular, &["b"], false),
                worker(5, Role::Decode, &["b"], true),
                worker(6, Role::Regular, &[], true),
            ],
        );
        assert_eq!(snapshot.models().collect::<Vec<_>>(), ["a", "b"]);
        let pool = |model: &str, role| snapshot.pool(model.as_bytes(), role).map(|at| &snapshot.pools[at]);
        let b = pool("b", Role::Regular).unwrap();
        assert_eq!((&*b.slots, &*b.eras, b.unresolved), (&[2, 9][..], &[1, 1][..], 1));
        assert_eq!(&*pool("a", Role::Regular).unwrap().slots, [9]);
        assert_eq!(&*pool("b", Role::Decode).unwrap().slots, [5]);
        assert!(pool("a", Role::Decode).is_none() && pool("", Role::Regular).is_none());
        assert_eq!(&*snapshot.everyone(Role::Regular).slots, [2, 6, 9]);
        assert_eq!(&*snapshot.everyone(Role::Prefill).slots, [0; 0]);
    }

    #[test]
    fn workers_are_found_by_slot_and_era() {
        let snapshot = Snapshot::new(1, vec![worker(3, Role::Regular, &[], true), worker(0, Role::Regular, &[], true)]);
        assert_eq!(snapshot.worker(3, 1).unwrap().slot, 3);
        assert!(snapshot.worker(3, 2).is_none() && snapshot.worker(1, 1).is_none() && snapshot.worker(9, 1).is_none());
    }

    #[test]
    fn a_slot_waits_for_every_lane_and_for_its_last_guard() {
        let shared = Shared::leak(2);
        let mut slots = Slots::new();
        assert_eq!(slots.take(shared), Some((0, 1)));
        assert_eq!(slots.take(shared), Some((1, 1)));
        shared.vitals.set_health(0, Health::Ready);
        let gone = shared.roster.publish(Vec::new());
        slots.retire(0, gone);
        shared.roster.saw(0, gone);
        assert_eq!(slots.take(shared), Some((2, 1)), "lane 1 has not seen it");
        let guard = shared.load.reserve(0, 1, Word(0), 1).unwrap();
        shared.roster.ended(1);
        assert_eq!(slots.take(shared), Some((3, 1)), "a guard is held");
        drop(guard);
        assert_eq!(slots.take(shared), Some((0, 2)));
        assert_eq!(shared.vitals.health(0), Health::Pending);
        assert_eq!(slots.waiting(), 0);
    }

    #[test]
    fn the_book_ends_with_the_last_slot() {
        let shared = Shared::leak(0);
        let mut slots = Slots::new();
        assert!((0..MAX_WORKERS).all(|slot| slots.take(shared) == Some((slot as Slot, 1))));
        assert_eq!(slots.take(shared), None);
        slots.retire(77, 1);
        assert_eq!(slots.take(shared), Some((77, 2)));
    }

    #[test]
    fn leads_in_work_fade_and_counts_never_wrap() {
        let shared = Shared::leak(1);
        let (load, vitals) = (&shared.load, &shared.vitals);
        let workers: Vec<_> = (0..3).map(|slot| worker(slot, Role::Regular, &["a"], true)).collect();
        let other = worker(3, Role::Prefill, &[], true);
        let snapshot = Snapshot::new(1, workers.iter().chain([&other]).cloned().collect());
        let set = |works: [u64; 4]| (0..).zip(works).for_each(|(slot, work)| load.seed(slot, work));
        let works = || [0, 1, 2, 3].map(|slot| load.word(slot).processed());
        for slot in 0..4 {
            vitals.set_health(slot, Health::Ready);
        }
        let _held = load.reserve_unconditional(2, 1, 0).unwrap();
        set([1000, 1063, 7400, 77]);
        snapshot.fade(load, vitals);
        assert_eq!(works(), [1000, 1063, 7300, 77], "a lead of less than 64 stays; a role is not compared with others");
        (0..1000).for_each(|_| snapshot.fade(load, vitals));
        assert_eq!(works(), [1000, 1063, 1063, 77]);
        vitals.set_health(0, Health::Unhealthy);
        set([0, 7400, 1000, 0]);
        snapshot.fade(load, vitals);
        assert_eq!(works(), [0, 7300, 1000, 0], "who is not usable is no measure");
        set([MOST_WORK - 2, MOST_WORK - 1, MOST_WORK, 5]);
        snapshot.fade(load, vitals);
        let half = MOST_WORK / 2;
        assert_eq!(works(), [half - 2, half - 1, half, 0]);
        assert_eq!(load.word(2).in_flight(), 1);
    }

    #[test]
    fn a_newcomer_starts_at_its_peers_minimum() {
        let shared = Shared::leak(1);
        let (load, vitals) = (&shared.load, &shared.vitals);
        let workers = [
            worker(0, Role::Regular, &["a"], true),
            worker(1, Role::Regular, &["a"], true),
            worker(2, Role::Regular, &["b"], true),
            worker(3, Role::Regular, &["a", "b"], true),
            worker(4, Role::Decode, &["a"], true),
            worker(5, Role::Regular, &[], true),
        ];
        let snapshot = Snapshot::new(1, workers.to_vec());
        let processed = |slot: Slot| load.word(slot).processed();
        snapshot.welcome(&workers[0], load, vitals);
        assert_eq!(processed(0), 0, "nobody is usable");
        for (slot, credit) in [(0, 70), (1, 50), (2, 9)] {
            load.seed(slot, credit);
            vitals.set_health(slot, Health::Ready);
        }
        for (slot, credit) in [(3, 50), (4, 0), (5, 9)] {
            snapshot.welcome(&workers[slot as usize], load, vitals);
            assert_eq!(processed(slot), credit, "slot {slot}");
        }
        snapshot.welcome(&workers[0], load, vitals);
        assert_eq!(processed(0), 50, "a recovered worker's own count does not matter");
    }

    #[test]
    fn a_new_decode_worker_starts_at_the_minimum_of_its_group() {
        let shared = Shared::leak(1);
        let of = |slot, group: &str| {
            let mut worker = Worker::clone(&worker(slot, Role::Decode, &["a"], true));
            worker.pairing.group = group.into();
            Arc::new(worker)
        };
        let workers = [of(0, "x"), of(1, "y"), of(2, "y"), of(3, "z")];
        let snapshot = Snapshot::new(1, workers.to_vec());
        for (slot, credit) in [(0, 5), (1, 70)] {
            shared.load.seed(slot, credit);
            shared.vitals.set_health(slot, Health::Ready);
        }
        for (slot, credit) in [(2, 70), (3, 0)] {
            snapshot.welcome(&workers[slot as usize], &shared.load, &shared.vitals);
            assert_eq!(shared.load.word(slot).processed(), credit, "slot {slot}");
        }
    }
}
