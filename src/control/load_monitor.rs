//! What engines say of their load is asked for, and made into what choices among workers go by.
//!
//! Takes engines' answers, gives readings, and findings about pools: who is shed, and whose KV caches are unevenly used. Never
//! asks anybody unless the configuration needs it; never goes by what is too old, nor by a number alone: a worker is shed
//! only while a usable one beside it is known to be better off.
//!
//! Engines' numbers lag behind bursts. So they only take workers out of the choice or affinity out of it; which of the
//! others gets a request is decided by what this process has in flight there.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::watch;
use tokio::time::sleep;

use super::Tended;
use super::fetch::{Failure, Reply};
use super::load_report::{self, Ranks, Report};
use crate::config::{Config, Engine, Routing};
use crate::shared::Shared;
use crate::shared::reported::{MOST_WAITING, Said, WHOLE};
use crate::shared::roster::Slot;

/// Between two looks at what has been said.
pub(super) const LOOK: Duration = Duration::from_millis(100);
/// Intervals after which a reading is too old.
const STALE_INTERVALS: u32 = 3;
/// Pauses are longer or shorter at random by this part of them, so that a fleet is not asked in one moment.
const JITTER: f64 = 0.1;

/// The thresholds, in what readings are counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// The usages of a pool are uneven if they differ by more; [`WHOLE`]: never.
    pub spread: u32,
    /// A worker with more is hot; [`WHOLE`]: none.
    pub usage: u32,
    /// So is one with as many waiting; 0: none.
    pub waiting: u32,
}

impl Rules {
    /// Those of a configuration.
    pub fn of(routing: &Routing) -> Rules {
        Rules {
            spread: parts(routing.balance_token_usage),
            usage: parts(routing.overload_token_usage),
            waiting: routing.max_worker_waiting,
        }
    }

    fn is_hot(&self, said: Said) -> bool {
        said.usage.is_some_and(|usage| usage > self.usage) || self.waiting > 0 && said.waiting >= self.waiting
    }

    /// Whether what was said answers the questions that the thresholds ask.
    fn is_cool(&self, said: Said) -> bool {
        !self.is_hot(said) && (said.usage.is_some() || self.usage >= WHOLE)
    }
}

/// What the readings of a pool's workers come to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finding {
    /// Those of them that are shed, by place.
    pub shed: Vec<usize>,
    /// The used parts of their KV caches differ by too much.
    pub uneven: bool,
}

/// Judges the workers of a pool, each by whether it is usable and what it has said. Who has said nothing is neither shed
/// nor a reason to shed others.
pub fn judge(rules: Rules, members: impl Iterator<Item = (bool, Option<Said>)> + Clone) -> Finding {
    let usable =
        || members.clone().enumerate().filter_map(|(at, (usable, said))| said.filter(|_| usable).map(|s| (at, s)));
    let usages = || usable().filter_map(|(_, said)| said.usage);
    let spread = usages().max().unwrap_or(0) - usages().min().unwrap_or(0);
    let shed = if usable().any(|(_, said)| rules.is_cool(said)) {
        // Who is not usable now may be in a moment.
        let hot = |(at, (_, said)): (usize, (bool, Option<Said>))| said.filter(|&s| rules.is_hot(s)).map(|_| at);
        members.clone().enumerate().filter_map(hot).collect()
    } else {
        Vec::new()
    };
    Finding { shed, uneven: spread > rules.spread }
}

/// A part of one in parts of [`WHOLE`].
fn parts(of_one: f64) -> u32 {
    (of_one.clamp(0.0, 1.0) * f64::from(WHOLE)).round() as u32
}

fn said(report: &Report, at_s: u32) -> Said {
    let waiting = report.waiting.min(MOST_WAITING.into()) as u32;
    Said { usage: report.kv_usage.map(parts), waiting, at_s }
}

/// Who looks at what has been said.
#[derive(Default)]
pub(super) struct Monitor {
    /// Places of pools that are uneven.
    uneven: Vec<usize>,
    /// Something may be left to be wiped when nobody wants it any more.
    has_looked: bool,
}

impl Monitor {
    /// Whether there is something to look at, or to wipe.
    pub(super) fn is_busy(&self, config: &Config) -> bool {
        self.has_looked || config.routing.wants_loads()
    }

    /// Wipes what is too old, and puts into effect what the rest comes to. `least_stale` is the age before which nothing
    /// is too old.
    pub(super) fn look(&mut self, shared: &Shared, config: &Config, now_s: u32, least_stale: Duration) {
        let on = config.routing.wants_loads();
        self.has_looked = on;
        let snapshot = shared.roster.snapshot();
        let most_s = (config.load_monitor_interval * STALE_INTERVALS).max(least_stale).as_secs_f64().ceil() as u32;
        for worker in &snapshot.workers {
            let kept = shared.reported.said(worker.slot);
            if kept.is_some_and(|said| !on || now_s.saturating_sub(said.at_s) > most_s) {
                shared.reported.note(worker.slot, None);
            }
        }
        let rules = Rules::of(&config.routing);
        let mut uneven = Vec::new();
        let mut shed: BTreeMap<Slot, bool> = snapshot.workers.iter().map(|worker| (worker.slot, false)).collect();
        for pool in snapshot.all_pools().filter(|_| on) {
            let members = pool.slots.iter().map(|&slot| (shared.vitals.usable(slot), shared.reported.said(slot)));
            let finding = judge(rules, members);
            for at in finding.shed {
                // The pool of all workers of a role says nothing of who serves a model: only a peer there is better off.
                let serves = |slot, era| snapshot.worker(slot, era).is_some_and(|worker| !worker.models.is_empty());
                if pool.model.is_some() || !serves(pool.slots[at], pool.eras[at]) {
                    shed.insert(pool.slots[at], true);
                }
            }
            if finding.uneven {
                uneven.push(pool.place);
            }
        }
        for place in self.uneven.drain(..).filter(|place| !uneven.contains(place)) {
            shared.reported.set_uneven(place, false);
        }
        uneven.iter().for_each(|&place| shared.reported.set_uneven(place, true));
        self.uneven = uneven;
        for worker in &snapshot.workers {
            let is = shed.get(&worker.slot) == Some(&true);
            if shared.vitals.shed(worker.slot, is) {
                let (worker, said) = (&worker.url, shared.reported.said(worker.slot));
                let waiting = said.map(|said| said.waiting);
                let kv_usage = said.and_then(Said::kv_usage);
                match is {
                    true => {
                        tracing::info!(%worker, kv_usage, waiting, "worker is shed for what its engine says of its load")
                    }
                    false => tracing::info!(%worker, kv_usage, waiting, "worker is shed no more"),
                }
            }
        }
    }
}

/// By what an engine is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Loads,
    Metrics,
}

/// Asks for as long as the worker is known, while the configuration wants it.
pub(super) async fn keep_asking(tended: &Tended) {
    tended.resolved().await;
    let mut follows = tended.newest.clone();
    let mut way = if tended.engine == Engine::Vllm { Way::Metrics } else { Way::Loads };
    let mut complained = false;
    loop {
        // The sender lives as long as the thread.
        let Ok(interval) = wanted(&mut follows).await else { return };
        match ask(tended, &mut way).await {
            Ok(ranks) => {
                note(tended, &ranks);
                complained = false;
            }
            Err(Lack::Unsaid(why)) if !std::mem::replace(&mut complained, true) => {
                tracing::warn!(worker = %tended.url, reason = %why, "load of the worker's engine is not known");
            }
            // One that does not answer at all is complained about by its probes.
            Err(why) => {
                tracing::debug!(worker = %tended.url, reason = %why, "load of the worker's engine is not known")
            }
        }
        let pause = interval.mul_f64(1.0 + JITTER * (2.0 * fastrand::f64() - 1.0));
        tokio::select! {
            () = sleep(pause) => {}
            _ = follows.changed() => {}
        }
    }
}

/// Returns when loads are wanted, with the interval.
async fn wanted(follows: &mut watch::Receiver<Arc<Config>>) -> Result<Duration, watch::error::RecvError> {
    let config = follows.wait_for(|config| config.routing.wants_loads()).await?;
    Ok(config.load_monitor_interval)
}

/// Notes for each member what its rank says, or for the only one what all of them say.
fn note(tended: &Tended, ranks: &Ranks) {
    let at_s = tended.epoch.elapsed().as_secs() as u32;
    let slots = tended.slots.borrow();
    for (rank, &slot) in (0..).zip(slots.iter()) {
        let report = match slots.len() {
            1 => Some(said(&ranks.total(), at_s)),
            _ => ranks.of(rank).map(|report| said(report, at_s)),
        };
        tended.shared.reported.note(slot, report);
    }
}

/// Asks in the way that answered last, else in the other one.
async fn ask(tended: &Tended, way: &mut Way) -> Result<Ranks, Lack> {
    match ask_by(tended, *way).await {
        Err(Lack::Unsaid(why)) => {
            let other = match way {
                Way::Metrics if tended.engine == Engine::Vllm => return Err(Lack::Unsaid(why)),
                Way::Metrics => Way::Loads,
                Way::Loads => Way::Metrics,
            };
            let ranks = ask_by(tended, other).await.map_err(|_| Lack::Unsaid(why))?;
            *way = other;
            Ok(ranks)
        }
        answered => answered,
    }
}

/// Why there is no load.
enum Lack {
    /// The engine does not answer.
    Silent(Failure),
    /// Its answer does not say it.
    Unsaid(String),
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lack::Silent(failure) => failure.fmt(f),
            Lack::Unsaid(why) => f.write_str(why),
        }
    }
}

async fn ask_by(tended: &Tended, way: Way) -> Result<Ranks, Lack> {
    let path = match way {
        Way::Loads => "/v1/loads",
        Way::Metrics => "/metrics",
    };
    let Reply { status, body, truncated } = tended.get(path).await.map_err(Lack::Silent)?;
    let unsaid = |why: &str| Lack::Unsaid(format!("{path} {why}"));
    if status != 200 {
        return Err(unsaid(&format!("answers {status}")));
    }
    if truncated {
        return Err(unsaid("answers too much"));
    }
    let ranks = match way {
        Way::Loads => serde_json::from_slice::<Value>(&body).ok().and_then(|said| load_report::sglang(&said)),
        Way::Metrics => load_report::metrics(&String::from_utf8_lossy(&body)),
    };
    ranks.ok_or_else(|| unsaid("says no load"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A usable worker that says so much, in percent of its cache; a negative one: does not say it.
    fn says(percent: i32, waiting: u32) -> (bool, Option<Said>) {
        let usage = (percent >= 0).then(|| parts(f64::from(percent) / 100.0));
        (true, Some(Said { usage, waiting, at_s: 1 }))
    }

    #[test]
    fn thresholds() {
        const SILENT: (bool, Option<Said>) = (true, None);
        let out = |(_, said): (bool, Option<Said>)| (false, said);
        let rules = |spread: f64, usage: f64, waiting| Rules { spread: parts(spread), usage: parts(usage), waiting };
        let (off, usage, waiting) = (rules(1.0, 1.0, 0), rules(1.0, 0.8, 0), rules(1.0, 1.0, 8));
        let (spread, both) = (rules(0.3, 1.0, 0), rules(1.0, 0.8, 8));
        for (name, rules, members, shed, uneven) in [
            ("off", off, vec![says(100, 99), says(0, 0)], vec![], false),
            ("nobody", both, vec![], vec![], false),
            ("above", usage, vec![says(81, 0), says(80, 99)], vec![0], false),
            ("all above", usage, vec![says(81, 0), says(99, 0)], vec![], false),
            ("several above", usage, vec![says(81, 0), says(10, 0), says(99, 0)], vec![0, 2], false),
            ("alone", usage, vec![says(99, 0)], vec![], false),
            ("beside one that says nothing", usage, vec![says(99, 0), SILENT], vec![], false),
            ("beside one that does not say it", usage, vec![says(99, 0), says(-1, 0)], vec![], false),
            ("beside one that is out", usage, vec![says(99, 0), out(says(10, 0))], vec![], false),
            ("out and above", usage, vec![out(says(99, 0)), says(10, 0), SILENT], vec![0], false),
            ("as many waiting", waiting, vec![says(-1, 8), says(-1, 7)], vec![0], false),
            ("all have as many", waiting, vec![says(-1, 8), says(0, 9)], vec![], false),
            ("either", both, vec![says(10, 8), says(90, 0), says(10, 0)], vec![0, 1], false),
            ("each in its way", both, vec![says(10, 8), says(90, 0)], vec![], false),
            ("even enough", spread, vec![says(70, 0), says(40, 0)], vec![], false),
            ("uneven", spread, vec![says(71, 0), says(50, 0), says(40, 0)], vec![], true),
            ("uneven with one that is out", spread, vec![says(71, 0), says(50, 0), out(says(0, 0))], vec![], false),
            ("uneven with one that says nothing", spread, vec![says(71, 0), SILENT, says(-1, 0)], vec![], false),
        ] {
            assert_eq!(judge(rules, members.into_iter()), Finding { shed, uneven }, "{name}");
        }
    }

    #[test]
    fn thresholds_are_those_of_the_configuration() {
        assert_eq!(Rules::of(&Routing::DEFAULT), Rules { spread: WHOLE, usage: WHOLE, waiting: 0 });
        let routing = Routing { overload_token_usage: 0.5, max_worker_waiting: 3, ..Routing::DEFAULT };
        assert_eq!(Rules::of(&routing), Rules { spread: WHOLE, usage: WHOLE / 2, waiting: 3 });
        let report = Report { running: 0, waiting: u64::MAX, kv_usage: Some(0.25) };
        assert_eq!(said(&report, 5), Said { usage: Some(WHOLE / 4), waiting: MOST_WAITING, at_s: 5 });
    }
}
