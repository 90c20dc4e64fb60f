//! Workers managed at run time: what the control thread can be told, and how it obeys.
//!
//! Takes commands from the admin listener and from whoever reads the configuration again, gives an answer to each.
//! Never waits for a worker: a command has been obeyed when its answer is there, what follows from it (probes, drains)
//! goes on by itself.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use super::Plane;
use super::fleet::{After, Change, Id, Listed, Refusal, Source};
use crate::config::{Role, WorkerSpec, fields};
use crate::shared::roster::Slot;

/// Commands that may wait; who gives more waits too.
const WAITING: usize = 1024;

/// What the control thread can be told. Workers go by their id or URL.
#[derive(Debug)]
pub enum Command {
    /// What is there?
    List(Reply<Vec<Listed>>),
    /// What is this worker? Its ranks, or nothing.
    Show(String, Reply<Vec<Listed>>),
    /// A worker is there.
    Add(Source, Box<WorkerSpec>, Reply<Result<Added, Refusal>>),
    /// A worker has other settings.
    Replace(String, Box<WorkerSpec>, Reply<Result<Id, Refusal>>),
    /// A worker has some other settings.
    Patch(String, Box<Patch>, Reply<Result<Id, Refusal>>),
    /// A worker is to leave; at once if `force`.
    Remove { name: String, force: bool, reply: Reply<Result<Left, Refusal>> },
    /// The engines of these slots have forgotten what they cached.
    Forget(Vec<Slot>, Reply<()>),
    /// These are all workers of a source.
    Reconcile(Source, Vec<WorkerSpec>, Reply<Reconciled>),
}

/// Where an answer goes.
pub type Reply<T> = oneshot::Sender<T>;

/// A worker that was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Added {
    pub id: Id,
    /// It was leaving: its drain has been ended, or, where it has to change for that, it comes back after it.
    pub was_leaving: bool,
}

/// How a worker leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// It finishes what it has first.
    Draining(Id),
    /// It is gone.
    Removed(Id),
}

/// Settings of a worker that change; `None` leaves one as it is.
#[derive(Clone, Default)]
pub struct Patch {
    pub api_key: Option<Option<String>>,
    pub models: Option<Vec<String>>,
    pub group: Option<String>,
    pub bootstrap_port: Option<Option<u16>>,
    pub health_endpoint: Option<Option<String>>,
    pub health_timeout: Option<Option<Duration>>,
    pub health_interval: Option<Option<Duration>>,
    pub health_failures: Option<Option<u32>>,
    pub health_successes: Option<Option<u32>>,
    pub labels: Option<BTreeMap<String, String>>,
    /// It takes nothing new, and stays on the list; or it does again.
    pub draining: Option<bool>,
}

impl std::fmt::Debug for Patch {
    /// Without the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Patch").finish_non_exhaustive()
    }
}

impl Patch {
    /// The settings with those that change.
    pub fn on(&self, spec: &WorkerSpec) -> WorkerSpec {
        fn put<T: Clone>(field: &mut T, new: &Option<T>) {
            if let Some(new) = new {
                field.clone_from(new);
            }
        }
        let mut spec = spec.clone();
        put(&mut spec.api_key, &self.api_key);
        put(&mut spec.models, &self.models);
        put(&mut spec.group, &self.group);
        put(&mut spec.bootstrap_port, &self.bootstrap_port);
        put(&mut spec.health_endpoint, &self.health_endpoint);
        put(&mut spec.health_timeout, &self.health_timeout);
        put(&mut spec.health_interval, &self.health_interval);
        put(&mut spec.health_failures, &self.health_failures);
        put(&mut spec.health_successes, &self.health_successes);
        put(&mut spec.labels, &self.labels);
        spec
    }
}

/// What it took to come from one list of workers to another, by URL.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reconciled {
    pub added: Vec<String>,
    /// Changed in place.
    pub changed: Vec<String>,
    /// They drain, and come back under settings that a worker cannot change to while it works.
    pub replaced: Vec<String>,
    /// They drain and are removed then.
    pub drained: Vec<String>,
    /// Workers that nothing was done about.
    pub kept: usize,
    pub refused: Vec<(String, Refusal)>,
}

/// By which the control thread is told what to do.
#[derive(Clone, Debug)]
pub struct Commands(mpsc::Sender<Command>);

/// The control thread has ended, or is about to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended;

/// Both ends.
pub(super) fn channel() -> (Commands, mpsc::Receiver<Command>) {
    let (send, receive) = mpsc::channel(WAITING);
    (Commands(send), receive)
}

impl Commands {
    /// Gives a command that is made around where its answer goes; returns the answer.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn give<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, Ended> {
        let (reply, answer) = oneshot::channel();
        self.0.send(command(reply)).await.map_err(|_| Ended)?;
        answer.await.map_err(|_| Ended)
    }

    /// The same for a thread that may block; not for one that runs a tokio runtime.
    ///
    /// # Errors
    /// [`Ended`].
    pub fn give_blocking<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, Ended> {
        let (reply, answer) = oneshot::channel();
        self.0.blocking_send(command(reply)).map_err(|_| Ended)?;
        answer.blocking_recv().map_err(|_| Ended)
    }
}

impl Plane {
    /// Obeys a command. Who does not wait for the answer any more is none of its business.
    pub(super) fn obey(&mut self, command: Command) {
        match command {
            Command::List(reply) => drop(reply.send(self.fleet.list())),
            Command::Show(name, reply) => {
                let id = self.fleet.find(&name);
                let _ = reply.send(id.map(|id| self.fleet.show(id)).unwrap_or_default());
            }
            Command::Add(source, spec, reply) => drop(reply.send(self.add(source, &spec))),
            Command::Replace(name, spec, reply) => {
                let found = self.fleet.find(&name).ok_or(Refusal::Unknown);
                let _ = reply.send(found.and_then(|id| self.change(id, &spec)));
            }
            Command::Patch(name, patch, reply) => {
                let found = self.fleet.find(&name).ok_or(Refusal::Unknown);
                let _ = reply.send(found.and_then(|id| self.patch(id, &patch)));
            }
            Command::Remove { name, force, reply } => {
                let found = self.fleet.find(&name).ok_or(Refusal::Unknown);
                let _ = reply.send(found.map(|id| self.remove(id, force)));
            }
            Command::Forget(slots, reply) => {
                self.fleet.forget_prefixes(&slots);
                let _ = reply.send(());
            }
            Command::Reconcile(source, specs, reply) => drop(reply.send(self.reconcile(source, &specs))),
        }
    }

    /// Adds a worker. One that is leaving stays: with what it has, but it is probed before it gets anything new.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub(super) fn add(&mut self, source: Source, spec: &WorkerSpec) -> Result<Added, Refusal> {
        let leaving = self.fleet.named(&spec.url, spec.role);
        let leaving = leaving.filter(|&id| self.fleet.draining(id) == Some(&After::Remove));
        let Some(id) = leaving else {
            let other = |role: &Role| *role != spec.role && self.fleet.named(&spec.url, *role).is_some();
            if let Some(role) = Role::ALL.into_iter().find(other).filter(|_| source == Source::Admin) {
                return Err(Refusal::OtherRole(role));
            }
            let id = self.fleet.register_from(source, spec)?;
            self.tend(id);
            return Ok(Added { id, was_leaving: false });
        };
        self.fleet.belongs_to(id, source);
        if self.fleet.fits(id, spec) {
            self.fleet.update(id, spec)?;
            self.fleet.take_back(id);
            self.tend(id);
        } else {
            self.leave(id, After::Become(Box::new(spec.clone())));
        }
        Ok(Added { id, was_leaving: true })
    }

    /// Changes a worker in place.
    fn change(&mut self, id: Id, spec: &WorkerSpec) -> Result<Id, Refusal> {
        if let Some(wrong) = fields::misfit(spec) {
            return Err(Refusal::Wrong(wrong));
        }
        if self.fleet.update(id, spec)? == Change::Asks {
            self.tend(id);
        }
        Ok(id)
    }

    fn patch(&mut self, id: Id, patch: &Patch) -> Result<Id, Refusal> {
        let spec = self.fleet.spec(id).map(|spec| patch.on(spec)).ok_or(Refusal::Unknown)?;
        self.change(id, &spec)?;
        match patch.draining {
            // Who is to leave already does so still.
            Some(true) if self.fleet.draining(id).is_none() => self.leave(id, After::Stay),
            Some(false) => drop(self.fleet.undrain(id)),
            _ => {}
        }
        Ok(id)
    }

    fn remove(&mut self, id: Id, force: bool) -> Left {
        if force {
            self.fleet.remove(id);
            return Left::Removed(id);
        }
        self.leave(id, After::Remove);
        Left::Draining(id)
    }

    fn leave(&mut self, id: Id, after: After) {
        self.fleet.drain(id, after, self.config.worker_drain_timeout);
    }

    /// Makes the workers of a source be these: adds, changes in place what can be, and drains the rest. Workers that
    /// stay as they are keep their state, counts, breaker and connections; those of other sources are left alone, but
    /// one that is named here belongs here from now on.
    pub(super) fn reconcile(&mut self, source: Source, specs: &[WorkerSpec]) -> Reconciled {
        let mut done = Reconciled::default();
        for spec in specs {
            self.reconcile_one(source, spec, &mut done);
        }
        let wanted: HashSet<(&str, Role)> = specs.iter().map(|spec| (spec.url.as_str(), spec.role)).collect();
        let is_gone = |spec: &WorkerSpec| !wanted.contains(&(spec.url.as_str(), spec.role));
        let gone = self
            .fleet
            .of(source)
            .filter(|(id, spec)| is_gone(spec) && self.fleet.draining(*id) != Some(&After::Remove));
        let gone: Vec<(Id, String)> = gone.map(|(id, spec)| (id, spec.url.clone())).collect();
        for (id, url) in gone {
            self.leave(id, After::Remove);
            done.drained.push(url);
        }
        done
    }

    fn reconcile_one(&mut self, source: Source, spec: &WorkerSpec, done: &mut Reconciled) {
        let url = spec.url.clone();
        let known = self.fleet.named(&spec.url, spec.role);
        let known = known.filter(|&id| self.fleet.draining(id) != Some(&After::Remove));
        let Some(id) = known else {
            match self.add(source, spec) {
                Ok(_) => done.added.push(url),
                Err(why) => done.refused.push((url, why)),
            }
            return;
        };
        self.fleet.belongs_to(id, source);
        let becomes = matches!(self.fleet.draining(id), Some(After::Become(_)));
        match self.fleet.update(id, spec) {
            Err(Refusal::Fixed(_)) => {
                self.leave(id, After::Become(Box::new(spec.clone())));
                done.replaced.push(url);
                return;
            }
            Err(why) => return done.refused.push((url, why)),
            Ok(Change::None) if !becomes => done.kept += 1,
            Ok(change) => {
                if change == Change::Asks {
                    self.tend(id);
                }
                done.changed.push(url);
            }
        }
        if becomes {
            // What it should have become is what it is.
            self.fleet.undrain(id);
        }
    }

    /// Removes workers that have finished; whether there were any.
    pub(super) fn end_drains(&mut self) -> bool {
        let before = self.fleet.len();
        let back = self.fleet.drained(Instant::now());
        let ended = self.fleet.len() < before;
        for (source, spec) in back {
            if let Err(why) = self.add(source, &spec) {
                tracing::error!(worker = %spec.url, reason = %why, "worker does not come back");
            }
        }
        ended
    }
}
