//! Prefix hash: consistent hashing on the head of the prompt, with bounded loads.
//!
//! Takes a field, gives a guard on the first member, clockwise from the hash of the prompt's first 1024 bytes, that
//! has not yet [`FACTOR`] times its share of what is in flight. Keeps no memory of prompts, so it costs none, and
//! gateways beside each other agree. A prompt without a whole block goes by least load, and every one does
//! while the engines' KV caches are used too unevenly.
//! (Mirrokni, Thorup, Zadimoghaddam, "Consistent hashing with bounded loads", 2018.)

use super::{Field, least_load};
use crate::limits::HEAD_SYMBOLS;
use crate::metrics::Tally;
use crate::shared::load::LoadGuard;

/// How far above the mean a member may go (the peers' default).
const FACTOR: f64 = 1.25;
/// Points that are looked at before the least loaded is taken.
const MOST_POINTS: usize = 1024;

pub(super) fn choose(field: &mut Field) -> Option<LoadGuard> {
    let symbols = field.want.symbols;
    if symbols.is_empty() {
        field.till.tallies.add(Tally::Keyless, 1);
        return least_load::choose(field);
    }
    if field.is_uneven() {
        return least_load::choose(field);
    }
    let head = &symbols[..symbols.len().min(HEAD_SYMBOLS)];
    // Symbols are hashes; an odd factor and a turn keep their order in the sum.
    let hash = head.iter().fold(0, |hash: u64, symbol| (hash ^ symbol).wrapping_mul(ODD).rotate_left(29));
    let totals = field.reading.totals(&field.pool.slots, field.till.shared, field.till.reach, field.now_us);
    let bound = FACTOR * (totals.in_flight + 1) as f64 / f64::from(totals.open.max(1));
    for at in field.pool.ring().from(hash).take(MOST_POINTS) {
        if field.weight(at).is_some_and(|load| f64::from(load + 1) <= bound.ceil())
            && let Some(guard) = field.reserve_of([at])
        {
            return Some(guard);
        }
    }
    least_load::choose(field)
}

/// 2^64 divided by the golden ratio.
const ODD: u64 = 0x9E37_79B9_7F4A_7C15;
