//! How many requests pairs are given at a time.

use std::time::Duration;

use corelane::config::Config;
use corelane::mock::Settings;
use serde_json::{Value, json};

use crate::Pairs;
use crate::rig::{Http, blamed, in_flight, post, until};

fn pairs(change: impl FnOnce(&mut Config)) -> Pairs {
    Pairs::with(Settings::default(), 1, 1, change)
}

/// A request that neither worker ends.
fn held(pairs: &Pairs) -> Http {
    let mut http = pairs.http();
    http.send(&post("/v1/completions", &json!({"prompt":"x","mock":{"hang":true}})));
    until("both have it", || pairs.engines().all(|engine| engine.stats().active == 1));
    http
}

fn short() -> Value {
    json!({"prompt":"x","max_tokens":2})
}

#[test]
fn a_pair_takes_one_permit() {
    let pairs = pairs(|c| c.max_concurrent_requests = 1);
    let holder = held(&pairs);
    let admission = &pairs.gateway.shared().admission;
    assert_eq!((admission.in_use(), in_flight(&pairs.gateway)), (1, 2));
    let mut next = pairs.http();
    next.send(&post("/v1/completions", &short()));
    until("it waits", || admission.waiting() == 1);
    drop(holder);
    next.answer().expect(200);
    for _ in 0..20 {
        pairs.http().post("/v1/completions", &short()).expect(200);
    }
    until("all permits are back", || (admission.in_use(), admission.waiting()) == (0, 0));
    pairs.settles();
}

#[test]
fn full_workers_of_a_pair_are_not_chosen() {
    let pairs = pairs(|c| c.max_requests_per_worker = 1);
    let holder = held(&pairs);
    for _ in 0..3 {
        pairs.http().post("/v1/completions", &short()).expect_error(429, "workers_full");
        assert_eq!(in_flight(&pairs.gateway), 2, "what was reserved for nothing is given back");
    }
    drop(holder);
    until("both are free", || in_flight(&pairs.gateway) == 0);
    pairs.http().post("/v1/completions", &short()).expect(200);
    pairs.settles();
}

/// The client's answer is whole, the prefill worker's is not: the permit is the prefill leg's then.
#[test]
fn a_prefill_that_outlives_its_request_keeps_the_permit() {
    let pairs = pairs(|c| (c.max_concurrent_requests, c.request_timeout) = (1, Duration::from_secs(3)));
    let stalls = json!({"only":"prefill","stall_after_events":1});
    let mut http = pairs.http();
    http.post("/v1/completions", &json!({"prompt":"x","max_tokens":2,"stream":true,"mock":stalls})).expect(200);
    // The connection is ready for the next request, so this one has been settled.
    http.ask("GET", "/health", &[], b"").expect(200);
    let admission = &pairs.gateway.shared().admission;
    assert_eq!((admission.in_use(), in_flight(&pairs.gateway)), (1, 1));
    until("the leg is given up", || in_flight(&pairs.gateway) == 0);
    until("and its permit is back", || admission.in_use() == 0);
    http.post("/v1/completions", &short()).expect(200);
}

/// A prefill whose answer is at its beginning when the time of its request is over is to blame only where it has had half
/// of that time.
#[test]
fn a_prefill_that_had_little_time_is_not_to_blame() {
    let pairs = pairs(|c| c.request_timeout = Duration::from_secs(5));
    let stalls = json!({"only":"prefill","stall_after_events":1});
    let bytes = post("/v1/completions", &json!({"prompt":"x","max_tokens":2,"stream":true,"mock":stalls}));
    for (pause, blames) in [(3500, 0), (0, 1)] {
        let mut http = pairs.http();
        http.send(&bytes[..bytes.len() - 1]);
        std::thread::sleep(Duration::from_millis(pause));
        http.send(&bytes[bytes.len() - 1..]).answer().expect(200);
        assert_eq!(in_flight(&pairs.gateway), 1, "the prefill has not ended");
        until("the leg is given up", || in_flight(&pairs.gateway) == 0);
        assert_eq!(blamed(&pairs.gateway), blames, "after a pause of {pause} ms");
    }
}
