//! Relay: a worker's answer goes to the client.
//!
//! Takes the answer's head and the connection, gives an outcome after the last byte. The first byte leaves at
//! once; one chunk at most waits while another is being sent, or one pipe is full, so a slow client slows the worker
//! down. An answer that breaks off never ends cleanly.
//!
//! What goes how is decided here, where the framing is known: heads and what stands between chunks are always received
//! and read, payload is received and sent (`copy`) or moved by the kernel unseen (`splice`). Of what is copied, the even flow
//! of small pieces passes without the walk (`steady`).

mod copy;
mod drain;
pub mod logprobs;
mod merge;
mod splice;
mod steady;

pub use drain::{Until, drain};
pub use merge::merged;

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::config::Relay;
use crate::fault::{Fault, What};
use crate::flow::passage::{Answer, Client, Follow, Outcome, Request, Then, give_back};
use crate::http1::{self, AnswerBody, Chunked, ResponseHead, Version};
use crate::lane::Lane;
use crate::lane::wire::{Chunk, Conn, Outgoing, Wire};
use crate::limits::{FRAME_SIGHT_BYTES, PIPELESS_BYTES, RECV_BUFFER_BYTES, SPLICE_BYTES, SPLICE_CHUNK_BYTES};
use crate::metrics::Tally;
use steady::Steady;

/// Where the body ends.
#[derive(Clone, Copy)]
enum Framing {
    Length(u64),
    Chunked(Chunked),
    UntilClose,
}

/// What a piece of body turned out to be.
struct Piece {
    /// Bytes that belong to this answer.
    len: usize,
    /// Payload among them.
    payload: u64,
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
                Ok(Piece { len, payload: len as u64, done: *left == 0 })
            }
            Framing::Chunked(state) => {
                let skim = state.skim(bytes).map_err(|_| What::CutBadFraming)?;
                Ok(Piece { len: skim.consumed, payload: skim.payload, done: skim.done })
            }
            Framing::UntilClose => Ok(Piece { len: bytes.len(), payload: bytes.len() as u64, done: false }),
        }
    }

    /// Takes the payload alone, for a client that does not know chunks.
    fn unpack(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<Piece, What> {
        let Framing::Chunked(state) = self else {
            let piece = self.take(bytes)?;
            out.extend_from_slice(&bytes[..piece.len]);
            return Ok(piece);
        };
        let (mut len, mut payload) = (0, 0);
        loop {
            let piece = state.next(&bytes[len..]).map_err(|_| What::CutBadFraming)?;
            out.extend_from_slice(&bytes[len..][piece.payload.clone()]);
            len += piece.consumed;
            payload += piece.payload.len() as u64;
            if piece.done || piece.payload.is_empty() {
                return Ok(Piece { len, payload, done: piece.done });
            }
        }
    }

    /// Notes that `n` bytes of payload passed unseen; whether the answer is complete.
    fn pass(&mut self, n: u64) -> bool {
        match self {
            Framing::Length(left) => {
                *left -= n;
                *left == 0
            }
            Framing::Chunked(state) => {
                state.pass(n);
                false
            }
            Framing::UntilClose => false,
        }
    }

    /// How many of these bytes come before the next payload, or are all that is left of the answer.
    fn before_payload(&self, seen: &[u8]) -> usize {
        match self {
            // What is malformed is taken, and then it is told.
            Framing::Chunked(state) => { *state }.next(seen).map_or(seen.len(), |piece| piece.payload.start),
            Framing::Length(_) | Framing::UntilClose => 0,
        }
    }
}

enum Event {
    /// The next bytes are there and the way to the client is free.
    Next(Chunk),
    /// So many bytes of payload went to the client unseen.
    Moved(u64),
    /// There was no pipe for them.
    NoPipe,
    /// The worker's side ended; whether with a FIN.
    WorkerEnded(bool),
    Fault(What),
}

/// Small chunks in a row after which chunks are copied again.
const SMALL_CHUNKS: u32 = 2;

/// How the next bytes pass.
#[derive(Debug, PartialEq, Eq)]
enum Path {
    /// They are received and sent.
    Copy,
    /// They stand between two chunks: they are received, but nothing that follows them.
    Frame,
    /// They are payload, so many at most, and moved by the kernel; `live`: as long as there are many at a time.
    Splice { left: u64, live: bool },
}

/// An answer under way: what its framing says and how the client is told.
struct Passing {
    frame: Framing,
    relay: Relay,
    /// The client does not know chunks: it is given the payload alone.
    unpack: bool,
    done: bool,
    /// The worker said more than its framing allows.
    excess: bool,
    /// The last chunk was large, or the last answer on this connection was: what comes next may be, too.
    large: bool,
    /// Chunks since the last large one.
    small: u32,
    /// Payload that passed seen and unseen.
    copied: u64,
    spliced: u64,
    /// Bytes that came in full buffers, one behind the other.
    backlog: usize,
    /// Bytes that are copied before a pipe is asked for again.
    pipeless: u64,
    /// What follows the framing that was read last is there already.
    followed: bool,
    /// Whether the request was sent whole; `None` while it is being sent.
    asked: Option<bool>,
}

impl Passing {
    /// Whether the worker's connection may serve another request.
    fn is_reusable<W: Wire>(
        &self,
        lane: &Lane<W>,
        relay: Relay,
        conn: &W::Conn,
        head: &ResponseHead,
        ended_well: bool,
    ) -> bool {
        let is_long = matches!(head.body, AnswerBody::Length(n) if n >= SPLICE_BYTES as u64);
        if relay == Relay::Auto && (is_long || self.spliced > self.copied) {
            // It may have been received before its length was known; the next one is left in the kernel from its
            // first byte.
            conn.set_lazy(true);
        }
        let by_close = matches!(self.frame, Framing::UntilClose);
        let silent = !conn.is_lazy() || conn.is_silent();
        // An answer that came before the whole request was sent leaves the connection half used.
        let asked = self.asked.or_else(|| collect(lane, conn)) == Some(true);
        ended_well && head.keep_alive && asked && !self.excess && silent && !by_close
    }

    fn new(body: AnswerBody, relay: Relay, unpack: bool, large: bool) -> Self {
        Passing {
            frame: Framing::new(body),
            relay,
            unpack,
            done: false,
            excess: false,
            large,
            small: 0,
            copied: 0,
            spliced: 0,
            backlog: 0,
            pipeless: 0,
            followed: false,
            asked: None,
        }
    }

    /// How the next bytes are to pass.
    fn path(&self) -> Path {
        const MANY: u64 = SPLICE_BYTES as u64;
        if self.relay == Relay::Copy || self.pipeless > 0 {
            return Path::Copy;
        }
        let all = self.relay == Relay::Splice;
        match &self.frame {
            Framing::Length(left) if all || *left >= MANY => Path::Splice { left: *left, live: false },
            Framing::Chunked(state) => match state.remaining() {
                0 if all || self.large => Path::Frame,
                left if all || self.large => Path::Splice { left, live: false },
                _ => Path::Copy,
            },
            Framing::UntilClose if all || self.backlog >= SPLICE_BYTES => Path::Splice { left: u64::MAX, live: !all },
            Framing::Length(_) | Framing::UntilClose => Path::Copy,
        }
    }

    /// Takes the next bytes; gives what is to be sent of them.
    fn take<W: Wire>(&mut self, lane: &Lane<W>, mut chunk: Chunk) -> Result<Outgoing, What> {
        self.backlog = if chunk.len() >= RECV_BUFFER_BYTES { self.backlog + chunk.len() } else { 0 };
        if self.unpack {
            let mut out = lane.buffers.take();
            let piece = self.frame.unpack(&chunk, &mut out)?;
            self.note(lane, &piece, chunk.len());
            return Ok(Outgoing::Heap(out));
        }
        let piece = self.frame.take(&chunk)?;
        self.note(lane, &piece, chunk.len());
        chunk.truncate(piece.len);
        // Line and payload leave together where both are there; else nothing waits.
        let followed = std::mem::take(&mut self.followed);
        let alone = piece.payload == 0 && followed && !self.done;
        Ok(if alone { Outgoing::Ahead(chunk.into_vec()) } else { Outgoing::Chunk(chunk) })
    }

    fn note<W: Wire>(&mut self, lane: &Lane<W>, piece: &Piece, given: usize) {
        (self.done, self.excess) = (piece.done, piece.len < given);
        self.pipeless = self.pipeless.saturating_sub(piece.payload);
        self.copied += piece.payload;
        lane.count(Tally::RelayCopied, piece.payload);
    }

    /// Whether what comes next may pass without the walk, as far as it is small and in order: not where more is done with
    /// it than to count it.
    fn is_steady(&self, request: &Request) -> bool {
        let has_begun = request.body_begun.get() && (request.event_us.get() > 0 || !request.ask.stream);
        has_begun && !self.unpack && self.pipeless == 0
    }

    /// Notes what passed without the walk.
    fn passed(&mut self, frame: Framing, payload: u64) {
        self.backlog = 0;
        self.frame = frame;
        self.copied += payload;
    }

    /// Notes what passed unseen.
    fn moved(&mut self, n: u64) {
        self.backlog = 0;
        self.spliced += n;
        self.done = self.frame.pass(n);
    }

    /// Learns from what passed whether the next chunks are going to be large. A single small one behind large ones says
    /// little: streams of large events end with one.
    fn learn(&mut self, path: &Path) {
        let Framing::Chunked(state) = &self.frame else { return };
        let is_large = state.chunk() >= SPLICE_CHUNK_BYTES;
        match path {
            Path::Copy if state.chunk() > 0 => self.large = is_large,
            Path::Frame if state.remaining() > 0 => {
                self.small = if is_large { 0 } else { self.small + 1 };
                self.large = self.small < SMALL_CHUNKS;
            }
            _ => {}
        }
    }

    /// Takes what came with the head, behind which it is sent.
    fn first<W: Wire>(&mut self, lane: &Lane<W>, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), Fault> {
        let taken = if self.unpack {
            self.frame.unpack(bytes, out)
        } else {
            self.frame.take(bytes).inspect(|piece| out.extend_from_slice(&bytes[..piece.len]))
        };
        let piece = taken.map_err(|_| Fault::with(What::BadAnswer, "Its body breaks its own framing."))?;
        self.note(lane, &piece, bytes.len());
        self.learn(&Path::Copy);
        Ok(())
    }

    /// Receives what stands before the next payload.
    fn poll_frame<C: Conn>(&mut self, conn: &C, cx: &mut Context<'_>) -> Poll<io::Result<Chunk>> {
        let (frame, followed) = (&self.frame, &mut self.followed);
        *followed = false;
        conn.poll_part(cx, FRAME_SIGHT_BYTES, &mut |seen| {
            let len = frame.before_payload(seen);
            *followed = len < seen.len();
            len
        })
    }
}

/// Passes the answer on to its last byte; with what `follow`s meanwhile, if anything does.
///
/// # Errors
/// A fault of the worker that shows before the client has seen a byte.
#[allow(clippy::manual_async_fn, reason = "an async fn keeps what it is given twice, and every walk has room for it")]
pub fn relay<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &Request,
    mut answer: Answer<W::Conn>,
    follow: Option<Follow<'_, W::Conn>>,
) -> impl Future<Output = Result<Outcome<W::Conn>, Fault>> {
    async move {
        let body = answer.head.body;
        let unpack = request.head.version == Version::H10 && body == AnswerBody::Chunked;
        let framing = if unpack { AnswerBody::UntilClose } else { body };
        let until_close = framing == AnswerBody::UntilClose;
        let keep_alive = request.keep_alive.get() && !until_close && !lane.is_draining();
        request.keep_alive.set(keep_alive);
        let mut out = lane.buffers.take();
        let told = http1::Answer { request_id: &request.id, framing, keep_alive, client_version: request.head.version };
        http1::response_head(&mut out, &answer.head, &answer.chunk, &told);
        answer.chunk.advance(answer.head_len);
        let mut passing = Passing::new(body, request.config.relay, unpack, answer.conn.is_lazy());
        passing.first(lane, &answer.chunk, &mut out)?;
        if !answer.chunk.is_empty() {
            request.gave(lane);
        }
        drop(answer.chunk);
        client.set_fragile(until_close);
        lane.count(Tally::RelayEvents, 1);
        client.answer(lane, request, Outgoing::Heap(out));
        request.answered_us.set(lane.wire.now_us());
        // A long answer does not keep what asked for it.
        passing.asked = collect(lane, &answer.conn);
        let ended = match follow {
            None => pass(lane, client, request, &answer.conn, &mut passing, true).await,
            Some(follow) => pass_both(lane, client, request, &answer.conn, &mut passing, follow).await,
        };
        let conn = passing
            .is_reusable(lane, request.config.relay, &answer.conn, &answer.head, ended.is_ok())
            .then_some(answer.conn);
        let (then, fault) = finish(lane, client, request, ended).await;
        Ok(Outcome { then, status: answer.head.status, conn, fault, head: answer.head })
    }
}

/// Passes an answer on while the rest of the request follows the other way; ends with the answer. Boxed here, so that the
/// many answers that nothing follows have no room for it.
fn pass_both<'a, W: Wire>(
    lane: &'a Lane<W>,
    client: &'a Client<W::Conn>,
    request: &'a Request,
    conn: &'a W::Conn,
    passing: &'a mut Passing,
    mut follow: Follow<'a, W::Conn>,
) -> Pin<Box<dyn Future<Output = Result<(), What>> + 'a>> {
    Box::pin(async move {
        let mut passes = std::pin::pin!(pass(lane, client, request, conn, passing, false));
        let mut follows = true;
        let mut sent = request.sent.get();
        poll_fn(|cx| {
            while follows {
                match follow(conn, cx) {
                    Poll::Pending => break,
                    Poll::Ready(Ok(())) => follows = false,
                    // The worker does without the rest of the body, as the client seems to know.
                    Poll::Ready(Err(What::ClientStalled)) if sent != request.sent.get() => sent = request.sent.get(),
                    Poll::Ready(Err(what)) => return Poll::Ready(Err(what)),
                }
            }
            passes.as_mut().poll(cx)
        })
        .await
    })
}

/// What becomes of the client's connection when its answer has ended, well or not. What arrived before a break is the
/// client's, only the end is withheld.
async fn finish<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &Request,
    ended: Result<(), What>,
) -> (Then, Option<What>) {
    match ended {
        // The kernel takes the last bytes while the next request is waited for; nobody is woken for it.
        Ok(()) if request.keep_alive.get() => (Then::Keep, None),
        Ok(()) => match client.flush_until(lane, request.deadline_us()).await {
            Ok(()) => {
                client.set_fragile(false);
                (Then::Close, None)
            }
            Err(what) => (client.broken(what), Some(what)),
        },
        Err(fault @ (What::Cut | What::CutBadFraming | What::CutStalled)) => {
            lane.count(Tally::Cuts, u64::from(fault != What::CutStalled));
            let flushed = client.flush_until(lane, request.deadline_us()).await;
            (client.broken(flushed.err().unwrap_or(fault)), Some(fault))
        }
        Err(fault) => (client.broken(fault), Some(fault)),
    }
}

/// Passes on what follows the first bytes; `alone`: nothing goes the other way meanwhile.
///
/// # Errors
/// What broke the answer off.
async fn pass<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &Request,
    conn: &W::Conn,
    passing: &mut Passing,
    alone: bool,
) -> Result<(), What> {
    let mut steady = None;
    while !passing.done {
        let path = passing.path();
        conn.set_lazy(path != Path::Copy);
        let event = match path {
            Path::Copy => {
                // The next part is asked for in the same turn that sends this one.
                conn.arm();
                let even = (alone && passing.is_steady(request)).then(|| {
                    let steady = steady.get_or_insert_with(|| Steady::new(lane, request));
                    steady.begin(passing.frame, lane.wire.now_us());
                    (conn, &*steady)
                });
                let event = copy::next(lane, client, |cx| conn.poll_recv(cx), request, even).await;
                if let Some((_, steady)) = even {
                    steady.end(passing, request);
                }
                event
            }
            Path::Frame => copy::next(lane, client, |cx| passing.poll_frame(conn, cx), request, None).await,
            Path::Splice { left, live } => splice::splice(lane, client, conn, (left, live), request).await,
        };
        match event {
            Event::Next(chunk) => {
                let out = passing.take(lane, chunk)?;
                if !out.is_empty() {
                    lane.count(Tally::RelayEvents, 1);
                    client.answer(lane, request, out);
                }
                request.gave(lane);
            }
            Event::Moved(n) => {
                passing.moved(n);
                request.gave(lane);
            }
            Event::NoPipe => passing.pipeless = PIPELESS_BYTES,
            // A break may have been told to who sent the rest of the request.
            Event::WorkerEnded(true) if matches!(passing.frame, Framing::UntilClose) && !conn.met_break() => {
                return Ok(());
            }
            Event::WorkerEnded(_) => return Err(What::Cut),
            Event::Fault(fault) => return Err(fault),
        }
        passing.learn(&path);
    }
    Ok(())
}

/// Collects the buffer of the request's send: whether all of it was sent, `None` while it is being sent.
fn collect<W: Wire>(lane: &Lane<W>, conn: &W::Conn) -> Option<bool> {
    if conn.is_sending() {
        return None;
    }
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    match conn.poll_sent(&mut cx) {
        Poll::Ready(Ok(sent)) => {
            give_back(lane, sent);
            Some(true)
        }
        _ => Some(false),
    }
}
