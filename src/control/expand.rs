//! Names that stand for as many workers as they have addresses.
//!
//! Takes the configured workers, gives them with each such name in place of its addresses as they are now. Never takes
//! workers away because a look-up failed: only another answer of the name service does.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::sleep;

use super::Pace;
use super::resolve::{Endpoint, same_addrs};
use crate::config::WorkerSpec;

/// A name and the addresses that it has now.
pub(super) type Found = (String, Box<[SocketAddr]>);

/// The names that are followed, by URL.
pub(super) struct Names {
    pace: Pace,
    found: mpsc::UnboundedSender<Found>,
    known: BTreeMap<String, Name>,
}

struct Name {
    /// Sorted; empty before the first answer.
    addrs: Box<[SocketAddr]>,
    task: AbortHandle,
}

impl Drop for Name {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Names {
    /// No names yet; what they are found to be arrives at the other end.
    pub(super) fn new(pace: Pace) -> (Names, mpsc::UnboundedReceiver<Found>) {
        let (found, arriving) = mpsc::unbounded_channel();
        (Names { pace, found, known: BTreeMap::new() }, arriving)
    }

    /// Follows the names of these workers and no others.
    pub(super) fn follow(&mut self, workers: &[WorkerSpec]) {
        let is_name = |url: &str| workers.iter().any(|spec| spec.expand && spec.url == url);
        self.known.retain(|url, _| is_name(url));
        for spec in workers.iter().filter(|spec| spec.expand) {
            let (pace, found) = (self.pace, self.found.clone());
            self.known.entry(spec.url.clone()).or_insert_with(|| {
                let task = tokio::spawn(keep_looking(spec.url.clone(), pace, found)).abort_handle();
                Name { addrs: Box::default(), task }
            });
        }
    }

    /// Notes what a name was found to be; whether that is something else than before.
    pub(super) fn note(&mut self, (url, mut addrs): Found) -> bool {
        addrs.sort_unstable();
        let name = self.known.get_mut(&url).filter(|name| name.addrs != addrs);
        let changed = name.is_some();
        if let Some(name) = name {
            name.addrs = addrs;
        }
        changed
    }

    /// The workers with names in place of their addresses; one that is given by its address, too, is there once.
    pub(super) fn workers(&self, configured: &[WorkerSpec]) -> Vec<WorkerSpec> {
        let mut workers: Vec<WorkerSpec> = configured.iter().filter(|spec| !spec.expand).cloned().collect();
        for spec in configured.iter().filter(|spec| spec.expand) {
            let Some((name, endpoint)) = self.known.get(&spec.url).zip(Endpoint::parse(&spec.url).ok()) else {
                continue;
            };
            for addr in &name.addrs {
                let url = format!("http://{addr}{}", endpoint.prefix);
                if !workers.iter().any(|other| other.url == url && other.role == spec.role) {
                    workers.push(WorkerSpec { url, expand: false, ..spec.clone() });
                }
            }
        }
        workers
    }
}

/// What the names among these workers are at the moment, as far as the name service tells.
pub(super) async fn look_up(workers: &[WorkerSpec]) -> Vec<Found> {
    let mut looks = JoinSet::new();
    for url in workers.iter().filter(|spec| spec.expand).map(|spec| spec.url.clone()) {
        looks.spawn(async move {
            let addrs = Endpoint::parse(&url).ok()?.look_up().await.ok()?;
            Some((url, addrs))
        });
    }
    looks.join_all().await.into_iter().flatten().collect()
}

async fn keep_looking(url: String, pace: Pace, found: mpsc::UnboundedSender<Found>) {
    // It was parsed when the configuration was read.
    let Ok(endpoint) = Endpoint::parse(&url) else { return };
    let mut known: Box<[SocketAddr]> = Box::default();
    let mut complained = false;
    loop {
        match endpoint.look_up().await {
            Ok(addrs) => {
                complained = false;
                if !same_addrs(&known, &addrs) {
                    known.clone_from(&addrs);
                    if found.send((url.clone(), addrs)).is_err() {
                        return;
                    }
                }
                sleep(pace.look_up_again).await;
            }
            Err(e) => {
                if !std::mem::replace(&mut complained, true) {
                    tracing::warn!(name = %url, reason = %e, "name of workers does not resolve");
                }
                sleep(pace.eager).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_stands_for_its_addresses_once_each() {
        let name = WorkerSpec { expand: true, dp_size: Some(2), ..WorkerSpec::new("http://localhost:9/p") };
        let fixed = ["http://10.0.0.2:9/p", "http://10.0.0.7:1"].map(WorkerSpec::new);
        let configured = [vec![name.clone()], fixed.to_vec()].concat();
        let (mut names, _arriving) = Names::new(Pace::default());
        assert_eq!(names.workers(&configured), fixed, "it is not followed");
        names.follow(&configured);
        assert_eq!(names.workers(&configured), fixed, "it has no addresses yet");
        let addrs = |all: &[&str]| -> Found { (name.url.clone(), all.iter().map(|a| a.parse().unwrap()).collect()) };
        assert!(names.note(addrs(&["[::1]:9", "10.0.0.2:9", "10.0.0.1:9"])));
        assert!(!names.note(addrs(&["10.0.0.1:9", "10.0.0.2:9", "[::1]:9"])), "the order does not matter");
        let workers = names.workers(&configured);
        let urls: Vec<&str> = workers.iter().map(|w| &*w.url).collect();
        assert_eq!(urls, ["http://10.0.0.2:9/p", "http://10.0.0.7:1", "http://10.0.0.1:9/p", "http://[::1]:9/p"]);
        assert_eq!((workers[2].dp_size, workers[2].expand), (Some(2), false));
        assert!(names.note(addrs(&["10.0.0.1:9"])));
        assert_eq!(names.workers(&configured).len(), 3);
        names.follow(&fixed);
        assert_eq!(names.workers(&configured), fixed);
        assert!(!names.note(addrs(&["10.0.0.3:9"])), "nobody asks for it any more");
    }
}
