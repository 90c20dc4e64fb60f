//! Payload passes from the worker's socket through a pipe to the client's, moved by the kernel.
//!
//! Takes both connections, the request and how much may pass, gives how much did once it is all with the client's
//! socket. A pipe is held only while bytes are on their way. Never moves a byte more than was asked for, never leaves
//! one in a pipe that somebody else gets: after a fault the pipe is closed.

use std::future::poll_fn;
use std::task::{Context, Poll};
use std::time::Duration;

use super::Event;
use crate::fault::What;
use crate::flow::passage::{Client, Request, Stall, give_back};
use crate::lane::Lane;
use crate::lane::pipes::Taken;
use crate::lane::wire::{Chunk, Conn, Drawn, Pipe, Wire};
use crate::limits::{SPLICE_BYTES, SPLICE_TURN_BYTES};
use crate::metrics::Tally;

/// Moves `left` bytes, or up to the worker's end; a `live` answer until a pause before which little came. What was
/// received before the connection became lazy is given first.
pub(super) async fn splice<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    conn: &W::Conn,
    (left, live): (u64, bool),
    request: &Request,
) -> Event {
    let mut moving = Moving {
        lane,
        client,
        conn,
        request,
        left,
        live,
        moved: 0,
        lately: None,
        pipe: None,
        stop: None,
        clock: Clock::Stands,
    };
    poll_fn(|cx| moving.poll(cx)).await
}

/// Who is waited for, on the client's timer.
enum Clock {
    Stands,
    /// It may be silent for so long.
    Worker(Duration),
    Client(Stall),
}

/// Why nothing more is drawn.
enum Stop {
    /// This goes next: what came before the connection was lazy, or what only a receive could get.
    Received(Chunk),
    NoPipe,
    /// The worker's side ended; whether with a FIN.
    Ended(bool),
}

/// What became of an attempt on one side.
enum Step {
    Moved(u64),
    /// Nothing to do.
    Idle,
    /// The other side of the socket is waited for; the task is woken.
    Waits,
}

struct Moving<'a, W: Wire> {
    lane: &'a Lane<W>,
    client: &'a Client<W::Conn>,
    conn: &'a W::Conn,
    request: &'a Request,
    /// Still to be drawn.
    left: u64,
    live: bool,
    /// Drawn so far.
    moved: u64,
    /// Drawn since the worker was last waited for, if anything was.
    lately: Option<u64>,
    pipe: Option<Taken<'a, <W::Conn as Conn>::Pipe>>,
    stop: Option<Stop>,
    clock: Clock,
}

impl<W: Wire> Moving<'_, W> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        let mut turn = 0;
        loop {
            if self.lane.is_ending() {
                return Poll::Ready(Event::Fault(What::CutEnding));
            }
            let drawn = self.draw(cx);
            let poured = match self.pour(cx) {
                Ok(poured) => poured,
                Err(fault) => return Poll::Ready(Event::Fault(fault)),
            };
            if self.held() == 0 {
                // Nobody waits with an empty pipe in hand.
                if !matches!(drawn, Step::Moved(_)) {
                    self.pipe = None;
                }
                if let Some(event) = self.event(&drawn, &poured) {
                    return Poll::Ready(event);
                }
            }
            match (drawn, poured) {
                (Step::Moved(n), _) | (_, Step::Moved(n)) => {
                    self.clock = Clock::Stands;
                    turn += n;
                    if turn >= SPLICE_TURN_BYTES {
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                }
                (_, Step::Waits) => return self.await_client(cx).map(Event::Fault),
                _ => return self.await_worker(cx).map(Event::Fault),
            }
        }
    }

    fn held(&self) -> usize {
        self.pipe.as_ref().map_or(0, |pipe| pipe.held())
    }

    /// From the worker into the pipe.
    fn draw(&mut self, cx: &mut Context<'_>) -> Step {
        if self.left == 0 || self.stop.is_some() {
            return Step::Idle;
        }
        if self.pipe.is_none() {
            self.pipe = self.lane.pipes.take();
        }
        let Some(pipe) = &mut self.pipe else {
            self.stop = Some(Stop::NoPipe);
            return Step::Idle;
        };
        let most = usize::try_from(self.left).unwrap_or(usize::MAX);
        self.stop = Some(match self.conn.poll_draw(cx, pipe, most) {
            Poll::Pending => return Step::Waits,
            Poll::Ready(Ok(Drawn::Piped(n))) if n > 0 => {
                let n = n as u64;
                self.left -= n;
                self.moved += n;
                self.lately = Some(self.lately.unwrap_or(0) + n);
                return Step::Moved(n);
            }
            Poll::Ready(Ok(Drawn::Received(chunk))) if !chunk.is_empty() => Stop::Received(chunk),
            Poll::Ready(end) => Stop::Ended(end.is_ok()),
        });
        Step::Idle
    }

    /// From the pipe to the client, behind what was sent before.
    fn pour(&mut self, cx: &mut Context<'_>) -> Result<Step, What> {
        match self.client.conn.poll_sent(cx) {
            Poll::Pending => return Ok(Step::Waits),
            Poll::Ready(Ok(sent)) => give_back(self.lane, sent),
            Poll::Ready(Err(_)) => return Err(What::ClientLeft),
        }
        let Some(pipe) = self.pipe.as_mut().filter(|pipe| pipe.held() > 0) else { return Ok(Step::Idle) };
        match self.client.conn.poll_pour(cx, pipe) {
            Poll::Pending => Ok(Step::Waits),
            Poll::Ready(Ok(n)) => {
                self.lane.count(Tally::ClientBytesOut, n as u64);
                self.lane.count(Tally::RelaySpliced, n as u64);
                self.lane.count(Tally::RelaySplices, 1);
                self.request.sent.set(self.request.sent.get() + n as u64);
                Ok(Step::Moved(n as u64))
            }
            Poll::Ready(Err(_)) => Err(What::ClientLeft),
        }
    }

    /// How it ended, if it did; asked when the pipe is empty.
    fn event(&mut self, drawn: &Step, poured: &Step) -> Option<Event> {
        if matches!(poured, Step::Waits) {
            return None;
        }
        let dry = matches!(drawn, Step::Waits) && self.lately.is_some_and(|n| n < SPLICE_BYTES as u64);
        if self.left == 0 || self.live && dry {
            return Some(Event::Moved(self.moved));
        }
        Some(match self.stop.take()? {
            Stop::Received(chunk) if self.moved > 0 => {
                self.conn.unread(chunk);
                Event::Moved(self.moved)
            }
            Stop::Received(chunk) => Event::Next(chunk),
            Stop::NoPipe if self.moved > 0 => Event::Moved(self.moved),
            Stop::NoPipe => Event::NoPipe,
            Stop::Ended(fin) => Event::WorkerEnded(fin),
        })
    }

    /// The worker's deadline runs.
    fn await_worker(&mut self, cx: &mut Context<'_>) -> Poll<What> {
        self.lately = None;
        if self.client.has_left(cx) {
            return Poll::Ready(What::ClientLeft);
        }
        // It changes when the body that follows becomes whole.
        let limit = self.request.stall_timeout();
        if !matches!(self.clock, Clock::Worker(known) if known == limit) {
            self.clock = Clock::Worker(limit);
            self.client.timer.set(self.lane.stall_deadline(self.lane.wire.now_us(), limit, self.request.deadline_us()));
        }
        self.client.timer.poll_due(cx).map(|()| self.request.ran_out(self.lane.wire.now_us()))
    }

    /// The client's stall clock runs.
    fn await_client(&mut self, cx: &mut Context<'_>) -> Poll<What> {
        if !matches!(self.clock, Clock::Client(_)) {
            self.clock = Clock::Client(Stall::default());
        }
        let Clock::Client(stall) = &mut self.clock else { unreachable!("set above") };
        stall.poll(self.lane, self.client, self.request.deadline_us(), cx)
    }
}
