//! What the client sends reaches the worker byte for byte, what the worker answers reaches the client.

use corelane::mock::{Settings, fnv1a64};
use serde_json::{Value, json};

use crate::rig::{Answer, Rig, request};

const ECHO: &[u8] = br#"{"mock":{"echo":true}}"#;

/// Lines of an echoed head with this name.
fn seen<'a>(echo: &'a Value, name: &str) -> Vec<&'a str> {
    let lines = echo["head"].as_array().unwrap().iter().skip(1).map(|l| l.as_str().unwrap());
    let fields = lines.map(|l| l.split_once(':').unwrap());
    fields.filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.trim()).collect()
}

/// Bodies are not parsed and written anew: field order, spaces, duplicates, escapes, number formats survive.
/// Field report 36: nor does anything care where characters begin.
#[test]
fn bodies_arrive_byte_for_byte() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    let bodies = [
        "{\"mock\":{\"echo_body\":true}}".to_owned(),
        " \r\n\t{ \"mock\" : {\"echo_body\" : true } ,\n\n\"model\"  :\t\"mock\", \"model\":\"mock\" }\r\n ".to_owned(),
        "{\"prompt\":\"h\\u00e9llo \u{1f600} \\ud83d\\ude00 \\\" \\/ \u{7f}\",\"mock\":{\"echo_body\":true},\"a\":[1e5,-0.0,1.0E+2,10000000000000000000000001],\"a\":{}}".to_owned(),
        format!("{{\"{}\":{{\"{}\":null}},\"mock\":{{\"echo_body\":true}}}}", "\u{4e2d}".repeat(5000), "\\u4e2d".repeat(500)),
    ];
    for body in &bodies {
        let answer = http.ask("POST", "/v1/completions", &[], body.as_bytes()).expect(200);
        assert!(answer.body == body.as_bytes(), "{body}");
        assert!(rig.stats(0).last.unwrap().body == body.as_bytes());
    }
    // Characters are cut anywhere on the way.
    let bytes = request("POST", "/v1/completions", &[], bodies[3].as_bytes());
    for piece in bytes.chunks(997) {
        http.send(piece);
        std::thread::yield_now();
    }
    assert!(http.answer().expect(200).body == bodies[3].as_bytes());
}

#[test]
fn request_headers_pass_but_for_those_of_the_hop() {
    let rig = Rig::new(1);
    let fields = [
        ("X-Multi", "a"),
        ("x-multi", "b, c"),
        ("X-Multi", ""),
        ("Cookie", "k=v; \"q\""),
        ("Authorization", "Bearer client"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("X-Odd", "tab\tinside  and  spaces"),
        ("Connection", "keep-alive, X-Hop"),
        ("X-Hop", "1"),
        ("Keep-Alive", "timeout=5"),
        ("TE", "trailers"),
        ("Trailer", "x-t"),
        ("Proxy-Authorization", "Basic eA=="),
        ("Proxy-Connection", "keep-alive"),
        ("Upgrade", "h2c"),
        ("X-Corelane-Anything", "1"),
        ("x-data-parallel-rank", "1"),
        ("X-Forwarded-For", "1.2.3.4"),
        ("X-Forwarded-For", "5.6.7.8"),
    ];
    let answer = rig.http().ask("POST", "/v1/completions?x=%20&y=1", &fields, ECHO).expect(200);
    let echo = answer.json();
    assert_eq!(echo["target"], "/v1/completions?x=%20&y=1");
    assert_eq!(echo["head"][0], "POST /v1/completions?x=%20&y=1 HTTP/1.1");
    assert_eq!(seen(&echo, "host"), ["localhost"]);
    assert_eq!(seen(&echo, "x-multi"), ["a", "b, c", ""]);
    assert_eq!(seen(&echo, "x-odd"), ["tab\tinside  and  spaces"]);
    assert_eq!(seen(&echo, "authorization"), ["Bearer client"]);
    for (name, value) in [fields[3], fields[5]] {
        assert_eq!(seen(&echo, name), [value]);
    }
    assert_eq!(seen(&echo, "x-forwarded-for"), ["1.2.3.4, 5.6.7.8, 127.0.0.1"]);
    assert_eq!(seen(&echo, "x-forwarded-proto"), ["http"]);
    for (name, _) in &fields[7..17] {
        assert!(seen(&echo, name).is_empty(), "{name}: {echo}");
    }
    assert_eq!(seen(&echo, "content-length"), [ECHO.len().to_string()]);
    assert!(rig.http().ask("POST", "/generate", &[("x-forwarded-proto", "https")], ECHO).text().contains("https"));
}

#[test]
fn answer_headers_pass_but_for_those_of_the_hop() {
    let rig = Rig::new(1);
    let headers = json!([
        ["set-cookie", "a=1"],
        ["Set-Cookie", "b=2"],
        ["X-Odd", "x  y"],
        ["x-hop", "1"],
        ["connection", "x-hop"],
        ["keep-alive", "timeout=5"],
        ["proxy-authenticate", "Basic"],
        ["x-corelane-secret", "1"],
        ["retry-after", "7"],
        ["x-should-retry", "false"],
        ["x-request-id", "the-workers"],
    ]);
    let mut http = rig.http();
    let answer = http.post("/generate", &json!({"text":"x","mock":{"headers":headers,"status":429}})).expect(429);
    assert_eq!(answer.headers("set-cookie"), ["a=1", "b=2"]);
    assert!(answer.head.contains("\nX-Odd: x  y\n") && answer.head.starts_with("HTTP/1.1 429 Too Many Requests\n"));
    assert_eq!((answer.header("retry-after"), answer.header("x-should-retry")), (Some("7"), Some("false")));
    for name in ["x-hop", "connection", "keep-alive", "proxy-authenticate", "x-corelane-secret", "x-corelane-error"] {
        assert!(answer.headers(name).is_empty(), "{name}: {}", answer.head);
    }
    assert!(answer.header("x-request-id").is_some_and(|id| id != "the-workers"));
    assert!(answer.text().contains("The mock was asked to refuse."));
    http.post("/generate", &json!({"text":"x"})).expect(200);
}

#[test]
fn request_ids_are_taken_over_or_made() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    let mut ask = |fields: &[(&str, &str)]| -> (String, String) {
        let answer: Answer = http.ask("POST", "/generate", fields, ECHO).expect(200);
        let id = answer.header("x-request-id").unwrap().to_owned();
        let echo = answer.json();
        assert_eq!(seen(&echo, "x-request-id"), [id.as_str()]);
        (id, echo.to_string())
    };
    let (one, _) = ask(&[]);
    let (two, _) = ask(&[]);
    assert!(one != two && one.len() == 32 && one.bytes().all(|b| b.is_ascii_hexdigit()));
    assert_eq!(ask(&[("X-Request-Id", "mine-1")]).0, "mine-1");
    for name in ["x-correlation-id", "X-Trace-Id", "request-id"] {
        let (id, echo) = ask(&[(name, "other-1")]);
        assert_eq!(id, "other-1");
        assert!(echo.contains(&format!("{name}: other-1")), "the other name passes too: {echo}");
    }
    assert_eq!(ask(&[("request-id", "later"), ("x-request-id", "first")]).0, "first");
    assert_eq!(ask(&[("x-request-id", "has space"), ("x-trace-id", "usable")]).0, "usable");
    assert_eq!(ask(&[("x-request-id", &"long".repeat(100))]).0.len(), 32);
}

/// Field report 31, and its other half: a worker's key reaches the worker and nobody else.
#[test]
fn a_workers_key_replaces_the_clients() {
    let settings = Settings { api_key: Some("sk-worker".into()), ..Settings::default() };
    let rig = Rig::with(settings, 1, |c| c.workers[0].api_key = Some("sk-worker".into()));
    for fields in [&[][..], &[("Authorization", "Bearer sk-client"), ("authorization", "Bearer again")]] {
        let echo = rig.http().ask("POST", "/generate", fields, ECHO).expect(200).json();
        assert_eq!(seen(&echo, "authorization"), ["Bearer sk-worker"]);
    }
}

fn chunked(body: &[u8], size: usize, extra: &str) -> Vec<u8> {
    let mut out =
        format!("POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n{extra}\r\n").into_bytes();
    for piece in body.chunks(size) {
        out.extend_from_slice(format!("{:X};ext=\"1\"\r\n", piece.len()).as_bytes());
        out.extend_from_slice(piece);
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(b"0\r\nx-trailer: gone\r\n\r\n");
    out
}

#[test]
fn a_chunked_body_is_sent_on_with_its_length() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    let body = format!(r#"{{"padding":"{}","mock":{{"echo":true}}}}"#, "z".repeat(100_000)).into_bytes();
    for size in [1, 7, 4096, 65_536, 1 << 20] {
        let body = if size < 10 { ECHO } else { &body };
        let echo = http.send(&chunked(body, size, "")).answer().expect(200).json();
        assert_eq!(seen(&echo, "content-length"), [body.len().to_string()]);
        assert!(seen(&echo, "transfer-encoding").is_empty() && echo["trailers"] == json!([]));
        assert_eq!(echo["body_fnv1a64"], format!("{:016x}", fnv1a64(body)));
    }
}

/// Field report 35.
#[test]
fn a_body_of_twenty_megabytes_arrives_whole() {
    let rig = Rig::new(1);
    let mut body = br#"{"mock":{"echo":true},"images":""#.to_vec();
    let mut rng = fastrand::Rng::with_seed(20);
    body.extend((0..20 << 20).map(|_| rng.u8(b'0'..=b'9')));
    body.extend_from_slice(b"\"}");
    let hash = format!("{:016x}", fnv1a64(&body));
    let mut http = rig.http();
    let echo = http.ask("POST", "/v1/chat/completions", &[], &body).expect(200).json();
    assert_eq!((&echo["body_length"], &echo["body_fnv1a64"]), (&body.len().into(), &hash.clone().into()));
    let echo = http.send(&chunked(&body, 123_456, "")).answer().expect(200).json();
    assert_eq!((&echo["body_length"], &echo["body_fnv1a64"]), (&body.len().into(), &hash.into()));
    rig.settles();
    assert_eq!(rig.gateway.shared().memory.claimed(), 0);
}

/// Field report 35: the limit is exact, its answer is JSON and arrives although the body does not fit.
#[test]
fn the_payload_limit_is_exact() {
    const MAX: usize = 50_000;
    let rig = Rig::with(Settings::default(), 1, |c| c.max_payload_bytes = MAX as u64);
    let body = |len: usize| {
        let around = r#"{"mock":{"echo":true},"p":""}"#.len();
        format!(r#"{{"mock":{{"echo":true}},"p":"{}"}}"#, "p".repeat(len - around)).into_bytes()
    };
    let mut http = rig.http();
    assert_eq!(http.ask("POST", "/generate", &[], &body(MAX)).expect(200).json()["body_length"], MAX);
    assert_eq!(http.send(&chunked(&body(MAX), 999, "")).answer().expect(200).json()["body_length"], MAX);
    let before = rig.received();
    for len in [MAX + 1, MAX + 400_000] {
        let mut http = rig.http();
        http.ask("POST", "/generate", &[], &body(len)).expect_error(413, "body_too_large");
        http.expect_closed();
        let mut http = rig.http();
        http.send(&chunked(&body(len), 999, "")).answer().expect_error(413, "body_too_large");
        http.expect_closed();
    }
    // Nobody waits for a chunk that would not fit.
    for promised in [MAX as u64 - 9, 1 << 63, u64::MAX] {
        let head = "POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\na\r\n{\"text\":\"a\r\n";
        let mut http = rig.http();
        http.send(format!("{head}{promised:x}\r\na").as_bytes()).answer().expect_error(413, "body_too_large");
    }
    // Who asks first is not invited.
    let mut http = rig.http();
    http.send(
        format!("POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: {}\r\nExpect: 100-continue\r\n\r\n", MAX + 1)
            .as_bytes(),
    );
    let head = http.head().unwrap();
    assert_eq!(head.status, 413, "{}", head.head);
    assert_eq!(rig.received(), before);
    rig.post("/generate", &json!({"text":"x"})).expect(200);
}

/// A refusal reaches a client that sends everything first and reads then, as most do.
#[test]
fn a_refusal_reaches_a_client_in_mid_upload() {
    let rig = Rig::with(Settings::default(), 1, |c| c.max_payload_bytes = 1 << 20);
    let mut http = rig.http();
    let body = vec![b' '; 24 << 20];
    let bytes = request("POST", "/generate", &[], &body);
    std::io::Write::write_all(&mut http.stream, &bytes).expect("the upload is not reset");
    http.answer().expect_error(413, "body_too_large");
}

/// Memory for bodies has a limit, and what counts is what has come, not what was promised.
#[test]
fn bodies_share_their_memory() {
    let rig = Rig::with(Settings::default(), 1, |c| c.body_memory_bytes = 4 << 20);
    let promise = b"POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 3500000\r\n\r\n{\"text\":\"";
    let mut promises: Vec<_> = (0..8).map(|_| rig.http()).collect();
    for http in &mut promises {
        http.send(promise);
    }
    std::thread::sleep(std::time::Duration::from_millis(100));
    let body = |mib: usize| json!({"padding":"m".repeat(mib << 20)});
    let mut http = rig.http();
    http.post("/generate", &body(3)).expect(200);
    http.post("/generate", &body(5)).expect_error(503, "out_of_buffers");
    http.expect_closed();
    drop(promises);
    rig.settles();
    crate::rig::until("all of it is given back", || rig.gateway.shared().memory.claimed() == 0);
    rig.post("/generate", &body(3)).expect(200);
    // A body with members that no worker may see is held twice: as it came, and without them.
    let private = |mib: usize| json!({"padding":"m".repeat(mib << 20),"bootstrap_room":7});
    rig.post("/generate", &private(3)).expect_error(503, "out_of_buffers");
    rig.post("/generate", &private(1)).expect(200);
    crate::rig::until("all of it is given back", || rig.gateway.shared().memory.claimed() == 0);
}
