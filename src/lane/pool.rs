//! Idle connections to workers, one lane's own.
//!
//! Takes connections whose answer was complete, gives the newest one back that is still silent and young
//! enough. Never gives a connection of another tenant of the slot, nor one that said anything while idle.

use std::cell::RefCell;

use crate::lane::wire::Conn;
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
    idle_limit_us: u64,
    cap: usize,
}

impl<C: Conn> Pool<C> {
    /// A pool that keeps up to `cap` connections a worker for up to `idle_limit_us`.
    pub fn new(idle_limit_us: u64, cap: usize) -> Self {
        Pool { shelves: RefCell::default(), idle_limit_us, cap }
    }

    /// The newest usable connection to a worker.
    pub fn take(&self, slot: Slot, era: u32, now_us: u64) -> Option<C> {
        let mut shelves = self.shelves.borrow_mut();
        let shelf = shelves.get_mut(slot as usize)?;
        if shelf.era != era {
            shelf.idle.clear();
            return None;
        }
        while let Some(Idle { conn, since_us }) = shelf.idle.pop() {
            if now_us.saturating_sub(since_us) > self.idle_limit_us {
                // The newest is too old, so all are.
                shelf.idle.clear();
                return None;
            }
            if conn.is_silent() {
                return Some(conn);
            }
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
            shelf.era = era;
            shelf.idle.clear();
        }
        if shelf.idle.len() < self.cap {
            shelf.idle.push(Idle { conn, since_us: now_us });
        }
    }

    /// Closes what is too old or has ended.
    pub fn sweep(&self, now_us: u64) {
        for shelf in self.shelves.borrow_mut().iter_mut() {
            shelf.idle.retain(|i| now_us.saturating_sub(i.since_us) <= self.idle_limit_us && i.conn.is_silent());
        }
    }

    /// Closes all.
    pub fn clear(&self) {
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
