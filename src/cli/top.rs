//! `corelane top`: what a gateway does, anew each second, in a terminal.
//!
//! Takes the address of an admin listener, gives a screen, or one text where there is no terminal. Exit code 1 where
//! nothing can be read or shown. Never changes anything, never shows what the address of the listener does not tell.

mod figures;
mod screen;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use clap::{Arg, ArgAction};
use hyper::Method;

use super::{Subcommand, complain, say, tell};
use crate::config::{self, Config, Origin, flags};
use crate::control::fetch::Question;
use crate::control::resolve::Endpoint;
use crate::control::stats::{MAX_STATS_BYTES, Stats};
use figures::History;

const ADMIN: &str = "admin";
const TOKEN: &str = "token";
const ONCE: &str = "once";
/// Where the token may stand, too: arguments show in the list of processes.
const TOKEN_VARIABLE: &str = "CORELANE_ADMIN_TOKEN";
/// From one reading to the next.
const TICK: Duration = Duration::from_secs(1);
/// Longest wait for a reading.
const PATIENCE: Duration = Duration::from_secs(4);

/// Runs the subcommand.
pub(super) fn run(subcommand: &Subcommand, args: &[String]) -> ExitCode {
    let usual = Config::with_workers(Vec::new());
    let url = format!("http://{}:{}", usual.metrics_host, usual.metrics_port);
    let command = flags::bare(subcommand.name, subcommand.about)
        .arg(value(ADMIN, "URL", format!("Address of the gateway's admin listener\n[default: {url}]")))
        .arg(value(TOKEN, "TOKEN", format!("Its token, if it wants one\n[env: {TOKEN_VARIABLE}]")))
        .arg(Arg::new(ONCE).long(ONCE).action(ArgAction::SetTrue).help("Print one text, of one second, and end"))
        .after_help("q quits, arrows and page keys scroll the workers, left and right choose their order.");
    let given = match super::read_flags(&command, args) {
        Ok(given) => given,
        Err(code) => return code,
    };
    if !given.mistakes.is_empty() {
        return tell(&given.mistakes);
    }
    let last = |name: &str| given.matches.get_many::<String>(name).and_then(|mut all| all.next_back().cloned());
    let url = last(ADMIN).unwrap_or(url);
    let endpoint = match Endpoint::parse(url.trim_end_matches('/')) {
        Ok(endpoint) => endpoint,
        Err(wrong) => return tell(&[wrong.at(&Origin::Flag(format!("--{ADMIN}")), &config::quote(&url))]),
    };
    let token = last(TOKEN).or_else(|| std::env::var(TOKEN_VARIABLE).ok());
    let source = Source { url, endpoint, token };
    let shown = match given.matches.get_flag(ONCE) || !std::io::stdout().is_terminal() {
        true => source.once().map(|text| say(&text)),
        false => screen::run(source),
    };
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            complain(format_args!("corelane top: {why}"));
            ExitCode::FAILURE
        }
    }
}

fn value(name: &'static str, placeholder: &'static str, help: String) -> Arg {
    Arg::new(name).long(name).value_name(placeholder).num_args(1).action(ArgAction::Append).help(help)
}

/// An admin listener.
struct Source {
    url: String,
    endpoint: Endpoint,
    token: Option<String>,
}

impl Source {
    /// Two readings, as a text.
    fn once(&self) -> Result<String, String> {
        let runtime = runtime()?;
        let mut history = History::default();
        history.push(runtime.block_on(self.read())?);
        std::thread::sleep(TICK);
        history.push(runtime.block_on(self.read())?);
        Ok(history.report(Default::default()).map(|report| report.text()).unwrap_or_default())
    }

    /// Sends a reading each second, until nobody takes it.
    fn keep_reading<M>(&self, to: &Sender<M>, wrap: impl Fn(Result<Stats, String>) -> M) -> Result<(), String> {
        let runtime = runtime()?;
        loop {
            let begun = Instant::now();
            if to.send(wrap(runtime.block_on(self.read()))).is_err() {
                return Ok(());
            }
            std::thread::sleep(TICK.saturating_sub(begun.elapsed()));
        }
    }

    async fn read(&self) -> Result<Stats, String> {
        let Source { url, endpoint, token } = self;
        let addrs = match endpoint.literal() {
            Some(addr) => [addr].into(),
            None => endpoint.look_up().await.map_err(|e| format!("{url}: {e}"))?,
        };
        let question = Question {
            addrs: &addrs,
            authority: &endpoint.authority,
            path: &format!("{}/stats", endpoint.prefix),
            api_key: token.as_deref(),
            limit: PATIENCE,
        };
        let asked = question.ask(Method::GET, MAX_STATS_BYTES).await;
        let reply = asked.map_err(|failure| format!("{url}: {failure}"))?;
        match reply.status {
            200 => serde_json::from_slice(&reply.body)
                .map_err(|e| format!("{url}/stats: not what this version of corelane writes ({e})")),
            401 | 403 if token.is_some() => Err(format!("{url}: the token is not taken")),
            401 | 403 => Err(format!("{url}: wants a token; give --{TOKEN}, or set {TOKEN_VARIABLE}")),
            status => Err(format!("{url}/stats: answered with {status}; is it the admin listener of a corelane?")),
        }
    }
}

fn runtime() -> Result<tokio::runtime::Runtime, String> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())
}
