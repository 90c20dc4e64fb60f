//! The tree under threads: interleavings chosen by a seed, threads that stop for ever, and plain stress.
//!
//! The explorer runs each operation on a thread of its own and lets one of them at a time go on to its next point
//! (`Pause`). A failing seed is printed; `PREFIX_SEED=n` runs it alone, `PREFIX_SEEDS=n` says how many are run:
//! `PREFIX_SEEDS=200000 cargo test --release --test prefix_tree interleavings`.

use std::cell::Cell;
use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use corelane::shared::prefix::{self, Counts, Forest, Found, Inserted, Pause, Point, TreeId, Trim, Trimmer};

use super::{Naive, alone, key, spread};

thread_local! {
    static ME: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Who may go on.
#[derive(Default)]
struct State {
    turn: Option<usize>,
    done: Vec<bool>,
    points: HashSet<Point>,
}

#[derive(Default)]
struct Baton {
    state: Mutex<State>,
    moved: Condvar,
}

/// Stops threads that have a number until it is their turn.
#[derive(Clone, Default)]
struct Hook(Arc<Baton>);

impl Pause for Hook {
    fn at(&self, point: Point) {
        if let Some(me) = ME.get() {
            let mut state = self.0.state.lock().unwrap();
            state.points.insert(point);
            self.0.hand_back(state, me);
        }
    }
}

impl Baton {
    fn hand_back(&self, mut state: std::sync::MutexGuard<State>, me: usize) {
        state.turn = None;
        self.moved.notify_all();
        drop(self.moved.wait_while(state, |state| state.turn != Some(me)).unwrap());
    }

    /// Lets a thread go on to its next point; false if it has ended.
    fn step(&self, who: usize) -> bool {
        let mut state = self.state.lock().unwrap();
        if state.done[who] {
            return false;
        }
        state.turn = Some(who);
        self.moved.notify_all();
        let state = self.moved.wait_while(state, |state| state.turn.is_some()).unwrap();
        !state.done[who]
    }

    /// A thread's body: waits for its first turn, and says when it has ended.
    fn run(&self, me: usize, work: impl FnOnce()) {
        ME.set(Some(me));
        drop(self.moved.wait_while(self.state.lock().unwrap(), |state| state.turn != Some(me)).unwrap());
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        ME.set(None);
        let mut state = self.state.lock().unwrap();
        (state.done[me], state.turn) = (true, None);
        self.moved.notify_all();
        drop(state);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    }
}

const NOW: u32 = 100;
/// Its entries from before are older than the limit.
const OLD: u16 = 4;
/// It is purged before the operations begin, or by one of them.
const PURGED: u16 = 5;

#[derive(Clone, Debug)]
enum Op {
    Insert(Vec<u64>, u16),
    Sweep,
    Purge,
    Match(Vec<u64>),
}

/// A few paths that have much in common, and their beginnings.
fn some_path(rng: &mut fastrand::Rng) -> Vec<u64> {
    let mut path: Vec<u64> = (1..=8).collect();
    match rng.u8(..6) {
        0 => path[4] = spread(4),
        1 => path[2] = spread(2),
        2 => path[0] = spread(0),
        3 => path.extend([9, 10]),
        4 => path[4] = 4,
        _ => {}
    }
    path.truncate(*[1, 2, 4, 4, 6, 8, 8, 10].get(rng.usize(..8)).unwrap());
    path
}

fn some_op(rng: &mut fastrand::Rng) -> Op {
    match rng.u8(..10) {
        0..5 => Op::Insert(some_path(rng), rng.u16(..=PURGED)),
        5..8 => Op::Sweep,
        8 => Op::Purge,
        _ => Op::Match(some_path(rng)),
    }
}

/// A forest and what must, and may, be in it.
struct World {
    forest: Forest<Hook>,
    hook: Hook,
    tree: TreeId,
    must: Naive,
    may: Naive,
}

impl World {
    fn new(rng: &mut fastrand::Rng) -> Self {
        let hook = Hook::default();
        let forest = Forest::with_pause(64 << 20, hook.clone());
        let tree = forest.tree(key());
        let mut world = World { forest, hook, tree, must: Naive::default(), may: Naive::default() };
        for _ in 0..rng.usize(..9) {
            // Much of it is about to go when the operations begin.
            let (path, slot) = (some_path(rng), if rng.bool() { OLD } else { rng.u16(..=PURGED) });
            world.forest.insert(tree, &path, slot, 1, if slot == OLD { 1 } else { NOW });
            if slot != OLD {
                world.must.insert(&path, slot, 1, NOW);
            }
            world.may.insert(&path, slot, 1, NOW);
        }
        world
    }

    /// What must and may be there when all of these have ended.
    fn expect(&mut self, ops: &[Op]) {
        for op in ops {
            if let Op::Insert(path, slot) = op {
                self.must.insert(path, *slot, 1, NOW);
                self.may.insert(path, *slot, 1, NOW);
            }
        }
        // Whenever it happened: a purged era never comes back.
        if ops.iter().any(|op| matches!(op, Op::Purge)) {
            for owners in self.must.0.values_mut().chain(self.may.0.values_mut()) {
                owners.remove(&PURGED);
            }
        }
    }

    fn run(&self, op: &Op) {
        match op {
            Op::Insert(path, slot) => {
                let inserted = self.forest.insert(self.tree, path, *slot, 1, NOW);
                assert!(inserted == Inserted::Whole || *slot == PURGED && inserted == Inserted::Gone);
            }
            Op::Sweep => self.sweep(),
            Op::Purge => self.forest.purge(PURGED, 1),
            Op::Match(path) => {
                let mut found = Found::default();
                self.forest.matched(self.tree, path, |_, _| true, &mut found);
                assert!(found.holders().iter().all(|holder| holder.depth as usize <= path.len()));
            }
        }
    }

    fn sweep(&self) {
        let want = Trim { now: NOW, until_bytes: u64::MAX, ttl_ticks: 50, max_steps: 1000 };
        let mut trimmer = Trimmer::new();
        while !self.forest.trim(&mut trimmer, &want).round {}
    }

    fn check(&self) {
        let mut found = Found::default();
        for path in self.may.0.keys() {
            self.forest.matched(self.tree, path, |_, _| true, &mut found);
            let held: BTreeMap<u16, u32> = found.holders().iter().map(|h| (h.slot, h.depth)).collect();
            let depths = |naive: &Naive, slot: u16| {
                naive.matched(path, |s, _| s == slot).get(&slot).map_or(0, |&(_, depth)| depth)
            };
            for slot in 0..=PURGED {
                let depth = held.get(&slot).copied().unwrap_or(0);
                let (must, may) = (depths(&self.must, slot), depths(&self.may, slot));
                assert!((must..=may).contains(&depth), "{slot} at {path:?}: {must} ≤ {depth} ≤ {may}");
            }
        }
    }
}

fn gone(counter: &impl Fn() -> Counts) -> bool {
    let counts = counter();
    (counts.bytes, counts.nodes, counts.owners) == (0, 0, 0)
}

fn wait_until(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        prefix::pin().flush();
        std::thread::yield_now();
    }
}

fn explore(seed: u64) -> (HashSet<Point>, impl Fn() -> Counts) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut world = World::new(&mut rng);
    let ops: Vec<Op> = (0..rng.usize(2..=3)).map(|_| some_op(&mut rng)).collect();
    let baton = Arc::clone(&world.hook.0);
    baton.state.lock().unwrap().done = vec![false; ops.len()];
    std::thread::scope(|scope| {
        for (me, op) in ops.iter().enumerate() {
            let (world, baton) = (&world, &baton);
            scope.spawn(move || baton.run(me, || world.run(op)));
        }
        let mut alive: Vec<usize> = (0..ops.len()).collect();
        let mut who = alive[0];
        while !alive.is_empty() {
            // Some schedules change at every point, others hardly ever.
            if !alive.contains(&who) || rng.u64(..8) <= seed % 8 {
                who = *rng.choice(&alive).unwrap();
            }
            if !baton.step(who) {
                alive.retain(|&other| other != who);
            }
        }
    });
    world.expect(&ops);
    world.check();
    world.sweep();
    world.check();
    (std::mem::take(&mut baton.state.lock().unwrap().points), world.forest.counter())
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|n| n.parse().expect("a number"))
}

#[test]
fn interleavings_by_seed_lose_nothing_invent_nothing_and_leak_nothing() {
    let _alone = alone();
    let seeds = match number("PREFIX_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("PREFIX_SEEDS").unwrap_or(400),
    };
    let (mut points, mut counters) = (HashSet::new(), Vec::new());
    let many = seeds.end - seeds.start > 300;
    for seed in seeds {
        let outcome = std::panic::catch_unwind(|| explore(seed));
        let Ok((some, counter)) = outcome else { panic!("PREFIX_SEED={seed} fails") };
        points.extend(some);
        counters.push(counter);
    }
    assert!(!many || points.len() == 10, "not all points were met: {points:?}");
    wait_until("everything is freed", || counters.iter().all(gone));
}

/// For every operation and every point of it: a thread stops there for ever, and the others do everything there is to
/// do, on the same paths. Then it goes on.
#[test]
fn a_thread_that_stops_anywhere_stops_nobody() {
    let _alone = alone();
    let mut stops = 0;
    for seed in 0..20 {
        for after in 0.. {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut world = World::new(&mut rng);
            let victim = [some_op(&mut rng), Op::Sweep, Op::Insert(some_path(&mut rng), 1)][seed as usize % 3].clone();
            let others: Vec<Op> = (0..12).map(|_| some_op(&mut rng)).chain([Op::Sweep, Op::Sweep]).collect();
            let baton = Arc::clone(&world.hook.0);
            baton.state.lock().unwrap().done = vec![false];
            let ended = std::thread::scope(|scope| {
                scope.spawn(|| baton.run(0, || world.run(&victim)));
                let ended = !(0..=after).all(|_| baton.step(0));
                // On this thread, which nothing stops: a hang here is the failure.
                others.iter().for_each(|op| world.run(op));
                while baton.step(0) {}
                ended
            });
            world.expect(&[others, vec![victim]].concat());
            world.check();
            stops += 1;
            if ended {
                break;
            }
        }
    }
    assert!(stops > 150, "{stops}");
}

/// What slot may insert what path: every third path of the pool.
const FAMILIES: u64 = 3;

fn pool() -> Vec<Vec<u64>> {
    (0..60u64)
        .map(|n| {
            let mut rng = fastrand::Rng::with_seed(n / 6);
            let mut path: Vec<u64> = (0..30).map(|_| rng.u64(..)).collect();
            path[(n % 6) as usize * 4 + 3] ^= n << 50;
            path.truncate(10 + (n * 7 % 21) as usize);
            path
        })
        .collect()
}

/// The longest part of `path` that a slot of a family can have.
fn most(pool: &[Vec<u64>], path: &[u64], family: u64) -> u32 {
    let common = |other: &Vec<u64>| other.iter().zip(path).take_while(|(a, b)| a == b).count() as u32;
    pool.iter().skip(family as usize).step_by(FAMILIES as usize).map(common).max().unwrap()
}

#[test]
fn stress_every_insertion_is_found_and_nobody_owns_what_it_never_got() {
    let _alone = alone();
    stress(Duration::from_millis(number("PREFIX_STRESS_MS").unwrap_or(400)));
}

fn stress(length: Duration) {
    let forest = Forest::new(8 << 20);
    let tree = forest.tree(key());
    let pool = pool();
    let limits: Vec<[u32; 3]> = pool.iter().map(|path| [0, 1, 2].map(|family| most(&pool, path, family))).collect();
    let eras: Vec<AtomicU32> = (0..6).map(|_| AtomicU32::new(1)).collect();
    let stop = AtomicBool::new(false);
    let lane = |lane: u16| {
        let mut rng = fastrand::Rng::with_seed(u64::from(lane));
        let (mut found, mut era, mut n) = (Found::default(), 1, 0u32);
        while !stop.load(Ordering::Relaxed) {
            let i = rng.usize(..pool.len());
            forest.matched(tree, &pool[i], |_, _| true, &mut found);
            for h in found.holders() {
                assert!(h.depth <= limits[i][h.slot as usize % 3], "{h:?} of {i}");
                assert!(h.era <= eras[h.slot as usize].load(Ordering::SeqCst));
                assert!(h.slot != lane || h.era == era, "purged: {h:?}");
            }
            let path = &pool[i - i % 3 + lane as usize % 3];
            let part = &path[..rng.usize(1..=path.len())];
            assert_eq!(forest.insert(tree, part, lane, era, 1000 + n / 100), Inserted::Whole);
            forest.matched(tree, part, |slot, _| slot == lane, &mut found);
            assert_eq!((found.depth() as usize, found.holders()[0].era), (part.len(), era), "{part:?}");
            n += 1;
            if n.is_multiple_of(500) {
                forest.purge(lane, era);
                era += 1;
                eras[lane as usize].store(era, Ordering::SeqCst);
                forest.matched(tree, part, |slot, _| slot == lane, &mut found);
                assert!(found.holders().is_empty());
            }
        }
        n
    };
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..4).map(|n| scope.spawn(move || lane(n))).collect();
        let mut trimmer = Trimmer::new();
        let start = Instant::now();
        while start.elapsed() < length && !lanes.iter().any(|lane| lane.is_finished()) {
            let want = Trim { now: 1, until_bytes: u64::MAX, ttl_ticks: 0, max_steps: 37 };
            forest.trim(&mut trimmer, &want);
        }
        stop.store(true, Ordering::Relaxed);
        assert!(lanes.into_iter().map(|lane| lane.join().unwrap()).sum::<u32>() > 1000);
    });
    let counts = forest.counts();
    assert!(counts.merged > 0 && counts.trimmed > 0, "{counts:?}");
}
