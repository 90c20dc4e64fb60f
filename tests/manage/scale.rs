//! Thousands of workers, registered one by one: figures to look at, none asserted.
//!
//! `cargo test --locked --test manage -- --ignored --nocapture thousands`

use std::time::{Duration, Instant};

use corelane::config::{Config, Policy};
use corelane::mock::Settings;
use serde_json::json;

use crate::admin::Client;
use crate::rig::{Rig, until};

const WORKERS: usize = 2048;

fn measure(name: &str, change: impl Fn(&mut Config)) {
    let rig = Rig::with(Settings::default(), 1, |config| {
        // Addresses where nobody listens: the first probe fails at once, and is not repeated soon.
        config.health_interval = Duration::from_secs(60);
        change(config);
    });
    let client = Client::of(&rig);
    let url = |i: usize| format!("http://127.{}.{}.1:9", 1 + i / 200, i % 200);
    let begun = Instant::now();
    for i in 0..WORKERS - 1 {
        client.send("POST", "/workers", &json!({"url": url(i), "models": ["mock"]})).expect(202);
    }
    println!("{name}: {WORKERS} workers registered one after another in {:?}", begun.elapsed());
    let shared = rig.gateway.shared();
    until("all are published", || shared.roster.snapshot().workers.len() == WORKERS);
    let timed = |what: &str, times: u32, mut act: Box<dyn FnMut(u32) + '_>| {
        let begun = Instant::now();
        (0..times).for_each(&mut act);
        println!("{name}: {what}: {:?} each", begun.elapsed() / times);
    };
    timed("GET /workers", 10, Box::new(|_| assert!(client.get("/workers").expect(200).body.len() > 100 * WORKERS)));
    timed(
        "add and remove, until published",
        10,
        Box::new(|i| {
            let new = url(WORKERS + i as usize);
            client.send("POST", "/workers", &json!({"url": new})).expect(202);
            while shared.roster.snapshot().workers.len() != WORKERS + 1 {
                std::thread::yield_now();
            }
            client.raw("DELETE", &format!("/workers/{new}?force=true"), "").expect(200);
            while shared.roster.snapshot().workers.len() != WORKERS {
                std::thread::yield_now();
            }
        }),
    );
    let ask = json!({"prompt": "x"});
    let mut http = rig.http();
    timed("a request meanwhile", 100, Box::new(|_| drop(http.post("/v1/completions", &ask).expect(200))));
}

#[test]
#[ignore = "figures to look at; run it alone"]
fn thousands_are_registered_quickly() {
    measure("cache_aware", |_| {});
    measure("consistent_hashing", |config| config.policy = Policy::ConsistentHashing);
}
