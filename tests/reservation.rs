//! The choice is the charge: what selection promises about counts, whoever chooses at the same time.
//!
//! Real views on real threads over one roster. Never asks what a worker would answer.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;

use corelane::config::{Policy, Role};
use corelane::fault::{Fault, What};
use corelane::flow::route::{Want, choose};
use corelane::lane::view::View;
use corelane::limits::{MAX_WORKERS, VIEW_AGE_US};
use corelane::metrics::Tally;
use corelane::shared::Shared;
use corelane::shared::load::{LoadGuard, Word};
use corelane::shared::roster::{Pairing, Slot, Slots, Worker};
use corelane::shared::vitals::Health;

const POLICIES: [Policy; 4] = [Policy::LeastLoad, Policy::RoundRobin, Policy::Random, Policy::PowerOfTwo];

fn worker(slot: Slot, era: u32, role: Role, models: &[&str]) -> Arc<Worker> {
    Arc::new(Worker {
        slot,
        era,
        role,
        url: format!("http://10.0.0.1:{slot}").into(),
        prefix: "".into(),
        addrs: [([10, 0, 0, 1], 80).into()].into(),
        api_key: None,
        models: models.iter().map(|&model| model.into()).collect(),
        server_info: None,
        pairing: Pairing::default(),
    })
}

/// Regular workers of model "m", ready, in slots from 0 on.
fn fleet(lanes: usize, workers: usize) -> &'static Shared {
    let shared = Shared::leak(lanes);
    shared.roster.publish((0..workers).map(|slot| worker(slot as Slot, 1, Role::Regular, &["m"])).collect());
    (0..workers).for_each(|slot| {
        shared.vitals.set_health(slot as Slot, Health::Ready);
    });
    shared
}

fn words(shared: &Shared, workers: usize) -> Vec<Word> {
    (0..workers).map(|slot| shared.load.word(slot as Slot)).collect()
}

/// Largest less smallest.
fn spread(counts: impl Iterator<Item = u64> + Clone) -> u64 {
    counts.clone().max().unwrap_or(0) - counts.min().unwrap_or(0)
}

/// Ends the loops of other threads when its scope ends, by a failed assertion too.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct Lane {
    lane: usize,
    view: View,
    rng: fastrand::Rng,
    now_us: u64,
    policy: Policy,
}

impl Lane {
    fn new(lane: usize, shared: &'static Shared, policy: Policy) -> Self {
        Lane {
            lane,
            view: View::new(lane, shared, None),
            rng: fastrand::Rng::with_seed(lane as u64),
            now_us: 0,
            policy,
        }
    }

    fn ask(&mut self, model: Option<&str>, role: Role, avoid: &[Slot]) -> Result<LoadGuard, Fault> {
        let want = Want { model: model.map(str::as_bytes), role, policy: self.policy, avoid, ..Want::default() };
        let tallies = self.view.shared().tallies.lane(self.lane);
        choose(&mut self.view, &want, self.now_us, &mut self.rng, tallies)
    }

    fn choose(&mut self) -> LoadGuard {
        self.ask(Some("m"), Role::Regular, &[]).expect("a usable worker")
    }
}

/// `threads` lanes, each on its own thread.
fn on_lanes(shared: &'static Shared, threads: usize, policy: Policy, work: impl Fn(Lane) + Sync) {
    thread::scope(|scope| {
        for lane in 0..threads {
            let work = &work;
            scope.spawn(move || work(Lane::new(lane, shared, policy)));
        }
    });
}

/// Every round, `threads` lanes together make one reservation for each worker of an idle fleet.
fn all_different(threads: usize, workers: usize, rounds: u64) {
    let shared = fleet(threads, workers);
    let barrier = Barrier::new(threads);
    // Asserted after the threads have ended: a panic between barriers would leave the others waiting.
    let wrong = Mutex::new(Vec::new());
    on_lanes(shared, threads, Policy::LeastLoad, |mut lane| {
        let share = workers / threads + usize::from(lane.lane < workers % threads);
        for round in 1..=rounds {
            lane.now_us = round * 1000;
            barrier.wait();
            let held: Vec<LoadGuard> = (0..share).map(|_| lane.choose()).collect();
            barrier.wait();
            let now = words(shared, workers);
            if now != vec![Word::new(1, round); workers] {
                wrong.lock().unwrap().push((round, now));
            }
            barrier.wait();
            drop(held);
        }
    });
    assert_eq!(wrong.into_inner().unwrap().first(), None, "{threads} threads, {workers} workers");
    assert_eq!(words(shared, workers), vec![Word::new(0, rounds); workers]);
    assert_eq!(shared.tallies.lanes().iter().map(|lane| lane.get(Tally::Unconditional)).sum::<u64>(), 0);
}

/// Lanes that take all that there is: each worker has as many as it may, none more, and then all are told.
#[test]
fn a_fleet_fills_up_to_the_limit_of_each_worker() {
    const MOST: u32 = 3;
    for (workers, policy) in [5, 200].into_iter().flat_map(|n| Policy::ALL.iter().map(move |policy| (n, *policy))) {
        let shared = fleet(4, workers);
        shared.load.limit(MOST);
        // Failures weigh, and are no room.
        shared.vitals.ended(0, false);
        let held = Mutex::new(Vec::new());
        on_lanes(shared, 4, policy, |mut lane| {
            let fault = loop {
                lane.now_us += 3;
                match lane.ask(Some("m"), Role::Regular, &[]) {
                    Ok(guard) => held.lock().unwrap().push(guard),
                    Err(fault) => break fault,
                }
            };
            assert_eq!(fault.what, What::WorkersFull, "{policy:?}");
        });
        assert!(words(shared, workers).iter().all(|word| word.in_flight() == MOST), "{policy:?}, {workers} workers");
        let mut lane = Lane::new(0, shared, policy);
        let mut held = held.into_inner().unwrap();
        let freed = held.pop().map(|guard| guard.slot());
        assert_eq!(Some(lane.choose().slot()), freed, "{policy:?}");
    }
}

#[test]
fn concurrent_requests_over_idle_workers_take_different_ones() {
    for threads in [1, 2, 3, 8] {
        all_different(threads, 8, 2000);
    }
    all_different(16, 16, 1000);
}

#[test]
fn large_fleets_take_different_ones_too() {
    for threads in [1, 2, 5] {
        all_different(threads, 1, 200);
        all_different(threads, 64, 300);
        all_different(threads, 65, 300);
        all_different(threads, 2048, 6);
    }
}

/// Where this gateway began: prompts so long that nothing has answered when the next request is routed.
#[test]
fn slow_answers_do_not_pile_up_on_the_first_worker() {
    let shared = fleet(2, 8);
    let barrier = Barrier::new(2);
    let wrong = Mutex::new(Vec::new());
    on_lanes(shared, 2, Policy::LeastLoad, |mut lane| {
        for wave in 0..500 {
            barrier.wait();
            let held: Vec<LoadGuard> = (0..wave % 23).map(|_| lane.choose()).collect();
            barrier.wait();
            let now = words(shared, 8);
            let in_flight = spread(now.iter().map(|word| word.in_flight().into()));
            let processed = spread(now.iter().map(|word| word.processed()));
            if in_flight > 1 || processed > 1 {
                wrong.lock().unwrap().push((wave, now));
            }
            barrier.wait();
            drop(held);
        }
    });
    assert_eq!(wrong.into_inner().unwrap().first(), None);
}

#[test]
fn counts_end_at_zero_whoever_drops_the_guards() {
    const REQUESTS: usize = 20_000;
    for workers in [3, 65] {
        for policy in POLICIES {
            let shared = fleet(3, workers);
            let board: Mutex<VecDeque<LoadGuard>> = Mutex::default();
            let done = AtomicBool::new(false);
            thread::scope(|scope| {
                let (board, done, _ends) = (&board, &done, Done(&done));
                scope.spawn(move || {
                    while !done.load(Ordering::Relaxed) {
                        // A count below zero would show as millions.
                        assert!(words(shared, workers).iter().all(|word| word.in_flight() < 1000));
                    }
                });
                on_lanes(shared, 3, policy, |mut lane| {
                    let mut held = Vec::new();
                    for request in 0..REQUESTS / 3 {
                        lane.now_us += 7;
                        let guard = lane.choose();
                        if request % 5 == 0 {
                            board.lock().unwrap().push_back(guard);
                        } else {
                            held.push(guard);
                        }
                        if held.len() > 40 || lane.rng.bool() && !held.is_empty() {
                            drop(held.swap_remove(lane.rng.usize(..held.len())));
                        }
                        if request % 7 == 0 {
                            let other = board.lock().unwrap().pop_front();
                            drop(other);
                        }
                        if board.lock().unwrap().len() > 100 {
                            board.lock().unwrap().clear();
                        }
                    }
                });
                board.lock().unwrap().clear();
            });
            let now = words(shared, workers);
            assert!(now.iter().all(|word| word.in_flight() == 0), "{policy:?}: {now:?}");
            let selections = |slot: usize| shared.tallies.lanes().iter().map(move |lane| lane.selections(slot as Slot));
            for (slot, word) in now.iter().enumerate() {
                assert_eq!(word.processed(), selections(slot).sum::<u64>(), "{policy:?}, slot {slot}");
            }
            assert_eq!(now.iter().map(|word| word.processed()).sum::<u64>(), (REQUESTS / 3 * 3) as u64);
        }
    }
}

#[test]
fn sequential_cold_requests_rotate() {
    for (workers, rounds) in [(8, 10), (1, 5), (64, 3), (65, 3), (2048, 2)] {
        let shared = fleet(1, workers);
        let mut lane = Lane::new(0, shared, Policy::LeastLoad);
        for _ in 0..workers as u64 * rounds {
            lane.now_us += VIEW_AGE_US;
            drop(lane.choose());
        }
        assert_eq!(words(shared, workers), vec![Word::new(0, rounds); workers]);
    }
}

#[test]
fn of_equals_the_lowest_index_is_taken() {
    let shared = fleet(1, 65);
    let mut lane = Lane::new(0, shared, Policy::LeastLoad);
    let taken: Vec<LoadGuard> = (0..65).map(|_| lane.choose()).collect();
    assert!(taken.iter().map(LoadGuard::slot).eq(0..65));
}

#[test]
fn a_newcomer_does_not_win_every_tie() {
    let shared = fleet(1, 0);
    let mut slots = Slots::new();
    let mut workers = Vec::new();
    let mut lane = Lane::new(0, shared, Policy::LeastLoad);
    let mut join = || {
        let (slot, era) = slots.take(shared).unwrap();
        workers.push(worker(slot, era, Role::Regular, &["m"]));
        shared.roster.publish(workers.clone());
        shared.roster.snapshot().welcome(workers.last().unwrap(), &shared.load, &shared.vitals);
        shared.vitals.set_health(slot, Health::Ready);
    };
    (0..4).for_each(|_| join());
    (0..4000).for_each(|_| drop(lane.choose()));
    join();
    (0..500).for_each(|_| drop(lane.choose()));
    assert_eq!(words(shared, 5), [1100, 1100, 1100, 1100, 1100].map(|processed| Word::new(0, processed)));
    assert_eq!(shared.tallies.lane(0).selections(4), 100);
}

#[test]
fn a_recovered_worker_does_not_win_every_tie() {
    let shared = fleet(1, 4);
    let mut lane = Lane::new(0, shared, Policy::LeastLoad);
    let (still_held, _) = (lane.choose(), shared.vitals.set_health(0, Health::Unhealthy));
    assert_eq!(still_held.slot(), 0);
    (0..3000).for_each(|_| drop(lane.choose()));
    let snapshot = shared.roster.snapshot();
    snapshot.welcome(snapshot.worker(0, 1).unwrap(), &shared.load, &shared.vitals);
    shared.vitals.set_health(0, Health::Ready);
    assert_eq!(shared.load.word(0), Word::new(1, 1000), "what is in flight stays");
    drop(still_held);
    (0..400).for_each(|_| drop(lane.choose()));
    assert_eq!(words(shared, 4), [Word::new(0, 1100); 4]);
}

#[test]
fn a_slot_is_reused_only_when_no_lane_and_no_guard_knows_the_old_tenant() {
    let shared = Shared::leak(2);
    let mut slots = Slots::new();
    let (slot, era) = slots.take(shared).unwrap();
    shared.roster.publish(vec![worker(slot, era, Role::Regular, &["m"])]);
    shared.vitals.set_health(slot, Health::Ready);
    let (mut busy, mut idle) = (Lane::new(0, shared, Policy::LeastLoad), Lane::new(1, shared, Policy::LeastLoad));
    drop(busy.choose());

    slots.retire(slot, shared.roster.publish(Vec::new()));
    assert_eq!(slots.take(shared), Some((1, 1)), "neither lane has looked");
    assert_eq!(busy.ask(Some("m"), Role::Regular, &[]).unwrap_err().what, What::NoWorker);
    assert_eq!(slots.take(shared), Some((2, 1)), "the idle lane has not looked");
    assert!(idle.view.worker(slot, era).is_some(), "a stale view is legal");
    let guard = shared.load.reserve_unconditional(slot, era, 1).unwrap();
    idle.view.refresh();
    assert!(idle.view.worker(slot, era).is_none());
    assert_eq!(slots.take(shared), Some((3, 1)), "a guard is held");
    drop(guard);
    let (again, next) = slots.take(shared).unwrap();
    assert_eq!((again, next), (slot, era + 1));

    shared.roster.publish(vec![worker(again, next, Role::Regular, &["m"])]);
    assert!(busy.ask(Some("m"), Role::Regular, &[]).is_err(), "the new tenant does not inherit its health");
    shared.vitals.set_health(again, Health::Ready);
    assert_eq!(busy.choose().era(), next);
    assert!(busy.view.worker(slot, era).is_none() && busy.view.worker(again, next).is_some());
}

#[test]
fn a_lane_that_has_ended_holds_no_slot_back() {
    let shared = Shared::leak(2);
    let mut slots = Slots::new();
    let (view, ended) = (View::new(0, shared, None), View::new(1, shared, None));
    let taken = slots.take(shared).unwrap();
    slots.retire(taken.0, shared.roster.publish(Vec::new()));
    drop(ended);
    assert_eq!(shared.roster.oldest_seen(), view.generation());
    drop(view);
    assert_eq!(slots.take(shared), Some((taken.0, taken.1 + 1)));
}

/// Workers come and go under load; a lane asserts that whom it chose is whom it knows.
#[test]
fn no_guard_ever_meets_a_new_tenant() {
    let shared = Shared::leak(3);
    let done = AtomicBool::new(false);
    let tenants: Vec<AtomicU32> = (0..MAX_WORKERS).map(|_| AtomicU32::new(0)).collect();
    thread::scope(|scope| {
        let (done, tenants, _ends) = (&done, &tenants, Done(&done));
        for (lane, policy) in POLICIES.into_iter().enumerate().take(3) {
            scope.spawn(move || {
                let mut lane = Lane::new(lane, shared, policy);
                let mut held = VecDeque::new();
                while !done.load(Ordering::Relaxed) {
                    lane.now_us += 20;
                    if let Ok(guard) = lane.ask(Some("m"), Role::Regular, &[]) {
                        assert!(lane.view.worker(guard.slot(), guard.era()).is_some());
                        let tenant = tenants[guard.slot() as usize].load(Ordering::SeqCst);
                        assert_eq!(guard.era(), tenant, "slot {} has a new tenant", guard.slot());
                        held.push_back(guard);
                    }
                    if held.len() > 20 {
                        held.pop_front();
                    }
                }
            });
        }
        let mut slots = Slots::new();
        let mut workers: Vec<Arc<Worker>> = Vec::new();
        let mut rng = fastrand::Rng::with_seed(3);
        let mut reused = 0;
        while reused < 1000 {
            if workers.len() < 6 {
                // None: every slot waits for a lane that has not started or had no turn yet.
                let Some((slot, era)) = slots.take(shared) else {
                    thread::yield_now();
                    continue;
                };
                tenants[slot as usize].store(era, Ordering::SeqCst);
                reused += usize::from(era > 1);
                workers.push(worker(slot, era, Role::Regular, &["m"]));
                shared.roster.publish(workers.clone());
                shared.vitals.set_health(slot, Health::Ready);
            } else {
                let leaver = workers.swap_remove(rng.usize(..workers.len()));
                slots.retire(leaver.slot, shared.roster.publish(workers.clone()));
            }
        }
    });
    assert!(words(shared, MAX_WORKERS).iter().all(|word| word.in_flight() == 0));
}

#[test]
fn every_policy_serves_fleets_of_every_size() {
    for workers in [1, 2, 64, 65, 2048] {
        for policy in POLICIES {
            let shared = fleet(1, workers);
            let mut lane = Lane::new(0, shared, policy);
            let held: Vec<LoadGuard> = (0..workers * 2).map(|_| lane.choose()).collect();
            let now = words(shared, workers);
            assert_eq!(now.iter().map(|word| word.in_flight() as usize).sum::<usize>(), held.len());
            if matches!(policy, Policy::LeastLoad | Policy::RoundRobin) {
                assert_eq!(now, vec![Word::new(2, 2); workers], "{policy:?}");
            }
        }
    }
}

#[test]
fn power_of_two_compares_two_different_workers() {
    for workers in [2, 3, 40] {
        let shared = fleet(1, workers);
        let mut lane = Lane::new(0, shared, Policy::PowerOfTwo);
        // All but the last two are closed; of those, the last is the busier one and so must never be taken.
        (0..workers as Slot - 2).for_each(|slot| {
            shared.vitals.set_health(slot, Health::Draining);
        });
        let busier = workers as Slot - 1;
        let _held = [shared.load.reserve_unconditional(busier, 1, 1), shared.load.reserve_unconditional(busier, 1, 1)];
        (0..500).for_each(|_| assert_eq!(lane.choose().slot(), busier - 1));
    }
}

#[test]
fn power_of_two_draws_all_pairs() {
    let shared = fleet(1, 4);
    let mut lane = Lane::new(0, shared, Policy::PowerOfTwo);
    (0..4000).for_each(|_| drop(lane.choose()));
    assert!(words(shared, 4).iter().all(|word| word.processed() > 800));
}

#[test]
fn random_is_even_and_leaves_out_who_is_not_usable() {
    let shared = fleet(1, 40);
    (4..40).for_each(|slot| {
        shared.vitals.set_health(slot, Health::Unhealthy);
    });
    let mut lane = Lane::new(0, shared, Policy::Random);
    (0..8000).for_each(|_| drop(lane.choose()));
    let now = words(shared, 40);
    assert!(now[..4].iter().all(|word| (1800..2200).contains(&word.processed())), "{now:?}");
}

#[test]
fn round_robin_is_even_beside_an_unusable_worker() {
    let shared = fleet(1, 5);
    shared.vitals.set_health(1, Health::Unhealthy);
    shared.vitals.set_health(2, Health::Pending);
    let mut lane = Lane::new(0, shared, Policy::RoundRobin);
    let order: Vec<Slot> = (0..6).map(|_| lane.choose().slot()).collect();
    assert_eq!(order, [0, 3, 4, 0, 3, 4]);
    (0..294).for_each(|_| drop(lane.choose()));
    assert_eq!(words(shared, 5).iter().map(|word| word.processed()).collect::<Vec<_>>(), [100, 0, 0, 100, 100]);
}

#[test]
fn round_robin_is_even_over_lanes_and_survives_a_new_roster() {
    let shared = fleet(4, 7);
    shared.vitals.set_health(3, Health::Unhealthy);
    on_lanes(shared, 4, Policy::RoundRobin, |mut lane| (0..3000).for_each(|_| drop(lane.choose())));
    let processed = words(shared, 7).iter().map(|word| word.processed()).collect::<Vec<_>>();
    assert_eq!(processed.iter().sum::<u64>(), 12_000);
    assert_eq!(processed, [2000, 2000, 2000, 0, 2000, 2000, 2000]);

    let mut lane = Lane::new(0, shared, Policy::RoundRobin);
    let before = lane.choose().slot();
    let workers = shared.roster.snapshot().workers.to_vec();
    shared.roster.publish(workers);
    assert_ne!(lane.choose().slot(), before);
}

#[test]
fn round_robin_has_a_position_for_each_model() {
    let shared = Shared::leak(1);
    shared.roster.publish((0..2).map(|slot| worker(slot, 1, Role::Regular, &["a", "b"])).collect());
    for slot in [0, 1] {
        shared.vitals.set_health(slot, Health::Ready);
    }
    let mut lane = Lane::new(0, shared, Policy::RoundRobin);
    let mut order = Vec::new();
    for _ in 0..4 {
        for model in ["a", "b"] {
            order.push(lane.ask(Some(model), Role::Regular, &[]).unwrap().slot());
        }
    }
    assert_eq!(order, [0, 0, 1, 1, 0, 0, 1, 1]);
}

#[test]
fn avoided_workers_are_taken_only_when_nobody_else_is_usable() {
    for workers in [3, 70] {
        for policy in POLICIES {
            let shared = fleet(1, workers);
            (3..workers as Slot).for_each(|slot| {
                shared.vitals.set_health(slot, Health::Unhealthy);
            });
            let mut lane = Lane::new(0, shared, policy);
            for _ in 0..50 {
                assert_eq!(lane.ask(Some("m"), Role::Regular, &[0, 2, 999]).unwrap().slot(), 1, "{policy:?}");
            }
            shared.vitals.set_health(1, Health::Unhealthy);
            assert!([0, 2].contains(&lane.ask(Some("m"), Role::Regular, &[0, 2]).unwrap().slot()), "{policy:?}");
            shared.vitals.set_health(1, Health::Ready);
            let all: Vec<LoadGuard> = (0..9).map(|_| lane.choose()).collect();
            assert!(policy != Policy::LeastLoad || [0, 1, 2].map(|s| shared.load.word(s).in_flight()) == [3; 3]);
            drop(all);
        }
    }
}

#[test]
fn a_large_fleets_copy_has_a_bounded_age_and_health_has_none() {
    let shared = fleet(1, 65);
    let mut lane = Lane::new(0, shared, Policy::LeastLoad);
    let mut held: Vec<LoadGuard> = (0..65).map(|_| lane.choose()).collect();
    drop(held.remove(40));
    lane.now_us = VIEW_AGE_US - 1;
    shared.vitals.set_health(0, Health::Unhealthy);
    assert_eq!(lane.choose().slot(), 1, "the copy does not know yet that 40 is idle, but that 0 is ill shows at once");
    lane.now_us = VIEW_AGE_US;
    assert_eq!(lane.choose().slot(), 40);
}

#[test]
fn a_copy_without_anybody_usable_is_read_again_before_the_request_fails() {
    let shared = fleet(1, 65);
    (0..65).for_each(|slot| {
        shared.vitals.set_health(slot, Health::Pending);
    });
    let mut lane = Lane::new(0, shared, Policy::LeastLoad);
    assert!(lane.ask(None, Role::Regular, &[]).is_err());
    shared.vitals.set_health(9, Health::Ready);
    assert_eq!(lane.ask(None, Role::Regular, &[]).unwrap().slot(), 9);
}

#[test]
fn a_request_finds_the_pool_of_its_model_and_role() {
    let shared = Shared::leak(1);
    let specs: [(Role, &[&str]); 4] =
        [(Role::Regular, &["a"]), (Role::Regular, &["b", "a"]), (Role::Prefill, &["b"]), (Role::Decode, &["b"])];
    shared.roster.publish(specs.iter().zip(0..).map(|(&(role, models), slot)| worker(slot, 1, role, models)).collect());
    (0..4).for_each(|slot| {
        shared.vitals.set_health(slot, Health::Ready);
    });
    let mut lane = Lane::new(0, shared, Policy::LeastLoad);
    let mut slot = |model, role| lane.ask(model, role, &[]).map(|guard| guard.slot()).map_err(|fault| fault.what);
    assert_eq!(slot(Some("b"), Role::Regular), Ok(1));
    assert_eq!(slot(Some("b"), Role::Prefill), Ok(2));
    assert_eq!(slot(Some("b"), Role::Decode), Ok(3));
    assert_eq!(slot(Some("a"), Role::Regular), Ok(0));
    assert_eq!(slot(Some("a"), Role::Prefill), Err(What::NoWorker), "the model is known, the role is missing");
    assert_eq!(slot(Some("c"), Role::Regular), Err(What::ModelUnknown));
    assert_eq!([slot(None, Role::Regular), slot(None, Role::Regular)], [Ok(0), Ok(1)], "any worker of the role");
    assert_eq!(lane.view.models().collect::<Vec<_>>(), ["a", "b"]);

    drop(lane.view);
    lane.view = View::new(0, shared, Some("b".into()));
    assert_eq!(lane.ask(None, Role::Regular, &[]).unwrap().slot(), 1, "the default model's workers");
}

#[test]
fn refusals_say_why() {
    let shared = fleet(1, 3);
    let mut lane = Lane::new(0, shared, Policy::LeastLoad);
    let long = "ü".repeat(100);
    let fault = lane.ask(Some(&long), Role::Regular, &[]).unwrap_err();
    assert_eq!(fault, Fault::with(What::ModelUnknown, format!("Model: {}", "ü".repeat(64))));

    shared.vitals.set_health(0, Health::Draining);
    shared.vitals.set_health(1, Health::Unhealthy);
    shared.vitals.set_health(2, Health::Pending);
    for policy in POLICIES {
        lane.policy = policy;
        let fault = lane.ask(Some("m"), Role::Regular, &[1]).unwrap_err();
        assert_eq!(fault.what, What::NoWorker);
        assert_eq!(
            &*fault.detail,
            "Of 3 workers 1 are pending, 1 unhealthy, 1 draining, 0 without an address, 0 out for their failures, 0 full."
        );
    }
    let mut workers = shared.roster.snapshot().workers.to_vec();
    workers.push(worker(3, 1, Role::Regular, &[]));
    shared.roster.publish(workers);
    let fault = lane.ask(Some("later"), Role::Regular, &[]).unwrap_err();
    assert_eq!(fault, Fault::with(What::NoWorker, "Model: later"), "a worker's models are not known yet");
    shared.roster.publish(Vec::new());
    assert_eq!(lane.ask(Some("m"), Role::Regular, &[]).unwrap_err().what, What::NoWorker);
    assert_eq!(lane.ask(None, Role::Decode, &[]).unwrap_err().what, What::NoWorker);
}
