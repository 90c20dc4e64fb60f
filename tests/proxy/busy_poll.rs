//! A lane that looks for work before it sleeps (`busy_poll_us`): the same answers, more looks, and sleep all the same.

use std::time::Duration;

use corelane::metrics::Tally;
use corelane::mock::Settings;
use serde_json::json;

use crate::rig::{Http, Rig, scrub, until};

fn rig(busy_poll_us: u64) -> Rig {
    Rig::with(Settings::default(), 1, |c| c.busy_poll = Duration::from_micros(busy_poll_us))
}

/// Waits until the lane has published what it counted so far.
fn published(rig: &Rig) {
    let beats = || rig.gateway.shared().tallies.lane(0).beats.get();
    let before = beats();
    until("the lane has published", || beats() >= before + 2);
}

/// System calls of the ring for the same requests, whose answers are held against the engine's own.
fn enters(rig: &Rig) -> u64 {
    let mut through = rig.http();
    let mut direct = Http::connect(rig.fleet.engine(0).addr());
    published(rig);
    let before = rig.tally(Tally::Enters);
    for stream in [false, true] {
        // Events that are apart, so that a lane has something to wait for.
        let body = json!({"model":"mock","prompt":"hello","max_tokens":5,"stream":stream,"mock":{"gap_ms":2}});
        let want = direct.post("/v1/completions", &body).expect(200);
        for _ in 0..30 {
            let got = through.post("/v1/completions", &body).expect(200);
            assert_eq!(scrub(&got.body), scrub(&want.body));
        }
    }
    rig.settles();
    published(rig);
    assert_eq!((rig.tally(Tally::LateWakes), rig.tally(Tally::Panics)), (0, 0));
    rig.tally(Tally::Enters) - before
}

#[test]
fn a_lane_looks_before_it_sleeps_and_answers_the_same() {
    let (sleeps, looks) = (rig(0), rig(1000));
    let (few, many) = (enters(&sleeps), enters(&looks));
    println!("{few} system calls without looking, {many} with");
    assert!(many > 5 * few, "{few} system calls without looking, {many} with");
    let spun = |rig: &Rig| rig.metric(r#"corelane_lane_spun_seconds_total{lane="0"}"#);
    assert_eq!(spun(&sleeps), Some(0.0));
    assert!(spun(&looks).is_some_and(|seconds| seconds > 0.0));
}

#[test]
fn an_idle_lane_sleeps_all_the_same() {
    let rig = rig(1000);
    rig.get("/health").expect(200);
    published(&rig);
    let lane = rig.gateway.shared().tallies.lane(0);
    let now = || (lane.beats.get(), lane.cpu_us.get(), lane.spun_us.get());
    let before = now();
    until("some rounds of chores", || now().0 >= before.0 + 4);
    let (_, cpu, spun) = now();
    let (cpu, spun) = (cpu - before.1, spun - before.2);
    println!("{cpu} µs of CPU time in four rounds of chores, {spun} of them looking");
    assert!(spun > 0, "it looks after each round");
    assert!(cpu < 4 * 50_000, "{cpu} µs of CPU time in four rounds of chores, which are 2 s");
}
