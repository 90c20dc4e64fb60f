//! Every policy as what it promises: who is chosen, and who is not.
//!
//! Real views and trees, no clock and no sockets. Never asks what a worker would answer.

use std::sync::{Arc, Barrier};
use std::thread;

use corelane::config::{Assignment, BalanceMode, Policy, Role, Routing};
use corelane::fault::What;
use corelane::flow::route::{Want, choose};
use corelane::lane::view::View;
use corelane::metrics::Tally;
use corelane::shared::Shared;
use corelane::shared::load::LoadGuard;
use corelane::shared::prefix::Kind;
use corelane::shared::roster::{Pairing, Slot, Worker};
use corelane::shared::vitals::Health;

/// Ready workers of model "m" in slots from 0 on.
fn fleet(lanes: usize, workers: usize) -> &'static Shared {
    let shared = Shared::leak(lanes);
    publish(shared, 0..workers);
    shared
}

fn publish(shared: &Shared, slots: impl Iterator<Item = usize>) {
    let worker = |slot: usize| {
        shared.vitals.set_health(slot as Slot, Health::Ready);
        Arc::new(Worker {
            slot: slot as Slot,
            era: 1,
            role: Role::Regular,
            url: format!("http://10.0.0.1:{slot}").into(),
            prefix: "".into(),
            addrs: [([10, 0, 0, 1], 80).into()].into(),
            api_key: None,
            models: ["m".into()].into(),
            server_info: None,
            pairing: Pairing::default(),
        })
    };
    shared.roster.publish(slots.map(worker).collect());
}

struct Lane {
    lane: usize,
    view: View,
    rng: fastrand::Rng,
    now_us: u64,
    want: Want<'static>,
}

impl Lane {
    fn new(lane: usize, shared: &'static Shared, policy: Policy) -> Self {
        let want = Want { model: Some(b"m"), policy, ..Want::default() };
        Lane { lane, view: View::new(lane, shared, None), rng: fastrand::Rng::with_seed(lane as u64), now_us: 0, want }
    }

    fn with(mut self, routing: Routing) -> Self {
        self.want.routing = Box::leak(Box::new(routing));
        self
    }

    fn try_ask(&mut self, want: Want) -> Result<LoadGuard, What> {
        let tallies = self.view.shared().tallies.lane(self.lane);
        choose(&mut self.view, &want, self.now_us, &mut self.rng, tallies).map_err(|fault| fault.what)
    }

    fn ask(&mut self, want: Want) -> LoadGuard {
        self.try_ask(want).expect("a usable worker")
    }

    fn prompt(&mut self, symbols: &[u64]) -> LoadGuard {
        self.ask(Want { symbols, ..self.want })
    }

    fn key(&mut self, routing_key: &str) -> Slot {
        self.ask(Want { routing_key: routing_key.as_bytes(), ..self.want }).slot()
    }

    fn count(&self, tally: Tally) -> u64 {
        self.view.shared().tallies.lane(self.lane).get(tally)
    }
}

/// Symbols `from` on of conversation `id`.
fn talk(id: u64, blocks: usize) -> Vec<u64> {
    (0..blocks as u64).map(|block| (id << 32 | block).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect()
}

fn loads(shared: &Shared, workers: usize) -> Vec<u32> {
    (0..workers).map(|slot| shared.load.word(slot as Slot).in_flight()).collect()
}

fn hold(shared: &'static Shared, slot: Slot, requests: usize) -> Vec<LoadGuard> {
    (0..requests).map(|_| shared.load.reserve_unconditional(slot, 1, 1).unwrap()).collect()
}

#[test]
fn cold_prompts_rotate() {
    let shared = fleet(1, 8);
    let mut lane = Lane::new(0, shared, Policy::CacheAware);
    let mut served = [0; 8];
    for id in 0..80 {
        served[lane.prompt(&talk(id, 128)).slot() as usize] += 1;
    }
    assert_eq!((served, lane.count(Tally::DecisionMiss)), ([10; 8], 80));
    // Short ones too; none of them is remembered.
    let before = shared.prefix.counts();
    (0..80).for_each(|_| served[lane.prompt(&[]).slot() as usize] += 1);
    assert_eq!((served, lane.count(Tally::DecisionShort)), ([20; 8], 80));
    assert_eq!(shared.prefix.counts(), before);
}

#[test]
fn conversations_stay_with_their_worker() {
    let shared = fleet(1, 8);
    let mut lane = Lane::new(0, shared, Policy::CacheAware);
    let mut held: Vec<LoadGuard> = Vec::new();
    let mut home = vec![None; 200];
    let (mut turns, mut stayed) = (0, 0);
    for turn in 0..10 {
        for id in 0..200 {
            lane.now_us += 1000;
            let guard = lane.prompt(&talk(id, 8 + 6 * turn));
            if let Some(home) = home[id as usize] {
                turns += 1;
                stayed += usize::from(home == guard.slot());
            }
            home[id as usize] = Some(guard.slot());
            held.push(guard);
            if held.len() > 40 {
                drop(held.swap_remove(lane.rng.usize(..held.len())));
            }
        }
    }
    assert!(stayed * 100 >= turns * 98, "{stayed} of {turns}");
}

#[test]
fn the_deepest_owner_wins_and_a_lost_one_is_followed_by_the_next_best() {
    let shared = fleet(1, 4);
    let mut lane = Lane::new(0, shared, Policy::CacheAware);
    // Worker 0 is the one that a careless fallback would take.
    let busy = hold(shared, 0, 1);
    let first = lane.prompt(&talk(1, 60)).slot();
    let others = (1..4).filter(|&slot| slot != first);
    // The longer prompt goes elsewhere as long as its owner is full of failures.
    shared.vitals.set_health(first, Health::Unhealthy);
    let second = lane.prompt(&talk(1, 100)).slot();
    assert!(others.clone().any(|slot| slot == second));
    shared.vitals.set_health(first, Health::Ready);

    assert_eq!(lane.prompt(&talk(1, 100)).slot(), second, "deepest first");
    shared.vitals.set_health(second, Health::Draining);
    assert_eq!(lane.prompt(&talk(1, 110)[..100]).slot(), first, "then who has less");
    shared.vitals.set_health(first, Health::Unhealthy);
    let third = others.clone().find(|&slot| slot != second).unwrap();
    assert_eq!(lane.prompt(&talk(1, 100)).slot(), third, "then the least loaded, not index 0");
    drop(busy);
}

#[test]
fn a_part_below_the_threshold_is_no_reason() {
    let shared = fleet(1, 4);
    let mut lane = Lane::new(0, shared, Policy::CacheAware);
    let owner = lane.prompt(&talk(1, 30)).slot();
    let mut mixed = talk(1, 30);
    mixed.extend(talk(2, 70));
    assert_ne!(lane.prompt(&mixed).slot(), owner, "exactly the threshold");
    let mut mixed = talk(1, 30);
    mixed.extend(talk(3, 69));
    assert_eq!(lane.prompt(&mixed).slot(), owner);
    assert_eq!((lane.count(Tally::DecisionHit), lane.count(Tally::DecisionMiss)), (1, 2));
}

#[test]
fn kinds_of_keys_do_not_mix() {
    let shared = fleet(1, 4);
    let mut lane = Lane::new(0, shared, Policy::CacheAware);
    let owner = lane.prompt(&talk(1, 50)).slot();
    let tokens = Want { symbols: &talk(1, 50), kind: Kind::Tokens, ..lane.want };
    assert_ne!(lane.ask(tokens).slot(), owner);
    assert_eq!(lane.prompt(&talk(1, 50)).slot(), owner);
}

#[test]
fn a_hot_prefix_spills_and_gains_owners() {
    let shared = fleet(1, 8);
    let routing = Routing { balance_abs: 8, ..Routing::DEFAULT };
    let mut lane = Lane::new(0, shared, Policy::CacheAware).with(routing);
    let held: Vec<LoadGuard> = (0..200)
        .map(|id| {
            let mut symbols = talk(1, 50);
            symbols.extend(talk(100 + id, 10));
            lane.prompt(&symbols)
        })
        .collect();
    // Six owners are enough: with an even share of the load none of them has 1.5 times the mean of eight.
    let loads = loads(shared, 8);
    assert!(loads.iter().all(|&load| load <= 38), "{loads:?}");
    assert!(loads.iter().filter(|&&load| load > 25).count() >= 5, "{loads:?}");
    let (spills, hits) = (lane.count(Tally::DecisionSpill), lane.count(Tally::DecisionHit));
    assert!((1..20).contains(&spills) && hits > 170, "{spills} spills, {hits} hits");
    drop(held);
    // All of them own the prefix now: as equals they take turns.
    let mut served = [0; 8];
    for id in 0..40 {
        let mut symbols = talk(1, 50);
        symbols.extend(talk(900 + id, 10));
        served[lane.prompt(&symbols).slot() as usize] += 1;
    }
    assert!(served.iter().filter(|&&n| n > 0).count() >= 5, "{served:?}");
}

#[test]
fn workers_are_charged_for_what_they_have_to_compute() {
    let shared = fleet(1, 1);
    let mut lane = Lane::new(0, shared, Policy::CacheAware);
    let work = || shared.load.word(0).processed();
    drop(lane.prompt(&talk(1, 100)));
    assert_eq!(work(), 101);
    drop(lane.prompt(&talk(1, 100)));
    assert_eq!(work(), 102, "known");
    drop(lane.prompt(&talk(1, 140)));
    assert_eq!(work(), 143, "the new part");
    drop(lane.prompt(&[]));
    assert_eq!(work(), 144);
    drop(lane.ask(Want { length: 6400, policy: Policy::LeastLoad, ..lane.want }));
    assert_eq!(work(), 245, "the whole body, by who knows no better");
}

#[test]
fn a_miss_goes_to_who_has_computed_least_of_those_near_the_fewest() {
    let shared = fleet(1, 4);
    let mut lane = Lane::new(0, shared, Policy::CacheAware);
    let busy: Vec<_> = [(0, 4), (1, 5), (2, 6), (3, 7)].map(|(slot, n)| hold(shared, slot, n)).into();
    for (slot, work) in [(0, 9000), (1, 8000), (2, 7000), (3, 10)] {
        drop(shared.load.reserve_unconditional(slot, 1, work));
    }
    assert_eq!(lane.prompt(&talk(1, 50)).slot(), 2, "6 are half as much again as 4, 7 are more");
    assert_eq!(lane.ask(Want { policy: Policy::LeastLoad, ..lane.want }).slot(), 0);
    drop(busy);
    let _one = hold(shared, 3, 1);
    assert_eq!(lane.prompt(&talk(2, 50)).slot(), 2, "nobody who is busy beside an idle one");
}

#[test]
fn an_overloaded_owner_keeps_affinity_for_the_others() {
    let shared = fleet(1, 4);
    let mut lane = Lane::new(0, shared, Policy::CacheAware);
    let hot = lane.prompt(&talk(1, 50)).slot();
    let calm = lane.prompt(&talk(2, 50)).slot();
    let _load = hold(shared, hot, 100);
    assert_ne!(lane.prompt(&talk(1, 50)).slot(), hot);
    assert_eq!(lane.prompt(&talk(2, 50)).slot(), calm);

    // The classic rule gives affinity up for everybody.
    let mut classic =
        Lane::new(0, shared, Policy::CacheAware).with(Routing { balance_mode: BalanceMode::Fleet, ..Routing::DEFAULT });
    for _ in 0..4 {
        assert_ne!(classic.prompt(&talk(3, 50)).slot(), hot);
    }
    assert_eq!((classic.count(Tally::DecisionImbalanced), classic.count(Tally::DecisionSpill)), (4, 1));
    drop(_load);
    let again = classic.prompt(&talk(2, 50)).slot();
    assert_eq!(again, calm);
}

/// Workers that control has shed, whatever the policy: nobody gets a request beside somebody who is not, everybody does
/// when all are; and who is named, or would be the only one left that has not just failed, is taken all the same.
#[test]
fn who_is_shed_gets_nothing_beside_somebody_who_is_not() {
    for &policy in Policy::ALL {
        // A fleet of which every choice reads all words, and one whose copy has a bounded age.
        for workers in [4, 100] {
            let shared = fleet(1, workers);
            let mut lane = Lane::new(0, shared, policy);
            let mut ask = |id: u64, avoid: &[Slot], target: Option<&[u8]>| {
                lane.now_us += 1000;
                let (symbols, key) = (talk(id, 20), id.to_le_bytes());
                lane.ask(Want { symbols: &symbols, routing_key: &key, avoid, target, length: id as usize, ..lane.want })
                    .slot()
            };
            let homes: Vec<Slot> = (0..40).map(|id| ask(id, &[], None)).collect();
            assert!(homes.iter().any(|&home| home != 1), "{policy:?}");
            (0..workers as Slot).filter(|&slot| slot != 1).for_each(|slot| assert!(shared.vitals.shed(slot, true)));
            assert!((0..40).all(|id| ask(id, &[], None) == 1), "{policy:?}");
            assert_eq!(ask(0, &[], Some(b"2")), 2, "{policy:?}");
            assert_ne!(ask(0, &[1], None), 1, "{policy:?}");
            let all: Vec<Slot> = (0..workers as Slot).filter(|&slot| slot != 3).collect();
            assert_eq!(ask(0, &all, None), 3, "{policy:?}: shed is better than failed");
            shared.vitals.shed(1, true);
            let served: Vec<Slot> = (100..140).map(|id| ask(id, &[], None)).collect();
            assert!(served.iter().any(|&slot| slot != served[0]), "{policy:?}: if all are, none is");
            (0..workers as Slot).for_each(|slot| assert!(shared.vitals.shed(slot, false)));
            let served: Vec<Slot> = (200..240).map(|id| ask(id, &[], None)).collect();
            assert!(served.iter().any(|&slot| slot != 1), "{policy:?}: it comes back");
        }
    }
}

#[test]
fn a_shed_owner_loses_its_prefix_for_a_while_and_the_reason_is_counted() {
    let shared = fleet(1, 3);
    let mut lane = Lane::new(0, shared, Policy::CacheAware);
    let owner = lane.prompt(&talk(1, 50)).slot();
    let other = (owner + 1) % 3;
    shared.vitals.shed(owner, true);
    shared.vitals.shed((owner + 2) % 3, true);
    assert_eq!(lane.prompt(&talk(1, 50)).slot(), other);
    assert_eq!((lane.count(Tally::DecisionShed), lane.view.choice.reason), (1, Some(Tally::DecisionShed)));
    // Now the other one has it, too.
    assert_eq!(lane.prompt(&talk(1, 50)).slot(), other);
    assert_eq!((lane.count(Tally::DecisionShed), lane.count(Tally::DecisionHit)), (1, 1));
    shared.vitals.shed(other, true);
    let _busy = hold(shared, other, 1);
    assert_eq!(lane.prompt(&talk(1, 50)).slot(), owner, "all are shed: its owner has it");
    assert_eq!(lane.count(Tally::DecisionHit), 2);
}

#[test]
fn uneven_caches_drop_affinity_where_a_threshold_asks_for_it() {
    for policy in [Policy::CacheAware, Policy::PrefixHash, Policy::ConsistentHashing, Policy::Manual] {
        let shared = fleet(1, 4);
        let on = Routing { balance_token_usage: 0.5, ..Routing::DEFAULT };
        let mut lane = Lane::new(0, shared, policy).with(on);
        let snapshot = shared.roster.snapshot();
        let place = snapshot.pool_at(snapshot.pool(b"m", Role::Regular).expect("the fleet's model")).place;
        let symbols = &talk(1, 50)[..];
        let want = Want { symbols, routing_key: b"k", ..lane.want };
        let home = lane.ask(want).slot();
        shared.reported.set_uneven(place, true);
        // Of idle ones the least loaded is who has done less.
        let keeps = matches!(policy, Policy::ConsistentHashing | Policy::Manual);
        assert_eq!(lane.ask(want).slot() == home, keeps, "{policy:?}: a routing key is a promise, a prefix is none");
        let counted = u64::from(policy == Policy::CacheAware);
        assert_eq!(lane.count(Tally::DecisionUneven), counted);
        let mut off = Lane::new(0, shared, policy);
        let want = Want { symbols: &talk(2, 50)[..], routing_key: b"k", ..off.want };
        let home = off.ask(want).slot();
        assert_eq!(off.ask(want).slot(), home, "{policy:?}: nobody asked for it");
        shared.reported.set_uneven(place, false);
        let want = Want { symbols: &talk(3, 50)[..], routing_key: b"k", ..lane.want };
        let home = lane.ask(want).slot();
        assert_eq!(lane.ask(want).slot(), home, "{policy:?}");
        assert_eq!(lane.count(Tally::DecisionUneven), counted);
    }
}

#[test]
fn whoever_is_avoided_is_no_owner_for_this_request() {
    let shared = fleet(1, 3);
    let mut lane = Lane::new(0, shared, Policy::CacheAware);
    let owner = lane.prompt(&talk(1, 50)).slot();
    let symbols = &talk(1, 50)[..];
    let avoid = &[owner];
    assert_ne!(lane.ask(Want { symbols, avoid, ..lane.want }).slot(), owner);
    assert_eq!(lane.ask(Want { symbols, avoid: &[0, 1, 2], ..lane.want }).slot(), owner, "nobody else is left");
}

#[test]
fn concurrent_long_prompts_with_slow_answers_stay_even() {
    let shared = fleet(2, 8);
    let barrier = &Barrier::new(2);
    for wave in 0..20 {
        let held: Vec<Vec<LoadGuard>> = thread::scope(|scope| {
            let ask = |index: usize| {
                let mut lane = Lane::new(index, shared, Policy::CacheAware);
                barrier.wait();
                // 32k tokens are 128 KiB of text.
                (0..10).map(|id| lane.prompt(&talk(wave * 100 + index as u64 * 50 + id, 2048))).collect()
            };
            let threads = [0, 1].map(|index| scope.spawn(move || ask(index)));
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let loads = loads(shared, 8);
        assert!(loads.iter().max().unwrap() - loads.iter().min().unwrap() <= 1, "{loads:?}");
        drop(held);
    }
}

#[test]
fn one_lane_and_eight_remember_the_same() {
    let hits = |lanes: usize| {
        let shared = fleet(lanes, 8);
        let mut lanes: Vec<Lane> = (0..lanes).map(|lane| Lane::new(lane, shared, Policy::CacheAware)).collect();
        let mut rng = fastrand::Rng::with_seed(5);
        let mut turns = [0; 300];
        for request in 0..6000u64 {
            let id = rng.usize(..300);
            turns[id] += 1;
            let at = request as usize % lanes.len();
            lanes[at].now_us = request * 100;
            drop(lanes[at].prompt(&talk(id as u64, 4 + 3 * turns[id])));
        }
        lanes.iter().map(|lane| lane.count(Tally::DecisionHit)).sum::<u64>() as f64
    };
    let (one, eight) = (hits(1), hits(8));
    assert!((one - eight).abs() <= 0.01 * one, "{one} {eight}");
}

#[test]
fn a_worker_that_fails_fast_is_not_fed() {
    for policy in [Policy::LeastLoad, Policy::CacheAware, Policy::PowerOfTwo] {
        let shared = fleet(1, 4);
        let mut lane = Lane::new(0, shared, policy);
        let mut busy: Vec<Vec<LoadGuard>> = (0..4).map(|_| Vec::new()).collect();
        let mut failed = 0;
        for id in 0..400 {
            let guard = lane.prompt(&talk(id, 20));
            if guard.slot() == 2 {
                // At once: it looks idle again.
                failed += 1;
                shared.vitals.ended(2, false);
                continue;
            }
            shared.vitals.ended(guard.slot(), true);
            busy[usize::from(guard.slot())].push(guard);
        }
        assert!(failed <= 6, "{policy:?}: {failed}");
        // After its pause it gets one request at a time, and more when that went well.
        for _ in 0..60 {
            shared.vitals.second(2);
        }
        let mut least = Lane::new(0, shared, Policy::LeastLoad);
        let trial = least.prompt(&[]);
        assert_eq!(trial.slot(), 2);
        assert_ne!(least.prompt(&[]).slot(), 2, "one trial at a time");
        shared.vitals.ended(2, true);
        drop(trial);
        assert_eq!(least.prompt(&[]).slot(), 2);
    }
}

#[test]
fn prefix_hash_keeps_heads_together_within_its_bound() {
    let shared = fleet(1, 8);
    let mut lane = Lane::new(0, shared, Policy::PrefixHash);
    for id in 0..50 {
        let homes: Vec<Slot> = (16..30).map(|blocks| lane.prompt(&talk(id, blocks)).slot()).collect();
        assert!(homes.iter().all(|&slot| slot == homes[0]), "{homes:?}");
    }
    let all: std::collections::HashSet<Slot> = (0..50).map(|id| lane.prompt(&talk(id, 16)).slot()).collect();
    assert!(all.len() >= 7);
    // One head for all: nobody has more than a quarter above the mean, rounded up.
    let held: Vec<LoadGuard> = (0..80).map(|_| lane.prompt(&talk(1, 20))).collect();
    let loads = loads(shared, 8);
    assert!(loads.iter().all(|&load| load <= 13), "{loads:?}");
    drop(held);
    assert_eq!(lane.count(Tally::Keyless), 0);
    drop(lane.prompt(&[]));
    assert_eq!(lane.count(Tally::Keyless), 1);
}

#[test]
fn consistent_hashing_moves_only_the_keys_of_who_left() {
    let shared = fleet(1, 8);
    let mut lane = Lane::new(0, shared, Policy::ConsistentHashing);
    let home: Vec<Slot> = (0..200).map(|key| lane.key(&format!("user-{key}"))).collect();
    assert!((0..8).all(|slot| home.contains(&slot)));
    shared.vitals.set_health(3, Health::Unhealthy);
    let check = |lane: &mut Lane| {
        for (key, &home) in home.iter().enumerate() {
            let now = lane.key(&format!("user-{key}"));
            assert!(if home == 3 { now != 3 } else { now == home }, "{key}");
        }
    };
    check(&mut lane);
    publish(shared, (0..8).filter(|&slot| slot != 3));
    check(&mut lane);
    shared.vitals.set_health(3, Health::Ready);
    publish(shared, 0..8);
    assert!(home.iter().enumerate().all(|(key, &home)| lane.key(&format!("user-{key}")) == home));
    lane.key("");
    assert_eq!(lane.count(Tally::Keyless), 1);
}

#[test]
fn manual_keys_stick_for_all_lanes_until_they_idle() {
    for assignment in [Assignment::Random, Assignment::MinLoad, Assignment::MinGroup] {
        let shared = fleet(2, 4);
        let routing = Routing { assignment, manual_idle_secs: 100, ..Routing::DEFAULT };
        let mut lanes = [0, 1].map(|lane| Lane::new(lane, shared, Policy::Manual).with(routing));
        let mut homes = [0; 4];
        for key in 0..80 {
            let key = format!("session-{key}");
            let home = lanes[0].key(&key);
            homes[usize::from(home)] += 1;
            let _load = hold(shared, home, 5);
            assert_eq!([lanes[1].key(&key), lanes[0].key(&key)], [home; 2]);
        }
        match assignment {
            Assignment::Random => assert!(homes.iter().all(|&n| n > 5), "{homes:?}"),
            _ => assert!(homes.iter().all(|&n| (15..=25).contains(&n)), "{assignment:?} {homes:?}"),
        }
        let home = lanes[0].key("x");
        shared.vitals.set_health(home, Health::Draining);
        let moved = lanes[0].key("x");
        assert_ne!(moved, home);
        shared.vitals.set_health(home, Health::Ready);
        assert_eq!(lanes[1].key("x"), moved, "it does not move back");
        let _load = hold(shared, moved, 50);
        lanes[0].now_us = 99_000_000;
        assert_eq!(lanes[0].key("x"), moved);
        lanes[0].now_us = 200_000_000;
        if assignment == Assignment::MinLoad {
            assert_ne!(lanes[0].key("x"), moved, "idle for too long");
        }
    }
}

#[test]
fn two_lanes_give_a_new_key_to_one_worker() {
    let shared = fleet(2, 8);
    let barrier = &Barrier::new(2);
    let homes: Vec<Vec<Slot>> = thread::scope(|scope| {
        let threads = [0, 1].map(|lane| {
            scope.spawn(move || {
                let mut lane = Lane::new(lane, shared, Policy::Manual);
                (0..500)
                    .map(|key| {
                        barrier.wait();
                        lane.key(&format!("{key}"))
                    })
                    .collect()
            })
        });
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(homes[0], homes[1]);
}

#[test]
fn buckets_separate_short_from_long_and_share_the_work() {
    let shared = fleet(1, 4);
    let mut lane = Lane::new(0, shared, Policy::Bucket);
    let mut work = [0; 4];
    let mut shorts = [0; 4];
    for request in 0..4000 {
        lane.now_us += 1000;
        let length = if request % 10 == 0 { 36_000 } else { 1000 };
        let guard = lane.ask(Want { length, ..lane.want });
        if request >= 1000 {
            work[usize::from(guard.slot())] += length;
            shorts[usize::from(guard.slot())] += usize::from(length == 1000);
        }
    }
    assert_eq!(shorts[1..], [0; 3], "short ones are a fifth of the work: the first group's");
    let (least, most) = (work.iter().min().unwrap(), work.iter().max().unwrap());
    assert!(most * 2 < least * 3, "{work:?}");
    // Of one length alone, all take part.
    let mut served = [0; 4];
    for request in 0..40_000 {
        lane.now_us += 1000;
        let guard = lane.ask(Want { length: 500, ..lane.want });
        served[usize::from(guard.slot())] += usize::from(request >= 30_000);
    }
    assert!(served.iter().all(|&n| n > 1000), "{served:?}");
}

#[test]
fn an_overloaded_or_closed_bucket_leaves_its_requests_to_all() {
    let shared = fleet(1, 2);
    let mut lane = Lane::new(0, shared, Policy::Bucket);
    for length in [100, 100_000].repeat(50) {
        drop(lane.ask(Want { length, ..lane.want }));
    }
    let home = lane.ask(Want { length: 100, ..lane.want }).slot();
    assert_eq!(home, 0);
    let load = hold(shared, 0, 200);
    assert_eq!(lane.ask(Want { length: 100, ..lane.want }).slot(), 1);
    drop(load);
    shared.vitals.set_health(0, Health::Unhealthy);
    assert_eq!(lane.ask(Want { length: 100, ..lane.want }).slot(), 1);
}

#[test]
fn passthrough_takes_the_only_one_or_turns() {
    let shared = fleet(1, 1);
    let mut lane = Lane::new(0, shared, Policy::Passthrough);
    assert_eq!(lane.prompt(&[]).slot(), 0);
    shared.vitals.set_health(0, Health::Unhealthy);
    assert_eq!(lane.try_ask(lane.want).unwrap_err(), What::NoWorker);
    publish(shared, 0..3);
    assert_eq!([0; 6].map(|_| lane.prompt(&[]).slot()).iter().filter(|&&slot| slot == 1).count(), 2);
}

#[test]
fn a_named_worker_serves_or_nobody_does() {
    let shared = fleet(1, 4);
    let mut lane = Lane::new(0, shared, Policy::CacheAware);
    let named = |target: &'static str| Want {
        target: Some(target.as_bytes()),
        ..Want { model: Some(b"m"), ..Want::default() }
    };
    for (target, slot) in [("2", 2), ("http://10.0.0.1:3", 3), ("http://10.0.0.1:3/", 3)] {
        let _load = hold(shared, slot, 90);
        assert_eq!(lane.ask(named(target)).slot(), slot);
    }
    for target in ["4", "", "http://10.0.0.1:4", "99999999999999999999999", "-1"] {
        assert_eq!(lane.try_ask(named(target)).unwrap_err(), What::NoWorker, "{target}");
    }
    shared.vitals.set_health(2, Health::Unhealthy);
    assert_eq!(lane.try_ask(named("2")).unwrap_err(), What::NoWorker);
}

#[test]
fn every_policy_spares_who_is_closed_and_fails_with_nobody() {
    for &policy in Policy::ALL {
        for workers in [1, 3, 70] {
            let shared = fleet(1, workers);
            let mut lane = Lane::new(0, shared, policy);
            let ask = |lane: &mut Lane, i: u64| {
                let want = Want { symbols: &talk(i % 3, 20), routing_key: b"k", length: 100 * i as usize, ..lane.want };
                lane.try_ask(want).map(|guard| guard.slot())
            };
            shared.vitals.set_health(0, Health::Draining);
            for i in 0..50 {
                assert_eq!(ask(&mut lane, i).is_ok_and(|slot| slot != 0), workers > 1, "{policy:?} {workers}");
            }
            (0..workers).for_each(|slot| {
                shared.vitals.set_health(slot as Slot, Health::Unhealthy);
            });
            lane.now_us += 1000;
            assert_eq!(ask(&mut lane, 1).unwrap_err(), What::NoWorker, "{policy:?} {workers}");
        }
    }
}
