//! The workers, asked: names, connections, health, models, and how long they keep an idle connection.
//!
//! Takes the configuration, gives what each worker answered and how long it took. Never sends a worker more than three
//! requests, never asks more than [`AT_ONCE`] at a time, never waits longer than the gateway itself would.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::Request;
use hyper::header::{AUTHORIZATION, CONNECTION, HOST};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::config::{Config, WorkerSpec};
use crate::control::fetch::{Question, Reply};
use crate::control::learn;
use crate::control::resolve::Endpoint;

/// Workers that are asked at a time.
const AT_ONCE: usize = 64;
/// Longest that an idle connection is watched.
pub const WATCH: Duration = Duration::from_secs(6);

/// A status and the time that it took, or why there is none.
pub type Answered = Result<(u16, Duration), String>;

/// What came of asking a worker; each step only if those before it went well.
pub struct Worker {
    pub url: String,
    /// Whether the configuration has a key for it.
    pub has_key: bool,
    /// Models that the configuration says it serves.
    pub configured: Vec<String>,
    /// Its addresses, and how long the name service took.
    pub looked_up: Result<Duration, String>,
    pub connected: Option<Result<Duration, String>>,
    /// Path and status of its health endpoint.
    pub health: Option<(String, Answered)>,
    /// How long its health endpoint may take.
    pub health_timeout: Duration,
    pub models: Option<Result<Vec<String>, String>>,
    /// How long it keeps an idle connection, if that was watched.
    pub keeps: Option<Keeps>,
}

/// How long an idle connection lasted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Keeps {
    /// It is closed with the first answer.
    Not,
    /// The worker closed it after this.
    For(Duration),
    /// It was still open after this.
    Longer(Duration),
    /// That could not be seen.
    Unknown(String),
}

/// Asks every worker; `slow`: watches an idle connection of each, too.
///
/// # Errors
/// When this process has no means to ask.
pub fn ask(config: &Config, slow: bool) -> std::io::Result<Vec<Worker>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let workers = runtime.block_on(async {
        let config = Arc::new(config.clone());
        let places = Arc::new(Semaphore::new(AT_ONCE));
        let mut asking = JoinSet::new();
        for at in 0..config.workers.len() {
            let (config, places) = (config.clone(), places.clone());
            asking.spawn(async move {
                let _place = places.acquire().await;
                (at, Asking { config: &config, spec: &config.workers[at] }.all(slow).await)
            });
        }
        let mut workers = asking.join_all().await;
        workers.sort_by_key(|(at, _)| *at);
        workers.into_iter().map(|(_, worker)| worker).collect()
    });
    // A look-up that hangs in its thread must not hold up the report.
    runtime.shutdown_background();
    Ok(workers)
}

struct Asking<'a> {
    config: &'a Config,
    spec: &'a WorkerSpec,
}

impl Asking<'_> {
    async fn all(&self, slow: bool) -> Worker {
        let mut worker = Worker {
            url: self.spec.url.clone(),
            has_key: self.spec.api_key.is_some(),
            configured: self.spec.models.clone(),
            looked_up: Ok(Duration::ZERO),
            connected: None,
            health: None,
            health_timeout: self.limit(),
            models: None,
            keeps: None,
        };
        let endpoint = match Endpoint::parse(&self.spec.url) {
            Ok(endpoint) => endpoint,
            Err(wrong) => {
                worker.looked_up = Err(wrong.to_string());
                return worker;
            }
        };
        let begun = Instant::now();
        let addrs = match endpoint.literal() {
            Some(addr) => [addr].into(),
            None => match endpoint.look_up().await {
                Ok(addrs) => addrs,
                Err(e) => {
                    worker.looked_up = Err(e.to_string());
                    return worker;
                }
            },
        };
        worker.looked_up = Ok(begun.elapsed());
        let stream = match self.connect(&addrs).await {
            Ok((stream, took)) => {
                worker.connected = Some(Ok(took));
                stream
            }
            Err(e) => {
                worker.connected = Some(Err(e));
                return worker;
            }
        };
        let path = self.spec.health_endpoint.as_ref().unwrap_or(&self.config.health_endpoint);
        let begun = Instant::now();
        let health = self.get(&endpoint, &addrs, path).await;
        worker.health = Some((path.clone(), health.map(|reply| (reply.status, begun.elapsed()))));
        worker.models = Some(self.models(&endpoint, &addrs).await);
        if slow {
            worker.keeps = Some(self.watch(&endpoint, stream, path).await);
        }
        worker
    }

    fn limit(&self) -> Duration {
        self.spec.health_timeout.unwrap_or(self.config.health_timeout)
    }

    async fn connect(&self, addrs: &[SocketAddr]) -> Result<(TcpStream, Duration), String> {
        let begun = Instant::now();
        match timeout(self.config.connect_timeout, TcpStream::connect(addrs)).await {
            Ok(Ok(stream)) => Ok((stream, begun.elapsed())),
            Ok(Err(e)) => Err(e.to_string()),
            Err(_) => Err(format!("no connection within {:?}", self.config.connect_timeout)),
        }
    }

    async fn get(&self, endpoint: &Endpoint, addrs: &[SocketAddr], path: &str) -> Result<Reply, String> {
        let question = Question {
            addrs,
            authority: &endpoint.authority,
            path: &format!("{}{path}", endpoint.prefix),
            api_key: self.spec.api_key.as_deref(),
            limit: self.limit(),
        };
        question.get().await.map_err(|failure| failure.to_string())
    }

    async fn models(&self, endpoint: &Endpoint, addrs: &[SocketAddr]) -> Result<Vec<String>, String> {
        let reply = self.get(endpoint, addrs, "/v1/models").await?;
        if reply.status != 200 {
            return Err(format!("/v1/models answers {}", reply.status));
        }
        let (names, _) = learn::models(&reply.body).map_err(|e| format!("/v1/models: {e}"))?;
        Ok(names.iter().map(|name| name.to_string()).collect())
    }

    /// One request, then how long the worker leaves the connection open.
    async fn watch(&self, endpoint: &Endpoint, stream: TcpStream, path: &str) -> Keeps {
        let unknown = |e: &dyn std::fmt::Display| Keeps::Unknown(e.to_string());
        let mut request = Request::get(format!("{}{path}", endpoint.prefix)).header(HOST, &*endpoint.authority);
        if let Some(key) = &self.spec.api_key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = match request.body(Empty::<Bytes>::new()) {
            Ok(request) => request,
            Err(e) => return unknown(&e),
        };
        let (mut sender, connection) = match hyper::client::conn::http1::handshake(TokioIo::new(stream)).await {
            Ok(both) => both,
            Err(e) => return unknown(&e),
        };
        let connection = tokio::spawn(connection);
        let answer = async {
            let answer = sender.send_request(request).await?;
            let is_last = answer.headers().get(CONNECTION).is_some_and(|v| v.as_bytes().eq_ignore_ascii_case(b"close"));
            answer.into_body().collect().await.map(|_| is_last)
        };
        match timeout(self.limit(), answer).await {
            Ok(Ok(true)) => return Keeps::Not,
            Ok(Ok(false)) => {}
            Ok(Err(e)) => return unknown(&e),
            Err(_) => return unknown(&"no complete answer in time"),
        }
        let begun = Instant::now();
        // The sender lives until here, so only the worker ends the connection.
        let ended = timeout(WATCH, connection).await;
        drop(sender);
        if ended.is_ok() { Keeps::For(begun.elapsed()) } else { Keeps::Longer(WATCH) }
    }
}
