//! The mock inference engine behind `corelane mock-worker`, `corelane demo` and the tests.
//!
//! Takes [`Settings`] and a number of ports, gives that many HTTP servers that behave like SGLang's: same
//! routes, same shapes, a prefix cache, a prefill queue, batched decoding, aborts, and faults on demand.
//! Never runs a model, never imports another part of corelane, so the gateway cannot be tuned to it.
//!
//! Faults ride in the JSON body, under a top-level object `"mock"`; see [`Controls`]. The engines of a process know
//! each other: a prefill and a decode engine serve a pair of requests together, as strictly as the real ones, and count
//! in [`Stats`] what those would stumble over.

mod ask;
pub mod cache;
mod engine;
mod http;
pub mod load;
mod pair;
mod plain;
mod server;
mod stats;
mod stream;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

pub use ask::{Controls, Early};
pub use engine::{Engine, Pretended};
pub use stats::{Last, Stats};

/// What a mock engine plays in prefill/decode disaggregation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// An ordinary worker.
    #[default]
    Regular,
    /// A prefill worker; works prompts off, hands them over to a decode worker of the same process, and answers with
    /// one token.
    Prefill,
    /// A decode worker; generates what a prefill worker of the same process has handed over.
    Decode,
}

/// How vLLM's engines hand a prompt over. SGLang's meet in bootstrap rooms instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Connector {
    /// Prefill first; what it answers as `kv_transfer_params` goes to the decode engine.
    #[default]
    Nixl,
    /// Both at once, with a common `transfer_id`.
    Mooncake,
}

/// How the engines of a fleet behave. The default has no delays, no cache, no limits, and uvicorn's keep-alive.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Model names that `/v1/models` lists; the first is the default of answers.
    pub models: Vec<String>,
    /// Answer 404 for models that are not in `models` (SGLang accepts any name).
    pub strict_model: bool,
    /// What the engines play in prefill/decode disaggregation.
    pub role: Role,
    /// Capacity of the prefix cache in tokens; 0 for none.
    pub cache_tokens: usize,
    /// Speed of the one prefill unit; 0 for instantaneous.
    pub prefill_tokens_per_sec: f64,
    /// Fixed part of a decode step, in milliseconds.
    pub decode_step_ms: f64,
    /// Part of a decode step that grows with the batch, in microseconds per running request.
    pub decode_step_per_seq_us: f64,
    /// Requests that run at once; further ones queue. 0 for no limit.
    pub max_running: usize,
    /// Tokens generated when the request names no maximum.
    pub max_tokens_default: usize,
    /// Tokens that the pretended KV cache holds; the denominator of `token_usage`.
    pub kv_tokens: usize,
    /// Milliseconds after which the server closes a connection that is idle after an answer; 0 for never.
    pub keep_alive_ms: u64,
    /// Milliseconds after the start during which everything is answered with 503.
    pub ready_after_ms: u64,
    /// When set, `Authorization: Bearer …` must carry it.
    pub api_key: Option<String>,
    /// Data-parallel ranks: reported by `/server_info` and `/v1/loads`, named by requests, counted in `Stats::ranks`.
    /// They share one batch and one cache.
    pub dp_size: usize,
    /// Speak vLLM's dialect where it differs: `owned_by`, metric names, nested errors, handing over.
    pub vllm: bool,
    /// How prefill and decode engines hand over, with `vllm`.
    pub connector: Connector,
    /// Milliseconds that the transfer of a cache takes: on SGLang's prefill engines, on vLLM's decode engines.
    pub transfer_ms: f64,
    /// Milliseconds that a leg of a pair waits for its partner before it is answered with 500.
    pub room_timeout_ms: u64,
    /// Milliseconds that a vLLM prefill engine with NIXL keeps a cache that nobody fetches, from when it can be fetched
    /// (vLLM's `VLLM_NIXL_ABORT_REQUEST_TIMEOUT`, 480 s).
    pub staged_timeout_ms: u64,
    /// Give each vLLM prefill engine with Mooncake a bootstrap server on a free port. Without one its bootstrap
    /// address is said to be port 8998 of its host.
    pub bootstrap: bool,
    /// Bytes of the last body that [`Stats`] keeps.
    pub keep_body_bytes: usize,
    /// Largest body that is read, in bytes; a larger one is answered with 413.
    pub max_body_bytes: usize,
    /// Threads that serve the fleet.
    pub threads: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            models: vec!["mock".to_owned()],
            strict_model: false,
            role: Role::Regular,
            cache_tokens: 0,
            prefill_tokens_per_sec: 0.0,
            decode_step_ms: 0.0,
            decode_step_per_seq_us: 0.0,
            max_running: 0,
            max_tokens_default: 16,
            kv_tokens: 1 << 20,
            keep_alive_ms: 5000,
            ready_after_ms: 0,
            api_key: None,
            dp_size: 1,
            vllm: false,
            connector: Connector::Nixl,
            transfer_ms: 0.0,
            room_timeout_ms: 30_000,
            staged_timeout_ms: 480_000,
            bootstrap: false,
            keep_body_bytes: 16 << 20,
            max_body_bytes: 1 << 30,
            threads: 1,
        }
    }
}

impl Settings {
    /// Whether decode engines look for this one by its engine id.
    fn is_mooncake_prefill(&self) -> bool {
        self.vllm && self.connector == Connector::Mooncake && self.role == Role::Prefill
    }
}

/// A number of mock engines on threads of their own. Its drop stops everything.
pub struct Fleet {
    engines: Vec<Engine>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Fleet {
    /// Starts `count` engines on consecutive ports from `addr` on, or on free ports where the port is 0.
    /// They accept connections when this returns. Callable inside and outside of any async runtime.
    ///
    /// # Errors
    /// A port that cannot be bound (nothing is started then), or a thread that cannot be made.
    pub fn start(settings: Settings, addr: impl Into<SocketAddr>, count: usize) -> io::Result<Fleet> {
        Fleet::start_mixed(vec![(settings, count)], addr)
    }

    /// The same with engines of several kinds, in this order; the highest number of threads counts.
    ///
    /// # Errors
    /// As [`Fleet::start`].
    pub fn start_mixed(parts: Vec<(Settings, usize)>, addr: impl Into<SocketAddr>) -> io::Result<Fleet> {
        let addr = addr.into();
        let threads = parts.iter().map(|(settings, _)| settings.threads).max().unwrap_or(1);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads.max(1))
            .thread_name("mock-engine")
            .enable_all()
            .build()?;
        let handle = runtime.handle().clone();
        // Made first: where a port cannot be bound, its drop stops the runtime the right way.
        let mut fleet = Fleet { engines: Vec::new(), runtime: Some(runtime) };
        for (settings, count) in parts {
            let settings = Arc::new(settings);
            for _ in 0..count {
                let mut at = addr;
                if addr.port() != 0 {
                    let port = addr.port() as usize + fleet.engines.len();
                    at.set_port(u16::try_from(port).map_err(|_| io::ErrorKind::InvalidInput)?);
                }
                fleet.engines.push(Engine::start(settings.clone(), at, handle.clone())?);
            }
        }
        Ok(fleet)
    }

    /// Base URLs in order of the engines, without a slash at the end.
    pub fn urls(&self) -> Vec<String> {
        self.engines.iter().map(Engine::url).collect()
    }

    /// The engine number `i`.
    ///
    /// # Panics
    /// When there is no such engine.
    pub fn engine(&self, i: usize) -> &Engine {
        &self.engines[i]
    }

    /// All engines in order.
    pub fn engines(&self) -> &[Engine] {
        &self.engines
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        // On a thread of its own: a runtime must not be waited for inside another one.
        if let Some(runtime) = self.runtime.take() {
            let _ = std::thread::spawn(move || runtime.shutdown_timeout(std::time::Duration::from_secs(2))).join();
        }
    }
}

/// A span of time from a request or a setting: what is negative or no number is nothing, a day is the most.
fn span_ms(ms: f64) -> std::time::Duration {
    let ms = if ms > 0.0 { ms.min(86_400_000.0) } else { 0.0 };
    std::time::Duration::from_secs_f64(ms / 1e3)
}

/// FNV-1a, 64 bits: the hash that `echo` states of a body.
pub fn fnv1a64(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Every byte as the character of the same number.
fn latin1(bytes: &[u8]) -> String {
    bytes.iter().map(|b| char::from(*b)).collect()
}

/// Where `what` (not empty) first stands in `text`.
fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    let mut from = 0;
    loop {
        from += memchr::memchr(what[0], text.get(from..)?)?;
        if text[from..].starts_with(what) {
            return Some(from);
        }
        from += 1;
    }
}
