//! One row a metric: name, type, labels, help; exposition and docs derive from it.
//!
//! Takes nothing, gives the rows and the enum by which lanes count. Never holds a value: values live in
//! `shared` (written by lanes) and are read by `control` when somebody asks. Two parts make the table: plain
//! counters of lanes ([`Tally`]) and what control works out of other shared state ([`Metric`]).

use std::fmt::Write;

/// What a metric's values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows; exposed with the suffix `_total`.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Cumulative buckets, sum and count.
    Histogram(Scale),
}

/// Buckets of a histogram, in the whole numbers that lanes count in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Microseconds, exposed as seconds; 1-2.5-5 steps from 1 ms to 10 min, because a gateway's answers span four
    /// decades between a cache hit and a long generation.
    Latency,
    /// Percent, exposed as a ratio.
    Share,
    /// Things, by powers of 2.
    Batch,
}

/// Bounds of the scale that has the most.
pub const MOST_BOUNDS: usize = 18;

impl Scale {
    /// Upper bounds, each included in its bucket; at most [`MOST_BOUNDS`]. What is above the last has one more bucket.
    pub const fn bounds(self) -> &'static [u64] {
        match self {
            Scale::Latency => &[
                1_000,
                2_500,
                5_000,
                10_000,
                25_000,
                50_000,
                100_000,
                250_000,
                500_000,
                1_000_000,
                2_500_000,
                5_000_000,
                10_000_000,
                30_000_000,
                60_000_000,
                120_000_000,
                300_000_000,
                600_000_000,
            ],
            Scale::Share => &[0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100],
            Scale::Batch => &[0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024],
        }
    }

    /// How many of what lanes count are one of the unit exposed.
    pub const fn per_unit(self) -> f64 {
        match self {
            Scale::Latency => 1e6,
            Scale::Share => 100.0,
            Scale::Batch => 1.0,
        }
    }

    /// The bucket of a value.
    #[inline]
    pub fn place(self, value: u64) -> usize {
        self.bounds().partition_point(|&bound| bound < value)
    }
}

/// What of a request takes time. The discriminant is the histogram's place in a block of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Time {
    /// From the request's first byte to the answer's first byte.
    FirstByte,
    /// From the request's first byte to the first bytes of the body of an answer that is a stream.
    FirstToken,
    /// From one thing that a stream's client is given to the next.
    Gap,
    /// From the request's first byte to the answer's last byte.
    Total,
    /// In the queue of the admission.
    Queue,
}

/// Histograms in a block.
pub const TIMES: usize = Time::ALL.len();

impl Time {
    /// All of them, in the order of their discriminants.
    pub const ALL: [Time; 5] = [Time::FirstByte, Time::FirstToken, Time::Gap, Time::Total, Time::Queue];
}

impl Kind {
    /// Lower-case name, as in the exposition.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram(_) => "histogram",
        }
    }
}

/// A row of the metric table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row<'a> {
    /// Name without the suffixes that exposition adds (`_total`, `_bucket`, `_sum`, `_count`).
    pub name: &'static str,
    pub kind: Kind,
    /// Label names, in the order of exposition.
    pub labels: &'a [&'static str],
    /// One line of prose.
    pub help: &'static str,
}

macro_rules! computed {
    ($( $metric:ident $kind:ident $(($scale:ident))? $name:literal $labels:tt $help:literal; )*) => {
        /// A metric that control works out at scrape time.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Metric { $( #[doc = $help] $metric, )* }

        impl Metric {
            /// All computed metrics, in table order.
            pub const ALL: &'static [Metric] = &[ $( Metric::$metric, )* ];

            /// The metric's row of the table.
            pub const fn row(self) -> Row<'static> {
                match self {
                    $( Metric::$metric => Row { name: $name, kind: Kind::$kind $((Scale::$scale))?, labels: &$labels, help: $help }, )*
                }
            }
        }
    };
}

computed! {
    BuildInfo        Gauge     "corelane_build_info"         ["version"]           "The running version; always 1.";
    Requests         Counter   "corelane_requests"           ["route", "status"]   "Finished requests by route (`other`: extra routes and unknown paths) and status (`cut`: broken off without one). Only what happened is shown.";
    Faults           Counter   "corelane_faults"             ["code"]              "Faults met, by the code that the client is told, where it is told one.";
    FirstByte        Histogram(Latency) "corelane_first_byte_seconds" ["route"]    "Seconds from a request's first byte to its answer's first byte, of what workers answered.";
    FirstToken       Histogram(Latency) "corelane_first_token_seconds" ["route"]   "Seconds from a request's first byte to the first bytes of the body of an answer that is a stream (TTFT).";
    EventGap         Histogram(Latency) "corelane_event_gap_seconds" ["route"]     "Seconds between two things that the client of a stream was given.";
    RequestSeconds   Histogram(Latency) "corelane_request_seconds" ["route"]       "Seconds from a request's first byte to its answer's last byte, of what workers answered.";
    QueueSeconds     Histogram(Latency) "corelane_queue_seconds" ["route"]         "Seconds that requests spent in the queue of max_concurrent_requests, let in or not; those that did not have to wait are not among them.";
    ModelRequests    Counter   "corelane_model_requests"      ["model", "status"]  "Finished requests by model and class of status, as for corelane_worker_responses_total. Models are those of the roster, 64 at most; `other`: any other model, and none.";
    ModelFirstByte   Histogram(Latency) "corelane_model_first_byte_seconds" ["model"] "The same as corelane_first_byte_seconds, by model.";
    ModelFirstToken  Histogram(Latency) "corelane_model_first_token_seconds" ["model"] "The same as corelane_first_token_seconds, by model.";
    ModelEventGap    Histogram(Latency) "corelane_model_event_gap_seconds" ["model"] "The same as corelane_event_gap_seconds, by model.";
    ModelSeconds     Histogram(Latency) "corelane_model_request_seconds" ["model"] "The same as corelane_request_seconds, by model.";
    ModelQueue       Histogram(Latency) "corelane_model_queue_seconds" ["model"]   "The same as corelane_queue_seconds, by model.";
    QueueLength      Gauge     "corelane_queue_length"       []                    "Requests in the queue of max_concurrent_requests.";
    PermitsInUse     Gauge     "corelane_permits_in_use"     []                    "Requests that are let in by max_concurrent_requests and have not ended; 0 without a limit.";
    BodyMemory       Gauge     "corelane_body_memory_bytes"  []                    "Bytes that count towards body_memory: of buffered requests and answers above 64 KiB.";
    WorkerInFlight   Gauge     "corelane_worker_inflight"    ["worker", "role"]    "Requests that the worker has now.";
    WorkerSelected   Counter   "corelane_worker_selected"    ["worker", "role"]    "Times the worker was chosen.";
    WorkerResponses  Counter   "corelane_worker_responses"   ["worker", "role", "status"] "Answers of the worker that were passed on, by class of status; 429 and 503 (it has enough to do) stand alone, `cut`: broken off, by either side. Only what happened is shown.";
    WorkerFailures   Counter   "corelane_worker_failures"    ["worker", "role"]    "Requests that failed by the worker's fault, as its breaker counts them.";
    WorkerWaits      Counter   "corelane_worker_first_byte_seconds" ["worker", "role"] "Seconds from the last byte of a request to the first of the worker's answer, summed up over all of its answers.";
    WorkerUp         Gauge     "corelane_worker_up"          ["worker", "role"]    "1 while the worker may be given requests, else 0.";
    WorkerFlips      Counter   "corelane_worker_health_transitions" ["worker", "role", "to"] "Times that what the probes think of the worker came to a state. Only what happened is shown.";
    BreakerState     Gauge     "corelane_worker_breaker_state" ["worker", "role"] "Where the worker's circuit breaker stands: 0 closed, 1 half-open, 2 open.";
    BreakerMoves     Counter   "corelane_breaker_transitions" ["worker", "role", "to"] "Times that the worker's circuit breaker came to a state. Only what happened is shown.";
    WorkerUsage      Gauge     "corelane_worker_kv_usage"    ["worker", "role"]    "Used part of the worker's KV cache, from 0 to 1, as its engine says; only where that is polled and known.";
    WorkerWaiting    Gauge     "corelane_worker_waiting"     ["worker", "role"]    "Requests that wait in the worker's engine, as it says; only where that is polled and known.";
    WorkerShed       Gauge     "corelane_worker_shed"        ["worker", "role"]    "1 while the worker is left out for what its engine says of its load, else 0; only where that is polled and known.";
    Workers          Gauge     "corelane_workers"            ["state"]             "Workers by what the probes think of them.";
    MatchRatio       Histogram(Share) "corelane_cache_match_ratio" []              "Share of a prompt that a usable worker is known to have, of the worker that has the most; of every choice by cache_aware that looked.";
    Reloads          Counter   "corelane_reloads"            ["result"]            "Times the configuration was read again: `applied`, `unchanged` (it said what was in effect already) or `refused` (it had mistakes, nothing was changed).";
    ConfigGeneration Gauge     "corelane_config_generation"  []                    "Number of the configuration in effect; 1 is that of the start.";
    PrefixBytes      Gauge     "corelane_prefix_bytes"       []                    "Memory of the prefix trees, with what waits to be freed.";
    PrefixNodes      Gauge     "corelane_prefix_nodes"       []                    "Nodes of the prefix trees.";
    PrefixOwners     Gauge     "corelane_prefix_owners"      []                    "Workers noted at nodes of the prefix trees.";
    PrefixTrims      Counter   "corelane_prefix_trims"       []                    "Nodes that were forgotten, for age, for want of memory, or because nobody owned them any more.";
    PrefixMerges     Counter   "corelane_prefix_merges"      []                    "Nodes that were merged with their only child.";
    Pipes            Gauge     "corelane_pipes"              ["state"]             "Pipes of the lanes: `used`, by an answer or a body that is being spliced, or `resting`. As of the last half second.";
    PoolIdle         Gauge     "corelane_upstream_idle"      []                    "Idle connections to workers that are kept. As of the last half second.";
    LaneConnections  Gauge     "corelane_lane_connections"   ["lane"]              "Client connections by lane.";
    LaneCpu          Counter   "corelane_lane_cpu_seconds"   ["lane"]              "CPU time of the lane's thread, the kernel's part included; its rate is the share of the core that the lane uses. As of the last half second.";
    LaneSpun         Counter   "corelane_lane_spun_seconds"  ["lane"]              "Part of the lane's CPU time in which it looked for work in vain, see `busy_poll_us`. As of the last half second.";
    LaneTasks        Gauge     "corelane_lane_tasks"         ["lane"]              "Tasks of the lane: one a connection and a few of its own. As of the last half second.";
    RingBatch        Histogram(Batch) "corelane_lane_ring_batch" ["lane"]          "Completions that one system call of the lane's ring brought. As of the last half second.";
    AccessLines      Counter   "corelane_access_log_lines"   ["result"]            "Lines of the access log by what became of them: `written`, or `failed` where they could not be.";
}

macro_rules! lane_counters {
    ($( $tally:ident $name:literal $labels:literal $help:literal; )*) => {
        /// A plain counter of a lane. The discriminant is its place in the lane's block.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Tally { $( #[doc = $help] $tally, )* }

        impl Tally {
            /// All counters, in table order.
            pub const ALL: &'static [Tally] = &[ $( Tally::$tally, )* ];

            /// Metric name without the `_total` suffix that exposition adds, fixed labels (`key="value"`, or
            /// empty) and help text. Rows with one name are one metric with several label sets.
            pub const fn row(self) -> (&'static str, &'static str, &'static str) {
                match self { $( Tally::$tally => ($name, $labels, $help), )* }
            }
        }
    };
}

lane_counters! {
    ClientBytesIn       "corelane_bytes"               r#"direction="in""#        "Bytes received from and sent to clients.";
    ClientBytesOut      "corelane_bytes"               r#"direction="out""#       "Bytes received from and sent to clients.";
    Accepted            "corelane_connections_accepted" ""                         "Client connections accepted.";
    TurnedAway          "corelane_connections_turned_away" ""                      "Client connections that were answered with 503 or closed, because their lane had max_connections_per_lane.";
    HandedOver          "corelane_connections_handed_over" ""                      "Client connections given to a lane with fewer.";
    AcceptErrors        "corelane_accept_errors"       ""                          "Accepts that failed (descriptors or memory short).";
    Connects            "corelane_upstream_connects"   ""                          "Attempts to open a connection to a worker.";
    ConnectFailures     "corelane_upstream_connect_failures" ""                    "Connections to workers that could not be opened.";
    Reuses              "corelane_upstream_reuses"     ""                          "Requests sent on a pooled connection.";
    Replays             "corelane_upstream_replays"    ""                          "Requests repeated because a reused connection turned out dead.";
    ClosedIdle          "corelane_upstream_closed"     r#"reason="idle""#          "Kept connections to workers that were closed: idle for too long, ended by the worker, full (enough are kept), gone (with the worker), draining; and unfit, after their answer, to be kept.";
    ClosedEnded         "corelane_upstream_closed"     r#"reason="ended""#         "Kept connections to workers that were closed: idle for too long, ended by the worker, full (enough are kept), gone (with the worker), draining; and unfit, after their answer, to be kept.";
    ClosedFull          "corelane_upstream_closed"     r#"reason="full""#          "Kept connections to workers that were closed: idle for too long, ended by the worker, full (enough are kept), gone (with the worker), draining; and unfit, after their answer, to be kept.";
    ClosedGone          "corelane_upstream_closed"     r#"reason="gone""#          "Kept connections to workers that were closed: idle for too long, ended by the worker, full (enough are kept), gone (with the worker), draining; and unfit, after their answer, to be kept.";
    ClosedDraining      "corelane_upstream_closed"     r#"reason="draining""#      "Kept connections to workers that were closed: idle for too long, ended by the worker, full (enough are kept), gone (with the worker), draining; and unfit, after their answer, to be kept.";
    ClosedUnfit         "corelane_upstream_closed"     r#"reason="unfit""#         "Kept connections to workers that were closed: idle for too long, ended by the worker, full (enough are kept), gone (with the worker), draining; and unfit, after their answer, to be kept.";
    Retries             "corelane_retries"             ""                          "Further attempts, at another worker where there is one.";
    Cuts                "corelane_streams_cut"         ""                          "Answers cut because the worker's side broke.";
    ClientsLeft         "corelane_clients_left"        ""                          "Requests whose client left before the answer was complete.";
    Panics              "corelane_panics"              ""                          "Panics caught; each ended one connection.";
    LateWakes           "corelane_late_wakes"          ""                          "Times a lane slept, or looked for work in vain, with a task that could run; stays 0.";
    Unconditional       "corelane_reserve_unconditional" ""                        "Reservations that gave up comparing and took what they had.";
    DecisionHit         "corelane_cache_decisions"     r#"reason="hit""#           "Decisions of cache_aware: hit (an owner of the prefix), spill (its owners are overloaded), miss (nobody has enough of it), short (no whole block), imbalanced (the fleet is, in fleet mode), shed (its owners are, for what their engines say of their load), uneven (use of the engines' KV caches).";
    DecisionSpill       "corelane_cache_decisions"     r#"reason="spill""#         "Decisions of cache_aware: hit (an owner of the prefix), spill (its owners are overloaded), miss (nobody has enough of it), short (no whole block), imbalanced (the fleet is, in fleet mode), shed (its owners are, for what their engines say of their load), uneven (use of the engines' KV caches).";
    DecisionMiss        "corelane_cache_decisions"     r#"reason="miss""#          "Decisions of cache_aware: hit (an owner of the prefix), spill (its owners are overloaded), miss (nobody has enough of it), short (no whole block), imbalanced (the fleet is, in fleet mode), shed (its owners are, for what their engines say of their load), uneven (use of the engines' KV caches).";
    DecisionShort       "corelane_cache_decisions"     r#"reason="short""#         "Decisions of cache_aware: hit (an owner of the prefix), spill (its owners are overloaded), miss (nobody has enough of it), short (no whole block), imbalanced (the fleet is, in fleet mode), shed (its owners are, for what their engines say of their load), uneven (use of the engines' KV caches).";
    DecisionImbalanced  "corelane_cache_decisions"     r#"reason="imbalanced""#    "Decisions of cache_aware: hit (an owner of the prefix), spill (its owners are overloaded), miss (nobody has enough of it), short (no whole block), imbalanced (the fleet is, in fleet mode), shed (its owners are, for what their engines say of their load), uneven (use of the engines' KV caches).";
    DecisionShed        "corelane_cache_decisions"     r#"reason="shed""#          "Decisions of cache_aware: hit (an owner of the prefix), spill (its owners are overloaded), miss (nobody has enough of it), short (no whole block), imbalanced (the fleet is, in fleet mode), shed (its owners are, for what their engines say of their load), uneven (use of the engines' KV caches).";
    DecisionUneven      "corelane_cache_decisions"     r#"reason="uneven""#        "Decisions of cache_aware: hit (an owner of the prefix), spill (its owners are overloaded), miss (nobody has enough of it), short (no whole block), imbalanced (the fleet is, in fleet mode), shed (its owners are, for what their engines say of their load), uneven (use of the engines' KV caches).";
    Keyless             "corelane_keyless"             ""                          "Requests that a policy could not tell by a key, because they have no routing key or no whole block of a prompt; they go by least load.";
    PrefixRefused       "corelane_prefix_insertions_refused" ""                    "Prefixes of which a part was not remembered, for want of memory.";
    RelayCopied         "corelane_relay_bytes"         r#"path="copy",direction="down""#   "Payload bytes that passed: copied, or moved within the kernel; down: of workers' answers to clients, up: of requests' bodies that were not held first.";
    RelaySpliced        "corelane_relay_bytes"         r#"path="splice",direction="down""# "Payload bytes that passed: copied, or moved within the kernel; down: of workers' answers to clients, up: of requests' bodies that were not held first.";
    UploadCopied        "corelane_relay_bytes"         r#"path="copy",direction="up""#   "Payload bytes that passed: copied, or moved within the kernel; down: of workers' answers to clients, up: of requests' bodies that were not held first.";
    UploadSpliced       "corelane_relay_bytes"         r#"path="splice",direction="up""#   "Payload bytes that passed: copied, or moved within the kernel; down: of workers' answers to clients, up: of requests' bodies that were not held first.";
    RelayEvents         "corelane_relay_events"        r#"path="copy""#            "Times something of a worker's answer was given to a client's socket.";
    RelaySplices        "corelane_relay_events"        r#"path="splice""#          "Times something of a worker's answer was given to a client's socket.";
    RelaySteady         "corelane_relay_steady"        ""                          "Copied events for which no task ran: the ring sent them on as they arrived (kernel 6.1 or newer).";
    AccessLogDropped    "corelane_access_log_dropped"  ""                          "Lines that the access log lacks because they came faster than they could be written.";
    NoBuffers           "corelane_ring_no_buffers"     ""                          "Receives that found the lane's buffer ring empty.";
    Enters              "corelane_ring_enters"         ""                          "System calls of the lanes' rings.";
    Completions         "corelane_ring_completions"    ""                          "Completions of the lanes' rings.";
}

/// Statuses that are counted one by one; any other is counted as its class's last entry (`2xx` … `5xx`, `0` = cut).
pub const STATUSES: [u16; 25] = [
    0, 200, 204, 206, 299, 304, 399, 400, 401, 403, 404, 405, 408, 413, 417, 422, 429, 431, 499, 500, 501, 502, 503,
    504, 599,
];

/// Classes in which the answers of each worker are counted; few, because every lane has them for every slot.
pub const WORKER_STATUSES: [&str; 7] = ["2xx", "3xx", "4xx", "429", "503", "5xx", "cut"];

/// Place of a status in [`WORKER_STATUSES`]; 0 stands for an answer that was cut.
pub fn worker_status_index(status: u16) -> usize {
    match status {
        0 => 6,
        1..=299 => 0,
        300..=399 => 1,
        429 => 3,
        400..=499 => 2,
        503 => 4,
        _ => 5,
    }
}

/// Place of a status in [`STATUSES`]: its own, or that of its class.
pub fn status_index(status: u16) -> usize {
    match STATUSES.binary_search(&status) {
        Ok(i) => i,
        Err(_) => {
            let class = match status / 100 {
                1 | 2 => 299,
                3 => 399,
                4 => 499,
                _ => 599,
            };
            STATUSES.binary_search(&class).expect("classes stand in the list")
        }
    }
}

/// Label of an entry of [`STATUSES`].
pub fn status_label(status: u16) -> String {
    match status {
        0 => "cut".into(),
        299 | 399 | 499 | 599 => format!("{}xx", status / 100),
        _ => status.to_string(),
    }
}

impl Tally {
    /// The fixed labels of the row, as names and values.
    pub fn labels(self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.row().1.split(',').filter_map(|label| {
            let (name, value) = label.split_once('=')?;
            Some((name, value.trim_matches('"')))
        })
    }
}

/// The table: every metric that is exposed, one row a name.
pub fn table() -> Vec<Row<'static>> {
    let mut rows: Vec<Row<'static>> = Metric::ALL.iter().map(|m| m.row()).collect();
    for tally in Tally::ALL {
        let (name, _, help) = tally.row();
        if rows.iter().any(|r| r.name == name) {
            continue;
        }
        let names: Vec<&str> = tally.labels().map(|(name, _)| name).collect();
        let labels: &'static [&'static str] = match names[..] {
            [] => &[],
            ["direction"] => &["direction"],
            ["path", "direction"] => &["path", "direction"],
            ["path"] => &["path"],
            ["reason"] => &["reason"],
            _ => unreachable!("labels of lane counters without a place in the table: {names:?}"),
        };
        rows.push(Row { name, kind: Kind::Counter, labels, help });
    }
    rows
}

/// The table as the text of `tuning/metrics.md`.
pub fn markdown() -> String {
    let mut page = String::from(
        "# Metrics\n\nServed as OpenMetrics text at `GET /metrics` of the admin listener. Written from the table in \
         `src/metrics.rs` (`CORELANE_BLESS=1 cargo test metrics` rewrites this page).\n\n\
         | metric | type | labels | meaning |\n|---|---|---|---|\n",
    );
    for row in table() {
        let suffix = if row.kind == Kind::Counter { "_total" } else { "" };
        let labels = row.labels.iter().map(|l| format!("`{l}`")).collect::<Vec<_>>().join(", ");
        let _ = writeln!(page, "| `{}{suffix}` | {} | {labels} | {} |", row.name, row.kind.name(), row.help);
    }
    let bounds = |scale: Scale| {
        let shown = |&bound: &u64| (bound as f64 / scale.per_unit()).to_string();
        scale.bounds().iter().map(shown).collect::<Vec<_>>().join(", ")
    };
    let [seconds, ratios, counts] = [Scale::Latency, Scale::Share, Scale::Batch].map(bounds);
    let _ = writeln!(
        page,
        "\nUpper bounds of the histograms' buckets, in seconds: {seconds}; of ratios: {ratios}; of batches: {counts}.\n\n\
         Series of a worker or a model that is gone are gone, too; one that comes back starts at 0."
    );
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_page_matches_the_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tuning/metrics.md");
        if std::env::var_os("CORELANE_BLESS").is_some() {
            std::fs::write(path, markdown()).expect("the page can be written");
        }
        let page = std::fs::read_to_string(path).unwrap_or_default();
        assert!(page == markdown(), "tuning/metrics.md is stale; CORELANE_BLESS=1 cargo test metrics rewrites it");
    }

    #[test]
    fn rows_are_well_formed() {
        let rows = table();
        for (i, row) in rows.iter().enumerate() {
            let plain = |s: &str| s.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
            assert!(row.name.starts_with("corelane_") && plain(row.name), "{}", row.name);
            assert!(!row.name.ends_with("_total"), "{}: the suffix is added", row.name);
            assert!(row.labels.iter().all(|l| plain(l) && *l != "le"), "{}", row.name);
            // The encoder writes help as it is: nothing in it may need escaping.
            assert!(row.help.ends_with('.') && !row.help.contains(['\\', '\n', '"', '|']), "{}", row.name);
            assert!(rows[i + 1..].iter().all(|other| other.name != row.name), "{} twice", row.name);
        }
    }

    #[test]
    fn statuses_find_their_place_and_label() {
        for (status, label) in [
            (0, "cut"),
            (100, "2xx"),
            (200, "200"),
            (201, "2xx"),
            (302, "3xx"),
            (404, "404"),
            (418, "4xx"),
            (499, "4xx"),
        ] {
            assert_eq!(status_label(STATUSES[status_index(status)]), label);
        }
        for (status, label) in [(500, "500"), (505, "5xx"), (599, "5xx"), (700, "5xx")] {
            assert_eq!(status_label(STATUSES[status_index(status)]), label);
        }
        assert!(STATUSES.is_sorted());
        for (status, label) in [
            (0, "cut"),
            (200, "2xx"),
            (302, "3xx"),
            (404, "4xx"),
            (429, "429"),
            (500, "5xx"),
            (503, "503"),
            (999, "5xx"),
        ] {
            assert_eq!(WORKER_STATUSES[worker_status_index(status)], label);
        }
    }
}
