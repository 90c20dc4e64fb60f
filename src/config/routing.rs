//! What the user may set about the choice of workers, as one plain value that decisions take.
//!
//! Takes nothing, gives names and types. Defaults stand in the option table.

/// How a worker is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    CacheAware,
    LeastLoad,
    PowerOfTwo,
    Random,
    RoundRobin,
    PrefixHash,
    ConsistentHashing,
    Manual,
    Bucket,
    Passthrough,
}

impl Policy {
    /// All policies, in the order of [`Policy::NAMES`].
    pub const ALL: &'static [Policy] = &[
        Policy::CacheAware,
        Policy::LeastLoad,
        Policy::PowerOfTwo,
        Policy::Random,
        Policy::RoundRobin,
        Policy::PrefixHash,
        Policy::ConsistentHashing,
        Policy::Manual,
        Policy::Bucket,
        Policy::Passthrough,
    ];
    /// Their names in the configuration.
    pub const NAMES: &'static [&'static str] = &[
        "cache_aware",
        "least_load",
        "power_of_two",
        "random",
        "round_robin",
        "prefix_hash",
        "consistent_hashing",
        "manual",
        "bucket",
        "passthrough",
    ];

    /// Name in the configuration, in labels and in logs.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// Whether decisions look at the prompt's key.
    pub const fn wants_key(self) -> bool {
        matches!(self, Policy::CacheAware | Policy::PrefixHash)
    }

    /// Whether decisions look at a ring of the pool's workers.
    pub const fn wants_ring(self) -> bool {
        matches!(self, Policy::ConsistentHashing | Policy::PrefixHash)
    }
}

/// When cache-aware routing gives affinity up for balance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BalanceMode {
    /// For an owner that has more in flight than the fleet's mean by both thresholds: that owner is passed over.
    Worker,
    /// For everybody, while the most and the least loaded worker differ by both thresholds: the peers' classic rule.
    Fleet,
}

impl BalanceMode {
    /// Both, in the order of [`BalanceMode::NAMES`].
    pub const ALL: &'static [BalanceMode] = &[BalanceMode::Worker, BalanceMode::Fleet];
    /// Their names in the configuration.
    pub const NAMES: &'static [&'static str] = &["worker", "fleet"];
}

/// Who gets a routing key that nobody has, in the manual policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Assignment {
    /// Anybody usable.
    Random,
    /// The least loaded.
    MinLoad,
    /// Who has the fewest keys.
    MinGroup,
}

impl Assignment {
    /// All of them, in the order of [`Assignment::NAMES`].
    pub const ALL: &'static [Assignment] = &[Assignment::Random, Assignment::MinLoad, Assignment::MinGroup];
    /// Their names in the configuration.
    pub const NAMES: &'static [&'static str] = &["random", "min_load", "min_group"];
}

/// A secret that shows itself to nobody.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Box<[u8]>);

impl Secret {
    /// Of these bytes.
    pub fn new(text: &str) -> Self {
        Secret(text.as_bytes().into())
    }

    /// Whether somebody knows it; takes as long whatever they give.
    pub fn is(&self, given: &[u8]) -> bool {
        let differ = self.0.iter().zip(given.iter().chain(std::iter::repeat(&0))).fold(0, |all, (a, b)| all | (a ^ b));
        std::hint::black_box(differ) == 0 && given.len() == self.0.len()
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(hidden)")
    }
}

/// The numbers by which workers are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Share of a prompt's blocks that an owner must have to be preferred.
    pub cache_threshold: f64,
    /// Requests by which a load must exceed what it is compared with.
    pub balance_abs: u32,
    /// Factor by which it must do so, too.
    pub balance_rel: f64,
    pub balance_mode: BalanceMode,
    /// Affinity is dropped while the used parts of the KV caches of a pool's engines differ by more; 1: never.
    pub balance_token_usage: f64,
    /// An engine of whose KV cache more is used is left out while another one is below; 1: never.
    pub overload_token_usage: f64,
    /// So is one in which so many requests wait; 0: never.
    pub max_worker_waiting: u32,
    /// Bytes of a prompt that count for its key.
    pub prefix_max_bytes: usize,
    /// Bytes for the prefix trees of the process.
    pub prefix_memory_bytes: u64,
    /// Entries that were not used for longer are forgotten; 0: never.
    pub prefix_ttl_secs: u32,
    /// Pause between two looks at whether the trees have to be trimmed.
    pub eviction_interval_secs: u32,
    pub assignment: Assignment,
    /// A routing key that was not used for longer may get another worker.
    pub manual_idle_secs: u32,
    /// Where nobody is usable, the least bad member is tried.
    pub panic: bool,
}

impl Routing {
    /// Nothing set.
    pub(super) const BLANK: Routing = Routing {
        cache_threshold: 0.0,
        balance_abs: 0,
        balance_rel: 0.0,
        balance_mode: BalanceMode::Worker,
        balance_token_usage: 0.0,
        overload_token_usage: 0.0,
        max_worker_waiting: 0,
        prefix_max_bytes: 0,
        prefix_memory_bytes: 0,
        prefix_ttl_secs: 0,
        eviction_interval_secs: 0,
        assignment: Assignment::Random,
        manual_idle_secs: 0,
        panic: false,
    };

    /// The defaults of the option table.
    pub const DEFAULT: Routing = Routing {
        cache_threshold: 0.3,
        balance_abs: 16,
        balance_rel: 1.5,
        balance_mode: BalanceMode::Worker,
        balance_token_usage: 1.0,
        overload_token_usage: 1.0,
        max_worker_waiting: 0,
        prefix_max_bytes: 1 << 20,
        prefix_memory_bytes: 1 << 30,
        prefix_ttl_secs: 0,
        eviction_interval_secs: 1,
        assignment: Assignment::Random,
        manual_idle_secs: 4 * 3600,
        panic: false,
    };

    /// Whether affinity may have to give way for what engines say of their KV caches.
    #[inline]
    pub fn balances_usage(&self) -> bool {
        self.balance_token_usage < 1.0
    }

    /// Whether decisions need to know what engines say of their load.
    pub fn wants_loads(&self) -> bool {
        self.balances_usage() || self.overload_token_usage < 1.0 || self.max_worker_waiting > 0
    }

    /// Whether a load is above another by both thresholds.
    #[inline]
    pub fn exceeds(&self, load: f64, other: f64) -> bool {
        load - other > f64::from(self.balance_abs) && load > self.balance_rel * other
    }
}
