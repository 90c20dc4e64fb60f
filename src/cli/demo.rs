//! `corelane demo`: the gateway in front of a mock fleet, in one process, with a table that shows what it does.
//!
//! Takes arguments, gives an exit code: 1 when a request of its own load failed, a burst was spread unevenly, or a
//! worker's count did not come back to 0. Never listens where it is not told to: the fleet and the metrics are on loopback.

mod burst;
mod screen;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Arg, ArgAction, ArgMatches, Command};

use super::{Subcommand, complain, count, read_flags, tell};
use crate::boot::{Gateway, Signals};
use crate::config::routes::ROUTES;
use crate::config::{self, Config, Mistake, Origin, WorkerSpec, environment, flags, options};
use crate::limits::MAX_WORKERS;
use crate::metrics::{STATUSES, Tally};
use crate::mock::load::{Load, Pattern, Totals};
use crate::mock::{Engine, Fleet, Role, Settings, Stats};
use crate::shared::Shared;
use crate::shared::roster::Slot;
use screen::{Screen, Table};

/// Options of the gateway that the demo takes, as flags and as variables.
const OPTIONS: [&str; 4] = ["host", "port", "policy", "cores"];
/// The other options, where the demo wants another default; also the list of workers, until the fleet is up.
const SETTINGS: &str = "\
worker_urls = ['http://127.0.0.1:1']
prometheus_port = 0
health_check_interval_secs = 2
shutdown_settle_secs = 0.1
shutdown_grace_period_secs = 5
log_level = 'warn'
";
/// Most workers: each has a port and a line.
const MOST_WORKERS: u64 = 256;
const _: () = assert!(MOST_WORKERS <= MAX_WORKERS as u64);
/// Prefill workers, and as many decode workers, of `--pd`; the second number with `--burst`.
const PAIRS: [usize; 2] = [2, 8];
/// Most conversations of the load; each has a connection.
const MOST_LOAD: u64 = 4096;
/// Most requests of a burst; client, gateway and workers hold some 128 KiB for each.
const MOST_BURST: u64 = 512;
const MOST_SECONDS: u64 = 7 * 24 * 3600;
/// Model that the fleet serves.
const MODEL: &str = "mock";
/// Workers that the introduction names; the table has all.
const SOME_WORKERS: usize = 8;
/// Time that the workers get to pass their first probes.
const READY_WAIT: Duration = Duration::from_secs(5);
/// From one table to the next.
const TICK: Duration = Duration::from_secs(1);

/// Runs the subcommand.
pub(super) fn run(subcommand: &Subcommand, args: &[String]) -> ExitCode {
    match configure(subcommand, args) {
        Ok((wishes, config)) => start(&wishes, config).unwrap_or_else(|line| {
            complain(format_args!("corelane: {line}"));
            ExitCode::FAILURE
        }),
        Err(code) => code,
    }
}

/// What the demo's own flags say.
struct Wishes {
    /// Regular workers; `None` for prefill and decode workers.
    workers: Option<u64>,
    load: u64,
    /// Requests of a burst; 0: no bursts, but a table until the end.
    burst: u64,
    /// 0: until a signal.
    seconds: u64,
    plain: bool,
}

impl Wishes {
    /// Prefill workers, and as many decode workers, of `--pd`.
    fn pairs(&self) -> usize {
        PAIRS[usize::from(self.burst > 0)]
    }

    /// The fleet: so many regular workers, or pairs.
    fn parts(&self) -> Vec<(Settings, usize)> {
        let settings = if self.burst > 0 { burst::settings(settings()) } else { settings() };
        match self.workers {
            Some(n) => vec![(settings, n as usize)],
            None => {
                [Role::Prefill, Role::Decode].map(|role| (Settings { role, ..settings.clone() }, self.pairs())).into()
            }
        }
    }
}

fn command(subcommand: &Subcommand) -> Command {
    let own = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).num_args(1).action(ArgAction::Append).help(help)
    };
    let rows = OPTIONS.iter().map(|key| options::find(key).expect("a row of the table"));
    flags::bare(subcommand.name, subcommand.about)
        .arg(own("workers", "N", "Mock workers to start, on free ports\n[default: 4]"))
        .arg(Arg::new("pd").long("pd").action(ArgAction::SetTrue).help(
            "Disaggregate prefill and decode: 2 prefill and 2 decode workers (8 and 8 with --burst), each request \
             served by one of either",
        ))
        .arg(own("load", "N", "Conversations that are held through the gateway all the time\n[default: 0]"))
        .arg(own(
            "burst",
            "N",
            "Send N prompts of 32k tokens at once, 3 times, hold all answers (of one token) back until a worker is \
             chosen for each, show how many each worker got, and end; exit code 1 if two workers of a role differ by \
             more than 1\n[default: 0: no burst]",
        ))
        .arg(own("seconds", "S", "End after this many seconds; 0: until Ctrl-C\n[default: 0]"))
        .arg(Arg::new("plain").long("plain").action(ArgAction::SetTrue).help("Append lines, on a terminal too"))
        .args(rows.map(flags::argument))
        .after_help("The mock workers answer with words without meaning, at a speed like that of a GPU.")
}

/// Reads flags and variables; mistakes are printed.
fn configure(subcommand: &Subcommand, args: &[String]) -> Result<(Wishes, Config), ExitCode> {
    let mut given = read_flags(&command(subcommand), args)?;
    let (matches, mut mistakes) = (given.matches.clone(), Vec::new());
    let mut number = |name, default, least, most| {
        whole(&matches, name, least, most)
            .unwrap_or_else(|mistake| {
                mistakes.push(mistake);
                None
            })
            .unwrap_or(default)
    };
    let workers = number("workers", 4, 1, MOST_WORKERS);
    let wishes = Wishes {
        workers: (!matches.get_flag("pd")).then_some(workers),
        load: number("load", 0, 0, MOST_LOAD),
        burst: number("burst", 0, 0, MOST_BURST),
        seconds: number("seconds", 0, 0, MOST_SECONDS),
        plain: matches.get_flag("plain"),
    };
    if matches.get_flag("pd") && matches.contains_id("workers") {
        let n = wishes.pairs();
        let what = format!("does not go with --pd, which starts {n} prefill and {n} decode workers");
        mistakes.push(Mistake::new(Origin::Flag("--workers".to_owned()), what, "leave one of them out"));
    }
    for flag in ["load", "seconds"] {
        if wishes.burst > 0 && matches.contains_id(flag) {
            let what = "does not go with --burst, which ends after its requests".to_owned();
            mistakes.push(Mistake::new(Origin::Flag(format!("--{flag}")), what, "leave one of them out"));
        }
    }
    given.mistakes.append(&mut mistakes);
    given.config_file = Some("the settings of the demo".to_owned());
    let mut variables = environment::of_process();
    variables.retain(|(name, _)| OPTIONS.iter().any(|key| options::find(key).is_some_and(|row| row.env() == *name)));
    let loaded = config::load(given, &variables, |_: &str| Ok(SETTINGS.to_owned())).map_err(|all| tell(&all))?;
    Ok((wishes, loaded.config))
}

/// A flag's whole number, if it is given.
fn whole(matches: &ArgMatches, name: &str, least: u64, most: u64) -> Result<Option<u64>, Mistake> {
    let mut texts = matches.get_many::<String>(name).into_iter().flatten();
    let Some(text) = texts.next() else { return Ok(None) };
    let mistake = |what: String| {
        let fix = format!("give a whole number from {least} to {most}");
        Mistake::new(Origin::Flag(format!("--{name}")), what, fix)
    };
    if texts.next().is_some() {
        return Err(mistake("is given more than once".to_owned()));
    }
    match text.parse::<u64>() {
        Ok(n) if (least..=most).contains(&n) => Ok(Some(n)),
        Ok(_) => Err(mistake(format!("{} is out of range", config::quote(text)))),
        Err(_) => Err(mistake(format!("{} is not a whole number", config::quote(text)))),
    }
}

/// Starts fleet, gateway and load, shows them until the end, and takes them down in the opposite order.
fn start(wishes: &Wishes, mut config: Config) -> Result<ExitCode, String> {
    let mut screen = Screen::new(wishes.plain);
    let log = screen.log();
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(&config.log_level))
        .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
        .with_writer(move || log.clone())
        .try_init();
    let signals = Signals::install().map_err(|e| format!("signals cannot be handled: {e}"))?;
    let fleet = Fleet::start_mixed(wishes.parts(), (Ipv4Addr::LOCALHOST, 0))
        .map_err(|e| format!("the mock workers could not be started ({e}): give fewer --workers"))?;
    config.workers = fleet.engines().iter().map(spec).collect();
    let mut usual_metrics = take_usual_metrics_port(&mut config);
    let gateway = Gateway::start(config.clone()).or_else(|why| {
        if !std::mem::take(&mut usual_metrics) {
            return Err(why);
        }
        // Another demo may have taken that port in the meantime.
        config.metrics_port = 0;
        Gateway::start(config)
    })?;
    let demo = Demo { shared: gateway.shared(), fleet, began: Instant::now() };

    // A reader that closed its end of the pipe ends the demo like a signal.
    let over = demo.wait_until_ready(&signals);
    let over = over || screen.say(&demo.introduction(wishes, &gateway, usual_metrics)).is_err();
    let (mut load, mut totals, mut faults) = (None, None, Vec::new());
    if !over && wishes.burst > 0 {
        let pattern = burst::pattern(pattern(&gateway, wishes.burst));
        let done = demo.bursts(pattern, &signals, &mut screen);
        let (all, uneven) = done.map_err(|e| format!("the burst could not be sent: {e}"))?;
        (totals, faults) = (Some(all), uneven);
    } else if !over {
        if wishes.load > 0 {
            let begun = Load::start(pattern(&gateway, wishes.load));
            load = Some(begun.map_err(|e| format!("the load could not be started: {e}"))?);
        }
        demo.watch(wishes, &signals, &mut screen);
    }
    signals.exit_on_second();
    let watched = demo.began.elapsed();
    let _ = screen.list(&["ending: load stops, gateway drains".to_owned()]);
    let held = load.map(Load::stop);
    let uncut = gateway.drain();
    let _ = screen.list(&demo.summary(held, watched, uncut));
    drop(screen);
    faults.extend(demo.faults(held.or(totals)));
    for fault in &faults {
        complain(format_args!("corelane: {fault}"));
    }
    Ok(if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Puts the metrics where `serve` has them, unless somebody is there already.
fn take_usual_metrics_port(config: &mut Config) -> bool {
    let usual = Config::with_workers(Vec::new()).metrics_port;
    let free = usual != config.port && TcpListener::bind((config.metrics_host, usual)).is_ok();
    if free {
        config.metrics_port = usual;
    }
    free
}

/// An engine as the gateway is told of it.
fn spec(engine: &Engine) -> WorkerSpec {
    WorkerSpec { role: gateway_role(engine.role()), ..WorkerSpec::new(engine.url()) }
}

fn gateway_role(role: Role) -> config::Role {
    match role {
        Role::Regular => config::Role::Regular,
        Role::Prefill => config::Role::Prefill,
        Role::Decode => config::Role::Decode,
    }
}

fn role_name(role: Role) -> &'static str {
    gateway_role(role).name()
}

/// An engine's address, and its role where the fleet has roles.
fn name(engine: &Engine) -> String {
    match engine.role() {
        Role::Regular => engine.addr().to_string(),
        _ => format!("{:<15} {}", engine.addr(), role_name(engine.role())),
    }
}

/// Engines with the pace of a small model on one GPU.
fn settings() -> Settings {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Settings {
        models: vec![MODEL.to_owned()],
        cache_tokens: 200_000,
        prefill_tokens_per_sec: 20_000.0,
        decode_step_ms: 12.0,
        decode_step_per_seq_us: 100.0,
        max_running: 32,
        max_tokens_default: 64,
        kv_tokens: 400_000,
        keep_body_bytes: 0,
        threads: (cores / 4).clamp(1, 4),
        ..Settings::default()
    }
}

fn pattern(gateway: &Gateway, conversations: u64) -> Pattern {
    Pattern {
        url: format!("http://{}", reachable(gateway.address())),
        conversations: conversations as usize,
        model: MODEL.to_owned(),
        seed: fastrand::u64(..),
        ..Pattern::default()
    }
}

/// The address by which this host reaches a listener.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    address
}

/// What runs, for those who look at it.
struct Demo {
    shared: &'static Shared,
    fleet: Fleet,
    began: Instant,
}

/// Counters at one moment.
struct Sample {
    at: Instant,
    finished: u64,
    workers: Vec<Stats>,
}

impl Demo {
    /// Waits until every worker takes requests; true when a signal came first.
    fn wait_until_ready(&self, signals: &Signals) -> bool {
        let until = Instant::now() + READY_WAIT;
        let ready = || self.slots().all(|slot| slot.is_some_and(|slot| self.shared.vitals.usable(slot)));
        while !ready() && Instant::now() < until {
            if signals.within(Duration::from_millis(10)) {
                return true;
            }
        }
        false
    }

    /// Each engine's slot, in order; `None` for one that is not on the roster.
    fn slots(&self) -> impl Iterator<Item = Option<Slot>> {
        let roster = self.shared.roster.snapshot();
        let slot_of = move |url: String| roster.workers.iter().find(|w| *w.url == *url).map(|w| w.slot);
        self.fleet.urls().into_iter().map(slot_of)
    }

    fn introduction(&self, wishes: &Wishes, gateway: &Gateway, usual_metrics: bool) -> String {
        let address = reachable(gateway.address());
        let taken = if usual_metrics { "" } else { "  (the usual port is taken)" };
        let list = |role: Role| {
            let of_role = self.fleet.engines().iter().filter(|e| e.role() == role);
            let all: Vec<String> = of_role.map(|e| e.addr().to_string()).collect();
            let more = if all.len() > SOME_WORKERS { " ..." } else { "" };
            format!("{}{more}", all[..all.len().min(SOME_WORKERS)].join(" "))
        };
        let workers = match wishes.workers {
            Some(_) => format!("workers  {}", list(Role::Regular)),
            None => format!("prefill  {}\ndecode   {}", list(Role::Prefill), list(Role::Decode)),
        };
        let lanes = self.shared.tallies.lanes().len();
        let load = match (wishes.burst, wishes.load) {
            (0, 0) => "none; --load 16 holds 16 conversations".to_owned(),
            (0, n) => format!("{} held all the time", count(n as usize, "conversation")),
            (n, _) => {
                let all = count(n as usize, "request");
                format!("{} bursts: {all} of 32k tokens at once, answers of one token", burst::BURSTS)
            }
        };
        let try_it = match wishes.burst {
            0 => format!("Try it:\n\n{}\n\nCtrl-C ends.\n\n", curl_line(address)),
            _ => String::new(),
        };
        format!(
            "gateway  http://{address}  ({})\nmetrics  http://{}/metrics{taken}\n{workers}\nload     {load}\n\n{try_it}",
            count(lanes, "lane"),
            gateway.admin(),
        )
    }

    /// Shows a table every second until a signal, the last second, or until nobody reads.
    fn watch(&self, wishes: &Wishes, signals: &Signals, screen: &mut Screen) {
        let end = (wishes.seconds > 0).then(|| self.began + Duration::from_secs(wishes.seconds));
        let mut before = self.sample();
        let mut tick = Instant::now();
        loop {
            tick += TICK;
            let until = end.map_or(tick, |end| end.min(tick));
            if signals.within(until.saturating_duration_since(Instant::now())) {
                return;
            }
            let now = self.sample();
            if screen.show(&self.table(&before, &now)).is_err() || end.is_some_and(|end| now.at >= end) {
                return;
            }
            before = now;
        }
    }

    fn sample(&self) -> Sample {
        let (ok, failed, cut) = outcomes(self.shared);
        let workers = self.fleet.engines().iter().map(|e| e.stats()).collect();
        Sample { at: Instant::now(), finished: ok + failed + cut, workers }
    }

    fn table(&self, before: &Sample, now: &Sample) -> Table {
        let seconds = now.at.duration_since(before.at).as_secs_f64().max(1e-3);
        let paired = self.fleet.engines().iter().any(|e| e.role() != Role::Regular);
        let (who, width) = if paired { ("worker          role", 23) } else { ("worker", 15) };
        let line = |name: &str, state: &str, in_flight: &str, selections: &str, tokens: &str, cached: &str| {
            format!("{name:<width$} {state:<9} {in_flight:>9} {selections:>10} {tokens:>8} {cached:>6}")
        };
        let mut workers = Vec::with_capacity(now.workers.len());
        for (i, slot) in self.slots().enumerate() {
            let (stats, earlier) = (&now.workers[i], &before.workers[i]);
            let rate = (stats.output_tokens - earlier.output_tokens) as f64 / seconds;
            workers.push(line(
                &name(self.fleet.engine(i)),
                slot.map_or("absent", |slot| self.shared.vitals.health(slot).name()),
                &self.in_flight(slot).to_string(),
                &self.selections(slot).to_string(),
                &format!("{rate:.0}"),
                &share(stats.cached_tokens, stats.prompt_tokens),
            ));
        }
        let connections: Vec<String> =
            (0..self.shared.tallies.lanes().len()).map(|l| self.shared.handover.connections(l).to_string()).collect();
        let total = format!(
            "{:.0} s  {:.1} req/s  connections by lane {}  failed {}",
            now.at.duration_since(self.began).as_secs_f64(),
            (now.finished - before.finished) as f64 / seconds,
            connections.join(" "),
            outcomes(self.shared).1,
        );
        Table { headings: line(who, "state", "in-flight", "selections", "tokens/s", "cached"), workers, total }
    }

    fn in_flight(&self, slot: Option<Slot>) -> u32 {
        slot.map_or(0, |slot| self.shared.load.word(slot).in_flight())
    }

    fn selections(&self, slot: Option<Slot>) -> u64 {
        slot.map_or(0, |slot| self.shared.tallies.lanes().iter().map(|lane| lane.selections(slot)).sum())
    }

    /// What came of it all, once everything rests.
    fn summary(&self, totals: Option<Totals>, watched: Duration, uncut: bool) -> Vec<String> {
        let (ok, failed, left) = outcomes(self.shared);
        let seconds = watched.as_secs_f64();
        let stats: Vec<Stats> = self.fleet.engines().iter().map(|e| e.stats()).collect();
        let sum = |of: fn(&Stats) -> u64| stats.iter().map(of).sum::<u64>();
        let tokens = sum(|s| s.output_tokens);
        let cached = share(sum(|s| s.cached_tokens), sum(|s| s.prompt_tokens));
        let mut lines =
            vec![format!("served for {seconds:.1} s"), format!("gateway  {ok} ok, {failed} failed, {left} left early")];
        if let Some(t) = totals {
            lines.push(format!("load     {} ok, {} failed, {:.1} req/s", t.ok, t.failed, t.ok as f64 / seconds));
            lines.push(format!("ttft     p50 {:.0} ms, p99 {:.0} ms", t.ttft_p50_ms, t.ttft_p99_ms));
        }
        lines.push(format!("tokens   {tokens}, {:.0}/s; prompts {cached} cached", tokens as f64 / seconds));
        if !uncut {
            lines.push("drain    cut what had not ended in time".to_owned());
        }
        for (i, slot) in self.slots().enumerate() {
            lines.push(format!(
                "in-flight at rest: {}  {}  selections {}",
                self.in_flight(slot),
                name(self.fleet.engine(i)),
                self.selections(slot),
            ));
        }
        lines
    }

    /// What must not be, a line each.
    fn faults(&self, totals: Option<Totals>) -> Vec<String> {
        let mut faults = Vec::new();
        for (i, slot) in self.slots().enumerate() {
            let (at, n) = (self.fleet.engine(i).addr(), self.in_flight(slot));
            if n > 0 {
                faults.push(format!(
                    "worker {at} still counts {} in flight: a guard was lost",
                    count(n as usize, "request")
                ));
            }
        }
        if let Some(t) = totals.filter(|t| t.failed > 0) {
            let failed = count(t.failed as usize, "request");
            faults.push(format!("{failed} of the load failed, {} of them with an error status", t.refused));
        }
        faults
    }
}

/// Finished requests of all lanes: answered well, failed, left by their clients.
fn outcomes(shared: &Shared) -> (u64, u64, u64) {
    let (mut ok, mut failed, mut cut, mut left) = (0, 0, 0, 0);
    for lane in shared.tallies.lanes() {
        for route in 0..=ROUTES.len() {
            for (i, status) in STATUSES.iter().enumerate() {
                let n = lane.requests(route, i);
                match status {
                    0 => cut += n,
                    400.. => failed += n,
                    _ => ok += n,
                }
            }
        }
        left += lane.get(Tally::ClientsLeft);
    }
    // A lane counts the cut before the departure, so a reader in between sees one departure too few.
    (ok, failed + cut.saturating_sub(left), cut.min(left))
}

fn share(part: u64, whole: u64) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.0}%", part as f64 * 100.0 / whole as f64) }
}

/// A command to paste: a chat completion that streams.
fn curl_line(address: SocketAddr) -> String {
    format!(
        "curl -N http://{address}/v1/chat/completions -H 'content-type: application/json' \
         -d '{{\"model\":\"{MODEL}\",\"stream\":true,\"max_tokens\":64,\
         \"messages\":[{{\"role\":\"user\",\"content\":\"Hello\"}}]}}'"
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::shared::roster::{Pairing, Role, Worker};

    #[test]
    fn a_lost_guard_and_failed_requests_are_told() {
        let fleet = Fleet::start(Settings::default(), (Ipv4Addr::LOCALHOST, 0), 2).unwrap();
        let shared = Shared::leak(1);
        let worker = |slot: Slot, url: String| {
            Arc::new(Worker {
                slot,
                era: 1,
                role: Role::Regular,
                url: url.into(),
                prefix: "".into(),
                addrs: [].into(),
                api_key: None,
                models: [].into(),
                server_info: None,
                pairing: Pairing::default(),
            })
        };
        // The slots are not in the engines' order.
        let urls = fleet.urls();
        shared.roster.publish(vec![worker(0, urls[1].clone()), worker(1, urls[0].clone())]);
        let demo = Demo { shared, fleet, began: Instant::now() };
        assert_eq!(demo.slots().collect::<Vec<_>>(), [Some(1), Some(0)]);
        assert_eq!(demo.faults(Some(Totals::default())), [""; 0]);

        let _lost = shared.load.reserve_unconditional(1, 1, 1).unwrap();
        shared.tallies.lane(0).request(0, 200);
        shared.tallies.lane(0).request(0, 503);
        shared.tallies.lane(0).request(0, 0);
        shared.tallies.lane(0).request(0, 0);
        shared.tallies.lane(0).add(Tally::ClientsLeft, 1);
        assert_eq!(outcomes(shared), (1, 2, 1));
        let totals = Totals { ok: 5, failed: 3, refused: 2, ..Totals::default() };
        let at = demo.fleet.engine(0).addr();
        assert_eq!(
            demo.faults(Some(totals)),
            [
                format!("worker {at} still counts 1 request in flight: a guard was lost"),
                "3 requests of the load failed, 2 of them with an error status".to_owned(),
            ]
        );
        let sample = demo.sample();
        assert!(demo.table(&sample, &demo.sample()).workers[0].starts_with(&format!("{at:<15} pending")));
        let lines = demo.summary(None, Duration::from_secs(1), true);
        assert!(lines.contains(&format!("in-flight at rest: 1  {at}  selections 0")), "{lines:#?}");
    }

    #[test]
    fn a_wildcard_is_reached_through_loopback() {
        assert_eq!(reachable(([0, 0, 0, 0], 7).into()).to_string(), "127.0.0.1:7");
        assert_eq!(reachable("[::]:7".parse().unwrap()).to_string(), "[::1]:7");
        assert_eq!(reachable("10.0.0.1:7".parse().unwrap()).to_string(), "10.0.0.1:7");
    }
}
