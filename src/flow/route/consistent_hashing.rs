//! Consistent hashing: one routing key, one worker, as long as that is usable.
//!
//! Takes a field, gives a guard on the first open member clockwise from the key's hash; a worker that comes or goes
//! moves its own keys only. Requests without a key go by least load. Never looks at the load of a key's worker.

use super::{Field, least_load};
use crate::metrics::Tally;
use crate::shared::load::LoadGuard;
use crate::shared::ring;

/// Points that are looked at before the least loaded is taken: so many closed ones in a row mean that few are open.
const MOST_POINTS: usize = 4096;

pub(super) fn choose(field: &mut Field) -> Option<LoadGuard> {
    if field.want.routing_key.is_empty() {
        field.till.tallies.add(Tally::Keyless, 1);
        return least_load::choose(field);
    }
    let hash = ring::hash(field.want.routing_key);
    for at in field.pool.ring().from(hash).take(MOST_POINTS) {
        if field.open(at)
            && let Some(guard) = field.reserve_of([at])
        {
            return Some(guard);
        }
    }
    least_load::choose(field)
}
