//! The lane's own io_uring: submission, completion, cancellation, and the ownership of what is in flight.
//!
//! Takes operations together with everything they point to (file, buffer, address) and gives results to
//! whoever asks by id; arrivals that are to go on as they are (see [`Pass`]) become the next send, and nobody is asked.
//! Never frees what the kernel may still touch: an operation that nobody waits for any
//! more is cancelled and kept as an orphan until its completion arrives.
//!
//! Single-threaded by construction (`Rc`); `user_data` is (generation, key), so that a late completion can
//! never be taken for a newer operation in the same place. Only sends of what passes follow one another under one name:
//! each has one completion, after which the next begins, and what is given up is not begun again.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use slab::Slab;

use super::Pass;
use super::bufring::{BufRing, GROUP, Lent};
use super::chunk::{Chunk, Outgoing};
use crate::limits::{RECV_BUFFER_BYTES, RING_COMPLETIONS, RING_ENTRIES};
use crate::metrics::{MOST_BOUNDS, Scale};

/// `IORING_RECVSEND_POLL_FIRST`: wait for readiness before the first try.
const POLL_FIRST: u16 = 1;
/// `IORING_RECV_MULTISHOT`: one request, a completion for every arrival. Under load Linux 6.18 was seen to give
/// bytes and never the reset that came right behind them (about every second run of the tests' churn): whoever
/// streams must also watch for the end, see `Socket`.
const MULTISHOT: u16 = 2;
/// Operations that a lane has room for at once; beyond, the table grows by copying.
const OPS: usize = 64 * 1024;
/// Bytes that may wait to be collected before a stream is stopped, so that a peer cannot fill our memory.
const INBOX_BYTES: usize = 64 * 1024;
/// Buffers of the ring that a stream may hold while nobody collects; what comes then is copied, so that a few
/// clients that are not being listened to cannot keep the lane's buffers.
const INBOX_BUFFERS: usize = 2;
/// The same while a task is on its way to collect them.
const INBOX_BUFFERS_AWAITED: usize = 8;
/// `IORING_ENTER_GETEVENTS`: run deferred task work and make completions visible.
const GETEVENTS: u32 = 1;
/// Completions that nobody asks for (cancel, close).
const IGNORED: u64 = u64::MAX;

/// How a ring was set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// SINGLE_ISSUER and DEFER_TASKRUN, kernel 6.1 or newer.
    Defer,
    /// COOP_TASKRUN, kernel 5.19 or newer.
    Coop,
    /// No flags.
    Plain,
}

impl Mode {
    /// The kernel's names of the flags.
    pub const fn name(self) -> &'static str {
        match self {
            Mode::Defer => "SINGLE_ISSUER|DEFER_TASKRUN",
            Mode::Coop => "COOP_TASKRUN",
            Mode::Plain => "none",
        }
    }
}

/// Names one operation in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpId {
    key: u32,
    generation: u32,
}

impl OpId {
    fn user_data(self) -> u64 {
        (self.generation as u64) << 32 | self.key as u64
    }
}

/// What an operation points to; owned by the ring while the kernel may use it.
pub enum Keep {
    /// A poll.
    Fd(Rc<Fd>),
    /// Receives into the ring's buffers, one completion each; and where they go on to.
    Stream(Rc<Fd>, Option<Onward>),
    /// A receive into spare capacity of a vector.
    Fill(Rc<Fd>, Vec<u8>),
    /// A send, and how far it got.
    Send(Rc<Fd>, Outgoing, usize),
    /// A connect to a boxed address.
    Connect(Rc<Fd>, Box<socket2::SockAddr>),
    /// An accept; its result is a new descriptor.
    Accept(Rc<Fd>),
    /// A read of an eventfd into a boxed counter.
    Bell(Box<[u8; 8]>),
}

/// Where the arrivals of a stream go on to, with nobody woken.
pub struct Onward {
    pass: Rc<dyn Pass>,
    /// The last send there; its place serves the next ones.
    to: OpId,
}

enum State {
    /// In flight, nobody has asked yet.
    Quiet,
    /// In flight, this waker wants to know.
    Wait(Waker),
    /// Ended: result and flags.
    Done(i32, u32),
    /// In flight, but given up: free everything at its completion.
    Orphan,
}

struct Op {
    generation: u32,
    state: State,
    keep: Keep,
    /// What a stream received and nobody has collected.
    inbox: Inbox,
    /// A cancellation is on its way.
    stopping: bool,
    /// A task was woken to collect what a stream received, and has not come yet.
    awaited: bool,
}

/// Arrivals of a stream in their order.
#[derive(Default)]
struct Inbox {
    lent: VecDeque<(Lent, usize)>,
    /// What came behind them.
    copied: Vec<u8>,
    bytes: usize,
}

impl Inbox {
    fn push(&mut self, lent: Lent, len: usize, awaited: bool) {
        self.bytes += len;
        let most = if awaited { INBOX_BUFFERS_AWAITED } else { INBOX_BUFFERS };
        if self.copied.is_empty() && self.lent.len() < most {
            self.lent.push_back((lent, len));
        } else {
            self.copied.extend_from_slice(&lent.bytes()[..len]);
        }
    }

    fn pop(&mut self) -> Option<Chunk> {
        let chunk = match self.lent.pop_front() {
            Some((lent, len)) => Chunk::lent(lent, len),
            None if !self.copied.is_empty() => Chunk::heap(std::mem::take(&mut self.copied)),
            None => return None,
        };
        self.bytes -= chunk.len();
        Some(chunk)
    }

    fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

/// What a stream gives.
pub enum Arrival {
    /// Bytes; the stream goes on.
    Bytes(Chunk),
    /// The stream's last completion: its result, and what it carried.
    Last(i32, Option<Lent>, Keep),
}

struct Core {
    uring: IoUring,
    ops: Slab<Op>,
    generation: u32,
    /// What completions freed; dropped outside the borrow, because drops come back to the ring.
    grave: Vec<Keep>,
    /// Sends to be queued: taken in part, or given something to send on.
    again: Vec<usize>,
    /// Streams with a full inbox, to be stopped.
    full: Vec<usize>,
    /// Wakers of what ended between two turns.
    late: Vec<Waker>,
    closed: bool,
}

impl Op {
    /// Notes who wants to know; gives the waker that was there, to be dropped after the borrow.
    fn ask(&mut self, cx: &Context<'_>) -> Option<Waker> {
        match &self.state {
            State::Wait(w) if w.will_wake(cx.waker()) => None,
            _ => match std::mem::replace(&mut self.state, State::Wait(cx.waker().clone())) {
                State::Wait(old) => Some(old),
                _ => None,
            },
        }
    }
}

impl Core {
    fn op(&mut self, id: OpId) -> &mut Op {
        let op = &mut self.ops[id.key as usize];
        debug_assert_eq!(op.generation, id.generation);
        op
    }

    fn take(&mut self, id: OpId) -> Op {
        debug_assert_eq!(self.ops[id.key as usize].generation, id.generation);
        self.ops.remove(id.key as usize)
    }
}

fn send_entry(fd: &Fd, what: &Outgoing, offset: usize) -> squeue::Entry {
    let bytes = &what[offset..];
    let len = bytes.len().min(u32::MAX as usize) as u32;
    let more = if matches!(what, Outgoing::Ahead(_)) { libc::MSG_MORE } else { 0 };
    opcode::Send::new(types::Fd(fd.raw()), bytes.as_ptr(), len).flags(libc::MSG_NOSIGNAL | more).build()
}

/// A lane's ring.
pub struct Ring {
    core: RefCell<Core>,
    buffers: Option<Rc<BufRing>>,
    mode: Mode,
    /// System calls made by the ring.
    pub enters: Cell<u64>,
    /// Completions reaped.
    pub completions: Cell<u64>,
    /// Turns by how many completions they brought (see [`Scale::Batch`]).
    pub batches: [Cell<u64>; MOST_BOUNDS + 1],
    /// Receives that found no buffer.
    pub no_buffers: Cell<u64>,
    /// Arrivals that were sent on with nobody woken.
    pub passed: Cell<u64>,
}

impl Ring {
    /// A ring with the best flags that this kernel takes. Must be called on the thread that will use it.
    ///
    /// # Errors
    /// The kernel's, when io_uring cannot be used at all: `ENOSYS` (too old), `EPERM` (disabled by sysctl or
    /// seccomp), `ENOMEM` (memlock limit).
    pub fn new() -> io::Result<Rc<Ring>> {
        let (uring, mode) = Self::build()?;
        // One lookup less in every enter; older kernels do without.
        let _ = uring.submitter().register_ring_fd();
        let buffers = BufRing::register(&uring).ok();
        Ok(Rc::new(Ring {
            core: RefCell::new(Core {
                uring,
                // Room that is not used is not resident; a table that grows by copying leaves its old copies behind.
                ops: Slab::with_capacity(OPS),
                generation: 0,
                grave: Vec::new(),
                again: Vec::new(),
                full: Vec::new(),
                late: Vec::new(),
                closed: false,
            }),
            buffers,
            mode,
            enters: Cell::new(0),
            completions: Cell::new(0),
            batches: Default::default(),
            no_buffers: Cell::new(0),
            passed: Cell::new(0),
        }))
    }

    fn build() -> io::Result<(IoUring, Mode)> {
        for mode in [Mode::Defer, Mode::Coop] {
            let mut b = IoUring::builder();
            b.setup_cqsize(RING_COMPLETIONS).setup_clamp();
            match mode {
                Mode::Defer => b.setup_single_issuer().setup_defer_taskrun(),
                _ => b.setup_coop_taskrun(),
            };
            match b.build(RING_ENTRIES) {
                Ok(ring) => return Ok((ring, mode)),
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
                Err(e) => return Err(e),
            }
        }
        let ring = IoUring::builder().setup_cqsize(RING_COMPLETIONS).setup_clamp().build(RING_ENTRIES)?;
        Ok((ring, Mode::Plain))
    }

    /// The flags in use.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Whether receives wait without holding a buffer (kernel 5.19 or newer).
    pub fn has_buffers(&self) -> bool {
        self.buffers.is_some()
    }

    /// Operations in flight or not yet collected.
    pub fn in_flight(&self) -> usize {
        self.core.borrow().ops.len()
    }

    /// Receive buffers that are lent out at the moment.
    pub fn lent(&self) -> usize {
        self.buffers.as_ref().map_or(0, |b| b.lent())
    }

    /// Queues an operation. `entry` may point only into what `keep` owns.
    fn submit(&self, entry: squeue::Entry, keep: Keep) -> OpId {
        let mut core = self.core.borrow_mut();
        core.generation = core.generation.wrapping_add(1);
        let generation = core.generation;
        let inbox = Inbox::default();
        let (state, stopping, awaited) = (State::Quiet, false, false);
        let key = core.ops.insert(Op { generation, state, keep, inbox, stopping, awaited }) as u32;
        let id = OpId { key, generation };
        self.push(&mut core, entry.user_data(id.user_data()));
        id
    }

    fn push(&self, core: &mut Core, entry: squeue::Entry) {
        loop {
            // SAFETY: what the entry points to is owned by `core.ops` until its completion was reaped (or
            // points to nothing), and the heap blocks behind `Keep` do not move when the slab grows.
            if unsafe { core.uring.submission().push(&entry) }.is_ok() {
                return;
            }
            self.enters.set(self.enters.get() + 1);
            if let Err(e) = core.uring.submit() {
                assert!(
                    matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)),
                    "io_uring_enter: {e}"
                );
                // A full completion queue: the entries stay queued until there is room in it.
                let mut late = std::mem::take(&mut core.late);
                self.reap(core, &mut late, None);
                // Queueing what that found may have come here, too.
                core.late.append(&mut late);
            }
        }
    }

    /// Receives into buffers of the ring's, as bytes arrive, until the stream is stopped or ends; on kernels
    /// before 6.1 one receive. Without a buffer ring, one receive into a buffer of the heap's.
    pub fn stream(&self, fd: &Rc<Fd>) -> OpId {
        if self.buffers.is_none() {
            return self.fill(fd, Vec::with_capacity(RECV_BUFFER_BYTES), RECV_BUFFER_BYTES, false);
        }
        let (flags, len) = match self.mode {
            Mode::Defer => (POLL_FIRST | MULTISHOT, 0),
            _ => (POLL_FIRST, RECV_BUFFER_BYTES as u32),
        };
        let entry = opcode::Recv::new(types::Fd(fd.raw()), std::ptr::null_mut(), len)
            .buf_group(GROUP)
            .ioprio(flags)
            .build()
            .flags(squeue::Flags::BUFFER_SELECT);
        self.submit(entry, Keep::Stream(fd.clone(), None))
    }

    /// What a stream received next. After [`Arrival::Last`] the id is spent.
    pub fn poll_stream(&self, id: OpId, cx: &mut Context<'_>) -> Poll<Arrival> {
        let mut core = self.core.borrow_mut();
        let op = core.op(id);
        op.awaited = false;
        if let Some(chunk) = op.inbox.pop() {
            return Poll::Ready(Arrival::Bytes(chunk));
        }
        let State::Done(res, flags) = op.state else {
            let old = op.ask(cx);
            drop(core);
            drop(old);
            return Poll::Pending;
        };
        let op = core.take(id);
        drop(core);
        Poll::Ready(Arrival::Last(res, self.lend(flags), op.keep))
    }

    /// Lets a stream's arrivals go on in the place of a chunk's send, whenever the last one there has ended well and as
    /// long as `pass` takes them; not while some are still to be collected.
    pub fn pass(&self, id: OpId, to: OpId, pass: Rc<dyn Pass>) {
        let mut core = self.core.borrow_mut();
        let op = core.op(id);
        let is_ready = op.inbox.is_empty() && !op.stopping && !matches!(op.state, State::Done(..));
        if let (true, Keep::Stream(_, onward)) = (is_ready, &mut op.keep) {
            *onward = Some(Onward { pass, to });
        }
    }

    /// Asks a stream to end; what it received stays to be collected, its last completion says `ECANCELED`.
    pub fn stop(&self, id: OpId) {
        let mut core = self.core.borrow_mut();
        self.cancel(&mut core, id);
    }

    fn cancel(&self, core: &mut Core, id: OpId) {
        let op = core.op(id);
        if !op.stopping && !matches!(op.state, State::Done(..)) {
            op.stopping = true;
            self.push(core, opcode::AsyncCancel::new(id.user_data()).build().user_data(IGNORED));
        }
    }

    /// Whether anything was received, or the stream ended.
    pub fn has_news(&self, id: OpId) -> bool {
        let mut core = self.core.borrow_mut();
        let op = core.op(id);
        !op.inbox.is_empty() || matches!(op.state, State::Done(..))
    }

    /// Whether a stream received bytes that nobody has collected.
    pub fn holds_bytes(&self, id: OpId) -> bool {
        let mut core = self.core.borrow_mut();
        let op = core.op(id);
        !op.inbox.is_empty() || matches!(op.state, State::Done(res, _) if res > 0)
    }

    /// How the operation ended, if it did, though what it received may not be collected yet; else the task is
    /// woken at its next completion.
    pub fn poll_end(&self, id: OpId, cx: &mut Context<'_>) -> Poll<i32> {
        let mut core = self.core.borrow_mut();
        let op = core.op(id);
        if let State::Done(res, _) = op.state {
            return Poll::Ready(res);
        }
        let old = op.ask(cx);
        drop(core);
        drop(old);
        Poll::Pending
    }

    /// A receive of up to `max` bytes into the spare capacity of `to`, which must have some.
    pub fn fill(&self, fd: &Rc<Fd>, mut to: Vec<u8>, max: usize, poll_first: bool) -> OpId {
        let spare = to.spare_capacity_mut();
        let len = spare.len().min(max).min(u32::MAX as usize) as u32;
        assert!(len > 0, "a fill needs room");
        let entry = opcode::Recv::new(types::Fd(fd.raw()), spare.as_mut_ptr().cast(), len)
            .ioprio(if poll_first { POLL_FIRST } else { 0 })
            .build();
        self.submit(entry, Keep::Fill(fd.clone(), to))
    }

    /// A send of all of `what`; ends when the kernel has taken every byte, or with an error.
    pub fn send(&self, fd: &Rc<Fd>, what: Outgoing) -> OpId {
        let entry = send_entry(fd, &what, 0);
        self.submit(entry, Keep::Send(fd.clone(), what, 0))
    }

    /// A connect.
    pub fn connect(&self, fd: &Rc<Fd>, to: std::net::SocketAddr) -> OpId {
        let to = Box::new(socket2::SockAddr::from(to));
        let entry = opcode::Connect::new(types::Fd(fd.raw()), to.as_ptr().cast(), to.len()).build();
        self.submit(entry, Keep::Connect(fd.clone(), to))
    }

    /// An accept.
    pub fn accept(&self, fd: &Rc<Fd>) -> OpId {
        let entry = opcode::Accept::new(types::Fd(fd.raw()), std::ptr::null_mut(), std::ptr::null_mut())
            .flags(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC)
            .build();
        self.submit(entry, Keep::Accept(fd.clone()))
    }

    /// A one-shot poll.
    pub fn poll(&self, fd: &Rc<Fd>, events: u32) -> OpId {
        let entry = opcode::PollAdd::new(types::Fd(fd.raw()), events).build();
        self.submit(entry, Keep::Fd(fd.clone()))
    }

    /// A read of an eventfd, which must outlive the ring.
    pub fn bell(&self, fd: BorrowedFd<'static>) -> OpId {
        let mut count = Box::new([0u8; 8]);
        let entry = opcode::Read::new(types::Fd(fd.as_raw_fd()), count.as_mut_ptr(), 8).build();
        self.submit(entry, Keep::Bell(count))
    }

    /// The result and flags of an operation once it has ended, with what it owned; the id is spent then.
    pub fn poll_op(&self, id: OpId, cx: &mut Context<'_>) -> Poll<(i32, u32, Keep)> {
        let mut core = self.core.borrow_mut();
        let op = core.op(id);
        let State::Done(res, flags) = op.state else {
            let old = op.ask(cx);
            drop(core);
            drop(old);
            return Poll::Pending;
        };
        let op = core.take(id);
        Poll::Ready((res, flags, op.keep))
    }

    /// The result of an operation that has ended, without collecting it.
    pub fn peek(&self, id: OpId) -> Option<i32> {
        match self.core.borrow().ops[id.key as usize].state {
            State::Done(res, _) => Some(res),
            _ => None,
        }
    }

    /// How far a send got before the try that is in flight.
    pub fn sent_offset(&self, id: OpId) -> usize {
        match &self.core.borrow().ops[id.key as usize].keep {
            Keep::Send(_, _, offset) => *offset,
            _ => 0,
        }
    }

    /// Gives an operation up: cancels it, and frees what it owns when the kernel has let go.
    pub fn abandon(&self, id: OpId) {
        let mut core = self.core.borrow_mut();
        if core.closed {
            return;
        }
        if let State::Done(res, flags) = core.op(id).state {
            let op = core.take(id);
            drop(core);
            self.discard(res, flags, &op.keep);
        } else {
            self.cancel(&mut core, id);
            // The waker is dropped after the borrow: its drop may run code that comes back here.
            let _old = std::mem::replace(&mut core.op(id).state, State::Orphan);
            drop(core);
        }
    }

    /// The buffer that a receive's flags name.
    pub fn lend(&self, flags: u32) -> Option<Lent> {
        let id = cqueue::buffer_select(flags)?;
        Some(self.buffers.as_ref()?.lend(id))
    }

    /// Frees what a completion carries that nobody will collect.
    fn discard(&self, res: i32, flags: u32, keep: &Keep) {
        drop(self.lend(flags));
        if res >= 0 && matches!(keep, Keep::Accept(_)) {
            // SAFETY: a successful accept's result is a fresh descriptor that nobody else knows.
            drop(unsafe { OwnedFd::from_raw_fd(res) });
        }
    }

    /// Notes a receive that found no buffer and offers more.
    pub fn ran_dry(&self) {
        self.no_buffers.set(self.no_buffers.get() + 1);
        if let Some(b) = &self.buffers {
            b.ran_dry();
        }
    }

    /// Submits what is queued and, when `wait` is given, sleeps until a completion or that time has passed.
    /// Wakers of what ended are put into `woken`; `clock` is asked, after the sleep, for the lane's time,
    /// without which nothing passes.
    pub fn turn(&self, wait: Option<Duration>, woken: &mut Vec<Waker>, clock: impl FnOnce() -> Option<u64>) {
        if let Some(b) = &self.buffers {
            b.restock();
        }
        let mut core = self.core.borrow_mut();
        self.enters.set(self.enters.get() + 1);
        let wait = wait.filter(|_| core.late.is_empty());
        let entered = match wait {
            Some(time) => {
                let time = types::Timespec::from(time);
                let args = types::SubmitArgs::new().timespec(&time);
                core.uring.submitter().submit_with_args(1, &args)
            }
            None => {
                let queued = core.uring.submission().len() as u32;
                // SAFETY: no argument is passed; the queue's entries are valid (see `push`).
                unsafe { core.uring.submitter().enter::<libc::sigset_t>(queued, 0, GETEVENTS, None) }
            }
        };
        if let Err(e) = entered {
            // ETIME: the time passed. EINTR: a signal. EAGAIN, EBUSY: reap first, then again.
            assert!(
                matches!(e.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY)),
                "io_uring_enter: {e}"
            );
        }
        self.reap(&mut core, woken, clock());
        woken.append(&mut core.late);
        let grave = std::mem::take(&mut core.grave);
        drop(core);
        if !grave.is_empty() {
            self.bury(grave);
        }
    }

    fn bury(&self, mut grave: Vec<Keep>) {
        grave.clear();
        let mut core = self.core.borrow_mut();
        if core.grave.capacity() == 0 {
            core.grave = grave;
        }
    }

    /// Sends on what a stream received, if that goes on; gives the place of the send, or the buffer back.
    fn send_on(ops: &mut Slab<Op>, key: usize, lent: Lent, len: usize, now_us: Option<u64>) -> Result<usize, Lent> {
        let Op { keep: Keep::Stream(_, onward), stopping, .. } = &mut ops[key] else { return Err(lent) };
        let Some(Onward { pass, to }) = onward.take() else { return Err(lent) };
        let (Some(now_us), false) = (now_us, *stopping) else { return Err(lent) };
        // The chunk before is sent, so this one can have its place.
        let is_free = |op: &&mut Op| {
            op.generation == to.generation
                && matches!(op.state, State::Done(res, _) if res > 0)
                && matches!(op.keep, Keep::Send(_, Outgoing::Static(&[]), _))
        };
        let Some(send) = ops.get_mut(to.key as usize).filter(is_free) else { return Err(lent) };
        // A panic is that of one connection: its task meets the same bytes.
        let taken = catch_unwind(AssertUnwindSafe(|| pass.take(&lent.bytes()[..len], now_us)));
        if !taken.unwrap_or(false) {
            return Err(lent);
        }
        send.state = State::Quiet;
        if let Keep::Send(_, what, offset) = &mut send.keep {
            (*what, *offset) = (Outgoing::Chunk(Chunk::lent(lent, len)), 0);
        }
        if let Keep::Stream(_, onward) = &mut ops[key].keep {
            *onward = Some(Onward { pass, to });
        }
        Ok(to.key as usize)
    }

    /// Notes what ended and what arrived. Nothing passes where the lane's time is not known: a task runs.
    fn reap(&self, core: &mut Core, woken: &mut Vec<Waker>, now_us: Option<u64>) {
        let Core { uring, ops, grave, again, full, .. } = core;
        let (mut n, mut passed) = (0, 0);
        for cqe in uring.completion() {
            n += 1;
            let data = cqe.user_data();
            if data == IGNORED {
                continue;
            }
            let (key, generation) = ((data & u32::MAX as u64) as usize, (data >> 32) as u32);
            let Some(op) = ops.get_mut(key).filter(|op| op.generation == generation) else {
                debug_assert!(false, "a completion for an operation that is gone");
                continue;
            };
            if cqueue::more(cqe.flags()) {
                let lent = self.lend(cqe.flags());
                let (Some(lent), false) = (lent, matches!(op.state, State::Orphan)) else { continue };
                let len = cqe.result().max(0) as usize;
                let lent = match Self::send_on(ops, key, lent, len, now_us) {
                    Ok(send) => {
                        passed += 1;
                        again.push(send);
                        continue;
                    }
                    Err(lent) => lent,
                };
                let op = &mut ops[key];
                if let State::Wait(w) = std::mem::replace(&mut op.state, State::Quiet) {
                    op.awaited = true;
                    woken.push(w);
                }
                op.inbox.push(lent, len, op.awaited);
                if op.inbox.bytes > INBOX_BYTES && !op.stopping {
                    full.push(key);
                }
                continue;
            }
            if let Keep::Send(_, what, offset) = &mut op.keep {
                // The ring itself goes on with what was taken in part, and lets go of a received chunk as
                // soon as it is sent, so that nobody needs to be woken for either.
                *offset += cqe.result().max(0) as usize;
                if cqe.result() > 0 && *offset < what.len() && !matches!(op.state, State::Orphan) {
                    again.push(key);
                    continue;
                }
                if matches!(what, Outgoing::Chunk(_)) {
                    // Dropping a chunk touches the buffer ring only, never the borrowed core.
                    *what = Outgoing::Static(&[]);
                }
            }
            match std::mem::replace(&mut op.state, State::Done(cqe.result(), cqe.flags())) {
                State::Wait(w) => woken.push(w),
                State::Quiet => {}
                State::Orphan => {
                    let op = ops.remove(key);
                    self.discard(cqe.result(), cqe.flags(), &op.keep);
                    grave.push(op.keep);
                }
                State::Done(..) => debug_assert!(false, "two completions of one operation"),
            }
        }
        self.completions.set(self.completions.get() + n);
        self.passed.set(self.passed.get() + passed);
        let batches = &self.batches[Scale::Batch.place(n)];
        batches.set(batches.get() + 1);
        while let Some(key) = core.full.pop() {
            let generation = core.ops[key].generation;
            self.cancel(core, OpId { key: key as u32, generation });
        }
        let mut again = std::mem::take(&mut core.again);
        for key in again.drain(..) {
            let op = &core.ops[key];
            let Keep::Send(fd, what, offset) = &op.keep else { unreachable!("only sends go on") };
            let id = OpId { key: key as u32, generation: op.generation };
            let entry = send_entry(fd, what, *offset).user_data(id.user_data());
            self.push(core, entry);
        }
        core.again = again;
    }

    /// Cancels everything, waits until the kernel has let go of it all, and closes the ring for new
    /// operations. What does not end within about a second is leaked rather than freed.
    pub fn wind_down(&self) {
        let mut woken = Vec::new();
        for round in 0..200 {
            {
                let mut core = self.core.borrow_mut();
                if core.ops.is_empty() && round > 1 {
                    break;
                }
                let entry = opcode::AsyncCancel2::new(types::CancelBuilder::any()).build().user_data(IGNORED);
                self.push(&mut core, entry);
            }
            self.turn(Some(Duration::from_millis(if round < 2 { 0 } else { 5 })), &mut woken, || None);
            let mut core = self.core.borrow_mut();
            let done: Vec<usize> =
                core.ops.iter().filter(|(_, op)| matches!(op.state, State::Done(..))).map(|(k, _)| k).collect();
            let gone: Vec<Op> = done.into_iter().map(|k| core.ops.remove(k)).collect();
            drop(core);
            for op in gone {
                if let State::Done(res, flags) = op.state {
                    self.discard(res, flags, &op.keep);
                }
            }
        }
        // Descriptors that the last round gave up are closed by the ring too.
        self.turn(Some(Duration::ZERO), &mut woken, || None);
        let mut core = self.core.borrow_mut();
        core.closed = true;
        let left = std::mem::take(&mut core.ops);
        if let Some(b) = &self.buffers {
            b.unregister(&core.uring.submitter());
        }
        drop(core);
        std::mem::forget(left);
    }
}

/// A file descriptor that operations share; closed through the ring when the last of them has ended.
pub struct Fd {
    fd: std::mem::ManuallyDrop<OwnedFd>,
    ring: Rc<Ring>,
}

impl Fd {
    /// Takes over a descriptor, which must be non-blocking.
    pub fn new(fd: OwnedFd, ring: &Rc<Ring>) -> Rc<Fd> {
        Rc::new(Fd { fd: std::mem::ManuallyDrop::new(fd), ring: ring.clone() })
    }

    /// The number.
    pub fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        // SAFETY: taken once, here.
        let fd = unsafe { std::mem::ManuallyDrop::take(&mut self.fd) };
        let mut core = self.ring.core.borrow_mut();
        if core.closed {
            drop(core);
            drop(fd);
        } else {
            let entry = opcode::Close::new(types::Fd(fd.into_raw_fd())).build().user_data(IGNORED);
            self.ring.push(&mut core, entry);
        }
    }
}
