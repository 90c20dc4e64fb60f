//! Is the worker alive? The judgement, and the loop that asks.
//!
//! Takes the outcomes of probes and of live requests, gives changes of health. Never flips on a single miss (the
//! thresholds say how many in a row), never flips a worker that another authority drains: the fleet sees to that.

use std::fmt;
use std::time::{Duration, Instant};

use super::Tended;
use super::fetch::Failure;
use super::fleet::News;
use crate::shared::vitals::Health;

/// A worker that stays out is complained about again after this.
const COMPLAIN_AGAIN: Duration = Duration::from_secs(60);

/// What a worker's probes have come to. A pure state machine: outcomes in, flips out.
#[derive(Clone, Copy, Debug)]
pub struct Streak {
    health: Health,
    /// Outcomes in a row that speak against `health`.
    against: u32,
    failures: u32,
    successes: u32,
}

impl Streak {
    /// A worker that was never probed. `failures` and `successes` in a row flip it later on.
    pub fn new(failures: u32, successes: u32) -> Self {
        Streak { health: Health::Pending, against: 0, failures: failures.max(1), successes: successes.max(1) }
    }

    /// A worker of which earlier probes came to `health`.
    pub fn from(self, health: Health) -> Self {
        Streak { health, ..self }
    }

    /// What the outcomes so far come to.
    pub fn health(&self) -> Health {
        self.health
    }

    /// Counts an outcome; the new health when it flipped.
    pub fn judge(&mut self, alive: bool) -> Option<Health> {
        let (flip, after) = match (self.health, alive) {
            (Health::Pending, true) => (Health::Ready, 1),
            (Health::Pending, false) | (Health::Ready, true) | (Health::Unhealthy, false) => {
                self.against = 0;
                return None;
            }
            (Health::Ready, false) => (Health::Unhealthy, self.failures),
            (_, true) => (Health::Ready, self.successes),
            (Health::Draining, false) => return None,
        };
        self.against += 1;
        if self.against < after {
            return None;
        }
        self.health = flip;
        self.against = 0;
        Some(flip)
    }
}

/// Probes for as long as the worker is known; with health checks off it only lets the worker in.
pub(super) async fn keep_probing(tended: &Tended) {
    tended.looked_up().await;
    let config = &tended.config;
    if !config.health_check {
        tended.tell(News::Probed);
        tended.resolved().await;
        tended.learn_again().await;
        tended.tell(News::Health(Health::Ready, "health checks are off".into()));
        return;
    }
    let mut streak = Streak::new(tended.thresholds.0, tended.thresholds.1).from(tended.verdict);
    let mut complained: Option<Instant> = None;
    let mut successes = tended.successes();
    loop {
        let outcome = probe(tended).await;
        let before = std::mem::replace(&mut successes, tended.successes());
        let verdict = match &outcome {
            // A probe that never left this process says nothing of the worker.
            Err(Miss::Ours(_)) => None,
            outcome => streak.judge(is_alive(streak.health(), outcome, successes != before)),
        };
        match verdict {
            Some(Health::Ready) => {
                // Its models may have changed while it was away: better known before the first request comes.
                tended.learn_again().await;
                tended.tell(News::Health(Health::Ready, "its probes succeed".into()));
            }
            Some(flip) => {
                complained = Some(Instant::now());
                tended.tell(News::Health(flip, outcome.as_ref().err().map(Miss::to_string).unwrap_or_default()));
            }
            None => {}
        }
        tended.tell(News::Probed);
        if let Err(why) = &outcome {
            tended.tell(News::Waits(why.to_string()));
            let ours = matches!(why, Miss::Ours(_));
            let is_bad = ours || streak.health() != Health::Ready;
            if is_bad && complained.is_none_or(|at| at.elapsed() >= COMPLAIN_AGAIN) {
                complained = Some(Instant::now());
                let what = if ours { "probe not made, the worker is not judged by it" } else { "worker is not ready" };
                tracing::warn!(worker = %tended.url, state = streak.health().name(), reason = %why, "{what}");
            } else {
                tracing::debug!(worker = %tended.url, reason = %why, "probe failed");
            }
        }
        tokio::time::sleep(pause(tended, streak.health())).await;
    }
}

/// Why a probe did not succeed.
enum Miss {
    /// The worker itself says that it is not well.
    Refused(String),
    /// It says nothing.
    Silent(String),
    /// It was not asked, for want of descriptors or memory here.
    Ours(String),
}

impl fmt::Display for Miss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Miss::Refused(why) | Miss::Silent(why) | Miss::Ours(why)) = self;
        f.write_str(why)
    }
}

/// Whether the worker counts as alive. One that takes requests and has answered some well since the last probe is,
/// even if it had no time for this one; what it says of itself is believed whatever it answers.
fn is_alive(health: Health, outcome: &Result<(), Miss>, has_answered: bool) -> bool {
    match outcome {
        Ok(()) => true,
        Err(Miss::Refused(_) | Miss::Ours(_)) => false,
        Err(Miss::Silent(_)) => health == Health::Ready && has_answered,
    }
}

async fn probe(tended: &Tended) -> Result<(), Miss> {
    let url = || format!("{}{}", tended.url, tended.health_endpoint);
    match tended.get(&tended.health_endpoint).await {
        Ok(reply) if (200..300).contains(&reply.status) => Ok(()),
        Ok(reply) => Err(Miss::Refused(format!("{} answers {}", url(), reply.status))),
        Err(failure @ Failure::Unresolved) => Err(Miss::Silent(failure.to_string())),
        Err(failure) if failure.is_ours() => Err(Miss::Ours(format!("{}: {failure}", url()))),
        Err(failure) => Err(Miss::Silent(format!("{}: {failure}", url()))),
    }
}

fn pause(tended: &Tended, health: Health) -> Duration {
    let interval = tended.health_interval;
    let base = match health {
        Health::Pending => return tended.pace.eager,
        Health::Unhealthy => interval.min(tended.pace.unhealthy_probe),
        _ => interval,
    };
    // ±10 %, so that the probes of a fleet that started at once drift apart.
    base.mul_f64(0.9 + 0.2 * fastrand::f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use Health::{Pending, Ready, Unhealthy};

    fn run(outcomes: &str) -> Vec<(usize, Health)> {
        let mut streak = Streak::new(3, 2);
        outcomes.bytes().enumerate().filter_map(|(i, b)| streak.judge(b == b'+').map(|h| (i, h))).collect()
    }

    #[test]
    fn the_first_success_makes_ready_and_thresholds_govern_the_rest() {
        assert_eq!(run("+"), [(0, Ready)]);
        assert_eq!(run("-------+"), [(7, Ready)]);
        assert_eq!(run("+--+--+--"), [(0, Ready)]);
        assert_eq!(run("+---"), [(0, Ready), (3, Unhealthy)]);
        assert_eq!(run("+---+-+-++"), [(0, Ready), (3, Unhealthy), (9, Ready)]);
        assert_eq!(run("+---++---"), [(0, Ready), (3, Unhealthy), (5, Ready), (8, Unhealthy)]);
        assert_eq!(Streak::new(0, 0).health(), Pending);
        let mut known = Streak::new(1, 1).from(Ready);
        assert_eq!((known.judge(true), known.judge(false)), (None, Some(Unhealthy)));
    }

    #[test]
    fn thresholds_of_one_flip_at_once() {
        let mut streak = Streak::new(1, 1);
        for (alive, flip) in [(true, Some(Ready)), (false, Some(Unhealthy)), (true, Some(Ready)), (true, None)] {
            assert_eq!(streak.judge(alive), flip);
        }
    }
}
