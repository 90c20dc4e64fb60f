//! What the prefix trees need besides requests: forgetting.
//!
//! Takes the shared trees, gives them small steps of trimming, more often while memory is short. Never works for longer
//! than a fraction of a millisecond at a time; never decides what a lane sees.

use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::config::Routing;
use crate::shared::Shared;
use crate::shared::prefix::{Kind, TreeKey, Trim, Trimmer};
use crate::shared::roster::{Pool, ROLES, Snapshot};

/// Nodes visited in one step: 25 to 150 µs.
const STEP_NODES: usize = 512;
/// Pauses between steps, while memory is short and while it is not.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
const CALM_PAUSE: Duration = Duration::from_millis(20);

/// Trims for ever. `epoch` is where the lanes' clocks begin, within a second.
pub async fn keep_trimming(shared: &'static Shared, routing: Routing, epoch: Instant) {
    let mut trimmer = Trimmer::new();
    // Insertions make room themselves near the budget; they should find some.
    let until_bytes = shared.prefix.budget() / 8 * 7;
    let interval = Duration::from_secs(routing.eviction_interval_secs.into());
    loop {
        let now = epoch.elapsed().as_secs() as u32;
        let want = Trim { now, until_bytes, ttl_ticks: routing.prefix_ttl_secs, max_steps: STEP_NODES };
        let done = shared.prefix.trim(&mut trimmer, &want);
        let is_short = shared.prefix.bytes() > until_bytes;
        sleep(match () {
            () if done.idle || done.round && !is_short => interval,
            () if is_short => BUSY_PAUSE,
            () => CALM_PAUSE,
        })
        .await;
    }
}

/// Takes down the trees of pools that are not there any more.
pub fn release(shared: &Shared, snapshot: &Snapshot) {
    let everyone = ROLES.map(|role| snapshot.everyone(role));
    let keys =
        |pool: &Pool| [Kind::Text, Kind::Tokens].map(|kind| TreeKey::new(pool.model.as_deref(), pool.role, kind));
    let keep: Vec<TreeKey> = snapshot.pools.iter().chain(everyone).flat_map(keys).collect();
    shared.prefix.release_except(&keep);
}
