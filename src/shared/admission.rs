//! How many requests go to workers at a time, and who waits until one of them has ended.
//!
//! Takes requests of all lanes, gives as many permits as the limit allows, never one more, and places in a queue of
//! bounded length. Who came first is let in first, whatever its lane. Never lets anybody pass those who wait, never
//! loses a permit, never blocks while nobody waits: taking and giving back is one compare-and-swap then.
//!
//! A permit that is given back while somebody waits is handed over, not freed, so that the limit holds in between.
//! The heirs of a lane are noted and its bell is rung; the lane wakes them ([`called`]).
//!
//! Every `Ordering` here is relaxed: the word publishes nothing but itself, and everything else is behind the mutex.

use std::mem;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crossbeam::utils::CachePadded;
use slab::Slab;

use super::Shared;

/// One permit in use, as it stands in the packed word; the number of those who wait lies below.
const ONE_IN_USE: u64 = 1 << 32;
/// So many permits that there is no limit.
pub const UNLIMITED: u32 = u32::MAX;

const fn in_use(word: u64) -> u32 {
    (word >> 32) as u32
}

const fn waiting(word: u64) -> u32 {
    word as u32
}

/// Permits and queue of the process. Writers: every lane.
pub struct Admission {
    /// Permits in use, and how many wait. The latter changes under the mutex only; while it is not 0, the former is at
    /// the limit, or above it where that was lowered.
    word: CachePadded<AtomicU64>,
    /// The limit. Written by boot, and by control under the mutex.
    permits: AtomicU32,
    /// Places in the queue; the same.
    places: AtomicU32,
    queue: Mutex<Queue>,
}

struct Queue {
    places: Slab<Place>,
    first: usize,
    last: usize,
    /// Seats of those who were let in and do not know it yet, by lane.
    called: Box<[Vec<usize>]>,
}

/// Somebody's place in the queue, linked to its neighbours.
struct Place {
    lane: usize,
    seat: usize,
    /// It has left the queue with a permit.
    let_in: bool,
    before: usize,
    behind: usize,
}

const NOBODY: usize = usize::MAX;

impl Queue {
    /// A place at the end.
    fn append(&mut self, lane: usize, seat: usize) -> usize {
        let place = Place { lane, seat, let_in: false, before: self.last, behind: NOBODY };
        let key = self.places.insert(place);
        match self.last {
            NOBODY => self.first = key,
            last => self.places[last].behind = key,
        }
        self.last = key;
        key
    }

    /// Takes a place out of the order; it stays in the table.
    fn unlink(&mut self, key: usize) {
        let Place { before, behind, .. } = self.places[key];
        match before {
            NOBODY => self.first = behind,
            before => self.places[before].behind = behind,
        }
        match behind {
            NOBODY => self.last = before,
            behind => self.places[behind].before = before,
        }
    }
}

impl Admission {
    /// For `lanes` lanes, without a permit and without a place until [`Admission::open`].
    pub fn new(lanes: usize) -> Self {
        let called = (0..lanes).map(|_| Vec::new()).collect();
        Admission {
            word: CachePadded::new(AtomicU64::new(0)),
            permits: AtomicU32::new(0),
            places: AtomicU32::new(0),
            queue: Mutex::new(Queue { places: Slab::new(), first: NOBODY, last: NOBODY, called }),
        }
    }

    /// Sets how many permits ([`UNLIMITED`] for as many as are asked for) and places there are;
    /// [`Shared::limit_requests`] for when somebody may wait already. With fewer permits than are in use, nobody is let
    /// in before enough have come back; who waits keeps the place. Gives the lanes whose bells are to be rung, because
    /// there is room for some who wait.
    pub fn open(&self, permits: u32, places: u32) -> Vec<usize> {
        let mut queue = self.lock();
        self.permits.store(permits, Ordering::Relaxed);
        self.places.store(places, Ordering::Relaxed);
        let mut lanes = Vec::new();
        // Nobody else changes the number of those in use while somebody waits, but who gives back, under the mutex.
        while queue.first != NOBODY && self.in_use() < permits {
            self.word.fetch_add(ONE_IN_USE, Ordering::Relaxed);
            lanes.extend(self.let_in(&mut queue));
        }
        lanes
    }

    /// Lets in who came first, with a permit that is counted already; gives the lane whose bell is to be rung.
    fn let_in(&self, queue: &mut Queue) -> Option<usize> {
        let key = queue.first;
        queue.unlink(key);
        self.word.fetch_sub(1, Ordering::Relaxed);
        queue.places[key].let_in = true;
        let Place { lane, seat, .. } = queue.places[key];
        let called = &mut queue.called[lane];
        called.push(seat);
        // If there are others, the bell that was rung for them has not been answered.
        (called.len() == 1).then_some(lane)
    }

    /// How many permits there are; 0: no limit.
    pub fn permits(&self) -> u32 {
        match self.permits.load(Ordering::Relaxed) {
            UNLIMITED => 0,
            permits => permits,
        }
    }

    /// Permits in use at the moment.
    pub fn in_use(&self) -> u32 {
        in_use(self.word.load(Ordering::Relaxed))
    }

    /// How many wait at the moment.
    pub fn waiting(&self) -> u32 {
        waiting(self.word.load(Ordering::Relaxed))
    }

    /// One step of the word, if there is one.
    fn step(&self, next: impl Fn(u64) -> Option<u64>) -> bool {
        self.word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }

    /// Takes a permit if one is free and nobody waits.
    #[inline]
    fn take(&self) -> bool {
        let most = self.permits.load(Ordering::Relaxed);
        self.step(|word| (waiting(word) == 0 && in_use(word) < most).then(|| word + ONE_IN_USE))
    }

    /// Never panics with the lock held, so a poisoned one is as good as any.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a permit back, or to whoever waits for it; gives the lane whose bell is to be rung.
    fn give_back(&self) -> Option<usize> {
        if self.step(|word| (waiting(word) == 0).then(|| word - ONE_IN_USE)) {
            return None;
        }
        let mut queue = self.lock();
        if queue.first == NOBODY || self.in_use() > self.permits.load(Ordering::Relaxed) {
            // Who waited has left since, or the limit was lowered.
            self.word.fetch_sub(ONE_IN_USE, Ordering::Relaxed);
            return None;
        }
        self.let_in(&mut queue)
    }
}

/// Takes the seats of those of a lane who were let in since the last call, in order, into `seats`, which is empty.
pub fn called(shared: &Shared, lane: usize, seats: &mut Vec<usize>) {
    mem::swap(&mut shared.admission.lock().called[lane], seats);
}

/// The right of one request to go to a worker; its drop gives it to the next.
#[must_use = "a dropped permit is given to the next"]
pub struct Permit(&'static Shared);

impl Permit {
    /// A permit, if one is free and nobody waits.
    #[inline]
    pub fn take(shared: &'static Shared) -> Option<Permit> {
        shared.admission.take().then(|| Permit(shared))
    }
}

impl Drop for Permit {
    #[inline]
    fn drop(&mut self) {
        if let Some(lane) = self.0.admission.give_back() {
            self.0.handover.ring(lane);
        }
    }
}

/// What somebody gets who lines up.
pub enum Lined {
    /// A permit, because one has become free.
    In(Permit),
    /// A place in the queue.
    Waits(Ticket),
    /// Nothing: the queue is full.
    Full,
}

/// A place in the queue; its drop leaves it, with the permit that it has won in the meantime.
#[must_use = "a dropped ticket leaves the queue"]
pub struct Ticket {
    shared: &'static Shared,
    /// `None` once the place was given up.
    key: Option<usize>,
}

impl Ticket {
    /// Lines up. `seat` is by what the lane knows who waits; [`called`] gives it back.
    pub fn draw(shared: &'static Shared, lane: usize, seat: usize) -> Lined {
        let admission = &shared.admission;
        let mut queue = admission.lock();
        let (most, places) = (admission.permits.load(Ordering::Relaxed), admission.places.load(Ordering::Relaxed));
        let mut got_in = false;
        let stepped = admission.word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
            // A permit may have become free while nobody waits.
            got_in = waiting(word) == 0 && in_use(word) < most;
            match got_in {
                true => Some(word + ONE_IN_USE),
                false => (waiting(word) < places).then(|| word + 1),
            }
        });
        match stepped {
            Err(_) => Lined::Full,
            Ok(_) if got_in => Lined::In(Permit(shared)),
            Ok(_) => Lined::Waits(Ticket { shared, key: Some(queue.append(lane, seat)) }),
        }
    }

    /// The permit, if it has been won.
    pub fn claim(&mut self) -> Option<Permit> {
        let key = self.key?;
        let mut queue = self.shared.admission.lock();
        if !queue.places[key].let_in {
            return None;
        }
        queue.places.remove(key);
        self.key = None;
        Some(Permit(self.shared))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some(key) = self.key else { return };
        let admission = &self.shared.admission;
        let mut queue = admission.lock();
        let won = queue.places[key].let_in;
        if !won {
            queue.unlink(key);
            admission.word.fetch_sub(1, Ordering::Relaxed);
        }
        queue.places.remove(key);
        drop(queue);
        if won {
            drop(Permit(self.shared));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::time::{Duration, Instant};

    use super::*;

    fn open(lanes: usize, permits: u32, places: u32) -> &'static Shared {
        let shared = Shared::leak(lanes);
        shared.admission.open(permits, places);
        shared
    }

    fn counts(shared: &Shared) -> (u32, u32) {
        (shared.admission.in_use(), shared.admission.waiting())
    }

    fn waits(shared: &'static Shared, lane: usize, seat: usize) -> Ticket {
        match Ticket::draw(shared, lane, seat) {
            Lined::Waits(ticket) => ticket,
            Lined::In(_) => panic!("let in"),
            Lined::Full => panic!("full"),
        }
    }

    fn seats(shared: &Shared, lane: usize) -> Vec<usize> {
        let mut seats = Vec::new();
        called(shared, lane, &mut seats);
        seats
    }

    #[test]
    fn permits_run_out_and_come_back() {
        let shared = open(1, 2, 0);
        let first = Permit::take(shared).unwrap();
        let _second = Permit::take(shared).unwrap();
        assert!(Permit::take(shared).is_none());
        assert!(matches!(Ticket::draw(shared, 0, 0), Lined::Full), "there are no places");
        drop(first);
        assert!(matches!(Ticket::draw(shared, 0, 0), Lined::In(_)));
        assert_eq!(counts(shared), (1, 0));
    }

    #[test]
    fn who_came_first_is_let_in_first_and_nobody_passes_by() {
        let shared = open(2, 1, 3);
        let permit = Permit::take(shared).unwrap();
        let mut tickets: Vec<Ticket> = [(0, 7), (1, 8), (0, 9)].map(|(lane, seat)| waits(shared, lane, seat)).into();
        assert!(matches!(Ticket::draw(shared, 1, 0), Lined::Full));
        assert_eq!(counts(shared), (1, 3));
        drop(permit);
        assert!(Permit::take(shared).is_none(), "the permit was handed over");
        assert_eq!((seats(shared, 0), seats(shared, 1)), (vec![7], vec![]));
        assert!(tickets[1].claim().is_none() && tickets[2].claim().is_none());
        let permit = tickets[0].claim().unwrap();
        assert_eq!(counts(shared), (1, 2));
        // The one in the middle leaves.
        drop(tickets.remove(1));
        drop(permit);
        assert_eq!((seats(shared, 0), seats(shared, 1)), (vec![9], vec![]));
        assert_eq!(counts(shared), (1, 0));
        // Who leaves with a permit unclaimed gives it on.
        let mut next = waits(shared, 1, 4);
        drop(tickets);
        assert_eq!(seats(shared, 1), [4]);
        drop(next.claim().unwrap());
        drop(next);
        assert_eq!(counts(shared), (0, 0));
        assert!(shared.admission.lock().places.is_empty());
    }

    #[test]
    fn the_limit_can_be_raised_and_lowered_while_somebody_waits() {
        let shared = open(2, 1, 4);
        let mut held: Vec<Permit> = Permit::take(shared).into_iter().collect();
        let mut tickets: Vec<Ticket> = [(0, 1), (1, 2), (0, 3)].map(|(lane, seat)| waits(shared, lane, seat)).into();
        assert_eq!(shared.admission.open(3, 0), [0, 1]);
        assert_eq!((counts(shared), seats(shared, 0), seats(shared, 1)), ((3, 1), vec![1], vec![2]));
        held.extend(tickets.drain(..2).map(|mut ticket| ticket.claim().unwrap()));
        assert!(matches!(Ticket::draw(shared, 0, 4), Lined::Full), "who waits keeps the place, nobody gets a new one");

        assert!(shared.admission.open(1, 4).is_empty());
        for left in [2, 1] {
            drop(held.pop());
            assert_eq!(counts(shared), (left, 1), "permits above the limit are not handed over");
        }
        assert!(Permit::take(shared).is_none() && tickets[0].claim().is_none());
        drop(held.pop());
        assert_eq!(seats(shared, 0), [3]);
        drop(tickets.remove(0).claim().unwrap());
        assert_eq!(counts(shared), (0, 0));
    }

    #[test]
    fn a_bell_is_rung_once_until_it_is_answered() {
        let shared = open(1, 2, 4);
        let admission = &shared.admission;
        let permits = [0, 1].map(|_| Permit::take(shared).unwrap());
        let tickets = [0, 1].map(|seat| waits(shared, 0, seat));
        permits.into_iter().for_each(mem::forget);
        assert_eq!([admission.give_back(), admission.give_back()], [Some(0), None]);
        assert_eq!(seats(shared, 0), [0, 1]);
        drop(tickets);
        assert_eq!(counts(shared), (0, 0));
    }

    #[test]
    fn a_panic_loses_neither_permit_nor_place() {
        let shared = open(1, 1, 2);
        let permit = Permit::take(shared).unwrap();
        let waiting = waits(shared, 0, 0);
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _held = (permit, waiting);
            std::panic::resume_unwind(Box::new("quietly"));
        }));
        assert!(unwound.is_err());
        assert_eq!((counts(shared), shared.admission.lock().places.len()), ((0, 0), 0));
        assert!(Permit::take(shared).is_some());
    }

    /// Queues of all shapes against a plain list.
    #[test]
    fn the_queue_is_that_of_a_list() {
        let seed = fastrand::u64(..);
        let mut rng = fastrand::Rng::with_seed(seed);
        for _ in 0..200 {
            let (permits, places) = (rng.u32(1..4), rng.u32(0..6));
            let shared = open(3, permits, places);
            let mut held: Vec<Permit> = Vec::new();
            let mut line: VecDeque<(usize, Ticket)> = VecDeque::new();
            for seat in 0..200 {
                match rng.u32(..4) {
                    0 | 1 => match Ticket::draw(shared, rng.usize(..3), seat) {
                        Lined::In(permit) => {
                            assert!(line.is_empty() && held.len() < permits as usize, "seed {seed}");
                            held.push(permit);
                        }
                        Lined::Waits(ticket) => line.push_back((seat, ticket)),
                        Lined::Full => assert_eq!(line.len(), places as usize, "seed {seed}"),
                    },
                    2 if !held.is_empty() => {
                        drop(held.swap_remove(rng.usize(..held.len())));
                        let mut all: Vec<usize> = (0..3).flat_map(|lane| seats(shared, lane)).collect();
                        let first = line.pop_front();
                        assert_eq!(all.pop(), first.as_ref().map(|(seat, _)| *seat), "seed {seed}");
                        held.extend(first.map(|(_, mut ticket)| ticket.claim().unwrap()));
                    }
                    3 if !line.is_empty() => drop(line.remove(rng.usize(..line.len()))),
                    _ => {}
                }
                assert_eq!(counts(shared), (held.len() as u32, line.len() as u32), "seed {seed}");
            }
        }
    }

    /// Threads as lanes: never more than the limit inside, everybody is served or leaves, and nothing is left over.
    #[test]
    fn threads_never_exceed_the_limit() {
        const LIMIT: u32 = 3;
        const ROUNDS: usize = 4000;
        let shared = open(4, LIMIT, 6);
        let (inside, most) = (AtomicU32::new(0), AtomicU32::new(0));
        let done = [const { AtomicU32::new(0) }; 3];
        let visit = |rng: &mut fastrand::Rng, permit: Permit| {
            most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            if rng.u32(..8) == 0 {
                std::thread::yield_now();
            }
            inside.fetch_sub(1, Ordering::SeqCst);
            drop(permit);
            done[0].fetch_add(1, Ordering::Relaxed);
        };
        std::thread::scope(|scope| {
            for lane in 0..4 {
                let (visit, done) = (&visit, &done);
                scope.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(lane as u64);
                    for round in 0..ROUNDS {
                        if let Some(permit) = Permit::take(shared) {
                            visit(&mut rng, permit);
                            continue;
                        }
                        match Ticket::draw(shared, lane, round) {
                            Lined::In(permit) => visit(&mut rng, permit),
                            Lined::Full => drop(done[1].fetch_add(1, Ordering::Relaxed)),
                            Lined::Waits(mut ticket) => {
                                // Some leave after a while, let in or not.
                                let patience = if rng.u32(..4) == 0 { rng.u32(..4) } else { u32::MAX };
                                let begun = Instant::now();
                                let mut looks = 0;
                                let permit = loop {
                                    if let Some(permit) = ticket.claim() {
                                        break Some(permit);
                                    }
                                    if looks == patience {
                                        break None;
                                    }
                                    looks += 1;
                                    assert!(begun.elapsed() < Duration::from_secs(20), "forgotten in the queue");
                                    std::thread::yield_now();
                                };
                                drop(seats(shared, lane));
                                match permit {
                                    Some(permit) => visit(&mut rng, permit),
                                    None => drop(done[2].fetch_add(1, Ordering::Relaxed)),
                                }
                            }
                        }
                    }
                });
            }
        });
        let done = done.map(|n| n.load(Ordering::Relaxed));
        println!("served, refused, left: {done:?}; at most {most:?} inside");
        assert_eq!(done.iter().sum::<u32>() as usize, 4 * ROUNDS);
        assert!(most.load(Ordering::SeqCst) <= LIMIT && done[0] > 0);
        assert_eq!((counts(shared), shared.admission.lock().places.len()), ((0, 0), 0));
    }

    /// The limit moves while threads come and go: nobody is forgotten in the queue, and nothing is left over.
    #[test]
    fn a_limit_that_moves_forgets_nobody() {
        const ROUNDS: usize = 3000;
        let shared = open(4, 2, 8);
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let lanes: Vec<_> = (0..3)
                .map(|lane| {
                    scope.spawn(move || {
                        let mut rng = fastrand::Rng::with_seed(lane as u64);
                        let mut held = Vec::new();
                        for round in 0..ROUNDS {
                            // Who holds some and waits for more could wait for itself.
                            if rng.u32(..3) == 0 {
                                held.clear();
                            }
                            match Permit::take(shared) {
                                Some(permit) => held.push(permit),
                                None => {
                                    held.clear();
                                    let Lined::Waits(mut ticket) = Ticket::draw(shared, lane, round) else { continue };
                                    let begun = Instant::now();
                                    while ticket.claim().is_none() {
                                        assert!(begun.elapsed() < Duration::from_secs(20), "forgotten in the queue");
                                        drop(seats(shared, lane));
                                        std::thread::yield_now();
                                    }
                                }
                            }
                        }
                    })
                })
                .collect();
            let over = &over;
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(9);
                while !over.load(Ordering::Relaxed) {
                    shared.limit_requests(rng.u32(..5), rng.u32(..9));
                    std::thread::yield_now();
                }
            });
            let ended: Vec<_> = lanes.into_iter().map(|lane| lane.join()).collect();
            over.store(true, Ordering::Relaxed);
            assert!(ended.iter().all(Result::is_ok));
        });
        assert_eq!((counts(shared), shared.admission.lock().places.len()), ((0, 0), 0));
    }
}
