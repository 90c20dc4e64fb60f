//! Everything at once, and nothing is left of it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use corelane::metrics::Tally;
use corelane::mock::Settings;
use serde_json::{Value, json};

use crate::rig::{End, Http, Rig, post, until};

const CLIENTS: u64 = 64;
const REQUESTS: u64 = 2000;

/// What a request does to the worker, and whether an error may come of it.
fn fault(rng: &mut fastrand::Rng) -> (Value, bool) {
    match rng.u32(0..30) {
        0 => (json!({"reset_before_head":true}), true),
        1 => (json!({"close_before_head":true}), true),
        2 => (json!({"reset_after_events":rng.u64(0..6)}), true),
        3 => (json!({"close_after_events":rng.u64(0..6)}), true),
        4 => (json!({"raw":"HTTP/1.1 200 O\r\nno head"}), true),
        5 => (json!({"no_length":true}), false),
        6 => (json!({"trailers":true}), false),
        7 => (json!({"interim":3}), false),
        8 => (json!({"excess":true}), false),
        9 => (json!({"close":true}), false),
        10 => (json!({"delay_ms":rng.u64(0..30)}), false),
        11 => (json!({"gap_ms":1}), false),
        12 => (json!({"event_bytes":rng.usize(1..60_000)}), false),
        13 => (json!({"status":rng.choice([400, 422, 429, 500, 503])}), false),
        _ => (json!({}), false),
    }
}

fn client(rig: &Rig, seed: u64, left: &AtomicU64, served: &AtomicU64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut http = rig.http();
    while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok() {
        let (mock, may_fail) = fault(&mut rng);
        let stream = rng.bool();
        let body = json!({"prompt":"p".repeat(rng.usize(0..3000)),"stream":stream,"max_tokens":5,"mock":mock});
        http.send(&post("/v1/completions", &body));
        if rng.u32(0..25) == 0 {
            std::thread::sleep(Duration::from_millis(rng.u64(0..5)));
            if rng.bool() {
                http.reset()
            } else {
                drop(http)
            }
            http = rig.http();
            continue;
        }
        let answer = match http.try_answer_to("POST") {
            Ok(answer) => answer,
            Err(end) => {
                // A cut may take the head along.
                assert!(may_fail, "{end:?} for {body}");
                http = rig.http();
                continue;
            }
        };
        if !may_fail {
            let status = mock["status"].as_u64().unwrap_or(200);
            assert_eq!((u64::from(answer.status), answer.end), (status, End::Whole), "{body}");
            if status == 200 {
                let whole =
                    if stream { answer.text().ends_with("[DONE]\n\n") } else { answer.json()["usage"].is_object() };
                assert!(whole, "{body} gave {}", answer.text());
            }
            served.fetch_add(1, Ordering::Relaxed);
        }
        if answer.end != End::Whole || answer.header("connection") == Some("close") || rng.u32(0..20) == 0 {
            http = rig.http();
        }
    }
}

/// Field report 2: two thousand requests that end in every way, and every count is zero again.
#[test]
fn nothing_is_left_of_two_thousand_requests() {
    let rig = Rig::with(Settings::default(), 5, |c| (c.cores, c.pool_idle) = (vec![0, 1], Duration::from_secs(1)));
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let (left, served) = (AtomicU64::new(REQUESTS), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for n in 0..CLIENTS {
            let (rig, left, served) = (&rig, &left, &served);
            scope.spawn(move || client(rig, seed.wrapping_add(n), left, served));
        }
    });
    println!("{} served as they should", served.into_inner());
    rig.settles();
    let shared = rig.gateway.shared();
    let connections = || [0, 1].map(|l| shared.handover.connections(l));
    until("all connections are gone", || {
        let now = connections();
        if now != [0, 0] {
            println!("{now:?}");
            std::thread::sleep(Duration::from_millis(500));
        }
        now == [0, 0]
    });
    assert_eq!(shared.memory.claimed(), 0);
    assert_eq!((rig.tally(Tally::Panics), rig.tally(Tally::AcceptErrors)), (0, 0));
    // Pooled connections end with their idle time, and there are no others.
    until("no connection to an engine is left", || rig.fleet.engines().iter().all(|e| e.stats().connections == 0));
    // Lanes publish what their rings did now and then.
    let before = rig.tally(Tally::Completions);
    until("lanes have published", || rig.tally(Tally::Completions) > before);
    let late = rig.tally(Tally::LateWakes);
    assert_eq!(late, 0, "a lane slept with runnable work");
    let mut http = Http::connect(rig.gateway.address());
    http.post("/v1/completions", &json!({"prompt":"x"})).expect(200);
}

/// Engines die and come back under load: every client hears of it at once, and again nothing is left.
#[test]
fn engines_that_come_and_go_leave_nothing_behind() {
    let rig = Rig::with(Settings::default(), 3, |c| {
        (c.cores, c.health_check, c.pool_idle) = (vec![0, 1], false, Duration::from_secs(1));
    });
    let (left, served) = (AtomicU64::new(600), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for n in 0..16u64 {
            let (rig, left, served) = (&rig, &left, &served);
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(n);
                let mut http = rig.http();
                while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok() {
                    let mock = json!({"gap_ms":rng.u32(0..6)});
                    http.send(&post("/generate", &json!({"text":"x","stream":rng.bool(),"mock":mock})));
                    match http.try_answer_to("POST") {
                        Ok(answer) if answer.end == End::Whole => {
                            assert!(matches!(answer.status, 200 | 502 | 503), "{}", answer.head);
                            served.fetch_add(u64::from(answer.status == 200), Ordering::Relaxed);
                        }
                        _ => http = rig.http(),
                    }
                }
            });
        }
        let mut turn = 0;
        while left.load(Ordering::Relaxed) > 0 {
            let engine = rig.fleet.engine(turn % 3);
            engine.kill();
            std::thread::sleep(Duration::from_millis(20));
            engine.restart().expect("the port is free again");
            std::thread::sleep(Duration::from_millis(50));
            turn += 1;
        }
    });
    println!("{} of 600 served", served.load(Ordering::Relaxed));
    assert!(served.into_inner() > 200);
    rig.settles();
    until("no connection to an engine is left", || rig.fleet.engines().iter().all(|e| e.stats().connections == 0));
    assert_eq!(rig.tally(Tally::Panics), 0);
}

/// Descriptors of this process that are sockets.
fn sockets() -> usize {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|e| std::fs::read_link(e.ok()?.path()).ok());
    open.filter(|to| to.to_string_lossy().starts_with("socket:")).count()
}

/// Connections that come and go leave no timer, no ring operation and no memory: the thousandth costs no more.
#[test]
fn connections_come_and_go() {
    let rig = Rig::new(1);
    let before = sockets();
    for i in 0..1000 {
        let mut http = rig.http();
        match i % 5 {
            0 => drop(http.post("/generate", &json!({"text":"x"})).expect(200)),
            1 => drop(http.ask("GET", "/health", &[], b"").expect(200)),
            2 => drop(http.send(b"GET /he")),
            3 => http.reset(),
            _ => {
                http.send(b"nonsense\r\n\r\n").answer().expect_error(400, "bad_request_line");
            }
        }
    }
    until("all connections are gone", || rig.gateway.shared().handover.connections(0) == 0);
    let after = sockets();
    println!("{before} sockets before, {after} after");
    // Other tests run beside this one and have a few hundred at most.
    assert!(after < before + 500, "{before} sockets before, {after} after");
}
