//! The configuration in effect, and which one it is.
//!
//! Takes whole configurations from the control thread (the only writer), gives lanes the newest one and a cheap way to
//! see that there is one. Never changes one that was given out: who goes by an older one goes on by it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwapOption;
use crossbeam::utils::CachePadded;

use crate::config::Config;

/// A configuration and its number.
#[derive(Debug)]
pub struct Published {
    /// 1 is the configuration of the start; grows by one with every reload that changed something.
    pub generation: u64,
    /// Without the workers, which are the roster's.
    pub config: Config,
}

/// What came of a reload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reload {
    /// Something was changed.
    Applied,
    /// The configuration says what is in effect already.
    Unchanged,
    /// It has mistakes: nothing was changed.
    Refused,
}

impl Reload {
    /// All of them, in the order of their discriminants.
    pub const ALL: [Reload; 3] = [Reload::Applied, Reload::Unchanged, Reload::Refused];

    /// Lower-case name, as in labels and the admin API.
    pub const fn name(self) -> &'static str {
        match self {
            Reload::Applied => "applied",
            Reload::Unchanged => "unchanged",
            Reload::Refused => "refused",
        }
    }
}

/// The newest configuration, and how reloads went.
#[derive(Default)]
pub struct Settings {
    newest: ArcSwapOption<Published>,
    /// Read by every lane for every request, so alone on its line.
    generation: CachePadded<AtomicU64>,
    reloads: [AtomicU64; Reload::ALL.len()],
}

impl Settings {
    /// Number of the newest configuration; 0 before there is one.
    #[inline]
    pub fn generation(&self) -> u64 {
        // Acquire pairs with the release in `publish`: who sees a generation finds a configuration at least as new.
        self.generation.load(Ordering::Acquire)
    }

    /// The newest configuration. Clones an `Arc`: for the control thread, and for lanes when the generation moved.
    pub fn newest(&self) -> Option<Arc<Published>> {
        self.newest.load_full()
    }

    /// Has every request that begins from now on go by `config` (control only, and boot before the lanes start); gives
    /// its number. Ring the lanes' bells afterwards: an idle lane adopts it only when woken.
    pub fn publish(&self, config: &Config) -> u64 {
        // Relaxed: there is one writer at a time.
        let generation = self.generation.load(Ordering::Relaxed) + 1;
        let config = Config { workers: Vec::new(), ..config.clone() };
        self.newest.store(Some(Arc::new(Published { generation, config })));
        // Release pairs with the acquire in `generation`.
        self.generation.store(generation, Ordering::Release);
        generation
    }

    /// Counts a reload (control only).
    pub fn count(&self, result: Reload) {
        // Relaxed, here and below: a count that guards nothing.
        self.reloads[result as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Reloads that ended so.
    pub fn reloads(&self, result: Reload) -> u64 {
        self.reloads[result as usize].load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::WorkerSpec;

    #[test]
    fn the_newest_counts_and_older_ones_stay_as_they_were() {
        let settings = Settings::default();
        assert!(settings.generation() == 0 && settings.newest().is_none());
        let mut config = Config::with_workers(vec![WorkerSpec::new("http://w:1")]);
        assert_eq!(settings.publish(&config), 1);
        let first = settings.newest().unwrap();
        config.max_headers += 1;
        assert_eq!((settings.publish(&config), settings.generation()), (2, 2));
        let second = settings.newest().unwrap();
        assert_eq!((first.generation, second.generation), (1, 2));
        assert_eq!(first.config.max_headers + 1, second.config.max_headers);
        assert!(first.config.workers.is_empty());
    }
}
