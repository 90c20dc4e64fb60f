//! Those of a lane's tasks that wait until another thread lets them in.
//!
//! Takes a task's waker under a seat, gives it back when the seat is called. Never wakes who was not called, but for
//! a seat that has changed hands: who sits there looks and waits on.

use std::cell::RefCell;
use std::task::{Context, Waker};

use slab::Slab;

use crate::shared::{Shared, admission};

/// A lane's seats.
#[derive(Default)]
pub struct Waiters {
    seats: RefCell<Slab<Option<Waker>>>,
    /// Who was called, between two calls empty: kept for its memory.
    called: RefCell<Vec<usize>>,
}

/// A seat; free again when it is dropped.
pub struct Seat<'a> {
    waiters: &'a Waiters,
    /// What the lane's admission is told of it.
    pub number: usize,
}

impl Waiters {
    /// A seat for the task at hand.
    pub fn sit(&self) -> Seat<'_> {
        Seat { waiters: self, number: self.seats.borrow_mut().insert(None) }
    }

    /// Wakes those who were let in.
    pub fn call(&self, shared: &Shared, lane: usize) {
        let mut called = self.called.take();
        admission::called(shared, lane, &mut called);
        for seat in called.drain(..) {
            let waker = self.seats.borrow_mut().get_mut(seat).and_then(Option::take);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
        self.called.replace(called);
    }
}

impl Seat<'_> {
    /// Notes whom to wake.
    pub fn watch(&self, cx: &Context<'_>) {
        let mut seats = self.waiters.seats.borrow_mut();
        let waker = &mut seats[self.number];
        if waker.as_ref().is_none_or(|known| !known.will_wake(cx.waker())) {
            let old = waker.replace(cx.waker().clone());
            // Dropped after the borrow: a waker's drop may run code that comes back here.
            drop(seats);
            drop(old);
        }
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let waker = self.waiters.seats.borrow_mut().remove(self.number);
        drop(waker);
    }
}
