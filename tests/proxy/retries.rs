//! Further attempts: when there is one, at whom, and when there is none (field report 25).

use std::time::{Duration, Instant};

use corelane::config::{Config, Policy};
use corelane::metrics::Tally;
use corelane::mock::{Controls, Settings};
use serde_json::{Value, json};

use crate::rig::{End, Rig};

fn ask() -> Value {
    json!({"model": "mock", "prompt": "Hello", "max_tokens": 2})
}

/// The default of every option, but pauses too short to be waited for.
fn quick(config: &mut Config) {
    config.policy = Policy::RoundRobin;
    (config.retry.backoff, config.retry.backoff_max) = (Duration::from_millis(2), Duration::from_millis(20));
}

fn misbehave(rig: &Rig, worker: usize, change: impl FnOnce(&mut Controls)) {
    let mut controls = Controls::default();
    change(&mut controls);
    rig.fleet.engine(worker).misbehave(Some(controls));
}

#[test]
fn a_status_that_says_so_is_tried_at_another_worker() {
    for status in [408, 429, 500, 502, 503, 504] {
        let rig = Rig::with(Settings::default(), 2, quick);
        misbehave(&rig, 0, |c| c.status = Some(status));
        for _ in 0..4 {
            rig.post("/v1/completions", &ask()).expect(200);
        }
        assert!(rig.tally(Tally::Retries) > 0, "{status}");
        rig.settles();
    }
}

/// A request that is wrong is wrong everywhere.
#[test]
fn other_statuses_pass_as_they_came() {
    for status in [400, 401, 404, 413, 422, 501] {
        let rig = Rig::with(Settings::default(), 2, quick);
        (0..2).for_each(|worker| misbehave(&rig, worker, |c| c.status = Some(status)));
        let answer = rig.post("/v1/completions", &ask()).expect(status);
        assert!(answer.header("x-corelane-error").is_none());
        assert_eq!((rig.received(), rig.tally(Tally::Retries)), (1, 0), "{status}");
    }
}

#[test]
fn a_worker_may_say_that_asking_again_is_of_no_use() {
    let rig = Rig::with(Settings::default(), 2, quick);
    (0..2).for_each(|worker| {
        misbehave(&rig, worker, |c| {
            c.status = Some(500);
            c.headers = vec![("X-Should-Retry".into(), "false".into())];
        });
    });
    rig.post("/v1/completions", &ask()).expect(500);
    assert_eq!(rig.received(), 1);
}

/// The last answer is the client's, and nobody is asked more often than the configuration says.
#[test]
fn attempts_have_an_end() {
    let rig = Rig::with(Settings::default(), 2, |config| {
        quick(config);
        config.max_attempts = 3;
    });
    (0..2).for_each(|worker| misbehave(&rig, worker, |c| c.status = Some(503)));
    let answer = rig.post("/v1/completions", &ask()).expect(503);
    assert!(answer.header("x-corelane-error").is_none(), "the worker's own answer: {}", answer.head);
    assert_eq!((rig.received(), rig.tally(Tally::Retries)), (3, 2));
    rig.settles();
}

/// Who just failed is not asked while another is usable.
#[test]
fn the_worker_that_failed_is_not_asked_again() {
    let rig = Rig::with(Settings::default(), 3, |config| {
        quick(config);
        config.max_attempts = 3;
    });
    (0..3).for_each(|worker| misbehave(&rig, worker, |c| c.status = Some(500)));
    rig.post("/v1/completions", &ask()).expect(500);
    assert!((0..3).all(|worker| rig.stats(worker).requests == 1));
}

/// What a worker may have begun to work on is not worked on twice, unless somebody wants that.
#[test]
fn a_worker_that_broke_off_is_followed_by_another_only_where_that_is_wanted() {
    for wanted in [false, true] {
        let rig = Rig::with(Settings::default(), 2, |config| {
            quick(config);
            config.retry.unanswered = wanted;
        });
        (0..2).for_each(|worker| misbehave(&rig, worker, |c| c.reset_before_head = true));
        rig.fleet.engine(1).misbehave(None);
        let statuses: Vec<u16> = (0..4).map(|_| rig.post("/v1/completions", &ask()).status).collect();
        assert_eq!(statuses.iter().all(|status| *status == 200), wanted, "{statuses:?}");
        rig.settles();
    }
}

/// Nothing is tried again once the client has seen something.
#[test]
fn an_answer_that_has_begun_is_not_tried_again() {
    let rig = Rig::with(Settings::default(), 2, |config| {
        quick(config);
        config.retry.unanswered = true;
    });
    (0..2).for_each(|worker| misbehave(&rig, worker, |c| c.reset_after_events = Some(1)));
    let ask = json!({"model": "mock", "prompt": "Hello", "max_tokens": 20, "stream": true});
    let answer = rig.post("/v1/completions", &ask);
    assert_eq!((answer.status, rig.received(), rig.tally(Tally::Retries)), (200, 1, 0));
    assert_ne!(answer.end, End::Whole);
    rig.settles();
}

#[test]
fn the_only_worker_left_may_ask_for_a_pause() {
    for (asked, waits) in [("1", true), ("60", false), ("Wed, 21 Oct 2026 07:28:00 GMT", false)] {
        let rig = Rig::with(Settings::default(), 1, |config| {
            quick(config);
            config.max_attempts = 2;
        });
        misbehave(&rig, 0, |c| {
            c.status = Some(429);
            c.headers = vec![("Retry-After".into(), asked.into())];
        });
        let start = Instant::now();
        rig.post("/v1/completions", &ask()).expect(429);
        assert_eq!(start.elapsed() >= Duration::from_secs(1), waits, "{asked}");
        assert_eq!(rig.received(), if asked == "60" { 1 } else { 2 });
    }
}

/// An outage is not multiplied.
#[test]
fn a_budget_bounds_what_is_added() {
    let rig = Rig::with(Settings::default(), 2, |config| {
        quick(config);
        config.retry.backoff = Duration::ZERO;
    });
    (0..2).for_each(|worker| misbehave(&rig, worker, |c| c.status = Some(503)));
    let mut http = rig.http();
    const REQUESTS: u64 = 400;
    for _ in 0..REQUESTS {
        http.post("/v1/completions", &ask()).expect(503);
    }
    let most = REQUESTS + REQUESTS / 5 + corelane::limits::FREE_RETRIES as u64;
    assert!((REQUESTS + 50..=most).contains(&rig.received()), "{} of at most {most}", rig.received());
}

/// One in five workers is sick: with further attempts nearly nobody notices, and the workers hardly do.
#[test]
fn one_sick_worker_in_five_is_not_noticed() {
    type Sickness = (&'static str, fn(&mut Controls));
    let sick: [Sickness; 3] =
        [("500", |c| c.status = Some(500)), ("hangs", |c| c.hang = true), ("resets", |c| c.reset_before_head = true)];
    for (name, change) in sick {
        let rig = Rig::with(Settings::default(), 5, |config| {
            config.cores = vec![0, 1];
            config.first_byte_timeout = Duration::from_millis(500);
            config.retry.unanswered = true;
        });
        misbehave(&rig, 2, change);
        const CLIENTS: u64 = 8;
        const EACH: u64 = 125;
        let good: u64 = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS)
                .map(|client| {
                    let rig = &rig;
                    scope.spawn(move || {
                        let mut http = rig.http();
                        let ask =
                            |n: &u64| json!({"model": "mock", "prompt": format!("{client} {n}"), "max_tokens": 1});
                        (0..EACH).filter(|n| http.post("/v1/completions", &ask(n)).status == 200).count() as u64
                    })
                })
                .collect();
            clients.into_iter().map(|client| client.join().unwrap()).sum()
        });
        let asked = CLIENTS * EACH;
        assert!(good * 1000 >= asked * 999, "{name}: {good} of {asked}");
        assert!(rig.received() * 10 <= asked * 12, "{name}: {} requests for {asked}", rig.received());
        rig.settles();
    }
}
