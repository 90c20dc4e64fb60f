//! What one core owns: its ring and sockets, pool, timers, buffers, its view of the fleet.
//!
//! Takes the shared state by `&'static`, gives rooms what they need by reference. Never leaves its thread
//! (`Rc`, `Cell`), never shares anything but through [`crate::shared`].

pub mod buffers;
pub mod pipes;
pub mod pool;
pub mod spawn;
pub mod timers;
pub mod view;
pub mod waiters;
pub mod wire;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use crate::config::Config;
use crate::metrics::Tally;
use crate::shared::drain::Phase;
use crate::shared::{Shared, tallies};

use buffers::Buffers;
use pipes::Pipes;
use pool::Pool;
use timers::Timers;
use view::View;
use waiters::Waiters;
use wire::{Conn, Wire};

/// One data-plane core.
pub struct Lane<W: Wire> {
    /// Which lane, from 0.
    pub index: usize,
    pub shared: &'static Shared,
    pub config: Arc<Config>,
    pub wire: W,
    pub timers: Rc<Timers>,
    pub buffers: Buffers,
    pub pool: Pool<W::Conn>,
    pub pipes: Pipes<<W::Conn as Conn>::Pipe>,
    pub view: RefCell<View>,
    pub rng: RefCell<fastrand::Rng>,
    /// Who waits in the queue of the admission.
    pub waiters: Waiters,
}

impl<W: Wire> Lane<W> {
    /// A lane without connections.
    pub fn new(
        index: usize,
        shared: &'static Shared,
        config: Arc<Config>,
        wire: W,
        timers: Rc<Timers>,
        seed: u64,
    ) -> Self {
        let default_model = config.default_model.as_deref().map(Box::from);
        Lane {
            index,
            shared,
            pool: Pool::new(config.pool_idle.as_micros() as u64, config.pool_size),
            pipes: Pipes::new(config.pipes_per_lane, config.pipe_bytes),
            config,
            wire,
            timers,
            buffers: Buffers::default(),
            view: RefCell::new(View::new(index, shared, default_model)),
            rng: RefCell::new(fastrand::Rng::with_seed(seed)),
            waiters: Waiters::default(),
        }
    }

    /// The lane's counters.
    pub fn tallies(&self) -> &'static tallies::Lane {
        self.shared.tallies.lane(self.index)
    }

    /// Adds to one of the lane's counters.
    pub fn count(&self, tally: Tally, n: u64) {
        self.tallies().add(tally, n);
    }

    /// When a worker whose answer has begun is given up if nothing more comes; the deadline at the latest.
    pub fn stall_deadline(&self, deadline_us: u64) -> u64 {
        match self.config.stall_timeout.as_micros() as u64 {
            0 => deadline_us,
            stall_us => deadline_us.min(self.wire.now_us() + stall_us),
        }
    }

    /// Whether connections are to be closed when their request is done.
    pub fn is_draining(&self) -> bool {
        self.shared.drain.phase() >= Phase::Draining
    }

    /// Whether what is in flight is to be cut.
    pub fn is_ending(&self) -> bool {
        self.shared.drain.phase() >= Phase::Ending
    }
}
