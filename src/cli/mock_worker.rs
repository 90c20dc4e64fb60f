//! `corelane mock-worker`: mock inference engines on consecutive ports, until a signal ends them.
//!
//! Takes the arguments after the subcommand's name, gives an exit code. Never returns before SIGINT or SIGTERM,
//! unless the arguments are wrong or a port is taken.

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::str::FromStr;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::mock::{Connector, Engine, Fleet, Role, Settings};

/// Bytes of each engine's last body that stay readable at `/mock/stats`.
const KEEP_BODY_BYTES: usize = 16 * 1024;

/// Runs the subcommand.
pub fn run(args: &[String]) -> ExitCode {
    let name = [String::from("corelane mock-worker")];
    let matches = match command().try_get_matches_from(name.iter().chain(args)) {
        Ok(matches) => matches,
        Err(e) => {
            let _ = e.print();
            return ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(2));
        }
    };
    match serve(&matches) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            super::complain(format_args!("corelane mock-worker: {e}"));
            ExitCode::FAILURE
        }
    }
}

fn option<T: Clone + Send + Sync + FromStr + 'static>(
    name: &'static str,
    value: &'static str,
    default: &'static str,
    help: &'static str,
) -> Arg
where
    T::Err: std::error::Error + Send + Sync,
{
    let parse = |s: &str| s.parse::<T>();
    Arg::new(name).long(name).value_name(value).default_value(default).value_parser(parse).help(help)
}

fn switch(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
}

fn command() -> Command {
    Command::new("corelane mock-worker")
        .about("Mock SGLang engines on consecutive ports: same routes, prefix cache, batching, faults on demand")
        .arg(option::<IpAddr>("host", "IP", "127.0.0.1", "Address to listen on"))
        .arg(option::<u16>("port", "PORT", "0", "First port; 0 for free ones"))
        .arg(option::<usize>("count", "N", "1", "Engines to start [with --prefill or --decode: 0]"))
        .arg(option::<usize>("prefill", "N", "0", "Prefill engines to start, on the ports before those of --count"))
        .arg(option::<usize>("decode", "N", "0", "Decode engines to start, on the ports after those of --prefill"))
        .arg(
            Arg::new("model")
                .long("model")
                .value_name("NAME")
                .action(ArgAction::Append)
                .help("Model that is served; repeatable [default: mock]"),
        )
        .arg(switch("strict-model", "Answer 404 for other models"))
        .arg(
            option::<String>("role", "ROLE", "regular", "Part of the engines of --count in prefill/decode disaggregation")
                .value_parser(["regular", "prefill", "decode"]),
        )
        .arg(option::<f64>("transfer-ms", "MS", "0", "Time that handing a prompt's cache over takes"))
        .arg(option::<u64>("room-timeout-ms", "MS", "30000", "Longest wait of a leg for its partner, then 500"))
        .arg(option::<u64>(
            "staged-timeout-ms",
            "MS",
            "480000",
            "Longest that vLLM's prefill engines with NIXL keep a cache that nobody fetches",
        ))
        .arg(
            option::<String>("connector", "NAME", "nixl", "How vLLM's engines hand over; mooncake starts bootstrap servers")
                .value_parser(["nixl", "mooncake"])
                .requires("vllm"),
        )
        .arg(switch("vllm", "Speak vLLM's dialect where it differs"))
        .arg(option::<usize>("cache-tokens", "N", "0", "Capacity of the prefix cache in tokens; 0 for none"))
        .arg(option::<f64>("prefill-tokens-per-sec", "N", "0", "Speed of the prefill unit; 0 for instantaneous"))
        .arg(option::<f64>("decode-step-ms", "MS", "0", "Fixed part of a decode step"))
        .arg(option::<f64>("decode-step-per-seq-us", "US", "0", "Part of a decode step for each running request"))
        .arg(option::<usize>("max-running", "N", "0", "Requests that run at once, others queue; 0 for no limit"))
        .arg(option::<f64>("keep-alive-secs", "S", "5", "Idle seconds after which a connection is closed; 0 for never"))
        .arg(option::<u64>("ready-after-ms", "MS", "0", "Answer 503 for so long after the start"))
        .arg(Arg::new("api-key").long("api-key").value_name("KEY").help("Demand this bearer token"))
        .arg(option::<usize>("max-tokens-default", "N", "16", "Tokens generated when a request names no maximum"))
        .arg(option::<usize>("kv-tokens", "N", "1048576", "Tokens of the pretended KV cache"))
        .arg(option::<usize>("dp-size", "N", "1", "Data-parallel ranks to report and to accept"))
        .arg(option::<usize>("threads", "N", "1", "Threads that serve the engines"))
        .after_help(
            "Prints a line for each engine: its URL, then \"prefill\" or \"decode\" if it is one, then \"bootstrap PORT\" if it \
             has such a server. \"ready\" comes last.\nA prefill and a decode engine hand over within one process only: \
             start both with --prefill and --decode.\nFaults are asked for in the body's \"mock\" object, or in an array of \
             them, each for one role (\"only\") or ports (\"on\").",
        )
}

fn settings(matches: &ArgMatches) -> Settings {
    let number = |name: &str| matches.get_one::<usize>(name).copied().unwrap_or_default();
    let fraction = |name: &str| matches.get_one::<f64>(name).copied().unwrap_or_default();
    let default = Settings::default();
    Settings {
        models: matches.get_many("model").map_or(default.models, |m| m.cloned().collect()),
        strict_model: matches.get_flag("strict-model"),
        role: match matches.get_one::<String>("role").map(String::as_str) {
            Some("prefill") => Role::Prefill,
            Some("decode") => Role::Decode,
            _ => Role::Regular,
        },
        cache_tokens: number("cache-tokens"),
        prefill_tokens_per_sec: fraction("prefill-tokens-per-sec"),
        decode_step_ms: fraction("decode-step-ms"),
        decode_step_per_seq_us: fraction("decode-step-per-seq-us"),
        max_running: number("max-running"),
        max_tokens_default: number("max-tokens-default"),
        kv_tokens: number("kv-tokens"),
        keep_alive_ms: (fraction("keep-alive-secs") * 1e3) as u64,
        ready_after_ms: matches.get_one("ready-after-ms").copied().unwrap_or_default(),
        api_key: matches.get_one("api-key").cloned(),
        dp_size: number("dp-size"),
        vllm: matches.get_flag("vllm"),
        connector: match matches.get_one::<String>("connector").map(String::as_str) {
            Some("mooncake") => Connector::Mooncake,
            _ => Connector::Nixl,
        },
        bootstrap: true,
        transfer_ms: fraction("transfer-ms"),
        room_timeout_ms: matches.get_one("room-timeout-ms").copied().unwrap_or_default(),
        staged_timeout_ms: matches.get_one("staged-timeout-ms").copied().unwrap_or_default(),
        keep_body_bytes: KEEP_BODY_BYTES,
        threads: number("threads"),
        ..default
    }
}

/// The engines in the order of their ports: prefill, decode, those of `--count`.
fn parts(matches: &ArgMatches) -> Vec<(Settings, usize)> {
    let number = |name: &str| *matches.get_one::<usize>(name).expect("has a default");
    let (prefill, decode, mut count) = (number("prefill"), number("decode"), number("count"));
    if prefill + decode > 0 && matches.value_source("count") == Some(ValueSource::DefaultValue) {
        count = 0;
    }
    let of = |role| Settings { role, ..settings(matches) };
    vec![(of(Role::Prefill), prefill), (of(Role::Decode), decode), (settings(matches), count)]
}

/// What is printed of an engine.
fn line(engine: &Engine) -> String {
    let role = match engine.role() {
        Role::Regular => "",
        Role::Prefill => " prefill",
        Role::Decode => " decode",
    };
    let bootstrap = engine.bootstrap_port().map_or(String::new(), |port| format!(" bootstrap {port}"));
    format!("{}{role}{bootstrap}\n", engine.url())
}

fn serve(matches: &ArgMatches) -> io::Result<()> {
    raise_descriptor_limit();
    let host = *matches.get_one::<IpAddr>("host").expect("has a default");
    let port = *matches.get_one::<u16>("port").expect("has a default");
    let at = SocketAddr::new(host, port);
    let fleet = Fleet::start_mixed(parts(matches), at).map_err(|e| io::Error::new(e.kind(), format!("{at}: {e}")))?;
    let mut list: String = fleet.engines().iter().map(line).collect();
    list.push_str("ready\n");
    let mut out = io::stdout().lock();
    out.write_all(list.as_bytes())?;
    out.flush()?;
    drop(out);
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let mut term = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        tokio::select! {
            r = tokio::signal::ctrl_c() => r,
            _ = term.recv() => Ok(()),
        }
    })
}

/// Thousands of ports need thousands of descriptors: as many as the system allows.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}
