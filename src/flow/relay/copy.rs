//! The next piece of an answer is received, to be sent on.
//!
//! Takes both connections, gives a piece once the client has taken the one before. Never holds more than one.

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};

use super::Event;
use super::steady::Steady;
use crate::fault::What;
use crate::flow::passage::{Client, Request, Stall, give_back};
use crate::lane::Lane;
use crate::lane::wire::{Chunk, Conn, Wire};

/// Waits until the next bytes are there and the client has taken the last ones. The deadline runs on for the
/// worker while it is waited for, the stall clock for the client while that is. What `steady` sends on of a
/// connection is not waited for, and begins the worker's clock anew.
pub(super) async fn next<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    mut receive: impl FnMut(&mut Context<'_>) -> Poll<io::Result<Chunk>>,
    request: &Request,
    steady: Option<(&W::Conn, &Rc<Steady>)>,
) -> Event {
    let mut to_start = steady;
    let deadline = request.deadline_us();
    let mut next: Option<Chunk> = None;
    let mut stall = None;
    let mut limit = request.stall_timeout();
    client.timer.set(lane.stall_deadline(lane.wire.now_us(), limit, deadline));
    poll_fn(|cx| {
        if lane.is_ending() {
            return Poll::Ready(Event::Fault(What::CutEnding));
        }
        if next.is_none() {
            match receive(cx) {
                Poll::Ready(Ok(chunk)) if !chunk.is_empty() => next = Some(chunk),
                Poll::Ready(end) => return Poll::Ready(Event::WorkerEnded(end.is_ok())),
                Poll::Pending if client.has_left(cx) => return Poll::Ready(Event::Fault(What::ClientLeft)),
                Poll::Pending => {
                    if let Some((conn, steady)) = to_start.take() {
                        conn.pass_to(&client.conn, steady.clone());
                    }
                    // The body has become whole meanwhile.
                    if limit != request.stall_timeout() {
                        limit = request.stall_timeout();
                        client.timer.set(lane.stall_deadline(lane.wire.now_us(), limit, deadline));
                    }
                    while client.timer.poll_due(cx).is_ready() {
                        // Where nothing passes, due is due.
                        let due_us = steady.map_or(0, |(_, s)| lane.stall_deadline(s.last_us(), limit, deadline));
                        if due_us <= lane.wire.now_us() {
                            return Poll::Ready(Event::Fault(request.ran_out(lane.wire.now_us())));
                        }
                        client.timer.set(due_us);
                    }
                    return Poll::Pending;
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
