//! Relay: a worker's answer goes to the client, by copying.
//!
//! Takes the answer's head and the connection, gives an outcome after the last byte. The first byte leaves at
//! once; one chunk at most waits while another is being sent, so a slow client slows the worker down. An
//! answer that breaks off never ends cleanly.

pub mod logprobs;
mod merge;

pub use merge::merged;

use std::future::poll_fn;
use std::task::Poll;

use crate::fault::{Fault, What};
use crate::flow::passage::{Answer, Client, Outcome, Request, Stall, Then, give_back};
use crate::http1::{self, AnswerBody, Chunked, ResponseHead, Version};
use crate::lane::Lane;
use crate::lane::timers::Timer;
use crate::lane::wire::{Chunk, Conn, Outgoing, Wire};
use crate::limits::MAX_KEPT_ANSWER_BYTES;
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

/// An answer under way: what its framing says and how the client is told.
struct Passing {
    frame: Framing,
    /// The client does not know chunks: it is given the payload alone.
    unpack: bool,
    done: bool,
    /// The worker said more than its framing allows.
    excess: bool,
}

impl Passing {
    /// Takes the next bytes; gives what is to be sent of them.
    fn take<W: Wire>(&mut self, lane: &Lane<W>, mut chunk: Chunk) -> Result<Outgoing, What> {
        if self.unpack {
            let mut out = lane.buffers.take();
            let piece = self.frame.unpack(&chunk, &mut out)?;
            (self.done, self.excess) = (piece.done, piece.len < chunk.len());
            return Ok(Outgoing::Heap(out));
        }
        let piece = self.frame.take(&chunk)?;
        (self.done, self.excess) = (piece.done, piece.len < chunk.len());
        chunk.truncate(piece.len);
        Ok(Outgoing::Chunk(chunk))
    }

    /// Takes what came with the head, behind which it is sent.
    fn first(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), Fault> {
        let taken = if self.unpack {
            self.frame.unpack(bytes, out)
        } else {
            self.frame.take(bytes).inspect(|piece| out.extend_from_slice(&bytes[..piece.len]))
        };
        let piece = taken.map_err(|_| Fault::with(What::BadAnswer, "Its body breaks its own framing."))?;
        (self.done, self.excess) = (piece.done, piece.len < bytes.len());
        Ok(())
    }
}

/// Passes the answer on to its last byte.
///
/// # Errors
/// A fault of the worker that shows before the client has seen a byte.
pub async fn relay<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &Request,
    answer: Answer<W::Conn>,
) -> Result<Outcome<W::Conn>, Fault> {
    let Answer { conn, head, mut chunk, head_len } = answer;
    let unpack = request.head.version == Version::H10 && head.body == AnswerBody::Chunked;
    let framing = if unpack { AnswerBody::UntilClose } else { head.body };
    let until_close = framing == AnswerBody::UntilClose;
    let keep_alive = request.keep_alive.get() && !until_close && !lane.is_draining();
    request.keep_alive.set(keep_alive);
    let mut out = lane.buffers.take();
    let told = http1::Answer { request_id: &request.id, framing, keep_alive, client_version: request.head.version };
    http1::response_head(&mut out, &head, &chunk, &told);
    chunk.advance(head_len);
    let mut passing = Passing { frame: Framing::new(head.body), unpack, done: false, excess: false };
    passing.first(&chunk, &mut out)?;
    request.body_begun.set(!chunk.is_empty());
    drop(chunk);
    // A next part is asked for in the same turn that sends this one.
    if !passing.done {
        conn.arm();
    }
    client.fragile.set(until_close);
    client.send(lane, Outgoing::Heap(out));
    request.answered_us.set(lane.wire.now_us());
    let ended = pass(lane, client, request, &conn, &mut passing).await;
    // An answer that came before the whole request was sent leaves the connection half used.
    let by_close = matches!(passing.frame, Framing::UntilClose);
    let reusable = head.keep_alive && !passing.excess && !conn.is_sending() && !by_close;
    let conn = if ended.is_ok() && reusable && collect(lane, &conn) { Some(conn) } else { None };
    Ok(finish(lane, client, request, until_close, ended, conn, head).await)
}

/// What becomes of the client's connection when its answer has ended, well or not.
async fn finish<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &Request,
    until_close: bool,
    ended: Result<(), What>,
    conn: Option<W::Conn>,
    head: ResponseHead,
) -> Outcome<W::Conn> {
    let (then, fault) = match ended {
        // The kernel takes the last bytes while the next request is waited for; nobody is woken for it.
        Ok(()) if request.keep_alive.get() => (Then::Keep, None),
        Ok(()) => {
            let flushed = client.flush(lane).await;
            client.fragile.set(flushed.is_err() && until_close);
            (if flushed.is_err() { Then::Cut } else { Then::Close }, flushed.err())
        }
        Err(fault @ (What::Cut | What::CutBadFraming)) => {
            lane.count(Tally::Cuts, 1);
            (cut(lane, client, until_close).await, Some(fault))
        }
        Err(fault) => (Then::Cut, Some(fault)),
    };
    Outcome { then, status: head.status, conn, fault, head }
}

/// Passes on what follows the first bytes.
///
/// # Errors
/// What broke the answer off; with [`What::Cut`] and [`What::CutBadFraming`] the client is there and may be told.
async fn pass<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &Request,
    conn: &W::Conn,
    passing: &mut Passing,
) -> Result<(), What> {
    let deadline = request.started_us + lane.config.request_timeout.as_micros() as u64;
    while !passing.done {
        match wait(lane, client, conn, deadline).await {
            Event::Next(chunk) => {
                client.send(lane, passing.take(lane, chunk)?);
                request.body_begun.set(true);
            }
            Event::WorkerEnded(true) if matches!(passing.frame, Framing::UntilClose) => return Ok(()),
            Event::WorkerEnded(_) => return Err(What::Cut),
            Event::Fault(fault) => return Err(fault),
        }
        if !passing.done {
            conn.arm();
        }
    }
    Ok(())
}

/// Reads an answer to its end without passing it on. The connection comes back if it may serve another request, and
/// the head. The body is put into `keep`, up to so many bytes of it. A `client` that is given is watched.
///
/// # Errors
/// [`What::WorkerReset`] when it broke off, [`What::BadAnswer`] when its framing is broken or it is too long to be
/// kept, [`What::RequestTimeout`] at the deadline, [`What::FirstByteTimeout`] when it stalls, [`What::ClientGone`],
/// [`What::ShuttingDown`].
pub async fn drain<W: Wire>(
    lane: &Lane<W>,
    client: Option<&Client<W::Conn>>,
    answer: Answer<W::Conn>,
    timer: &Timer,
    deadline_us: u64,
    mut keep: Option<&mut Vec<u8>>,
) -> Result<(Option<W::Conn>, ResponseHead), Fault> {
    let Answer { conn, head, mut chunk, head_len } = answer;
    chunk.advance(head_len);
    let mut frame = Framing::new(head.body);
    loop {
        let taken = match &mut keep {
            Some(body) => {
                let taken = frame.unpack(&chunk, body);
                if body.len() > MAX_KEPT_ANSWER_BYTES {
                    return Err(Fault::with(What::BadAnswer, "It is too long for what has to be read of it."));
                }
                taken
            }
            None => frame.take(&chunk),
        };
        let piece = taken.map_err(|_| Fault::with(What::BadAnswer, "Its body breaks its own framing."))?;
        if piece.done {
            let reusable = head.keep_alive && piece.len == chunk.len() && !conn.is_sending() && collect(lane, &conn);
            return Ok((reusable.then_some(conn), head));
        }
        timer.set(lane.stall_deadline(deadline_us));
        let next = poll_fn(|cx| {
            if lane.is_ending() {
                return Poll::Ready(Err(What::ShuttingDown));
            }
            if let Poll::Ready(got) = conn.poll_recv(cx) {
                return Poll::Ready(Ok(got));
            }
            if client.is_some_and(|client| client.has_left(lane, cx)) {
                return Poll::Ready(Err(What::ClientGone));
            }
            timer.poll_due(cx).map(|()| {
                let stalled = lane.wire.now_us() < deadline_us;
                Err(if stalled { What::FirstByteTimeout } else { What::RequestTimeout })
            })
        })
        .await?;
        chunk = match next {
            Ok(chunk) if !chunk.is_empty() => chunk,
            Ok(_) if matches!(frame, Framing::UntilClose) => return Ok((None, head)),
            _ => return Err(What::WorkerReset.into()),
        };
    }
}

/// Ends an answer that broke off. What arrived before the break is the client's, only the end is withheld: a
/// reset would discard what the client has not read yet, so it is left for the framing that a FIN would complete.
async fn cut<W: Wire>(lane: &Lane<W>, client: &Client<W::Conn>, until_close: bool) -> Then {
    let sent = client.flush(lane).await.is_ok();
    if sent && !until_close { Then::Close } else { Then::Cut }
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
    client.timer.set(lane.stall_deadline(deadline));
    poll_fn(|cx| {
        if lane.is_ending() {
            return Poll::Ready(Event::Fault(What::CutEnding));
        }
        if next.is_none() {
            match conn.poll_recv(cx) {
                Poll::Ready(Ok(chunk)) if !chunk.is_empty() => next = Some(chunk),
                Poll::Ready(end) => return Poll::Ready(Event::WorkerEnded(end.is_ok())),
                Poll::Pending if client.has_left(lane, cx) => return Poll::Ready(Event::Fault(What::ClientLeft)),
                Poll::Pending => {
                    let late = if lane.wire.now_us() < deadline { What::CutStalled } else { What::CutTimeout };
                    return client.timer.poll_due(cx).map(|()| Event::Fault(late));
                }
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
