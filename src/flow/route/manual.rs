//! Manual: a routing key stays with the worker that got it first, until it was idle for too long.
//!
//! Takes a field, gives a guard on the key's worker. A key that nobody has, or whose worker is not open, is assigned:
//! to anybody, to the least loaded, or to who has the fewest keys. Requests without a key go by least load. Never
//! gives one key to two workers, however many lanes ask at once.

use super::{Field, close, least_load, random};
use crate::config::Assignment;
use crate::lane::view::{By, CLOSED};
use crate::limits::RESERVE_TRIES;
use crate::metrics::Tally;
use crate::shared::load::LoadGuard;
use crate::shared::ring;
use crate::shared::sticky::Tenant;

pub(super) fn choose(field: &mut Field) -> Option<LoadGuard> {
    if field.want.routing_key.is_empty() {
        field.till.tallies.add(Tally::Keyless, 1);
        return least_load::choose(field);
    }
    let (sticky, now, idle) = (&field.till.shared.sticky, field.now_s(), field.want.routing.manual_idle_secs);
    // One key may be used with several models.
    let key = ring::hash(field.want.routing_key) ^ (field.reading.place as u64).rotate_left(48);
    let mut known = sticky.find(key, now, idle);
    for _ in 0..RESERVE_TRIES {
        if let Some(guard) = known.and_then(|tenant| reserve(field, tenant)) {
            return Some(guard);
        }
        let guard = assign(field)?;
        match sticky.assign(key, known, (guard.slot(), guard.era()), now, idle) {
            Ok(()) => return Some(guard),
            // Another lane was faster: its choice counts.
            Err(theirs) => known = Some(theirs),
        }
    }
    least_load::choose(field)
}

fn reserve(field: &mut Field, (slot, era): Tenant) -> Option<LoadGuard> {
    let at = field.pool.place(slot, era).filter(|&at| field.open(at))?;
    field.reserve_of([at])
}

fn assign(field: &mut Field) -> Option<LoadGuard> {
    match field.want.routing.assignment {
        Assignment::Random => random::choose(field),
        Assignment::MinLoad => least_load::choose(field),
        Assignment::MinGroup => smallest_group(field),
    }
}

/// The least loaded of those who have the fewest keys.
fn smallest_group(field: &mut Field) -> Option<LoadGuard> {
    let (slots, sticky) = (&field.pool.slots, &field.till.shared.sticky);
    field.reading.spoilt = true;
    field.reading.freshen(slots, field.till.shared, field.till.reach, field.now_us);
    // The copy serves this assignment only.
    field.reading.spoilt = true;
    let words = &mut field.reading.words;
    close(field.till.avoid, slots, words);
    let open = || slots.iter().enumerate();
    let fewest = open().filter(|&(at, _)| words[at] != CLOSED).map(|(_, &slot)| sticky.group(slot)).min()?;
    for (at, &slot) in open() {
        if sticky.group(slot) > fewest {
            words[at] = CLOSED;
        }
    }
    field.reserve_of_all(By::Load).or_else(|| least_load::choose(field))
}
