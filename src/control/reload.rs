//! The configuration is read again: on SIGHUP, and when its files have changed.
//!
//! Takes the files, gives the control thread configurations that were checked whole, and operators a report. Never gives
//! a part of one that has a mistake; never reads a file on the control thread itself, where a slow disk would stop the
//! probes.
//!
//! Files are looked at rather than watched: by name and through links, so that editors that write a new file in the place
//! of the old one, and Kubernetes, which turns a link, are seen as well as those that write into it.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep_until};

use super::command::Reconciled;
use super::expand::{self, Found};
use super::fleet::{After, Source as Whose};
use super::{Plane, warn_of_open_doors};
use crate::config::{Config, Disk, Kept, Loaded, Mistake, Origin, Source, WorkerSpec, is_workers_file};
use crate::shared::Shared;
use crate::shared::settings::Reload;

/// What a process needs to take over another configuration while it runs.
pub struct Reloadable {
    /// Where configurations come from.
    pub source: Source,
    /// The one of the start.
    pub loaded: Loaded,
    /// Fills in what the host decides.
    pub finish: Box<dyn Fn(&mut Config) + Send>,
    /// Changes what is logged.
    pub log: Box<dyn Fn(&str) + Send>,
    /// Told true when what somebody asked for, or what has changed, has been read, and false when that is in effect or
    /// refused.
    pub reloading: Box<dyn Fn(bool) + Send>,
}

/// Why the files were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// They may have changed since they were read for the start.
    Start,
    /// Somebody asked for it.
    Signal,
    /// They have changed.
    Change,
}

impl Cause {
    const fn name(self) -> &'static str {
        match self {
            Cause::Start => "start",
            Cause::Signal => "signal",
            Cause::Change => "change",
        }
    }
}

/// What came of a reading.
pub(super) struct Reading {
    cause: Cause,
    result: Result<Loaded, Vec<Mistake>>,
    /// Names that stand for workers, so that none leaves because its name is not known yet.
    found: Vec<Found>,
}

/// What is looked at, and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Watched {
    file: Option<PathBuf>,
    workers: Option<PathBuf>,
    interval: Duration,
}

impl Watched {
    fn of(loaded: &Loaded) -> Watched {
        Watched {
            file: loaded.file.as_ref().map(PathBuf::from),
            workers: loaded.config.workers_file.as_ref().map(PathBuf::from),
            interval: loaded.config.watch_interval,
        }
    }

    /// What is wrong with a file that is none: a pipe, say, out of which everything has come.
    fn pipe(&self) -> Option<Mistake> {
        let path = self.file.as_ref().filter(|path| std::fs::metadata(path).is_ok_and(|m| !m.is_file()))?;
        let origin = Origin::File { name: path.display().to_string(), line: 0, column: 0 };
        Some(Mistake::new(origin, "is no regular file, and cannot be read again", "give --config a file that stays"))
    }

    /// How the files look now.
    fn look(&self) -> Look {
        let mut look = Vec::new();
        for path in self.file.iter().chain(&self.workers) {
            see(path, &mut look);
            let entries = std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
            let mut entries: Vec<PathBuf> = entries.filter(|path| is_entry(path)).collect();
            entries.sort_unstable();
            entries.iter().for_each(|entry| see(entry, &mut look));
        }
        look
    }
}

fn is_entry(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(is_workers_file)
}

fn see(path: &Path, look: &mut Look) {
    // Through links: what they lead to counts.
    let of = |m: Metadata| [m.dev(), m.ino(), m.size(), m.mtime() as u64, m.mtime_nsec() as u64, m.ctime_nsec() as u64];
    look.push((path.to_owned(), std::fs::metadata(path).ok().map(of)));
}

/// By what a change of files is told; `None` for one that is not there.
type Look = Vec<(PathBuf, Option<[u64; 6]>)>;

/// Reads for as long as readings are taken.
struct Reader {
    source: Source,
    watched: watch::Receiver<Watched>,
    readings: mpsc::Sender<Reading>,
    /// SIGHUP, where it can be handled.
    hangup: Option<Signal>,
}

impl Reader {
    /// Waits for signals and changes and reads then.
    async fn run(mut self) {
        // What was read for the start looked some other way, perhaps.
        let (mut read, mut last): (Option<Look>, Look) = (None, look(&self.watched).await);
        let mut since = Instant::now();
        loop {
            let interval = self.watched.borrow_and_update().interval;
            let next = async {
                match interval {
                    Duration::ZERO => std::future::pending().await,
                    interval => sleep_until(since + interval).await,
                }
            };
            let cause = tokio::select! {
                () = hangup(&mut self.hangup) => Some(Cause::Signal),
                () = next => None,
                changed = self.watched.changed() => match changed {
                    Ok(()) => continue,
                    Err(_) => return,
                },
            };
            since = Instant::now();
            let now = look(&self.watched).await;
            // A file that is still being written looks another way each time.
            let settled = now == last && read.as_ref() != Some(&now);
            last = now;
            let change = if read.is_none() { Cause::Start } else { Cause::Change };
            let Some(cause) = cause.or(settled.then_some(change)) else { continue };
            read = Some(last.clone());
            let (watched, source) = (self.watched.borrow().clone(), self.source.clone());
            let read = move || match watched.pipe() {
                Some(_) if cause != Cause::Signal => None,
                Some(mistake) => Some(Err(vec![mistake])),
                None => Some(source.load(Disk)),
            };
            let Ok(Some(result)) = spawn_blocking(read).await else { continue };
            let found = match &result {
                Ok(loaded) => expand::look_up(&loaded.config.workers).await,
                Err(_) => Vec::new(),
            };
            if self.readings.send(Reading { cause, result, found }).await.is_err() {
                return;
            }
        }
    }
}

async fn hangup(signal: &mut Option<Signal>) {
    if let Some(signal) = signal
        && signal.recv().await.is_some()
    {
        return;
    }
    std::future::pending().await
}

async fn look(watched: &watch::Receiver<Watched>) -> Look {
    let watched = watched.borrow().clone();
    spawn_blocking(move || watched.look()).await.unwrap_or_default()
}

/// How the newest readings went, for the admin listener.
#[derive(Clone, Default)]
pub struct Report(Arc<Mutex<Value>>);

impl Report {
    /// As JSON; null in a process that cannot read its configuration again.
    pub fn json(&self) -> Value {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, report: Value) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = report;
    }
}

/// What runs, and how it came to that.
pub(super) struct Reloader {
    shared: &'static Shared,
    running: Loaded,
    finish: Box<dyn Fn(&mut Config) + Send>,
    log: Box<dyn Fn(&str) + Send>,
    reloading: Box<dyn Fn(bool) + Send>,
    watched: watch::Sender<Watched>,
    arriving: mpsc::Receiver<Reading>,
    report: Report,
    applied_unix_s: u64,
    last: Value,
    error: Value,
    kept: Vec<Kept>,
}

impl Reloader {
    /// Starts to read again whenever there is a reason to.
    pub(super) fn start(shared: &'static Shared, reloadable: Reloadable, report: Report) -> Reloader {
        let Reloadable { source, loaded, finish, log, reloading } = reloadable;
        let hangup = signal(SignalKind::hangup())
            .inspect_err(|e| tracing::warn!(reason = %e, "SIGHUP cannot be handled: only changes of files are seen"))
            .ok();
        let (watched, watching) = watch::channel(Watched::of(&loaded));
        let (readings, arriving) = mpsc::channel(1);
        tokio::spawn(Reader { source, watched: watching, readings, hangup }.run());
        let reloader = Reloader {
            shared,
            running: loaded,
            finish,
            log,
            reloading,
            watched,
            arriving,
            report,
            applied_unix_s: unix_s(),
            last: Value::Null,
            error: Value::Null,
            kept: Vec::new(),
        };
        reloader.tell();
        reloader
    }

    /// Judges a reading; gives the configuration that is to be in effect, if it is another than the one that is. The
    /// caller puts it into effect, then calls [`Reloader::applied`].
    pub(super) fn judge(&mut self, Reading { cause, result, found }: Reading) -> Option<(Arc<Config>, Vec<Found>)> {
        if cause != Cause::Start {
            (self.reloading)(true);
        }
        let mut new = match result {
            Ok(new) => new,
            Err(mistakes) => {
                self.refuse(cause, &mistakes);
                return None;
            }
        };
        let kept = new.keep(&self.running);
        if let Some(mistake) = new.exposed() {
            self.refuse(cause, &[mistake]);
            return None;
        }
        (self.finish)(&mut new.config);
        for kept in &kept {
            let [running, wanted] = [&kept.running, &kept.wanted].map(|v| v.as_deref().unwrap_or("unset").to_owned());
            tracing::warn!(option = kept.key, running, wanted, "{}: {} needs a restart", kept.origin, kept.key);
        }
        let changed = new.changes(&self.running);
        if changed.is_empty() && kept.is_empty() && cause == Cause::Start {
            return None;
        }
        for warning in &new.warnings {
            tracing::warn!(cause = cause.name(), "configuration: {warning}");
        }
        (self.error, self.kept) = (Value::Null, kept);
        let result = if changed.is_empty() { Reload::Unchanged } else { Reload::Applied };
        self.last = json!({"unix_s": unix_s(), "cause": cause.name(), "result": result.name(), "changed": changed});
        self.running = new;
        if result == Reload::Unchanged {
            tracing::info!(cause = cause.name(), "configuration read again: nothing to change");
            self.finished(result);
            return None;
        }
        tracing::info!(cause = cause.name(), changed = changed.join(", "), "configuration read again");
        Some((Arc::new(self.running.config.clone()), found))
    }

    /// What [`Reloader::judge`] gave is in effect.
    pub(super) fn applied(&mut self) {
        (self.log)(&self.running.config.log_level);
        self.applied_unix_s = unix_s();
        self.watched.send_if_modified(|watched| {
            let new = Watched::of(&self.running);
            let changed = *watched != new;
            *watched = new;
            changed
        });
        self.finished(Reload::Applied);
    }

    fn refuse(&mut self, cause: Cause, mistakes: &[Mistake]) {
        for mistake in mistakes {
            tracing::error!(cause = cause.name(), "configuration: {mistake}");
        }
        tracing::error!(mistakes = mistakes.len(), "configuration has mistakes: nothing was changed");
        let mistakes: Vec<String> = mistakes.iter().map(Mistake::to_string).collect();
        let result = Reload::Refused;
        self.last = json!({"unix_s": unix_s(), "cause": cause.name(), "result": result.name(), "changed": []});
        self.error = json!({"unix_s": unix_s(), "mistakes": mistakes});
        self.finished(result);
    }

    fn finished(&self, result: Reload) {
        self.tell();
        self.shared.settings.count(result);
        (self.reloading)(false);
    }

    fn tell(&self) {
        let kept = |k: &Kept| json!({"option": k.key, "running": k.running, "wanted": k.wanted, "origin": k.origin.to_string()});
        self.report.set(json!({
            "generation": self.shared.settings.generation(),
            "file": self.running.file,
            "applied_unix_s": self.applied_unix_s,
            "last_reload": self.last,
            "last_error": self.error,
            "needs_restart": self.kept.iter().map(kept).collect::<Vec<_>>(),
            "config": self.running.to_json(),
        }));
    }
}

/// The next reading; never one where there is no reloader.
pub(super) async fn next(reloader: &mut Option<Reloader>) -> Reading {
    if let Some(reloader) = reloader
        && let Some(reading) = reloader.arriving.recv().await
    {
        return reading;
    }
    std::future::pending().await
}

impl Plane {
    /// Puts a configuration into effect: nothing of what is under way is touched by it.
    pub(super) fn renew(&mut self, config: Arc<Config>, found: Vec<Found>) {
        let (shared, old) = (self.shared, std::mem::replace(&mut self.config, config.clone()));
        shared.limit_requests(config.max_concurrent_requests, config.queue_size);
        shared.load.limit(config.max_requests_per_worker);
        if config.breaker != old.breaker {
            shared.vitals.set_rules(config.breaker);
            self.fleet.judge_breakers_anew();
        }
        if config.wants_rings() && !old.wants_rings() {
            shared.roster.make_rings();
            self.fleet.publish_anew();
        }
        self.newest.send_replace(config.clone());
        if health(&config) != health(&old) {
            self.fleet.ids().into_iter().for_each(|id| self.tend(id));
        }
        self.names.follow(&config.workers);
        for found in found {
            self.names.note(found);
        }
        self.take_over();
        warn_of_open_doors(&config);
        // Workers first: a policy or a default model may be new for those that come.
        self.fleet.settle();
        let generation = shared.settings.publish(&config);
        for lane in 0..shared.tallies.lanes().len() {
            shared.handover.ring(lane);
        }
        tracing::info!(generation, "configuration is in effect");
    }
}

impl Plane {
    /// A name that stands for workers has these addresses now; whether that changed anything.
    pub(super) fn found(&mut self, found: Found) -> bool {
        let changed = self.names.note(found);
        if changed {
            self.take_over();
        }
        changed
    }

    /// Makes the workers of the configuration be what it says, where it says something else than before.
    fn take_over(&mut self) {
        let mut workers = self.names.workers(&self.config.workers);
        let wanted: Vec<WorkerSpec> = workers.iter().filter_map(|spec| self.as_left(spec)).collect();
        let Reconciled { added, changed, replaced, drained, kept, refused } = self.reconcile(Whose::Config, &wanted);
        // Who was refused is tried again.
        workers.retain(|spec| refused.iter().all(|(url, _)| *url != spec.url));
        self.listed = workers.into_iter().map(|spec| ((spec.url.clone(), spec.role), spec)).collect();
        for (url, why) in &refused {
            tracing::error!(worker = %url, reason = %why, "worker not taken over from the configuration");
        }
        tracing::info!(
            added = added.len(),
            changed = changed.len(),
            replaced = replaced.len(),
            drained = drained.len(),
            kept,
            "workers are those of the configuration"
        );
    }

    /// A worker as the configuration wants it: as operators have left it, if it says the same of it as before. `None`:
    /// they have removed it.
    fn as_left(&self, spec: &WorkerSpec) -> Option<WorkerSpec> {
        if self.listed.get(&(spec.url.clone(), spec.role)) != Some(spec) {
            return Some(spec.clone());
        }
        let id = self.fleet.named(&spec.url, spec.role)?;
        match self.fleet.draining(id) {
            Some(After::Remove) => None,
            Some(After::Become(_)) => Some(spec.clone()),
            Some(After::Stay) | None => self.fleet.spec(id).cloned(),
        }
    }
}

/// What workers are probed by.
fn health(config: &Config) -> impl PartialEq + use<> {
    let Config { health_check, health_interval, health_timeout, health_failures, health_successes, .. } = *config;
    (health_check, health_interval, health_timeout, health_failures, health_successes, config.health_endpoint.clone())
}

fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
