//! What engines say of their load, and what that does to the choice of workers. Field report 6.

use std::time::Duration;

use corelane::mock::{Pretended, Settings};
use serde_json::json;

use crate::rig::{Http, Rig, until};

const LOADS: [&str; 2] = ["/v1/loads", "/metrics"];

fn pretend(rig: &Rig, engine: usize, kv_usage: f64, waiting: u64) {
    rig.fleet.engine(engine).pretend(Some(Pretended::Load { kv_usage, waiting }));
}

/// Requests that each engine gets of `n` with one prompt, one after the other.
fn share(rig: &Rig, prompt: &str, n: usize) -> Vec<u64> {
    let counts = || rig.fleet.engines().iter().map(|engine| engine.stats().requests).collect::<Vec<u64>>();
    let before = counts();
    let mut http = rig.http();
    for _ in 0..n {
        http.post("/v1/completions", &json!({"prompt": prompt, "max_tokens": 1})).expect(200);
    }
    counts().iter().zip(before).map(|(after, before)| after - before).collect()
}

fn asked(rig: &Rig, engine: usize) -> u64 {
    let paths = rig.stats(engine).paths;
    LOADS.iter().filter_map(|path| paths.get(*path)).sum()
}

fn is_shed(rig: &Rig, engine: usize) -> bool {
    let name = format!("corelane_worker_shed{{worker=\"{}\",role=\"regular\"}}", rig.fleet.urls()[engine]);
    rig.metric(&name) == Some(1.0)
}

#[test]
fn a_hot_worker_is_shed_and_comes_back() {
    for vllm in [false, true] {
        let rig = Rig::with(Settings { vllm, ..Settings::default() }, 3, |config| {
            config.routing.overload_token_usage = 0.8;
            config.load_monitor_interval = Duration::from_millis(100);
        });
        let prompt = &"hot and long ".repeat(50);
        share(&rig, prompt, 1);
        let home = (0..3).find(|&i| rig.stats(i).requests == 1).unwrap();
        assert_eq!(share(&rig, prompt, 5)[home], 5, "its prefix keeps it there");
        pretend(&rig, home, 0.95, 0);
        until("it is shed", || is_shed(&rig, home));
        assert_eq!(share(&rig, prompt, 9)[home], 0);
        let shed = "corelane_cache_decisions_total{reason=\"shed\"}";
        assert!(rig.metric(shed).is_some_and(|n| n >= 1.0));
        pretend(&rig, home, 0.5, 0);
        until("it is back", || !is_shed(&rig, home));
        until("it has its prefix", || share(&rig, prompt, 3)[home] > 0);
        // All of them are hot: nobody is left out.
        (0..3).for_each(|i| pretend(&rig, i, 0.99, 0));
        let usage = format!("corelane_worker_kv_usage{{worker=\"{}\",role=\"regular\"}}", rig.fleet.urls()[2]);
        until("all say so", || {
            rig.metric(&usage).is_some_and(|usage| usage > 0.98) && (0..3).all(|i| !is_shed(&rig, i))
        });
        assert_eq!(share(&rig, "cold", 6).iter().sum::<u64>(), 6);
    }
}

#[test]
fn uneven_caches_drop_affinity() {
    let rig = Rig::with(Settings::default(), 2, |config| {
        config.routing.balance_token_usage = 0.5;
        config.load_monitor_interval = Duration::from_millis(100);
    });
    let prompt = &"hot and long ".repeat(50);
    let uneven = || rig.metric("corelane_cache_decisions_total{reason=\"uneven\"}").unwrap();
    assert_eq!(share(&rig, prompt, 6).iter().max(), Some(&6));
    assert_eq!(uneven(), 0.0);
    pretend(&rig, 0, 0.9, 0);
    pretend(&rig, 1, 0.3, 0);
    until("affinity is dropped", || share(&rig, prompt, 1).iter().sum::<u64>() == 1 && uneven() > 0.0);
    let counts = share(&rig, prompt, 8);
    assert!(counts.iter().all(|n| *n > 0), "{counts:?}");
    pretend(&rig, 1, 0.5, 0);
    until("affinity is back", || {
        let before = uneven();
        share(&rig, prompt, 4);
        uneven() == before
    });
}

#[test]
fn requests_that_wait_in_an_engine_shed_it_and_silence_brings_it_back() {
    let rig = Rig::with(Settings::default(), 2, |config| {
        config.routing.max_worker_waiting = 4;
        config.load_monitor_interval = Duration::from_millis(100);
    });
    pretend(&rig, 0, 0.1, 4);
    until("it is shed", || is_shed(&rig, 0));
    assert_eq!(share(&rig, "cold", 6), [0, 6]);
    // Ten seconds are the least after which a word is old.
    rig.fleet.engine(0).pretend(Some(Pretended::Nothing));
    assert!(is_shed(&rig, 0));
    let waiting = format!("corelane_worker_waiting{{worker=\"{}\",role=\"regular\"}}", rig.fleet.urls()[0]);
    until("its word is old", || rig.metric(&waiting).is_none());
    until("it is back", || share(&rig, "cold", 2)[0] > 0);
}

#[test]
fn nobody_is_asked_where_no_threshold_is_set() {
    let rig = Rig::with(Settings::default(), 2, |config| config.load_monitor_interval = Duration::from_millis(100));
    pretend(&rig, 0, 1.0, 99);
    pretend(&rig, 1, 0.0, 0);
    std::thread::sleep(Duration::from_millis(400));
    assert_eq!([0, 1].map(|i| asked(&rig, i)), [0, 0]);
    assert_eq!(share(&rig, "cold", 8), [4, 4]);
}

#[test]
fn the_series_of_a_removed_worker_go_with_it() {
    let rig = Rig::with(Settings::default(), 2, |config| {
        config.routing.max_worker_waiting = 4;
        config.load_monitor_interval = Duration::from_millis(100);
    });
    let url = &rig.fleet.urls()[0];
    let page = || Http::connect(rig.gateway.admin()).ask("GET", "/metrics", &[], b"").text();
    let has = |name: &str| page().contains(&format!("corelane_worker_{name}{{worker=\"{url}\""));
    const NAMES: [&str; 3] = ["kv_usage", "waiting", "shed"];
    until("there are series", || NAMES.iter().all(|name| has(name)));
    let path = format!("/workers/{}?force=true", url.replace(':', "%3A").replace('/', "%2F"));
    let head = format!("DELETE {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    Http::connect(rig.gateway.admin()).send(head.as_bytes()).answer().expect(200);
    until("they are gone", || NAMES.iter().all(|name| !has(name)));
    let before = asked(&rig, 0);
    until("the other one is still asked", {
        let from = asked(&rig, 1);
        let rig = &rig;
        move || asked(rig, 1) > from + 2
    });
    assert!(asked(&rig, 0) <= before + 1, "at most one question was under way");
}
