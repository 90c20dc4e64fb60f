//! The other plane: one thread that probes workers, serves the admin listener and alone writes the roster.
//!
//! Takes the configuration, gives lanes a roster, health and readiness through [`crate::shared`], and
//! operators metrics. Never touches a request, never makes a lane wait.

pub mod admin;
pub mod bootstrap;
pub mod exposition;
pub mod fetch;
pub mod fleet;
pub mod learn;
pub mod prefix;
pub mod probe;
pub mod resolve;
pub mod window;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::config::{Config, WorkerSpec};
use crate::shared::Shared;
use crate::shared::roster::{MOONCAKE_PORT, Slot};
use fetch::{Failure, Reply};
use fleet::{Fleet, Id, News};
use resolve::{Endpoint, same_addrs};

/// Threads that look names up: a look-up blocks, and a fleet's worth of threads would be too many.
const LOOKUP_THREADS: usize = 8;
/// News taken in before they are published together.
const BATCH: usize = 1024;

/// The control plane's own clockwork: what no option changes, but tests want faster.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// How long readiness waits for workers that were not probed yet.
    pub readiness_wait: Duration,
    /// Between tries for what is needed before a worker can be used: first success, models, addresses.
    pub eager: Duration,
    /// Longest pause between probes of an unhealthy worker.
    pub unhealthy_probe: Duration,
    /// Between look-ups of a name that resolves.
    pub look_up_again: Duration,
    /// How long a worker that answers its probe is kept out because its models are being asked for.
    pub learn_grace: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Pace {
            readiness_wait: Duration::from_secs(5),
            eager: Duration::from_secs(1),
            unhealthy_probe: Duration::from_secs(5),
            look_up_again: Duration::from_secs(30),
            learn_grace: Duration::from_secs(1),
        }
    }
}

/// Runs the control plane on the calling thread until `stop` completes. `ready` is told the admin listener's
/// address as soon as all configured workers are on the roster, or why there is no control plane; after an
/// error this returns.
pub fn run(
    shared: &'static Shared,
    config: Arc<Config>,
    ready: Sender<io::Result<SocketAddr>>,
    stop: impl Future<Output = ()>,
) {
    run_at(Pace::default(), shared, config, ready, stop);
}

/// [`run`] at another pace.
pub fn run_at(
    pace: Pace,
    shared: &'static Shared,
    config: Arc<Config>,
    ready: Sender<io::Result<SocketAddr>>,
    stop: impl Future<Output = ()>,
) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(LOOKUP_THREADS).build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(e) => return drop(ready.send(Err(e))),
    };
    runtime.block_on(serve(pace, shared, config, ready, stop));
    // A look-up that hangs in its thread must not hold up the exit.
    runtime.shutdown_background();
}

async fn serve(
    pace: Pace,
    shared: &'static Shared,
    config: Arc<Config>,
    ready: Sender<io::Result<SocketAddr>>,
    stop: impl Future<Output = ()>,
) {
    let bound = match admin::bind(config.metrics_host, config.metrics_port).await {
        Ok(listener) => listener.local_addr().map(|addr| (listener, addr)),
        Err(e) => Err(e),
    };
    let (listener, addr) = match bound {
        Ok(bound) => bound,
        Err(e) => return drop(ready.send(Err(e))),
    };
    let (news, mut inbox) = mpsc::unbounded_channel();
    let epoch = Instant::now();
    let mut fleet = Fleet::new(shared).dp_aware(config.dp_aware);
    let trimming = tokio::spawn(prefix::keep_trimming(shared, config.routing, epoch));
    let admin = tokio::spawn(admin::Admin::new(shared, fleet.bases(), fleet.notes()).serve(listener));
    for spec in &config.workers {
        welcome(&mut fleet, shared, pace, &config, spec, &news);
    }
    if is_open_with_keys(&config) {
        tracing::warn!(
            host = %config.host,
            "clients need no key (--api-key), and whoever reaches this address uses the workers' api keys: keep it behind a \
             firewall or a proxy that checks them"
        );
    }
    fleet.settle();
    // Nobody waits for the answer when boot has given up meanwhile; `stop` ends this then.
    let _ = ready.send(Ok(addr));

    let mut batch = Vec::with_capacity(BATCH);
    let mut pulse = interval(Duration::from_secs(1));
    pulse.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut patience = std::pin::pin!(sleep(pace.readiness_wait));
    let mut waiting = true;
    let mut stop = std::pin::pin!(stop);
    loop {
        tokio::select! {
            () = &mut stop => break,
            _ = inbox.recv_many(&mut batch, BATCH) => {
                for (id, news) in batch.drain(..) {
                    fleet.apply(id, news);
                }
                fleet.settle();
            }
            _ = pulse.tick() => fleet.second(epoch.elapsed().as_secs(), config.routing.manual_idle_secs),
            () = &mut patience, if waiting => {
                waiting = false;
                fleet.stop_waiting();
            }
        }
    }
    trimming.abort();
    admin.abort();
}

/// Whether anybody beyond this host may use the workers' keys without one of their own.
fn is_open_with_keys(config: &Config) -> bool {
    config.api_keys.is_empty()
        && !config.host.to_canonical().is_loopback()
        && config.workers.iter().any(|w| w.api_key.is_some())
}

/// Registers a worker and starts to look after it.
fn welcome(
    fleet: &mut Fleet,
    shared: &'static Shared,
    pace: Pace,
    config: &Arc<Config>,
    spec: &WorkerSpec,
    news: &Inbox,
) {
    let registered =
        fleet.register(spec).and_then(|id| Endpoint::parse(&spec.url).map(|e| (id, e)).map_err(fleet::Refusal::BadUrl));
    let (id, endpoint) = match registered {
        Ok(registered) => registered,
        Err(why) => {
            tracing::error!(worker = %spec.url, role = spec.role.name(), reason = %why, "worker not registered");
            return;
        }
    };
    let Some(slots) = fleet.members(id) else { return };
    let tended = Tended {
        id,
        slots,
        shared,
        url: spec.url.as_str().into(),
        endpoint,
        api_key: spec.api_key.as_deref().map(Into::into),
        health_endpoint: spec.health_endpoint.as_deref().unwrap_or(&config.health_endpoint).into(),
        health_timeout: spec.health_timeout.unwrap_or(config.health_timeout),
        ask_models: spec.models.is_empty(),
        ask_size: config.dp_aware && spec.dp_size.is_none(),
        bootstrap_port: fleet::needs_engine_id(spec).then(|| spec.bootstrap_port.unwrap_or(MOONCAKE_PORT)),
        config: config.clone(),
        pace,
        addrs: watch::Sender::new(None),
        asked: watch::Sender::new(0),
        answered: watch::Sender::new(None),
        news: news.clone(),
    };
    fleet.assign(id, tokio::spawn(tended.tend()).abort_handle());
}

type Inbox = mpsc::UnboundedSender<(Id, News)>;

/// A worker as its task sees it.
pub(crate) struct Tended {
    id: Id,
    /// Where the counts of its members live.
    slots: watch::Receiver<Box<[Slot]>>,
    shared: &'static Shared,
    url: Box<str>,
    endpoint: Endpoint,
    api_key: Option<Box<str>>,
    /// Where it is probed.
    health_endpoint: Box<str>,
    /// How long it may take to answer.
    health_timeout: Duration,
    ask_models: bool,
    /// Its data-parallel size has to be learnt.
    ask_size: bool,
    /// Where Mooncake's id of its engine is asked for, if it has to be.
    bootstrap_port: Option<u16>,
    config: Arc<Config>,
    pace: Pace,
    /// `None` before the first look-up has ended, empty when it failed.
    addrs: watch::Sender<Option<Arc<[SocketAddr]>>>,
    /// Round of learning that is wanted.
    asked: watch::Sender<u64>,
    /// Newest round whose first try has ended.
    answered: watch::Sender<Option<u64>>,
    news: Inbox,
}

impl Tended {
    async fn tend(self) {
        tokio::join!(
            self.keep_resolving(),
            probe::keep_probing(&self),
            learn::keep_learning(&self),
            bootstrap::keep_asking(&self)
        );
    }

    fn tell(&self, news: News) {
        // The inbox closes only when the thread is about to end.
        let _ = self.news.send((self.id, news));
    }

    /// Asks the worker for a path under its prefix.
    async fn get(&self, path: &str) -> Result<Reply, Failure> {
        let addrs = self.addrs.borrow().clone().unwrap_or_default();
        let path = format!("{}{path}", self.endpoint.prefix);
        fetch::get(&addrs, &self.endpoint.authority, &path, self.api_key.as_deref(), self.health_timeout).await
    }

    /// Returns when the first look-up has ended, well or not.
    async fn looked_up(&self) {
        let _ = self.addrs.subscribe().wait_for(Option::is_some).await;
    }

    /// Returns when there are addresses.
    async fn resolved(&self) {
        let _ = self.addrs.subscribe().wait_for(|a| a.as_ref().is_some_and(|a| !a.is_empty())).await;
    }

    /// Whether models have to be asked for at all.
    fn asks_models(&self) -> bool {
        self.ask_models
    }

    /// Has the worker's models asked for anew and waits a little for the first try to end.
    async fn learn_again(&self) {
        self.asked.send_modify(|round| *round += 1);
        let wanted = *self.asked.borrow();
        let mut answered = self.answered.subscribe();
        let _ = timeout(self.pace.learn_grace, answered.wait_for(|a| a.is_some_and(|a| a >= wanted))).await;
    }

    /// Requests of clients that the worker has answered well so far.
    fn successes(&self) -> u64 {
        self.slots.borrow().iter().map(|&slot| fleet::successes(self.shared, slot)).sum()
    }

    async fn keep_resolving(&self) {
        if let Some(addr) = self.endpoint.literal() {
            // The roster has it since registration.
            self.addrs.send_replace(Some([addr].into()));
            return;
        }
        let mut complained = false;
        loop {
            let known = self.addrs.borrow().clone().unwrap_or_default();
            match self.endpoint.look_up().await {
                Ok(found) => {
                    complained = false;
                    if !same_addrs(&known, &found) {
                        self.tell(News::Addrs(found.clone()));
                        self.addrs.send_replace(Some(found.into()));
                    }
                    sleep(self.pace.look_up_again).await;
                }
                Err(e) => {
                    if !std::mem::replace(&mut complained, true) {
                        tracing::warn!(worker = %self.url, reason = %e, "host name of the worker does not resolve");
                    }
                    self.tell(News::Waits(format!("its host name does not resolve: {e}")));
                    self.addrs.send_if_modified(|addrs| {
                        let first = addrs.is_none();
                        addrs.get_or_insert_default();
                        first
                    });
                    sleep(self.pace.eager).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Secret;

    #[test]
    fn open_doors_are_warned_of_only_where_there_are_keys() {
        let mut config = Config::with_workers(vec![WorkerSpec::new("http://a:1")]);
        for (host, key, warns) in [
            ("0.0.0.0", None, false),
            ("0.0.0.0", Some("k"), true),
            ("::", Some("k"), true),
            ("10.0.0.1", Some("k"), true),
            ("127.0.0.1", Some("k"), false),
            ("::1", Some("k"), false),
            ("::ffff:127.0.0.1", Some("k"), false),
        ] {
            config.host = host.parse().expect("an address");
            config.workers[0].api_key = key.map(str::to_owned);
            assert_eq!(is_open_with_keys(&config), warns, "{host} {key:?}");
            let asks = Config { api_keys: vec![Secret::new("ours")], ..config.clone() };
            assert!(!is_open_with_keys(&asks), "{host} {key:?}");
        }
    }
}
