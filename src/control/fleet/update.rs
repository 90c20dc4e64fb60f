//! What may change of a worker while it works.
//!
//! Takes a worker's new settings, changes it in place. Never changes what makes it another worker: its address, role,
//! backend and number of ranks.

use super::{Fleet, Id, Refusal, Source};
use crate::config::WorkerSpec;
use crate::control::prefix;
use crate::shared::roster::Slot;

/// What a change means for the worker's task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing is different.
    None,
    /// The task need not know.
    Kept,
    /// The task has to begin anew: it asks with another key, or for other things.
    Asks,
}

/// The first setting that makes two specs two workers.
fn identity(old: &WorkerSpec, new: &WorkerSpec) -> Option<&'static str> {
    match () {
        () if old.url != new.url => Some("url"),
        () if old.role != new.role => Some("role"),
        () if old.backend != new.backend => Some("backend"),
        () if old.dp_size != new.dp_size => Some("dp_size"),
        () => None,
    }
}

/// What a worker's task goes by: all but what is said of it, with its models only if they have to be asked for.
fn asks(spec: &WorkerSpec) -> WorkerSpec {
    let models = if spec.models.is_empty() { Vec::new() } else { vec![String::new()] };
    WorkerSpec { models, group: String::new(), labels: Default::default(), ..spec.clone() }
}

impl Fleet {
    /// Whether a worker can be changed to these settings in place.
    pub fn fits(&self, id: Id, spec: &WorkerSpec) -> bool {
        self.engines.get(&id).is_some_and(|engine| identity(&engine.spec, spec).is_none())
    }

    /// Changes a worker in place; its counts, health, breaker and connections stay. Models that it does not name any
    /// more are those that it had until it is asked.
    ///
    /// # Errors
    /// [`Refusal::Fixed`] for what cannot be changed, [`Refusal::Unknown`].
    pub fn update(&mut self, id: Id, spec: &WorkerSpec) -> Result<Change, Refusal> {
        let engine = self.engines.get_mut(&id).ok_or(Refusal::Unknown)?;
        if let Some(what) = identity(&engine.spec, spec) {
            return Err(Refusal::Fixed(what));
        }
        if engine.spec == *spec {
            return Ok(Change::None);
        }
        let change = if asks(&engine.spec) == asks(spec) { Change::Kept } else { Change::Asks };
        engine.change(|worker| {
            worker.api_key = spec.api_key.as_deref().map(Into::into);
            worker.pairing.group = spec.group.as_str().into();
            worker.pairing.bootstrap_port = spec.bootstrap_port;
            if !spec.models.is_empty() {
                worker.models = spec.models.iter().map(|model| model.as_str().into()).collect();
            }
        });
        engine.spec = spec.clone();
        tracing::info!(worker = %spec.url, role = spec.role.name(), "worker changed");
        self.stale = true;
        Ok(change)
    }

    /// Forgets who has which prefix, in all pools that one of these slots is in: its engine has dropped its cache. Lanes
    /// begin anew with the next publication.
    pub fn forget_prefixes(&mut self, slots: &[Slot]) {
        if !slots.is_empty() {
            prefix::forget(self.shared, &self.shared.roster.snapshot(), slots);
            self.stale = true;
        }
    }

    /// Says whose a worker is from now on.
    pub fn belongs_to(&mut self, id: Id, source: Source) {
        if let Some(engine) = self.engines.get_mut(&id) {
            engine.source = source;
        }
    }

    /// The workers of a source.
    pub fn of(&self, source: Source) -> impl Iterator<Item = (Id, &WorkerSpec)> {
        self.engines.iter().filter(move |(_, engine)| engine.source == source).map(|(id, engine)| (*id, &engine.spec))
    }
}
