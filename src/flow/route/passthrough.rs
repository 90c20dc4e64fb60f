//! Passthrough: the gateway adds nothing of its own.
//!
//! Takes a field, gives a guard on the only member; of several on the next in turn. Never looks at load or prompt.

use super::{Field, round_robin};
use crate::shared::load::LoadGuard;

pub(super) fn choose(field: &mut Field) -> Option<LoadGuard> {
    if field.pool.slots.len() == 1 && field.open(0) { field.reserve_of([0]) } else { round_robin::choose(field) }
}
