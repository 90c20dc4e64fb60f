//! Workers that finish what they have and take nothing new.
//!
//! Takes who is to drain and what comes after it, gives who has finished. Never takes a worker off the list while a
//! lane could still choose it or a request holds a place on it, unless its time is over.

use std::time::{Duration, Instant};

use super::{Fleet, Id};
use crate::config::WorkerSpec;
use crate::shared::vitals::Health;

/// What becomes of a worker that has finished what it had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum After {
    /// It stays, and takes requests again when it is told to.
    Stay,
    /// It is removed.
    Remove,
    /// It is removed, and registered anew under settings that a worker cannot change to while it works.
    Become(Box<WorkerSpec>),
}

/// A worker's drain.
pub(super) struct Draining {
    pub(super) after: After,
    pub(super) since: Instant,
    /// When it is removed whatever it still has; `None`: never.
    pub(super) until: Option<Instant>,
    /// The publication after which no lane chooses it; `None` before that is out.
    published: Option<u64>,
}

impl Fleet {
    /// Lets a worker finish what it has; it is given nothing new from now on. When it has finished, or when `limit` has
    /// passed, [`drained`](Self::drained) does what comes after. For a worker that drains already only that changes, and
    /// the limit counts from the beginning of the drain. Whether there is such a worker.
    pub fn drain(&mut self, id: Id, after: After, limit: Duration) -> bool {
        let Some(engine) = self.engines.get_mut(&id) else { return false };
        let begun = engine.draining.take();
        let since = begun.as_ref().map_or_else(Instant::now, |draining| draining.since);
        let until = (after != After::Stay).then(|| since.checked_add(limit)).flatten();
        let published = begun.as_ref().and_then(|draining| draining.published);
        engine.draining = Some(Draining { after, since, until, published });
        if begun.is_some() {
            return true;
        }
        for member in &engine.members {
            self.shared.vitals.set_health(member.slot, Health::Draining);
            self.notes[member.slot as usize].reason = Some("it was told to drain".into());
        }
        tracing::info!(worker = %engine.spec.url, role = engine.spec.role.name(), "worker drains");
        self.drains.push(id);
        // What lanes see does not change, but they say that they have seen it: then their choices of before are counted.
        self.stale = true;
        true
    }

    /// Ends a worker's drain: it is what its probes have come to. Whether there is such a worker.
    pub fn undrain(&mut self, id: Id) -> bool {
        let Some(engine) = self.engines.get_mut(&id) else { return false };
        if engine.draining.take().is_none() {
            return true;
        }
        self.drains.retain(|known| *known != id);
        for member in &engine.members {
            self.shared.vitals.set_health(member.slot, Health::Pending);
            self.notes[member.slot as usize].reason = Some("its drain was ended".into());
        }
        tracing::info!(worker = %engine.spec.url, role = engine.spec.role.name(), "drain of the worker was ended");
        self.judged.push(id);
        true
    }

    /// What comes after a worker's drain; `None` while it does not drain.
    pub fn draining(&self, id: Id) -> Option<&After> {
        self.engines.get(&id)?.draining.as_ref().map(|draining| &draining.after)
    }

    /// Whether [`drained`](Self::drained) has something to wait for.
    pub fn is_draining(&self) -> bool {
        self.drains.iter().any(|id| self.draining(*id).is_some_and(|after| *after != After::Stay))
    }

    /// Removes the workers that have finished, and those whose time is over: what the latter have is still finished by
    /// whoever holds their guards. Gives those that come back under other settings.
    pub fn drained(&mut self, now: Instant) -> Vec<(super::Source, Box<WorkerSpec>)> {
        let over: Vec<Id> = self.drains.iter().copied().filter(|&id| self.is_over(id, now)).collect();
        let mut back = Vec::new();
        for id in over {
            let Some(engine) = self.engines.get_mut(&id) else { continue };
            let left: u32 = engine.members.iter().map(|member| self.shared.load.word(member.slot).in_flight()).sum();
            if left > 0 {
                tracing::warn!(worker = %engine.spec.url, in_flight = left, "drain of the worker takes too long");
            }
            if let Some(Draining { after: After::Become(spec), .. }) = engine.draining.take() {
                back.push((engine.source, spec));
            }
            self.remove(id);
        }
        back
    }

    fn is_over(&self, id: Id, now: Instant) -> bool {
        let Some(engine) = self.engines.get(&id) else { return false };
        let Some(draining) = engine.draining.as_ref().filter(|draining| draining.after != After::Stay) else {
            return false;
        };
        // In this order, as for the reuse of a slot: a lane that has seen the publication makes no more reservations, and
        // those that it made before are seen by the load of the words.
        let unseen = draining.published.is_none_or(|published| self.shared.roster.oldest_seen() < published);
        let is_idle = || engine.members.iter().all(|member| self.shared.load.word(member.slot).in_flight() == 0);
        !unseen && is_idle() || draining.until.is_some_and(|until| now >= until)
    }

    /// Notes that drains which have begun are known from this generation on.
    pub(super) fn drains_published(&mut self, generation: u64) {
        for id in &self.drains {
            if let Some(draining) = self.engines.get_mut(id).and_then(|engine| engine.draining.as_mut()) {
                draining.published.get_or_insert(generation);
            }
        }
    }

    /// Takes a worker back that was about to leave: its drain ends, and it is probed before it is given requests.
    pub fn take_back(&mut self, id: Id) {
        if let Some(engine) = self.engines.get_mut(&id) {
            (engine.verdict, engine.probed) = (None, false);
        }
        self.undrain(id);
    }
}
