//! Workers that fail, and what their circuit breakers make of it.

use std::time::Duration;

use corelane::config::{Breaker, Config, Policy, Secret};
use corelane::mock::{Controls, Settings};
use corelane::shared::vitals::{Health, State};
use serde_json::{Value, json};

use crate::rig::{Answer, Http, Rig, post, request, until};

/// Opens after two failures in a row, and then for a second.
const RULES: Breaker = Breaker { failures: 2, successes: 2, open_s: 1, ..Breaker::DEFAULT };
const SECRET: &str = "s";

fn rig(workers: usize, policy: Policy, change: impl FnOnce(&mut Config)) -> Rig {
    Rig::with(Settings::default(), workers, |c| {
        (c.policy, c.breaker, c.target_worker_secret) = (policy, RULES, Some(Secret::new(SECRET)));
        // Every failure is to be seen, and none to be made good.
        c.max_attempts = 1;
        change(c);
    })
}

fn ask(prompt: impl Into<Value>) -> Value {
    json!({"prompt": prompt.into(), "max_tokens": 4})
}

impl Rig {
    fn state(&self, worker: usize) -> State {
        self.gateway.shared().vitals.vital(worker as u16).state()
    }

    fn trials(&self, worker: usize) -> u32 {
        self.gateway.shared().vitals.vital(worker as u16).trials()
    }

    fn failures(&self, worker: usize) -> u32 {
        self.gateway.shared().vitals.vital(worker as u16).failures()
    }

    fn answers(&self, worker: usize, status: u16) {
        self.fleet.engine(worker).misbehave(Some(Controls { status: Some(status), ..Controls::default() }));
    }

    /// A request to one worker, whatever the policy is.
    fn send_to(&self, worker: usize, body: &Value) -> Http {
        let mut http = self.http();
        let fields = [("x-smg-target-worker", &*worker.to_string()), ("x-corelane-target-secret", SECRET)];
        http.send(&request("POST", "/v1/completions", &fields, body.to_string().as_bytes()));
        http
    }

    fn to(&self, worker: usize, body: &Value) -> Answer {
        self.send_to(worker, body).answer()
    }

    /// Makes a worker's breaker open, and waits until it is half-open.
    fn half_open(&self, worker: usize) {
        self.answers(worker, 500);
        for _ in 0..RULES.failures {
            self.to(worker, &ask("x")).expect(500);
        }
        self.fleet.engine(worker).misbehave(None);
        assert_eq!(self.state(worker), State::Open);
        until("it is half-open", || self.state(worker) == State::HalfOpen);
    }

    /// The samples of a worker in the metrics: where its breaker stands, and how often it came to open, half-open and
    /// closed.
    fn told(&self, worker: usize) -> [Option<f64>; 4] {
        let url = self.fleet.engine(worker).url();
        let moved = |to: &str| {
            self.metric(&format!(r#"corelane_breaker_transitions_total{{worker="{url}",role="regular",to="{to}"}}"#))
        };
        let state = format!(r#"corelane_worker_breaker_state{{worker="{url}",role="regular"}}"#);
        [self.metric(&state), moved("open"), moved("half_open"), moved("closed")]
    }
}

/// A worker that fails at once looks idle: it must not be fed for that, and has to be found well again. Field report
/// 30: a half-open breaker let everything through.
#[test]
fn a_worker_that_fails_fast_gets_few_requests_and_comes_back() {
    for policy in [Policy::LeastLoad, Policy::CacheAware] {
        let rig = rig(4, policy, |_| {});
        rig.answers(2, 500);
        let mut failed = 0;
        let mut http = rig.http();
        let mut sent = 0u64;
        until("it is open", || {
            sent += 1;
            let answer = http.post("/v1/completions", &ask(format!("{sent} {}", "words ".repeat(40))));
            assert!(matches!(answer.status, 200 | 500), "{}", answer.head);
            failed += u32::from(answer.status == 500);
            rig.state(2) == State::Open
        });
        assert!(failed <= 3 && sent > 100, "{policy:?}: {failed} of {sent}");
        let told = rig.told(2);
        assert_eq!((told[1], told[3]), (Some(1.0), None), "{told:?}");

        // Slow, so that its trials overlap.
        let slow = Controls { delay_ms: 150.0, ..Controls::default() };
        rig.fleet.engine(2).misbehave(Some(slow));
        until("it is half-open", || rig.state(2) == State::HalfOpen);
        let before = rig.stats(2).requests;
        let clients = |n: usize| {
            (0..n)
                .map(|at| {
                    let mut http = rig.http();
                    http.send(&post("/v1/completions", &ask(format!("{at} {}", "other ".repeat(40)))));
                    http
                })
                .collect::<Vec<_>>()
        };
        // All but the trials go to the three others.
        let mut all = clients(40);
        until("all have been given to an engine", || rig.received() >= sent + 40);
        let trials = rig.stats(2).requests - before;
        assert!((1..=3).contains(&trials), "{policy:?}: {trials} at once");
        all.iter_mut().for_each(|http| drop(http.answer().expect(200)));
        until("it is closed", || {
            http.post("/v1/completions", &ask("more")).expect(200);
            rig.state(2) == State::Closed
        });
        assert_eq!(rig.told(2), [Some(0.0), Some(1.0), Some(1.0), Some(1.0)]);
        rig.settles();
        assert_eq!(rig.trials(2), 0);
    }
}

/// When everybody fails it is no worker's fault alone: half of them go on being asked.
#[test]
fn never_more_than_half_is_out() {
    let rig = rig(5, Policy::RoundRobin, |c| c.cores = vec![0, 1]);
    (0..5).for_each(|worker| rig.answers(worker, 500));
    let out = || (0..5).filter(|&at| matches!(rig.state(at), State::Open | State::HalfOpen)).count();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut http = rig.http();
                for _ in 0..100 {
                    http.post("/v1/completions", &ask("x")).expect(500);
                    assert!(out() <= 2);
                }
            });
        }
    });
    assert_eq!(out(), 2);
    let list =
        Http::connect(rig.gateway.admin()).send(b"GET /workers HTTP/1.1\r\nHost: localhost\r\n\r\n").answer().json();
    let count = |state: &str| list["workers"].as_array().unwrap().iter().filter(|w| w["breaker"] == state).count();
    assert_eq!(count("held"), 3, "{list}");
    // One alone is never out.
    let rig = self::rig(1, Policy::LeastLoad, |_| {});
    rig.answers(0, 500);
    for _ in 0..30 {
        rig.post("/v1/completions", &ask("x")).expect(500);
    }
    rig.fleet.engine(0).misbehave(None);
    rig.post("/v1/completions", &ask("x")).expect(200);
}

/// A trial ends with its request, however that ends.
#[test]
fn trials_are_bounded_and_a_client_that_leaves_gives_its_place_back() {
    let rig = rig(2, Policy::LeastLoad, |_| {});
    rig.half_open(0);
    rig.fleet.engine(0).misbehave(Some(Controls { hang: true, ..Controls::default() }));
    for round in 0..2 {
        let mut hung: Vec<Http> = (0..3).map(|_| rig.send_to(0, &ask("x"))).collect();
        until("all places are taken", || rig.trials(0) == 3);
        rig.to(0, &ask("x")).expect_error(503, "no_usable_worker");
        // The others are served meanwhile.
        rig.post("/v1/completions", &ask("y")).expect(200);
        if round == 0 {
            hung.drain(..).for_each(Http::reset);
        }
        drop(hung);
        until("all places are free", || rig.trials(0) == 0);
        assert_eq!((rig.state(0), rig.failures(0)), (State::HalfOpen, 2), "that says nothing of the worker");
    }
    rig.settles();
    // Neither does that it has enough to do.
    rig.answers(0, 503);
    (0..5).for_each(|_| drop(rig.to(0, &ask("x")).expect(503)));
    assert_eq!(rig.state(0), State::HalfOpen);
    // One failure opens it again; enough successes close it.
    rig.half_open_again(0);
    rig.to(0, &ask("x")).expect(200);
    assert_eq!(rig.state(0), State::HalfOpen);
    rig.answers(0, 404);
    rig.to(0, &ask("x")).expect(404);
    assert_eq!((rig.state(0), rig.trials(0)), (State::Closed, 0), "what it answers to a wrong request is an answer");
    assert_eq!(rig.told(0), [Some(0.0), Some(2.0), Some(2.0), Some(1.0)]);
}

impl Rig {
    fn half_open_again(&self, worker: usize) {
        self.answers(worker, 500);
        self.to(worker, &ask("x")).expect(500);
        assert_eq!(self.state(worker), State::Open);
        self.to(worker, &ask("x")).expect_error(503, "no_usable_worker");
        self.fleet.engine(worker).misbehave(None);
        until("it is half-open", || self.state(worker) == State::HalfOpen);
    }
}

/// Field report 28: back-pressure and the clients' own mistakes counted as failures, and overload became an outage.
#[test]
fn back_pressure_and_wrong_requests_are_no_failures() {
    let rig = rig(2, Policy::LeastLoad, |_| {});
    for status in [429, 503, 400, 404, 422] {
        rig.answers(0, status);
        (0..12).for_each(|_| drop(rig.to(0, &ask("x")).expect(status)));
        assert_eq!((rig.state(0), rig.failures(0)), (State::Closed, 0), "{status}");
    }
    // A row of failures goes on over back-pressure.
    for (status, state) in [(500, State::Closed), (429, State::Closed), (502, State::Open)] {
        rig.answers(0, status);
        rig.to(0, &ask("x")).expect(status);
        assert_eq!(rig.state(0), state);
    }
    // Who leaves has not been failed.
    rig.fleet.engine(1).misbehave(Some(Controls { hang: true, ..Controls::default() }));
    for _ in 0..5 {
        let gone = rig.send_to(1, &ask("x"));
        until("it is there", || rig.in_flight() == 1);
        drop(gone);
        rig.settles();
    }
    assert_eq!((rig.state(1), rig.failures(1)), (State::Closed, 0));
}

#[test]
fn what_breaks_on_the_workers_side_is_a_failure() {
    let streams = |after| Controls { reset_after_events: Some(after), gap_ms: Some(1.0), ..Controls::default() };
    let resets = Controls { reset_before_head: true, ..Controls::default() };
    let garbage = Controls { raw: Some("garbage\r\n\r\n".into()), ..Controls::default() };
    for controls in [streams(2), resets, garbage] {
        let rig = rig(2, Policy::LeastLoad, |_| {});
        rig.fleet.engine(0).misbehave(Some(controls.clone()));
        for _ in 0..RULES.failures {
            rig.to(0, &json!({"prompt":"x","stream":true,"max_tokens":8}));
        }
        until("it is open", || rig.state(0) == State::Open);
    }
    // One that does not answer in time.
    let rig = self::rig(2, Policy::LeastLoad, |c| c.request_timeout = Duration::from_millis(100));
    rig.fleet.engine(0).misbehave(Some(Controls { hang: true, ..Controls::default() }));
    (0..RULES.failures).for_each(|_| drop(rig.to(0, &ask("x")).expect_error(504, "request_timeout")));
    assert_eq!(rig.state(0), State::Open);
    // One that is not there; the requests go elsewhere.
    let rig = self::rig(2, Policy::RoundRobin, |c| c.max_attempts = 2);
    rig.fleet.engine(0).kill();
    until("it is open", || {
        rig.post("/v1/completions", &ask("x")).expect(200);
        rig.state(0) == State::Open
    });
}

/// Failures that never come in a row open it too, if half of what ended in the window has failed.
#[test]
fn a_worker_that_fails_every_other_time_is_taken_out() {
    let rig = rig(2, Policy::LeastLoad, |c| c.breaker.failures = 10);
    let mix = |failing: &[u16]| {
        for &status in failing {
            rig.answers(0, status);
            rig.to(0, &ask("x")).expect(status);
        }
    };
    // Of 20 nine: enough outcomes, but not half of them.
    (0..9).for_each(|_| mix(&[500, 404]));
    mix(&[404, 404]);
    std::thread::sleep(Duration::from_millis(2100));
    assert_eq!(rig.state(0), State::Closed);
    (0..3).for_each(|_| mix(&[404, 500, 500]));
    until("it is open", || rig.state(0) == State::Open);
    // What opened it does not open it again at once.
    rig.fleet.engine(0).misbehave(None);
    until("it is closed", || {
        rig.state(0) != State::Open && rig.to(0, &ask("x")).status == 200 && rig.state(0) == State::Closed
    });
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(rig.state(0), State::Closed);
}

#[test]
fn a_breaker_can_be_switched_off() {
    let rig = rig(2, Policy::LeastLoad, |c| c.breaker.on = false);
    rig.answers(0, 500);
    (0..30).for_each(|_| drop(rig.to(0, &ask("x")).expect(500)));
    assert_eq!((rig.state(0), rig.failures(0)), (State::Closed, 30));
    // It still is nobody's choice.
    (0..30).for_each(|_| drop(rig.post("/v1/completions", &ask("x")).expect(200)));
}

/// Where nobody is usable the client is told when to come again, or the least bad worker is tried.
#[test]
fn panic_routing_tries_the_least_bad() {
    for panic in [false, true] {
        let rig = rig(3, Policy::LeastLoad, |c| c.routing.panic = panic);
        let vitals = &rig.gateway.shared().vitals;
        vitals.ended(1, false);
        let set = |all: [Health; 3]| {
            for (slot, health) in (0..).zip(all) {
                vitals.set_health(slot, health);
            }
        };
        set([Health::Draining, Health::Unhealthy, Health::Unhealthy]);
        let before = rig.stats(2).requests;
        let answer = rig.post("/v1/completions", &ask("x"));
        if panic {
            answer.expect(200);
            assert_eq!(rig.stats(2).requests, before + 1, "who has failed last time comes last");
            rig.settles();
        } else {
            assert!(answer.expect_error(503, "no_usable_worker").header("retry-after").is_some());
        }
        // Who drains takes nothing new, come what may.
        set([Health::Draining; 3]);
        rig.post("/v1/completions", &ask("x")).expect_error(503, "no_usable_worker");
    }
}
