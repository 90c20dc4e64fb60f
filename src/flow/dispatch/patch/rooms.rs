//! Room numbers: by them the two workers of a pair find each other's half of a request.
//!
//! Takes a seed and a lane's number, gives numbers that no two requests share. Never gives 0 (it never completes) or
//! more than 63 bits, never keeps a list, never touches another lane's cache lines.
//!
//! A number is a block of [`GAP`] numbers that belongs to one prompt, and the place in it that the prefill's rank asks
//! for. The block is a permutation of a counter: lane above, the lane's own count below. So two draws of one process
//! can't meet: counters differ between lanes by their upper bits, within a lane until the count wraps (2^46: two decades
//! at 100 000 a second), and a permutation keeps apart what differs, whatever its round function does. It is a Feistel
//! network whose rounds are hashes keyed by the seed, which the operating system made: fast rather than cryptographic,
//! which does for numbers that only workers see. Another process has another permutation, and meets one of 10 000 live
//! rooms once in 10^12 draws.

use std::cell::Cell;

use rapidhash::v3::{RapidSecrets, rapidhash_v3_inline};

use crate::fault::{Fault, What};
use crate::limits::{MAX_LANES, MAX_PAIR_BATCH};
use crate::shared::roster::DpRank;

/// Bits of a number within its block.
const GAP_BITS: u32 = 9;
/// Numbers that one prompt may take: an engine fans a scalar out as room, room + 1, and so on.
const GAP: u64 = 1 << GAP_BITS;
/// Bits of one half of a block's number.
const HALF_BITS: u32 = 27;
const HALF: u64 = (1 << HALF_BITS) - 1;
/// Bits of a lane's count.
const COUNT_BITS: u32 = 46;
/// Counts a lane goes through; the last one stays unused.
const COUNTS: u64 = (1 << COUNT_BITS) - 1;
/// Stands in for the counter whose block is 0. The last count of the last lane, which is never drawn.
const SPARE: u64 = (1 << (2 * HALF_BITS)) - 1;
/// Rounds of the network; four make a permutation that can't be told from a random one, given good rounds.
const ROUNDS: u64 = 6;

const _: () = assert!(2 * HALF_BITS + GAP_BITS == 63);
const _: () = assert!(MAX_LANES << COUNT_BITS == 1 << (2 * HALF_BITS));

/// One lane's source of room numbers.
pub struct Rooms {
    secrets: RapidSecrets,
    lane: u64,
    count: Cell<u64>,
}

/// The rooms of one request, as a place in the lane's sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    first: u64,
    /// Prompts in a batch, 0 for a request that isn't one.
    batch: u32,
}

impl Draw {
    /// Prompts in a batch, 0 for a request that isn't one.
    pub fn batch(self) -> u32 {
        self.batch
    }
}

impl Rooms {
    /// A source for a lane. All lanes of a process have the same `seed`, random and secret, and no lane has two sources.
    pub fn new(seed: u64, lane: usize) -> Self {
        // Turned, so that prompts, which are hashed by the same seed, are hashed by other secrets.
        Rooms { secrets: RapidSecrets::seed(seed.rotate_left(32)), lane: lane as u64, count: Cell::new(0) }
    }

    /// Takes rooms for a request: one for each prompt of a batch, one where `batch` is 0.
    ///
    /// # Errors
    /// [`What::BadField`] for a batch of more than [`MAX_PAIR_BATCH`] prompts.
    pub fn draw(&self, batch: u32) -> Result<Draw, Fault> {
        if batch > MAX_PAIR_BATCH {
            let told = format!("A batch may have at most {MAX_PAIR_BATCH} prompts with prefill/decode.");
            return Err(Fault::with(What::BadField, told));
        }
        let first = self.count.get();
        self.count.set(first + u64::from(batch.max(1)));
        Ok(Draw { first, batch })
    }

    /// The `nth` room of a request, from 0. With the prefill's rank, room mod size is that rank if it can be.
    pub fn room(&self, draw: Draw, nth: u32, prefill: Option<DpRank>) -> u64 {
        let first = self.block((draw.first + u64::from(nth)) % COUNTS) << GAP_BITS;
        let Some(dp) = prefill.filter(|dp| agrees(*dp)) else { return first };
        let size = u64::from(dp.size);
        first + (u64::from(dp.rank) + size - first % size) % size
    }

    fn block(&self, count: u64) -> u64 {
        match self.permute(self.lane << COUNT_BITS | count) {
            0 => self.permute(SPARE),
            block => block,
        }
    }

    fn permute(&self, counter: u64) -> u64 {
        let (mut left, mut right) = (counter >> HALF_BITS & HALF, counter & HALF);
        for round in 0..ROUNDS {
            let key = (round << HALF_BITS | right).to_le_bytes();
            // Protected mode, so that no half cancels the key.
            let mixed = rapidhash_v3_inline::<true, false, true>(&key, &self.secrets);
            (left, right) = (right, left ^ mixed & HALF);
        }
        left << HALF_BITS | right
    }
}

/// Whether rooms can be such that room mod size is the rank.
pub(super) fn agrees(dp: DpRank) -> bool {
    dp.rank < dp.size && u64::from(dp.size) <= GAP
}
