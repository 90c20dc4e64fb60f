//! `corelane serve`: the gateway.
//!
//! Takes arguments, gives an exit code once the gateway has ended. Never starts anything while the configuration
//! has a mistake.

use std::process::ExitCode;

use super::Subcommand;
use crate::config;

/// Runs the subcommand.
pub(super) fn run(subcommand: &Subcommand, args: &[String]) -> ExitCode {
    crate::boot::outlive_requests();
    let command = config::flags::command(subcommand.name, subcommand.about);
    let (loaded, source) = match super::configure(&command, args) {
        Ok(done) => done,
        Err(code) => return code,
    };
    crate::boot::run(loaded, source)
}
