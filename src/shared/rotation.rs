//! Round-robin positions, one per (model, role) and group of decode workers, shared by all lanes.
//!
//! Takes the place of a pool, which the roster gives it ([`super::roster::Pool::place`]), gives the turn that comes next
//! there. Never skips for lack of a usable worker: the caller does, and says how far it went. Never blocks.

use std::sync::atomic::{AtomicU64, Ordering};

/// Pools that get a position of their own.
pub(super) const PLACES: usize = 4096;
/// The position of all for which there was none.
pub const OVERFLOW: usize = PLACES;

/// Positions by place: turns taken so far, skipped members included; each wraps.
pub struct Rotation {
    turns: Box<[AtomicU64]>,
}

impl Rotation {
    /// No turn taken.
    pub fn new() -> Self {
        Rotation { turns: (0..=OVERFLOW).map(|_| AtomicU64::new(0)).collect() }
    }

    /// The turn that comes next at a place.
    #[inline]
    pub fn turn(&self, place: usize) -> u64 {
        // Relaxed, as below: turns only have to be unique, and one atomic's modification order does that.
        self.turns[place].load(Ordering::Relaxed)
    }

    /// Takes the turns from `turn` up to `next`, unless another lane took `turn` first.
    ///
    /// # Errors
    /// The turn that comes next now.
    #[inline]
    pub fn take(&self, place: usize, turn: u64, next: u64) -> Result<(), u64> {
        self.turns[place].compare_exchange(turn, next, Ordering::Relaxed, Ordering::Relaxed).map(|_| ())
    }

    /// Takes one turn whatever it is.
    pub fn take_any(&self, place: usize) -> u64 {
        self.turns[place].fetch_add(1, Ordering::Relaxed)
    }
}

impl Default for Rotation {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_taken_once() {
        let rotation = Rotation::new();
        let place = OVERFLOW;
        assert_eq!(rotation.take(place, 0, 3), Ok(()));
        assert_eq!(rotation.take(place, 0, 1), Err(3));
        assert_eq!(rotation.take_any(place), 3);
        assert_eq!(rotation.turn(place), 4);
    }
}
