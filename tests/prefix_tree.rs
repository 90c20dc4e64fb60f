//! The prefix tree against a naive map, under threads, at its budget, and with threads that stop.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use corelane::config::Role;
use corelane::shared::prefix::{self, Forest, Found, Inserted, Kind, Pause, TreeKey, Trim, Trimmer};
use proptest::prelude::*;

/// The allocator of the binary: resident memory is judged with it. Debug builds keep the system's, for sanitizers.
#[cfg(not(debug_assertions))]
#[global_allocator]
static GLOBAL: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[path = "prefix_tree/threads.rs"]
mod threads;

/// What the forest should say: for every path from the top, who owns it.
#[derive(Default)]
struct Naive(BTreeMap<Vec<u64>, BTreeMap<u16, (u32, u32)>>);

impl Naive {
    fn insert(&mut self, path: &[u64], slot: u16, era: u32, tick: u32) {
        for end in 1..=path.len() {
            self.0.entry(path[..end].to_vec()).or_default().insert(slot, (era, tick));
        }
    }

    /// Deepest part of the path that each worker has.
    fn matched(&self, path: &[u64], usable: impl Fn(u16, u32) -> bool) -> BTreeMap<u16, (u32, u32)> {
        let mut found = BTreeMap::new();
        for end in 1..=path.len() {
            for (&slot, &(era, _)) in self.0.get(&path[..end]).into_iter().flatten() {
                if usable(slot, era) {
                    found.insert(slot, (era, end as u32));
                }
            }
        }
        found
    }
}

fn key() -> TreeKey {
    TreeKey::new(Some("m"), Role::Regular, Kind::Text)
}

/// Symbols are hashes in earnest; some tests want many that begin alike.
fn spread(symbol: u64) -> u64 {
    symbol.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[derive(Clone, Debug)]
enum Act {
    Insert { path: Vec<u64>, slot: u16, tick: u32 },
    Match { path: Vec<u64> },
    Purge { slot: u16 },
    Sweep { steps: usize },
}

fn path() -> impl Strategy<Value = Vec<u64>> {
    prop_oneof![
        4 => prop::collection::vec(0u64..3, 0..14),
        1 => prop::collection::vec((0u64..40).prop_map(spread), 1..5),
        1 => prop::collection::vec(0u64..40, 1..5),
    ]
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        6 => (path(), 0u16..6, 0u32..50).prop_map(|(path, slot, tick)| Act::Insert { path, slot, tick }),
        4 => path().prop_map(|path| Act::Match { path }),
        1 => (0u16..6).prop_map(|slot| Act::Purge { slot }),
        1 => (1usize..60).prop_map(|steps| Act::Sweep { steps }),
    ]
}

fn check(forest: &Forest, naive: &Naive, path: &[u64], odd_only: bool) {
    let usable = |slot: u16, _| !odd_only || slot % 2 == 1;
    let mut found = Found::default();
    forest.matched(forest.find(key()).unwrap(), path, usable, &mut found);
    let expected = naive.matched(path, usable);
    assert!(found.holders().is_sorted_by(|a, b| a.depth >= b.depth));
    assert_eq!(found.holders().len(), expected.len(), "{path:?}: {found:?}, not {expected:?}");
    for holder in found.holders() {
        assert_eq!(expected.get(&holder.slot), Some(&(holder.era, holder.depth)), "{path:?}: {holder:?}");
    }
}

fn sweep(steps: usize) -> Trim {
    Trim { now: 100, until_bytes: u64::MAX, ttl_ticks: 0, max_steps: steps }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn agrees_with_a_naive_map(acts in prop::collection::vec(act(), 1..120)) {
        let _alone = alone();
        let forest = Forest::new(64 << 20);
        let tree = forest.tree(key());
        let (mut naive, mut eras, mut trimmer) = (Naive::default(), [1u32; 6], Trimmer::new());
        for act in acts {
            match act {
                Act::Insert { path, slot, tick } => {
                    let era = eras[slot as usize];
                    assert_eq!(forest.insert(tree, &path, slot, era, tick), Inserted::Whole);
                    naive.insert(&path, slot, era, tick);
                    check(&forest, &naive, &path, false);
                }
                Act::Match { path } => [false, true].iter().for_each(|&odd| check(&forest, &naive, &path, odd)),
                Act::Purge { slot } => {
                    forest.purge(slot, eras[slot as usize]);
                    eras[slot as usize] += 1;
                    naive.0.values_mut().for_each(|owners| { owners.remove(&slot); });
                }
                Act::Sweep { steps } => { forest.trim(&mut trimmer, &sweep(steps)); }
            }
        }
        for path in naive.0.keys() {
            check(&forest, &naive, path, false);
        }
    }
}

/// Calls [`Forest::trim`] until rounds find nothing more to do.
fn settle<P: Pause>(forest: &Forest<P>, trimmer: &mut Trimmer, want: &Trim) {
    for _ in 0..100_000 {
        if forest.trim(trimmer, want).idle {
            return;
        }
    }
    panic!("no end: {:?}", forest.counts());
}

/// Rounds of trimming, however little there is to do.
fn rounds<P: Pause>(forest: &Forest<P>, trimmer: &mut Trimmer, want: &Trim, rounds: usize) {
    for _ in 0..rounds {
        while !forest.trim(trimmer, want).round {}
    }
}

fn depth_of<P: Pause>(forest: &Forest<P>, path: &[u64], slot: u16) -> u32 {
    let mut found = Found::default();
    forest.matched(forest.tree(key()), path, |s, _| s == slot, &mut found);
    assert!(found.holders().iter().all(|holder| holder.slot == slot) && found.holders().len() <= 1);
    found.depth()
}

fn unique(n: u64, len: u64) -> Vec<u64> {
    (0..len).map(|i| spread(n * 1000 + i)).collect()
}

#[test]
fn conversations_merge_into_few_nodes_and_keep_their_owners() {
    let _alone = alone();
    let forest = Forest::new(64 << 20);
    let tree = forest.tree(key());
    for talk in 0..100 {
        let path = unique(talk, 200);
        (1..=40).for_each(|turn| {
            forest.insert(tree, &path[..turn * 5], talk as u16, 1, turn as u32);
        });
    }
    let before = forest.counts();
    assert!(before.nodes >= 4000 && before.bytes < 64 * 20_000, "{before:?}");
    settle(&forest, &mut Trimmer::new(), &sweep(777));
    collect(&forest);
    let after = forest.counts();
    assert!(after.nodes == 100 && after.merged == 3900 && after.owners == 100, "{after:?}");
    for talk in 0..100 {
        assert_eq!(depth_of(&forest, &unique(talk, 200), talk as u16), 200);
    }
}

/// Lets the collector free what was unlinked.
fn collect(forest: &Forest) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while forest.counts().garbage > 0 && Instant::now() < deadline {
        prefix::pin().flush();
        std::thread::yield_now();
    }
    assert_eq!(forest.counts().garbage, 0);
}

/// The collector is one a process: a test that looks at memory, or keeps a thread pinned, has it for itself.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn a_purged_worker_is_gone_at_once_and_its_memory_soon() {
    let _alone = alone();
    let forest = Forest::new(64 << 20);
    let tree = forest.tree(key());
    for n in 0..500 {
        forest.insert(tree, &unique(n, 20), 1, 1, 1);
        forest.insert(tree, &unique(n, if n % 2 == 0 { 10 } else { 30 }), 2, 1, 1);
    }
    forest.purge(1, 1);
    assert_eq!(forest.insert(tree, &unique(0, 20), 1, 1, 1), Inserted::Gone);
    for n in 0..500 {
        assert_eq!(depth_of(&forest, &unique(n, 20), 1), 0);
        assert_eq!(depth_of(&forest, &unique(n, 20), 2), if n % 2 == 0 { 10 } else { 20 });
    }
    forest.insert(tree, &unique(7, 5), 1, 2, 1);
    assert_eq!(depth_of(&forest, &unique(7, 20), 1), 5, "it returned, and starts with what it gets now");
    let mut trimmer = Trimmer::new();
    settle(&forest, &mut trimmer, &sweep(100));
    collect(&forest);
    assert_eq!(forest.counts().owners, 502, "{:?}", forest.counts());
    forest.purge(1, 2);
    forest.purge(2, 1);
    settle(&forest, &mut trimmer, &sweep(100));
    collect(&forest);
    let counts = forest.counts();
    assert_eq!((counts.nodes, counts.owners, counts.bytes), (0, 0, 0), "{counts:?}");
}

#[test]
fn what_is_idle_for_longer_than_the_limit_goes() {
    let _alone = alone();
    let forest = Forest::new(64 << 20);
    let tree = forest.tree(key());
    (0..300).for_each(|n| {
        forest.insert(tree, &unique(n, 20), 1, 1, n as u32);
    });
    let want = Trim { now: 300, until_bytes: u64::MAX, ttl_ticks: 100, max_steps: 50 };
    rounds(&forest, &mut Trimmer::new(), &want, 1);
    for n in 0..300 {
        assert_eq!(depth_of(&forest, &unique(n, 20), 1), if n < 200 { 0 } else { 20 });
    }
}

#[test]
fn the_least_recently_used_go_first() {
    let _alone = alone();
    let forest = Forest::new(64 << 20);
    let tree = forest.tree(key());
    (0..2000).for_each(|n| {
        forest.insert(tree, &unique(n, 50), 1, 1, 1 + n as u32);
    });
    (0..100).for_each(|n| {
        forest.insert(tree, &unique(n, 50), 1, 1, 2001);
    });
    let until_bytes = forest.counts().bytes / 2;
    let want = Trim { now: 2001, until_bytes, ttl_ticks: 0, max_steps: 100 };
    rounds(&forest, &mut Trimmer::new(), &want, 3);
    collect(&forest);
    let has = |range: std::ops::Range<u64>| range.filter(|&n| depth_of(&forest, &unique(n, 50), 1) == 50).count();
    assert!(forest.counts().bytes.abs_diff(until_bytes) < until_bytes / 20, "{:?}", forest.counts());
    assert_eq!(has(0..100), 100, "used again");
    assert_eq!(has(1300..2000), 700, "young");
    assert_eq!(has(100..600), 0, "old");
}

#[test]
fn insertions_alone_keep_to_the_budget_and_prefer_the_young() {
    let _alone = alone();
    let budget = 4 << 20;
    let forest = Forest::new(budget);
    let tree = forest.tree(key());
    let (mut written, mut n, mut most) = (0, 0, 0);
    while written < 20 * budget {
        let path = unique(n, 60);
        // One in ten is asked for again and again.
        forest.insert(tree, &path, 1, 1, n as u32);
        forest.insert(tree, &unique(n % 100, 60), 2, 1, n as u32);
        most = most.max(forest.counts().bytes);
        written += 8 * 60;
        n += 1;
    }
    let counts = forest.counts();
    assert!(most <= budget + budget / 10, "{most}");
    assert!(counts.bytes > budget / 4 * 3, "{counts:?}");
    assert!(counts.refused < n / 20, "{counts:?} of {n}");
    let hot = (0..100).filter(|&n| depth_of(&forest, &unique(n, 60), 2) == 60).count();
    assert!(hot >= 95, "{hot}");
}

#[test]
fn churn_on_two_lanes_with_a_trimming_control_thread_keeps_to_the_budget() {
    let _alone = alone();
    churn(4 << 20, 20);
}

/// 20 times a budget of 256 MiB, and resident memory is flat:
/// `cargo test --release --test prefix_tree -- --ignored --nocapture`.
#[test]
#[ignore = "long"]
fn long_churn() {
    let _alone = alone();
    churn(256 << 20, 20);
}

fn churn(budget: u64, times: u64) {
    let forest = Forest::new(budget);
    let tree = forest.tree(key());
    let stop = AtomicBool::new(false);
    let resident = || {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    };
    let mut at_first = 0;
    std::thread::scope(|scope| {
        let forest = &forest;
        let control = scope.spawn(|| {
            let mut trimmer = Trimmer::new();
            let mut most = 0;
            for now in 0.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let want = Trim { now: now / 8, until_bytes: budget / 10 * 9, ttl_ticks: 0, max_steps: 2000 };
                forest.trim(&mut trimmer, &want);
                most = most.max(forest.counts().bytes);
                std::thread::sleep(Duration::from_millis(1));
            }
            most
        });
        let lane = |lane: u64| {
            move || {
                let mut written = 0;
                for n in 0.. {
                    let talk = unique(lane << 40 | n, 128);
                    (1..=4).for_each(|turn| {
                        forest.insert(tree, &talk[..turn * 32], (n % 100) as u16, 1, (n / 500) as u32);
                    });
                    written += 8 * 128;
                    if written > times * budget / 2 {
                        break;
                    }
                }
            }
        };
        let lanes = [scope.spawn(lane(1)), scope.spawn(lane(2))];
        while lanes.iter().any(|lane| !lane.is_finished()) {
            std::thread::sleep(Duration::from_millis(20));
            if forest.counts().trimmed > 0 && at_first == 0 {
                at_first = resident();
            }
        }
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
        stop.store(true, Ordering::Relaxed);
        let most = control.join().unwrap();
        assert!(most <= budget + budget / 10, "{most}");
        println!("at most {most} of {budget} bytes; resident {at_first}, at the end {}", resident());
    });
    let counts = forest.counts();
    println!("{counts:?}");
    assert!(counts.trimmed > 0 && counts.bytes > budget / 2, "{counts:?}");
    // A sanitizer keeps what was freed.
    let sanitized = std::env::var_os("ASAN_OPTIONS").is_some();
    assert!(sanitized || resident() < at_first + budget / 4 + (8 << 20), "{at_first} → {}", resident());
}

#[test]
fn a_forest_that_is_dropped_leaves_nothing() {
    let _alone = alone();
    let forest = Forest::new(4 << 20);
    let tree = forest.tree(key());
    (0..20_000).for_each(|n| {
        forest.insert(tree, &unique(n, 1 + n % 70), (n % 90) as u16, 1, n as u32);
    });
    let counter = forest.counter();
    assert!(counter().bytes > 0);
    drop(forest);
    let deadline = Instant::now() + Duration::from_secs(20);
    while counter().bytes > 0 && Instant::now() < deadline {
        prefix::pin().flush();
        std::thread::yield_now();
    }
    let counts = counter();
    assert_eq!((counts.bytes, counts.garbage, counts.nodes, counts.owners), (0, 0, 0, 0));
}

#[test]
fn trees_are_apart_and_released_with_their_model() {
    let _alone = alone();
    let forest = Forest::new(64 << 20);
    let keys = |n: usize| TreeKey::new(Some(&format!("m{n}")), Role::Regular, Kind::Text);
    let [a, b] = [0, 1].map(|n| forest.tree(keys(n)));
    assert!(a != b && forest.tree(keys(0)) == a);
    let path = unique(1, 10);
    forest.insert(a, &path, 1, 1, 1);
    let holders = |tree| {
        let mut found = Found::default();
        forest.matched(tree, &path, |_, _| true, &mut found);
        found.holders().len()
    };
    assert_eq!([holders(a), holders(b)], [1, 0]);
    forest.release_except(&[keys(1)]);
    assert_eq!((holders(a), forest.insert(a, &path, 1, 1, 1)), (0, Inserted::Gone));
    settle(&forest, &mut Trimmer::new(), &sweep(100));
    collect(&forest);
    assert_eq!(forest.counts().nodes, 0);
    assert_eq!(holders(forest.tree(keys(0))), 0);
    let trees: Vec<_> = (0..prefix::MAX_TREES + 5).map(|n| forest.tree(keys(n))).collect();
    assert_eq!(trees[prefix::MAX_TREES], trees[prefix::MAX_TREES + 4], "those beyond the last place share one tree");
    assert_ne!(trees[0], trees[1]);
    forest.insert(trees[prefix::MAX_TREES], &path, 3, 1, 1);
    assert_eq!([holders(trees[prefix::MAX_TREES + 2]), holders(trees[1])], [1, 0]);
}

#[test]
fn very_many_children_and_owners_and_very_long_paths() {
    let _alone = alone();
    let forest = Forest::new(256 << 20);
    let tree = forest.tree(key());
    let stem = unique(0, 40);
    for n in 0..20_000 {
        let mut path = stem.clone();
        path.push(spread(n | 1 << 40));
        forest.insert(tree, &path, (n % 3000) as u16, 1, 1 + n as u32);
        forest.insert(tree, &path[40..], (n % 3000) as u16, 1, 1);
    }
    let mut found = Found::default();
    forest.matched(tree, &stem, |_, _| true, &mut found);
    assert_eq!((found.holders().len(), found.depth()), (prefix::MAX_FOUND, 40));
    assert_eq!(depth_of(&forest, &stem, 1999), 40, "the last to come are among the owners");
    for n in (0..20_000).step_by(97) {
        let path = [&stem[..], &[spread(n | 1 << 40)]].concat();
        assert_eq!(
            (depth_of(&forest, &path, (n % 3000) as u16), depth_of(&forest, &path[40..], (n % 3000) as u16)),
            (41, 1)
        );
    }
    let long = unique(5, 16_384);
    forest.insert(tree, &long, 7, 1, 1);
    forest.insert(tree, &long[..10_001], 8, 1, 1);
    assert_eq!([7, 8].map(|slot| depth_of(&forest, &long, slot)), [16_384, 10_001]);
    let per_child = (forest.counts().bytes - 8 * 16_384) / 40_000;
    assert!(per_child < 160, "{per_child}");
}

/// A path with more different owner sets than a match remembers on its way down.
#[test]
fn owners_far_up_are_found_when_nobody_below_is_usable() {
    let _alone = alone();
    let forest = Forest::new(64 << 20);
    let tree = forest.tree(key());
    let path = unique(1, 400);
    (0..60).for_each(|slot| {
        forest.insert(tree, &path[..400 - 6 * slot as usize], slot, 1, 1);
    });
    for slot in 0..60 {
        assert_eq!(depth_of(&forest, &path, slot), 400 - 6 * u32::from(slot));
    }
}
