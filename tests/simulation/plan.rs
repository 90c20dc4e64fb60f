//! What a seed decides before anything happens: configuration, fleet, who asks what and who misbehaves how.
//!
//! Takes a world's dice, gives a plan. Never decides what happens on the way: that is decided when it happens.

use std::time::Duration;

use corelane::config::{
    Assignment, Backend, BalanceMode, Breaker, ClientLeaves, Config, ExtraRoute, HalfClose, Policy, Relay, Retry,
    Secret,
};

use crate::client::UPLOAD;
use crate::net::Manners;
use crate::world::World;

/// Which kind of fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fleet {
    Regular,
    Pairs(Backend),
}

/// How much goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    /// Nothing does.
    Calm,
    /// Now and then something does.
    Mixed,
    /// Most of it does.
    Wild,
    /// Workers refuse with statuses that are tried elsewhere.
    Storm,
}

/// All that is fixed from the start.
pub struct Plan {
    pub fleet: Fleet,
    pub mood: Mood,
    pub config: Config,
    pub workers: usize,
    pub clients: usize,
    /// When the process drains, and how long after that it ends.
    pub drain: Option<(u64, u64)>,
    pub lanes: usize,
    /// Once in so many connections there is no room for it.
    pub turned_away: u64,
    pub no_pipe: u64,
    /// Whether the roster and the health of workers change.
    pub moves: bool,
    /// Most requests have a body that nobody looks into, and that follows.
    pub uploads: bool,
}

/// What clients show where keys are asked for.
pub const KEY: &str = "open sesame";
/// No seed's answers are longer.
pub const MOST_BODY: u64 = 200_000;

fn ms(world: &World, from: u64, to: u64) -> Duration {
    Duration::from_millis(world.roll(from, to))
}

impl Plan {
    pub fn new(world: &World, fleet: Fleet) -> Plan {
        let mood = world.one(&[Mood::Calm, Mood::Mixed, Mood::Mixed, Mood::Wild, Mood::Wild, Mood::Storm]);
        let calm = mood == Mood::Calm;
        let drains = world.once_in(3);
        let drain_at = world.roll(0, world.one(&[300_000, 3_000_000]));
        let mut config = config(world, calm);
        let storm = mood == Mood::Storm;
        if storm && world.once_in(2) {
            // Enough of it to spend all that there is to spend.
            config.max_attempts = 5;
            config.retry.statuses = vec![500, 503];
            config.keep_alive = Duration::from_secs(60);
            config.max_concurrent_requests = 0;
            config.max_requests_per_worker = 0;
        }
        let uploads = world.once_in(4);
        if uploads {
            config.relay = Relay::Splice;
        }
        Plan {
            uploads,
            fleet,
            mood,
            workers: world.roll(1, 5) as usize,
            clients: if storm { world.roll(3, 9) } else { world.roll(1, 6) } as usize,
            lanes: if storm { 1 } else { world.one(&[1, 1, 2, 3]) },
            drain: drains.then(|| (drain_at, world.roll(0, world.one(&[1_000, 100_000, 3_000_000])))),
            turned_away: if calm { 0 } else { world.one(&[0, 0, 10]) },
            no_pipe: world.one(&[0, 2, 5, 1]),
            moves: !calm && world.once_in(4),
            config,
        }
    }

    /// Once in how many times something goes wrong.
    pub fn fault(&self) -> u64 {
        match self.mood {
            Mood::Calm => 0,
            Mood::Storm => 50,
            Mood::Mixed => 10,
            Mood::Wild => 3,
        }
    }
}

/// Every timeout is set, so that nothing may last for ever.
fn config(world: &World, calm: bool) -> Config {
    let mut config = Config::with_workers(vec![]);
    config.policy = world.one(Policy::ALL);
    config.prefill_policy = world.once_in(2).then(|| world.one(Policy::ALL));
    config.decode_policy = world.once_in(2).then(|| world.one(Policy::ALL));
    config.relay = world.one(Relay::ALL);
    config.extra_routes = vec![ExtraRoute { path: UPLOAD.into(), methods: vec!["POST".into()] }];
    config.pipes_per_lane = world.one(&[0, 1, 2, 64]);
    config.pipe_bytes = world.one(&[65_536, 8_192, 1_048_576]);
    config.half_close = world.one(HalfClose::ALL);
    config.sglang_client_leaves = world.one(ClientLeaves::ALL);
    config.vllm_client_leaves = world.one(ClientLeaves::ALL);
    config.head_timeout = ms(world, 1000, 3000);
    config.body_timeout = ms(world, 1000, 3000);
    config.keep_alive = ms(world, 1000, 6000);
    config.request_timeout = ms(world, 3000, 8000);
    config.connect_timeout = ms(world, 200, 1000);
    config.write_stall_timeout = ms(world, 1000, 2500);
    let limit = |from, to| if world.once_in(4) { Duration::ZERO } else { ms(world, from, to) };
    config.stall_timeout = if world.once_in(2) { Duration::ZERO } else { ms(world, 500, 2000) };
    config.first_byte_timeout = limit(400, 3000);
    config.prefill_first_byte_timeout = limit(400, 3000);
    config.decode_first_byte_timeout = limit(400, 3000);
    config.pool_idle = ms(world, 500, 4500);
    config.pool_size = world.roll(0, 6) as usize;
    config.max_attempts = world.roll(1, 6) as u32;
    config.retry = Retry {
        statuses: world.one(&[&[][..], &[503], &[429, 500, 503], &[408, 429, 500, 502, 503, 504]]).to_vec(),
        unanswered: world.once_in(3),
        backoff: ms(world, 1, 60),
        backoff_max: ms(world, 60, 400),
        backoff_factor: 1.5,
        jitter: 0.2,
        budget: world.one(&[0.0, 0.1, 0.5]),
    };
    config.max_payload_bytes = world.one(&[1 << 20, 1 << 20, 30_000]);
    config.body_memory_bytes = world.one(&[1 << 30, 1 << 30, 150_000, 80_000]);
    config.max_head_bytes = world.one(&[config.max_head_bytes, 1_500]);
    if world.once_in(4) {
        config.api_keys = vec![Secret::new(KEY)];
    }
    config.routing.balance_abs = world.one(&[16, 0, 2]);
    config.routing.balance_mode = world.one(BalanceMode::ALL);
    config.routing.assignment = world.one(Assignment::ALL);
    config.routing.panic = world.once_in(4);
    config.breaker = Breaker {
        on: !world.once_in(4),
        failures: world.roll(1, 5) as u8,
        successes: world.roll(1, 4) as u8,
        open_s: world.roll(1, 4) as u32,
        window_s: 10,
    };
    if !calm || world.once_in(2) {
        config.max_concurrent_requests = world.one(&[0, 0, 1, 2, 4]);
        config.queue_size = world.one(&[0, 1, 2, 100]);
        config.queue_timeout = ms(world, 100, 3000);
        config.max_requests_per_worker = world.one(&[0, 0, 1, 2]);
    }
    config
}

/// How a connection behaves.
pub fn manners(world: &World) -> Manners {
    const ROOM: &[usize] = &[262_144, 262_144, 65_536, 16_384, 4_096, 600];
    let tight = world.once_in(8);
    let (send_bytes, recv_bytes) = if tight { (600, 600) } else { (world.one(ROOM), world.one(ROOM)) };
    // A network that is narrow and slow at once would need more time than requests have.
    let narrow = send_bytes.min(recv_bytes) < 16_384;
    Manners { send_bytes, recv_bytes, delay_us: world.one(if narrow { &[0, 50] } else { &[0, 50, 200, 1_000, 5_000] }) }
}
