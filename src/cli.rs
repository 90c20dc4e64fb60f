//! The command line: which subcommands there are.
//!
//! Takes arguments, gives an exit code: 0 done, 1 failed while running, 2 wrong usage or configuration. Never does a
//! subcommand's work itself.

mod check;
mod demo;
mod doctor;
pub mod mock_worker;
mod serve;
mod top;

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

use crate::config;

/// A subcommand; `run` gets the arguments after its name.
struct Subcommand {
    name: &'static str,
    about: &'static str,
    run: fn(&Subcommand, &[String]) -> ExitCode,
}

const SUBCOMMANDS: &[Subcommand] = &[
    Subcommand { name: "serve", about: "Serve clients: the gateway itself", run: serve::run },
    Subcommand { name: "check", about: "Check a configuration, tell every mistake, start nothing", run: check::run },
    Subcommand {
        name: "doctor",
        about: "Look at host, configuration and workers, say what to change",
        run: doctor::run,
    },
    Subcommand { name: "top", about: "Show what a gateway does, anew each second, in the terminal", run: top::run },
    Subcommand { name: "demo", about: "Serve a mock fleet, to see the gateway at work without a GPU", run: demo::run },
    Subcommand {
        name: "mock-worker",
        about: "Behave like a fleet of SGLang workers, for tests and demos",
        run: |_, args| mock_worker::run(args),
    },
];

/// Exit code of wrong usage or configuration.
const USAGE: u8 = 2;

/// Runs the program with its arguments (without the program's name).
pub fn run(args: impl IntoIterator<Item = std::ffi::OsString>) -> ExitCode {
    let mut texts = Vec::new();
    for arg in args {
        match arg.into_string() {
            Ok(text) => texts.push(text),
            Err(arg) => {
                return wrong_usage(&format!(
                    "{}: not UTF-8; correct this argument",
                    config::quote(&arg.to_string_lossy())
                ));
            }
        }
    }
    let Some((first, rest)) = texts.split_first() else {
        say(&overview());
        return ExitCode::from(USAGE);
    };
    match first.as_str() {
        "help" if !rest.is_empty() => run([&*rest[0], "--help"].map(std::ffi::OsString::from)),
        "--help" | "-h" | "help" => {
            say(&overview());
            ExitCode::SUCCESS
        }
        "--version" | "-V" => {
            say(concat!("corelane ", env!("CARGO_PKG_VERSION"), "\n"));
            ExitCode::SUCCESS
        }
        name => match SUBCOMMANDS.iter().find(|s| s.name == name) {
            Some(subcommand) => (subcommand.run)(subcommand, rest),
            None => wrong_usage(&unknown(name)),
        },
    }
}

fn unknown(name: &str) -> String {
    let names: Vec<&str> = SUBCOMMANDS.iter().map(|s| s.name).collect();
    if name.starts_with('-') {
        return format!("{name}: the subcommand is missing; write corelane serve {name} …");
    }
    match config::nearest(name, names.iter().copied()) {
        Some(near) => format!("{}: no such subcommand; did you mean {near}?", config::quote(name)),
        None => format!("{}: no such subcommand; give one of {}", config::quote(name), names.join(", ")),
    }
}

/// Writes to standard output. A closed pipe is the reader's affair; printing would panic.
fn say(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// Writes a line to standard error, in the same way.
fn complain(line: impl Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn wrong_usage(line: &str) -> ExitCode {
    complain(line);
    ExitCode::from(USAGE)
}

fn overview() -> String {
    let mut command = clap::Command::new("corelane")
        .about(env!("CARGO_PKG_DESCRIPTION"))
        .version(env!("CARGO_PKG_VERSION"))
        .disable_help_subcommand(true)
        .override_usage("corelane SUBCOMMAND [OPTIONS]")
        .after_help("corelane SUBCOMMAND --help lists the options of a subcommand.");
    for subcommand in SUBCOMMANDS {
        command = command.subcommand(clap::Command::new(subcommand.name).about(subcommand.about));
    }
    command.render_help().to_string()
}

/// Reads the configuration for a subcommand: flags, environment, files. Warnings and mistakes are printed.
///
/// # Errors
/// The exit code: 0 after `--help`, 2 after mistakes.
fn configure(command: &clap::Command, args: &[String]) -> Result<(config::Loaded, config::Source), ExitCode> {
    let flags = read_flags(command, args)?;
    let source = config::Source { flags, environment: config::environment::of_process() };
    match source.load(config::Disk) {
        Ok(loaded) => {
            for warning in &loaded.warnings {
                complain(format_args!("warning: {warning}"));
            }
            Ok((loaded, source))
        }
        Err(mistakes) => Err(tell(&mistakes)),
    }
}

/// Reads flags alone.
///
/// # Errors
/// The exit code after `--help`, which has been printed.
fn read_flags(command: &clap::Command, args: &[String]) -> Result<config::flags::FromFlags, ExitCode> {
    config::flags::read(command, args).map_err(|error| {
        // A closed pipe is the reader's affair.
        let _ = error.print();
        ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(USAGE))
    })
}

/// Prints mistakes; the exit code for them.
fn tell(mistakes: &[config::Mistake]) -> ExitCode {
    for mistake in mistakes {
        complain(mistake);
    }
    complain(format_args!("corelane: {} to correct; nothing was started", count(mistakes.len(), "mistake")));
    ExitCode::from(USAGE)
}

fn count(n: usize, noun: &str) -> String {
    if n == 1 { format!("1 {noun}") } else { format!("{n} {noun}s") }
}
