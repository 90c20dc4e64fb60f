//! What the user may set: one row an option, from which flags, environment, file, `--help` and docs derive.
//!
//! Takes arguments, environment and a TOML file, gives one [`Config`] or every mistake at once. Never starts
//! anything and never reads the clock.

mod breaker;
mod discovery;
pub mod environment;
pub mod fields;
pub mod flags;
mod given;
pub mod help;
mod load;
mod mistakes;
pub mod options;
mod print;
pub mod routes;
mod routing;
mod source;
mod tables;
mod toml;
mod values;
mod worker_url;
mod workers;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

pub use breaker::Breaker;
pub use discovery::is_workers_file;
pub use load::{Loaded, Setting, load};
pub use mistakes::{Mistake, Origin, Wrong, nearest, quote};
pub use routing::{Assignment, BalanceMode, Policy, Routing, Secret};
pub use source::{Disk, Files, Kept, Source};
pub use values::{choice, parse_cores};
pub use worker_url::WorkerUrl;

/// What a worker is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Serves whole requests.
    Regular,
    /// Computes prompts of pairs.
    Prefill,
    /// Generates tokens of pairs.
    Decode,
}

impl Role {
    /// All of them, in the order of their names.
    pub const ALL: [Role; 3] = [Role::Regular, Role::Prefill, Role::Decode];

    /// Lower-case name, as in labels and the admin API.
    pub const fn name(self) -> &'static str {
        match self {
            Role::Regular => "regular",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
}

/// How the two workers of a pair hand a prompt's cache over, which decides what they are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Backend {
    /// SGLang: both are sent the request at once, and meet in a bootstrap room.
    #[default]
    Sglang,
    /// vLLM with the NIXL connector: the prefill worker first; what it answers goes to the decode worker.
    VllmNixl,
    /// vLLM with the Mooncake connector: both at once, with a common transfer id.
    VllmMooncake,
}

impl Backend {
    /// What an engine and, for vLLM, its connector come to.
    pub const fn of(engine: Engine, connector: Connector) -> Backend {
        match (engine, connector) {
            (Engine::Sglang, _) => Backend::Sglang,
            (Engine::Vllm, Connector::Nixl) => Backend::VllmNixl,
            (Engine::Vllm, Connector::Mooncake) => Backend::VllmMooncake,
        }
    }

    /// The engine alone.
    pub const fn engine(self) -> Engine {
        match self {
            Backend::Sglang => Engine::Sglang,
            Backend::VllmNixl | Backend::VllmMooncake => Engine::Vllm,
        }
    }

    /// vLLM's connector.
    pub const fn connector(self) -> Option<Connector> {
        match self {
            Backend::Sglang => None,
            Backend::VllmNixl => Some(Connector::Nixl),
            Backend::VllmMooncake => Some(Connector::Mooncake),
        }
    }

    /// Lower-case name, as in the admin API and in mistakes.
    pub const fn name(self) -> &'static str {
        match self {
            Backend::Sglang => "sglang",
            Backend::VllmNixl => "vllm_nixl",
            Backend::VllmMooncake => "vllm_mooncake",
        }
    }
}

/// Which engine a worker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    Sglang,
    Vllm,
}

impl Engine {
    /// Both, in the order of [`Engine::NAMES`].
    pub const ALL: &'static [Engine] = &[Engine::Sglang, Engine::Vllm];
    /// Their names in the configuration.
    pub const NAMES: &'static [&'static str] = &["sglang", "vllm"];
}

/// By what vLLM hands the cache of a prompt over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connector {
    Nixl,
    Mooncake,
}

impl Connector {
    /// Both, in the order of [`Connector::NAMES`].
    pub const ALL: &'static [Connector] = &[Connector::Nixl, Connector::Mooncake];
    /// Their names in the configuration.
    pub const NAMES: &'static [&'static str] = &["nixl", "mooncake"];
}

/// What becomes of a pair's requests when their client has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientLeaves {
    /// Both are ended at once.
    Close,
    /// The prefill worker's may come to its end first: closing it in the middle of handing the cache over leaks memory
    /// in some engines. With vLLM and NIXL the decode worker is then asked, and left, so that it frees what waits.
    FinishPrefill,
}

impl ClientLeaves {
    /// Both, in the order of [`ClientLeaves::NAMES`].
    pub const ALL: &'static [ClientLeaves] = &[ClientLeaves::Close, ClientLeaves::FinishPrefill];
    /// Their names in the configuration.
    pub const NAMES: &'static [&'static str] = &["close", "finish_prefill"];
}

/// What a client's FIN means while its request is being served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalfClose {
    /// The client left: the upstream is closed at once (default; a closed socket looks the same).
    Abort,
    /// The client only stopped sending: it is served.
    Serve,
}

impl HalfClose {
    /// Both, in the order of [`HalfClose::NAMES`].
    pub const ALL: &'static [HalfClose] = &[HalfClose::Abort, HalfClose::Serve];
    /// Their names in the configuration.
    pub const NAMES: &'static [&'static str] = &["abort", "serve"];
}

/// How further attempts are made, besides how many.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Retry {
    /// Statuses of workers that are tried elsewhere.
    pub statuses: Vec<u16>,
    /// Requests that may have begun at a worker are tried again: it broke off or stayed silent before it answered.
    pub unanswered: bool,
    /// Pause before the second attempt.
    pub backoff: Duration,
    /// Longest pause, and the longest that a worker may ask for.
    pub backoff_max: Duration,
    /// Factor from one pause to the next.
    pub backoff_factor: f64,
    /// Part of a pause by which it is longer or shorter at random.
    pub jitter: f64,
    /// Attempts that may be added, as a share of the requests.
    pub budget: f64,
}

/// Which requests have a line in the access log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessLog {
    /// None.
    Off,
    /// Those that were answered with a status from 400 on, or that ended otherwise than well.
    Errors,
    /// Those, and a sample of the others.
    Sampled,
    /// All.
    All,
}

impl AccessLog {
    /// All of them, in the order of [`AccessLog::NAMES`].
    pub const ALL: &'static [AccessLog] = &[AccessLog::Off, AccessLog::Errors, AccessLog::Sampled, AccessLog::All];
    /// Their names in the configuration.
    pub const NAMES: &'static [&'static str] = &["off", "errors", "sampled", "all"];
}

/// What a line of the access log looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessFormat {
    /// An object of JSON.
    Json,
    /// `name=value` pairs.
    Text,
}

impl AccessFormat {
    /// Both, in the order of [`AccessFormat::NAMES`].
    pub const ALL: &'static [AccessFormat] = &[AccessFormat::Json, AccessFormat::Text];
    /// Their names in the configuration.
    pub const NAMES: &'static [&'static str] = &["json", "text"];
}

/// How answers pass from workers to clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relay {
    /// What is known to be large is moved by the kernel, the rest is copied.
    Auto,
    /// Every byte of payload is moved by the kernel.
    Splice,
    /// Everything is copied.
    Copy,
}

impl Relay {
    /// All of them, in the order of [`Relay::NAMES`].
    pub const ALL: &'static [Relay] = &[Relay::Auto, Relay::Splice, Relay::Copy];
    /// Their names in the configuration.
    pub const NAMES: &'static [&'static str] = &["auto", "splice", "copy"];
}

/// One worker as configured.
#[derive(Clone, PartialEq, Eq)]
pub struct WorkerSpec {
    /// `http://host:port[/prefix]`, without a trailing slash.
    pub url: String,
    pub role: Role,
    /// Models it serves; empty: asked for at `/v1/models`.
    pub models: Vec<String>,
    pub api_key: Option<String>,
    pub backend: Backend,
    /// Workers are paired within a group only; empty: the group of all that name none.
    pub group: String,
    /// Port of a prefill worker's bootstrap server; `None`: the engine's own default.
    pub bootstrap_port: Option<u16>,
    /// Data-parallel ranks, each routed to on its own; `None`: asked for where `dp_aware` is on, else one.
    pub dp_size: Option<u32>,
    /// Where it is probed; `None`: where all are.
    pub health_endpoint: Option<String>,
    /// How long it may take to answer a probe; `None`: as long as all.
    pub health_timeout: Option<Duration>,
    /// The host is a name that stands for a worker at each of its addresses.
    pub expand: bool,
    /// Between probes; `None`: as all.
    pub health_interval: Option<Duration>,
    /// Failed probes in a row that take it out; `None`: as many as for all.
    pub health_failures: Option<u32>,
    /// Successful ones that bring it back; `None`: as many as for all.
    pub health_successes: Option<u32>,
    /// What operators note of it; shown with it, and nothing else.
    pub labels: BTreeMap<String, String>,
}

impl WorkerSpec {
    /// A regular worker without a key, whose models are asked for.
    pub fn new(url: impl Into<String>) -> WorkerSpec {
        WorkerSpec {
            url: url.into(),
            role: Role::Regular,
            models: Vec::new(),
            api_key: None,
            backend: Backend::default(),
            group: String::new(),
            bootstrap_port: None,
            dp_size: None,
            health_endpoint: None,
            health_timeout: None,
            expand: false,
            health_interval: None,
            health_failures: None,
            health_successes: None,
            labels: BTreeMap::new(),
        }
    }
}

impl std::fmt::Debug for WorkerSpec {
    /// Without the key: configurations are logged.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerSpec")
            .field("url", &self.url)
            .field("role", &self.role)
            .field("models", &self.models)
            .field("backend", &self.backend)
            .field("group", &self.group)
            .field("bootstrap_port", &self.bootstrap_port)
            .field("dp_size", &self.dp_size)
            .field("health_endpoint", &self.health_endpoint)
            .field("health_timeout", &self.health_timeout)
            .field("expand", &self.expand)
            .field("health_interval", &self.health_interval)
            .field("health_failures", &self.health_failures)
            .field("health_successes", &self.health_successes)
            .field("labels", &self.labels)
            .field("api_key", &self.api_key.as_ref().map(|_| "(hidden)"))
            .finish()
    }
}

/// A pass-through route from the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtraRoute {
    pub path: String,
    /// Methods; empty means GET, HEAD and POST.
    pub methods: Vec<String>,
}

/// All settings of `corelane serve`, resolved and in range.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub host: IpAddr,
    pub port: u16,
    /// Cores of the lanes, in order; empty: every core of the affinity mask.
    pub cores: Vec<usize>,
    /// Core of the control thread; `None`: one that is no lane's, if there is one.
    pub control_core: Option<usize>,
    /// How long a lane looks for work before it sleeps.
    pub busy_poll: Duration,
    pub workers: Vec<WorkerSpec>,
    /// No worker need be given: they are added at run time.
    pub start_without_workers: bool,
    pub policy: Policy,
    /// How prefill workers are chosen; `None`: by `policy`. See [`Config::policy_of`].
    pub prefill_policy: Option<Policy>,
    /// The same for decode workers.
    pub decode_policy: Option<Policy>,
    /// The user says that there are pairs, so a configuration without any is refused. That there are some is
    /// [`Config::has_pairs`]'s to say.
    pub pd_disaggregation: bool,
    /// Engine of workers that do not say theirs.
    pub engine: Engine,
    /// Connector of vLLM workers that do not say theirs.
    pub connector: Connector,
    /// Engines are asked for their data-parallel size, and each rank is chosen on its own.
    pub dp_aware: bool,
    pub routing: Routing,
    /// When a worker's circuit breaker opens and closes.
    pub breaker: Breaker,
    /// Secret by which a request may name its worker; `None`: none may.
    pub target_worker_secret: Option<Secret>,
    /// Model whose workers serve requests that name none; `None`: any worker does.
    pub default_model: Option<String>,
    pub extra_routes: Vec<ExtraRoute>,
    pub max_payload_bytes: u64,
    pub max_head_bytes: usize,
    pub max_headers: usize,
    pub head_timeout: Duration,
    pub body_timeout: Duration,
    /// Idle client connections are closed after this.
    pub keep_alive: Duration,
    pub request_timeout: Duration,
    pub connect_timeout: Duration,
    /// A client that takes nothing for this long is cut.
    pub write_stall_timeout: Duration,
    pub half_close: HalfClose,
    pub relay: Relay,
    /// Pipes that a lane has at most, for bytes that are moved by the kernel.
    pub pipes_per_lane: usize,
    /// What each of them is asked to hold.
    pub pipe_bytes: usize,
    /// From the sending of a prefill leg to the first byte of its answer; zero: no limit.
    pub prefill_first_byte_timeout: Duration,
    /// The same for a decode leg.
    pub decode_first_byte_timeout: Duration,
    /// A worker's answer that has begun and brings nothing for this long is given up; zero: never.
    pub stall_timeout: Duration,
    /// Pairs of SGLang workers whose client left.
    pub sglang_client_leaves: ClientLeaves,
    /// Pairs of vLLM workers whose client left.
    pub vllm_client_leaves: ClientLeaves,
    pub pool_idle: Duration,
    /// Idle connections kept per lane and worker.
    pub pool_size: usize,
    /// From the sending of a request to a regular worker to the first byte of its answer; zero: no limit.
    pub first_byte_timeout: Duration,
    /// Attempts in all, the first included.
    pub max_attempts: u32,
    pub retry: Retry,
    /// Memory for buffered request bodies of the whole process.
    pub body_memory_bytes: u64,
    /// Keys of which a client must bring one; empty: none has to.
    pub api_keys: Vec<Secret>,
    /// Requests that may go to workers at a time; 0: no limit.
    pub max_concurrent_requests: u32,
    /// Requests that may wait for that.
    pub queue_size: u32,
    /// For so long.
    pub queue_timeout: Duration,
    /// Requests that one worker may have at a time; 0: no limit.
    pub max_requests_per_worker: u32,
    /// Client connections of a lane; 0: as the limit of descriptors allows.
    pub max_connections_per_lane: u32,
    pub backlog: u32,
    pub metrics_host: IpAddr,
    pub metrics_port: u16,
    /// What who manages workers has to bring; `None`: nothing.
    pub admin_token: Option<Secret>,
    /// An admin listener beyond loopback may do without a token.
    pub admin_open: bool,
    pub request_id_headers: Vec<String>,
    /// Which requests have a line in the access log.
    pub access_log: AccessLog,
    /// Of so many requests that went well, one has, where a sample is logged.
    pub access_log_sample: u32,
    pub access_log_format: AccessFormat,
    /// A file, or `stderr` or `stdout`.
    pub access_log_path: String,
    /// Between questions for an engine's load, where decisions need it.
    pub load_monitor_interval: Duration,
    pub health_check: bool,
    pub health_endpoint: String,
    pub health_interval: Duration,
    pub health_timeout: Duration,
    pub health_failures: u32,
    pub health_successes: u32,
    /// How long a worker that is to be removed may take to finish what it has.
    pub worker_drain_timeout: Duration,
    pub shutdown_settle: Duration,
    pub shutdown_grace: Duration,
    pub log_level: String,
    /// File or directory with further workers.
    pub workers_file: Option<String>,
    /// Between looks at whether files have changed; zero: nobody looks.
    pub watch_interval: Duration,
}

impl Config {
    /// Every option at its default, in front of `workers`.
    pub fn with_workers(workers: Vec<WorkerSpec>) -> Config {
        let mut config = Config { workers, ..Config::blank() };
        for row in options::OPTIONS {
            let put = row.kind.put(&mut config, &load::default_texts(row));
            debug_assert!(put.is_ok(), "default of {}", row.key);
        }
        config
    }

    /// How workers of a role are chosen.
    pub fn policy_of(&self, role: Role) -> Policy {
        match role {
            Role::Regular => None,
            Role::Prefill => self.prefill_policy,
            Role::Decode => self.decode_policy,
        }
        .unwrap_or(self.policy)
    }

    /// Whether the admin listener is beyond loopback without a token, and nobody has said that it may.
    pub fn strangers_may_manage(&self) -> bool {
        !self.metrics_host.to_canonical().is_loopback() && self.admin_token.is_none() && !self.admin_open
    }

    /// Whether some role's workers are chosen on a ring of hashes.
    pub fn wants_rings(&self) -> bool {
        Role::ALL.iter().any(|role| self.policy_of(*role).wants_ring())
    }

    /// Whether some worker is one of a pair.
    pub fn has_pairs(&self) -> bool {
        self.workers.iter().any(|worker| worker.role != Role::Regular)
    }

    /// What becomes of a pair's requests when their client has left.
    pub const fn client_leaves(&self, backend: Backend) -> ClientLeaves {
        match backend.engine() {
            Engine::Sglang => self.sglang_client_leaves,
            Engine::Vllm => self.vllm_client_leaves,
        }
    }

    /// Nothing set; the option table fills every field that it has a row for.
    fn blank() -> Config {
        let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        Config {
            host: nowhere,
            port: 0,
            cores: Vec::new(),
            control_core: None,
            busy_poll: Duration::ZERO,
            workers: Vec::new(),
            start_without_workers: false,
            policy: Policy::CacheAware,
            prefill_policy: None,
            decode_policy: None,
            pd_disaggregation: false,
            engine: Engine::Sglang,
            connector: Connector::Nixl,
            dp_aware: false,
            routing: Routing::BLANK,
            breaker: Breaker { on: true, failures: 0, successes: 0, open_s: 0, window_s: 0 },
            target_worker_secret: None,
            default_model: None,
            extra_routes: Vec::new(),
            max_payload_bytes: 0,
            max_head_bytes: 0,
            max_headers: 0,
            head_timeout: Duration::ZERO,
            body_timeout: Duration::ZERO,
            keep_alive: Duration::ZERO,
            request_timeout: Duration::ZERO,
            connect_timeout: Duration::ZERO,
            write_stall_timeout: Duration::ZERO,
            half_close: HalfClose::Abort,
            relay: Relay::Auto,
            pipes_per_lane: 0,
            pipe_bytes: 0,
            prefill_first_byte_timeout: Duration::ZERO,
            decode_first_byte_timeout: Duration::ZERO,
            stall_timeout: Duration::ZERO,
            sglang_client_leaves: ClientLeaves::Close,
            vllm_client_leaves: ClientLeaves::Close,
            pool_idle: Duration::ZERO,
            pool_size: 0,
            first_byte_timeout: Duration::ZERO,
            max_attempts: 0,
            retry: Retry::default(),
            body_memory_bytes: 0,
            api_keys: Vec::new(),
            max_concurrent_requests: 0,
            queue_size: 0,
            queue_timeout: Duration::ZERO,
            max_requests_per_worker: 0,
            max_connections_per_lane: 0,
            backlog: 0,
            metrics_host: nowhere,
            metrics_port: 0,
            admin_token: None,
            admin_open: false,
            request_id_headers: Vec::new(),
            access_log: AccessLog::Off,
            access_log_sample: 0,
            access_log_format: AccessFormat::Json,
            access_log_path: String::new(),
            load_monitor_interval: Duration::ZERO,
            health_check: false,
            health_endpoint: String::new(),
            health_interval: Duration::ZERO,
            health_timeout: Duration::ZERO,
            health_failures: 0,
            health_successes: 0,
            worker_drain_timeout: Duration::ZERO,
            shutdown_settle: Duration::ZERO,
            shutdown_grace: Duration::ZERO,
            log_level: String::new(),
            workers_file: None,
            watch_interval: Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_those_of_the_peers() {
        let config = Config::with_workers(vec![WorkerSpec::new("http://w:1")]);
        assert_eq!(config.port, 30000);
        assert_eq!(config.metrics_port, 29000);
        assert_eq!(config.max_payload_bytes, 512 << 20);
        assert_eq!(config.request_timeout, Duration::from_secs(1800));
        assert_eq!(config.max_attempts, 5);
        assert_eq!((config.health_failures, config.health_successes), (3, 2));
        assert_eq!((config.max_concurrent_requests, config.queue_size), (0, 100));
        assert_eq!((config.queue_timeout, config.max_requests_per_worker), (Duration::from_secs(60), 0));
        assert!(config.api_keys.is_empty());
        assert_eq!(config.request_id_headers, ["x-request-id", "x-correlation-id", "x-trace-id", "request-id"]);
        assert!(config.health_check && config.cores.is_empty() && config.default_model.is_none());
        assert_eq!(config.workers.len(), 1);
        assert_eq!((config.policy, config.routing), (Policy::CacheAware, Routing::DEFAULT));
        assert_eq!(config.breaker, Breaker::DEFAULT);
    }

    #[test]
    fn names_and_values_of_choices_agree() {
        let names: Vec<&str> = Policy::ALL.iter().map(|p| p.name()).collect();
        assert_eq!(names, Policy::NAMES);
        assert_eq!(BalanceMode::ALL.len(), BalanceMode::NAMES.len());
        assert_eq!(Assignment::ALL.len(), Assignment::NAMES.len());
        assert_eq!(HalfClose::ALL.len(), HalfClose::NAMES.len());
        assert_eq!(Relay::ALL.len(), Relay::NAMES.len());
        assert_eq!(Engine::ALL.len(), Engine::NAMES.len());
        assert_eq!(Connector::ALL.len(), Connector::NAMES.len());
        assert_eq!(ClientLeaves::ALL.len(), ClientLeaves::NAMES.len());
        assert_eq!(AccessLog::ALL.len(), AccessLog::NAMES.len());
        assert_eq!(AccessFormat::ALL.len(), AccessFormat::NAMES.len());
    }

    #[test]
    fn roles_go_by_their_own_policy_or_the_common_one() {
        let mut config = Config::with_workers(vec![WorkerSpec::new("http://w:1")]);
        config.policy = Policy::Random;
        assert_eq!(Role::ALL.map(|role| config.policy_of(role)), [Policy::Random; 3]);
        config.decode_policy = Some(Policy::RoundRobin);
        assert_eq!(Role::ALL.map(|role| config.policy_of(role)), [Policy::Random, Policy::Random, Policy::RoundRobin]);
        assert!(!config.has_pairs());
        config.workers[0].role = Role::Decode;
        assert!(config.has_pairs());
    }

    #[test]
    fn what_is_safe_when_a_client_leaves_depends_on_the_engine() {
        let config = Config::with_workers(Vec::new());
        for (backend, leaves) in [
            (Backend::Sglang, ClientLeaves::Close),
            (Backend::VllmNixl, ClientLeaves::FinishPrefill),
            (Backend::VllmMooncake, ClientLeaves::FinishPrefill),
        ] {
            assert_eq!(config.client_leaves(backend), leaves);
            let connector = backend.connector().unwrap_or(Connector::Nixl);
            assert_eq!(Backend::of(backend.engine(), connector), backend);
        }
    }

    #[test]
    fn keys_are_not_logged() {
        let mut worker = WorkerSpec::new("http://w:1");
        worker.api_key = Some("sk-secret".into());
        assert!(!format!("{worker:?}").contains("secret"));
    }
}
