//! The one place where a lane waits.
//!
//! Takes the ring, the timers and the pulse; gives wake-ups. Blocks in the kernel only when a whole yield
//! cycle ran no task and, where it is told to, looking for more in vain took as long as it may; and then no longer
//! than the next timer. A look is a whole turn that does not block: clock, timers, bell and end are minded as ever.
//! After a standstill tasks see what arrived meanwhile, and only then the clock is held against the timers.

use std::cell::Cell;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use super::ring::Ring;
use crate::lane::spawn::Pulse;
use crate::lane::timers::Timers;

/// Longest sleep without a completion or a timer: a bound on what a lost wake-up could cost.
const LONGEST_SLEEP: Duration = Duration::from_millis(500);
/// Microseconds beyond its sleep after which a turn says that the lane stood still: its process was stopped, or starved,
/// or its tasks ran for so long.
const STANDSTILL_US: u64 = 250_000;
/// Microseconds for which what arrived in a standstill goes before the timers, if there is so much of it.
const CATCH_UP_US: u64 = 500_000;
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
    /// Microseconds that the lane goes on looking, after it last had something to do, before it sleeps; 0: none.
    pub busy_poll_us: u64,
    /// Microseconds that went by between looks that brought nothing.
    pub spun_us: Rc<Cell<u64>>,
    /// Microseconds that went by in sleeps, where the lane looks before them.
    pub slept_us: Rc<Cell<u64>>,
    /// Sleeps that timed out, and looks that brought nothing, although a task was runnable.
    pub late_wakes: Rc<Cell<u64>>,
}

impl Driver {
    /// Runs the lane until `ended` says so (asked once a turn).
    pub async fn drive(&self, ended: impl Fn() -> bool) {
        let mut woken: Vec<Waker> = Vec::with_capacity(256);
        let mut quiet = false;
        // The clock at the first look since there was something to do.
        let mut looks_since: Option<u64> = None;
        // The clock when a standstill was found out, until all that came in it is seen.
        let mut behind_since: Option<u64> = None;
        while !ended() {
            let was = self.now_us.get();
            let looks = quiet && self.busy_poll_us > 0 && looks_since.is_none_or(|us| was - us < self.busy_poll_us);
            let wait = (quiet && !looks && behind_since.is_none()).then(|| {
                self.timers.next_us().map_or(LONGEST_SLEEP, |us| Duration::from_micros(us).min(LONGEST_SLEEP))
            });
            let passed = self.ring.passed.get();
            let brought = self.turn(wait, &mut woken);
            let now = self.now_us.get();
            let passed = self.ring.passed.get() != passed;
            let due = was + wait.map_or(0, |wait| wait.as_micros() as u64);
            behind_since = match behind_since {
                None if now > due + STANDSTILL_US => Some(now),
                Some(_) if quiet && brought == 0 => None,
                since => since.filter(|since| now - since <= CATCH_UP_US),
            };
            // Nobody's time is over before what came in a standstill was seen.
            if behind_since.is_none() {
                self.timers.advance(now, &mut woken);
            }
            let in_vain = quiet && woken.is_empty() && !passed;
            if wait.is_some() && self.busy_poll_us > 0 {
                // What it did since `was` is the end of a look in vain.
                self.slept_us.set(self.slept_us.get() + (now - was));
            }
            if looks {
                if in_vain && looks_since.is_some() {
                    self.spun_us.set(self.spun_us.get() + (now - was));
                }
                looks_since.get_or_insert(now);
            }
            woken.drain(..).for_each(Waker::wake);
            let before = self.pulse.polls();
            quiet = self.run_tasks().await;
            if passed {
                looks_since = None;
            }
            if self.pulse.polls() != before {
                looks_since = None;
                self.late_wakes.set(self.late_wakes.get() + in_vain as u64);
            }
        }
    }

    /// A turn of the ring, and the clock as it is then; gives how many completions it brought.
    fn turn(&self, wait: Option<Duration>, woken: &mut Vec<Waker>) -> u64 {
        let before = self.ring.completions.get();
        self.ring.turn(wait, woken, || {
            self.now_us.set(self.epoch.elapsed().as_micros() as u64);
            Some(self.now_us.get())
        });
        self.ring.completions.get() - before
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
