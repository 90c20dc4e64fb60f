//! Random: one member, each open one with the same chance.
//!
//! Takes a field, gives a guard on a drawn member. Never looks at the load, but charges it like everybody.

use super::Field;
use crate::shared::load::LoadGuard;

pub(super) fn choose(field: &mut Field) -> Option<LoadGuard> {
    // Who closes between the draw and the reservation is not drawn again.
    loop {
        let drawn = field.draw(None)?;
        if let Some(guard) = field.reserve_of([drawn]) {
            return Some(guard);
        }
    }
}
