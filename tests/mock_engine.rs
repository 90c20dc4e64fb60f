//! The mock engine over real sockets: framing, timing, cache, aborts, faults, life.
//!
//! Takes nothing, gives proof that what other tests assert against does what its documentation says.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use corelane::mock::load::{Load, Pattern};
use corelane::mock::{Connector, Engine, Fleet, Role, Settings, Stats, fnv1a64};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn fleet(settings: Settings, count: usize) -> Fleet {
    Fleet::start(settings, ([127, 0, 0, 1], 0), count).unwrap()
}

/// Waits until the engine's counters are as wanted.
fn until(engine: &Engine, wanted: impl Fn(&Stats) -> bool) -> Stats {
    let begun = Instant::now();
    loop {
        let stats = engine.stats();
        if wanted(&stats) {
            return stats;
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "{stats:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

struct Client {
    stream: TcpStream,
    buf: Vec<u8>,
}

struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
    chunks: Vec<Vec<u8>>,
    trailers: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&self.body)))
    }
}

impl Client {
    fn new(addr: SocketAddr) -> Client {
        let stream = TcpStream::connect(addr).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        Client { stream, buf: Vec::new() }
    }

    fn send(&mut self, method: &str, path: &str, headers: &str, body: &[u8]) {
        let length = if body.is_empty() { String::new() } else { format!("content-length: {}\r\n", body.len()) };
        let mut wire = format!("{method} {path} HTTP/1.1\r\nhost: mock\r\n{headers}{length}\r\n").into_bytes();
        wire.extend_from_slice(body);
        self.stream.write_all(&wire).unwrap();
    }

    fn post(&mut self, path: &str, body: &Value) {
        self.send("POST", path, "", body.to_string().as_bytes());
    }

    fn ask(&mut self, path: &str, body: &Value) -> Answer {
        self.post(path, body);
        self.receive().unwrap()
    }

    fn get(&mut self, path: &str) -> Answer {
        self.send("GET", path, "", b"");
        self.receive().unwrap()
    }

    fn more(&mut self) -> std::io::Result<()> {
        let mut piece = [0; 65536];
        match self.stream.read(&mut piece)? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            n => {
                self.buf.extend_from_slice(&piece[..n]);
                Ok(())
            }
        }
    }

    fn until(&mut self, end: &[u8]) -> std::io::Result<Vec<u8>> {
        loop {
            if let Some(at) = self.buf.windows(end.len()).position(|w| w == end) {
                return Ok(self.take(at + end.len()));
            }
            self.more()?;
        }
    }

    fn exactly(&mut self, n: usize) -> std::io::Result<Vec<u8>> {
        while self.buf.len() < n {
            self.more()?;
        }
        Ok(self.take(n))
    }

    fn take(&mut self, n: usize) -> Vec<u8> {
        let rest = self.buf.split_off(n);
        std::mem::replace(&mut self.buf, rest)
    }

    fn head(&mut self) -> std::io::Result<(u16, String)> {
        let head = String::from_utf8(self.until(b"\r\n\r\n")?).unwrap();
        Ok((head[9..12].parse().unwrap(), head))
    }

    fn chunk(&mut self) -> std::io::Result<Vec<u8>> {
        let line = self.until(b"\r\n")?;
        let n = usize::from_str_radix(std::str::from_utf8(&line).unwrap().trim(), 16).unwrap();
        if n == 0 {
            return Ok(Vec::new());
        }
        let mut payload = self.exactly(n + 2)?;
        assert!(payload.ends_with(b"\r\n"));
        payload.truncate(n);
        Ok(payload)
    }

    fn receive(&mut self) -> std::io::Result<Answer> {
        let (status, head) = self.head()?;
        let mut answer = Answer { status, head, body: Vec::new(), chunks: Vec::new(), trailers: String::new() };
        if answer.head.contains("transfer-encoding: chunked") {
            loop {
                let chunk = self.chunk()?;
                if chunk.is_empty() {
                    break;
                }
                answer.body.extend_from_slice(&chunk);
                answer.chunks.push(chunk);
            }
            loop {
                let line = self.until(b"\r\n")?;
                if line == b"\r\n" {
                    break;
                }
                answer.trailers += std::str::from_utf8(&line).unwrap();
            }
        } else if let Some((_, n)) = answer.head.split_once("content-length: ") {
            let n = n.split("\r\n").next().unwrap().parse().unwrap();
            answer.body = self.exactly(n)?;
        } else if status != 204 {
            while self.more().is_ok() {}
            answer.body = std::mem::take(&mut self.buf);
        }
        Ok(answer)
    }

    /// Reads to the end: what came, and whether the end was a reset.
    fn rest(&mut self) -> (Vec<u8>, bool) {
        loop {
            match self.more() {
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::UnexpectedEof => return (std::mem::take(&mut self.buf), false),
                Err(e) if e.kind() == ErrorKind::ConnectionReset => return (std::mem::take(&mut self.buf), true),
                Err(e) => panic!("{e}"),
            }
        }
    }
}

fn chat(stream: bool, tokens: usize, mock: Value) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": stream, "max_tokens": tokens, "mock": mock})
}

#[test]
fn a_stream_is_one_event_a_chunk_and_ends_as_its_dialect_has_it() {
    let fleet = fleet(Settings::default(), 1);
    let mut client = Client::new(fleet.engine(0).addr());
    for (path, ask, done) in [
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": "hi"}], "stream": true, "max_completion_tokens": 3}),
            true,
        ),
        ("/v1/completions", json!({"prompt": "hi", "stream": true, "max_tokens": 3}), true),
        ("/generate", json!({"text": "hi", "stream": true, "sampling_params": {"max_new_tokens": 3}}), true),
        ("/v1/messages", json!({"messages": [], "stream": true, "max_tokens": 3}), false),
        ("/v1/responses", json!({"input": "hi", "stream": true, "max_output_tokens": 3}), false),
    ] {
        let answer = client.ask(path, &ask);
        assert_eq!(answer.status, 200, "{path}");
        assert!(answer.head.contains("content-type: text/event-stream"), "{path}");
        for chunk in &answer.chunks {
            let text = std::str::from_utf8(chunk).unwrap();
            assert!(text.starts_with("data: ") || text.starts_with("event: "), "{path}: {text}");
            assert!(text.ends_with("\n\n") && text.matches("\n\n").count() == 1, "{path}: {text}");
        }
        assert_eq!(answer.chunks.last().unwrap() == b"data: [DONE]\n\n", done, "{path}");
        let text = String::from_utf8_lossy(&answer.body);
        assert!(text.contains(" lane"), "{path}: {text}");
    }
    let stats = fleet.engine(0).stats();
    assert_eq!((stats.requests, stats.output_tokens, stats.aborted, stats.accepted), (5, 15, 0, 1));
    assert_eq!(stats.paths["/generate"], 1);
    assert_eq!(stats.last.unwrap().header("Host"), ["mock"]);
}

#[test]
fn answers_without_stream_state_their_usage() {
    let fleet = fleet(Settings::default(), 1);
    let mut client = Client::new(fleet.engine(0).addr());
    let v = client.ask(CHAT, &json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "n": 2})).json();
    assert_eq!((v["choices"].as_array().unwrap().len(), v["usage"]["completion_tokens"].as_u64()), (2, Some(8)));
    let v = client.ask("/generate", &json!({"input_ids": [1, 2, 3], "return_logprob": true, "rid": "r1"})).json();
    let meta = &v["meta_info"];
    assert_eq!(
        (&meta["prompt_tokens"], &meta["completion_tokens"], &meta["id"]),
        (&json!(3), &json!(16), &json!("r1"))
    );
    assert_eq!(meta["input_token_logprobs"].as_array().unwrap().len(), 3);
    assert_eq!(client.ask("/generate", &json!({"text": ["a", "b"]})).json().as_array().unwrap().len(), 2);
    assert_eq!(client.ask("/v1/embeddings", &json!({"input": ["a", "b"]})).json()["data"].as_array().unwrap().len(), 2);
    let rerank = json!({"query": "q", "documents": ["a", "b", "c"]});
    assert_eq!(client.ask("/v1/rerank", &rerank).json().as_array().unwrap().len(), 3);
    for path in ["/v1/classify", "/score", "/pooling", "/tokenize", "/v1/detokenize", "/v1/messages/count_tokens"] {
        assert_eq!(client.ask(path, &json!({"input": "x"})).status, 200, "{path}");
    }
    let id = client.ask("/v1/responses", &json!({"input": "x"})).json()["id"].as_str().unwrap().to_owned();
    assert_eq!(client.get(&format!("/v1/responses/{id}")).status, 200);
    assert_eq!(client.ask(&format!("/v1/responses/{id}/cancel"), &json!({})).json()["status"], "cancelled");
    assert_eq!(client.get("/v1/responses/resp_other").status, 404);
    assert_eq!(client.get("/nowhere").status, 404);
    assert_eq!(client.get(CHAT).status, 405);
    client.send("POST", CHAT, "", b"{broken");
    let refused = client.receive().unwrap();
    assert_eq!((refused.status, &refused.json()["object"]), (400, &json!("error")));
}

#[test]
fn the_engine_tells_of_itself() {
    let settings = Settings { models: vec!["a".into(), "b".into()], dp_size: 2, ..Settings::default() };
    let fleet = fleet(settings, 1);
    let mut client = Client::new(fleet.engine(0).addr());
    for path in ["/health", "/health_generate", "/ready", "/ping", "/get_model_info", "/model_info", "/metrics"] {
        assert_eq!(client.get(path).status, 200, "{path}");
    }
    let models = client.get("/v1/models").json();
    assert_eq!((&models["data"][1]["id"], &models["data"][0]["owned_by"]), (&json!("b"), &json!("sglang")));
    let info = client.get("/server_info").json();
    assert!(info["api_key"].is_string() && info["admin_api_key"].is_string() && info["dp_size"] == 2);
    assert_eq!(client.get("/v1/loads").json()["loads"].as_array().unwrap().len(), 2);
    assert!(String::from_utf8(client.get("/metrics").body).unwrap().contains("sglang:num_queue_reqs{"));
    assert_eq!(client.get("/mock/stats").json()["requests"], 0);
}

#[test]
fn keys_and_models_are_checked_when_asked_for() {
    let settings = Settings { api_key: Some("k".into()), strict_model: true, ..Settings::default() };
    let fleet = fleet(settings, 1);
    let mut client = Client::new(fleet.engine(0).addr());
    assert_eq!(client.ask("/generate", &json!({"text": "x"})).status, 401);
    assert_eq!(client.get("/health").status, 200);
    for (model, status) in [("mock", 200), ("other", 404)] {
        let body = json!({"text": "x", "model": model}).to_string();
        client.send("POST", "/generate", "authorization: Bearer k\r\n", body.as_bytes());
        assert_eq!(client.receive().unwrap().status, status);
    }
}

#[test]
fn cached_prefixes_cost_nothing_and_are_counted() {
    let settings = Settings { cache_tokens: 64 * 100, prefill_tokens_per_sec: 10_000.0, ..Settings::default() };
    let fleet = fleet(settings, 1);
    let mut client = Client::new(fleet.engine(0).addr());
    let text = "x".repeat(8000); // 2000 tokens: 31 whole blocks
    let mut run = |text: &str| {
        let begun = Instant::now();
        let v = client.ask("/generate", &json!({"text": text, "max_new_tokens": 1})).json();
        (v["meta_info"]["cached_tokens"].as_u64().unwrap(), begun.elapsed())
    };
    let (cached, cold) = run(&text);
    assert!(cached == 0 && cold >= Duration::from_millis(195), "{cached} {cold:?}");
    let (cached, warm) = run(&text);
    assert!(cached == 31 * 64 && warm < cold / 2, "{cached} {warm:?}");
    let (cached, _) = run(&format!("{text}and more"));
    assert_eq!(cached, 31 * 64);
    let stats = fleet.engine(0).stats();
    assert_eq!((stats.cached_tokens, stats.prompt_tokens), (2 * 31 * 64, 2000 + 2000 + 2002));
    fleet.engine(0).flush_cache();
    assert_eq!(run("y").0, 0);
    assert_eq!(run(&text).0, 0);
}

#[test]
fn prefill_is_one_unit_for_all() {
    let fleet = fleet(Settings { prefill_tokens_per_sec: 10_000.0, ..Settings::default() }, 1);
    let addr = fleet.engine(0).addr();
    let body = json!({"text": "x".repeat(4000), "max_new_tokens": 1}); // 100 ms each
    let begun = Instant::now();
    let mut clients: Vec<_> = (0..3).map(|_| Client::new(addr)).collect();
    clients.iter_mut().for_each(|c| c.post("/generate", &body));
    clients.iter_mut().for_each(|c| assert_eq!(c.receive().unwrap().status, 200));
    assert!((Duration::from_millis(290)..Duration::from_millis(2000)).contains(&begun.elapsed()));
}

#[test]
fn requests_beyond_the_batch_queue() {
    let fleet = fleet(Settings { max_running: 2, decode_step_ms: 10.0, ..Settings::default() }, 1);
    let engine = fleet.engine(0);
    let mut clients: Vec<_> = (0..5).map(|_| Client::new(engine.addr())).collect();
    clients.iter_mut().for_each(|c| c.post(CHAT, &chat(true, 11, json!({}))));
    until(engine, |s| s.active == 5 && s.queued == 3);
    let loads = Client::new(engine.addr()).get("/v1/loads").json();
    assert_eq!(
        (&loads["loads"][0]["num_running_reqs"], &loads["loads"][0]["num_waiting_reqs"]),
        (&json!(2), &json!(3))
    );
    clients.pop(); // one that waits leaves
    until(engine, |s| s.queued == 2 && s.aborted == 1);
    for client in &mut clients {
        assert_eq!(client.receive().unwrap().status, 200);
    }
    let stats = until(engine, |s| s.active == 0);
    assert_eq!((stats.peak, stats.peak_running, stats.queued, stats.aborted), (5, 2, 0, 1));
}

#[test]
fn decode_steps_grow_with_the_batch() {
    let fleet = fleet(Settings { decode_step_ms: 2.0, decode_step_per_seq_us: 500.0, ..Settings::default() }, 1);
    let mut client = Client::new(fleet.engine(0).addr());
    let begun = Instant::now();
    client.ask(CHAT, &chat(true, 41, json!({})));
    assert!((Duration::from_millis(100)..Duration::from_millis(1000)).contains(&begun.elapsed())); // 40 × 2.5 ms
}

#[test]
fn a_client_that_leaves_is_aborted_wherever_its_request_is() {
    let fleet = fleet(Settings { prefill_tokens_per_sec: 100.0, max_running: 2, ..Settings::default() }, 1);
    let engine = fleet.engine(0);
    let slow = json!({"text": "x".repeat(4000)}); // 10 s of prefill
    let mut prefilling = Client::new(engine.addr());
    prefilling.post("/generate", &slow);
    until(engine, |s| s.active == 1 && s.queued == 0);
    let mut waiting = Client::new(engine.addr());
    waiting.post("/generate", &slow);
    until(engine, |s| s.queued == 1);
    let left = Instant::now();
    drop(waiting);
    until(engine, |s| s.aborted == 1 && s.queued == 0 && s.active == 1);
    drop(prefilling);
    until(engine, |s| s.aborted == 2 && s.active == 0);
    assert!(left.elapsed() < Duration::from_millis(300), "{:?}", left.elapsed());
    // The prefill unit is free again at once.
    let mut next = Client::new(engine.addr());
    let begun = Instant::now();
    assert_eq!(next.ask("/generate", &json!({"text": "short"})).status, 200);
    assert!(begun.elapsed() < Duration::from_millis(2000));
    // In the middle of a stream, too.
    next.post(CHAT, &chat(true, 1000, json!({"gap_ms": 5})));
    next.until(b" lane").unwrap();
    drop(next);
    until(engine, |s| s.aborted == 3 && s.active == 0 && s.connections == 0);
}

#[test]
fn requests_are_aborted_by_id() {
    let fleet = fleet(Settings { decode_step_ms: 20.0, ..Settings::default() }, 1);
    let engine = fleet.engine(0);
    let mut client = Client::new(engine.addr());
    client.post("/generate", &json!({"text": "x", "rid": "mine", "max_new_tokens": 1000}));
    until(engine, |s| s.output_tokens > 0);
    let mut admin = Client::new(engine.addr());
    admin.ask("/abort_request", &json!({"rid": "other"}));
    assert_eq!(engine.stats().active, 1);
    admin.ask("/abort_request", &json!({"rid": "mine"}));
    assert_eq!(client.receive().unwrap().json()["meta_info"]["finish_reason"]["type"], "abort");
    let stats = until(engine, |s| s.active == 0);
    assert_eq!(stats.aborted, 1);
}

#[test]
fn idle_connections_are_closed_when_their_time_has_come() {
    let fleet = fleet(Settings { keep_alive_ms: 300, ..Settings::default() }, 1);
    let mut client = Client::new(fleet.engine(0).addr());
    let fresh = Client::new(fleet.engine(0).addr());
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(150));
        assert_eq!(client.get("/health").status, 200);
    }
    let idle = Instant::now();
    assert_eq!(client.rest(), (Vec::new(), false));
    let idle = idle.elapsed();
    assert!((Duration::from_millis(280)..Duration::from_millis(1500)).contains(&idle), "{idle:?}");
    until(fleet.engine(0), |s| s.connections == 1); // one that never asked stays, as with uvicorn
    drop(fresh);
}

#[test]
fn faults_before_the_head() {
    let fleet = fleet(Settings::default(), 1);
    let addr = fleet.engine(0).addr();
    let with = |mock: Value| {
        let mut client = Client::new(addr);
        client.post(CHAT, &chat(false, 4, mock));
        client
    };
    let refused = with(json!({"status": 503, "headers": [["retry-after", "1"]]})).receive().unwrap();
    assert_eq!((refused.status, &refused.json()["code"]), (503, &json!(503)));
    assert!(refused.head.contains("retry-after: 1\r\n"));
    let begun = Instant::now();
    assert_eq!(with(json!({"delay_ms": 80})).receive().unwrap().status, 200);
    assert!(begun.elapsed() >= Duration::from_millis(80));
    assert_eq!(with(json!({"reset_before_head": true})).rest(), (Vec::new(), true));
    assert_eq!(with(json!({"close_before_head": true})).rest(), (Vec::new(), false));
    assert_eq!(with(json!({"raw": "HTTP/9 \u{ff}\r\n"})).rest(), (b"HTTP/9 \xff\r\n".to_vec(), false));
    let mut interim = with(json!({"interim": 2}));
    let statuses = [interim.head().unwrap().0, interim.head().unwrap().0, interim.receive().unwrap().status];
    assert_eq!(statuses, [103, 102, 200]);
    let mut hanging = with(json!({"hang": true}));
    hanging.stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(hanging.more().is_err_and(|e| e.kind() == ErrorKind::WouldBlock));
    drop(hanging);
    until(fleet.engine(0), |s| s.aborted == 1 && s.active == 0);
    assert_eq!(with(json!({"unheard_of": 1})).receive().unwrap().status, 400);
    let elsewhere = json!({"on": [1], "status": 503});
    assert_eq!(with(elsewhere).receive().unwrap().status, 200);
    assert_eq!(with(json!({"only": "prefill", "status": 503})).receive().unwrap().status, 200);
}

#[test]
fn faults_in_the_body() {
    let fleet = fleet(Settings::default(), 1);
    let addr = fleet.engine(0).addr();
    let with = |stream: bool, mock: Value| {
        let mut client = Client::new(addr);
        client.post(CHAT, &chat(stream, 8, mock));
        client
    };
    let events = |wire: &[u8]| wire.windows(6).filter(|w| w == b"data: ").count();
    let (wire, reset) = with(true, json!({"reset_after_events": 3})).rest();
    assert!(reset && events(&wire) == 3, "{}", String::from_utf8_lossy(&wire));
    let (wire, reset) = with(true, json!({"close_after_events": 2})).rest();
    assert!(!reset && events(&wire) == 2 && !wire.ends_with(b"0\r\n\r\n"));
    let mut half = with(false, json!({"close_after_events": 0}));
    assert!(half.receive().is_err_and(|e| e.kind() == ErrorKind::UnexpectedEof));
    let mut stalled = with(true, json!({"stall_after_events": 2}));
    stalled.stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(stalled.receive().is_err_and(|e| e.kind() == ErrorKind::WouldBlock));

    let sized = with(true, json!({"event_bytes": 5000, "gap_ms": 1})).receive().unwrap();
    assert!(sized.chunks[2].len() > 5000 && sized.chunks.len() == 11);
    let text = with(true, json!({"text": "data: [DONE]"})).receive().unwrap();
    assert!(String::from_utf8(text.chunks[1].clone()).unwrap().contains("data: [DONE]\""));
    let open = with(true, json!({"no_length": true})).receive().unwrap();
    assert!(!open.head.contains("transfer-encoding") && open.body.ends_with(b"data: [DONE]\n\n"));
    for stream in [true, false] {
        let trailed = with(stream, json!({"trailers": true})).receive().unwrap();
        assert_eq!(trailed.trailers, "x-mock-trailer: 1\r\n");
        let mut excess = with(stream, json!({"excess": true}));
        assert_eq!(excess.receive().unwrap().status, 200);
        assert_eq!(excess.exactly(12).unwrap(), b"EXCESS BYTES");
    }
    let mut closing = with(false, json!({"close": true}));
    assert!(closing.receive().unwrap().head.contains("connection: close\r\n"));
    assert_eq!(closing.rest(), (Vec::new(), false));
}

#[test]
fn echoes_prove_what_arrived() {
    let fleet = fleet(Settings::default(), 1);
    let mut client = Client::new(fleet.engine(0).addr());
    let body = json!({"text": "caf\u{e9}", "mock": {"echo": true}}).to_string();
    client.send("POST", "/generate?a=b", "X-Twice: 1\r\nX-Twice: 2\r\n", body.as_bytes());
    let v = client.receive().unwrap().json();
    assert_eq!((&v["target"], &v["body_length"]), (&json!("/generate?a=b"), &json!(body.len())));
    assert_eq!(v["body_fnv1a64"], format!("{:016x}", fnv1a64(body.as_bytes())));
    assert_eq!((&v["head"][2], &v["head"][3]), (&json!("X-Twice: 1"), &json!("X-Twice: 2")));

    let body = json!({"mock": {"echo_body": true}, "text": "x".repeat(100_000)}).to_string();
    let mut wire =
        b"POST /generate HTTP/1.1\r\nhost: m\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    client.stream.write_all(&wire).unwrap();
    assert_eq!(client.head().unwrap().0, 100);
    wire.clear();
    for piece in body.as_bytes().chunks(7001) {
        wire.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
        wire.extend_from_slice(piece);
        wire.extend_from_slice(b"\r\n");
    }
    wire.extend_from_slice(b"0\r\nx-t: 1\r\n\r\n");
    client.stream.write_all(&wire).unwrap();
    assert_eq!(client.receive().unwrap().body, body.as_bytes());
    assert_eq!(fleet.engine(0).stats().last.unwrap().body, body.as_bytes());
}

#[test]
fn an_early_answer_precedes_the_body() {
    let fleet = fleet(Settings::default(), 1);
    for (early, status) in [(json!(true), 200), (json!("close"), 413)] {
        let mut client = Client::new(fleet.engine(0).addr());
        let mock = json!({"early": early, "status": if status == 200 { None } else { Some(status) }});
        let start = format!("{{\"mock\":{mock},\"text\":\"");
        let rest = "x".repeat(1000) + "\"}";
        let head =
            format!("POST /generate HTTP/1.1\r\nhost: m\r\ncontent-length: {}\r\n\r\n", start.len() + rest.len());
        client.stream.write_all(format!("{head}{start}").as_bytes()).unwrap();
        assert_eq!(client.receive().unwrap().status, status);
        if status == 200 {
            client.stream.write_all(rest.as_bytes()).unwrap();
            assert_eq!(client.get("/health").status, 200);
        } else {
            assert_eq!(client.rest(), (Vec::new(), false));
        }
    }
}

#[test]
fn engines_freeze_thaw_die_and_return() {
    let fleet = fleet(Settings { ready_after_ms: 0, ..Settings::default() }, 2);
    let engine = fleet.engine(1);
    let mut client = Client::new(engine.addr());
    engine.freeze();
    client.post(CHAT, &chat(false, 1, json!({})));
    client.stream.set_read_timeout(Some(Duration::from_millis(80))).unwrap();
    assert!(client.more().is_err_and(|e| e.kind() == ErrorKind::WouldBlock));
    assert_eq!(Client::new(engine.addr()).get("/mock/stats").json()["active"], 1);
    engine.thaw();
    client.stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    assert_eq!(client.receive().unwrap().status, 200);

    client.post(CHAT, &chat(true, 100, json!({"gap_ms": 20})));
    client.until(b" lane").unwrap();
    engine.kill();
    assert!(client.rest().1);
    assert!(TcpStream::connect(engine.addr()).is_err());
    let stats = engine.stats();
    assert_eq!((stats.aborted, stats.connections, stats.active), (1, 0, 0));
    assert_eq!(Client::new(fleet.engine(0).addr()).get("/health").status, 200);
    engine.restart().unwrap();
    assert!(engine.restart().is_err());
    assert_eq!(Client::new(engine.addr()).ask(CHAT, &chat(false, 1, json!({}))).status, 200);

    engine.misbehave(Some(serde_json::from_value(json!({"status": 500})).unwrap()));
    let plain = json!({"text": "x"});
    assert_eq!(Client::new(engine.addr()).ask("/generate", &plain).status, 500);
    engine.misbehave(None);
    assert_eq!(Client::new(engine.addr()).ask("/generate", &plain).status, 200);
}

#[test]
fn an_engine_that_starts_answers_503() {
    let fleet = fleet(Settings { ready_after_ms: 200, ..Settings::default() }, 1);
    let mut client = Client::new(fleet.engine(0).addr());
    assert_eq!(client.get("/health").status, 503);
    std::thread::sleep(Duration::from_millis(210));
    assert_eq!(client.get("/health").status, 200);
}

/// One prefill engine (0) and one decode engine (1).
fn pair(settings: Settings) -> Fleet {
    let of = |role| (Settings { role, ..settings.clone() }, 1);
    Fleet::start_mixed(vec![of(Role::Prefill), of(Role::Decode)], ([127, 0, 0, 1], 0)).unwrap()
}

/// A room that no other test uses, with a gap behind it.
fn room() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1000);
    NEXT.fetch_add(100, Relaxed)
}

/// A body for both legs of SGLang.
fn roomy(room: u64, more: Value) -> Value {
    let mut body = json!({
        "text": "x".repeat(400), "bootstrap_host": "127.0.0.1", "bootstrap_port": null, "bootstrap_room": room,
        "sampling_params": {"max_new_tokens": 5},
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Sends the body to both engines; the connections.
fn send_both(fleet: &Fleet, path: &str, body: &Value) -> (Client, Client) {
    let [mut prefill, mut decode] = [0, 1].map(|i| Client::new(fleet.engine(i).addr()));
    decode.post(path, body);
    prefill.post(path, body);
    (prefill, decode)
}

/// Sends the body to both engines; their answers.
fn ask_both(fleet: &Fleet, path: &str, body: &Value) -> (Answer, Answer) {
    let (mut prefill, mut decode) = send_both(fleet, path, body);
    (prefill.receive().unwrap(), decode.receive().unwrap())
}

/// Whether nothing comes for a while.
fn is_silent(client: &mut Client) -> bool {
    client.stream.set_read_timeout(Some(Duration::from_millis(80))).unwrap();
    let silent = client.more().is_err_and(|e| e.kind() == ErrorKind::WouldBlock);
    client.stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    silent
}

#[test]
fn two_legs_meet_in_a_room_and_only_there() {
    let fleet = pair(Settings { transfer_ms: 60.0, ..Settings::default() });
    let body = roomy(room(), json!({}));
    // Neither answers alone, whichever comes first.
    for first in [0, 1] {
        let body = roomy(room(), json!({}));
        let mut early = Client::new(fleet.engine(first).addr());
        early.post("/generate", &body);
        assert!(is_silent(&mut early), "{first}");
        let begun = Instant::now();
        let late = Client::new(fleet.engine(1 - first).addr()).ask("/generate", &body);
        assert!(begun.elapsed() >= Duration::from_millis(60), "{first}: {:?}", begun.elapsed());
        assert_eq!((late.status, early.receive().unwrap().status), (200, 200));
    }
    let (prefill, decode) = ask_both(&fleet, "/generate", &body);
    assert_eq!(prefill.json()["meta_info"]["completion_tokens"], 1);
    assert_eq!(decode.json()["meta_info"]["completion_tokens"], 5);
    // The decode engine works no prompt off.
    assert_eq!(fleet.engine(0).stats().prompt_tokens, 3 * 100);
    let stats = fleet.engine(1).stats();
    assert_eq!((stats.prompt_tokens, stats.output_tokens), (0, 15));

    // A frozen engine hands nothing over.
    for engine in fleet.engines() {
        engine.freeze();
        let (mut prefill, mut decode) = send_both(&fleet, "/generate", &roomy(room(), json!({})));
        assert!(is_silent(&mut prefill) && is_silent(&mut decode));
        engine.thaw();
        assert_eq!((prefill.receive().unwrap().status, decode.receive().unwrap().status), (200, 200));
    }

    // Streams and chats too, and a batch over a room each, given as an array or as the first of them.
    let stream = chat(true, 4, json!({}));
    let (prefill, decode) = ask_both(&fleet, CHAT, &roomy(room(), stream));
    assert!(prefill.body.ends_with(b"data: [DONE]\n\n") && decode.body.ends_with(b"data: [DONE]\n\n"));
    assert!(prefill.chunks.len() < decode.chunks.len());
    let first = room();
    for rooms in [json!(first), json!([first + 10, first + 12])] {
        let (host, port) = (json!(["127.0.0.1", "127.0.0.1"]), json!([null, 8998]));
        let batch =
            json!({"text": ["a", "b"], "bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": rooms});
        let (prefill, decode) = ask_both(&fleet, "/generate", &roomy(0, batch));
        assert_eq!((prefill.status, decode.json().as_array().unwrap().len()), (200, 2));
    }
    // What fanned out is used.
    assert_eq!(Client::new(fleet.engine(1).addr()).ask("/generate", &roomy(first + 1, json!({}))).status, 500);
}

#[test]
fn a_room_is_used_once() {
    let fleet = pair(Settings { room_timeout_ms: 50, ..Settings::default() });
    let body = roomy(room(), json!({}));
    let (prefill, decode) = ask_both(&fleet, "/generate", &body);
    assert_eq!((prefill.status, decode.status), (200, 200));
    let (prefill, decode) = ask_both(&fleet, "/generate", &body);
    assert_eq!((prefill.status, decode.status), (500, 500));
    assert!(prefill.json()["error"]["message"].as_str().unwrap().contains(&body["bootstrap_room"].to_string()));
    // A refusal uses it up as well.
    let refused = roomy(room(), json!({"mock": {"status": 503}}));
    assert_eq!(ask_both(&fleet, "/generate", &refused).0.status, 503);
    assert_eq!(ask_both(&fleet, "/generate", &refused).1.status, 500);
    for engine in fleet.engines() {
        assert_eq!(engine.stats().duplicate_rooms, 2);
        engine.reset_stats();
        assert_eq!(engine.stats().duplicate_rooms, 0);
    }
}

#[test]
fn a_leg_whose_partner_does_not_come_or_leaves_times_out() {
    let fleet = pair(Settings { room_timeout_ms: 150, ..Settings::default() });
    for (i, partner) in [(0, 1), (1, 0)] {
        let number = room();
        let begun = Instant::now();
        let answer = Client::new(fleet.engine(i).addr()).ask("/generate", &roomy(number, json!({})));
        assert!(begun.elapsed() >= Duration::from_millis(150), "{i}");
        assert_eq!(answer.status, 500);
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(&number.to_string()) && message.contains("150 ms"), "{message}");

        // The partner hangs, and its connection is closed: it is gone at once, the other waits on.
        let role = if partner == 0 { "prefill" } else { "decode" };
        let body = roomy(room(), json!({"mock": [{"only": role, "delay_ms": 40, "hang": true}]}));
        let [mut here, mut there] = [i, partner].map(|i| Client::new(fleet.engine(i).addr()));
        here.post("/generate", &body);
        there.post("/generate", &body);
        until(fleet.engine(partner), |s| s.active == 1);
        drop(there);
        until(fleet.engine(partner), |s| s.active == 0 && s.aborted == 1);
        assert_eq!(fleet.engine(i).stats().active, 1);
        assert_eq!(here.receive().unwrap().status, 500);
        // Its room stays used.
        assert_eq!(Client::new(fleet.engine(partner).addr()).ask("/generate", &body).status, 500);
        let stats = fleet.engine(partner).stats();
        assert_eq!((stats.duplicate_rooms, fleet.engine(i).stats().room_timeouts), (1, 2));
        fleet.engines().iter().for_each(Engine::reset_stats);
    }
    // The partner was there, and left while it waited.
    let slow = pair(Settings { room_timeout_ms: 150, transfer_ms: 60.0, ..Settings::default() });
    let (mut prefill, decode) = send_both(&slow, "/generate", &roomy(room(), json!({})));
    until(slow.engine(0), |s| s.active == 1);
    until(slow.engine(1), |s| s.active == 1);
    drop(decode);
    until(slow.engine(1), |s| s.aborted == 1);
    assert_eq!(prefill.receive().unwrap().status, 500);
}

#[test]
fn what_real_engines_stumble_over_is_refused_and_counted() {
    let fleet = pair(Settings { room_timeout_ms: 20, ..Settings::default() });
    let refused = |i: usize, more: Value| {
        let answer = Client::new(fleet.engine(i).addr()).ask("/generate", &roomy(room(), more));
        assert_eq!(answer.status, 400, "{}", answer.json());
    };
    for i in [0, 1] {
        assert_eq!(Client::new(fleet.engine(i).addr()).ask(CHAT, &chat(false, 1, json!({}))).status, 400);
        refused(i, json!({"bootstrap_room": null}));
        for bad in [json!(0), json!(-1), json!(1u64 << 63), json!("7"), json!(1.5)] {
            refused(i, json!({"bootstrap_room": bad}));
        }
        refused(i, json!({"bootstrap_room": (1u64 << 63) - 1, "text": ["a", "b"]}));
        for (field, shape) in [
            ("bootstrap_room", json!([room()])),
            ("bootstrap_host", json!(["127.0.0.1"])),
            ("bootstrap_host", json!("")),
            ("bootstrap_port", json!([8998])),
            ("bootstrap_port", json!(0)),
        ] {
            refused(i, json!({field: shape}));
        }
        refused(i, json!({"text": ["a", "b"], "bootstrap_room": [room()]}));
        refused(i, json!({"text": ["a", "b"], "bootstrap_host": ["127.0.0.1"]}));
        let stats = fleet.engine(i).stats();
        assert_eq!((stats.roomless, stats.bad_room, stats.bad_bootstrap, stats.duplicate_rooms), (2, 6, 7, 0));
        // What generates nothing needs no room.
        assert_eq!(Client::new(fleet.engine(i).addr()).ask("/tokenize", &json!({"prompt": "x"})).status, 200);
    }
    // Only the decode engine needs to be told where the other is.
    let bare = json!({"text": "x", "bootstrap_room": room()});
    assert_eq!(Client::new(fleet.engine(1).addr()).ask("/generate", &bare).status, 400);
    assert_eq!(Client::new(fleet.engine(0).addr()).ask("/generate", &bare).status, 500); // it waited in vain
    assert_eq!(fleet.engine(1).stats().bad_bootstrap, 8);
    // Several samples share one room, and hang.
    let several = roomy(room(), json!({"sampling_params": {"n": 2}}));
    let (mut prefill, mut decode) = send_both(&fleet, "/generate", &several);
    assert!(is_silent(&mut prefill) && is_silent(&mut decode));
    // One request id for both.
    let (mut prefill, mut decode) = (Client::new(fleet.engine(0).addr()), Client::new(fleet.engine(1).addr()));
    for (ids, count) in [(["a", "a"], 0), (["a", "b"], 1)] {
        let body = roomy(room(), json!({})).to_string();
        for (client, id) in [&mut prefill, &mut decode].into_iter().zip(ids) {
            client.send("POST", "/generate", &format!("x-request-id: {id}\r\n"), body.as_bytes());
        }
        assert_eq!((prefill.receive().unwrap().status, decode.receive().unwrap().status), (200, 200));
        assert_eq!(fleet.engine(1).stats().bad_request_id, count);
    }
}

#[test]
fn each_leg_has_its_own_faults() {
    let fleet = pair(Settings { room_timeout_ms: 60, ..Settings::default() });
    for (i, role) in ["prefill", "decode"].into_iter().enumerate() {
        let port = fleet.engine(i).addr().port();
        for status in [400, 422, 429, 500, 503] {
            let by_role = json!([{"only": role, "status": status}, {"headers": [["x-other", "1"]]}]);
            let by_port = json!([{"on": [port], "status": status}, {"on": [port], "status": 418}, {"headers": [["x-other", "1"]]}]);
            for mock in [by_role, by_port] {
                let (prefill, decode) = ask_both(&fleet, "/generate", &roomy(room(), json!({"mock": mock})));
                let (here, there) = if i == 0 { (prefill, decode) } else { (decode, prefill) };
                assert_eq!((here.status, there.status), (status, 500), "{role}"); // the other waits in vain
            }
        }
        let play = |mock: Value, stream: bool| {
            let body = roomy(room(), json!({"stream": stream, "mock": [mock]}));
            let (prefill, decode) = send_both(&fleet, "/generate", &body);
            if i == 0 { (prefill, decode) } else { (decode, prefill) }
        };
        let (mut here, _there) = play(json!({"only": role, "hang": true}), false);
        assert!(is_silent(&mut here));
        drop(here);
        let (mut here, mut there) = play(json!({"only": role, "reset_before_head": true}), false);
        assert_eq!((here.rest(), there.receive().unwrap().status), ((Vec::new(), true), 500));
        // In mid-answer, when the caches have moved: the other is not touched.
        let (mut here, mut there) = play(json!({"only": role, "reset_after_events": 1}), true);
        let (wire, reset) = here.rest();
        assert!(reset && wire.windows(6).filter(|w| w == b"data: ").count() == 1, "{role}");
        assert!(there.receive().unwrap().body.ends_with(b"data: [DONE]\n\n"));
        let (mut here, mut there) = play(json!({"only": role, "close_after_events": 0}), false);
        assert!(here.receive().is_err_and(|e| e.kind() == ErrorKind::UnexpectedEof));
        assert_eq!(there.receive().unwrap().status, 200);
        let begun = Instant::now();
        let (mut here, mut there) = play(json!({"only": role, "delay_ms": 30}), false);
        assert_eq!((here.receive().unwrap().status, there.receive().unwrap().status), (200, 200));
        assert!(begun.elapsed() >= Duration::from_millis(30));
    }
    let bad = json!({"text": "x", "mock": [{"only": "decode"}, {"unheard_of": 1}]});
    assert_eq!(Client::new(fleet.engine(0).addr()).ask("/generate", &bad).status, 400);
}

#[test]
fn ranks_are_counted_and_must_agree() {
    let fleet = pair(Settings { dp_size: 4, room_timeout_ms: 60, ..Settings::default() });
    for path in ["/server_info", "/get_server_info"] {
        assert_eq!(Client::new(fleet.engine(0).addr()).get(path).json()["dp_size"], 4);
    }
    let legs = |prefill: Value, decode: Value| {
        let at = room();
        assert_eq!(at % 4, 0);
        let mut sent = [prefill, decode].into_iter().enumerate().map(|(i, mut more)| {
            let offset = more.as_object_mut().unwrap().remove("offset").and_then(|n| n.as_u64()).unwrap_or(0);
            let mut client = Client::new(fleet.engine(i).addr());
            client.post("/generate", &roomy(at + offset, more));
            client
        });
        let (mut prefill, mut decode) = (sent.next().unwrap(), sent.next().unwrap());
        (prefill.receive().unwrap().status, decode.receive().unwrap().status)
    };
    // By the room, and by fields that say the same or say it to all.
    assert_eq!(legs(json!({"offset": 3}), json!({"offset": 3, "routed_dp_rank": 1})), (200, 200));
    let told = json!({"routed_dp_rank": 2, "disagg_prefill_dp_rank": 2});
    assert_eq!(legs(told, json!({"disagg_prefill_dp_rank": 2, "data_parallel_rank": 1})), (200, 200));
    assert_eq!(fleet.engine(0).stats().ranks, [(2, 1), (3, 1)].into());
    assert_eq!(fleet.engine(1).stats().ranks, [(1, 2)].into());
    // The decode leg is told another one, or the prefill leg contradicts itself: they never meet.
    assert_eq!(legs(json!({}), json!({"disagg_prefill_dp_rank": 1})), (500, 500));
    assert_eq!((fleet.engine(0).stats().bad_rank, fleet.engine(1).stats().bad_rank), (0, 1));
    assert_eq!(legs(json!({"routed_dp_rank": 3}), json!({"disagg_prefill_dp_rank": 3})), (500, 500));
    assert_eq!((fleet.engine(0).stats().bad_rank, fleet.engine(1).stats().bad_rank), (1, 1));
    // Out of range; the header counts before the fields.
    for bad in [json!({"routed_dp_rank": 4}), json!({"data_parallel_rank": -1}), json!({"disagg_prefill_dp_rank": "x"})]
    {
        assert_eq!(Client::new(fleet.engine(0).addr()).ask("/generate", &roomy(room(), bad)).status, 400);
    }
    assert_eq!(fleet.engine(0).stats().bad_rank, 4);
    let regular = self::fleet(Settings { dp_size: 2, ..Settings::default() }, 1);
    let mut client = Client::new(regular.engine(0).addr());
    for (rank, status) in [("1", 200), ("2", 400), ("x", 400)] {
        let header = format!("X-Data-Parallel-Rank: {rank}\r\n");
        client.send("POST", "/generate", &header, json!({"text": "x", "routed_dp_rank": 0}).to_string().as_bytes());
        assert_eq!(client.receive().unwrap().status, status, "{rank}");
    }
    for _ in 0..4 {
        client.ask("/generate", &json!({"text": "x"}));
    }
    let stats = regular.engine(0).stats();
    assert_eq!((stats.ranks, stats.bad_rank), ([(0, 2), (1, 3)].into(), 2));
}

#[test]
fn prompt_log_probabilities_come_from_the_prefill_engine_only() {
    let fleet = pair(Settings::default());
    let wanted = json!({"return_logprob": true, "top_logprobs_num": 2, "token_ids_logprob": [1]});
    let lists = ["input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"];
    let lengths = |v: &Value| lists.map(|l| v["meta_info"][l].as_array().unwrap_or_else(|| panic!("{l}: {v}")).len());
    let (prefill, decode) = ask_both(&fleet, "/generate", &roomy(room(), wanted.clone()));
    assert_eq!((lengths(&prefill.json()), lengths(&decode.json())), ([100; 3], [0; 3]));
    assert_eq!(decode.json()["meta_info"]["output_token_logprobs"].as_array().unwrap().len(), 5);

    let mut batch = roomy(room(), wanted.clone());
    batch["text"] = json!(["aaaa", "bbbb", "cccc"]);
    let (prefill, decode) = ask_both(&fleet, "/generate", &batch);
    for (answer, filled) in [(prefill, true), (decode, false)] {
        let all = answer.json();
        assert_eq!(all.as_array().unwrap().len(), 3);
        assert!(all.as_array().unwrap().iter().all(|one| lengths(one).iter().all(|n| (*n > 0) == filled)));
    }

    let mut stream = roomy(room(), wanted);
    stream["stream"] = json!(true);
    let (prefill, decode) = ask_both(&fleet, "/generate", &stream);
    for (answer, filled) in [(prefill, true), (decode, false)] {
        let text = String::from_utf8(answer.body).unwrap();
        let events: Vec<&str> = text.split("\n\n").filter_map(|e| e.strip_prefix("data: {")).collect();
        assert!(!events.is_empty());
        for event in events {
            let v: Value = serde_json::from_str(&format!("{{{event}")).unwrap();
            assert!(lengths(&v).iter().all(|n| (*n > 0) == filled), "{v}");
        }
    }
}

/// A vLLM prefill request with these transfer parameters.
fn first_leg(params: Value) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": false, "max_tokens": 1, "kv_transfer_params": params})
}

fn second_leg(params: Value) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "kv_transfer_params": params})
}

#[test]
fn nixl_legs_hand_over_by_their_words() {
    let fleet = pair(Settings { vllm: true, ..Settings::default() });
    let (one, two) = (fleet.engine(0), fleet.engine(1));
    let (mut prefill, mut decode) = (Client::new(one.addr()), Client::new(two.addr()));
    let start = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null, "remote_host": null, "remote_port": null});
    let answer = prefill.ask(CHAT, &first_leg(start.clone())).json();
    let params = answer["kv_transfer_params"].clone();
    assert_eq!((&params["do_remote_prefill"], &params["do_remote_decode"]), (&json!(true), &json!(false)));
    assert!(params["x_mock"].is_object() && params["remote_engine_id"] == one.engine_id());
    assert_eq!(answer["usage"]["completion_tokens"], 1);
    assert_eq!(one.stats().staged, 1);
    // Not what was said, or nothing: refused, and the cache stays.
    let mut altered = params.clone();
    altered.as_object_mut().unwrap().remove("x_mock");
    for wrong in [altered, Value::Null, start.clone()] {
        assert_eq!(decode.ask(CHAT, &second_leg(wrong)).status, 400);
    }
    assert_eq!((two.stats().bad_transfer, one.stats().staged), (3, 1));
    // A decode engine that refuses leaves it for another try.
    let mut refused = second_leg(params.clone());
    refused["mock"] = json!({"status": 503});
    assert_eq!((decode.ask(CHAT, &refused).status, one.stats().staged), (503, 1));
    assert_eq!(decode.ask(CHAT, &second_leg(params.clone())).json()["usage"]["completion_tokens"], 3);
    assert_eq!((one.stats().staged, two.stats().prompt_tokens), (0, 0));
    assert_eq!(decode.ask(CHAT, &second_leg(params)).status, 400); // once

    // Dispatched and closed: released.
    let params = prefill.ask(CHAT, &first_leg(start.clone())).json()["kv_transfer_params"].clone();
    let mut hanging = second_leg(params);
    hanging["mock"] = json!({"hang": true});
    decode.post(CHAT, &hanging);
    until(two, |s| s.active == 1);
    assert_eq!(one.stats().staged, 1);
    drop(decode);
    until(two, |s| s.aborted == 1);
    until(one, |s| s.staged == 0);
    // An answer that breaks off leaves nothing behind.
    let mut broken = first_leg(start.clone());
    broken["mock"] = json!({"close_after_events": 0});
    prefill.post(CHAT, &broken);
    assert!(prefill.receive().is_err());
    until(one, |s| s.staged == 0 && s.active == 0);

    // Request ids are the same on both legs.
    let (mut prefill, mut decode) = (Client::new(one.addr()), Client::new(two.addr()));
    for (id, count) in [("a", 0), ("b", 1)] {
        prefill.send("POST", CHAT, "x-request-id: a\r\n", first_leg(start.clone()).to_string().as_bytes());
        let params = prefill.receive().unwrap().json()["kv_transfer_params"].clone();
        let header = format!("x-request-id: {id}\r\n");
        decode.send("POST", CHAT, &header, second_leg(params).to_string().as_bytes());
        assert_eq!(decode.receive().unwrap().status, 200);
        assert_eq!(two.stats().bad_request_id, count);
    }
    // Nothing to hand over.
    let bare = |mut body: Value| {
        body["mock"] = json!({"no_transfer": true});
        body
    };
    let answer = prefill.ask(CHAT, &bare(first_leg(start))).json();
    assert!(answer.as_object().unwrap().contains_key("kv_transfer_params") && answer["kv_transfer_params"].is_null());
    assert_eq!(decode.ask(CHAT, &bare(second_leg(Value::Null))).status, 200);
    assert!(two.stats().prompt_tokens > 0);
}

#[test]
fn a_cache_that_nobody_fetches_is_given_up() {
    let fleet = pair(Settings { vllm: true, staged_timeout_ms: 300, ..Settings::default() });
    let (one, two) = (fleet.engine(0), fleet.engine(1));
    let (mut prefill, mut decode) = (Client::new(one.addr()), Client::new(two.addr()));
    let start = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null, "remote_host": null, "remote_port": null});
    let params = prefill.ask(CHAT, &first_leg(start)).json()["kv_transfer_params"].clone();
    assert!(params["remote_engine_id"].is_string(), "{params}");
    until(one, |s| s.staged == 0);
    assert_eq!((decode.ask(CHAT, &second_leg(params)).status, two.stats().bad_transfer), (400, 1));
}

#[test]
fn a_vllm_prefill_engine_wants_sanitised_requests() {
    let fleet = pair(Settings { vllm: true, ..Settings::default() });
    let mut client = Client::new(fleet.engine(0).addr());
    let start = json!({"do_remote_decode": true});
    let bad = [
        json!({"stream": true}),
        json!({"max_tokens": 2}),
        json!({"max_tokens": null}),
        json!({"max_completion_tokens": 5}),
        json!({"n": 2}),
        json!({"min_tokens": 1}),
        json!({"stream_options": {"include_usage": true}}),
    ];
    for more in &bad {
        let mut body = first_leg(start.clone());
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let refused = client.ask(CHAT, &body);
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &json!(400)), "{more}");
    }
    assert_eq!(client.ask(CHAT, &first_leg(json!({"do_remote_decode": false}))).status, 400);
    let stats = fleet.engine(0).stats();
    assert_eq!((stats.unsanitised, stats.bad_transfer, stats.staged), (bad.len() as u64, 1, 0));
    assert_eq!(client.ask(CHAT, &first_leg(start)).status, 200);
    assert_eq!(client.get("/v1/models").json()["data"][0]["owned_by"], "vllm");
    assert!(String::from_utf8(client.get("/metrics").body).unwrap().contains("vllm:num_requests_waiting{"));
}

#[test]
fn mooncake_legs_meet_by_transfer_and_engine() {
    let settings = Settings {
        vllm: true,
        connector: Connector::Mooncake,
        bootstrap: true,
        room_timeout_ms: 100,
        ..Settings::default()
    };
    let fleet = pair(settings.clone());
    let (one, two) = (fleet.engine(0), fleet.engine(1));
    let port = one.bootstrap_port().unwrap();
    assert_eq!(two.bootstrap_port(), None);
    let query = || Client::new(([127, 0, 0, 1], port).into()).get("/query").json();
    assert_eq!((&query()["engine_id"], &query()["0"]["engine_id"]), (&json!(one.engine_id()), &json!(one.engine_id())));
    assert_eq!(Client::new(([127, 0, 0, 1], port).into()).get("/else").status, 404);

    let (mut prefill, mut decode) = (Client::new(one.addr()), Client::new(two.addr()));
    let first = |id: &str| first_leg(json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id}));
    let second = |id: &str| {
        second_leg(json!({
            "do_remote_decode": false, "do_remote_prefill": true, "transfer_id": id, "remote_engine_id": one.engine_id(),
            "remote_bootstrap_addr": format!("http://127.0.0.1:{port}"),
        }))
    };
    // The decode leg waits, the prefill leg does not.
    decode.post(CHAT, &second("xfer-1"));
    assert!(is_silent(&mut decode));
    let answer = prefill.ask(CHAT, &first("xfer-1"));
    assert!(answer.status == 200 && answer.json().get("kv_transfer_params").is_none());
    assert_eq!(decode.receive().unwrap().json()["usage"]["completion_tokens"], 3);
    assert_eq!(one.stats().staged, 0);
    assert_eq!(prefill.ask(CHAT, &first("xfer-2")).status, 200);
    assert_eq!(one.stats().staged, 1);
    // Twice is once too often, and what is not fetched stays.
    assert_eq!(prefill.ask(CHAT, &first("xfer-2")).status, 500);
    for (field, wrong) in [
        ("remote_engine_id", json!("mock-other")),
        ("remote_bootstrap_addr", json!("http://127.0.0.1:1")),
        ("transfer_id", Value::Null),
        ("do_remote_prefill", json!(false)),
    ] {
        let mut body = second("xfer-2");
        body["kv_transfer_params"][field] = wrong;
        assert_eq!(decode.ask(CHAT, &body).status, 400, "{field}");
    }
    assert_eq!(decode.ask(CHAT, &second("xfer-2")).status, 200);
    assert_eq!(decode.ask(CHAT, &second("xfer-3")).status, 500); // nobody comes
    assert_eq!((one.stats().duplicate_rooms, two.stats().bad_transfer, two.stats().room_timeouts), (1, 4, 1));
    assert_eq!(one.stats().staged, 0);
    // Dispatched and closed: released.
    assert_eq!((prefill.ask(CHAT, &first("xfer-4")).status, one.stats().staged), (200, 1));
    let mut hanging = second("xfer-4");
    hanging["mock"] = json!({"hang": true});
    decode.post(CHAT, &hanging);
    until(two, |s| s.active == 1);
    drop(decode);
    until(one, |s| s.staged == 0);

    // A restart changes the id; the bootstrap port stays, and is closed in between.
    let before = one.engine_id();
    one.kill();
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
    one.restart().unwrap();
    assert_ne!(query()["engine_id"], json!(before));
    let mut stale = second("xfer-5");
    stale["kv_transfer_params"]["remote_engine_id"] = json!(before);
    assert_eq!(Client::new(two.addr()).ask(CHAT, &stale).status, 400);

    // Each rank has an id of its own.
    let fleet = pair(Settings { dp_size: 2, ..settings });
    let port = fleet.engine(0).bootstrap_port().unwrap();
    let ids = Client::new(([127, 0, 0, 1], port).into()).get("/query").json();
    let mut prefill = Client::new(fleet.engine(0).addr());
    prefill.send("POST", CHAT, "X-data-parallel-rank: 1\r\n", first("xfer-6").to_string().as_bytes());
    assert_eq!(prefill.receive().unwrap().status, 200);
    for (rank, status) in [("0", 500), ("1", 200)] {
        let mut body = second("xfer-6");
        body["kv_transfer_params"]["remote_engine_id"] = ids[rank]["engine_id"].clone();
        body["kv_transfer_params"]["remote_bootstrap_addr"] = json!(format!("http://127.0.0.1:{port}"));
        assert_eq!(Client::new(fleet.engine(1).addr()).ask(CHAT, &body).status, status, "{rank}");
    }
    assert_eq!(fleet.engine(0).stats().ranks, [(1, 1)].into());
}

#[test]
fn multipart_bodies_carry_controls_too() {
    let fleet = fleet(Settings::default(), 1);
    let mut client = Client::new(fleet.engine(0).addr());
    for (mock, status) in [("{}", 200), (r#"{"status":503}"#, 503)] {
        let body = format!("--b\r\ncontent-disposition: form-data; name=\"mock\"\r\n\r\n{mock}\r\n--b--\r\n");
        let kind = "content-type: multipart/form-data; boundary=b\r\n";
        client.send("POST", "/v1/audio/transcriptions", kind, body.as_bytes());
        assert_eq!(client.receive().unwrap().status, status);
    }
}

#[test]
fn a_taken_port_is_an_error_also_inside_a_runtime() {
    let first = fleet(Settings::default(), 1);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let second = runtime.block_on(async { Fleet::start(Settings::default(), first.engine(0).addr(), 1) });
    assert_eq!(second.err().unwrap().kind(), ErrorKind::AddrInUse);
}

#[test]
fn two_thousand_engines_start() {
    let begun = Instant::now();
    let fleet = fleet(Settings::default(), 2000);
    for i in [0, 999, 1999] {
        assert_eq!(Client::new(fleet.engine(i).addr()).get("/health").status, 200);
    }
    assert_eq!(fleet.urls().len(), 2000);
    drop(fleet);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

#[test]
fn the_load_drives_conversations() {
    let fleet = fleet(Settings { cache_tokens: 1 << 20, ..Settings::default() }, 1);
    let pattern = Pattern { url: fleet.engine(0).url(), think_ms: (0, 5), max_tokens: 8, ..Pattern::default() };
    let load = Load::start(pattern).unwrap();
    let begun = Instant::now();
    while load.totals().ok < 200 {
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", load.totals());
        std::thread::sleep(Duration::from_millis(5));
    }
    let totals = load.stop();
    assert_eq!((totals.failed, totals.running), (0, 0), "{totals:?}");
    assert!(totals.tokens >= 8 * totals.ok && totals.cached_tokens * 2 > totals.prompt_tokens, "{totals:?}");
    let stats = fleet.engine(0).stats();
    assert!(stats.accepted <= 16 && stats.peak <= 16, "{stats:?}");
}

#[test]
fn one_process_hosts_both_roles() {
    let args = [
        "mock-worker",
        "--prefill",
        "2",
        "--decode",
        "1",
        "--count",
        "1",
        "--transfer-ms",
        "30",
        "--room-timeout-ms",
        "70",
    ];
    let plain = Worker::start(&args);
    let roles: Vec<&str> = plain.lines.iter().map(|line| line.split_once(' ').map_or("", |(_, role)| role)).collect();
    assert_eq!(roles, ["prefill", "prefill", "decode", ""]);
    let body = roomy(room(), json!({}));
    let mut prefill = Client::new(plain.address(1));
    prefill.post("/generate", &body);
    let begun = Instant::now();
    assert_eq!(Client::new(plain.address(2)).ask("/generate", &body).status, 200);
    assert!(begun.elapsed() >= Duration::from_millis(30));
    assert_eq!(prefill.receive().unwrap().status, 200);
    assert_eq!(Client::new(plain.address(0)).ask("/generate", &roomy(room(), json!({}))).status, 500);
    assert_eq!(Client::new(plain.address(3)).ask("/generate", &json!({"text": "x"})).status, 200);

    let args = ["mock-worker", "--prefill", "1", "--vllm", "--connector", "mooncake", "--dp-size", "2"];
    let mooncake = Worker::start(&args);
    let [line] = &mooncake.lines[..] else { panic!("{:?}", mooncake.lines) };
    let port: u16 = line.split_once(" prefill bootstrap ").unwrap().1.parse().unwrap();
    let ids = Client::new(([127, 0, 0, 1], port).into()).get("/query").json();
    assert!(ids["1"]["engine_id"].is_string() && ids.get("2").is_none(), "{ids}");
}

/// A process of mock engines. Its drop kills it.
struct Worker {
    child: std::process::Child,
    lines: Vec<String>,
}

impl Worker {
    fn start(args: &[&str]) -> Worker {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_corelane"));
        let mut child = command.args(args).stdout(std::process::Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let lines = lines.take_while(|line| line != "ready").collect();
        Worker { child, lines }
    }

    fn address(&self, i: usize) -> SocketAddr {
        self.lines[i].split(' ').next().unwrap().strip_prefix("http://").unwrap().parse().unwrap()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
