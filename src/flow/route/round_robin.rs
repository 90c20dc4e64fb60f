//! Round robin: the members in turn, all lanes together, one position a (model, role).
//!
//! Takes a field, gives a guard on the next open member. A turn that finds closed members takes their turns too, so
//! the one behind them does not serve twice. Never gives one turn to two requests.

use super::Field;
use crate::limits::RESERVE_TRIES;
use crate::shared::load::LoadGuard;

pub(super) fn choose(field: &mut Field) -> Option<LoadGuard> {
    loop {
        let at = turn(field)?;
        if let Some(guard) = field.reserve_of([at]) {
            return Some(guard);
        }
    }
}

fn turn(field: &Field) -> Option<usize> {
    let members = field.pool.slots.len();
    let (rotation, place) = (&field.till.shared.rotation, field.reading.place);
    let next = |turn: u64| {
        let from = (turn % members.max(1) as u64) as usize;
        (from..members).chain(0..from).enumerate().find(|&(_, at)| field.open(at))
    };
    let mut turn = rotation.turn(place);
    for _ in 0..RESERVE_TRIES {
        let (skipped, at) = next(turn)?;
        match rotation.take(place, turn, turn.wrapping_add(skipped as u64 + 1)) {
            Ok(()) => return Some(at),
            Err(now) => turn = now,
        }
    }
    next(rotation.take_any(place)).map(|(_, at)| at)
}
