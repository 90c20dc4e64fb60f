//! Round-robin positions, one per (model, role) and group of decode workers, shared by all lanes.
//!
//! Takes a model and a role when a lane reads a new roster, gives the place of their position for as long as the
//! process lives, so that positions survive roster changes. Never skips for lack of a usable worker: the caller
//! does, and says how far it went. Never blocks and never gives a place back.
//!
//! Places are claimed by open addressing in a fixed table. A place is known by the 64-bit hash of its (model, role):
//! two pairs with one hash would share a position (about 1 in 10^12 for 4096 pairs). When the table is full, pairs
//! that found no place share [`OVERFLOW`]; what suffers is the evenness of those pools, nothing else.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

use super::roster::Pool;
use crate::config::{Backend, Role};

/// Pairs of model and role that get a position of their own.
pub(super) const PLACES: usize = 4096;
/// The position of all pairs that came after the table was full.
pub const OVERFLOW: usize = PLACES;

#[derive(Default)]
struct Place {
    /// Hash of the owner; 0 while free. Written once.
    owner: AtomicU64,
    /// Turns taken so far, skipped members included; wraps.
    turn: AtomicU64,
}

/// Positions by place.
pub struct Rotation {
    places: Box<[Place]>,
}

impl Rotation {
    /// Every place free.
    pub fn new() -> Self {
        Rotation { places: (0..PLACES + 1).map(|_| Place::default()).collect() }
    }

    /// The place of a model's (`None`: of all models) workers of a role. Claims one at the first call; not for the
    /// request path.
    pub fn place(&self, model: Option<&str>, role: Role) -> usize {
        self.claim(owner((model, role)))
    }

    /// The place of those of them that share backend and group: else the turns of one group would move those of
    /// another on.
    pub fn place_of_team(&self, model: Option<&str>, role: Role, team: (Backend, &str)) -> usize {
        self.claim(owner((model, role, team)))
    }

    /// The place of a pool.
    pub fn place_of(&self, pool: &Pool) -> usize {
        match &pool.team {
            None => self.place(pool.model.as_deref(), pool.role),
            Some((backend, group)) => self.place_of_team(pool.model.as_deref(), pool.role, (*backend, group)),
        }
    }

    fn claim(&self, owner: u64) -> usize {
        let home = (owner % PLACES as u64) as usize;
        for place in (home..PLACES).chain(0..home) {
            let claimed = &self.places[place].owner;
            // Relaxed: the hash is the whole message; the turn beside it starts at 0 for everybody. What is somebody's
            // is only looked at: a full table is walked by every lane for every pool that has no place.
            let found = match claimed.load(Ordering::Relaxed) {
                0 => claimed.compare_exchange(0, owner, Ordering::Relaxed, Ordering::Relaxed).err().unwrap_or(owner),
                theirs => theirs,
            };
            if found == owner {
                return place;
            }
        }
        OVERFLOW
    }

    /// The turn that comes next at a place.
    #[inline]
    pub fn turn(&self, place: usize) -> u64 {
        // Relaxed, as below: turns only have to be unique, and one atomic's modification order does that.
        self.places[place].turn.load(Ordering::Relaxed)
    }

    /// Takes the turns from `turn` up to `next`, unless another lane took `turn` first.
    ///
    /// # Errors
    /// The turn that comes next now.
    #[inline]
    pub fn take(&self, place: usize, turn: u64, next: u64) -> Result<(), u64> {
        self.places[place].turn.compare_exchange(turn, next, Ordering::Relaxed, Ordering::Relaxed).map(|_| ())
    }

    /// Takes one turn whatever it is.
    pub fn take_any(&self, place: usize) -> u64 {
        self.places[place].turn.fetch_add(1, Ordering::Relaxed)
    }
}

impl Default for Rotation {
    fn default() -> Self {
        Self::new()
    }
}

fn owner(whose: impl Hash) -> u64 {
    // DefaultHasher::new has fixed keys, so that every lane finds the same place.
    let mut hasher = DefaultHasher::new();
    whose.hash(&mut hasher);
    hasher.finish().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_keeps_its_place_and_shares_it_with_no_other() {
        let rotation = Rotation::new();
        let pairs = [
            (None, Role::Regular),
            (Some(""), Role::Regular),
            (Some("a"), Role::Regular),
            (Some("a"), Role::Prefill),
            (Some("b"), Role::Prefill),
        ];
        let places = pairs.map(|(model, role)| rotation.place(model, role));
        for (i, place) in places.iter().enumerate() {
            assert!(!places[..i].contains(place));
        }
        assert_eq!(places, pairs.map(|(model, role)| rotation.place(model, role)));
        let teams = [(Backend::Sglang, "x"), (Backend::Sglang, "y"), (Backend::VllmNixl, "x")];
        let of_team = |team| rotation.place_of_team(Some("a"), Role::Prefill, team);
        let mut all: Vec<usize> = teams.map(of_team).into_iter().chain(places).collect();
        assert_eq!(of_team(teams[1]), all[1]);
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), teams.len() + places.len());
    }

    #[test]
    fn colliding_homes_get_places_of_their_own_until_the_table_is_full() {
        let rotation = Rotation::new();
        let owners = |i: usize| 5 + (i * PLACES) as u64;
        let mut places: Vec<usize> = (0..PLACES).map(|i| rotation.claim(owners(i))).collect();
        assert_eq!(places, (0..PLACES).map(|i| rotation.claim(owners(i))).collect::<Vec<_>>());
        places.sort_unstable();
        assert_eq!(places, (0..PLACES).collect::<Vec<_>>());
        assert_eq!(rotation.claim(owners(PLACES)), OVERFLOW);
        assert_eq!(rotation.claim(owners(PLACES + 1)), OVERFLOW);
    }

    #[test]
    fn a_turn_is_taken_once() {
        let rotation = Rotation::new();
        let place = rotation.place(None, Role::Regular);
        assert_eq!(rotation.take(place, 0, 3), Ok(()));
        assert_eq!(rotation.take(place, 0, 1), Err(3));
        assert_eq!(rotation.take_any(place), 3);
        assert_eq!(rotation.turn(place), 4);
    }
}
