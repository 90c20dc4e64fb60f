//! What a service manager hears of the program: ready, alive, stopping, and no more signs of life from a stuck lane.
//!
//! Takes the built binary, gives it a manager's socket. Never stops a thread that it did not start.

mod children;

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process::Child;
use std::time::{Duration, Instant};

use children::{PATIENCE, Process, command, ready, serve_args, two_cores, until, worker};
use rustix::process::Signal;

/// A manager's socket, in the abstract namespace.
struct Manager {
    socket: UnixDatagram,
    name: String,
}

impl Manager {
    fn new(what: &str) -> Manager {
        let name = format!("corelane-test-{what}-{}", std::process::id());
        let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        Manager { socket, name }
    }

    /// The next message, if one comes in time.
    fn hears(&self, within: Duration) -> Option<String> {
        let mut text = [0; 1024];
        self.socket.set_read_timeout(Some(within)).unwrap();
        let n = self.socket.recv(&mut text).ok()?;
        Some(String::from_utf8(text[..n].to_vec()).unwrap())
    }

    /// Gateway with this manager and a watchdog of a second.
    fn starts(&self, url: &str, more: &[&str]) -> Process {
        let cores = two_cores();
        let mut args = serve_args(&[url], more);
        args.extend(["--cores", &cores]);
        let mut command = command(&args);
        command.env("NOTIFY_SOCKET", format!("@{}", self.name)).env("WATCHDOG_USEC", "1000000");
        Process::start(command)
    }
}

#[test]
fn ready_comes_when_it_serves_and_stopping_with_the_drain() {
    let manager = Manager::new("life");
    let (_worker, url) = worker(0, &[]);
    let mut gateway = manager.starts(&url, &["--shutdown-settle-secs", "2"]);
    let said = manager.hears(PATIENCE).expect("READY=1");
    let address = gateway.announced("address");
    assert_eq!(said, format!("READY=1\nSTATUS=serving {address} with {} lanes", two_cores().split(',').count()));
    ready(address);
    for _ in 0..3 {
        assert_eq!(manager.hears(PATIENCE).as_deref(), Some("WATCHDOG=1"));
    }
    gateway.signal(Signal::HUP);
    for what in ["RELOADING=1\nMONOTONIC_USEC=", "READY=1\nSTATUS=serving"] {
        let begun = Instant::now();
        while !manager.hears(PATIENCE).expect(what).starts_with(what) {
            assert!(begun.elapsed() < PATIENCE, "no {what}");
        }
    }
    gateway.signal(Signal::TERM);
    let begun = Instant::now();
    loop {
        let said = manager.hears(PATIENCE).expect("STOPPING=1");
        if said.starts_with("STOPPING=1") {
            break;
        }
        assert!(said == "WATCHDOG=1" && begun.elapsed() < PATIENCE, "{said}");
    }
    // A gateway that is stopping does not say that it is ready, whatever it reads.
    gateway.signal(Signal::HUP);
    until("it is read again", || gateway.log().matches("configuration read again").count() == 2);
    assert_eq!(gateway.end().code(), Some(0));
    while let Some(said) = manager.hears(Duration::from_millis(100)) {
        assert_eq!(said, "WATCHDOG=1");
    }
}

#[test]
fn a_start_that_fails_never_says_ready() {
    let manager = Manager::new("fail");
    let mut gateway = manager.starts("http://127.0.0.1:1", &["--control-core", "1023"]);
    assert_eq!(gateway.end().code(), Some(1));
    assert_eq!(manager.hears(Duration::from_millis(100)), None);
}

/// A thread of a child that does not run while this lives.
struct Stuck {
    thread: i32,
}

impl Stuck {
    /// The lane's thread; `None` where tracing is forbidden.
    fn lane(child: &Child, lane: usize) -> Option<Stuck> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
        let named = |task: &std::fs::DirEntry| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim() == format!("lane-{lane}"))
        };
        let task = tasks.map(Result::unwrap).find(named).expect("the lane's thread");
        let thread: i32 = task.file_name().to_str().unwrap().parse().unwrap();
        // SAFETY: neither request reads or writes memory of this process.
        let done = unsafe {
            libc::ptrace(libc::PTRACE_SEIZE, thread, 0, 0) == 0
                && libc::ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0) == 0
        };
        if !done {
            eprintln!("no thread can be stopped here: {}", std::io::Error::last_os_error());
            return None;
        }
        Some(Stuck { thread })
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        // SAFETY: waits for the stop of a thread of a child, and lets it go on; no memory is passed.
        unsafe {
            libc::waitpid(self.thread, std::ptr::null_mut(), libc::__WALL);
            libc::ptrace(libc::PTRACE_DETACH, self.thread, 0, 0);
        }
    }
}

#[test]
fn a_lane_that_is_stuck_stops_the_signs_of_life_and_one_that_goes_on_brings_them_back() {
    let manager = Manager::new("stuck");
    let (_worker, url) = worker(0, &[]);
    let mut gateway = manager.starts(&url, &[]);
    ready(gateway.announced("address"));
    assert!(manager.hears(PATIENCE).is_some_and(|said| said.starts_with("READY=1")));
    assert_eq!(manager.hears(PATIENCE).as_deref(), Some("WATCHDOG=1"));

    let last = two_cores().split(',').count() - 1;
    let Some(stuck) = Stuck::lane(&gateway.child, last) else { return };
    // The lane's silence is noticed after two seconds; until then all seems well.
    let begun = Instant::now();
    while manager.hears(Duration::from_secs(2)).is_some() {
        assert!(begun.elapsed() < PATIENCE, "signs of life of a stuck lane");
    }
    gateway.line("the lane gives no sign of life");
    assert!(gateway.log().contains(&format!("lane={last}")), "{}", gateway.log());

    drop(stuck);
    assert_eq!(manager.hears(PATIENCE).as_deref(), Some("WATCHDOG=1"));
    gateway.signal(Signal::TERM);
    let begun = Instant::now();
    while gateway.child.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < PATIENCE, "it does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
}
