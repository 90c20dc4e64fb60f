//! The control plane against scripted workers on real sockets.
//!
//! Takes nothing, gives verdicts. Never waits a fixed time for something to happen; where something must *not*
//! happen, the wait is short and says so.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use corelane::config::{Backend, Config, Role, WorkerSpec};
use corelane::control::exposition::Exposition;
use corelane::control::fleet::{Fleet, News, Refusal};
use corelane::control::{Pace, Running, run, run_at};
use corelane::fault::What;
use corelane::metrics::{Scale, Tally, Time, table};
use corelane::mock;
use corelane::shared::Shared;
use corelane::shared::drain::Phase;
use corelane::shared::roster::{DpRank, Worker};
use corelane::shared::vitals::Health;

const FAST: Pace = Pace {
    readiness_wait: Duration::from_millis(600),
    eager: Duration::from_millis(30),
    unhealthy_probe: Duration::from_millis(30),
    look_up_again: Duration::from_millis(50),
    learn_grace: Duration::from_millis(200),
    load_counts: Duration::from_secs(1),
};

fn config(workers: Vec<WorkerSpec>) -> Config {
    Config {
        port: 0,
        metrics_port: 0,
        health_interval: Duration::from_millis(40),
        health_timeout: Duration::from_millis(500),
        shutdown_settle: Duration::ZERO,
        shutdown_grace: Duration::ZERO,
        ..Config::with_workers(workers)
    }
}

fn spec(url: &str, role: Role) -> WorkerSpec {
    WorkerSpec { role, ..WorkerSpec::new(url) }
}

/// What a scripted worker does with a path.
#[derive(Clone)]
enum Deed {
    Answer(u16, String),
    /// Head and half a body, then silence.
    Stall,
    /// Takes the request and says nothing.
    Silence,
}

/// A worker that does what it was told and remembers what it was asked. Unknown paths are 404.
#[derive(Clone)]
struct Script {
    url: String,
    deeds: Arc<Mutex<HashMap<String, Deed>>>,
    /// (path, Authorization)
    asked: Arc<Mutex<Vec<(String, String)>>>,
}

impl Script {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let script = Script {
            url: format!("http://{}", listener.local_addr().unwrap()),
            deeds: Arc::default(),
            asked: Arc::default(),
        };
        let this = script.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(this.accept(listener));
        });
        script
    }

    /// Healthy, with one model.
    fn healthy(model: &str) -> Self {
        let script = Script::new();
        script.on("/health", 200, "");
        script.on("/v1/models", 200, &models(&[model]));
        script
    }

    fn on(&self, path: &str, status: u16, body: &str) {
        self.does(path, Deed::Answer(status, body.into()));
    }

    fn does(&self, path: &str, deed: Deed) {
        self.deeds.lock().unwrap().insert(path.into(), deed);
    }

    fn times(&self, path: &str) -> usize {
        self.asked.lock().unwrap().iter().filter(|(p, _)| p == path).count()
    }

    async fn accept(self, listener: TcpListener) {
        listener.set_nonblocking(true).unwrap();
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        loop {
            let (socket, _) = listener.accept().await.unwrap();
            tokio::spawn(self.clone().answer(socket));
        }
    }

    async fn answer(self, mut socket: tokio::net::TcpStream) -> io::Result<()> {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(socket.read_u8().await?);
        }
        let head = String::from_utf8(head).unwrap();
        let path = head.split(' ').nth(1).unwrap().to_string();
        let field = |name: &str| {
            let mut lines = head.lines().filter_map(|l| l.split_once(": "));
            lines.find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.to_string()).unwrap_or_default()
        };
        assert_eq!(field("host").rsplit(':').next(), self.url.rsplit(':').next(), "{head}");
        self.asked.lock().unwrap().push((path.clone(), field("authorization")));
        let deed = self.deeds.lock().unwrap().get(&path).cloned().unwrap_or(Deed::Answer(404, String::new()));
        match deed {
            Deed::Answer(status, body) => {
                let text = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n{body}", body.len());
                socket.write_all(text.as_bytes()).await?;
            }
            Deed::Stall => {
                socket.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{\"da").await?;
                let _ = socket.read_u8().await;
            }
            Deed::Silence => drop(socket.read_u8().await),
        }
        Ok(())
    }
}

fn models(names: &[&str]) -> String {
    let list: Vec<String> = names.iter().map(|n| format!(r#"{{"id":"{n}","object":"model"}}"#)).collect();
    format!(r#"{{"object":"list","data":[{}]}}"#, list.join(","))
}

/// A control plane on a thread of its own; dropping it ends it.
struct Plane {
    shared: &'static Shared,
    admin: SocketAddr,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Plane {
    fn start(config: Config) -> Self {
        let shared = Shared::leak(2);
        let (ready, told) = mpsc::channel();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let thread = std::thread::spawn(move || {
            run_at(FAST, shared, Arc::new(config), ready, async {
                let _ = stopped.await;
            });
        });
        let Running { admin, .. } = told.recv().unwrap().unwrap();
        Plane { shared, admin, stop: Some(stop), thread: Some(thread) }
    }

    fn worker(&self, url: &str) -> Arc<Worker> {
        let snapshot = self.shared.roster.snapshot();
        snapshot.workers.iter().find(|w| &*w.url == url).expect("registered").clone()
    }

    fn health(&self, url: &str) -> Health {
        self.shared.vitals.health(self.worker(url).slot)
    }

    fn models(&self, url: &str) -> Vec<String> {
        self.worker(url).models.iter().map(|m| m.to_string()).collect()
    }

    fn get(&self, path: &str) -> (u16, String, String) {
        ask(self.admin, "GET", path)
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        drop(self.stop.take());
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking(), "the control thread panicked");
    }
}

/// Status, head and body.
fn ask(addr: SocketAddr, method: &str, path: &str) -> (u16, String, String) {
    let mut socket = TcpStream::connect(addr).unwrap();
    write!(socket, "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_ascii_lowercase(), body.into())
}

#[track_caller]
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "not so after 20 s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The one place where time passes for nothing: to see that something stays as it is.
fn a_while() {
    std::thread::sleep(Duration::from_millis(250));
}

#[test]
fn the_first_success_makes_ready_with_models_known() {
    let worker = Script::healthy("m1");
    worker.on("/health", 503, "");
    let plane = Plane::start(config(vec![spec(&worker.url, Role::Regular)]));
    eventually("probed more than once", || worker.times("/health") > 5);
    assert_eq!(plane.health(&worker.url), Health::Pending, "failures do not make a new worker unhealthy");
    assert_eq!(plane.shared.readiness.json(Phase::Serving).0, 503);
    worker.on("/health", 204, "");
    eventually("ready", || plane.health(&worker.url) == Health::Ready);
    assert_eq!(plane.models(&worker.url), ["m1"], "models were learnt before the worker was let in");
    eventually("readiness", || plane.shared.readiness.json(Phase::Serving).0 == 200);
    assert_eq!(plane.shared.readiness.json(Phase::Draining).0, 503);
}

#[test]
fn thresholds_flip_a_worker_out_and_in_and_its_models_are_learnt_anew() {
    let worker = Script::healthy("old");
    let plane = Plane::start(config(vec![spec(&worker.url, Role::Regular)]));
    eventually("ready", || plane.health(&worker.url) == Health::Ready);

    let before = worker.times("/health");
    worker.on("/health", 500, "");
    eventually("unhealthy", || plane.health(&worker.url) == Health::Unhealthy);
    assert!(worker.times("/health") >= before + 3, "three failures in a row");
    eventually("not ready", || plane.shared.readiness.json(Phase::Serving).0 == 503);

    worker.on("/v1/models", 200, &models(&["new", "newer"]));
    worker.on("/health", 200, "ok");
    eventually("ready again", || plane.health(&worker.url) == Health::Ready);
    assert_eq!(plane.models(&worker.url), ["new", "newer"]);
}

#[test]
fn who_answers_clients_is_alive_unless_it_says_otherwise() {
    let worker = Script::healthy("m");
    let mut config = config(vec![spec(&worker.url, Role::Regular)]);
    (config.health_timeout, config.health_failures) = (Duration::from_millis(10), 20);
    let plane = Plane::start(config);
    eventually("ready", || plane.health(&worker.url) == Health::Ready);
    let (slot, lane) = (plane.worker(&worker.url).slot, plane.shared.tallies.lane(0));
    worker.does("/health", Deed::Silence);
    let before = worker.times("/health");
    eventually("many misses", || {
        lane.worker_response(slot, 200);
        worker.times("/health") > before + 30
    });
    assert_eq!(plane.health(&worker.url), Health::Ready, "it has no time for probes because it works");
    eventually("out, since its answers are failures", || {
        lane.worker_response(slot, 500);
        plane.health(&worker.url) == Health::Unhealthy
    });
    worker.on("/health", 200, "");
    eventually("ready again", || plane.health(&worker.url) == Health::Ready);
    worker.on("/health", 503, "");
    eventually("out, since it says so", || {
        lane.worker_response(slot, 200);
        plane.health(&worker.url) == Health::Unhealthy
    });
}

#[test]
fn a_worker_may_have_its_own_probe() {
    let slow = Script::new();
    slow.on("/ready", 200, "");
    slow.on("/v1/models", 200, &models(&["m"]));
    let hasty = Script::new();
    hasty.does("/health", Deed::Silence);
    let mut given = vec![spec(&slow.url, Role::Regular), spec(&hasty.url, Role::Regular)];
    given[0].health_endpoint = Some("/ready".into());
    given[1].health_timeout = Some(Duration::from_millis(20));
    let mut config = config(given);
    config.health_timeout = Duration::from_secs(60);
    let plane = Plane::start(config);
    eventually("ready", || plane.health(&slow.url) == Health::Ready);
    assert_eq!(slow.times("/health"), 0);
    eventually("its timeout is short", || hasty.times("/health") > 3);
    let (_, _, page) = plane.get("/metrics");
    let sample = |to: &str| {
        format!(r#"corelane_worker_health_transitions_total{{worker="{}",role="regular",to="{to}"}} 1"#, slow.url)
    };
    assert!(page.contains(&sample("ready")) && !page.contains(&sample("unhealthy")), "{page}");
}

#[test]
fn single_misses_do_not_flip() {
    let worker = Script::healthy("m");
    let mut config = config(vec![spec(&worker.url, Role::Regular)]);
    config.health_failures = 1000;
    let plane = Plane::start(config);
    eventually("ready", || plane.health(&worker.url) == Health::Ready);
    worker.on("/health", 500, "");
    let before = worker.times("/health");
    eventually("several misses", || worker.times("/health") > before + 4);
    assert_eq!(plane.health(&worker.url), Health::Ready);
}

#[test]
fn models_are_asked_for_until_they_are_known() {
    let worker = Script::healthy("m");
    worker.on("/v1/models", 404, "");
    let plane = Plane::start(config(vec![spec(&worker.url, Role::Regular)]));
    eventually("asked again after 404", || worker.times("/v1/models") > 4);
    assert_eq!(plane.health(&worker.url), Health::Ready, "unknown models do not keep a worker out");
    for bad in ["", "not json", r#"{"data":[]}"#, &format!(r#"{{"data":[{{"id":"{}"}}]}}"#, "x".repeat(2 << 20))] {
        worker.on("/v1/models", 200, bad);
        let before = worker.times("/v1/models");
        eventually("asked again after nonsense", || worker.times("/v1/models") > before + 1);
        assert!(plane.models(&worker.url).is_empty());
    }
    worker.does("/v1/models", Deed::Stall);
    let before = worker.times("/v1/models");
    eventually("asked again after a body that never ends", || worker.times("/v1/models") > before + 1);
    let long = "x".repeat(257);
    worker.on("/v1/models", 200, &models(&["a", &long, "b\\n", "c"]));
    eventually("known", || plane.models(&worker.url) == ["a", "c"]);
    let known = worker.times("/v1/models");
    a_while();
    assert_eq!(worker.times("/v1/models"), known, "known models are not asked for again");
}

#[test]
fn models_from_the_configuration_are_taken_as_they_are() {
    let worker = Script::healthy("other");
    let mut given = spec(&worker.url, Role::Regular);
    given.models = vec!["given".into()];
    let plane = Plane::start(config(vec![given]));
    eventually("ready", || plane.health(&worker.url) == Health::Ready);
    a_while();
    assert_eq!((plane.models(&worker.url), worker.times("/v1/models")), (vec!["given".to_string()], 0));
}

#[test]
fn health_checks_off_means_usable_at_once_and_models_still_learnt() {
    let worker = Script::new();
    let mut config = config(vec![spec(&worker.url, Role::Regular), spec("http://no-such-host.invalid", Role::Regular)]);
    config.health_check = false;
    let plane = Plane::start(config);
    eventually("usable", || plane.health(&worker.url) == Health::Ready);
    worker.on("/v1/models", 200, &models(&["late"]));
    eventually("learnt", || plane.models(&worker.url) == ["late"]);
    assert_eq!(worker.times("/health"), 0);
    assert_eq!(plane.health("http://no-such-host.invalid"), Health::Pending);
    let view = plane.shared.readiness.snapshot();
    assert_eq!((view.configured, view.usable), (2, 1));
}

#[test]
fn names_are_resolved() {
    let worker = Script::healthy("m");
    let port = worker.url.rsplit(':').next().unwrap();
    worker.on("/some/prefix/health", 200, "");
    worker.on("/some/prefix/v1/models", 200, &models(&["under a prefix"]));
    let url = format!("http://localhost:{port}/some/prefix");
    let plane = Plane::start(config(vec![spec(&url, Role::Regular)]));
    eventually("resolved", || !plane.worker(&url).addrs.is_empty());
    let found = plane.worker(&url);
    assert!(found.addrs.iter().all(|a| a.ip().is_loopback() && a.port().to_string() == port), "{:?}", found.addrs);
    assert_eq!(&*found.prefix, "/some/prefix");
    eventually("ready", || plane.health(&url) == Health::Ready);
    assert_eq!(plane.models(&url), ["under a prefix"]);
    eventually("all asked", || worker.times("/some/prefix/server_info") > 0);
    let generation = plane.shared.roster.generation();
    a_while();
    assert_eq!(plane.shared.roster.generation(), generation, "an unchanged answer publishes nothing");
}

#[test]
fn the_workers_own_key_goes_with_every_question() {
    let worker = Script::healthy("m");
    let mut keyed = spec(&worker.url, Role::Regular);
    keyed.api_key = Some("sesame".into());
    let plane = Plane::start(config(vec![keyed]));
    eventually("asked everything", || {
        ["/health", "/v1/models", "/get_server_info", "/server_info"].iter().all(|path| worker.times(path) > 0)
    });
    for (path, key) in worker.asked.lock().unwrap().iter() {
        assert_eq!(key, "Bearer sesame", "{path}");
    }
    let (_, _, list) = plane.get("/workers");
    assert!(!list.contains("sesame") && !plane.get("/metrics").2.contains("sesame"));
}

#[test]
fn server_info_is_filtered_and_its_second_name_is_tried() {
    let old = Script::healthy("m");
    let said = r#"{"api_key":"s3cret","admin_api_key":"s3cret","tp_size":8,"model_path":"/models/m","internal_states":[{"api_key":"s3cret"}]}"#;
    old.on("/get_server_info", 200, said);
    let new = Script::healthy("m");
    new.on("/server_info", 200, r#"{"version":"0.5","nonsense":1}"#);
    let none = Script::healthy("m");
    let plane = Plane::start(config([&old, &new, &none].map(|w| spec(&w.url, Role::Regular)).to_vec()));
    let info = |w: &Script| plane.worker(&w.url).server_info.as_deref().map(str::to_string);
    eventually("both known", || info(&old).is_some() && info(&new).is_some());
    assert_eq!(info(&old).unwrap(), r#"{"model_path":"/models/m","tp_size":8}"#);
    assert_eq!(info(&new).unwrap(), r#"{"version":"0.5"}"#);
    eventually("asked", || none.times("/server_info") > 0);
    assert_eq!(info(&none), None);
    eventually("no harm in having none", || plane.health(&none.url) == Health::Ready);
}

/// A configuration under which engines are asked for their load.
fn monitored(urls: &[&str]) -> Config {
    let mut config = config(urls.iter().map(|url| spec(url, Role::Regular)).collect());
    config.routing.overload_token_usage = 0.8;
    config.routing.max_worker_waiting = 8;
    config.load_monitor_interval = Duration::from_millis(50);
    config
}

fn sglang_load(rank: u32, waiting: u32, usage: f64) -> String {
    format!(r#"{{"dp_rank":{rank},"num_running_reqs":1,"num_waiting_reqs":{waiting},"token_usage":{usage},"new":[1]}}"#)
}

impl Plane {
    fn said(&self, url: &str) -> Option<(Option<f64>, u32)> {
        let said = self.shared.reported.said(self.worker(url).slot)?;
        Some((said.kv_usage(), said.waiting))
    }

    fn is_shed(&self, url: &str) -> bool {
        self.shared.vitals.vital(self.worker(url).slot).is_shed()
    }
}

#[test]
fn engines_are_not_asked_for_their_load_unless_somebody_wants_it() {
    let worker = Script::healthy("m");
    let mut config = config(vec![spec(&worker.url, Role::Regular)]);
    config.load_monitor_interval = Duration::from_millis(20);
    let plane = Plane::start(config);
    eventually("ready", || plane.health(&worker.url) == Health::Ready);
    a_while();
    assert_eq!((worker.times("/v1/loads"), worker.times("/metrics"), plane.said(&worker.url)), (0, 0, None));
    let page = plane.get("/metrics").2;
    assert!(page.contains("corelane_worker_up{") && !page.contains("corelane_worker_kv_usage{"), "{page}");
}

#[test]
fn engines_are_asked_for_their_load_each_in_the_way_that_it_knows() {
    let (new, old, vllm, dumb) =
        (Script::healthy("m"), Script::healthy("m"), Script::healthy("m"), Script::healthy("m"));
    new.on("/v1/loads", 200, &format!(r#"{{"loads":[{}]}}"#, sglang_load(0, 3, 0.25)));
    new.on("/metrics", 200, "sglang:num_running_reqs 1\nsglang:token_usage 0.75\n");
    old.on("/metrics", 200, "sglang:num_running_reqs 1\nsglang:num_queue_reqs 2\nsglang:token_usage 0.5\n");
    let text = "vllm:num_requests_running 1\nvllm:num_requests_waiting 7\nvllm:gpu_cache_usage_perc 0.125\n";
    vllm.on("/metrics", 200, text);
    dumb.on("/v1/loads", 200, "{\"loads\":[");
    dumb.on("/metrics", 200, &"x".repeat(2 << 20));
    let mut config = monitored(&[&new.url, &old.url, &vllm.url, &dumb.url]);
    config.workers[2].backend = Backend::VllmNixl;
    config.workers[1].api_key = Some("sesame".into());
    let plane = Plane::start(config);
    for (worker, said) in [(&new, (Some(0.25), 3)), (&old, (Some(0.5), 2)), (&vllm, (Some(0.125), 7))] {
        eventually("its load is known", || plane.said(&worker.url) == Some(said));
    }
    eventually("asked again and again", || {
        [&new, &dumb].iter().all(|w| w.times("/v1/loads") > 3) && old.times("/metrics") > 3
    });
    assert_eq!((new.times("/metrics"), old.times("/v1/loads"), vllm.times("/v1/loads")), (0, 1, 0), "they learn");
    assert_eq!(plane.said(&dumb.url), None);
    let asked = old.asked.lock().unwrap();
    assert!(asked.iter().filter(|(path, _)| path == "/metrics").all(|(_, key)| key == "Bearer sesame"), "{asked:?}");
    // The worker speaks another way after an upgrade.
    old.on("/metrics", 404, "");
    old.on("/v1/loads", 200, &format!(r#"{{"loads":[{}]}}"#, sglang_load(0, 1, 0.75)));
    drop(asked);
    eventually("it is asked in the other way", || plane.said(&old.url) == Some((Some(0.75), 1)));
}

#[test]
fn a_hot_engine_is_shed_until_it_has_cooled_down_or_its_word_is_old() {
    let (hot, calm) = (Script::healthy("m"), Script::healthy("m"));
    let says = |worker: &Script, waiting: u32, usage: f64| {
        worker.on("/v1/loads", 200, &format!(r#"{{"loads":[{}]}}"#, sglang_load(0, waiting, usage)));
    };
    says(&hot, 0, 0.9);
    says(&calm, 0, 0.5);
    let plane = Plane::start(monitored(&[&hot.url, &calm.url]));
    eventually("shed", || plane.is_shed(&hot.url));
    assert!(!plane.is_shed(&calm.url) && plane.health(&hot.url) == Health::Ready);
    let listed = shown(&plane).into_iter().find(|worker| worker["url"] == *hot.url).unwrap();
    assert_eq!(listed["shed"], true);
    assert!((listed["kv_usage"].as_f64().unwrap() - 0.9).abs() < 1e-4 && listed["waiting"] == 0, "{listed}");
    let shed = |url: &str| {
        parse(&plane.get("/metrics").2)
            .get(&format!("corelane_worker_shed{{worker=\"{url}\",role=\"regular\"}}"))
            .copied()
    };
    assert_eq!((shed(&hot.url), shed(&calm.url)), (Some(1.0), Some(0.0)), "{}", plane.get("/metrics").2);
    says(&hot, 0, 0.8);
    eventually("back", || !plane.is_shed(&hot.url));
    says(&hot, 8, 0.1);
    eventually("shed for those that wait", || plane.is_shed(&hot.url));
    says(&calm, 9, 0.1);
    eventually("if all are, none is", || !plane.is_shed(&hot.url) && !plane.is_shed(&calm.url));
    says(&calm, 0, 0.1);
    eventually("shed again", || plane.is_shed(&hot.url));
    hot.on("/v1/loads", 500, "");
    assert!(plane.is_shed(&hot.url), "its word counts for a while");
    eventually("its word is old", || plane.said(&hot.url).is_none());
    eventually("back", || !plane.is_shed(&hot.url));
    assert!(plane.said(&calm.url).is_some() && shed(&hot.url).is_none());
}

#[test]
fn every_rank_is_judged_by_its_own_load() {
    let engine = Script::healthy("m");
    let loads = |ranks: &[String]| engine.on("/v1/loads", 200, &format!(r#"{{"loads":[{}]}}"#, ranks.join(",")));
    loads(&[sglang_load(1, 9, 0.95), sglang_load(0, 1, 0.5)]);
    let mut config = monitored(&[&engine.url]);
    config.workers[0].dp_size = Some(3);
    let plane = Plane::start(config);
    let rank = |rank: u32| format!("{}@{rank}", engine.url);
    eventually("known", || plane.said(&rank(1)).is_some_and(|(_, waiting)| waiting == 9));
    assert_eq!((plane.said(&rank(0)), plane.said(&rank(2))), (Some((Some(0.5), 1)), None));
    eventually("shed", || plane.is_shed(&rank(1)));
    assert!(!plane.is_shed(&rank(0)) && !plane.is_shed(&rank(2)));
    // A rank of which nothing is said any more is not known any more.
    loads(&[sglang_load(0, 1, 0.5)]);
    eventually("unknown", || plane.said(&rank(1)).is_none() && !plane.is_shed(&rank(1)));
}

#[test]
fn a_dead_worker_is_probed_but_not_usable() {
    let alive = Script::healthy("m");
    let dead = {
        let gone = TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", gone.local_addr().unwrap())
    };
    let plane = Plane::start(config(vec![
        spec(&alive.url, Role::Regular),
        spec(&dead, Role::Regular),
        spec("http://no-such-host.invalid:1", Role::Regular),
    ]));
    eventually("all probed", || plane.shared.readiness.snapshot().probed == 3);
    eventually("one usable", || plane.shared.readiness.snapshot().usable == 1);
    assert_eq!(plane.health(&dead), Health::Pending);
    assert!(plane.worker("http://no-such-host.invalid:1").addrs.is_empty());
    assert_eq!(plane.shared.readiness.json(Phase::Serving).0, 200, "every worker was probed, one is usable");
    // Who waits for a worker is told what it waits for.
    let (_, _, list) = plane.get("/workers");
    let list: serde_json::Value = serde_json::from_str(&list).expect("JSON");
    for (url, why) in [(dead.as_str(), "connect"), ("http://no-such-host.invalid:1", "resolve")] {
        let worker = list["workers"].as_array().unwrap().iter().find(|worker| worker["url"] == url).unwrap();
        assert!(worker["reason"].as_str().is_some_and(|reason| reason.contains(why)), "{worker}");
    }
}

#[test]
fn readiness_waits_for_first_probes_but_not_for_ever() {
    let alive = Script::healthy("m");
    let silent = Script::new();
    silent.does("/health", Deed::Silence);
    let mut config = config(vec![spec(&alive.url, Role::Regular), spec(&silent.url, Role::Regular)]);
    config.health_timeout = Duration::from_secs(60);
    let begun = Instant::now();
    let plane = Plane::start(config);
    eventually("one usable", || plane.shared.readiness.snapshot().usable == 1);
    if begun.elapsed() < FAST.readiness_wait {
        let (status, body) = plane.shared.readiness.json(Phase::Serving);
        // The wait may have ended between the two lines above.
        assert!(status == 503 && body.contains("probed") || begun.elapsed() >= FAST.readiness_wait, "{body}");
    }
    eventually("patience ends", || plane.shared.readiness.json(Phase::Serving).0 == 200);
    assert!(begun.elapsed() >= FAST.readiness_wait);
    assert_eq!(plane.shared.readiness.snapshot().probed, 1);
}

#[test]
fn a_health_body_that_never_ends_is_no_success() {
    let worker = Script::healthy("m");
    worker.does("/health", Deed::Stall);
    let mut config = config(vec![spec(&worker.url, Role::Regular)]);
    config.health_timeout = Duration::from_millis(50);
    let plane = Plane::start(config);
    eventually("probed more than once", || worker.times("/health") > 2);
    assert_eq!(plane.health(&worker.url), Health::Pending);
    worker.on("/health", 200, &"x".repeat(3 << 20));
    eventually("a long one is", || plane.health(&worker.url) == Health::Ready);
}

#[test]
fn publications_ring_every_lane() {
    let worker = Script::healthy("m");
    let plane = Plane::start(config(vec![spec(&worker.url, Role::Regular)]));
    eventually("models published", || !plane.models(&worker.url).is_empty());
    for lane in 0..2 {
        let mut rings = [0; 8];
        eventually("rung", || rustix::io::read(plane.shared.handover.bell(lane), &mut rings).is_ok());
        assert!(u64::from_ne_bytes(rings) >= 1);
    }
}

#[test]
fn the_admin_listener_lists_workers_and_refuses_the_rest() {
    let worker = Script::healthy("m");
    let twice = spec(&worker.url, Role::Prefill);
    let plane = Plane::start(config(vec![twice.clone(), twice, spec(&worker.url, Role::Decode)]));
    eventually("ready", || plane.shared.readiness.snapshot().usable == 2);
    let slot = plane.shared.roster.snapshot().workers[1].slot;
    plane.shared.tallies.lane(0).selected(slot);
    plane.shared.tallies.lane(1).selected(slot);

    let (status, head, body) = plane.get("/workers");
    assert!(status == 200 && head.contains("content-type: application/json"), "{head}");
    let list: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(list["total"], 2, "the same URL in the same role is one worker");
    let second = &list["workers"][1];
    let want = serde_json::json!({
        "id": second["id"], "worker_id": second["id"], "url": worker.url, "role": "decode", "backend": "sglang", "group": "", "dp": null, "models": ["m"], "state": "ready",
        "in_flight": 0, "selected_total": 2, "reason": "its probes succeed", "failures_in_row": 0,
        "breaker": "closed", "breaker_open_s": null, "breaker_trials": 0, "worker_type": "decode", "model_id": "m",
        "bootstrap_port": null, "labels": {}, "source": "config", "is_healthy": true, "draining": null, "load": 0,
        "kv_usage": null, "waiting": null, "shed": false,
        "last_probe_ms_ago": second["last_probe_ms_ago"],
    });
    assert_eq!(*second, want);
    assert_ne!(list["workers"][0]["id"], second["id"]);
    assert!(second["last_probe_ms_ago"].as_u64().is_some_and(|ms| ms < 20_000), "{second}");
    let (status, head, body) = plane.get("/readiness");
    assert!(status == 200 && head.contains("application/json") && body.contains(r#""usable":2"#), "{head}\n{body}");

    assert_eq!(plane.get("/health").0, 200);
    for (method, path, status, code) in [
        ("GET", "/page", 404, "not_found"),
        ("POST", "/", 405, "method_not_allowed"),
        ("POST", "/stats", 405, "method_not_allowed"),
        ("GET", "/v1/models", 404, "not_found"),
        ("DELETE", "/workers", 405, "method_not_allowed"),
        ("GET", "/flush_cache", 405, "method_not_allowed"),
        ("DELETE", "/metrics", 405, "method_not_allowed"),
    ] {
        let (got, head, body) = ask(plane.admin, method, path);
        let body: serde_json::Value = serde_json::from_str(&body).expect("errors are JSON");
        assert_eq!((got, &body["error"]["code"]), (status, &code.into()), "{method} {path}");
        assert_eq!(status == 405, head.contains("\r\nallow: "), "{head}");
    }
}

// ---- pairs and ranks ----

fn shown(plane: &Plane) -> Vec<serde_json::Value> {
    let list: serde_json::Value = serde_json::from_str(&plane.get("/workers").2).unwrap();
    list["workers"].as_array().unwrap().clone()
}

fn readiness(plane: &Plane) -> (u16, serde_json::Value) {
    let (status, body) = plane.shared.readiness.json(Phase::Serving);
    (status, serde_json::from_str(&body).unwrap())
}

#[test]
fn every_rank_of_an_engine_is_a_worker_of_its_own() {
    let engines = mock::Settings { dp_size: 4, ..mock::Settings::default() };
    let engines = mock::Fleet::start(engines, ([127, 0, 0, 1], 0), 1).unwrap();
    let url = engines.urls().remove(0);
    let mut config = config(vec![spec(&url, Role::Regular), spec("http://[::1]:9/x", Role::Decode)]);
    config.workers[1].dp_size = Some(2);
    config.dp_aware = true;
    let plane = Plane::start(config);
    eventually("all ranks are usable", || plane.shared.readiness.snapshot().usable == 4);
    let snapshot = plane.shared.roster.snapshot();
    for rank in 0..4 {
        let worker = plane.worker(&format!("{url}@{rank}"));
        assert_eq!(worker.pairing.dp, Some(DpRank { rank, size: 4 }));
        assert_eq!((&*worker.prefix, worker.addrs.len(), worker.models.len()), ("", 1, 1));
        assert!(url.ends_with(&worker.addrs[0].to_string()));
        assert_eq!(snapshot.worker(worker.slot, worker.era).unwrap().url, worker.url);
    }
    for rank in 0..2 {
        let worker = plane.worker(&format!("http://[::1]:9/x@{rank}"));
        assert_eq!((&*worker.prefix, worker.addrs[0]), ("/x", "[::1]:9".parse().unwrap()));
        assert_eq!((worker.pairing.dp, &*worker.pairing.bootstrap_host), (Some(DpRank { rank, size: 2 }), "[::1]"));
    }
    let list = shown(&plane);
    assert_eq!(list.len(), 6);
    let third = list.iter().find(|w| w["url"] == format!("{url}@2")).unwrap();
    assert_eq!((&third["dp"], &third["group"]), (&serde_json::json!({"rank": 2, "size": 4}), &serde_json::Value::Null));
    assert!(plane.get("/metrics").2.contains(&format!(r#"corelane_worker_up{{worker="{url}@3",role="regular"}} 1"#)));
}

#[test]
fn an_engine_waits_until_its_size_is_known_and_a_new_size_replaces_its_ranks() {
    let worker = Script::healthy("m");
    worker.on("/get_server_info", 503, "");
    let mut config = config(vec![spec(&worker.url, Role::Regular)]);
    config.dp_aware = true;
    let plane = Plane::start(config);
    eventually("asked more often than for a description alone", || worker.times("/get_server_info") > 5);
    eventually("judged", || shown(&plane)[0]["reason"] == "its data-parallel size is not known yet");
    assert_eq!(plane.health(&worker.url), Health::Pending, "its probes succeed, but it has to wait");

    worker.on("/get_server_info", 200, r#"{"dp_size":2}"#);
    eventually("two ranks", || plane.shared.readiness.snapshot().usable == 2);
    let old = plane.worker(&format!("{}@1", worker.url));
    let (probes, began) = (worker.times("/health"), Instant::now());
    a_while();
    let due = began.elapsed().as_millis() as usize / 36 + 2;
    assert!(worker.times("/health") - probes <= due, "one probe an engine, not one a rank");

    worker.on("/health", 500, "");
    eventually("out", || plane.health(&format!("{}@0", worker.url)) == Health::Unhealthy);
    worker.on("/get_server_info", 200, r#"{"dp_size":3}"#);
    worker.on("/health", 200, "");
    eventually("three ranks", || plane.shared.readiness.snapshot().usable == 3);
    let new = plane.worker(&format!("{}@1", worker.url));
    assert_ne!((new.slot, new.era), (old.slot, old.era), "what the old rank knew is forgotten");
    assert_eq!(new.pairing.dp, Some(DpRank { rank: 1, size: 3 }));
    assert_eq!((shown(&plane).len(), plane.shared.readiness.snapshot().configured), (3, 3));
}

#[test]
fn an_engine_that_says_no_size_has_one_rank() {
    let worker = Script::healthy("m");
    let mut config = config(vec![spec(&worker.url, Role::Regular)]);
    config.dp_aware = true;
    let plane = Plane::start(config);
    eventually("usable", || plane.health(&worker.url) == Health::Ready);
    assert_eq!(plane.worker(&worker.url).pairing.dp, None);
}

#[test]
fn a_mooncake_prefill_worker_waits_for_the_id_of_its_engine() {
    let [prefill, bootstrap, decode] = ["m"; 3].map(Script::healthy);
    let port = |script: &Script| script.url.rsplit(':').next().unwrap().parse().unwrap();
    let mut given = [spec(&prefill.url, Role::Prefill), spec(&decode.url, Role::Decode)];
    for worker in &mut given {
        (worker.backend, worker.group) = (Backend::VllmMooncake, "g".into());
    }
    (given[0].bootstrap_port, given[0].dp_size) = (Some(port(&bootstrap)), Some(2));
    given[0].api_key = Some("sesame".into());
    let plane = Plane::start(config(given.to_vec()));
    let rank = |rank: u32| plane.worker(&format!("{}@{rank}", prefill.url));
    eventually("asked again and again", || bootstrap.times("/query") > 3);
    eventually("decode is in", || plane.health(&decode.url) == Health::Ready);
    bootstrap.on("/query", 200, "[]");
    let before = bootstrap.times("/query");
    eventually("asked after nonsense", || bootstrap.times("/query") > before + 2);
    assert_eq!(plane.shared.vitals.health(rank(0).slot), Health::Pending);
    assert_eq!(shown(&plane)[0]["reason"], "Mooncake's id of its engine is not known yet");
    let (status, body) = readiness(&plane);
    assert_eq!((status, &body["reason"]), (503, &"no complete pair: model m: no prefill worker is usable".into()));

    bootstrap.on("/query", 200, r#"{"0":{"engine_id":"e0"},"1":{"engine_id":"e1"}}"#);
    eventually("in", || plane.shared.readiness.snapshot().usable == 3);
    assert_eq!([rank(0), rank(1)].map(|w| w.pairing.engine_id.clone()), [Some("e0".into()), Some("e1".into())]);
    let pairing = rank(0).pairing.clone();
    assert_eq!((&*pairing.bootstrap_host, pairing.mooncake_port()), ("127.0.0.1", port(&bootstrap)));
    assert!(bootstrap.asked.lock().unwrap().iter().all(|(_, key)| key.is_empty()), "the key is the engine's");
    assert_eq!(readiness(&plane).0, 200);

    // Another engine behind the same address is not let in under the old id.
    prefill.on("/health", 500, "");
    eventually("out", || plane.shared.vitals.health(rank(0).slot) == Health::Unhealthy);
    bootstrap.on("/query", 200, r#"{"engine_id":"new"}"#);
    prefill.on("/health", 200, "");
    eventually("in again", || plane.shared.readiness.snapshot().usable == 3);
    eventually("under its new id", || [rank(0), rank(1)].iter().all(|w| w.pairing.engine_id.as_deref() == Some("new")));
}

#[test]
fn readiness_takes_a_complete_pair_for_every_model() {
    let [prefill, decode, lone] = ["m", "m", "n"].map(Script::healthy);
    decode.on("/health", 503, "");
    let workers = [spec(&prefill.url, Role::Prefill), spec(&decode.url, Role::Decode), spec(&lone.url, Role::Regular)];
    let plane = Plane::start(config(workers.to_vec()));
    eventually("two are usable", || plane.shared.readiness.snapshot().usable == 2);
    eventually("probed", || plane.shared.readiness.snapshot().probed == 3);
    let (status, body) = readiness(&plane);
    assert_eq!((status, &body["reason"]), (503, &"no complete pair: model m: no decode worker is usable".into()));
    decode.on("/health", 200, "");
    eventually("ready", || readiness(&plane).0 == 200);
    let team = |role: &str| serde_json::json!({"role": role, "group": "", "backend": "sglang", "configured": 1, "usable": 1, "dp_ranks": 0});
    assert_eq!(readiness(&plane).1["pairs"], serde_json::json!([team("prefill"), team("decode")]));
    let group = |role: &str| shown(&plane).iter().find(|w| w["role"] == role).unwrap()["group"].clone();
    assert_eq!(["regular", "prefill"].map(group), [serde_json::Value::Null, "".into()]);
}

#[test]
fn readiness_of_pairs_minds_groups_and_does_without_models() {
    let shared = Shared::leak(1);
    let mut fleet = Fleet::new(shared);
    let mut register = |role, port: u16, group: &str| {
        let worker = WorkerSpec { group: group.into(), ..spec(&format!("http://10.0.0.1:{port}"), role) };
        let id = fleet.register(&worker).unwrap();
        fleet.apply(id, News::Probed);
        fleet.apply(id, News::Health(Health::Ready, "test".into()));
        id
    };
    register(Role::Prefill, 1, "x");
    let decode = register(Role::Decode, 2, "y");
    fleet.settle();
    let (status, body) = shared.readiness.json(Phase::Serving);
    let lack = "no complete pair: no usable prefill worker shares group and backend with a usable decode worker";
    assert!(status == 503 && body.contains(lack), "{body}");
    fleet.remove(decode);
    let worker = WorkerSpec { group: "x".into(), ..spec("http://10.0.0.1:3", Role::Decode) };
    let id = fleet.register(&worker).unwrap();
    fleet.apply(id, News::Probed);
    fleet.apply(id, News::Health(Health::Ready, "test".into()));
    fleet.settle();
    let (status, body) = shared.readiness.json(Phase::Serving);
    assert_eq!(status, 200, "{body}");
}

#[test]
fn ranks_that_find_no_slot_leave_everything_as_it_was() {
    let shared = Shared::leak(1);
    let mut fleet = Fleet::new(shared).dp_aware(true);
    let large =
        |host: u8| WorkerSpec { dp_size: Some(1024), ..spec(&format!("http://10.0.0.{host}:1"), Role::Regular) };
    let ids: Vec<_> = (0..3).map(|host| fleet.register(&large(host)).unwrap()).collect();
    let waiting = fleet.register(&spec("http://10.0.1.1:1", Role::Regular)).unwrap();
    assert_eq!(fleet.register(&large(9)), Err(Refusal::Full));
    fleet.apply(waiting, News::Health(Health::Ready, "test".into()));
    fleet.settle();
    assert_eq!(shared.roster.snapshot().workers.len(), 3 * 1024 + 1);
    shared.roster.ended(0);
    fleet.apply(waiting, News::Ranks(1025));
    fleet.settle();
    assert_eq!(shared.roster.snapshot().workers.len(), 3 * 1024 + 1, "too many");
    assert!(!shared.vitals.usable(waiting.slot));
    fleet.apply(waiting, News::Ranks(1024));
    fleet.settle();
    assert_eq!((shared.roster.snapshot().workers.len(), shared.readiness.snapshot().usable), (4096, 1024));
    assert!(fleet.remove(ids[0]));
    fleet.settle();
    fleet.apply(waiting, News::Ranks(8));
    fleet.settle();
    assert_eq!((shared.roster.snapshot().workers.len(), shared.readiness.snapshot().usable), (2 * 1024 + 8, 8));
}

#[test]
fn a_taken_admin_port_ends_the_start_with_one_clear_line() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut config = config(vec![]);
    config.metrics_port = taken.local_addr().unwrap().port();
    let (ready, told) = mpsc::channel();
    run(Shared::leak(1), Arc::new(config), ready, std::future::pending());
    let error = told.recv().unwrap().unwrap_err();
    let line = error.to_string();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    assert!(line.contains("--prometheus-port") && line.contains(&taken.local_addr().unwrap().to_string()), "{line}");
    assert!(!line.contains('\n'));
}

#[test]
fn an_idle_admin_connection_does_not_hold_up_the_end() {
    let plane = Plane::start(config(vec![]));
    let idle = TcpStream::connect(plane.admin).unwrap();
    assert_eq!(plane.get("/health").0, 200);
    drop(plane);
    drop(idle);
}

// ---- fleet and exposition, without a thread ----

#[test]
fn removed_workers_vanish_and_old_counts_are_not_inherited() {
    let shared = Shared::leak(2);
    // What an earlier tenant of the first slots left behind.
    for slot in 0..4 {
        shared.tallies.lane(1).selected(slot);
        shared.tallies.lane(1).worker_response(slot, 200);
    }
    let mut fleet = Fleet::new(shared);
    let page = Exposition::new(shared, fleet.bases());
    let a = fleet.register(&spec("http://10.0.0.1:1", Role::Regular)).unwrap();
    let b = fleet.register(&spec("http://10.0.0.2:1", Role::Regular)).unwrap();
    assert_eq!(fleet.register(&spec("http://10.0.0.2:1", Role::Regular)), Err(Refusal::Known));
    for (url, says) in [("ftp://x", "unknown scheme"), ("http://", "host"), ("http://u:key@x", "user info")] {
        let refusal = fleet.register(&spec(url, Role::Regular)).unwrap_err();
        let line = refusal.to_string();
        assert!(matches!(refusal, Refusal::BadUrl(_)) && line.contains(says) && !line.contains("key@"), "{line}");
    }
    assert_eq!(shared.roster.generation(), 0, "nothing is published before the batch is complete");
    fleet.settle();
    assert_eq!(shared.roster.generation(), 1);
    shared.tallies.lane(0).selected(b.slot);

    let series = |url: &str| format!(r#"corelane_worker_selected_total{{worker="{url}",role="regular"}}"#);
    let samples = parse(&page.text());
    assert_eq!(samples[&series("http://10.0.0.1:1")], 0.0);
    assert_eq!(samples[&series("http://10.0.0.2:1")], 1.0);
    assert!(!samples.keys().any(|s| s.starts_with("corelane_worker_responses")), "only what this tenant answered");
    for (lane, status) in [(0, 200), (1, 201), (0, 429), (1, 0)] {
        shared.tallies.lane(lane).worker_response(b.slot, status);
    }
    let samples = parse(&page.text());
    for (status, n) in [("2xx", 2.0), ("429", 1.0), ("cut", 1.0)] {
        let labels = format!(r#"worker="http://10.0.0.2:1",role="regular",status="{status}""#);
        assert_eq!(samples[&format!("corelane_worker_responses_total{{{labels}}}")], n);
    }

    assert!(fleet.remove(a) && !fleet.remove(a));
    fleet.apply(a, News::Health(Health::Ready, "late news".into()));
    fleet.settle();
    fleet.settle();
    assert_eq!(shared.roster.generation(), 2);
    let text = page.text();
    assert!(!text.contains("10.0.0.1") && text.contains("10.0.0.2"));
    assert!(!shared.vitals.usable(a.slot));
}

#[test]
fn probes_do_not_overrule_draining() {
    let shared = Shared::leak(1);
    let mut fleet = Fleet::new(shared);
    let id = fleet.register(&spec("http://10.0.0.1:1", Role::Regular)).unwrap();
    shared.vitals.set_health(id.slot, Health::Draining);
    fleet.apply(id, News::Health(Health::Ready, "its probes succeed".into()));
    fleet.settle();
    assert_eq!(shared.vitals.health(id.slot), Health::Draining);
}

#[test]
fn the_exposition_is_well_formed_and_complete() {
    let shared = Shared::leak(2);
    let mut fleet = Fleet::new(shared);
    let page = Exposition::new(shared, fleet.bases());
    parse(&page.text());

    let a = fleet.register(&spec("http://10.0.0.1:1", Role::Prefill)).unwrap();
    fleet.register(&spec("http://10.0.0.1:1", Role::Decode)).unwrap();
    fleet.apply(a, News::Health(Health::Ready, "test".into()));
    fleet.settle();
    let (one, two) = (shared.tallies.lane(0), shared.tallies.lane(1));
    for lane in [one, two] {
        lane.request(0, 200);
        lane.request(0, 201);
        lane.request(corelane::config::routes::ROUTES.len(), 404);
        lane.request(1, 0);
        lane.fault(What::ConnectFailed);
        lane.add(Tally::ClientBytesIn, 10);
        lane.add(Tally::ClientBytesOut, 20);
    }
    one.took(0, 0, Time::FirstByte, 1_000);
    two.took(0, 0, Time::FirstByte, 3_000_000);
    two.took(0, 0, Time::FirstByte, 700_000_000);
    one.matched.observe(Scale::Share, 80);
    two.batches.observe(Scale::Batch, 3);
    two.cpu_us.set(1_500_000);
    two.spun_us.set(250_000);
    shared.handover.joined(1);

    let text = page.text();
    let samples = parse(&text);
    for (series, value) in [
        (r#"corelane_requests_total{route="/v1/chat/completions",status="200"}"#, 2.0),
        (r#"corelane_requests_total{route="/v1/chat/completions",status="2xx"}"#, 2.0),
        (r#"corelane_requests_total{route="/v1/completions",status="cut"}"#, 2.0),
        (r#"corelane_requests_total{route="other",status="404"}"#, 2.0),
        (r#"corelane_faults_total{code="worker_unreachable"}"#, 2.0),
        (r#"corelane_bytes_total{direction="in"}"#, 20.0),
        (r#"corelane_bytes_total{direction="out"}"#, 40.0),
        (r#"corelane_worker_up{worker="http://10.0.0.1:1",role="prefill"}"#, 1.0),
        (r#"corelane_worker_up{worker="http://10.0.0.1:1",role="decode"}"#, 0.0),
        (r#"corelane_worker_inflight{worker="http://10.0.0.1:1",role="decode"}"#, 0.0),
        (r#"corelane_workers{state="ready"}"#, 1.0),
        (r#"corelane_workers{state="pending"}"#, 1.0),
        (r#"corelane_workers{state="unhealthy"}"#, 0.0),
        (r#"corelane_lane_connections{lane="0"}"#, 0.0),
        (r#"corelane_lane_connections{lane="1"}"#, 1.0),
        (r#"corelane_first_byte_seconds_bucket{le="0.001",route="/v1/chat/completions"}"#, 1.0),
        (r#"corelane_first_byte_seconds_bucket{le="5.0",route="/v1/chat/completions"}"#, 2.0),
        (r#"corelane_first_byte_seconds_bucket{le="+Inf",route="/v1/chat/completions"}"#, 3.0),
        (r#"corelane_first_byte_seconds_count{route="/v1/chat/completions"}"#, 3.0),
        (r#"corelane_first_byte_seconds_sum{route="/v1/chat/completions"}"#, 703.001),
        (r#"corelane_model_first_byte_seconds_count{model="other"}"#, 3.0),
        (r#"corelane_cache_match_ratio_bucket{le="0.7"}"#, 0.0),
        (r#"corelane_cache_match_ratio_bucket{le="0.8"}"#, 1.0),
        (r#"corelane_lane_ring_batch_bucket{le="4.0",lane="1"}"#, 1.0),
        (r#"corelane_lane_ring_batch_count{lane="0"}"#, 0.0),
        (r#"corelane_lane_cpu_seconds_total{lane="1"}"#, 1.5),
        (r#"corelane_lane_spun_seconds_total{lane="1"}"#, 0.25),
        ("corelane_panics_total", 0.0),
        (concat!(r#"corelane_build_info{version=""#, env!("CARGO_PKG_VERSION"), r#""}"#), 1.0),
    ] {
        assert_eq!(samples.get(series), Some(&value), "{series}\n{text}");
    }
    assert_eq!(samples.keys().filter(|s| s.starts_with("corelane_requests_total")).count(), 4, "only what happened");
    for row in table() {
        assert!(text.contains(&format!("# TYPE {} {}\n", row.name, row.kind.name())), "{} is not exposed", row.name);
    }
    assert_eq!(text.matches("# TYPE ").count(), table().len(), "every exposed metric has a row");
}

/// Field reports 10 and 37: series are those of the roster, and go with who goes.
#[test]
fn series_of_models_come_and_go_with_the_roster() {
    let shared = Shared::leak(2);
    let mut fleet = Fleet::new(shared);
    let page = Exposition::new(shared, fleet.bases());
    let with = |url: &str, models: &[&str]| WorkerSpec {
        models: models.iter().map(|&m| m.to_owned()).collect(),
        ..spec(url, Role::Regular)
    };
    let nasty = "a\"b\\c\nd";
    let gone = fleet.register(&with("http://10.0.0.1:1", &["gone", nasty])).unwrap();
    fleet.register(&with("http://10.0.0.2:1", &["stays", "other"])).unwrap();
    fleet.settle();
    let label = |model: &str| shared.roster.snapshot().label(model.as_bytes());
    let place = |model: &str| shared.roster.snapshot().label_place(label(model));
    assert_eq!(
        (place("unknown"), place("other")),
        (0, 0),
        "what nobody serves, and what is called as they are together"
    );
    let serve = |lane: usize, place: usize| {
        shared.tallies.lane(lane).model_request(place, 200);
        shared.tallies.lane(lane).took(0, place, Time::Gap, 20_000);
    };
    ["gone", nasty, "stays", "unknown"].iter().for_each(|model| [0, 1].iter().for_each(|&l| serve(l, place(model))));
    let requests = |page: &str, model: &str| {
        let model = model.replace('\\', r"\\").replace('"', r#"\""#).replace('\n', r"\n");
        let samples = parse(page);
        let gaps = samples.get(&format!(r#"corelane_model_event_gap_seconds_count{{model="{model}"}}"#)).copied();
        let requests =
            samples.get(&format!(r#"corelane_model_requests_total{{model="{model}",status="2xx"}}"#)).copied();
        assert_eq!(gaps, requests);
        requests
    };
    for model in ["gone", nasty, "stays", "other"] {
        assert_eq!(requests(&page.text(), model), Some(2.0), "{model}");
    }
    let (stale, old) = (label("gone"), place("gone"));
    fleet.remove(gone);
    fleet.register(&with("http://10.0.0.3:1", &["new"])).unwrap();
    fleet.settle();
    assert_eq!((requests(&page.text(), "gone"), requests(&page.text(), nasty)), (None, None));
    assert_ne!(place("new"), old, "some lane may still count there");
    // What ends late is nobody's.
    assert_eq!(shared.roster.snapshot().label_place(stale), 0);
    let seen = shared.roster.generation();
    [0, 1].iter().for_each(|&lane| shared.roster.saw(lane, seen));
    fleet.register(&with("http://10.0.0.4:1", &["newer"])).unwrap();
    fleet.settle();
    assert!([1, 2, 3].contains(&place("newer")), "a place is used again");
    assert_eq!(shared.roster.snapshot().label_place(stale), 0);
    assert_eq!(requests(&page.text(), "newer"), None, "what its predecessor was asked does not count");
    serve(1, place("newer"));
    assert_eq!((requests(&page.text(), "newer"), requests(&page.text(), "stays")), (Some(1.0), Some(2.0)));
}

#[test]
fn label_values_survive_the_round_trip() {
    let nasty = r#"x_total{a="q\"uote\\ and \n line",b=""} 1"#;
    let text = format!("# HELP x Help.\n# TYPE x counter\n{nasty}\n# EOF\n");
    assert_eq!(parse(&text).len(), 1);
    for bad in [
        "x_total 1\n# EOF\n",
        "# TYPE x counter\nx_total 1\n# EOF\n",
        "# HELP x H.\n# TYPE x counter\nx 1\n# EOF\n",
        "# HELP x H.\n# TYPE x counter\nx_total 1\nx_total 2\n# EOF\n",
        "# HELP x H.\n# TYPE x counter\nx_total{a=\"\\q\"} 1\n# EOF\n",
        "# HELP x H.\n# TYPE x counter\nx_total{a=\"1\",a=\"2\"} 1\n# EOF\n",
        "# HELP x H.\n# TYPE x counter\nx_total 1\n",
        "# HELP x H.\n# TYPE x counter\nx_total 1\n# HELP x H.\n# TYPE x counter\n# EOF\n",
        "# HELP x H.\n# TYPE x histogram\nx_bucket{le=\"1.0\"} 2\nx_bucket{le=\"+Inf\"} 1\nx_count 1\nx_sum 1\n# EOF\n",
        "# HELP x H.\n# TYPE x histogram\nx_bucket{le=\"1.0\"} 1\nx_count 1\nx_sum 1\n# EOF\n",
    ] {
        assert!(std::panic::catch_unwind(|| parse(bad)).is_err(), "the parser is strict about {bad:?}");
    }
}

#[test]
fn scrapes_come_as_openmetrics() {
    let plane = Plane::start(config(vec![]));
    let (status, head, body) = plane.get("/metrics");
    assert!(status == 200 && head.contains("content-type: application/openmetrics-text; version=1.0.0"), "{head}");
    parse(&body);
}

/// A strict reader of OpenMetrics text: every sample by its series, or a panic that says what is wrong.
#[track_caller]
fn parse(text: &str) -> HashMap<String, f64> {
    let text = text.strip_suffix("# EOF\n").expect("ends with # EOF");
    let mut samples = HashMap::new();
    let mut seen = HashSet::new();
    let mut lines = text.split_terminator('\n').peekable();
    while let Some(line) = lines.next() {
        let (name, help) = line.strip_prefix("# HELP ").and_then(|l| l.split_once(' ')).expect("HELP opens a metric");
        assert!(!help.is_empty() && seen.insert(name.to_string()), "{name}: no help, or twice");
        let kind = lines.next().and_then(|l| l.strip_prefix(&format!("# TYPE {name} "))).expect("TYPE follows HELP");
        // Of a histogram, by labels.
        let mut buckets: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
        let mut parts: HashMap<(&str, String), f64> = HashMap::new();
        while let Some(line) = lines.next_if(|l| !l.starts_with('#')) {
            let (series, value) = line.rsplit_once(' ').expect("a sample has a value");
            let value: f64 = value.parse().expect("values are numbers");
            let (full, labels) = series.split_once('{').unwrap_or((series, "}"));
            let mut labels = read_labels(labels);
            let bound = labels.remove("le");
            assert_eq!(bound.is_some(), kind == "histogram" && full.ends_with("_bucket"), "{series}");
            let rest = labels.iter().map(|(k, v)| format!("{k}={v:?}")).collect::<Vec<_>>().join(",");
            let suffix = full.strip_prefix(name).expect("samples stand under their metric");
            match (kind, suffix) {
                ("counter", "_total") => assert!(value >= 0.0),
                ("gauge", "") => {}
                ("histogram", "_bucket") => {
                    let bound = bound.unwrap().replace("+Inf", "inf").parse().unwrap();
                    buckets.entry(rest).or_default().push((bound, value));
                }
                ("histogram", "_sum" | "_count") => drop(parts.insert((&suffix[1..], rest), value)),
                _ => panic!("{series} does not belong to a {kind}"),
            }
            assert!(samples.insert(series.to_string(), value).is_none(), "{series} twice");
        }
        assert_eq!(parts.len(), 2 * buckets.len(), "{name}: sum and count stand with buckets");
        for (labels, buckets) in buckets {
            assert!(buckets.windows(2).all(|w| w[0].0 < w[1].0 && w[0].1 <= w[1].1), "{name} is cumulative");
            assert_eq!(buckets.last(), Some(&(f64::INFINITY, parts[&("count", labels.clone())])), "{name}");
            assert!(parts.contains_key(&("sum", labels)), "{name}");
        }
    }
    samples
}

#[track_caller]
fn read_labels(text: &str) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    let mut rest = text.strip_suffix('}').expect("labels are closed");
    while !rest.is_empty() {
        let (key, after) = rest.split_once("=\"").expect("a label has a quoted value");
        assert!(!key.is_empty() && key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{key:?}");
        let mut value = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next().expect("the quote is closed") {
                (i, '"') => break i,
                (_, '\\') => match chars.next() {
                    Some((_, 'n')) => value.push('\n'),
                    Some((_, c @ ('\\' | '"'))) => value.push(c),
                    other => panic!("bad escape {other:?}"),
                },
                (_, c) => value.push(c),
            }
        };
        assert!(labels.insert(key.to_string(), value).is_none(), "{key} twice");
        rest = &after[end + 1..];
        if let Some(more) = rest.strip_prefix(',') {
            assert!(!more.is_empty(), "a comma is followed by a label");
            rest = more;
        } else {
            assert!(rest.is_empty(), "labels are separated by commas");
        }
    }
    labels
}
