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

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use crate::config::Config;
use crate::metrics::Tally;
use crate::shared::drain::Phase;
use crate::shared::vitals::Health;
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
    /// What requests go by that begin now; the lane's own copy.
    config: RefCell<Rc<Config>>,
    /// Its generation; 0 for the one that the lane was made with.
    adopted: Cell<u64>,
    pub wire: W,
    pub timers: Rc<Timers>,
    pub buffers: Buffers,
    pub pool: Pool<W::Conn>,
    pub pipes: Pipes<<W::Conn as Conn>::Pipe>,
    pub view: Rc<RefCell<View>>,
    pub rng: RefCell<fastrand::Rng>,
    /// Who waits in the queue of the admission.
    pub waiters: Waiters,
}

impl<W: Wire> Lane<W> {
    /// A lane without connections.
    pub fn new(
        index: usize,
        shared: &'static Shared,
        config: Rc<Config>,
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
            config: RefCell::new(config),
            adopted: Cell::new(0),
            wire,
            timers,
            buffers: Buffers::default(),
            view: Rc::new(RefCell::new(View::new(index, shared, default_model))),
            rng: RefCell::new(fastrand::Rng::with_seed(seed)),
            waiters: Waiters::default(),
        }
    }

    /// The configuration for who begins something now. It stays as it is for as long as it is kept.
    pub fn config(&self) -> Rc<Config> {
        self.adopt();
        self.config.borrow().clone()
    }

    /// Puts the newest configuration in the place of an older one.
    #[inline]
    pub fn renew(&self, known: &mut Rc<Config>) {
        self.adopt();
        let newest = self.config.borrow();
        if !Rc::ptr_eq(known, &newest) {
            known.clone_from(&newest);
        }
    }

    /// Takes the newest configuration over if there is one that the lane does not know. An idle lane must when its bell
    /// rings.
    #[inline]
    pub fn adopt(&self) {
        if self.shared.settings.generation() != self.adopted.get() {
            self.adopt_newest();
        }
    }

    #[cold]
    fn adopt_newest(&self) {
        let Some(newest) = self.shared.settings.newest() else { return };
        let config = newest.config.clone();
        self.pool.limit(config.pool_idle.as_micros() as u64, config.pool_size);
        self.pipes.limit(config.pipes_per_lane);
        self.view.borrow_mut().set_default_model(config.default_model.as_deref());
        self.adopted.set(newest.generation);
        self.config.replace(Rc::new(config));
    }

    /// Closes connections to workers that are not to be used again: old ones, and those to workers that drain or are gone.
    pub fn sweep(&self) {
        let view = self.view.borrow();
        let vitals = &self.shared.vitals;
        let is_wanted = |slot, era| view.worker(slot, era).is_some() && vitals.health(slot) != Health::Draining;
        self.pool.sweep(self.wire.now_us(), is_wanted);
    }

    /// The lane's counters.
    pub fn tallies(&self) -> &'static tallies::Lane {
        self.shared.tallies.lane(self.index)
    }

    /// Adds to one of the lane's counters.
    pub fn count(&self, tally: Tally, n: u64) {
        self.tallies().add(tally, n);
    }

    /// When a worker whose answer has begun is given up if nothing more comes for so long (zero: never) after `since_us`;
    /// the deadline at the latest.
    pub fn stall_deadline(&self, since_us: u64, stall: Duration, deadline_us: u64) -> u64 {
        match stall.as_micros() as u64 {
            0 => deadline_us,
            stall_us => deadline_us.min(since_us + stall_us),
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
