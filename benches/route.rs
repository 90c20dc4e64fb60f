//! What one decision costs: `choose` and the drop of its guard, by policy and size of the fleet.
//!
//! `cargo bench --bench route`. A lane that serves 100 000 requests a second decides every 10 µs, so that is how far
//! the clock moves between decisions. Where the name says `beside`, another lane decides without a pause meanwhile.
//!
//! `CORELANE_BENCH_LANES=ROUNDS cargo bench --bench route` tells how decisions scale from one lane to two instead: all of
//! a request's work without sockets (8 KiB read and hashed, a worker chosen, charged and released, the answer counted),
//! on one thread and on two that are pinned to cores 0 and 1, in turn.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use corelane::config::routes::Body;
use corelane::config::{Policy, Role};
use corelane::flow::inspect::{Inspector, KeyRules};
use corelane::flow::route::{Want, choose};
use corelane::lane::view::View;
use corelane::metrics::Time;
use corelane::shared::Shared;
use corelane::shared::load::{LoadGuard, Word};
use corelane::shared::roster::{Pairing, Slot, Worker};
use corelane::shared::vitals::Health;
use divan::{AllocProfiler, Bencher};

/// Shows allocations beside the times, if there are any: there must be none.
#[global_allocator]
static ALLOCATIONS: AllocProfiler = AllocProfiler::system();

const FLEETS: [usize; 4] = [8, 64, 256, 2048];
/// Requests that each worker has in flight on average while decisions are measured.
const BUSY: usize = 2;
const STEP_US: u64 = 10;

fn main() {
    match std::env::var("CORELANE_BENCH_LANES").ok().and_then(|rounds| rounds.parse().ok()) {
        Some(rounds) => lanes(rounds),
        None => divan::main(),
    }
}

/// Workers and conversations of [`lanes`].
const LANES_WORKERS: usize = 16;
const LANES_CHATS: usize = 64;

/// Requests a second of one lane and of two, by rounds.
fn lanes(rounds: usize) {
    let (shared, _held) = fleet(LANES_WORKERS);
    let mut ratios: Vec<f64> = Vec::new();
    for round in 1..=rounds {
        let [one, two] = [1, 2].map(|lanes| rate(shared, lanes));
        println!("round {round}: 1 lane {one:.0}/s, 2 lanes {two:.0}/s: {:.2}", two / one);
        ratios.push(two / one);
    }
    ratios.sort_by(f64::total_cmp);
    println!("median {:.2}", ratios[ratios.len() / 2]);
}

fn rate(shared: &'static Shared, lanes: usize) -> f64 {
    let begun = std::time::Instant::now();
    let done: u64 = std::thread::scope(|scope| {
        let lane = |lane| {
            move || {
                core_affinity::set_for_current(core_affinity::CoreId { id: lane });
                serve_for(shared, lane, std::time::Duration::from_millis(500))
            }
        };
        let threads: Vec<_> = (0..lanes).map(|at| scope.spawn(lane(at))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a lane that ends")).sum()
    });
    done as f64 / begun.elapsed().as_secs_f64()
}

fn serve_for(shared: &'static Shared, index: usize, time: std::time::Duration) -> u64 {
    let mut lane = Lane::new(index, shared, STEP_US);
    let mut inspector = Inspector::new();
    let chats: Vec<String> = (0..LANES_CHATS)
        .map(|chat| {
            let content = format!("Lane {index}, conversation {chat}: so it goes. ").repeat(200);
            format!("{{\"model\":\"some/model\",\"messages\":[{{\"role\":\"user\",\"content\":\"{content}\"}}]}}")
        })
        .collect();
    let (begun, mut done) = (std::time::Instant::now(), 0);
    while begun.elapsed() < time {
        for chat in &chats {
            inspector.begin(Body::Json(&["messages"]), b"");
            inspector.want_key(KeyRules { seed: 1, max_bytes: 1 << 20 });
            let ask = inspector.finish(black_box(chat.as_bytes())).expect("a good body");
            while !inspector.hash(&ask, chat.as_bytes()) {}
            let symbols = inspector.key().1;
            let model = Some(&b"some/model"[..]);
            let want = Want { model, policy: Policy::CacheAware, symbols, length: chat.len(), ..Want::default() };
            let tallies = shared.tallies.lane(index);
            lane.now_us += lane.step_us;
            let guard = choose(&mut lane.view, &want, lane.now_us, &mut lane.rng, tallies).expect("a worker");
            tallies.worker_response(guard.slot(), 200);
            tallies.request(0, 200);
            tallies.took(0, 0, Time::FirstByte, 900);
            tallies.took(0, 0, Time::Total, 1000);
            shared.vitals.ended(guard.slot(), true);
            drop(guard);
            done += 1;
        }
    }
    done
}

/// A fleet that is ready and busy.
fn fleet(workers: usize) -> (&'static Shared, Vec<LoadGuard>) {
    let shared = Shared::leak(2);
    let worker = |slot: usize| {
        Arc::new(Worker {
            slot: slot as Slot,
            era: 1,
            role: Role::Regular,
            url: format!("http://10.0.0.1:{slot}").into(),
            prefix: "".into(),
            addrs: [([10, 0, 0, 1], 80).into()].into(),
            api_key: None,
            models: ["some/model".into()].into(),
            server_info: None,
            pairing: Pairing::default(),
        })
    };
    shared.roster.publish((0..workers).map(worker).collect());
    for slot in 0..workers {
        shared.vitals.set_health(slot as Slot, Health::Ready);
    }
    let mut rng = fastrand::Rng::with_seed(1);
    let held = (0..BUSY * workers)
        .map(|_| shared.load.reserve_unconditional(rng.usize(..workers) as Slot, 1, 1).expect("room"))
        .collect();
    (shared, held)
}

struct Lane {
    lane: usize,
    shared: &'static Shared,
    view: View,
    rng: fastrand::Rng,
    now_us: u64,
    step_us: u64,
}

impl Lane {
    fn new(lane: usize, shared: &'static Shared, step_us: u64) -> Self {
        let view = View::new(lane, shared, None);
        Lane { lane, shared, view, rng: fastrand::Rng::with_seed(lane as u64), now_us: 0, step_us }
    }

    fn decide(&mut self, policy: Policy) {
        self.now_us += self.step_us;
        let want = Want { model: Some(b"some/model"), role: Role::Regular, policy, ..Want::default() };
        let tallies = self.shared.tallies.lane(self.lane);
        drop(black_box(choose(&mut self.view, &want, self.now_us, &mut self.rng, tallies)).expect("a worker"));
    }
}

/// Symbols of an 8 KiB prompt, and prompts that the tree knows.
const SYMBOLS: usize = 128;
const PROMPTS: usize = 64;
const PREFIX_FLEETS: [usize; 3] = [8, 256, 2048];

/// A lane that routes by prompts: ones that the tree knows, or ones that nobody has seen.
struct Prompts {
    lane: Lane,
    known: Vec<Vec<u64>>,
    new: Vec<u64>,
    next: usize,
}

impl Prompts {
    fn new(lane: Lane) -> Self {
        let mut rng = fastrand::Rng::with_seed(9);
        let mut symbols = || (0..SYMBOLS).map(|_| rng.u64(..)).collect::<Vec<u64>>();
        let mut prompts = Prompts { lane, known: (0..PROMPTS).map(|_| symbols()).collect(), new: symbols(), next: 0 };
        (0..PROMPTS).for_each(|_| prompts.decide(Policy::CacheAware, true));
        prompts
    }

    fn decide(&mut self, policy: Policy, hit: bool) {
        let lane = &mut self.lane;
        lane.now_us += lane.step_us;
        let symbols = if hit {
            self.next += 1;
            &self.known[self.next % PROMPTS]
        } else {
            self.new[0] = lane.rng.u64(..);
            &self.new
        };
        let want =
            Want { model: Some(b"some/model"), policy, symbols, routing_key: b"user", length: 8192, ..Want::default() };
        let tallies = lane.shared.tallies.lane(lane.lane);
        drop(black_box(choose(&mut lane.view, &want, lane.now_us, &mut lane.rng, tallies)).expect("a worker"));
    }
}

fn prompts(bencher: Bencher, workers: usize, policy: Policy, hit: bool, beside: bool) {
    let (shared, _held) = fleet(workers);
    let mut lane = Prompts::new(Lane::new(0, shared, STEP_US));
    let mut neighbour = Prompts::new(Lane::new(1, shared, STEP_US));
    measure(bencher, || lane.decide(policy, hit), beside.then_some(|| neighbour.decide(policy, hit)));
}

#[divan::bench(args = PREFIX_FLEETS)]
fn cache_aware_hit(bencher: Bencher, workers: usize) {
    prompts(bencher, workers, Policy::CacheAware, true, false);
}

#[divan::bench(args = PREFIX_FLEETS)]
fn cache_aware_hit_beside(bencher: Bencher, workers: usize) {
    prompts(bencher, workers, Policy::CacheAware, true, true);
}

#[divan::bench(args = PREFIX_FLEETS)]
fn cache_aware_miss(bencher: Bencher, workers: usize) {
    prompts(bencher, workers, Policy::CacheAware, false, false);
}

#[divan::bench(args = PREFIX_FLEETS)]
fn cache_aware_miss_beside(bencher: Bencher, workers: usize) {
    prompts(bencher, workers, Policy::CacheAware, false, true);
}

#[divan::bench(args = PREFIX_FLEETS)]
fn prefix_hash(bencher: Bencher, workers: usize) {
    prompts(bencher, workers, Policy::PrefixHash, true, false);
}

#[divan::bench(args = PREFIX_FLEETS)]
fn consistent_hashing(bencher: Bencher, workers: usize) {
    prompts(bencher, workers, Policy::ConsistentHashing, true, false);
}

#[divan::bench(args = PREFIX_FLEETS)]
fn manual(bencher: Bencher, workers: usize) {
    prompts(bencher, workers, Policy::Manual, true, false);
}

#[divan::bench(args = PREFIX_FLEETS)]
fn bucket(bencher: Bencher, workers: usize) {
    prompts(bencher, workers, Policy::Bucket, true, false);
}

/// The inspection of a chat of that many bytes, with and without its key.
#[divan::bench(args = [(8192, false), (8192, true), (131_072, false), (131_072, true)])]
fn inspect_text(bencher: Bencher, (bytes, key): (usize, bool)) {
    let content = "All work and no play makes a dull prompt. ".repeat(bytes / 42);
    inspect(bencher, &format!("{{\"messages\":[{{\"role\":\"user\",\"content\":\"{content}\"}}]}}"), key);
}

/// The same of a list of token ids.
#[divan::bench(args = [(8192, false), (8192, true), (131_072, false), (131_072, true)])]
fn inspect_tokens(bencher: Bencher, (bytes, key): (usize, bool)) {
    inspect(bencher, &format!("{{\"messages\":[{}1]}}", "12345, ".repeat(bytes / 7)), key);
}

fn inspect(bencher: Bencher, body: &str, key: bool) {
    let mut inspector = Inspector::new();
    bencher.bench_local(|| {
        inspector.begin(Body::Json(&["messages"]), b"");
        if key {
            inspector.want_key(KeyRules { seed: 1, max_bytes: 1 << 20 });
        }
        let ask = inspector.finish(black_box(body.as_bytes())).expect("a good body");
        while !inspector.hash(&ask, body.as_bytes()) {}
        black_box(inspector.key().1.len())
    });
}

/// What the view's copy is measured against: one pass over the shared words, no copy.
fn decide_directly(shared: &'static Shared, workers: usize) {
    loop {
        let words = (0..workers as Slot).filter(|&slot| shared.vitals.usable(slot)).map(|s| (shared.load.word(s), s));
        let (word, slot): (Word, Slot) = words.min().expect("a worker");
        if let Ok(guard) = shared.load.reserve(slot, 1, word, 1) {
            drop(black_box(guard));
            return;
        }
    }
}

/// Measures `decide`, alone or while another thread runs `other` without a pause.
fn measure(bencher: Bencher, mut decide: impl FnMut(), other: Option<impl FnMut() + Send>) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        if let Some(mut other) = other {
            let stop = &stop;
            scope.spawn(move || {
                // Relaxed: it stops a loop, nothing else.
                while !stop.load(Ordering::Relaxed) {
                    other();
                }
            });
        }
        bencher.bench_local(&mut decide);
        stop.store(true, Ordering::Relaxed);
    });
}

fn policy(bencher: Bencher, workers: usize, policy: Policy, step_us: u64, beside: bool) {
    let (shared, _held) = fleet(workers);
    let mut lane = Lane::new(0, shared, step_us);
    let mut neighbour = Lane::new(1, shared, step_us);
    measure(bencher, || lane.decide(policy), beside.then_some(|| neighbour.decide(policy)));
}

#[divan::bench(args = FLEETS)]
fn least_load(bencher: Bencher, workers: usize) {
    policy(bencher, workers, Policy::LeastLoad, STEP_US, false);
}

#[divan::bench(args = FLEETS)]
fn round_robin(bencher: Bencher, workers: usize) {
    policy(bencher, workers, Policy::RoundRobin, STEP_US, false);
}

#[divan::bench(args = FLEETS)]
fn random(bencher: Bencher, workers: usize) {
    policy(bencher, workers, Policy::Random, STEP_US, false);
}

#[divan::bench(args = FLEETS)]
fn power_of_two(bencher: Bencher, workers: usize) {
    policy(bencher, workers, Policy::PowerOfTwo, STEP_US, false);
}

#[divan::bench(args = FLEETS)]
fn least_load_beside(bencher: Bencher, workers: usize) {
    policy(bencher, workers, Policy::LeastLoad, STEP_US, true);
}

#[divan::bench(args = FLEETS)]
fn round_robin_beside(bencher: Bencher, workers: usize) {
    policy(bencher, workers, Policy::RoundRobin, STEP_US, true);
}

#[divan::bench(args = FLEETS)]
fn random_beside(bencher: Bencher, workers: usize) {
    policy(bencher, workers, Policy::Random, STEP_US, true);
}

#[divan::bench(args = FLEETS)]
fn power_of_two_beside(bencher: Bencher, workers: usize) {
    policy(bencher, workers, Policy::PowerOfTwo, STEP_US, true);
}

/// The copy is read whole before every decision.
#[divan::bench(args = FLEETS)]
fn least_load_always_read(bencher: Bencher, workers: usize) {
    policy(bencher, workers, Policy::LeastLoad, 1000, false);
}

#[divan::bench(args = FLEETS)]
fn least_load_always_read_beside(bencher: Bencher, workers: usize) {
    policy(bencher, workers, Policy::LeastLoad, 1000, true);
}

#[divan::bench(args = FLEETS)]
fn least_load_directly(bencher: Bencher, workers: usize) {
    let (shared, _held) = fleet(workers);
    measure(bencher, || decide_directly(shared, workers), None::<fn()>);
}

#[divan::bench(args = FLEETS)]
fn least_load_directly_beside(bencher: Bencher, workers: usize) {
    let (shared, _held) = fleet(workers);
    measure(bencher, || decide_directly(shared, workers), Some(|| decide_directly(shared, workers)));
}
