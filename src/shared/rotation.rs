//! Round-robin positions, one per (model, role), shared by all lanes.
//!
//! Takes a pool's index, gives the next position. Never skips for lack of a usable worker: the caller does.

use std::sync::atomic::AtomicU64;

/// Positions by pool index.
pub struct Rotation {
    #[allow(dead_code)]
    positions: Box<[AtomicU64]>,
}

impl Rotation {
    pub fn new() -> Self {
        Rotation { positions: Box::default() }
    }
}

impl Default for Rotation {
    fn default() -> Self {
        Self::new()
    }
}
