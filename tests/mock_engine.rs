//! The mock engine over real sockets: framing, timing, cache, aborts, faults, life.
//!
//! Takes nothing, gives proof that what other tests assert against does what its documentation says.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use corelane::mock::load::{Load, Pattern};
use corelane::mock::{Engine, Fleet, Role, Settings, Stats, fnv1a64};
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

#[test]
fn decode_waits_for_the_room_that_prefill_opens() {
    let prefill = fleet(Settings { role: Role::Prefill, ..Settings::default() }, 1);
    let decode = fleet(Settings { role: Role::Decode, ..Settings::default() }, 1);
    let body = json!({"text": "x", "return_logprob": true, "bootstrap_room": 7_001});
    let mut second = Client::new(decode.engine(0).addr());
    second.post("/generate", &body);
    until(decode.engine(0), |s| s.active == 1 && s.queued == 0);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(decode.engine(0).stats().active, 1);
    let v = Client::new(prefill.engine(0).addr()).ask("/generate", &body).json();
    assert_eq!(v["meta_info"]["input_token_logprobs"].as_array().unwrap().len(), 1);
    let v = second.receive().unwrap().json();
    assert_eq!(v["meta_info"]["input_token_logprobs"], json!([]));
}

#[test]
fn vllm_prefill_hands_its_parameters_over() {
    let fleet = fleet(Settings { role: Role::Prefill, vllm: true, ..Settings::default() }, 1);
    let mut client = Client::new(fleet.engine(0).addr());
    let v = client.ask(CHAT, &json!({"messages": [], "kv_transfer_params": {"do_remote_decode": true}})).json();
    assert_eq!(v["kv_transfer_params"]["do_remote_prefill"], true);
    assert!(client.ask(CHAT, &json!({"messages": []})).json().get("kv_transfer_params").is_none());
    assert_eq!(client.get("/v1/models").json()["data"][0]["owned_by"], "vllm");
    assert!(String::from_utf8(client.get("/metrics").body).unwrap().contains("vllm:num_requests_waiting{"));
    let refused = client.ask(CHAT, &chat(false, 1, json!({"status": 429})));
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (429, &json!(429)));
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
