//! Least load: every member is a candidate.
//!
//! Takes a field, gives a guard on the member with the fewest in flight, of equals the one that has processed the
//! least work (or, for a policy that asks so, on the one with the least work of those near the fewest).
//! Never decides by a copy of the words that is older than its bound, nor fails by one that is old at all.

use super::{Field, close};
use crate::lane::view::By;
use crate::shared::load::LoadGuard;

pub(super) fn choose(field: &mut Field) -> Option<LoadGuard> {
    choose_by(field, By::Load)
}

/// The best of all.
pub(super) fn choose_by(field: &mut Field, by: By) -> Option<LoadGuard> {
    let mut fresh = field.reading.freshen(&field.pool.slots, field.till.shared, field.till.reach, field.now_us);
    loop {
        if !field.till.avoid.is_empty() {
            close(field.till.avoid, &field.pool.slots, &mut field.reading.words);
            // Only this request avoids them.
            field.reading.spoilt = true;
        }
        let chosen = field.reserve_of_all(by);
        if chosen.is_some() || fresh {
            return chosen;
        }
        field.reading.spoilt = true;
        fresh = field.reading.freshen(&field.pool.slots, field.till.shared, field.till.reach, field.now_us);
    }
}
