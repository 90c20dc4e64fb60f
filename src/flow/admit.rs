//! Admit: a request for a worker waits for its turn, where the number of requests is limited.
//!
//! Takes a request, gives it a permit, which it has to its end. Never lets more requests through than the limit says,
//! nor one before another that came earlier; never keeps a place for a client that has left.

use std::future::poll_fn;
use std::task::Poll;

use crate::fault::{Fault, What};
use crate::flow::passage::{Client, Request};
use crate::lane::Lane;
use crate::lane::wire::Wire;
use crate::metrics::Time;
use crate::shared::admission::{Lined, Permit, Ticket};

/// Gives the request its permit, at once or after its time in the queue.
///
/// # Errors
/// [`What::QueueFull`], [`What::QueueTimeout`], or that nobody is there to be served any more.
pub async fn admit<W: Wire>(lane: &Lane<W>, client: &Client<W::Conn>, request: &Request) -> Result<(), Fault> {
    if request.config.max_concurrent_requests == 0 {
        return Ok(());
    }
    let permit = match Permit::take(lane.shared) {
        Some(permit) => permit,
        None => line_up(lane, client, request).await?,
    };
    request.permit.set(Some(permit));
    Ok(())
}

async fn line_up<W: Wire>(lane: &Lane<W>, client: &Client<W::Conn>, request: &Request) -> Result<Permit, Fault> {
    let since = lane.wire.now_us();
    let seat = lane.waiters.sit();
    let mut ticket = match Ticket::draw(lane.shared, lane.index, seat.number) {
        Lined::In(permit) => return Ok(permit),
        Lined::Full => return Err(What::QueueFull.into()),
        Lined::Waits(ticket) => ticket,
    };
    let deadline = request.deadline_us();
    client.timer.set(deadline.min(since + request.config.queue_timeout.as_micros() as u64));
    let ended = poll_fn(|cx| {
        seat.watch(cx);
        if client.has_left(cx) {
            return Poll::Ready(Err(What::ClientGone));
        }
        if let Some(permit) = ticket.claim() {
            return Poll::Ready(Ok(permit));
        }
        if lane.is_ending() {
            return Poll::Ready(Err(What::ShuttingDown));
        }
        client.timer.poll_due(cx).map(|()| Err(What::QueueTimeout))
    })
    .await;
    let queued_us = lane.wire.now_us().saturating_sub(since);
    request.queued_us.set(queued_us);
    request.took(lane, Time::Queue, queued_us);
    ended.map_err(Fault::from)
}
