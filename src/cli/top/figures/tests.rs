//! Figures against readings that are written by hand.

use super::*;
use crate::control::stats::{LaneStats, Prefix, Queue, Traffic};

fn worker(id: &str, url: &str, in_flight: u64, selected: u64) -> WorkerStats {
    WorkerStats {
        id: id.to_owned(),
        url: url.to_owned(),
        role: "regular".to_owned(),
        state: "ready".to_owned(),
        breaker: "closed".to_owned(),
        usable: true,
        in_flight,
        selected,
        answers: vec![selected, 0],
        failures: 0,
    }
}

/// A reading at a second: what happens once a second has happened as often.
pub fn reading(second: u64) -> Stats {
    Stats {
        version: "0.1.0".to_owned(),
        up_ms: second * 1000,
        ready: true,
        draining: false,
        lanes: vec![LaneStats {
            cpu_us: second * 750_000,
            spun_us: second * 500_000,
            connections: 3,
            requests: second,
            tasks: 9,
        }],
        statuses: [("200".to_owned(), second * 10), ("502".to_owned(), second)].into(),
        faults: [("worker_unreachable".to_owned(), second)].into(),
        decisions: [("hit".to_owned(), second * 3), ("miss".to_owned(), second)].into(),
        latency: Latency {
            bounds_us: vec![1000, 2000],
            total: vec![second, second, 0],
            first_byte: vec![second * 4, 0, 0],
            first_token: vec![0, 0, 0],
            event_gap: vec![0, 0, second],
            queue: vec![7, 0, 0],
        },
        queue: Queue { waiting: 2, in_use: 5, permits: 8 },
        traffic: Traffic { copied: second * 2048, spliced: 0, ..Traffic::default() },
        prefix: Prefix { bytes: 3 << 20, budget: 1 << 30, nodes: 4, owners: 5 },
        answer_classes: vec!["2xx".to_owned(), "5xx".to_owned()],
        workers: vec![worker("0-1", "http://b:1", 1, second * 2), worker("1-1", "http://a:1", 4, second)],
    }
}

fn report(seconds: &[u64]) -> Report {
    let mut history = History::default();
    seconds.iter().for_each(|&second| history.push(reading(second)));
    history.report(Order::InFlight).expect("there are readings")
}

#[test]
fn rates_are_differences() {
    let report = report(&[100, 101, 104]);
    assert_eq!(
        report.lines,
        [
            "corelane 0.1.0  ready  up 00:01:44  usable 2/2",
            "requests/s 11.0  failed/s 1.0  in flight 5  queue 2  permits 5/8",
            "copied 2.0 KiB/s  spliced 0 B/s  trees 3.0 MiB/1.0 GiB  kept 0  retries/s 0.0",
            "cache hits 75 %  per s: hit 3.0 miss 1.0",
            "answers/s  200 10.0  502 1.0",
            "faults  worker_unreachable 104",
        ]
    );
    assert_eq!(report.lanes.rows, [["0", "25 %", "3", "1.0", "9"]]);
    assert_eq!(
        report.latency.rows,
        [
            ["whole answer", "1.0 ms", "1.8 ms", "2.0 ms", "8"],
            ["first byte", "500 us", "900 us", "990 us", "16"],
            ["first token", "-", "-", "-", "0"],
            ["event gap", "beyond", "beyond", "beyond", "4"],
            ["in queue", "-", "-", "-", "0"],
        ]
    );
    assert_eq!(
        report.workers.rows,
        [
            ["a:1", "regular", "ready", "closed", "4", "1.0", "104", "0", "104", "0"],
            ["b:1", "regular", "ready", "closed", "1", "2.0", "208", "0", "208", "0"],
        ]
    );
}

#[test]
fn one_reading_has_no_rates_and_a_new_start_begins_anew() {
    for report in [report(&[5]), report(&[100, 5])] {
        assert!(report.lines[1].starts_with("requests/s -  failed/s -  in flight 5"), "{:?}", report.lines);
        assert_eq!(report.lanes.rows[0][1], "-");
        assert_eq!(report.workers.rows[0][5], "-");
    }
    // Old readings go.
    let mut history = History::default();
    (0..20).for_each(|second| history.push(reading(second)));
    assert_eq!(history.0.iter().map(|s| s.up_ms / 1000).collect::<Vec<_>>(), [14, 15, 16, 17, 18, 19]);
}

#[test]
fn workers_stand_in_the_order_that_is_wanted() {
    let mut history = History::default();
    for second in [1, 2] {
        let mut stats = reading(second);
        stats.workers.push(WorkerStats { usable: false, ..worker("2-1", "http://c:1", 0, 0) });
        history.push(stats);
    }
    for (order, wanted) in [
        (Order::InFlight, ["a:1", "b:1", "c:1"]),
        (Order::Chosen, ["b:1", "a:1", "c:1"]),
        (Order::Trouble, ["c:1", "a:1", "b:1"]),
        (Order::Name, ["a:1", "b:1", "c:1"]),
    ] {
        let report = history.report(order).expect("readings");
        assert_eq!(report.workers.rows.iter().map(|row| row[0].as_str()).collect::<Vec<_>>(), wanted, "{order:?}");
    }
}

#[test]
fn what_others_name_cannot_steer_the_terminal() {
    let mut history = History::default();
    let mut stats = reading(1);
    stats.workers[0].url = "http://x\x1b]0;title\x07\u{9b}2J".to_owned();
    stats.faults = [("\x1b[2J".to_owned(), 1)].into();
    history.push(stats);
    let text = history.report(Order::Name).expect("a reading").text();
    assert!(!text.contains(['\x1b', '\x07', '\u{9b}']) && text.contains("x?]0;title??2J"), "{text}");
}
