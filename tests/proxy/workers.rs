//! Workers that fail in every way, and what the client sees of it.

use std::sync::Mutex;
use std::time::Duration;

use corelane::config::{Policy, WorkerSpec};
use corelane::metrics::Tally;
use corelane::mock::Settings;
use serde_json::{Value, json};

use crate::rig::{End, Http, Rig, config, fleet, in_flight, post, specs, start, tally_of, until};

fn ask(mock: Value, stream: bool) -> Value {
    json!({"prompt":"x","stream":stream,"max_tokens":8,"mock":mock})
}

/// Field report 25: a request that a worker had accepted is not sent again, on a fresh connection.
#[test]
fn no_answer_is_a_502() {
    let rig = Rig::with(Settings::default(), 2, |_| {});
    for fault in ["reset_before_head", "close_before_head"] {
        let before = rig.received();
        let mut http = rig.http();
        let body = ask(json!({fault:true,"delay_ms":150}), true);
        http.post("/v1/completions", &body).expect_error(502, "worker_reset");
        assert_eq!(rig.received(), before + 1, "{fault}");
        http.post("/v1/completions", &ask(json!({}), false)).expect(200);
    }
    rig.settles();
}

/// Field report 15: an answer that breaks off does not look complete.
#[test]
fn a_broken_answer_is_cut() {
    let rig = Rig::new(1);
    for fault in ["reset_after_events", "close_after_events"] {
        for gap in [false, true] {
            // Chunked: no last chunk.
            let mut mock = json!({fault:3});
            if gap {
                mock["gap_ms"] = 20.into();
            }
            let answer = rig.post("/v1/completions", &ask(mock.clone(), true));
            assert_eq!(answer.status, 200);
            assert_ne!(answer.end, End::Whole, "{fault}");
            assert_eq!(answer.text().matches("data: ").count(), 3, "what came before the break arrives: {fault}");
            // With a length: short.
            let answer = rig.post("/v1/completions", &ask(mock.clone(), false));
            let length: usize = answer.header("content-length").unwrap().parse().unwrap();
            assert_ne!(answer.end, End::Whole);
            assert_eq!(answer.body.len(), length / 2, "{fault}");
        }
        // Until the end of the connection: the only honest break is a reset.
        let answer = rig.post("/v1/completions", &ask(json!({"reset_after_events":3,"no_length":true}), true));
        assert_eq!((answer.status, answer.end), (200, End::Reset));
    }
    rig.settles();
    assert_eq!(rig.tally(Tally::Cuts), 10);
    rig.post("/v1/completions", &ask(json!({}), false)).expect(200);
}

/// What a worker said before it broke off reaches a client that has not read it yet.
#[test]
fn what_came_before_the_break_arrives() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    let mock = json!({"event_bytes":20_000,"close_after_events":60});
    http.send(&post("/v1/completions", &json!({"prompt":"x","stream":true,"max_tokens":100,"mock":mock})));
    rig.settles_after(1);
    std::thread::sleep(Duration::from_millis(100));
    let answer = http.answer();
    assert_ne!(answer.end, End::Whole);
    assert_eq!(answer.text().matches("data: ").count(), 60);
}

impl Rig {
    /// Waits until the engine has received and ended so many requests.
    fn settles_after(&self, requests: u64) {
        until("it has come", || self.received() == requests);
        self.settles();
    }
}

#[test]
fn garbage_is_a_502() {
    let rig = Rig::new(1);
    let long = format!("HTTP/1.1 200 OK\r\nX-A: {}", "a".repeat(200_000));
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "X-A: 1\r\n".repeat(1000));
    let raws = [
        "garbage\r\n\r\n",
        "\0\u{1}\u{2}\u{ff}",
        "HTTP/1.1 200 OK\r\n",
        "HTTP/1.1 20 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nab",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nab",
        "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nab",
        "HTTP/1.1 200 OK\r\nX-A : 1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX-A: 1\r\n folded\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nframes",
        "HTTP/2.0 200 OK\r\n\r\n",
        &long,
        &many,
    ];
    let mut http = rig.http();
    for raw in raws {
        let shown = &raw[..raw.floor_char_boundary(80)];
        http.send(&post("/v1/completions", &ask(json!({"raw":raw}), false)));
        let answer = http.answer();
        assert_eq!(answer.status, 502, "{shown:?} gave {} {}", answer.head, answer.text());
        let code = answer.header("x-corelane-error").unwrap().to_owned();
        answer.expect_error(502, &code);
    }
    http.post("/v1/completions", &ask(json!({"interim":17}), false)).expect_error(502, "worker_bad_answer");
    http.post("/v1/completions", &ask(json!({}), false)).expect(200);
    // Framing that goes wrong in the middle.
    for raw in [
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nxyz\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloX5\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\nhello",
    ] {
        let mut http = rig.http();
        http.send(&post("/v1/completions", &ask(json!({"raw":raw}), true)));
        if let Ok(answer) = http.try_answer_to("POST") {
            assert!(answer.status == 502 || answer.end != End::Whole, "{raw:?} gave {answer:?}");
        }
    }
    rig.settles();
}

/// Nothing was sent yet, so there still is an answer to give.
#[test]
fn framing_that_is_wrong_from_the_first_bytes_is_answered() {
    let rig = Rig::new(1);
    for version in ["1.1", "1.0"] {
        for body in ["xyz\r\n", "5\r\nhello\r\nxyz\r\n"] {
            let raw = format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{body}");
            let bytes = post("/v1/completions", &ask(json!({"raw":raw}), true));
            let bytes = String::from_utf8(bytes).unwrap().replacen("HTTP/1.1", &format!("HTTP/{version}"), 1);
            let mut http = rig.http();
            http.send(bytes.as_bytes());
            http.answer().expect_error(502, "worker_bad_answer");
        }
    }
    rig.settles();
    assert_eq!(rig.metric(r#"corelane_requests_total{route="/v1/completions",status="502"}"#), Some(4.0));
}

/// Field report 26: a connection on which a worker said too much is not used again.
#[test]
fn excess_bytes_reach_nobody() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    for i in 0..20 {
        let body = ask(json!({"excess":i % 2 == 0}), i % 3 == 0);
        let answer = http.post("/v1/completions", &body).expect(200);
        assert!(!answer.text().contains("EXCESS"));
    }
    assert!(http.buf.is_empty());
    rig.settles();
}

/// Field report 26: an answer before the whole request was sent passes, and its connection is not used again.
#[test]
fn an_early_answer_passes() {
    let rig = Rig::new(1);
    for early in [json!(true), json!("close")] {
        for status in [413, 200] {
            let mut mock = json!({"early":early});
            if status != 200 {
                mock["status"] = status.into();
            }
            let body = json!({"mock":mock,"text":"e".repeat(8 << 20)});
            let mut http = rig.http();
            let answer = http.post("/generate", &body);
            // A worker that closes over unread bytes resets; then either its answer or an error comes.
            assert!(answer.status == status || early != true && answer.status == 502, "{}", answer.head);
            http.post("/generate", &json!({"text":"x"})).expect(200);
        }
    }
    rig.settles();
}

#[test]
fn a_worker_comes_back() {
    let rig = Rig::with(Settings::default(), 1, |c| c.health_check = false);
    let mut http = rig.http();
    http.post("/generate", &json!({"text":"x"})).expect(200);
    let mut streaming = rig.http();
    streaming.send(&post("/v1/completions", &ask(json!({"gap_ms":50,"text":"y"}), true)));
    assert_eq!(streaming.head().unwrap().status, 200);
    rig.fleet.engine(0).kill();
    while streaming.chunk(&mut String::new()).is_ok_and(|c| !c.is_empty()) {}
    let answer = http.post("/generate", &json!({"text":"x"}));
    assert!(matches!(answer.status, 502 | 503), "{}", answer.head);
    rig.fleet.engine(0).restart().unwrap();
    http.post("/generate", &json!({"text":"x"})).expect(200);
    until("no request is in flight", || rig.in_flight() == 0);
}

/// Field report 24: engines close idle connections, and no client ever hears of it.
#[test]
fn stale_connections_are_never_an_error() {
    let counts = Mutex::new([0; 3]);
    std::thread::scope(|scope| {
        for n in 0..10 {
            let counts = &counts;
            scope.spawn(move || {
                let settings = Settings { keep_alive_ms: 150, ..Settings::default() };
                let rig = Rig::with(settings, 1, |c| c.cores = vec![n as usize % 2]);
                let mut rng = fastrand::Rng::with_seed(n);
                let mut http = rig.http();
                for _ in 0..20 {
                    http.post("/generate", &json!({"text":"x"})).expect(200);
                    // Mostly in the milliseconds around the moment when the engine closes.
                    let pause = if rng.bool() { rng.u64(100_000..300_000) } else { rng.u64(148_000..153_000) };
                    std::thread::sleep(Duration::from_micros(pause));
                }
                assert_eq!(rig.received(), 20);
                let mut counts = counts.lock().unwrap();
                for (sum, tally) in counts.iter_mut().zip([Tally::Connects, Tally::Reuses, Tally::Replays]) {
                    *sum += rig.tally(tally);
                }
            });
        }
    });
    let [connects, reuses, replays] = counts.into_inner().unwrap();
    println!("{connects} connects, {reuses} reuses, {replays} replays");
    assert!(connects > 20 && connects + reuses == 200 + replays);
}

/// A worker that refuses connections costs an attempt, not the request.
#[test]
fn a_refused_connection_goes_elsewhere() {
    let fleet = fleet(Settings::default(), 2);
    let mut workers = specs(&fleet);
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    workers.insert(0, WorkerSpec::new(format!("http://{closed}")));
    workers.iter_mut().for_each(|w| w.models = vec!["mock".into()]);
    for &policy in Policy::ALL {
        let mut config = config(workers.clone());
        (config.health_check, config.policy) = (false, policy);
        let gateway = start(config);
        for _ in 0..20 {
            Http::connect(gateway.address()).post("/generate", &json!({"text":"x"})).expect(200);
        }
        let retries = tally_of(&gateway, Tally::Retries);
        println!("{}: {retries} retries", policy.name());
        assert!(retries > 0 || policy == Policy::PowerOfTwo, "{}", policy.name());
        until("no request is in flight", || in_flight(&gateway) == 0);
    }
}

#[test]
fn when_all_refuse_the_client_is_told() {
    let fleet = fleet(Settings::default(), 2);
    let mut workers = specs(&fleet);
    workers.iter_mut().for_each(|w| w.models = vec!["mock".into()]);
    fleet.engines().iter().for_each(|e| e.kill());
    for attempts in [1, 5] {
        let mut config = config(workers.clone());
        (config.health_check, config.max_attempts) = (false, attempts);
        let gateway = start(config);
        let mut http = Http::connect(gateway.address());
        for _ in 0..3 {
            http.post("/generate", &json!({"text":"x"})).expect_error(502, "worker_unreachable");
        }
        until("no request is in flight", || in_flight(&gateway) == 0);
    }
}

/// Field report 14, the worker's side: slow is not broken.
#[test]
fn a_slow_worker_is_waited_for() {
    let rig = Rig::new(1);
    let answer = rig.post("/v1/completions", &ask(json!({"delay_ms":700,"gap_ms":100}), true)).expect(200);
    assert!(answer.text().ends_with("[DONE]\n\n"));
    // A frozen engine too, in the middle of a stream.
    let mut http = rig.http();
    http.send(&post("/v1/completions", &ask(json!({"gap_ms":30}), true)));
    http.head().unwrap();
    rig.fleet.engine(0).freeze();
    std::thread::sleep(Duration::from_millis(300));
    rig.fleet.engine(0).thaw();
    let mut trailers = String::new();
    let mut events = 0;
    while !http.chunk(&mut trailers).unwrap().is_empty() {
        events += 1;
    }
    assert_eq!(events, 10);
}

/// What is odd but right passes: extensions, trailers, any spelling, old versions, long heads.
#[test]
fn odd_answers_pass() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    let mut raw = |raw: &str| http.post("/generate", &ask(json!({"raw":raw}), false)).expect(200);
    let answer = raw("HTTP/1.1 200 \r\ntransfer-encoding: Chunked\r\n\r\n5;x=\"y\"\r\nhello\r\n000\r\nX-T: 1\r\n\r\n");
    assert_eq!((answer.text().as_str(), answer.trailers.as_str()), ("hello", "X-T: 1\n"));
    let answer = raw("HTTP/1.0 200 Fine, thanks\r\nContent-Length: 2\r\n\r\nab");
    assert!(answer.head.starts_with("HTTP/1.1 200 Fine, thanks\n") && answer.text() == "ab");
    assert_eq!(raw("HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nz").text(), "z");
    let long = "h".repeat(40_000);
    let answer = raw(&format!("HTTP/1.1 200 OK\r\nX-Long: {long}\r\nContent-Length: 0\r\n\r\n"));
    assert_eq!(answer.header("x-long"), Some(long.as_str()));
    // So does a long head of a request.
    let echo = http.ask("POST", "/generate", &[("X-Long", &long)], br#"{"mock":{"echo":true}}"#).expect(200);
    assert!(echo.text().contains(&long));
}

/// A name with several addresses: one that refuses is passed over.
#[test]
fn a_worker_may_have_a_name_and_a_prefix() {
    let fleet = fleet(Settings::default(), 1);
    let port = fleet.engine(0).addr().port();
    let mut spec = WorkerSpec::new(format!("http://localhost:{port}/base"));
    spec.models = vec!["mock".into()];
    let mut config = config(vec![spec]);
    config.health_check = false;
    let gateway = corelane::boot::Gateway::start(config).unwrap();
    let mut http = Http::connect(gateway.address());
    until("the name is known and the engine asked", || http.post("/generate?a=b", &json!({"text":"x"})).status == 404);
    let stats = fleet.engine(0).stats();
    assert!(stats.paths.contains_key("/base/generate"), "{:?}", stats.paths);
}

/// A worker that takes no more of a long body holds neither the client's departure nor its memory back.
#[test]
fn a_client_leaves_while_its_body_is_sent_on() {
    let deaf = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut spec = WorkerSpec::new(format!("http://{}", deaf.local_addr().unwrap()));
    spec.models = vec!["m".into()];
    let mut config = config(vec![spec]);
    config.health_check = false;
    let gateway = start(config);
    let mut http = Http::connect(gateway.address());
    http.send(&post("/generate", &json!({"text":"t".repeat(24 << 20)})));
    until("it is being sent on", || in_flight(&gateway) == 1);
    let (peer, _) = deaf.accept().unwrap();
    drop(http);
    let took = until("the guard is released", || in_flight(&gateway) == 0);
    println!("released after {took:?}");
    until("its memory is given back", || gateway.shared().memory.claimed() == 0);
    // The worker sees the connection end in the middle of the body.
    let mut peer = Http { stream: peer, buf: Vec::new(), most: 1 << 20 };
    let mut got = 0;
    while peer.fill().is_ok() {
        got += std::mem::take(&mut peer.buf).len();
    }
    assert!(got < 24 << 20, "{got}");
}
