//! The world of one seed: clock, dice, tasks, what is due, and the trace of all that happened.
//!
//! Takes futures and things to do later, gives them their turns. Never asks anything but its seed: which task goes
//! next, how long something takes, what breaks.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use slab::Slab;

/// Whose a task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// The code under test.
    Gateway,
    Client,
    Worker,
}

struct Task {
    who: Who,
    /// Taken while it runs.
    future: Option<Pin<Box<dyn Future<Output = ()>>>>,
    flag: Arc<Flag>,
}

/// Marks a task as runnable.
struct Flag {
    key: usize,
    queued: AtomicBool,
    ready: Arc<Mutex<Vec<usize>>>,
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }
    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::Relaxed) {
            self.ready.lock().unwrap().push(self.key);
        }
    }
}

/// Something to do at a time; in the order of their making where times are equal.
struct Due {
    at_us: u64,
    seq: u64,
    act: Box<dyn FnOnce()>,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.seq == other.seq
    }
}
impl Eq for Due {}
impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_us, self.seq).cmp(&(other.at_us, other.seq))
    }
}

/// Everything that one seed decides.
pub struct World {
    now_us: Cell<u64>,
    dice: RefCell<fastrand::Rng>,
    due: RefCell<BinaryHeap<Reverse<Due>>>,
    seq: Cell<u64>,
    tasks: RefCell<Slab<Task>>,
    ready: Arc<Mutex<Vec<usize>>>,
    alive: [Cell<usize>; 3],
    polls: Cell<u64>,
    hash: Cell<u64>,
    /// Lines of the trace, where somebody wants to read them.
    lines: Option<RefCell<Vec<String>>>,
    violation: RefCell<Option<String>>,
    numbers: Cell<u64>,
}

impl World {
    /// A world at the beginning of time. `told`: the trace is kept as text, too.
    pub fn new(seed: u64, told: bool) -> Rc<World> {
        Rc::new(World {
            now_us: Cell::new(0),
            dice: RefCell::new(fastrand::Rng::with_seed(seed)),
            due: RefCell::default(),
            seq: Cell::new(0),
            tasks: RefCell::default(),
            ready: Arc::default(),
            alive: Default::default(),
            polls: Cell::new(0),
            hash: Cell::new(0xcbf2_9ce4_8422_2325),
            lines: told.then(RefCell::default),
            violation: RefCell::new(None),
            numbers: Cell::new(0),
        })
    }

    pub fn now_us(&self) -> u64 {
        self.now_us.get()
    }

    pub fn set_now(&self, now_us: u64) {
        self.now_us.set(now_us);
    }

    // ── dice ────────────────────────────────────────────────────────────────────────────────────────────────────

    /// A number of `from..to`.
    pub fn roll(&self, from: u64, to: u64) -> u64 {
        if from >= to { from } else { self.dice.borrow_mut().u64(from..to) }
    }

    /// True once in `n` times; never for 0.
    pub fn once_in(&self, n: u64) -> bool {
        n > 0 && self.dice.borrow_mut().u64(..n) == 0
    }

    /// One of several.
    pub fn one<T: Copy>(&self, of: &[T]) -> T {
        of[self.dice.borrow_mut().usize(..of.len())]
    }

    /// A number that nothing else has.
    pub fn number(&self) -> u64 {
        self.numbers.set(self.numbers.get() + 1);
        self.numbers.get()
    }

    /// How much of `n` things comes at once: mostly all, at least one.
    pub fn portion(&self, n: usize) -> usize {
        if n <= 1 {
            return n;
        }
        match self.roll(0, 10) {
            0 => self.roll(1, 1 + (n as u64).min(9)) as usize,
            1 | 2 => self.roll(1, n as u64) as usize,
            _ => n,
        }
    }

    // ── trace ───────────────────────────────────────────────────────────────────────────────────────────────────

    /// Notes what happened.
    pub fn note(&self, what: &str, a: u64, b: u64, c: u64) {
        let mut hash = self.hash.get();
        let mut mix = |value: u64| hash = (hash ^ value).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
        what.bytes().for_each(|byte| mix(byte.into()));
        [self.now_us(), a, b, c].into_iter().for_each(&mut mix);
        self.hash.set(hash);
        if let Some(lines) = &self.lines {
            lines.borrow_mut().push(format!("{:>10} {what} {a} {b} {c}", self.now_us()));
        }
    }

    /// Notes more of it, for readers only.
    pub fn tell(&self, text: impl FnOnce() -> String) {
        if let Some(lines) = &self.lines {
            lines.borrow_mut().push(format!("{:>10} {}", self.now_us(), text()));
        }
    }

    pub fn hash(&self) -> u64 {
        self.hash.get()
    }

    pub fn lines(&self) -> Vec<String> {
        self.lines.as_ref().map(|lines| lines.borrow().clone()).unwrap_or_default()
    }

    /// Says that something is wrong; the first word counts.
    pub fn violated(&self, what: impl FnOnce() -> String) {
        let mut first = self.violation.borrow_mut();
        if first.is_none() {
            *first = Some(format!("at {} µs: {}", self.now_us(), what()));
        }
    }

    pub fn violation(&self) -> Option<String> {
        self.violation.borrow().clone()
    }

    // ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────────

    pub fn spawn(&self, who: Who, future: impl Future<Output = ()> + 'static) {
        let mut tasks = self.tasks.borrow_mut();
        let entry = tasks.vacant_entry();
        let flag = Arc::new(Flag { key: entry.key(), queued: AtomicBool::new(false), ready: self.ready.clone() });
        flag.wake_by_ref();
        entry.insert(Task { who, future: Some(Box::pin(future)), flag });
        let alive = &self.alive[who as usize];
        alive.set(alive.get() + 1);
    }

    /// Tasks that have not ended.
    pub fn alive(&self, who: Who) -> usize {
        self.alive[who as usize].get()
    }

    /// Polls so far.
    pub fn polls(&self) -> u64 {
        self.polls.get()
    }

    pub fn is_quiet(&self) -> bool {
        self.ready.lock().unwrap().is_empty()
    }

    /// Polls one of the runnable tasks; false when there is none.
    pub fn run_one(&self) -> bool {
        let key = {
            let mut ready = self.ready.lock().unwrap();
            if ready.is_empty() {
                return false;
            }
            let at = self.dice.borrow_mut().usize(..ready.len());
            ready.swap_remove(at)
        };
        self.polls.set(self.polls.get() + 1);
        let (mut future, flag, who) = {
            let mut tasks = self.tasks.borrow_mut();
            // A waker may outlive its task.
            let Some(task) = tasks.get_mut(key) else { return true };
            task.flag.queued.store(false, Ordering::Relaxed);
            let Some(future) = task.future.take() else { return true };
            (future, task.flag.clone(), task.who)
        };
        self.note("poll", key as u64, who as u64, 0);
        let waker = Waker::from(flag);
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(()) => {
                self.note("ended", key as u64, who as u64, 0);
                drop(future);
                self.tasks.borrow_mut().remove(key);
                let alive = &self.alive[who as usize];
                alive.set(alive.get() - 1);
            }
            Poll::Pending => self.tasks.borrow_mut()[key].future = Some(future),
        }
        true
    }

    // ── time ────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Does something in `us` microseconds.
    pub fn after(&self, us: u64, act: impl FnOnce() + 'static) {
        let seq = self.seq.get();
        self.seq.set(seq + 1);
        self.due.borrow_mut().push(Reverse(Due { at_us: self.now_us() + us, seq, act: Box::new(act) }));
    }

    /// When the next thing is due.
    pub fn next_due(&self) -> Option<u64> {
        self.due.borrow().peek().map(|Reverse(due)| due.at_us)
    }

    /// Does what is due now.
    pub fn do_due(&self) {
        loop {
            let next = {
                let mut due = self.due.borrow_mut();
                match due.peek() {
                    Some(Reverse(next)) if next.at_us <= self.now_us() => due.pop(),
                    _ => None,
                }
            };
            let Some(Reverse(next)) = next else { return };
            (next.act)();
        }
    }

    /// Waits.
    pub async fn sleep(&self, us: u64) {
        let bell = Bell::new();
        let ring = bell.clone();
        self.after(us, move || ring.ring());
        bell.rung().await;
    }

    /// Lets go of everything, so that nothing keeps itself alive in a circle.
    pub fn end(&self) {
        // Dropped outside of the borrow: what is dropped may ask for something.
        for _ in 0..8 {
            let tasks = std::mem::take(&mut *self.tasks.borrow_mut());
            drop(tasks);
            let due = std::mem::take(&mut *self.due.borrow_mut());
            drop(due);
        }
    }
}

/// Something that happens once, and who waits for it.
#[derive(Default)]
pub struct Bell {
    rung: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
}

impl Bell {
    pub fn new() -> Rc<Bell> {
        Rc::default()
    }

    pub fn ring(&self) {
        self.rung.set(true);
        self.waiting.take().into_iter().for_each(Waker::wake);
    }

    pub fn is_rung(&self) -> bool {
        self.rung.get()
    }

    pub fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.rung.get() {
            return Poll::Ready(());
        }
        let mut waiting = self.waiting.borrow_mut();
        if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
            waiting.push(cx.waker().clone());
        }
        Poll::Pending
    }

    pub async fn rung(&self) {
        poll_fn(|cx| self.poll(cx)).await
    }
}
