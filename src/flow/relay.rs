//! Relay: a worker's answer goes to the client, by copying.
//!
//! Takes the answer's head and the connection, gives an outcome after the last byte. The first byte leaves at
//! once; one chunk at most waits while another is being sent, so a slow client slows the worker down. An
//! answer that breaks off never ends cleanly.

use std::future::poll_fn;
use std::task::Poll;

use crate::fault::{Fault, What};
use crate::flow::passage::{Answer, Client, Outcome, Request, Stall, Then, give_back};
use crate::http1::{self, AnswerBody, Chunked, Version};
use crate::lane::Lane;
use crate::lane::wire::{Chunk, Conn, Outgoing, Wire};
use crate::metrics::Tally;

/// Where the body ends.
enum Framing {
    Length(u64),
    Chunked(Chunked),
    UntilClose,
}

/// What a piece of body turned out to be.
struct Piece {
    /// Bytes that belong to this answer.
    len: usize,
    /// Whether the answer is complete.
    done: bool,
}

impl Framing {
    fn new(body: AnswerBody) -> Self {
        match body {
            AnswerBody::None => Framing::Length(0),
            AnswerBody::Length(n) => Framing::Length(n),
            AnswerBody::Chunked => Framing::Chunked(Chunked::new()),
            AnswerBody::UntilClose => Framing::UntilClose,
        }
    }

    fn take(&mut self, bytes: &[u8]) -> Result<Piece, What> {
        match self {
            Framing::Length(left) => {
                let len = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                *left -= len as u64;
                Ok(Piece { len, done: *left == 0 })
            }
            Framing::Chunked(state) => {
                let skim = state.skim(bytes).map_err(|_| What::CutBadFraming)?;
                Ok(Piece { len: skim.consumed, done: skim.done })
            }
            Framing::UntilClose => Ok(Piece { len: bytes.len(), done: false }),
        }
    }

    /// Takes the payload alone, for a client that does not know chunks.
    fn unpack(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<Piece, What> {
        let Framing::Chunked(state) = self else {
            let piece = self.take(bytes)?;
            out.extend_from_slice(&bytes[..piece.len]);
            return Ok(piece);
        };
        let mut len = 0;
        loop {
            let piece = state.next(&bytes[len..]).map_err(|_| What::CutBadFraming)?;
            out.extend_from_slice(&bytes[len..][piece.payload.clone()]);
            len += piece.consumed;
            if piece.done || piece.payload.is_empty() {
                return Ok(Piece { len, done: piece.done });
            }
        }
    }
}

enum Event {
    /// The next bytes are there and the way to the client is free.
    Next(Chunk),
    /// The worker's side ended; whether with a FIN.
    WorkerEnded(bool),
    Fault(What),
}

/// Passes the answer on to its last byte.
///
/// # Errors
/// A fault of the worker that shows before the client has seen a byte.
pub async fn relay<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &mut Request,
    answer: Answer<W::Conn>,
) -> Result<Outcome<W::Conn>, Fault> {
    let Answer { conn, mut chunk, head_len } = answer;
    let old_client = request.head.version == Version::H10;
    let body = request.answer.body;
    let unpack = old_client && body == AnswerBody::Chunked;
    let framing = if unpack { AnswerBody::UntilClose } else { body };
    request.keep_alive &= framing != AnswerBody::UntilClose && !lane.is_draining();
    let until_close = framing == AnswerBody::UntilClose;
    let mut out = lane.buffers.take();
    let head = http1::Answer {
        request_id: &request.id,
        framing,
        keep_alive: request.keep_alive,
        client_version: request.head.version,
    };
    http1::response_head(&mut out, &request.answer, &chunk, &head);
    chunk.advance(head_len);
    let mut frame = Framing::new(body);
    let first = if unpack {
        frame.unpack(&chunk, &mut out)
    } else {
        frame.take(&chunk).inspect(|piece| out.extend_from_slice(&chunk[..piece.len]))
    };
    let broken = |fault| Outcome { then: Then::Cut, conn: None, fault: Some(fault) };
    let mut piece = match first {
        Ok(piece) => piece,
        Err(_) => return Err(Fault::with(What::BadAnswer, "Its body breaks its own framing.")),
    };
    let mut excess = piece.len < chunk.len();
    drop(chunk);
    // A next part is asked for in the same turn that sends this one.
    if !piece.done {
        conn.arm();
    }
    client.fragile.set(until_close);
    client.send(lane, Outgoing::Heap(out));
    request.answered_us = lane.wire.now_us();
    let deadline = request.started_us + lane.config.request_timeout.as_micros() as u64;
    while !piece.done {
        let mut chunk = match wait(lane, client, &conn, deadline).await {
            Event::Next(chunk) => chunk,
            Event::WorkerEnded(true) if matches!(frame, Framing::UntilClose) => break,
            Event::WorkerEnded(_) => {
                lane.count(Tally::Cuts, 1);
                return Ok(cut(lane, client, until_close, What::Cut).await);
            }
            Event::Fault(fault) => return Ok(broken(fault)),
        };
        let taken = if unpack {
            let mut out = lane.buffers.take();
            let taken = frame.unpack(&chunk, &mut out);
            excess = taken.as_ref().is_ok_and(|p| p.len < chunk.len());
            client.send(lane, Outgoing::Heap(out));
            taken
        } else {
            let taken = frame.take(&chunk);
            if let Ok(piece) = &taken {
                excess = piece.len < chunk.len();
                chunk.truncate(piece.len);
                client.send(lane, Outgoing::Chunk(chunk));
            }
            taken
        };
        match taken {
            Ok(p) => piece = p,
            Err(fault) => {
                lane.count(Tally::Cuts, 1);
                return Ok(cut(lane, client, until_close, fault).await);
            }
        }
        if !piece.done {
            conn.arm();
        }
    }
    // An answer that came before the whole request was sent leaves the connection half used.
    let reusable = request.answer.keep_alive && !excess && !conn.is_sending() && !matches!(frame, Framing::UntilClose);
    let conn = if reusable && collect(lane, &conn) { Some(conn) } else { None };
    if request.keep_alive {
        // The kernel takes the last bytes while the next request is waited for; nobody is woken for it.
        return Ok(Outcome { then: Then::Keep, conn, fault: None });
    }
    let flushed = client.flush(lane).await;
    client.fragile.set(flushed.is_err() && until_close);
    let then = if flushed.is_err() { Then::Cut } else { Then::Close };
    Ok(Outcome { then, conn, fault: flushed.err() })
}

/// Ends an answer that broke off. What arrived before the break is the client's, only the end is withheld: a
/// reset would discard what the client has not read yet, so it is left for the framing that a FIN would complete.
async fn cut<W: Wire>(lane: &Lane<W>, client: &Client<W::Conn>, until_close: bool, fault: What) -> Outcome<W::Conn> {
    let sent = client.flush(lane).await.is_ok();
    let then = if sent && !until_close { Then::Close } else { Then::Cut };
    Outcome { then, conn: None, fault: Some(fault) }
}

/// Collects the buffer of the request's send; false when it failed or was not complete.
fn collect<W: Wire>(lane: &Lane<W>, conn: &W::Conn) -> bool {
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    match conn.poll_sent(&mut cx) {
        Poll::Ready(Ok(sent)) => {
            give_back(lane, sent);
            true
        }
        _ => false,
    }
}

/// Waits until the next bytes are there and the client has taken the last ones. The deadline runs on for the
/// worker while it is waited for, the stall clock for the client while that is.
async fn wait<W: Wire>(lane: &Lane<W>, client: &Client<W::Conn>, conn: &W::Conn, deadline: u64) -> Event {
    let mut next: Option<Chunk> = None;
    let mut stall = None;
    client.timer.set(deadline);
    poll_fn(|cx| {
        if lane.is_ending() {
            return Poll::Ready(Event::Fault(What::CutEnding));
        }
        if next.is_none() {
            match conn.poll_recv(cx) {
                Poll::Ready(Ok(chunk)) if !chunk.is_empty() => next = Some(chunk),
                Poll::Ready(end) => return Poll::Ready(Event::WorkerEnded(end.is_ok())),
                Poll::Pending if client.has_left(lane, cx) => return Poll::Ready(Event::Fault(What::ClientLeft)),
                Poll::Pending => return client.timer.poll_due(cx).map(|()| Event::Fault(What::CutTimeout)),
            }
        }
        match client.conn.poll_sent(cx) {
            Poll::Ready(Ok(sent)) => {
                give_back(lane, sent);
                Poll::Ready(Event::Next(next.take().expect("received above")))
            }
            Poll::Ready(Err(_)) => Poll::Ready(Event::Fault(What::ClientLeft)),
            Poll::Pending => {
                stall.get_or_insert_with(Stall::default).poll(lane, client, deadline, cx).map(Event::Fault)
            }
        }
    })
    .await
}
