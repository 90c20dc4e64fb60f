//! One coarse timer wheel a lane.
//!
//! Takes deadlines in microseconds of the lane's clock, gives wake-ups no earlier than asked and at most two
//! ticks later. Never allocates but when a timer is made: members of a slot are linked through the slab.
//!
//! Moving a deadline back (what every request does) is one store: the entry stays where it is and is looked
//! at again when its slot comes up.

use std::cell::RefCell;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use slab::Slab;

/// Length of a tick: 2^14 µs, about 16 ms. Timeouts of a proxy are seconds; 100 ms is the finest promise.
const TICK_SHIFT: u32 = 14;
/// Slots of the wheel, about 17 s; what lies beyond waits in the farthest slot and is looked at again.
const SLOTS: usize = 1024;
/// Timers that fit without growing the table by copying; room that is not used is not resident.
const ROOM: usize = 32 * 1024;
const NONE: u32 = u32::MAX;
const NEVER: u64 = u64::MAX;

struct Entry {
    deadline_us: u64,
    /// Tick in whose slot the entry is linked; `NEVER` when it is not.
    tick: u64,
    previous: u32,
    next: u32,
    waker: Option<Waker>,
}

struct Wheel {
    entries: Slab<Entry>,
    heads: Box<[u32; SLOTS]>,
    occupied: [u64; SLOTS / 64],
    /// The next tick to be looked at.
    tick: u64,
    now_us: u64,
}

/// A lane's timers.
pub struct Timers(RefCell<Wheel>);

impl Timers {
    /// A wheel whose clock stands at `now_us`.
    pub fn new(now_us: u64) -> Rc<Timers> {
        Rc::new(Timers(RefCell::new(Wheel {
            entries: Slab::with_capacity(ROOM),
            heads: Box::new([NONE; SLOTS]),
            occupied: [0; SLOTS / 64],
            tick: now_us >> TICK_SHIFT,
            now_us,
        })))
    }

    /// A timer that is not set.
    pub fn timer(self: &Rc<Self>) -> Timer {
        let key = self.0.borrow_mut().entries.insert(Entry {
            deadline_us: NEVER,
            tick: NEVER,
            previous: NONE,
            next: NONE,
            waker: None,
        });
        Timer { timers: self.clone(), key: key as u32 }
    }

    /// Moves the clock on and collects the wakers of what is due.
    pub fn advance(&self, now_us: u64, woken: &mut Vec<Waker>) {
        let mut wheel = self.0.borrow_mut();
        wheel.now_us = wheel.now_us.max(now_us);
        let now = wheel.now_us >> TICK_SHIFT;
        if now < wheel.tick {
            return;
        }
        // After a long sleep one round over the wheel sees everything.
        let first = wheel.tick.max((now + 1).saturating_sub(SLOTS as u64));
        wheel.tick = now + 1;
        for tick in first..=now {
            let slot = tick as usize % SLOTS;
            if wheel.occupied[slot / 64] & (1 << (slot % 64)) != 0 {
                wheel.expire(slot, woken);
            }
        }
    }

    /// Microseconds until the next slot that has anything in it; `None` when no timer is set.
    pub fn next_us(&self) -> Option<u64> {
        let wheel = self.0.borrow();
        let start = wheel.tick as usize % SLOTS;
        let mut ahead = 0;
        while ahead < SLOTS {
            let slot = (start + ahead) % SLOTS;
            let word = wheel.occupied[slot / 64] >> (slot % 64);
            if word != 0 {
                let tick = wheel.tick + ahead as u64 + word.trailing_zeros() as u64;
                return Some(((tick + 1) << TICK_SHIFT).saturating_sub(wheel.now_us));
            }
            ahead += 64 - slot % 64;
        }
        None
    }

    /// Wakes every task that waits with a timer, due or not: when all must look at the world again.
    pub fn wake_all(&self) {
        let wakers: Vec<Waker> = self.0.borrow_mut().entries.iter_mut().filter_map(|(_, e)| e.waker.take()).collect();
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Wheel {
    fn link(&mut self, key: u32) {
        let deadline = self.entries[key as usize].deadline_us;
        // The slot of the tick in which the deadline lies is looked at when that tick is over.
        let tick = (deadline >> TICK_SHIFT).clamp(self.tick, self.tick + SLOTS as u64 - 1);
        let slot = tick as usize % SLOTS;
        let head = self.heads[slot];
        let entry = &mut self.entries[key as usize];
        entry.tick = tick;
        entry.previous = NONE;
        entry.next = head;
        if head != NONE {
            self.entries[head as usize].previous = key;
        }
        self.heads[slot] = key;
        self.occupied[slot / 64] |= 1 << (slot % 64);
    }

    fn unlink(&mut self, key: u32) {
        let entry = &mut self.entries[key as usize];
        let (tick, previous, next) = (entry.tick, entry.previous, entry.next);
        if tick == NEVER {
            return;
        }
        entry.tick = NEVER;
        let slot = tick as usize % SLOTS;
        if next != NONE {
            self.entries[next as usize].previous = previous;
        }
        if previous != NONE {
            self.entries[previous as usize].next = next;
        } else {
            self.heads[slot] = next;
            if next == NONE {
                self.occupied[slot / 64] &= !(1 << (slot % 64));
            }
        }
    }

    fn expire(&mut self, slot: usize, woken: &mut Vec<Waker>) {
        let mut key = std::mem::replace(&mut self.heads[slot], NONE);
        self.occupied[slot / 64] &= !(1 << (slot % 64));
        while key != NONE {
            let now = self.now_us;
            let entry = &mut self.entries[key as usize];
            let next = entry.next;
            entry.tick = NEVER;
            if entry.deadline_us <= now {
                woken.extend(entry.waker.take());
            } else if entry.deadline_us != NEVER {
                self.link(key);
            }
            key = next;
        }
    }
}

/// One deadline of one task.
pub struct Timer {
    timers: Rc<Timers>,
    key: u32,
}

impl Timer {
    /// Sets the deadline, in microseconds of the lane's clock.
    pub fn set(&self, deadline_us: u64) {
        let mut wheel = self.timers.0.borrow_mut();
        let entry = &mut wheel.entries[self.key as usize];
        entry.deadline_us = deadline_us;
        let linked = entry.tick;
        if linked == NEVER {
            wheel.link(self.key);
        } else if deadline_us >> TICK_SHIFT < linked {
            wheel.unlink(self.key);
            wheel.link(self.key);
        }
    }

    /// Forgets the deadline.
    pub fn clear(&self) {
        self.timers.0.borrow_mut().entries[self.key as usize].deadline_us = NEVER;
    }

    /// Ready when the deadline has passed; wakes the task then. Not ready while none is set.
    pub fn poll_due(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut wheel = self.timers.0.borrow_mut();
        let now = wheel.now_us;
        let entry = &mut wheel.entries[self.key as usize];
        if entry.deadline_us <= now {
            return Poll::Ready(());
        }
        let mut old = None;
        if entry.waker.as_ref().is_none_or(|w| !w.will_wake(cx.waker())) {
            old = entry.waker.replace(cx.waker().clone());
        }
        if entry.tick == NEVER && entry.deadline_us != NEVER {
            wheel.link(self.key);
        }
        // Dropped after the borrow: a waker's drop may run code that comes back here.
        drop(wheel);
        drop(old);
        Poll::Pending
    }

    /// Sleeps until the deadline.
    pub async fn due(&self) {
        std::future::poll_fn(|cx| self.poll_due(cx)).await
    }

    /// Microseconds of the lane's clock.
    pub fn now_us(&self) -> u64 {
        self.timers.0.borrow().now_us
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let mut wheel = self.timers.0.borrow_mut();
        wheel.unlink(self.key);
        let entry = wheel.entries.remove(self.key as usize);
        drop(wheel);
        drop(entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    struct Count(AtomicU64);
    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    const TICK_US: u64 = 1 << TICK_SHIFT;

    #[test]
    fn random_deadlines_are_met_neither_early_nor_late() {
        let mut rng = fastrand::Rng::with_seed(7);
        let timers = Timers::new(123);
        let mut now = 123;
        let mut woken = Vec::new();
        let mut live: Vec<(Timer, Arc<Count>, u64)> = Vec::new();
        let mut met = 0;
        for _ in 0..20_000 {
            if live.len() < 200 {
                let count = Arc::new(Count(AtomicU64::new(0)));
                live.push((timers.timer(), count, NEVER));
            }
            let i = rng.usize(..live.len());
            match rng.u32(..10) {
                0..7 => {
                    let reach = 1 << rng.u32(10..28);
                    let deadline = now + rng.u64(..reach);
                    live[i].0.set(deadline);
                    live[i].1.0.store(0, Ordering::Relaxed);
                    live[i].2 = deadline;
                }
                7 => {
                    live[i].0.clear();
                    live[i].1.0.store(0, Ordering::Relaxed);
                    live[i].2 = NEVER;
                }
                _ => drop(live.swap_remove(i)),
            }
            for (timer, count, deadline) in &live {
                let waker = Waker::from(count.clone());
                let due = timer.poll_due(&mut Context::from_waker(&waker)).is_ready();
                assert_eq!(due, *deadline <= now);
                // Who is told at once is not woken later.
                count.0.fetch_add(due as u64, Ordering::Relaxed);
            }
            let step = timers.next_us().unwrap_or(TICK_US).min(rng.u64(1..5 * TICK_US));
            now += step;
            timers.advance(now, &mut woken);
            woken.drain(..).for_each(Waker::wake);
            for (timer, count, deadline) in &mut live {
                let fired = count.0.load(Ordering::Relaxed) > 0;
                assert!(!fired || *deadline <= now, "early");
                let over = deadline.saturating_add(2 * TICK_US) <= now;
                assert!(fired || !over, "late");
                if over {
                    met += 1;
                    timer.clear();
                    count.0.store(0, Ordering::Relaxed);
                    *deadline = NEVER;
                }
            }
        }
        assert!(met > 1000, "only {met} deadlines came up");
    }

    #[test]
    fn an_empty_wheel_asks_for_no_wake_up_and_forgets_dropped_timers() {
        let timers = Timers::new(0);
        assert_eq!(timers.next_us(), None);
        let t = timers.timer();
        t.set(1_000_000);
        assert!(timers.next_us().is_some_and(|us| (1_000_000..1_000_000 + 2 * TICK_US).contains(&us)));
        drop(t);
        assert_eq!(timers.next_us(), None);
    }
}
