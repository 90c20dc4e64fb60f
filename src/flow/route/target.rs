//! The worker that a request names itself.
//!
//! Takes a name that came with the secret, gives that worker or nobody: whoever names a worker wants no other one.

use super::Field;
use crate::lane::view::{PoolId, View};
use crate::shared::load::LoadGuard;

/// Place in the pool of the worker with this URL, or at this position (digits, from 0).
pub(super) fn find(view: &mut View, id: PoolId, named: &[u8]) -> Option<usize> {
    let digits = named.iter().all(u8::is_ascii_digit).then(|| std::str::from_utf8(named).ok()?.parse::<usize>().ok());
    if let Some(position) = digits.flatten() {
        return Some(position).filter(|&at| at < view.pool(id).0.slots.len());
    }
    let is = |url: &str| url.as_bytes() == named.strip_suffix(b"/").unwrap_or(named);
    // The same URL may have several roles: the pool knows which one is meant.
    let same: [Option<(u16, u32)>; 3] = {
        let mut workers = view.workers().filter(|worker| is(&worker.url)).map(|worker| (worker.slot, worker.era));
        std::array::from_fn(|_| workers.next())
    };
    let pool = view.pool(id).0;
    same.into_iter().flatten().find_map(|(slot, era)| pool.place(slot, era))
}

pub(super) fn choose(field: &mut Field, at: Option<usize>) -> Option<LoadGuard> {
    let at = at.filter(|&at| field.open(at))?;
    field.reserve_of([at])
}
