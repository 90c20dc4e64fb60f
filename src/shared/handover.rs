//! New connections on their way from the lane that accepted them to the lane that has the fewest, and the
//! eventfds by which a lane is woken from outside.
//!
//! Takes accepted sockets from any lane, gives them to one. Never blocks: a full queue returns the socket.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use crossbeam::queue::ArrayQueue;
use crossbeam::utils::CachePadded;
use rustix::event::{EventfdFlags, eventfd};

use crate::limits::HANDOVER_QUEUE;

/// An accepted connection that no lane owns yet.
#[derive(Debug)]
pub struct Newcomer {
    pub socket: OwnedFd,
    pub peer: SocketAddr,
}

struct Desk {
    queue: ArrayQueue<Newcomer>,
    /// Client connections of the lane, waiting ones included. Writer: whoever accepts for it, and the lane itself.
    connections: AtomicU32,
    bell: OwnedFd,
}

/// One desk a lane.
pub struct Handover {
    desks: Box<[CachePadded<Desk>]>,
}

impl Handover {
    /// Desks for `lanes` lanes.
    ///
    /// # Panics
    /// When the process has no file descriptors left for the eventfds.
    pub fn new(lanes: usize) -> Self {
        Handover {
            desks: (0..lanes)
                .map(|_| {
                    CachePadded::new(Desk {
                        queue: ArrayQueue::new(HANDOVER_QUEUE),
                        connections: AtomicU32::new(0),
                        bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                            .expect("file descriptors for the lanes' eventfds"),
                    })
                })
                .collect(),
        }
    }

    /// The eventfd that wakes the lane; the lane's ring reads it.
    pub fn bell(&self, lane: usize) -> BorrowedFd<'_> {
        self.desks[lane].bell.as_fd()
    }

    /// Wakes a lane from any thread.
    pub fn ring(&self, lane: usize) {
        // The only failure of a non-blocking eventfd write is a full counter, and then the lane wakes anyway.
        let _ = rustix::io::write(&self.desks[lane].bell, &1u64.to_ne_bytes());
    }

    /// Client connections of a lane.
    pub fn connections(&self, lane: usize) -> u32 {
        self.desks[lane].connections.load(Ordering::Relaxed)
    }

    /// Counts a connection for a lane.
    pub fn joined(&self, lane: usize) {
        self.desks[lane].connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Uncounts a connection of a lane.
    pub fn left(&self, lane: usize) {
        self.desks[lane].connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// The lane with the fewest connections.
    pub fn emptiest(&self) -> usize {
        (0..self.desks.len()).min_by_key(|&l| self.connections(l)).unwrap_or(0)
    }

    /// Gives a connection to another lane and wakes it; returns it when the lane's queue is full.
    pub fn give(&self, lane: usize, newcomer: Newcomer) -> Result<(), Newcomer> {
        self.desks[lane].queue.push(newcomer)?;
        self.ring(lane);
        Ok(())
    }

    /// Takes the next connection that was given to this lane.
    pub fn take(&self, lane: usize) -> Option<Newcomer> {
        self.desks[lane].queue.pop()
    }
}
