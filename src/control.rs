//! The other plane: one thread that probes workers, reads the configuration again, serves the admin listener and alone
//! writes the roster. The access log's lines are written here too, by a thread of their own.
//!
//! Takes the configuration and commands, gives lanes a roster, settings, health and readiness through [`crate::shared`],
//! and operators metrics. Never touches a request, never makes a lane wait.

pub mod access_log;
pub mod admin;
pub mod bootstrap;
pub mod command;
mod expand;
pub mod exposition;
pub mod fanout;
pub mod fetch;
pub mod fleet;
pub mod learn;
pub mod load_monitor;
pub mod load_report;
pub mod merge;
pub mod page;
pub mod prefix;
pub mod probe;
pub mod reload;
pub mod resolve;
pub mod standard_error;
pub mod stats;
pub mod window;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep, sleep_until, timeout};

use crate::config::{Config, Engine, Role, WorkerSpec};
use crate::shared::Shared;
use crate::shared::roster::{MOONCAKE_PORT, Slot};
use crate::shared::vitals::Health;
use command::Commands;
use expand::Names;
use fetch::{Failure, Question, Reply};
use fleet::{Fleet, Id, News};
use load_monitor::Monitor;
use reload::{Reloadable, Reloader, Report};
use resolve::{Endpoint, same_addrs};

/// Threads for what blocks: one a look-up, and some for files, which do not wait for the name service.
const BLOCKING_THREADS: usize = resolve::LOOKUPS + 2;
/// News, or commands, taken in before they are published together.
const BATCH: usize = 1024;
/// Between looks at workers that drain.
const DRAIN_LOOK: Duration = Duration::from_millis(20);
/// A publication that took some time is followed by the next one after so many times as long, at the earliest: with
/// thousands of workers it takes milliseconds, and a fleet that is registered one by one would pay them for each.
const REST_AFTER_PUBLISHING: u32 = 4;
/// And by then at the latest.
const MOST_REST: Duration = Duration::from_millis(250);

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
    /// The age up to which an engine's word on its load counts in any case.
    pub load_counts: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Pace {
            readiness_wait: Duration::from_secs(5),
            eager: Duration::from_secs(1),
            unhealthy_probe: Duration::from_secs(5),
            look_up_again: Duration::from_secs(30),
            learn_grace: Duration::from_secs(1),
            load_counts: Duration::from_secs(10),
        }
    }
}

/// A control plane that runs.
#[derive(Clone, Debug)]
pub struct Running {
    /// Address of the admin listener.
    pub admin: SocketAddr,
    /// By which it is told what to do.
    pub commands: Commands,
}

/// Runs the control plane on the calling thread until `stop` completes. `ready` is told as soon as all configured
/// workers are on the roster, or why there is no control plane; after an error this returns.
pub fn run(
    shared: &'static Shared,
    config: Arc<Config>,
    ready: Sender<io::Result<Running>>,
    stop: impl Future<Output = ()>,
) {
    run_at(Pace::default(), shared, config, ready, stop);
}

/// [`run`] in a process that reads its configuration again when it is told to, or when the files have changed.
pub fn run_reloadable(
    shared: &'static Shared,
    config: Arc<Config>,
    reloadable: Reloadable,
    ready: Sender<io::Result<Running>>,
    stop: impl Future<Output = ()>,
) {
    run_with(Pace::default(), shared, config, Some(reloadable), ready, stop);
}

/// [`run`] at another pace.
pub fn run_at(
    pace: Pace,
    shared: &'static Shared,
    config: Arc<Config>,
    ready: Sender<io::Result<Running>>,
    stop: impl Future<Output = ()>,
) {
    run_with(pace, shared, config, None, ready, stop);
}

fn run_with(
    pace: Pace,
    shared: &'static Shared,
    config: Arc<Config>,
    reloadable: Option<Reloadable>,
    ready: Sender<io::Result<Running>>,
    stop: impl Future<Output = ()>,
) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(BLOCKING_THREADS).build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(e) => return drop(ready.send(Err(e))),
    };
    runtime.block_on(serve(pace, shared, config, reloadable, ready, stop));
    // A look-up that hangs in its thread must not hold up the exit.
    runtime.shutdown_background();
}

async fn serve(
    pace: Pace,
    shared: &'static Shared,
    config: Arc<Config>,
    reloadable: Option<Reloadable>,
    ready: Sender<io::Result<Running>>,
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
    let (commands, mut told) = command::channel();
    let epoch = Instant::now();
    let fleet = Fleet::new(shared).dp_aware(config.dp_aware);
    let (newest, follows) = watch::channel(config.clone());
    let (names, mut resolved) = Names::new(pace);
    let mut plane = Plane { shared, pace, epoch, config, newest, names, listed: HashMap::new(), fleet, news };
    let mut monitor = Monitor::default();
    let trimming = tokio::spawn(prefix::keep_trimming(shared, follows.clone(), epoch));
    let report = Report::default();
    let admin = admin::Admin::new(shared, follows, plane.fleet.bases(), commands.clone(), report.clone());
    let admin = tokio::spawn(admin.serve(listener));
    let reopening = tokio::spawn(access_log::keep_reopening(shared));
    plane.begin();
    warn_of_open_doors(&plane.config);
    plane.fleet.settle();
    let mut reloader = reloadable.map(|reloadable| Reloader::start(shared, reloadable, report));
    // Nobody waits for the answer when boot has given up meanwhile; `stop` ends this then.
    let _ = ready.send(Ok(Running { admin: addr, commands }));

    let (mut batch, mut orders) = (Vec::with_capacity(BATCH), Vec::new());
    let [mut pulse, mut looks, mut loads] = [Duration::from_secs(1), DRAIN_LOOK, load_monitor::LOOK].map(interval);
    pulse.set_missed_tick_behavior(MissedTickBehavior::Delay);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loads.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut patience = std::pin::pin!(sleep(pace.readiness_wait));
    let mut waiting = true;
    let (mut unsettled, mut rested) = (false, tokio::time::Instant::now());
    let mut stop = std::pin::pin!(stop);
    loop {
        tokio::select! {
            () = &mut stop => break,
            _ = inbox.recv_many(&mut batch, BATCH) => {
                for (id, news) in batch.drain(..) {
                    plane.fleet.apply(id, news);
                }
                unsettled = true;
            }
            // The admin listener keeps the channel open.
            _ = told.recv_many(&mut orders, BATCH) => {
                for order in orders.drain(..) {
                    plane.obey(order);
                }
                unsettled = true;
            }
            // The plane keeps the channel open.
            Some(found) = resolved.recv() => unsettled |= plane.found(found),
            _ = looks.tick(), if plane.fleet.is_draining() => unsettled |= plane.end_drains(),
            _ = loads.tick(), if monitor.is_busy(&plane.config) => {
                monitor.look(shared, &plane.config, epoch.elapsed().as_secs() as u32, pace.load_counts);
            }
            _ = pulse.tick() => plane.fleet.second(epoch.elapsed().as_secs(), plane.config.routing.manual_idle_secs),
            () = &mut patience, if waiting => {
                waiting = false;
                plane.fleet.stop_waiting();
            }
            reading = reload::next(&mut reloader) => {
                if let Some(reloader) = &mut reloader
                    && let Some((config, found)) = reloader.judge(reading)
                {
                    plane.renew(config, found);
                    reloader.applied();
                    unsettled = false;
                }
            }
            () = sleep_until(rested), if unsettled => {}
        }
        let now = tokio::time::Instant::now();
        if unsettled && now >= rested {
            plane.fleet.settle();
            unsettled = false;
            rested = tokio::time::Instant::now() + (now.elapsed() * REST_AFTER_PUBLISHING).min(MOST_REST);
        }
    }
    reopening.abort();
    trimming.abort();
    admin.abort();
}

fn warn_of_open_doors(config: &Config) {
    if is_open_with_keys(config) {
        tracing::warn!(
            host = %config.host,
            "clients need no key (--api-key), and whoever reaches this address uses the workers' api keys: keep it behind a \
             firewall or a proxy that checks them"
        );
    }
}

/// Whether anybody beyond this host may use the workers' keys without one of their own.
fn is_open_with_keys(config: &Config) -> bool {
    config.api_keys.is_empty()
        && !config.host.to_canonical().is_loopback()
        && config.workers.iter().any(|w| w.api_key.is_some())
}

/// The workers and what looks after them.
pub(crate) struct Plane {
    shared: &'static Shared,
    pace: Pace,
    /// When the plane began.
    epoch: Instant,
    config: Arc<Config>,
    /// The same, for who follows it.
    newest: watch::Sender<Arc<Config>>,
    names: Names,
    /// What the configuration said of its workers when they were last made to be so.
    listed: HashMap<(String, Role), WorkerSpec>,
    fleet: Fleet,
    news: Inbox,
}

impl Plane {
    /// Registers the configured workers.
    fn begin(&mut self) {
        self.names.follow(&self.config.workers);
        for spec in &self.names.workers(&self.config.workers) {
            match self.fleet.register(spec) {
                Ok(id) => {
                    self.listed.insert((spec.url.clone(), spec.role), spec.clone());
                    self.tend(id);
                }
                Err(why) => {
                    tracing::error!(worker = %spec.url, role = spec.role.name(), reason = %why, "worker not registered");
                }
            }
        }
    }

    /// Starts to look after a worker, or starts anew.
    fn tend(&mut self, id: Id) {
        let Plane { shared, pace, epoch, ref config, ref newest, ref mut fleet, ref news, .. } = *self;
        let Some((slots, spec)) = fleet.members(id).zip(fleet.spec(id)) else { return };
        // It was parsed when the worker was registered.
        let Ok(endpoint) = Endpoint::parse(&spec.url) else { return };
        let tended = Tended {
            id,
            slots,
            shared,
            url: spec.url.as_str().into(),
            endpoint,
            api_key: spec.api_key.as_deref().map(Into::into),
            health_endpoint: spec.health_endpoint.as_deref().unwrap_or(&config.health_endpoint).into(),
            health_timeout: spec.health_timeout.unwrap_or(config.health_timeout),
            health_interval: spec.health_interval.unwrap_or(config.health_interval),
            thresholds: (
                spec.health_failures.unwrap_or(config.health_failures),
                spec.health_successes.unwrap_or(config.health_successes),
            ),
            verdict: fleet.verdict(id),
            ask_models: spec.models.is_empty(),
            ask_size: config.dp_aware && spec.dp_size.is_none(),
            bootstrap_port: fleet::needs_engine_id(spec).then(|| spec.bootstrap_port.unwrap_or(MOONCAKE_PORT)),
            config: config.clone(),
            newest: newest.subscribe(),
            engine: spec.backend.engine(),
            epoch,
            pace,
            addrs: watch::Sender::new(fleet.addrs(id)),
            asked: watch::Sender::new(0),
            answered: watch::Sender::new(None),
            news: news.clone(),
        };
        fleet.assign(id, tokio::spawn(tended.tend()).abort_handle());
    }
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
    /// Between probes.
    health_interval: Duration,
    /// Failures and successes in a row that flip it.
    thresholds: (u32, u32),
    /// What its probes have come to before this task began.
    verdict: Health,
    ask_models: bool,
    /// Its data-parallel size has to be learnt.
    ask_size: bool,
    /// Where Mooncake's id of its engine is asked for, if it has to be.
    bootstrap_port: Option<u16>,
    config: Arc<Config>,
    /// The configuration in effect.
    newest: watch::Receiver<Arc<Config>>,
    engine: Engine,
    epoch: Instant,
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
            bootstrap::keep_asking(&self),
            load_monitor::keep_asking(&self)
        );
    }

    fn tell(&self, news: News) {
        // The inbox closes only when the thread is about to end.
        let _ = self.news.send((self.id, news));
    }

    /// Asks the worker for a path under its prefix.
    async fn get(&self, path: &str) -> Result<Reply, Failure> {
        let addrs = self.addrs.borrow().clone().unwrap_or_default();
        let question = Question {
            addrs: &addrs,
            authority: &self.endpoint.authority,
            path: &format!("{}{path}", self.endpoint.prefix),
            api_key: self.api_key.as_deref(),
            limit: self.health_timeout,
        };
        question.get().await
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
    use crate::config::{Secret, WorkerSpec};

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

    /// An engine that answers everything with 200.
    async fn engine() -> SocketAddr {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = listener.local_addr().expect("its address");
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.read(&mut [0; 1024]).await;
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
            }
        });
        addr
    }

    #[test]
    fn a_worker_that_is_tended_anew_keeps_the_addresses_that_it_has() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let addr = engine().await;
            // A name that no name service knows any more.
            let spec = WorkerSpec {
                models: vec!["m".into()],
                ..WorkerSpec::new(format!("http://gone.invalid:{}", addr.port()))
            };
            let shared = Shared::leak(1);
            let mut fleet = Fleet::new(shared);
            let id = fleet.register(&spec).expect("a slot");
            fleet.apply(id, News::Addrs([addr].into()));
            let mut config = Config::with_workers(Vec::new());
            (config.health_failures, config.health_interval) = (1, Duration::from_millis(1));
            let (news, mut inbox) = mpsc::unbounded_channel();
            let (config, pace) = (Arc::new(config), Pace::default());
            let newest = watch::Sender::new(config.clone());
            let names = Names::new(pace).0;
            let (epoch, listed) = (Instant::now(), HashMap::new());
            let mut plane = Plane { shared, pace, epoch, config, newest, names, listed, fleet, news };
            plane.tend(id);
            // Nothing but a probe, of the addresses from before, lets it in.
            let told = async {
                while let Some((_, news)) = inbox.recv().await {
                    match news {
                        News::Health(health, why) => return (health, why),
                        _ => continue,
                    }
                }
                unreachable!("its task lives")
            };
            let (health, why) = timeout(Duration::from_secs(20), told).await.expect("a verdict");
            assert_eq!(health, Health::Ready, "{why}");
        });
        // The name is still being looked up, perhaps.
        runtime.shutdown_background();
    }
}
