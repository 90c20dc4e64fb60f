//! Which request goes where, and what the gateway says itself.

use corelane::config::{ExtraRoute, WorkerSpec};
use corelane::mock::Settings;
use serde_json::{Value, json};

use crate::rig::{Http, Rig, config, fleet, post, specs, start, until};

#[test]
fn unknown_routes_and_methods_are_refused() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    for path in ["/", "/v1", "/v1/chat/completions/", "/server_info", "/flush_cache", "/mock/stats", "/V1/models"] {
        http.ask("GET", path, &[], b"").expect_error(404, "not_found");
    }
    let answer = http.ask("GET", "/v1/completions", &[], b"").expect_error(405, "method_not_allowed");
    assert_eq!(answer.header("allow"), Some("POST"));
    for method in ["PUT", "DELETE", "PATCH", "OPTIONS"] {
        let answer = http.ask(method, "/v1/models", &[], b"").expect_error(405, "method_not_allowed");
        assert_eq!(answer.header("allow"), Some("GET, HEAD"));
    }
    // A body that nobody wants is not read, so the connection cannot go on.
    http.post("/flush_cache", &json!({})).expect_error(404, "not_found");
    http.expect_closed();
    assert_eq!(rig.received(), 0);
}

/// One client's mistake costs it an answer, not its connection.
#[test]
fn a_bad_body_leaves_the_connection_usable() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    for body in ["", "{", "[]", "{\"a\":1}x", "{'a':1}", "{\"a\":NaN}", "nonsense", "{\"a\":\"\u{1}\"}"] {
        http.ask("POST", "/v1/completions", &[], body.as_bytes()).expect_error(400, "invalid_json");
    }
    http.ask("POST", "/v1/completions", &[], b"{\"a\":\"\xff\"}").expect_error(400, "invalid_json");
    for body in [r#"{"model":1}"#, r#"{"stream":"yes"}"#, r#"{"n":"two"}"#] {
        http.ask("POST", "/v1/completions", &[], body.as_bytes()).expect_error(400, "invalid_field");
    }
    http.send(b"POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{]\r\n0\r\n\r\n");
    http.answer().expect_error(400, "invalid_json");
    assert_eq!(rig.received(), 0);
    http.post("/v1/completions", &json!({"prompt":"x"})).expect(200);
    // Found out while the rest is still coming: answered at once, and the rest is not waited for.
    let long = format!("{{]{}", " ".repeat(400_000));
    let mut http = rig.http();
    http.ask("POST", "/v1/completions", &[], long.as_bytes()).expect_error(400, "invalid_json");
    http.expect_closed();
}

#[test]
fn models_decide_which_worker() {
    let of = |models: &[&str]| Settings {
        models: models.iter().map(|m| (*m).to_owned()).collect(),
        strict_model: true,
        ..Settings::default()
    };
    let (a, b) = (fleet(of(&["alpha", "both"]), 1), fleet(of(&["beta", "both", "org/n\u{e4}me"]), 1));
    let gateway = start(config(specs(&a).into_iter().chain(specs(&b)).collect()));
    let mut http = Http::connect(gateway.address());
    let counts = || (a.engine(0).stats().requests, b.engine(0).stats().requests);
    let mut ask = |body: &str| http.ask("POST", "/v1/completions", &[], body.as_bytes());
    for _ in 0..4 {
        ask(r#"{"model":"alpha","prompt":"x"}"#).expect(200);
    }
    assert_eq!(counts(), (4, 0));
    for body in [r#"{"model":"beta","prompt":"x"}"#, r#"{"prompt":"x","model":"org/n\u00e4me"}"#] {
        ask(body).expect(200);
    }
    ask(r#"{"model":"alpha","prompt":"the last one counts","model":"beta"}"#).expect(200);
    assert_eq!(counts(), (4, 3));
    for _ in 0..8 {
        ask(r#"{"model":"both","prompt":"x"}"#).expect(200);
    }
    let (at_a, at_b) = counts();
    assert!(at_a > 4 && at_b > 3 && at_a + at_b == 15, "{at_a} {at_b}");
    let answer = ask(r#"{"model":"gamma","prompt":"x"}"#).expect_error(404, "model_not_found");
    assert!(answer.text().contains("gamma"));
    ask(r#"{"model":"","prompt":"x"}"#).expect_error(404, "model_not_found");
    assert_eq!(counts(), (at_a, at_b));
    // Without a model any worker does; the engines refuse that themselves here.
    assert_eq!(ask(r#"{"prompt":"x"}"#).status, 404);
    assert_eq!(counts().0 + counts().1, 16);
    let list = http.ask("GET", "/v1/models", &[], b"").expect(200).json();
    let ids: Vec<&str> = list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["alpha", "beta", "both", "org/n\u{e4}me"]);
    assert_eq!(list["object"], "list");
    for path in ["alpha", "%61lpha", "org/n%C3%A4me", "org%2fn%c3%a4me"] {
        let model = http.ask("GET", &format!("/v1/models/{path}"), &[], b"").expect(200).json();
        assert!(list["data"].as_array().unwrap().contains(&model), "{path}: {model}");
    }
    for path in ["gamma", "alph", "alpha%", "org", "org/name"] {
        http.ask("GET", &format!("/v1/models/{path}"), &[], b"").expect_error(404, "model_not_found");
    }

    // Multipart bodies are routed by their part.
    for (model, at) in [("alpha", &a), ("beta", &b)] {
        let before = at.engine(0).stats().requests;
        let body = format!(
            "--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n\0\u{1}--XX--RIFF\r\n\
             --XX\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n{model}\r\n--XX--\r\n"
        );
        let head = format!(
            "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: g\r\nContent-Type: multipart/form-data; boundary=XX\r\n\
             Content-Length: {}\r\n\r\n",
            body.len()
        );
        // The engine, which reads no models from parts, refuses; that it was asked is what counts.
        assert_eq!(http.send(format!("{head}{body}").as_bytes()).answer().header("server"), Some("uvicorn"));
        let stats = at.engine(0).stats();
        assert_eq!(stats.requests, before + 1);
        assert!(stats.last.unwrap().body == body.as_bytes());
    }
}

#[test]
fn the_default_model_serves_who_names_none() {
    let of = |model: &str| Settings { models: vec![model.to_owned()], ..Settings::default() };
    let (a, b) = (fleet(of("alpha"), 1), fleet(of("beta"), 1));
    let mut config = config(specs(&a).into_iter().chain(specs(&b)).collect());
    config.default_model = Some("beta".into());
    let gateway = start(config);
    for _ in 0..6 {
        Http::connect(gateway.address()).post("/generate", &json!({"text":"x"})).expect(200);
    }
    assert_eq!((a.engine(0).stats().requests, b.engine(0).stats().requests), (0, 6));
}

#[test]
fn extra_routes_pass_and_others_do_not() {
    let rig = Rig::with(Settings::default(), 1, |c| {
        c.extra_routes = vec![
            ExtraRoute { path: "/v1/loads".into(), methods: vec![] },
            ExtraRoute { path: "/abort_request".into(), methods: vec!["POST".into()] },
        ];
    });
    let mut http = rig.http();
    assert!(http.ask("GET", "/v1/loads?x=1", &[], b"").expect(200).json()["loads"].is_array());
    http.ask("POST", "/abort_request", &[], b"not json at all").expect(200);
    let answer = http.ask("GET", "/abort_request", &[], b"").expect_error(405, "method_not_allowed");
    assert_eq!(answer.header("allow"), Some("POST"));
    http.ask("DELETE", "/v1/loads", &[], b"").expect_error(405, "method_not_allowed");
    http.ask("GET", "/metrics", &[], b"").expect_error(404, "not_found");
}

/// Field report 1: what is passed on unread is charged like everything else.
#[test]
fn extra_routes_are_charged() {
    let rig = Rig::with(Settings::default(), 4, |c| {
        c.extra_routes = vec![ExtraRoute { path: "/v1/pooling".into(), methods: vec![] }];
    });
    let hang = json!({"input":"x","mock":{"hang":true}});
    let mut clients: Vec<_> = (0..8).map(|_| rig.http()).collect();
    for http in &mut clients {
        http.send(&post("/v1/pooling", &hang));
    }
    until("each worker has its share", || (0..4).all(|worker| rig.stats(worker).active == 2));
    assert_eq!(rig.in_flight(), 8);
    drop(clients);
    rig.settles();
}

#[test]
fn a_response_is_found_on_the_worker_that_holds_it() {
    let rig = Rig::new(4);
    let mut http = rig.http();
    let ids: Vec<String> = (0..8)
        .map(|_| http.post("/v1/responses", &json!({"input":"x"})).expect(200).json()["id"].as_str().unwrap().into())
        .collect();
    for id in &ids {
        let answer = http.ask("GET", &format!("/v1/responses/{id}"), &[], b"").expect(200);
        assert_eq!(answer.json()["id"], id.as_str());
        let answer = http.ask("POST", &format!("/v1/responses/{id}/cancel"), &[], b"").expect(200);
        assert_eq!(answer.json()["status"], "cancelled");
    }
    let answer = http.ask("GET", "/v1/responses/resp_unknown", &[], b"").expect(404);
    assert!(answer.text().contains("not found"), "{}", answer.text());
    rig.settles();
    let asked = rig.fleet.engines().iter().map(|e| e.stats().paths.get("/v1/responses/resp_unknown").copied());
    let asked: Vec<u64> = asked.flatten().collect();
    println!("asked for an unknown one: {asked:?}");
    assert!(asked.len() == 4 && asked.iter().sum::<u64>() == 4, "every worker is asked once: {asked:?}");
}

/// What any worker may answer does not depend on the default model: an id may be held by a worker of another one.
#[test]
fn the_default_model_is_for_prompts_only() {
    let rig = Rig::with(Settings::default(), 2, |c| {
        c.default_model = Some("a".into());
        (c.workers[0].models, c.workers[1].models) = (vec!["a".into()], vec!["b".into()]);
    });
    let mut http = rig.http();
    let made = http.post("/v1/responses", &json!({"input":"x","model":"b"})).expect(200).json();
    let id = made["id"].as_str().unwrap();
    assert_eq!(http.ask("GET", &format!("/v1/responses/{id}"), &[], b"").expect(200).json()["id"], id);
    http.post("/generate", &json!({"text":"no model"})).expect(200);
    assert_eq!(rig.stats(0).paths.get("/generate"), Some(&1));
    rig.fleet.engine(0).kill();
    http.ask("GET", &format!("/v1/responses/{id}"), &[], b"").expect(200);
    http.ask("GET", "/get_model_info", &[], b"").expect(200);
}

#[test]
fn the_gateway_answers_for_itself() {
    let settings = Settings { api_key: Some("sk-worker".into()), ..Settings::default() };
    let rig = Rig::with(settings, 2, |c| c.workers.iter_mut().for_each(|w| w.api_key = Some("sk-worker".into())));
    for path in ["/health", "/liveness"] {
        assert_eq!(rig.get(path).expect(200).json()["status"], "ok");
    }
    let ready = rig.get("/readiness").expect(200).json();
    assert_eq!((&ready["status"], &ready["workers"]["usable"]), (&json!("ready"), &json!(2)));
    assert_eq!(rig.get("/get_model_info").expect(200).json()["model_path"], "mock");
    assert_eq!(rig.get("/model_info").expect(200).json()["model_path"], "mock");
    rig.get("/health_generate").expect(200);
    let mut info = Value::Null;
    until("server info is learnt", || {
        info = rig.get("/get_server_info").expect(200).json();
        info["workers"].as_array().is_some_and(|w| w.len() == 2)
    });
    let text = info.to_string();
    assert!(!text.contains("sk-") && !text.contains("api_key") && text.contains("dp_size"), "{text}");
    let id = rig.http().ask("GET", "/health", &[("x-request-id", "abc")], b"");
    assert_eq!(id.header("x-request-id"), Some("abc"));
}

#[test]
fn ranks_are_chosen_on_their_own_and_described_once() {
    let engines = fleet(Settings { dp_size: 2, ..Settings::default() }, 1);
    let mut config = config(specs(&engines));
    config.dp_aware = true;
    let gateway = corelane::boot::Gateway::start(config).unwrap();
    until("both ranks are usable", || gateway.shared().readiness.snapshot().usable == 2);
    let mut http = Http::connect(gateway.address());
    for _ in 0..2 {
        http.post("/generate", &json!({"text": "x"})).expect(200);
    }
    let shared = gateway.shared();
    let chosen = |slot| shared.tallies.lanes().iter().map(|lane| lane.selections(slot)).sum::<u64>();
    let workers = shared.roster.snapshot();
    assert_eq!(workers.workers.iter().map(|w| chosen(w.slot)).collect::<Vec<_>>(), [1, 1], "in turn");
    assert_eq!(engines.engine(0).stats().requests, 2, "both stand for one engine");
    let info = http.ask("GET", "/get_server_info", &[], b"").expect(200).json();
    assert_eq!((info["workers"].as_array().unwrap().len(), &info["workers"][0]["dp_size"]), (1, &json!(2)));
    assert_eq!(http.ask("GET", "/v1/models", &[], b"").expect(200).json()["data"].as_array().unwrap().len(), 1);
}

#[test]
fn without_a_usable_worker_it_says_so() {
    let mut config = config(vec![WorkerSpec::new("http://127.0.0.1:1")]);
    config.health_timeout = std::time::Duration::from_millis(200);
    let gateway = corelane::boot::Gateway::start(config).unwrap();
    let mut http = Http::connect(gateway.address());
    let answer = http.post("/generate", &json!({"text":"x"})).expect_error(503, "no_usable_worker");
    assert_eq!(answer.header("retry-after"), Some("1"));
    let ready = http.ask("GET", "/readiness", &[], b"").expect(503).json();
    assert_eq!(ready["status"], "not_ready");
    http.ask("GET", "/health", &[], b"").expect(200);
    assert_eq!(http.ask("GET", "/v1/models", &[], b"").expect(200).json()["data"], json!([]));
    http.ask("GET", "/get_model_info", &[], b"").expect_error(503, "no_usable_worker");
}
