//! Bucket: requests of about one length share workers, so that short ones do not wait behind long ones.
//!
//! Takes a field, gives a guard on the least loaded of the group of members that serves the request's length. Groups
//! are runs of members in pool order, at most [`GROUPS`]; the boundaries between them move so that each group gets the
//! same share of the work, as far as length tells (see [`crate::shared::buckets`]). A group whose least loaded member
//! is overloaded, or that has no open one, leaves its requests to the least loaded of all.

use super::{Candidates, Field, close, least_load};
use crate::lane::view::{self, By, CLOSED};
use crate::shared::load::{LoadGuard, Word};

/// Most groups: more would tell lengths apart that cost the same.
const GROUPS: usize = 16;
/// Members of a group that are looked at; of more, a random run of as many.
const MOST_MEMBERS: usize = 64;

pub(super) fn choose(field: &mut Field) -> Option<LoadGuard> {
    let members = field.pool.slots.len();
    let groups = members.min(GROUPS);
    if groups < 2 {
        return least_load::choose(field);
    }
    let chance = field.till.rng.f64();
    let position = field.till.shared.buckets.position(field.reading.place, field.want.length, chance);
    let group = ((position * groups as f64) as usize).min(groups - 1);
    let (mut from, mut to) = (group * members / groups, (group + 1) * members / groups);
    if to - from > MOST_MEMBERS {
        from += field.till.rng.usize(..=to - from - MOST_MEMBERS);
        to = from + MOST_MEMBERS;
    }
    let (slots, eras) = (&field.pool.slots[from..to], &field.pool.eras[from..to]);
    let mut words = [CLOSED; MOST_MEMBERS];
    let words = &mut words[..to - from];
    view::read(slots, field.till.shared, field.till.reach, words);
    close(field.till.avoid, slots, words);
    let least = words.iter().copied().min().filter(|&word| word != CLOSED).map(|word| Word(word).in_flight());
    if least.is_none_or(|least| field.is_overload(least)) {
        return least_load::choose(field);
    }
    let reserved = field.till.reserve(Candidates { slots, eras, words, by: By::Load, start: &mut 0 });
    reserved.or_else(|| least_load::choose(field))
}
