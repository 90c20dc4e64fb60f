//! The access log: a line a request, what it says, and what it never says.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use corelane::config::{AccessFormat, AccessLog, Secret, WorkerSpec};
use corelane::metrics::Tally;
use corelane::mock::Settings;
use serde_json::{Value, json};

use crate::rig::{End, Http, Rig, config, fleet, post, specs, start, until};

/// A file of its own, removed at the end.
pub struct Log(PathBuf);

impl Log {
    pub fn new(name: &str) -> Log {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("access-{name}-{}.log", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Log(path)
    }

    pub fn path(&self) -> String {
        self.0.to_str().unwrap().to_owned()
    }

    fn text(&self) -> String {
        std::fs::read_to_string(&self.0).unwrap_or_default()
    }

    /// The lines, once there are so many.
    #[track_caller]
    pub fn lines(&self, n: usize) -> Vec<Value> {
        until(&format!("{n} lines:\n{}", self.text()), || self.text().lines().count() >= n);
        let text = self.text();
        assert_eq!(text.lines().count(), n, "{text}");
        text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn rig(log: &Log, workers: usize, change: impl FnOnce(&mut corelane::config::Config)) -> Rig {
    Rig::with(Settings::default(), workers, |c| {
        c.access_log = AccessLog::All;
        c.access_log_path = log.path();
        c.retry.statuses.clear();
        change(c);
    })
}

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

#[test]
fn a_line_says_what_became_of_a_request() {
    let log = Log::new("whole");
    let rig = rig(&log, 1, |_| {});
    let mut http = rig.http();
    let traceparent = format!("00-{TRACE}-00f067aa0ba902b7-01");
    let fields = [
        ("content-type", "application/json"),
        ("x-request-id", "mine-1"),
        ("traceparent", &*traceparent),
        ("tracestate", "vendor=opaque,other=1"),
        ("authorization", "Bearer sk-client-key"),
    ];
    let body = json!({"model":"mock","prompt":"secret-prompt ".repeat(40),"mock":{"echo":true}}).to_string();
    let answer = http.ask("POST", "/v1/completions?api_key=sk-in-the-query", &fields, body.as_bytes()).expect(200);
    // W3C trace context goes on to the worker.
    for line in [&*format!("traceparent: {traceparent}"), "tracestate: vendor=opaque,other=1"] {
        assert!(answer.text().contains(line), "{}", answer.text());
    }
    let sent =
        json!({"model":"mock","prompt":"secret-prompt ".repeat(40),"stream":true,"max_tokens":3,"mock":{"gap_ms":30}});
    let stream = http.post("/v1/completions", &sent).expect(200);
    http.post("/v1/completions", &json!({"model":"mock\n\"evil\u{1b}[2J","prompt":"x"})).expect(404);
    http.ask("POST", "/generate", &[], b"{").expect_error(400, "invalid_json");
    http.ask("GET", "/v1/responses/resp_1", &[], b"").expect(404);
    http.ask("GET", "/health", &[], b"").expect(200);

    let lines = log.lines(6);
    let worker = &rig.fleet.urls()[0];
    let first = &lines[0];
    for (key, value) in [
        ("id", json!("mine-1")),
        ("trace", json!(TRACE)),
        ("method", json!("POST")),
        ("route", json!("/v1/completions")),
        ("path", Value::Null),
        ("model", json!("mock")),
        ("stream", Value::Null),
        ("worker", json!(worker)),
        ("role", json!("regular")),
        ("decision", json!("miss")),
        ("match", json!(0.0)),
        ("status", json!(200)),
        ("end", json!("complete")),
        ("attempts", json!(1)),
        ("bytes_out", json!(answer.head.len() + answer.head.lines().count() + 2 + answer.body.len())),
    ] {
        assert_eq!(first[key], value, "{key}: {first}");
    }
    assert!(first["bytes_in"].as_u64().unwrap() > body.len() as u64 + 100);
    assert!(first["client"].as_str().unwrap().starts_with("127.0.0.1:"));
    let time = first["time"].as_str().unwrap();
    assert!(time.len() == 27 && time.starts_with("20") && time.ends_with('Z'), "{time}");
    for key in ["head_ms", "body_ms", "queue_ms", "upstream_ms", "total_ms"] {
        assert!(first[key].as_f64().is_some_and(|ms| (0.0..20_000.0).contains(&ms)), "{key}: {first}");
    }
    // The prompt is known by now.
    let second = &lines[1];
    assert_eq!((&second["stream"], &second["decision"], &second["trace"]), (&json!(true), &json!("hit"), &Value::Null));
    assert!(second["match"].as_f64().unwrap() > 0.9 && second["total_ms"].as_f64().unwrap() > 50.0, "{second}");
    assert_eq!(second["id"], stream.header("x-request-id").unwrap());

    let unknown = &lines[2];
    assert_eq!((&unknown["model"], &unknown["end"]), (&json!("mock\n\"evil\u{1b}[2J"), &json!("model_not_found")));
    assert_eq!(
        (&unknown["status"], &unknown["worker"], &unknown["upstream_ms"]),
        (&json!(404), &Value::Null, &Value::Null)
    );
    assert_eq!((&lines[3]["end"], &lines[3]["status"]), (&json!("invalid_json"), &json!(400)));
    assert_eq!((&lines[4]["route"], &lines[4]["path"]), (&json!("/v1/responses/*"), &json!("/v1/responses/resp_1")));
    assert_eq!((&lines[4]["end"], &lines[4]["status"]), (&json!("complete"), &json!(404)));
    assert_eq!((&lines[5]["route"], &lines[5]["status"]), (&json!("/health"), &json!(200)));
    for never in ["secret-prompt", "sk-client-key", "sk-in-the-query", "\u{1b}"] {
        assert!(!log.text().contains(never), "{never}");
    }
    assert_eq!(rig.metric(r#"corelane_access_log_lines_total{result="written"}"#), Some(6.0));
    assert_eq!(rig.tally(Tally::AccessLogDropped), 0);
}

#[test]
fn a_line_says_how_it_ended_otherwise() {
    let log = Log::new("ends");
    let rig = rig(&log, 1, |c| {
        c.access_log = AccessLog::Errors;
        c.api_keys = vec![Secret::new("sk-gateway")];
        c.max_concurrent_requests = 1;
        c.queue_timeout = Duration::from_millis(150);
    });
    let key = [("authorization", "Bearer sk-gateway"), ("content-type", "application/json")];
    let ask = |http: &mut Http, mock: Value| {
        let body = json!({"prompt":"x","stream":true,"max_tokens":200,"mock":mock}).to_string();
        http.send(&crate::rig::request("POST", "/v1/completions", &key, body.as_bytes()));
    };
    // What went well has no line here.
    let mut http = rig.http();
    ask(&mut http, json!({}));
    http.answer().expect(200);
    // The worker dies.
    ask(&mut http, json!({"reset_after_events":2}));
    assert_ne!(http.answer().end, End::Whole);
    let worker_cut = &log.lines(1)[0];
    assert_eq!((&worker_cut["end"], &worker_cut["status"]), (&json!("worker_cut"), &json!(0)));
    assert!(worker_cut["bytes_out"].as_u64().unwrap() > 200, "{worker_cut}");
    // The client leaves, while another waits for its turn in vain.
    let mut http = rig.http();
    ask(&mut http, json!({"stall_after_events":1}));
    http.head().unwrap();
    let mut waiting = rig.http();
    ask(&mut waiting, json!({}));
    waiting.answer().expect_error(408, "queue_timeout");
    let late = &log.lines(2)[1];
    assert_eq!((&late["end"], &late["worker"]), (&json!("queue_timeout"), &Value::Null));
    assert!(late["queue_ms"].as_f64().unwrap() >= 150.0, "{late}");
    drop(http);
    let left = &log.lines(3)[2];
    assert_eq!((&left["end"], &left["status"], &left["attempts"]), (&json!("client_left"), &json!(0), &json!(1)));
    // Who has no key, and who is none of us.
    rig.http().post("/v1/completions", &json!({"prompt":"x"})).expect_error(401, "invalid_api_key");
    rig.http().send(b"NONSENSE\r\n\r\n").answer().expect_error(400, "bad_request_line");
    let lines = log.lines(5);
    assert_eq!((&lines[3]["end"], &lines[3]["route"]), (&json!("invalid_api_key"), &json!("/v1/completions")));
    assert_eq!((&lines[4]["end"], &lines[4]["route"]), (&json!("bad_request_line"), &Value::Null));
    assert!(!log.text().contains("sk-gateway"));
}

/// The kernel has the buffer, and the head in it, when the time for a large body is over.
#[test]
fn a_body_that_does_not_come_has_its_line() {
    let log = Log::new("half");
    let rig = rig(&log, 1, |c| c.body_timeout = Duration::from_millis(300));
    let head = "POST /generate HTTP/1.1\r\nHost: g\r\nx-request-id: mine-1\r\nContent-Length: 200000\r\n\r\n";
    for body in [100, 150_000] {
        let mut http = rig.http();
        http.send(head.as_bytes()).send(&vec![b' '; body]).answer().expect_error(408, "body_timeout");
        http.expect_closed();
    }
    for line in log.lines(2) {
        let said = ["id", "route", "status", "end"].map(|name| line[name].clone());
        assert_eq!(said, [json!("mine-1"), json!("/generate"), json!(408), json!("body_timeout")], "{line}");
    }
    let came: Vec<Value> = log.lines(2).iter().map(|line| line["bytes_in"].clone()).collect();
    assert_eq!(came, [100, 150_000].map(|body| json!(head.len() + body)));
    assert_eq!(rig.tally(Tally::Panics), 0);
}

/// A body that was still coming when the grace period ended did not fail by its client.
#[test]
fn a_body_that_the_end_of_the_process_cuts_is_not_the_clients_fault() {
    let log = Log::new("ending");
    let rig = rig(&log, 1, |c| c.shutdown_grace = Duration::from_millis(300));
    let mut clients = Vec::new();
    for framing in ["Content-Length: 200000\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n5\r\n{"] {
        let mut http = rig.http();
        http.send(format!("POST /generate HTTP/1.1\r\nHost: g\r\nx-request-id: mine-1\r\n{framing}").as_bytes());
        clients.push(http);
    }
    until("both are being read", || rig.tally(Tally::ClientBytesIn) > 150);
    assert!(!rig.gateway.drain(), "something had to be cut");
    for line in log.lines(2) {
        let said = ["id", "route", "status", "end"].map(|name| line[name].clone());
        assert_eq!(said, [json!("mine-1"), json!("/generate"), json!(503), json!("shutting_down")], "{line}");
    }
    for http in &mut clients {
        if let Ok(answer) = http.try_answer_to("POST") {
            answer.expect_error(503, "shutting_down");
        }
    }
}

#[test]
fn attempts_and_their_last_worker_are_told() {
    let log = Log::new("attempts");
    let fleet = fleet(Settings::default(), 1);
    let mut config = config([vec![WorkerSpec::new("http://127.0.0.1:9")], specs(&fleet)].concat());
    config.health_check = false;
    config.workers[0].models = vec!["mock".into()];
    config.policy = corelane::config::Policy::LeastLoad;
    (config.access_log, config.access_log_path) = (AccessLog::All, log.path());
    config.access_log_format = AccessFormat::Text;
    let gateway = start(config);
    let mut http = Http::connect(gateway.address());
    for _ in 0..2 {
        http.post("/v1/completions", &json!({"model":"mock","prompt":"x"})).expect(200);
    }
    until("two lines", || log.text().lines().count() == 2);
    let (text, worker) = (log.text(), format!(" worker={} role=regular ", fleet.urls()[0]));
    assert!(text.lines().all(|line| line.contains(&worker) && line.contains(" status=200 end=complete ")), "{text}");
    assert!(text.contains(" attempts=2 ") && text.contains(" attempts=1 "), "{text}");
}

#[test]
fn a_sample_has_all_that_failed() {
    let log = Log::new("sample");
    let rig = rig(&log, 1, |c| {
        c.access_log = AccessLog::Sampled;
        c.access_log_sample = 10;
    });
    let mut http = rig.http();
    for _ in 0..300 {
        http.ask("GET", "/health", &[], b"").expect(200);
    }
    for _ in 0..5 {
        http.ask("GET", "/nowhere", &[], b"").expect(404);
    }
    until("the failures are there", || log.text().matches("not_found").count() == 5);
    let sampled = log.text().matches(r#""status":200"#).count();
    assert!((5..100).contains(&sampled), "{sampled} of 300");
}

#[test]
fn what_was_handed_over_is_written_before_the_end() {
    let log = Log::new("drain");
    let Rig { gateway, fleet } = rig(&log, 1, |c| c.cores = vec![0, 1]);
    let address = gateway.address();
    let clients: Vec<_> = (0..4)
        .map(|_| {
            std::thread::spawn(move || {
                let mut http = Http::connect(address);
                (0..100).for_each(|_| drop(http.ask("GET", "/liveness", &[], b"").expect(200)));
            })
        })
        .collect();
    clients.into_iter().for_each(|client| client.join().unwrap());
    // One that the end cuts.
    let mut http = Http::connect(address);
    http.send(&post("/v1/completions", &json!({"prompt":"x","stream":true,"mock":{"stall_after_events":1}})));
    http.head().unwrap();
    assert!(!gateway.drain());
    let lines = log.lines(401);
    assert_eq!(lines[400]["end"], "shutdown_midway");
    drop(fleet);
}

/// logrotate moves the file away and says so.
#[test]
fn the_file_is_opened_anew_on_request() {
    let log = Log::new("rotate");
    let moved = Log::new("rotated");
    let rig = rig(&log, 1, |_| {});
    let mut http = rig.http();
    http.ask("GET", "/health", &[], b"").expect(200);
    log.lines(1);
    std::fs::rename(&log.0, &moved.0).unwrap();
    http.ask("GET", "/health", &[], b"").expect(200);
    moved.lines(2);
    assert!(!log.0.exists());
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::USR1).unwrap();
    until("there is a new file", || log.0.exists());
    http.ask("GET", "/health", &[], b"").expect(200);
    assert_eq!((log.lines(1).len(), moved.lines(2).len()), (1, 2));
}

/// A pipe that nobody reads, and a file that cannot be made.
#[test]
fn a_log_that_takes_nothing_holds_nobody_up() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let rig = Rig::with(Settings::default(), 1, |c| {
        c.access_log = AccessLog::All;
        c.access_log_path = format!("/proc/self/fd/{}", writer.as_raw_fd());
    });
    let mut http = rig.http();
    // One write of the lines and the queue of the lane, at least.
    let many = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n".repeat(50);
    for _ in 0..100 {
        http.send(&many);
        (0..50).for_each(|_| drop(http.answer_to("GET").expect(200)));
    }
    until("lines are dropped", || rig.tally(Tally::AccessLogDropped) > 0);
    let dropped = rig.tally(Tally::AccessLogDropped);
    assert!(dropped < 5000 - 64 * 1024 / 400, "what fits is kept: {dropped}");
    assert_eq!(rig.metric("corelane_access_log_dropped_total"), Some(dropped as f64));
    // It is read again, and goes on with whole lines.
    drop(writer);
    let reading = std::thread::spawn(move || {
        let mut text = String::new();
        reader.read_to_string(&mut text).map(|_| text)
    });
    let Rig { gateway, fleet } = rig;
    drop((http, gateway, fleet));
    let text = reading.join().unwrap().unwrap();
    assert_eq!(text.lines().count() as u64, 5000 - dropped);
    text.lines().for_each(|line| drop(serde_json::from_str::<Value>(line).unwrap()));

    let mut nowhere = config(Vec::new());
    (nowhere.access_log, nowhere.access_log_path) = (AccessLog::All, "/nowhere/access.log".into());
    let refused = corelane::boot::Gateway::start(nowhere).err().unwrap();
    assert!(refused.contains("/nowhere/access.log") && refused.contains("--access-log-path"), "{refused}");

    // Nobody has opened the other end: the start does not wait for that.
    let pipe = Log::new("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe.0).status().unwrap().success());
    let mut unread = config(Vec::new());
    (unread.access_log, unread.access_log_path) = (AccessLog::All, pipe.path());
    let refused = corelane::boot::Gateway::start(unread).err().unwrap();
    assert!(refused.contains(&pipe.path()) && refused.contains("cannot be opened"), "{refused}");
}
