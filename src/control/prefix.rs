//! What the prefix trees need besides requests: forgetting.
//!
//! Takes the shared trees, gives them small steps of trimming, more often while memory is short. Never works for longer
//! than a fraction of a millisecond at a time; never decides what a lane sees.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::sleep;

use crate::config::Config;
use crate::shared::Shared;
use crate::shared::prefix::{Kind, TreeKey, Trim, Trimmer};
use crate::shared::roster::{Pool, ROLES, Slot, Snapshot};

/// Nodes visited in one step: 25 to 150 µs.
const STEP_NODES: usize = 512;
/// Pauses between steps, while memory is short and while it is not.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
const CALM_PAUSE: Duration = Duration::from_millis(20);

/// Trims for as long as there is a configuration to do it by. `epoch` is where the lanes' clocks begin, within a second.
pub async fn keep_trimming(shared: &'static Shared, mut config: watch::Receiver<Arc<Config>>, epoch: Instant) {
    let mut trimmer = Trimmer::new();
    // Insertions make room themselves near the budget; they should find some.
    let until_bytes = shared.prefix.budget() / 8 * 7;
    loop {
        let routing = config.borrow_and_update().routing;
        let interval = Duration::from_secs(routing.eviction_interval_secs.into());
        let now = epoch.elapsed().as_secs() as u32;
        let want = Trim { now, until_bytes, ttl_ticks: routing.prefix_ttl_secs, max_steps: STEP_NODES };
        let done = shared.prefix.trim(&mut trimmer, &want);
        let is_short = shared.prefix.bytes() > until_bytes;
        let pause = match () {
            () if done.idle || done.round && !is_short => interval,
            () if is_short => BUSY_PAUSE,
            () => CALM_PAUSE,
        };
        tokio::select! {
            () = sleep(pause) => {}
            changed = config.changed() => if changed.is_err() { return },
        }
    }
}

/// Takes down the trees of pools that are not there any more.
pub fn release(shared: &Shared, snapshot: &Snapshot) {
    keep(shared, snapshot, |_| true);
}

/// Takes down the trees of pools that one of these slots is in. Lanes find nothing there, and insert nothing, until they
/// adopt the next roster.
pub fn forget(shared: &Shared, snapshot: &Snapshot, slots: &[Slot]) {
    keep(shared, snapshot, |pool| !pool.slots.iter().any(|slot| slots.contains(slot)));
}

fn keep(shared: &Shared, snapshot: &Snapshot, is_kept: impl Fn(&Pool) -> bool) {
    let everyone = ROLES.map(|role| snapshot.everyone(role));
    let keys =
        |pool: &Pool| [Kind::Text, Kind::Tokens].map(|kind| TreeKey::new(pool.model.as_deref(), pool.role, kind));
    let pools = snapshot.pools.iter().chain(everyone).filter(|pool| is_kept(pool));
    let keep: Vec<TreeKey> = pools.flat_map(keys).collect();
    shared.prefix.release_except(&keep);
}
