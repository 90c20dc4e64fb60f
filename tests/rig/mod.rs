//! A gateway between mock engines and a client of its own, all in this process, on real sockets.
//!
//! Takes settings, gives a running gateway and a blocking client that shares no code with it. Never waits a fixed
//! time for something to happen.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use corelane::boot::Gateway;
use corelane::config::{Config, WorkerSpec};
use corelane::metrics::Tally;
use corelane::mock::{Fleet, Settings, Stats};
use serde_json::Value;

/// Longest wait for anything: far beyond what a loaded machine needs.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until something is so.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "still not so: {what}");
        std::thread::sleep(Duration::from_millis(3));
    }
    start.elapsed()
}

/// A gateway in front of mock engines.
pub struct Rig {
    // Ended before the engines, so that what it still holds is not what ends it.
    pub gateway: Gateway,
    pub fleet: Fleet,
}

/// A configuration for tests: free ports, one lane, nothing waits at the end.
pub fn config(workers: Vec<WorkerSpec>) -> Config {
    let mut config = Config::with_workers(workers);
    config.host = IpAddr::V4(Ipv4Addr::LOCALHOST);
    (config.port, config.metrics_port) = (0, 0);
    config.cores = vec![0];
    config.shutdown_settle = Duration::ZERO;
    config.shutdown_grace = Duration::from_millis(100);
    config
}

pub fn fleet(settings: Settings, workers: usize) -> Fleet {
    Fleet::start(settings, (Ipv4Addr::LOCALHOST, 0), workers).expect("mock engines start")
}

/// The workers of a fleet, whose models are asked for.
pub fn specs(fleet: &Fleet) -> Vec<WorkerSpec> {
    fleet.urls().into_iter().map(WorkerSpec::new).collect()
}

/// Starts a gateway and waits until all of its workers are usable.
pub fn start(config: Config) -> Gateway {
    let workers = config.workers.len();
    let gateway = Gateway::start(config).expect("the gateway starts");
    until("all workers are usable", || gateway.shared().readiness.snapshot().usable == workers);
    gateway
}

impl Rig {
    pub fn new(workers: usize) -> Rig {
        Rig::with(Settings::default(), workers, |_| {})
    }

    pub fn with(settings: Settings, workers: usize, change: impl FnOnce(&mut Config)) -> Rig {
        let fleet = fleet(settings, workers);
        let mut config = config(specs(&fleet));
        change(&mut config);
        Rig { gateway: start(config), fleet }
    }

    pub fn http(&self) -> Http {
        Http::connect(self.gateway.address())
    }

    /// One request on a connection of its own.
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.http().post(path, body)
    }

    pub fn get(&self, path: &str) -> Answer {
        self.http().ask("GET", path, &[], b"")
    }

    pub fn stats(&self, i: usize) -> Stats {
        self.fleet.engine(i).stats()
    }

    /// Requests that any engine has received.
    pub fn received(&self) -> u64 {
        self.fleet.engines().iter().map(|e| e.stats().requests).sum()
    }

    /// Requests that the gateway holds a guard for.
    pub fn in_flight(&self) -> u32 {
        in_flight(&self.gateway)
    }

    /// Waits until neither side has a request left.
    pub fn settles(&self) -> Duration {
        until("no request is in flight", || {
            self.in_flight() == 0 && self.fleet.engines().iter().all(|e| e.stats().active == 0)
        })
    }

    pub fn tally(&self, tally: Tally) -> u64 {
        tally_of(&self.gateway, tally)
    }

    /// A sample of the admin listener's metrics, by name and labels as they are written.
    pub fn metric(&self, name: &str) -> Option<f64> {
        let page = Http::connect(self.gateway.admin()).ask("GET", "/metrics", &[], b"").text();
        page.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    }
}

/// A worker written by hand: each of its connections is served on a thread of its own.
pub fn serve_each(serve: impl Fn(TcpStream) + Clone + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (serve, stream) = (serve.clone(), stream.unwrap());
            stream.set_nodelay(true).unwrap();
            std::thread::spawn(move || serve(stream));
        }
    });
    address
}

pub fn in_flight(gateway: &Gateway) -> u32 {
    let shared = gateway.shared();
    shared.roster.snapshot().workers.iter().map(|w| shared.load.word(w.slot).in_flight()).sum()
}

/// How often a worker was to blame.
pub fn blamed(gateway: &Gateway) -> u64 {
    let roster = gateway.shared().roster.snapshot();
    roster.workers.iter().map(|worker| gateway.shared().vitals.failed(worker.slot)).sum()
}

pub fn tally_of(gateway: &Gateway, tally: Tally) -> u64 {
    gateway.shared().tallies.lanes().iter().map(|l| l.get(tally)).sum()
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// As its framing says; for a body without a length: with a FIN.
    Whole,
    /// A FIN before the end.
    Fin,
    /// A reset.
    Reset,
}

#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    /// Status line and header lines, Latin-1.
    pub head: String,
    pub fields: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub trailers: String,
    pub end: End,
}

impl Answer {
    /// The only value of a header; panics when it is repeated.
    pub fn header(&self, name: &str) -> Option<&str> {
        let all = self.headers(name);
        assert!(all.len() < 2, "{name} is repeated in {}", self.head);
        all.first().copied()
    }

    pub fn headers(&self, name: &str) -> Vec<&str> {
        self.fields.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str()).collect()
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {} {}", self.head, self.text()))
    }

    /// Asserts a whole answer with this status.
    pub fn expect(self, status: u16) -> Answer {
        assert_eq!((self.status, self.end), (status, End::Whole), "{}\n{}", self.head, self.text());
        self
    }

    /// Asserts an error of the gateway's own, in the OpenAI shape.
    pub fn expect_error(self, status: u16, code: &str) -> Answer {
        assert_eq!(self.status, status, "{}\n{}", self.head, self.text());
        let v = self.json();
        assert_eq!(v["error"]["code"], code, "{v}");
        assert!(v["error"]["message"].is_string() && v["error"]["type"].is_string(), "{v}");
        assert!(v["error"]["param"].is_null() && v["error"].get("param").is_some(), "{v}");
        assert_eq!(self.header("x-corelane-error"), Some(code));
        assert_eq!(self.header("content-type"), Some("application/json"));
        self
    }
}

pub fn latin1(bytes: &[u8]) -> String {
    bytes.iter().map(|b| char::from(*b)).collect()
}

/// The bytes of a request.
pub fn request(method: &str, path: &str, fields: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut out = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\n").into_bytes();
    for (name, value) in fields {
        out.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
    }
    if method == "POST" || !body.is_empty() {
        out.extend_from_slice(
            format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len()).as_bytes(),
        );
    }
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(body);
    out
}

pub fn post(path: &str, body: &Value) -> Vec<u8> {
    request("POST", path, &[], body.to_string().as_bytes())
}

/// A client's connection.
pub struct Http {
    pub stream: TcpStream,
    pub buf: Vec<u8>,
    /// Most bytes that one read takes.
    pub most: usize,
}

enum Framing {
    Nothing,
    Length(usize),
    Chunked,
    UntilClose,
}

impl Http {
    pub fn connect(to: SocketAddr) -> Http {
        let stream = TcpStream::connect(to).expect("connects");
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Http { stream, buf: Vec::new(), most: 64 * 1024 }
    }

    /// Sends; an error is not one of the test's: the answer says what happened.
    pub fn send(&mut self, bytes: &[u8]) -> &mut Http {
        let _ = self.stream.write_all(bytes);
        self
    }

    pub fn ask(&mut self, method: &str, path: &str, fields: &[(&str, &str)], body: &[u8]) -> Answer {
        self.send(&request(method, path, fields, body)).answer_to(method)
    }

    pub fn post(&mut self, path: &str, body: &Value) -> Answer {
        self.send(&post(path, body)).answer()
    }

    /// Receives something.
    pub fn fill(&mut self) -> Result<(), End> {
        let old = self.buf.len();
        self.buf.resize(old + self.most, 0);
        let got = self.stream.read(&mut self.buf[old..]);
        self.buf.truncate(old + *got.as_ref().unwrap_or(&0));
        match got {
            Ok(0) => Err(End::Fin),
            Ok(_) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {
                println!("a read was interrupted");
                Ok(())
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                panic!("nothing came for {PATIENCE:?}; so far: {:?}", latin1(&self.buf))
            }
            Err(_) => Err(End::Reset),
        }
    }

    fn take(&mut self, n: usize) -> Vec<u8> {
        let rest = self.buf.split_off(n);
        std::mem::replace(&mut self.buf, rest)
    }

    /// A line without its end.
    pub fn line(&mut self) -> Result<Vec<u8>, End> {
        let mut from = 0;
        loop {
            if let Some(at) = self.buf[from..].windows(2).position(|w| w == b"\r\n") {
                let mut line = self.take(from + at + 2);
                line.truncate(line.len() - 2);
                return Ok(line);
            }
            from = self.buf.len().saturating_sub(1);
            self.fill()?;
        }
    }

    pub fn exactly(&mut self, n: usize) -> Result<Vec<u8>, End> {
        while self.buf.len() < n {
            self.fill()?;
        }
        Ok(self.take(n))
    }

    /// The next head; `None` when the connection ends instead.
    pub fn head(&mut self) -> Result<Answer, End> {
        let line = latin1(&self.line()?);
        let status = line.strip_prefix("HTTP/1.1 ").and_then(|l| l.get(..3)?.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status line: {line:?}"));
        let mut answer = Answer {
            status,
            head: line + "\n",
            fields: Vec::new(),
            body: Vec::new(),
            trailers: String::new(),
            end: End::Whole,
        };
        loop {
            let line = latin1(&self.line()?);
            if line.is_empty() {
                return Ok(answer);
            }
            answer.head += &format!("{line}\n");
            let (name, value) = line.split_once(':').unwrap_or_else(|| panic!("no header line: {line:?}"));
            answer.fields.push((name.to_owned(), value.trim().to_owned()));
        }
    }

    /// One chunk; empty for the last one, whose trailers are then in `trailers`.
    pub fn chunk(&mut self, trailers: &mut String) -> Result<Vec<u8>, End> {
        let line = latin1(&self.line()?);
        let size = usize::from_str_radix(line.split(';').next().unwrap().trim(), 16);
        let size = size.unwrap_or_else(|_| panic!("no chunk size: {line:?}"));
        if size > 0 {
            let mut chunk = self.exactly(size + 2)?;
            assert_eq!(&chunk[size..], b"\r\n");
            chunk.truncate(size);
            return Ok(chunk);
        }
        loop {
            let line = latin1(&self.line()?);
            if line.is_empty() {
                return Ok(Vec::new());
            }
            *trailers += &format!("{line}\n");
        }
    }

    pub fn answer(&mut self) -> Answer {
        self.answer_to("POST")
    }

    /// The next final answer.
    pub fn answer_to(&mut self, method: &str) -> Answer {
        self.try_answer_to(method).unwrap_or_else(|end| panic!("{end:?} instead of an answer"))
    }

    pub fn try_answer_to(&mut self, method: &str) -> Result<Answer, End> {
        let mut answer = loop {
            let head = self.head()?;
            if head.status >= 200 {
                break head;
            }
        };
        let framing = if method == "HEAD" || answer.status == 204 || answer.status == 304 {
            Framing::Nothing
        } else if let Some(coding) = answer.header("transfer-encoding") {
            assert_eq!((coding, answer.header("content-length")), ("chunked", None));
            Framing::Chunked
        } else if let Some(length) = answer.header("content-length") {
            Framing::Length(length.parse().unwrap())
        } else {
            Framing::UntilClose
        };
        answer.end = match framing {
            Framing::Nothing => End::Whole,
            Framing::Length(n) => loop {
                if self.buf.len() >= n {
                    answer.body = self.take(n);
                    break End::Whole;
                }
                if let Err(end) = self.fill() {
                    answer.body = std::mem::take(&mut self.buf);
                    break end;
                }
            },
            Framing::Chunked => loop {
                match self.chunk(&mut answer.trailers) {
                    Ok(chunk) if chunk.is_empty() => break End::Whole,
                    Ok(chunk) => answer.body.extend_from_slice(&chunk),
                    Err(end) => break end,
                }
            },
            Framing::UntilClose => loop {
                if let Err(end) = self.fill() {
                    answer.body = std::mem::take(&mut self.buf);
                    break if end == End::Fin { End::Whole } else { end };
                }
            },
        };
        Ok(answer)
    }

    /// Asserts that the gateway closes the connection without another byte.
    pub fn expect_closed(&mut self) -> End {
        let mut filled = self.fill();
        while filled.is_ok() && self.buf.is_empty() {
            filled = self.fill();
        }
        match filled {
            Err(end) => end,
            Ok(()) => panic!("more came: {:?}", latin1(&self.buf)),
        }
    }

    /// Makes the close a reset.
    pub fn reset(self) {
        socket2::SockRef::from(&self.stream).set_linger(Some(Duration::ZERO)).unwrap();
    }
}

/// An answer's bytes without what no two answers of a mock engine share: ids and times.
pub fn scrub(bytes: &[u8]) -> String {
    let mut text = String::from_utf8(bytes.to_vec()).expect("UTF-8");
    for mark in ["chatcmpl-", "cmpl-", "resp_", "msg_", "\"id\":\""] {
        let mut from = 0;
        while let Some(at) = text[from..].find(mark) {
            from += at + mark.len();
            let hex = text[from..].bytes().take_while(u8::is_ascii_hexdigit).count();
            if hex == 24 {
                text.replace_range(from..from + hex, "ID");
            }
        }
    }
    for mark in ["\"created\":", "\"created_at\":"] {
        let mut from = 0;
        while let Some(at) = text[from..].find(mark) {
            from += at + mark.len();
            let digits = text[from..].bytes().take_while(u8::is_ascii_digit).count();
            text.replace_range(from..from + digits, "0");
        }
    }
    text
}
