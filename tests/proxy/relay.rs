//! Answers pass whole and unchanged whichever way they go, and nothing but whole when they broke off.
//!
//! The worker is written by hand: it makes bytes from a seed that the client knows too, in pieces and with pauses that
//! the request asks for.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use corelane::boot::Gateway;
use corelane::config::{AccessLog, Config, Relay, WorkerSpec};
use corelane::fault::What;
use corelane::lane::wire::ring::{Mode, Ring};
use corelane::metrics::Tally;
use serde::{Deserialize, Serialize};

use crate::access::Log;
use crate::rig::{Answer, End, Http, config, in_flight, post, serve_each, start, tally_of, until};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Framing {
    #[default]
    Length,
    Chunked,
    UntilClose,
}

/// What a request asks of the worker.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Plan {
    framing: Framing,
    seed: u64,
    /// Bytes of the pieces that are made; each is a chunk of its own.
    pieces: Vec<usize>,
    /// Milliseconds between two pieces.
    gap_ms: u64,
    /// Pieces are written in parts, with pauses.
    stutter: bool,
    /// The connection ends in the middle of this piece, with a reset or a FIN.
    dies_in: Option<usize>,
    reset: bool,
    /// Nothing comes in the middle of this piece, and the connection stays.
    stalls_in: Option<usize>,
    /// More comes than was said.
    excess: bool,
    /// In the middle of this piece comes a byte of urgent data, which is none of the answer's. (Only the last such byte
    /// that is on its way is kept apart.)
    urgent_in: Option<usize>,
}

impl Plan {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.pieces.iter().sum()];
        fastrand::Rng::with_seed(self.seed).fill(&mut bytes);
        bytes
    }

    fn request(&self) -> Vec<u8> {
        post("/generate", &serde_json::to_value(self).unwrap())
    }
}

/// Sizes over all orders of magnitude, up to 4 MiB in sum.
fn random_plan(rng: &mut fastrand::Rng) -> Plan {
    let framing = rng.choice([Framing::Length, Framing::Chunked, Framing::UntilClose]).unwrap();
    let mut pieces = Vec::new();
    let mut left = 1 << rng.u32(0..23);
    while left > 0 && pieces.len() < 200 {
        let piece = rng.usize(1..=left).min(1 << rng.u32(0..23));
        pieces.push(piece);
        left -= piece;
    }
    Plan { framing, seed: rng.u64(..), pieces, stutter: rng.u8(..) < 80, ..Plan::default() }
}

#[derive(Default)]
struct Seen {
    /// Connections on which an answer was asked for.
    connections: AtomicUsize,
    /// Pieces that were written whole.
    pieces: AtomicUsize,
    /// Times the gateway had closed an answer's connection before its end.
    refused: AtomicUsize,
}

struct Worker {
    address: SocketAddr,
    seen: Arc<Seen>,
}

impl Worker {
    fn start() -> Worker {
        let seen = Arc::<Seen>::default();
        let noted = seen.clone();
        Worker { address: serve_each(move |stream| serve(stream, &noted)), seen }
    }

    fn connections(&self) -> usize {
        self.seen.connections.load(SeqCst)
    }
}

fn serve(mut stream: TcpStream, seen: &Seen) {
    let mut buf = Vec::new();
    for nth in 0.. {
        let plan: Plan = loop {
            let head = buf.windows(4).position(|w| w == b"\r\n\r\n").map(|at| at + 4);
            if let Some(plan) = head.and_then(|head| serde_json::from_slice(&buf[head..]).ok()) {
                break plan;
            }
            let mut more = [0; 4096];
            match stream.read(&mut more) {
                Ok(n) if n > 0 => buf.extend_from_slice(&more[..n]),
                _ => return,
            }
        };
        buf.clear();
        seen.connections.fetch_add(usize::from(nth == 0), SeqCst);
        match answer(&mut stream, &plan, seen) {
            Ok(true) => {}
            Ok(false) => return,
            Err(_) => {
                seen.refused.fetch_add(1, SeqCst);
                return;
            }
        }
    }
}

/// Whether the connection stays.
fn answer(stream: &mut TcpStream, plan: &Plan, seen: &Seen) -> std::io::Result<bool> {
    let bytes = plan.bytes();
    let mut rng = fastrand::Rng::with_seed(!plan.seed);
    let mut out = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n".to_vec();
    match plan.framing {
        Framing::Length => write!(out, "Content-Length: {}\r\n\r\n", bytes.len())?,
        Framing::Chunked => write!(out, "Transfer-Encoding: chunked\r\n\r\n")?,
        Framing::UntilClose => write!(out, "Connection: close\r\n\r\n")?,
    }
    if rng.bool() {
        stream.write_all(&std::mem::take(&mut out))?;
    }
    let mut from = 0;
    for (n, len) in plan.pieces.iter().enumerate() {
        let mut piece = &bytes[from..from + len];
        from += len;
        let breaks = plan.dies_in == Some(n) || plan.stalls_in == Some(n);
        if breaks {
            piece = &piece[..len / 2];
        }
        if plan.framing == Framing::Chunked {
            write!(out, "{len:x}\r\n")?;
        }
        out.extend_from_slice(piece);
        if plan.framing == Framing::Chunked && !breaks {
            out.extend_from_slice(b"\r\n");
        }
        if plan.stutter {
            while !out.is_empty() {
                let part = rng.usize(1..=out.len());
                stream.write_all(&out[..part])?;
                out.drain(..part);
                std::thread::sleep(Duration::from_micros(rng.u64(0..500)));
            }
        }
        if plan.urgent_in == Some(n) {
            let half = out.len() / 2;
            stream.write_all(&out[..half])?;
            out.drain(..half);
            socket2::SockRef::from(&*stream).send_out_of_band(b"!")?;
            std::thread::sleep(Duration::from_millis(plan.gap_ms));
        }
        if plan.excess && n + 1 == plan.pieces.len() {
            // It goes out with what is too much, which else might come when the next answer is waited for already.
            break;
        }
        stream.write_all(&std::mem::take(&mut out))?;
        if breaks {
            if plan.stalls_in == Some(n) {
                // Until the gateway gives up.
                let ended = stream.read(&mut [0])?;
                assert_eq!(ended, 0, "the gateway says more");
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            if plan.reset {
                socket2::SockRef::from(&*stream).set_linger(Some(Duration::ZERO))?;
            }
            return Ok(false);
        }
        seen.pieces.fetch_add(1, SeqCst);
        if plan.gap_ms > 0 {
            std::thread::sleep(Duration::from_millis(plan.gap_ms));
        }
    }
    if plan.framing == Framing::Chunked {
        out.extend_from_slice(b"0\r\n\r\n");
    }
    if plan.excess {
        out.extend_from_slice(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged");
    }
    stream.write_all(&out)?;
    Ok(plan.framing != Framing::UntilClose)
}

fn gateway(worker: &Worker, relay: Relay, change: impl FnOnce(&mut Config)) -> Gateway {
    let mut spec = WorkerSpec::new(format!("http://{}", worker.address));
    spec.models = vec!["m".into()];
    let mut config = config(vec![spec]);
    (config.health_check, config.relay) = (false, relay);
    change(&mut config);
    start(config)
}

fn paths(gateway: &Gateway) -> (u64, u64) {
    (tally_of(gateway, Tally::RelayCopied), tally_of(gateway, Tally::RelaySpliced))
}

/// An answer with a body of `len` bytes, read at a random pace.
fn read(http: &mut Http, len: usize, rng: &mut fastrand::Rng) -> Answer {
    http.most = 1 << rng.u32(8..21);
    if rng.u8(..) < 80 {
        for _ in 0..rng.u32(1..6) {
            std::thread::sleep(Duration::from_millis(rng.u64(0..30)));
            // What is there behind the head is less than the body, so there is more.
            if http.buf.len() < len {
                http.fill().unwrap();
            }
        }
    }
    http.answer()
}

/// Sizes from a byte to 4 MiB in every framing, workers that stutter, readers that are slow or stop: every byte arrives,
/// in every mode, and goes the way that the mode says.
#[test]
fn answers_of_all_sizes_are_exact_whichever_way_they_go() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    for (mode, relay) in Relay::ALL.iter().copied().enumerate() {
        let worker = Worker::start();
        let gateway = gateway(&worker, relay, |c| c.cores = vec![0, 1]);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for n in 0..8 {
                let (gateway, sum) = (&gateway, &sum);
                scope.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(seed + (mode * 100 + n) as u64);
                    let mut http = Http::connect(gateway.address());
                    for _ in 0..16 {
                        let plan = random_plan(&mut rng);
                        http.send(&plan.request());
                        let want = plan.bytes();
                        let answer = read(&mut http, want.len(), &mut rng).expect(200);
                        assert!(answer.body == want, "{relay:?} {plan:?}: {} of {}", answer.body.len(), want.len());
                        sum.fetch_add(want.len(), SeqCst);
                        if plan.framing == Framing::UntilClose || rng.u8(..) < 20 {
                            http = Http::connect(gateway.address());
                        }
                    }
                });
            }
        });
        until("no request is in flight", || in_flight(&gateway) == 0);
        let (copied, spliced) = paths(&gateway);
        let sum = sum.into_inner() as u64;
        println!("{relay:?}: {copied} copied, {spliced} spliced, {} events", tally_of(&gateway, Tally::RelayEvents));
        assert_eq!(copied + spliced, sum);
        match relay {
            Relay::Copy => assert_eq!(spliced, 0),
            Relay::Splice => assert!(spliced * 100 >= sum * 99),
            Relay::Auto => assert!(copied > 0 && spliced > 0),
        }
    }
}

/// In splice mode a stream of small events goes through the pipe too, and none of it waits for what comes next.
#[test]
fn a_spliced_stream_is_live() {
    let worker = Worker::start();
    let gateway = gateway(&worker, Relay::Splice, |_| {});
    let plan = Plan { framing: Framing::Chunked, pieces: vec![120; 6], gap_ms: 150, ..Plan::default() };
    let mut http = Http::connect(gateway.address());
    http.send(&plan.request());
    http.head().unwrap();
    let mut trailers = String::new();
    for n in 1..=plan.pieces.len() {
        assert_eq!(http.chunk(&mut trailers).unwrap().len(), 120);
        let made = worker.seen.pieces.load(SeqCst);
        assert!(made <= n, "event {n} came after {made} were made");
    }
    assert!(http.chunk(&mut trailers).unwrap().is_empty());
    assert_eq!(paths(&gateway), (0, 720));
}

/// A client that does not know chunks is given the payload alone, moved by the kernel.
#[test]
fn a_client_of_http_1_0_gets_the_payload() {
    let worker = Worker::start();
    let gateway = gateway(&worker, Relay::Splice, |_| {});
    let plan = Plan { framing: Framing::Chunked, pieces: vec![1, 300_000, 17], ..Plan::default() };
    let request = String::from_utf8(plan.request()).unwrap().replacen("HTTP/1.1", "HTTP/1.0", 1);
    let mut http = Http::connect(gateway.address());
    let answer = http.send(request.as_bytes()).answer().expect(200);
    assert_eq!(answer.header("transfer-encoding"), None);
    assert!(answer.body == plan.bytes());
    assert_eq!(paths(&gateway), (0, 300_018));
}

/// Without pipes, or with fewer than answers, bytes are copied.
#[test]
fn without_a_pipe_answers_are_copied() {
    for (pipes, relay) in [(0, Relay::Auto), (0, Relay::Splice), (1, Relay::Auto), (1, Relay::Splice)] {
        let worker = Worker::start();
        let gateway = gateway(&worker, relay, |c| (c.pipes_per_lane, c.pipe_bytes) = (pipes, 64 << 10));
        std::thread::scope(|scope| {
            for n in 0..6 {
                let gateway = &gateway;
                scope.spawn(move || {
                    let framing = if n % 2 == 0 { Framing::Length } else { Framing::Chunked };
                    let plan = Plan { framing, seed: n, pieces: vec![6 << 20, 2 << 20], ..Plan::default() };
                    let mut http = Http::connect(gateway.address());
                    http.send(&plan.request());
                    // Long enough for bytes to lie in the only pipe.
                    std::thread::sleep(Duration::from_millis(150));
                    assert!(http.answer().expect(200).body == plan.bytes());
                });
            }
        });
        let (copied, spliced) = paths(&gateway);
        println!("{pipes} pipes, {relay:?}: {copied} copied, {spliced} spliced");
        assert_eq!(copied + spliced, 6 * (8 << 20));
        assert!(copied > 0 && (spliced > 0) == (pipes > 0));
        let sample = |state: &str| {
            let page = Http::connect(gateway.admin()).ask("GET", "/metrics", &[], b"").text();
            let name = format!("corelane_pipes{{state=\"{state}\"}} ");
            page.lines().find_map(|l| l.strip_prefix(&name)?.parse::<usize>().ok())
        };
        until("the pipe rests", || (sample("used"), sample("resting")) == (Some(0), Some(pipes)));
    }
}

/// A worker that breaks off in the middle of an answer never leaves the client with what looks like a whole one.
#[test]
fn an_answer_that_breaks_off_does_not_look_whole() {
    for relay in [Relay::Splice, Relay::Auto] {
        let worker = Worker::start();
        let gateway = gateway(&worker, relay, |_| {});
        for framing in [Framing::Length, Framing::Chunked, Framing::UntilClose] {
            for reset in [false, true] {
                for gap_ms in [0, 30] {
                    let pieces = vec![400_000, 700, 400_000];
                    for dies_in in 0..pieces.len() {
                        let dies_in = Some(dies_in);
                        let plan = Plan { framing, pieces: pieces.clone(), reset, gap_ms, dies_in, ..Plan::default() };
                        let answer = Http::connect(gateway.address()).send(&plan.request()).cut_answer();
                        // Without a length, a FIN is the end.
                        let may = framing == Framing::UntilClose && !reset;
                        assert!(answer.is_none_or(|end| end != End::Whole || may), "{relay:?} {plan:?}: {answer:?}");
                    }
                }
            }
        }
        until("no request is in flight", || in_flight(&gateway) == 0);
        assert!(tally_of(&gateway, Tally::Cuts) >= 30, "{}", tally_of(&gateway, Tally::Cuts));
        // The gateway is none the worse for it.
        let plan = Plan { pieces: vec![1 << 20], ..Plan::default() };
        let answer = Http::connect(gateway.address()).send(&plan.request()).answer().expect(200);
        assert!(answer.body == plan.bytes());
    }
}

/// A mark of urgent data, past which the kernel splices nothing, is not taken for the end, nor waited at.
#[test]
fn urgent_data_does_not_stop_an_answer() {
    for relay in Relay::ALL.iter().copied() {
        let worker = Worker::start();
        let gateway = gateway(&worker, relay, |c| c.stall_timeout = Duration::from_secs(2));
        for framing in [Framing::Length, Framing::Chunked, Framing::UntilClose] {
            for gap_ms in [0, 40] {
                let plan = Plan { framing, pieces: vec![400_000; 3], urgent_in: Some(1), gap_ms, ..Plan::default() };
                let answer = Http::connect(gateway.address()).send(&plan.request()).answer().expect(200);
                assert!(answer.body == plan.bytes(), "{relay:?} {plan:?}: {} bytes", answer.body.len());
            }
        }
    }
}

impl Http {
    /// How an answer ends that may break off anywhere; `None` before its head was complete.
    fn cut_answer(&mut self) -> Option<End> {
        let head = self.head().ok()?;
        let chunked = head.header("transfer-encoding").is_some();
        let length: Option<usize> = head.header("content-length").map(|v| v.parse().unwrap());
        let mut trailers = String::new();
        loop {
            let end = if chunked {
                match self.chunk(&mut trailers) {
                    Ok(chunk) if chunk.is_empty() => return Some(End::Whole),
                    Ok(_) => continue,
                    Err(end) => end,
                }
            } else if length.is_some_and(|length| self.buf.len() >= length) {
                return Some(End::Whole);
            } else {
                match self.fill() {
                    Ok(()) => continue,
                    Err(End::Fin) if length.is_none() => End::Whole,
                    Err(end) => end,
                }
            };
            return Some(end);
        }
    }
}

/// A client that leaves ends the worker's answer, whether bytes flow, wait in the pipe, or are waited for.
#[test]
fn a_client_that_leaves_ends_a_spliced_answer() {
    let worker = Worker::start();
    let gateway = gateway(&worker, Relay::Splice, |_| {});
    let flows = Plan { pieces: vec![1 << 20; 64], ..Plan::default() };
    let waits = Plan { pieces: vec![200_000, 200_000], stalls_in: Some(1), ..Plan::default() };
    for (n, (plan, takes)) in [(&flows, 3 << 20), (&flows, 100_000), (&waits, 300_000)].into_iter().enumerate() {
        let mut http = Http::connect(gateway.address());
        http.send(&plan.request());
        http.head().unwrap();
        http.exactly(takes).unwrap();
        if n == 1 {
            std::thread::sleep(Duration::from_millis(100));
        }
        http.reset();
        until("the worker is told", || worker.seen.refused.load(SeqCst) == n + 1);
        until("no request is in flight", || in_flight(&gateway) == 0);
    }
    until("they are counted", || tally_of(&gateway, Tally::ClientsLeft) == 3);
    assert_eq!(worker.connections(), 3);
}

/// The stall clocks run for spliced answers: a client that takes nothing is cut, one that is slow is not; so is a worker
/// that says nothing more.
#[test]
fn stalls_are_noticed_while_splicing() {
    let worker = Worker::start();
    let gateway = gateway(&worker, Relay::Splice, |c| {
        c.write_stall_timeout = Duration::from_millis(600);
        c.stall_timeout = Duration::from_millis(700);
    });
    let faults = |what: What| gateway.shared().tallies.lanes().iter().map(|l| l.faults(what)).sum::<u64>();
    let plan = Plan { pieces: vec![1 << 20; 48], ..Plan::default() };

    let mut slow = Http::connect(gateway.address());
    socket2::SockRef::from(&slow.stream).set_recv_buffer_size(64 << 10).unwrap();
    slow.most = 200_000;
    slow.send(&plan.request());
    slow.head().unwrap();
    let want = plan.bytes();
    // Longer than the clock in all, in steps that are shorter.
    for _ in 0..8 {
        slow.fill().unwrap();
        std::thread::sleep(Duration::from_millis(150));
    }
    assert!(slow.exactly(want.len()).unwrap() == want);
    assert_eq!(faults(What::ClientStalled), 0);

    let mut deaf = Http::connect(gateway.address());
    deaf.send(&plan.request());
    let took = until("it is cut", || faults(What::ClientStalled) == 1);
    assert!(took > Duration::from_millis(500), "{took:?}");
    until("the worker is told", || worker.seen.refused.load(SeqCst) == 1);
    // What the kernel holds for it is given up.
    assert_eq!(deaf.cut_answer(), Some(End::Reset));

    let plan = Plan { pieces: vec![300_000, 300_000], stalls_in: Some(1), ..Plan::default() };
    let mut http = Http::connect(gateway.address());
    assert_ne!(http.send(&plan.request()).cut_answer(), Some(End::Whole));
    assert_eq!(faults(What::CutStalled), 1);
    until("the worker is told", || worker.seen.refused.load(SeqCst) == 2);
}

/// The events of an even stream pass without their walk, which knows what passed: they are counted as any others, the
/// stall clock begins anew with each, and the end is the walk's again.
#[test]
fn an_even_stream_passes_without_its_walk_and_is_counted_like_any_other() {
    const EVENTS: usize = 20;
    for framing in [Framing::Length, Framing::Chunked, Framing::UntilClose] {
        let worker = Worker::start();
        let log = Log::new(&format!("even-{framing:?}"));
        let gateway = gateway(&worker, Relay::Auto, |c| {
            c.stall_timeout = Duration::from_millis(400);
            (c.access_log, c.access_log_path) = (AccessLog::All, log.path());
        });
        let even = Plan { framing, pieces: vec![120; EVENTS], gap_ms: 40, ..Plan::default() };
        let ask = |plan: &Plan| {
            let mut ask = serde_json::to_value(plan).unwrap();
            (ask["stream"], ask["model"]) = (true.into(), "m".into());
            let mut http = Http::connect(gateway.address());
            http.send(&post("/generate", &ask));
            http
        };
        // Twice as long as the worker may be silent.
        let started = Instant::now();
        let answer = ask(&even).answer().expect(200);
        let took = started.elapsed().as_secs_f64();
        assert!(answer.body == even.bytes());
        until("no request is in flight", || in_flight(&gateway) == 0);
        let steady = tally_of(&gateway, Tally::RelaySteady);
        // Older kernels have no streams of receives.
        let passes = Ring::new().unwrap().mode() == Mode::Defer;
        assert!(steady >= EVENTS as u64 / 2 || !passes, "{framing:?}: {steady}");
        assert_eq!(paths(&gateway), (120 * EVENTS as u64, 0));
        let framed = if framing == Framing::Chunked { EVENTS * 6 + 5 } else { 0 };
        let head: usize = answer.head.lines().map(|line| line.len() + 2).sum();
        let bytes_out = (head + 2 + 120 * EVENTS + framed) as u64;
        assert_eq!(tally_of(&gateway, Tally::ClientBytesOut), bytes_out, "{framing:?}\n{}", answer.head);
        let page = Http::connect(gateway.admin()).ask("GET", "/metrics", &[], b"").text();
        let sample = |name: &str| -> f64 {
            page.lines().find_map(|l| l.strip_prefix(name)?.parse().ok()).unwrap_or_else(|| panic!("no {name}"))
        };
        for name in [
            r#"corelane_event_gap_seconds_NAME{route="/generate"} "#,
            r#"corelane_model_event_gap_seconds_NAME{model="m"} "#,
        ] {
            let gaps = sample(&name.replace("NAME", "count"));
            assert!(gaps + 3.0 >= EVENTS as f64, "{framing:?}: {gaps} gaps");
            // All between the first and the last.
            let sum = sample(&name.replace("NAME", "sum"));
            assert!(
                (0.035 * (gaps - 1.0)..took).contains(&sum),
                "{framing:?}: {sum} s between {gaps} events in {took} s"
            );
        }

        // The clock runs from the last event, and what had come before is the client's.
        let stalls = Plan { stalls_in: Some(EVENTS - 1), ..even.clone() };
        let started = Instant::now();
        assert_ne!(ask(&stalls).cut_answer(), Some(End::Whole), "{framing:?}");
        let least = Duration::from_millis(40 * (EVENTS as u64 - 1) + 400);
        assert!(started.elapsed() >= least, "{framing:?}: cut after {:?}", started.elapsed());
        until("the worker is told", || worker.seen.refused.load(SeqCst) == 1);

        // So it is when the worker dies, and when the client leaves.
        let dies = Plan { dies_in: Some(EVENTS - 1), reset: true, ..even.clone() };
        assert_ne!(ask(&dies).cut_answer(), Some(End::Whole), "{framing:?}");
        let mut leaves = ask(&even);
        leaves.head().unwrap();
        leaves.exactly(120 * 10).unwrap();
        leaves.reset();
        until("the worker is told", || worker.seen.refused.load(SeqCst) == 2);
        until("no request is in flight", || in_flight(&gateway) == 0);
        assert!(tally_of(&gateway, Tally::RelaySteady) >= 3 * steady / 2 + EVENTS as u64 / 2);
        let faults = |what: What| gateway.shared().tallies.lanes().iter().map(|l| l.faults(what)).sum::<u64>();
        assert_eq!((faults(What::CutStalled), faults(What::Cut), faults(What::ClientLeft)), (1, 1, 1), "{framing:?}");
        // The log knows what passed, too, however it ended.
        let lines = log.lines(4);
        let told = |line: &serde_json::Value| line["bytes_out"].as_u64().unwrap();
        assert_eq!(told(&lines[0]), bytes_out, "{framing:?}");
        assert_eq!(lines.iter().map(told).sum::<u64>(), tally_of(&gateway, Tally::ClientBytesOut), "{framing:?}");
    }
}

/// A client that takes nothing of an even stream is noticed, though nobody was woken for what came until then.
#[test]
fn a_deaf_client_of_an_even_stream_is_cut() {
    let worker = Worker::start();
    let gateway = gateway(&worker, Relay::Auto, |c| c.write_stall_timeout = Duration::from_millis(600));
    let plan = Plan { framing: Framing::Chunked, pieces: vec![3000; 20_000], ..Plan::default() };
    let mut http = Http::connect(gateway.address());
    http.send(&plan.request());
    let faults = |what: What| gateway.shared().tallies.lanes().iter().map(|l| l.faults(what)).sum::<u64>();
    until("it is cut", || faults(What::ClientStalled) == 1);
    until("the worker is told", || worker.seen.refused.load(SeqCst) == 1);
    assert_eq!(http.cut_answer(), Some(End::Reset));
    until("no request is in flight", || in_flight(&gateway) == 0);
}

/// Connections serve again after a spliced answer, unless the worker said more than its answer.
#[test]
fn a_spliced_answer_leaves_a_connection_for_the_next_one_or_none() {
    for relay in [Relay::Splice, Relay::Auto] {
        let worker = Worker::start();
        let gateway = gateway(&worker, relay, |_| {});
        let mut http = Http::connect(gateway.address());
        let mut ask = |plan: &Plan| {
            let answer = http.send(&plan.request()).answer().expect(200);
            assert!(answer.body == plan.bytes(), "{relay:?} {plan:?}");
        };
        // Large and small ones by turns, so that what was waited for on the one kind does not hurt the other.
        for round in 0..4 {
            for framing in [Framing::Length, Framing::Chunked] {
                for pieces in [vec![500_000], vec![20], vec![200_000, 5, 5, 200_000], vec![]] {
                    ask(&Plan { framing, pieces, seed: round, ..Plan::default() });
                }
            }
        }
        assert_eq!(worker.connections(), 1, "{relay:?}");
        for (n, framing) in [Framing::Length, Framing::Chunked].into_iter().enumerate() {
            ask(&Plan { framing, pieces: vec![300_000, 100], excess: true, ..Plan::default() });
            // The next one must not be given what was forged.
            ask(&Plan { framing, pieces: vec![300_000], seed: 9, ..Plan::default() });
            assert_eq!(worker.connections(), n + 2, "{relay:?}");
        }
    }
}

/// What the process holds for a deaf client of a spliced answer is a pipe and two sockets' buffers, however long it is.
#[test]
fn a_slow_client_slows_the_worker_down() {
    let worker = Worker::start();
    let gateway = gateway(&worker, Relay::Splice, |c| c.pipe_bytes = 256 << 10);
    let plan = Plan { pieces: vec![1 << 20; 48], ..Plan::default() };
    let mut http = Http::connect(gateway.address());
    http.send(&plan.request());
    http.head().unwrap();
    let made = || worker.seen.pieces.load(SeqCst);
    let mut last = usize::MAX;
    until("the worker waits", || {
        std::thread::sleep(Duration::from_millis(200));
        std::mem::replace(&mut last, made()) == made()
    });
    assert!(made() < 30, "{}", made());
    let want = plan.bytes();
    assert!(http.exactly(want.len()).unwrap() == want);
    assert!(http.buf.is_empty());
}
