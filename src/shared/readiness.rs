//! Whether the process is worth sending traffic to.
//!
//! Takes counts from the control thread (the only writer), gives `/readiness` its status and body. Never
//! shows counts of two different moments: all of them live in one word.

use std::sync::atomic::{AtomicU64, Ordering};

use super::drain::Phase;
use crate::limits::MAX_WORKERS;

const FIELD_BITS: u32 = 16;
const FIELD: u64 = (1 << FIELD_BITS) - 1;
const WAITED: u64 = 1 << (3 * FIELD_BITS);

const _: () = assert!(MAX_WORKERS as u64 <= FIELD);

/// The counts behind `/readiness`.
#[derive(Debug, Default)]
pub struct Readiness(AtomicU64);

/// One moment's counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadinessView {
    /// Workers that the roster knows.
    pub configured: usize,
    /// Workers of which at least one probe has ended, whatever came of it.
    pub probed: usize,
    /// Workers that may be given requests.
    pub usable: usize,
    /// At least one worker is usable, and either all were probed or the start has waited long enough for them.
    pub ready: bool,
}

impl Readiness {
    /// Nothing known yet: not ready.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets all counts at once (control only). `waited`: the time that the start allows for first probes is over.
    pub fn set(&self, configured: usize, probed: usize, usable: usize, waited: bool) {
        let field = |n: usize, place: u32| (n as u64).min(FIELD) << (place * FIELD_BITS);
        let word = field(configured, 0) | field(probed, 1) | field(usable, 2) | if waited { WAITED } else { 0 };
        // Relaxed: the word is the whole message; nothing else is read on the strength of it.
        self.0.store(word, Ordering::Relaxed);
    }

    /// Whether the time that the start allows for first answers of workers is over.
    pub fn waited(&self) -> bool {
        self.0.load(Ordering::Relaxed) & WAITED != 0
    }

    /// The current counts.
    pub fn snapshot(&self) -> ReadinessView {
        let word = self.0.load(Ordering::Relaxed);
        let field = |place: u32| (word >> (place * FIELD_BITS) & FIELD) as usize;
        let (configured, probed, usable) = (field(0), field(1), field(2));
        let ready = usable > 0 && (probed >= configured || word & WAITED != 0);
        ReadinessView { configured, probed, usable, ready }
    }

    /// Status and JSON body of `/readiness`: 200, or 503 with the reason.
    pub fn json(&self, phase: Phase) -> (u16, String) {
        let view = self.snapshot();
        let reason = match view {
            _ if phase != Phase::Serving => Some("draining"),
            ReadinessView { configured: 0, .. } => Some("no worker is configured"),
            ReadinessView { usable: 0, .. } => Some("no worker is usable"),
            ReadinessView { ready: false, .. } => Some("not all workers have been probed"),
            _ => None,
        };
        let ReadinessView { configured, probed, usable, .. } = view;
        let workers = format!(r#""workers":{{"configured":{configured},"probed":{probed},"usable":{usable}}}"#);
        match reason {
            None => (200, format!(r#"{{"status":"ready",{workers}}}"#)),
            Some(reason) => (503, format!(r#"{{"status":"not_ready","reason":"{reason}",{workers}}}"#)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            (MAX_WORKERS, MAX_WORKERS, MAX_WORKERS, false, true),
        ] {
            r.set(configured, probed, usable, waited);
            assert_eq!(r.snapshot(), ReadinessView { configured, probed, usable, ready });
            assert_eq!(r.json(Phase::Serving).0, if ready { 200 } else { 503 });
            assert_eq!(r.json(Phase::Settling).0, 503);
        }
    }

    #[test]
    fn the_body_has_counts_and_a_reason() {
        let r = Readiness::new();
        r.set(3, 2, 1, false);
        assert_eq!(
            r.json(Phase::Serving).1,
            r#"{"status":"not_ready","reason":"not all workers have been probed","workers":{"configured":3,"probed":2,"usable":1}}"#
        );
        r.set(3, 3, 1, false);
        assert_eq!(r.json(Phase::Serving).1, r#"{"status":"ready","workers":{"configured":3,"probed":3,"usable":1}}"#);
        assert!(r.json(Phase::Draining).1.contains(r#""reason":"draining""#));
    }
}
