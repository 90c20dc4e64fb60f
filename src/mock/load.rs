//! Synthetic conversations against a base URL: the traffic of `corelane demo --load` and `--burst`.
//!
//! Takes a [`Pattern`] and a moment to stop, gives [`Totals`]. Never holds more connections than conversations,
//! never lets a conversation grow past its turns, and counts every request exactly once.
//!
//! Each conversation picks one of a few shared system prompts, then asks turn by turn, with everything said so far
//! in its messages, and streams the answers; after its last turn it begins anew with another prompt.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::{find, http};

/// Idle time after which a conversation's connection is not used again, below the servers' 5 s.
const REUSE: Duration = Duration::from_secs(3);
/// Largest answer head, in bytes.
const MAX_HEAD_BYTES: usize = 64 * 1024;
/// Buckets of the histogram of first-token times: bucket i ends at 2^(i/4) × 0.1 ms.
const BUCKETS: usize = 96;

/// What the conversations look like.
#[derive(Clone, Debug)]
pub struct Pattern {
    /// `http://host:port`, without a path.
    pub url: String,
    /// Conversations at the same time.
    pub conversations: usize,
    /// Value of `model`.
    pub model: String,
    /// Sent as `Authorization: Bearer …`.
    pub api_key: Option<String>,
    /// Different system prompts that conversations share.
    pub system_prompts: usize,
    /// Length of a system prompt in bytes.
    pub system_bytes: usize,
    /// Length of a user's turn in bytes.
    pub turn_bytes: usize,
    /// Turns of a conversation, at least 1.
    pub turns: usize,
    /// `max_tokens` of each answer.
    pub max_tokens: usize,
    /// Least and greatest pause between an answer and the next turn.
    pub think_ms: (u64, u64),
    /// Milliseconds after which a request counts as failed.
    pub timeout_ms: u64,
    /// Seed of everything random.
    pub seed: u64,
}

impl Default for Pattern {
    fn default() -> Self {
        Pattern {
            url: "http://127.0.0.1:8000".to_owned(),
            conversations: 16,
            model: "mock".to_owned(),
            api_key: None,
            system_prompts: 8,
            system_bytes: 8 * 1024,
            turn_bytes: 512,
            turns: 6,
            max_tokens: 64,
            think_ms: (100, 1000),
            timeout_ms: 120_000,
            seed: 1,
        }
    }
}

/// What came of the requests so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Totals {
    /// Requests answered with 200 and a whole stream.
    pub ok: u64,
    /// Requests that failed in any other way.
    pub failed: u64,
    /// Of those, the ones that were answered with another status than 200.
    pub refused: u64,
    /// Requests under way.
    pub running: u64,
    /// Events with text that were received.
    pub tokens: u64,
    /// Prompt tokens and cached prompt tokens, as the answers' usage states them.
    pub prompt_tokens: u64,
    /// See `prompt_tokens`.
    pub cached_tokens: u64,
    /// Mean time to the first event with text, in milliseconds.
    pub ttft_mean_ms: f64,
    /// Its median, within a fifth.
    pub ttft_p50_ms: f64,
    /// Its 99th percentile, within a fifth.
    pub ttft_p99_ms: f64,
}

/// Relaxed throughout: they are counts, no memory is published through them.
struct Counts {
    ok: AtomicU64,
    failed: AtomicU64,
    refused: AtomicU64,
    running: AtomicU64,
    tokens: AtomicU64,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    ttft_us: AtomicU64,
    ttft: [AtomicU64; BUCKETS],
}

impl Default for Counts {
    fn default() -> Self {
        let zero = || AtomicU64::new(0);
        Counts {
            ok: zero(),
            failed: zero(),
            refused: zero(),
            running: zero(),
            tokens: zero(),
            prompt_tokens: zero(),
            cached_tokens: zero(),
            ttft_us: zero(),
            ttft: std::array::from_fn(|_| zero()),
        }
    }
}

impl Counts {
    fn first_token(&self, after: Duration) {
        self.ttft_us.fetch_add(after.as_micros() as u64, Relaxed);
        let bucket = ((after.as_secs_f64() * 1e4).max(1.0).log2() * 4.0).ceil() as usize;
        self.ttft[bucket.min(BUCKETS - 1)].fetch_add(1, Relaxed);
    }

    fn totals(&self) -> Totals {
        let get = |c: &AtomicU64| c.load(Relaxed);
        let buckets: Vec<u64> = self.ttft.iter().map(get).collect();
        let all: u64 = buckets.iter().sum();
        let quantile = |q: f64| {
            let mut left = (all as f64 * q).ceil() as u64;
            let at = buckets.iter().position(|n| {
                left = left.saturating_sub(*n);
                left == 0
            });
            if all == 0 { 0.0 } else { 0.1 * 2f64.powf(at.unwrap_or(BUCKETS - 1) as f64 / 4.0) }
        };
        Totals {
            ok: get(&self.ok),
            failed: get(&self.failed),
            refused: get(&self.refused),
            running: get(&self.running),
            tokens: get(&self.tokens),
            prompt_tokens: get(&self.prompt_tokens),
            cached_tokens: get(&self.cached_tokens),
            ttft_mean_ms: get(&self.ttft_us) as f64 / 1e3 / all.max(1) as f64,
            ttft_p50_ms: quantile(0.5),
            ttft_p99_ms: quantile(0.99),
        }
    }
}

/// Traffic that runs on a thread of its own. Its drop stops it, in the middle of requests.
pub struct Load {
    counts: Arc<Counts>,
    stop: watch::Sender<bool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Load {
    /// Starts the conversations on a thread of their own.
    ///
    /// # Errors
    /// A URL that is not `http://host:port`, or a thread that cannot be made.
    pub fn start(pattern: Pattern) -> io::Result<Load> {
        let target = Target::parse(&pattern)?;
        let counts = Arc::new(Counts::default());
        let (stop, mut stopped) = watch::channel(false);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mine = counts.clone();
        let thread = std::thread::Builder::new().name("mock-load".to_owned()).spawn(move || {
            runtime.block_on(drive(pattern, target, mine, async move {
                let _ = stopped.wait_for(|s| *s).await;
            }));
        })?;
        Ok(Load { counts, stop, thread: Some(thread) })
    }

    /// Runs the conversations inside the caller's tokio runtime until `stop` completes.
    ///
    /// # Errors
    /// A URL that is not `http://host:port`.
    pub async fn run(pattern: Pattern, stop: impl Future<Output = ()>) -> io::Result<Totals> {
        let target = Target::parse(&pattern)?;
        let counts = Arc::new(Counts::default());
        drive(pattern, target, counts.clone(), stop).await;
        Ok(counts.totals())
    }

    /// Asks one question in each conversation, all at the same time, and returns when all have been answered. They
    /// differ from their first words on. Of the pattern, prompts, turns and pauses do not matter here.
    ///
    /// # Errors
    /// A URL that is not `http://host:port`, or a runtime that cannot be made.
    pub fn burst(pattern: &Pattern) -> io::Result<Totals> {
        let target = Target::parse(pattern)?;
        let counts = Arc::new(Counts::default());
        let pattern = Arc::new(Pattern { think_ms: (0, 0), ..pattern.clone() });
        let text: Arc<str> = words(pattern.seed, pattern.turn_bytes).into();
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
            let mut tasks = tokio::task::JoinSet::new();
            for i in 0..pattern.conversations {
                let mut one = Conversation::new(i as u64, pattern.clone(), target.clone(), counts.clone());
                let text = text.clone();
                tasks.spawn(async move {
                    let said = format!(r#"{{"role":"user","content":"{:016x} {text}"}}"#, one.random.u64(..));
                    one.ask(&said).await;
                });
            }
            tasks.join_all().await;
        });
        Ok(counts.totals())
    }

    /// What came of the requests so far.
    pub fn totals(&self) -> Totals {
        self.counts.totals()
    }

    /// Stops, and gives the final counts.
    pub fn stop(mut self) -> Totals {
        self.end();
        self.counts.totals()
    }

    fn end(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.end();
    }
}

#[derive(Clone)]
struct Target {
    authority: String,
    head: String,
}

impl Target {
    fn parse(p: &Pattern) -> io::Result<Target> {
        let wrong = || io::Error::new(io::ErrorKind::InvalidInput, format!("{}: not http://host:port", p.url));
        let authority = p.url.trim_end_matches('/').strip_prefix("http://").ok_or_else(wrong)?;
        if authority.is_empty() || authority.contains('/') {
            return Err(wrong());
        }
        let port = if authority.rsplit(':').next().is_some_and(|s| s.parse::<u16>().is_ok()) { "" } else { ":80" };
        let key = p.api_key.as_ref().map_or(String::new(), |k| format!("authorization: Bearer {k}\r\n"));
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {authority}\r\ncontent-type: application/json\r\n{key}content-length: "
        );
        Ok(Target { authority: format!("{authority}{port}"), head })
    }
}

async fn drive(pattern: Pattern, target: Target, counts: Arc<Counts>, stop: impl Future<Output = ()>) {
    let pattern = Arc::new(pattern);
    let mut tasks = tokio::task::JoinSet::new();
    for i in 0..pattern.conversations {
        tasks.spawn(Conversation::new(i as u64, pattern.clone(), target.clone(), counts.clone()).talk());
    }
    stop.await;
    tasks.shutdown().await;
}

struct Conversation {
    pattern: Arc<Pattern>,
    target: Target,
    counts: Arc<Counts>,
    random: fastrand::Rng,
    connection: Option<(TcpStream, Instant)>,
}

/// How a request ended.
enum Ended {
    /// With a whole stream; its text.
    Whole(String),
    /// With another status than 200.
    Refused,
    /// With a broken connection or answer; true when not a byte had come.
    Broken { untouched: bool },
}

impl Conversation {
    fn new(number: u64, pattern: Arc<Pattern>, target: Target, counts: Arc<Counts>) -> Self {
        let random = fastrand::Rng::with_seed(pattern.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number);
        Conversation { pattern, target, counts, random, connection: None }
    }

    async fn talk(mut self) {
        // Spread over one think time, so that the start is no burst.
        self.think().await;
        loop {
            let prompt = self.random.u64(0..self.pattern.system_prompts.max(1) as u64);
            let system = words(self.pattern.seed ^ prompt, self.pattern.system_bytes);
            let mut messages = format!(r#"{{"role":"system","content":"{system}"}}"#);
            for _ in 0..self.pattern.turns.max(1) {
                let said = words(self.random.u64(..), self.pattern.turn_bytes);
                messages += &format!(r#",{{"role":"user","content":"{said}"}}"#);
                let Some(answer) = self.ask(&messages).await else { break };
                let answer = serde_json::Value::from(answer);
                messages += &format!(r#",{{"role":"assistant","content":{answer}}}"#);
                self.think().await;
            }
        }
    }

    async fn think(&mut self) {
        let (least, most) = self.pattern.think_ms;
        sleep(Duration::from_millis(self.random.u64(least..=most.max(least)))).await;
    }

    /// Asks once; a kept connection that turns out to be closed does not count as a failure.
    async fn ask(&mut self, messages: &str) -> Option<String> {
        let p = &self.pattern;
        let body = format!(
            r#"{{"model":{},"messages":[{messages}],"stream":true,"stream_options":{{"include_usage":true}},"max_tokens":{}}}"#,
            serde_json::Value::from(p.model.as_str()),
            p.max_tokens
        );
        let request = format!("{}{}\r\n\r\n{body}", self.target.head, body.len());
        let limit = Duration::from_millis(p.timeout_ms);
        let counts = self.counts.clone();
        counts.running.fetch_add(1, Relaxed);
        let _running = Running(&counts);
        let kept = self.connection.take().filter(|(_, used)| used.elapsed() < REUSE);
        let mut ended = Ended::Broken { untouched: true };
        if let Some((stream, _)) = kept {
            ended = self.exchange(Ok(stream), &request, limit).await;
        }
        if let Ended::Broken { untouched: true } = ended {
            let fresh = timeout(limit, TcpStream::connect(&self.target.authority)).await;
            ended = self.exchange(fresh.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())), &request, limit).await;
        }
        match ended {
            Ended::Whole(text) => {
                counts.ok.fetch_add(1, Relaxed);
                return Some(text);
            }
            Ended::Refused => {
                counts.refused.fetch_add(1, Relaxed);
                counts.failed.fetch_add(1, Relaxed);
            }
            Ended::Broken { .. } => {
                counts.failed.fetch_add(1, Relaxed);
            }
        }
        self.think().await;
        None
    }

    async fn exchange(&mut self, stream: io::Result<TcpStream>, request: &str, limit: Duration) -> Ended {
        let Ok(stream) = stream else { return Ended::Broken { untouched: false } };
        let _ = stream.set_nodelay(true);
        let mut answer = Answer::default();
        let begun = Instant::now();
        let done = timeout(limit, answer.receive(&stream, request, begun, &self.counts)).await;
        match done {
            Ok(Ok(keep)) => {
                if keep {
                    self.connection = Some((stream, Instant::now()));
                }
                if answer.status != 200 {
                    Ended::Refused
                } else if answer.done {
                    Ended::Whole(answer.text)
                } else {
                    Ended::Broken { untouched: false }
                }
            }
            _ => Ended::Broken { untouched: answer.bytes == 0 && done.is_ok() },
        }
    }
}

/// Counts a request off, also when its conversation is stopped.
struct Running<'a>(&'a Counts);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Relaxed);
    }
}

/// An answer as far as it has come.
#[derive(Default)]
struct Answer {
    bytes: usize,
    status: u16,
    text: String,
    tokens: u64,
    done: bool,
}

enum Body {
    Length(usize),
    Chunked,
    UntilClose,
}

impl Answer {
    /// Sends the request and receives the answer; true when the connection can be used again.
    async fn receive(
        &mut self,
        stream: &TcpStream,
        request: &str,
        begun: Instant,
        counts: &Counts,
    ) -> io::Result<bool> {
        http::send(stream, request.as_bytes()).await?;
        let mut buf = Vec::new();
        let (body, mut keep) = loop {
            if let Some((status, body, keep, used)) = parse_head(&buf)? {
                buf.drain(..used);
                if (100..200).contains(&status) {
                    continue;
                }
                self.status = status;
                break (body, keep);
            }
            if buf.len() > MAX_HEAD_BYTES {
                return Err(io::ErrorKind::InvalidData.into());
            }
            self.more(stream, &mut buf).await?;
        };
        let mut events = Vec::new();
        match body {
            Body::Length(n) => {
                while buf.len() < n {
                    self.more(stream, &mut buf).await?;
                }
                keep &= buf.len() == n;
                buf.truncate(n);
                events = buf;
            }
            Body::UntilClose => {
                keep = false;
                while self.more(stream, &mut buf).await.is_ok() {}
                events = buf;
            }
            Body::Chunked => loop {
                match next_chunk(&buf)? {
                    Some((payload, used)) if payload.is_empty() => {
                        keep &= used == buf.len();
                        break;
                    }
                    Some((payload, used)) => {
                        events.extend_from_slice(&buf[payload]);
                        buf.drain(..used);
                        self.take_events(&mut events, begun, counts);
                    }
                    None => self.more(stream, &mut buf).await?,
                }
            },
        }
        self.take_events(&mut events, begun, counts);
        Ok(keep)
    }

    async fn more(&mut self, stream: &TcpStream, buf: &mut Vec<u8>) -> io::Result<()> {
        match http::fill(stream, buf).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            n => {
                self.bytes += n;
                Ok(())
            }
        }
    }

    fn take_events(&mut self, events: &mut Vec<u8>, begun: Instant, counts: &Counts) {
        let mut at = 0;
        while let Some(end) = find(&events[at..], b"\n\n") {
            let event = &events[at..at + end];
            at += end + 2;
            let Some(data) = event.strip_prefix(b"data: ") else { continue };
            if data == b"[DONE]" {
                self.done = true;
                continue;
            }
            let Ok(v) = serde_json::from_slice::<serde_json::Value>(data) else { continue };
            if let Some(text) = v["choices"][0]["delta"]["content"].as_str().filter(|t| !t.is_empty()) {
                if self.tokens == 0 {
                    counts.first_token(begun.elapsed());
                }
                self.tokens += 1;
                self.text.push_str(text);
                counts.tokens.fetch_add(1, Relaxed);
            }
            let usage = &v["usage"];
            let cached = &usage["prompt_tokens_details"]["cached_tokens"];
            counts.prompt_tokens.fetch_add(usage["prompt_tokens"].as_u64().unwrap_or(0), Relaxed);
            counts.cached_tokens.fetch_add(cached.as_u64().unwrap_or(0), Relaxed);
        }
        events.drain(..at);
    }
}

/// Status, body, reusable or not, length of the head.
fn parse_head(buf: &[u8]) -> io::Result<Option<(u16, Body, bool, usize)>> {
    let mut fields = [httparse::EMPTY_HEADER; 128];
    let mut head = httparse::Response::new(&mut fields);
    let used = match head.parse(buf) {
        Ok(httparse::Status::Complete(used)) => used,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(io::ErrorKind::InvalidData.into()),
    };
    let field = |name: &str| head.headers.iter().find(|h| h.name.eq_ignore_ascii_case(name)).map(|h| h.value);
    let body = if field("transfer-encoding").is_some() {
        Body::Chunked
    } else if let Some(n) = field("content-length") {
        let n = std::str::from_utf8(n).ok().and_then(|n| n.parse().ok());
        Body::Length(n.ok_or(io::ErrorKind::InvalidData)?)
    } else {
        Body::UntilClose
    };
    let keep = !field("connection").is_some_and(|v| v.eq_ignore_ascii_case(b"close"));
    Ok(Some((head.code.unwrap_or(0), body, keep, used)))
}

/// Where the next chunk's payload lies and where the chunk ends; an empty payload is the end of the body, trailers
/// included.
fn next_chunk(buf: &[u8]) -> io::Result<Option<(std::ops::Range<usize>, usize)>> {
    let wrong = || io::Error::from(io::ErrorKind::InvalidData);
    let Some(line) = find(buf, b"\r\n") else { return Ok(None) };
    let size = std::str::from_utf8(&buf[..line]).map_err(|_| wrong())?;
    let size = usize::from_str_radix(size.split(';').next().unwrap_or("").trim(), 16).map_err(|_| wrong())?;
    if size == 0 {
        return Ok(find(&buf[line..], b"\r\n\r\n").map(|end| (0..0, line + end + 4)));
    }
    let start = line + 2;
    let end = start.checked_add(size).and_then(|e| e.checked_add(2)).ok_or_else(wrong)?;
    Ok((buf.len() >= end).then_some((start..end - 2, end)))
}

/// Text of about `bytes` bytes that depends on the seed alone and needs no escapes.
fn words(seed: u64, bytes: usize) -> String {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut text = String::with_capacity(bytes + 16);
    while text.len() < bytes {
        for _ in 0..random.usize(2..9) {
            text.push(random.lowercase());
        }
        text.push(' ');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_near() {
        let counts = Counts::default();
        for ms in 1..=100 {
            counts.first_token(Duration::from_millis(ms));
        }
        let t = counts.totals();
        assert!((t.ttft_mean_ms - 50.5).abs() < 0.1, "{t:?}");
        assert!((50.0..60.0).contains(&t.ttft_p50_ms) && (99.0..119.0).contains(&t.ttft_p99_ms), "{t:?}");
    }
}
