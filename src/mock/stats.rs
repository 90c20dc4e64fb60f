//! What a mock engine remembers of the traffic it saw, for tests to assert on.
//!
//! Takes events of connections and requests, gives snapshots. Never influences an answer.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use serde::Serialize;

/// Most different paths that are counted by name; the rest is counted as `other`.
const MAX_PATHS: usize = 128;

/// A snapshot of one engine's counters. Everything but `active`, `queued`, `connections` and
/// `staged` only grows, until `reset`.
/// A client may have the last byte of an answer a moment before the counts show its end: wait for them.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Stats {
    /// Requests for inference that were received whole (probes and admin calls are counted in `paths` only).
    pub requests: u64,
    /// Requests inside now, waiting ones included.
    pub active: u64,
    /// Of those, the ones that wait for a place in the batch or for prefill.
    pub queued: u64,
    /// The most requests that were inside at once.
    pub peak: u64,
    /// The most requests that were past the queue at once.
    pub peak_running: u64,
    /// Requests that ended early: the client left, `/abort_request`, an engine that was killed.
    pub aborted: u64,
    /// Connections open now.
    pub connections: u64,
    /// Connections ever accepted.
    pub accepted: u64,
    /// Prompt tokens that the prefix cache held.
    pub cached_tokens: u64,
    /// Prompt tokens of all requests that reached prefill.
    pub prompt_tokens: u64,
    /// Tokens that were generated.
    pub output_tokens: u64,
    /// Legs refused because an earlier leg of the same side had the room (SGLang) or the transfer id (Mooncake).
    pub duplicate_rooms: u64,
    /// Requests without `bootstrap_room` to an SGLang engine that needs one.
    pub roomless: u64,
    /// Requests whose `bootstrap_room` is no integer from 1 to 2^63 − 1.
    pub bad_room: u64,
    /// Requests whose bootstrap fields are missing, or arrays and scalars where the prompt asks for the other.
    pub bad_bootstrap: u64,
    /// Ranks out of range, prefill ranks that their own request contradicts, and (on the decode engine) prefill
    /// ranks that are not the one which the prefill leg used.
    pub bad_rank: u64,
    /// Requests whose `kv_transfer_params` are missing, for the other side, or lead to nothing.
    pub bad_transfer: u64,
    /// Requests to a vLLM prefill engine that ask for more than one token without a stream.
    pub unsanitised: u64,
    /// Pairs whose legs did not have the same `x-request-id`; counted by the decode engine.
    pub bad_request_id: u64,
    /// Legs that waited in vain for their partner.
    pub room_timeouts: u64,
    /// Caches that a vLLM prefill engine keeps now, because no decode engine has fetched them yet.
    pub staged: u64,
    /// Requests by data-parallel rank; on an SGLang prefill engine each room of a batch counts.
    pub ranks: BTreeMap<u32, u64>,
    /// Requests of every kind by path, without query.
    pub paths: BTreeMap<String, u64>,
    /// The last request for inference.
    pub last: Option<Last>,
}

/// A request as it came over the wire.
#[derive(Clone, Default, Serialize)]
pub struct Last {
    /// Request line and header lines, without the final empty line; bytes above 0x7f as Latin-1.
    pub head: String,
    /// The body with chunked coding removed, cut to `Settings::keep_body_bytes`.
    #[serde(serialize_with = "lossy")]
    pub body: Vec<u8>,
    /// Length of the whole body.
    pub body_length: u64,
}

fn lossy<S: serde::Serializer>(body: &[u8], s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(&String::from_utf8_lossy(body))
}

impl std::fmt::Debug for Last {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let body = String::from_utf8_lossy(&self.body[..self.body.len().min(512)]);
        f.debug_struct("Last").field("head", &self.head).field("body", &body).finish_non_exhaustive()
    }
}

impl Last {
    /// Values of every header line of this name, in order.
    pub fn header(&self, name: &str) -> Vec<&str> {
        self.head
            .lines()
            .skip(1)
            .filter_map(|line| line.split_once(':'))
            .filter(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, v)| v.trim())
            .collect()
    }
}

/// The counters behind a [`Stats`]. Relaxed throughout: they are counts, no memory is published through them.
#[derive(Default)]
pub(super) struct Counters {
    pub requests: AtomicU64,
    pub active: AtomicU64,
    pub queued: AtomicU64,
    pub peak: AtomicU64,
    pub running: AtomicU64,
    pub peak_running: AtomicU64,
    pub aborted: AtomicU64,
    pub connections: AtomicU64,
    pub accepted: AtomicU64,
    pub cached_tokens: AtomicU64,
    pub prompt_tokens: AtomicU64,
    pub output_tokens: AtomicU64,
    pub duplicate_rooms: AtomicU64,
    pub roomless: AtomicU64,
    pub bad_room: AtomicU64,
    pub bad_bootstrap: AtomicU64,
    pub bad_rank: AtomicU64,
    pub bad_transfer: AtomicU64,
    pub unsanitised: AtomicU64,
    pub bad_request_id: AtomicU64,
    pub room_timeouts: AtomicU64,
    /// Shared with what is staged, which may outlive the engine.
    pub staged: Arc<AtomicU64>,
    ranks: Mutex<BTreeMap<u32, u64>>,
    paths: Mutex<BTreeMap<String, u64>>,
    last: Mutex<Option<Last>>,
}

/// Adds one and returns the new value.
pub(super) fn up(counter: &AtomicU64) -> u64 {
    counter.fetch_add(1, Relaxed) + 1
}

/// Takes one off.
pub(super) fn down(counter: &AtomicU64) {
    counter.fetch_sub(1, Relaxed);
}

impl Counters {
    pub fn saw_path(&self, path: &str) {
        let mut paths = self.paths.lock().unwrap();
        if let Some(n) = paths.get_mut(path) {
            *n += 1;
        } else {
            let name = if paths.len() < MAX_PATHS { path } else { "other" };
            *paths.entry(name.to_owned()).or_default() += 1;
        }
    }

    pub fn saw_rank(&self, rank: u32) {
        *self.ranks.lock().unwrap().entry(rank).or_default() += 1;
    }

    pub fn saw_request(&self, head: &[u8], body: &[u8], keep: usize) {
        up(&self.requests);
        *self.last.lock().unwrap() = Some(Last {
            head: super::latin1(head),
            body: body[..body.len().min(keep)].to_vec(),
            body_length: body.len() as u64,
        });
    }

    pub fn snapshot(&self) -> Stats {
        let get = |c: &AtomicU64| c.load(Relaxed);
        Stats {
            requests: get(&self.requests),
            active: get(&self.active),
            queued: get(&self.queued),
            peak: get(&self.peak),
            peak_running: get(&self.peak_running),
            aborted: get(&self.aborted),
            connections: get(&self.connections),
            accepted: get(&self.accepted),
            cached_tokens: get(&self.cached_tokens),
            prompt_tokens: get(&self.prompt_tokens),
            output_tokens: get(&self.output_tokens),
            duplicate_rooms: get(&self.duplicate_rooms),
            roomless: get(&self.roomless),
            bad_room: get(&self.bad_room),
            bad_bootstrap: get(&self.bad_bootstrap),
            bad_rank: get(&self.bad_rank),
            bad_transfer: get(&self.bad_transfer),
            unsanitised: get(&self.unsanitised),
            bad_request_id: get(&self.bad_request_id),
            room_timeouts: get(&self.room_timeouts),
            staged: get(&self.staged),
            ranks: self.ranks.lock().unwrap().clone(),
            paths: self.paths.lock().unwrap().clone(),
            last: self.last.lock().unwrap().clone(),
        }
    }

    /// Zeroes what only grows.
    pub fn reset(&self) {
        for c in [
            &self.requests,
            &self.aborted,
            &self.accepted,
            &self.cached_tokens,
            &self.prompt_tokens,
            &self.output_tokens,
            &self.duplicate_rooms,
            &self.roomless,
            &self.bad_room,
            &self.bad_bootstrap,
            &self.bad_rank,
            &self.bad_transfer,
            &self.unsanitised,
            &self.bad_request_id,
            &self.room_timeouts,
        ] {
            c.store(0, Relaxed);
        }
        self.peak.store(self.active.load(Relaxed), Relaxed);
        self.peak_running.store(self.running.load(Relaxed), Relaxed);
        self.ranks.lock().unwrap().clear();
        self.paths.lock().unwrap().clear();
        *self.last.lock().unwrap() = None;
    }
}
