//! HTTP/1.1 as clients speak it: keep-alive, pipelines, interim answers, old versions, odd framings.

use std::time::Duration;

use corelane::metrics::Tally;
use serde_json::json;

use crate::rig::{End, Http, Rig, post, scrub};

#[test]
fn a_connection_serves_one_request_after_the_other() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    for i in 0..50 {
        let answer = http.post("/generate", &json!({"text":"x","stream":i % 2 == 0})).expect(200);
        assert_eq!(answer.header("connection"), None);
    }
    let answer = http.ask("POST", "/generate", &[("Connection", "close")], br#"{"text":"x"}"#).expect(200);
    assert_eq!(answer.header("connection"), Some("close"));
    assert_eq!(http.expect_closed(), End::Fin);
    // The worker's side is kept alive too.
    assert_eq!((rig.tally(Tally::Connects), rig.tally(Tally::Reuses)), (1, 50));
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let rig = Rig::with(Default::default(), 3, |_| {});
    let mut http = rig.http();
    let mut bytes = Vec::new();
    let body = |i: usize| json!({"prompt":"p","max_tokens":2,"stream":i % 2 == 1,"mock":{"text":format!(" word{i}"),"delay_ms":10 - i}});
    for i in 0..10 {
        bytes.extend_from_slice(&post("/v1/completions", &body(i)));
    }
    bytes.extend_from_slice(b"GET /health HTTP/1.1\r\nHost: g\r\n\r\nGET /nowhere HTTP/1.1\r\nHost: g\r\n\r\n");
    http.send(&bytes);
    for i in 0..10 {
        let want = Http::connect(rig.fleet.engine(0).addr()).post("/v1/completions", &body(i));
        assert_eq!(scrub(&http.answer().expect(200).body), scrub(&want.body), "{i}");
    }
    assert_eq!(http.answer().expect(200).json()["status"], "ok");
    http.answer().expect_error(404, "not_found");
    // The same, in pieces.
    for piece in bytes.chunks(61) {
        http.send(piece);
    }
    for _ in 0..11 {
        http.answer().expect(200);
    }
    http.answer().expect_error(404, "not_found");
}

#[test]
fn a_client_that_expects_is_invited() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    let body = br#"{"text":"x","mock":{"echo":true}}"#;
    for framing in [format!("Content-Length: {}", body.len()), "Transfer-Encoding: chunked".into()] {
        http.send(
            format!("POST /generate HTTP/1.1\r\nHost: g\r\nExpect: 100-Continue\r\n{framing}\r\n\r\n").as_bytes(),
        );
        assert_eq!(http.head().unwrap().status, 100);
        match framing.starts_with("Content") {
            true => http.send(body),
            false => {
                http.send(format!("{:x}\r\n{}\r\n0\r\n\r\n", body.len(), String::from_utf8_lossy(body)).as_bytes())
            }
        };
        let answer = http.answer().expect(200);
        assert!(!answer.text().to_lowercase().contains("expect:"), "{}", answer.text());
    }
    // Who sends the body along needs no invitation.
    let answer = http.ask("POST", "/generate", &[("Expect", "100-continue")], body).expect(200);
    assert!(answer.head.starts_with("HTTP/1.1 200"));
    http.ask("POST", "/generate", &[("Expect", "something")], body).expect_error(417, "expectation_failed");
}

#[test]
fn head_gets_a_head() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    for path in ["/health", "/readiness", "/v1/models", "/get_model_info", "/health_generate"] {
        let want = http.ask("GET", path, &[], b"").expect(200);
        let got = http.ask("HEAD", path, &[], b"").expect(200);
        assert_eq!(got.header("content-length"), Some(want.body.len().to_string().as_str()), "{path}");
    }
    assert_eq!(http.ask("HEAD", "/nowhere", &[], b"").status, 404);
    assert_eq!(http.ask("HEAD", "/v1/completions", &[], b"").status, 405);
    http.post("/generate", &json!({"text":"x"})).expect(200);
}

fn old(fields: &str, body: &str) -> Vec<u8> {
    format!("POST /v1/completions HTTP/1.0\r\n{fields}Content-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

#[test]
fn old_clients_get_no_chunks() {
    let rig = Rig::new(1);
    let body = r#"{"prompt":"p","stream":true,"mock":{"trailers":true}}"#;
    let want =
        Http::connect(rig.fleet.engine(0).addr()).ask("POST", "/v1/completions", &[], body.as_bytes()).expect(200);
    for fields in ["", "Host: g\r\n", "Connection: keep-alive\r\n"] {
        let mut http = rig.http();
        let answer = http.send(&old(fields, body)).answer().expect(200);
        assert_eq!((answer.header("transfer-encoding"), answer.header("content-length")), (None, None));
        assert_eq!(answer.header("connection"), Some("close"));
        assert_eq!(scrub(&answer.body), scrub(&want.body));
    }
    // An answer with a length lets the connection live, if that is asked for.
    let body = r#"{"prompt":"p"}"#;
    let mut http = rig.http();
    for _ in 0..3 {
        let answer = http.send(&old("Connection: Keep-Alive\r\n", body)).answer().expect(200);
        assert_eq!(answer.header("connection"), Some("keep-alive"));
    }
    let answer = http.send(&old("", body)).answer().expect(200);
    assert_eq!(answer.header("connection"), Some("close"));
    assert_eq!(http.expect_closed(), End::Fin);
    let mut http = rig.http();
    http.send(b"GET /health HTTP/1.0\r\n\r\n").answer().expect(200);
    assert_eq!(http.expect_closed(), End::Fin);
}

/// Field report 15: for a client without chunks the only clean end is a FIN, so a broken answer gets none.
#[test]
fn old_clients_see_a_broken_stream() {
    let rig = Rig::new(1);
    for fault in ["reset_after_events", "close_after_events"] {
        let body = format!(r#"{{"prompt":"p","stream":true,"mock":{{"{fault}":3}}}}"#);
        let answer = rig.http().send(&old("", &body)).answer();
        assert_eq!((answer.status, answer.end), (200, End::Reset), "{fault}");
    }
}

#[test]
fn trailers_pass() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    for stream in [true, false] {
        let body = json!({"prompt":"p","stream":stream,"mock":{"trailers":true}});
        let answer = http.post("/v1/completions", &body).expect(200);
        assert_eq!(answer.trailers, "x-mock-trailer: 1\n");
        assert!(answer.text().contains("text_completion"));
    }
    assert_eq!(http.post("/v1/completions", &json!({"prompt":"p"})).expect(200).trailers, "");
}

#[test]
fn interim_answers_do_not_count() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    for interim in [1, 5, 16] {
        let answer = http.post("/generate", &json!({"text":"p","mock":{"interim":interim}})).expect(200);
        assert!(answer.json()["text"].is_string());
    }
}

#[test]
fn answers_without_a_length_end_with_the_connection() {
    let rig = Rig::new(1);
    for stream in [true, false] {
        let mut http = rig.http();
        let answer = http.post("/generate", &json!({"text":"p","stream":stream,"mock":{"no_length":true}})).expect(200);
        assert_eq!(answer.header("connection"), Some("close"));
        assert!(!answer.body.is_empty() && http.expect_closed() == End::Fin);
    }
}

#[test]
fn statuses_without_a_body_have_none() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    for status in [204, 304, 404, 422, 500, 503] {
        let answer = http.post("/generate", &json!({"text":"p","mock":{"status":status}})).expect(status);
        assert_eq!(answer.body.is_empty(), status < 400);
        assert_eq!(answer.header("x-corelane-error"), None, "the worker's own errors pass as they came");
    }
}

/// A head that comes byte by byte is a head.
#[test]
fn a_request_in_single_bytes_is_served() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    for byte in post("/generate", &json!({"text":"slow"})) {
        http.send(&[byte]);
        if byte == b'\n' {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    http.answer().expect(200);
    // Empty lines before a request are allowed (RFC 9112, section 2.2).
    let mut bytes = b"\r\n\r\n".to_vec();
    bytes.extend_from_slice(&post("/generate", &json!({"text":"x"})));
    http.send(&bytes).answer().expect(200);
}

/// A deep pipeline of bodies of all sizes, cut anywhere, is answered in order and byte for byte.
#[test]
fn a_deep_pipeline_is_exact() {
    let rig = Rig::with(Default::default(), 2, |c| c.cores = vec![0, 1]);
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    std::thread::scope(|scope| {
        for n in 0..4 {
            let rig = &rig;
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(seed + n);
                let mut bodies: Vec<String> = Vec::new();
                for i in 0..100 {
                    let len = 1 << rng.u32(0..16);
                    let padding: String = (0..rng.usize(0..len)).map(|_| char::from(rng.u8(b' '..=b'~'))).collect();
                    bodies.push(json!({"i":i,"padding":padding,"mock":{"echo_body":true}}).to_string());
                }
                let mut bytes = Vec::new();
                for body in &bodies {
                    let chunks = body.as_bytes().chunks(rng.usize(1..9000)).collect::<Vec<_>>();
                    match rng.u32(0..4) {
                        0 => {
                            bytes.extend_from_slice(
                                b"POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n",
                            );
                            for chunk in chunks {
                                bytes.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
                                bytes.extend_from_slice(chunk);
                                bytes.extend_from_slice(b"\r\n");
                            }
                            bytes.extend_from_slice(b"0\r\n\r\n");
                        }
                        1 => bytes.extend_from_slice(b"GET /health HTTP/1.1\r\nHost: g\r\n\r\n"),
                        _ => bytes.extend_from_slice(&crate::rig::request("POST", "/generate", &[], body.as_bytes())),
                    }
                    if bytes.ends_with(b"GET /health HTTP/1.1\r\nHost: g\r\n\r\n") {
                        bytes.extend_from_slice(&crate::rig::request("POST", "/generate", &[], body.as_bytes()));
                    }
                }
                let mut http = rig.http();
                let copy = http.stream.try_clone().unwrap();
                let sender = std::thread::spawn(move || {
                    let mut rest = &bytes[..];
                    while !rest.is_empty() {
                        let (piece, left) = rest.split_at(rng.usize(1..70_000).min(rest.len()));
                        std::io::Write::write_all(&mut &copy, piece).unwrap();
                        rest = left;
                        if rng.u32(0..8) == 0 {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    }
                });
                for body in &bodies {
                    let mut answer = http.answer().expect(200);
                    if answer.text() == r#"{"status":"ok"}"# {
                        answer = http.answer().expect(200);
                    }
                    assert!(answer.body == body.as_bytes(), "{} instead of {}", answer.body.len(), body.len());
                }
                sender.join().unwrap();
            });
        }
    });
    rig.settles();
}
