//! Settle: what remains of a request.
//!
//! Takes an outcome, counts it, hands it to the access log, puts the worker's connection back; gives what becomes of
//! the client's. Cannot fail.

use crate::config::AccessLog;
use crate::config::routes::Answer;
use crate::fault::{What, Whose};
use crate::flow::passage::{Outcome, Request, Then};
use crate::lane::Lane;
use crate::lane::wire::Wire;
use crate::metrics::{Tally, Time};
use crate::shared::access::{Record, Text};
use crate::shared::roster::Slot;

/// Settles a request that a worker answered.
pub fn settle<W: Wire>(lane: &Lane<W>, request: &mut Request, slot: Slot, era: u32, outcome: Outcome<W::Conn>) -> Then {
    let Outcome { then, status, conn, fault, head } = outcome;
    request.spare_head = head;
    let told = if fault.is_some() { 0 } else { status };
    leg(lane, (slot, era), conn, fault.map_or(Ok(told), Err));
    if let Some(fault) = fault {
        lane.tallies().fault(fault);
        if matches!(fault, What::ClientLeft | What::ClientStalled) {
            lane.count(Tally::ClientsLeft, 1);
        }
    }
    count(lane, request, told, fault);
    then
}

/// Notes an answer of a worker, one of a pair too: with a status when it was complete, else with what broke it off.
/// Keeps the connection that is given.
pub fn leg<W: Wire>(lane: &Lane<W>, (slot, era): (Slot, u32), conn: Option<W::Conn>, end: Result<u16, What>) {
    match conn {
        Some(conn) => lane.pool.put(slot, era, conn, lane.wire.now_us()),
        None => lane.count(Tally::ClosedUnfit, 1),
    }
    lane.tallies().worker_response(slot, end.unwrap_or(0));
    judge(lane, slot, end);
}

/// Notes how a worker did, for its breaker and the choice of workers: answers of the classes 2xx to 4xx are good, 429
/// and 503 say that it has enough to do and nothing else, other 5xx are failures; so are faults that are its own.
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

/// Counts a request that ended with a status, 0 for one that was cut, and a fault if one ended it.
pub fn count<W: Wire>(lane: &Lane<W>, request: &Request, status: u16, fault: Option<What>) {
    let tallies = lane.tallies();
    let now = lane.wire.now_us();
    request.counted.set(true);
    tallies.request(request.route, status);
    if request.body_us != 0 && request.answerer == Answer::Worker {
        tallies.model_request(lane.view.borrow().label_place(request.label), status);
    }
    // Only what a worker answered: the gateway's own answers and refusals take no time, and would hide that.
    let answered_us = request.answered_us.get();
    if answered_us != 0 {
        request.took(lane, Time::FirstByte, answered_us.saturating_sub(request.started_us));
        request.took(lane, Time::Total, now.saturating_sub(request.started_us));
    }
    if is_logged(lane, request, status, fault)
        && !lane.shared.access.push(lane.index, record(lane, request, status, fault))
    {
        lane.count(Tally::AccessLogDropped, 1);
    }
}

/// Whether the access log has a line for a request that ended so.
fn is_logged<W: Wire>(lane: &Lane<W>, request: &Request, status: u16, fault: Option<What>) -> bool {
    let failed = fault.is_some() || status == 0 || status >= 400;
    match request.config.access_log {
        AccessLog::Off => false,
        AccessLog::Errors => failed,
        AccessLog::Sampled => failed || lane.rng.borrow_mut().u32(..request.config.access_log_sample) == 0,
        AccessLog::All => true,
    }
}

fn record<W: Wire>(lane: &Lane<W>, request: &Request, status: u16, fault: Option<What>) -> Record {
    let clock = |at_us: u64| (at_us != 0).then_some(at_us);
    let since = |at_us: u64, from_us: u64| clock(at_us).map(|at| at.saturating_sub(from_us));
    let begun = request.started_us;
    let choice = request.choice.get();
    let mut scratch = lane.buffers.take();
    let model = request.ask.model(request.body(), &mut scratch).unwrap_or_default();
    // Without a head there are no spans of it.
    let (path, trace) = match request.head_len {
        0 => (&[][..], 0),
        _ => (
            request.head.path.of(&request.input),
            request.head.named(&request.input, "traceparent").map_or(0, |value| trace_id(value.of(&request.input))),
        ),
    };
    let record = Record {
        begun_us: lane.shared.access.unix_us(lane.index, begun),
        client: request.peer,
        trace,
        method: request.head.method,
        route: request.route as u16,
        status,
        fault,
        stream: request.ask.stream,
        workers: request.workers.get(),
        reason: choice.reason,
        matched: (choice.matched, choice.symbols),
        attempts: request.attempts.get(),
        bytes_in: (request.input.len() + request.lost) as u64 + request.unread.taken(),
        bytes_out: request.sent.get(),
        head_us: since(request.head_us, begun),
        body_us: since(request.body_us.max(request.unread.whole_us()), request.head_us),
        queue_us: request.queued_us.get(),
        upstream_us: clock(request.answered_us.get()).and_then(|at| since(at, request.routed_us.get())),
        total_us: lane.wire.now_us().saturating_sub(begun),
        text: Text::new(&request.id, model, path),
    };
    lane.buffers.give(scratch);
    record
}

/// The trace id of a W3C `traceparent` (version, trace id, parent id, flags); 0 for what is none.
fn trace_id(value: &[u8]) -> u128 {
    let plain = |b: &u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
    let [_, _, b'-', id @ ..] = value else { return 0 };
    match id.split_at_checked(32) {
        Some((id, [b'-', ..])) if id.iter().all(plain) && value[..2].iter().all(plain) && &value[..2] != b"ff" => {
            let digit = |b: &u8| u128::from((b & 15) + 9 * (b >> 6));
            id.iter().fold(0, |trace, b| trace << 4 | digit(b))
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::trace_id;

    #[test]
    fn trace_ids_are_read_strictly() {
        let good = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert_eq!(trace_id(good), 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        for bad in [
            &b""[..],
            b"00",
            b"00-4bf92f3577b34da6a3ce929d0e0e4736",
            b"00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            b"00-4bf92f3577b34da6a3ce929d0e0e473x-00f067aa0ba902b7-01",
            b"ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            b"00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            b"00_4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ] {
            assert_eq!(trace_id(bad), 0, "{}", String::from_utf8_lossy(bad));
        }
    }
}
