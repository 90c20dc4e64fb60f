//! Which pool has which place: where its round-robin position and its like are, one per (model, role) and group of
//! decode workers.
//!
//! Takes the pools of a snapshot that is about to be published, gives each its place; a pool that comes back finds the one
//! that it had. Never gives a place to another pool while one is left that nobody had, nor before every lane has seen
//! that its owner is gone.
//!
//! A pool is known by the 64-bit hash of what it is: two with one hash would share a place (about 1 in 10^12 for 4096
//! pools). Pools for which there is no place share [`OVERFLOW`]: turns are less even there, sticky keys can be taken by
//! another model's requests and are lost when a place is found, and uneven ranks go unnoticed.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::Pool;
use crate::shared::rotation::{OVERFLOW, PLACES};

/// Whose a place is.
#[derive(Debug)]
struct Owned {
    place: usize,
    /// The generation in which its pool had vanished; `None` while it is there.
    gone: Option<u64>,
}

/// The book of places; the writer of the roster keeps it.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// By the hash of a pool. As many places were given away as there are entries.
    known: HashMap<u64, Owned>,
}

impl Places {
    /// Gives the pools of generation `generation` their places. `settled` is the oldest generation that some lane may go
    /// by.
    pub(super) fn assign<'a>(&mut self, pools: impl Iterator<Item = &'a mut Pool>, generation: u64, settled: u64) {
        self.known.values_mut().for_each(|owned| _ = owned.gone.get_or_insert(generation));
        let mut strangers = Vec::new();
        for pool in pools {
            let owner = owner(pool);
            match self.known.get_mut(&owner) {
                Some(owned) => (pool.place, owned.gone) = (owned.place, None),
                None => strangers.push((owner, pool)),
            }
        }
        let wants = self.known.len() + strangers.len() > PLACES;
        let mut free = if wants { self.longest_gone(settled) } else { Vec::new() };
        for (owner, pool) in strangers {
            pool.place = match self.known.len() {
                nth @ ..PLACES => fresh(nth),
                _ => free.pop().and_then(|gone| self.known.remove(&gone)).map_or(OVERFLOW, |owned| owned.place),
            };
            if pool.place != OVERFLOW {
                self.known.insert(owner, Owned { place: pool.place, gone: None });
            }
        }
    }

    /// Owners that every lane knows to be gone; last who is so for the longest time.
    fn longest_gone(&self, settled: u64) -> Vec<u64> {
        let gone =
            |(owner, owned): (&u64, &Owned)| owned.gone.filter(|&gone| gone <= settled).map(|gone| (gone, *owner));
        let mut all: Vec<(u64, u64)> = self.known.iter().filter_map(gone).collect();
        all.sort_unstable_by(|a, b| b.cmp(a));
        all.into_iter().map(|(_, owner)| owner).collect()
    }
}

/// Places that are given away one after the other are so far apart: lanes count at them, and neighbours would share a
/// cache line.
const APART: usize = 64;
const _: () = assert!(APART * APART == PLACES);

/// The place that is given away first, second and so on.
fn fresh(nth: usize) -> usize {
    nth % APART * APART + nth / APART
}

fn owner(pool: &Pool) -> u64 {
    let mut hasher = DefaultHasher::new();
    (&pool.model, pool.role, &pool.team).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::config::{Backend, Role};

    fn pool(model: Option<&str>, role: Role, team: Option<(Backend, &str)>) -> Pool {
        let mut pool = Pool::of(model, role, std::iter::empty());
        pool.team = team.map(|(backend, group)| (backend, group.into()));
        pool
    }

    fn assign(places: &mut Places, pools: &mut [Pool], generation: u64, settled: u64) -> Vec<usize> {
        places.assign(pools.iter_mut(), generation, settled);
        pools.iter().map(|pool| pool.place).collect()
    }

    /// Pools of that many models.
    fn models(names: std::ops::Range<usize>) -> Vec<Pool> {
        names.map(|n| pool(Some(&format!("m{n}")), Role::Regular, None)).collect()
    }

    #[test]
    fn a_pool_keeps_its_place_and_shares_it_with_no_other() {
        let mut pools = [
            pool(None, Role::Regular, None),
            pool(Some(""), Role::Regular, None),
            pool(Some("a"), Role::Regular, None),
            pool(Some("a"), Role::Prefill, None),
            pool(Some("b"), Role::Prefill, None),
            pool(Some("a"), Role::Prefill, Some((Backend::Sglang, "x"))),
            pool(Some("a"), Role::Prefill, Some((Backend::Sglang, "y"))),
            pool(Some("a"), Role::Prefill, Some((Backend::VllmNixl, "x"))),
        ];
        let mut book = Places::default();
        let places = assign(&mut book, &mut pools, 1, 0);
        let all: BTreeSet<usize> = places.iter().copied().collect();
        assert!(all.len() == pools.len() && all.iter().zip(all.iter().skip(1)).all(|(a, b)| b - a >= 8), "{all:?}");
        // Others come, and all but they go and come back in another order.
        assert!(assign(&mut book, &mut models(0..3), 2, 1).iter().all(|place| !all.contains(place)));
        pools.reverse();
        assert!(assign(&mut book, &mut pools, 3, 2).iter().rev().eq(&places));
    }

    #[test]
    fn places_are_given_to_others_when_none_is_left_and_every_lane_has_seen_their_owners_gone() {
        let mut book = Places::default();
        let first = assign(&mut book, &mut models(0..PLACES), 1, 0);
        assert_eq!(first.iter().copied().collect::<BTreeSet<_>>(), (0..PLACES).collect());
        // Of the first four the last two have gone before the others.
        assign(&mut book, &mut [models(0..2), models(4..PLACES)].concat(), 2, 1);
        assign(&mut book, &mut models(4..PLACES), 3, 1);
        let mut with = |more: std::ops::Range<usize>, generation, settled| {
            let given = assign(&mut book, &mut [models(4..PLACES), models(more)].concat(), generation, settled);
            assert_eq!(given[..PLACES - 4], first[4..]);
            given[PLACES - 4..].to_vec()
        };
        let new = PLACES;
        assert_eq!(with(new..new + 1, 4, 1), [OVERFLOW], "a lane may go by the first generation");
        let two = with(new..new + 3, 5, 2);
        assert_eq!((two.iter().filter(|&&place| place == OVERFLOW).count(), two[2]), (1, OVERFLOW));
        assert!(two.contains(&first[2]) && two.contains(&first[3]), "{two:?}");
        // Who has got one keeps it; who had one before is a stranger if it was given away.
        let again = with(new..new + 5, 6, 5);
        assert_eq!(again[..2], two[..2]);
        let given = &again[2..4];
        assert!(given.contains(&first[0]) && given.contains(&first[1]) && again[4] == OVERFLOW, "{again:?}");
    }
}
