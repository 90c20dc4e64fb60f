//! Whether the process is worth sending traffic to.
//!
//! Takes a standing from the control thread (the only writer), gives `/readiness` its status and body. Never
//! shows parts of two different moments: a standing is swapped as a whole.

use std::fmt::Write as _;

use arc_swap::ArcSwap;
use serde_json::{Value, json};

use super::drain::Phase;
use crate::config::{Backend, Role};

/// What pairs lack is told for so many models.
const TOLD_LACKS: usize = 8;

/// What `/readiness` goes by.
#[derive(Debug, Default)]
pub struct Readiness(ArcSwap<Standing>);

/// One moment of the fleet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Workers that the roster knows.
    pub configured: usize,
    /// Workers of which at least one probe has ended, whatever came of it.
    pub probed: usize,
    /// Workers that may be given requests.
    pub usable: usize,
    /// The time that the start allows for first probes is over.
    pub waited: bool,
    /// What keeps pairs from serving: one sentence a model that they serve.
    pub lacks: Vec<String>,
    /// Prefill and decode workers.
    pub teams: Vec<TeamStanding>,
}

/// The workers of one role, group and backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TeamStanding {
    pub role: Role,
    pub group: Box<str>,
    pub backend: Backend,
    pub configured: usize,
    pub usable: usize,
    /// How many of the configured ones are data-parallel ranks of an engine.
    pub dp_ranks: usize,
}

/// One moment's counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadinessView {
    /// Workers that the roster knows.
    pub configured: usize,
    /// Workers of which at least one probe has ended, whatever came of it.
    pub probed: usize,
    /// Workers that may be given requests.
    pub usable: usize,
    /// At least one worker is usable, every model that pairs serve has a complete usable pair, and either all workers
    /// were probed or the start has waited long enough for them.
    pub ready: bool,
}

impl Standing {
    fn view(&self) -> ReadinessView {
        let Standing { configured, probed, usable, waited, .. } = *self;
        let ready = usable > 0 && self.lacks.is_empty() && (probed >= configured || waited);
        ReadinessView { configured, probed, usable, ready }
    }

    /// Why it is not ready.
    fn reason(&self) -> String {
        match self.view() {
            ReadinessView { configured: 0, .. } => "no worker is configured".into(),
            ReadinessView { usable: 0, .. } => "no worker is usable".into(),
            _ if self.lacks.is_empty() => "not all workers have been probed".into(),
            _ => {
                let mut reason =
                    format!("no complete pair: {}", self.lacks[..self.lacks.len().min(TOLD_LACKS)].join("; "));
                if self.lacks.len() > TOLD_LACKS {
                    // Writing to a string does not fail.
                    let _ = write!(reason, "; and {} more", self.lacks.len() - TOLD_LACKS);
                }
                reason
            }
        }
    }
}

impl Readiness {
    /// Nothing known yet: not ready.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets everything at once (control only).
    pub fn set(&self, standing: Standing) {
        if **self.0.load() != standing {
            self.0.store(standing.into());
        }
    }

    /// Whether the time that the start allows for first answers of workers is over.
    pub fn waited(&self) -> bool {
        self.0.load().waited
    }

    /// The current counts.
    pub fn snapshot(&self) -> ReadinessView {
        self.0.load().view()
    }

    /// Status and JSON body of `/readiness`: 200, or 503 with the reason.
    pub fn json(&self, phase: Phase) -> (u16, String) {
        let standing = self.0.load();
        let ReadinessView { configured, probed, usable, ready } = standing.view();
        let mut body = json!({"workers": {"configured": configured, "probed": probed, "usable": usable}});
        if !standing.teams.is_empty() {
            body["pairs"] = standing.teams.iter().map(team).collect();
        }
        let is_serving = phase == Phase::Serving;
        let reason = if is_serving { standing.reason() } else { "draining".into() };
        let is_ready = ready && is_serving;
        body["status"] = if is_ready { "ready" } else { "not_ready" }.into();
        if !is_ready {
            body["reason"] = reason.into();
        }
        (if is_ready { 200 } else { 503 }, body.to_string())
    }
}

fn team(team: &TeamStanding) -> Value {
    json!({
        "role": team.role.name(), "group": team.group, "backend": team.backend.name(),
        "configured": team.configured, "usable": team.usable, "dp_ranks": team.dp_ranks,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(configured: usize, probed: usize, usable: usize, waited: bool) -> Standing {
        Standing { configured, probed, usable, waited, ..Standing::default() }
    }

    #[test]
    fn ready_needs_a_usable_worker_and_every_probe_or_patience() {
        let r = Readiness::new();
        for (configured, probed, usable, waited, ready) in [
            (0, 0, 0, false, false),
            (0, 0, 0, true, false),
            (2, 0, 0, true, false),
            (2, 1, 1, false, false),
            (2, 2, 1, false, true),
            (2, 1, 1, true, true),
            (2, 2, 0, true, false),
        ] {
            r.set(counts(configured, probed, usable, waited));
            assert_eq!(r.snapshot(), ReadinessView { configured, probed, usable, ready });
            assert_eq!(r.waited(), waited);
            assert_eq!(r.json(Phase::Serving).0, if ready { 200 } else { 503 });
            assert_eq!(r.json(Phase::Settling).0, 503);
        }
    }

    fn body(r: &Readiness, phase: Phase) -> Value {
        serde_json::from_str(&r.json(phase).1).expect("JSON")
    }

    #[test]
    fn the_body_has_counts_and_a_reason() {
        let r = Readiness::new();
        let workers = json!({"configured": 3, "probed": 2, "usable": 1});
        r.set(counts(3, 2, 1, false));
        let wanted = json!({"status": "not_ready", "reason": "not all workers have been probed", "workers": workers});
        assert_eq!(body(&r, Phase::Serving), wanted);
        r.set(counts(3, 2, 1, true));
        assert_eq!(body(&r, Phase::Serving), json!({"status": "ready", "workers": workers}));
        assert_eq!(body(&r, Phase::Draining)["reason"], "draining");
    }

    #[test]
    fn an_incomplete_pair_is_told() {
        let r = Readiness::new();
        let prefill = TeamStanding {
            role: Role::Prefill,
            group: "a\"b".into(),
            backend: Backend::VllmMooncake,
            configured: 2,
            usable: 1,
            dp_ranks: 2,
        };
        let lacks = vec!["model m: no decode worker is usable".to_owned()];
        r.set(Standing { lacks, teams: vec![prefill], ..counts(3, 3, 1, false) });
        let (status, _) = r.json(Phase::Serving);
        let body = body(&r, Phase::Serving);
        assert_eq!((status, &body["reason"]), (503, &json!("no complete pair: model m: no decode worker is usable")));
        let team = json!({
            "role": "prefill", "group": "a\"b", "backend": "vllm_mooncake", "configured": 2, "usable": 1, "dp_ranks": 2,
        });
        assert_eq!(body["pairs"], json!([team]));
        r.set(Standing { lacks: vec!["x".into(); TOLD_LACKS + 3], ..counts(3, 3, 1, false) });
        assert!(r.json(Phase::Serving).1.contains("; and 3 more"));
    }
}
