//! Options from the command line.
//!
//! Takes arguments and a clap command made from the option table, gives raw options. Never stops at the first
//! mistake: clap only sees arguments that it knows, and takes every value as plain text.

use clap::{Arg, ArgAction, ArgMatches, Command};

use super::given::Given;
use super::help;
use super::mistakes::{Mistake, Origin, nearest, quote};
use super::options::{OPTIONS, Row, later};
use super::values::Kind;

/// Flag of the configuration file; it has no row because it cannot stand in the file.
pub const CONFIG_FLAG: &str = "config";

/// A command that takes every option of the table, and `--config`.
pub fn command(name: &'static str, about: &'static str) -> Command {
    let config = Arg::new(CONFIG_FLAG)
        .long(CONFIG_FLAG)
        .value_name("FILE")
        .num_args(1)
        .action(ArgAction::Append)
        .help("TOML file with any of these options. Flags win over variables, variables over the file.");
    bare(name, about)
        .override_usage(format!("corelane {name} [--config FILE] [OPTIONS]"))
        .after_help(help::AFTER)
        .arg(config)
        .args(OPTIONS.iter().map(argument))
}

/// A command without options, for subcommands that take few: see [`argument`].
pub fn bare(name: &'static str, about: &'static str) -> Command {
    Command::new(name)
        .bin_name(format!("corelane {name}"))
        .about(about)
        .override_usage(format!("corelane {name} [OPTIONS]"))
        .term_width(help::WIDTH)
}

/// The flag of an option.
pub fn argument(row: &'static Row) -> Arg {
    let arg = Arg::new(row.key)
        .long(row.flag().trim_start_matches('-').to_owned())
        .value_name(row.kind.placeholder())
        .help(help::flag_text(row))
        .help_heading(row.section.title())
        .action(ArgAction::Append);
    match row.kind {
        Kind::Switch(_) => arg.num_args(0..=1).require_equals(true).default_missing_value("true"),
        _ if row.kind.is_list() => arg.num_args(1..),
        _ => arg.num_args(1),
    }
}

/// What the command line says.
#[derive(Clone)]
pub struct FromFlags {
    pub config_file: Option<String>,
    pub given: Vec<Given>,
    pub mistakes: Vec<Mistake>,
    /// For flags that a subcommand added to [`command`] or [`bare`].
    pub matches: ArgMatches,
}

/// Reads `args` (without program and subcommand).
///
/// # Errors
/// Only what clap has to say itself, above all the text of `--help`.
pub fn read(command: &Command, args: &[String]) -> Result<FromFlags, clap::Error> {
    let (known, mut mistakes) = sift(command, args);
    let program = command.get_name().to_owned();
    let matches = command.clone().try_get_matches_from(std::iter::once(program).chain(known))?;
    let mut files = values(&matches, CONFIG_FLAG);
    if files.len() > 1 {
        mistakes.push(Mistake::new(flag(CONFIG_FLAG), format!("given {} times", files.len()), "give one file"));
    }
    let given = OPTIONS.iter().filter_map(|row| {
        let values = values(&matches, row.key);
        (!values.is_empty()).then(|| Given::new(row, Origin::Flag(row.flag()), values))
    });
    Ok(FromFlags { config_file: files.pop(), given: given.collect(), mistakes, matches })
}

fn flag(name: &str) -> Origin {
    Origin::Flag(format!("--{name}"))
}

fn values(matches: &ArgMatches, id: &str) -> Vec<String> {
    // A subcommand need not have every option.
    matches.try_get_many::<String>(id).ok().flatten().into_iter().flatten().cloned().collect()
}

/// Whether an argument is a flag; a negative number is not.
fn looks_like_flag(arg: &str) -> bool {
    arg.strip_prefix('-')
        .is_some_and(|rest| !rest.is_empty() && !rest.starts_with(|c: char| c.is_ascii_digit() || c == '.'))
}

/// Parts the arguments into those that clap knows, as `--flag=value`, and mistakes.
fn sift(command: &Command, args: &[String]) -> (Vec<String>, Vec<Mistake>) {
    let mut known = Vec::new();
    let mut mistakes = Vec::new();
    let mut rest = args.iter().peekable();
    while let Some(arg) = rest.next() {
        if arg == "--" || !looks_like_flag(arg) {
            mistakes.push(stray(command, arg));
            continue;
        }
        if matches!(arg.as_str(), "--help" | "-h") {
            known.push(arg.clone());
            continue;
        }
        let (name, attached) = arg.split_once('=').map_or((arg.as_str(), None), |(name, value)| (name, Some(value)));
        let long = name.strip_prefix("--").and_then(|l| command.get_arguments().find(|a| a.get_long() == Some(l)));
        let mut values: Vec<String> = attached.iter().map(|&value| value.to_owned()).collect();
        let most = long.map_or(usize::MAX, most_values);
        while values.len() < most
            && let Some(value) = rest.next_if(|next| !looks_like_flag(next))
        {
            values.push(value.clone());
        }
        if long.is_some_and(Arg::is_require_equals_set)
            && attached.is_none()
            && let Some(value) = rest.next_if(|next| matches!(next.as_str(), "true" | "false" | "1" | "0"))
        {
            mistakes.push(belongs_to_no_flag(value, format!("write {name}={value}")));
        }
        match long {
            None => mistakes.push(unknown(command, name)),
            Some(wanted) if most > 0 && values.is_empty() => {
                let what = format!("needs a value ({})", wanted_value(wanted));
                mistakes.push(Mistake::new(Origin::Flag(arg.clone()), what, format!("write {name} VALUE")));
            }
            Some(switch) if !values.is_empty() && !switch.get_action().takes_values() => {
                mistakes.push(Mistake::new(Origin::Flag(name.to_owned()), "takes no value", "leave the value out"));
            }
            Some(_) if values.is_empty() => known.push(name.to_owned()),
            Some(_) => known.extend(values.iter().map(|value| format!("{name}={value}"))),
        }
    }
    (known, mistakes)
}

/// How many of the following arguments can be values of a flag.
fn most_values(arg: &Arg) -> usize {
    match arg.get_num_args() {
        _ if !arg.get_action().takes_values() || arg.is_require_equals_set() => 0,
        range => range.map_or(1, |r| r.max_values()),
    }
}

fn stray(command: &Command, arg: &str) -> Mistake {
    let takes_file = command.get_arguments().any(|a| a.get_id() == CONFIG_FLAG);
    let fix = match takes_file && arg.ends_with(".toml") {
        true => format!("did you mean --{CONFIG_FLAG} {arg}?"),
        false => "values follow their flag; see --help".to_owned(),
    };
    belongs_to_no_flag(arg, fix)
}

fn belongs_to_no_flag(arg: &str, fix: String) -> Mistake {
    Mistake::new(Origin::Flag(quote(arg)), "this argument belongs to no flag", fix)
}

fn wanted_value(arg: &Arg) -> String {
    match OPTIONS.iter().find(|row| row.key == arg.get_id().as_str()) {
        Some(row) => row.kind.wants(),
        None if arg.get_id() == CONFIG_FLAG => "a file".to_owned(),
        // Flags of a subcommand: numbers, but for those that name what they want.
        None => match arg.get_value_names() {
            Some([name]) if name.len() > 1 => name.to_lowercase(),
            _ => "a whole number".to_owned(),
        },
    }
}

fn unknown(command: &Command, name: &str) -> Mistake {
    let origin = Origin::Flag(name.to_owned());
    let plain = name.trim_start_matches('-');
    if let Some(what) = later(&plain.replace('-', "_")) {
        return Mistake::new(origin, format!("not supported yet ({what})"), "leave it out");
    }
    let longs = command.get_arguments().filter_map(|a| a.get_long());
    match nearest(&plain.replace('_', "-"), longs) {
        Some(near) => Mistake::new(origin, "no such flag", format!("did you mean --{near}?")),
        None => Mistake::new(origin, "no such flag", "see --help"),
    }
}
