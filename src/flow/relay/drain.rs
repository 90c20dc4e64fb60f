//! An answer that goes to nobody.
//!
//! Takes it with its connection, gives the connection back after the last byte, and the body where it is wanted. Never
//! keeps more of a body than [`MAX_KEPT_ANSWER_BYTES`], nor more than the process has memory for.

use std::future::poll_fn;
use std::task::Poll;

use super::{Framing, collect};
use crate::config::Config;
use crate::fault::{Fault, What};
use crate::flow::passage::{Answer, Client, Kept, time_over};
use crate::http1::ResponseHead;
use crate::lane::Lane;
use crate::lane::timers::Timer;
use crate::lane::wire::{Conn, Wire};
use crate::limits::MAX_KEPT_ANSWER_BYTES;

/// How long a worker may take for an answer that is drained: it may be silent for the stall timeout.
pub struct Until<'a> {
    pub config: &'a Config,
    /// When the request's time is over.
    pub deadline_us: u64,
    /// Since when the worker has had the request.
    pub since_us: u64,
}

/// Reads an answer to its end without passing it on. The connection comes back if it may serve another request, and
/// the head. The body is put into `keep`, up to so many bytes of it. A `client` that is given is watched.
///
/// # Errors
/// [`What::WorkerReset`] when it broke off, [`What::BadAnswer`] when its framing is broken or it is too long to be
/// kept, [`What::OutOfMemory`] when there is none for it, [`What::RequestTimeout`] or [`What::TimeUsedUp`] at the deadline,
/// [`What::FirstByteTimeout`] when it stalls, [`What::ClientGone`], [`What::ShuttingDown`].
pub async fn drain<W: Wire>(
    lane: &Lane<W>,
    client: Option<&Client<W::Conn>>,
    answer: Answer<W::Conn>,
    timer: &Timer,
    until: Until<'_>,
    mut keep: Option<&mut Kept>,
) -> Result<(Option<W::Conn>, ResponseHead), Fault> {
    let Answer { conn, head, mut chunk, head_len } = answer;
    chunk.advance(head_len);
    let mut frame = Framing::new(head.body);
    loop {
        let taken = match &mut keep {
            Some(body) => {
                let taken = frame.unpack(&chunk, &mut body.bytes);
                if body.bytes.len() > MAX_KEPT_ANSWER_BYTES {
                    return Err(Fault::with(What::BadAnswer, "It is too long for what has to be read of it."));
                }
                body.hold(lane)?;
                taken
            }
            None => frame.take(&chunk),
        };
        let piece = taken.map_err(|_| Fault::with(What::BadAnswer, "Its body breaks its own framing."))?;
        if piece.done {
            let reusable = head.keep_alive && piece.len == chunk.len() && collect(lane, &conn) == Some(true);
            return Ok((reusable.then_some(conn), head));
        }
        timer.set(lane.stall_deadline(lane.wire.now_us(), until.config.stall_timeout, until.deadline_us));
        let next = poll_fn(|cx| {
            if lane.is_ending() {
                return Poll::Ready(Err(What::ShuttingDown));
            }
            if let Poll::Ready(got) = conn.poll_recv(cx) {
                return Poll::Ready(Ok(got));
            }
            if client.is_some_and(|client| client.has_left(cx)) {
                return Poll::Ready(Err(What::ClientGone));
            }
            timer.poll_due(cx).map(|()| {
                let now = lane.wire.now_us();
                let stalled = now < until.deadline_us;
                Err(if stalled { What::FirstByteTimeout } else { time_over(until.config, now - until.since_us) })
            })
        })
        .await?;
        chunk = match next {
            Ok(chunk) if !chunk.is_empty() => chunk,
            Ok(_) if matches!(frame, Framing::UntilClose) && !conn.met_break() => return Ok((None, head)),
            _ => return Err(What::WorkerReset.into()),
        };
    }
}
