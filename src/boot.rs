//! Cores become lanes. The only place where the gateway's threads are born, and where they end.
//!
//! Takes a configuration, gives a running gateway or one line that says what to change. Never starts half:
//! ports, cores and the ring are tried before anything serves.

pub(crate) mod host;
mod lanes;
mod log;
pub mod notify;

use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tracing_subscriber::EnvFilter;

use crate::config::{Config, Loaded, Source};
use crate::control;
use crate::control::reload::Reloadable;
use crate::control::standard_error::StandardError;
use crate::shared::Shared;
use crate::shared::drain::Phase;

/// Time that cut connections get to be torn down before the lanes end regardless.
const UNWIND: Duration = Duration::from_secs(1);

/// Makes what the control thread needs to read the configuration again, around what the host decides.
type MakeReloadable = Box<dyn FnOnce(Box<dyn Fn(&mut Config) + Send>) -> Reloadable + Send>;

/// A running gateway.
pub struct Gateway {
    shared: &'static Shared,
    config: Arc<Config>,
    address: SocketAddr,
    admin: SocketAddr,
    commands: control::command::Commands,
    lanes: Vec<JoinHandle<()>>,
    control: Option<JoinHandle<()>>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    /// The access log's writer, if there is one.
    log: Option<log::Log>,
}

impl Gateway {
    /// Starts lanes and control thread; returns once connections are accepted.
    ///
    /// # Errors
    /// One line for people: what failed and what to change.
    pub fn start(config: Config) -> Result<Gateway, String> {
        Gateway::begin(config, None)
    }

    /// The same for a gateway that reads its configuration again on SIGHUP and when its files have changed; `log` changes
    /// what is logged, `reloading` is told when that begins and when it is done.
    ///
    /// # Errors
    /// See [`Gateway::start`].
    pub fn start_reloadable(
        loaded: Loaded,
        source: Source,
        log: impl Fn(&str) + Send + 'static,
        reloading: impl Fn(bool) + Send + 'static,
    ) -> Result<Gateway, String> {
        let config = loaded.config.clone();
        let (log, reloading) = (Box::new(log), Box::new(reloading));
        let make = |finish| Reloadable { source, loaded, finish, log, reloading };
        Gateway::begin(config, Some(Box::new(make)))
    }

    fn begin(mut config: Config, reloadable: Option<MakeReloadable>) -> Result<Gateway, String> {
        host::raise_nofile();
        host::report_nofile();
        let cores = host::lane_cores(&config.cores)?;
        host::try_files(cores.len())?;
        let mode = host::probe_ring()?;
        let lanes = cores.len();
        let finish = move |config: &mut Config| {
            if config.max_connections_per_lane == 0 {
                config.max_connections_per_lane = host::connections_per_lane(lanes);
            }
        };
        finish(&mut config);
        let config = Arc::new(config);
        let listeners = host::listen(&config, cores.len())?;
        let address = listeners[0].local_addr().map_err(|e| format!("the listening address cannot be read: {e}"))?;
        let shared = Shared::leak_with(cores.len(), config.routing.prefix_memory_bytes);
        shared.limit_requests(config.max_concurrent_requests, config.queue_size);
        shared.settings.publish(&config);
        shared.load.limit(config.max_requests_per_worker);
        shared.vitals.set_rules(config.breaker);
        if config.wants_rings() {
            shared.roster.make_rings();
        }

        let log = log::Log::start(shared, &config, cores.len())?;
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (ready, is_ready) = mpsc::channel();
        let control_core = host::control_core(config.control_core, &cores)?;
        let control = std::thread::Builder::new()
            .name("control".into())
            .spawn({
                let config = config.clone();
                move || {
                    if let Some(id) = control_core
                        && !core_affinity::set_for_current(core_affinity::CoreId { id })
                    {
                        tracing::warn!(core = id, "the control thread could not be pinned");
                    }
                    let stop = async move {
                        let _ = stopped.await;
                    };
                    match reloadable.map(|make| make(Box::new(finish))) {
                        Some(reloadable) => control::run_reloadable(shared, config, reloadable, ready, stop),
                        None => control::run(shared, config, ready, stop),
                    }
                }
            })
            .map_err(|e| format!("the control thread could not be started: {e}"))?;
        let control::Running { admin, commands } = match is_ready.recv() {
            Ok(Ok(running)) => running,
            Ok(Err(e)) => return Err(e.to_string()),
            Err(_) => return Err("the control thread ended at start".into()),
        };
        let mut gateway = Gateway {
            shared,
            config,
            address,
            admin,
            commands,
            lanes: Vec::new(),
            control: Some(control),
            stop: Some(stop),
            log,
        };
        gateway.lanes = lanes::start(shared, &gateway.config, &cores, listeners)?;
        tracing::info!(
            address = %gateway.address,
            admin = %gateway.admin,
            lanes = cores.len(),
            cores = ?cores,
            control_core = %control_core.map_or("none".to_owned(), |core| core.to_string()),
            connections_per_lane = gateway.config.max_connections_per_lane,
            ring = mode.name(),
            workers = gateway.config.workers.len(),
            "corelane serves"
        );
        Ok(gateway)
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where metrics and the worker list are.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// By which workers are managed.
    pub fn commands(&self) -> &control::command::Commands {
        &self.commands
    }

    /// The process's shared state.
    pub fn shared(&self) -> &'static Shared {
        self.shared
    }

    /// Moves on in the order of a drain and tells every lane.
    fn advance(&self, phase: Phase) {
        self.shared.drain.advance(phase);
        for lane in 0..self.lanes.len() {
            self.shared.handover.ring(lane);
        }
    }

    /// Client connections of all lanes.
    fn connections(&self) -> u32 {
        (0..self.lanes.len()).map(|l| self.shared.handover.connections(l)).sum()
    }

    /// Readiness 503, a settle time, no new connections, what is in flight is finished up to the grace period;
    /// then everything ends. True when nothing had to be cut.
    pub fn drain(mut self) -> bool {
        self.advance(Phase::Settling);
        let (settle, grace) = match self.shared.settings.newest() {
            Some(newest) => (newest.config.shutdown_settle, newest.config.shutdown_grace),
            None => (self.config.shutdown_settle, self.config.shutdown_grace),
        };
        tracing::info!(seconds = settle.as_secs_f64(), "settling: /readiness says 503");
        std::thread::sleep(settle);
        self.advance(Phase::Draining);
        tracing::info!(connections = self.connections(), "draining: no new connections");
        let until = Instant::now() + grace;
        // A prefill may go on when its request has ended.
        while (self.connections() > 0 || self.in_flight() > 0) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        let cut = self.connections();
        if cut > 0 {
            tracing::warn!(connections = cut, "the grace period is over: cutting what is left");
        }
        self.end();
        cut == 0
    }

    /// Requests that hold a place on a worker.
    fn in_flight(&self) -> u64 {
        let workers = &self.shared.roster.snapshot().workers;
        workers.iter().map(|worker| u64::from(self.shared.load.word(worker.slot).in_flight())).sum()
    }

    fn end(&mut self) {
        self.advance(Phase::Ending);
        for lane in self.lanes.drain(..) {
            let _ = lane.join();
        }
        // What the lanes had to say is written.
        if let Some(log) = self.log.take() {
            log.end();
        }
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(control) = self.control.take() {
            let _ = control.join();
        }
    }
}

impl Drop for Gateway {
    /// Ends at once; what is in flight is cut.
    fn drop(&mut self) {
        self.end();
    }
}

/// Serves until a signal, then drains. A second signal ends the process at once.
pub fn run(loaded: Loaded, source: Source) -> ExitCode {
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(&loaded.config.log_level))
        .with_writer(|| StandardError)
        .with_ansi(std::io::stderr().is_terminal())
        // Complaints about a log that nobody reads would be printed there, which panics.
        .log_internal_errors(false)
        .with_filter_reloading();
    let filter = subscriber.reload_handle();
    let _ = subscriber.try_init();
    // It fails only where the subscriber is gone.
    let log = move |levels: &str| drop(filter.reload(EnvFilter::new(levels)));
    host::raise_nofile();
    if let Err(line) = host::try_files(0) {
        return fail(&line);
    }
    let signals = match Signals::install() {
        Ok(signals) => signals,
        Err(e) => return fail(&format!("signals cannot be handled: {e}")),
    };
    // Of reloads the manager hears while the gateway serves: not before it is ready, nor when it is told to stop.
    // Relaxed: nothing is ordered by it, and a message more or less does no harm.
    let serves = Arc::new(AtomicBool::new(false));
    let (manager, is_serving) = (notify::Manager::of_process(), serves.clone());
    let reloading = move |begins: bool| match is_serving.load(Relaxed) {
        true if begins => manager.reloading(),
        true => manager.ready("serving"),
        false => {}
    };
    let gateway = match Gateway::start_reloadable(loaded, source, log, reloading) {
        Ok(gateway) => gateway,
        Err(line) => return fail(&line),
    };
    let manager = notify::Manager::of_process();
    manager.ready(&format!("serving {} with {} lanes", gateway.address, gateway.lanes.len()));
    serves.store(true, Relaxed);
    notify::keep_watch(notify::Manager::of_process(), gateway.shared);
    signals.first();
    serves.store(false, Relaxed);
    manager.stopping();
    signals.exit_on_second();
    gateway.drain();
    tracing::info!("corelane ends");
    ExitCode::SUCCESS
}

fn fail(line: &str) -> ExitCode {
    say(line);
    ExitCode::from(1)
}

/// A line for whoever started the process. Printing would panic where nobody reads any more.
fn say(line: &str) {
    let _ = StandardError.write_all(format!("corelane: {line}\n").as_bytes());
}

/// From now on SIGHUP and SIGUSR1 do not end the process, as they would by default: they may come before what they ask
/// for can be done. Where they cannot be handled, that is told later.
pub fn outlive_requests() {
    use tokio::signal::unix::{SignalKind, signal};
    host::raise_nofile();
    if host::try_files(0).is_err() {
        return;
    }
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
    let _inside = runtime.enter();
    // A handler stays when nobody listens any more.
    [SignalKind::hangup(), SignalKind::user_defined1()].into_iter().for_each(|kind| drop(signal(kind)));
}

/// SIGTERM and SIGINT, as a channel.
pub struct Signals(mpsc::Receiver<i32>);

impl Signals {
    /// Starts the thread that listens for them.
    ///
    /// # Errors
    /// When the handlers cannot be installed.
    pub fn install() -> std::io::Result<Signals> {
        use tokio::signal::unix::{SignalKind, signal};
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (send, receive) = mpsc::channel();
        let (mut term, mut int) = {
            let _inside = runtime.enter();
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?)
        };
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            runtime.block_on(async {
                loop {
                    let number = tokio::select! { _ = term.recv() => 15, _ = int.recv() => 2 };
                    if send.send(number).is_err() {
                        return;
                    }
                }
            });
        })?;
        Ok(Signals(receive))
    }

    /// Waits for the first signal.
    pub fn first(&self) {
        let _ = self.0.recv();
    }

    /// Waits for a signal up to `time`; whether one came.
    pub fn within(&self, time: Duration) -> bool {
        self.0.recv_timeout(time).is_ok()
    }

    /// From now on a signal ends the process at once, with the shell's code for it.
    pub fn exit_on_second(self) {
        let wait = move || {
            if let Ok(number) = self.0.recv() {
                say("second signal, ending at once");
                std::process::exit(128 + number);
            }
        };
        // Where no thread can be had, the drain goes on without it.
        let _ = std::thread::Builder::new().name("second-signal".into()).spawn(wait);
    }
}
