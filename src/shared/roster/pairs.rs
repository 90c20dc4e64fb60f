//! Who is paired with whom: prefill workers with the decode workers of their model, group and backend.
//!
//! Takes a snapshot's workers and pools, gives every prefill worker its pool of decode workers, worked out once a
//! publication. Never says who is usable: that stands in [`Vitals`].

use std::collections::HashMap;
use std::sync::Arc;

use super::{Pool, ROLES, Role, Slot, Snapshot, Team, Worker};
use crate::shared::vitals::Vitals;

/// Who is paired with whom. Empty where no worker is one of a pair.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    /// Number of a worker's backend and group, by place in `workers`; [`NO_TEAM`] for regular ones.
    team_of: Box<[u16]>,
    /// By index of a pool of [`Snapshot::pools`] or of everyone.
    mates: Box<[Mates]>,
    /// Decode workers of one backend and group, where those of a model have several.
    pub(super) teams: Box<[Pool]>,
}

const NO_TEAM: u16 = u16::MAX;
const NO_POOL: u32 = u32::MAX;

/// Whom the prefill workers of a pool are paired with, by index of pools.
#[derive(Debug)]
enum Mates {
    /// Nobody, or the pool is none of prefill workers.
    Nobody,
    /// All have one backend and group, as their decode workers do: these.
    All(u32),
    /// By number of the prefill worker's backend and group; [`NO_POOL`] for nobody.
    Team(Box<[u32]>),
}

impl Pairs {
    /// Of a snapshot that is complete but for its pairs.
    pub(super) fn of<'a>(snapshot: &'a Snapshot) -> Pairs {
        let mut numbers: HashMap<Team, u16> = HashMap::new();
        // Most fleets have one, and large ones come in runs.
        let mut last: Option<(Team, u16)> = None;
        let number = |worker: &'a Arc<Worker>| {
            let team = worker.pairing.team();
            match last {
                _ if worker.role == Role::Regular => NO_TEAM,
                Some((known, number)) if known == team => number,
                _ => {
                    let next = numbers.len() as u16;
                    let number = *numbers.entry(team).or_insert(next);
                    last = Some((team, number));
                    number
                }
            }
        };
        let team_of: Box<[u16]> = snapshot.workers.iter().map(number).collect();
        let mut pairs = Pairs { team_of, mates: Box::default(), teams: Box::default() };
        let mut teams = Vec::new();
        let mates = snapshot.pools.iter().chain(&snapshot.everyone).map(|pool| match pool.role {
            Role::Prefill => pairs.mates_of(snapshot, pool, numbers.len(), &mut teams),
            _ => Mates::Nobody,
        });
        let mates = mates.collect();
        (pairs.mates, pairs.teams) = (mates, teams.into());
        pairs
    }

    fn mates_of(&self, snapshot: &Snapshot, prefill: &Pool, numbers: usize, teams: &mut Vec<Pool>) -> Mates {
        let decode = match &prefill.model {
            Some(model) => snapshot.pool(model.as_bytes(), Role::Decode),
            None => Some(snapshot.everyone_at(Role::Decode)),
        };
        let Some(decode) = decode else { return Mates::Nobody };
        let members = &snapshot.pool_at(decode).slots;
        let place = |slot: Slot| usize::from(snapshot.by_slot[slot as usize]);
        let team = |slot: Slot| self.team_of[place(slot)];
        let Some(&first) = members.first() else { return Mates::Nobody };
        let only = members.iter().all(|&slot| team(slot) == team(first));
        if only && prefill.slots.iter().all(|&slot| team(slot) == team(first)) {
            return Mates::All(decode as u32);
        }
        let mut pools = vec![NO_POOL; numbers];
        if only {
            pools[usize::from(team(first))] = decode as u32;
            return Mates::Team(pools.into());
        }
        let mut sorted: Vec<Slot> = members.to_vec();
        // Stable: members of a pool stand in slot order.
        sorted.sort_by_key(|&slot| team(slot));
        for mates in sorted.chunk_by(|&a, &b| team(a) == team(b)) {
            pools[usize::from(team(mates[0]))] = (snapshot.pools.len() + ROLES.len() + teams.len()) as u32;
            let workers = mates.iter().map(|&slot| &*snapshot.workers[place(slot)]);
            let (backend, group) = snapshot.workers[place(mates[0])].pairing.team();
            let mut pool = Pool::of(prefill.model.as_deref(), Role::Decode, workers);
            pool.team = Some((backend, group.into()));
            teams.push(pool);
        }
        Mates::Team(pools.into())
    }
}

impl Snapshot {
    /// Index of the prefill workers of a model (`None`: of all), if the model has any prefill or decode worker: then
    /// pairs serve it. The pool may be empty.
    #[inline]
    pub fn pairs(&self, model: Option<&[u8]>) -> Option<usize> {
        match model {
            Some(model) => self.pool(model, Role::Prefill),
            None => {
                let paired = self.everyone(Role::Prefill).is_peopled() || self.everyone(Role::Decode).is_peopled();
                paired.then(|| self.everyone_at(Role::Prefill))
            }
        }
    }

    /// Index of the decode workers that a prefill worker, chosen from a pool of prefill workers, can be paired with:
    /// they serve what the pool serves and share group and backend with it. `None`: there are none.
    #[inline]
    pub fn mates(&self, prefill_pool: usize, slot: Slot, era: u32) -> Option<usize> {
        let place = usize::from(*self.by_slot.get(slot as usize)?);
        self.workers.get(place).filter(|worker| worker.era == era)?;
        match self.pairs.mates.get(prefill_pool)? {
            Mates::Nobody => None,
            Mates::All(pool) => Some(*pool as usize),
            Mates::Team(pools) => {
                let pool = *pools.get(usize::from(*self.pairs.team_of.get(place)?))?;
                (pool != NO_POOL).then_some(pool as usize)
            }
        }
    }

    /// Index of the pool for requests that any worker can answer: all regular workers, or all prefill workers where
    /// the roster has no regular one.
    #[inline]
    pub fn anyone_at(&self) -> usize {
        let alone = !self.everyone(Role::Regular).is_peopled() && self.everyone(Role::Prefill).is_peopled();
        self.everyone_at(if alone { Role::Prefill } else { Role::Regular })
    }

    /// What a pool of prefill workers lacks to serve a request with a usable pair; `None`: nothing.
    pub fn lacks(&self, prefill_pool: usize, vitals: &Vitals) -> Option<&'static str> {
        let pool = self.pool_at(prefill_pool);
        let has_usable = |pool: &Pool| pool.slots.iter().any(|&slot| vitals.usable(slot));
        let mut seen = Vec::new();
        let mut prefills = false;
        for (&slot, &era) in pool.slots.iter().zip(&pool.eras).filter(|(slot, _)| vitals.usable(**slot)) {
            prefills = true;
            let Some(mates) = self.mates(prefill_pool, slot, era) else { continue };
            if seen.contains(&mates) {
                continue;
            }
            if has_usable(self.pool_at(mates)) {
                return None;
            }
            seen.push(mates);
        }
        let decode = match &pool.model {
            Some(model) => self.pool(model.as_bytes(), Role::Decode),
            None => Some(self.everyone_at(Role::Decode)),
        };
        Some(match (prefills, decode.is_some_and(|at| has_usable(self.pool_at(at)))) {
            (false, false) => "no prefill worker and no decode worker is usable",
            (false, true) => "no prefill worker is usable",
            (true, false) => "no decode worker is usable",
            (true, true) => "no usable prefill worker shares group and backend with a usable decode worker",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Backend, Pairing};
    use super::*;
    use crate::shared::Shared;
    use crate::shared::vitals::Health;

    fn worker(slot: Slot, role: Role, models: &[&str], backend: Backend, group: &str) -> Arc<Worker> {
        Arc::new(Worker {
            slot,
            era: 1,
            role,
            url: format!("http://10.0.0.1:{slot}").into(),
            prefix: "".into(),
            addrs: [([10, 0, 0, 1], 80).into()].into(),
            api_key: None,
            models: models.iter().map(|&m| m.into()).collect(),
            server_info: None,
            pairing: Pairing { backend, group: group.into(), ..Pairing::default() },
        })
    }

    /// Slots of the decode workers that a prefill worker of a pool gets.
    fn mates(snapshot: &Snapshot, pool: usize, slot: Slot) -> Option<Vec<Slot>> {
        snapshot.mates(pool, slot, 1).map(|at| snapshot.pool_at(at).slots.to_vec())
    }

    use Backend::{Sglang, VllmMooncake, VllmNixl};
    use Role::{Decode, Prefill, Regular};

    #[test]
    fn one_team_takes_no_pools_of_its_own() {
        let snapshot = Snapshot::new(
            1,
            vec![
                worker(0, Prefill, &["a"], Sglang, "g"),
                worker(1, Decode, &["a", "b"], Sglang, "g"),
                worker(2, Decode, &["a"], Sglang, "g"),
                worker(3, Regular, &["a", "c"], Sglang, ""),
            ],
        );
        let a = snapshot.pairs(Some(b"a")).unwrap();
        assert_eq!(snapshot.mates(a, 0, 1), snapshot.pool(b"a", Decode));
        assert_eq!((snapshot.mates(a, 0, 2), snapshot.mates(a, 9, 1)), (None, None), "gone");
        let all = snapshot.pairs(None).unwrap();
        assert_eq!(mates(&snapshot, all, 0), Some(vec![1, 2]));
        assert_eq!(snapshot.all_pools().count(), snapshot.pools.len() + ROLES.len());
        let b = snapshot.pairs(Some(b"b")).expect("b has a decode worker");
        assert!(!snapshot.pool_at(b).is_peopled() && snapshot.pool_at(b).role == Prefill);
        assert_eq!((snapshot.pairs(Some(b"c")), snapshot.pairs(Some(b"d"))), (None, None));
    }

    #[test]
    fn mates_share_model_group_and_backend() {
        let snapshot = Snapshot::new(
            1,
            vec![
                worker(0, Prefill, &["a"], Sglang, "x"),
                worker(1, Prefill, &["a"], Sglang, "y"),
                worker(2, Prefill, &["a"], VllmNixl, "x"),
                worker(3, Prefill, &["b"], VllmMooncake, "x"),
                worker(4, Decode, &["a"], Sglang, "y"),
                worker(5, Decode, &["a", "b"], Sglang, "x"),
                worker(6, Decode, &["a"], Sglang, "y"),
                worker(7, Decode, &["b"], VllmNixl, "x"),
            ],
        );
        let [a, b] = [b"a", b"b"].map(|model| snapshot.pairs(Some(model)).unwrap());
        let all = snapshot.pairs(None).unwrap();
        for (pool, slot, decode) in [
            (a, 0, Some(vec![5])),
            (a, 1, Some(vec![4, 6])),
            (a, 2, None),
            (b, 3, None),
            (all, 0, Some(vec![5])),
            (all, 1, Some(vec![4, 6])),
            (all, 2, Some(vec![7])),
            (all, 3, None),
        ] {
            assert_eq!(mates(&snapshot, pool, slot), decode, "slot {slot}");
        }
        let pool = snapshot.pool_at(snapshot.mates(a, 1, 1).unwrap());
        assert_eq!((pool.model.as_deref(), pool.role, &pool.team), (Some("a"), Decode, &Some((Sglang, "y".into()))));
        assert_eq!(snapshot.all_pools().count(), snapshot.pools.len() + ROLES.len() + 2 + 2 + 3);
        for (index, pool) in snapshot.all_pools().enumerate() {
            assert!(std::ptr::eq(pool, snapshot.pool_at(index)));
        }
    }

    #[test]
    fn a_lone_team_of_decode_workers_is_no_mate_of_strangers() {
        let snapshot = Snapshot::new(
            1,
            vec![
                worker(0, Prefill, &["a"], Sglang, "x"),
                worker(1, Prefill, &["a"], Sglang, "y"),
                worker(2, Decode, &["a"], Sglang, "y"),
            ],
        );
        let a = snapshot.pairs(Some(b"a")).unwrap();
        assert_eq!((mates(&snapshot, a, 0), mates(&snapshot, a, 1)), (None, Some(vec![2])));
        assert_eq!(snapshot.all_pools().count(), snapshot.pools.len() + ROLES.len());
    }

    #[test]
    fn anyone_is_a_regular_worker_or_a_prefill_worker() {
        let pool = |roles: &[Role]| {
            let workers = roles.iter().enumerate().map(|(slot, role)| worker(slot as Slot, *role, &[], Sglang, ""));
            let snapshot = Snapshot::new(1, workers.collect());
            let pool = snapshot.pool_at(snapshot.anyone_at());
            (pool.role, pool.slots.to_vec())
        };
        assert_eq!(pool(&[]), (Regular, vec![]));
        assert_eq!(pool(&[Decode, Prefill, Prefill]), (Prefill, vec![1, 2]));
        assert_eq!(pool(&[Decode, Prefill, Regular]), (Regular, vec![2]));
    }

    #[test]
    fn what_pairs_lack_is_said() {
        let shared = Shared::leak(1);
        let snapshot = Snapshot::new(
            1,
            vec![
                worker(0, Prefill, &["a"], Sglang, "x"),
                worker(1, Prefill, &["a"], Sglang, "y"),
                worker(2, Decode, &["a"], Sglang, "x"),
                worker(3, Decode, &["a"], Sglang, "y"),
            ],
        );
        let a = snapshot.pairs(Some(b"a")).unwrap();
        for (usable, lacks) in [
            (&[][..], Some("no prefill worker and no decode worker is usable")),
            (&[0], Some("no decode worker is usable")),
            (&[2, 3], Some("no prefill worker is usable")),
            (&[0, 3], Some("no usable prefill worker shares group and backend with a usable decode worker")),
            (&[0, 1, 3], None),
        ] {
            for slot in 0..4 {
                let health = if usable.contains(&slot) { Health::Ready } else { Health::Unhealthy };
                shared.vitals.set_health(slot, health);
            }
            assert_eq!(snapshot.lacks(a, &shared.vitals), lacks, "{usable:?}");
            assert_eq!(snapshot.lacks(snapshot.pairs(None).unwrap(), &shared.vitals), lacks, "{usable:?}");
        }
    }
}
