//! What the user may set: one row an option, from which flags, environment, file, `--help` and docs derive.
//!
//! Takes arguments, environment and a TOML file, gives one [`Config`] or every mistake at once. Never starts
//! anything and never reads the clock.

pub mod environment;
pub mod flags;
mod given;
pub mod help;
mod load;
mod mistakes;
pub mod options;
mod print;
pub mod routes;
mod routing;
mod tables;
mod toml;
mod values;
mod worker_url;

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

pub use load::{Loaded, Setting, load};
pub use mistakes::{Mistake, Origin, Wrong, nearest, quote};
pub use routing::{Assignment, BalanceMode, Policy, Routing, Secret};
pub use values::parse_cores;
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
    /// Lower-case name, as in labels and the admin API.
    pub const fn name(self) -> &'static str {
        match self {
            Role::Regular => "regular",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
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

/// One worker as configured.
#[derive(Clone, PartialEq, Eq)]
pub struct WorkerSpec {
    /// `http://host:port[/prefix]`, without a trailing slash.
    pub url: String,
    pub role: Role,
    /// Models it serves; empty: asked for at `/v1/models`.
    pub models: Vec<String>,
    pub api_key: Option<String>,
}

impl WorkerSpec {
    /// A regular worker without a key, whose models are asked for.
    pub fn new(url: impl Into<String>) -> WorkerSpec {
        WorkerSpec { url: url.into(), role: Role::Regular, models: Vec::new(), api_key: None }
    }
}

impl std::fmt::Debug for WorkerSpec {
    /// Without the key: configurations are logged.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerSpec")
            .field("url", &self.url)
            .field("role", &self.role)
            .field("models", &self.models)
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
#[derive(Clone, Debug)]
pub struct Config {
    pub host: IpAddr,
    pub port: u16,
    /// Cores of the lanes, in order; empty: every core of the affinity mask.
    pub cores: Vec<usize>,
    /// Core of the control thread; `None`: one that is no lane's, if there is one.
    pub control_core: Option<usize>,
    pub workers: Vec<WorkerSpec>,
    pub policy: Policy,
    pub routing: Routing,
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
    pub pool_idle: Duration,
    /// Idle connections kept per lane and worker.
    pub pool_size: usize,
    /// Attempts in all, the first included.
    pub max_attempts: u32,
    /// Memory for buffered request bodies of the whole process.
    pub body_memory_bytes: u64,
    pub backlog: u32,
    pub metrics_host: IpAddr,
    pub metrics_port: u16,
    pub request_id_headers: Vec<String>,
    pub health_check: bool,
    pub health_endpoint: String,
    pub health_interval: Duration,
    pub health_timeout: Duration,
    pub health_failures: u32,
    pub health_successes: u32,
    pub shutdown_settle: Duration,
    pub shutdown_grace: Duration,
    pub log_level: String,
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

    /// Nothing set; the option table fills every field that it has a row for.
    fn blank() -> Config {
        let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        Config {
            host: nowhere,
            port: 0,
            cores: Vec::new(),
            control_core: None,
            workers: Vec::new(),
            policy: Policy::CacheAware,
            routing: Routing::BLANK,
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
            pool_idle: Duration::ZERO,
            pool_size: 0,
            max_attempts: 0,
            body_memory_bytes: 0,
            backlog: 0,
            metrics_host: nowhere,
            metrics_port: 0,
            request_id_headers: Vec::new(),
            health_check: false,
            health_endpoint: String::new(),
            health_interval: Duration::ZERO,
            health_timeout: Duration::ZERO,
            health_failures: 0,
            health_successes: 0,
            shutdown_settle: Duration::ZERO,
            shutdown_grace: Duration::ZERO,
            log_level: String::new(),
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
        assert_eq!(config.request_id_headers, ["x-request-id", "x-correlation-id", "x-trace-id", "request-id"]);
        assert!(config.health_check && config.cores.is_empty() && config.default_model.is_none());
        assert_eq!(config.workers.len(), 1);
        assert_eq!((config.policy, config.routing), (Policy::CacheAware, Routing::DEFAULT));
    }

    #[test]
    fn names_and_values_of_choices_agree() {
        let names: Vec<&str> = Policy::ALL.iter().map(|p| p.name()).collect();
        assert_eq!(names, Policy::NAMES);
        assert_eq!(BalanceMode::ALL.len(), BalanceMode::NAMES.len());
        assert_eq!(Assignment::ALL.len(), Assignment::NAMES.len());
        assert_eq!(HalfClose::ALL.len(), HalfClose::NAMES.len());
    }

    #[test]
    fn keys_are_not_logged() {
        let mut worker = WorkerSpec::new("http://w:1");
        worker.api_key = Some("sk-secret".into());
        assert!(!format!("{worker:?}").contains("secret"));
    }
}
