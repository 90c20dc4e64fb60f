//! Settle: what remains of a request.
//!
//! Takes an outcome, counts it, puts the worker's connection back; gives what becomes of the client's. Cannot fail.

use crate::fault::What;
use crate::flow::passage::{Outcome, Request, Then};
use crate::lane::Lane;
use crate::lane::wire::Wire;
use crate::metrics::Tally;
use crate::shared::roster::Slot;

/// Settles a request that a worker answered.
pub fn settle<W: Wire>(lane: &Lane<W>, request: &mut Request, slot: Slot, era: u32, outcome: Outcome<W::Conn>) -> Then {
    if let Some(conn) = outcome.conn {
        lane.pool.put(slot, era, conn, lane.wire.now_us());
    }
    if let Some(fault) = outcome.fault {
        lane.tallies().fault(fault);
        if matches!(fault, What::ClientLeft | What::ClientStalled) {
            lane.count(Tally::ClientsLeft, 1);
        }
    }
    count(lane, request, if outcome.fault.is_some() { 0 } else { request.answer.status });
    outcome.then
}

/// Counts a request that ended with a status; 0 for one that was cut.
pub fn count<W: Wire>(lane: &Lane<W>, request: &Request, status: u16) {
    let tallies = lane.tallies();
    let now = lane.wire.now_us();
    let first = if request.answered_us == 0 { now } else { request.answered_us };
    tallies.request(request.route, status);
    tallies.first_byte.observe_us(first.saturating_sub(request.started_us));
    tallies.total.observe_us(now.saturating_sub(request.started_us));
}
