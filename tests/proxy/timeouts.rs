//! Every wait has an end, and its own answer.

use std::time::{Duration, Instant};

use corelane::config::Config;
use corelane::mock::Settings;
use serde_json::json;

use crate::rig::{End, Http, Rig, post};

fn rig(change: impl FnOnce(&mut Config)) -> Rig {
    Rig::with(Settings::default(), 1, change)
}

/// Sends a byte now and then until an answer is there.
fn trickle(http: &mut Http, bytes: &[u8], pause: Duration) -> Duration {
    let start = Instant::now();
    let nothing_yet = |http: &Http| {
        http.stream.set_nonblocking(true).unwrap();
        let waits = http.stream.peek(&mut [0]).is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock);
        http.stream.set_nonblocking(false).unwrap();
        waits
    };
    for byte in bytes {
        http.send(&[*byte]);
        std::thread::sleep(pause);
        if !nothing_yet(http) {
            break;
        }
    }
    start.elapsed()
}

#[test]
fn a_head_that_trickles_is_timed_out() {
    let rig = rig(|c| c.head_timeout = Duration::from_secs(1));
    let mut http = rig.http();
    let head = format!("GET /health HTTP/1.1\r\nHost: g\r\nX-Slow: {}", "x".repeat(400));
    let took = trickle(&mut http, head.as_bytes(), Duration::from_millis(100));
    println!("408 after {took:?}");
    http.answer().expect_error(408, "head_timeout");
    assert_eq!(http.expect_closed(), End::Fin);
    assert!(took > Duration::from_millis(800) && took < Duration::from_secs(10), "{took:?}");
}

#[test]
fn a_body_that_stops_is_timed_out() {
    let rig = rig(|c| c.body_timeout = Duration::from_millis(400));
    for framing in ["Content-Length: 100", "Transfer-Encoding: chunked"] {
        let mut http = rig.http();
        http.send(format!("POST /generate HTTP/1.1\r\nHost: g\r\n{framing}\r\n\r\n").as_bytes());
        http.answer().expect_error(408, "body_timeout");
        http.expect_closed();
    }
    // Pauses shorter than that are nobody's business.
    let bytes = post("/generate", &json!({"text":"x"}));
    let mut http = rig.http();
    http.send(&bytes[..bytes.len() - 8]);
    for byte in &bytes[bytes.len() - 8..] {
        std::thread::sleep(Duration::from_millis(80));
        http.send(&[*byte]);
    }
    http.answer().expect(200);
    assert_eq!(rig.received(), 1);
}

/// Pauses below their limit do not add up to more than a request may take.
#[test]
fn a_body_that_trickles_ends_with_the_time_of_its_request() {
    let rig = rig(|c| c.request_timeout = Duration::from_millis(600));
    for framing in ["Content-Length: 400", "Transfer-Encoding: chunked"] {
        let mut http = rig.http();
        http.send(format!("POST /generate HTTP/1.1\r\nHost: g\r\n{framing}\r\n\r\n").as_bytes());
        let drops: &[u8] =
            if framing.starts_with('C') { &[b' '; 300] } else { b"8;xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx" };
        let took = trickle(&mut http, drops, Duration::from_millis(50));
        http.answer().expect_error(408, "body_timeout");
        http.expect_closed();
        assert!(took > Duration::from_millis(400) && took < Duration::from_secs(8), "{framing}: {took:?}");
    }
    assert_eq!(rig.received(), 0);
}

#[test]
fn idle_connections_are_closed() {
    let rig = rig(|c| c.keep_alive = Duration::from_millis(400));
    let (mut fresh, mut used) = (rig.http(), rig.http());
    used.post("/generate", &json!({"text":"x"})).expect(200);
    let start = Instant::now();
    assert_eq!((fresh.expect_closed(), used.expect_closed()), (End::Fin, End::Fin));
    println!("closed after {:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_request_has_an_end() {
    let rig = rig(|c| c.request_timeout = Duration::from_millis(600));
    let mut http = rig.http();
    http.post("/generate", &json!({"text":"x","mock":{"hang":true}})).expect_error(504, "request_timeout");
    rig.settles();
    http.post("/generate", &json!({"text":"x"})).expect(200);
    // After the first byte there is no status left to give: cut.
    for mock in [json!({"stall_after_events":2}), json!({"gap_ms":100})] {
        let mut http = rig.http();
        let answer = http.post("/v1/completions", &json!({"prompt":"x","stream":true,"max_tokens":1000,"mock":mock}));
        assert_eq!(answer.status, 200);
        assert_ne!(answer.end, End::Whole);
        assert!(answer.text().starts_with("data: {"));
        rig.settles();
    }
    assert_eq!(rig.stats(0).aborted, 3);
    assert_eq!(rig.metric(r#"corelane_requests_total{route="/v1/completions",status="cut"}"#), Some(2.0));
}
