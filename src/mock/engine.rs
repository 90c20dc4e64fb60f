//! One mock engine: its life, its batch, its memory.
//!
//! Takes requests that the server has read, gives each its time: a place in the batch, its share of the one
//! prefill unit, its decode steps. Never touches a socket but its listener.
//!
//! A request waits (FIFO) for one of `max_running` places, then (FIFO) for the prefill unit, which takes
//! (prompt − cached tokens) ÷ `prefill_tokens_per_sec`; the first token comes with the end of prefill, every
//! further one a step later: `decode_step_ms` + running requests × `decode_step_per_seq_us`.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep_until};

use super::ask::{Addressee, Ask, Controls};
use super::cache::{BLOCK_TOKENS, Cache};
use super::stats::{Counters, Stats, down, up};
use super::{Role, Settings, pair, server, span_ms};

/// Ids of answers that `GET /v1/responses/{id}` still finds.
const MAX_RESPONSES: usize = 4096;
/// Connections that the kernel may hold for one engine before they are accepted.
const BACKLOG: i32 = 1024;
/// Longest wait for a listener and its connections to go, in `Engine::kill`.
const KILL_WAIT: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Running,
    Frozen,
    Dead,
}

/// A handle on one running mock engine; clones share it. Callable from any thread.
#[derive(Clone)]
pub struct Engine(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub settings: Arc<Settings>,
    pub addr: SocketAddr,
    pub counters: Counters,
    life: watch::Sender<Life>,
    runtime: Handle,
    /// Listeners that are open.
    listeners: AtomicU64,
    /// Where Mooncake's bootstrap server listens, if the engine has one.
    bootstrap: Option<SocketAddr>,
    /// What Mooncake calls the engine, or its ranks with a suffix each; new after a restart.
    engine_id: Mutex<String>,
    /// The rank of the next request that names none.
    next_rank: AtomicU64,
    started: Mutex<Instant>,
    places: Arc<Semaphore>,
    /// The prefill unit; holds the moment at which it is free.
    prefill: tokio::sync::Mutex<Instant>,
    cache: Mutex<Cache>,
    /// Tokens that running requests hold.
    held_tokens: AtomicU64,
    aborts: Mutex<HashMap<String, Vec<Arc<Abort>>>>,
    responses: Mutex<VecDeque<String>>,
    pub standing: Mutex<Option<Controls>>,
    /// What it says of its load instead of the truth.
    pretended: Mutex<Option<Pretended>>,
}

/// What an engine is to say of its load, whatever it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pretended {
    /// So much of the KV cache is used, and so many requests wait.
    Load { kv_usage: f64, waiting: u64 },
    /// Nothing: questions for its load are answered with 503.
    Nothing,
}

impl Engine {
    pub(super) fn start(settings: Arc<Settings>, addr: SocketAddr, runtime: Handle) -> io::Result<Engine> {
        let listener = listen(addr)?;
        let has_bootstrap = settings.bootstrap && settings.is_mooncake_prefill();
        let bootstrap = if has_bootstrap { Some(listen(SocketAddr::new(addr.ip(), 0))?) } else { None };
        let unlimited = Semaphore::MAX_PERMITS;
        let places = if settings.max_running == 0 { unlimited } else { settings.max_running.min(unlimited) };
        let inner = Inner {
            addr: listener.local_addr()?,
            counters: Counters::default(),
            life: watch::Sender::new(Life::Running),
            listeners: AtomicU64::new(0),
            bootstrap: bootstrap.as_ref().map(std::net::TcpListener::local_addr).transpose()?,
            engine_id: Mutex::default(),
            next_rank: AtomicU64::new(0),
            started: Mutex::new(Instant::now()),
            places: Arc::new(Semaphore::new(places)),
            prefill: tokio::sync::Mutex::new(Instant::now()),
            cache: Mutex::new(Cache::new(settings.cache_tokens)),
            held_tokens: AtomicU64::new(0),
            aborts: Mutex::default(),
            responses: Mutex::default(),
            standing: Mutex::default(),
            pretended: Mutex::default(),
            settings,
            runtime,
        };
        let engine = Engine(Arc::new(inner));
        engine.serve(listener, bootstrap)?;
        Ok(engine)
    }

    fn serve(&self, listener: std::net::TcpListener, bootstrap: Option<std::net::TcpListener>) -> io::Result<()> {
        let _inside = self.0.runtime.enter();
        let listener = TcpListener::from_std(listener)?;
        let bootstrap = bootstrap.map(TcpListener::from_std).transpose()?;
        self.0.introduce();
        up(&self.0.listeners);
        self.0.runtime.spawn(server::listen(self.0.clone(), listener));
        if let Some(bootstrap) = bootstrap {
            up(&self.0.listeners);
            self.0.runtime.spawn(server::listen_for_bootstrap(self.0.clone(), bootstrap));
        }
        Ok(())
    }

    /// Has it say something of its load from now on; `None`: the truth.
    pub fn pretend(&self, pretended: Option<Pretended>) {
        *self.0.pretended.lock().unwrap() = pretended;
    }

    /// The address it listens on.
    pub fn addr(&self) -> SocketAddr {
        self.0.addr
    }

    /// Its base URL, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.0.addr)
    }

    /// The part that it plays.
    pub fn role(&self) -> Role {
        self.0.settings.role
    }

    /// Port of its bootstrap server: of vLLM prefill engines with Mooncake, where `Settings::bootstrap` asks for one.
    pub fn bootstrap_port(&self) -> Option<u16> {
        self.0.bootstrap.map(|at| at.port())
    }

    /// The id by which a vLLM prefill engine is known to decode engines (that of rank 0); new after a restart.
    pub fn engine_id(&self) -> String {
        self.0.engine_id()
    }

    /// Stops answering, in the middle of streams too; connections are still accepted and read.
    pub fn freeze(&self) {
        self.0.turn(Life::Running, Life::Frozen);
    }

    /// Goes on answering.
    pub fn thaw(&self) {
        self.0.turn(Life::Frozen, Life::Running);
    }

    /// Closes its listeners and resets every connection; returns when both have happened, at most 5 s later.
    pub fn kill(&self) {
        self.0.life.send_replace(Life::Dead);
        let patience = std::time::Instant::now() + KILL_WAIT;
        while (self.0.listeners.load(Relaxed) > 0 || self.0.counters.connections.load(Relaxed) > 0)
            && std::time::Instant::now() < patience
        {
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Starts again on the same port after [`Engine::kill`]: cache and response ids are gone, counters stay.
    ///
    /// # Errors
    /// The port cannot be bound again.
    pub fn restart(&self) -> io::Result<()> {
        if self.0.listeners.load(Relaxed) > 0 {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let listener = listen(self.0.addr)?;
        let bootstrap = self.0.bootstrap.map(listen).transpose()?;
        self.0.cache.lock().unwrap().clear();
        self.0.responses.lock().unwrap().clear();
        *self.0.started.lock().unwrap() = Instant::now();
        self.0.life.send_replace(Life::Running);
        self.serve(listener, bootstrap)
    }

    /// A snapshot of its counters.
    pub fn stats(&self) -> Stats {
        self.0.counters.snapshot()
    }

    /// Zeroes its counters.
    pub fn reset_stats(&self) {
        self.0.counters.reset();
    }

    /// Makes every request for inference that brings no controls of its own obey these; `None` ends it.
    pub fn misbehave(&self, controls: Option<Controls>) {
        *self.0.standing.lock().unwrap() = controls;
    }

    /// Forgets its prefix cache.
    pub fn flush_cache(&self) {
        self.0.flush_cache();
    }
}

fn listen(addr: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(addr), socket2::Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&addr.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

impl Inner {
    fn turn(&self, from: Life, to: Life) {
        self.life.send_if_modified(|l| {
            let turns = *l == from;
            if turns {
                *l = to;
            }
            turns
        });
    }

    /// Whether the start-up time is over.
    pub fn ready(&self) -> bool {
        self.started.lock().unwrap().elapsed() >= Duration::from_millis(self.settings.ready_after_ms)
    }

    /// Returns when the engine is not frozen.
    pub async fn thawed(&self) {
        if *self.life.borrow() == Life::Frozen {
            let _ = self.life.subscribe().wait_for(|l| *l != Life::Frozen).await;
        }
    }

    /// Returns when the engine is killed.
    pub async fn died(&self) {
        let _ = self.life.subscribe().wait_for(|l| *l == Life::Dead).await;
    }

    pub fn stopped_listening(&self) {
        down(&self.listeners);
    }

    /// How controls may call it.
    pub fn addressee(&self) -> Addressee {
        Addressee { role: self.settings.role, port: self.addr.port() }
    }

    /// Counts a request for this rank, or for the one whose turn it is.
    pub fn saw_rank(&self, rank: Option<u64>) {
        let turn = || self.next_rank.fetch_add(1, Relaxed) % self.settings.dp_size.max(1) as u64;
        self.counters.saw_rank(rank.unwrap_or_else(turn) as u32);
    }

    /// The id of each rank.
    pub fn engine_ids(&self) -> Vec<String> {
        let id = self.engine_id.lock().unwrap().clone();
        match self.settings.dp_size {
            0 | 1 => vec![id],
            n => (0..n).map(|rank| format!("{id}_dp{rank}")).collect(),
        }
    }

    /// The id of rank 0.
    pub fn engine_id(&self) -> String {
        self.engine_ids().swap_remove(0)
    }

    /// Takes a new engine id, and tells decode engines of it if it is one that they ask for caches.
    fn introduce(&self) {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let known = self.settings.is_mooncake_prefill();
        if known {
            pair::forget(&self.engine_ids());
        }
        let id = format!("mock-{}-{}", self.addr.port(), NEXT.fetch_add(1, Relaxed));
        *self.engine_id.lock().unwrap() = id;
        if known {
            let (ip, port) = (self.addr.ip(), self.bootstrap.map_or(pair::DEFAULT_BOOTSTRAP_PORT, |at| at.port()));
            pair::introduce(&self.engine_ids(), &format!("http://{}", SocketAddr::new(ip, port)));
        }
    }

    pub fn flush_cache(&self) {
        self.cache.lock().unwrap().clear();
    }

    /// Whether it says nothing of its load.
    pub fn keeps_its_load(&self) -> bool {
        *self.pretended.lock().unwrap() == Some(Pretended::Nothing)
    }

    /// Requests past the queue and requests in it.
    pub fn load(&self) -> (u64, u64) {
        let queued = match *self.pretended.lock().unwrap() {
            Some(Pretended::Load { waiting, .. }) => waiting,
            _ => self.counters.queued.load(Relaxed),
        };
        (self.counters.running.load(Relaxed), queued)
    }

    /// Tokens held and the fraction of the pretended KV cache that they are.
    pub fn usage(&self) -> (u64, f64) {
        if let Some(Pretended::Load { kv_usage, .. }) = *self.pretended.lock().unwrap() {
            return ((kv_usage * self.settings.kv_tokens as f64) as u64, kv_usage);
        }
        let held = self.held_tokens.load(Relaxed);
        (held, (held as f64 / self.settings.kv_tokens.max(1) as f64).min(1.0))
    }

    /// Aborts the requests of this id; true when there were any.
    pub fn abort(&self, rid: &str) -> bool {
        let found = self.aborts.lock().unwrap().get(rid).cloned().unwrap_or_default();
        found.iter().for_each(|a| a.set());
        !found.is_empty()
    }

    /// Aborts everything.
    pub fn abort_all(&self) {
        self.aborts.lock().unwrap().values().flatten().for_each(|a| a.set());
    }

    pub fn remember_response(&self, id: &str) {
        let mut responses = self.responses.lock().unwrap();
        if responses.len() == MAX_RESPONSES {
            responses.pop_front();
        }
        responses.push_back(id.to_owned());
    }

    pub fn made_response(&self, id: &str) -> bool {
        self.responses.lock().unwrap().iter().any(|r| r == id)
    }

    /// Takes a request in; it is inside until the visit is dropped.
    pub fn enter(self: &Arc<Self>, rid: String) -> Visit {
        let abort = Arc::new(Abort::default());
        self.aborts.lock().unwrap().entry(rid.clone()).or_default().push(abort.clone());
        let active = up(&self.counters.active);
        self.counters.peak.fetch_max(active, Relaxed);
        Visit { engine: self.clone(), rid, abort, place: None, stage: Stage::Idle, held: 0, finished: false }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.settings.is_mooncake_prefill() {
            pair::forget(&self.engine_ids());
        }
    }
}

/// A flag that `/abort_request` raises.
#[derive(Default)]
pub(super) struct Abort {
    raised: AtomicBool,
    notify: Notify,
}

impl Abort {
    fn set(&self) {
        self.raised.store(true, Relaxed);
        self.notify.notify_one(); // leaves a permit when nobody waits yet; only the visit's own task waits
    }

    fn is_set(&self) -> bool {
        self.raised.load(Relaxed)
    }

    async fn wait(&self) {
        while !self.is_set() {
            self.notify.notified().await;
        }
    }
}

/// A request was aborted through `/abort_request`.
#[derive(Debug)]
pub(super) struct Aborted;

#[derive(PartialEq)]
enum Stage {
    Idle,
    Queued,
    Running,
}

/// A request inside an engine. Its drop takes the request out, and counts it as aborted unless it was finished.
pub(super) struct Visit {
    engine: Arc<Inner>,
    rid: String,
    abort: Arc<Abort>,
    place: Option<OwnedSemaphorePermit>,
    stage: Stage,
    held: u64,
    finished: bool,
}

impl Visit {
    /// Waits for a place and works the prompt off; gives the tokens that the cache held.
    pub async fn prefill(&mut self, ask: &Ask) -> Result<usize, Aborted> {
        let abort = self.abort.clone();
        tokio::select! {
            biased;
            () = abort.wait() => Err(Aborted),
            cached = self.work_prompt_off(ask) => Ok(cached),
        }
    }

    async fn work_prompt_off(&mut self, ask: &Ask) -> usize {
        let engine = self.engine.clone();
        let arrival = Instant::now();
        up(&engine.counters.queued);
        self.stage = Stage::Queued;
        self.place = engine.places.clone().acquire_owned().await.ok();
        let mut unit = engine.prefill.lock().await;
        down(&engine.counters.queued);
        self.run(ask);

        let blocks = engine.cache.lock().unwrap().held(&ask.chain);
        let cached = (blocks * BLOCK_TOKENS).min(ask.prompt_tokens - 1); // the last token is always computed
        engine.counters.prompt_tokens.fetch_add(ask.prompt_tokens as u64, Relaxed);
        engine.counters.cached_tokens.fetch_add(cached as u64, Relaxed);
        let speed = engine.settings.prefill_tokens_per_sec;
        if speed > 0.0 {
            let cost = span_ms((ask.prompt_tokens - cached) as f64 * 1e3 / speed);
            let end = (*unit).max(arrival) + cost;
            let mut shift = Shift { free: &mut unit, end: None };
            if end > Instant::now() {
                sleep_until(end).await;
            }
            shift.end = Some(end);
        }
        drop(unit);
        engine.cache.lock().unwrap().hold(&ask.chain);
        cached
    }

    /// Waits for a place, for a request whose prompt another engine has worked off.
    pub async fn join(&mut self, ask: &Ask) -> Result<(), Aborted> {
        let engine = self.engine.clone();
        up(&engine.counters.queued);
        self.stage = Stage::Queued;
        self.place = self.unless_aborted(engine.places.clone().acquire_owned()).await?.ok();
        down(&engine.counters.queued);
        self.run(ask);
        Ok(())
    }

    /// Has left the queue.
    fn run(&mut self, ask: &Ask) {
        self.stage = Stage::Running;
        let running = up(&self.engine.counters.running);
        self.engine.counters.peak_running.fetch_max(running, Relaxed);
        self.hold(ask.prompt_tokens as u64);
    }

    /// Does something unless the request is aborted meanwhile.
    pub async fn unless_aborted<T>(&self, work: impl Future<Output = T>) -> Result<T, Aborted> {
        tokio::select! {
            biased;
            () = self.abort.wait() => Err(Aborted),
            done = work => Ok(done),
        }
    }

    /// Time of one decode step with the batch as it is now.
    pub fn step(&self) -> Duration {
        let s = &self.engine.settings;
        let running = self.engine.counters.running.load(Relaxed) as f64;
        span_ms(s.decode_step_ms + running * s.decode_step_per_seq_us / 1e3)
    }

    /// Sleeps until `when`, unless the request is aborted.
    pub async fn pause(&self, when: Instant) -> Result<(), Aborted> {
        self.unless_aborted(sleep_until(when)).await
    }

    /// Fails when the request was aborted.
    pub fn check(&self) -> Result<(), Aborted> {
        if self.abort.is_set() { Err(Aborted) } else { Ok(()) }
    }

    /// Counts `n` generated tokens.
    pub fn generated(&mut self, n: u64) {
        self.engine.counters.output_tokens.fetch_add(n, Relaxed);
        self.hold(n);
    }

    fn hold(&mut self, tokens: u64) {
        self.held += tokens;
        self.engine.held_tokens.fetch_add(tokens, Relaxed);
    }

    /// The answer is complete.
    pub fn finish(mut self) {
        self.finished = true;
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let c = &self.engine.counters;
        match self.stage {
            Stage::Idle => {}
            Stage::Queued => down(&c.queued),
            Stage::Running => down(&c.running),
        }
        self.engine.held_tokens.fetch_sub(self.held, Relaxed);
        let mut aborts = self.engine.aborts.lock().unwrap();
        if let Some(same) = aborts.get_mut(&self.rid) {
            same.retain(|a| !Arc::ptr_eq(a, &self.abort));
            if same.is_empty() {
                aborts.remove(&self.rid);
            }
        }
        if !self.finished {
            up(&c.aborted);
        }
        down(&c.active);
    }
}

/// A turn at the prefill unit: when it breaks off, the unit is free at that moment.
struct Shift<'a> {
    free: &'a mut Instant,
    end: Option<Instant>,
}

impl Drop for Shift<'_> {
    fn drop(&mut self) {
        *self.free = self.end.unwrap_or_else(Instant::now);
    }
}
