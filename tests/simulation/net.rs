//! Connections of the simulated network: two byte streams with buffers, delays, ends and resets, as TCP has them.
//!
//! Takes bytes at one end, gives them at the other in pieces of any size, later. Never reorders, never loses a byte but
//! to a reset, never tells an end before all that was sent has arrived.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use corelane::lane::wire::{Chunk, Outgoing, Pass};
use corelane::limits::RECV_BUFFER_BYTES;

use crate::world::World;

/// How long the kernel holds back what it was told more will follow.
const CORK_US: u64 = 200_000;
/// What it sends at once all the same.
const SEGMENT_BYTES: usize = 1460;

/// Bytes in a queue.
#[derive(Default)]
struct Queue {
    bytes: Vec<u8>,
    start: usize,
}

impl Queue {
    fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    fn push(&mut self, bytes: &[u8]) {
        if self.start == self.bytes.len() {
            self.clear();
        }
        self.bytes.extend_from_slice(bytes);
    }

    fn front(&self, n: usize) -> &[u8] {
        &self.bytes[self.start..self.start + n]
    }

    fn pop(&mut self, n: usize) -> Vec<u8> {
        let out = self.front(n).to_vec();
        self.start += n;
        out
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.start = 0;
    }
}

/// How a connection behaves.
#[derive(Clone, Copy, Debug)]
pub struct Manners {
    /// Room for what was sent and has not arrived.
    pub send_bytes: usize,
    /// Room for what has arrived and was not read.
    pub recv_bytes: usize,
    /// Longest time that a piece takes.
    pub delay_us: u64,
}

/// One end of a connection.
#[derive(Default)]
struct End {
    inbox: Queue,
    /// The peer's end has arrived.
    fin: bool,
    /// When it did.
    fin_us: Option<u64>,
    /// A reset has arrived.
    rst: bool,
    /// Somebody was told of it: Linux tells of it once, and then of an end.
    rst_told: bool,
    /// Who sent was told of it, before an end had come.
    met_break: bool,
    outbox: Queue,
    /// The end follows what is in the outbox.
    fin_out: bool,
    /// A piece is on its way.
    moving: bool,
    /// The last bytes were sent ahead of others.
    held_until: u64,
    /// Nobody is there any more.
    closed: bool,
    /// It was ended with a reset.
    killed: bool,
    /// Bytes that have arrived at the peer's.
    acked: usize,
    /// When the last of them did.
    acked_us: u64,
    /// A send in flight, and how far it is.
    tx: Option<(Outgoing, usize)>,
    /// Where arrivals go on to without the reader.
    onward: Option<(Rc<dyn Pass>, Rc<Line>)>,
    reader: Option<Waker>,
    watcher: Option<Waker>,
    sender: Option<Waker>,
    pourer: Option<Waker>,
}

impl End {
    /// A send fails.
    fn meet_break(&mut self) {
        self.met_break |= self.rst && !self.rst_told && !self.fin;
        self.rst_told |= self.rst;
    }

    fn is_dead(&self) -> bool {
        self.rst || self.killed
    }

    fn wake_in(&mut self) {
        self.reader.take().into_iter().chain(self.watcher.take()).for_each(Waker::wake);
    }

    fn wake_out(&mut self) {
        self.sender.take().into_iter().chain(self.pourer.take()).for_each(Waker::wake);
    }
}

/// A connection.
pub struct Line {
    pub id: u64,
    pub world: Rc<World>,
    pub manners: Manners,
    ends: RefCell<[End; 2]>,
}

fn error(kind: io::ErrorKind) -> io::Error {
    kind.into()
}

impl Line {
    pub fn new(world: &Rc<World>, manners: Manners) -> Rc<Line> {
        let id = world.number();
        world.note("line", id, 0, 0);
        Rc::new(Line { id, world: world.clone(), manners, ends: RefCell::default() })
    }

    fn with<T>(&self, end: usize, of: impl FnOnce(&mut End, &mut End) -> T) -> T {
        let [a, b] = &mut *self.ends.borrow_mut();
        if end == 0 { of(a, b) } else { of(b, a) }
    }

    /// Something is to move from an end.
    fn schedule(self: &Rc<Self>, end: usize) {
        let started = self.with(end, |me, _| !std::mem::replace(&mut me.moving, true));
        if started {
            self.move_in(end, self.world.roll(0, self.manners.delay_us + 1));
        }
    }

    fn move_in(self: &Rc<Self>, end: usize, us: u64) {
        let line = self.clone();
        self.world.after(us, move || line.deliver(end));
    }

    fn deliver(self: &Rc<Self>, end: usize) {
        let world = &self.world;
        let now = world.now_us();
        let (again, refused) = self.with(end, |me, peer| {
            me.moving = false;
            if me.is_dead() {
                me.outbox.clear();
                return (None, false);
            }
            if now < me.held_until && me.outbox.len() < SEGMENT_BYTES && !me.fin_out && me.tx.is_none() {
                return (Some(me.held_until - now), false);
            }
            if peer.closed {
                let refused = me.outbox.len() > 0;
                me.outbox.clear();
                return (None, refused);
            }
            let room = self.manners.recv_bytes.saturating_sub(peer.inbox.len());
            let n = world.portion(me.outbox.len().min(room));
            if n > 0 {
                let bytes = me.outbox.pop(n);
                peer.inbox.push(&bytes);
                me.acked += n;
                me.acked_us = now;
                world.note("deliver", self.id, end as u64, n as u64);
                if peer.onward.is_none() {
                    peer.reader.take().into_iter().for_each(Waker::wake);
                }
                me.pourer.take().into_iter().for_each(Waker::wake);
                self.pump(me);
            }
            if me.outbox.len() > 0 {
                let more = peer.inbox.len() < self.manners.recv_bytes;
                return (more.then(|| world.roll(0, self.manners.delay_us + 1)), false);
            }
            if me.fin_out && me.tx.is_none() && !peer.fin {
                if n > 0 && world.once_in(2) {
                    return (Some(world.roll(0, self.manners.delay_us + 1)), false);
                }
                (peer.fin, peer.fin_us) = (true, Some(now));
                world.note("fin", self.id, end as u64, 0);
                peer.wake_in();
            }
            (None, false)
        });
        self.pass(1 - end);
        if refused {
            // Nobody takes it: the kernel of the other side says so.
            self.reset_at(end);
        }
        if let Some(us) = again {
            self.with(end, |me, _| me.moving = true);
            self.move_in(end, us);
        }
    }

    /// From now on what arrives at an end goes on from the same end of another connection.
    pub fn pass_to(&self, end: usize, to: &Rc<Line>, pass: Rc<dyn Pass>) {
        self.with(end, |me, _| me.onward = Some((pass, to.clone())));
    }

    /// From now on everything is for the reader.
    pub fn pass_no_more(&self, end: usize) {
        self.with(end, |me, _| me.onward = None);
    }

    /// Sends on what has arrived at an end, as far as that is so and may be; what may not is for the reader.
    fn pass(self: &Rc<Self>, end: usize) {
        let Some((pass, to)) = self.with(end, |me, _| me.onward.take()) else { return };
        while self.waiting(end) > 0 {
            let n = self.world.portion(self.waiting(end).min(RECV_BUFFER_BYTES));
            let bytes = self.peek(end, n);
            // A ring also gives up when it has no room for the send.
            if !to.is_free(end) || self.world.once_in(32) || !pass.take(&bytes, self.world.now_us()) {
                return self.with(end, |me, _| me.reader.take().into_iter().for_each(Waker::wake));
            }
            self.world.note("pass", self.id, end as u64, n as u64);
            to.with(end, |me, _| me.tx = None);
            to.start_send(end, Outgoing::Chunk(Chunk::heap(self.take(end, n))));
        }
        self.pass_to(end, &to, pass);
    }

    /// Whether the last send was a piece that was received, and has ended well.
    fn is_free(&self, end: usize) -> bool {
        self.with(end, |me, _| matches!(&me.tx, Some((what @ Outgoing::Chunk(_), sent)) if *sent == what.len()))
    }

    /// Moves a send on, as far as there is room.
    fn pump(&self, me: &mut End) {
        let Some((what, sent)) = &mut me.tx else { return };
        let room = self.manners.send_bytes.saturating_sub(me.outbox.len());
        let n = room.min(what.len() - *sent);
        if n > 0 {
            me.outbox.push(&what[*sent..*sent + n]);
            *sent += n;
        }
        if *sent == what.len() {
            me.held_until = if matches!(what, Outgoing::Ahead(_)) { self.world.now_us() + CORK_US } else { 0 };
            me.sender.take().into_iter().for_each(Waker::wake);
        }
    }

    /// A reset is on its way to an end.
    fn reset_at(self: &Rc<Self>, end: usize) {
        let line = self.clone();
        self.world.after(self.world.roll(0, self.manners.delay_us + 1), move || {
            let world = &line.world;
            line.with(end, |me, _| {
                if me.closed || me.rst {
                    return;
                }
                me.rst = true;
                me.outbox.clear();
                // Linux lets what has arrived be read, others do not.
                if !me.fin && world.once_in(2) {
                    me.inbox.clear();
                }
                world.note("rst", line.id, end as u64, 0);
                me.wake_in();
                me.wake_out();
            });
        });
    }

    // ── what an end can do ──────────────────────────────────────────────────────────────────────────────────────

    /// Takes up to `max` bytes that have arrived.
    fn take(self: &Rc<Self>, end: usize, max: usize) -> Vec<u8> {
        let (bytes, more) = self.with(end, |me, peer| {
            let n = me.inbox.len().min(max);
            (me.inbox.pop(n), peer.outbox.len() > 0 || peer.fin_out && !me.fin)
        });
        if more {
            self.schedule(1 - end);
        }
        bytes
    }

    /// Bytes that have arrived.
    pub fn waiting(&self, end: usize) -> usize {
        self.with(end, |me, _| me.inbox.len())
    }

    pub fn peek(&self, end: usize, most: usize) -> Vec<u8> {
        self.with(end, |me, _| me.inbox.front(me.inbox.len().min(most)).to_vec())
    }

    pub fn is_over(&self, end: usize) -> bool {
        self.with(end, |me, _| me.fin || me.rst)
    }

    pub fn met_break(&self, end: usize) -> bool {
        self.with(end, |me, _| me.met_break || me.rst && !me.rst_told && !me.fin && me.tx.is_some())
    }

    pub fn is_reset(&self, end: usize) -> bool {
        self.with(end, |me, _| me.rst)
    }

    /// The next bytes, up to `max`; none at the end of the stream.
    pub fn poll_read(self: &Rc<Self>, end: usize, max: usize, cx: &mut Context<'_>) -> Poll<io::Result<Vec<u8>>> {
        let state = self.with(end, |me, _| {
            if me.inbox.len() > 0 {
                return Some(Ok(true));
            }
            if me.rst && !me.fin && !std::mem::replace(&mut me.rst_told, true) {
                return Some(Err(error(io::ErrorKind::ConnectionReset)));
            }
            if me.fin || me.rst {
                return Some(Ok(false));
            }
            me.reader = Some(cx.waker().clone());
            None
        });
        match state {
            None => Poll::Pending,
            Some(Err(e)) => Poll::Ready(Err(e)),
            Some(Ok(false)) => Poll::Ready(Ok(Vec::new())),
            Some(Ok(true)) => Poll::Ready(Ok(self.take(end, max))),
        }
    }

    /// Ready when the peer's end or a reset has arrived.
    pub fn poll_over(&self, end: usize, cx: &mut Context<'_>) -> Poll<()> {
        self.with(end, |me, _| {
            if me.fin || me.rst {
                return Poll::Ready(());
            }
            me.watcher = Some(cx.waker().clone());
            Poll::Pending
        })
    }

    /// Puts bytes into the socket, as far as there is room; gives how many.
    pub fn poll_write(self: &Rc<Self>, end: usize, bytes: &[u8], cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let wrote = self.with(end, |me, _| {
            if me.is_dead() || me.fin_out || me.closed {
                me.meet_break();
                return Poll::Ready(Err(error(io::ErrorKind::BrokenPipe)));
            }
            let room = self.manners.send_bytes.saturating_sub(me.outbox.len());
            if room == 0 {
                me.pourer = Some(cx.waker().clone());
                return Poll::Pending;
            }
            let n = self.world.portion(room.min(bytes.len()));
            me.outbox.push(&bytes[..n]);
            me.held_until = 0;
            Poll::Ready(Ok(n))
        });
        if let Poll::Ready(Ok(_)) = wrote {
            self.schedule(end);
        }
        wrote
    }

    /// Starts a send that goes on by itself.
    pub fn start_send(self: &Rc<Self>, end: usize, what: Outgoing) {
        self.with(end, |me, _| {
            assert!(me.tx.is_none(), "a send is in flight");
            me.tx = Some((what, 0));
        });
        let line = self.clone();
        self.world.after(self.world.roll(0, 20), move || {
            let moves = line.with(end, |me, _| {
                if !me.is_dead() && !me.closed {
                    line.pump(me);
                }
                me.outbox.len() > 0
            });
            if moves {
                line.schedule(end);
            }
        });
    }

    /// Whether the send has ended.
    pub fn poll_sent(&self, end: usize, cx: &mut Context<'_>) -> Poll<io::Result<Option<Outgoing>>> {
        self.with(end, |me, _| {
            let Some((what, sent)) = &me.tx else { return Poll::Ready(Ok(None)) };
            if *sent == what.len() {
                return Poll::Ready(Ok(me.tx.take().map(|(what, _)| what)));
            }
            if me.rst {
                me.tx = None;
                me.meet_break();
                return Poll::Ready(Err(error(io::ErrorKind::BrokenPipe)));
            }
            me.sender = Some(cx.waker().clone());
            Poll::Pending
        })
    }

    pub fn is_sending(&self, end: usize) -> bool {
        self.with(end, |me, _| me.tx.as_ref().is_some_and(|(what, sent)| *sent < what.len() && !me.rst))
    }

    pub fn acked(&self, end: usize) -> usize {
        self.with(end, |me, _| me.acked)
    }

    /// Whether all that an end has sent has arrived, and when the last of it did.
    pub fn acked_all(&self, end: usize) -> (bool, u64) {
        self.with(end, |me, _| (me.outbox.len() == 0 && me.tx.is_none(), me.acked_us))
    }

    /// When the gateway could know that its client or worker has left: since then, or never, as long as the end is stuck
    /// behind bytes that nobody has room for.
    pub fn left_us(&self, since_us: u64) -> Option<u64> {
        let killed = self.with(1, |me, _| me.killed);
        self.with(0, |me, _| if killed { Some(since_us) } else { me.fin_us.map(|us| us.max(since_us)) })
    }

    /// Ends the sending side, behind what the kernel has taken; the rest of a send in flight is given up.
    pub fn shut(self: &Rc<Self>, end: usize) {
        let first = self.with(end, |me, _| {
            me.tx = None;
            me.wake_out();
            !std::mem::replace(&mut me.fin_out, true)
        });
        if first {
            self.world.note("shut", self.id, end as u64, 0);
            self.schedule(end);
        }
    }

    /// Closes an end: with a reset if that is asked for, or if bytes lie there unread.
    pub fn close(self: &Rc<Self>, end: usize, reset: bool) {
        let kills = self.with(end, |me, _| {
            if me.closed {
                return None;
            }
            me.closed = true;
            me.tx = None;
            me.onward = None;
            me.wake_in();
            me.wake_out();
            let kills = reset || me.inbox.len() > 0;
            if kills {
                me.killed = true;
                me.outbox.clear();
            }
            me.inbox.clear();
            Some(kills && !me.rst)
        });
        match kills {
            None => {}
            Some(true) => {
                self.world.note("kill", self.id, end as u64, 0);
                self.reset_at(1 - end);
            }
            Some(false) => {
                self.world.note("close", self.id, end as u64, 0);
                self.shut(end);
            }
        }
    }

    pub fn is_closed(&self, end: usize) -> bool {
        self.with(end, |me, _| me.closed)
    }
}

/// The end of a client or of a worker.
pub struct Peer {
    pub line: Rc<Line>,
    end: usize,
}

impl Peer {
    /// Clients and workers have the second end, the gateway the first.
    pub fn new(line: &Rc<Line>) -> Peer {
        Peer { line: line.clone(), end: 1 }
    }

    /// More bytes, appended; false at the end of the stream.
    pub async fn recv(&self, to: &mut Vec<u8>, max: usize) -> io::Result<bool> {
        let bytes = poll_fn(|cx| self.line.poll_read(self.end, max, cx)).await?;
        to.extend_from_slice(&bytes);
        Ok(!bytes.is_empty())
    }

    /// The same until a bell rings: `None` then.
    pub async fn recv_or(&self, to: &mut Vec<u8>, bell: &crate::world::Bell) -> Option<io::Result<bool>> {
        poll_fn(|cx| {
            if let Poll::Ready(got) = self.line.poll_read(self.end, usize::MAX, cx) {
                return Poll::Ready(Some(got.map(|bytes| {
                    to.extend_from_slice(&bytes);
                    !bytes.is_empty()
                })));
            }
            bell.poll(cx).map(|()| None)
        })
        .await
    }

    /// Up to `max` bytes, appended; `None` when a bell rings before.
    pub async fn recv_part(
        &self,
        to: &mut Vec<u8>,
        max: usize,
        bell: &crate::world::Bell,
    ) -> Option<io::Result<usize>> {
        poll_fn(|cx| {
            if bell.poll(cx).is_ready() {
                return Poll::Ready(None);
            }
            self.line
                .poll_read(self.end, max, cx)
                .map_ok(|bytes| {
                    to.extend_from_slice(&bytes);
                    bytes.len()
                })
                .map(Some)
        })
        .await
    }

    pub async fn send(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let n = poll_fn(|cx| self.line.poll_write(self.end, bytes, cx)).await?;
            bytes = &bytes[n..];
        }
        Ok(())
    }

    /// Waits until the other side ends or breaks off.
    pub async fn over(&self) {
        poll_fn(|cx| self.line.poll_over(self.end, cx)).await
    }

    /// The same, or until a bell rings.
    pub async fn over_or(&self, bell: &crate::world::Bell) {
        poll_fn(|cx| if self.line.poll_over(self.end, cx).is_ready() { Poll::Ready(()) } else { bell.poll(cx) }).await
    }

    pub fn is_over(&self) -> bool {
        self.line.is_over(self.end)
    }

    pub fn is_closed(&self) -> bool {
        self.line.is_closed(self.end)
    }

    pub fn shut(&self) {
        self.line.shut(self.end);
    }

    pub fn close(&self) {
        self.line.close(self.end, false);
    }

    pub fn reset(&self) {
        self.line.close(self.end, true);
    }
}
