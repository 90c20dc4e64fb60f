//! `corelane doctor`: a host and a configuration, looked at before they serve.
//!
//! Takes the arguments of `serve`, gives findings: what was seen and what to do. Exit code 0: nothing fails; 1:
//! something warns, with `--strict`; 2: something fails, or the configuration has mistakes. Never changes anything,
//! never starts a lane.

mod clock;
mod cores;
mod doors;
mod facts;
mod finding;
mod interrupts;
mod kernel;
mod limits;
mod network;
mod workers;

use std::process::ExitCode;

use clap::{Arg, ArgAction};

use super::Subcommand;
use crate::boot::host;
use crate::config::{self, Config};
use facts::doors::try_door;
use facts::{Host, Tree, fleet};
use finding::Finding;

const JSON: &str = "json";
const STRICT: &str = "strict";
const SLOW: &str = "slow";
const ROOT: &str = "root";

const AFTER: &str = "Exit code: 0 nothing fails, 1 something warns (with --strict), 2 something fails or the configuration has \
                     mistakes. What the findings mean: tuning/README.md.";

/// What is to be served, and on which cores.
struct Plan<'a> {
    config: &'a Config,
    lanes: Vec<usize>,
    control: Option<usize>,
}

impl Plan<'_> {
    fn of<'a>(config: &'a Config, host: &Host) -> Plan<'a> {
        let allowed = &host.cores.allowed;
        let lanes = if config.cores.is_empty() { allowed.clone() } else { config.cores.clone() };
        let control = config.control_core.or_else(|| allowed.iter().copied().find(|c| !lanes.contains(c)));
        Plan { config, lanes, control }
    }

    /// Pipes of all lanes.
    fn pipes(&self) -> u64 {
        (self.config.pipes_per_lane * self.lanes.len()) as u64
    }
}

/// Runs the subcommand.
pub(super) fn run(subcommand: &Subcommand, args: &[String]) -> ExitCode {
    let switch =
        |name: &'static str, help: &'static str| Arg::new(name).long(name).action(ArgAction::SetTrue).help(help);
    let root = Arg::new(ROOT).long(ROOT).value_name("DIR").num_args(1).help(
        "Look at a copy of another host's /proc and /sys below this directory: no worker is asked, no port tried.",
    );
    let command = config::flags::command(subcommand.name, subcommand.about)
        .arg(switch(JSON, "Print the findings as JSON."))
        .arg(switch(STRICT, "Exit with 1 when something warns."))
        .arg(switch(SLOW, "Also watch, for up to 6 s, how long workers keep idle connections."))
        .arg(root)
        .after_help(AFTER);
    let (loaded, source) = match super::configure(&command, args) {
        Ok(done) => done,
        Err(code) => return code,
    };
    let matches = &source.flags.matches;
    let root = matches.get_one::<String>(ROOT).map(String::as_str);
    let tree = Tree::new(root.unwrap_or("/"));
    if !tree.exists("proc/self/limits") {
        super::complain(format_args!("--root: {} holds no proc/self/limits", root.unwrap_or("/")));
        return ExitCode::from(super::USAGE);
    }
    let host = Host::read(&tree);
    let plan = Plan::of(&loaded.config, &host);
    let findings = match look(&host, &plan, root.is_none(), matches.get_flag(SLOW)) {
        Ok(findings) => findings,
        Err(e) => {
            super::complain(format_args!("corelane doctor: workers cannot be asked: {e}"));
            return ExitCode::from(2);
        }
    };
    let exit = finding::exit_code(&findings, matches.get_flag(STRICT));
    super::say(&match matches.get_flag(JSON) {
        true => finding::json(&findings, exit),
        false => finding::text(&findings),
    });
    ExitCode::from(exit)
}

/// All checks. What only this host itself can tell is asked where `is_here`.
fn look(host: &Host, plan: &Plan, is_here: bool, slow: bool) -> std::io::Result<Vec<Finding>> {
    let ring = is_here.then(|| host::probe_ring().map(|mode| mode.name()));
    let mut all = kernel::check(host, plan, &ring);
    all.extend(limits::check(host, plan));
    all.extend(cores::check(host, plan));
    all.extend(interrupts::check(host, plan));
    all.extend(network::check(host, plan));
    all.extend(clock::check(host, plan));
    let config = plan.config;
    let tried = is_here.then(|| {
        let clients = try_door(config.host, config.port, false);
        (clients, try_door(config.metrics_host, config.metrics_port, true))
    });
    all.extend(doors::check(plan, &tried));
    if is_here {
        all.extend(workers::check(plan, &fleet::ask(config, slow)?));
    }
    Ok(all)
}
