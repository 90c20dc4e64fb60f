//! The steady path: a small request on warm connections allocates nothing on its lane, and an idle connection
//! holds no receive buffer.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use corelane::boot::Gateway;
use corelane::config::{AccessLog, Config, Policy, Secret, WorkerSpec};
use corelane::metrics::{Tally, status_index};

/// Counts allocations of lane threads while armed.
struct Counting;

static ARMED: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

fn note(bytes: usize) {
    if ARMED.load(Ordering::Relaxed) {
        let mut name = [0u8; 16];
        // SAFETY: PR_GET_NAME writes at most 16 bytes.
        unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
        if name.starts_with(b"lane-") {
            COUNT.fetch_add(1, Ordering::Relaxed);
            BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }
}

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        unsafe { System.dealloc(p, layout) }
    }
    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        unsafe { System.realloc(p, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A worker that answers every request with the same bytes: whatever allocates here is not the lane's.
fn start_worker() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for s in listener.incoming() {
            std::thread::spawn(move || answer(s.unwrap()));
        }
    });
    address
}

fn answer(mut s: TcpStream) {
    s.set_nodelay(true).unwrap();
    let mut buf = vec![0u8; 65536];
    let mut have = 0;
    loop {
        let head_end = loop {
            if let Some(at) = buf[..have].windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            match s.read(&mut buf[have..]) {
                Ok(n) if n > 0 => have += n,
                _ => return,
            }
        };
        let head = String::from_utf8_lossy(&buf[..head_end]).to_ascii_lowercase();
        let length =
            head.split("content-length: ").nth(1).map_or(0, |v| v.split('\r').next().unwrap().parse().unwrap());
        while have < head_end + length {
            match s.read(&mut buf[have..]) {
                Ok(n) if n > 0 => have += n,
                _ => return,
            }
        }
        have = 0;
        let body = if head.starts_with("get /v1/models") {
            r#"{"object":"list","data":[{"id":"m","object":"model"}]}"#.to_string()
        } else {
            r#"{"id":"x","choices":[{"message":{"role":"assistant","content":"hello"}}]}"#.to_string()
        };
        let streams = buf[..head_end + length].windows(13).any(|w| w == b"\"stream\":true");
        let text = if streams {
            let event = "c\r\ndata: {\"a\"}\n\r\n";
            format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{}0\r\n\r\n", event.repeat(8))
        } else {
            format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len())
        };
        if s.write_all(text.as_bytes()).is_err() {
            return;
        }
    }
}

fn config(worker: SocketAddr, policy: Policy) -> Config {
    // What limits, asks for keys and logs allocates no more than what does not.
    let strict = policy != Policy::RoundRobin;
    Config {
        access_log: if strict { AccessLog::All } else { AccessLog::Off },
        access_log_path: "/dev/null".into(),
        api_keys: if strict { vec![Secret::new("key")] } else { Vec::new() },
        max_concurrent_requests: if strict { 1000 } else { 0 },
        max_requests_per_worker: if strict { 1000 } else { 0 },
        port: 0,
        metrics_port: 0,
        cores: vec![0],
        policy,
        shutdown_settle: Duration::ZERO,
        shutdown_grace: Duration::from_secs(2),
        ..Config::with_workers(vec![WorkerSpec::new(format!("http://{worker}"))])
    }
}

fn exchange(s: &mut TcpStream, request: &[u8], buf: &mut [u8]) {
    s.write_all(request).unwrap();
    let mut have = 0;
    loop {
        let n = s.read(&mut buf[have..]).unwrap();
        assert!(n > 0, "the gateway closed: {}", String::from_utf8_lossy(&buf[..have]));
        have += n;
        let seen = &buf[..have];
        if seen.ends_with(b"0\r\n\r\n") || seen.ends_with(b"\"hello\"}}]}") {
            assert!(seen.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(seen));
            return;
        }
    }
}

fn wait_ready(gateway: &Gateway) {
    for _ in 0..500 {
        if gateway.shared().readiness.snapshot().ready {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the gateway did not become ready");
}

#[test]
fn a_small_request_allocates_nothing_after_warm_up() {
    let worker = start_worker();
    for policy in [Policy::RoundRobin, Policy::LeastLoad, Policy::Random, Policy::PowerOfTwo, Policy::CacheAware] {
        let gateway = Gateway::start(config(worker, policy)).unwrap();
        wait_ready(&gateway);
        let mut clients: Vec<TcpStream> = (0..4).map(|_| TcpStream::connect(gateway.address()).unwrap()).collect();
        let mut buf = vec![0u8; 65536];
        for stream in [false, true] {
            let body = format!(
                r#"{{"model":"m","messages":[{{"role":"user","content":"{}"}}],"stream":{stream}}}"#,
                "hello ".repeat(40)
            );
            let request = format!(
                "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n\
                 Authorization: Bearer key\r\nUser-Agent: test\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
            let mut rounds = |n: usize| {
                for i in 0..n {
                    exchange(&mut clients[i % 4], request.as_bytes(), &mut buf);
                }
            };
            rounds(2000);
            COUNT.store(0, Ordering::SeqCst);
            BYTES.store(0, Ordering::SeqCst);
            ARMED.store(true, Ordering::SeqCst);
            rounds(2000);
            ARMED.store(false, Ordering::SeqCst);
            let (count, bytes) = (COUNT.load(Ordering::SeqCst), BYTES.load(Ordering::SeqCst));
            println!("{}, stream {stream}: {count} allocations ({bytes} bytes) in 2000 requests", policy.name());
            assert_eq!(count, 0, "{} stream={stream}: {bytes} bytes", policy.name());
        }
        drop(clients);
        let lane = gateway.shared().tallies.lane(0);
        let (answered, logged) = (lane.requests(0, status_index(200)), policy != Policy::RoundRobin);
        let shared = gateway.shared();
        assert!(gateway.drain(), "nothing was cut");
        let all = shared.access.lines().0 + lane.get(Tally::AccessLogDropped);
        assert_eq!(all, if logged { answered } else { 0 });
    }
}
