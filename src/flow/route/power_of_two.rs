//! Power of two choices: two different members, drawn at random, and the less loaded of them.
//!
//! Takes a field, gives a guard on the one with the lesser word. Never compares a member with itself unless it is
//! the only open one. (Mitzenmacher, "The power of two choices in randomized load balancing", 2001.)

use super::Field;
use crate::shared::load::LoadGuard;

pub(super) fn choose(field: &mut Field) -> Option<LoadGuard> {
    loop {
        let one = field.draw(None)?;
        let guard = match field.draw(Some(one)) {
            // In pool order, so that of equals the lower index wins, as everywhere.
            Some(other) => field.reserve_of([one.min(other), one.max(other)]),
            None => field.reserve_of([one]),
        };
        if guard.is_some() {
            return guard;
        }
    }
}
