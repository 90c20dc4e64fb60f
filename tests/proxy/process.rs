//! The process around the requests: metrics, addresses, drain.

use std::net::{IpAddr, Ipv6Addr, TcpStream};
use std::time::Duration;

use corelane::metrics::Tally;
use corelane::mock::{Fleet, Settings};
use serde_json::json;

use crate::rig::{End, Http, Rig, config, post, specs, start, until};

#[test]
fn metrics_tell_what_happened() {
    let rig = Rig::with(Settings::default(), 2, |c| {
        c.cores = vec![0, 1];
        c.retry.statuses.clear();
    });
    let mut http = rig.http();
    for _ in 0..6 {
        http.post("/v1/completions", &json!({"prompt":"x"})).expect(200);
    }
    http.post("/v1/completions", &json!({"prompt":"x","mock":{"status":429}})).expect(429);
    http.ask("POST", "/v1/completions", &[], b"{").expect_error(400, "invalid_json");
    http.ask("GET", "/nowhere", &[], b"").expect_error(404, "not_found");
    // A client has the last byte of an answer a moment before it is counted.
    let is = |name: &str, value: f64| {
        until(&format!("{name} is {value}"), || rig.metric(name) == Some(value));
    };
    is(r#"corelane_requests_total{route="/v1/completions",status="200"}"#, 6.0);
    is(r#"corelane_requests_total{route="/v1/completions",status="429"}"#, 1.0);
    is(r#"corelane_requests_total{route="/v1/completions",status="400"}"#, 1.0);
    is(r#"corelane_requests_total{route="other",status="404"}"#, 1.0);
    is(r#"corelane_faults_total{code="invalid_json"}"#, 1.0);
    // Those that a worker answered.
    is(r#"corelane_request_seconds_count{route="/v1/completions"}"#, 7.0);
    is("corelane_connections_accepted_total", 1.0);
    let of = |name: &str, i: usize| format!(r#"{name}{{worker="{}",role="regular"}}"#, rig.fleet.urls()[i]);
    let selected: f64 = (0..2).map(|i| rig.metric(&of("corelane_worker_selected_total", i)).unwrap()).sum();
    assert_eq!(selected, 7.0);
    is(&of("corelane_worker_up", 0), 1.0);
    // One connection to each worker, used again afterwards.
    is("corelane_upstream_connects_total", 2.0);
    is("corelane_upstream_reuses_total", 5.0);
    is("corelane_upstream_replays_total", 0.0);
    let bytes = |direction: &str| rig.metric(&format!(r#"corelane_bytes_total{{direction="{direction}"}}"#)).unwrap();
    assert!(bytes("in") > 900.0 && bytes("out") > 2000.0);

    http.send(&post("/v1/completions", &json!({"prompt":"x","stream":true,"mock":{"stall_after_events":1}})));
    http.head().unwrap();
    let inflight = || (0..2).map(|i| rig.metric(&of("corelane_worker_inflight", i)).unwrap()).sum::<f64>();
    assert_eq!(inflight(), 1.0);
    let lanes = || (0..2).map(|l| rig.metric(&format!(r#"corelane_lane_connections{{lane="{l}"}}"#)).unwrap());
    assert_eq!(lanes().sum::<f64>(), 1.0);
    drop(http);
    rig.settles();
    assert_eq!(inflight(), 0.0);
    until("the connection is gone", || lanes().sum::<f64>() == 0.0);
    is(r#"corelane_requests_total{route="/v1/completions",status="cut"}"#, 1.0);
    is("corelane_clients_left_total", 1.0);
}

/// Field report 37: what clients make up becomes no label.
#[test]
fn clients_make_no_series() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    let series = || {
        let page = Http::connect(rig.gateway.admin()).ask("GET", "/metrics", &[], b"").expect(200).text();
        page.lines().count()
    };
    http.post("/generate", &json!({"model":"first","text":"x"})).expect_error(404, "model_not_found");
    http.ask("GET", "/first", &[], b"").expect_error(404, "not_found");
    let before = series();
    for i in 0..50 {
        http.post("/generate", &json!({"model":format!("m{i}"),"text":"x"})).expect_error(404, "model_not_found");
        http.ask("GET", &format!("/p{i}"), &[], b"").expect_error(404, "not_found");
    }
    assert_eq!(series(), before);
}

#[test]
fn ipv6_on_both_sides() {
    let Ok(fleet) = Fleet::start(Settings::default(), (Ipv6Addr::LOCALHOST, 0), 1) else {
        println!("this host has no IPv6: nothing to see");
        return;
    };
    let mut v6 = config(specs(&fleet));
    assert!(v6.workers[0].url.starts_with("http://[::1]:"));
    v6.host = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    let gateway = start(v6);
    let port = gateway.address().port();
    let body = json!({"text":"x","mock":{"echo":true}});
    for (address, seen) in [("[::1]", "x-forwarded-for: ::1"), ("127.0.0.1", "x-forwarded-for: 127.0.0.1")] {
        let to = format!("{address}:{port}").parse().unwrap();
        let answer = Http::connect(to).post("/generate", &body).expect(200);
        assert!(answer.text().contains(seen), "{}", answer.text());
    }
    let mut http = Http::connect(format!("[::1]:{port}").parse().unwrap());
    http.send(b"GET /get_model_info HTTP/1.1\r\nHost: [::1]:80\r\n\r\n").answer_to("GET").expect(200);
}

/// Field report 38: a drain says so first, then takes nothing new, finishes what runs, and ends.
#[test]
fn a_drain_finishes_what_runs() {
    let rig = Rig::with(Settings::default(), 1, |c| {
        c.cores = vec![0, 1];
        c.shutdown_settle = Duration::from_millis(1500);
        c.shutdown_grace = Duration::from_secs(15);
    });
    let Rig { gateway, fleet } = rig;
    let (address, shared) = (gateway.address(), gateway.shared());
    let mut idle: Vec<Http> = (0..4).map(|_| Http::connect(address)).collect();
    idle[0].ask("GET", "/health", &[], b"").expect(200);
    let mut stream = Http::connect(address);
    let body = json!({"prompt":"x","stream":true,"max_tokens":20,"mock":{"gap_ms":200}});
    stream.send(&post("/v1/completions", &body));
    assert_eq!(stream.head().unwrap().status, 200);

    let drained = std::thread::spawn(move || gateway.drain());
    until("it is not ready any more", || Http::connect(address).ask("GET", "/readiness", &[], b"").status == 503);
    // While it settles, it serves.
    Http::connect(address).post("/generate", &json!({"text":"x"})).expect(200);
    for mut http in idle {
        assert_eq!(http.expect_closed(), End::Fin);
    }
    until("new connections are refused", || TcpStream::connect(address).is_err());
    assert!(!drained.is_finished(), "the stream is still running");
    let mut text = String::new();
    let mut trailers = String::new();
    loop {
        let chunk = stream.chunk(&mut trailers).expect("the stream is not cut");
        if chunk.is_empty() {
            break;
        }
        text += &String::from_utf8_lossy(&chunk);
    }
    assert!(text.ends_with("data: [DONE]\n\n") && text.matches("data: ").count() == 22);
    assert_eq!(stream.expect_closed(), End::Fin);
    assert!(drained.join().unwrap(), "nothing had to be cut");
    assert_eq!(fleet.engine(0).stats().aborted, 0);
    assert_eq!(shared.tallies.lanes().iter().map(|l| l.get(Tally::Panics)).sum::<u64>(), 0);
    until("connections to the worker are closed", || fleet.engine(0).stats().connections == 0);
}

#[test]
fn a_drain_cuts_what_takes_too_long() {
    let rig = Rig::with(Settings::default(), 1, |c| c.shutdown_grace = Duration::from_millis(300));
    let Rig { gateway, fleet } = rig;
    let (mut waiting, mut streaming) = (Http::connect(gateway.address()), Http::connect(gateway.address()));
    waiting.send(&post("/generate", &json!({"text":"x","mock":{"hang":true}})));
    streaming.send(&post("/generate", &json!({"text":"x","stream":true,"mock":{"stall_after_events":1}})));
    streaming.head().unwrap();
    until("both run", || fleet.engine(0).stats().active == 2);
    let shared = gateway.shared();
    assert!(!gateway.drain(), "something had to be cut");
    assert_ne!(streaming.answer_rest(), End::Whole);
    let _ = waiting.try_answer_to("POST").map(|answer| assert_eq!(answer.status, 503));
    until("the engine is free", || fleet.engine(0).stats().active == 0);
    assert_eq!(shared.load.word(0).in_flight(), 0);
}

impl Http {
    /// How a chunked answer ends, whatever it says.
    fn answer_rest(&mut self) -> End {
        loop {
            match self.chunk(&mut String::new()) {
                Ok(chunk) if chunk.is_empty() => return End::Whole,
                Ok(_) => {}
                Err(end) => return end,
            }
        }
    }
}

/// A gateway that is dropped leaves no thread, no port, no connection behind.
#[test]
fn a_gateway_that_ends_is_gone() {
    let rig = Rig::new(1);
    rig.post("/generate", &json!({"text":"x"})).expect(200);
    let Rig { gateway, fleet } = rig;
    let (address, admin) = (gateway.address(), gateway.admin());
    drop(gateway);
    assert!(TcpStream::connect(address).is_err() && TcpStream::connect(admin).is_err());
    until("its connections are closed", || fleet.engine(0).stats().connections == 0);
}

/// Whatever a connection is at when the process ends, it is closed; none waits for its client.
#[test]
fn an_end_cuts_every_connection() {
    let rig = Rig::with(Settings::default(), 1, |c| c.max_payload_bytes = 1 << 20);
    let body = |mock: serde_json::Value| post("/generate", &json!({"text":"x","stream":true,"mock":mock}));
    let large =
        post("/v1/completions", &json!({"prompt":"x","stream":true,"max_tokens":500,"mock":{"event_bytes":100_000}}));
    let requests: [(&str, Vec<u8>); 8] = [
        ("idle", Vec::new()),
        ("in its head", b"POST /generate HTTP/1.1\r\nHost:".to_vec()),
        ("in its body", b"POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 1000\r\n\r\n{".to_vec()),
        ("in its chunks", b"POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{".to_vec()),
        ("refused", b"POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 9999999\r\n\r\n{".to_vec()),
        ("waiting", body(json!({"hang":true}))),
        ("streaming", body(json!({"stall_after_events":1}))),
        ("not reading", large),
    ];
    let mut clients: Vec<(&str, Http)> = Vec::new();
    for (what, bytes) in requests {
        let mut http = rig.http();
        http.send(&bytes);
        clients.push((what, http));
    }
    until("all are where they should be", || rig.stats(0).active == 3);
    std::thread::sleep(Duration::from_millis(200));
    let Rig { gateway, fleet } = rig;
    let begun = std::time::Instant::now();
    drop(gateway);
    let took = begun.elapsed();
    println!("ended after {took:?}");
    for (what, http) in &mut clients {
        http.stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        println!("{what}");
        while http.fill().is_ok() {}
    }
    until("the engine is free", || fleet.engine(0).stats().active == 0 && fleet.engine(0).stats().connections == 0);
    assert!(took < Duration::from_secs(3), "{took:?}");
}
