//! `corelane check`: a configuration is read and judged.
//!
//! Takes the arguments of `serve`, gives one line of summary or every mistake. Never starts anything.

use std::process::ExitCode;

use clap::{Arg, ArgAction};

use super::Subcommand;
use crate::config;

const PRINT: &str = "print";

/// Runs the subcommand.
pub(super) fn run(subcommand: &Subcommand, args: &[String]) -> ExitCode {
    let print = Arg::new(PRINT)
        .long(PRINT)
        .action(ArgAction::SetTrue)
        .help("Print the configuration in effect as TOML, with the origin of every value.");
    let command = config::flags::command(subcommand.name, subcommand.about).arg(print);
    let (loaded, matches) = match super::configure(&command, args) {
        Ok(done) => done,
        Err(code) => return code,
    };
    if matches.get_flag(PRINT) {
        super::say(&format!("# {}\n\n{}", loaded.summary(), loaded.to_toml()));
    } else {
        super::say(&format!("{}\n", loaded.summary()));
    }
    ExitCode::SUCCESS
}
