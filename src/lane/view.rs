//! One lane's reading of the fleet: the roster's snapshot it routes by, and a dense copy of the load words.
//!
//! Takes the shared state, gives pools, workers and words that are scanned without touching another core's cache
//! lines. Never writes shared state but for saying which generation it has seen, and never allocates unless the
//! roster moved.

use crate::limits::{FRESH_FLEET, IN_FLIGHT_BITS, MEAN_AGE_US, VIEW_AGE_US};
use crate::metrics::Tally;
use crate::shared::Shared;
use crate::shared::load::Word;
use crate::shared::prefix::{Found, Kind, TreeId, TreeKey};
use crate::shared::roster::{Label, Pool, Published, Role, Slot, Worker};
use crate::shared::vitals::{Reach, Vital};

/// The word of a member that cannot be chosen (not usable, or full): above every word that can.
pub const CLOSED: u64 = u64::MAX;

/// Members whose words are compared at once by [`best`].
const STRIDE: usize = 64;

/// One lane's reading of the fleet. Dropping it says that the lane has ended, so a lane has one at a time.
pub struct View {
    lane: usize,
    shared: &'static Shared,
    /// The model of requests that name none; `None`: they go to any worker of the role.
    default_model: Option<Box<str>>,
    snapshot: Published,
    /// One a pool of the snapshot, by index.
    readings: Box<[Reading]>,
    /// What the last selection went by.
    pub choice: Choice,
}

/// What a selection went by, where its policy says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// The counter of its kind.
    pub reason: Option<Tally>,
    /// Symbols of the prompt that the usable worker with the most of it has, of so many.
    pub matched: u32,
    pub symbols: u32,
}

/// Which pool of the view's present snapshot; good until the next [`View::refresh`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolId(usize);

impl View {
    /// The view of a lane, with the newest snapshot adopted.
    pub fn new(lane: usize, shared: &'static Shared, default_model: Option<Box<str>>) -> Self {
        let mut view = View {
            lane,
            shared,
            default_model,
            snapshot: shared.roster.snapshot(),
            readings: Box::default(),
            choice: Choice::default(),
        };
        view.adopt();
        view
    }

    /// Adopts the newest snapshot if the roster moved, and says so, so that slots of vanished workers can be reused.
    /// Every selection does this first; an idle lane must when its bell rings.
    #[inline]
    pub fn refresh(&mut self) {
        if self.shared.roster.generation() != self.snapshot.generation {
            self.snapshot = self.shared.roster.snapshot();
            self.adopt();
        }
    }

    #[cold]
    fn adopt(&mut self) {
        let prefix = &self.shared.prefix;
        self.readings = self
            .snapshot
            .all_pools()
            .map(|pool| {
                let model = pool.model.as_deref();
                // Groups share what is known of prefixes: who is no member is passed over.
                let trees = [Kind::Text, Kind::Tokens].map(|kind| prefix.tree(TreeKey::new(model, pool.role, kind)));
                Reading::new(pool.slots.len(), pool.place, trees)
            })
            .collect();
        self.shared.roster.saw(self.lane, self.snapshot.generation);
    }

    /// From now on requests that name no model go to this one's workers; `None`: to any.
    pub fn set_default_model(&mut self, model: Option<&str>) {
        self.default_model = model.map(Box::from);
    }

    /// The shared state that this view reads.
    pub fn shared(&self) -> &'static Shared {
        self.shared
    }

    /// Generation of the snapshot in use.
    pub fn generation(&self) -> u64 {
        self.snapshot.generation
    }

    /// All workers of the snapshot, in slot order.
    pub fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.snapshot.workers.iter().map(|worker| &**worker)
    }

    /// The worker at a slot, if it still is the tenant of that era. After a selection: the worker that was chosen,
    /// as long as the view is not refreshed in between.
    #[inline]
    pub fn worker(&self, slot: Slot, era: u32) -> Option<&Worker> {
        self.snapshot.worker(slot, era)
    }

    /// Names of all models that some worker serves, sorted, each once.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        self.snapshot.models()
    }

    /// Whether some worker's models are still to be learnt, or no worker is known at all: then an unknown name may
    /// be known soon.
    pub fn expects_models(&self) -> bool {
        self.snapshot.workers.is_empty() || self.snapshot.workers.iter().any(|worker| worker.models.is_empty())
    }

    /// The name a request is routed by: its own, else the default model's.
    pub fn model<'a>(&'a self, asked: Option<&'a [u8]>) -> Option<&'a [u8]> {
        asked.or(self.default_model.as_deref().map(str::as_bytes))
    }

    /// Where the model of a request that asks for one, or for none, is counted.
    #[inline]
    pub fn label(&self, asked: Option<&[u8]>) -> Label {
        self.model(asked).map_or(Label::default(), |model| self.snapshot.label(model))
    }

    /// The place of a label that this or an earlier snapshot gave; 0 when its model is gone.
    #[inline]
    pub fn label_place(&self, label: Label) -> usize {
        self.snapshot.label_place(label)
    }

    /// The pool for a request that asks for a model, or for none; `None` when no worker of the role serves it.
    #[inline]
    pub fn find(&self, asked: Option<&[u8]>, role: Role) -> Option<PoolId> {
        match self.model(asked) {
            Some(model) => self.snapshot.pool(model, role),
            None => Some(self.snapshot.everyone_at(role)),
        }
        .map(PoolId)
    }

    /// The pool of all workers of a role.
    pub fn everyone(&self, role: Role) -> PoolId {
        PoolId(self.snapshot.everyone_at(role))
    }

    /// The pool for requests that any worker can answer: all regular workers, or all prefill workers where the roster
    /// has no regular one.
    #[inline]
    pub fn anyone(&self) -> PoolId {
        PoolId(self.snapshot.anyone_at())
    }

    /// The prefill workers for a request that asks for a model, or for none, if pairs serve it: the model (or, for a
    /// request without one, the roster) has a prefill or a decode worker. The pool may be empty.
    #[inline]
    pub fn pairs(&self, asked: Option<&[u8]>) -> Option<PoolId> {
        self.snapshot.pairs(self.model(asked)).map(PoolId)
    }

    /// Whether some worker is one of a pair.
    #[inline]
    pub fn has_pairs(&self) -> bool {
        self.snapshot.pairs(None).is_some()
    }

    /// The members of a prefill pool whose mates are those; looked at one by one.
    pub fn mated(&self, prefill_pool: PoolId, mates: Option<PoolId>) -> impl Iterator<Item = Slot> {
        let pool = self.snapshot.pool_at(prefill_pool.0);
        let members = pool.slots.iter().zip(&pool.eras).map(|(&slot, &era)| (slot, era));
        members.filter(move |&(slot, era)| self.mates(prefill_pool, slot, era) == mates).map(|(slot, _)| slot)
    }

    /// The decode workers that a worker of a prefill pool can be paired with: they serve the pool's model (or anything,
    /// for the pool without one) and share group and backend with it. `None`: there are none, or the worker is gone.
    #[inline]
    pub fn mates(&self, prefill_pool: PoolId, slot: Slot, era: u32) -> Option<PoolId> {
        self.snapshot.mates(prefill_pool.0, slot, era).map(PoolId)
    }

    /// A pool and this lane's reading of it.
    #[inline]
    pub fn pool(&mut self, id: PoolId) -> (&Pool, &mut Reading) {
        (self.snapshot.pool_at(id.0), &mut self.readings[id.0])
    }
}

impl Drop for View {
    fn drop(&mut self) {
        self.shared.roster.ended(self.lane);
    }
}

/// What the open members of a pool have in flight together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub in_flight: u64,
    pub open: u32,
}

impl Totals {
    /// Requests in flight of the average open member.
    #[inline]
    pub fn mean(self) -> f64 {
        self.in_flight as f64 / f64::from(self.open.max(1))
    }
}

/// A lane's copy of one pool's load words, in pool order.
pub struct Reading {
    /// Where the pool's shared positions and tables live (see [`crate::shared::rotation`]).
    pub place: usize,
    /// The pool's prefix trees: of text and of token ids.
    trees: [TreeId; 2],
    /// Sums over the copy, kept up with what this lane reserves.
    pub totals: Totals,
    /// Load words, weighed by failures; [`CLOSED`] for who cannot be chosen.
    pub words: Box<[u64]>,
    /// Where the search among equals begins: 0 (so the lowest index wins) until this lane has lost a race.
    pub start: usize,
    read_us: u64,
    /// Who has what of the prompt at hand: room for the answers of the tree.
    pub found: Found,
    /// The copy must be read again before it is used, whatever its age.
    pub spoilt: bool,
}

impl Reading {
    fn new(members: usize, place: usize, trees: [TreeId; 2]) -> Self {
        Reading {
            place,
            trees,
            totals: Totals::default(),
            found: Found::default(),
            words: vec![CLOSED; members].into(),
            start: 0,
            read_us: 0,
            spoilt: true,
        }
    }

    /// The pool's prefix tree for a kind of key.
    pub fn tree(&self, kind: Kind) -> TreeId {
        self.trees[usize::from(kind == Kind::Tokens)]
    }

    /// What the open members have in flight: from the copy, which is at most [`MEAN_AGE_US`] old, and fresh for small
    /// fleets; what this lane has reserved since is in it.
    #[inline]
    pub fn totals(&mut self, slots: &[Slot], shared: &Shared, reach: Reach, now_us: u64) -> Totals {
        if slots.len() <= FRESH_FLEET || now_us.wrapping_sub(self.read_us) >= MEAN_AGE_US {
            self.spoilt = true;
            self.freshen(slots, shared, reach, now_us);
        }
        self.totals
    }

    /// Reads the whole pool again if the copy is too old for its size; gives whether it did.
    #[inline]
    pub fn freshen(&mut self, slots: &[Slot], shared: &Shared, reach: Reach, now_us: u64) -> bool {
        let due = self.spoilt || slots.len() <= FRESH_FLEET || now_us.wrapping_sub(self.read_us) >= VIEW_AGE_US;
        if due {
            self.totals = read(slots, shared, reach, &mut self.words);
            self.read_us = now_us;
            self.spoilt = false;
        }
        due
    }
}

/// Copies the words of `slots`, weighed by failures, with [`CLOSED`] for who is out of reach or is full; gives their
/// sums, without the weights.
#[inline]
pub fn read(slots: &[Slot], shared: &Shared, reach: Reach, words: &mut [u64]) -> Totals {
    let mut totals = Totals::default();
    let most = shared.load.most();
    for (copy, &slot) in words.iter_mut().zip(slots) {
        let word = shared.load.word(slot).within(most);
        *copy = weighed(word, shared.vitals.vital(slot), reach);
        if *copy != CLOSED {
            totals.in_flight += u64::from(word.in_flight());
            totals.open += 1;
        }
    }
    totals
}

/// A word as it is compared: with what the worker's failures weigh on top; [`CLOSED`] when it cannot be chosen.
#[inline]
pub fn weighed(word: Word, vital: Vital, reach: Reach) -> u64 {
    if !vital.open_to(reach) || word.is_full() {
        return CLOSED;
    }
    match vital.weight(word.in_flight()) {
        0 => word.0,
        weight => Word::new(word.in_flight().saturating_add(weight).min(MOST_WEIGHED), word.processed()).0,
    }
}

/// Most in-flight requests that a weighed word says: one less than full.
const MOST_WEIGHED: u32 = (1 << IN_FLIGHT_BITS) - 2;

/// Which of several words is the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The lowest: fewest in flight, and of those the least work.
    Load,
    /// The least work among those that have at most half as much again in flight as the lowest: where many are in
    /// flight, small differences of their number say less than the work that they brought. Of equals the lowest.
    Work,
}

impl By {
    /// The best word; [`CLOSED`] when all are.
    #[inline]
    fn best(self, words: &[u64]) -> u64 {
        let least = least(words);
        match self {
            By::Load => least,
            By::Work if least == CLOSED || Word(least).in_flight() < 2 => least,
            By::Work => least_work(words, Word(least).in_flight()),
        }
    }
}

/// The word with the least work among those with at most half as much again in flight as the fewest.
fn least_work(words: &[u64], fewest: u32) -> u64 {
    let end = Word::new((fewest + fewest / 2).min(MOST_WEIGHED) + 1, 0).0;
    // Turned, so that the work stands above what is in flight; without a branch a word.
    let turned = |&word: &u64| if word < end { word.rotate_left(IN_FLIGHT_BITS) } else { CLOSED };
    words.iter().map(turned).fold(CLOSED, u64::min).rotate_right(IN_FLIGHT_BITS)
}

/// Place of the best word, searched from `start` around, so that the first of equals wins; `None` when all are
/// [`CLOSED`] (or there are none).
#[inline]
pub fn best(words: &[u64], by: By, start: usize) -> Option<usize> {
    let least = by.best(words);
    if least == CLOSED {
        return None;
    }
    let (before, after) = words.split_at(start.min(words.len()));
    first(after, least).map(|at| start + at).or_else(|| first(before, least))
}

/// Place of one of the best words: of how many there are, `pick` says which. 0 when all are [`CLOSED`].
pub fn among_best(words: &[u64], by: By, pick: impl FnOnce(usize) -> usize) -> usize {
    let least = by.best(words);
    if least == CLOSED {
        return 0;
    }
    let mut equals = (0..words.len()).filter(|&at| words[at] == least);
    equals.nth(pick(equals.clone().count())).unwrap_or(0)
}

/// The lowest word, in eight independent chains. A function of its own: amid other code the chains do not get the
/// registers that they need (2048 words: 0.59 µs a decision instead of 0.45).
#[inline(never)]
fn least(words: &[u64]) -> u64 {
    let (chunks, rest) = words.as_chunks::<8>();
    let mut lanes = [CLOSED; 8];
    for chunk in chunks {
        for (lane, &word) in lanes.iter_mut().zip(chunk) {
            *lane = word.min(*lane);
        }
    }
    lanes.iter().chain(rest).copied().fold(CLOSED, u64::min)
}

/// Place of the first word that is `least`; whole strides are ruled out without a branch a word.
#[inline]
fn first(words: &[u64], least: u64) -> Option<usize> {
    let stride =
        words.chunks(STRIDE).position(|stride| stride.iter().fold(false, |hit, &word| hit | (word == least)))?;
    let from = stride * STRIDE;
    words[from..].iter().position(|&word| word == least).map(|at| from + at)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::shared::roster::Pairing;
    use crate::shared::vitals::Health;

    #[test]
    fn the_lowest_is_the_first_of_equals_from_the_start() {
        let mut rng = fastrand::Rng::with_seed(7);
        for members in [1, 2, 7, 8, 9, 63, 64, 65, 200, 2048] {
            for _ in 0..200 {
                let words: Vec<u64> =
                    (0..members).map(|_| if rng.u8(..4) == 0 { CLOSED } else { rng.u64(..9) }).collect();
                let start = rng.usize(..members);
                let expected = (start..members)
                    .chain(0..start)
                    .filter(|&at| words[at] != CLOSED)
                    .min_by_key(|&at| (words[at], (at + members - start) % members));
                assert_eq!(best(&words, By::Load, start), expected);
            }
        }
        assert_eq!(best(&[], By::Work, 0), None);
        assert_eq!([By::Load, By::Work].map(|by| best(&[CLOSED; 70], by, 3)), [None; 2]);
    }

    #[test]
    fn the_least_work_counts_within_half_as_much_again_in_flight() {
        let mut rng = fastrand::Rng::with_seed(8);
        for _ in 0..2000 {
            let draw = |rng: &mut fastrand::Rng| {
                if rng.u8(..5) == 0 { CLOSED } else { Word::new(rng.u32(..7), rng.u64(..4)).0 }
            };
            let words: Vec<u64> = (0..rng.usize(1..20)).map(|_| draw(&mut rng)).collect();
            let open = || words.iter().filter(|&&word| word != CLOSED).map(|&word| Word(word));
            let fewest = open().map(Word::in_flight).min().unwrap_or(0);
            let near = open().filter(|word| word.in_flight() <= fewest + fewest / 2);
            let expected = near.min_by_key(|word| (word.processed(), word.in_flight()));
            let at = best(&words, By::Work, 0);
            assert_eq!(at, expected.map(|word| words.iter().position(|&other| other == word.0).unwrap()), "{words:?}");
        }
        let nearly_full = [Word::new(MOST_WEIGHED, 5).0, Word::new(MOST_WEIGHED, 4).0, CLOSED];
        assert_eq!(best(&nearly_full, By::Work, 0), Some(1));
    }

    #[test]
    fn any_of_the_lowest_can_be_picked() {
        let words = [3, 1, CLOSED, 1, 1];
        let picked = [0, 1, 2].map(|which| {
            among_best(&words, By::Load, |equals| {
                assert_eq!(equals, 3);
                which
            })
        });
        assert_eq!(picked, [1, 3, 4]);
        assert_eq!(among_best(&[CLOSED; 3], By::Work, |_| 1), 0);
        assert_eq!(among_best(&[], By::Load, |_| 1), 0);
    }

    #[test]
    fn words_are_weighed_by_failures_and_closed_when_full() {
        let shared = Shared::leak(1);
        let vitals = &shared.vitals;
        vitals.set_health(0, Health::Ready);
        let weighed = |word| weighed(word, vitals.vital(0), Reach::Unshed);
        assert_eq!(weighed(Word::new(3, 5)), Word::new(3, 5).0);
        assert_eq!(weighed(Word::new((1 << 24) - 1, 5)), CLOSED);
        vitals.ended(0, false);
        assert_eq!(weighed(Word::new(3, 5)), Word::new(19, 5).0);
        assert_eq!(weighed(Word::new((1 << 24) - 3, 5)), Word::new((1 << 24) - 2, 5).0);
        vitals.set_health(0, Health::Draining);
        assert_eq!(weighed(Word::new(3, 5)), CLOSED);
    }

    #[test]
    fn totals_are_of_the_open_members() {
        let shared = Shared::leak(1);
        for slot in 0..3 {
            shared.vitals.set_health(slot, Health::Ready);
        }
        shared.vitals.ended(0, false);
        let _held: Vec<_> = [0, 0, 1, 3].map(|slot| shared.load.reserve_unconditional(slot, 1, 1)).into();
        let totals = read(&[0, 1, 2, 3], shared, Reach::Unshed, &mut [0; 4]);
        assert_eq!((totals, totals.mean()), (Totals { in_flight: 3, open: 3 }, 1.0));
        assert_eq!(Totals::default().mean(), 0.0);
    }

    fn worker(slot: Slot, role: Role, models: &[&str], group: &str) -> Arc<Worker> {
        Arc::new(Worker {
            slot,
            era: 1,
            role,
            url: format!("http://10.0.0.1:{slot}").into(),
            prefix: "".into(),
            addrs: [([10, 0, 0, 1], 80).into()].into(),
            api_key: None,
            models: models.iter().map(|&m| m.into()).collect(),
            server_info: None,
            pairing: Pairing { group: group.into(), ..Pairing::default() },
        })
    }

    #[test]
    fn pairs_are_found_by_model_and_the_view_keeps_a_reading_of_every_group() {
        let shared = Shared::leak(1);
        shared.roster.publish(vec![
            worker(0, Role::Prefill, &["a"], "x"),
            worker(1, Role::Prefill, &["a"], "y"),
            worker(2, Role::Decode, &["a"], "x"),
            worker(3, Role::Decode, &["a"], "y"),
            worker(4, Role::Decode, &["a"], "y"),
            worker(5, Role::Regular, &["r"], ""),
        ]);
        let mut view = View::new(0, shared, None);
        let a = view.pairs(Some(b"a")).unwrap();
        assert_eq!(Some(a), view.find(Some(b"a"), Role::Prefill));
        assert_eq!((view.pairs(Some(b"r")), view.pairs(Some(b"?"))), (None, None));
        assert_eq!(view.pairs(None), Some(view.everyone(Role::Prefill)));
        assert_eq!(view.anyone(), view.everyone(Role::Regular));
        let [x, y] = [0, 1].map(|slot| view.mates(a, slot, 1).unwrap());
        let all = view.find(Some(b"a"), Role::Decode).unwrap();
        let mut places = Vec::new();
        let tree = |view: &mut View, id| view.pool(id).1.tree(Kind::Text);
        for (id, slots) in [(x, &[2][..]), (y, &[3, 4]), (all, &[2, 3, 4])] {
            let (pool, reading) = view.pool(id);
            assert_eq!((&*pool.slots, reading.words.len()), (slots, slots.len()));
            places.push(reading.place);
            assert_eq!(tree(&mut view, id), tree(&mut view, all), "groups share what is known of prefixes");
        }
        places.dedup();
        assert_eq!(places.len(), 3, "and not their turns");
        assert_eq!(view.mates(a, 0, 2), None);

        shared.roster.publish(vec![worker(0, Role::Prefill, &["a"], "x"), worker(2, Role::Decode, &["a"], "x")]);
        view.refresh();
        let a = view.pairs(Some(b"a")).unwrap();
        assert_eq!(view.mates(a, 0, 1), view.find(Some(b"a"), Role::Decode));
        assert_eq!(view.anyone(), view.everyone(Role::Prefill));
        drop(view);
        let view = View::new(0, shared, Some("b".into()));
        assert_eq!(view.pairs(None), None, "the default model counts");
    }
}
