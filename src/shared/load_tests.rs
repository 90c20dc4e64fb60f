//! Tests of [`super::load`], outside of it: the model checks compile that file with atomics of their own.
//!
//! Takes nothing, gives verdicts. Never touches another part of the shared state.

use super::atomic::{AtomicU32, Ordering};
use super::load::{Load, MOST_IN_FLIGHT, PROCESSED_MASK, Word, work};

fn leak() -> &'static Load {
    Box::leak(Box::new(Load::new()))
}

#[test]
fn words_compare_by_in_flight_then_processed() {
    assert!(Word::new(0, PROCESSED_MASK) < Word::new(1, 0));
    assert!(Word::new(1, 6) < Word::new(1, 7));
    assert_eq!((Word::new(3, 9).in_flight(), Word::new(3, 9).processed()), (3, 9));
}

#[test]
fn a_drop_gives_back_the_in_flight_part_only() {
    let load = leak();
    let guard = load.reserve(7, 3, Word(0), 1).unwrap();
    assert_eq!(load.word(7), Word::new(1, 1));
    assert_eq!((guard.slot(), guard.era()), (7, 3));
    drop(guard);
    assert_eq!(load.word(7), Word::new(0, 1));
}

#[test]
fn a_stale_expectation_gets_the_current_word() {
    let load = leak();
    let _held = load.reserve(0, 1, Word(0), 1).unwrap();
    assert_eq!(load.reserve(0, 1, Word(0), 1).unwrap_err(), Word::new(1, 1));
}

#[test]
fn processed_wraps_without_a_carry() {
    let load = leak();
    load.seed(0, PROCESSED_MASK);
    let first = load.reserve(0, 1, load.word(0), 1).unwrap();
    assert_eq!(load.word(0), Word::new(1, 0));
    load.seed(0, PROCESSED_MASK);
    let second = load.reserve_unconditional(0, 1, 1).unwrap();
    assert_eq!(load.word(0), Word::new(2, 0));
    drop((first, second));
    assert_eq!(load.word(0), Word::new(0, 0));
}

#[test]
fn a_reservation_brings_its_work_and_forgetting_takes_some() {
    assert_eq!([work(0), work(63), work(64), work(8192)], [1, 1, 2, 129]);
    let load = leak();
    let first = load.reserve(0, 1, Word(0), work(8192)).unwrap();
    let second = load.reserve_unconditional(0, 1, 7).unwrap();
    assert_eq!(load.word(0), Word::new(2, 136));
    load.forget(0, 36);
    assert_eq!(load.word(0), Word::new(2, 100));
    load.forget(0, 101);
    assert_eq!(load.word(0), Word::new(2, 0));
    drop((first, second));
    assert_eq!(load.word(0), Word::new(0, 0));
}

#[test]
fn a_full_worker_refuses() {
    let load = leak();
    load.words[0].store(Word::new(MOST_IN_FLIGHT, 5).0, Ordering::Relaxed);
    assert_eq!(load.reserve(0, 1, load.word(0), 1).unwrap_err(), Word::new(MOST_IN_FLIGHT, 5));
    assert!(load.reserve_unconditional(0, 1, 1).is_none());
    assert_eq!(load.word(0), Word::new(MOST_IN_FLIGHT, 5));
}

#[test]
fn a_worker_is_full_at_the_limit() {
    let load = leak();
    load.limit(2);
    let first = load.reserve(0, 1, Word(0), 1).unwrap();
    assert_eq!(load.offer(0), Word::new(1, 1));
    let _second = load.reserve_unconditional(0, 1, 1).unwrap();
    assert!(load.offer(0).is_full());
    assert_eq!(load.word(0), Word::new(2, 2), "what is counted stays true");
    assert_eq!(load.reserve(0, 1, Word::new(2, 2), 1).unwrap_err(), Word::new(2, 2));
    assert!(load.reserve_unconditional(0, 1, 1).is_none());
    drop(first);
    assert!(load.reserve(0, 1, load.offer(0), 1).is_ok());
    load.limit(0);
    assert_eq!(load.most(), MOST_IN_FLIGHT);
}

/// However many threads reserve in whatever way, a worker never has more than it may.
#[test]
fn threads_never_exceed_a_workers_limit() {
    const MOST: u32 = 3;
    let load = leak();
    load.limit(MOST);
    let (inside, highest) = (AtomicU32::new(0), AtomicU32::new(0));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (inside, highest) = (&inside, &highest);
            scope.spawn(move || {
                for round in 0..20_000 {
                    let guard = match (thread + round) % 2 {
                        0 => load.reserve(0, 1, load.word(0), 1).ok(),
                        _ => load.reserve_unconditional(0, 1, 1),
                    };
                    if let Some(guard) = guard {
                        highest.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        drop(guard);
                    }
                }
            });
        }
    });
    assert!((1..=MOST).contains(&highest.load(Ordering::SeqCst)));
    assert_eq!(load.word(0).in_flight(), 0);
}

#[test]
fn seeding_keeps_what_is_in_flight() {
    let load = leak();
    let _held = load.reserve_unconditional(4, 1, 1).unwrap();
    load.seed(4, 1000);
    assert_eq!(load.word(4), Word::new(1, 1000));
}

#[test]
fn a_release_without_a_reservation_saturates() {
    let load = leak();
    load.seed(1, 9);
    let outcome = std::panic::catch_unwind(|| load.release(1));
    assert_eq!(outcome.is_err(), cfg!(debug_assertions));
    assert_eq!(load.word(1), Word::new(0, 9));
}
