//! Everything goes wrong at once, and the gateway is at rest afterwards: workers that are killed, frozen and started
//! again as processes, workers that break HTTP and connections in every phase, clients that leave in every phase.
//!
//! Takes the built binary, gives verdicts. Never ends a process that it did not start. `CHAOS_REQUESTS` sets how many
//! requests there are, `CHAOS_SEED` repeats what chance has chosen (not the order of what happens at the same time).

#[path = "chaos/clients.rs"]
mod clients;
#[path = "chaos/host.rs"]
mod host;
#[path = "chaos/rogue.rs"]
mod rogue;

mod children;
#[allow(dead_code, reason = "other test programs use the rest")]
mod rig;

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use clients::Ledger;
use host::{Engines, Host};
use rig::{Http, post, until};

const CLIENTS: u64 = 48;
/// Requests of a run, unless `CHAOS_REQUESTS` says otherwise.
const REQUESTS: u64 = 10_000;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |v| v.parse().unwrap_or_else(|_| panic!("{name}={v} is no number")))
}

/// Options of the gateway: times are short, and everything that is bounded has a bound that is met.
const OPTIONS: &str = "\
    --max-concurrent-requests 32 --queue-size 1000 \
    --first-byte-timeout-secs 2.5 --prefill-first-byte-timeout-secs 2.5 \
    --decode-first-byte-timeout-secs 2.5 --stall-timeout-secs 2.5 --write-stall-timeout-secs 1 \
    --head-timeout-secs 2 --body-timeout-secs 2 --pool-idle-ms 1000 --pool-size 16 \
    --pipes-per-lane 8 --retry-initial-backoff-ms 5 --retry-max-backoff-ms 20 \
    --health-check-interval-secs 0.5 --health-failure-threshold 2 --health-success-threshold 1 \
    --cb-timeout-duration-secs 1 --prefix-memory 16MiB --body-memory 64MiB --max-payload-size 8MiB \
    --log-level debug";

/// Disrupts one process after the other until the clients have finished; gives how often each kind came.
fn disrupt(gateway: &Host, fleet: &mut [Engines], ledger: &Ledger, rng: &mut fastrand::Rng) -> (u64, u64) {
    let (mut kills, mut freezes) = (0, 0);
    while ledger.left.load(Relaxed) > 0 {
        std::thread::sleep(Duration::from_millis(rng.u64(300..1200)));
        let victim = rng.usize(0..fleet.len());
        let (on_it, before) = gateway.load(&fleet[victim]);
        ledger.disrupt();
        if rng.u32(0..3) > 0 {
            fleet[victim].kill();
            std::thread::sleep(Duration::from_millis(rng.u64(0..400)));
            fleet[victim].revive();
            kills += 1;
        } else {
            fleet[victim].signal(Signal::STOP);
            std::thread::sleep(Duration::from_millis(rng.u64(20..3500)));
            fleet[victim].signal(Signal::CONT);
            freezes += 1;
        }
        ledger.calm();
        ledger.exposed.fetch_add(on_it + gateway.load(&fleet[victim]).1 - before, Relaxed);
    }
    (kills, freezes)
}

#[test]
fn nothing_is_left_of_chaos() {
    let (requests, seed) = (number("CHAOS_REQUESTS", REQUESTS), number("CHAOS_SEED", fastrand::u64(..)));
    println!("CHAOS_REQUESTS={requests} CHAOS_SEED={seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    // SGLang's pairs, whose legs go out at once, and vLLM's, one leg after the other.
    let backends = ["sglang", "vllm"];
    let pair =
        ["--prefill", "1", "--decode", "1", "--room-timeout-ms", "1000", "--staged-timeout-ms", "10000", "--vllm"];
    let mut fleet: Vec<Engines> = (0..4).map(|_| Engines::start(1, &[])).collect();
    fleet.extend((0..2).map(|vllm| Engines::start(2, &pair[..pair.len() - 1 + vllm])));
    let rogues: Vec<String> = (0..4).map(|_| format!("http://{}", rogue::start(rng.u64(..)))).collect();
    let mut tables = String::new();
    let mut add = |url: &str, model: &str, more: &str| {
        tables += &format!("[[workers]]\nurl = \"{url}\"\nmodels = [\"{model}\"]\n{more}\n");
    };
    fleet[..4].iter().for_each(|e| add(&e.url(0), "plain", ""));
    rogues.iter().for_each(|url| add(url, "rogue", ""));
    for (engines, backend) in fleet[4..].iter().zip(backends) {
        for (i, role) in [(0, "prefill"), (1, "decode")] {
            add(&engines.url(i), "pair", &format!("role = \"{role}\"\nbackend = \"{backend}\""));
        }
    }
    let gateway = Host::start(&tables, &OPTIONS.split_whitespace().collect::<Vec<_>>(), 12);
    // Everything that is made on first use is made: the rest must come back to this.
    let ledger = Ledger::default();
    clients_of(&gateway, seed ^ 1, 200, &ledger);
    rests(&gateway);
    let (descriptors, threads) = (at_rest(&gateway), gateway.status("Threads"));

    let ledger = Ledger::default();
    let begun = Instant::now();
    let mut resident = 0;
    let (kills, freezes) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            // Memory after a fifth: what is kept for the next request has its size then.
            while ledger.left.load(Relaxed) > requests * 4 / 5 {
                std::thread::sleep(Duration::from_millis(20));
            }
            gateway.status("VmRSS")
        });
        ledger.left.store(requests, Relaxed);
        let disruption = scope.spawn(|| disrupt(&gateway, &mut fleet, &ledger, &mut rng));
        clients_of(&gateway, seed, requests, &ledger);
        resident = watch.join().unwrap();
        disruption.join().unwrap()
    });
    let get = |count| ledger.get(count);
    println!(
        "{requests} in {:?}: {} whole, {} refused, {} cut, {} unanswered behind a cut, {} given up; {kills} kills and \
         {freezes} freezes hit {} of {} that had not asked for trouble",
        begun.elapsed(),
        get(|l| &l.whole),
        get(|l| &l.refused),
        get(|l| &l.cut),
        get(|l| &l.unanswered),
        get(|l| &l.given_up),
        get(|l| &l.hit),
        get(|l| &l.exposed),
    );
    let all = get(|l| &l.whole) + get(|l| &l.refused) + get(|l| &l.cut) + get(|l| &l.unanswered) + get(|l| &l.given_up);
    assert_eq!(all, requests);
    assert!(get(|l| &l.whole) > requests / 2, "hardly anything is served");
    assert!(get(|l| &l.hit) <= get(|l| &l.exposed), "hit without having been there");

    is_idle(&gateway);
    let pooled = at_rest(&gateway) - descriptors;
    assert!(pooled <= 12 * 2 * 16, "{pooled} more descriptors than workers times lanes times pool_size");
    rests(&gateway);
    until("as many descriptors as before", || at_rest(&gateway) == descriptors);
    println!(
        "resident: {resident} kB after a fifth, {} kB at the end, {} kB at most; {descriptors} descriptors",
        gateway.status("VmRSS"),
        gateway.status("VmHWM")
    );
    assert_eq!(gateway.status("Threads"), threads);
    assert!(gateway.status("VmRSS") < resident + 64 * 1024, "memory grows");
    assert!(gateway.status("VmHWM") < 512 * 1024, "memory is not bounded");
    assert_eq!(gateway.metric("corelane_panics_total", ""), 0.0, "{}", gateway.log());
    // Whatever it logs, it is nothing of what clients and workers say to each other.
    assert!(!gateway.log().contains(clients::MARK) && gateway.log().contains("corelane serves"));
    println!("late wakes: {}", gateway.metric("corelane_late_wakes_total", ""));
    // The engines are free, too: what clients left was ended there.
    for at in fleet.iter().flat_map(Engines::addresses) {
        until("no engine works for nobody", || {
            let stats = Http::connect(at).ask("GET", "/mock/stats", &[], b"").expect(200).json();
            stats["active"] == 0 && stats["staged"] == 0
        });
    }
    // And it serves.
    until("every worker is usable", || gateway.workers().iter().all(|w| w["state"] == "ready"));
    for model in ["plain", "pair"] {
        Http::connect(gateway.address).post("/v1/completions", &json!({"model": model, "prompt": "x"})).expect(200);
    }
}

/// Lets clients make `requests` requests.
fn clients_of(gateway: &Host, seed: u64, requests: u64, ledger: &Ledger) {
    ledger.left.store(requests, Relaxed);
    std::thread::scope(|scope| {
        for n in 0..CLIENTS {
            scope.spawn(move || clients::client(gateway.address, seed.wrapping_add(n * 0x9e37_79b9), ledger));
        }
    });
}

/// Waits until nothing is under way.
fn is_idle(gateway: &Host) {
    let zero = |name: &str, label: &str| {
        until(&format!("{name} {label} is 0"), || gateway.metric(name, label) == 0.0);
    };
    zero("corelane_lane_connections", "");
    zero("corelane_permits_in_use", "");
    zero("corelane_queue_length", "");
    zero("corelane_worker_inflight", "");
    zero("corelane_body_memory_bytes", "");
    zero("corelane_pipes", "used");
    assert!(gateway.workers().iter().all(|w| w["in_flight"] == 0 && w["breaker_trials"] == 0));
}

/// Waits until nothing is under way, and pooled connections have ended.
fn rests(gateway: &Host) {
    is_idle(gateway);
    // Longer than a connection may rest in the pool.
    std::thread::sleep(Duration::from_millis(1500));
}

/// Descriptors that are no pipe of the lanes' stock: each has two.
fn at_rest(gateway: &Host) -> u64 {
    gateway.descriptors() - 2 * gateway.metric("corelane_pipes", "resting") as u64
}

/// A worker that is killed costs what was on it and nothing else, whatever was going to come; and nobody is sent there
/// for long.
#[test]
fn a_killed_worker_costs_what_was_on_it() {
    const STREAMS: usize = 12;
    let mut fleet: Vec<Engines> = (0..3).map(|_| Engines::start(1, &[])).collect();
    let tables: String =
        fleet.iter().map(|e| format!("[[workers]]\nurl = \"{}\"\nmodels = [\"m\"]\n", e.url(0))).collect();
    // Probes would tell, too: here requests find out by themselves.
    let options = [
        "--health-check-interval-secs",
        "3600",
        "--cb-timeout-duration-secs",
        "2",
        "--max-concurrent-requests",
        "100",
        "--pool-idle-ms",
        "4000",
    ];
    let gateway = Host::start(&tables, &options, 3);
    let short = |n: usize| json!({"model": "m", "prompt": format!("{n} {}", "p".repeat(200)), "max_tokens": 2});
    // Every lane has connections to every worker in its pool.
    for n in 0..60 {
        Http::connect(gateway.address).post("/v1/completions", &short(n)).expect(200);
    }
    let long = json!({"model": "m", "prompt": "x", "stream": true, "max_tokens": 100, "mock": {"gap_ms": 20}});
    let mut streams: Vec<Http> = (0..STREAMS).map(|_| Http::connect(gateway.address)).collect();
    for http in &mut streams {
        http.send(&post("/v1/completions", &long));
    }
    let answers: Vec<_> = streams.iter_mut().map(|http| http.head().expect("a stream")).collect();
    assert!(answers.iter().all(|answer| answer.status == 200));
    let (on_it, chosen) = gateway.load(&fleet[1]);
    assert!(on_it >= 2, "{on_it} of {STREAMS}");
    fleet[1].kill();

    // Whoever comes afterwards is served, by others.
    const CLIENTS: usize = 8;
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let gateway = &gateway;
            scope.spawn(move || {
                let mut http = Http::connect(gateway.address);
                for n in 0..50 {
                    http.post("/v1/completions", &short(client * 1000 + n)).expect(200);
                }
            });
        }
    });
    let mut cut = 0;
    for http in &mut streams {
        let mut text = Vec::new();
        let whole = loop {
            match http.chunk(&mut String::new()) {
                Ok(chunk) if chunk.is_empty() => break true,
                Ok(chunk) => text.extend(chunk),
                Err(_) => break false,
            }
        };
        assert_eq!(String::from_utf8_lossy(&text).ends_with("data: [DONE]\n\n"), whole);
        cut += u64::from(!whole);
    }
    assert_eq!(cut, on_it, "streams that were cut, and those that were on the worker");
    drop(streams);
    let tried = gateway.load(&fleet[1]).1 - chosen;
    println!("{cut} streams cut; {tried} of {} requests tried the dead worker", CLIENTS * 50);
    // Failures in a row open its breaker; those that were on their way by then come on top.
    assert!(tried <= (usize::from(corelane::config::Breaker::DEFAULT.failures) + CLIENTS) as u64, "{tried} tried it");
    is_idle(&gateway);

    fleet[1].revive();
    fleet[0].kill();
    fleet[2].kill();
    // One of the others is found dead first; then the one that came back serves alone.
    until("the worker that came back is found", || {
        Http::connect(gateway.address).post("/v1/completions", &short(0)).status == 200
    });
}
