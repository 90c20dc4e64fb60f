//! One row a metric: name, type, labels, help; exposition and docs derive from it.
//!
//! Takes nothing, gives the rows and the enum by which lanes count. Never holds a value: values live in
//! `shared::tallies` (written by lanes) and are read by `control`.

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
    HandedOver          "corelane_connections_handed_over" ""                      "Client connections given to a lane with fewer.";
    AcceptErrors        "corelane_accept_errors"       ""                          "Accepts that failed (descriptors or memory short).";
    Connects            "corelane_upstream_connects"   ""                          "Connections opened to workers.";
    ConnectFailures     "corelane_upstream_connect_failures" ""                    "Connections to workers that could not be opened.";
    Reuses              "corelane_upstream_reuses"     ""                          "Requests sent on a pooled connection.";
    Replays             "corelane_upstream_replays"    ""                          "Requests repeated because a reused connection turned out dead.";
    Retries             "corelane_retries"             ""                          "Further attempts at another worker.";
    Cuts                "corelane_streams_cut"         ""                          "Answers cut because the worker's side broke.";
    ClientsLeft         "corelane_clients_left"        ""                          "Requests whose client left before the answer was complete.";
    Panics              "corelane_panics"              ""                          "Panics caught; each ended one connection.";
    LateWakes           "corelane_late_wakes"          ""                          "Times a lane slept with runnable work; stays 0.";
    Unconditional       "corelane_reserve_unconditional" ""                        "Reservations that gave up comparing and took what they had.";
    NoBuffers           "corelane_ring_no_buffers"     ""                          "Receives that found the lane's buffer ring empty.";
    Enters              "corelane_ring_enters"         ""                          "System calls of the lanes' rings.";
    Completions         "corelane_ring_completions"    ""                          "Completions of the lanes' rings.";
}

/// Upper bounds in seconds of the latency histograms; 1-2.5-5 steps from 1 ms to 10 min, because a gateway's
/// answers span four decades between a cache hit and a long generation.
pub const LATENCY_BUCKETS: [f64; 18] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];

/// Statuses that are counted one by one; any other is counted as its class's last entry (`2xx` … `5xx`, `0` = cut).
pub const STATUSES: [u16; 24] = [
    0, 200, 204, 206, 299, 304, 399, 400, 401, 403, 404, 405, 408, 413, 417, 422, 429, 431, 499, 500, 501, 502, 503,
    504,
];

/// Place of a status in [`STATUSES`]: its own, or that of its class.
pub fn status_index(status: u16) -> usize {
    match STATUSES.binary_search(&status) {
        Ok(i) => i,
        Err(_) => {
            let class = match status / 100 {
                1 | 2 => 299,
                3 => 399,
                4 => 499,
                _ => 500,
            };
            STATUSES.binary_search(&class).expect("classes stand in the list")
        }
    }
}
