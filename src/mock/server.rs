//! The connections of one mock engine, and the faults that they play.
//!
//! Takes sockets, gives answers written by hand, so that every breach of HTTP is possible. Never answers on a
//! connection whose client has left: reading goes on while a request is worked on, and its end aborts the request.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::json;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, timeout};

use super::ask::{Ask, Controls, Early};
use super::engine::{Inner, Visit};
use super::http::{self, Request, Unread};
use super::pair::{Leg, Refused, Side};
use super::plain::{self, Answer};
use super::stats::{down, up};
use super::stream::{Dialect, Script, word};
use super::{fnv1a64, span_ms};

/// Bytes of events that are gathered into one write while none of them is due later.
const GATHER_BYTES: usize = 16 * 1024;
/// Pause before a reset, so that the peer can read what came before: a reset discards what it has not read.
const BEFORE_RESET: Duration = Duration::from_millis(10);
/// Bytes that `excess` sends after the end.
const EXCESS: &[u8] = b"EXCESS BYTES";

/// How a connection goes on after an answer.
enum End {
    Keep,
    Close,
    Reset,
}

/// Accepts until the engine is killed.
pub(super) async fn listen(engine: Arc<Inner>, listener: TcpListener) {
    loop {
        tokio::select! {
            biased;
            () = engine.died() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    up(&engine.counters.accepted);
                    up(&engine.counters.connections);
                    tokio::spawn(connection(engine.clone(), stream));
                }
                Err(_) => sleep(Duration::from_millis(5)).await, // out of descriptors: wait for some to be closed
            },
        }
    }
    drop(listener);
    engine.stopped_listening();
}

/// Accepts on the port of the bootstrap server until the engine is killed. Its connections are not counted.
pub(super) async fn listen_for_bootstrap(engine: Arc<Inner>, listener: TcpListener) {
    loop {
        tokio::select! {
            biased;
            () = engine.died() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => drop(tokio::spawn(bootstrap(engine.clone(), stream))),
                Err(_) => sleep(Duration::from_millis(5)).await,
            },
        }
    }
    drop(listener);
    engine.stopped_listening();
}

/// A connection to the bootstrap server.
async fn bootstrap(engine: Arc<Inner>, stream: TcpStream) {
    let mut buf = Vec::new();
    loop {
        let received = tokio::select! {
            biased;
            () = engine.died() => return,
            received = http::receive(&stream, &mut buf, 0, engine.addressee()) => received,
        };
        let Ok(request) = received else { return };
        let none = Controls::default();
        let mut reply = Reply::new(&engine, &stream, &request, &none);
        match reply.answer(plain::bootstrap(&engine, &request)).await {
            Ok(End::Keep) if request.keep_alive => {}
            _ => return,
        }
    }
}

/// Counts the connection off, after the socket is closed.
struct Open<'a>(&'a Inner);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        down(&self.0.counters.connections);
    }
}

async fn connection(engine: Arc<Inner>, stream: TcpStream) {
    let _open = Open(&engine);
    let stream = stream; // declared after the guard, so closed before it
    let _ = stream.set_nodelay(true);
    let end = tokio::select! {
        biased;
        () = engine.died() => End::Reset,
        end = requests(&engine, &stream) => end,
    };
    if let End::Reset = end {
        let _ = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
    }
}

/// Serves one request after the other.
async fn requests(engine: &Arc<Inner>, stream: &TcpStream) -> End {
    let s = &engine.settings;
    let mut buf = Vec::new();
    for served in 0u64.. {
        // As uvicorn has it: the idle limit starts with an answer, a fresh connection has none.
        if buf.is_empty() {
            let first = http::fill(stream, &mut buf);
            let read = if served > 0 && s.keep_alive_ms > 0 {
                timeout(Duration::from_millis(s.keep_alive_ms), first).await
            } else {
                Ok(first.await)
            };
            if !matches!(read, Ok(Ok(1..))) {
                return End::Close;
            }
        }
        let mut request = match http::receive(stream, &mut buf, s.max_body_bytes, engine.addressee()).await {
            Ok(request) => request,
            Err(Unread::Gone) => return End::Close,
            Err(Unread::Refused(status)) => {
                let (status, kind, body) = plain::error(engine, "", status, "The request cannot be read.");
                let close = Controls { close: true, ..Controls::default() };
                let mut reply = Reply::new(engine, stream, &Request::default(), &close);
                let _ = reply.whole(status, kind, &body).await;
                return End::Close;
            }
        };
        if let Some(controls) = request.early.take() {
            let mut reply = Reply::new(engine, stream, &request, &controls);
            let (status, kind, body) = match controls.status {
                Some(status) => plain::error(engine, &request.path, status, "Answered before the body was read."),
                None => plain::json_answer(200, &json!({"early": true})),
            };
            if reply.whole(status, kind, &body).await.is_err() || controls.early == Some(Early::Close) {
                return End::Close;
            }
            match http::receive_rest(stream, &mut buf, &mut request, s.max_body_bytes).await {
                Ok(()) if request.keep_alive => continue,
                _ => return End::Close,
            }
        }
        let end = tokio::select! {
            biased;
            end = respond(engine, stream, &request) => end,
            () = http::gone(stream, &mut buf) => return End::Close,
        };
        match end {
            Ok(End::Keep) if request.keep_alive => {}
            Ok(End::Keep) | Err(_) => return End::Close,
            Ok(end) => return end,
        }
        if buf.capacity() > 1 << 20 && buf.is_empty() {
            buf = Vec::new();
        }
    }
    End::Close
}

/// What an engine does with a path.
enum Work {
    Generate(Dialect),
    Verdict,
}

fn work(path: &str) -> Option<Work> {
    Some(Work::Generate(match path {
        "/v1/chat/completions" => Dialect::Chat,
        "/v1/completions" => Dialect::Completion,
        "/generate" => Dialect::Generate,
        "/v1/responses" => Dialect::Responses,
        "/v1/messages" => Dialect::Messages,
        "/v1/embeddings"
        | "/v1/messages/count_tokens"
        | "/v1/rerank"
        | "/rerank"
        | "/v1/classify"
        | "/classify"
        | "/v1/score"
        | "/score"
        | "/pooling"
        | "/v1/pooling"
        | "/v1/tokenize"
        | "/tokenize"
        | "/v1/detokenize"
        | "/detokenize"
        | "/v1/audio/transcriptions" => return Some(Work::Verdict),
        _ => return None,
    }))
}

async fn respond(engine: &Arc<Inner>, stream: &TcpStream, request: &Request) -> io::Result<End> {
    let path = request.path.as_str();
    engine.counters.saw_path(path);
    let none = Controls::default();
    let mut reply = Reply::new(engine, stream, request, &none);
    let own = path.starts_with("/mock/");
    let open = own || matches!(path, "/health" | "/health_generate" | "/ready" | "/ping" | "/metrics");
    if !own && !engine.ready() {
        return reply.answer(plain::error(engine, path, 503, "The server is starting.")).await;
    }
    if !open && !authorized(engine, request) {
        let v = json!({"error": "Unauthorized"});
        return reply.answer(plain::json_answer(401, &v)).await;
    }
    match work(path) {
        Some(work) if request.method == "POST" => infer(engine, stream, request, work).await,
        Some(_) => {
            let v = json!({"detail": "Method Not Allowed"});
            reply.answer(plain::json_answer(405, &v)).await
        }
        None => {
            let found = plain::about(engine, request);
            let missing = || plain::json_answer(404, &json!({"detail": "Not Found"}));
            let answer = found.unwrap_or_else(missing);
            if own {
                // Answers of the mock itself come from a frozen engine too.
                reply.frozen_too = true;
            }
            reply.answer(answer).await
        }
    }
}

fn authorized(engine: &Inner, request: &Request) -> bool {
    let Some(key) = &engine.settings.api_key else { return true };
    request.header("authorization").and_then(|v| v.strip_prefix(b"Bearer ")) == Some(key.as_bytes())
}

/// Serves a request for inference, faults included.
async fn infer(engine: &Arc<Inner>, stream: &TcpStream, request: &Request, work: Work) -> io::Result<End> {
    let path = request.path.as_str();
    engine.counters.saw_request(&request.head, &request.body, engine.settings.keep_body_bytes);
    let multipart = request.header("content-type").is_some_and(|v| v.starts_with(b"multipart/"));
    let read = if multipart { Ok(Ask::read_multipart(&request.body)) } else { Ask::read(path, &request.body) };
    let mut ask = match read {
        Ok(ask) => ask,
        Err(message) => {
            let none = Controls::default();
            let mut reply = Reply::new(engine, stream, request, &none);
            return reply.answer(plain::error(engine, path, 400, &message)).await;
        }
    };
    let standing = || engine.standing.lock().unwrap().clone().unwrap_or_default();
    let controls = ask.controls.take().unwrap_or_else(|| vec![standing()]);
    let controls = Controls::first_for(controls, engine.addressee());
    let id = new_id(engine, path);
    let mut visit = engine.enter(ask.rid.clone().unwrap_or_else(|| id.clone()));
    let mut reply = Reply::new(engine, stream, request, &controls);

    let generates = matches!(work, Work::Generate(_));
    let mut leg = match Leg::of(engine, request, &ask, generates, controls.no_transfer) {
        Ok(leg) => leg,
        Err(Refused { status, message }) => {
            let end = reply.answer(plain::error(engine, path, status, &message)).await;
            visit.finish();
            return end;
        }
    };
    if let Some(end) = before_head(&mut reply, &visit).await? {
        leg.spare();
        visit.finish();
        return Ok(end);
    }
    let refusal = refusal(engine, request, &ask, &controls);
    if let Some(answer) = refusal {
        leg.spare();
        let end = reply.answer(answer).await;
        visit.finish();
        return end;
    }
    if leg.has_room() && ask.n > 1 {
        // SGLang takes the one room for every sample, and none of them ever ends.
        std::future::pending::<()>().await;
    }
    if leg.side().is_some() {
        engine.thawed().await;
    }
    leg.arrive();
    let cached = match prepare(&mut visit, &mut leg, &ask).await {
        Ok(cached) => cached,
        Err(Refused { status, message }) => {
            let end = reply.answer(plain::error(engine, path, status, &message)).await;
            if visit.check().is_ok() {
                visit.finish();
            }
            return end;
        }
    };
    if leg.side() == Some(Side::Prefill) {
        ask.max_tokens = Some(1);
    }
    let model = ask.model.clone().or_else(|| engine.settings.models.first().cloned()).unwrap_or_default();
    let end = match work {
        Work::Verdict => {
            let answer = plain::verdict(path, &ask, &model, cached);
            reply.answer(answer).await
        }
        Work::Generate(dialect) => {
            if dialect == Dialect::Responses && ask.store {
                engine.remember_response(&id);
            }
            let script = Script {
                dialect,
                id: if dialect == Dialect::Generate { ask.rid.as_deref().unwrap_or(&id) } else { &id },
                model: &model,
                created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
                prompt_tokens: ask.prompt_tokens,
                cached,
                samples: ask.samples,
                batch: ask.batch,
                logprob: ask.logprob,
                top_logprobs: ask.top_logprobs,
                ids_logprob: ask.ids_logprob,
                knows_prompt: leg.side() != Some(Side::Decode),
                include_usage: ask.include_usage,
                kv_transfer: leg.params(),
            };
            generate(engine, &mut visit, &mut reply, &ask, &script).await
        }
    };
    if end.is_ok() && controls.reset_after_events.is_none() && controls.close_after_events.is_none() {
        leg.sent();
    }
    if end.is_ok() && visit.check().is_ok() {
        visit.finish();
    }
    end
}

/// What comes before the first token: the prompt, and the other engine's part in it. Gives the cached prompt tokens.
async fn prepare(visit: &mut Visit, leg: &mut Leg, ask: &Ask) -> Result<usize, Refused> {
    if leg.side() == Some(Side::Decode) {
        let cached = visit.unless_aborted(leg.receive()).await??;
        visit.join(ask).await?;
        return Ok(cached);
    }
    let cached = visit.prefill(ask).await?;
    visit.unless_aborted(leg.hand_over(cached)).await??;
    Ok(cached)
}

/// Answers that need no engine: echoes, refusals.
fn refusal(engine: &Inner, request: &Request, ask: &Ask, controls: &Controls) -> Option<Answer> {
    let path = request.path.as_str();
    if controls.echo {
        return Some(plain::echo(engine, request));
    }
    if controls.echo_body {
        return Some((controls.status.unwrap_or(200), "application/json", request.body.clone()));
    }
    if let Some(status @ (204 | 300..)) = controls.status {
        return Some(plain::error(engine, path, status, "The mock was asked to refuse."));
    }
    let known = |m: &String| engine.settings.models.contains(m);
    if engine.settings.strict_model && !ask.model.as_ref().is_some_and(known) {
        let message = format!("The model `{}` does not exist.", ask.model.as_deref().unwrap_or(""));
        return Some(plain::error(engine, path, 404, &message));
    }
    None
}

/// A number that no two answers of this process share.
fn new_id(engine: &Inner, path: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let n = NEXT.fetch_add(1, Relaxed);
    let unique = fnv1a64(format!("{}-{}-{n}", std::process::id(), engine.addr.port()).as_bytes());
    let prefix = match path {
        "/v1/responses" => "resp_",
        "/v1/messages" => "msg_",
        "/v1/completions" => "cmpl-",
        "/v1/chat/completions" => "chatcmpl-",
        _ => "",
    };
    format!("{prefix}{unique:016x}{n:08x}")
}

/// Plays what happens before an answer; `Some` when nothing is to follow.
async fn before_head(reply: &mut Reply<'_>, visit: &Visit) -> io::Result<Option<End>> {
    let c = reply.controls;
    if c.delay_ms > 0.0 && visit.pause(Instant::now() + span_ms(c.delay_ms)).await.is_err() {
        return Ok(Some(End::Close));
    }
    if c.hang {
        std::future::pending::<()>().await;
    }
    if c.reset_before_head || c.close_before_head {
        return Ok(Some(if c.reset_before_head { End::Reset } else { End::Close }));
    }
    for i in 0..c.interim {
        let interim: &[u8] = if i % 2 == 0 {
            b"HTTP/1.1 103 Early Hints\r\nlink: </style>; rel=preload\r\n\r\n"
        } else {
            b"HTTP/1.1 102 Processing\r\n\r\n"
        };
        reply.send(interim).await?;
    }
    if let Some(raw) = &c.raw {
        let bytes: Vec<u8> = raw.chars().map(|ch| u8::try_from(u32::from(ch)).unwrap_or(b'?')).collect();
        reply.send(&bytes).await?;
        return Ok(Some(End::Close));
    }
    Ok(None)
}

/// Decodes, and answers with a stream or with one body.
async fn generate(
    engine: &Inner,
    visit: &mut Visit,
    reply: &mut Reply<'_>,
    ask: &Ask,
    script: &Script<'_>,
) -> io::Result<End> {
    let tokens = ask.max_tokens.unwrap_or(engine.settings.max_tokens_default);
    let c = reply.controls;
    let filler = c.event_bytes.map(|n| "x".repeat(n));
    let (mut whole, mut count, mut finish) = (String::new(), 0, "length");
    if ask.stream {
        reply.stream_head(c.status.unwrap_or(200)).await?;
        for event in script.opening() {
            if let Some(end) = reply.event(&event).await? {
                return Ok(end);
            }
        }
    }
    let mut due = Instant::now();
    while count < tokens {
        if count > 0 || c.gap_ms.is_some() {
            due += c.gap_ms.map_or_else(|| visit.step(), span_ms);
        }
        let now = Instant::now();
        if due > now {
            reply.flush().await?;
        }
        let aborted = if due > now { visit.pause(due).await } else { visit.check() };
        if aborted.is_err() {
            finish = "abort";
            break;
        }
        let text = c.text.as_deref().or(filler.as_deref()).unwrap_or(word(count));
        whole.push_str(text);
        count += 1;
        visit.generated(script.samples as u64);
        if ask.stream {
            for sample in 0..script.samples {
                if let Some(end) = reply.event(&script.token(sample, count, text, &whole)).await? {
                    return Ok(end);
                }
            }
            if c.gap_ms.is_some() {
                reply.flush().await?;
            }
        } else if count.is_multiple_of(1024) {
            tokio::task::yield_now().await;
        }
    }
    if !ask.stream {
        let body = script.whole(count, &whole, finish);
        return reply.whole(c.status.unwrap_or(200), "application/json", body.as_bytes()).await;
    }
    for event in script.closing(count, &whole, finish) {
        if let Some(end) = reply.event(&event).await? {
            return Ok(end);
        }
    }
    reply.stream_end().await
}

#[derive(Clone, Copy, PartialEq)]
enum Framing {
    Length,
    Chunked,
    UntilClose,
}

/// One answer on its way out.
struct Reply<'a> {
    engine: &'a Inner,
    stream: &'a TcpStream,
    controls: &'a Controls,
    framing: Framing,
    keep: bool,
    head_only: bool,
    frozen_too: bool,
    events: u64,
    out: Vec<u8>,
}

impl<'a> Reply<'a> {
    fn new(engine: &'a Inner, stream: &'a TcpStream, request: &Request, controls: &'a Controls) -> Self {
        Reply {
            engine,
            stream,
            controls,
            framing: if controls.no_length || !request.chunked_ok { Framing::UntilClose } else { Framing::Chunked },
            keep: request.keep_alive && !controls.close && controls.early != Some(Early::Close),
            head_only: request.method == "HEAD",
            frozen_too: false,
            events: 0,
            out: Vec::new(),
        }
    }

    async fn send(&self, bytes: &[u8]) -> io::Result<()> {
        if !self.frozen_too {
            self.engine.thawed().await;
        }
        http::send(self.stream, bytes).await
    }

    async fn flush(&mut self) -> io::Result<()> {
        if self.out.is_empty() {
            return Ok(());
        }
        let out = std::mem::take(&mut self.out);
        self.send(&out).await?;
        self.out = out;
        self.out.clear();
        Ok(())
    }

    fn head(&mut self, status: u16, kind: &str, framing: Framing, length: usize) {
        let mut head = format!("HTTP/1.1 {status} {}\r\nserver: uvicorn\r\n", reason(status));
        if !kind.is_empty() {
            head += &format!("content-type: {kind}\r\n");
        }
        for (name, value) in &self.controls.headers {
            head += &format!("{name}: {value}\r\n");
        }
        if self.controls.trailers && framing == Framing::Chunked {
            head += "trailer: x-mock-trailer\r\n";
        }
        match framing {
            Framing::Length if status == 204 => {}
            Framing::Length => head += &format!("content-length: {length}\r\n"),
            Framing::Chunked => head += "transfer-encoding: chunked\r\n",
            Framing::UntilClose => self.keep = false,
        }
        if !self.keep {
            head += "connection: close\r\n";
        }
        self.out.extend_from_slice(head.as_bytes());
        self.out.extend_from_slice(b"\r\n");
    }

    async fn answer(&mut self, (status, kind, body): Answer) -> io::Result<End> {
        self.whole(status, kind, &body).await
    }

    /// Answers with one body.
    async fn whole(&mut self, status: u16, kind: &str, body: &[u8]) -> io::Result<End> {
        let c = self.controls;
        let framing = match self.framing {
            Framing::UntilClose if c.no_length => Framing::UntilClose,
            Framing::Chunked if c.trailers => Framing::Chunked,
            _ => Framing::Length,
        };
        let body = if status == 204 || status == 304 { &[] } else { body };
        self.head(status, kind, framing, body.len());
        if self.head_only {
            self.flush().await?;
            return Ok(self.end());
        }
        if framing == Framing::Chunked && !body.is_empty() {
            self.out.extend_from_slice(format!("{:x}\r\n", body.len()).as_bytes());
        }
        if let Some(end) = self.break_off(&body[..body.len() / 2]).await? {
            return Ok(end);
        }
        self.out.extend_from_slice(body);
        if framing == Framing::Chunked {
            self.out.extend_from_slice(if body.is_empty() { b"" } else { b"\r\n" });
            self.last_chunk();
        }
        self.finish().await
    }

    /// Breaks an answer that is no stream off after its first half, if the controls say so.
    async fn break_off(&mut self, half: &[u8]) -> io::Result<Option<End>> {
        let c = self.controls;
        let end = match (c.reset_after_events, c.close_after_events, c.stall_after_events) {
            (Some(_), ..) => End::Reset,
            (_, Some(_), _) => End::Close,
            (_, _, Some(_)) => End::Keep,
            _ => return Ok(None),
        };
        self.out.extend_from_slice(half);
        self.cut(end).await.map(Some)
    }

    async fn cut(&mut self, end: End) -> io::Result<End> {
        self.flush().await?;
        match end {
            End::Keep => std::future::pending().await,
            End::Reset => sleep(BEFORE_RESET).await,
            End::Close => {}
        }
        Ok(end)
    }

    async fn stream_head(&mut self, status: u16) -> io::Result<()> {
        self.head(status, "text/event-stream; charset=utf-8", self.framing, 0);
        // The head travels with the first events, unless those are paced one by one.
        if self.controls.gap_ms.is_some() { self.flush().await } else { Ok(()) }
    }

    /// Adds one event, as a chunk of its own; `Some` when the answer breaks off here.
    async fn event(&mut self, event: &str) -> io::Result<Option<End>> {
        let c = self.controls;
        let reached = |limit: Option<u64>| limit.is_some_and(|n| self.events >= n);
        let end = match () {
            () if reached(c.reset_after_events) => Some(End::Reset),
            () if reached(c.close_after_events) => Some(End::Close),
            () if reached(c.stall_after_events) => Some(End::Keep),
            () => None,
        };
        if let Some(end) = end {
            return self.cut(end).await.map(Some);
        }
        self.events += 1;
        if self.framing == Framing::Chunked {
            self.out.extend_from_slice(format!("{:x}\r\n", event.len()).as_bytes());
        }
        self.out.extend_from_slice(event.as_bytes());
        if self.framing == Framing::Chunked {
            self.out.extend_from_slice(b"\r\n");
        }
        if self.out.len() >= GATHER_BYTES {
            self.flush().await?;
            tokio::task::yield_now().await;
        }
        Ok(None)
    }

    async fn stream_end(&mut self) -> io::Result<End> {
        if self.framing == Framing::Chunked {
            self.last_chunk();
        }
        self.finish().await
    }

    fn last_chunk(&mut self) {
        let trailers = if self.controls.trailers { "x-mock-trailer: 1\r\n" } else { "" };
        self.out.extend_from_slice(format!("0\r\n{trailers}\r\n").as_bytes());
    }

    async fn finish(&mut self) -> io::Result<End> {
        if self.controls.excess {
            self.out.extend_from_slice(EXCESS);
        }
        self.flush().await?;
        Ok(self.end())
    }

    fn end(&self) -> End {
        if self.keep { End::Keep } else { End::Close }
    }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        201 => "Created",
        204 => "No Content",
        400 => "Bad Request",
        401 => "Unauthorized",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        413 => "Content Too Large",
        422 => "Unprocessable Entity",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        _ => "Unnamed",
    }
}
