//! The demo as people run it: the real program, its printed addresses, the line to paste, signals.
//!
//! Takes nothing, gives proof that what the demo prints is true and that its counts come to rest.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Longest wait for a line, on a busy host.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running demo. Its drop kills it.
struct Demo {
    child: Child,
    lines: Receiver<String>,
    stderr: Option<ChildStderr>,
    /// Everything that was read.
    seen: Vec<String>,
}

impl Demo {
    fn start(args: &[&str]) -> Demo {
        let mut command = Command::new(env!("CARGO_BIN_EXE_corelane"));
        for name in ["HOST", "PORT", "POLICY", "CORES"] {
            command.env_remove(format!("CORELANE_{name}"));
        }
        command.arg("demo").args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = read_lines(child.stdout.take().unwrap());
        let stderr = child.stderr.take();
        Demo { child, lines, stderr, seen: Vec::new() }
    }

    /// The next line that begins so.
    fn line(&mut self, start: &str) -> String {
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => self.seen.push(line),
                Err(_) => {
                    let complaints = self.complaints();
                    panic!("no line {start:?} in {:#?}\n{complaints}", self.seen);
                }
            }
            if let Some(line) = self.seen.last().filter(|line| line.starts_with(start)) {
                return line.clone();
            }
        }
    }

    /// `http://host:port` of a line like `gateway  http://host:port  …`.
    fn url(&mut self, start: &str) -> String {
        let line = self.line(start);
        let url = line.split_whitespace().nth(1).unwrap().to_owned();
        assert!(url.starts_with("http://"), "{line}");
        url
    }

    fn interrupt(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    }

    fn complaints(&mut self) -> String {
        let mut text = String::new();
        // Only of a demo that has ended or is killed now.
        let _ = self.child.kill();
        if let Some(mut stderr) = self.stderr.take() {
            stderr.read_to_string(&mut text).unwrap();
        }
        text
    }

    /// Waits for the end: exit code, all lines of stdout, stderr.
    fn end(mut self) -> (i32, Vec<String>, String) {
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            self.seen.push(line);
        }
        let mut text = String::new();
        self.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        let code = self.child.wait().unwrap().code().expect("no signal ended it");
        (code, std::mem::take(&mut self.seen), text)
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_lines(stdout: ChildStdout) -> Receiver<String> {
    let (send, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines() {
            if send.send(line.unwrap()).is_err() {
                return;
            }
        }
    });
    lines
}

/// The value behind a flag of the curl line, without its quotes.
fn quoted<'a>(curl: &'a str, flag: &str) -> &'a str {
    let at = curl.find(&format!(" {flag} '")).unwrap_or_else(|| panic!("no {flag} in {curl}")) + flag.len() + 3;
    &curl[at..at + curl[at..].find('\'').unwrap()]
}

/// Sends what curl would send; the whole answer.
fn by_hand(curl: &str) -> String {
    let url = curl.split_whitespace().find_map(|word| word.strip_prefix("http://")).unwrap();
    let (authority, path) = url.split_once('/').unwrap();
    let (header, body) = (quoted(curl, "-H"), quoted(curl, "-d"));
    let mut stream = TcpStream::connect(authority).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(
        stream,
        "POST /{path} HTTP/1.1\r\nhost: {authority}\r\n{header}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Runs the line in a shell; `None` where there is no curl.
fn by_curl(curl: &str) -> Option<String> {
    Command::new("curl").arg("--version").stdout(Stdio::null()).status().ok()?;
    let mut shell = Command::new("sh");
    for name in ["http_proxy", "ALL_PROXY", "all_proxy"] {
        shell.env_remove(name);
    }
    let done = shell.arg("-c").arg(curl).output().unwrap();
    assert!(done.status.success(), "{curl}\n{}", String::from_utf8_lossy(&done.stderr));
    Some(String::from_utf8(done.stdout).unwrap())
}

fn get(url: &str) -> String {
    let (authority, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
    let mut stream = TcpStream::connect(authority).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET /{path} HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn is_whole_stream(events: &str) -> bool {
    events.matches("data: {").count() > 60 && events.trim_end().ends_with("data: [DONE]")
}

/// Every worker counts nothing, and the number of workers is as wanted.
fn assert_at_rest(lines: &[String], workers: usize) {
    let at_rest: Vec<&String> = lines.iter().filter(|line| line.contains("in-flight at rest: ")).collect();
    assert_eq!(at_rest.len(), workers, "{lines:#?}");
    assert!(at_rest.iter().all(|line| line.contains("in-flight at rest: 0 ")), "{at_rest:#?}");
}

#[test]
fn what_it_prints_is_true() {
    let mut demo = Demo::start(&["--plain", "--port", "0", "--load", "8", "--seconds", "4"]);
    let gateway = demo.url("gateway");
    let metrics = demo.url("metrics");
    let curl = demo.line("curl");
    assert!(curl.starts_with(&format!("curl -N {gateway}/v1/chat/completions ")), "{curl}");
    let answer = by_hand(&curl);
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert!(answer.contains("data: {") && answer.contains("data: [DONE]"), "{answer}");
    if let Some(events) = by_curl(&curl) {
        assert!(is_whole_stream(&events), "{events}");
    }
    let text = get(&metrics);
    assert!(text.starts_with("HTTP/1.1 200 ") && text.contains("corelane_worker_selected_total"), "{text}");

    let (code, lines, complaints) = demo.end();
    assert_eq!((code, &*complaints), (0, ""), "{lines:#?}");
    assert_at_rest(&lines, 4);
    let ok = lines.iter().rev().find_map(|line| line.strip_prefix("load ")?.trim().split_once(" ok, 0 failed"));
    assert!(ok.unwrap_or_else(|| panic!("{lines:#?}")).0.parse::<u64>().unwrap() > 0, "{lines:#?}");
    assert!(lines.iter().any(|line| line.contains(" failed 0") && line.contains("req/s")), "{lines:#?}");
    assert_eq!(lines.iter().filter(|line| line.starts_with("worker ")).count(), 1, "{lines:#?}");
    assert!(lines.iter().all(|line| !line.contains('\x1b')), "{lines:#?}");
}

#[test]
fn an_interrupt_ends_it_well() {
    let mut demo = Demo::start(&["--plain", "--port", "0", "--load", "3", "--workers", "2", "--policy", "round_robin"]);
    demo.line("curl");
    demo.line("2 s");
    demo.interrupt();
    let (code, lines, complaints) = demo.end();
    assert_eq!((code, &*complaints), (0, ""), "{lines:#?}");
    assert_at_rest(&lines, 2);
}

#[test]
fn a_stream_in_progress_is_finished() {
    let mut demo = Demo::start(&["--plain", "--port", "0", "--workers", "1"]);
    let curl = demo.line("curl");
    let asking = std::thread::spawn(move || by_hand(&curl));
    std::thread::sleep(Duration::from_millis(300));
    demo.interrupt();
    let answer = asking.join().unwrap();
    assert!(answer.contains("data: [DONE]"), "{answer}");
    let (code, lines, complaints) = demo.end();
    assert_eq!((code, &*complaints), (0, ""), "{lines:#?}");
    assert_at_rest(&lines, 1);
}

/// The rows of the table for a role: in-flight, selections and tokens per second of each worker.
fn rows(lines: &[String], role: &str) -> Vec<[u64; 3]> {
    let mut rows = Vec::new();
    for line in lines.iter().filter(|line| line.starts_with("127.0.0.1:")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words[1] == role {
            rows.push([3, 4, 5].map(|i: usize| words[i].parse().unwrap_or_else(|e| panic!("{e}: {line}"))));
        }
    }
    rows
}

#[test]
fn pairs_are_shown_by_role() {
    let mut demo = Demo::start(&["--pd", "--plain", "--port", "0"]);
    for role in ["prefill", "decode"] {
        assert_eq!(demo.line(role).matches(" 127.0.0.1:").count(), 2);
    }
    demo.line("curl");
    assert!(demo.line("worker ").contains(" role "));
    demo.line("1 s");
    demo.interrupt();
    let (code, lines, complaints) = demo.end();
    assert_eq!((code, &*complaints), (0, ""), "{lines:#?}");
    assert_at_rest(&lines, 4);
    for role in ["prefill", "decode"] {
        assert!(rows(&lines, role).len() >= 2, "{role}: {lines:#?}");
        assert_eq!(lines.iter().filter(|l| l.contains("at rest: 0 ") && l.contains(role)).count(), 2, "{lines:#?}");
    }
}

#[test]
fn pairs_serve_the_load_and_the_line_to_paste() {
    let mut demo = Demo::start(&["--pd", "--plain", "--port", "0", "--load", "8", "--seconds", "4"]);
    let curl = demo.line("curl");
    let answer = by_hand(&curl);
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("data: [DONE]"), "{answer}");
    if let Some(events) = by_curl(&curl) {
        assert!(is_whole_stream(&events), "{events}");
    }
    let (code, lines, complaints) = demo.end();
    assert_eq!((code, &*complaints), (0, ""), "{lines:#?}");
    assert_at_rest(&lines, 4);
    assert!(lines.iter().any(|line| line.starts_with("load ") && line.contains(" 0 failed")), "{lines:#?}");
    for role in ["prefill", "decode"] {
        let rows = rows(&lines, role);
        let last = &rows[rows.len() - 2..];
        assert!(last.iter().all(|[_, selections, _]| *selections > 0), "{role}: {lines:#?}");
        assert!(rows.iter().any(|[.., tokens]| *tokens > 0), "{role}: {lines:#?}");
    }
}

/// What each worker of a role got of each burst, and the difference that is printed.
fn shares(lines: &[String], role: &str) -> Vec<(Vec<u64>, u64)> {
    let of_role = lines.iter().filter(|line| line.starts_with("burst ") && line.contains(&format!(" {role} ")));
    let number = |word: &str| word.parse::<u64>().unwrap_or_else(|e| panic!("{e}: {word}"));
    let read = |line: &String| {
        let (shares, difference) = line.split_once("  difference ").unwrap();
        (shares.split_whitespace().skip(3).map(number).collect(), number(difference))
    };
    of_role.map(read).collect()
}

#[test]
fn bursts_are_spread_evenly_over_pairs() {
    let (code, lines, complaints) = Demo::start(&["--pd", "--burst", "20", "--plain", "--port", "0"]).end();
    assert_eq!((code, &*complaints), (0, ""), "{lines:#?}");
    assert_at_rest(&lines, 16);
    for role in ["prefill", "decode"] {
        let bursts = shares(&lines, role);
        assert_eq!(bursts.len(), 3, "{lines:#?}");
        for (mut shares, difference) in bursts {
            shares.sort_unstable();
            assert_eq!((shares, difference), (vec![2, 2, 2, 2, 3, 3, 3, 3], 1), "{lines:#?}");
        }
    }
    assert!(lines.iter().any(|line| line == "gateway  60 ok, 0 failed, 0 left early"), "{lines:#?}");
}

#[test]
fn an_uneven_burst_is_a_failure() {
    // By chance all of them get 4 less often than once in a thousand million bursts.
    let args = ["--burst", "64", "--workers", "16", "--policy", "random", "--plain", "--port", "0"];
    let (code, lines, complaints) = Demo::start(&args).end();
    assert_eq!(code, 1, "{lines:#?}");
    assert_at_rest(&lines, 16);
    let told: Vec<&str> = complaints.lines().collect();
    for (n, (shares, difference)) in shares(&lines, "regular").into_iter().enumerate() {
        assert_eq!(shares.iter().sum::<u64>(), 64, "{lines:#?}");
        assert_eq!(shares.iter().max().unwrap() - shares.iter().min().unwrap(), difference, "{lines:#?}");
        let told = told.get(n).unwrap_or_else(|| panic!("{complaints}"));
        let wanted =
            format!("corelane: burst {}: one regular worker got {difference} requests more than another", n + 1);
        assert_eq!(**told, wanted);
    }
    assert_eq!(told.len(), 3, "{complaints}");
}

#[test]
fn a_busy_port_is_one_line() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (code, lines, complaints) = Demo::start(&["--plain", "--port", &port]).end();
    assert_eq!((code, lines.len()), (1, 0), "{lines:#?}\n{complaints}");
    assert_eq!(complaints.lines().count(), 1, "{complaints}");
    assert!(complaints.contains(&format!("127.0.0.1:{port}")) && complaints.contains("--port"), "{complaints}");
}

#[test]
fn a_busy_metrics_port_is_avoided() {
    // Held by this test as soon as the demos of others let go of it, or by whoever keeps it.
    let begun = Instant::now();
    let _taken = loop {
        match TcpListener::bind("127.0.0.1:29000") {
            Err(_) if begun.elapsed() < PATIENCE / 3 => std::thread::sleep(Duration::from_millis(20)),
            taken => break taken,
        }
    };
    let mut demo = Demo::start(&["--plain", "--port", "0", "--workers", "1"]);
    let line = demo.line("metrics");
    assert!(line.contains("the usual port is taken") && !line.contains(":29000/"), "{line}");
    demo.line("Ctrl-C");
    demo.interrupt();
    assert_eq!(demo.end().0, 0);
}

#[test]
fn mistakes_are_told_before_anything_starts() {
    let args = ["--workers", "0", "--load", "x", "--seconds", "1", "--policy", "rando", "--worker-urls", "http://w"];
    let (code, lines, complaints) = Demo::start(&args).end();
    assert_eq!((code, lines.len()), (2, 0), "{complaints}");
    for wanted in [
        "--workers: \"0\" is out of range; give a whole number from 1 to 256",
        "--load: \"x\" is not a whole number; give a whole number from 0 to 4096",
        "--policy: \"rando\"",
        "--worker-urls: no such flag",
        "corelane: 4 mistakes to correct; nothing was started",
    ] {
        assert!(complaints.lines().any(|line| line.starts_with(wanted)), "{wanted}: {complaints}");
    }
    let (code, _, complaints) = Demo::start(&["--pd", "--workers", "3"]).end();
    assert!(code == 2 && complaints.starts_with("--workers: does not go with --pd"), "{complaints}");
    let (code, _, complaints) = Demo::start(&["--burst", "2", "--load", "3"]).end();
    assert!(code == 2 && complaints.starts_with("--load: does not go with --burst"), "{complaints}");
    let (code, lines, _) = Demo::start(&["--help"]).end();
    assert_eq!(code, 0);
    for flag in
        ["--host", "--port", "--policy", "--cores", "--workers", "--load", "--seconds", "--plain", "--pd", "--burst"]
    {
        assert!(lines.iter().any(|line| line.contains(flag)), "{flag}: {lines:#?}");
    }
}
