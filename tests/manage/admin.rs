//! The admin listener as its clients see it.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use corelane::config::{Backend, Policy, Role, Secret};
use corelane::limits::MAX_ADMIN_CONNECTIONS;
use corelane::mock::{self, Settings};
use serde_json::{Value, json};

use crate::rig::{self, Answer, Http, Rig, until};

/// A client of the admin listener that is no browser.
#[derive(Clone)]
pub struct Client {
    pub to: SocketAddr,
    pub fields: Vec<(&'static str, &'static str)>,
}

impl Client {
    pub fn of(rig: &Rig) -> Client {
        Client { to: rig.gateway.admin(), fields: vec![("Host", "localhost")] }
    }

    fn with(&self, name: &'static str, value: &'static str) -> Client {
        let mut fields = self.fields.clone();
        fields.retain(|(known, _)| *known != name);
        fields.push((name, value));
        Client { fields, ..self.clone() }
    }

    /// A request with a body, or without one if it is empty.
    pub fn raw(&self, method: &str, path: &str, body: &str) -> Answer {
        let mut text = format!("{method} {path} HTTP/1.1\r\nContent-Length: {}\r\n", body.len());
        if !body.is_empty() && !self.fields.iter().any(|(name, _)| *name == "Content-Type") {
            text += "Content-Type: application/json\r\n";
        }
        for (name, value) in &self.fields {
            text += &format!("{name}: {value}\r\n");
        }
        Http::connect(self.to).send(format!("{text}\r\n{body}").as_bytes()).answer_to(method)
    }

    pub fn get(&self, path: &str) -> Answer {
        self.raw("GET", path, "")
    }

    pub fn send(&self, method: &str, path: &str, body: &Value) -> Answer {
        self.raw(method, path, &body.to_string())
    }

    #[track_caller]
    fn refused(&self, method: &str, path: &str, body: &str, status: u16, says: &str) {
        let answer = self.raw(method, path, body);
        assert_eq!(answer.status, status, "{method} {path} {body}: {}", answer.text());
        let message = answer.json()["error"]["message"].as_str().expect("a message").to_owned();
        assert!(message.contains(says), "{method} {path} {body}: {message}");
    }

    pub fn is_ready(&self, name: &str) -> bool {
        let answer = self.get(&format!("/workers/{name}"));
        answer.status == 200 && answer.json()["state"] == "ready"
    }
}

fn encoded(url: &str) -> String {
    url.replace(':', "%3A").replace('/', "%2F")
}

/// Descriptors are for clients and workers: whoever comes to the admin listener and says nothing gets few of them.
#[test]
fn visitors_that_say_nothing_take_few_descriptors() {
    let rig = Rig::new(1);
    let client = Client::of(&rig);
    let silent: Vec<_> = (0..MAX_ADMIN_CONNECTIONS).map(|_| TcpStream::connect(client.to).unwrap()).collect();
    let mut late = TcpStream::connect(client.to).unwrap();
    late.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    late.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut begun = [0; 12];
    late.read_exact(&mut begun).expect_err("it waits in the kernel for a place");
    drop(silent);
    late.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    late.read_exact(&mut begun).unwrap();
    assert_eq!(&begun, b"HTTP/1.1 200");
}

#[test]
fn workers_are_added_changed_and_removed() {
    let rig = Rig::new(1);
    let more = rig::fleet(Settings { models: vec!["other".into()], ..Settings::default() }, 1);
    let (client, url) = (Client::of(&rig), more.engine(0).url());
    let said = json!({"url": url, "api_key": "sesame", "labels": {"rack": "7"}, "worker_type": "regular"});
    let answer = client.send("POST", "/workers", &said).expect(202);
    let added = answer.json();
    let id = added["id"].as_str().unwrap().to_owned();
    assert_eq!((&added["worker_id"], &added["url"], &added["status"]), (&json!(id), &json!(url), &json!("accepted")));
    assert_eq!(answer.header("location"), Some(&*format!("/workers/{id}")));
    until("it is ready", || client.is_ready(&id));

    let worker = client.get(&format!("/workers/{id}")).expect(200).json();
    assert_eq!((&worker["models"], &worker["model_id"]), (&json!(["other"]), &json!("other")));
    assert_eq!((&worker["source"], &worker["labels"]), (&json!("admin"), &json!({"rack": "7"})));
    for name in [encoded(&url), url.clone(), url.to_uppercase().replace("HTTP", "http") + "/"] {
        assert_eq!(client.get(&format!("/workers/{name}")).expect(200).json()["id"], id, "{name}");
    }
    let ask = json!({"prompt": "x", "model": "other"});
    rig.post("/v1/completions", &ask).expect(200);
    assert!(more.engine(0).stats().last.unwrap().head.contains("Bearer sesame"));

    let all = client.get("/workers").expect(200).json();
    assert_eq!(
        (&all["total"], &all["stats"]["healthy_workers"], &all["stats"]["by_type"]["regular"]),
        (&json!(2), &json!(2), &json!(2))
    );
    assert_eq!(all["stats"]["total_models"], 2);
    for (query, total) in
        [("?model=other", 1), ("?model=x", 0), ("?role=regular&state=ready", 2), ("?state=draining", 0)]
    {
        assert_eq!(client.get(&format!("/workers{query}")).json()["total"], total, "{query}");
    }
    for (query, says) in [
        ("state=xx", "state: \"xx\" is not known; give one of pending, ready, unhealthy, draining"),
        ("state=redy&model=x", "state: \"redy\" is not known; did you mean ready?"),
        ("state=", "state: \"\" is not known"),
        ("role=xx", "role: \"xx\" is not known; give one of regular, prefill, decode"),
        ("worker_type=prefil", "worker_type: \"prefil\" is not known; did you mean prefill?"),
        ("status=ready", "status: no such parameter; the parameters are model, role, worker_type, state"),
    ] {
        client.refused("GET", &format!("/workers?{query}"), "", 400, says);
    }
    assert_eq!(client.get("/list_workers").json()["urls"].as_array().unwrap().len(), 2);

    client.refused("POST", "/workers", &said.to_string(), 409, "already known");
    let other_role = json!({"url": url, "role": "decode"}).to_string();
    client.refused("POST", "/workers", &other_role, 409, "one address has one role");

    let changed =
        client.send("PATCH", &format!("/workers/{id}"), &json!({"labels": {}, "api_key": null, "models": ["alias"]}));
    let changed = changed.expect(200).json();
    assert_eq!((&changed["id"], &changed["labels"], &changed["models"]), (&json!(id), &json!({}), &json!(["alias"])));
    until("lanes know", || rig.post("/v1/completions", &json!({"prompt": "x", "model": "alias"})).status == 200);
    assert!(!more.engine(0).stats().last.unwrap().head.to_lowercase().contains("authorization"));
    // All of it anew, or (as older clients have it) some of it.
    client.send("PUT", &format!("/workers/{id}"), &json!({"labels": {"a": "b"}})).expect(200);
    let put =
        client.send("PUT", &format!("/workers/{id}"), &json!({"url": url, "models": ["other"]})).expect(200).json();
    assert_eq!((&put["labels"], &put["models"]), (&json!({}), &json!(["other"])));

    let drained = client.raw("DELETE", &format!("/workers/{}", encoded(&url)), "").expect(202).json();
    assert_eq!((&drained["status"], &drained["worker_id"]), (&json!("draining"), &json!(id)));
    until("it has left", || client.get(&format!("/workers/{id}")).status == 404);
    client.refused("DELETE", &format!("/workers/{id}"), "", 404, "no such worker");
    rig.post("/v1/completions", &ask).expect_error(404, "model_not_found");

    client.raw("POST", &format!("/add_worker?url={}", encoded(&url)), "").expect(202);
    client.raw("DELETE", &format!("/workers/{url}?force=true"), "").expect(200);
    client.raw("POST", &format!("/add_worker?url={url}&model_id=m"), "").expect(202);
    client.raw("POST", &format!("/remove_worker?url={}", encoded(&url)), "").expect(202);
    until("one is left", || client.get("/workers").json()["total"] == 1);
}

#[test]
fn ranks_are_one_worker_and_listed_each() {
    let rig = Rig::new(1);
    let engines = rig::fleet(Settings { dp_size: 2, ..Settings::default() }, 1);
    let (client, url) = (Client::of(&rig), engines.engine(0).url());
    let id = client.send("POST", "/workers", &json!({"url": url, "dp_size": 2})).expect(202).json()["id"].clone();
    let id = id.as_str().unwrap();
    until("they are ready", || client.get("/workers?state=ready").json()["total"] == 3);
    let whole = client.get(&format!("/workers/{id}")).json();
    assert_eq!((&whole["url"], &whole["dp"]), (&json!(url), &json!({"rank": null, "size": 2})));
    let second = client.get(&format!("/workers/{url}@1")).json();
    assert_eq!((&second["worker_id"], &second["dp"]), (&json!(id), &json!({"rank": 1, "size": 2})));
    client.raw("DELETE", &format!("/workers/{}", second["id"].as_str().unwrap()), "").expect(202);
    until("both are gone", || client.get("/workers").json()["total"] == 1);
}

#[test]
fn a_drain_is_seen_and_can_be_ended() {
    let rig = Rig::new(1);
    let (client, url) = (Client::of(&rig), rig.fleet.engine(0).url());
    let path = format!("/workers/{url}");
    let mut http = rig.http();
    http.send(&rig::post(
        "/v1/completions",
        &json!({"prompt": "x", "stream": true, "max_tokens": 400, "mock": {"gap_ms": 5}}),
    ));
    until("it streams", || http.fill().is_ok() && http.buf.len() > 300);
    client.raw("DELETE", &path, "").expect(202);
    client.raw("DELETE", &path, "").expect(202);
    let worker = client.get(&path).expect(200).json();
    assert_eq!(
        (&worker["state"], &worker["draining"]["then"], &worker["in_flight"]),
        (&json!("draining"), &json!("remove"), &json!(1))
    );
    assert!(worker["draining"]["left_s"].as_u64().is_some_and(|left| left > 500), "{worker}");
    assert_eq!(rig.metric(r#"corelane_workers{state="draining"}"#), Some(1.0));
    rig.post("/v1/completions", &json!({"prompt": "x"})).expect_error(503, "no_usable_worker");
    // Somebody has changed their mind.
    client.send("PATCH", &path, &json!({"draining": false})).expect(200);
    until("it is ready", || client.is_ready(&url));
    rig.post("/v1/completions", &json!({"prompt": "x"})).expect(200);
    client.send("PATCH", &path, &json!({"draining": true})).expect(200);
    assert_eq!(client.get(&path).json()["draining"], json!({"since_s": 0, "left_s": null, "then": "stay"}));
    drop(http);
    until("nobody holds it", || rig.in_flight() == 0);
    assert_eq!(client.get(&path).expect(200).json()["state"], "draining");
}

#[test]
fn what_is_wrong_is_told() {
    let rig = Rig::new(1);
    let (client, url) = (Client::of(&rig), rig.fleet.engine(0).url());
    let own = format!("/workers/{url}");
    for (method, path, body, status, says) in [
        ("POST", "/workers", "{}", 400, "url: is missing"),
        ("POST", "/workers", "[]", 400, "no JSON object"),
        ("POST", "/workers", "{\"url\":", 400, "no JSON: EOF"),
        ("POST", "/workers", r#"{"url":"https://a"}"#, 400, "asks for TLS"),
        ("POST", "/workers", r#"{"url":"http://u:secret@a"}"#, 400, "carries user info"),
        ("POST", "/workers", r#"{"url":"http://a","modls":["x"]}"#, 400, "did you mean models?"),
        ("POST", "/workers", r#"{"url":"http://a","draining":true}"#, 400, "takes requests; leave it out"),
        ("POST", "/add_worker", "", 400, "url: is missing"),
        ("POST", "/add_worker?url=http://a&x=1", "", 400, "no such parameter"),
        ("POST", "/remove_worker", "", 400, "url: is missing"),
        ("POST", "/remove_worker?url=http://a", "", 404, "no such worker"),
        ("GET", "/workers?modle=x", "", 400, "the parameters are model"),
        ("GET", "/workers/7-7", "", 404, "no such worker"),
        ("GET", "/workers/nonsense%00%ff", "", 400, ""),
        ("PATCH", "/workers/http://a", "{}", 404, "no such worker"),
        ("PATCH", own.as_str(), r#"{"role":"decode"}"#, 400, "role of a worker cannot be changed: remove it"),
        ("PATCH", own.as_str(), r#"{"url":"http://a"}"#, 400, "url of a worker cannot be changed"),
        ("PATCH", own.as_str(), r#"{"bootstrap_port":1}"#, 400, "is for prefill workers"),
        ("PUT", own.as_str(), r#"{"url":"http://a"}"#, 400, "url of a worker cannot be changed"),
        ("DELETE", &format!("{own}?force=perhaps"), "", 400, "neither true nor false"),
        ("DELETE", "/workers/http://a:1", "", 404, "http://a:1: there is no such worker"),
    ] {
        if says.is_empty() {
            assert_eq!(client.raw(method, path, body).status, status, "{path}");
        } else {
            client.refused(method, path, body, status, says);
        }
    }
    let long = json!({"url": "http://a", "labels": {"x": "y".repeat(300_000)}}).to_string();
    client.refused("POST", "/workers", &long, 413, "longer than");
    let told = client.raw("POST", "/workers", r#"{"url":"http://u:secret@a","api_key":"a secret"}"#).text();
    assert!(!told.contains("secret"), "{told}");
    assert_eq!(client.get("/workers").json()["total"], 1);
}

#[test]
fn who_has_no_token_manages_nothing() {
    let rig = Rig::with(Settings::default(), 1, |config| config.admin_token = Some(Secret::new("s3same")));
    let client = Client::of(&rig);
    for path in ["/health", "/liveness", "/readiness", "/metrics"] {
        client.get(path).expect(200);
    }
    for (method, path) in [
        ("GET", "/workers"),
        ("POST", "/workers"),
        ("GET", "/workers/0-1"),
        ("DELETE", "/workers/0-1"),
        ("PATCH", "/workers/0-1"),
        ("POST", "/flush_cache"),
        ("GET", "/get_loads"),
        ("GET", "/engine_metrics"),
        ("GET", "/list_workers"),
        ("POST", "/add_worker?url=http://a"),
        ("POST", "/remove_worker?url=http://a"),
    ] {
        for bad in
            [None, Some("Bearer s3sam"), Some("Bearer s3same2"), Some("Bearer "), Some("Basic s3same"), Some("s3same")]
        {
            let client = bad.map_or(client.clone(), |bad| client.with("Authorization", bad));
            let answer = client.raw(method, path, "");
            assert_eq!((answer.status, answer.header("www-authenticate")), (401, Some("Bearer")), "{method} {path}");
        }
    }
    assert_eq!(rig.gateway.shared().roster.snapshot().workers.len(), 1);
    // With the token, the name of the host does not matter.
    let known = client.with("Authorization", "bearer s3same").with("Host", "admin.example");
    assert_eq!(known.get("/workers").expect(200).json()["total"], 1);
    known.raw("DELETE", "/workers/0-1", "").expect(202);
}

#[test]
fn web_pages_manage_nothing() {
    let rig = Rig::new(1);
    let client = Client::of(&rig);
    let worker = r#"{"url":"http://10.0.0.1"}"#;
    let page = client.with("Origin", "http://localhost");
    for (method, path, body) in [
        ("POST", "/workers", worker),
        ("POST", "/flush_cache", ""),
        ("POST", "/add_worker?url=http://a", ""),
        ("DELETE", "/workers/0-1", ""),
    ] {
        page.refused(method, path, body, 403, "without an Origin");
    }
    for kind in ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""] {
        client.with("Content-Type", kind).refused("POST", "/workers", worker, 415, "application/json");
    }
    client.with("Content-Type", "Application/JSON; charset=utf-8").raw("POST", "/workers", worker).expect(202);
    // A name that somebody else can let point here.
    for host in ["evil.example:29000", "localhost.evil.example", "127.0.0.1.evil.example"] {
        client.with("Host", host).refused("GET", "/workers", "", 421, "IP address or localhost");
    }
    for host in ["127.0.0.1:29000", "[::1]:29000", "LOCALHOST"] {
        client.with("Host", host).get("/workers").expect(200);
    }
    let open = Rig::with(Settings::default(), 1, |config| config.admin_open = true);
    Client::of(&open).with("Host", "corelane.svc:29000").get("/workers").expect(200);
}

#[test]
fn caches_are_flushed_and_prefixes_forgotten() {
    let rig = Rig::with(Settings::default(), 3, |config| {
        config.policy = Policy::CacheAware;
        config.workers[2].backend = Backend::VllmNixl;
    });
    let client = Client::of(&rig);
    let prompt = |i: usize| json!({"model": "mock", "prompt": format!("{i} {}", "word ".repeat(400)), "max_tokens": 1});
    let holder = |i: usize| {
        let before: Vec<u64> = (0..3).map(|at| rig.stats(at).requests).collect();
        rig.post("/v1/completions", &prompt(i)).expect(200);
        (0..3).find(|&at| rig.stats(at).requests > before[at]).unwrap()
    };
    let first: Vec<usize> = (0..9).map(holder).collect();
    assert_eq!((0..9).map(holder).collect::<Vec<_>>(), first, "each prompt goes where it was");
    assert!(rig.metric("corelane_prefix_owners").unwrap() >= 9.0);

    let answer = client.raw("POST", "/flush_cache", "").expect(200).json();
    assert_eq!((answer["successful"].as_array().unwrap().len(), &answer["failed"]), (2, &json!([])));
    let flushed = |i: usize| rig.stats(i).paths.get("/flush_cache").copied().unwrap_or(0);
    assert_eq!([0, 1, 2].map(flushed), [1, 1, 0], "vLLM has no such route");
    until("all is forgotten", || rig.metric("corelane_prefix_owners") == Some(0.0));
    // And learnt anew.
    let second: Vec<usize> = (0..9).map(holder).collect();
    assert_eq!((0..9).map(holder).collect::<Vec<_>>(), second);

    rig.fleet.engine(1).kill();
    let answer = client.raw("POST", "/flush_cache", "");
    assert_eq!(answer.status, 206);
    let answer = answer.json();
    assert_eq!((&answer["successful"], &answer["total_workers"]), (&json!([rig.fleet.engine(0).url()]), &json!(2)));
    assert_eq!(answer["failed"][0][0], json!(rig.fleet.engine(1).url()));
    assert!(answer["failed"][0][1].as_str().unwrap().contains("connect"), "{answer}");
}

#[test]
fn loads_and_metrics_of_all_engines_come_together() {
    let sglang = rig::fleet(Settings { dp_size: 2, ..Settings::default() }, 2);
    let vllm = rig::fleet(Settings { vllm: true, ..Settings::default() }, 1);
    let mut workers = [rig::specs(&sglang), rig::specs(&vllm)].concat();
    workers[2].backend = Backend::VllmNixl;
    workers[0].dp_size = Some(2);
    let gateway = corelane::boot::Gateway::start(rig::config(workers)).unwrap();
    until("usable", || gateway.shared().readiness.snapshot().usable == 4);
    let rig = Rig { gateway, fleet: sglang };
    let client = Client::of(&rig);
    let mut http = rig.http();
    http.send(&rig::post(
        "/v1/completions",
        &json!({"prompt": "x", "stream": true, "max_tokens": 1000, "mock": {"gap_ms": 10}}),
    ));
    until("it streams", || http.fill().is_ok() && http.buf.len() > 300);

    let loads = client.get("/get_loads").expect(200).json();
    assert_eq!(
        (&loads["total_workers"], &loads["successful"], &loads["failed"]),
        (&json!(3), &json!(3), &json!(0)),
        "{loads}"
    );
    let all = loads["loads"].as_array().unwrap();
    let sum = |field: &str| all.iter().map(|load| load[field].as_i64().unwrap()).sum::<i64>();
    assert_eq!((sum("load"), sum("running"), sum("in_flight")), (1, 1, 1), "{loads}");
    assert!(all.iter().all(|load| load["kv_usage"].is_number() && load["error"].is_null()), "{loads}");

    rig.fleet.engine(1).kill();
    let loads = client.get("/get_loads").expect(200).json();
    let dead = rig.fleet.engine(1).url();
    let of_dead = loads["loads"].as_array().unwrap().iter().find(|load| load["worker"] == dead).unwrap();
    assert_eq!((&loads["failed"], &of_dead["load"]), (&json!(1), &json!(-1)));
    assert!(of_dead["error"].as_str().unwrap().contains("connect"), "{loads}");

    let answer = client.get("/engine_metrics").expect(200);
    assert_eq!(answer.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let page = answer.text();
    let types: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    let names: BTreeSet<&str> = types.iter().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(types.len(), names.len(), "each family once:\n{page}");
    for (i, up) in [(0, 1), (1, 0)] {
        assert!(
            page.contains(&format!("corelane_engine_metrics_up{{worker=\"{}\"}} {up}\n", rig.fleet.engine(i).url())),
            "{page}"
        );
    }
    let mut series = BTreeSet::new();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').unwrap();
        assert!(name.contains("{worker=\"http://127.0.0.1:") && value.parse::<f64>().is_ok(), "{line}");
        assert!(series.insert(name), "{line} twice");
    }
    assert!(
        page.contains("sglang:num_running_reqs{worker=") && page.contains("vllm:num_requests_running{worker="),
        "{page}"
    );
}

#[test]
fn pairs_are_built_worker_by_worker() {
    let rig = Rig::new(1);
    let role = |role| Settings { role, models: vec!["paired".into()], ..Settings::default() };
    let [prefill, decode] = [mock::Role::Prefill, mock::Role::Decode].map(|part| rig::fleet(role(part), 1));
    let client = Client::of(&rig);
    let said = json!({"url": prefill.engine(0).url(), "worker_type": "prefill", "bootstrap_port": 8998, "group": "g"});
    client.send("POST", "/workers", &said).expect(202);
    let said = json!({"url": decode.engine(0).url(), "worker_type": "decode", "group": "g"});
    client.send("POST", "/workers", &said).expect(202);
    let shown = client.get(&format!("/workers/{}", prefill.engine(0).url())).json();
    assert_eq!(
        (&shown["role"], &shown["bootstrap_port"], &shown["group"]),
        (&json!(Role::Prefill.name()), &json!(8998), &json!("g"))
    );
    until("the pair serves", || rig.post("/v1/completions", &json!({"prompt": "x", "model": "paired"})).status == 200);
    assert!(decode.engine(0).stats().requests > 0);
    client.raw("DELETE", &format!("/workers/{}", decode.engine(0).url()), "").expect(202);
    until("the pair is gone", || rig.post("/v1/completions", &json!({"prompt": "x", "model": "paired"})).status != 200);
}

#[test]
fn a_gateway_may_start_without_workers() {
    let engines = rig::fleet(Settings::default(), 1);
    let rig = Rig { gateway: rig::start(rig::config(Vec::new())), fleet: engines };
    let client = Client::of(&rig);
    assert_eq!(client.get("/workers").json()["workers"], json!([]));
    assert_eq!(rig.post("/v1/completions", &json!({"prompt": "x"})).status, 503);
    assert_eq!(rig.get("/readiness").status, 503);
    client.send("POST", "/workers", &json!({"url": rig.fleet.engine(0).url()})).expect(202);
    until("it is ready", || rig.get("/readiness").status == 200);
    rig.post("/v1/completions", &json!({"prompt": "x"})).expect(200);
}
