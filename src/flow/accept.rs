//! Accept: new connections come in and are spread over the lanes.
//!
//! Takes a listener, gives every connection a task, on this lane or on the one that has the fewest, or an answer that
//! there is no room. Never stops for a failed accept: it is counted, and the next one is tried after a breath.

use std::cell::Cell;
use std::future::poll_fn;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::task::Poll;

use glommio::TaskQueueHandle;

use crate::flow::Flow;
use crate::lane::spawn::{Pulse, spawn};
use crate::lane::wire::socket::{Listener, RingWire, Socket};
use crate::metrics::Tally;
use crate::shared::handover::Newcomer;

/// A lane that has this many connections more than the emptiest gives new ones away.
const AHEAD: u32 = 1;
/// Pause in microseconds after an accept that failed, so that a lack of descriptors does not spin.
const BREATH_US: u64 = 50_000;

/// Connections that are turned away at a time with an answer: a part of those that are served, within bounds. What
/// comes beyond is closed without one.
const TURNING_SHARE: u32 = 4;
const TURNING: RangeInclusive<u32> = 4..=256;

/// What accepting needs to start tasks.
#[derive(Clone)]
pub struct Door {
    pub flow: Rc<Flow<RingWire>>,
    pub pulse: Rc<Pulse>,
    pub queue: TaskQueueHandle,
    /// Connections that are being turned away at the moment.
    pub turning: Rc<Cell<u32>>,
}

impl Door {
    /// Accepts until the process drains.
    pub async fn accept(self, listener: Listener) {
        let lane = &self.flow.lane;
        let timer = lane.timers.timer();
        loop {
            let accepted = poll_fn(|cx| {
                if lane.is_draining() {
                    return Poll::Ready(None);
                }
                let _ = timer.poll_due(cx);
                listener.poll_accept(cx).map(Some)
            })
            .await;
            match accepted {
                None => return,
                Some(Ok(socket)) => self.admit(socket),
                Some(Err(_)) => {
                    lane.count(Tally::AcceptErrors, 1);
                    timer.set(timer.now_us() + BREATH_US);
                    timer.due().await;
                    timer.clear();
                }
            }
        }
    }

    /// Gives a new connection to the lane with the fewest.
    fn admit(&self, socket: OwnedFd) {
        let lane = &self.flow.lane;
        lane.count(Tally::Accepted, 1);
        // A peer that is gone already has no name, and no use for an answer.
        let Some(peer) = rustix::net::getpeername(&socket).ok().flatten().and_then(|a| a.try_into().ok()) else {
            return;
        };
        let desks = &lane.shared.handover;
        let emptiest = desks.emptiest();
        let newcomer = Newcomer { socket, peer };
        let most = lane.config().max_connections_per_lane;
        if desks.connections(emptiest) >= most {
            return self.turn_away(newcomer, most);
        }
        if desks.connections(lane.index) >= desks.connections(emptiest) + AHEAD {
            desks.joined(emptiest);
            match desks.give(emptiest, newcomer) {
                Ok(()) => return lane.count(Tally::HandedOver, 1),
                Err(newcomer) => {
                    desks.left(emptiest);
                    return self.start_counted(newcomer);
                }
            }
        }
        self.start_counted(newcomer);
    }

    /// Says no to a connection for which there is no room, where there is room for that.
    fn turn_away(&self, newcomer: Newcomer, most: u32) {
        let lane = &self.flow.lane;
        lane.count(Tally::TurnedAway, 1);
        if self.turning.get() >= (most / TURNING_SHARE).clamp(*TURNING.start(), *TURNING.end()) {
            return;
        }
        let turning = Turning::new(&self.turning);
        let flow = self.flow.clone();
        let conn = Socket::new(newcomer.socket, lane.wire.ring());
        spawn(&self.pulse, self.queue, async move {
            let _turning = turning;
            flow.turn_away(conn, newcomer.peer).await;
        });
    }

    fn start_counted(&self, newcomer: Newcomer) {
        self.flow.lane.shared.handover.joined(self.flow.lane.index);
        self.start(newcomer);
    }

    /// Starts the task of a connection that is counted already.
    pub fn start(&self, newcomer: Newcomer) {
        let flow = self.flow.clone();
        let conn = Socket::new(newcomer.socket, flow.lane.wire.ring());
        let seat = Seat { flow: flow.clone() };
        spawn(&self.pulse, self.queue, async move {
            let _seat = seat;
            flow.serve(conn, newcomer.peer).await;
        });
    }
}

/// A connection that is being turned away.
struct Turning(Rc<Cell<u32>>);

impl Turning {
    fn new(count: &Rc<Cell<u32>>) -> Self {
        count.set(count.get() + 1);
        Turning(count.clone())
    }
}

impl Drop for Turning {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// A connection's place in the lane's count.
struct Seat {
    flow: Rc<Flow<RingWire>>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let lane = &self.flow.lane;
        lane.shared.handover.left(lane.index);
    }
}
