//! From readings of a gateway to tables: rates, shares, quantiles, as text.
//!
//! Takes [`Stats`], gives a [`Report`] of cells that hold no control characters. Never asks anybody, never reads a clock:
//! time is the gateway's own.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt::Write;

use crate::control::stats::{LaneStats, Latency, Stats, WorkerStats};

/// Rates and quantiles are of so many milliseconds: CPU time comes each half second, so less would be uneven.
const WINDOW_MS: u64 = 5500;

/// What stands for a figure that there is none of.
const NONE: &str = "-";

/// In which order workers are shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Those with the most requests first.
    #[default]
    InFlight,
    /// Those that are chosen most often now first.
    Chosen,
    /// Those that cannot be used first, then those with the most failures.
    Trouble,
    /// By role and address.
    Name,
}

impl Order {
    pub const ALL: [Order; 4] = [Order::InFlight, Order::Chosen, Order::Trouble, Order::Name];

    pub const fn name(self) -> &'static str {
        match self {
            Order::InFlight => "in flight",
            Order::Chosen => "chosen/s",
            Order::Trouble => "trouble",
            Order::Name => "name",
        }
    }
}

/// A table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Grid {
    pub heads: Vec<String>,
    pub rows: Vec<Vec<String>>,
    /// So many columns hold text and begin at their left, the others end at their right.
    pub left: usize,
}

/// What is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Lines above the tables, for a screen of 80 columns.
    pub lines: Vec<String>,
    pub latency: Grid,
    pub lanes: Grid,
    pub workers: Grid,
    /// So many of the workers' columns, the last ones, are answers by class: a narrow screen has no room for them.
    pub classes: usize,
}

/// The readings of the last seconds, oldest first.
#[derive(Default)]
pub struct History(Vec<Stats>);

impl History {
    /// Adds a reading; a gateway that was started anew begins a new history.
    pub fn push(&mut self, now: Stats) {
        if self.0.last().is_some_and(|last| last.up_ms >= now.up_ms) {
            self.0.clear();
        }
        self.0.retain(|old| now.up_ms - old.up_ms <= WINDOW_MS);
        self.0.push(now);
    }

    /// The newest reading against the oldest; `None` before there is one.
    pub fn report(&self, order: Order) -> Option<Report> {
        let now = self.0.last()?;
        let old = self.0.first().filter(|_| self.0.len() > 1);
        Some(Change { now, old }.report(order))
    }
}

/// Two readings.
struct Change<'a> {
    now: &'a Stats,
    /// `None`: there is one only, and no rate is known.
    old: Option<&'a Stats>,
}

impl Change<'_> {
    fn report(&self, order: Order) -> Report {
        let now = self.now;
        Report {
            lines: self.lines(),
            latency: self.latency(),
            lanes: self.lanes(),
            workers: self.workers(order),
            classes: now.answer_classes.len(),
        }
    }

    /// How often something happened in a second.
    fn rate(&self, of: impl Fn(&Stats) -> u64) -> Option<f64> {
        let old = self.old?;
        let seconds = self.now.up_ms.saturating_sub(old.up_ms) as f64 / 1e3;
        (seconds > 0.0).then(|| of(self.now).saturating_sub(of(old)) as f64 / seconds)
    }

    fn lines(&self) -> Vec<String> {
        let Stats { queue, traffic, prefix, .. } = self.now;
        let state = match (self.now.draining, self.now.ready) {
            (true, _) => "draining",
            (false, true) => "ready",
            (false, false) => "not ready",
        };
        let finished = self.rate(|s| s.statuses.values().sum());
        let failed = self.rate(|s| s.statuses.iter().filter(|(status, _)| is_bad(status)).map(|(_, n)| n).sum());
        let in_flight: u64 = self.now.workers.iter().map(|w| w.in_flight).sum();
        let usable = self.now.workers.iter().filter(|w| w.usable).count();
        let permits = match queue.permits {
            0 => "no limit".to_owned(),
            permits => format!("permits {}/{permits}", queue.in_use),
        };
        let decided = self.rate(|s| s.decisions.values().sum()).filter(|&all| all > 0.0);
        let hits = self.rate(|s| s.decisions.get("hit").copied().unwrap_or(0));
        let hit_rate = decided.zip(hits).map(|(all, hits)| hits / all);
        let mut decisions = format!("cache hits {}  per s:", share(hit_rate));
        for reason in self.now.decisions.keys() {
            let of_reason = self.rate(|s| s.decisions.get(reason).copied().unwrap_or(0));
            // Writing to a string does not fail.
            let _ = write!(decisions, " {} {}", plain(reason), rate(of_reason));
        }
        let mut answers = "answers/s".to_owned();
        for status in self.now.statuses.keys() {
            let of_status = self.rate(|s| s.statuses.get(status).copied().unwrap_or(0));
            let _ = write!(answers, "  {} {}", plain(status), rate(of_status));
        }
        let mut faults = "faults".to_owned();
        for (code, n) in &self.now.faults {
            let _ = write!(faults, "  {} {}", plain(code), whole(*n));
        }
        let per = |of: fn(&Stats) -> u64| self.rate(of).map_or(NONE.to_owned(), |n| bytes(n as u64) + "/s");
        vec![
            format!(
                "corelane {}  {state}  up {}  usable {usable}/{}",
                plain(&self.now.version),
                age(self.now.up_ms),
                self.now.workers.len()
            ),
            format!(
                "requests/s {}  failed/s {}  in flight {}  queue {}  {permits}",
                rate(finished),
                rate(failed),
                whole(in_flight),
                whole(queue.waiting),
            ),
            format!(
                "copied {}  spliced {}  trees {}/{}  kept {}  retries/s {}",
                per(|s| s.traffic.copied),
                per(|s| s.traffic.spliced),
                bytes(prefix.bytes),
                bytes(prefix.budget),
                whole(traffic.idle),
                rate(self.rate(|s| s.traffic.retries)),
            ),
            decisions,
            answers,
            faults,
        ]
    }

    fn latency(&self) -> Grid {
        type Of = fn(&Latency) -> &Vec<u64>;
        let kinds: [(&str, Of); 5] = [
            ("whole answer", |l| &l.total),
            ("first byte", |l| &l.first_byte),
            ("first token", |l| &l.first_token),
            ("event gap", |l| &l.event_gap),
            ("in queue", |l| &l.queue),
        ];
        let row = |(name, of): (&str, Of)| {
            let now = of(&self.now.latency);
            let old = self.old.map_or(&[][..], |old| of(&old.latency));
            let counts: Vec<u64> =
                now.iter().enumerate().map(|(i, n)| n.saturating_sub(old.get(i).copied().unwrap_or(0))).collect();
            let at = |q| time(quantile(&self.now.latency.bounds_us, &counts, q));
            vec![name.to_owned(), at(0.5), at(0.9), at(0.99), whole(counts.iter().sum())]
        };
        Grid { heads: heads(&["latency", "p50", "p90", "p99", "count"]), rows: kinds.map(row).into(), left: 1 }
    }

    fn lanes(&self) -> Grid {
        let row = |at: usize| {
            let lane = self.now.lanes[at];
            let of = |pick: fn(&LaneStats) -> u64| self.rate(|s| s.lanes.get(at).map_or(0, pick));
            let busy = of(|lane| lane.cpu_us.saturating_sub(lane.spun_us)).map(|us| (us / 1e6).min(1.0));
            let requests = rate(of(|lane| lane.requests));
            vec![at.to_string(), share(busy), whole(lane.connections), requests, whole(lane.tasks)]
        };
        let rows = (0..self.now.lanes.len()).map(row).collect();
        Grid { heads: heads(&["lane", "busy", "conns", "req/s", "tasks"]), rows, left: 1 }
    }

    fn workers(&self, order: Order) -> Grid {
        let before: HashMap<&str, &WorkerStats> =
            self.old.iter().flat_map(|old| &old.workers).map(|w| (w.id.as_str(), w)).collect();
        let seconds = self.old.map_or(0.0, |old| self.now.up_ms.saturating_sub(old.up_ms) as f64 / 1e3);
        let chosen = |w: &WorkerStats| {
            let earlier = before.get(w.id.as_str()).map_or(0, |old| old.selected);
            (seconds > 0.0).then(|| w.selected.saturating_sub(earlier) as f64 / seconds)
        };
        let mut workers: Vec<(&WorkerStats, Option<f64>)> = self.now.workers.iter().map(|w| (w, chosen(w))).collect();
        workers.sort_by(|(a, _), (b, _)| (&a.role, &a.url).cmp(&(&b.role, &b.url)));
        // The sorts are stable: the names order equals.
        match order {
            Order::InFlight => workers.sort_by_key(|(w, _)| Reverse(w.in_flight)),
            Order::Chosen => workers.sort_by(|(_, a), (_, b)| b.unwrap_or(0.0).total_cmp(&a.unwrap_or(0.0))),
            Order::Trouble => workers.sort_by_key(|(w, _)| (w.usable, Reverse(w.failures))),
            Order::Name => {}
        }
        let row = |(w, chosen): (&WorkerStats, Option<f64>)| {
            let name = w.url.strip_prefix("http://").unwrap_or(&w.url);
            let mut cells: Vec<String> = [name, &w.role, &w.state, &w.breaker].map(plain).into();
            cells.extend([whole(w.in_flight), rate(chosen), whole(w.selected), whole(w.failures)]);
            cells.extend(w.answers.iter().map(|n| whole(*n)));
            cells
        };
        let mut names = heads(&["worker", "role", "state", "breaker", "flight", "chose/s", "chosen", "failed"]);
        names.extend(self.now.answer_classes.iter().map(|class| plain(class)));
        Grid { heads: names, rows: workers.into_iter().map(row).collect(), left: 4 }
    }
}

impl Report {
    /// All of it, as lines.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for line in &self.lines {
            text += &format!("{line}\n");
        }
        for grid in [&self.latency, &self.lanes, &self.workers] {
            text += &format!("\n{}", grid.text());
        }
        text
    }
}

impl Grid {
    fn text(&self) -> String {
        let all = || std::iter::once(&self.heads).chain(&self.rows);
        let width = |at: usize| all().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max();
        let widths: Vec<usize> = (0..self.heads.len()).map(|at| width(at).unwrap_or(0)).collect();
        let mut text = String::new();
        for row in all() {
            let cells = row.iter().zip(&widths).enumerate().map(|(at, (cell, width))| match at < self.left {
                true => format!("{cell:<width$}"),
                false => format!("{cell:>width$}"),
            });
            let line = cells.collect::<Vec<_>>().join("  ");
            text += &format!("{}\n", line.trim_end());
        }
        text
    }
}

fn heads(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

fn is_bad(status: &str) -> bool {
    status.starts_with('5') || status == "cut"
}

/// Text for a terminal: what could steer one is replaced.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The value below which a share of the observations lies, by straight lines within buckets. `None`: there are none;
/// infinity: it is above the highest bound.
fn quantile(bounds_us: &[u64], counts: &[u64], q: f64) -> Option<f64> {
    let rank = q * counts.iter().sum::<u64>() as f64;
    if rank <= 0.0 {
        return None;
    }
    let (mut below, mut from) = (0.0, 0.0);
    for (&bound, &n) in bounds_us.iter().zip(counts) {
        let (n, bound) = (n as f64, bound as f64);
        if n > 0.0 && below + n >= rank {
            return Some(from + (bound - from) * (rank - below) / n);
        }
        (below, from) = (below + n, bound);
    }
    Some(f64::INFINITY)
}

fn scaled(mut n: f64, base: f64, units: &[&str]) -> String {
    let mut at = 0;
    while n >= base && at + 1 < units.len() {
        (n, at) = (n / base, at + 1);
    }
    let decimals = usize::from(at > 0 && n < 100.0);
    format!("{n:.decimals$}{}", units[at])
}

fn whole(n: u64) -> String {
    if n < 100_000 { n.to_string() } else { scaled(n as f64, 1e3, &["", "k", "M", "G", "T", "P", "E"]) }
}

fn bytes(n: u64) -> String {
    scaled(n as f64, 1024.0, &[" B", " KiB", " MiB", " GiB", " TiB", " PiB"])
}

fn rate(n: Option<f64>) -> String {
    match n {
        None => NONE.to_owned(),
        Some(n) if n < 99.95 => format!("{n:.1}"),
        Some(n) => whole(n as u64),
    }
}

fn share(n: Option<f64>) -> String {
    n.map_or(NONE.to_owned(), |n| format!("{:.0} %", 100.0 * n))
}

fn time(us: Option<f64>) -> String {
    match us {
        None => NONE.to_owned(),
        Some(us) if us.is_infinite() => "beyond".to_owned(),
        Some(us) if us < 1e3 => format!("{us:.0} us"),
        Some(us) if us < 1e4 => format!("{:.1} ms", us / 1e3),
        Some(us) if us < 1e6 => format!("{:.0} ms", us / 1e3),
        Some(us) => format!("{:.1} s", us / 1e6),
    }
}

fn age(ms: u64) -> String {
    let s = ms / 1000;
    let clock = format!("{:02}:{:02}:{:02}", s / 3600 % 24, s / 60 % 60, s % 60);
    if s < 86_400 { clock } else { format!("{} d {clock}", s / 86_400) }
}

#[cfg(test)]
pub mod tests;
