//! Dispatch: a request goes to its worker, the head of the answer comes back.
//!
//! Takes a request and a worker, gives the live connection with the answer's head and the first bytes behind
//! it. Never sends a request twice but in one case: a pooled connection that turns out dead before it said
//! anything, at once. Never keeps a worker busy for a client that has left.

use std::future::poll_fn;
use std::io;
use std::task::Poll;

use crate::fault::{Fault, What};
use crate::flow::passage::{Answer, Client, Request, give_back};
use crate::http1::{self, BodyLength, Forward, HeadLimits, Parsed};
use crate::lane::Lane;
use crate::lane::wire::{Chunk, Conn, Outgoing, Wire};
use crate::limits::{MAX_INTERIM, ONE_SEND_BYTES};
use crate::metrics::Tally;
use crate::shared::roster::Slot;

/// How an exchange ended without an answer.
enum Broken {
    /// The connection died before the worker said anything.
    Silent {
        at_once: bool,
    },
    Fault(Fault),
}

impl From<What> for Broken {
    fn from(what: What) -> Self {
        Broken::Fault(what.into())
    }
}

/// A reused connection that dies within this time after the last piece was handed to the kernel was dead before
/// (field experience with engines that close idle connections after 5 s).
const AT_ONCE_US: u64 = 100_000;

/// Sends the request to a worker and waits for the head of its answer.
pub async fn dispatch<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &mut Request,
    slot: Slot,
    era: u32,
) -> Result<Answer<W::Conn>, Fault> {
    request.attempts += 1;
    if let Some(conn) = lane.pool.take(slot, era, lane.wire.now_us()) {
        lane.count(Tally::Reuses, 1);
        match exchange(lane, client, request, slot, era, conn).await {
            Ok(answer) => return Ok(answer),
            Err(Broken::Fault(fault)) => return Err(fault),
            Err(Broken::Silent { at_once: true }) if request.attempts < lane.config.max_attempts => {
                request.attempts += 1;
                lane.count(Tally::Replays, 1);
            }
            Err(Broken::Silent { .. }) => return Err(What::WorkerReset.into()),
        }
    }
    let conn = connect(lane, client, slot, era).await?;
    exchange(lane, client, request, slot, era, conn).await.map_err(|broken| match broken {
        Broken::Fault(fault) => fault,
        Broken::Silent { .. } => What::WorkerReset.into(),
    })
}

async fn connect<W: Wire>(lane: &Lane<W>, client: &Client<W::Conn>, slot: Slot, era: u32) -> Result<W::Conn, Fault> {
    let mut nth = 0;
    loop {
        let to = lane.view.borrow().worker(slot, era).and_then(|w| w.addrs.get(nth).copied());
        let Some(to) = to else { return Err(What::ConnectFailed.into()) };
        nth += 1;
        lane.count(Tally::Connects, 1);
        client.timer.set(lane.wire.now_us() + lane.config.connect_timeout.as_micros() as u64);
        let mut connecting = std::pin::pin!(lane.wire.connect(to));
        let connected = poll_fn(|cx| {
            if let Poll::Ready(done) = connecting.as_mut().poll(cx) {
                return Poll::Ready(done.map_err(|_| Fault::from(What::ConnectFailed)));
            }
            if client.has_left(lane, cx) {
                return Poll::Ready(Err(What::ClientGone.into()));
            }
            if lane.is_ending() {
                return Poll::Ready(Err(What::ShuttingDown.into()));
            }
            client.timer.poll_due(cx).map(|()| Err(What::ConnectTimeout.into()))
        })
        .await;
        match connected {
            Ok(conn) => return Ok(conn),
            Err(fault) if matches!(fault.what, What::ClientGone | What::ShuttingDown) => return Err(fault),
            Err(fault) => {
                lane.count(Tally::ConnectFailures, 1);
                let another = lane.view.borrow().worker(slot, era).is_some_and(|w| w.addrs.len() > nth);
                if !another {
                    return Err(fault);
                }
            }
        }
    }
}

/// Writes the request's head for this worker, with the body behind it when it is small; whether it is.
fn write_request<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &Request,
    slot: Slot,
    era: u32,
    out: &mut Vec<u8>,
) -> Result<bool, Fault> {
    let view = lane.view.borrow();
    // Gone since it was chosen: another one can be tried, nothing was sent.
    let Some(worker) = view.worker(slot, era) else { return Err(What::ConnectFailed.into()) };
    let body = request.body();
    let length = match request.head.body {
        BodyLength::None => BodyLength::None,
        _ => BodyLength::Length(body.len() as u64),
    };
    let forward = Forward {
        prefix: &worker.prefix,
        host: None,
        client: client.peer.ip(),
        authorization: worker.api_key.as_deref(),
        request_id: &request.id,
        length,
    };
    http1::request_head(out, &request.head, &request.input, &forward);
    let small = body.len() <= ONE_SEND_BYTES;
    if small {
        out.extend_from_slice(body);
    }
    Ok(small)
}

/// The request's way out: its head, then the body where that is large.
struct Sending {
    body_follows: bool,
    failed: bool,
    last_us: u64,
}

impl Sending {
    /// Moves on; never waits for more than the next piece.
    fn poll<W: Wire>(&mut self, lane: &Lane<W>, conn: &W::Conn, request: &Request, cx: &mut std::task::Context<'_>) {
        while self.body_follows {
            match conn.poll_sent(cx) {
                Poll::Pending => return,
                Poll::Ready(Ok(sent)) => {
                    give_back(lane, sent);
                    self.body_follows = false;
                    self.last_us = lane.wire.now_us();
                    conn.start_send(Outgoing::Shared(request.input.clone(), request.head_len, request.input.len()));
                }
                // The worker may have answered before it broke off: the receiving side decides.
                Poll::Ready(Err(_)) => (self.body_follows, self.failed) = (false, true),
            }
        }
    }
}

enum Event {
    Bytes(io::Result<Chunk>),
    Left,
    Ending,
    Late,
}

async fn exchange<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &mut Request,
    slot: Slot,
    era: u32,
    conn: W::Conn,
) -> Result<Answer<W::Conn>, Broken> {
    request.answer.reset();
    let mut out = lane.buffers.take();
    let small = write_request(lane, client, request, slot, era, &mut out).map_err(Broken::Fault)?;
    conn.start_send(Outgoing::Heap(out));
    conn.arm();
    let mut sending = Sending { body_follows: !small, failed: false, last_us: lane.wire.now_us() };
    client.timer.set(request.started_us + lane.config.request_timeout.as_micros() as u64);
    let limits = HeadLimits { bytes: lane.config.max_head_bytes, fields: lane.config.max_headers };
    let mut gathered: Option<Vec<u8>> = None;
    let mut interim = 0;
    loop {
        let event = poll_fn(|cx| {
            sending.poll(lane, &conn, request, cx);
            if let Poll::Ready(got) = conn.poll_recv(cx) {
                return Poll::Ready(Event::Bytes(got));
            }
            if client.has_left(lane, cx) {
                return Poll::Ready(Event::Left);
            }
            if lane.is_ending() {
                return Poll::Ready(Event::Ending);
            }
            client.timer.poll_due(cx).map(|()| Event::Late)
        })
        .await;
        let mut chunk = match event {
            Event::Left => return Err(What::ClientGone.into()),
            Event::Ending => return Err(What::ShuttingDown.into()),
            Event::Late => return Err(What::RequestTimeout.into()),
            Event::Bytes(Ok(chunk)) if !chunk.is_empty() => chunk,
            Event::Bytes(_) if gathered.is_none() && interim == 0 => {
                let at_once = lane.wire.now_us().saturating_sub(sending.last_us) <= AT_ONCE_US;
                return Err(Broken::Silent { at_once });
            }
            Event::Bytes(_) => return Err(What::WorkerReset.into()),
        };
        if let Some(mut v) = gathered.take() {
            v.extend_from_slice(&chunk);
            chunk = Chunk::heap(v);
        }
        loop {
            match request.answer.parse(&chunk, &limits, request.head.method).map_err(Broken::Fault)? {
                Parsed::Partial => {
                    gathered = Some(chunk.into_vec());
                    break;
                }
                Parsed::Complete(len) if request.answer.interim() => {
                    interim += 1;
                    if interim > MAX_INTERIM {
                        return Err(Broken::Fault(Fault::with(What::BadAnswer, "It has too many interim answers.")));
                    }
                    chunk.advance(len);
                    if chunk.is_empty() {
                        break;
                    }
                }
                Parsed::Complete(head_len) => {
                    // It answered before the body was on its way: what it is sent next, it would take for that.
                    request.answer.keep_alive &= !sending.body_follows && !sending.failed;
                    return Ok(Answer { conn, chunk, head_len });
                }
            }
        }
    }
}
