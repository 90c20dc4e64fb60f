//! One question to many workers.
//!
//! Takes the roster and a question, gives every engine's answer. Never asks more than [`MAX_ASKED_AT_ONCE`] at a time,
//! never asks an engine once for each of its ranks, and leaves no question behind when nobody waits for the answers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::Method;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::fetch::{Failure, MAX_ANSWER_BYTES, Question, Reply};
use super::resolve::Endpoint;
use crate::config::{Backend, Role};
use crate::limits::MAX_ASKED_AT_ONCE;
use crate::shared::roster::{Slot, Snapshot, Worker};

/// How long an engine may take for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// An engine that can be asked, with all its ranks. It has no `Debug`: that would show the key.
pub struct Target {
    pub url: Box<str>,
    pub role: Role,
    pub backend: Backend,
    pub slots: Vec<Slot>,
    endpoint: Endpoint,
    addrs: Box<[SocketAddr]>,
    api_key: Option<Box<str>>,
}

impl Target {
    /// Asks for a path under the engine's prefix.
    ///
    /// # Errors
    /// See [`Failure`].
    pub async fn ask(&self, method: Method, path: &str) -> Result<Reply, Failure> {
        let question = Question {
            addrs: &self.addrs,
            authority: &self.endpoint.authority,
            path: &format!("{}{path}", self.endpoint.prefix),
            api_key: self.api_key.as_deref(),
            limit: ANSWER_TIMEOUT,
        };
        question.ask(method, MAX_ANSWER_BYTES).await
    }
}

/// The engines of a roster, sorted by URL and role.
pub fn targets(snapshot: &Snapshot) -> Vec<Arc<Target>> {
    let mut engines: BTreeMap<(Box<str>, Role), Target> = BTreeMap::new();
    for worker in &snapshot.workers {
        let url = base(worker);
        let Ok(endpoint) = Endpoint::parse(url) else { continue };
        let target = engines.entry((url.into(), worker.role)).or_insert_with(|| Target {
            url: url.into(),
            role: worker.role,
            backend: worker.pairing.backend,
            slots: Vec::new(),
            endpoint,
            addrs: worker.addrs.clone(),
            api_key: worker.api_key.clone(),
        });
        target.slots.push(worker.slot);
    }
    engines.into_values().map(Arc::new).collect()
}

/// The same, each address once: while a worker's role is being changed it is there in both.
pub fn addresses(snapshot: &Snapshot) -> Vec<Arc<Target>> {
    let mut targets = targets(snapshot);
    targets.dedup_by(|later, first| later.url == first.url);
    targets
}

/// The URL without the rank.
fn base(worker: &Worker) -> &str {
    match worker.pairing.dp {
        Some(_) => worker.url.rsplit_once('@').map_or(&worker.url, |(url, _)| url),
        None => &worker.url,
    }
}

/// Asks all; gives their answers in the order of the targets. A target whose question came to nothing (it panicked) is
/// left out.
pub async fn each<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
    targets: &[Arc<Target>],
    question: impl Fn(Arc<Target>) -> F,
) -> Vec<(Arc<Target>, T)> {
    let turns = Arc::new(Semaphore::new(MAX_ASKED_AT_ONCE));
    let mut asking = JoinSet::new();
    for (at, target) in targets.iter().enumerate() {
        let (turns, answer) = (turns.clone(), question(target.clone()));
        asking.spawn(async move {
            // The semaphore is never closed.
            let _turn = turns.acquire_owned().await;
            (at, answer.await)
        });
    }
    let mut answers = Vec::with_capacity(targets.len());
    while let Some(done) = asking.join_next().await {
        answers.extend(done);
    }
    answers.sort_unstable_by_key(|(at, _)| *at);
    answers.into_iter().map(|(at, answer)| (targets[at].clone(), answer)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::WorkerSpec;
    use crate::control::fleet::Fleet;
    use crate::shared::Shared;

    #[test]
    fn an_engine_is_a_target_once_for_each_role_and_an_address_once() {
        let shared = Shared::leak(1);
        let mut fleet = Fleet::new(shared);
        let spec = |role| WorkerSpec { role, dp_size: Some(2), ..WorkerSpec::new("http://10.0.0.1:1") };
        for role in [Role::Decode, Role::Regular] {
            fleet.register(&spec(role)).expect("a slot");
        }
        fleet.register(&WorkerSpec::new("http://10.0.0.2:1")).expect("a slot");
        fleet.settle();
        let snapshot = shared.roster.snapshot();
        let shown = |all: Vec<Arc<Target>>| all.iter().map(|t| (t.url.to_string(), t.slots.len())).collect::<Vec<_>>();
        let [first, second] = [("http://10.0.0.1:1".to_owned(), 2), ("http://10.0.0.2:1".to_owned(), 1)];
        assert_eq!(shown(targets(&snapshot)), [first.clone(), first.clone(), second.clone()]);
        assert_eq!(shown(addresses(&snapshot)), [first, second]);
    }
}
