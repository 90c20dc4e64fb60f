//! What each policy makes of a trace: hit rate, evenness of work, time to first token.
//!
//! Takes a trace in the format that Mooncake published (a JSON object a line: `timestamp` in ms, `input_length`,
//! `output_length`, `hash_ids` of blocks of 512 tokens), drives the real route room with it, and asks a simple model
//! of engines what came of it. Never sends a byte and reads no clock: one trace gives one table.
//!
//! `zcat TRACE.gz | cargo bench --bench replay -- - workers=8 rate=2`; all settings stand in [`Settings`], with their
//! defaults. `CORELANE_TRACE` names a file too. Without a trace it makes a small one of conversations. Run as a test
//! it does that quickly, and asserts that cache_aware does what it is for.

use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;

use corelane::config::{Policy, Role, Routing};
use corelane::flow::route::{Want, choose};
use corelane::lane::view::View;
use corelane::metrics::Tally;
use corelane::shared::Shared;
use corelane::shared::load::LoadGuard;
use corelane::shared::roster::{Pairing, Slot, Worker};
use corelane::shared::vitals::Health;

/// Tokens of one block of the trace, and the 64-byte symbols that it becomes (four bytes a token).
const BLOCK_TOKENS: u64 = 512;
const BLOCK_SYMBOLS: u64 = 32;
/// Width of the windows in which evenness is judged.
const WINDOW_US: u64 = 60_000_000;

#[derive(serde::Deserialize)]
struct Request {
    /// Milliseconds.
    timestamp: u64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// What can be set as `name=value`.
#[derive(Clone)]
struct Settings {
    workers: usize,
    /// Blocks that a worker's cache holds: 4096 are two million tokens.
    blocks: usize,
    /// Tokens a second that a worker computes of prompts, one prompt after the other.
    prefill: f64,
    /// Milliseconds between two tokens of an answer; answers do not slow each other down.
    token_ms: f64,
    /// Share of that time that an answer costs its worker, because answers are computed together.
    batch_share: f64,
    /// Milliseconds that each prompt costs whatever its length.
    fixed_ms: f64,
    /// Factor on the speed at which requests arrive.
    rate: f64,
    /// Requests at the start of a trace that only warm the caches up, as a share of it.
    warm: f64,
    routing: Routing,
    policies: Vec<Policy>,
    lanes: Vec<usize>,
    /// Of the trace that is made where none is given: its length, and of a hundred requests those below a hot prefix.
    requests: usize,
    hot: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            workers: 8,
            blocks: 4096,
            prefill: 12_000.0,
            token_ms: 25.0,
            batch_share: 1.0 / 32.0,
            fixed_ms: 20.0,
            rate: 1.0,
            warm: 0.0,
            routing: Routing::DEFAULT,
            policies: Policy::ALL.to_vec(),
            lanes: vec![1, 8],
            requests: 2000,
            hot: 0,
        }
    }
}

impl Settings {
    fn set(&mut self, name: &str, value: &str) {
        let number = || value.parse::<f64>().unwrap_or_else(|_| panic!("{name}={value}: give a number"));
        match name {
            "workers" => self.workers = number() as usize,
            "blocks" => self.blocks = number() as usize,
            "prefill" => self.prefill = number(),
            "token_ms" => self.token_ms = number(),
            "batch_share" => self.batch_share = number(),
            "fixed_ms" => self.fixed_ms = number(),
            "rate" => self.rate = number(),
            "warm" => self.warm = number(),
            "threshold" => self.routing.cache_threshold = number(),
            "abs" => self.routing.balance_abs = number() as u32,
            "rel" => self.routing.balance_rel = number(),
            "fleet" => self.routing.balance_mode = corelane::config::BalanceMode::Fleet,
            "memory" => self.routing.prefix_memory_bytes = number() as u64,
            "lanes" => self.lanes = value.split(',').map(|n| n.parse().expect("numbers of lanes")).collect(),
            "hot" => self.hot = number() as u64,
            "requests" => self.requests = number() as usize,
            "policies" => {
                let named = |name: &str| *Policy::ALL.iter().find(|p| p.name() == name).expect("names of policies");
                self.policies = value.split(',').map(named).collect();
            }
            _ => panic!("{name} cannot be set"),
        }
    }
}

/// A cache of blocks: least recently used goes.
#[derive(Default)]
struct Cache {
    capacity: usize,
    /// Last use by block.
    used: HashMap<u64, u64>,
    /// Uses in order; those that are not a block's last one are skipped.
    order: VecDeque<(u64, u64)>,
    clock: u64,
}

impl Cache {
    fn of(capacity: usize) -> Self {
        Cache { capacity, ..Cache::default() }
    }

    /// Blocks of the prompt that are there from its first one on; afterwards all of them are.
    fn take(&mut self, blocks: &[u64]) -> usize {
        let hits = blocks.iter().take_while(|block| self.used.contains_key(block)).count();
        // The last block is the first to go.
        for &block in blocks.iter().rev() {
            self.clock += 1;
            self.used.insert(block, self.clock);
            self.order.push_back((block, self.clock));
        }
        while self.used.len() > self.capacity {
            let (block, clock) = self.order.pop_front().expect("every block was used");
            if self.used[&block] == clock {
                self.used.remove(&block);
            }
        }
        if self.order.len() > 8 * self.capacity.max(64) {
            let used = &self.used;
            self.order.retain(|(block, clock)| used.get(block) == Some(clock));
        }
        hits
    }
}

struct Engine {
    cache: Cache,
    /// When the prompts that it has are computed.
    free_us: u64,
    work_us: f64,
    window_us: f64,
}

/// What came of a trace.
struct Outcome {
    hit_rate: f64,
    spread: f64,
    spread_60s: f64,
    mean_ms: f64,
    p99_ms: f64,
    reasons: [u64; 4],
}

fn fleet(lanes: usize, settings: &Settings) -> &'static Shared {
    let shared = Shared::leak_with(lanes, settings.routing.prefix_memory_bytes);
    let worker = |slot: usize| {
        shared.vitals.set_health(slot as Slot, Health::Ready);
        Arc::new(Worker {
            slot: slot as Slot,
            era: 1,
            role: Role::Regular,
            url: format!("http://10.0.0.1:{slot}").into(),
            prefix: "".into(),
            addrs: [([10, 0, 0, 1], 80).into()].into(),
            api_key: None,
            models: ["m".into()].into(),
            server_info: None,
            pairing: Pairing::default(),
        })
    };
    shared.roster.publish((0..settings.workers).map(worker).collect());
    shared
}

fn symbols(request: &Request, out: &mut Vec<u64>) {
    out.clear();
    for id in &request.hash_ids {
        let mut state = id.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        out.extend((0..BLOCK_SYMBOLS).map(|_| {
            state = (state ^ state >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9).wrapping_add(1);
            state ^ state >> 32
        }));
    }
}

/// A request in flight: ends at its time, by dropping its guard.
struct Running(u64, #[expect(dead_code, reason = "dropped at its time")] LoadGuard);

impl PartialEq for Running {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}
impl Eq for Running {}
impl PartialOrd for Running {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Running {
    /// The earliest is the greatest: a heap gives that first.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.0.cmp(&self.0)
    }
}

fn variation(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let n = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / n;
    if mean == 0.0 { 0.0 } else { (values.map(|v| (v - mean).powi(2)).sum::<f64>() / n).sqrt() / mean }
}

fn replay(trace: &[Request], policy: Policy, lanes: usize, settings: &Settings) -> Outcome {
    let shared = fleet(lanes, settings);
    let mut views: Vec<View> = (0..lanes).map(|lane| View::new(lane, shared, None)).collect();
    let mut rng = fastrand::Rng::with_seed(1);
    let engine = || Engine { cache: Cache::of(settings.blocks), free_us: 0, work_us: 0.0, window_us: 0.0 };
    let mut engines: Vec<Engine> = (0..settings.workers).map(|_| engine()).collect();
    let mut running: BinaryHeap<Running> = BinaryHeap::new();
    let (mut hits, mut blocks) = (0, 0);
    let (mut waits, mut windows) = (Vec::new(), Vec::new());
    let mut key = Vec::new();
    let (mut window, mut second) = (0, 0);
    let warm = (trace.len() as f64 * settings.warm) as usize;
    for (nth, request) in trace.iter().enumerate() {
        let now_us = (request.timestamp as f64 * 1000.0 / settings.rate) as u64;
        while running.peek().is_some_and(|first| first.0 <= now_us) {
            running.pop();
        }
        while window < now_us / WINDOW_US {
            windows.push(variation(engines.iter().map(|engine| engine.window_us)));
            engines.iter_mut().for_each(|engine| engine.window_us = 0.0);
            window += 1;
        }
        while second < now_us / 1_000_000 {
            shared.roster.snapshot().fade(&shared.load, &shared.vitals);
            second += 1;
        }
        symbols(request, &mut key);
        let conversation = request.hash_ids.get(1).or(request.hash_ids.first()).copied().unwrap_or(0).to_le_bytes();
        let want = Want {
            model: Some(b"m"),
            policy,
            routing: &settings.routing,
            symbols: &key,
            routing_key: &conversation,
            length: 4 * request.input_length as usize,
            ..Want::default()
        };
        let lane = rng.usize(..lanes);
        let guard = choose(&mut views[lane], &want, now_us, &mut rng, shared.tallies.lane(lane)).expect("a worker");
        let engine = &mut engines[usize::from(guard.slot())];
        let hit = engine.cache.take(&request.hash_ids);
        let computed = request.input_length.saturating_sub(hit as u64 * BLOCK_TOKENS);
        let prefill_us = computed as f64 / settings.prefill * 1e6 + settings.fixed_ms * 1e3;
        let decode_us = request.output_length as f64 * settings.token_ms * 1e3;
        engine.free_us = engine.free_us.max(now_us) + prefill_us as u64;
        let work_us = prefill_us + decode_us * settings.batch_share;
        engine.window_us += work_us;
        running.push(Running(engine.free_us + decode_us as u64, guard));
        if nth >= warm {
            engine.work_us += work_us;
            hits += hit;
            blocks += request.hash_ids.len();
            waits.push((engine.free_us - now_us) as f64 / 1e3);
        }
    }
    waits.sort_unstable_by(f64::total_cmp);
    let reasons = [Tally::DecisionHit, Tally::DecisionSpill, Tally::DecisionMiss, Tally::DecisionImbalanced];
    Outcome {
        hit_rate: hits as f64 / blocks.max(1) as f64,
        spread: variation(engines.iter().map(|engine| engine.work_us)),
        spread_60s: windows.iter().sum::<f64>() / windows.len().max(1) as f64,
        mean_ms: waits.iter().sum::<f64>() / waits.len().max(1) as f64,
        p99_ms: waits.get(waits.len() * 99 / 100).copied().unwrap_or(0.0),
        reasons: reasons.map(|reason| shared.tallies.lanes().iter().map(|lane| lane.get(reason)).sum()),
    }
}

/// Hit rate of one worker that has the cache of all.
fn ideal(trace: &[Request], settings: &Settings) -> f64 {
    let mut cache = Cache::of(settings.blocks * settings.workers);
    let warm = (trace.len() as f64 * settings.warm) as usize;
    let (mut hits, mut blocks) = (0, 0);
    for (nth, request) in trace.iter().enumerate() {
        let hit = cache.take(&request.hash_ids);
        if nth >= warm {
            hits += hit;
            blocks += request.hash_ids.len();
        }
    }
    hits as f64 / blocks.max(1) as f64
}

/// Conversations that come back with one more turn each time, below a common system prompt; `hot` of a hundred
/// requests are single questions below one long prefix instead.
fn conversations(requests: usize, hot: u64) -> Vec<Request> {
    let mut rng = fastrand::Rng::with_seed(3);
    let mut open: Vec<Vec<u64>> = Vec::new();
    let mut next = 1_000;
    let mut fresh = |n: usize| {
        next += n as u64;
        next - n as u64..next
    };
    (0..requests)
        .map(|nth| {
            let hash_ids = if rng.u64(..100) < hot {
                (0..20).chain(fresh(2)).collect()
            } else {
                if open.len() < 100 || rng.u8(..8) == 0 {
                    open.push(std::iter::once(0).chain(fresh(6)).collect());
                }
                if open.len() > 200 {
                    open.swap_remove(rng.usize(..200));
                }
                let at = rng.usize(..open.len());
                let more = rng.usize(1..4);
                open[at].extend(fresh(more));
                open[at].clone()
            };
            Request {
                timestamp: nth as u64 * 250,
                input_length: hash_ids.len() as u64 * BLOCK_TOKENS,
                output_length: rng.u64(50..500),
                hash_ids,
            }
        })
        .collect()
}

fn read(name: &str) -> Vec<Request> {
    let input: Box<dyn Read> = match name {
        "-" => Box::new(std::io::stdin()),
        name => Box::new(std::fs::File::open(name).unwrap_or_else(|e| panic!("{name}: {e}"))),
    };
    let lines = BufReader::new(input).lines().map(|line| line.expect("lines of text (unpack it first)"));
    lines.map(|line| serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line}: {e}"))).collect()
}

fn table(name: &str, trace: &[Request], settings: &Settings) -> Vec<(Policy, usize, f64, Outcome)> {
    let ideal = ideal(trace, settings);
    println!(
        "\n{name}: {} requests, {} workers × {} blocks, ideal hit rate {:.1} %\n",
        trace.len(),
        settings.workers,
        settings.blocks,
        100.0 * ideal
    );
    println!(
        "| policy | lanes | hits ÷ ideal | work CV | CV 60 s | TTFT mean ms | p99 ms | hit/spill/miss/imbalanced |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    let mut rows = Vec::new();
    for &policy in &settings.policies {
        for &lanes in &settings.lanes {
            let outcome = replay(trace, policy, lanes, settings);
            println!(
                "| {} | {lanes} | {:.3} | {:.3} | {:.3} | {:.0} | {:.0} | {} |",
                policy.name(),
                outcome.hit_rate / ideal,
                outcome.spread,
                outcome.spread_60s,
                outcome.mean_ms,
                outcome.p99_ms,
                outcome.reasons.map(|n| n.to_string()).join("/"),
            );
            rows.push((policy, lanes, outcome.hit_rate / ideal, outcome));
        }
    }
    rows
}

fn quick(settings: &Settings) {
    let rows = table("synthetic conversations", &conversations(2000, 0), settings);
    let of = |policy, lanes| rows.iter().find(|row| row.0 == policy && row.1 == lanes).expect("a row");
    let (one, eight) = (of(Policy::CacheAware, 1), of(Policy::CacheAware, 8));
    assert!(one.2 >= 0.97 && (one.2 - eight.2).abs() <= 0.01, "{} {}", one.2, eight.2);
    assert!(of(Policy::LeastLoad, 1).2 < 0.9 * one.2);

    let policies = vec![Policy::CacheAware, Policy::LeastLoad];
    let hot = Settings { policies, lanes: vec![1], rate: 6.0, ..settings.clone() };
    let fast = Settings { workers: 16, rate: 32.0, prefill: 60_000.0, fixed_ms: 5.0, ..hot.clone() };
    for settings in [hot, fast] {
        let rows = table("synthetic, with a hot prefix", &conversations(20_000, 80), &settings);
        let [cache_aware, least_load] = [0, 1].map(|row| &rows[row].3);
        assert!(cache_aware.reasons[1] > 0, "spills");
        assert!(cache_aware.p99_ms <= least_load.p99_ms, "{} {}", cache_aware.p99_ms, least_load.p99_ms);
    }
}

fn main() {
    let mut settings = Settings::default();
    let mut trace = std::env::var("CORELANE_TRACE").ok();
    for arg in std::env::args().skip(1).filter(|arg| !arg.starts_with("--")) {
        match arg.split_once('=') {
            Some((name, value)) => settings.set(name, value),
            None => trace = Some(arg),
        }
    }
    match trace {
        Some(name) => drop(table(&name, &read(&name), &settings)),
        None if std::env::args().any(|arg| arg == "--bench") && std::env::args().any(|arg| arg.contains('=')) => {
            drop(table("synthetic", &conversations(settings.requests, settings.hot), &settings));
        }
        None => quick(&settings),
    }
}
