//! Clients that ask for everything, some of which stay and some of which leave, in every phase.
//!
//! Takes an address and a seed, gives counts of what came of their requests. Never takes an answer on trust: each
//! request has a text of its own, which must come back exactly as often as was asked for.

use std::io::Write;
use std::net::{Shutdown, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::rig::{Answer, End, Http, request};

/// Longest that a disruption is felt after it is over: timeouts of the gateway, probes, and a slow machine.
const AFTERMATH: Duration = Duration::from_millis(4500);

/// What happens beside the clients, and what came of their requests.
#[derive(Default)]
pub struct Ledger {
    /// Requests that nobody has begun yet.
    pub left: AtomicU64,
    /// Answered with what was asked for.
    pub whole: AtomicU64,
    /// Answered with an error status.
    pub refused: AtomicU64,
    /// Visibly broken off.
    pub cut: AtomicU64,
    /// Not answered, because an earlier one of the same connection was broken off.
    pub unanswered: AtomicU64,
    /// Given up by their client.
    pub given_up: AtomicU64,
    /// Of `refused` and `cut`, those that did not ask for it: they were hit by a disruption.
    pub hit: AtomicU64,
    /// What disruptions may cost: requests that were on their workers, or came there meanwhile.
    pub exposed: AtomicU64,
    disruptions: Mutex<Vec<(Instant, Option<Instant>)>>,
}

impl Ledger {
    /// Notes that something happens to the workers from now on.
    pub fn disrupt(&self) {
        self.disruptions.lock().unwrap().push((Instant::now(), None));
    }

    /// Notes that the last disruption is over.
    pub fn calm(&self) {
        self.disruptions.lock().unwrap().last_mut().expect("one has begun").1 = Some(Instant::now());
    }

    /// Whether a disruption can have been felt since then.
    fn disrupted_since(&self, begun: Instant) -> bool {
        let felt = |(_, end): &(Instant, Option<Instant>)| end.is_none_or(|end| end + AFTERMATH >= begun);
        self.disruptions.lock().unwrap().iter().any(felt)
    }

    pub fn get(&self, count: fn(&Ledger) -> &AtomicU64) -> u64 {
        count(self).load(Relaxed)
    }
}

/// One request and what may come of it.
struct Ask {
    path: &'static str,
    body: Value,
    /// Occurs once in each event.
    mark: String,
    /// Bytes of `~` in each event.
    padding: usize,
    events: usize,
    stream: bool,
    /// It goes to a worker that misbehaves, or asks for a misbehaviour: an error is an answer to it.
    may_fail: bool,
}

/// Marks of all requests begin like this.
pub const MARK: &str = "<<";

impl Ask {
    /// Any request of the mix.
    fn any(rng: &mut fastrand::Rng) -> Ask {
        let rogue = rng.u32(0..4) == 0;
        let (fault, may_fail) = if rogue { (json!({}), true) } else { fault(rng) };
        let model = if rogue {
            "rogue"
        } else if rng.u32(0..5) == 0 {
            "pair"
        } else {
            "plain"
        };
        let padding = if rng.u32(0..60) == 0 { 64 * 1024 } else { rng.usize(0..40) };
        let events = if padding > 40 { 16 } else { rng.usize(1..12) };
        Ask::new(rng, model, events, padding, fault, may_fail)
    }

    fn new(
        rng: &mut fastrand::Rng,
        model: &str,
        events: usize,
        padding: usize,
        mut mock: Value,
        may_fail: bool,
    ) -> Ask {
        let mark = format!("{MARK}{:016x}>>", rng.u64(..));
        mock["text"] = format!("{mark}{}", "~".repeat(padding)).into();
        let length = if rng.u32(0..40) == 0 { rng.usize(60_000..300_000) } else { rng.usize(0..4000) };
        let prompt = (0..length / 8 + 1).map(|i| format!("word{:03} ", i % 7 + length % 90)).collect::<String>();
        let stream = rng.bool();
        let mut body = json!({"model": model, "stream": stream, "max_tokens": events, "mock": mock});
        let path = if rng.bool() {
            body["messages"] = json!([{"role": "user", "content": prompt}]);
            "/v1/chat/completions"
        } else {
            body["prompt"] = prompt.into();
            "/v1/completions"
        };
        Ask { path, body, mark, padding, events, stream, may_fail }
    }

    fn wire(&self) -> Vec<u8> {
        request("POST", self.path, &[], self.body.to_string().as_bytes())
    }

    /// Asserts that the answer is this request's, every byte that can be known.
    fn check(&self, answer: &Answer) {
        let text = answer.text();
        let told = || format!("{}\n{}\nfor {}", answer.head, text.get(..2000).unwrap_or(&text), self.mark);
        assert_eq!(text.matches(MARK).count(), self.events, "texts: {}", told());
        assert_eq!(text.matches(&self.mark).count(), self.events, "somebody else's: {}", told());
        let padding = answer.body.iter().filter(|b| **b == b'~').count();
        assert_eq!(padding, self.events * self.padding, "bytes: {}", told());
        if self.stream {
            assert!(text.ends_with("data: [DONE]\n\n"), "no end: {}", told());
        } else {
            assert!(answer.json()["usage"].is_object(), "no end: {}", told());
        }
    }
}

/// What a request asks a mock engine to do to it, and whether an error may come of it.
fn fault(rng: &mut fastrand::Rng) -> (Value, bool) {
    match rng.u32(0..400) {
        0..5 => (json!({"reset_before_head": true}), true),
        5..10 => (json!({"close_before_head": true}), true),
        10..16 => (json!({"reset_after_events": rng.u64(0..6)}), true),
        16..22 => (json!({"close_after_events": rng.u64(0..6)}), true),
        22..25 => (json!({"raw": "HTTP/1.1 200 O\r\nno head"}), true),
        25..35 => (json!({"status": rng.choice([400, 422, 429, 500, 503])}), true),
        35..37 => (json!({"hang": true}), true),
        37..39 => (json!({"stall_after_events": 1}), true),
        39..45 => (json!({"trailers": true}), false),
        45..50 => (json!({"interim": 3}), false),
        50..55 => (json!({"excess": true}), false),
        55..65 => (json!({"close": true}), false),
        65..90 => (json!({"delay_ms": rng.u64(0..40)}), false),
        90..170 => (json!({"gap_ms": rng.u64(2..30)}), false),
        _ => (json!({}), false),
    }
}

/// Codes of the gateway that a request may meet here.
const CODES: &[&str] = &[
    "worker_unreachable",
    "worker_connect_timeout",
    "worker_reset",
    "worker_bad_answer",
    "worker_silent",
    "stale_connection",
    "no_usable_worker",
    "request_timeout",
];

/// One client: asks until nothing is left.
pub fn client(to: SocketAddr, seed: u64, ledger: &Ledger) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut http = Http::connect(to);
    while ledger.left.fetch_update(Relaxed, Relaxed, |n| n.checked_sub(1)).is_ok() {
        let keep = match rng.u32(0..20) {
            0..3 => {
                leave(&mut rng, http, to);
                ledger.given_up.fetch_add(1, Relaxed);
                None
            }
            3 => {
                // The others of the pipeline count, too.
                let more = rng.u64(1..4);
                let taken = ledger.left.fetch_update(Relaxed, Relaxed, |n| n.checked_sub(more)).is_ok();
                let asks = (0..if taken { more + 1 } else { 1 }).map(|_| Ask::any(&mut rng)).collect();
                stay(http, asks, ledger)
            }
            _ => stay(http, vec![Ask::any(&mut rng)], ledger),
        };
        http = match keep {
            Some(http) if rng.u32(0..20) > 0 => http,
            _ => Http::connect(to),
        };
    }
}

/// Asks and waits for every answer. Gives the connection, if it can be used again.
fn stay(mut http: Http, asks: Vec<Ask>, ledger: &Ledger) -> Option<Http> {
    let begun = Instant::now();
    let wire: Vec<u8> = asks.iter().flat_map(Ask::wire).collect();
    http.send(&wire);
    let mut open = true;
    for ask in &asks {
        if open {
            open = settle(ask, http.try_answer_to("POST"), begun, ledger);
        } else {
            ledger.unanswered.fetch_add(1, Relaxed);
        }
    }
    assert!(http.buf.is_empty() || !open, "more than was asked for: {:?}", String::from_utf8_lossy(&http.buf));
    open.then_some(http)
}

/// Judges what came of a request; whether the connection can be used again.
fn settle(ask: &Ask, answer: Result<Answer, End>, begun: Instant, ledger: &Ledger) -> bool {
    let answer = match answer {
        Ok(answer) if answer.end == End::Whole => answer,
        cut => {
            let excused = ask.may_fail || ledger.disrupted_since(begun);
            assert!(excused, "cut for nothing: {cut:?} for {}", ask.body["mock"]);
            ledger.cut.fetch_add(1, Relaxed);
            ledger.hit.fetch_add(u64::from(!ask.may_fail), Relaxed);
            return false;
        }
    };
    let open = answer.header("connection") != Some("close");
    if answer.status == 200 {
        ask.check(&answer);
        ledger.whole.fetch_add(1, Relaxed);
        return open;
    }
    let code =
        answer.header("x-corelane-error").map(|c| c.trim_start_matches("prefill_").trim_start_matches("decode_"));
    match code {
        Some(code) => {
            assert!(CODES.contains(&code), "{} for {}", answer.head, ask.body["mock"]);
            assert_eq!(answer.json()["error"]["code"], answer.header("x-corelane-error").unwrap());
        }
        None => assert!(matches!(answer.status, 400 | 422 | 429 | 500 | 503), "{}", answer.head),
    }
    // Legs whose partner was killed time out in the engine, which says 500.
    let excused = ask.may_fail || ledger.disrupted_since(begun);
    assert!(excused, "refused for nothing: {}\n{}\nfor {}", answer.head, answer.text(), ask.body["mock"]);
    ledger.refused.fetch_add(1, Relaxed);
    ledger.hit.fetch_add(u64::from(!ask.may_fail), Relaxed);
    open
}

/// Leaves, in some phase of a request.
fn leave(rng: &mut fastrand::Rng, mut http: Http, to: SocketAddr) {
    let ask = Ask::any(rng);
    let wire = ask.wire();
    let head = wire.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
    let model = ask.body["model"].as_str().unwrap();
    match rng.u32(0..9) {
        0 => drop(http.send(&wire[..rng.usize(1..head)])),
        1 => drop(http.send(&wire[..rng.usize(head..wire.len())])),
        2 => {
            // While it waits, for a worker that does not hurry.
            let mock = if rng.bool() { json!({"hang": true}) } else { json!({"delay_ms": 300}) };
            http.send(&Ask::new(rng, model, 2, 0, mock, true).wire());
            std::thread::sleep(Duration::from_millis(rng.u64(0..40)));
        }
        3 | 4 => {
            // In the middle of a stream.
            let mut ask = Ask::new(rng, "plain", 100, 10, json!({"gap_ms": 10}), true);
            (ask.body["stream"], ask.body["model"]) = (true.into(), model.into());
            http.send(&ask.wire());
            if http.head().is_ok() && http.buf.is_empty() {
                let _ = http.fill();
            }
        }
        5 => {
            // Not reading.
            http.send(&Ask::new(rng, model, 64, 64 * 1024, json!({}), true).wire());
            std::thread::sleep(Duration::from_millis(rng.u64(20..200)));
        }
        6 => {
            // Not reading, and staying until it is cut or the end is there.
            if rng.u32(0..4) == 0 {
                let ask = Ask::new(rng, model, 64, 64 * 1024, json!({}), true);
                http.send(&ask.wire());
                std::thread::sleep(Duration::from_millis(2500));
                if let Ok(answer) = http.try_answer_to("POST")
                    && (answer.status, answer.end) == (200, End::Whole)
                {
                    ask.check(&answer);
                }
            }
        }
        7 => {
            // Only the sending side is closed: that counts as having left.
            http.send(&wire);
            let _ = http.stream.shutdown(Shutdown::Write);
            if let Ok(answer) = http.try_answer_to("POST")
                && (answer.status, answer.end) == (200, End::Whole)
            {
                ask.check(&answer);
            }
        }
        _ => {
            // Nonsense.
            let mut http = Http::connect(to);
            let _ = http.stream.write_all(b"GET /v1/models\r\n\r\n");
            let answer = http.try_answer_to("GET");
            assert!(answer.is_ok_and(|a| (a.status, a.end) == (400, End::Whole)));
        }
    }
    if rng.bool() {
        http.reset();
    }
}
