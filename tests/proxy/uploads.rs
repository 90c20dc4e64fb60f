//! Large bodies that nobody looks into follow their request to the worker without being held; whatever happens on the
//! way, one answer comes, and nothing is sent twice.
//!
//! The worker is written by hand; the path tells it what to do.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use corelane::boot::Gateway;
use corelane::config::{Config, ExtraRoute, Relay, WorkerSpec};
use corelane::fault::What;
use corelane::metrics::Tally;
use corelane::mock::fnv1a64;
use corelane::shared::drain::Phase;

use crate::rig::{End, Http, blamed, config, in_flight, request, serve_each, start, tally_of, until};

const MIB: usize = 1 << 20;

#[derive(Default)]
struct Seen {
    requests: AtomicUsize,
    connections: AtomicUsize,
    /// Bytes of bodies.
    bytes: AtomicUsize,
    /// Connections that the gateway ended before the body did.
    cut: AtomicUsize,
}

struct Worker {
    address: SocketAddr,
    seen: Arc<Seen>,
}

impl Worker {
    fn start() -> Worker {
        let seen = Arc::<Seen>::default();
        let noted = seen.clone();
        let served = move |stream| {
            serve(stream, &noted);
        };
        Worker { address: serve_each(served), seen }
    }

    fn bytes(&self) -> usize {
        self.seen.bytes.load(SeqCst)
    }

    fn cut(&self) -> usize {
        self.seen.cut.load(SeqCst)
    }
}

/// Serves a connection: the path is `/up/WHAT` or `/up/WHAT-BYTES`, and what is done is done after so many bytes.
fn serve(mut stream: TcpStream, seen: &Seen) -> Option<()> {
    let mut buf = Vec::new();
    let mut more = vec![0; 64 * 1024];
    for nth in 0.. {
        let head_len = loop {
            match buf.windows(4).position(|w| w == b"\r\n\r\n") {
                Some(at) => break at + 4,
                None => read(&mut stream, &mut buf, &mut more)?,
            }
        };
        let head = String::from_utf8(buf.drain(..head_len).collect()).unwrap().to_ascii_lowercase();
        let length: usize =
            head.lines().find_map(|line| line.strip_prefix("content-length: ")).map_or(0, |n| n.parse().unwrap());
        let Some(said) = head.split(' ').nth(1).unwrap().strip_prefix("/up/") else {
            // The gateway asks what it serves.
            return stream.write_all(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n").ok();
        };
        seen.requests.fetch_add(1, SeqCst);
        seen.connections.fetch_add(usize::from(nth == 0), SeqCst);
        let (what, after) = said.split_once('-').map_or((said, length), |(what, n)| (what, n.parse().unwrap()));
        let mut told = false;
        let mut echoed = 0;
        while buf.len() < length {
            if what == "echo" {
                if echoed == 0 {
                    stream.write_all(format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n").as_bytes()).ok()?;
                }
                stream.write_all(&buf[echoed..]).ok()?;
                echoed = buf.len();
            }
            if buf.len() >= after && !std::mem::replace(&mut told, true) {
                match what {
                    "early" => {
                        let answer = b"HTTP/1.1 413 Too Much\r\nContent-Length: 4\r\n\r\nstop";
                        stream.write_all(answer).ok()?;
                    }
                    "busy" if seen.requests.load(SeqCst) == 1 => {
                        let answer = b"HTTP/1.1 503 Later\r\nContent-Length: 5\r\n\r\nlater";
                        stream.write_all(answer).ok()?;
                    }
                    "interim" => stream.write_all(b"HTTP/1.1 102 Processing\r\n\r\n").ok()?,
                    "halves" => stream.write_all(b"HTTP/1.1 200 OK\r\nContent-").ok()?,
                    "dies" => {
                        socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
                        return None;
                    }
                    "begins" | "mute" => {
                        let len = length.to_string().len() + 17;
                        let begun = format!("HTTP/1.1 200 OK\r\nContent-Length: {len}\r\n\r\n{length} ");
                        stream.write_all(begun.as_bytes()).ok()?;
                    }
                    "tires" => {
                        std::thread::sleep(Duration::from_millis(2500));
                        return None;
                    }
                    "sips" => loop {
                        std::thread::sleep(Duration::from_millis(100));
                        let n = stream.read(&mut more[..16_384]).ok().filter(|n| *n > 0)?;
                        seen.bytes.fetch_add(n, SeqCst);
                    },
                    "drips" => {
                        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n").ok()?;
                        for _ in 0..20 {
                            stream.write_all(b".").ok()?;
                            std::thread::sleep(Duration::from_millis(100));
                        }
                    }
                    "snaps" => {
                        // Not read any further: what comes fills the buffers of both sides.
                        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\nhalf").ok()?;
                        std::thread::sleep(Duration::from_millis(1000));
                        socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
                        return None;
                    }
                    "shuts" => {
                        // As servers do that close behind an answer for which they did not read everything.
                        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\nwhole").ok()?;
                        stream.shutdown(std::net::Shutdown::Write).ok()?;
                        std::thread::sleep(Duration::from_millis(100));
                        return None;
                    }
                    "stops" => std::thread::sleep(Duration::from_secs(3600)),
                    _ => {}
                }
            }
            let old = buf.len();
            let got = read(&mut stream, &mut buf, &mut more);
            seen.bytes.fetch_add(buf.len() - old, SeqCst);
            if got.is_none() {
                seen.cut.fetch_add(1, SeqCst);
                return None;
            }
        }
        if echoed > 0 {
            stream.write_all(&buf[echoed..length]).ok()?;
            buf.drain(..length);
            continue;
        }
        if what == "mute" || what == "dumb" {
            if what == "mute" && !told {
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf").ok()?;
            }
            // The gateway ends it.
            let _ = read(&mut stream, &mut buf, &mut more);
            seen.cut.fetch_add(1, SeqCst);
            return None;
        }
        if what == "leaves" {
            return None;
        }
        if what == "large" {
            let size = if after > 0 { after } else { 5 * MIB };
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n");
            stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&vec![b'A'; size])).ok()?;
            continue;
        }
        let said = format!("{length} {:016x}", fnv1a64(&buf[..length]));
        buf.drain(..length);
        if what == "begins" {
            stream.write_all(said.split_once(' ')?.1.as_bytes()).ok()?;
            continue;
        }
        let start = if what == "halves" { "" } else { "HTTP/1.1 200 OK\r\nContent-" };
        stream.write_all(format!("{start}Length: {}\r\n\r\n{said}", said.len()).as_bytes()).ok()?;
    }
    None
}

fn read(stream: &mut TcpStream, buf: &mut Vec<u8>, more: &mut [u8]) -> Option<()> {
    match stream.read(more) {
        Ok(n) if n > 0 => buf.extend_from_slice(&more[..n]),
        _ => return None,
    }
    Some(())
}

fn gateway(workers: &[SocketAddr], relay: Relay, change: impl FnOnce(&mut Config)) -> Gateway {
    let spec = |address: &SocketAddr| {
        let mut spec = WorkerSpec::new(format!("http://{address}"));
        spec.models = vec!["m".into()];
        spec
    };
    let mut config = config(workers.iter().map(spec).collect());
    config.extra_routes = vec![ExtraRoute { path: "/up/*".into(), methods: vec![] }];
    (config.health_check, config.relay) = (false, relay);
    // No large body could be held.
    config.body_memory_bytes = MIB as u64 / 2;
    config.pipes_per_lane = 16;
    change(&mut config);
    start(config)
}

fn body(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(len as u64).fill(&mut bytes);
    bytes
}

fn told(body: &[u8]) -> String {
    format!("{} {:016x}", body.len(), fnv1a64(body))
}

fn uploaded(gateway: &Gateway) -> (u64, u64) {
    (tally_of(gateway, Tally::UploadCopied), tally_of(gateway, Tally::UploadSpliced))
}

fn faults(gateway: &Gateway, what: What) -> u64 {
    gateway.shared().tallies.lanes().iter().map(|lane| lane.faults(what)).sum()
}

fn settles(gateway: &Gateway) {
    until("no request is in flight", || in_flight(gateway) == 0);
}

/// Whole bodies, byte for byte, by pipes and without one, on connections that serve on; what stands behind a body is
/// the next request's.
#[test]
fn large_bodies_pass_unheld_and_exact() {
    for pipes in [16, 0] {
        let worker = Worker::start();
        let gateway = gateway(&[worker.address], Relay::Auto, |c| c.pipes_per_lane = pipes);
        let mut http = Http::connect(gateway.address());
        let mut rng = fastrand::Rng::with_seed(7);
        let mut sum = 0;
        for len in [2 * MIB, 1, 5 * MIB + 1, 300_000, 20 * MIB] {
            let body = body(len);
            let mut bytes = request("POST", "/up/whole", &[], &body);
            bytes.extend_from_slice(b"GET /up/whole HTTP/1.1\r\nHost: g\r\n\r\n");
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let (piece, left) = rest.split_at(rng.usize(1..=rest.len().min(3 * MIB)));
                http.send(piece);
                rest = left;
                if rng.bool() {
                    std::thread::sleep(Duration::from_millis(rng.u64(0..8)));
                }
            }
            assert_eq!(http.answer().expect(200).text(), told(&body), "{len}");
            assert_eq!(http.answer().expect(200).text(), told(b""));
            sum += if len >= MIB { len as u64 } else { 0 };
        }
        settles(&gateway);
        let (copied, moved) = uploaded(&gateway);
        println!("{pipes} pipes: {copied} copied, {moved} moved of {sum}");
        // What came with the heads was in memory by then.
        assert!(copied + moved <= sum && copied + moved > sum - 256 * 1024);
        assert_eq!(moved > sum / 2, pipes > 0);
        assert_eq!(moved > 0, pipes > 0);
        assert_eq!(worker.cut(), 0);
    }
}

/// A mode that moves all it can moves small bodies too; one that copies holds them as any other, and can try again.
#[test]
fn the_relay_option_says_what_is_held() {
    let worker = Worker::start();
    let fast = gateway(&[worker.address], Relay::Splice, |_| {});
    let mut http = Http::connect(fast.address());
    let body = body(50_000);
    let bytes = request("POST", "/up/whole", &[], &body);
    http.send(&bytes[..2000]);
    until("the head is there", || worker.seen.requests.load(SeqCst) == 1);
    assert_eq!(http.send(&bytes[2000..]).answer().expect(200).text(), told(&body));
    let (copied, moved) = uploaded(&fast);
    assert_eq!(copied + moved, bytes.len() as u64 - 2000);
    let plain = gateway(&[worker.address], Relay::Copy, |c| c.body_memory_bytes = 64 << 20);
    let mut http = Http::connect(plain.address());
    let body = self::body(3 * MIB);
    assert_eq!(http.ask("POST", "/up/whole", &[], &body).expect(200).text(), told(&body));
    assert_eq!(uploaded(&plain), (0, 0));
}

#[test]
fn a_worker_that_does_not_read_stops_the_client() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Auto, |_| {});
    let mut stream = TcpStream::connect(gateway.address()).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    let bytes = request("POST", "/up/stops-0", &[], &body(128 * MIB));
    let mut sent = 0;
    let stopped = loop {
        match stream.write(&bytes[sent..]) {
            Ok(n) => sent += n,
            Err(e) => break e,
        }
    };
    // What the sockets' buffers hold, two of them on either side of the gateway, and a pipe.
    println!("{sent} sent, then {stopped}");
    assert!(sent < 64 * MIB);
    assert_eq!(in_flight(&gateway), 1);
    // A FIN would stand behind what the kernel could not send yet, for nobody to see.
    Http { stream, buf: Vec::new(), most: 0 }.reset();
    settles(&gateway);
}

/// An answer that comes before the body is at its end is the answer; the rest of the body is neither forwarded nor
/// taken for a request.
#[test]
fn early_answers_end_the_upload() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Auto, |_| {});
    let body = body(32 * MIB);
    let mut http = Http::connect(gateway.address());
    let answer = http.ask("POST", "/up/early-100000", &[], &body).expect(413);
    assert_eq!((answer.text().as_str(), answer.header("connection")), ("stop", Some("close")));
    http.expect_closed();
    settles(&gateway);
    until("the worker's connection is closed", || worker.cut() == 1);
    assert!(worker.bytes() < body.len());
    let whole = self::body(2 * MIB);
    let mut http = Http::connect(gateway.address());
    assert_eq!(http.ask("POST", "/up/whole", &[], &whole).expect(200).text(), told(&whole));
    assert_eq!(worker.seen.connections.load(SeqCst), 2);
}

/// An answer without a length ends with its connection, so a reset of that must not look like its end, even if the kernel
/// tells who sends the rest of the body of it, and who reads of an end.
#[test]
fn a_break_that_is_met_in_sending_does_not_end_an_answer() {
    for (relay, version) in [(Relay::Auto, "1.1"), (Relay::Splice, "1.1"), (Relay::Auto, "1.0")] {
        let worker = Worker::start();
        let gateway = gateway(&[worker.address], relay, |_| {});
        let mut http = Http::connect(gateway.address());
        let head = format!("POST /up/snaps-100000 HTTP/{version}\r\nHost: g\r\nContent-Length: {}\r\n\r\n", 64 * MIB);
        http.send(head.as_bytes());
        // As much as all buffers take. One thread, which reads last: the kernel tells the client, too, of a reset once.
        http.stream.set_nonblocking(true).unwrap();
        let (piece, start) = (body(64 * 1024), Instant::now());
        while start.elapsed() < Duration::from_millis(700) {
            if (&http.stream).write(&piece).is_err() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        http.stream.set_nonblocking(false).unwrap();
        let answer = http.answer();
        assert_eq!((answer.text().as_str(), answer.end), ("half", End::Reset), "{relay:?} HTTP/{version}");
        settles(&gateway);
        assert_eq!((faults(&gateway, What::Cut), blamed(&gateway)), (1, 1), "{relay:?} HTTP/{version}");
    }
}

/// What breaks off behind its end is whole.
#[test]
fn a_break_behind_the_end_of_an_answer_is_none() {
    for relay in [Relay::Auto, Relay::Splice] {
        let worker = Worker::start();
        let gateway = gateway(&[worker.address], relay, |_| {});
        for size in [2 * MIB, 8 * MIB] {
            let mut http = Http::connect(gateway.address());
            let answer = http.send(&request("POST", "/up/shuts-100000", &[], &body(size))).answer();
            assert_eq!((answer.text().as_str(), answer.end), ("whole", End::Whole), "{relay:?} {size}");
        }
        settles(&gateway);
        assert_eq!((faults(&gateway, What::Cut), blamed(&gateway)), (0, 0), "{relay:?}");
    }
}

/// An answer can grow with the body that it is an answer to: both pass at a time.
#[test]
fn a_body_goes_on_while_its_answer_passes() {
    for relay in [Relay::Auto, Relay::Splice] {
        let worker = Worker::start();
        let gateway = gateway(&[worker.address], relay, |_| {});
        let body = body(24 * MIB);
        let bytes = request("POST", "/up/echo", &[], &body);
        let mut http = Http::connect(gateway.address());
        let mut sends = http.stream.try_clone().unwrap();
        let sender = std::thread::spawn(move || {
            for piece in bytes.chunks(700_000) {
                sends.write_all(piece).unwrap();
                std::thread::sleep(Duration::from_millis(3));
            }
        });
        let answer = http.answer().expect(200);
        sender.join().unwrap();
        assert!(answer.body == body);
        assert_eq!((answer.header("connection"), http.expect_closed()), (Some("close"), End::Fin));
        assert_eq!(worker.cut(), 0);
        settles(&gateway);
    }
}

/// A client that leaves, or stops sending, ends such an answer; it does not end cleanly.
#[test]
fn a_client_that_stops_sending_has_no_whole_answer() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Auto, |c| c.body_timeout = Duration::from_millis(300));
    let bytes = request("POST", "/up/echo", &[], &body(8 * MIB));
    let mut silent = Http::connect(gateway.address());
    silent.send(&bytes[..3 * MIB]);
    silent.head().unwrap();
    while silent.fill().is_ok() {}
    assert!(silent.buf.len() < 3 * MIB + 1);
    until("the worker's connection is closed", || worker.cut() == 1);
    settles(&gateway);
    assert_eq!(faults(&gateway, What::ClientStalled), 1);
}

/// It may stop, since it was told that nothing follows; then an answer that goes on is passed to its end.
#[test]
fn an_answer_that_does_without_the_body_is_passed_on() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Auto, |c| c.body_timeout = Duration::from_millis(500));
    let mut http = Http::connect(gateway.address());
    let bytes = request("POST", "/up/drips-0", &[], &body(3 * MIB));
    let answer = http.send(&bytes[..MIB / 2]).answer().expect(200);
    assert_eq!((answer.text(), answer.header("connection")), (".".repeat(20), Some("close")));
    settles(&gateway);
    assert_eq!(faults(&gateway, What::ClientStalled), 0);
}

/// Nor is the worker of a client that is still sending when the request's time is over.
#[test]
fn time_that_a_client_used_up_is_not_the_workers_fault() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Auto, |c| {
        c.request_timeout = Duration::from_secs(1);
    });
    let mut http = Http::connect(gateway.address());
    let bytes = request("POST", "/up/drips-0", &[], &body(3 * MIB));
    let mut sends = http.stream.try_clone().unwrap();
    let sender = std::thread::spawn(move || {
        for piece in bytes.chunks(2000).take(200) {
            if sends.write_all(piece).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    http.head().unwrap();
    while http.fill().is_ok() {}
    sender.join().unwrap();
    settles(&gateway);
    assert_eq!((faults(&gateway, What::CutTimeout), faults(&gateway, What::ClientStalled)), (0, 1));
    assert_eq!(blamed(&gateway), 0);
    Http::connect(gateway.address()).ask("GET", "/up/whole", &[], b"").expect(200);
}

/// Its silence counts from when it has the whole body, also where its answer had begun before.
#[test]
fn a_worker_that_has_the_body_may_not_be_silent_for_ever() {
    for relay in [Relay::Auto, Relay::Splice] {
        let worker = Worker::start();
        let gateway = gateway(&[worker.address], relay, |c| c.stall_timeout = Duration::from_millis(300));
        let mut http = Http::connect(gateway.address());
        let bytes = request("POST", "/up/mute-0", &[], &body(3 * MIB));
        http.send(&bytes[..MIB]).head().unwrap();
        // The clock does not run before.
        std::thread::sleep(Duration::from_millis(600));
        http.send(&bytes[MIB..]);
        while http.fill().is_ok() {}
        until("the worker's connection is closed", || worker.cut() == 1);
        settles(&gateway);
        assert_eq!(faults(&gateway, What::CutStalled), 1);
    }
}

/// A client that has asked for a large answer, and reads no more of it than it takes for the rest to be in the kernel's
/// hands.
fn slow_reader(gateway: &Gateway, worker: &Worker) -> Http {
    let mut http = Http::connect(gateway.address());
    http.send(b"GET /up/large HTTP/1.1\r\nHost: g\r\n\r\n");
    until("the answer has left the gateway", || {
        let over = in_flight(gateway) == 0 && worker.seen.requests.load(SeqCst) == 1;
        over || http.fill().is_err()
    });
    http
}

fn expect_large(http: &mut Http) {
    let answer = http.answer().expect(200);
    assert!(answer.body.len() == 5 * MIB && answer.body.iter().all(|&b| b == b'A'));
}

/// A slow reader does not keep a place at the worker beyond the time of its request, however little is left to be given to
/// the kernel.
#[test]
fn the_last_piece_does_not_outlast_its_request() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Copy, |c| c.request_timeout = Duration::from_secs(2));
    let sent = || tally_of(&gateway, Tally::ClientBytesOut);
    let ask = |size: usize| narrow(&gateway, size, 4096);
    // What the sockets take, and the piece that waits.
    let _probe = ask(64 * MIB);
    let mut most = 0;
    until("they are full", || {
        std::thread::sleep(Duration::from_millis(200));
        std::mem::replace(&mut most, sent()) == sent() && most > 0
    });
    let mut readers: Vec<_> = (1..8).map(|n| ask(most as usize - n * 2000)).collect();
    let start = Instant::now();
    let mut waited = false;
    while start.elapsed() < Duration::from_secs(5) {
        for http in &mut readers {
            http.most = 1000;
            let _ = http.fill();
        }
        waited |= start.elapsed() > Duration::from_millis(1000) && in_flight(&gateway) > 0;
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(waited, "nothing was left to be given");
    assert_eq!(in_flight(&gateway), 0);
}

/// A client with so much room for what it has not read, which is to get so much and then the end of its connection.
fn narrow(gateway: &Gateway, size: usize, room: usize) -> Http {
    let mut http = Http::connect(gateway.address());
    socket2::SockRef::from(&http.stream).set_recv_buffer_size(room).unwrap();
    http.send(&request("GET", &format!("/up/large-{size}"), &[("Connection", "close")], b""));
    http
}

/// Reads slowly for so long.
fn sip(http: &mut Http, time: Duration) {
    let start = Instant::now();
    http.most = 5_000;
    while start.elapsed() < time {
        http.fill().expect("not ended yet");
        std::thread::sleep(Duration::from_millis(20));
    }
    http.most = MIB;
}

/// What is in the kernel's hands is not lost to bytes that its reader sends meanwhile, however long it takes to read.
#[test]
fn a_slow_reader_that_sends_gets_the_whole_answer() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Auto, |_| {});
    let mut http = narrow(&gateway, MIB, 32 * 1024);
    for _ in 0..3 {
        sip(&mut http, Duration::from_millis(1200));
        http.send(b"\r\n");
    }
    assert_eq!(in_flight(&gateway), 0, "all of it was with the kernel");
    assert_eq!(http.answer().expect(200).body.len(), MIB);
    http.expect_closed();
}

/// Nor is what a reader has been given until the time of its request is over.
#[test]
fn a_slow_reader_gets_what_was_sent_in_time() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Copy, |c| {
        (c.request_timeout, c.write_stall_timeout) = (Duration::from_secs(2), Duration::from_secs(1));
    });
    let mut http = narrow(&gateway, 64 * MIB, 32 * 1024);
    sip(&mut http, Duration::from_millis(3500));
    assert_eq!((in_flight(&gateway), faults(&gateway, What::ClientStalled)), (0, 1), "the time is over");
    let answer = http.answer();
    assert_eq!((answer.status, answer.end), (200, End::Fin));
    assert!(answer.body.len() > MIB / 2 && answer.body.len() < 64 * MIB, "{}", answer.body.len());
}

/// All of an answer is with the kernel, which does not keep it for ever for a client that takes nothing.
#[test]
fn a_client_that_does_not_take_the_end_is_reset() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Copy, |c| c.write_stall_timeout = Duration::from_secs(1));
    let mut http = narrow(&gateway, MIB, 32 * 1024);
    std::thread::sleep(Duration::from_millis(6500));
    let answer = http.answer();
    assert_eq!(answer.end, End::Reset);
    assert!(answer.body.len() < MIB, "{}", answer.body.len());
}

/// An answer that is still on its way to a slow reader is not lost to what becomes of the request behind it.
#[test]
fn an_upload_that_ends_early_leaves_the_answer_before_it() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Auto, |_| {});
    let mut http = slow_reader(&gateway, &worker);
    let bytes = request("POST", "/up/whole", &[], &body(4 * MIB));
    http.send(&bytes[..1000]);
    until("the upload has begun", || worker.seen.requests.load(SeqCst) == 2);
    http.stream.shutdown(std::net::Shutdown::Write).unwrap();
    settles(&gateway);
    expect_large(&mut http);
    http.expect_closed();
}

/// Nor to what becomes of an answer behind it that has begun, which does not end cleanly all the same.
#[test]
fn an_answer_that_breaks_off_leaves_the_one_before_it() {
    for fault in [What::CutStalled, What::CutTimeout, What::ClientLeft] {
        let worker = Worker::start();
        let gateway = gateway(&[worker.address], Relay::Auto, |c| match fault {
            What::CutStalled => c.stall_timeout = Duration::from_millis(500),
            What::CutTimeout => c.request_timeout = Duration::from_secs(3),
            _ => {}
        });
        let mut http = slow_reader(&gateway, &worker);
        let before = tally_of(&gateway, Tally::ClientBytesOut);
        http.send(b"GET /up/mute HTTP/1.1\r\nHost: g\r\n\r\n");
        until("the next answer has begun", || tally_of(&gateway, Tally::ClientBytesOut) > before);
        if fault == What::ClientLeft {
            http.stream.shutdown(std::net::Shutdown::Write).unwrap();
        }
        until("the worker's connection is closed", || worker.cut() == 1);
        settles(&gateway);
        assert_eq!(faults(&gateway, fault), 1, "{fault:?}");
        expect_large(&mut http);
        let begun = http.answer();
        assert_eq!((begun.text().as_str(), begun.end), ("half", End::Fin), "{fault:?}");
    }
}

/// A worker that says nothing because it waits for the client is not ill, whatever it has said before.
#[test]
fn a_worker_that_waits_for_the_body_is_not_silent() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Auto, |c| {
        c.stall_timeout = Duration::from_millis(300);
    });
    let body = body(4 * MIB);
    let bytes = request("POST", "/up/begins-100000", &[], &body);
    let mut http = Http::connect(gateway.address());
    for piece in bytes.chunks(MIB) {
        http.send(piece);
        std::thread::sleep(Duration::from_millis(500));
    }
    assert_eq!(http.answer().expect(200).text(), told(&body));
    settles(&gateway);
    assert_eq!(blamed(&gateway), 0);
}

/// A worker that has waited long enough for a client is not ill.
#[test]
fn a_worker_that_gives_up_waiting_is_not_to_blame() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Auto, |_| {});
    let bytes = request("POST", "/up/tires-1000000", &[], &body(8 * MIB));
    let mut slow = Http::connect(gateway.address());
    // No more than what the worker reads and sockets hold.
    slow.send(&bytes[..MIB]).answer().expect_error(502, "worker_gave_up");
    slow.expect_closed();
    // Though it never waited for long at a time.
    let mut drips = Http::connect(gateway.address());
    drips.send(&bytes[..MIB]);
    until("the worker has given up", || {
        let _ = drips.stream.write_all(b"x");
        in_flight(&gateway) == 0
    });
    drips.answer().expect_error(502, "worker_gave_up");
    settles(&gateway);
    assert_eq!(blamed(&gateway), 0);
}

/// One that has all of a body is, however slowly that came.
#[test]
fn a_worker_that_dies_with_the_body_is_to_blame() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Auto, |_| {});
    let bytes = request("POST", "/up/leaves", &[], &body(2 * MIB));
    let mut http = Http::connect(gateway.address());
    http.send(&bytes[..MIB / 2]);
    std::thread::sleep(Duration::from_millis(1500));
    http.send(&bytes[MIB / 2..]).answer().expect_error(502, "worker_reset");
    settles(&gateway);
    assert_eq!(blamed(&gateway), 1);
}

/// Nor is one to which a slow client left little of the time that its request had.
#[test]
fn a_worker_that_had_little_time_is_not_to_blame() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Auto, |c| {
        c.request_timeout = Duration::from_secs(2);
    });
    let bytes = request("POST", "/up/dumb", &[], &body(1000));
    let mut slow = Http::connect(gateway.address());
    slow.send(&bytes[..bytes.len() - 1]);
    std::thread::sleep(Duration::from_millis(1500));
    slow.send(&bytes[bytes.len() - 1..]).answer().expect_error(504, "request_time_used_up");
    let mut prompt = Http::connect(gateway.address());
    prompt.send(&bytes).answer().expect_error(504, "request_timeout");
    settles(&gateway);
    assert_eq!(blamed(&gateway), 1, "for the second alone");
    // It is the same once its answer has begun.
    let bytes = request("POST", "/up/mute", &[], &body(1000));
    for (pause, fault, blames) in [(1500, What::CutUsedUp, 1), (0, What::CutTimeout, 2)] {
        let mut http = Http::connect(gateway.address());
        http.send(&bytes[..bytes.len() - 1]);
        std::thread::sleep(Duration::from_millis(pause));
        http.send(&bytes[bytes.len() - 1..]);
        assert_eq!(http.answer().end, End::Fin);
        settles(&gateway);
        assert_eq!((faults(&gateway, fault), blamed(&gateway)), (1, blames), "{fault:?}");
    }
}

/// A worker that takes nothing of a body is waited for as long as one that says nothing, whatever its client still
/// sends; one that takes a little now and then has longer, and is to blame when the time is over.
#[test]
fn a_worker_that_does_not_read_is_given_up() {
    for (path, status, code) in [("/up/stops-0", 504, "worker_silent"), ("/up/sips-0", 504, "request_timeout")] {
        let worker = Worker::start();
        let gateway = gateway(&[worker.address], Relay::Auto, |c| {
            c.first_byte_timeout = Duration::from_secs(1);
            c.request_timeout = Duration::from_secs(5);
        });
        let mut http = Http::connect(gateway.address());
        let mut sends = http.stream.try_clone().unwrap();
        let bytes = request("POST", path, &[], &body(64 * MIB));
        let sender = std::thread::spawn(move || {
            // As much as is taken at once, and then bit by bit.
            let _ = sends.write_all(&bytes[..12 * MIB]);
            for bit in bytes[12 * MIB..].chunks(1000) {
                if sends.write_all(bit).is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        http.answer().expect_error(status, code);
        settles(&gateway);
        assert_eq!(blamed(&gateway), 1);
        let _ = http.stream.shutdown(std::net::Shutdown::Both);
        sender.join().unwrap();
    }
}

/// Interim answers, and answers whose head has only begun, do not.
#[test]
fn what_is_no_answer_yet_does_not_end_the_upload() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Auto, |_| {});
    let body = body(16 * MIB);
    for path in ["/up/interim-1000000", "/up/halves-1000000"] {
        let mut http = Http::connect(gateway.address());
        assert_eq!(http.ask("POST", path, &[], &body).expect(200).text(), told(&body));
        assert_eq!(http.ask("GET", "/up/whole", &[], b"").expect(200).text(), told(b""));
    }
    settles(&gateway);
}

/// As long as it took nothing, another one can be tried.
#[test]
fn a_worker_that_gives_up_before_the_body_is_replaced() {
    let workers = [Worker::start(), Worker::start()];
    let gateway = gateway(&workers.each_ref().map(|w| w.address), Relay::Auto, |c| c.retry.unanswered = true);
    let bytes = request("POST", "/up/tires-0", &[], &body(4 * MIB));
    let mut http = Http::connect(gateway.address());
    http.send(&bytes[..bytes.len() - 4 * MIB]).answer().expect_error(502, "worker_gave_up");
    settles(&gateway);
    assert!(workers.iter().all(|worker| worker.seen.requests.load(SeqCst) > 0));
    assert!(tally_of(&gateway, Tally::Retries) > 0);
}

/// A client that has sent a moment ago did not keep it waiting.
#[test]
fn a_worker_that_dies_while_the_client_sends_is_to_blame() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Auto, |_| {});
    let mut http = Http::connect(gateway.address());
    let bytes = request("POST", "/up/dies-1000000", &[], &body(32 * MIB));
    for piece in bytes.chunks(100_000) {
        if http.stream.write_all(piece).is_err() || worker.seen.requests.load(SeqCst) > 0 && worker.bytes() > 990_000 {
            break;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    http.answer().expect_error(502, "worker_reset");
    settles(&gateway);
}

/// Nobody has the bytes that a worker took with it: the request is not tried again, though there is another worker.
#[test]
fn a_worker_that_dies_is_told_of_and_not_replaced() {
    let workers = [Worker::start(), Worker::start()];
    let gateway = gateway(&workers.each_ref().map(|w| w.address), Relay::Auto, |c| c.retry.unanswered = true);
    let mut http = Http::connect(gateway.address());
    http.ask("POST", "/up/dies-300000", &[], &body(8 * MIB)).expect_error(502, "worker_reset");
    http.expect_closed();
    settles(&gateway);
    assert_eq!(workers.each_ref().map(|w| w.seen.requests.load(SeqCst)).iter().sum::<usize>(), 1);
    assert_eq!(tally_of(&gateway, Tally::Retries), 0);
}

/// As long as nothing was taken of it, it can go to another worker.
#[test]
fn a_worker_that_cannot_be_reached_is_replaced() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let worker = Worker::start();
    let gateway = gateway(&[closed, worker.address], Relay::Auto, |_| {});
    let body = body(4 * MIB);
    for _ in 0..4 {
        let mut http = Http::connect(gateway.address());
        assert_eq!(http.ask("POST", "/up/whole", &[], &body).expect(200).text(), told(&body));
    }
    assert!(tally_of(&gateway, Tally::Retries) > 0);
    settles(&gateway);
}

/// So can one that a worker refuses before anything was taken; the client's connection serves on.
#[test]
fn a_refusal_before_the_body_is_tried_elsewhere() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Auto, |_| {});
    let body = body(4 * MIB);
    let bytes = request("POST", "/up/busy-0", &[], &body);
    let mut http = Http::connect(gateway.address());
    http.send(&bytes[..bytes.len() - body.len()]);
    until("it was tried again", || worker.seen.requests.load(SeqCst) == 2);
    let answer = http.send(&bytes[bytes.len() - body.len()..]).answer().expect(200);
    assert_eq!((answer.text(), answer.header("connection")), (told(&body), None));
    assert_eq!(http.ask("GET", "/up/whole", &[], b"").expect(200).text(), told(b""));
    assert_eq!(tally_of(&gateway, Tally::Retries), 1);
    settles(&gateway);
}

/// One pipe, and an upload that keeps it: the next is received and sent, and gets the pipe when it is free.
#[test]
fn a_pipe_is_asked_for_again() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Auto, |c| c.pipes_per_lane = 1);
    let mut stuck = Http::connect(gateway.address());
    stuck.stream.set_nonblocking(true).unwrap();
    let stops = request("POST", "/up/stops-0", &[], &body(64 * MIB));
    let mut sent = 0;
    let mut moves = Instant::now();
    until("it is stuck", || {
        match stuck.stream.write(&stops[sent..]) {
            Ok(n) => (sent, moves) = (sent + n, Instant::now()),
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock),
        }
        moves.elapsed() > Duration::from_millis(1500)
    });
    assert!(sent < stops.len());
    let (copied, moved) = uploaded(&gateway);
    let body = body(24 * MIB);
    let bytes = request("POST", "/up/whole", &[], &body);
    let mut http = Http::connect(gateway.address());
    http.send(&bytes[..4 * MIB]);
    until("it is copied", || uploaded(&gateway).0 > copied + 3 * MIB as u64);
    assert_eq!(uploaded(&gateway).1, moved);
    stuck.reset();
    until("the pipe is free", || in_flight(&gateway) == 1);
    assert_eq!(http.send(&bytes[4 * MIB..]).answer().expect(200).text(), told(&body));
    assert!(uploaded(&gateway).1 > moved + 10 * MIB as u64);
    settles(&gateway);
}

/// The gateway ends while a body is on its way: what is under way has the time that a drain gives it.
#[test]
fn a_drain_waits_for_uploads() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Auto, |c| c.shutdown_grace = Duration::from_secs(20));
    let body = body(8 * MIB);
    let bytes = request("POST", "/up/whole", &[], &body);
    let mut http = Http::connect(gateway.address());
    http.send(&bytes[..3 * MIB]);
    until("it is on its way", || worker.bytes() > 2 * MIB);
    let shared = gateway.shared();
    let rest = bytes[3 * MIB..].to_vec();
    let ends = std::thread::spawn(move || {
        until("it drains", || shared.drain.phase() == Phase::Draining);
        http.send(&rest).answer().expect(200)
    });
    assert!(gateway.drain(), "something was cut");
    let answer = ends.join().unwrap();
    assert_eq!((answer.text(), answer.header("connection")), (told(&body), Some("close")));
}

/// A client that leaves or falls silent is nobody's fault but its own: the worker's connection ends, its breaker does
/// not hear of it.
#[test]
fn clients_that_stop_sending_end_their_upload() {
    let worker = Worker::start();
    let gateway = gateway(&[worker.address], Relay::Auto, |c| {
        c.body_timeout = Duration::from_millis(1500);
        c.request_timeout = Duration::from_secs(5);
    });
    let bytes = request("POST", "/up/whole", &[], &body(8 * MIB));
    let mut left = Http::connect(gateway.address());
    left.send(&bytes[..3 * MIB]);
    until("it is on its way", || worker.bytes() > 2 * MIB);
    drop(left);
    until("the worker's connection is closed", || worker.cut() == 1);
    let mut silent = Http::connect(gateway.address());
    silent.send(&bytes[..3 * MIB]).answer().expect_error(408, "body_timeout");
    silent.expect_closed();
    until("the worker's connection is closed", || worker.cut() == 2);
    settles(&gateway);
    // Nor of one that sends a byte now and then until the time for its request is over.
    let mut trickles = Http::connect(gateway.address());
    trickles.send(&bytes[..3 * MIB]);
    let early = until("its time is over", || {
        trickles.send(b"x");
        worker.cut() == 3
    });
    assert!(early > Duration::from_millis(2500));
    trickles.answer().expect_error(408, "body_timeout");
    let faults = |what| gateway.shared().tallies.lanes().iter().map(|lane| lane.faults(what)).sum::<u64>();
    assert_eq!((faults(What::ClientGone), faults(What::BodyTimeout), faults(What::RequestTimeout)), (1, 2, 0));
    assert_eq!(blamed(&gateway), 0);
    let whole = body(2 * MIB);
    let mut http = Http::connect(gateway.address());
    assert_eq!(http.ask("POST", "/up/whole", &[], &whole).expect(200).text(), told(&whole));
}
