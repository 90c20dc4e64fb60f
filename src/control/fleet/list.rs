//! The workers as operators are shown them.
//!
//! Takes the fleet, gives one entry a member. Never shows a key.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;

use super::{After, Engine, Fleet, Id, Note};
use crate::config::{Role, WorkerUrl};
use crate::shared::reported::Said;
use crate::shared::roster::{DpRank, Worker};
use crate::shared::vitals::Health;

/// A worker in the list; an engine of several data-parallel ranks has an entry a rank.
#[derive(Clone, Debug, Serialize)]
pub struct Listed {
    /// Slot and tenancy: names this worker and no later one.
    pub id: String,
    /// That of the engine as a whole, which has no other than its own where it has no ranks.
    pub worker_id: String,
    pub url: Box<str>,
    pub role: &'static str,
    /// The same, as clients of the peers read it.
    pub worker_type: &'static str,
    pub backend: &'static str,
    /// Prefill and decode workers of one group and backend are paired; `null` for regular workers.
    pub group: Option<Box<str>>,
    /// Port of a prefill worker's bootstrap server; `null`: none is configured.
    pub bootstrap_port: Option<u16>,
    /// The data-parallel rank that it stands for; `null` for an engine as a whole.
    pub dp: Option<Rank>,
    pub models: Box<[Box<str>]>,
    /// The first of them.
    pub model_id: Option<Box<str>>,
    pub labels: BTreeMap<String, String>,
    /// Who has given it: `config` or `admin`.
    pub source: &'static str,
    pub state: &'static str,
    /// Whether the state is `ready`.
    pub is_healthy: bool,
    /// Why the state is what it is; `null` before the first change.
    pub reason: Option<Box<str>>,
    /// `null` while it does not drain.
    pub draining: Option<Leaving>,
    /// Requests that failed on it since one last succeeded.
    pub failures_in_row: u32,
    /// `closed`, `half_open`, `open`, or `held`: it would be open, but half of its pool is.
    pub breaker: &'static str,
    /// Seconds until it is half-open; `null` while it is not open.
    pub breaker_open_s: Option<u32>,
    /// Requests that a half-open breaker has let in and that have not ended.
    pub breaker_trials: u32,
    /// Since its newest probe ended; `null` before the first.
    pub last_probe_ms_ago: Option<u64>,
    pub in_flight: u32,
    /// The same, as clients of the peers read it.
    pub load: u32,
    pub selected_total: u64,
    /// Used part of its KV cache as its engine says, from 0 to 1; `null`: not asked for, not said, or too long ago.
    pub kv_usage: Option<f64>,
    /// Requests that wait in the engine, as it says; `null` likewise.
    pub waiting: Option<u32>,
    /// Whether it is left out for that.
    pub shed: bool,
}

/// A data-parallel rank in the list.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rank {
    /// `null` for all of them.
    pub rank: Option<u32>,
    pub size: u32,
}

/// A drain in the list.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Leaving {
    /// Seconds since it began.
    pub since_s: u64,
    /// Seconds until the worker is removed whatever it still has; `null`: never.
    pub left_s: Option<u64>,
    /// `stay`, `remove`, or `replace`: it comes back under other settings.
    pub then: &'static str,
}

impl Fleet {
    /// Every member, by worker in the order of registration, then by rank.
    pub fn list(&self) -> Vec<Listed> {
        self.engines.iter().flat_map(|(id, engine)| self.members_of(*id, engine)).collect()
    }

    /// The members of a worker.
    pub fn show(&self, id: Id) -> Vec<Listed> {
        self.engines.get(&id).into_iter().flat_map(|engine| self.members_of(id, engine)).collect()
    }

    fn members_of(&self, id: Id, engine: &Engine) -> impl Iterator<Item = Listed> {
        engine.members.iter().map(move |member| self.listed(id, engine, member))
    }

    /// The worker that goes by a name: its id or that of one of its ranks as they are listed, or its URL, with or
    /// without a rank behind it.
    pub fn find(&self, name: &str) -> Option<Id> {
        if let Some(id) = parse(name) {
            let is_member = |engine: &Engine| engine.members.iter().any(|m| (m.slot, m.era) == (id.slot, id.era));
            let by_rank = || self.engines.iter().find(|(_, engine)| is_member(engine)).map(|(id, _)| *id);
            return self.engines.contains_key(&id).then_some(id).or_else(by_rank);
        }
        let url = match name.rsplit_once('@') {
            Some((url, rank)) if rank.bytes().all(|b| b.is_ascii_digit()) => url,
            _ => name,
        };
        let url = WorkerUrl::parse(url).map_or_else(|_| url.to_owned(), |url| url.to_string());
        Role::ALL.iter().find_map(|role| self.named(&url, *role))
    }

    fn listed(&self, id: Id, engine: &Engine, worker: &Worker) -> Listed {
        let shared = self.shared;
        let (health, vital) = (shared.vitals.health(worker.slot), shared.vitals.vital(worker.slot));
        let Note { reason, probed } = &self.notes[worker.slot as usize];
        let in_flight = shared.load.word(worker.slot).in_flight();
        let said = shared.reported.said(worker.slot);
        Listed {
            id: Id { slot: worker.slot, era: worker.era }.to_string(),
            worker_id: id.to_string(),
            url: worker.url.clone(),
            role: worker.role.name(),
            worker_type: worker.role.name(),
            backend: worker.pairing.backend.name(),
            group: (worker.role != Role::Regular).then(|| worker.pairing.group.clone()),
            bootstrap_port: worker.pairing.bootstrap_port,
            dp: worker.pairing.dp.map(|DpRank { rank, size }| Rank { rank: Some(rank), size }),
            models: worker.models.clone(),
            model_id: worker.models.first().cloned(),
            labels: engine.spec.labels.clone(),
            source: engine.source.name(),
            state: health.name(),
            is_healthy: health == Health::Ready,
            reason: reason.clone(),
            draining: engine.draining.as_ref().map(|draining| Leaving {
                since_s: draining.since.elapsed().as_secs(),
                left_s: draining.until.map(|until| until.saturating_duration_since(Instant::now()).as_secs()),
                then: match draining.after {
                    After::Stay => "stay",
                    After::Remove => "remove",
                    After::Become(_) => "replace",
                },
            }),
            failures_in_row: vital.failures(),
            breaker: vital.state().name(),
            breaker_open_s: Some(vital.open_left_s()).filter(|&left| left > 0),
            breaker_trials: vital.trials(),
            last_probe_ms_ago: probed.map(|at| at.elapsed().as_millis() as u64),
            in_flight,
            load: in_flight,
            selected_total: self.bases.selected(shared, worker.slot),
            kv_usage: said.and_then(Said::kv_usage),
            waiting: said.map(|said| said.waiting),
            shed: vital.is_shed(),
        }
    }
}

fn parse(name: &str) -> Option<Id> {
    let (slot, era) = name.split_once('-')?;
    Some(Id { slot: slot.parse().ok()?, era: era.parse().ok()? })
}
