//! Settle: what remains of a request.
//!
//! Takes an outcome, counts it, puts the worker's connection back; gives what becomes of the client's. Cannot fail.

use crate::fault::{What, Whose};
use crate::flow::passage::{Outcome, Request, Then};
use crate::lane::Lane;
use crate::lane::wire::Wire;
use crate::metrics::Tally;
use crate::shared::roster::Slot;

/// Settles a request that a worker answered.
pub fn settle<W: Wire>(lane: &Lane<W>, request: &mut Request, slot: Slot, era: u32, outcome: Outcome<W::Conn>) -> Then {
    let Outcome { then, status, conn, fault, head } = outcome;
    request.spare_head = head;
    let status = if fault.is_some() { 0 } else { status };
    leg(lane, (slot, era), conn, fault.map_or(Ok(status), Err));
    if let Some(fault) = fault {
        lane.tallies().fault(fault);
        if matches!(fault, What::ClientLeft | What::ClientStalled) {
            lane.count(Tally::ClientsLeft, 1);
        }
    }
    count(lane, request, status);
    then
}

/// Notes an answer of a worker, one of a pair too: with a status when it was complete, else with what broke it off.
/// Keeps the connection that is given.
pub fn leg<W: Wire>(lane: &Lane<W>, (slot, era): (Slot, u32), conn: Option<W::Conn>, end: Result<u16, What>) {
    if let Some(conn) = conn {
        lane.pool.put(slot, era, conn, lane.wire.now_us());
    }
    lane.tallies().worker_response(slot, end.unwrap_or(0));
    judge(lane, slot, end);
}

/// Notes how a worker did, for its breaker and the choice of workers: answers of the classes 2xx to 4xx are good, 429 and 503 say that
/// it has enough to do and nothing else, other 5xx are failures; so are faults that are its own.
pub fn judge<W: Wire>(lane: &Lane<W>, slot: Slot, end: Result<u16, What>) {
    let well = match end {
        Ok(429 | 503) => return,
        Ok(status) => status < 500,
        Err(fault) if fault.row().whose == Whose::Worker => false,
        Err(_) => return,
    };
    if lane.shared.vitals.ended(slot, well) {
        lane.shared.try_open(slot);
    }
}

/// Counts a request that ended with a status; 0 for one that was cut.
pub fn count<W: Wire>(lane: &Lane<W>, request: &Request, status: u16) {
    let tallies = lane.tallies();
    let now = lane.wire.now_us();
    tallies.request(request.route, status);
    // Only what a worker answered: the gateway's own answers and refusals take no time, and would hide that.
    let answered_us = request.answered_us.get();
    if answered_us != 0 {
        tallies.first_byte.observe_us(answered_us.saturating_sub(request.started_us));
        tallies.total.observe_us(now.saturating_sub(request.started_us));
    }
}
