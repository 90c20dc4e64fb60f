//! `corelane demo --burst N`: the fault that this gateway grew from, staged. Long prompts and one-token answers, all at
//! once: load that is counted when an answer begins stands at 0 for every one of them.
//!
//! Takes a demo whose fleet is ready, gives what is wrong. Never lets a worker answer before all requests of a burst
//! are chosen for, unless that takes too long; then that is wrong.

use std::io;
use std::time::{Duration, Instant};

use super::screen::Screen;
use super::{Demo, count};
use crate::boot::Signals;
use crate::mock::load::{Load, Pattern, Totals};
use crate::mock::{Role, Settings};

/// Bursts, one after the other.
pub(super) const BURSTS: usize = 3;
/// Length of a prompt, in bytes: 32k tokens of about four.
const PROMPT_BYTES: usize = 4 * 32 * 1024;
/// Longest time for which answers are held back.
const HOLD: Duration = Duration::from_secs(20);
/// Time for the counts to come to rest after the last answer.
const REST: Duration = Duration::from_secs(5);
/// From one look at the counts to the next.
const LOOK: Duration = Duration::from_millis(2);

/// Engines whose prefill is far slower than their decode: about 80 ms a prompt, 1 ms a token.
pub(super) fn settings(base: Settings) -> Settings {
    Settings { prefill_tokens_per_sec: 4e5, decode_step_ms: 1.0, decode_step_per_seq_us: 0.0, max_running: 0, ..base }
}

/// The requests of a burst.
pub(super) fn pattern(base: Pattern) -> Pattern {
    Pattern { turn_bytes: PROMPT_BYTES, max_tokens: 1, ..base }
}

impl Demo {
    /// Sends the bursts and shows what each worker got of them. Gives what came of the requests, and what must not be,
    /// a line each. A signal, or nobody who reads, ends it after the burst under way.
    pub(super) fn bursts(
        &self,
        mut pattern: Pattern,
        signals: &Signals,
        screen: &mut Screen,
    ) -> io::Result<(Totals, Vec<String>)> {
        let (mut all, mut faults) = (Totals::default(), Vec::new());
        for n in 1..=BURSTS {
            if signals.within(Duration::ZERO) {
                break;
            }
            let before = self.received();
            let (totals, held) = self.burst(&pattern, signals)?;
            (all.ok, all.failed, all.refused) =
                (all.ok + totals.ok, all.failed + totals.failed, all.refused + totals.refused);
            let got: Vec<u64> = self.received().iter().zip(&before).map(|(now, before)| now - before).collect();
            let (lines, uneven) = self.spread(n, &got);
            match held {
                Held::Interrupted => return Ok((all, faults)),
                Held::UntilAllChosen => {}
                Held::TooLong(chosen) => faults.push(format!(
                    "burst {n}: after {} s workers were chosen for {chosen} of {}",
                    HOLD.as_secs(),
                    count(pattern.conversations, "request")
                )),
            }
            faults.extend(uneven);
            if screen.list(&lines).is_err() {
                break;
            }
            pattern.seed = pattern.seed.wrapping_add(1);
        }
        Ok((all, faults))
    }

    /// One burst, from the first request to the last count.
    fn burst(&self, pattern: &Pattern, signals: &Signals) -> io::Result<(Totals, Held)> {
        let holders = || self.fleet.engines().iter().filter(|engine| engine.role() != Role::Decode);
        holders().for_each(|engine| engine.freeze());
        let (totals, held) = std::thread::scope(|scope| {
            let asking = scope.spawn(|| Load::burst(pattern));
            let held = self.hold(pattern.conversations, signals, || asking.is_finished());
            holders().for_each(|engine| engine.thaw());
            (asking.join(), held)
        });
        let totals = totals.map_err(|_| io::Error::other("the client panicked"))??;
        let until = Instant::now() + REST;
        while self.charged().iter().any(|n| *n > 0) && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
        Ok((totals, held))
    }

    /// Waits until workers are chosen for all requests.
    fn hold(&self, requests: usize, signals: &Signals, ended: impl Fn() -> bool) -> Held {
        let until = Instant::now() + HOLD;
        loop {
            let chosen = self.roles().map(|role| self.of(role, &self.charged()).sum::<u64>()).min().unwrap_or(0);
            if chosen >= requests as u64 {
                return Held::UntilAllChosen;
            }
            if Instant::now() >= until || ended() {
                return Held::TooLong(chosen);
            }
            if signals.within(LOOK) {
                return Held::Interrupted;
            }
        }
    }

    /// A line for each role with what each worker got, and what must not be of it.
    fn spread(&self, burst: usize, got: &[u64]) -> (Vec<String>, Vec<String>) {
        let (mut lines, mut faults) = (Vec::new(), Vec::new());
        for role in self.roles() {
            let name = super::role_name(role);
            let shares: Vec<u64> = self.of(role, got).collect();
            let difference = shares.iter().max().unwrap_or(&0) - shares.iter().min().unwrap_or(&0);
            let list: Vec<String> = shares.iter().map(|n| format!("{n:>3}")).collect();
            lines.push(format!("burst {burst}  {name:<7} {}  difference {difference}", list.join(" ")));
            if difference > 1 {
                faults.push(format!("burst {burst}: one {name} worker got {difference} requests more than another"));
            }
        }
        (lines, faults)
    }

    /// Requests that each engine has received, in order.
    fn received(&self) -> Vec<u64> {
        self.fleet.engines().iter().map(|engine| engine.stats().requests).collect()
    }

    /// Requests that each engine is charged with now, in order.
    fn charged(&self) -> Vec<u64> {
        self.slots().map(|slot| u64::from(self.in_flight(slot))).collect()
    }

    /// The numbers of the engines that have a role.
    fn of(&self, role: Role, numbers: &[u64]) -> impl Iterator<Item = u64> {
        self.fleet.engines().iter().zip(numbers).filter(move |(engine, _)| engine.role() == role).map(|(_, n)| *n)
    }

    /// The roles that the fleet has.
    fn roles(&self) -> impl Iterator<Item = Role> {
        let has = |role: &Role| self.fleet.engines().iter().any(|engine| engine.role() == *role);
        [Role::Regular, Role::Prefill, Role::Decode].into_iter().filter(has)
    }
}

/// How the answers of a burst were held back.
enum Held {
    UntilAllChosen,
    /// Until time was up or requests ended, with so many chosen for.
    TooLong(u64),
    /// Until a signal came.
    Interrupted,
}
