//! The one place where a lane waits.
//!
//! Takes the ring, the timers and the pulse; gives wake-ups. Blocks in the kernel only when a whole yield
//! cycle ran no task, and then no longer than the next timer.

use std::cell::Cell;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use super::ring::Ring;
use crate::lane::spawn::Pulse;
use crate::lane::timers::Timers;

/// Longest sleep without a completion or a timer: a bound on what a lost wake-up could cost.
const LONGEST_SLEEP: Duration = Duration::from_millis(500);
/// Yield cycles that may run tasks before the ring is looked at again.
const CYCLES: usize = 4;

/// What the driver moves.
pub struct Driver {
    pub ring: Rc<Ring>,
    pub timers: Rc<Timers>,
    pub pulse: Rc<Pulse>,
    /// The lane's clock in microseconds.
    pub now_us: Rc<Cell<u64>>,
    /// Where the clock stood at 0.
    pub epoch: Instant,
    /// Sleeps that timed out although a task was runnable.
    pub late_wakes: Rc<Cell<u64>>,
}

impl Driver {
    /// Runs the lane until `ended` says so (asked once a turn).
    pub async fn drive(&self, ended: impl Fn() -> bool) {
        let mut woken: Vec<Waker> = Vec::with_capacity(256);
        let mut quiet = false;
        while !ended() {
            let wait = quiet.then(|| {
                self.timers.next_us().map_or(LONGEST_SLEEP, |us| Duration::from_micros(us).min(LONGEST_SLEEP))
            });
            self.ring.turn(wait, &mut woken);
            let now = self.epoch.elapsed().as_micros() as u64;
            self.now_us.set(now);
            self.timers.advance(now, &mut woken);
            let slept_in_vain = quiet && woken.is_empty();
            woken.drain(..).for_each(Waker::wake);
            let before = self.pulse.polls();
            quiet = self.run_tasks().await;
            if slept_in_vain && self.pulse.polls() != before {
                self.late_wakes.set(self.late_wakes.get() + 1);
            }
        }
    }

    /// Lets tasks run; true when in the end none was runnable.
    async fn run_tasks(&self) -> bool {
        for _ in 0..CYCLES {
            let before = self.pulse.polls();
            if self.pulse.take_aside() {
                glommio::executor().yield_task_queue_now().await;
            } else {
                // Within the queue: far cheaper, and enough while no other queue has anything to do.
                yield_once().await;
            }
            if self.pulse.polls() == before {
                return true;
            }
        }
        false
    }
}

/// Lets every task of this queue run that is runnable now.
async fn yield_once() {
    let mut yielded = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}
