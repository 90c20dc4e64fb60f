//! The configuration changes while the program serves: signals, files, workers, keys, limits, under load.
//!
//! Takes the built binary and mock engines of this process, gives it other files. Never waits a fixed time for a reload.

mod children;
#[allow(dead_code, reason = "other test programs use the rest")]
mod rig;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use children::{Process, command, ready, two_cores, until};
use corelane::boot::Gateway;
use corelane::config::options::{OPTIONS, Row};
use corelane::config::{self, flags};
use corelane::control::command::{Command, Patch};
use corelane::control::fleet::Source;
use corelane::mock::load::{Load, Pattern};
use corelane::mock::{Fleet, Pretended, Settings};
use rig::{Answer, Http};
use rustix::process::Signal;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// A directory that goes away.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Dir {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("corelane-reload-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Dir(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    /// Puts a file in the place of an older one, as careful editors do.
    fn replace(&self, name: &str, text: &str) {
        let (new, path) = (self.path(".new"), self.path(name));
        std::fs::write(&new, text).unwrap();
        std::fs::rename(&new, &path).unwrap();
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A gateway with a file.
struct Served {
    process: Process,
    dir: Dir,
    address: SocketAddr,
    admin: SocketAddr,
}

/// A whole file: what the text does not say itself is as all tests want it. Nobody looks at the file by itself.
fn whole(text: &str) -> String {
    let cores = format!("cores = {:?}", two_cores());
    let head = ["port = 0", "prometheus_port = 0", &cores, "shutdown_settle_secs = 0", "watch_interval_secs = 0"];
    let key = |line: &str| line.split(" = ").next().unwrap_or_default().to_owned();
    let missing = head.into_iter().filter(|line| text.lines().all(|said| key(said) != key(line)));
    format!("{}\n{text}", missing.collect::<Vec<_>>().join("\n"))
}

impl Served {
    fn start(text: &str) -> Served {
        Served::start_in(Dir::new(), text)
    }

    fn start_in(dir: Dir, text: &str) -> Served {
        dir.replace("c.toml", &whole(text));
        let mut process = Process::start(command(&["serve", "--config", &dir.path("c.toml")]));
        let (address, admin) = (process.announced("address"), process.announced("admin"));
        ready(address);
        Served { process, dir, address, admin }
    }

    /// Has another file read; gives the report.
    fn reload(&self, text: &str) -> Value {
        let before = self.reloads();
        self.dir.replace("c.toml", &whole(text));
        self.process.signal(Signal::HUP);
        until("the file is read", || self.reloads() > before);
        self.config()
    }

    fn reloads(&self) -> u64 {
        self.metric("corelane_reloads_total") as u64
    }

    fn ask(&self, path: &str) -> Answer {
        let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret-of-admins\r\n\r\n");
        Http::connect(self.admin).send(head.as_bytes()).answer()
    }

    fn config(&self) -> Value {
        self.ask("/config").expect(200).json()
    }

    /// The value of a metric, summed over its labels.
    fn metric(&self, name: &str) -> f64 {
        let page = self.ask("/metrics").text();
        let rows = page.lines().filter(|l| l.starts_with(name) && !l.starts_with('#'));
        rows.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// State by URL of the workers that are listed.
    fn state(&self, url: &str) -> Option<String> {
        let all = self.ask("/workers").expect(200).json();
        let found = all["workers"].as_array().unwrap().iter().find(|w| w["url"] == *url)?["state"].clone();
        found.as_str().map(str::to_owned)
    }

    fn chat(&self) -> Answer {
        Http::connect(self.address).post(CHAT, &short())
    }
}

fn short() -> Value {
    json!({"model": "mock", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]})
}

fn engines(count: usize) -> Fleet {
    Fleet::start(Settings::default(), (Ipv4Addr::LOCALHOST, 0), count).unwrap()
}

fn workers(urls: &[&String]) -> String {
    format!("worker_urls = {urls:?}\n")
}

/// A stream in a thread of its own: its text, when it has ended.
fn stream(address: SocketAddr, tokens: u32, gap_ms: u32) -> std::thread::JoinHandle<String> {
    let body = json!({
        "model": "mock", "stream": true, "max_tokens": tokens, "mock": {"gap_ms": gap_ms},
        "messages": [{"role": "user", "content": "hello"}],
    });
    let mut http = Http::connect(address);
    http.send(&rig::post(CHAT, &body));
    // It is under way when its head is there.
    let head = http.head().unwrap();
    assert_eq!(head.status, 200);
    std::thread::spawn(move || {
        let mut trailers = String::new();
        let mut text = String::new();
        loop {
            match http.chunk(&mut trailers) {
                Ok(chunk) if chunk.is_empty() => return text,
                Ok(chunk) => text.push_str(std::str::from_utf8(&chunk).unwrap()),
                Err(end) => panic!("the stream was cut ({end:?}): {text}"),
            }
        }
    })
}

// ── what is changed ─────────────────────────────────────────────────────────────────────────────────────────────

/// Another value of an option than its default, in TOML.
fn sample(row: &Row, dir: &Dir) -> String {
    let range = row.kind.range().unwrap_or_default();
    let first = |list: &str| {
        let names = list.split(", ").map(str::to_owned);
        format!("{:?}", names.clone().find(|name| name != row.default).unwrap())
    };
    let (least, most) = range.split_once(" to ").unwrap_or_default();
    let most = most.split(' ').next().unwrap_or_default();
    match (row.key, row.kind.unit(), row.default) {
        ("host", ..) => "'127.0.0.2'".into(),
        ("prometheus_host", ..) => "'127.0.0.3'".into(),
        ("cores", ..) => "'0-5'".into(),
        ("control_core", ..) => "0".into(),
        ("api_key", ..) => "['key-of-a-client']".into(),
        ("default_model", ..) => "'m'".into(),
        ("admin_token", ..) => "'secret-of-admins'".into(),
        ("target_worker_secret", ..) => "'secret-of-ours'".into(),
        ("health_check_endpoint", ..) => "'/ping'".into(),
        ("log_level", ..) => "'warn'".into(),
        ("request_id_headers", ..) => "['x-id']".into(),
        ("retry_statuses", ..) => "[429]".into(),
        ("access_log_path", ..) => format!("{:?}", dir.path("access.log")),
        ("workers_file", ..) => format!("{:?}", dir.path("more.txt")),
        (_, Some("bytes"), _) if most.ends_with("GiB") || most.ends_with("4095MiB") => "'3GiB'".into(),
        (_, Some("bytes"), _) => "'128KiB'".into(),
        (_, Some("s"), _) => (least.parse::<f64>().unwrap() + 0.5).to_string(),
        (_, _, "true") => "false".into(),
        (_, _, "false") => "true".into(),
        _ if range.contains(" to ") => match most.parse::<f64>().unwrap() {
            most if most <= 1.0 => "0.75".into(),
            _ => (least.parse::<u64>().unwrap() + 6).to_string(),
        },
        _ => first(&range),
    }
}

fn as_json(toml: &str) -> Value {
    let text = toml.replace('\'', "\"");
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{toml}: {e}"))
}

#[test]
fn every_live_option_is_taken_over_and_what_needs_a_restart_is_named() {
    let fleet = engines(1);
    let list = workers(&[&fleet.urls()[0]]);
    let mut served = Served::start(&list);
    let first = served.config();
    assert_eq!((&first["generation"], &first["last_reload"]), (&json!(1), &Value::Null));
    std::fs::write(served.dir.path("more.txt"), "http://127.0.0.1:9\n").unwrap();
    let is_plain = |row: &&Row| !["worker_urls", "prefill", "decode"].contains(&row.key);

    // All live options at once.
    let mut text = list.clone();
    for row in OPTIONS.iter().filter(|row| row.live).filter(is_plain) {
        text.push_str(&format!("{} = {}\n", row.key, sample(row, &served.dir)));
    }
    let pair = "[[workers]]\nurl = 'http://127.0.0.1:8'\nrole = 'prefill'\napi_key = 'key-of-a-worker'\n\
                [[workers]]\nurl = 'http://127.0.0.1:7'\nrole = 'decode'\n\
                [[extra_routes]]\npath = '/x/*'\n";
    let report = served.reload(&(text.clone() + pair));
    assert_eq!((&report["generation"], &report["last_error"]), (&json!(2), &Value::Null), "{report:#}");
    assert_eq!(report["needs_restart"], json!([]));
    for row in OPTIONS.iter().filter(|row| row.live).filter(is_plain) {
        let wanted = match row.key {
            "api_key" | "admin_token" | "target_worker_secret" => json!("(hidden)"),
            _ => as_json(&sample(row, &served.dir)),
        };
        assert_ne!(first["config"][row.key], wanted, "{} was so before", row.key);
        assert_eq!(report["config"][row.key], wanted, "{}", row.key);
        let named = report["last_reload"]["changed"].as_array().unwrap();
        assert!(named.contains(&json!(row.key)), "{}: {named:?}", row.key);
    }
    let urls: Vec<_> = report["config"]["workers"].as_array().unwrap().iter().map(|w| &w["url"]).collect();
    let others = ["http://127.0.0.1:8", "http://127.0.0.1:7", "http://127.0.0.1:9"].map(Value::from);
    assert_eq!(urls[1..], others.iter().collect::<Vec<_>>());
    assert_eq!(report["config"]["workers"][1]["api_key"], "(hidden)");
    assert_eq!(report["config"]["extra_routes"], json!([{"path": "/x/*", "methods": []}]));
    assert!(!report.to_string().contains("secret-of") && !report.to_string().contains("key-of"), "{report:#}");

    // The same again changes nothing.
    let report = served.reload(&(text + pair));
    assert_eq!((&report["generation"], &report["last_reload"]["result"]), (&json!(2), &json!("unchanged")));

    // Everything else at once, and one live option.
    let mut text = list + "policy = 'random'\n";
    let mut wanted = Vec::new();
    for row in OPTIONS.iter().filter(|row| !row.live) {
        wanted.push(row.key);
        text.push_str(&format!("{} = {}\n", row.key, sample(row, &served.dir)));
    }
    let report = served.reload(&text);
    assert_eq!((&report["generation"], &report["config"]["policy"]), (&json!(3), &json!("random")), "{report:#}");
    let named: Vec<&str> =
        report["needs_restart"].as_array().unwrap().iter().map(|k| k["option"].as_str().unwrap()).collect();
    assert_eq!(named, wanted);
    for key in wanted {
        assert_eq!(report["config"][key], first["config"][key], "{key}");
        served.process.line(&format!("{key} needs a restart"));
    }
    assert_eq!(served.metric("corelane_config_generation"), 3.0);
    // Its backend has changed twice, so it is another worker.
    ready(served.address);
    assert_eq!(served.chat().status, 200);
}

#[test]
fn a_bad_file_changes_nothing_and_every_mistake_is_told() {
    let fleet = engines(1);
    let list = workers(&[&fleet.urls()[0]]);
    let mut served = Served::start(&list);
    let report = served.reload(&format!("{list}policy = 'rnadom'\nmax_headers = 3\nworkers = 7\n"));
    assert_eq!(report["generation"], 1);
    assert_eq!(report["last_reload"]["result"], "refused");
    let told = report["last_error"]["mistakes"].to_string();
    for what in ["did you mean random?", "\\\"3\\\" is out of range", "workers: is no list of tables"] {
        assert!(told.contains(what), "{told}");
    }
    served.process.line("did you mean random?");
    served.process.line("nothing was changed");
    assert_eq!(served.metric("corelane_reloads_total{result=\"refused\"}"), 1.0);
    assert_eq!((report["config"]["policy"].as_str(), served.chat().status), (Some("cache_aware"), 200));
    // Cut off in the middle, gone, and good again.
    served.reload(&format!("{list}policy = "));
    std::fs::remove_file(served.dir.path("c.toml")).unwrap();
    served.process.signal(Signal::HUP);
    until("the third one is refused", || served.metric("corelane_reloads_total{result=\"refused\"}") == 3.0);
    assert!(served.config()["last_error"].to_string().contains("cannot read"));
    let report = served.reload(&format!("{list}policy = 'random'\n"));
    assert_eq!((&report["generation"], &report["last_error"]), (&json!(2), &Value::Null));
    assert_eq!(Http::connect(served.address).ask("GET", "/get_server_info", &[], b"").json()["policy"], "random");
}

// ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_changed_file_is_seen_however_it_was_changed() {
    let fleet = engines(1);
    let list = workers(&[&fleet.urls()[0]]) + "watch_interval_secs = 0.05\n";
    let text = |headers: u32| whole(&format!("{list}max_headers = {headers}\n"));
    let dir = Dir::new();
    // As Kubernetes mounts it: the file is a link through a link to a directory, and that link is turned.
    for version in ["v1", "v2"] {
        std::fs::create_dir(dir.path(version)).unwrap();
    }
    std::fs::write(dir.path("v1/c.toml"), text(50)).unwrap();
    std::fs::write(dir.path("v2/c.toml"), text(53)).unwrap();
    std::os::unix::fs::symlink("v1", dir.path("data")).unwrap();
    std::fs::write(dir.path("plain.toml"), text(50)).unwrap();
    std::os::unix::fs::symlink("data/c.toml", dir.path("c.toml")).unwrap();
    let mut process = Process::start(command(&["serve", "--config", &dir.path("c.toml")]));
    let (address, admin) = (process.announced("address"), process.announced("admin"));
    ready(address);
    let served = Served { process, dir, address, admin };
    let seen = |headers: u32| until("the change is seen", || served.config()["config"]["max_headers"] == headers);
    // Written into.
    std::fs::write(served.dir.path("v1/c.toml"), text(51)).unwrap();
    seen(51);
    // Another file in its place.
    std::fs::write(served.dir.path("v1/new"), text(52)).unwrap();
    std::fs::rename(served.dir.path("v1/new"), served.dir.path("v1/c.toml")).unwrap();
    seen(52);
    // The link is turned.
    std::os::unix::fs::symlink("v2", served.dir.path("turned")).unwrap();
    std::fs::rename(served.dir.path("turned"), served.dir.path("data")).unwrap();
    seen(53);
    // A bad one is told once, and a touched one is no change.
    std::fs::write(served.dir.path("v2/c.toml"), "max_headers = 'many'").unwrap();
    until("it is refused", || served.config()["last_reload"]["result"] == "refused");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(served.metric("corelane_reloads_total{result=\"refused\"}"), 1.0);
    assert_eq!(served.config()["config"]["max_headers"], 53);
    std::fs::write(served.dir.path("v2/c.toml"), text(53)).unwrap();
    until("it is read", || served.config()["last_reload"]["result"] == "unchanged");
    assert_eq!(served.config()["generation"], 4);
}

#[test]
fn workers_come_and_go_with_a_file_that_a_program_writes() {
    let fleet = engines(3);
    let urls = fleet.urls();
    let dir = Dir::new();
    std::fs::create_dir(dir.path("found")).unwrap();
    dir.replace("found/a.txt", &urls[0]);
    let text = format!("watch_interval_secs = 0.05\nworkers_file = {:?}\n", dir.path("found"));
    let mut served = Served::start_in(dir, &text);
    assert_eq!(served.chat().status, 200);
    served.dir.replace("found/b.json", &json!([{"url": urls[1], "models": ["mock"]}, urls[2]]).to_string());
    until("they are there", || urls.iter().all(|url| served.state(url).as_deref() == Some("ready")));
    // A broken one changes nothing, and is complained of once.
    served.dir.replace("found/b.json", "[");
    served.process.line("no JSON");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(served.process.log().matches("no JSON").count(), 1);
    assert!(urls.iter().all(|url| served.state(url).as_deref() == Some("ready")));
    // One leaves with its stream in flight, which goes on.
    let streams: Vec<_> = (0..6).map(|_| stream(served.address, 30, 30)).collect();
    served.dir.replace("found/b.json", &json!([urls[1]]).to_string());
    until("it drains", || served.state(&urls[2]).as_deref() != Some("ready"));
    assert!(streams.into_iter().all(|stream| stream.join().unwrap().contains("[DONE]")));
    until("it is gone", || served.state(&urls[2]).is_none());
    std::fs::remove_file(served.dir.path("found/b.json")).unwrap();
    until("the file's are gone", || served.state(&urls[1]).is_none());
    assert_eq!((served.state(&urls[0]).as_deref(), served.chat().status), (Some("ready"), 200));
}

/// Whatever stands where a file of workers should: a pipe that nobody writes to, a device without end, a directory.
#[test]
fn what_is_no_file_of_workers_is_told_and_holds_no_reload_up() {
    let fleet = engines(1);
    let dir = Dir::new();
    std::fs::create_dir(dir.path("found")).unwrap();
    dir.replace("found/a.txt", &fleet.urls()[0]);
    let text = format!("workers_file = {:?}\n", dir.path("found"));
    let served = Served::start_in(dir, &text);
    let odd = served.dir.path("found/odd.txt");
    let pipe = |path: &str| {
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    let device = |path: &str| std::os::unix::fs::symlink("/dev/zero", path).unwrap();
    let directory = |path: &str| std::fs::create_dir(path).unwrap();
    for make in [&pipe as &dyn Fn(&str), &device, &directory] {
        make(&odd);
        let told = served.reload(&text)["last_error"]["mistakes"][0].to_string();
        assert!(told.contains("odd.txt") && told.contains("it is no regular file"), "{told}");
        std::fs::remove_file(&odd).or_else(|_| std::fs::remove_dir(&odd)).unwrap();
        assert_eq!(served.reload(&text)["last_error"], Value::Null);
    }
    assert_eq!(served.chat().status, 200);
}

#[test]
fn a_configuration_out_of_a_pipe_serves_and_is_not_read_again() {
    let fleet = engines(1);
    let list = workers(&[&fleet.urls()[0]]) + "watch_interval_secs = 0.05\n";
    let (reader, mut writer) = std::io::pipe().unwrap();
    let mut serve = command(&["serve", "--config", "/dev/stdin"]);
    serve.stdin(reader);
    let mut process = Process::start(serve);
    std::io::Write::write_all(&mut writer, whole(&list).as_bytes()).unwrap();
    drop(writer);
    let (address, admin) = (process.announced("address"), process.announced("admin"));
    ready(address);
    let mut served = Served { process, dir: Dir::new(), address, admin };
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!((served.reloads(), served.chat().status), (0, 200));
    served.process.signal(Signal::HUP);
    served.process.line("cannot be read again");
    assert_eq!(served.chat().status, 200);
}

/// Whoever writes the file may say so at any time.
#[test]
fn signals_during_the_start_do_not_end_the_process() {
    let fleet = engines(1);
    let (reader, mut writer) = std::io::pipe().unwrap();
    let mut serve = command(&["serve", "--config", "/dev/stdin"]);
    serve.stdin(reader);
    let mut process = Process::start(serve);
    let status = format!("/proc/{}/status", process.child.id());
    let handled = || {
        let status = std::fs::read_to_string(&status).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        let mask = u64::from_str_radix(mask.trim(), 16).unwrap();
        [Signal::HUP, Signal::USR1].iter().all(|signal| mask & 1 << (signal.as_raw() - 1) != 0)
    };
    until("they are handled", handled);
    process.signal(Signal::HUP);
    process.signal(Signal::USR1);
    std::io::Write::write_all(&mut writer, whole(&workers(&[&fleet.urls()[0]])).as_bytes()).unwrap();
    drop(writer);
    ready(process.announced("address"));
}

/// What the log has to say is not worth a stop: of the probes, of the admin listener, of the end.
#[test]
fn a_log_that_nobody_reads_any_more_stops_nothing() {
    use std::io::{BufRead, Read, Write};
    let fleet = engines(1);
    let dir = Dir::new();
    dir.replace("c.toml", &whole(&format!("{}access_log = 'all'\n", workers(&[&fleet.urls()[0]]))));
    let (reader, mut writer) = std::io::pipe().unwrap();
    let mut serve = command(&["serve", "--config", &dir.path("c.toml")]);
    let child = serve.stderr(writer.try_clone().unwrap()).spawn().unwrap();
    drop(serve);
    let mut reader = std::io::BufReader::new(reader);
    let mut line = String::new();
    while !line.contains("corelane serves") {
        line.clear();
        assert!(reader.read_line(&mut line).unwrap() > 0, "it ended");
    }
    let process = Process { child, lines: std::sync::Arc::default() };
    process.lines.lock().unwrap().push(line);
    let mut served = Served { process, dir, address: ([0; 4], 0).into(), admin: ([0; 4], 0).into() };
    (served.address, served.admin) = (served.process.announced("address"), served.process.announced("admin"));
    ready(served.address);
    // Ends when the pipe has no reader any more.
    let filler = std::thread::spawn(move || while writer.write_all(&[b'\n'; 512]).is_ok() {});
    std::thread::sleep(Duration::from_millis(300));
    let text = workers(&[&fleet.urls()[0]]);
    for policy in ["random", "round_robin", "least_load"] {
        let told = served.reload(&format!("{text}policy = {policy:?}\n"));
        assert_eq!(told["last_reload"]["result"], "applied");
        assert_eq!(served.chat().status, 200);
    }
    // It is read again: what is missing is told.
    for _ in 0..200 * 1024 {
        reader.read_exact(&mut [0]).unwrap();
    }
    served.process.signal(Signal::HUP);
    let told = reader.by_ref().lines().map_while(Result::ok).find(|line| line.contains("lines were left out"));
    assert!(told.is_some_and(|told| told.starts_with("corelane: ")));
    std::thread::sleep(Duration::from_millis(300));
    served.process.signal(Signal::TERM);
    assert!(served.process.end().success());
    drop(reader);
    filler.join().unwrap();
}

#[test]
fn a_name_can_stand_for_workers() {
    let fleet = engines(1);
    let url = &fleet.urls()[0];
    let table = format!("[[workers]]\nurl = '{}'\nexpand = true\n", url.replace("127.0.0.1", "localhost"));
    let served = Served::start(&table);
    assert_eq!((served.state(url).as_deref(), served.chat().status), (Some("ready"), 200));
    // It stays when it is given by its address instead, and the other way round.
    for text in [workers(&[url]), table] {
        let id = served.ask("/workers").json()["workers"][0]["id"].clone();
        served.reload(&text);
        assert_eq!((served.state(url).as_deref(), served.chat().status), (Some("ready"), 200));
        assert_eq!(served.ask("/workers").json()["workers"][0]["id"], id);
    }
}

// ── under way ───────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_hundred_reloads_under_load_lose_no_request() {
    const RELOADS: usize = 100;
    let fleet = engines(3);
    let urls = fleet.urls();
    let text = |i: usize| {
        let policies = ["cache_aware", "round_robin", "least_load", "consistent_hashing", "power_of_two"];
        let who = [vec![&urls[0], &urls[1]], vec![&urls[0], &urls[2]], vec![&urls[0]], urls.iter().collect()];
        format!(
            "{}policy = {:?}\nmax_concurrent_requests = {}\nqueue_size = 1000\nmax_requests_per_worker = {}\n\
             retry_max_retries = {}\nrequest_timeout_secs = {}\nmax_headers = {}\npool_size = {}\ncb_failure_threshold = {}\n\
             health_check_interval_secs = {}\ndisable_circuit_breaker = {}\n",
            workers(&who[i % 4]),
            policies[i % 5],
            [0, 24, 4, 9][i % 4],
            [0, 50, 0][i % 3],
            1 + i % 5,
            60 + i,
            50 + i,
            1 + i % 7,
            3 + i % 9,
            [60, 1][i % 2],
            i.is_multiple_of(6),
        )
    };
    let mut served = Served::start(&text(3));
    let load = Load::start(Pattern {
        url: format!("http://{}", served.address),
        conversations: 24,
        system_bytes: 2048,
        turn_bytes: 64,
        max_tokens: 8,
        think_ms: (0, 3),
        timeout_ms: 20_000,
        ..Pattern::default()
    })
    .unwrap();
    let streams: Vec<_> = (0..6).map(|_| stream(served.address, 150, 20)).collect();
    let mut last = 1;
    for i in 0..RELOADS {
        let report = served.reload(&text(i));
        assert_eq!(report["last_error"], Value::Null, "{report:#}");
        last = report["generation"].as_u64().unwrap();
    }
    assert_eq!(last, RELOADS as u64 + 1);
    for stream in streams {
        assert!(stream.join().unwrap().contains("[DONE]"));
    }
    let totals = load.stop();
    println!("{totals:?}");
    assert!(totals.failed == 0 && totals.ok > 500, "{totals:?}");
    until("nothing is in flight", || served.metric("corelane_worker_inflight{") == 0.0);
    until("who was removed is gone", || served.ask("/workers").json()["total"] == [2, 2, 1, 3][(RELOADS - 1) % 4]);
    let panics = served.metric("corelane_panics_total") + served.metric("corelane_late_wakes_total");
    assert_eq!((panics, served.metric("corelane_permits_in_use")), (0.0, 0.0));
    served.process.signal(Signal::TERM);
    assert_eq!(served.process.end().code(), Some(0));
}

#[test]
fn an_old_key_is_refused_and_its_connection_stays() {
    let fleet = engines(1);
    let list = workers(&[&fleet.urls()[0]]);
    let served = Served::start(&format!("{list}api_key = ['old', 'both']\n"));
    let mut http = Http::connect(served.address);
    // Without a body, which would not be waited for where the key is wrong.
    let mut ask =
        |key: &str| http.ask("GET", "/v1/models", &[("Authorization", &*format!("Bearer {key}"))], b"").status;
    assert_eq!(["old", "both", "new"].map(&mut ask), [200, 200, 401]);
    let connections = served.metric("corelane_connections_accepted_total");
    served.reload(&format!("{list}api_key = ['new', 'both']\n"));
    assert_eq!(["old", "both", "new"].map(&mut ask), [401, 200, 200]);
    served.reload(&list);
    assert_eq!(["old", "none"].map(&mut ask), [200, 200]);
    assert_eq!(served.metric("corelane_connections_accepted_total"), connections, "all on one connection");
}

#[test]
fn limits_count_for_connections_that_are_there() {
    let fleet = engines(1);
    let list = workers(&[&fleet.urls()[0]]);
    let served = Served::start(&list);
    let mut http = Http::connect(served.address);
    let large = json!({"model": "mock", "max_tokens": 1, "prompt": "x".repeat(4000)});
    let mut ask = || http.post("/v1/completions", &large).status;
    assert_eq!(ask(), 200);
    served.reload(&format!("{list}max_payload_size = 2048\n"));
    let mut refused = Http::connect(served.address);
    assert_eq!(refused.post("/v1/completions", &large).status, 413);
    served.reload(&list);
    assert_eq!(ask(), 200, "the connection was not touched");

    // Those that wait are let in by a larger limit.
    served.reload(&format!("{list}max_concurrent_requests = 1\n"));
    let first = stream(served.address, 20, 50);
    let waiting = std::thread::spawn({
        let address = served.address;
        move || Http::connect(address).post(CHAT, &short()).status
    });
    until("it waits", || served.metric("corelane_queue_length") == 1.0);
    served.reload(&list);
    assert_eq!(waiting.join().unwrap(), 200);
    assert!(!first.is_finished(), "it did not wait for the stream");
    assert!(first.join().unwrap().contains("[DONE]"));
}

#[test]
fn what_is_logged_can_be_changed() {
    let fleet = engines(1);
    let list = workers(&[&fleet.urls()[0]]);
    let mut served = Served::start(&list);
    served.reload(&format!("{list}log_level = 'error'\n"));
    let lines = served.process.log().lines().count();
    served.reload(&format!("{list}log_level = 'error'\nmax_headers = 60\n"));
    assert_eq!(served.process.log().lines().count(), lines, "{}", served.process.log());
    served.reload(&format!("{list}log_level = 'debug'\n"));
    served.reload(&format!("{list}log_level = 'debug'\nmax_headers = 61\n"));
    served.process.line("changed=\"max_headers\"");
}

// ── workers ─────────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn health_checks_go_on_after_a_reload_with_other_settings_too() {
    let (mut worker, url) = children::worker(0, &[]);
    let fleet = engines(1);
    let list = workers(&[&url, &fleet.urls()[0]]);
    let probes = |interval: &str, more: &str| {
        format!("{list}health_check_interval_secs = {interval}\nhealth_failure_threshold = 2\n{more}")
    };
    let served = Served::start(&probes("3600", ""));
    until("both are in", || served.state(&url).as_deref() == Some("ready"));
    // Probes that would have come in an hour come now.
    served.reload(&probes("0.1", ""));
    assert_eq!(served.state(&url).as_deref(), Some("ready"), "a reload does not put it out");
    // And go on after one that has nothing to do with them.
    served.reload(&probes("0.1", "policy = 'least_load'\n"));
    let probed = |url: &str| {
        let all = served.ask("/workers").json();
        let found = all["workers"].as_array().unwrap().iter().find(|w| w["url"] == *url).cloned().unwrap();
        found["last_probe_ms_ago"].as_u64().unwrap()
    };
    // A worker that nobody probes any more would be the longer unprobed, the longer one waits.
    std::thread::sleep(Duration::from_millis(500));
    until("it is probed", || probed(&url) < 450);
    worker.kill();
    until("it is out", || served.state(&url).as_deref() == Some("unhealthy"));
    // Without checks everybody is in; with them it is out again.
    served.reload(&probes("0.1", "disable_health_check = true\n"));
    until("it is in", || served.state(&url).as_deref() == Some("ready"));
    served.reload(&probes("0.1", ""));
    until("it is out again", || served.state(&url).as_deref() == Some("unhealthy"));
    assert_eq!(served.state(&fleet.urls()[0]).as_deref(), Some("ready"));
}

#[test]
fn a_removed_worker_finishes_what_it_has_and_those_that_stay_keep_their_state() {
    let fleet = engines(2);
    let urls = fleet.urls();
    let text = |urls: &[&String]| workers(urls) + "policy = 'round_robin'\n";
    let served = Served::start(&text(&[&urls[0], &urls[1]]));
    until("both are in", || urls.iter().all(|url| served.state(url).as_deref() == Some("ready")));
    for _ in 0..4 {
        assert_eq!(served.chat().status, 200);
    }
    let selected = |url: &str| served.metric(&format!("corelane_worker_selected_total{{worker=\"{url}\""));
    let streams: Vec<_> = (0..4).map(|_| stream(served.address, 40, 30)).collect();
    let before = selected(&urls[0]);
    assert!(before >= 2.0);
    served.reload(&text(&[&urls[0]]));
    assert_eq!(served.state(&urls[1]).as_deref(), Some("draining"));
    let had = fleet.engine(1).stats().requests;
    for _ in 0..6 {
        assert_eq!(served.chat().status, 200);
    }
    assert_eq!(fleet.engine(1).stats().requests, had, "it gets nothing new");
    assert!(streams.iter().any(|stream| !stream.is_finished()), "too slow a machine to tell");
    for stream in streams {
        assert!(stream.join().unwrap().contains("[DONE]"));
    }
    until("it is gone", || served.state(&urls[1]).is_none());
    assert_eq!(selected(&urls[0]), before + 6.0, "the other one's counts went on");
    served.reload(&text(&[&urls[0], &urls[1]]));
    until("it is back", || served.state(&urls[1]).as_deref() == Some("ready"));
}

#[test]
fn workers_that_an_operator_added_are_left_alone_unless_the_file_names_them() {
    let fleet = engines(3);
    let urls = fleet.urls();
    let dir = Dir::new();
    let text = |urls: &[&String]| whole(&(workers(urls) + "watch_interval_secs = 0.05\n"));
    dir.replace("c.toml", &text(&[&urls[0]]));
    let args = ["--config".to_owned(), dir.path("c.toml")];
    let flags = flags::read(&flags::command("serve", "Serves."), &args).expect("clap has nothing to say");
    let source = config::Source { flags, environment: Vec::new() };
    let loaded = source.load(config::Disk).ok().unwrap();
    let gateway = Gateway::start_reloadable(loaded, source, |_| (), |_| ()).unwrap();
    let commands = gateway.commands();
    let list = || {
        let listed = commands.give_blocking(Command::List).unwrap();
        let mut all: Vec<_> = listed.iter().map(|w| (w.url.to_string(), w.source, w.state)).collect();
        all.sort_unstable();
        all
    };
    let until_they_are = |wanted: &[(&String, &'static str)]| {
        let mut wanted: Vec<_> = wanted.iter().map(|(url, source)| ((*url).clone(), *source, "ready")).collect();
        wanted.sort_unstable();
        until("the workers are those", || list() == wanted);
    };
    let spec = config::WorkerSpec::new(urls[1].clone());
    commands.give_blocking(|reply| Command::Add(Source::Admin, Box::new(spec), reply)).unwrap().unwrap();
    until_they_are(&[(&urls[0], "config"), (&urls[1], "admin")]);
    dir.replace("c.toml", &text(&[&urls[2]]));
    until_they_are(&[(&urls[1], "admin"), (&urls[2], "config")]);
    dir.replace("c.toml", &text(&[&urls[1], &urls[2]]));
    until_they_are(&[(&urls[1], "config"), (&urls[2], "config")]);
    dir.replace("c.toml", &text(&[&urls[2]]));
    until_they_are(&[(&urls[2], "config")]);

    // What operators did to the file's workers stays, until the file says something else of them.
    dir.replace("c.toml", &text(&[&urls[0], &urls[2]]));
    until_they_are(&[(&urls[0], "config"), (&urls[2], "config")]);
    let labels = Some([("by".to_owned(), "hand".to_owned())].into());
    let patch = Patch { labels, ..Patch::default() };
    commands.give_blocking(|reply| Command::Patch(urls[2].clone(), Box::new(patch), reply)).unwrap().unwrap();
    let gone = |reply| Command::Remove { name: urls[0].clone(), force: false, reply };
    commands.give_blocking(gone).unwrap().unwrap();
    let generation = || gateway.shared().settings.generation();
    let before = generation();
    dir.replace("c.toml", &(text(&[&urls[0], &urls[2]]) + "max_headers = 60\n"));
    until("it is read", || generation() > before);
    until_they_are(&[(&urls[2], "config")]);
    let listed = commands.give_blocking(Command::List).unwrap();
    assert_eq!(listed[0].labels.get("by").map(String::as_str), Some("hand"));
    for urls in [vec![&urls[2]], vec![&urls[0], &urls[2]]] {
        dir.replace("c.toml", &text(&urls));
        let wanted: Vec<_> = urls.iter().map(|url| (*url, "config")).collect();
        until("it is read", || gateway.shared().settings.newest().is_some_and(|n| n.config.max_headers == 100));
        until_they_are(&wanted);
    }
}

#[test]
fn engines_are_asked_for_their_load_from_one_reload_to_another() {
    let fleet = engines(2);
    let urls = fleet.urls();
    let list = workers(&[&urls[0], &urls[1]]) + "load_monitor_interval = 0.1\n";
    let asked =
        || fleet.engines().iter().filter_map(|engine| engine.stats().paths.get("/v1/loads").copied()).sum::<u64>();
    fleet.engine(0).pretend(Some(Pretended::Load { kv_usage: 0.9, waiting: 0 }));
    let served = Served::start(&list);
    (0..4).for_each(|_| drop(served.chat().expect(200)));
    assert_eq!(asked(), 0);
    let is_shed = || served.metric("corelane_worker_shed") == 1.0;
    served.reload(&(list.clone() + "overload_token_usage_threshold = 0.8\n"));
    until("it is shed", is_shed);
    let before = fleet.engine(0).stats().requests;
    (0..4).for_each(|_| drop(served.chat().expect(200)));
    assert_eq!(fleet.engine(0).stats().requests, before);
    // The threshold moves while readings stay.
    served.reload(&(list.clone() + "overload_token_usage_threshold = 0.95\n"));
    until("it is back", || !is_shed());
    served.reload(&(list.clone() + "overload_token_usage_threshold = 0.5\n"));
    until("it is shed", is_shed);
    served.reload(&list);
    until("nothing is known", || !served.ask("/metrics").text().contains("corelane_worker_shed{"));
    let (before, requests) = (asked(), fleet.engine(0).stats().requests);
    (0..8).for_each(|_| drop(served.chat().expect(200)));
    assert!(fleet.engine(0).stats().requests > requests);
    std::thread::sleep(Duration::from_millis(400));
    assert!(asked() <= before + 2, "at most one question each was under way");
}
