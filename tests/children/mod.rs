//! Children of the tests: gateways and mock workers as processes of their own.
//!
//! Takes arguments, gives processes with their addresses and what they wrote. Never lets one outlive its test.

// Each test binary uses its own part.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

pub const BINARY: &str = env!("CARGO_BIN_EXE_corelane");
/// Longer than anything here takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    command.args(args).stdin(Stdio::null());
    for (name, _) in std::env::vars_os().filter(|(n, _)| n.to_string_lossy().starts_with("CORELANE_")) {
        command.env_remove(name);
    }
    command
}

/// A child, ended by its drop, and what it has written so far.
pub struct Process {
    pub child: Child,
    pub lines: Arc<Mutex<Vec<String>>>,
}

impl Process {
    pub fn start(mut command: Command) -> Process {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let streams: [Box<dyn Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        for stream in streams {
            let lines = lines.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    lines.lock().unwrap().push(line);
                }
            });
        }
        Process { child, lines }
    }

    pub fn log(&self) -> String {
        self.lines.lock().unwrap().join("\n")
    }

    /// Waits for a line that has `what` in it.
    #[track_caller]
    pub fn line(&mut self, what: &str) -> String {
        let begun = Instant::now();
        loop {
            if let Some(line) = self.lines.lock().unwrap().iter().find(|l| l.contains(what)) {
                return line.clone();
            }
            assert!(begun.elapsed() < PATIENCE, "no {what:?} in:\n{}", self.log());
            if let Some(status) = self.child.try_wait().unwrap() {
                // What it wrote last may still be on its way.
                std::thread::sleep(Duration::from_millis(200));
                assert!(self.log().contains(what), "{status}, without {what:?}:\n{}", self.log());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The address after `name=` in the line that says that the gateway serves.
    #[track_caller]
    pub fn announced(&mut self, name: &str) -> SocketAddr {
        let line = self.line("corelane serves");
        let at = line.find(&format!(" {name}=")).unwrap_or_else(|| panic!("{line}")) + name.len() + 2;
        line[at..].split(' ').next().unwrap().parse().unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for the end.
    #[track_caller]
    pub fn end(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < PATIENCE, "still running:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- what process {} wrote:\n{}", self.child.id(), self.log());
        }
    }
}

/// A free port below those that the kernel gives to others, and behind it `n - 1` more: they stay free while their
/// process is dead. Each test process has a share of its own, below the usual port of the metrics.
pub fn lasting_ports(n: u16) -> u16 {
    const SHARE: u16 = 100;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let from = 10_000 + (std::process::id() % 190) as u16 * SHARE;
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let mut places = (0..SHARE).map(|_| NEXT.fetch_add(n, Ordering::Relaxed) % SHARE);
    let place = places.find(|at| at + n <= SHARE && (0..n).all(|i| is_free(from + at + i)));
    from + place.expect("free ports")
}

/// A file that goes away.
pub struct TempFile(PathBuf);

impl TempFile {
    pub fn new(name: &str, content: &str) -> TempFile {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("corelane-{}-{n}-{name}", std::process::id()));
        std::fs::write(&path, content).unwrap();
        TempFile(path)
    }

    pub fn name(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A mock worker as a process, on a given port or (0) any.
pub fn worker(port: u16, more: &[&str]) -> (Process, String) {
    let port = port.to_string();
    let mut args = vec!["mock-worker", "--port", &port];
    args.extend(more);
    let mut process = Process::start(command(&args));
    process.line("ready");
    let url = process.line("http://");
    (process, url)
}

/// Arguments of a gateway on free ports; its lanes are on whatever cores there are.
pub fn serve_args<'a>(workers: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["serve", "--port", "0", "--prometheus-port", "0", "--worker-urls"];
    args.extend(workers);
    args.extend(more);
    args
}

/// The cores that this process may use.
pub fn mask() -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(None).unwrap();
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|c| set.is_set(*c)).collect()
}

/// Two cores at most, so that a large machine does not make a large gateway.
pub fn two_cores() -> String {
    mask().iter().take(2).map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// A gateway as a process, ready to serve, with two lanes where there are two cores.
pub fn gateway(workers: &[&str], more: &[&str]) -> (Process, SocketAddr) {
    let cores = two_cores();
    let mut args = serve_args(workers, more);
    args.extend(["--cores", &cores]);
    let mut process = Process::start(command(&args));
    let address = process.announced("address");
    ready(address);
    (process, address)
}

#[track_caller]
pub fn ready(address: SocketAddr) {
    until("readiness", || status(address, "/readiness").is_ok_and(|s| s == 200));
}

#[track_caller]
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The status that a GET is answered with.
fn status(address: SocketAddr, path: &str) -> std::io::Result<u16> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: corelane\r\nconnection: close\r\n\r\n")?;
    let mut all = Vec::new();
    stream.read_to_end(&mut all)?;
    let status = String::from_utf8_lossy(&all).split(' ').nth(1).and_then(|s| s.parse().ok());
    status.ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}
