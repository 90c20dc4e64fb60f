//! Field report 33: what two parsers could read differently is refused, and nothing of it reaches a worker.

use serde_json::json;

use crate::rig::{End, Rig};

/// Requests that must be refused, and with what.
const VECTORS: &[(&str, u16)] = &[
    // Two lengths.
    ("POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n5c\r\n", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 2, 2\r\n\r\n{}", 400),
    // Lengths that are no numbers.
    ("POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: +2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: -2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 0x2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 2 2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length:\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 18446744073709551618\r\n\r\n{}", 400),
    // Codings.
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 501),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", 501),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n", 400),
    ("POST /generate HTTP/1.0\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    // Field syntax.
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nX-A: 1\r\n Content-Length: 2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nX-A: 1\r\n\tfolded\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\n Host: g\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nX-A: 1\rContent-Length: 2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nX-A: 1\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\nHost: g\nContent-Length: 2\n\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nX-A: a\0b\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nX A: 1\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\n: 1\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nno colon\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nConnection: content-length\r\nContent-Length: 2\r\n\r\n{}", 400),
    // Hosts.
    ("POST /generate HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: a b\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1\r\nHost: u@h\r\nContent-Length: 2\r\n\r\n{}", 400),
    // Request lines.
    ("POST  /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST /generate  HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST /gen erate HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST\t/generate HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST generate HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.1 \r\nHost: g\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST /generate http/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("POST /generate HTTP/1.2\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}", 505),
    ("POST /generate HTTP/2.0\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}", 505),
    ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ("POST /generate\r\n\r\n", 400),
    ("CONNECT g:80 HTTP/1.1\r\nHost: g:80\r\n\r\n", 501),
    ("BREW /generate HTTP/1.1\r\nHost: g\r\n\r\n", 501),
    ("\x16\x03\x01\x02\0\x01\0\x01\u{7c}\x03\x03\r\n\r\n", 400),
    // Upgrades are not tunnelled.
    ("GET /health HTTP/1.1\r\nHost: g\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 501),
    // Chunks.
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n+2\r\n{}\r\n0\r\n\r\n", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n 2\r\n{}\r\n0\r\n\r\n", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n\r\n{}\r\n0\r\n\r\n", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}0\r\n\r\n", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n", 400),
    (
        "POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n10000000000000002\r\n{}\r\n0\r\n\r\n",
        400,
    ),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n2;a\nb\r\n{}\r\n0\r\n\r\n", 400),
    ("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nbad trailer\n\r\n", 400),
];

/// The request that would be smuggled behind each of them.
const BEHIND: &str = "POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}";

fn refuse(rig: &Rig, bytes: &[u8], status: u16, pieces: usize) {
    let shown = || String::from_utf8_lossy(&bytes[..bytes.len().min(300)]).into_owned();
    let mut http = rig.http();
    for piece in bytes.chunks(pieces) {
        http.send(piece);
    }
    let answer = http.try_answer_to("POST").unwrap_or_else(|end| panic!("{end:?} after {:?}", shown()));
    assert_eq!(answer.status, status, "{:?} got {}", shown(), answer.text());
    let code = answer.header("x-corelane-error").unwrap_or_default().to_owned();
    let answer = answer.expect_error(status, &code);
    assert_eq!(answer.header("connection"), Some("close"), "{:?}", shown());
    assert_eq!(http.expect_closed(), End::Fin, "{:?}", shown());
}

#[test]
fn ambiguous_requests_are_refused() {
    let rig = Rig::new(1);
    for (vector, status) in VECTORS {
        refuse(&rig, format!("{vector}{BEHIND}").as_bytes(), *status, usize::MAX);
        assert_eq!(rig.received(), 0, "{vector:?}");
    }
    // The same where the parts arrive one by one.
    for (vector, status) in VECTORS.iter().step_by(3) {
        refuse(&rig, format!("{vector}{BEHIND}").as_bytes(), *status, 11);
    }
    assert_eq!((rig.received(), rig.in_flight()), (0, 0));
    rig.post("/generate", &json!({"text":"x"})).expect(200);
    assert_eq!(rig.received(), 1);
}

#[test]
fn oversized_heads_are_refused() {
    let rig = Rig::new(1);
    let many = format!("GET /health HTTP/1.1\r\nHost: g\r\n{}\r\n", "X-A: 1\r\n".repeat(101));
    refuse(&rig, many.as_bytes(), 431, usize::MAX);
    let large = format!("GET /health HTTP/1.1\r\nHost: g\r\nX-A: {}\r\n\r\n", "a".repeat(70_000));
    refuse(&rig, large.as_bytes(), 431, usize::MAX);
    refuse(&rig, large.as_bytes(), 431, 1000);
    let long = format!("GET /{} HTTP/1.1\r\nHost: g\r\n\r\n", "a".repeat(9_000));
    refuse(&rig, long.as_bytes(), 414, usize::MAX);
    let endless = "x".repeat(80_000);
    refuse(&rig, endless.as_bytes(), 400, usize::MAX);
    // What fits, passes.
    let fits = format!("GET /health HTTP/1.1\r\nHost: g\r\n{}\r\n", "X-A: 1\r\n".repeat(99));
    rig.http().send(fits.as_bytes()).answer().expect(200);
}

/// A refusal in the middle of a pipeline comes after the answers before it, and nothing comes after.
#[test]
fn a_bad_request_ends_a_pipeline() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    let good = crate::rig::post("/generate", &json!({"text":"x"}));
    let mut bytes = good.clone();
    bytes.extend_from_slice(VECTORS[0].0.as_bytes());
    bytes.extend_from_slice(&good);
    http.send(&bytes);
    http.answer().expect(200);
    http.answer().expect_error(400, "bad_framing");
    assert_eq!(http.expect_closed(), End::Fin);
    assert_eq!(rig.received(), 1);
}
