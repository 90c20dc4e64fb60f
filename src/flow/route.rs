//! Which worker serves a request.
//!
//! Takes what the request wants and the lane's view, gives a guard: the choice is the charge, so nobody else can read
//! the load from before it. Never awaits, reads no clock, does no I/O, and allocates only for a fault's text.
//!
//! A policy says who the candidates are (one file each); `Till::reserve` alone takes one of them: the minimum of
//! (in-flight, processed work, index), or the least work among those near the fewest in flight, by compare-and-swap. It
//! charges the work that the request brings to that worker. What a worker's failures in a row weigh counts as in flight.
//!
//! Below every policy, workers that control sheds for what their engines say of their load are as good as not usable, as
//! long as somebody else is.

mod bucket;
mod cache_aware;
mod consistent_hashing;
mod least_load;
mod manual;
mod passthrough;
mod power_of_two;
mod prefix_hash;
mod random;
mod round_robin;
mod target;

use crate::config::{Policy, Role, Routing};
use crate::fault::{Fault, What};
use crate::lane::view::{self, By, CLOSED, Choice, PoolId, Reading, View};
use crate::limits::RESERVE_TRIES;
use crate::metrics::Tally;
use crate::shared::Shared;
use crate::shared::load::{self, LoadGuard, Word};
use crate::shared::prefix::Kind;
use crate::shared::roster::{Pool, Slot};
use crate::shared::tallies;
use crate::shared::vitals::{Health, Reach, Vital};

/// Bytes of a client's model name that are repeated to it.
const NAME_BYTES: usize = 128;
/// Draws of a random member before all of them are asked.
const DRAWS: usize = 16;

/// What a request wants of a worker.
#[derive(Clone, Copy, Debug)]
pub struct Want<'a> {
    /// Model name as the client sent it; `None` when the request names none.
    pub model: Option<&'a [u8]>,
    /// Any worker of the role will do, whatever it serves: the default model does not matter either.
    pub anyone: bool,
    pub role: Role,
    pub policy: Policy,
    pub routing: &'a Routing,
    /// Workers that are taken only if no other usable one exists: those that just failed this request.
    pub avoid: &'a [Slot],
    /// The prompt's key, empty if it has none.
    pub symbols: &'a [u64],
    /// What its symbols stand for.
    pub kind: Kind,
    /// Sticky routing key, empty if there is none.
    pub routing_key: &'a [u8],
    /// The worker that a request with the secret names, by URL or by position in the pool.
    pub target: Option<&'a [u8]>,
    /// Bytes of the request's body.
    pub length: usize,
}

impl Default for Want<'_> {
    /// Any regular worker, by the defaults of the option table.
    fn default() -> Self {
        Want {
            model: None,
            anyone: false,
            role: Role::Regular,
            policy: Policy::CacheAware,
            routing: &Routing::DEFAULT,
            avoid: &[],
            symbols: &[],
            kind: Kind::Text,
            routing_key: &[],
            target: None,
            length: 0,
        }
    }
}

/// Chooses a usable worker and reserves a place on it; what it went by stands in [`View::choice`] then. `now_us` is any
/// clock that does not run backwards; the clocks of lanes should agree within a second, because they stamp what lanes
/// share (sticky keys, prefixes).
///
/// # Errors
/// [`What::ModelUnknown`] when no worker serves the model, [`What::WorkersFull`] when all of those that can be used have
/// as many requests as they may, [`What::NoWorker`] when none of those that do is usable, when some worker's models are
/// not known yet, or when the worker that was named cannot serve.
#[inline]
pub fn choose(
    view: &mut View,
    want: &Want,
    now_us: u64,
    rng: &mut fastrand::Rng,
    tallies: &tallies::Lane,
) -> Result<LoadGuard, Fault> {
    view.refresh();
    let found = if want.anyone {
        Some(if want.role == Role::Regular { view.anyone() } else { view.everyone(want.role) })
    } else {
        // Where pairs serve a model, their prefill workers answer what needs no generation.
        view.find(want.model, want.role).or_else(|| view.find(want.model, Role::Prefill))
    };
    match found {
        Some(id) => choose_of(view, id, want, now_us, rng, tallies),
        None => Err(unknown(view, want)),
    }
}

/// Chooses a prefill worker of a pool and a decode worker that goes with it, and reserves a place on both. A decode
/// worker that cannot be had gives the prefill worker back. [`View::choice`] is the prefill worker's then.
///
/// # Errors
/// [`What::NoWorker`] when no complete pair is usable, [`What::WorkersFull`] when there is no room for one.
pub fn choose_pair(
    view: &mut View,
    prefill_pool: PoolId,
    prefill: &Want,
    decode: &Want,
    now_us: u64,
    rng: &mut fastrand::Rng,
    tallies: &tallies::Lane,
) -> Result<(LoadGuard, LoadGuard), Fault> {
    // Members of groups without a usable decode worker; and those with the workers that were tried.
    let (mut useless, mut avoid) = (Vec::new(), Vec::new());
    loop {
        let want = Want { avoid: if useless.is_empty() { prefill.avoid } else { &avoid }, ..*prefill };
        let first = choose_of(view, prefill_pool, &want, now_us, rng, tallies)
            .map_err(|fault| Fault::with(fault.what, format!("Prefill: {}", fault.detail)))?;
        let choice = view.choice;
        let mates = view.mates(prefill_pool, first.slot(), first.era());
        let fault = match mates.map(|id| choose_of(view, id, decode, now_us, rng, tallies)) {
            Some(Ok(second)) => {
                view.choice = choice;
                return Ok((first, second));
            }
            Some(Err(fault)) => Fault::with(fault.what, format!("Decode: {}", fault.detail)),
            None => Fault::with(What::NoWorker, "No decode worker goes with the prefill worker."),
        };
        // Workers of another group may make a pair, tried ones too if no other does. Who is useless and is chosen all
        // the same is the last one.
        if useless.contains(&first.slot()) {
            if avoid.len() == useless.len() {
                return Err(fault);
            }
            avoid.clone_from(&useless);
            continue;
        }
        useless.extend(view.mated(prefill_pool, mates));
        avoid.clone_from(&useless);
        avoid.extend(prefill.avoid.iter().filter(|slot| !useless.contains(slot)));
    }
}

fn choose_of(
    view: &mut View,
    id: PoolId,
    want: &Want,
    now_us: u64,
    rng: &mut fastrand::Rng,
    tallies: &tallies::Lane,
) -> Result<LoadGuard, Fault> {
    let shared = view.shared();
    let target = want.target.map(|named| target::find(view, id, named));
    let (pool, reading) = view.pool(id);
    // Who names a worker wants it, shed or not.
    let reach = if want.target.is_some() { Reach::Usable } else { Reach::Unshed };
    let till = Till { shared, avoid: want.avoid, reach, rng, tallies, work: load::work(want.length) };
    let mut field = Field { pool, reading, now_us, want, till, choice: Choice::default() };
    let chosen = match target {
        Some(at) => target::choose(&mut field, at),
        None => field
            .choose_any()
            .or_else(|| {
                let tried = !std::mem::take(&mut field.till.avoid).is_empty();
                if tried { field.choose_any() } else { None }
            })
            .or_else(|| if want.routing.panic { field.least_bad() } else { None }),
    };
    let choice = field.choice;
    if chosen.is_some() {
        field.reading.totals.in_flight += 1;
    }
    view.choice = choice;
    match chosen {
        Some(guard) => {
            tallies.selected(guard.slot());
            Ok(guard)
        }
        None if want.target.is_some() => Err(Fault::with(What::NoWorker, "The worker that was named cannot serve.")),
        None => Err(nobody(view, id)),
    }
}

/// One selection: the pool and everything a policy may look at.
struct Field<'a> {
    pool: &'a Pool,
    reading: &'a mut Reading,
    now_us: u64,
    want: &'a Want<'a>,
    till: Till<'a>,
    /// What the policy went by.
    choice: Choice,
}

/// Where candidates are charged.
struct Till<'a> {
    shared: &'static Shared,
    avoid: &'a [Slot],
    /// Whether those that are shed for their engines' load are closed, too.
    reach: Reach,
    rng: &'a mut fastrand::Rng,
    tallies: &'a tallies::Lane,
    /// What the request brings to whoever is charged: all of its body, unless a policy knows better.
    work: u64,
}

/// Who may be taken: slots, eras and words in one order.
struct Candidates<'a> {
    slots: &'a [Slot],
    eras: &'a [u32],
    words: &'a mut [u64],
    by: By,
    /// Where the search among equals begins.
    start: &'a mut usize,
}

impl Field<'_> {
    /// By the policy; among those that are shed, too, if nobody else can be had.
    #[inline]
    fn choose_any(&mut self) -> Option<LoadGuard> {
        self.choose().or_else(|| self.choose_beyond())
    }

    #[cold]
    fn choose_beyond(&mut self) -> Option<LoadGuard> {
        let vitals = &self.till.shared.vitals;
        if !self.pool.slots.iter().any(|&slot| vitals.vital(slot).is_shed() && vitals.usable(slot)) {
            return None;
        }
        // The copy says who is out of reach: it is made anew for this choice, and after it.
        (self.till.reach, self.reading.spoilt) = (Reach::Usable, true);
        let chosen = self.choose();
        (self.till.reach, self.reading.spoilt) = (Reach::Unshed, true);
        chosen
    }

    /// Whether the engines say that their KV caches are so unevenly used that affinity must give way.
    #[inline]
    fn is_uneven(&self) -> bool {
        self.want.routing.balances_usage() && self.till.shared.reported.is_uneven(self.reading.place)
    }

    fn choose(&mut self) -> Option<LoadGuard> {
        match self.want.policy {
            Policy::CacheAware => cache_aware::choose(self),
            Policy::LeastLoad => least_load::choose(self),
            Policy::RoundRobin => round_robin::choose(self),
            Policy::Random => random::choose(self),
            Policy::PowerOfTwo => power_of_two::choose(self),
            Policy::PrefixHash => prefix_hash::choose(self),
            Policy::ConsistentHashing => consistent_hashing::choose(self),
            Policy::Manual => manual::choose(self),
            Policy::Bucket => bucket::choose(self),
            Policy::Passthrough => passthrough::choose(self),
        }
    }

    /// A member's requests in flight with what its failures weigh; `None` when it may not be chosen now.
    #[inline]
    fn weight(&self, at: usize) -> Option<u32> {
        let slot = self.pool.slots[at];
        let Till { shared, avoid, reach, .. } = self.till;
        let word = view::weighed(shared.load.offer(slot), shared.vitals.vital(slot), reach);
        (word != CLOSED && !avoid.contains(&slot)).then(|| Word(word).in_flight())
    }

    /// Whether a load is so far above the fleet's mean that affinity must give way. The mean is asked for only where
    /// it can matter.
    #[inline]
    fn is_overload(&mut self, in_flight: u32) -> bool {
        let routing = self.want.routing;
        if in_flight <= routing.balance_abs {
            return false;
        }
        let totals = self.reading.totals(&self.pool.slots, self.till.shared, self.till.reach, self.now_us);
        routing.exceeds(f64::from(in_flight), totals.mean())
    }

    /// Now in seconds, as what lanes share is stamped.
    fn now_s(&self) -> u32 {
        (self.now_us / 1_000_000) as u32
    }

    /// Whether a member may be chosen now.
    fn open(&self, at: usize) -> bool {
        self.weight(at).is_some()
    }

    /// A random member that may be chosen and is not `but`, each with the same chance.
    fn draw(&mut self, but: Option<usize>) -> Option<usize> {
        let members = self.pool.slots.len();
        if members == 0 {
            return None;
        }
        for _ in 0..DRAWS {
            let at = self.till.rng.usize(..members);
            if Some(at) != but && self.open(at) {
                return Some(at);
            }
        }
        // Few are open: ask all, and let the n-th that is replace what we have with a chance of one in n.
        let mut drawn = None;
        let mut open = 0;
        for at in 0..members {
            if Some(at) != but && self.open(at) {
                open += 1;
                if self.till.rng.usize(..open) == 0 {
                    drawn = Some(at);
                }
            }
        }
        drawn
    }

    /// Reserves the least loaded of some members, by their present words; `None` when all of them have closed.
    fn reserve_of<const N: usize>(&mut self, members: [usize; N]) -> Option<LoadGuard> {
        let slots = members.map(|at| self.pool.slots[at]);
        let eras = members.map(|at| self.pool.eras[at]);
        let mut words = [CLOSED; N];
        view::read(&slots, self.till.shared, self.till.reach, &mut words);
        self.till.reserve(Candidates { slots: &slots, eras: &eras, words: &mut words, by: By::Load, start: &mut 0 })
    }

    /// Reserves the least bad member of a pool in which nobody is usable: not draining, not tried by this request, let in
    /// by the probes, the fewest in flight with what failures weigh.
    #[cold]
    fn least_bad(&mut self) -> Option<LoadGuard> {
        let Till { shared, work, .. } = self.till;
        let mut failures = 0;
        loop {
            let members = self.pool.slots.iter().zip(&self.pool.eras);
            let open = members.filter_map(|(&slot, &era)| {
                let (word, vital) = (shared.load.word(slot), shared.vitals.vital(slot));
                let load = word.in_flight().saturating_add(vital.weight(word.in_flight()));
                let order = (self.want.avoid.contains(&slot), vital.health() != Health::Ready, load, word.processed());
                (vital.health() != Health::Draining && !word.is_full()).then_some((order, slot, era, word))
            });
            let (_, slot, era, word) = open.min_by_key(|(order, ..)| *order)?;
            if failures >= RESERVE_TRIES {
                return shared.load.reserve_unconditional(slot, era, work);
            }
            match shared.load.reserve(slot, era, word, work) {
                Ok(guard) => return Some(guard),
                Err(_) => failures += 1,
            }
        }
    }

    /// Reserves the best of the whole pool, by the lane's copy of the words; `None` when all are closed.
    fn reserve_of_all(&mut self, by: By) -> Option<LoadGuard> {
        let (pool, Reading { words, start, .. }) = (self.pool, &mut *self.reading);
        self.till.reserve(Candidates { slots: &pool.slots, eras: &pool.eras, words, by, start })
    }
}

impl Till<'_> {
    /// The one place where a worker is charged. Takes the best (the minimum of in-flight, work and index, if it is by
    /// load) and compares and swaps it; if another lane was faster, reads all candidates again and chooses again. Gives
    /// up comparing after some tries and takes what it has, but not while somebody is idle: each failure then is an
    /// idle worker that another request took, so that requests that arrive together never share a worker beside an idle
    /// one.
    fn reserve(&mut self, of: Candidates) -> Option<LoadGuard> {
        let Candidates { slots, eras, words, by, start } = of;
        let load = &self.shared.load;
        let mut failures = 0;
        while let Some(at) = view::best(words, by, *start) {
            let (slot, era) = (slots[at], eras[at]);
            let vital = self.shared.vitals.vital(slot);
            if !vital.takes_all() {
                match self.try_out(slot, era, &mut words[at]) {
                    None => continue,
                    tried => return tried,
                }
            }
            let word = self.unweighed(slot, words[at], vital);
            let tries = if word.in_flight() == 0 { slots.len() + RESERVE_TRIES } else { RESERVE_TRIES };
            let reserved = if failures < tries {
                load.reserve(slot, era, word, self.work)
            } else {
                self.tallies.add(Tally::Unconditional, 1);
                load.reserve_unconditional(slot, era, self.work).ok_or(Word(CLOSED))
            };
            match reserved {
                Ok(guard) => {
                    let next = word.reserved(self.work).map(|next| next.within(load.most()));
                    words[at] = next.map_or(CLOSED, |next| view::weighed(next, vital, self.reach));
                    return Some(guard);
                }
                Err(_) if failures >= tries => words[at] = CLOSED,
                Err(_) => {
                    failures += 1;
                    view::read(slots, self.shared, self.reach, words);
                    close(self.avoid, slots, words);
                    // Lanes that lost one race would run the next one against each other too if all took the lowest
                    // index again; and they stay apart from then on.
                    *start = view::among_best(words, by, |equals| self.rng.usize(..equals));
                }
            }
        }
        None
    }
}

impl Till<'_> {
    /// Gives a half-open worker a request, if it has a place for a trial: that bounds what it gets, so nothing is
    /// compared. Puts its word right; closes it where it gets nothing.
    #[cold]
    fn try_out(&self, slot: Slot, era: u32, copy: &mut u64) -> Option<LoadGuard> {
        let Shared { load, vitals, .. } = self.shared;
        *copy = CLOSED;
        let vital = vitals.vital(slot);
        // It may have closed since it was looked at.
        let trial = if vital.takes_all() { None } else { Some(vitals.try_trial(slot).filter(|_| vital.usable())?) };
        let guard = load.reserve_unconditional(slot, era, self.work)?;
        let guard = if let Some(trial) = trial { guard.on_trial(trial) } else { guard };
        *copy = view::weighed(load.word(slot), vitals.vital(slot), self.reach);
        Some(guard)
    }

    /// The word of which `weighed` is what was compared; one that no slot has, if it has changed since.
    #[inline]
    fn unweighed(&self, slot: Slot, weighed: u64, vital: Vital) -> Word {
        if vital.failures() == 0 {
            return Word(weighed);
        }
        let word = self.shared.load.offer(slot);
        if view::weighed(word, vital, self.reach) == weighed { word } else { Word(CLOSED) }
    }
}

/// Closes the words of the avoided workers.
fn close(avoid: &[Slot], slots: &[Slot], words: &mut [u64]) {
    for slot in avoid {
        if let Some(at) = slots.iter().position(|s| s == slot) {
            words[at] = CLOSED;
        }
    }
}

#[cold]
fn unknown(view: &View, want: &Want) -> Fault {
    let asked = view.model(want.model).unwrap_or_default();
    // A little more than fits, so that no character is cut before the lossy conversion has seen it whole.
    let mut name = String::from_utf8_lossy(&asked[..asked.len().min(NAME_BYTES + 4)]).into_owned();
    let mut end = name.len().min(NAME_BYTES);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name.truncate(end);
    if view.models().any(|model| model.as_bytes() == asked) {
        return Fault::with(What::NoWorker, format!("No {} worker serves model {name}.", want.role.name()));
    }
    // A worker that never says what it serves must not make every unknown name look like an outage.
    let soon = view.expects_models() && !view.shared().readiness.waited();
    let what = if soon { What::NoWorker } else { What::ModelUnknown };
    Fault::with(what, format!("Model: {name}"))
}

#[cold]
fn nobody(view: &mut View, id: PoolId) -> Fault {
    let Shared { vitals, load, .. } = view.shared();
    let (pool, _) = view.pool(id);
    let count = |health| pool.slots.iter().filter(|&&slot| vitals.health(slot) == health).count();
    if pool.slots.iter().any(|&slot| vitals.usable(slot) && load.offer(slot).is_full()) {
        return What::WorkersFull.into();
    }
    let [pending, ready, unhealthy, draining] = Health::ALL.map(count);
    let is_out = |&&slot: &&Slot| vitals.health(slot) == Health::Ready && vitals.vital(slot).is_out();
    let out = pool.slots.iter().filter(is_out).count();
    Fault::with(
        What::NoWorker,
        format!(
            "Of {} workers {pending} are pending, {unhealthy} unhealthy, {draining} draining, {} without an address, \
             {out} out for their failures, {} full.",
            pool.slots.len() + pool.unresolved,
            pool.unresolved,
            ready - out
        ),
    )
}
