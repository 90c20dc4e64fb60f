//! What one decision costs: `choose` and the drop of its guard, by policy and size of the fleet.
//!
//! `cargo bench --bench route`. A lane that serves 100 000 requests a second decides every 10 µs, so that is how far
//! the clock moves between decisions. Where the name says `beside`, another lane decides without a pause meanwhile.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use corelane::config::{Policy, Role};
use corelane::flow::route::{Want, choose};
use corelane::lane::view::View;
use corelane::shared::Shared;
use corelane::shared::load::{LoadGuard, Word};
use corelane::shared::roster::{Slot, Worker};
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
    divan::main();
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
        })
    };
    shared.roster.publish((0..workers).map(worker).collect());
    for slot in 0..workers {
        shared.vitals.set_health(slot as Slot, Health::Ready);
    }
    let mut rng = fastrand::Rng::with_seed(1);
    let held = (0..BUSY * workers)
        .map(|_| shared.load.reserve_unconditional(rng.usize(..workers) as Slot, 1).expect("room"))
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
        let want = Want { model: Some(b"some/model"), role: Role::Regular, policy, avoid: &[] };
        let tallies = self.shared.tallies.lane(self.lane);
        drop(black_box(choose(&mut self.view, &want, self.now_us, &mut self.rng, tallies)).expect("a worker"));
    }
}

/// What the view's copy is measured against: one pass over the shared words, no copy.
fn decide_directly(shared: &'static Shared, workers: usize) {
    loop {
        let words = (0..workers as Slot).filter(|&slot| shared.vitals.usable(slot)).map(|s| (shared.load.word(s), s));
        let (word, slot): (Word, Slot) = words.min().expect("a worker");
        if let Ok(guard) = shared.load.reserve(slot, 1, word) {
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
