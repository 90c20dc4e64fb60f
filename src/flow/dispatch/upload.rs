//! Upload: the part of a body that is not held follows the request to its worker.
//!
//! Takes the client's connection and the worker's, gives the end: the last byte is with the worker's socket. Bytes are
//! moved by the kernel where there is a pipe, else they are received and sent, a buffer at a time, so a slow worker
//! slows the client down. Never takes a byte that belongs to the client's next request, never waits for the client
//! longer than for any other body, nor for a worker that takes nothing longer than for the first byte of its answer.

use std::rc::Rc;
use std::task::{Context, Poll, ready};

use crate::fault::What;
use crate::flow::passage::{Client, Follow, Leg, Unread, give_back};
use crate::lane::Lane;
use crate::lane::pipes::Taken;
use crate::lane::timers::Timer;
use crate::lane::wire::{Chunk, Conn, Drawn, Outgoing, Pipe, Wire};
use crate::limits::{PIPELESS_BYTES, SPLICE_TURN_BYTES};
use crate::metrics::Tally;

/// Why it ended before its time.
pub(super) enum Stopped {
    /// The worker takes no more; it may have said why.
    Worker,
    /// The worker took nothing for longer than it may.
    Unread,
    Client(What),
}

/// What became of an attempt on one side.
#[derive(Clone, Copy)]
enum Step {
    Moved(u64),
    /// Nothing to do.
    Idle,
    /// The other side of the socket is waited for; the task is woken.
    Waits,
}

/// Who is waited for.
enum Waits {
    Nobody,
    /// Clock since when.
    Client(u64),
    /// What it had taken when that began.
    Worker(usize),
}

/// A body on its way. The client's connection is lazy until all was taken: what it sends stays in the kernel.
pub struct Upload<'a, W: Wire> {
    client: &'a Client<W::Conn>,
    unread: Rc<Unread>,
    /// Longest pause of the client's.
    pause_us: u64,
    deadline_us: u64,
    /// Runs while one side is waited for.
    timer: Timer,
    pipe: Option<Taken<'a, <W::Conn as Conn>::Pipe>>,
    /// Received, because there was no pipe or it was there before the connection became lazy; not yet sent.
    chunk: Option<Chunk>,
    /// Bytes that are received before a pipe is asked for again.
    pipeless: u64,
    waits: Waits,
    /// For how long the client was waited for before, in microseconds.
    awaited_us: u64,
    /// Longest that the worker may take nothing while there is something for it; 0: no limit but the deadline.
    unread_us: u64,
    /// Clock when the worker's socket was last given something.
    poured_us: u64,
}

impl<W: Wire> Drop for Upload<'_, W> {
    fn drop(&mut self) {
        self.client.conn.set_lazy(self.unread.left() > 0);
    }
}

impl<'a, W: Wire> Upload<'a, W> {
    /// What follows on this leg, if anything does.
    pub(super) fn new(lane: &Lane<W>, client: &'a Client<W::Conn>, leg: Leg<'_>) -> Option<Box<Self>> {
        let unread = leg.unread.filter(|unread| unread.left() > 0)?.clone();
        client.conn.set_lazy(true);
        unread.awaited(0);
        Some(Box::new(Upload {
            client,
            unread,
            pause_us: leg.config.body_timeout.as_micros() as u64,
            deadline_us: leg.deadline_us,
            timer: lane.timers.timer(),
            pipe: None,
            chunk: None,
            pipeless: 0,
            waits: Waits::Nobody,
            awaited_us: 0,
            unread_us: leg.first_byte_us,
            poured_us: 0,
        }))
    }

    /// What is left when the worker answers early: it goes on while the answer passes.
    pub fn follow(mut self: Box<Self>, lane: &'a Lane<W>) -> Follow<'a, W::Conn> {
        // A worker that answers may take its time for the rest.
        self.unread_us = 0;
        Box::new(Box::new(move |conn: &W::Conn, cx: &mut Context<'_>| {
            self.poll(lane, conn, cx).map(|ended| match ended {
                Err(Stopped::Client(What::BodyTimeout)) => Err(What::ClientStalled),
                Err(Stopped::Client(_)) => Err(What::ClientLeft),
                Err(Stopped::Worker | Stopped::Unread) | Ok(()) => Ok(()),
            })
        }))
    }

    /// Whether it is the client that is waited for.
    pub(super) fn awaits(&self) -> bool {
        matches!(self.waits, Waits::Client(_))
    }

    /// For how long the worker has waited for the client in all, in microseconds.
    pub(super) fn awaited_us(&self, now_us: u64) -> u64 {
        match self.waits {
            Waits::Client(since_us) => self.awaited_us + (now_us - since_us),
            Waits::Nobody | Waits::Worker(_) => self.awaited_us,
        }
    }

    /// Clock when the worker's socket was last given something; 0 before.
    pub(super) fn poured_us(&self) -> u64 {
        self.poured_us
    }

    /// Moves on as far as both sides let it, behind what was sent before. Ready when all was given to the worker.
    ///
    /// # Errors
    /// The side that ended it.
    pub(super) fn poll(
        &mut self,
        lane: &'a Lane<W>,
        conn: &W::Conn,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Stopped>> {
        let mut turn = 0;
        loop {
            let drawn = match self.draw(lane, cx) {
                Ok(drawn) => drawn,
                Err(what) => return Poll::Ready(Err(Stopped::Client(what))),
            };
            let Ok(poured) = self.pour(lane, conn, cx) else { return Poll::Ready(Err(Stopped::Worker)) };
            if self.held() == 0 {
                if self.unread.left() == 0 && matches!(poured, Step::Idle) {
                    return Poll::Ready(Ok(()));
                }
                // Nobody waits with an empty pipe in hand.
                if !matches!(drawn, Step::Moved(_)) {
                    self.pipe = None;
                }
            }
            let now = lane.wire.now_us();
            match (drawn, poured) {
                (Step::Moved(n), _) | (_, Step::Moved(n)) => {
                    // What is drawn ends the wait for the client alone.
                    if matches!(poured, Step::Moved(_)) || matches!(self.waits, Waits::Client(_)) {
                        self.waits_for(Waits::Nobody, now);
                    }
                    turn += n;
                    if turn >= SPLICE_TURN_BYTES {
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                }
                (_, Step::Waits) => {
                    if !matches!(self.waits, Waits::Worker(_)) {
                        self.waits_for(Waits::Worker(conn.taken()), now);
                        self.timer.set(now + self.unread_us);
                    }
                    if self.unread_us == 0 {
                        return Poll::Pending;
                    }
                    ready!(self.timer.poll_due(cx));
                    // The kernel says that there is room when there is much of it.
                    let taken = conn.taken();
                    if matches!(self.waits, Waits::Worker(before) if before == taken) {
                        return Poll::Ready(Err(Stopped::Unread));
                    }
                    self.waits = Waits::Nobody;
                }
                _ => {
                    if !matches!(self.waits, Waits::Client(_)) {
                        self.waits_for(Waits::Client(now), now);
                        self.timer.set(self.deadline_us.min(now + self.pause_us));
                    }
                    ready!(self.timer.poll_due(cx));
                    // Who goes on waiting does so for another pause.
                    self.waits_for(Waits::Nobody, now);
                    return Poll::Ready(Err(Stopped::Client(What::BodyTimeout)));
                }
            }
        }
    }

    fn waits_for(&mut self, waits: Waits, now_us: u64) {
        self.awaited_us = self.awaited_us(now_us);
        self.unread.awaited(self.awaited_us);
        self.waits = waits;
    }

    /// Bytes that were taken from the client and are not with the worker.
    fn held(&self) -> usize {
        self.chunk.as_ref().map_or(0, |chunk| chunk.len()) + self.pipe.as_ref().map_or(0, |pipe| pipe.held())
    }

    /// From the client into the pipe, or into memory.
    fn draw(&mut self, lane: &'a Lane<W>, cx: &mut Context<'_>) -> Result<Step, What> {
        let left = self.unread.left();
        if left == 0 || self.chunk.is_some() {
            return Ok(Step::Idle);
        }
        if self.pipe.is_none() && self.pipeless == 0 {
            self.pipe = lane.pipes.take();
            self.pipeless = if self.pipe.is_none() { PIPELESS_BYTES } else { 0 };
        }
        let drawn = match &mut self.pipe {
            Some(pipe) => self.client.conn.poll_draw(cx, pipe, usize::try_from(left).unwrap_or(usize::MAX)),
            None => self.client.conn.poll_recv(cx).map_ok(Drawn::Received),
        };
        let n = match drawn {
            Poll::Pending => return Ok(Step::Waits),
            Poll::Ready(Ok(Drawn::Piped(n))) if n > 0 => n as u64,
            Poll::Ready(Ok(Drawn::Received(mut chunk))) if !chunk.is_empty() => {
                if chunk.len() as u64 > left {
                    self.client.conn.unread(Chunk::heap(chunk[left as usize..].to_vec()));
                    chunk.truncate(left as usize);
                }
                let n = chunk.len() as u64;
                self.pipeless = self.pipeless.saturating_sub(n);
                self.chunk = Some(chunk);
                n
            }
            Poll::Ready(_) => return Err(What::ClientGone),
        };
        self.unread.take(n, lane.wire.now_us());
        lane.count(Tally::ClientBytesIn, n);
        Ok(Step::Moved(n))
    }

    /// From the pipe or from memory to the worker, behind what was sent before.
    fn pour(&mut self, lane: &Lane<W>, conn: &W::Conn, cx: &mut Context<'_>) -> Result<Step, ()> {
        match conn.poll_sent(cx) {
            Poll::Pending => return Ok(Step::Waits),
            Poll::Ready(Ok(sent)) => give_back(lane, sent),
            Poll::Ready(Err(_)) => return Err(()),
        }
        // What is in the pipe was taken before the chunk.
        if let Some(pipe) = self.pipe.as_mut().filter(|pipe| pipe.held() > 0) {
            return match conn.poll_pour(cx, pipe) {
                Poll::Pending => Ok(Step::Waits),
                Poll::Ready(Ok(n)) => {
                    self.poured_us = lane.wire.now_us();
                    lane.count(Tally::UploadSpliced, n as u64);
                    Ok(Step::Moved(n as u64))
                }
                Poll::Ready(Err(_)) => Err(()),
            };
        }
        let Some(chunk) = self.chunk.take() else { return Ok(Step::Idle) };
        let n = chunk.len() as u64;
        self.poured_us = lane.wire.now_us();
        lane.count(Tally::UploadCopied, n);
        conn.start_send(Outgoing::Chunk(chunk));
        Ok(Step::Moved(n))
    }
}
