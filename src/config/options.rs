//! The option table: one row an option. Flag, environment name, file key, help and the written reference derive from it.
//!
//! Takes nothing, gives the rows. Never reads a value: that is the row's [`Kind`]'s.

use super::values::Kind;
use super::{
    AccessFormat, AccessLog, Assignment, BalanceMode, ClientLeaves, Connector, Engine, HalfClose, Policy, Relay, Role,
};
use crate::limits::MAX_BUSY_POLL_US;

/// The heading under which help and reference list an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    Listening,
    Cores,
    Workers,
    Pairs,
    Routing,
    Limits,
    Timeouts,
    Upstream,
    Relaying,
    Retries,
    Health,
    Breaker,
    Observing,
    Shutdown,
    Reload,
}

impl Section {
    /// All sections, in the order of help and reference.
    pub const ALL: &'static [Section] = &[
        Section::Listening,
        Section::Workers,
        Section::Pairs,
        Section::Routing,
        Section::Cores,
        Section::Limits,
        Section::Timeouts,
        Section::Upstream,
        Section::Relaying,
        Section::Retries,
        Section::Health,
        Section::Breaker,
        Section::Observing,
        Section::Shutdown,
        Section::Reload,
    ];

    /// The heading.
    pub const fn title(self) -> &'static str {
        match self {
            Section::Listening => "Listening",
            Section::Cores => "Cores",
            Section::Workers => "Workers",
            Section::Pairs => "Prefill/decode",
            Section::Routing => "Choice of a worker",
            Section::Limits => "Limits",
            Section::Timeouts => "Timeouts",
            Section::Upstream => "Connections to workers",
            Section::Relaying => "Answers on their way",
            Section::Retries => "Retries",
            Section::Health => "Health checks",
            Section::Breaker => "Circuit breaker",
            Section::Observing => "Metrics, logs and request ids",
            Section::Shutdown => "Shutdown",
            Section::Reload => "Reload",
        }
    }
}

/// One option.
pub struct Row {
    /// Key in the file. The flag is the key with dashes, the variable the key in capitals after `CORELANE_`.
    pub key: &'static str,
    pub section: Section,
    pub kind: Kind,
    /// Default in the spelling of a flag's value; empty: none. List items are separated by commas.
    pub default: &'static str,
    /// What it does, as one or two sentences. Unit, range and default are added from the other fields.
    pub prose: &'static str,
    /// A reload changes it in the running process; else the change waits for the next start.
    pub live: bool,
}

impl Row {
    /// The same for an option that only a start can change.
    const fn at_start(self) -> Row {
        Row { live: false, ..self }
    }

    /// `--max-payload-size`
    pub fn flag(&self) -> String {
        format!("--{}", self.key.replace('_', "-"))
    }

    /// `CORELANE_MAX_PAYLOAD_SIZE`
    pub fn env(&self) -> String {
        format!("{ENV_PREFIX}{}", self.key.to_ascii_uppercase())
    }
}

/// What the names of all environment variables begin with.
pub const ENV_PREFIX: &str = "CORELANE_";

/// The row of a file key.
pub fn find(key: &str) -> Option<&'static Row> {
    OPTIONS.iter().find(|row| row.key == key)
}

/// Longest time that a breaker stays open: what its worker's word can count.
pub const MOST_OPEN_S: u64 = 86400;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

const fn row(section: Section, key: &'static str, kind: Kind, default: &'static str, prose: &'static str) -> Row {
    Row { key, section, kind, default, prose, live: true }
}

/// Every option. A row that switches something off stands after the row that it overrides.
pub const OPTIONS: &[Row] = &[
    row(
        Section::Listening,
        "host",
        Kind::Address(|c, v| c.host = v),
        "127.0.0.1",
        "Address to listen on for clients. `::` takes IPv6 and IPv4.",
    )
    .at_start(),
    row(
        Section::Listening,
        "port",
        Kind::Whole { min: 0, max: 65535, set: |c, v| c.port = v as u16 },
        "30000",
        "Port to listen on for clients; 0 takes any free one.",
    )
    .at_start(),
    row(
        Section::Listening,
        "backlog",
        Kind::Whole { min: 1, max: 65535, set: |c, v| c.backlog = v as u32 },
        "4096",
        "Connections that may wait to be accepted, per lane; the kernel caps it at net.core.somaxconn.",
    )
    .at_start(),
    row(
        Section::Listening,
        "max_connections_per_lane",
        Kind::Whole { min: 0, max: 1 << 24, set: |c, v| c.max_connections_per_lane = v as u32 },
        "0",
        "Client connections that a lane may have; a further one is answered with 503 and closed. 0: half of the \
         descriptors that the process may open, divided by the lanes.",
    ),
    row(
        Section::Listening,
        "api_key",
        Kind::Secrets(|c, v| c.api_keys = v),
        "",
        "Keys of clients: a request must bring one of them as `Authorization: Bearer KEY` or in x-api-key, except to \
         /health, /liveness and /readiness. Neither header is passed on to workers then. Several after one flag, \
         repeated flags, or separated by commas in the variable, which does not show them in the list of processes. \
         Unset: clients are not asked.",
    ),
    row(
        Section::Workers,
        "worker_urls",
        Kind::Workers(Role::Regular),
        "",
        "Addresses of the workers: several after one flag, repeated flags, or separated by commas. Given as flag or \
         variable they replace all workers of the file; so do prefill and decode.",
    ),
    row(
        Section::Workers,
        "default_model",
        Kind::Name(|c, v| c.default_model = v),
        "",
        "Model whose workers serve requests that name none. Unset: any worker does.",
    ),
    row(
        Section::Workers,
        "backend",
        Kind::Choice { names: Engine::NAMES, set: |c, v| c.engine = Engine::ALL[v] },
        "sglang",
        "Engine of the workers that do not say theirs in [[workers]].",
    ),
    row(
        Section::Workers,
        "dp_aware",
        Kind::Switch(|c, v| c.dp_aware = v),
        "false",
        "Engines are asked for their data-parallel size (dp_size), and each of their ranks is chosen as a worker of its \
         own. Such a worker gets no requests before its size is known.",
    )
    .at_start(),
    row(
        Section::Workers,
        "workers_file",
        Kind::Name(|c, v| c.workers_file = v),
        "",
        "File, or directory of files, with workers besides those of this configuration, for whoever writes them by \
         program: .toml with [[workers]], .json with a list of addresses or of such tables, any other name with an address \
         a line. Of a directory those that end in .toml, .json or .txt count. It is watched, see watch_interval_secs.",
    ),
    row(
        Section::Workers,
        "start_without_workers",
        Kind::Switch(|c, v| c.start_without_workers = v),
        "false",
        "No worker need be given: they are added at the admin listener. Until then /readiness says no.",
    ),
    row(
        Section::Workers,
        "worker_drain_timeout_secs",
        Kind::Seconds { min: 0.0, max: 86400.0, set: |c, v| c.worker_drain_timeout = v },
        "600",
        "How long a worker that is removed at run time may take to finish the requests that it has. Then it is taken off \
         the list; what it still has is not cut.",
    ),
    row(
        Section::Pairs,
        "pd_disaggregation",
        Kind::Switch(|c, v| c.pd_disaggregation = v),
        "false",
        "There are prefill and decode workers. Giving some says so already; this refuses to start without any.",
    ),
    row(
        Section::Pairs,
        "prefill",
        Kind::Workers(Role::Prefill),
        "",
        "Addresses of prefill workers, each followed by the port of its bootstrap server, or by none for the engine's \
         own default. Repeated flags, or separated by commas; in the file a list of such texts.",
    ),
    row(
        Section::Pairs,
        "decode",
        Kind::Workers(Role::Decode),
        "",
        "Addresses of decode workers: several after one flag, repeated flags, or separated by commas.",
    ),
    row(
        Section::Pairs,
        "prefill_policy",
        Kind::ChoiceOrNone { names: Policy::NAMES, set: |c, v| c.prefill_policy = v.map(|at| Policy::ALL[at]) },
        "",
        "How a prefill worker is chosen. Unset: as policy says.",
    ),
    row(
        Section::Pairs,
        "decode_policy",
        Kind::ChoiceOrNone { names: Policy::NAMES, set: |c, v| c.decode_policy = v.map(|at| Policy::ALL[at]) },
        "",
        "How a decode worker is chosen. Unset: as policy says.",
    ),
    row(
        Section::Pairs,
        "connector",
        Kind::Choice { names: Connector::NAMES, set: |c, v| c.connector = Connector::ALL[v] },
        "nixl",
        "How vLLM workers hand the cache of a prompt over, where they do not say in [[workers]].",
    ),
    row(
        Section::Pairs,
        "prefill_first_byte_timeout_secs",
        Kind::Seconds { min: 0.0, max: 604800.0, set: |c, v| c.prefill_first_byte_timeout = v },
        "0",
        "Time from the sending of a request to a prefill worker to the first byte of its answer; 0: no limit.",
    ),
    row(
        Section::Pairs,
        "decode_first_byte_timeout_secs",
        Kind::Seconds { min: 0.0, max: 604800.0, set: |c, v| c.decode_first_byte_timeout = v },
        "0",
        "The same for a decode worker; 0: no limit.",
    ),
    row(
        Section::Pairs,
        "sglang_client_leaves",
        Kind::Choice { names: ClientLeaves::NAMES, set: |c, v| c.sglang_client_leaves = ClientLeaves::ALL[v] },
        "close",
        "What becomes of a pair of SGLang workers when the client leaves. close: both requests are ended at once. \
         finish_prefill: the prefill worker's may come to its end first.",
    ),
    row(
        Section::Pairs,
        "vllm_client_leaves",
        Kind::Choice { names: ClientLeaves::NAMES, set: |c, v| c.vllm_client_leaves = ClientLeaves::ALL[v] },
        "finish_prefill",
        "The same for vLLM. With finish_prefill and NIXL the decode worker is asked after the prefill worker has ended, \
         and left at once, so that it frees the cache that waits for it.",
    ),
    row(
        Section::Routing,
        "policy",
        Kind::Choice { names: Policy::NAMES, set: |c, v| c.policy = Policy::ALL[v] },
        "cache_aware",
        "How a worker is chosen for a request.",
    ),
    row(
        Section::Routing,
        "cache_threshold",
        Kind::Ratio { min: 0.0, max: 1.0, set: |c, v| c.routing.cache_threshold = v },
        "0.3",
        "cache_aware: share of a prompt that a worker must have seen already to be preferred for it.",
    ),
    row(
        Section::Routing,
        "balance_abs_threshold",
        Kind::Whole { min: 0, max: 1 << 24, set: |c, v| c.routing.balance_abs = v as u32 },
        "16",
        "cache_aware, bucket: requests in flight by which a worker must exceed the mean to be passed over, if it \
         exceeds balance_rel_threshold too.",
    ),
    row(
        Section::Routing,
        "balance_rel_threshold",
        Kind::Ratio { min: 1.0, max: 1000.0, set: |c, v| c.routing.balance_rel = v },
        "1.5",
        "cache_aware, bucket: factor by which a worker must exceed the mean to be passed over, if it exceeds \
         balance_abs_threshold too.",
    ),
    row(
        Section::Routing,
        "balance_mode",
        Kind::Choice { names: BalanceMode::NAMES, set: |c, v| c.routing.balance_mode = BalanceMode::ALL[v] },
        "worker",
        "cache_aware: worker passes an overloaded worker over; fleet drops affinity for everybody while the most and \
         the least loaded worker differ by both thresholds.",
    ),
    row(
        Section::Routing,
        "balance_token_usage_threshold",
        Kind::Ratio { min: 0.0, max: 1.0, set: |c, v| c.routing.balance_token_usage = v },
        "1.0",
        "cache_aware, prefix_hash: affinity is dropped for least load while the most and the least used KV cache of the \
         usable workers, as their engines say, differ by more than this. 1: never.",
    ),
    row(
        Section::Routing,
        "overload_token_usage_threshold",
        Kind::Ratio { min: 0.0, max: 1.0, set: |c, v| c.routing.overload_token_usage = v },
        "1.0",
        "A worker whose engine says that more of its KV cache is used gets no requests while another usable one is \
         not above; whatever the policy. 1: off.",
    ),
    row(
        Section::Routing,
        "max_worker_waiting",
        Kind::Whole { min: 0, max: 32767, set: |c, v| c.routing.max_worker_waiting = v as u32 },
        "0",
        "A worker in whose engine, as that says, so many requests wait gets no more while another usable one has fewer; \
         whatever the policy. 0: off.",
    ),
    row(
        Section::Routing,
        "load_monitor_interval",
        Kind::Seconds { min: 0.1, max: 3600.0, set: |c, v| c.load_monitor_interval = v },
        "2",
        "Time from one question for the load of a worker's engine to the next. Engines are asked only where one of the \
         two thresholds of token usage, or max_worker_waiting, is set; what was said 3 intervals (at least 10 s) ago does \
         not count.",
    ),
    row(
        Section::Routing,
        "prefix_memory",
        Kind::Bytes { min: MIB, max: 1024 * GIB, set: |c, v| c.routing.prefix_memory_bytes = v },
        "1GiB",
        "cache_aware: memory for what is known of the workers' caches, of the whole process; the least recently used \
         goes.",
    )
    .at_start(),
    row(
        Section::Routing,
        "max_tree_size",
        Kind::Whole {
            min: 0,
            max: 1024 * GIB,
            set: |c, v| {
                if v > 0 {
                    c.routing.prefix_memory_bytes = v.max(MIB);
                }
            },
        },
        "0",
        "The peers' measure for prefix_memory, in characters of prompts; counted as as many bytes (a 64-byte block of \
         a prompt takes 12 to 64 of them). 0: prefix_memory counts.",
    )
    .at_start(),
    row(
        Section::Routing,
        "prefix_ttl_secs",
        Kind::Whole { min: 0, max: 1 << 22, set: |c, v| c.routing.prefix_ttl_secs = v as u32 },
        "0",
        "cache_aware: prefixes that were not used for so many seconds are forgotten; 0: only when memory is short.",
    ),
    row(
        Section::Routing,
        "eviction_interval_secs",
        Kind::Whole { min: 1, max: 86400, set: |c, v| c.routing.eviction_interval_secs = v as u32 },
        "1",
        "cache_aware: seconds between two looks at whether something has to be forgotten. Memory does not depend on it.",
    ),
    row(
        Section::Routing,
        "prefix_max_bytes",
        Kind::Bytes { min: KIB, max: 64 * MIB, set: |c, v| c.routing.prefix_max_bytes = v as usize },
        "1MiB",
        "cache_aware: bytes of a prompt that are looked at; prompts that differ behind them only count as equal.",
    ),
    row(
        Section::Routing,
        "manual_assignment",
        Kind::Choice { names: Assignment::NAMES, set: |c, v| c.routing.assignment = Assignment::ALL[v] },
        "random",
        "manual: who gets a routing key that nobody has: anybody, the least loaded, or who has the fewest keys.",
    ),
    row(
        Section::Routing,
        "manual_idle_secs",
        Kind::Whole { min: 1, max: 1 << 24, set: |c, v| c.routing.manual_idle_secs = v as u32 },
        "14400",
        "manual: a routing key that was not used for so many seconds may get another worker.",
    ),
    row(
        Section::Routing,
        "target_worker_secret",
        Kind::Secret(|c, v| c.target_worker_secret = v),
        "",
        "Secret that lets a request name its worker (URL or position) in x-smg-target-worker, when it brings the \
         secret in x-corelane-target-secret. Unset: that header is ignored.",
    ),
    row(
        Section::Cores,
        "cores",
        Kind::Cores(|c, v| c.cores = v),
        "auto",
        "Cores of the lanes, one lane each, in this order. auto: every core that the process may use.",
    )
    .at_start(),
    row(
        Section::Cores,
        "control_core",
        Kind::Core(|c, v| c.control_core = v),
        "auto",
        "Core of the control thread. auto: one that is no lane's, if there is one.",
    )
    .at_start(),
    row(
        Section::Cores,
        "busy_poll_us",
        Kind::Micros { min: 0, max: MAX_BUSY_POLL_US, set: |c, v| c.busy_poll = v },
        "0",
        "How long a lane that has run out of work keeps looking for more before it sleeps: what comes meanwhile waits \
         for no wake-up, and CPU time pays for it. For lanes that share their cores with nobody. What is spent in vain is \
         part of corelane_lane_cpu_seconds, and told apart as corelane_lane_spun_seconds; the page and `top` count it as \
         idle. 0: it sleeps at once.",
    )
    .at_start(),
    row(
        Section::Limits,
        "max_payload_size",
        Kind::Bytes { min: KIB, max: 4095 * MIB, set: |c, v| c.max_payload_bytes = v },
        "512MiB",
        "Largest request body; a larger one is answered with 413. Below 4 GiB, because places in a request are 32 bits.",
    ),
    row(
        Section::Limits,
        "body_memory",
        Kind::Bytes { min: MIB, max: 1024 * GIB, set: |c, v| c.body_memory_bytes = v },
        "4GiB",
        "Memory for buffered bodies of the whole process: of requests above 64 KiB, of their copies where a worker must not see \
         all of it, and of answers that are read whole.",
    ),
    row(
        Section::Limits,
        "max_concurrent_requests",
        Kind::Whole { min: 0, max: 1 << 24, set: |c, v| c.max_concurrent_requests = v as u32 },
        "0",
        "Requests that may go to workers at a time, over all lanes, from their turn to the end of their answer; further \
         ones wait in the order of their arrival. 0: no limit.",
    ),
    row(
        Section::Limits,
        "queue_size",
        Kind::Whole { min: 0, max: 1 << 20, set: |c, v| c.queue_size = v as u32 },
        "100",
        "Requests that may wait for max_concurrent_requests; a further one is answered with 429.",
    ),
    row(
        Section::Limits,
        "queue_timeout_secs",
        Kind::Seconds { min: 0.1, max: 86400.0, set: |c, v| c.queue_timeout = v },
        "60",
        "Time that a request may wait there; then it is answered with 408.",
    ),
    row(
        Section::Limits,
        "max_requests_per_worker",
        Kind::Whole { min: 0, max: 1 << 20, set: |c, v| c.max_requests_per_worker = v as u32 },
        "0",
        "Requests that one worker may have at a time; one that has as many is not chosen. When all usable workers have, \
         a request is answered with 429 at once: only max_concurrent_requests has a queue. 0: no limit.",
    ),
    row(
        Section::Limits,
        "max_head_size",
        Kind::Bytes { min: 4 * KIB, max: MIB, set: |c, v| c.max_head_bytes = v as usize },
        "64KiB",
        "Largest request or answer head; a request above it is answered with 431.",
    ),
    row(
        Section::Limits,
        "max_headers",
        Kind::Whole { min: 8, max: 256, set: |c, v| c.max_headers = v as usize },
        "100",
        "Most header lines of a head; a request above it is answered with 431.",
    ),
    row(
        Section::Timeouts,
        "head_timeout_secs",
        Kind::Seconds { min: 0.1, max: 3600.0, set: |c, v| c.head_timeout = v },
        "10",
        "Time for a client to send a whole request head.",
    ),
    row(
        Section::Timeouts,
        "body_timeout_secs",
        Kind::Seconds { min: 0.1, max: 3600.0, set: |c, v| c.body_timeout = v },
        "60",
        "Longest pause between two bytes of a request body; while an early answer of the worker still goes on to the client, \
         a body that is passed on may pause for longer.",
    ),
    row(
        Section::Timeouts,
        "keep_alive_secs",
        Kind::Seconds { min: 0.1, max: 86400.0, set: |c, v| c.keep_alive = v },
        "75",
        "Idle client connections are closed after this.",
    ),
    row(
        Section::Timeouts,
        "request_timeout_secs",
        Kind::Seconds { min: 0.1, max: 604800.0, set: |c, v| c.request_timeout = v },
        "1800",
        "Time for a request from its head to the last byte of its answer.",
    ),
    row(
        Section::Timeouts,
        "first_byte_timeout_secs",
        Kind::Seconds { min: 0.0, max: 604800.0, set: |c, v| c.first_byte_timeout = v },
        "0",
        "From the sending of a request to the first byte of a regular worker's answer; 0: no limit but that of the whole \
         request. An answer that is no stream begins when it is complete. A worker that takes nothing of a body that \
         follows to it has as long.",
    ),
    row(
        Section::Timeouts,
        "write_stall_timeout_secs",
        Kind::Seconds { min: 0.1, max: 3600.0, set: |c, v| c.write_stall_timeout = v },
        "60",
        "A client that takes nothing for this long while its answer is being sent is reset.",
    ),
    row(
        Section::Timeouts,
        "stall_timeout_secs",
        Kind::Seconds { min: 0.0, max: 604800.0, set: |c, v| c.stall_timeout = v },
        "0",
        "A worker's answer that has begun and brings nothing for this long is given up; 0: never.",
    ),
    row(
        Section::Timeouts,
        "half_close",
        Kind::Choice { names: HalfClose::NAMES, set: |c, v| c.half_close = HalfClose::ALL[v] },
        "abort",
        "What it means that a client closes its sending side while it is served. abort: it left, the worker's request \
         is ended at once. serve: it only stopped sending.",
    ),
    row(
        Section::Upstream,
        "connect_timeout_ms",
        Kind::Millis { min: 1, max: 60_000, set: |c, v| c.connect_timeout = v },
        "1000",
        "Time to open a connection to a worker.",
    ),
    row(
        Section::Upstream,
        "pool_idle_ms",
        Kind::Millis { min: 1, max: 3_600_000, set: |c, v| c.pool_idle = v },
        "4000",
        "Idle connections to workers are closed after this. Keep it below the 5 s after which SGLang and vLLM close \
         theirs.",
    ),
    row(
        Section::Upstream,
        "pool_size",
        Kind::Whole { min: 1, max: 65536, set: |c, v| c.pool_size = v as usize },
        "256",
        "Idle connections kept per lane and worker.",
    ),
    row(
        Section::Relaying,
        "relay",
        Kind::Choice { names: Relay::NAMES, set: |c, v| c.relay = Relay::ALL[v] },
        "auto",
        "How answers pass. auto: what is known to be large is moved within the kernel by splice(2), small pieces are \
         copied. splice: all payload is moved by the kernel, which costs more than copying where chunks are small. copy: \
         everything is copied. So it is with bodies of requests on extra_routes, into which nobody looks: one with a \
         Content-Length, of which 1 MiB or more (splice: 32 KiB; copy: never) is still to come, is not held but follows as \
         it comes, on a new connection to the worker, and is not tried at another one when a part of it is gone. \
         An answer that is complete before it ends it: the worker gets no more.",
    ),
    row(
        Section::Relaying,
        "pipes_per_lane",
        Kind::Whole { min: 0, max: 65536, set: |c, v| c.pipes_per_lane = v as usize },
        "64",
        "Pipes that a lane splices through at most; each has two descriptors, and one answer or body has it while bytes are \
         on their way. What gets none is copied.",
    ),
    row(
        Section::Relaying,
        "pipe_size",
        Kind::Bytes { min: 64 * KIB, max: 64 * MIB, set: |c, v| c.pipe_bytes = v as usize },
        "1MiB",
        "What a pipe may hold: how far a worker may be ahead of its client, or a client of its worker. The kernel's limits count \
         (fs.pipe-max-size, fs.pipe-user-pages-soft); where it allows less, pipes are smaller.",
    )
    .at_start(),
    row(
        Section::Retries,
        "retry_max_retries",
        Kind::Whole { min: 1, max: 100, set: |c, v| c.max_attempts = v as u32 },
        "5",
        "Attempts in all, the first included; each further one goes to another worker where there is one.",
    ),
    row(
        Section::Retries,
        "disable_retries",
        Kind::Switch(|c, v| {
            if v {
                c.max_attempts = 1;
            }
        }),
        "false",
        "One attempt only, whatever retry_max_retries says.",
    ),
    row(
        Section::Retries,
        "retry_statuses",
        Kind::Statuses(|c, v| c.retry.statuses = v),
        "408,429,500,502,503,504",
        "Statuses of a worker's answer for which another attempt is made, before the client has seen anything of it; \
         none: no status.",
    ),
    row(
        Section::Retries,
        "retry_unanswered",
        Kind::Switch(|c, v| c.retry.unanswered = v),
        "false",
        "Another attempt is also made when a worker broke off, or was silent longer than its first-byte timeout, before \
         it answered. It may have begun to work on the request, which is then worked on twice.",
    ),
    row(
        Section::Retries,
        "retry_initial_backoff_ms",
        Kind::Millis { min: 0, max: 60_000, set: |c, v| c.retry.backoff = v },
        "50",
        "Pause before the second attempt.",
    ),
    row(
        Section::Retries,
        "retry_max_backoff_ms",
        Kind::Millis { min: 0, max: 600_000, set: |c, v| c.retry.backoff_max = v },
        "30000",
        "Longest pause between attempts. The only worker left may ask for one of up to 5 s (Retry-After); if it asks for more, its \
         answer is passed on.",
    ),
    row(
        Section::Retries,
        "retry_backoff_multiplier",
        Kind::Ratio { min: 1.0, max: 100.0, set: |c, v| c.retry.backoff_factor = v },
        "1.5",
        "Factor from one pause to the next.",
    ),
    row(
        Section::Retries,
        "retry_jitter_factor",
        Kind::Ratio { min: 0.0, max: 1.0, set: |c, v| c.retry.jitter = v },
        "0.2",
        "Part of a pause by which it is made longer or shorter at random.",
    ),
    row(
        Section::Retries,
        "retry_budget",
        Kind::Ratio { min: 0.0, max: 100.0, set: |c, v| c.retry.budget = v },
        "0.2",
        "Further attempts as a share of the requests of a lane, so that an outage is not multiplied; a few are free. \
         Attempts that no worker has seen do not count.",
    ),
    row(
        Section::Health,
        "health_check_endpoint",
        Kind::Target(|c, v| c.health_endpoint = v),
        "/health",
        "Path at which workers are probed.",
    ),
    row(
        Section::Health,
        "health_check_interval_secs",
        Kind::Seconds { min: 0.1, max: 86400.0, set: |c, v| c.health_interval = v },
        "60",
        "Time from one probe of a worker to the next; workers that failed theirs are probed every 5 s at least.",
    ),
    row(
        Section::Health,
        "health_check_timeout_secs",
        Kind::Seconds { min: 0.1, max: 3600.0, set: |c, v| c.health_timeout = v },
        "5",
        "Time for a worker to answer a probe.",
    ),
    row(
        Section::Health,
        "health_failure_threshold",
        Kind::Whole { min: 1, max: 1000, set: |c, v| c.health_failures = v as u32 },
        "3",
        "Failed probes in a row after which a worker gets no more requests.",
    ),
    row(
        Section::Health,
        "health_success_threshold",
        Kind::Whole { min: 1, max: 1000, set: |c, v| c.health_successes = v as u32 },
        "2",
        "Good probes in a row after which it gets requests again.",
    ),
    row(
        Section::Health,
        "disable_health_check",
        Kind::Switch(|c, v| c.health_check = !v),
        "false",
        "No probes: every worker counts as healthy.",
    ),
    row(
        Section::Breaker,
        "cb_failure_threshold",
        Kind::Whole { min: 1, max: 255, set: |c, v| c.breaker.failures = v as u8 },
        "10",
        "Failed requests in a row that open a worker's breaker, so that it gets none. Answers of the classes 2xx to 4xx are \
         successes, 429 and 503 are neither, other 5xx and whatever breaks on the worker's side are failures. At most half \
         of the workers of a model and role are out at a time.",
    ),
    row(
        Section::Breaker,
        "cb_success_threshold",
        Kind::Whole { min: 1, max: 255, set: |c, v| c.breaker.successes = v as u8 },
        "3",
        "Good requests that close a half-open breaker; one failure opens it again. It gets 3 at a time.",
    ),
    row(
        Section::Breaker,
        "cb_timeout_duration_secs",
        Kind::Whole { min: 1, max: MOST_OPEN_S, set: |c, v| c.breaker.open_s = v as u32 },
        "60",
        "Seconds that a breaker is open before it is half-open.",
    ),
    row(
        Section::Breaker,
        "cb_window_duration_secs",
        Kind::Whole { min: 1, max: 86400, set: |c, v| c.breaker.window_s = v as u32 },
        "120",
        "A breaker opens, too, when at least half of at least 20 requests that ended in so many seconds have failed.",
    ),
    row(
        Section::Breaker,
        "disable_circuit_breaker",
        Kind::Switch(|c, v| c.breaker.on = !v),
        "false",
        "No breaker opens. Failures in a row still count as load, so that a worker that fails fast is not preferred.",
    ),
    row(
        Section::Breaker,
        "panic_routing",
        Kind::Switch(|c, v| c.routing.panic = v),
        "false",
        "Where no worker is usable, try the least bad one (that is not draining) instead of answering 503.",
    ),
    row(
        Section::Observing,
        "prometheus_host",
        Kind::Address(|c, v| c.metrics_host = v),
        "127.0.0.1",
        "Address of the metrics and admin listener.",
    )
    .at_start(),
    row(
        Section::Observing,
        "prometheus_port",
        Kind::Whole { min: 0, max: 65535, set: |c, v| c.metrics_port = v as u16 },
        "29000",
        "Port of the metrics and admin listener; 0 takes any free one.",
    )
    .at_start(),
    row(
        Section::Observing,
        "admin_token",
        Kind::Secret(|c, v| c.admin_token = v),
        "",
        "What the admin listener wants as `Authorization: Bearer …` of everybody, but for /metrics, /health, /liveness and \
         /readiness. Without it the listener has to be on loopback.",
    ),
    row(
        Section::Observing,
        "admin_open",
        Kind::Switch(|c, v| c.admin_open = v),
        "false",
        "The admin listener may be beyond loopback without admin_token: whoever reaches it can add and remove workers.",
    ),
    row(
        Section::Observing,
        "log_level",
        Kind::Levels(|c, v| c.log_level = v),
        "info",
        "Least important events that are logged.",
    ),
    row(
        Section::Observing,
        "request_id_headers",
        Kind::HeaderNames(|c, v| c.request_id_headers = v),
        "x-request-id,x-correlation-id,x-trace-id,request-id",
        "Headers that may bring a request's id; the first that is present counts.",
    ),
    row(
        Section::Observing,
        "access_log",
        Kind::Choice { names: AccessLog::NAMES, set: |c, v| c.access_log = AccessLog::ALL[v] },
        "off",
        "Which requests have a line in the access log: none, those that failed (a status from 400 on, cut, or left by the \
         client), those and a sample of the others, or all.",
    )
    .at_start(),
    row(
        Section::Observing,
        "access_log_sample",
        Kind::Whole { min: 1, max: 1_000_000, set: |c, v| c.access_log_sample = v as u32 },
        "100",
        "With access_log = sampled: one of so many requests that went well has a line.",
    ),
    row(
        Section::Observing,
        "access_log_format",
        Kind::Choice { names: AccessFormat::NAMES, set: |c, v| c.access_log_format = AccessFormat::ALL[v] },
        "json",
        "What a line of it looks like: an object of JSON, or name=value pairs.",
    )
    .at_start(),
    row(
        Section::Observing,
        "access_log_path",
        Kind::Name(|c, v| c.access_log_path = v.unwrap_or_else(|| "stderr".into())),
        "stderr",
        "Where it goes: stderr, stdout, or a file, which is opened anew on SIGUSR1.",
    )
    .at_start(),
    row(
        Section::Shutdown,
        "shutdown_settle_secs",
        Kind::Seconds { min: 0.0, max: 600.0, set: |c, v| c.shutdown_settle = v },
        "2",
        "On SIGTERM, how long /readiness says no while requests are still taken, so that balancers notice.",
    ),
    row(
        Section::Shutdown,
        "shutdown_grace_period_secs",
        Kind::Seconds { min: 0.0, max: 86400.0, set: |c, v| c.shutdown_grace = v },
        "600",
        "Then, how long requests in progress may take before they are cut.",
    ),
    row(
        Section::Reload,
        "watch_interval_secs",
        Kind::Seconds { min: 0.0, max: 3600.0, set: |c, v| c.watch_interval = v },
        "1",
        "Time between two looks at whether the configuration file or workers_file has changed; a change is taken over when \
         the next look finds nothing new. 0: only SIGHUP has them read again.",
    ),
];

/// Options of the peers that this version does not have, with what they belong to. A `*` at the end stands for any rest.
pub const LATER: &[(&str, &str)] = &[
    ("tls_cert_path", "TLS towards clients"),
    ("tls_key_path", "TLS towards clients"),
    ("cors_allowed_origins", "CORS"),
    ("rate_limit_tokens_per_second", "limits of rates"),
    ("log_dir", "logs in files; standard error has them"),
    ("service_discovery*", "service discovery"),
    ("selector", "service discovery"),
    ("prefill_selector", "service discovery"),
    ("decode_selector", "service discovery"),
];

/// What an option that comes later belongs to.
pub fn later(key: &str) -> Option<&'static str> {
    let fits = |name: &str| name.strip_suffix('*').map_or(name == key, |start| key.starts_with(start));
    LATER.iter().find(|(name, _)| fits(name)).map(|(_, what)| *what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_unique_and_plain() {
        for (i, row) in OPTIONS.iter().enumerate() {
            assert!(row.key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{}", row.key);
            assert!(OPTIONS[..i].iter().all(|r| r.key != row.key), "{} twice", row.key);
            assert!(later(row.key).is_none(), "{} is here and comes later", row.key);
            assert!(row.prose.ends_with('.'), "{}", row.key);
        }
    }

    #[test]
    fn sections_are_contiguous_and_all_used() {
        let mut seen: Vec<Section> = OPTIONS.iter().map(|r| r.section).collect();
        seen.dedup();
        assert_eq!(seen, Section::ALL);
    }
}
