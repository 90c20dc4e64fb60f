//! How much is let in: requests at a time, requests of a worker, connections, framing.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use corelane::config::{Config, Policy, WorkerSpec};
use corelane::metrics::{Tally, Time};
use corelane::mock::Settings;
use serde_json::json;

use crate::rig::{End, Http, Rig, config, post, start, tally_of, until};

/// A worker that counts what it has at a time, each request from its last byte to the last but one of the answer: so
/// no request can be in before another one is out.
#[derive(Default)]
struct Counter {
    inside: AtomicUsize,
    peak: AtomicUsize,
    served: AtomicUsize,
    /// Texts in the order of their arrival.
    texts: Mutex<Vec<String>>,
    /// The text "hold" is not answered before.
    released: AtomicBool,
}

impl Counter {
    fn start() -> (Arc<Counter>, SocketAddr) {
        let counter = Arc::new(Counter::default());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = counter.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let shared = shared.clone();
                std::thread::spawn(move || shared.serve(stream.unwrap()));
            }
        });
        (counter, address)
    }

    fn serve(&self, mut stream: TcpStream) -> Option<()> {
        stream.set_nodelay(true).ok()?;
        let mut got = Vec::new();
        loop {
            let head = loop {
                if let Some(at) = got.windows(4).position(|w| w == b"\r\n\r\n") {
                    break at + 4;
                }
                Counter::more(&mut stream, &mut got)?;
            };
            let text = String::from_utf8_lossy(&got[..head]).to_ascii_lowercase();
            let length =
                text.split("content-length: ").nth(1).map_or(0, |l| l.split('\r').next().unwrap().parse().unwrap());
            while got.len() < head + length {
                Counter::more(&mut stream, &mut got)?;
            }
            let counts = text.starts_with("post /generate");
            if counts {
                let body: serde_json::Value = serde_json::from_slice(&got[head..head + length]).unwrap();
                self.texts.lock().unwrap().push(body["text"].as_str().unwrap().to_owned());
                let inside = self.inside.fetch_add(1, Ordering::SeqCst) + 1;
                self.peak.fetch_max(inside, Ordering::SeqCst);
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n{\"data\":[]").ok()?;
            if counts {
                std::thread::sleep(Duration::from_millis(fastrand::u64(0..6)));
                while body_is_held(&got[head..head + length]) && !self.released.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                self.inside.fetch_sub(1, Ordering::SeqCst);
                self.served.fetch_add(1, Ordering::SeqCst);
            }
            stream.write_all(b"}").ok()?;
            got.drain(..head + length);
        }
    }

    fn more(stream: &mut TcpStream, got: &mut Vec<u8>) -> Option<()> {
        let mut piece = [0; 4096];
        let n = stream.read(&mut piece).ok().filter(|n| *n > 0)?;
        got.extend_from_slice(&piece[..n]);
        Some(())
    }
}

fn body_is_held(body: &[u8]) -> bool {
    body == json!({"text":"hold"}).to_string().as_bytes()
}

fn counting(change: impl FnOnce(&mut Config)) -> (Arc<Counter>, corelane::boot::Gateway) {
    let (counter, address) = Counter::start();
    let mut spec = WorkerSpec::new(format!("http://{address}"));
    spec.models = vec!["m".into()];
    let mut config = config(vec![spec]);
    config.health_check = false;
    change(&mut config);
    (counter, start(config))
}

/// Nobody is inside and nobody waits.
fn empty(gateway: &corelane::boot::Gateway) {
    let admission = &gateway.shared().admission;
    until("all permits are back", || (admission.in_use(), admission.waiting()) == (0, 0));
}

#[test]
fn no_more_than_the_limit_go_to_workers_and_all_are_served() {
    const CLIENTS: usize = 64;
    const REQUESTS: usize = 12;
    let (counter, gateway) = counting(|c| {
        (c.cores, c.max_concurrent_requests, c.queue_size) = (vec![0, 1], 4, 100);
    });
    let address = gateway.address();
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(move || {
                let mut http = Http::connect(address);
                for _ in 0..REQUESTS {
                    http.post("/generate", &json!({"text":"x"})).expect(200);
                }
            });
        }
    });
    empty(&gateway);
    let [peak, served] = [&counter.peak, &counter.served].map(|n| n.load(Ordering::SeqCst));
    assert_eq!((peak, served), (4, CLIENTS * REQUESTS), "the limit is reached and never exceeded");
    let lanes = gateway.shared().tallies.lanes();
    let queued = |lane: &corelane::shared::tallies::Lane| lane.times(route("/generate"), Time::Queue).count();
    assert!(lanes.iter().all(|lane| queued(lane) > 0), "requests of both lanes have waited");
    let before = tally_of(&gateway, Tally::Completions);
    until("lanes have published", || tally_of(&gateway, Tally::Completions) > before);
    assert_eq!(tally_of(&gateway, Tally::LateWakes), 0, "who is let in is woken at once");
}

/// A gateway with one permit, which a request holds that does not end.
fn occupied(change: impl FnOnce(&mut Config)) -> (Rig, Http) {
    let rig = Rig::with(Settings::default(), 1, |c| {
        c.max_concurrent_requests = 1;
        change(c);
    });
    let mut holder = rig.http();
    holder.send(&post("/generate", &json!({"text":"x","stream":true,"mock":{"hang":true}})));
    until("the engine has it", || rig.stats(0).active == 1);
    (rig, holder)
}

fn route(path: &str) -> usize {
    corelane::config::routes::find(path.as_bytes()).expect("a route")
}

fn waits(rig: &Rig, path: &str) -> Http {
    let before = rig.gateway.shared().admission.waiting();
    let mut http = rig.http();
    http.send(&post(path, &json!({"text":"x","prompt":"x"})));
    until("it waits", || rig.gateway.shared().admission.waiting() == before + 1);
    http
}

#[test]
fn a_full_queue_says_so_at_once() {
    let (rig, holder) = occupied(|c| c.queue_size = 2);
    let mut inside = [waits(&rig, "/generate"), waits(&rig, "/v1/completions")];
    let mut http = rig.http();
    for _ in 0..3 {
        let answer = http.post("/generate", &json!({"text":"x"})).expect_error(429, "queue_full");
        assert_eq!((answer.header("retry-after"), answer.header("connection")), (Some("1"), None));
        assert_eq!(answer.json()["error"]["type"], "rate_limit_error");
    }
    // What needs no worker needs no permit.
    for path in ["/health", "/readiness", "/v1/models", "/get_server_info"] {
        http.ask("GET", path, &[], b"").expect(200);
    }
    assert_eq!(rig.metric("corelane_queue_length"), Some(2.0));
    assert_eq!(rig.metric("corelane_permits_in_use"), Some(1.0));
    assert_eq!(rig.received(), 1);
    drop(holder);
    for http in &mut inside {
        http.answer().expect(200);
    }
    empty(&rig.gateway);
    assert_eq!(rig.metric(r#"corelane_faults_total{code="queue_full"}"#), Some(3.0));
    assert_eq!(rig.metric(r#"corelane_queue_seconds_count{route="/generate"}"#), Some(1.0));
    assert_eq!(rig.metric(r#"corelane_queue_seconds_count{route="/v1/completions"}"#), Some(1.0));
}

#[test]
fn without_places_nobody_waits() {
    let (rig, holder) = occupied(|c| c.queue_size = 0);
    rig.post("/generate", &json!({"text":"x"})).expect_error(429, "queue_full");
    drop(holder);
    empty(&rig.gateway);
    rig.post("/generate", &json!({"text":"x"})).expect(200);
}

#[test]
fn waiting_has_an_end() {
    let (rig, holder) = occupied(|c| c.queue_timeout = Duration::from_millis(300));
    let begun = Instant::now();
    let mut http = waits(&rig, "/generate");
    let answer = http.answer().expect_error(408, "queue_timeout");
    assert!((250..5000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
    assert_eq!(answer.header("connection"), None, "its request was read, so another one may follow");
    assert_eq!(rig.gateway.shared().admission.waiting(), 0);
    drop(holder);
    empty(&rig.gateway);
    http.post("/generate", &json!({"text":"x"})).expect(200);
    assert_eq!(rig.received(), 2);
}

#[test]
fn a_client_that_leaves_gives_its_place_up() {
    let (rig, holder) = occupied(|c| c.queue_size = 1);
    for reset in [false, true] {
        let gone = waits(&rig, "/generate");
        rig.post("/generate", &json!({"text":"x"})).expect_error(429, "queue_full");
        if reset {
            gone.reset();
        } else {
            drop(gone);
        }
        until("its place is free", || rig.gateway.shared().admission.waiting() == 0);
    }
    let mut next = waits(&rig, "/generate");
    assert_eq!(rig.received(), 1, "who has left is not served");
    drop(holder);
    next.answer().expect(200);
    empty(&rig.gateway);
    assert_eq!((rig.received(), rig.tally(Tally::ClientsLeft)), (2, 3));
}

#[test]
fn who_came_first_is_served_first() {
    let (counter, gateway) = counting(|c| (c.cores, c.max_concurrent_requests) = (vec![0, 1], 1));
    let send = |text: &str| {
        let mut http = Http::connect(gateway.address());
        http.send(&post("/generate", &json!({"text":text})));
        http
    };
    let mut line = vec![send("hold")];
    until("the worker has it", || counter.inside.load(Ordering::SeqCst) == 1);
    for i in 0..20 {
        line.push(send(&i.to_string()));
        until("it waits", || gateway.shared().admission.waiting() == i + 1);
    }
    counter.released.store(true, Ordering::SeqCst);
    for http in &mut line {
        http.answer().expect(200);
    }
    let wanted = std::iter::once("hold".to_owned()).chain((0..20).map(|i| i.to_string()));
    assert_eq!(*counter.texts.lock().unwrap(), wanted.collect::<Vec<_>>());
    assert_eq!(counter.peak.load(Ordering::SeqCst), 1);
    empty(&gateway);
}

/// However a request ends, its permit comes back.
#[test]
fn permits_survive_whatever_happens() {
    let rig = Rig::with(Settings::default(), 1, |c| {
        (c.max_concurrent_requests, c.max_attempts) = (2, 2);
    });
    for mock in [
        json!({"reset_before_head":true}),
        json!({"close_before_head":true}),
        json!({"reset_after_events":2}),
        json!({"close_after_events":2}),
        json!({"raw":"HTTP/1.1 200 O\r\nno head"}),
        json!({"status":500}),
        json!({"no_length":true}),
    ] {
        for _ in 0..3 {
            let mut http = rig.http();
            http.send(&post("/v1/completions", &json!({"prompt":"x","stream":true,"max_tokens":5,"mock":mock})));
            let _ = http.try_answer_to("POST");
        }
    }
    rig.post("/v1/completions", &json!({"prompt":"x","model":"unknown"})).expect_error(404, "model_not_found");
    rig.post("/generate", &json!({"text":"x"})).expect(200);
    empty(&rig.gateway);
    rig.settles();
}

#[test]
fn who_waits_is_served_while_the_gateway_drains() {
    let (rig, holder) = occupied(|c| c.shutdown_grace = Duration::from_secs(20));
    let mut next = waits(&rig, "/generate");
    let Rig { gateway, fleet } = rig;
    let draining = std::thread::spawn(move || gateway.drain());
    std::thread::sleep(Duration::from_millis(100));
    drop(holder);
    let answer = next.answer().expect(200);
    assert_eq!(answer.header("connection"), Some("close"));
    assert!(draining.join().unwrap(), "nothing was cut");
    drop(fleet);
}

#[test]
fn who_still_waits_at_the_end_is_told() {
    let (rig, _holder) = occupied(|_| {});
    let mut next = waits(&rig, "/generate");
    let Rig { gateway, fleet } = rig;
    assert!(!gateway.drain(), "the request that held the permit was cut");
    next.answer().expect_error(503, "shutting_down");
    drop(fleet);
}

#[test]
fn a_full_worker_is_not_chosen() {
    for policy in Policy::ALL {
        let rig = Rig::with(Settings::default(), 2, |c| {
            (c.max_requests_per_worker, c.policy) = (2, *policy);
        });
        let hang = json!({"text":"one and the same prompt, which is longer than a block of sixty-four bytes, so that it has a key","mock":{"hang":true}});
        let mut held: Vec<Http> = Vec::new();
        for n in 1..=4 {
            let mut http = rig.http();
            let body = hang.to_string();
            http.send(&crate::rig::request("POST", "/generate", &[("x-corelane-key", "k")], body.as_bytes()));
            held.push(http);
            until("it is there", || rig.stats(0).active + rig.stats(1).active == n);
        }
        assert_eq!([rig.stats(0).peak, rig.stats(1).peak], [2, 2], "{policy:?}");
        let mut http = rig.http();
        let answer = http.post("/generate", &json!({"text":"x"})).expect_error(429, "workers_full");
        assert_eq!(answer.header("retry-after"), Some("1"));
        held.pop();
        until("there is room", || rig.in_flight() == 3);
        http.post("/generate", &json!({"text":"x"})).expect(200);
    }
}

#[test]
fn connections_beyond_the_limit_are_turned_away() {
    let rig = Rig::with(Settings::default(), 1, |c| {
        (c.cores, c.max_connections_per_lane) = (vec![0, 1], 3);
    });
    let mut inside: Vec<Http> = (0..6).map(|_| rig.http()).collect();
    for http in &mut inside {
        http.post("/generate", &json!({"text":"x"})).expect(200);
    }
    for n in 1..=3 {
        let mut http = rig.http();
        http.send(&post("/generate", &json!({"text":"x"})));
        let answer = http.answer().expect_error(503, "too_many_connections");
        assert_eq!((answer.header("retry-after"), answer.header("connection")), (Some("1"), Some("close")));
        assert_eq!(http.expect_closed(), End::Fin);
        assert_eq!(rig.tally(Tally::TurnedAway), n);
    }
    for http in &mut inside {
        http.post("/generate", &json!({"text":"x"})).expect(200);
    }
    assert_eq!(rig.received(), 12);
    inside.truncate(2);
    until("there is room", || rig.http().ask("GET", "/health", &[], b"").status == 200);
}

/// A body that is nearly all framing is refused, however small its chunks.
#[test]
fn framing_has_a_limit() {
    let rig = Rig::new(1);
    let head = "POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n";
    let body = json!({"text":"x".repeat(60_000)}).to_string();
    let chunks = |framed: fn(u8) -> String| body.bytes().map(framed).collect::<String>();
    // One byte a chunk is odd, but honest.
    let honest = format!("{head}{}0\r\n\r\n", chunks(|b| format!("1\r\n{}\r\n", char::from(b))));
    rig.http().send(honest.as_bytes()).answer().expect(200);
    for framed in [
        |b| format!("1;x={}\r\n{}\r\n", "y".repeat(60), char::from(b)),
        |b| format!("0000000000000001\r\n{}\r\n", char::from(b)),
        |b| format!("1      ;x\r\n{}\r\n", char::from(b)),
    ] {
        let mut http = rig.http();
        let answer = http.send(format!("{head}{}0\r\n\r\n", chunks(framed)).as_bytes()).answer();
        assert!(answer.expect_error(400, "bad_chunk").text().contains("mostly framing"));
        assert_eq!(http.expect_closed(), End::Fin);
    }
    let few = format!("{head}{:x};{}\r\n{body}\r\n0\r\n\r\n", body.len(), "x".repeat(4000));
    rig.http().send(few.as_bytes()).answer().expect(200);
    assert_eq!(rig.received(), 2);
}
