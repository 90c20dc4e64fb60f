//! Keys of clients: who brings none is told so before anything else, and no key goes on to a worker.

use std::time::{Duration, Instant};

use corelane::config::Secret;
use corelane::mock::Settings;
use serde_json::{Value, json};

use crate::rig::{Answer, End, Rig, request};

const OURS: [&str; 3] = ["sk-first", "sk-second-and-longer", "z"];

fn rig() -> Rig {
    Rig::with(Settings::default(), 1, |c| c.api_keys = OURS.map(Secret::new).into())
}

fn refused(answer: Answer) -> Answer {
    let answer = answer.expect_error(401, "invalid_api_key");
    assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
    assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
    assert!(answer.header("x-request-id").is_some());
    answer
}

#[test]
fn every_key_opens_and_nothing_else_does() {
    let rig = rig();
    let mut http = rig.http();
    let body = br#"{"text":"x"}"#;
    for key in OURS {
        let bearer = format!("Bearer {key}");
        for field in [("Authorization", &*bearer), ("authorization", &format!("bEARER  {key}")), ("X-Api-Key", key)] {
            http.ask("POST", "/generate", &[field], body).expect(200);
        }
        // Any right one will do.
        http.ask("POST", "/generate", &[("Authorization", "Basic eDp5"), ("x-api-key", key)], body).expect(200);
        http.ask("POST", "/generate", &[("x-api-key", "wrong"), ("Authorization", &bearer)], body).expect(200);
    }
    let received = rig.received();
    let wrong = [
        "",
        "Bearer",
        "Bearer ",
        "Bearer sk-firs",
        "Bearer sk-first1",
        "Bearer sk-firsT",
        "Bearer sk-second",
        "Bearer sk-first,z",
        "Bearer sk-first z",
        "Basic sk-first",
        "sk-first",
        "Bearersk-first",
        "Bearer \"z\"",
    ];
    for value in wrong {
        let answer = refused(rig.http().ask("POST", "/generate", &[("Authorization", value)], body));
        assert_eq!(answer.header("connection"), Some("close"), "a body that was not read ends the connection");
    }
    for value in ["", "sk-firs", "Bearer z"] {
        refused(rig.http().ask("POST", "/generate", &[("x-api-key", value)], body));
    }
    refused(rig.http().ask("POST", "/generate", &[], body));
    assert_eq!((rig.received(), rig.in_flight()), (received, 0));
    assert_eq!(rig.metric(r#"corelane_faults_total{code="invalid_api_key"}"#), Some((wrong.len() + 4) as f64));
}

#[test]
fn only_the_health_of_the_gateway_is_open() {
    let rig = rig();
    let key = ("Authorization", "Bearer z");
    for path in ["/health", "/liveness", "/readiness"] {
        for method in ["GET", "HEAD"] {
            assert_eq!(rig.http().ask(method, path, &[], b"").expect(200).status, 200);
        }
        rig.http().ask("PUT", path, &[], b"").expect_error(405, "method_not_allowed");
    }
    let mut http = rig.http();
    for path in
        ["/v1/models", "/get_server_info", "/get_model_info", "/health_generate", "/v1/responses/r", "/nowhere", "/"]
    {
        let answer = refused(http.ask("GET", path, &[], b""));
        assert_eq!(answer.header("connection"), None, "{path}: without a body the connection lives on");
        let head = http.ask("HEAD", path, &[], b"");
        assert_eq!((head.status, head.header("www-authenticate")), (401, Some("Bearer")), "{path}");
        let known = http.ask("GET", path, &[key], b"");
        assert_ne!(known.status, 401, "{path}");
    }
    // What exists is not told to strangers either.
    refused(http.ask("GET", "/v1/chat/completions", &[], b""));
    http.ask("GET", "/v1/chat/completions", &[key], b"").expect_error(405, "method_not_allowed");
    http.ask("GET", "/nowhere", &[key], b"").expect_error(404, "not_found");
}

fn lines(answer: &Answer) -> Vec<String> {
    let v: Value = answer.json();
    v["head"].as_array().unwrap().iter().map(|l| l.as_str().unwrap().to_ascii_lowercase()).collect()
}

#[test]
fn keys_go_no_further() {
    let echo = json!({"text":"x","mock":{"echo":true}}).to_string();
    let fields = [("Authorization", "Bearer sk-first"), ("X-Api-Key", "z"), ("Authorization", "Bearer other")];
    let has = |lines: &[String], start: &str| lines.iter().filter(|l| l.starts_with(start)).count();
    let rig = rig();
    let got = lines(&rig.http().ask("POST", "/generate", &fields, echo.as_bytes()).expect(200));
    assert_eq!((has(&got, "authorization:"), has(&got, "x-api-key:")), (0, 0), "{got:?}");

    let rig = Rig::with(Settings { api_key: Some("engine".into()), ..Settings::default() }, 1, |c| {
        c.api_keys = OURS.map(Secret::new).into();
        c.workers[0].api_key = Some("engine".into());
    });
    let got = lines(&rig.http().ask("POST", "/generate", &fields, echo.as_bytes()).expect(200));
    assert_eq!((has(&got, "authorization: bearer engine"), has(&got, "authorization:")), (1, 1), "{got:?}");
    assert_eq!(has(&got, "x-api-key:"), 0, "{got:?}");

    // Without keys of the gateway's own they are the worker's.
    let rig = Rig::new(1);
    let got = lines(&rig.http().ask("POST", "/generate", &fields[..2], echo.as_bytes()).expect(200));
    assert_eq!((has(&got, "authorization: bearer sk-first"), has(&got, "x-api-key: z")), (1, 1), "{got:?}");
}

#[test]
fn strangers_are_answered_before_their_body() {
    let rig = rig();
    let head = |more: &str| format!("POST /generate HTTP/1.1\r\nHost: g\r\n{more}\r\n");
    for more in [
        "Content-Length: 1000000\r\n",
        "Transfer-Encoding: chunked\r\n",
        "Expect: 100-continue\r\nContent-Length: 9\r\n",
    ] {
        let begun = Instant::now();
        let mut http = rig.http();
        // No interim answer comes first.
        let answer = http.send(head(more).as_bytes()).head().unwrap();
        assert_eq!(answer.status, 401, "{more}");
        assert!(begun.elapsed() < Duration::from_secs(5), "{more}");
        assert_eq!(answer.header("connection"), Some("close"));
        // Who sends the body all the same still reads the answer.
        http.send(&[b'x'; 200_000]);
        let length = answer.header("content-length").unwrap().parse().unwrap();
        assert!(String::from_utf8_lossy(&http.exactly(length).unwrap()).contains("invalid_api_key"));
        assert_eq!(http.expect_closed(), End::Fin);
    }
    assert_eq!((rig.received(), rig.gateway.shared().memory.claimed()), (0, 0));
    // A pipeline goes on behind a refusal that has no body.
    let mut bytes = request("GET", "/v1/models", &[], b"");
    bytes.extend(request("GET", "/v1/models", &[("x-api-key", "z")], b""));
    let mut http = rig.http();
    refused(http.send(&bytes).answer_to("GET"));
    http.answer_to("GET").expect(200);
}

/// Only who knows the secret chooses the worker, and the secret goes no further.
#[test]
fn naming_a_worker_needs_the_secret() {
    let rig = Rig::with(Settings::default(), 3, |c| c.target_worker_secret = Some(Secret::new("open")));
    let body = br#"{"text":"x","mock":{"echo":true}}"#;
    let url = rig.fleet.urls()[1].clone();
    let asks = |fields: &[(&str, &str)]| {
        (0..6).map(|_| rig.http().ask("POST", "/generate", fields, body).expect(200).json()).collect::<Vec<Value>>()
    };
    let named = rig.fleet.engine(1).addr().port();
    let target = ("x-smg-target-worker", &*url);
    for echo in asks(&[target, ("x-corelane-target-secret", "open")]) {
        assert_eq!(echo["port"], named);
        assert!(!echo["head"].to_string().contains("open") && !echo["head"].to_string().contains("target-worker"));
    }
    for fields in
        [&[target][..], &[target, ("x-corelane-target-secret", "opem")], &[target, ("x-corelane-key", "open")]]
    {
        assert!(asks(fields).iter().any(|echo| echo["port"] != named), "{fields:?}");
    }
}
