//! What the user may set: one row an option, from which flags, environment, file, `--help` and docs derive.
//!
//! Takes arguments, environment and a TOML file, gives one [`Config`] or every mistake at once. Never starts
//! anything and never reads the clock.

pub mod routes;

use std::net::IpAddr;
use std::time::Duration;

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

/// How a worker is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    RoundRobin,
    Random,
    LeastLoad,
    PowerOfTwo,
}

/// What a client's FIN means while its request is being served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalfClose {
    /// The client left: the upstream is closed at once (default; a closed socket looks the same).
    Abort,
    /// The client only stopped sending: it is served.
    Serve,
}

/// One worker as configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerSpec {
    /// `http://host:port[/prefix]`, without a trailing slash.
    pub url: String,
    pub role: Role,
    /// Models it serves; empty: asked for at `/v1/models`.
    pub models: Vec<String>,
    pub api_key: Option<String>,
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
    /// Cores of the lanes, in order; empty: every core of the affinity mask, less the control core where more than one is left.
    pub cores: Vec<usize>,
    /// Core of the control thread; `None`: one that is no lane's, if there is one.
    pub control_core: Option<usize>,
    pub workers: Vec<WorkerSpec>,
    pub policy: Policy,
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
