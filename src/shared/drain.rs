//! Where the process stands between start and exit.
//!
//! Takes steps forward from boot's signal handling, gives them to every lane and to `/readiness`. Never goes back.

use std::sync::atomic::{AtomicU8, Ordering};

/// The steps of a process's life, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// Serving.
    Serving = 0,
    /// Readiness says 503, connections are still accepted.
    Settling = 1,
    /// Nothing new is accepted; what is in flight is finished.
    Draining = 2,
    /// The grace period is over: everything is cut.
    Ending = 3,
}

/// The current phase.
pub struct Drain(AtomicU8);

impl Drain {
    pub fn new() -> Self {
        Drain(AtomicU8::new(0))
    }

    /// The current phase. Relaxed: lanes are woken through their eventfd, whose write orders what came before.
    pub fn phase(&self) -> Phase {
        match self.0.load(Ordering::Relaxed) {
            0 => Phase::Serving,
            1 => Phase::Settling,
            2 => Phase::Draining,
            _ => Phase::Ending,
        }
    }

    /// Moves on to `phase`; a step back is ignored.
    pub fn advance(&self, phase: Phase) {
        self.0.fetch_max(phase as u8, Ordering::Relaxed);
    }
}

impl Default for Drain {
    fn default() -> Self {
        Self::new()
    }
}
