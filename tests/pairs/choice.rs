//! Which workers make a pair, who is blamed, and what is tried again.

use corelane::boot::Gateway;
use std::time::{Duration, Instant};

use corelane::config::{Backend, ClientLeaves, Config, WorkerSpec};
use corelane::metrics::Tally;
use corelane::mock::{Controls, Engine, Settings};
use serde_json::{Value, json};

use crate::Pairs;
use crate::rig::{self, post, tally_of, until};

fn ask() -> Value {
    json!({"model": "mock", "prompt": "Hello", "max_tokens": 2})
}

/// Failures in a row that a worker is blamed for.
fn blame(gateway: &Gateway, engine: &Engine) -> u32 {
    let snapshot = gateway.shared().roster.snapshot();
    let worker = snapshot.workers.iter().find(|worker| *worker.url == *engine.url()).expect("it is known");
    gateway.shared().vitals.vital(worker.slot).failures()
}

/// The pair is chosen anew when a worker of it cannot be reached, and that worker is not in it.
#[test]
fn an_unreachable_worker_costs_no_request() {
    for side in 0..2 {
        let pairs = Pairs::with(Settings::default(), 2, 2, |config| config.health_check = false);
        let dead = if side == 0 { pairs.prefill.engine(0) } else { pairs.decode.engine(1) };
        dead.kill();
        for _ in 0..12 {
            pairs.http().post("/v1/completions", &ask()).expect(200);
        }
        assert!(tally_of(&pairs.gateway, Tally::Retries) > 0);
        for engine in pairs.engines() {
            assert_eq!(blame(&pairs.gateway, engine) > 0, engine.url() == dead.url(), "{}", engine.url());
            assert_eq!(engine.stats().duplicate_rooms, 0);
        }
        pairs.settles();
    }
}

/// Tokens do not wait for what the prefill worker has still to say (field report 18).
#[test]
fn tokens_do_not_wait_for_the_prefills_answer() {
    let pairs = Pairs::new(1, 1);
    pairs.prefill.engine(0).misbehave(Some(Controls { stall_after_events: Some(1), ..Controls::default() }));
    let ask = json!({"model": "mock", "prompt": "Hello", "max_tokens": 8, "stream": true});
    let answer = pairs.http().post("/v1/completions", &ask).expect(200);
    assert!(answer.text().ends_with("data: [DONE]\n\n"), "{}", answer.text());
    assert_eq!((pairs.prefill.engine(0).stats().active, pairs.decode.engine(0).stats().active), (1, 0));
    pairs.prefill.engine(0).kill();
    pairs.settles();
}

/// A failure is the failing worker's, not its partner's (field report 19).
#[test]
fn only_the_worker_that_failed_is_blamed() {
    for side in 0..2 {
        let pairs = Pairs::new(1, 1);
        let engines = [pairs.prefill.engine(0), pairs.decode.engine(0)];
        engines[side].misbehave(Some(Controls { status: Some(500), ..Controls::default() }));
        pairs.http().post("/v1/completions", &ask()).expect(500);
        pairs.settles();
        assert!(blame(&pairs.gateway, engines[side]) > 0);
        assert_eq!(blame(&pairs.gateway, engines[1 - side]), 0);
    }
}

/// A room's number is not sent twice, not even because a kept connection was dead.
#[test]
fn a_dead_connection_begins_the_pair_anew() {
    for side in 0..2 {
        let pairs = Pairs::new(1, 1);
        pairs.http().post("/v1/completions", &ask()).expect(200);
        pairs.settles();
        let engines = [pairs.prefill.engine(0), pairs.decode.engine(0)];
        engines[side].misbehave(Some(Controls { reset_before_head: true, ..Controls::default() }));
        let name = ["prefill", "decode"][side];
        pairs.http().post("/v1/completions", &ask()).expect_error(502, &format!("{name}_worker_reset"));
        assert_eq!(tally_of(&pairs.gateway, Tally::Replays), 1);
        engines[side].misbehave(None);
        pairs.http().post("/v1/completions", &ask()).expect(200);
        assert!(pairs.engines().all(|engine| engine.stats().duplicate_rooms == 0));
        pairs.settles();
    }
}

fn grouped(groups: [&[&str]; 2]) -> Pairs {
    let (prefill, decode) = crate::engines(&Settings::default(), groups[0].len(), groups[1].len());
    let mut specs: Vec<WorkerSpec> = crate::specs(&prefill, &decode);
    for (spec, group) in specs.iter_mut().zip(groups[0].iter().chain(groups[1])) {
        spec.group = group.to_string();
    }
    Pairs { gateway: rig::start(rig::config(specs)), prefill, decode }
}

/// Workers of different groups are never one pair, and a group that is not complete takes nothing.
#[test]
fn pairs_stay_within_their_group() {
    let pairs = grouped([&["a", "b", "b"], &["b", "c"]]);
    for _ in 0..9 {
        pairs.http().post("/v1/completions", &ask()).expect(200);
    }
    let requests = |engine: &Engine| engine.stats().requests;
    let prefill: Vec<u64> = pairs.prefill.engines().iter().map(requests).collect();
    let decode: Vec<u64> = pairs.decode.engines().iter().map(requests).collect();
    assert!(prefill[0] == 0 && prefill[1] > 0 && prefill[2] > 0, "{prefill:?}");
    assert_eq!(decode, [9, 0]);
    pairs.settles();
}

#[test]
fn without_a_complete_pair_there_is_nobody() {
    let pairs = grouped([&["a"], &["b"]]);
    pairs.http().post("/v1/completions", &ask()).expect_error(503, "no_usable_worker");
    pairs.http().ask("GET", "/readiness", &[], b"").expect(503);
    pairs.settles();
    assert!(pairs.engines().all(|engine| engine.stats().requests == 0));
}

/// A client that leaves during the prefill: both legs are closed, or the prefill may finish (field reports 12, 23).
#[test]
fn a_client_that_leaves_closes_both_legs_unless_the_prefill_may_finish() {
    for (leaves, aborted) in [(ClientLeaves::Close, 1), (ClientLeaves::FinishPrefill, 0)] {
        let settings = Settings { transfer_ms: 400.0, ..Settings::default() };
        let pairs = Pairs::with(settings, 1, 1, |config: &mut Config| config.sglang_client_leaves = leaves);
        let mut http = pairs.http();
        http.send(&post("/v1/completions", &json!({"model": "mock", "prompt": "Hello", "max_tokens": 500})));
        until("both have it", || pairs.engines().all(|engine| engine.stats().active == 1));
        drop(http);
        pairs.settles();
        assert_eq!(pairs.prefill.engine(0).stats().aborted, aborted, "{leaves:?}");
        // Who may finish may also have an answer before it is seen that nobody takes it.
        if leaves == ClientLeaves::Close {
            until("it is counted", || tally_of(&pairs.gateway, Tally::ClientsLeft) == 1);
        }
    }
}

/// Both legs are one attempt, and where one goes after the other a pair whose second leg never went out is one too.
#[test]
fn attempts_have_an_end() {
    for backend in [Backend::Sglang, Backend::VllmNixl] {
        for side in 0..2 {
            let pairs = crate::of_backend(backend, |config| {
                config.max_attempts = 3;
                (config.retry.backoff, config.retry.backoff_max) = (Duration::from_millis(2), Duration::from_millis(2));
            });
            let engine = [pairs.prefill.engine(0), pairs.decode.engine(0)][side];
            engine.misbehave(Some(Controls { status: Some(503), ..Controls::default() }));
            pairs.http().post("/v1/completions", &ask()).expect(503);
            assert_eq!((engine.stats().requests, tally_of(&pairs.gateway, Tally::Retries)), (3, 2), "{backend:?}");
            pairs.settles();
        }
    }
}

/// A decode worker is no other prefill worker.
#[test]
fn the_only_worker_of_its_role_may_ask_for_a_pause() {
    for side in 0..2 {
        let pairs = Pairs::with(Settings::default(), 1, 1, |config| config.max_attempts = 2);
        let engine = [pairs.prefill.engine(0), pairs.decode.engine(0)][side];
        let headers = vec![("Retry-After".into(), "1".into())];
        engine.misbehave(Some(Controls { status: Some(503), headers, ..Controls::default() }));
        let start = Instant::now();
        pairs.http().post("/v1/completions", &ask()).expect(503);
        assert!(start.elapsed() >= Duration::from_secs(1));
        assert_eq!(engine.stats().requests, 2);
        pairs.settles();
    }
}

/// Where the untried prefill workers have no decode worker, the tried one is asked again.
#[test]
fn a_further_attempt_finds_the_only_complete_pair() {
    let pairs = grouped([&["a", "a", "a", "b"], &["b"]]);
    let engine = pairs.prefill.engine(3);
    engine.misbehave(Some(Controls { status: Some(429), ..Controls::default() }));
    for nth in 1..4 {
        let answer = pairs.http().post("/v1/completions", &ask()).expect(429);
        assert!(answer.header("x-corelane-error").is_none(), "the worker's own answer: {}", answer.head);
        assert_eq!(engine.stats().requests, 5 * nth);
        pairs.settles();
    }
}

/// A prefill that may finish for a client that has left is not begun anew when it fails.
#[test]
fn nothing_is_tried_again_for_a_client_that_has_left() {
    let pairs = Pairs::with(Settings::default(), 2, 1, |config| {
        config.sglang_client_leaves = ClientLeaves::FinishPrefill;
        config.prefill_first_byte_timeout = Duration::from_millis(400);
        config.retry.unanswered = true;
        config.retry.backoff = Duration::ZERO;
    });
    for engine in pairs.engines() {
        engine.misbehave(Some(Controls { hang: true, ..Controls::default() }));
    }
    let mut http = pairs.http();
    http.send(&post("/v1/completions", &ask()));
    until("both have it", || pairs.decode.engine(0).stats().active == 1);
    drop(http);
    pairs.settles();
    assert_eq!(pairs.prefill.engines().iter().map(|engine| engine.stats().requests).sum::<u64>(), 1);
}

/// Tokens may come before the prefill worker says that it failed: its failure is noted all the same.
#[test]
fn a_prefill_that_fails_too_late_for_the_client_is_blamed() {
    for stream in [false, true] {
        let pairs = Pairs::new(1, 1);
        let [prefill, decode] = [pairs.prefill.engine(0), pairs.decode.engine(0)];
        prefill.misbehave(Some(Controls { status: Some(500), delay_ms: 300.0, ..Controls::default() }));
        let body = "data: [DONE]\n\n";
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
        decode.misbehave(Some(Controls { raw: Some(head + body), ..Controls::default() }));
        let ask = json!({"model": "mock", "prompt": "Hello", "stream": stream});
        pairs.http().post("/v1/completions", &ask).expect(200);
        pairs.settles();
        until("it is blamed", || blame(&pairs.gateway, prefill) > 0);
        assert_eq!(blame(&pairs.gateway, decode), 0);
    }
}
