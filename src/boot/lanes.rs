//! The life of a lane: executor, ring, accepting, chores, end.
//!
//! Takes a core and a listener each, gives threads to join. Never shares a lane's things with another thread.

use std::cell::Cell;
use std::future::poll_fn;
use std::net::TcpListener;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::task::ready;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use glommio::{Latency, LocalExecutorBuilder, Placement, Shares};

use super::host::explain_ring;
use crate::config::Config;
use crate::flow::Flow;
use crate::flow::accept::Door;
use crate::lane::Lane;
use crate::lane::spawn::{Pulse, spawn, spawn_aside};
use crate::lane::timers::Timers;
use crate::lane::wire::driver::Driver;
use crate::lane::wire::ring::{Keep, Ring};
use crate::lane::wire::socket::{Listener, RingWire};
use crate::limits::LANE_LOCKED_BYTES;
use crate::metrics::Tally;
use crate::shared::Shared;
use crate::shared::drain::Phase;

/// Shares of the executor's time: requests against chores.
const DATA_SHARES: usize = 1000;
const CHORE_SHARES: usize = 100;
/// Pause between two rounds of chores, each of which is a sign of life.
pub const BEAT: Duration = Duration::from_millis(500);
/// Memory that glommio sets aside for disk I/O, of which lanes do none (its least).
const DISK_BYTES: usize = 64 * 1024;

/// The driver gives way after every turn, so nothing needs to be preempted; glommio's timer for it would cost an
/// interrupt and four allocations each time.
const NO_PREEMPTION: Duration = Duration::from_secs(24 * 3600);

/// Starts a lane on every core; returns when all of them accept.
pub fn start(
    shared: &'static Shared,
    config: &Arc<Config>,
    cores: &[usize],
    listeners: Vec<TcpListener>,
) -> Result<Vec<JoinHandle<()>>, String> {
    let (ready, is_ready) = mpsc::channel();
    let mut threads = Vec::new();
    for (index, (core, listener)) in cores.iter().copied().zip(listeners).enumerate() {
        let (config, ready) = (config.clone(), ready.clone());
        let thread = std::thread::Builder::new()
            .name(format!("lane-{index}"))
            .spawn(move || run(index, core, shared, config, listener, &ready))
            .map_err(|e| format!("the thread of lane {index} could not be started: {e}"))?;
        threads.push(thread);
    }
    drop(ready);
    for _ in cores {
        is_ready.recv().map_err(|_| "a lane ended at start; see the log".to_string())??;
    }
    Ok(threads)
}

fn run(
    index: usize,
    core: usize,
    shared: &'static Shared,
    config: Arc<Config>,
    listener: TcpListener,
    ready: &mpsc::Sender<Result<(), String>>,
) {
    let executor = LocalExecutorBuilder::new(Placement::Fixed(core))
        .io_memory(DISK_BYTES)
        .ring_depth(16)
        .preempt_timer(NO_PREEMPTION)
        .make();
    match executor {
        Ok(executor) => {
            let live = live(index, shared, config, listener, ready);
            if catch_unwind(AssertUnwindSafe(|| executor.run(live))).is_err() {
                // Clients would still be sent to a lane that is gone, and a drain would wait for it: better that
                // whoever watches the process starts it anew.
                tracing::error!(lane = index, "a lane panicked outside of any connection: the process ends");
                std::process::abort();
            }
        }
        Err(e) => {
            let _ = ready.send(Err(format!(
                "lane {index} could not be set up on core {core} ({e}): it needs {} KiB of locked memory a lane, see LimitMEMLOCK= \
                 and ulimit -l; or leave the core out of --cores",
                LANE_LOCKED_BYTES / 1024
            )));
        }
    }
    shared.roster.ended(index);
}

async fn live(
    index: usize,
    shared: &'static Shared,
    config: Arc<Config>,
    listener: TcpListener,
    ready: &mpsc::Sender<Result<(), String>>,
) {
    let ring = match Ring::new() {
        Ok(ring) => ring,
        Err(e) => {
            let _ = ready.send(Err(format!("lane {index} got no ring: {}", explain_ring(e))));
            return;
        }
    };
    let now_us = Rc::new(Cell::new(0));
    let timers = Timers::new(0);
    let pulse = Rc::new(Pulse::default());
    let wire = RingWire::new(&ring, &now_us);
    let seed = fastrand::u64(..);
    let lane = Rc::new(Lane::new(index, shared, Rc::new(Config::clone(&config)), wire, timers.clone(), seed));
    let data = glommio::executor().create_task_queue(Shares::Static(DATA_SHARES), Latency::NotImportant, "data");
    let chores = glommio::executor().create_task_queue(Shares::Static(CHORE_SHARES), Latency::NotImportant, "chores");
    let starter = pulse.clone();
    let flow = Flow::new(lane.clone(), move |task| spawn(&starter, data, task));
    let door = Door { flow, pulse: pulse.clone(), queue: data, turning: Rc::default() };
    let driver = Driver {
        ring: ring.clone(),
        timers: timers.clone(),
        pulse: pulse.clone(),
        now_us,
        epoch: Instant::now(),
        busy_poll_us: config.busy_poll.as_micros() as u64,
        spun_us: Rc::default(),
        slept_us: Rc::default(),
        late_wakes: Rc::new(Cell::new(0)),
    };
    let late_wakes = driver.late_wakes.clone();
    let looked = Looked { since_us: Cell::new(0), spun_us: driver.spun_us.clone(), slept_us: driver.slept_us.clone() };
    spawn(&pulse, data, door.clone().accept(Listener::new(listener.into(), &ring)));
    spawn_aside(&pulse, chores, answer_bell(lane.clone(), door, ring.clone()));
    spawn_aside(&pulse, chores, do_chores(lane.clone(), ring.clone(), pulse.clone(), late_wakes, looked));
    shared.access.set_clock(index, 0);
    let _ = ready.send(Ok(()));

    let (told, ending) = (Cell::new(None), lane.clone());
    let over = move || is_over(&ending, &pulse, &told);
    let task = glommio::spawn_local_into(async move { driver.drive(over).await }, data).expect("a queue of this lane");
    task.await;
    lane.pool.clear();
    ring.wind_down();
}

/// Whether the lane may end: told so, and every task has ended or had the time to. The executor frees no task
/// that has not ended, so one that is left would keep its sockets open: the listener, for one.
fn is_over(lane: &Lane<RingWire>, pulse: &Pulse, told: &Cell<Option<Instant>>) -> bool {
    if !lane.is_ending() {
        return false;
    }
    let since = told.get().unwrap_or_else(|| {
        let now = Instant::now();
        told.set(Some(now));
        now
    });
    pulse.alive() == 0 || since.elapsed() > super::UNWIND
}

/// Wakes up when another thread rings: newcomers, requests that are let in, a new roster, a step of the drain.
async fn answer_bell(lane: Rc<Lane<RingWire>>, door: Door, ring: Rc<Ring>) {
    let bell: BorrowedFd<'static> = lane.shared.handover.bell(lane.index);
    let (mut phase, mut swept) = (Phase::Serving, 0);
    loop {
        while let Some(newcomer) = lane.shared.handover.take(lane.index) {
            door.start(newcomer);
        }
        lane.waiters.call(lane.shared, lane.index);
        lane.adopt();
        lane.view.borrow_mut().refresh();
        let generation = lane.view.borrow().generation();
        if std::mem::replace(&mut swept, generation) != generation {
            lane.sweep();
        }
        if phase != lane.shared.drain.phase() {
            phase = lane.shared.drain.phase();
            if phase >= Phase::Draining {
                lane.pool.clear();
            }
            lane.timers.wake_all();
        }
        if phase >= Phase::Ending {
            return;
        }
        let id = ring.bell(bell);
        let (_, _, keep) = poll_fn(|cx| std::task::Poll::Ready(ready!(ring.poll_op(id, cx)))).await;
        debug_assert!(matches!(keep, Keep::Bell(_)));
    }
}

/// CPU time of the calling thread.
fn cpu_us() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1000
}

/// What went by since the last round of chores, by the driver's clock. That also runs while the lane's thread has no
/// core, so of what the lane was awake it says which part were looks in vain, and not how much they took.
struct Looked {
    since_us: Cell<u64>,
    spun_us: Rc<Cell<u64>>,
    slept_us: Rc<Cell<u64>>,
}

impl Looked {
    /// How much of the CPU time since the last call went into looks; the clock stands at `now_us`.
    fn spent_us(&self, now_us: u64, cpu_us: u64) -> u64 {
        let awake_us = (now_us - self.since_us.replace(now_us)).saturating_sub(self.slept_us.take());
        let spun_us = self.spun_us.take().min(awake_us);
        // What of the CPU time is more than that was spent since the clock was last read, by tasks.
        let cpu_us = cpu_us.min(awake_us);
        (u128::from(cpu_us) * u128::from(spun_us)).checked_div(awake_us.into()).unwrap_or(0) as u64
    }
}

/// What a lane does now and then: old connections are closed, counters published, a beat counted. A lane whose tasks
/// do not give way does not come here.
async fn do_chores(
    lane: Rc<Lane<RingWire>>,
    ring: Rc<Ring>,
    pulse: Rc<Pulse>,
    late_wakes: Rc<Cell<u64>>,
    looked: Looked,
) {
    let timer = lane.timers.timer();
    let publish = |tally: Tally, value: u64| {
        let known = lane.tallies().get(tally);
        lane.count(tally, value - known);
    };
    loop {
        timer.set(timer.now_us() + BEAT.as_micros() as u64);
        poll_fn(|cx| if lane.is_ending() { std::task::Poll::Ready(()) } else { timer.poll_due(cx) }).await;
        lane.view.borrow_mut().refresh();
        lane.sweep();
        publish(Tally::Enters, ring.enters.get());
        publish(Tally::Completions, ring.completions.get());
        publish(Tally::NoBuffers, ring.no_buffers.get());
        publish(Tally::Panics, pulse.panics());
        publish(Tally::LateWakes, late_wakes.get());
        lane.pool.closings().for_each(|(tally, n)| publish(tally, n));
        let tallies = lane.tallies();
        tallies.beats.add(1);
        tallies.pipes_used.set(lane.pipes.used() as u64);
        tallies.pipes_resting.set(lane.pipes.resting() as u64);
        tallies.pool_idle.set(lane.pool.len() as u64);
        tallies.tasks.set(pulse.alive() as u64);
        let cpu = cpu_us();
        tallies.spun_us.add(looked.spent_us(timer.now_us(), cpu - tallies.cpu_us.get()));
        tallies.cpu_us.set(cpu);
        tallies.batches.set(ring.batches.iter().map(Cell::get), ring.completions.get());
        lane.shared.access.set_clock(lane.index, timer.now_us());
        if lane.is_ending() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_take_their_part_of_the_time_that_the_lane_had_a_core() {
        let looked = Looked { since_us: Cell::new(0), spun_us: Rc::default(), slept_us: Rc::default() };
        let mut now_us = 0;
        for (elapsed, slept, spun, cpu, spent) in [
            // It had the core all the time, or slept: what it spun, it spent.
            (500_000, 0, 400_000, 500_000, 400_000),
            (500_000, 100_000, 300_000, 400_000, 300_000),
            // Somebody else had it half of the time: of what was left a fifth was work, not nothing.
            (500_000, 0, 400_000, 250_000, 200_000),
            (500_000, 100_000, 300_000, 200_000, 150_000),
            // It slept and worked, or did neither.
            (500_000, 450_000, 0, 60_000, 0),
            (500_000, 500_000, 0, 0, 0),
            (0, 0, 0, 0, 0),
            // Tasks that ran since the clock was read did not look.
            (1000, 0, 1000, 9000, 1000),
            // A lane that hung for a year.
            (1 << 45, 0, 1 << 44, 1 << 45, 1 << 44),
        ] {
            looked.spun_us.set(spun);
            looked.slept_us.set(slept);
            now_us += elapsed;
            assert_eq!(looked.spent_us(now_us, cpu), spent, "{elapsed} {slept} {spun} {cpu}");
            assert_eq!((looked.spun_us.get(), looked.slept_us.get()), (0, 0));
        }
    }
}
