//! Stream sockets and listeners over the ring.
//!
//! Takes descriptors, gives the [`Conn`] operations. Never blocks, never loses received bytes when a future
//! is dropped: the receive stays armed and its bytes are there for the next one who asks.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::net::RecvFlags;

use super::chunk::{Chunk, Outgoing};
use super::pipe::KernelPipe;
use super::ring::{Arrival, Fd, Keep, OpId, Ring};
use super::{Conn, Drawn, Pass, Pipe, Wire};
use crate::limits::{BODY_TURN_BYTES, FRAME_SIGHT_BYTES, HEAD_SIGHT_BYTES, RECV_BUFFER_BYTES};

/// How far a lazy connection can be looked into.
const MOST_SIGHT_BYTES: usize = HEAD_SIGHT_BYTES;
const _: () = assert!(FRAME_SIGHT_BYTES <= MOST_SIGHT_BYTES);

#[derive(Clone, Copy)]
enum Rx {
    Idle,
    /// Receives into buffers of the ring's choice.
    Armed(OpId),
    /// A receive into the caller's vector.
    Filling(OpId),
    /// A poll for something to receive, of a lazy connection.
    Polling(OpId),
}

/// A connected stream socket. Boxed: a connection goes from hand to hand, several times a request.
pub struct Socket(Box<State>);

struct State {
    ring: Rc<Ring>,
    fd: Rc<Fd>,
    rx: Cell<Rx>,
    tx: Cell<Option<OpId>>,
    /// What is armed is a stream of receives, not one.
    streaming: Cell<bool>,
    /// A poll for the peer's end, armed with the first receive: a stream of receives can miss it.
    watch: Cell<Option<OpId>>,
    /// The poll has seen it: from now on receives are made one by one, up to the end.
    over: Cell<bool>,
    /// Nothing more can be sent either.
    broken: Cell<bool>,
    /// A send was told of a break.
    met_break: Cell<bool>,
    /// What arrives stays in the kernel until it is asked for.
    lazy: Cell<bool>,
    /// A poll for room to pour into.
    room: Cell<Option<OpId>>,
    /// Bytes that were poured so far.
    poured: Cell<usize>,
    /// Received, but asked for later.
    kept: RefCell<Option<Chunk>>,
}

/// Whether a send that failed so was the first to be told of a break. After the peer's end, or after somebody else was told,
/// it is told of a broken pipe.
fn tells_break(e: &io::Error) -> bool {
    e.kind() != io::ErrorKind::BrokenPipe
}

fn error(res: i32) -> io::Error {
    io::Error::from_raw_os_error(-res)
}

impl Socket {
    /// Takes over a connected, non-blocking socket.
    pub fn new(fd: OwnedFd, ring: &Rc<Ring>) -> Socket {
        Socket(Box::new(State {
            ring: ring.clone(),
            fd: Fd::new(fd, ring),
            rx: Cell::new(Rx::Idle),
            tx: Cell::new(None),
            streaming: Cell::new(false),
            watch: Cell::new(None),
            over: Cell::new(false),
            broken: Cell::new(false),
            met_break: Cell::new(false),
            lazy: Cell::new(false),
            room: Cell::new(None),
            poured: Cell::new(0),
            kept: RefCell::new(None),
        }))
    }

    /// What a receive into the ring's buffers gave; none when it was stopped and everything is collected.
    fn poll_armed(&self, id: OpId, cx: &mut Context<'_>) -> Poll<Option<io::Result<Chunk>>> {
        let (res, lent, keep) = match ready!(self.0.ring.poll_stream(id, cx)) {
            Arrival::Bytes(chunk) => return Poll::Ready(Some(Ok(chunk))),
            Arrival::Last(res, lent, keep) => (res, lent, keep),
        };
        self.0.rx.set(Rx::Idle);
        if res == -libc::ECANCELED {
            // Too much was waiting, or a fill wants its place, or the peer ended, or the connection became lazy.
            return Poll::Ready(None);
        }
        if res == -libc::ENOBUFS {
            self.0.ring.ran_dry();
            if self.0.lazy.get() {
                return Poll::Ready(None);
            }
            let id = self.receive_once();
            return self.poll_armed(id, cx);
        }
        if res < 0 {
            return Poll::Ready(Some(Err(error(res))));
        }
        Poll::Ready(Some(Ok(match (lent, keep) {
            _ if res == 0 => Chunk::empty(),
            (Some(lent), _) => Chunk::lent(lent, res as usize),
            (None, Keep::Fill(_, v)) => Chunk::heap(filled(v, res as usize)),
            (None, _) => unreachable!("a receive has a buffer of the ring's or its own"),
        })))
    }

    /// What is still to be collected of a connection that became lazy; none when it is idle.
    fn poll_early(&self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Chunk>>> {
        if let Some(chunk) = self.0.kept.borrow_mut().take() {
            return Poll::Ready(Some(Ok(chunk)));
        }
        match self.0.rx.get() {
            Rx::Armed(id) => {
                self.0.ring.stop(id);
                self.poll_armed(id, cx)
            }
            Rx::Filling(_) => self.poll_filled(cx).map(Some),
            Rx::Idle | Rx::Polling(_) => Poll::Ready(None),
        }
    }

    /// What a fill gave that nobody came back for.
    fn poll_filled(&self, cx: &mut Context<'_>) -> Poll<io::Result<Chunk>> {
        let Rx::Filling(id) = self.0.rx.get() else { unreachable!("asked of a fill") };
        let (res, _, keep) = ready!(self.0.ring.poll_op(id, cx));
        self.0.rx.set(Rx::Idle);
        match keep {
            _ if res < 0 => Poll::Ready(Err(error(res))),
            Keep::Fill(_, v) if res > 0 => {
                let mut chunk = Chunk::heap(filled(v, res as usize));
                let old = chunk.len() - res as usize;
                chunk.advance(old);
                Poll::Ready(Ok(chunk))
            }
            _ => Poll::Ready(Ok(Chunk::empty())),
        }
    }

    /// Tries something of an idle, lazy connection whenever there may be something to receive; the attempt is told
    /// whether a poll says so.
    fn poll_try<T>(&self, cx: &mut Context<'_>, mut attempt: impl FnMut(bool) -> io::Result<T>) -> Poll<io::Result<T>> {
        loop {
            let mut polled = false;
            if let Rx::Polling(id) = self.0.rx.get() {
                // Whatever the poll says, the attempt knows better.
                ready!(self.0.ring.poll_op(id, cx));
                self.0.rx.set(Rx::Idle);
                polled = true;
            }
            match attempt(polled) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.arm(),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                done => return Poll::Ready(done),
            }
        }
    }

    /// Whether the kernel holds nothing to be received, and no end.
    fn is_dry(&self) -> bool {
        let seen = rustix::net::recv(&self.0.fd, &mut [0], RecvFlags::DONTWAIT | RecvFlags::PEEK);
        seen.is_err_and(|e| e == rustix::io::Errno::AGAIN)
    }

    /// Receives from a lazy connection.
    fn poll_lazy(&self, cx: &mut Context<'_>, max: usize) -> Poll<io::Result<Chunk>> {
        self.poll_try(cx, |_| self.receive_now(max))
    }

    fn receive_now(&self, max: usize) -> io::Result<Chunk> {
        let mut bytes = Vec::with_capacity(max);
        rustix::net::recv(&self.0.fd, rustix::buffer::spare_capacity(&mut bytes), RecvFlags::DONTWAIT)?;
        Ok(if bytes.is_empty() { Chunk::empty() } else { Chunk::heap(bytes) })
    }

    /// Notes what a send was told.
    fn send_failed(&self, e: io::Error) -> io::Error {
        self.0.met_break.set(self.0.met_break.get() || tells_break(&e));
        e
    }

    /// Bytes that were sent, and of which the peer's kernel has not said that it has them.
    fn unacknowledged(&self) -> usize {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the descriptor is open as long as `self.0.fd` is, and TIOCOUTQ (SIOCOUTQ of a socket) writes one int.
        unsafe { libc::ioctl(self.0.fd.as_fd().as_raw_fd(), libc::TIOCOUTQ, &mut bytes) };
        bytes as usize
    }

    /// One receive into memory of its own.
    fn receive_once(&self) -> OpId {
        let room = Vec::with_capacity(RECV_BUFFER_BYTES);
        let id = self.0.ring.fill(&self.0.fd, room, RECV_BUFFER_BYTES, false);
        self.0.rx.set(Rx::Armed(id));
        self.0.streaming.set(false);
        id
    }

    /// Whether the peer has closed its sending side or the connection broke; wakes the task when it happens.
    fn poll_over(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.0.over.get() {
            return Poll::Ready(());
        }
        let Some(id) = self.0.watch.get() else { return Poll::Pending };
        let (events, _, _) = ready!(self.0.ring.poll_op(id, cx));
        self.0.watch.set(None);
        if events < 0 {
            // The kernel had no memory for it; the next receive asks again.
            return Poll::Pending;
        }
        self.0.over.set(true);
        self.0.broken.set(events & i32::from(libc::POLLERR | libc::POLLHUP) != 0);
        Poll::Ready(())
    }

    /// Whether the connection broke, or was closed in both directions. After a half-close the ring's polls report
    /// nothing but that (Linux reports it unasked), so a break that follows one shows at the next send.
    fn poll_dead(&self, cx: &mut Context<'_>) -> Poll<()> {
        ready!(self.poll_over(cx));
        if self.0.broken.get() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Stops the stream for the sake of a fill. Ready when it has ended; the socket is idle then, unless there is
    /// something to collect first: bytes, the peer's end, an error.
    fn poll_disarmed(&self, id: OpId, cx: &mut Context<'_>) -> Poll<()> {
        self.0.ring.stop(id);
        let res = ready!(self.0.ring.poll_end(id, cx));
        if res == -libc::ECANCELED && !self.0.ring.holds_bytes(id) {
            let _spent = self.0.ring.poll_op(id, cx);
            self.0.rx.set(Rx::Idle);
        }
        Poll::Ready(())
    }
}

/// The vector after the kernel wrote `n` bytes behind its length.
fn filled(mut v: Vec<u8>, n: usize) -> Vec<u8> {
    assert!(v.capacity() - v.len() >= n);
    // SAFETY: `Ring::fill` pointed the kernel at the spare capacity, and its completion says that `n` bytes
    // of it are written.
    unsafe { v.set_len(v.len() + n) };
    v
}

impl Conn for Socket {
    type Pipe = KernelPipe;

    fn arm(&self) {
        if let Rx::Idle = self.0.rx.get() {
            if self.0.lazy.get() {
                let events = (libc::POLLIN | libc::POLLRDHUP) as u32;
                self.0.rx.set(Rx::Polling(self.0.ring.poll(&self.0.fd, events)));
                return;
            }
            if self.0.over.get() {
                self.receive_once();
                return;
            }
            self.0.rx.set(Rx::Armed(self.0.ring.stream(&self.0.fd)));
            self.0.streaming.set(true);
            if self.0.watch.get().is_none() {
                self.0.watch.set(Some(self.0.ring.poll(&self.0.fd, libc::POLLRDHUP as u32)));
            }
        }
    }

    fn poll_recv(&self, cx: &mut Context<'_>) -> Poll<io::Result<Chunk>> {
        if self.0.lazy.get() {
            return match ready!(self.poll_early(cx)) {
                Some(early) => Poll::Ready(early),
                None => self.poll_lazy(cx, RECV_BUFFER_BYTES),
            };
        }
        if let Some(chunk) = self.0.kept.borrow_mut().take() {
            return Poll::Ready(Ok(chunk));
        }
        loop {
            self.arm();
            match self.0.rx.get() {
                Rx::Armed(id) => match self.poll_armed(id, cx) {
                    Poll::Ready(Some(got)) => return Poll::Ready(got),
                    Poll::Ready(None) => {}
                    Poll::Pending if !self.0.streaming.get() || self.poll_over(cx).is_pending() => {
                        return Poll::Pending;
                    }
                    Poll::Pending => {
                        // The end is there: if the stream missed it, what follows is received one by one.
                        let Rx::Armed(id) = self.0.rx.get() else { unreachable!("still waiting") };
                        self.0.ring.stop(id);
                        return Poll::Pending;
                    }
                },
                Rx::Filling(_) => return self.poll_filled(cx),
                Rx::Idle | Rx::Polling(_) => unreachable!("armed above, and not lazy"),
            }
        }
    }

    fn poll_fill(&self, cx: &mut Context<'_>, to: &mut Vec<u8>, max: usize) -> Poll<io::Result<usize>> {
        let waiting = self.0.kept.borrow().is_some();
        if let Rx::Armed(id) = self.0.rx.get()
            && !waiting
            && max > RECV_BUFFER_BYTES
            && !self.0.ring.holds_bytes(id)
        {
            // Large bodies go straight to where they are kept, once nothing waits in buffers of the ring.
            ready!(self.poll_disarmed(id, cx));
        }
        if let Rx::Idle = self.0.rx.get()
            && !waiting
        {
            if to.capacity() == to.len() {
                to.reserve(max.min(BODY_TURN_BYTES));
            }
            let id = self.0.ring.fill(&self.0.fd, std::mem::take(to), max, false);
            self.0.rx.set(Rx::Filling(id));
        }
        if let Rx::Filling(id) = self.0.rx.get() {
            let (res, _, keep) = ready!(self.0.ring.poll_op(id, cx));
            self.0.rx.set(Rx::Idle);
            if let Keep::Fill(_, v) = keep {
                *to = if res > 0 { filled(v, res as usize) } else { v };
            }
            return Poll::Ready(if res < 0 { Err(error(res)) } else { Ok(res as usize) });
        }
        let mut chunk = ready!(self.poll_recv(cx))?;
        let n = chunk.len().min(max);
        to.extend_from_slice(&chunk[..n]);
        chunk.advance(n);
        if !chunk.is_empty() {
            self.unread(chunk);
        }
        Poll::Ready(Ok(n))
    }

    fn set_lazy(&self, lazy: bool) {
        if self.0.lazy.replace(lazy) == lazy {
            return;
        }
        match self.0.rx.get() {
            Rx::Armed(id) if lazy => self.0.ring.stop(id),
            Rx::Polling(id) => {
                self.0.ring.abandon(id);
                self.0.rx.set(Rx::Idle);
            }
            _ => {}
        }
    }

    fn is_lazy(&self) -> bool {
        self.0.lazy.get()
    }

    fn poll_part(
        &self,
        cx: &mut Context<'_>,
        sight: usize,
        pick: &mut dyn FnMut(&[u8]) -> usize,
    ) -> Poll<io::Result<Chunk>> {
        if !self.0.lazy.get() {
            return self.poll_recv(cx);
        }
        if let Some(early) = ready!(self.poll_early(cx)) {
            return Poll::Ready(early);
        }
        self.poll_try(cx, |_| {
            let mut room = [MaybeUninit::uninit(); MOST_SIGHT_BYTES];
            let room = &mut room[..sight.min(MOST_SIGHT_BYTES)];
            let ((seen, _), _) = rustix::net::recv(&self.0.fd, room, RecvFlags::DONTWAIT | RecvFlags::PEEK)?;
            if seen.is_empty() {
                return Ok(Chunk::empty());
            }
            self.receive_now(pick(seen).clamp(1, seen.len()))
        })
    }

    fn poll_draw(&self, cx: &mut Context<'_>, pipe: &mut KernelPipe, max: usize) -> Poll<io::Result<Drawn>> {
        debug_assert!(self.0.lazy.get(), "drawn from a connection that receives");
        if let Some(early) = ready!(self.poll_early(cx)) {
            return Poll::Ready(early.map(Drawn::Received));
        }
        if pipe.held() > 0 {
            return match pipe.draw(&self.0.fd, max) {
                // The end, or what looks like it.
                Ok(0) => Poll::Pending,
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Poll::Pending,
                drawn => Poll::Ready(drawn.map(Drawn::Piped)),
            };
        }
        self.poll_try(cx, |polled| match pipe.draw(&self.0.fd, max) {
            Ok(n) if n > 0 => Ok(Drawn::Piped(n)),
            Err(e) if e.kind() != io::ErrorKind::WouldBlock || !polled => Err(e),
            // The kernel moves nothing past a mark of urgent data, while its polls say that there is something, and
            // tells of an end that lies behind the mark as if it had come. To receive knows better.
            _ => self.receive_now(max.min(RECV_BUFFER_BYTES)).map(Drawn::Received),
        })
    }

    fn poll_pour(&self, cx: &mut Context<'_>, pipe: &mut KernelPipe) -> Poll<io::Result<usize>> {
        debug_assert!(self.0.tx.get().is_none(), "a send is in flight");
        loop {
            if let Some(id) = self.0.room.get() {
                ready!(self.0.ring.poll_op(id, cx));
                self.0.room.set(None);
            }
            match pipe.pour(&self.0.fd) {
                Ok(n) => {
                    self.0.poured.set(self.0.poured.get().wrapping_add(n));
                    return Poll::Ready(Ok(n));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.0.room.set(Some(self.0.ring.poll(&self.0.fd, libc::POLLOUT as u32)));
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Poll::Ready(Err(self.send_failed(e))),
            }
        }
    }

    fn pass_to(&self, to: &Socket, pass: Rc<dyn Pass>) {
        let is_plain = !self.0.lazy.get() && self.0.streaming.get() && self.0.kept.borrow().is_none();
        if let (true, Rx::Armed(id), Some(sent)) = (is_plain, self.0.rx.get(), to.0.tx.get()) {
            self.0.ring.pass(id, sent, pass);
        }
    }

    fn unread(&self, chunk: Chunk) {
        // A lent buffer must not be held by a connection that waits.
        let chunk = if chunk.is_lent() { Chunk::heap(chunk.to_vec()) } else { chunk };
        let old = self.0.kept.borrow_mut().replace(chunk);
        debug_assert!(old.is_none(), "bytes kept twice");
    }

    fn start_send(&self, what: Outgoing) {
        assert!(self.0.tx.get().is_none(), "a send is in flight");
        if !what.is_empty() {
            self.0.tx.set(Some(self.0.ring.send(&self.0.fd, what)));
        }
    }

    fn poll_sent(&self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Outgoing>>> {
        let Some(id) = self.0.tx.get() else { return Poll::Ready(Ok(None)) };
        let (res, _, keep) = ready!(self.0.ring.poll_op(id, cx));
        self.0.tx.set(None);
        let Keep::Send(_, what, _) = keep else { unreachable!("a send keeps its bytes") };
        Poll::Ready(if res < 0 { Err(self.send_failed(error(res))) } else { Ok(Some(what)) })
    }

    fn is_sending(&self) -> bool {
        [self.0.tx.get(), self.0.room.get()].into_iter().flatten().any(|id| self.0.ring.peek(id).is_none())
    }

    fn taken(&self) -> usize {
        // The kernel asks for more only when a third of its buffer is free, which for a slow peer is megabytes and
        // minutes: what the peer has not acknowledged yet tells sooner.
        let unacknowledged = self.unacknowledged();
        let offset = self.0.tx.get().map_or(0, |id| self.0.ring.sent_offset(id));
        self.0.poured.get().wrapping_add(offset).wrapping_sub(unacknowledged)
    }

    fn poll_gone(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.arm();
        self.poll_over(cx)
    }

    fn poll_broken(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.arm();
        self.poll_dead(cx)
    }

    fn met_break(&self) -> bool {
        let result = self.0.tx.get().and_then(|id| self.0.ring.peek(id));
        self.0.met_break.get() || result.is_some_and(|res| res < 0 && tells_break(&error(res)))
    }

    fn is_taken(&self) -> bool {
        !self.is_sending() && self.unacknowledged() == 0
    }

    fn is_silent(&self) -> bool {
        let ended = self.0.over.get() || self.0.watch.get().is_some_and(|id| self.0.ring.has_news(id));
        if ended || self.0.kept.borrow().is_some() {
            return false;
        }
        let watched = match self.0.rx.get() {
            Rx::Armed(id) | Rx::Filling(id) => {
                let end = self.0.ring.peek(id);
                if self.0.ring.holds_bytes(id) || end.is_some_and(|res| res != -libc::ECANCELED) {
                    return false;
                }
                end.is_none() && !self.0.lazy.get()
            }
            Rx::Idle | Rx::Polling(_) => !self.0.lazy.get(),
        };
        watched || self.is_dry()
    }

    fn shutdown(&self) {
        let _ = rustix::net::shutdown(self.0.fd.as_fd(), rustix::net::Shutdown::Write);
    }

    fn set_abortive(&self, abortive: bool) {
        let _ = rustix::net::sockopt::set_socket_linger(self.0.fd.as_fd(), abortive.then_some(Duration::ZERO));
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Rx::Armed(id) | Rx::Filling(id) | Rx::Polling(id) = self.0.rx.get() {
            self.0.ring.abandon(id);
        }
        for id in [self.0.tx.get(), self.0.watch.get(), self.0.room.get()].into_iter().flatten() {
            self.0.ring.abandon(id);
        }
    }
}

/// A listening socket of this lane.
pub struct Listener {
    ring: Rc<Ring>,
    fd: Rc<Fd>,
    pending: Cell<Option<OpId>>,
}

impl Listener {
    /// Takes over a listening, non-blocking socket.
    pub fn new(fd: OwnedFd, ring: &Rc<Ring>) -> Listener {
        Listener { ring: ring.clone(), fd: Fd::new(fd, ring), pending: Cell::new(None) }
    }

    /// The next connection, non-blocking and without delay.
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<OwnedFd>> {
        let id = self.pending.get().unwrap_or_else(|| {
            let id = self.ring.accept(&self.fd);
            self.pending.set(Some(id));
            id
        });
        let (res, _, _) = ready!(self.ring.poll_op(id, cx));
        self.pending.set(None);
        if res < 0 {
            return Poll::Ready(Err(error(res)));
        }
        // SAFETY: the kernel made this descriptor for us; nobody else knows it.
        let fd = unsafe { OwnedFd::from_raw_fd(res) };
        let _ = rustix::net::sockopt::set_tcp_nodelay(&fd, true);
        Poll::Ready(Ok(fd))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(id) = self.pending.get() {
            self.ring.abandon(id);
        }
    }
}

/// The wire of a real lane.
pub struct RingWire {
    ring: Rc<Ring>,
    now_us: Rc<Cell<u64>>,
}

impl RingWire {
    /// A wire over a ring; `now_us` is set by the driver.
    pub fn new(ring: &Rc<Ring>, now_us: &Rc<Cell<u64>>) -> Self {
        RingWire { ring: ring.clone(), now_us: now_us.clone() }
    }

    /// The ring itself.
    pub fn ring(&self) -> &Rc<Ring> {
        &self.ring
    }
}

/// A connect in flight; dropping it cancels.
struct Connecting<'a> {
    ring: &'a Ring,
    id: Option<OpId>,
}

impl Drop for Connecting<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.ring.abandon(id);
        }
    }
}

impl Wire for RingWire {
    type Conn = Socket;

    async fn connect(&self, to: SocketAddr) -> io::Result<Socket> {
        let socket = socket2::Socket::new(
            socket2::Domain::for_address(to),
            socket2::Type::STREAM.nonblocking().cloexec(),
            Some(socket2::Protocol::TCP),
        )?;
        socket.set_tcp_nodelay(true)?;
        let socket = Socket::new(socket.into(), &self.ring);
        let mut connecting = Connecting { ring: &self.ring, id: Some(self.ring.connect(&socket.0.fd, to)) };
        let (res, _, _) = poll_fn(|cx| self.ring.poll_op(connecting.id.expect("taken once"), cx)).await;
        connecting.id = None;
        if res < 0 { Err(error(res)) } else { Ok(socket) }
    }

    fn now_us(&self) -> u64 {
        self.now_us.get()
    }
}
