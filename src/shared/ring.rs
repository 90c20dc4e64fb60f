//! The ring of consistent hashing over a pool's workers.
//!
//! Takes the workers' names, gives for any hash the workers in the order in which they come for it. The same names
//! give the same ring in every process, so gateways beside each other agree. Never allocates after it was made.

use rapidhash::v3::{DEFAULT_RAPID_SECRETS, rapidhash_v3_seeded};

use crate::limits::{MAX_WORKERS, RING_NODES};

/// Points on the circle of 64-bit hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Where the point lies, and which member of the pool it belongs to; sorted.
    points: Box<[(u64, u16)]>,
}

const _: () = assert!(MAX_WORKERS <= u16::MAX as usize);

/// The hash of a worker's name or of a routing key; the same in every process.
pub fn hash(name: &[u8]) -> u64 {
    rapidhash_v3_seeded(name, &DEFAULT_RAPID_SECRETS)
}

impl Ring {
    /// The ring of members with these hashes, in pool order.
    pub fn new(members: &[u64]) -> Self {
        let mut points: Vec<(u64, u16)> = Vec::with_capacity(members.len() * RING_NODES);
        for (at, member) in members.iter().enumerate() {
            points.extend((0..RING_NODES as u64).map(|node| (point(*member, node), at as u16)));
        }
        points.sort_unstable();
        Ring { points: points.into() }
    }

    /// Members in the order in which they come from `hash` on; most come several times. Each point once.
    pub fn from(&self, hash: u64) -> impl Iterator<Item = usize> {
        let (before, after) = self.points.split_at(self.points.partition_point(|point| point.0 < hash));
        after.iter().chain(before).map(|point| usize::from(point.1))
    }
}

fn point(member: u64, node: u64) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&member.to_le_bytes());
    bytes[8..].copy_from_slice(&node.to_le_bytes());
    hash(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(count: usize) -> Vec<u64> {
        (0..count).map(|i| hash(format!("http://w{i}:1").as_bytes())).collect()
    }

    fn first(ring: &Ring, key: u64) -> usize {
        ring.from(hash(&key.to_le_bytes())).next().unwrap()
    }

    #[test]
    fn a_newcomer_takes_its_share_and_nothing_else_moves() {
        let (ten, eleven) = (Ring::new(&members(10)), Ring::new(&members(11)));
        let mut moved = 0;
        for key in 0..10_000 {
            let (before, after) = (first(&ten, key), first(&eleven, key));
            if before != after {
                assert_eq!(after, 10);
                moved += 1;
            }
        }
        assert!((600..1300).contains(&moved), "{moved}");
    }

    #[test]
    fn shares_are_even_within_a_quarter() {
        let ring = Ring::new(&members(8));
        let mut counts = [0; 8];
        (0..16_000).for_each(|key| counts[first(&ring, key)] += 1);
        assert!(counts.iter().all(|count| (1500..2500).contains(count)), "{counts:?}");
    }

    #[test]
    fn everybody_comes_round() {
        let ring = Ring::new(&members(5));
        let mut seen = [false; 5];
        ring.from(u64::MAX).for_each(|at| seen[at] = true);
        assert_eq!((seen, ring.from(3).count()), ([true; 5], 5 * RING_NODES));
        assert_eq!(Ring::new(&[]).from(3).next(), None);
    }
}
