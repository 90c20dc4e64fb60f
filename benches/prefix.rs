//! What the prefix tree costs: matching and insertion of 8 KiB prompts (128 symbols), alone and with a second lane on
//! the same tree, and bytes per block.
//!
//! `cargo bench --bench prefix`. The tree holds [`PATHS`] prompts below 64 shared prefixes; 2048 workers own them.
//!
//! `CORELANE_BENCH_MEMORY=churn cargo bench --bench prefix -- [MIB [TURNS]]` fills a budget of so many MiB over and
//! over with conversations of all lengths, by two threads, beside one that trims as the control thread does, and says
//! each time what is counted and what is resident.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use corelane::config::Role;
use corelane::shared::prefix::{Forest, Found, Kind, TreeId, TreeKey, Trim, Trimmer, pin};
use divan::Bencher;

/// The allocator of the binary, whose size classes the tree counts by.
#[global_allocator]
static GLOBAL: mimalloc::MiMalloc = mimalloc::MiMalloc;

const PATHS: usize = 20_000;
const PREFIXES: usize = 64;
/// Symbols of an 8 KiB prompt, and of the part that many prompts share.
const SYMBOLS: usize = 128;
const SHARED: usize = 96;
const BUDGET: u64 = 1 << 30;

fn main() {
    // Memory is measured in processes of their own.
    match std::env::var("CORELANE_BENCH_MEMORY").as_deref() {
        Ok("prompts") => return prompts(),
        Ok("talks") => return talks(),
        Ok("churn") => return churn(),
        _ => {}
    }
    for what in ["prompts", "talks"] {
        let this = std::env::current_exe().expect("linux");
        let done = std::process::Command::new(this).env("CORELANE_BENCH_MEMORY", what).status().expect("it starts");
        assert!(done.success());
    }
    two_lanes();
    divan::main();
}

struct Bench {
    forest: Forest,
    tree: TreeId,
    paths: Vec<Vec<u64>>,
}

fn owner(path: usize) -> u16 {
    (path * 7 % 2048) as u16
}

fn build(shared: usize) -> Bench {
    let forest = Forest::new(BUDGET);
    let tree = forest.tree(TreeKey::new(Some("m"), Role::Regular, Kind::Text));
    let mut rng = fastrand::Rng::with_seed(7);
    let prefixes: Vec<Vec<u64>> = (0..PREFIXES).map(|_| (0..shared).map(|_| rng.u64(..)).collect()).collect();
    let paths: Vec<Vec<u64>> = (0..PATHS)
        .map(|i| {
            let mut path = prefixes[i % PREFIXES].clone();
            path.extend((shared..SYMBOLS).map(|_| rng.u64(..)));
            path
        })
        .collect();
    for (i, path) in paths.iter().enumerate() {
        forest.insert(tree, path, owner(i), 1, 1);
    }
    Bench { forest, tree, paths }
}

/// One path that is asked for again and again: everything is in the cache.
#[divan::bench(args = [0, SHARED])]
fn match_hot(bencher: Bencher, shared: usize) {
    let b = build(shared);
    let mut found = Found::default();
    bencher.bench_local(|| {
        b.forest.matched(b.tree, black_box(&b.paths[5]), |_, _| true, &mut found);
        assert_eq!(found.depth(), SYMBOLS as u32);
    });
}

/// Any of all paths: most of it comes from memory.
#[divan::bench(args = [0, SHARED])]
fn match_any(bencher: Bencher, shared: usize) {
    let b = build(shared);
    let (mut found, mut i) = (Found::default(), 0);
    bencher.bench_local(|| {
        i = (i + 7919) % PATHS;
        b.forest.matched(b.tree, black_box(&b.paths[i]), |_, _| true, &mut found);
        assert_eq!(found.depth(), SYMBOLS as u32);
    });
}

/// A path that shares a prefix only: up to 65 owners there.
#[divan::bench]
fn match_shared_part(bencher: Bencher) {
    let b = build(SHARED);
    let mut path = b.paths[5].clone();
    path[SHARED] ^= 1 << 60;
    let mut found = Found::default();
    bencher.bench_local(|| b.forest.matched(b.tree, black_box(&path), |_, _| true, &mut found));
    assert_eq!(found.depth(), SHARED as u32);
}

/// A path of which the tree knows nothing.
#[divan::bench]
fn match_miss(bencher: Bencher) {
    let b = build(SHARED);
    let path: Vec<u64> = (0..SYMBOLS).map(|_| fastrand::u64(..)).collect();
    let mut found = Found::default();
    bencher.bench_local(|| b.forest.matched(b.tree, black_box(&path), |_, _| true, &mut found));
}

#[divan::bench(args = [0, SHARED])]
fn insert_known_hot(bencher: Bencher, shared: usize) {
    let b = build(shared);
    bencher.bench_local(|| b.forest.insert(b.tree, black_box(&b.paths[5]), owner(5), 1, 1));
}

/// Any of all paths, by its owner, at a tick that has not moved.
#[divan::bench(args = [0, SHARED])]
fn insert_known_any(bencher: Bencher, shared: usize) {
    let b = build(shared);
    let mut i = 0;
    bencher.bench_local(|| {
        i = (i + 7919) % PATHS;
        b.forest.insert(b.tree, black_box(&b.paths[i]), owner(i), 1, 1)
    });
}

/// New paths; the budget is large enough for a while, then insertions make room themselves.
#[divan::bench(args = [64 << 20, 1 << 30])]
fn insert_new(bencher: Bencher, budget: u64) {
    let forest = Forest::new(budget);
    let tree = forest.tree(TreeKey::new(Some("m"), Role::Regular, Kind::Text));
    let mut rng = fastrand::Rng::with_seed(7);
    let mut path = [0u64; SYMBOLS];
    let mut tick = 0;
    bencher.bench_local(|| {
        path.iter_mut().for_each(|symbol| *symbol = rng.u64(..));
        tick += 1;
        forest.insert(tree, black_box(&path), rng.u16(..2048), 1, tick >> 10)
    });
}

/// Matches and insertions of known paths per second, by threads.
fn rate(b: &Bench, lanes: usize) -> f64 {
    let (begin, length) = (Barrier::new(lanes), Duration::from_millis(700));
    let one = |lane: usize| {
        let (mut found, mut i, mut n) = (Found::default(), lane * PATHS / 2, 0u64);
        begin.wait();
        let start = Instant::now();
        while start.elapsed() < length {
            for _ in 0..64 {
                i = (i + 7919) % PATHS;
                b.forest.matched(b.tree, &b.paths[i], |_, _| true, &mut found);
                b.forest.insert(b.tree, &b.paths[i], owner(i), 1, 1);
                n += 1;
            }
        }
        n as f64 / start.elapsed().as_secs_f64()
    };
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|lane| scope.spawn(move || one(lane))).collect();
        lanes.into_iter().map(|lane| lane.join().expect("no panic")).sum()
    })
}

fn two_lanes() {
    let b = build(SHARED);
    let mut best = [0f64; 2];
    for _ in 0..5 {
        best[0] = best[0].max(rate(&b, 1));
        best[1] = best[1].max(rate(&b, 2));
    }
    println!(
        "match and insert of a known path: {:.2} M/s, two threads {:.2} M/s: {:.2} x",
        best[0] / 1e6,
        best[1] / 1e6,
        best[1] / best[0]
    );
}

/// Resident bytes of the process.
fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("linux");
    pages.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok()).expect("a number") * 4096
}

fn report(what: &str, forest: &Forest, blocks: usize, before: u64) {
    let counts = forest.counts();
    println!(
        "{what}: {:.1} bytes a block as counted, {:.1} resident, {} nodes",
        counts.bytes as f64 / blocks as f64,
        (resident() - before) as f64 / blocks as f64,
        counts.nodes
    );
}

fn prompts() {
    let mut rng = fastrand::Rng::with_seed(1);
    let before = resident();
    let forest = Forest::new(BUDGET);
    let tree = forest.tree(TreeKey::new(Some("m"), Role::Regular, Kind::Text));
    let unique = 100_000;
    for i in 0..unique {
        let path: [u64; SYMBOLS] = std::array::from_fn(|_| rng.u64(..));
        forest.insert(tree, &path, owner(i), 1, 1);
    }
    report("unique 8 KiB prompts", &forest, unique * SYMBOLS, before);
}

fn talks() {
    let mut rng = fastrand::Rng::with_seed(1);
    let before = resident();
    let forest = Forest::new(BUDGET);
    let tree = forest.tree(TreeKey::new(Some("m"), Role::Regular, Kind::Text));
    let (talks, turns) = (10_000, 40);
    let mut blocks = 0;
    for talk in 0..talks {
        let mut path = Vec::new();
        for turn in 1..=turns {
            path.extend((path.len()..turn * 300 / 64).map(|_| rng.u64(..)));
            forest.insert(tree, &path, owner(talk), 1, turn as u32);
        }
        blocks += path.len();
    }
    report("conversations of 300 bytes a turn", &forest, blocks, before);
    let mut trimmer = Trimmer::new();
    let want = Trim { now: 41, until_bytes: BUDGET, ttl_ticks: 0, max_steps: 10_000 };
    let start = Instant::now();
    let mut steps = 0;
    for _ in 0..2 {
        loop {
            let done = forest.trim(&mut trimmer, &want);
            steps += done.steps;
            if done.round || done.idle {
                break;
            }
        }
    }
    println!("two rounds of trimming: {steps} steps, {:.0} ns each", start.elapsed().as_nanos() as f64 / steps as f64);
    while forest.counts().garbage > 0 {
        pin().flush();
    }
    report("the same, merged", &forest, blocks, before);
}

/// What the threads of the soak share.
struct Soak {
    forest: Forest,
    tree: TreeId,
    /// Bytes of symbols that were inserted and were new.
    written: AtomicU64,
    stop: AtomicBool,
    start: Instant,
}

impl Soak {
    fn now(&self) -> u32 {
        // A tick is 10 ms here, so that ages differ although all goes faster than in life.
        (self.start.elapsed().as_millis() / 10) as u32
    }

    /// Conversations that grow by turns of different lengths, a few hundred at a time; new ones replace those that
    /// have ended.
    fn lane(&self, seed: u64) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut open: Vec<(Vec<u64>, usize, u16)> = Vec::new();
        // Relaxed, here and below: counts, and a word that ends a loop.
        while !self.stop.load(Ordering::Relaxed) {
            if open.len() < 300 {
                // Lengths over two orders of magnitude: 4 to 600 blocks, short ones more often.
                let end = (4.0 * 150f64.powf(rng.f64())) as usize;
                open.push((Vec::new(), end, rng.u16(..64)));
            }
            let at = rng.usize(..open.len());
            let (path, end, slot) = &mut open[at];
            let more = rng.usize(1..40).min(*end - path.len());
            path.extend((0..more).map(|_| rng.u64(..)));
            self.forest.insert(self.tree, path, *slot, 1, self.now());
            self.written.fetch_add(8 * more as u64, Ordering::Relaxed);
            if path.len() == *end {
                open.swap_remove(at);
            }
        }
    }

    /// As the control thread does it.
    fn trim(&self) {
        let mut trimmer = Trimmer::new();
        let until_bytes = self.forest.budget() / 8 * 7;
        while !self.stop.load(Ordering::Relaxed) {
            let want = Trim { now: self.now(), until_bytes, ttl_ticks: 0, max_steps: 512 };
            self.forest.trim(&mut trimmer, &want);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn churn() {
    let mut numbers = std::env::args().skip(1).filter_map(|arg| arg.parse::<u64>().ok());
    let (mib, turns) = (numbers.next().unwrap_or(256), numbers.next().unwrap_or(20));
    let before = resident();
    let forest = Forest::new(mib << 20);
    let tree = forest.tree(TreeKey::new(Some("m"), Role::Regular, Kind::Text));
    let (written, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let soak = Soak { forest, tree, written, stop, start: Instant::now() };
    println!(
        "| budgets written | s | counted MiB | of it garbage | resident MiB | nodes | trimmed | merged | refused |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    std::thread::scope(|scope| {
        let soak = &soak;
        scope.spawn(|| soak.trim());
        (1..=2).for_each(|seed| drop(scope.spawn(move || soak.lane(seed))));
        for turn in 1..=turns {
            while soak.written.load(Ordering::Relaxed) < turn * (mib << 20) {
                std::thread::sleep(Duration::from_millis(5));
            }
            let counts = soak.forest.counts();
            let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
            println!(
                "| {turn} | {:.1} | {:.1} | {:.1} | {:.1} | {} | {} | {} | {} |",
                soak.start.elapsed().as_secs_f64(),
                mib(counts.bytes),
                mib(counts.garbage),
                mib(resident() - before),
                counts.nodes,
                counts.trimmed,
                counts.merged,
                counts.refused,
            );
        }
        soak.stop.store(true, Ordering::Relaxed);
    });
}
