//! Who gets what: connections over lanes, requests over workers.

use corelane::config::Policy;
use corelane::mock::Settings;
use serde_json::json;

use crate::rig::{Http, Rig, post, until};

#[test]
fn connections_are_spread_over_the_lanes() {
    let rig = Rig::with(Settings::default(), 1, |c| c.cores = vec![0, 1]);
    let mut clients: Vec<Http> = (0..64).map(|_| rig.http()).collect();
    for http in &mut clients {
        http.ask("GET", "/health", &[], b"").expect(200);
    }
    let lanes = || [0, 1].map(|l| rig.gateway.shared().handover.connections(l));
    until("all are counted", || lanes().iter().sum::<u32>() == 64);
    println!("{:?}", lanes());
    assert!(lanes().iter().all(|n| *n <= 38), "{:?}", lanes());
    drop(clients);
    until("all are gone", || lanes() == [0, 0]);
}

/// Requests each engine got of `n` that were all in flight at once.
fn wave(rig: &Rig, n: u64) -> Vec<u64> {
    let before: Vec<u64> = rig.fleet.engines().iter().map(|e| e.stats().requests).collect();
    rig.fleet.engines().iter().for_each(|e| e.freeze());
    std::thread::scope(|scope| {
        for _ in 0..n {
            scope.spawn(|| {
                let mut http = rig.http();
                http.send(&post("/v1/completions", &json!({"prompt":"cold","max_tokens":1})));
                http.answer().expect(200);
            });
        }
        until("all have been given to an engine", || rig.received() == before.iter().sum::<u64>() + n);
        rig.fleet.engines().iter().for_each(|e| e.thaw());
    });
    rig.settles();
    rig.fleet.engines().iter().zip(before).map(|(e, b)| e.stats().requests - b).collect()
}

fn spread(counts: &[u64]) -> u64 {
    counts.iter().max().unwrap() - counts.iter().min().unwrap()
}

/// Field report 1: with first bytes that come late, all requests went to the first worker. Here the choice is the
/// charge: whatever arrives together, from both lanes, is spread evenly.
#[test]
fn concurrent_cold_requests_are_spread_evenly() {
    let rig = Rig::with(Settings::default(), 8, |c| c.cores = vec![0, 1]);
    for n in [8, 64, 256, 63] {
        let counts = wave(&rig, n);
        println!("{n} at once: {counts:?}");
        assert!(spread(&counts) <= 1, "{n}: {counts:?}");
    }
    // Idle workers take turns as well, for one client after the other.
    let before: Vec<u64> = rig.fleet.engines().iter().map(|e| e.stats().requests).collect();
    let mut http = rig.http();
    for _ in 0..16 {
        http.post("/generate", &json!({"text":"x"})).expect(200);
    }
    let after = rig.fleet.engines().iter().zip(before).map(|(e, b)| e.stats().requests - b);
    let counts: Vec<u64> = after.collect();
    assert!(counts.iter().all(|n| (1..=3).contains(n)), "{counts:?}");
}

#[test]
fn the_other_policies_work_too() {
    for policy in [Policy::RoundRobin, Policy::Random, Policy::PowerOfTwo] {
        let rig = Rig::with(Settings::default(), 8, |c| (c.cores, c.policy) = (vec![0, 1], policy));
        let counts = wave(&rig, 128);
        println!("{}: {counts:?}", policy.name());
        assert_eq!(counts.iter().sum::<u64>(), 128);
        let most = match policy {
            Policy::RoundRobin => 1,
            Policy::PowerOfTwo => 8,
            _ => 64,
        };
        assert!(spread(&counts) <= most, "{}: {counts:?}", policy.name());
    }
}
