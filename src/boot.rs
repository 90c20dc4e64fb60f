//! Cores become lanes. The only place where the gateway's threads are born, and where they end.
//!
//! Takes a configuration, gives a running gateway or one line that says what to change. Never starts half:
//! ports, cores and the ring are tried before anything serves.

mod host;
mod lanes;

use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::config::{Config, Role};
use crate::control;
use crate::shared::Shared;
use crate::shared::drain::Phase;

/// Time that cut connections get to be torn down before the lanes end regardless.
const UNWIND: Duration = Duration::from_secs(1);

/// A running gateway.
pub struct Gateway {
    shared: &'static Shared,
    config: Arc<Config>,
    address: SocketAddr,
    admin: SocketAddr,
    lanes: Vec<JoinHandle<()>>,
    control: Option<JoinHandle<()>>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
}

impl Gateway {
    /// Starts lanes and control thread; returns once connections are accepted.
    ///
    /// # Errors
    /// One line for people: what failed and what to change.
    pub fn start(mut config: Config) -> Result<Gateway, String> {
        host::raise_nofile();
        host::report_nofile();
        let cores = host::lane_cores(&config.cores)?;
        host::try_files(cores.len())?;
        let mode = host::probe_ring()?;
        if config.max_connections_per_lane == 0 {
            config.max_connections_per_lane = host::connections_per_lane(cores.len());
        }
        let config = Arc::new(config);
        let listeners = host::listen(&config, cores.len())?;
        let address = listeners[0].local_addr().map_err(|e| format!("the listening address cannot be read: {e}"))?;
        let shared = Shared::leak_with(cores.len(), config.routing.prefix_memory_bytes);
        shared.admission.open(config.max_concurrent_requests, config.queue_size);
        shared.load.limit(config.max_requests_per_worker);
        shared.vitals.set_rules(config.breaker);
        if Role::ALL.iter().any(|role| config.policy_of(*role).wants_ring()) {
            shared.roster.make_rings();
        }

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
                    control::run(shared, config, ready, async move {
                        let _ = stopped.await;
                    });
                }
            })
            .map_err(|e| format!("the control thread could not be started: {e}"))?;
        let mut gateway = Gateway {
            shared,
            config,
            address,
            admin: address,
            lanes: Vec::new(),
            control: Some(control),
            stop: Some(stop),
        };
        match is_ready.recv() {
            Ok(Ok(admin)) => gateway.admin = admin,
            Ok(Err(e)) => return Err(e.to_string()),
            Err(_) => return Err("the control thread ended at start".into()),
        }
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
        tracing::info!(seconds = self.config.shutdown_settle.as_secs_f64(), "settling: /readiness says 503");
        std::thread::sleep(self.config.shutdown_settle);
        self.advance(Phase::Draining);
        tracing::info!(connections = self.connections(), "draining: no new connections");
        let until = Instant::now() + self.config.shutdown_grace;
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
pub fn run(config: Config) -> ExitCode {
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(&config.log_level))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // Complaints about a log that nobody reads would be printed there, which panics.
        .log_internal_errors(false)
        .try_init();
    host::raise_nofile();
    if let Err(line) = host::try_files(0) {
        return fail(&line);
    }
    let signals = match Signals::install() {
        Ok(signals) => signals,
        Err(e) => return fail(&format!("signals cannot be handled: {e}")),
    };
    let gateway = match Gateway::start(config) {
        Ok(gateway) => gateway,
        Err(line) => return fail(&line),
    };
    signals.first();
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
    let _ = writeln!(std::io::stderr(), "corelane: {line}");
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
