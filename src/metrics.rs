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
    /// Cumulative buckets (see [`LATENCY_BUCKETS`]), sum and count.
    Histogram,
}

impl Kind {
    /// Lower-case name, as in the exposition.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
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
    ($( $metric:ident $kind:ident $name:literal $labels:tt $help:literal; )*) => {
        /// A metric that control works out at scrape time.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Metric { $( #[doc = $help] $metric, )* }

        impl Metric {
            /// All computed metrics, in table order.
            pub const ALL: &'static [Metric] = &[ $( Metric::$metric, )* ];

            /// The metric's row of the table.
            pub const fn row(self) -> Row<'static> {
                match self {
                    $( Metric::$metric => Row { name: $name, kind: Kind::$kind, labels: &$labels, help: $help }, )*
                }
            }
        }
    };
}

computed! {
    BuildInfo        Gauge     "corelane_build_info"         ["version"]           "The running version; always 1.";
    Requests         Counter   "corelane_requests"           ["route", "status"]   "Finished requests by route (`other`: extra routes and unknown paths) and status (`cut`: broken off without one). Only what happened is shown.";
    Faults           Counter   "corelane_faults"             ["code"]              "Faults met, by the code that the client is told, where it is told one.";
    FirstByte        Histogram "corelane_first_byte_seconds" []                    "Seconds from a request's first byte to its answer's first byte.";
    RequestSeconds   Histogram "corelane_request_seconds"    []                    "Seconds from a request's first byte to its answer's last byte.";
    QueueSeconds     Histogram "corelane_queue_seconds"      []                    "Seconds that requests spent in the queue of max_concurrent_requests, let in or not; those that did not have to wait are not among them.";
    QueueLength      Gauge     "corelane_queue_length"       []                    "Requests in the queue of max_concurrent_requests.";
    PermitsInUse     Gauge     "corelane_permits_in_use"     []                    "Requests that are let in by max_concurrent_requests and have not ended; 0 without a limit.";
    WorkerInFlight   Gauge     "corelane_worker_inflight"    ["worker", "role"]    "Requests that the worker has now.";
    WorkerSelected   Counter   "corelane_worker_selected"    ["worker", "role"]    "Times the worker was chosen.";
    WorkerResponses  Counter   "corelane_worker_responses"   ["worker", "role", "status"] "Answers of the worker that were passed on, by class of status; 429 and 503 (it has enough to do) stand alone, `cut`: broken off, by either side. Only what happened is shown.";
    WorkerUp         Gauge     "corelane_worker_up"          ["worker", "role"]    "1 while the worker may be given requests, else 0.";
    WorkerFlips      Counter   "corelane_worker_health_transitions" ["worker", "role", "to"] "Times that what the probes think of the worker came to a state. Only what happened is shown.";
    BreakerState     Gauge     "corelane_worker_breaker_state" ["worker", "role"] "Where the worker's circuit breaker stands: 0 closed, 1 half-open, 2 open.";
    BreakerMoves     Counter   "corelane_breaker_transitions" ["worker", "role", "to"] "Times that the worker's circuit breaker came to a state. Only what happened is shown.";
    Workers          Gauge     "corelane_workers"            ["state"]             "Workers by what the probes think of them.";
    PrefixBytes      Gauge     "corelane_prefix_bytes"       []                    "Memory of the prefix trees, with what waits to be freed.";
    PrefixNodes      Gauge     "corelane_prefix_nodes"       []                    "Nodes of the prefix trees.";
    PrefixOwners     Gauge     "corelane_prefix_owners"      []                    "Workers noted at nodes of the prefix trees.";
    PrefixTrims      Counter   "corelane_prefix_trims"       []                    "Nodes that were forgotten, for age, for want of memory, or because nobody owned them any more.";
    PrefixMerges     Counter   "corelane_prefix_merges"      []                    "Nodes that were merged with their only child.";
    Pipes            Gauge     "corelane_pipes"              ["state"]             "Pipes of the lanes: `used`, by an answer that is being spliced, or `resting`. As of the last half second.";
    LaneConnections  Gauge     "corelane_lane_connections"   ["lane"]              "Client connections by lane.";
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
    Retries             "corelane_retries"             ""                          "Further attempts, at another worker where there is one.";
    Cuts                "corelane_streams_cut"         ""                          "Answers cut because the worker's side broke.";
    ClientsLeft         "corelane_clients_left"        ""                          "Requests whose client left before the answer was complete.";
    Panics              "corelane_panics"              ""                          "Panics caught; each ended one connection.";
    LateWakes           "corelane_late_wakes"          ""                          "Times a lane slept with runnable work; stays 0.";
    Unconditional       "corelane_reserve_unconditional" ""                        "Reservations that gave up comparing and took what they had.";
    DecisionHit         "corelane_cache_decisions"     r#"reason="hit""#           "Decisions of cache_aware: hit (an owner of the prefix), spill (its owners are overloaded), miss (nobody has enough of it), short (no whole block), imbalanced (the fleet is, in fleet mode).";
    DecisionSpill       "corelane_cache_decisions"     r#"reason="spill""#         "Decisions of cache_aware: hit (an owner of the prefix), spill (its owners are overloaded), miss (nobody has enough of it), short (no whole block), imbalanced (the fleet is, in fleet mode).";
    DecisionMiss        "corelane_cache_decisions"     r#"reason="miss""#          "Decisions of cache_aware: hit (an owner of the prefix), spill (its owners are overloaded), miss (nobody has enough of it), short (no whole block), imbalanced (the fleet is, in fleet mode).";
    DecisionShort       "corelane_cache_decisions"     r#"reason="short""#         "Decisions of cache_aware: hit (an owner of the prefix), spill (its owners are overloaded), miss (nobody has enough of it), short (no whole block), imbalanced (the fleet is, in fleet mode).";
    DecisionImbalanced  "corelane_cache_decisions"     r#"reason="imbalanced""#    "Decisions of cache_aware: hit (an owner of the prefix), spill (its owners are overloaded), miss (nobody has enough of it), short (no whole block), imbalanced (the fleet is, in fleet mode).";
    Keyless             "corelane_keyless"             ""                          "Requests that a policy could not tell by a key, because they have no routing key or no whole block of a prompt; they go by least load.";
    PrefixRefused       "corelane_prefix_insertions_refused" ""                    "Prefixes of which a part was not remembered, for want of memory.";
    RelayCopied         "corelane_relay_bytes"         r#"path="copy",direction="down""#   "Payload bytes of workers' answers that went to clients: copied, or moved within the kernel.";
    RelaySpliced        "corelane_relay_bytes"         r#"path="splice",direction="down""# "Payload bytes of workers' answers that went to clients: copied, or moved within the kernel.";
    RelayEvents         "corelane_relay_events"        ""                          "Times something of a worker's answer was given to a client's socket.";
    NoBuffers           "corelane_ring_no_buffers"     ""                          "Receives that found the lane's buffer ring empty.";
    Enters              "corelane_ring_enters"         ""                          "System calls of the lanes' rings.";
    Completions         "corelane_ring_completions"    ""                          "Completions of the lanes' rings.";
}

/// Upper bounds in seconds of the latency histograms; 1-2.5-5 steps from 1 ms to 10 min, because a gateway's
/// answers span four decades between a cache hit and a long generation.
pub const LATENCY_BUCKETS: [f64; 18] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];

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
    let bounds = LATENCY_BUCKETS.iter().map(f64::to_string).collect::<Vec<_>>().join(", ");
    let _ = writeln!(page, "\nUpper bounds of the histograms' buckets, in seconds: {bounds}.");
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
