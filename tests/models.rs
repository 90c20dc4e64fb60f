//! Model checks of reserving and releasing: every interleaving of a few threads, up to a bound on how often one may be
//! interrupted.
//!
//! Takes the sources of the load words as they are and compiles them with the atomics of a model checker; gives verdicts.
//! Never repeats what it checks: what is modelled here is who calls what. `LOOM_MAX_PREEMPTIONS=5 cargo test --release
//! --test models` explores further (minutes); without it the bound is 3.
//!
//! Trees are beyond this checker, since crossbeam-epoch keeps atomics of its own; `tests/prefix_tree` explores them with
//! pause points.

use loom::thread;

/// What the sources below import, by the paths under which they import it.
#[allow(dead_code, reason = "the rest of the sources is not modelled")]
#[path = "../src/shared"]
mod shared {
    pub mod atomic {
        pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    }
    pub mod load;
    pub mod roster {
        pub type Slot = u16;
    }
    /// No worker is on trial in these models.
    pub mod vitals {
        use super::roster::Slot;

        pub struct Vitals;

        impl Vitals {
            pub fn end_trial(&self, _: Slot) {}
        }

        pub struct Trial(&'static Vitals, Slot);

        impl Trial {
            pub fn into_parts(self) -> (&'static Vitals, Slot) {
                (self.0, self.1)
            }
        }
    }
}

/// The bounds that matter for the words, and as few of them as a model can hold.
mod limits {
    pub const IN_FLIGHT_BITS: u32 = corelane::limits::IN_FLIGHT_BITS;
    pub const PROCESSED_BITS: u32 = corelane::limits::PROCESSED_BITS;
    pub const WORK_BYTES: usize = corelane::limits::WORK_BYTES;
    pub const MAX_WORKERS: usize = 3;
}

use shared::load::{Load, LoadGuard, Word};

/// Explores what `threads` can do to words that all stand at 0.
fn explore(check: impl Fn(&'static Load) + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    if model.preemption_bound.is_none() {
        model.preemption_bound = Some(3);
    }
    model.check(move || {
        // The guards want words that live for ever; a model's live as long as one exploration.
        let load: &'static Load = Box::leak(Box::new(Load::new()));
        check(load);
    });
}

/// What route does: the lowest word is compared and swapped, and all are read again when somebody was faster.
fn choose(load: &'static Load, workers: u16) -> LoadGuard {
    let read = || (0..workers).map(|slot| (load.word(slot), slot)).min().expect("there are workers");
    let mut lowest = read();
    loop {
        match load.reserve(lowest.1, 1, lowest.0, 1) {
            Ok(guard) => return guard,
            Err(_) => lowest = read(),
        }
    }
}

#[test]
fn concurrent_requests_over_idle_workers_take_different_ones() {
    explore(|load| {
        let other = thread::spawn(move || choose(load, 2));
        let mine = choose(load, 2);
        let other = other.join().unwrap();
        assert_ne!(mine.slot(), other.slot(), "both went to one worker beside an idle one");
        drop((mine, other));
        assert_eq!((load.word(0), load.word(1)), (Word::new(0, 1), Word::new(0, 1)));
    });
}

#[test]
fn three_requests_take_three_workers() {
    explore(|load| {
        let others = [(); 2].map(|()| thread::spawn(move || choose(load, 3)));
        let mine = choose(load, 3);
        let guards = others.map(|other| other.join().unwrap());
        let mut slots = [mine.slot(), guards[0].slot(), guards[1].slot()];
        slots.sort_unstable();
        assert_eq!(slots, [0, 1, 2]);
    });
}

#[test]
fn no_release_is_lost_and_none_counts_below_zero() {
    explore(|load| {
        let other = thread::spawn(move || {
            drop(load.reserve_unconditional(0, 1, 3));
            drop(load.reserve_unconditional(0, 1, 3));
        });
        let held = load.reserve_unconditional(0, 1, 5).expect("it is not full");
        assert!((1..=2).contains(&load.word(0).in_flight()));
        drop(held);
        other.join().unwrap();
        assert_eq!(load.word(0), Word::new(0, 11));
    });
}

#[test]
fn seeding_and_fading_leave_what_is_in_flight_alone() {
    explore(|load| {
        let control = thread::spawn(move || {
            load.seed(0, 100);
            load.forget(0, 40);
        });
        let held = load.reserve_unconditional(0, 1, 1).expect("it is not full");
        assert_eq!(load.word(0).in_flight(), 1);
        control.join().unwrap();
        assert_eq!(load.word(0).in_flight(), 1);
        drop(held);
        assert!(matches!(load.word(0).processed(), 60 | 61), "{:?}", load.word(0));
        assert_eq!(load.word(0).in_flight(), 0);
    });
}

/// A guard may end on another thread than the one that made it.
#[test]
fn a_guard_ends_where_it_is_dropped() {
    explore(|load| {
        let guard = choose(load, 1);
        let other = thread::spawn(move || drop(guard));
        let mine = choose(load, 1);
        other.join().unwrap();
        assert_eq!(load.word(0).in_flight(), 1);
        drop(mine);
        assert_eq!(load.word(0), Word::new(0, 2));
    });
}
