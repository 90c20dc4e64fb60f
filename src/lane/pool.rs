//! Idle connections to workers, one lane's own.
//!
//! Takes connections whose answer was complete, gives the newest one back that is still silent and young
//! enough, and counts why the others were closed. Never gives a connection of another tenant of the slot, nor one that
//! said anything while idle.

use std::cell::{Cell, RefCell};

use crate::lane::wire::Conn;
use crate::metrics::Tally;
use crate::shared::roster::Slot;

struct Idle<C> {
    conn: C,
    since_us: u64,
}

struct Shelf<C> {
    era: u32,
    idle: Vec<Idle<C>>,
}

/// A lane's idle upstream connections by worker slot.
pub struct Pool<C> {
    shelves: RefCell<Vec<Shelf<C>>>,
    idle_limit_us: Cell<u64>,
    cap: Cell<usize>,
    /// Connections closed, by [`WHY`].
    closed: [Cell<u64>; WHY.len()],
}

/// Why connections are closed here, and what counts them.
const WHY: [Tally; 5] =
    [Tally::ClosedIdle, Tally::ClosedEnded, Tally::ClosedFull, Tally::ClosedGone, Tally::ClosedDraining];
const IDLE: usize = 0;
const ENDED: usize = 1;
const FULL: usize = 2;
const GONE: usize = 3;
const DRAINING: usize = 4;

impl<C: Conn> Pool<C> {
    /// A pool that keeps up to `cap` connections a worker for up to `idle_limit_us`.
    pub fn new(idle_limit_us: u64, cap: usize) -> Self {
        Pool {
            shelves: RefCell::default(),
            idle_limit_us: Cell::new(idle_limit_us),
            cap: Cell::new(cap),
            closed: Default::default(),
        }
    }

    fn closed(&self, why: usize, n: usize) {
        self.closed[why].set(self.closed[why].get() + n as u64);
    }

    /// Connections closed since the start, by reason.
    pub fn closings(&self) -> impl Iterator<Item = (Tally, u64)> {
        WHY.into_iter().zip(self.closed.each_ref().map(Cell::get))
    }

    /// From now on up to `cap` connections a worker are kept for up to `idle_limit_us`.
    pub fn limit(&self, idle_limit_us: u64, cap: usize) {
        self.idle_limit_us.set(idle_limit_us);
        self.cap.set(cap);
        for shelf in self.shelves.borrow_mut().iter_mut() {
            // The oldest lie in front.
            let beyond = shelf.idle.drain(..shelf.idle.len().saturating_sub(cap)).count();
            self.closed(FULL, beyond);
        }
    }

    /// The newest usable connection to a worker.
    pub fn take(&self, slot: Slot, era: u32, now_us: u64) -> Option<C> {
        let mut shelves = self.shelves.borrow_mut();
        let shelf = shelves.get_mut(slot as usize)?;
        if shelf.era != era {
            self.closed(GONE, shelf.idle.len());
            shelf.idle.clear();
            return None;
        }
        while let Some(Idle { conn, since_us }) = shelf.idle.pop() {
            if now_us.saturating_sub(since_us) > self.idle_limit_us.get() {
                // The newest is too old, so all are.
                self.closed(IDLE, shelf.idle.len() + 1);
                shelf.idle.clear();
                return None;
            }
            if conn.is_silent() {
                return Some(conn);
            }
            self.closed(ENDED, 1);
        }
        None
    }

    /// Takes a connection back; it is watched for anything that it says or for its end.
    pub fn put(&self, slot: Slot, era: u32, conn: C, now_us: u64) {
        conn.arm();
        let mut shelves = self.shelves.borrow_mut();
        while shelves.len() <= slot as usize {
            shelves.push(Shelf { era: 0, idle: Vec::new() });
        }
        let shelf = &mut shelves[slot as usize];
        if shelf.era != era {
            self.closed(GONE, shelf.idle.len());
            shelf.era = era;
            shelf.idle.clear();
        }
        if shelf.idle.len() < self.cap.get() {
            shelf.idle.push(Idle { conn, since_us: now_us });
        } else {
            self.closed(FULL, 1);
        }
    }

    /// Closes what is too old, has ended, or belongs to a worker that is not given requests any more.
    pub fn sweep(&self, now_us: u64, is_wanted: impl Fn(Slot, u32) -> bool) {
        for (slot, shelf) in self.shelves.borrow_mut().iter_mut().enumerate().filter(|(_, s)| !s.idle.is_empty()) {
            if !is_wanted(slot as Slot, shelf.era) {
                self.closed(GONE, shelf.idle.len());
                shelf.idle.clear();
            }
            shelf.idle.retain(|i| {
                let why = if now_us.saturating_sub(i.since_us) > self.idle_limit_us.get() {
                    IDLE
                } else if !i.conn.is_silent() {
                    ENDED
                } else {
                    return true;
                };
                self.closed(why, 1);
                false
            });
        }
    }

    /// Closes all, because the lane drains.
    pub fn clear(&self) {
        self.closed(DRAINING, self.len());
        self.shelves.borrow_mut().clear();
    }

    /// Connections that are kept at the moment.
    pub fn len(&self) -> usize {
        self.shelves.borrow().iter().map(|s| s.idle.len()).sum()
    }

    /// Whether none is kept.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
