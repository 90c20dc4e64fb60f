//! The one way to start a task on a lane.
//!
//! Takes a future, gives it to the executor wrapped so that a panic ends this task alone and every poll is
//! counted. Never lets a task run uncounted: the count is how the driver knows that the lane is quiet.

use std::cell::Cell;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use glommio::TaskQueueHandle;

/// Polls of all tasks of a lane, and the panics among them.
#[derive(Default)]
pub struct Pulse {
    polls: Cell<u64>,
    panics: Cell<u64>,
    alive: Cell<usize>,
    /// Some task of another queue is runnable.
    aside: Arc<AtomicBool>,
}

impl Pulse {
    /// Whether a task outside of the driver's queue was woken since the last call.
    pub fn take_aside(&self) -> bool {
        // Relaxed: set and taken on this thread; atomic only because a waker must be.
        self.aside.load(Ordering::Relaxed) && self.aside.swap(false, Ordering::Relaxed)
    }

    /// Polls so far.
    pub fn polls(&self) -> u64 {
        self.polls.get()
    }
    /// Panics caught so far.
    pub fn panics(&self) -> u64 {
        self.panics.get()
    }
    /// Tasks that have not ended.
    pub fn alive(&self) -> usize {
        self.alive.get()
    }
}

struct Counted<F> {
    future: Pin<Box<F>>,
    pulse: Rc<Pulse>,
}

impl<F> Drop for Counted<F> {
    fn drop(&mut self) {
        self.pulse.alive.set(self.pulse.alive.get() - 1);
    }
}

impl<F: Future<Output = ()>> Future for Counted<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.pulse.polls.set(self.pulse.polls.get() + 1);
        match catch_unwind(AssertUnwindSafe(|| self.future.as_mut().poll(cx))) {
            Ok(poll) => poll,
            Err(_) => {
                self.pulse.panics.set(self.pulse.panics.get() + 1);
                tracing::error!("a task of the lane panicked; its connection is closed, the lane goes on");
                Poll::Ready(())
            }
        }
    }
}

/// Starts a task in a queue beside the driver's: chores. Its wake-ups are noted, so that the driver gives way to
/// other queues then, and only then.
pub fn spawn_aside(pulse: &Rc<Pulse>, queue: TaskQueueHandle, future: impl Future<Output = ()> + 'static) {
    pulse.aside.store(true, Ordering::Relaxed);
    let aside = pulse.aside.clone();
    let mut future = Box::pin(future);
    let mut noted: Option<Waker> = None;
    let mut inner: Option<Waker> = None;
    spawn(
        pulse,
        queue,
        std::future::poll_fn(move |cx| {
            if inner.as_ref().is_none_or(|w| !w.will_wake(cx.waker())) {
                inner = Some(cx.waker().clone());
                noted = Some(Waker::from(Arc::new(Noted { aside: aside.clone(), task: cx.waker().clone() })));
            }
            let waker = noted.as_ref().expect("made above");
            future.as_mut().poll(&mut Context::from_waker(waker))
        }),
    );
}

struct Noted {
    aside: Arc<AtomicBool>,
    task: Waker,
}

impl Wake for Noted {
    fn wake(self: Arc<Self>) {
        self.aside.store(true, Ordering::Relaxed);
        self.task.wake_by_ref();
    }
}

/// Starts a task in one of the lane's queues.
pub fn spawn(pulse: &Rc<Pulse>, queue: TaskQueueHandle, future: impl Future<Output = ()> + 'static) {
    pulse.alive.set(pulse.alive.get() + 1);
    let counted = Counted { future: Box::pin(future), pulse: pulse.clone() };
    // The queue was made by this executor, which is the only way that this can fail.
    glommio::spawn_local_into(counted, queue).expect("a queue of this lane").detach();
}
