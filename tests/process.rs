//! The program as a process: signals, exit codes, ports, cores, limits, killed workers, closed pipes.
//!
//! Takes the built binary, gives real processes real signals. Never ends a process that it did not start.

mod children;

use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use corelane::config::options::OPTIONS;

use children::{
    PATIENCE, Process, TempFile, command, gateway, lasting_ports, mask, ready, serve_args, two_cores, until, worker,
};
use rustix::process::Signal;

const CHAT: &str = "/v1/chat/completions";

/// Runs to its end.
fn run(mut command: Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > PATIENCE {
            let _ = child.kill();
            panic!("{command:?} did not end: {:?}", child.wait_with_output().unwrap());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// The one line that a failed start leaves.
#[track_caller]
fn one_line(output: &Output) -> &str {
    let line = text(&output.stderr).trim_end_matches('\n');
    assert!(!line.is_empty() && !line.contains('\n'), "not one line: {line:?}");
    assert!(!line.contains("panicked"), "{line}");
    line
}

// ── a client ────────────────────────────────────────────────────────────────────────────────────────────────────

#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
}

fn ask(address: SocketAddr, method: &str, path: &str, body: &str) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let wire = format!(
        "{method} {path} HTTP/1.1\r\nhost: corelane\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(wire.as_bytes())?;
    Ok(stream)
}

/// A whole exchange on a connection of its own.
fn fetch(address: SocketAddr, method: &str, path: &str, body: &str) -> io::Result<Answer> {
    let mut all = Vec::new();
    ask(address, method, path, body)?.read_to_end(&mut all)?;
    let end = all.windows(4).position(|w| w == b"\r\n\r\n").ok_or(ErrorKind::UnexpectedEof)? + 4;
    let head = String::from_utf8_lossy(&all[..end]).to_lowercase();
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).ok_or(ErrorKind::InvalidData)?;
    Ok(Answer { status, head, body: all.split_off(end) })
}

fn get(address: SocketAddr, path: &str) -> io::Result<Answer> {
    fetch(address, "GET", path, "")
}

const SHORT: &str = r#"{"model":"mock","max_tokens":2,"messages":[{"role":"user","content":"hello"}]}"#;

fn chat(address: SocketAddr) -> io::Result<Answer> {
    fetch(address, "POST", CHAT, SHORT)
}

/// A stream that is under way.
struct Slow {
    stream: TcpStream,
    seen: Vec<u8>,
}

impl Slow {
    /// Asks for `tokens` events, `gap_ms` apart, and waits for the first.
    fn start(address: SocketAddr, tokens: usize, gap_ms: u64) -> Slow {
        let body = format!(
            r#"{{"model":"mock","stream":true,"max_tokens":{tokens},"mock":{{"gap_ms":{gap_ms}}},"messages":[{{"role":"user","content":"hello"}}]}}"#
        );
        Slow { stream: ask(address, "POST", CHAT, &body).unwrap(), seen: Vec::new() }.begun()
    }

    /// Asks as a client of HTTP/1.0 does, for whom the end of the connection ends an answer.
    fn start_1_0(address: SocketAddr) -> Slow {
        let body = r#"{"model":"mock","stream":true,"max_tokens":200,"mock":{"gap_ms":50},"messages":[]}"#;
        let mut stream = TcpStream::connect(address).unwrap();
        let length = body.len();
        write!(stream, "POST {CHAT} HTTP/1.0\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
        Slow { stream, seen: Vec::new() }.begun()
    }

    /// Waits for the first event.
    fn begun(mut self) -> Slow {
        while !text(&self.seen).contains("\ndata: ") {
            let mut piece = [0; 4096];
            let n = self.stream.read(&mut piece).unwrap();
            assert!(n > 0, "ended early: {}", text(&self.seen));
            self.seen.extend_from_slice(&piece[..n]);
        }
        self
    }

    /// Reads to the end; whether it was a clean one.
    fn rest(mut self) -> (String, bool) {
        let _ = self.stream.read_to_end(&mut self.seen);
        let seen = String::from_utf8(self.seen).unwrap();
        let clean = seen.ends_with("\r\n0\r\n\r\n");
        (seen, clean)
    }
}

fn events(seen: &str) -> usize {
    seen.matches("data: {").count()
}

/// The value of a metric, summed over its labels.
fn metric(admin: SocketAddr, name: &str) -> f64 {
    let answer = get(admin, "/metrics").unwrap();
    let page = String::from_utf8_lossy(&answer.body).into_owned();
    let rows = page.lines().filter(|l| l.starts_with(name) && !l.starts_with('#'));
    rows.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

// ── the end of a gateway ────────────────────────────────────────────────────────────────────────────────────────

fn drains(signal: Signal) {
    let (_worker, url) = worker(0, &[]);
    let (mut gateway, address) =
        gateway(&[&url], &["--shutdown-settle-secs", "3", "--shutdown-grace-period-secs", "15"]);
    let slow = Slow::start(address, 40, 150);
    let idle = TcpStream::connect(address).unwrap();
    let asked = Instant::now();
    gateway.signal(signal);
    gateway.line("settling");

    // No longer ready, but who comes is served.
    let answer = get(address, "/readiness").unwrap();
    assert_eq!((answer.status, &answer.json()["reason"]), (503, &"draining".into()));
    assert_eq!(get(address, "/liveness").unwrap().status, 200);
    assert_eq!(chat(address).unwrap().status, 200);
    assert!(asked.elapsed() < Duration::from_millis(2800), "too slow a machine to tell");

    // Nobody new, and who is idle is told to go.
    gateway.line("draining");
    until("refusal", || TcpStream::connect(address).is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused));
    idle.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
    assert_eq!((&idle).read(&mut [0; 1]).unwrap(), 0);
    assert!(gateway.child.try_wait().unwrap().is_none(), "ended with a stream in flight");

    let (seen, clean) = slow.rest();
    assert!(clean && seen.contains("data: [DONE]"), "{seen}");
    assert!(events(&seen) >= 40, "{}", events(&seen));
    let status = gateway.end();
    assert_eq!(status.code(), Some(0), "{status}");
    gateway.line("corelane ends");
}

#[test]
fn sigterm_drains_and_finishes_what_is_in_flight() {
    drains(Signal::TERM);
}

#[test]
fn sigint_drains_and_finishes_what_is_in_flight() {
    drains(Signal::INT);
}

#[test]
fn a_second_signal_ends_at_once() {
    let (_worker, url) = worker(0, &[]);
    for (first, second, code) in
        [(Signal::TERM, Signal::TERM, 143), (Signal::INT, Signal::INT, 130), (Signal::TERM, Signal::INT, 130)]
    {
        let (mut gateway, address) = gateway(&[&url], &["--shutdown-settle-secs", "10"]);
        let slow = Slow::start(address, 200, 100);
        gateway.signal(first);
        gateway.line("settling");
        let asked = Instant::now();
        gateway.signal(second);
        assert_eq!(gateway.end().code(), Some(code));
        assert!(asked.elapsed() < Duration::from_secs(3), "{:?}", asked.elapsed());
        gateway.line("second signal");
        assert!(!slow.rest().1, "a cut stream ended cleanly");
    }
}

/// An answer that ends with its connection has nothing but the way in which that ends to tell whether it is whole.
#[test]
fn a_gateway_that_ends_at_once_or_is_killed_resets_what_a_close_would_complete() {
    let (_worker, url) = worker(0, &[]);
    for signal in [Signal::KILL, Signal::TERM] {
        let (mut gateway, address) = gateway(&[&url], &["--shutdown-settle-secs", "10"]);
        let mut slow = Slow::start_1_0(address);
        assert!(!text(&slow.seen).contains("chunked"), "{}", text(&slow.seen));
        if signal == Signal::TERM {
            gateway.signal(signal);
            gateway.line("settling");
        }
        gateway.signal(signal);
        let end = slow.stream.read_to_end(&mut slow.seen);
        assert_eq!(end.map_err(|e| e.kind()), Err(ErrorKind::ConnectionReset), "{signal:?}: {}", text(&slow.seen));
        gateway.end();
    }
}

/// What arrived while the process was stopped counts before the clock does.
#[test]
fn a_gateway_that_stood_still_gives_nobody_up_for_it() {
    let (_worker, url) = worker(0, &[]);
    let core = mask()[0].to_string();
    let limits = ["--cores", &core, "--stall-timeout-secs", "1", "--write-stall-timeout-secs", "1"];
    let mut gateway = Process::start(command(&serve_args(&[&url], &limits)));
    let address = gateway.announced("address");
    ready(address);
    // More than the kernel gives in one turn, and than the lane has buffers at first.
    let streams: Vec<Slow> = (0..200).map(|_| Slow::start(address, 40, 100)).collect();
    gateway.signal(Signal::STOP);
    std::thread::sleep(Duration::from_millis(2500));
    gateway.signal(Signal::CONT);
    for (n, stream) in streams.into_iter().enumerate() {
        let (seen, clean) = stream.rest();
        assert!(clean && seen.contains("data: [DONE]"), "stream {n}: {seen}");
        assert!(events(&seen) >= 40, "stream {n}: {}", events(&seen));
    }
}

#[test]
fn the_grace_period_bounds_the_wait() {
    let (_worker, url) = worker(0, &[]);
    let (mut gateway, address) =
        gateway(&[&url], &["--shutdown-settle-secs", "0", "--shutdown-grace-period-secs", "1"]);
    let slow = Slow::start(address, 200, 100);
    let asked = Instant::now();
    gateway.signal(Signal::TERM);
    let (seen, clean) = slow.rest();
    assert!(!clean && !seen.contains("[DONE]"), "{seen}");
    assert!(events(&seen) > 5, "cut too early: {seen}");
    assert_eq!(gateway.end().code(), Some(0));
    let took = asked.elapsed();
    assert!(took > Duration::from_millis(900) && took < Duration::from_secs(5), "{took:?}");
    gateway.line("the grace period is over");
}

#[test]
fn an_idle_gateway_ends_right_after_settling_and_leaves_its_port() {
    let (_worker, url) = worker(0, &[]);
    let port = lasting_ports(1).to_string();
    let args =
        ["serve", "--port", &port, "--prometheus-port", "0", "--shutdown-settle-secs", "0", "--worker-urls", &url];
    // The port can be taken again at once, whatever its last connections left behind.
    for _ in 0..3 {
        let mut gateway = Process::start(command(&args));
        let address = gateway.announced("address");
        assert_eq!(address.port().to_string(), port);
        ready(address);
        assert_eq!(chat(address).unwrap().status, 200);
        let asked = Instant::now();
        gateway.signal(Signal::TERM);
        assert_eq!(gateway.end().code(), Some(0));
        assert!(asked.elapsed() < Duration::from_secs(3), "{:?}", asked.elapsed());
    }
}

/// Nothing waits in the kernel for more to come, on either side of the gateway.
#[test]
fn sockets_on_both_sides_send_at_once() {
    let (_worker, url) = worker(0, &[]);
    let (gateway, address) = gateway(&[&url], &["--health-check-interval-secs", "3600"]);
    let slow = Slow::start(address, 1000, 100);
    let pid = rustix::process::Pid::from_child(&gateway.child);
    let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    let (mut refused, mut sides) = (false, [0, 0]);
    // A probe's socket, which waits for nothing, may be among them for a moment.
    until("every socket sends at once, and there are some on either side", || {
        let numbers = std::fs::read_dir(format!("/proc/{}/fd", gateway.child.id())).unwrap();
        let numbers = numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let mut held_back = 0;
        sides = [0, 0];
        for number in numbers {
            let fd = match rustix::process::pidfd_getfd(&process, number, rustix::process::PidfdGetfdFlags::empty()) {
                Ok(fd) => fd,
                Err(e) => {
                    refused |= e == rustix::io::Errno::PERM;
                    continue;
                }
            };
            let socket = socket2::SockRef::from(&fd);
            let port = |address: io::Result<socket2::SockAddr>| Some(address.ok()?.as_socket()?.port());
            let Some(peer) = port(socket.peer_addr()) else { continue };
            let worker = url.ends_with(&format!(":{peer}"));
            if worker || port(socket.local_addr()) == Some(address.port()) {
                held_back += u32::from(!socket.tcp_nodelay().unwrap());
                sides[usize::from(worker)] += 1;
            }
        }
        refused || held_back == 0 && sides.iter().all(|n| *n > 0)
    });
    if refused {
        println!("this host does not show one process the sockets of another: nothing to see");
    }
    drop(slow);
}

// ── workers that die ────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_killed_worker_cuts_its_streams_and_is_missed_until_it_is_back() {
    let port = lasting_ports(1);
    let (mut only, url) = worker(port, &[]);
    let probes =
        ["--health-check-interval-secs", "0.2", "--health-failure-threshold", "2", "--health-success-threshold", "1"];
    let (mut gateway, address) = gateway(&[&url], &probes);
    let slow = Slow::start(address, 200, 50);
    only.kill();
    let (seen, clean) = slow.rest();
    assert!(!clean && !seen.contains("[DONE]"), "{seen}");

    let mut statuses = Vec::new();
    until("503 once the probes have noticed", || {
        let answer = chat(address).unwrap();
        assert!(answer.head.contains("x-corelane-error:"), "{answer:?}");
        assert!(answer.json()["error"]["message"].is_string(), "{answer:?}");
        statuses.push(answer.status);
        answer.status == 503
    });
    assert!(statuses.iter().all(|s| matches!(s, 502 | 503)), "{statuses:?}");
    assert_eq!(get(address, "/readiness").unwrap().status, 503);
    assert_eq!(get(address, "/health").unwrap().status, 200);
    let admin = gateway.announced("admin");
    assert!(metric(admin, "corelane_streams_cut_total") >= 1.0);

    let (_again, _) = worker(port, &[]);
    until("the worker is taken back", || chat(address).unwrap().status == 200);
    assert_eq!(get(address, "/readiness").unwrap().status, 200);
    assert_eq!(metric(admin, "corelane_worker_inflight{"), 0.0);
    gateway.signal(Signal::TERM);
    gateway.line("settling");
}

#[test]
fn another_worker_takes_over_from_a_killed_one() {
    let (mut doomed, first) = worker(0, &[]);
    let (_other, second) = worker(0, &[]);
    let (mut gateway, address) = gateway(&[&first, &second], &["--health-check-interval-secs", "3600"]);
    for _ in 0..4 {
        assert_eq!(chat(address).unwrap().status, 200);
    }
    doomed.kill();
    // No probe tells: each request finds out by itself, on pooled connections and on new ones.
    for i in 0..20 {
        assert_eq!(chat(address).unwrap().status, 200, "request {i}");
    }
    assert!(metric(gateway.announced("admin"), "corelane_retries_total") >= 1.0);
}

// ── what the host must give ─────────────────────────────────────────────────────────────────────────────────────

const NOBODY: &str = "http://127.0.0.1:9";

#[track_caller]
fn refused(mut prepare: impl FnMut(&mut Command), more: &[&str]) -> String {
    let mut args = vec!["serve", "--log-level", "error", "--worker-urls", NOBODY];
    args.extend(more);
    if !more.contains(&"--prometheus-port") {
        args.extend(["--prometheus-port", "0"]);
    }
    let mut command = command(&args);
    prepare(&mut command);
    let output = run(command);
    let line = one_line(&output).to_owned();
    assert_eq!(output.status.code(), Some(1), "{line}");
    assert!(line.starts_with("corelane: "), "{line}");
    line
}

#[test]
fn a_busy_port_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let line = refused(|_| (), &["--port", &port]);
    assert!(line.contains("--port") && line.contains(&port), "{line}");

    // Another gateway shares its port among its lanes, but with nobody else.
    let (_worker, url) = worker(0, &[]);
    let (_gateway, address) = gateway(&[&url], &[]);
    let port = address.port().to_string();
    let line = refused(|_| (), &["--port", &port]);
    assert!(line.contains("--port") && line.contains(&port), "{line}");
    assert_eq!(chat(address).unwrap().status, 200);
}

#[test]
fn a_busy_metrics_port_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let line = refused(|_| (), &["--port", "0", "--prometheus-port", &port]);
    assert!(line.contains("--prometheus-port") && line.contains(&port), "{line}");
}

#[test]
fn an_address_of_another_host_is_named() {
    let line = refused(|_| (), &["--port", "0", "--host", "192.0.2.1"]);
    assert!(line.contains("--host") && line.contains("192.0.2.1"), "{line}");
}

#[test]
fn cores_that_do_not_exist_are_named() {
    let line = refused(|_| (), &["--port", "0", "--cores", "999"]);
    assert!(line.contains("--cores") && line.contains("999"), "{line}");
    let line = refused(|_| (), &["--port", "0", "--control-core", "999"]);
    assert!(line.contains("--control-core") && line.contains("999"), "{line}");
}

fn pin(command: &mut Command, core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    // SAFETY: between fork and exec only a system call is made.
    unsafe { command.pre_exec(move || Ok(rustix::thread::sched_setaffinity(None, &set)?)) };
}

#[test]
fn cores_outside_of_the_affinity_mask_are_named() {
    let [first, second, ..] = mask()[..] else {
        return println!("skipped: there is one core only");
    };
    let second = second.to_string();
    let line = refused(|c| pin(c, first), &["--port", "0", "--cores", &second]);
    assert!(line.contains("affinity mask") && line.contains("--cores") && line.contains(&second), "{line}");

    // Without --cores the mask decides.
    let (_worker, url) = worker(0, &[]);
    let mut command = command(&serve_args(&[&url], &[]));
    pin(&mut command, first);
    let mut gateway = Process::start(command);
    let address = gateway.announced("address");
    let line = gateway.line("corelane serves");
    assert!(line.contains("lanes=1") && line.contains(&format!("cores=[{first}]")), "{line}");
    ready(address);
    assert_eq!(chat(address).unwrap().status, 200);
}

fn limit(command: &mut Command, resource: rustix::process::Resource, to: u64) {
    let limit = rustix::process::Rlimit { current: Some(to), maximum: Some(to) };
    // SAFETY: between fork and exec only a system call is made.
    unsafe { command.pre_exec(move || Ok(rustix::process::setrlimit(resource, limit)?)) };
}

#[test]
fn a_lack_of_locked_memory_is_named() {
    let line = refused(|c| limit(c, rustix::process::Resource::Memlock, 0), &["--port", "0"]);
    assert!(line.contains("LimitMEMLOCK=") && line.contains("ulimit -l"), "{line}");
}

#[test]
fn a_lack_of_descriptors_at_start_is_named() {
    for few in 7..40 {
        let mut args = serve_args(&[NOBODY], &["--log-level", "error"]);
        let core = mask()[0].to_string();
        args.extend(["--cores", &core]);
        let mut command = command(&args);
        limit(&mut command, rustix::process::Resource::Nofile, few);
        let mut process = Process::start(command);
        let begun = Instant::now();
        let status = loop {
            match process.child.try_wait().unwrap() {
                Some(status) => break status,
                // It was enough.
                None if begun.elapsed() > Duration::from_secs(2) => return,
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        std::thread::sleep(Duration::from_millis(100));
        let log = process.log();
        assert!(!log.contains("panicked"), "with {few}: {log}");
        assert_eq!(status.code(), Some(1), "with {few}: {status} {log}");
        assert!(log.starts_with("corelane: ") && !log.contains('\n'), "with {few}: {log}");
        // Whatever ran out of them, the advice is about them.
        assert!(!log.contains("Too many open files") || log.contains("LimitNOFILE="), "with {few}: {log}");
    }
}

#[test]
fn few_descriptors_refuse_connections_and_nothing_else() {
    let (_worker, url) = worker(0, &[]);
    let cores = two_cores();
    let mut command = command(&serve_args(&[&url], &["--keep-alive-secs", "60", "--cores", &cores]));
    limit(&mut command, rustix::process::Resource::Nofile, 64);
    let mut gateway = Process::start(command);
    let (address, admin) = (gateway.announced("address"), gateway.announced("admin"));
    gateway.line("fewer than 8192 open files");
    ready(address);
    assert_eq!(metric(admin, "corelane_connections_turned_away_total"), 0.0);

    let slow = Slow::start(address, 20, 100);
    let crowd: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(address).unwrap()).collect();
    std::thread::sleep(Duration::from_millis(500));
    // Who is in is served on.
    let (seen, clean) = slow.rest();
    assert!(clean, "{seen}");
    drop(crowd);
    until("room again", || chat(address).is_ok_and(|a| a.status == 200));
    for _ in 0..20 {
        assert_eq!(chat(address).unwrap().status, 200);
    }
    // What was refused was refused before descriptors ran out.
    assert!(metric(admin, "corelane_connections_turned_away_total") >= 100.0);
    assert_eq!(metric(admin, "corelane_accept_errors_total"), 0.0);
    assert_eq!(metric(admin, "corelane_panics_total"), 0.0);
    until("everybody has left", || metric(admin, "corelane_lane_connections{") == 0.0);
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.end().code(), Some(0));
}

/// A probe or a request that could not be made for want of a descriptor says nothing of the worker.
#[test]
fn workers_stay_usable_while_descriptors_are_short() {
    let (_worker, url) = worker(0, &[]);
    let cores = two_cores();
    let mut more = vec!["--health-check-interval-secs", "0.1", "--health-failure-threshold", "1", "--cores", &cores];
    more.extend(["--max-connections-per-lane", "1000"]);
    let mut command = command(&serve_args(&[&url], &more));
    limit(&mut command, rustix::process::Resource::Nofile, 64);
    let mut gateway = Process::start(command);
    let address = gateway.announced("address");
    ready(address);
    let mut inside = TcpStream::connect(address).unwrap();
    inside.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut ask = |path: &str| {
        inside.write_all(format!("GET {path} HTTP/1.1\r\nhost: corelane\r\n\r\n").as_bytes()).unwrap();
        let mut piece = [0; 4096];
        let n = inside.read(&mut piece).unwrap();
        String::from_utf8_lossy(&piece[..n]).into_owned()
    };
    assert!(ask("/readiness").starts_with("HTTP/1.1 200"));
    let crowd: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(address).unwrap()).collect();
    gateway.line("probe not made");
    std::thread::sleep(Duration::from_millis(500));
    let answer = ask("/readiness");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let answer = ask("/get_model_info");
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("\"out_of_descriptors\""), "{answer}");
    drop(crowd);
    until("room again", || ask("/get_model_info").starts_with("HTTP/1.1 200"));
}

/// Makes system calls of one number fail with EPERM.
fn forbid(command: &mut Command, number: i64) {
    const LOAD_NUMBER: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let code = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut filter = [
        code(LOAD_NUMBER, 0, 0, 0),
        code(IF_EQUAL, 0, 1, number as u32),
        code(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        code(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    // SAFETY: between fork and exec only system calls are made; the filter lives in the closure.
    unsafe {
        command.pre_exec(move || {
            let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
            let done = libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0;
            if done { Ok(()) } else { Err(io::Error::last_os_error()) }
        })
    };
}

#[test]
fn a_forbidden_io_uring_is_explained() {
    for call in [libc::SYS_io_uring_setup, libc::SYS_io_uring_register, libc::SYS_io_uring_enter] {
        let line = refused(|c| forbid(c, call), &["--port", "0"]);
        assert!(line.contains("io_uring") && line.contains("seccomp") && line.contains("io_uring_disabled"), "{line}");
    }
}

// ── command line, file, variables, pipes ────────────────────────────────────────────────────────────────────────

#[test]
fn exit_codes_tell_help_from_mistakes() {
    let plain = |args: &[&str]| {
        let output = run(command(args));
        assert!(!text(&output.stderr).contains("panicked"));
        (output.status.code().unwrap(), text(&output.stdout).to_owned(), text(&output.stderr).to_owned())
    };
    for help in [&["--help"][..], &["-h"], &["help"]] {
        let (code, out, err) = plain(help);
        assert_eq!((code, err.as_str()), (0, ""), "{help:?}");
        assert!(["serve", "check", "demo", "mock-worker"].iter().all(|s| out.contains(s)), "{out}");
    }
    for version in ["--version", "-V"] {
        assert_eq!(plain(&[version]), (0, format!("corelane {}\n", env!("CARGO_PKG_VERSION")), String::new()));
    }
    for subcommand in ["serve", "check", "demo", "mock-worker"] {
        let (code, out, err) = plain(&[subcommand, "--help"]);
        assert_eq!((code, err.as_str()), (0, ""), "{subcommand}");
        assert!(out.contains("--port"), "{out}");
    }
    for wrong in [
        &[][..],
        &["sevre"],
        &["--port", "1"],
        &["serve", "--prot", "1"],
        &["serve", "--port", "x"],
        &["serve"],
        &["check", "--port"],
        &["mock-worker", "--prot"],
    ] {
        assert_eq!(plain(wrong).0, 2, "{wrong:?}");
    }
    let (code, out, err) = plain(&["check", "--worker-urls", NOBODY]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.starts_with("ok (no file): 1 worker") && out.ends_with('\n'), "{out}");
    let (code, out, err) = plain(&["check", "--port", "70000", "--policy", "lest_load"]);
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(err.contains("--port") && err.contains("did you mean least_load?") && err.contains("3 mistakes"), "{err}");
}

#[test]
fn a_file_with_everything_serves() {
    let (_worker, url) = worker(0, &["--api-key", "sk-worker"]);
    // The whole table with its defaults, as `check --print` writes it, is the file's beginning.
    let print = run(command(&["check", "--print", "--worker-urls", &url]));
    let page = text(&print.stdout);
    let mut file = String::new();
    for line in page.lines().filter(|l| !l.starts_with("worker_urls")) {
        let key = line.split(' ').next().unwrap_or_default();
        match key {
            "port" | "prometheus_port" => file.push_str(&format!("{key} = 0\n")),
            "log_level" => file.push_str("log_level = \"debug\"\n"),
            _ => file.push_str(&format!("{line}\n")),
        }
    }
    let pairs = ["prefill", "decode", "prefill_policy", "decode_policy"];
    let unset = ["worker_urls", "workers_file", "default_model", "target_worker_secret", "api_key", "admin_token"];
    let optional = |key| pairs.contains(&key) || unset.contains(&key);
    for row in OPTIONS.iter().filter(|r| !optional(r.key)) {
        assert!(file.contains(&format!("\n{} = ", row.key)), "{} is missing in\n{page}", row.key);
    }
    file.push_str(&format!(
        "default_model = \"mock\"\n[[workers]]\nurl = \"{url}\"\nrole = \"regular\"\nmodels = [\"mock\", \"other\"]\n\
         api_key = \"sk-worker\"\n[[extra_routes]]\npath = \"/mock/stats\"\nmethods = [\"GET\"]\n"
    ));
    let file = TempFile::new("everything.toml", &file);
    let check = run(command(&["check", "--config", file.name()]));
    assert_eq!(check.status.code(), Some(0), "{}", text(&check.stderr));
    assert!(text(&check.stdout).contains(file.name()), "{}", text(&check.stdout));

    let mut gateway = Process::start(command(&["serve", "--config", file.name()]));
    let address = gateway.announced("address");
    ready(address);
    assert_eq!(chat(address).unwrap().status, 200);
    assert_eq!(get(address, "/mock/stats").unwrap().status, 200);
    let models = get(address, "/v1/models").unwrap().json();
    assert_eq!((models["data"][0]["id"].as_str(), models["data"][1]["id"].as_str()), (Some("mock"), Some("other")));
    assert!(!gateway.log().contains("sk-worker"), "a key in the log");

    // A mistake in the file is told with its line, and nothing starts.
    let wrong = TempFile::new("wrong.toml", "port = 1\nprot = 2\n");
    let output = run(command(&["serve", "--config", wrong.name(), "--worker-urls", NOBODY]));
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains(&format!("{}:2", wrong.name())), "{}", text(&output.stderr));
    let output = run(command(&["serve", "--config", "/nowhere/corelane.toml"]));
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("/nowhere/corelane.toml"), "{}", text(&output.stderr));
}

#[test]
fn variables_configure_and_flags_win() {
    let (_worker, url) = worker(0, &[]);
    let mut command = command(&["serve", "--port", "0"]);
    command
        .env("CORELANE_PORT", "1")
        .env("CORELANE_PROMETHEUS_PORT", "0")
        .env("CORELANE_WORKER_URLS", &url)
        .env("CORELANE_POLICY", "round_robin")
        .env("CORELANE_POLCY", "typo");
    let mut gateway = Process::start(command);
    let address = gateway.announced("address");
    assert_ne!(address.port(), 1);
    gateway.line("CORELANE_POLCY");
    ready(address);
    assert_eq!(chat(address).unwrap().status, 200);
    assert_eq!(get(address, "/get_server_info").unwrap().json()["policy"], "round_robin");
}

#[test]
fn the_log_says_which_ring_and_is_plain_in_a_pipe() {
    let (_worker, url) = worker(0, &[]);
    let (mut gateway, _) = gateway(&[&url], &[]);
    let line = gateway.line("corelane serves");
    let rings = ["ring=\"SINGLE_ISSUER|DEFER_TASKRUN\"", "ring=\"COOP_TASKRUN\"", "ring=\"none\""];
    assert!(rings.iter().any(|r| line.contains(r)), "{line}");
    assert!(line.contains("lanes=") && line.contains("workers=1"), "{line}");
    assert!(!gateway.log().contains('\x1b'), "colours in a pipe: {}", gateway.log());
}

/// A pipe that nobody reads.
fn broken_pipe() -> Stdio {
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    writer.into()
}

#[test]
fn a_reader_that_leaves_ends_nothing() {
    for args in [
        &["--help"][..],
        &["--version"],
        &["serve", "--help"],
        &["mock-worker", "--help"],
        &["check", "--worker-urls", NOBODY],
        &["check", "--print", "--worker-urls", NOBODY],
    ] {
        let output = command(args).stdout(broken_pipe()).stderr(Stdio::piped()).output().unwrap();
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""), "{args:?}");
    }
    for args in [&["serve", "--prot"][..], &["sevre"], &["mock-worker", "--prot"], &["serve"]] {
        let output = command(args).stdout(Stdio::null()).stderr(broken_pipe()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    }

    // The reader of the log leaves: requests are served, the drain drains, the second signal works.
    let (_worker, url) = worker(0, &[]);
    for (signals, code) in [(1, Some(0)), (2, Some(143))] {
        let settle = if signals == 1 { "0" } else { "10" };
        let (reader, writer) = io::pipe().unwrap();
        let mut command = command(&serve_args(&[&url], &["--shutdown-settle-secs", settle, "--log-level", "trace"]));
        let child = command.stdout(broken_pipe()).stderr(writer).spawn().unwrap();
        let mut gateway = Process { child, lines: Arc::default() };
        let mut log = io::BufReader::new(reader).lines().map(Result::unwrap);
        gateway.lines.lock().unwrap().push(log.find(|l| l.contains("corelane serves")).unwrap());
        drop(log);
        let address = gateway.announced("address");
        ready(address);
        for _ in 0..5 {
            assert_eq!(chat(address).unwrap().status, 200);
        }
        gateway.signal(Signal::TERM);
        if signals == 2 {
            until("settling", || get(address, "/readiness").is_ok_and(|a| a.status == 503));
            gateway.signal(Signal::TERM);
        }
        assert_eq!(gateway.end().code(), code);
    }
}

#[test]
fn a_mock_worker_says_its_addresses_and_ends_on_signals() {
    for signal in [Signal::TERM, Signal::INT] {
        let (mut fleet, _) = worker(0, &["--count", "3", "--model", "a", "--model", "b"]);
        let log = fleet.log();
        let lines: Vec<&str> = log.lines().collect();
        assert_eq!((lines.len(), lines[3]), (4, "ready"), "{log}");
        for url in &lines[..3] {
            let address: SocketAddr = url.strip_prefix("http://").unwrap().parse().unwrap();
            let models = get(address, "/v1/models").unwrap().json();
            assert_eq!(models["data"][1]["id"], "b");
        }
        let address: SocketAddr = lines[0].strip_prefix("http://").unwrap().parse().unwrap();
        let slow = Slow::start(address, 1000, 50);
        fleet.signal(signal);
        assert_eq!(fleet.end().code(), Some(0));
        assert!(!slow.rest().1);
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = run(command(&["mock-worker", "--port", &port]));
    assert_eq!(output.status.code(), Some(1));
    assert!(one_line(&output).contains(&port), "{}", text(&output.stderr));
    // Killed is killed.
    let (mut fleet, _) = worker(0, &[]);
    fleet.kill();
    assert_eq!(fleet.end().signal(), Some(9));
}
