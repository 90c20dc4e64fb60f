//! How long requests are, for the policy that sorts them by length: one histogram a (model, role).
//!
//! Takes lengths from every lane, gives the share of all work that shorter requests make up. Never decides who serves
//! what. Old requests count less and less: sums are halved every [`HALVING`] requests. Halving races with adding, and
//! may lose some of it: the boundaries are estimates anyway.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::rotation::OVERFLOW;

/// Bins an octave of length: boundaries are exact within a fifth, and evened out within a bin.
const BINS_AN_OCTAVE: u32 = 4;
/// Lengths from 2^32 on are one.
const BINS: usize = 32 * BINS_AN_OCTAVE as usize;
/// Requests between two halvings.
const HALVING: u64 = 4096;

struct Histogram {
    /// Bytes of all requests of a bin: the work that they are.
    bins: [AtomicU64; BINS],
    requests: AtomicU64,
}

/// Histograms by place (see [`super::roster::Pool::place`]), made at the first use of each. What the pool that had a place
/// before has left there fades as old requests do.
pub struct Buckets {
    places: Box<[OnceLock<Box<Histogram>>]>,
}

impl Buckets {
    /// Nothing known.
    pub fn new() -> Self {
        Buckets { places: (0..=OVERFLOW).map(|_| OnceLock::new()).collect() }
    }

    /// Counts a request and gives where it stands, from 0 to below 1: the share of the work that shorter requests make
    /// up. Requests of about the same length are told apart by `chance`, a number from 0 to below 1, so that they
    /// take up the space that is theirs.
    pub fn position(&self, place: usize, length: usize, chance: f64) -> f64 {
        let make = || Box::new(Histogram { bins: [const { AtomicU64::new(0) }; BINS], requests: AtomicU64::new(0) });
        let histogram = self.places[place].get_or_init(make);
        let bin = bin(length);
        // Relaxed, all of them: sums of numbers that guard nothing.
        histogram.bins[bin].fetch_add(length.max(1) as u64, Ordering::Relaxed);
        if histogram.requests.fetch_add(1, Ordering::Relaxed) % HALVING == HALVING - 1 {
            for bin in &histogram.bins {
                bin.fetch_sub(bin.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
            }
        }
        let work = |bins: &[AtomicU64]| bins.iter().map(|bin| bin.load(Ordering::Relaxed)).sum::<u64>() as f64;
        let (shorter, rest) = histogram.bins.split_at(bin);
        let (shorter, same, longer) = (work(shorter), work(&rest[..1]), work(&rest[1..]));
        let all = shorter + same + longer;
        if all > 0.0 { ((shorter + chance * same) / all).clamp(0.0, 1.0 - f64::EPSILON) } else { 0.0 }
    }
}

impl Default for Buckets {
    fn default() -> Self {
        Self::new()
    }
}

fn bin(length: usize) -> usize {
    let length = length.clamp(1, u32::MAX as usize) as u32;
    let octave = length.ilog2();
    let quarter = (u64::from(length) << 2 >> octave & 3) as u32;
    (octave * BINS_AN_OCTAVE + quarter) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_grow_with_length() {
        assert_eq!((bin(0), bin(1), bin(2), bin(3)), (0, 0, 4, 6));
        assert_eq!([1024, 1279, 1280, 1536, 1792, 2048].map(bin), [40, 40, 41, 42, 43, 44]);
        assert_eq!(bin(usize::MAX), BINS - 1);
    }

    #[test]
    fn positions_are_shares_of_the_work() {
        let buckets = Buckets::new();
        for _ in 0..100 {
            buckets.position(0, 1000, 0.5);
            buckets.position(0, 3000, 0.5);
        }
        assert!((buckets.position(0, 1000, 0.0)).abs() < 0.01);
        assert!((buckets.position(0, 1000, 0.999) - 0.25).abs() < 0.01);
        assert!((buckets.position(0, 3000, 0.5) - 0.625).abs() < 0.01);
        assert!(buckets.position(0, 1 << 20, 1.0) < 1.0);
        assert_eq!(buckets.position(1, 500, 0.5), 0.5, "another pool");
    }

    #[test]
    fn what_is_long_ago_is_forgotten() {
        let buckets = Buckets::new();
        for _ in 0..HALVING {
            buckets.position(0, 100_000, 0.5);
        }
        for _ in 0..20 * HALVING {
            buckets.position(0, 100, 0.5);
        }
        assert!(buckets.position(0, 100, 1.0) > 0.99);
    }
}
