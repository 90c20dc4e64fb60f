//! Dispatch: a request goes to its worker, the head of the answer comes back.
//!
//! Takes what is to be sent and a worker, gives the live connection with the answer's head and the first bytes behind
//! it. Never sends a request twice but in one case: a pooled connection that turns out dead before it said
//! anything, at once. Never keeps a worker busy for a client that has left, where it is given one to watch. What is
//! not held of the body follows as it comes (`upload`).

pub mod patch;
mod upload;

use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll};

use memchr::memmem;

use crate::config::Relay;
use crate::fault::{Fault, What};
use crate::flow::passage::{Answer, Client, Leg, Mark, Marked, Parcel, Request, Reuse, give_back, time_over};
use crate::http1::{self, BodyLength, Forward, HeadLimits, Parsed, ResponseHead};
use crate::lane::Lane;
use crate::lane::wire::{Chunk, Conn, Outgoing, Wire};
use crate::limits::{HEAD_SIGHT_BYTES, MAX_INTERIM, ONE_SEND_BYTES};
use crate::metrics::Tally;
use crate::shared::roster::Slot;
use crate::span::Span;
use upload::Stopped;
pub use upload::Upload;

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
/// A worker that has waited for a client's body for so long in all, piece by piece, may give up without being to blame.
/// Servers that limit how long a body takes do so in whole seconds; to hide a worker's death, a client has to be slow.
const PATIENCE_US: u64 = 1_000_000;

/// Sends a request to a worker and waits for the head of its answer. `parcel` makes what is sent, once a sending.
/// A `client` that is given is watched: its leaving ends the attempt. What is left of a body that follows when the worker
/// answers is given as `upload`.
///
/// # Errors
/// A fault of the worker, of the client that left, or of `parcel`.
pub async fn dispatch<'a, W: Wire>(
    lane: &'a Lane<W>,
    client: Option<&'a Client<W::Conn>>,
    leg: Leg<'_>,
    mut head: ResponseHead,
    upload: &mut Option<Box<Upload<'a, W>>>,
    parcel: impl Fn() -> Result<Parcel, Fault>,
) -> Result<Answer<W::Conn>, Fault> {
    let attempts = leg.attempts;
    attempts.set(attempts.get() + 1);
    let mut may_reuse = leg.reuse != Reuse::Never;
    loop {
        let kept = if may_reuse { lane.pool.take(leg.slot, leg.era, lane.wire.now_us()) } else { None };
        let was_kept = kept.is_some();
        let conn = match kept {
            Some(conn) => {
                lane.count(Tally::Reuses, 1);
                conn
            }
            None => connect(lane, client, leg).await?,
        };
        let mut parcel = parcel()?;
        *upload = client.and_then(|client| Upload::new(lane, client, leg));
        match exchange(lane, client, leg, &mut head, &conn, (&mut parcel, upload)).await {
            Ok((chunk, head_len)) => return Ok(Answer { conn, head, chunk, head_len }),
            Err(Broken::Fault(fault)) => return Err(fault),
            Err(Broken::Silent { at_once: true }) if was_kept && leg.reuse == Reuse::Fail => {
                return Err(What::StaleConnection.into());
            }
            Err(Broken::Silent { at_once: true }) if was_kept && attempts.get() < leg.config.max_attempts => {
                attempts.set(attempts.get() + 1);
                lane.count(Tally::Replays, 1);
                may_reuse = false;
            }
            Err(Broken::Silent { .. }) => return Err(What::WorkerReset.into()),
        }
    }
}

/// Whether what is waited for has lost its point.
fn pointless<W: Wire>(lane: &Lane<W>, client: Option<&Client<W::Conn>>, cx: &mut Context<'_>) -> Option<What> {
    if client.is_some_and(|client| client.has_left(cx)) {
        return Some(What::ClientGone);
    }
    lane.is_ending().then_some(What::ShuttingDown)
}

async fn connect<W: Wire>(lane: &Lane<W>, client: Option<&Client<W::Conn>>, leg: Leg<'_>) -> Result<W::Conn, Fault> {
    let Leg { config, slot, era, timer, deadline_us, .. } = leg;
    let begun_us = lane.wire.now_us();
    let mut nth = 0;
    loop {
        let to = lane.view.borrow().worker(slot, era).and_then(|w| w.addrs.get(nth).copied());
        let Some(to) = to else { return Err(What::ConnectFailed.into()) };
        nth += 1;
        lane.count(Tally::Connects, 1);
        timer.set(deadline_us.min(lane.wire.now_us() + config.connect_timeout.as_micros() as u64));
        let mut connecting = std::pin::pin!(lane.wire.connect(to));
        let connected = poll_fn(|cx| {
            if let Poll::Ready(done) = connecting.as_mut().poll(cx) {
                return Poll::Ready(done.map_err(|e| Fault::from(unconnected(&e))));
            }
            if let Some(what) = pointless(lane, client, cx) {
                return Poll::Ready(Err(what.into()));
            }
            timer.poll_due(cx).map(|()| {
                let is_over = lane.wire.now_us() >= deadline_us;
                Err(if is_over { late(lane, leg, begun_us) } else { What::ConnectTimeout }.into())
            })
        })
        .await;
        match connected {
            Ok(conn) => return Ok(conn),
            Err(fault) => {
                let refused = matches!(fault.what, What::ConnectFailed | What::ConnectTimeout);
                if refused || fault.what == What::OutOfDescriptors {
                    lane.count(Tally::ConnectFailures, 1);
                }
                // Its next address may do.
                if !(refused && lane.view.borrow().worker(slot, era).is_some_and(|w| w.addrs.len() > nth)) {
                    return Err(fault);
                }
            }
        }
    }
}

/// What it means that a connection cannot be opened: the worker is not to blame for what this process lacks.
fn unconnected(e: &io::Error) -> What {
    match e.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => What::OutOfDescriptors,
        _ => What::ConnectFailed,
    }
}

/// The request as this worker is sent it: the client's head rewritten, the body as it came, or as the patch wants it.
///
/// # Errors
/// [`What::ConnectFailed`] when the worker has gone since it was chosen: nothing was sent, another one can be tried.
pub fn parcel<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &Request,
    (slot, era): (Slot, u32),
    patch: Option<&Patch>,
) -> Result<Parcel, Fault> {
    let view = lane.view.borrow();
    let Some(worker) = view.worker(slot, era) else { return Err(What::ConnectFailed.into()) };
    let body = request.body();
    let mut patched = None;
    let mut tail = None;
    let mut length = body.len();
    if let Some(patch) = patch {
        let mut out = lane.buffers.take();
        if body.len() <= ONE_SEND_BYTES || patch.cuts(request).next().is_some() {
            patch::cut_and_add(&mut out, body, request.inspector.object(), patch.cuts(request), patch.add);
            length = out.len();
            patched = Some(out);
        } else {
            let kept = request.inspector.object().end() - 1;
            patch::tail(&mut out, body, request.inspector.object(), patch.add);
            length = kept + out.len();
            tail = Some((kept, out));
        }
    }
    let forward = Forward {
        prefix: &worker.prefix,
        client: client.peer.ip(),
        authorization: worker.api_key.as_deref(),
        own_keys: !request.config.api_keys.is_empty(),
        request_id: &request.id,
        length: match request.head.body {
            BodyLength::None => BodyLength::None,
            _ => BodyLength::Length(length as u64 + request.unread.left()),
        },
        dp_rank: if patch.is_some_and(|patch| patch.names_rank) { None } else { worker.pairing.dp.map(|dp| dp.rank) },
    };
    let mut out = lane.buffers.take();
    http1::request_head(&mut out, &request.head, &request.input, &forward);
    let shared = |end| Outgoing::Shared(request.input.clone(), request.head_len, request.head_len + end);
    let rest = match (patched, tail) {
        (Some(patched), _) if patched.len() <= ONE_SEND_BYTES => {
            out.extend_from_slice(&patched);
            lane.buffers.give(patched);
            [None, None]
        }
        (Some(patched), _) => [Some(Outgoing::Heap(patched)), None],
        (None, Some((kept, tail))) => [Some(shared(kept)), Some(Outgoing::Heap(tail))],
        (None, None) if body.len() <= ONE_SEND_BYTES => {
            out.extend_from_slice(body);
            [None, None]
        }
        (None, None) => [Some(shared(body.len())), None],
    };
    let first = if rest[0].is_some() { Outgoing::Ahead(out) } else { Outgoing::Heap(out) };
    Ok(Parcel { first, rest })
}

/// What is changed in a body on its way to one worker.
pub struct Patch<'a> {
    /// Whether all marked members go; else only those that are never forwarded.
    pub bare: bool,
    /// Members that come in, as JSON text; empty for none.
    pub add: &'a [u8],
    /// Whether they name the data-parallel rank, so that no header has to.
    pub names_rank: bool,
}

/// Only what is never forwarded goes.
pub static PRIVATE: Patch<'static> = Patch { bare: false, add: b"", names_rank: false };

impl Patch<'_> {
    fn cuts<'a>(&'a self, request: &'a Request) -> impl Iterator<Item = Span> + Clone + 'a {
        let goes = |mark: &&Mark| self.bare || mark.field == Marked::Private;
        request.inspector.marks().iter().filter(goes).map(|mark| mark.span)
    }
}

/// Whether a leg's body is a copy of the client's, cut; `bare` as in [`Patch`].
pub fn is_cut(request: &Request, bare: bool) -> bool {
    Patch { bare, add: b"", names_rank: false }.cuts(request).next().is_some()
}

/// The request's way out, piece by piece.
struct Sending<'s, 'a, W: Wire> {
    rest: &'s mut [Option<Outgoing>; 2],
    /// What follows behind the last piece; boxed, since few requests have it.
    upload: &'s mut Option<Box<Upload<'a, W>>>,
    failed: bool,
    last_us: u64,
    /// For how long the worker waited for the client in all, in microseconds.
    awaited_us: u64,
}

impl<'a, W: Wire> Sending<'_, 'a, W> {
    fn all_started(&self) -> bool {
        self.rest[0].is_none() && self.upload.is_none()
    }

    /// Whether the connection ended before all of it was given to the worker.
    fn is_cut_short(&self) -> bool {
        self.failed || !self.all_started()
    }

    /// Whether the client is waited for, whose body follows.
    fn awaits(&self) -> bool {
        self.upload.as_ref().is_some_and(|upload| upload.awaits())
    }

    /// Moves on; never waits for more than the next piece.
    ///
    /// # Errors
    /// What the client did whose body follows, or that the worker did not take it.
    fn poll(&mut self, lane: &'a Lane<W>, conn: &W::Conn, cx: &mut Context<'_>) -> Result<(), What> {
        while self.rest[0].is_some() {
            match conn.poll_sent(cx) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Ok(sent)) => {
                    give_back(lane, sent);
                    self.last_us = lane.wire.now_us();
                    self.rest.rotate_left(1);
                    conn.start_send(self.rest[1].take().expect("looked at above"));
                }
                Poll::Ready(Err(_)) => self.fail(),
            }
        }
        let Some(upload) = self.upload else { return Ok(()) };
        let ended = upload.poll(lane, conn, cx);
        self.last_us = self.last_us.max(upload.poured_us());
        self.awaited_us = upload.awaited_us(lane.wire.now_us());
        match ended {
            Poll::Pending => {}
            Poll::Ready(Ok(())) => *self.upload = None,
            Poll::Ready(Err(Stopped::Worker)) => self.fail(),
            Poll::Ready(Err(Stopped::Unread)) => return Err(What::FirstByteTimeout),
            Poll::Ready(Err(Stopped::Client(what))) => return Err(what),
        }
        Ok(())
    }

    /// The worker may have answered before it broke off: the receiving side decides.
    fn fail(&mut self) {
        (*self.rest, *self.upload, self.failed) = ([None, None], None, true);
    }
}

/// Whether so little time has passed since then that what happens now has to do with what happened then.
fn is_at_once<W: Wire>(lane: &Lane<W>, since_us: u64) -> bool {
    lane.wire.now_us().saturating_sub(since_us) <= AT_ONCE_US
}

/// What it means that a request's time was over, of which the worker has had as much as if it had had all since then.
fn late<W: Wire>(lane: &Lane<W>, leg: Leg<'_>, since_us: u64) -> What {
    time_over(leg.config, lane.wire.now_us().saturating_sub(since_us))
}

/// Where the body of an answer begins, as far as it can be seen; what follows can then be moved by the kernel.
fn up_to_body(seen: &[u8]) -> usize {
    memmem::find(seen, b"\r\n\r\n").map_or(seen.len(), |at| at + 4)
}

enum Event {
    Bytes(io::Result<Chunk>),
    Pointless(What),
    Late,
}

/// Gives the answer's first bytes and the length of its head, which is parsed into `head`.
async fn exchange<'a, W: Wire>(
    lane: &'a Lane<W>,
    client: Option<&'a Client<W::Conn>>,
    leg: Leg<'_>,
    head: &mut ResponseHead,
    conn: &W::Conn,
    (parcel, upload): (&mut Parcel, &mut Option<Box<Upload<'a, W>>>),
) -> Result<(Chunk, usize), Broken> {
    head.reset();
    if leg.config.relay == Relay::Splice {
        conn.set_lazy(true);
    }
    conn.start_send(std::mem::replace(&mut parcel.first, Outgoing::Static(b"")));
    conn.arm();
    let begun_us = lane.wire.now_us();
    let mut sending = Sending { rest: &mut parcel.rest, upload, failed: false, last_us: begun_us, awaited_us: 0 };
    leg.timer.set(leg.deadline_us);
    let mut timed = leg.first_byte_us == 0;
    let limits = HeadLimits { bytes: leg.config.max_head_bytes, fields: leg.config.max_headers };
    let mut gathered: Option<Vec<u8>> = None;
    let mut interim = 0;
    loop {
        let event = poll_fn(|cx| {
            let sent = sending.poll(lane, conn, cx);
            if let Err(what) = sent
                && what != What::FirstByteTimeout
            {
                return Poll::Ready(Event::Pointless(what));
            }
            if !timed
                && sending.all_started()
                && let Poll::Ready(sent) = conn.poll_sent(cx)
            {
                timed = true;
                sending.failed |= sent.is_err();
                give_back(lane, sent.ok().flatten());
                leg.timer.set(leg.deadline_us.min(lane.wire.now_us() + leg.first_byte_us));
            }
            if let Poll::Ready(got) = conn.poll_part(cx, HEAD_SIGHT_BYTES, &mut up_to_body) {
                return Poll::Ready(Event::Bytes(got));
            }
            // A worker that has answered need not read.
            if let Err(what) = sent {
                return Poll::Ready(Event::Pointless(what));
            }
            // Who is being read from is watched by that.
            let watched = client.filter(|_| !sending.awaits());
            if let Some(what) = pointless(lane, watched, cx) {
                return Poll::Ready(Event::Pointless(what));
            }
            leg.timer.poll_due(cx).map(|()| Event::Late)
        })
        .await;
        let mut chunk = match event {
            Event::Pointless(what) => return Err(what.into()),
            // The worker is not to blame for a client that did not send.
            Event::Late if sending.awaits() => return Err(What::BodyTimeout.into()),
            Event::Late if lane.wire.now_us() < leg.deadline_us => return Err(What::FirstByteTimeout.into()),
            Event::Late => return Err(late(lane, leg, begun_us + sending.awaited_us).into()),
            Event::Bytes(Ok(chunk)) if !chunk.is_empty() => chunk,
            // Nor is it, when waiting was most of what it did, though not as long as this gateway would have.
            Event::Bytes(_)
                if gathered.is_none()
                    && sending.is_cut_short()
                    && sending.awaited_us > PATIENCE_US.max((lane.wire.now_us() - begun_us) / 2) =>
            {
                return Err(What::WorkerGaveUp.into());
            }
            Event::Bytes(_) if gathered.is_none() && interim == 0 => {
                return Err(Broken::Silent { at_once: is_at_once(lane, sending.last_us) });
            }
            Event::Bytes(_) => return Err(What::WorkerReset.into()),
        };
        if let Some(mut v) = gathered.take() {
            v.extend_from_slice(&chunk);
            chunk = Chunk::heap(v);
        }
        loop {
            match head.parse(&chunk, &limits, leg.method).map_err(Broken::Fault)? {
                Parsed::Partial => {
                    gathered = Some(chunk.into_vec());
                    break;
                }
                Parsed::Complete(len) if head.interim() => {
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
                    lane.tallies().waited(leg.slot, lane.wire.now_us().saturating_sub(sending.last_us));
                    // It answered before the body was on its way: what it is sent next, it would take for that.
                    head.keep_alive &= sending.all_started() && !sending.failed;
                    return Ok((chunk, head_len));
                }
            }
        }
    }
}
