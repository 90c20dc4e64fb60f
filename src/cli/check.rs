//! `corelane check`: a configuration is read and judged.
//!
//! Takes the arguments of `serve`, gives one line of summary or every mistake. Never starts anything, never leaves a file
//! behind.

use std::process::ExitCode;

use clap::{Arg, ArgAction};

use super::Subcommand;
use crate::config::{self, AccessLog, Config, Loaded, Mistake};
use crate::control::access_log;

const PRINT: &str = "print";

/// Runs the subcommand.
pub(super) fn run(subcommand: &Subcommand, args: &[String]) -> ExitCode {
    let print = Arg::new(PRINT)
        .long(PRINT)
        .action(ArgAction::SetTrue)
        .help("Print the configuration in effect as TOML, with the origin of every value.");
    let command = config::flags::command(subcommand.name, subcommand.about).arg(print);
    let (loaded, source) = match super::configure(&command, args) {
        Ok(done) => done,
        Err(code) => return code,
    };
    for warning in absent_cores(&loaded, &allowed_cores()) {
        super::complain(format_args!("warning: {warning}"));
    }
    if let Err(why) = log_opens(&loaded.config) {
        super::complain(format_args!("warning: {why}; serve would refuse it here, as this user"));
    }
    if source.flags.matches.get_flag(PRINT) {
        super::say(&format!("# {}\n\n{}", loaded.summary(), loaded.to_toml()));
    } else {
        super::say(&format!("{}\n", loaded.summary()));
    }
    ExitCode::SUCCESS
}

/// Cores that this process may use; `serve` takes no others.
fn allowed_cores() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect()
}

/// Whether the access log, where there is one, can be written on this host.
fn log_opens(config: &Config) -> Result<(), String> {
    if config.access_log == AccessLog::Off { Ok(()) } else { access_log::try_open(&config.access_log_path) }
}

/// Cores of the configuration that are not there. Only warnings: the configuration may be meant for another host.
fn absent_cores(loaded: &Loaded, allowed: &[usize]) -> Vec<Mistake> {
    let of_key = |key: &str, cores: &[usize]| {
        let absent: Vec<String> = cores.iter().filter(|c| !allowed.contains(c)).map(usize::to_string).collect();
        let origin = &loaded.settings.iter().find(|s| s.row.key == key)?.origin;
        let what = format!("this process may not use core {} of this host", absent.join(", "));
        let fix = "serve would refuse it here; correct it if this is the host that is meant";
        (!absent.is_empty()).then(|| config::Wrong::new(what, fix).at(origin, key))
    };
    let control: Vec<usize> = loaded.config.control_core.into_iter().collect();
    [of_key("cores", &loaded.config.cores), of_key("control_core", &control)].into_iter().flatten().collect()
}
