//! Clients that leave, half leave, or stop reading.

use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use corelane::config::{HalfClose, WorkerSpec};
use corelane::metrics::Tally;
use corelane::mock::Settings;
use serde_json::json;

use crate::rig::{End, Http, Rig, config, in_flight, post, start, until};

/// Asserts that the engine was told within a second (the design says 100 ms), and nothing is left.
fn left(rig: &Rig, what: &str, aborted: u64) {
    let start = Instant::now();
    until("the engine's request is aborted", || rig.stats(0).aborted == aborted);
    let took = start.elapsed();
    println!("{what}: aborted after {took:?}");
    assert!(took < Duration::from_secs(1), "{what}: {took:?}");
    rig.settles();
}

fn begun(rig: &Rig) {
    until("the engine works on it", || rig.stats(0).active == 1);
    assert_eq!(rig.in_flight(), 1);
}

/// Field report 12: a client that leaves during a long prefill frees the engine at once.
#[test]
fn a_client_leaves_during_prefill() {
    let rig = Rig::new(1);
    let mut aborted = 0;
    for fault in [json!({"hang":true}), json!({"delay_ms":60_000}), json!({"interim":2,"hang":false,"delay_ms":60_000})]
    {
        for reset in [false, true] {
            let mut http = rig.http();
            http.send(&post("/generate", &json!({"text":"x","stream":true,"mock":fault})));
            begun(&rig);
            if reset {
                http.reset()
            } else {
                drop(http)
            }
            aborted += 1;
            left(&rig, "prefill", aborted);
        }
    }
    assert_eq!(rig.tally(Tally::ClientsLeft), aborted);
    until("the connections to the engine are closed", || rig.stats(0).connections == 0);
}

#[test]
fn a_client_leaves_in_mid_stream() {
    let rig = Rig::new(1);
    for (aborted, gap) in [(1, 20), (2, 60_000)] {
        let mut http = rig.http();
        let mock = json!({"gap_ms":gap,"reset_after_events":null});
        http.send(&post("/v1/chat/completions", &json!({"messages":[],"stream":true,"max_tokens":5000,"mock":mock})));
        assert_eq!(http.head().unwrap().status, 200);
        begun(&rig);
        drop(http);
        left(&rig, "stream", aborted);
    }
}

/// Bytes of a next request hide the FIN behind them.
#[test]
fn a_client_leaves_with_another_request_behind() {
    let rig = Rig::new(1);
    for behind in [20, 30_000] {
        let before = rig.stats(0).aborted;
        let mut http = rig.http();
        let mut bytes = post("/generate", &json!({"text":"x","mock":{"hang":true}}));
        bytes.extend_from_slice(&post("/generate", &json!({"text":"y".repeat(behind)})));
        http.send(&bytes);
        begun(&rig);
        drop(http);
        left(&rig, "pipelined", before + 1);
    }
}

/// A listener that accepts nothing and whose queue is full.
fn blackhole() -> (socket2::Socket, SocketAddr, Vec<TcpStream>) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
    socket.listen(0).unwrap();
    let addr = socket.local_addr().unwrap().as_socket().unwrap();
    let mut fill = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&addr, Duration::from_millis(300)) {
        fill.push(stream);
        assert!(fill.len() < 64, "the queue does not fill");
    }
    (socket, addr, fill)
}

#[test]
fn a_client_leaves_while_the_worker_is_connected_to() {
    let (_socket, addr, _fill) = blackhole();
    let mut spec = WorkerSpec::new(format!("http://{addr}"));
    spec.models = vec!["m".into()];
    let mut config = config(vec![spec]);
    (config.health_check, config.connect_timeout) = (false, Duration::from_secs(30));
    let gateway = start(config);
    let mut http = Http::connect(gateway.address());
    http.send(&post("/generate", &json!({"text":"x"})));
    until("it connects", || in_flight(&gateway) == 1);
    std::thread::sleep(Duration::from_millis(50));
    drop(http);
    let took = until("the guard is released", || in_flight(&gateway) == 0);
    println!("connecting: released after {took:?}");
    assert!(took < Duration::from_secs(2));
}

#[test]
fn a_worker_that_does_not_accept_times_out() {
    let (_socket, addr, _fill) = blackhole();
    let mut spec = WorkerSpec::new(format!("http://{addr}"));
    spec.models = vec!["m".into()];
    let mut config = config(vec![spec]);
    (config.health_check, config.connect_timeout, config.max_attempts) = (false, Duration::from_millis(300), 1);
    let gateway = start(config);
    let mut http = Http::connect(gateway.address());
    http.post("/generate", &json!({"text":"x"})).expect_error(504, "worker_connect_timeout");
    until("the guard is released", || in_flight(&gateway) == 0);
    http.ask("GET", "/health", &[], b"").expect(200);
}

#[test]
fn a_half_closed_client_is_served_if_so_configured() {
    let body = json!({"text":"x","stream":true,"mock":{"delay_ms":300}});
    let rig = Rig::with(Settings::default(), 1, |c| c.half_close = HalfClose::Serve);
    let mut http = rig.http();
    http.send(&post("/generate", &body));
    http.stream.shutdown(Shutdown::Write).unwrap();
    http.answer().expect(200);
    assert_eq!(http.expect_closed(), End::Fin);
    rig.settles();
    assert_eq!(rig.stats(0).aborted, 0);

    let rig = Rig::new(1);
    let mut http = rig.http();
    http.send(&post("/generate", &json!({"text":"x","mock":{"hang":true}})));
    begun(&rig);
    http.stream.shutdown(Shutdown::Write).unwrap();
    left(&rig, "half close", 1);
    http.expect_closed();
}

/// A client that leaves in the middle of its own request costs nobody anything.
#[test]
fn a_client_leaves_before_its_request_is_complete() {
    let rig = Rig::new(1);
    for bytes in ["", "POST /gen", "POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 100000\r\n\r\n{\"text\":"] {
        rig.http().send(bytes.as_bytes());
        let mut http = rig.http();
        http.send(bytes.as_bytes());
        http.reset();
    }
    let connections = || rig.gateway.shared().handover.connections(0);
    until("their connections are gone", || connections() == 0);
    assert_eq!((rig.received(), rig.gateway.shared().memory.claimed()), (0, 0));
}

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// Field report 13: who does not read slows the worker down, fills no memory, and is cut in the end.
#[test]
fn a_client_that_does_not_read_slows_the_worker() {
    const EVENT: usize = 64 * 1024;
    const EVENTS: u64 = 4096;
    let rig = Rig::with(Settings::default(), 1, |c| c.write_stall_timeout = Duration::from_secs(2));
    let before = resident_bytes();
    let mut http = rig.http();
    let body = json!({"prompt":"x","stream":true,"max_tokens":EVENTS,"mock":{"event_bytes":EVENT}});
    http.send(&post("/v1/completions", &body));
    begun(&rig);
    let made = || rig.stats(0).output_tokens;
    let mut last = (made(), Instant::now());
    until("the worker stands still", || {
        if made() != last.0 {
            last = (made(), Instant::now());
        }
        last.1.elapsed() > Duration::from_millis(700)
    });
    let (made, grown) = (made(), resident_bytes().saturating_sub(before));
    println!("the worker made {made} events of {EVENT} bytes; resident memory grew by {} MiB", grown >> 20);
    assert!(made < EVENTS / 2, "{made}");
    // The engine keeps its own copy of what it made; other tests run beside this one.
    assert!(grown < 160 << 20, "{grown}");
    left_after_stall(&rig);
    assert_eq!(rig.metric(r#"corelane_faults_total{code="client_stalled"}"#), Some(1.0));
    while http.fill().is_ok() {}
}

fn left_after_stall(rig: &Rig) {
    let took = until("the client is cut", || rig.stats(0).aborted == 1);
    println!("cut {took:?} after that");
    rig.settles();
}

/// Field report 14: the stall clock runs for the client only while the client is waited for.
#[test]
fn a_slow_worker_is_not_the_clients_fault() {
    let rig = Rig::with(Settings::default(), 1, |c| c.write_stall_timeout = Duration::from_millis(300));
    let body = json!({"prompt":"x","stream":true,"max_tokens":3,"mock":{"gap_ms":700}});
    rig.post("/v1/completions", &body).expect(200);
    // Nor is a client stalled that reads slowly but reads.
    let body = json!({"prompt":"x","stream":true,"max_tokens":30,"mock":{"event_bytes":200_000}});
    let mut http = rig.http();
    http.most = 150_000;
    http.send(&post("/v1/completions", &body));
    let mut got = 0;
    let mut tail = Vec::new();
    while !tail.ends_with(b"0\r\n\r\n") {
        http.fill().unwrap();
        got += http.buf.len();
        tail = std::mem::take(&mut http.buf);
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(got > 30 * 200_000);
}

/// A client that reads slowly but all the time is not stalled, however much lies between it and the gateway.
#[test]
fn a_client_that_reads_slowly_is_served() {
    let rig = Rig::with(Settings::default(), 1, |c| c.write_stall_timeout = Duration::from_secs(1));
    let mut http = rig.http();
    let body = json!({"prompt":"x","stream":true,"max_tokens":1024,"mock":{"event_bytes":65_536}});
    http.send(&post("/v1/completions", &body));
    begun(&rig);
    http.most = 8 * 1024;
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(4500) {
        http.fill().expect("not cut");
        std::thread::sleep(Duration::from_millis(30));
    }
    assert_eq!((rig.stats(0).aborted, rig.in_flight()), (0, 1));
    let mut rest = 0;
    http.most = 1 << 20;
    while !http.buf.ends_with(b"\r\n0\r\n\r\n") {
        http.fill().expect("not cut");
        rest += 1;
    }
    println!("{} MiB in the end, the rest in {rest} pieces", http.buf.len() >> 20);
    rig.settles();
}
