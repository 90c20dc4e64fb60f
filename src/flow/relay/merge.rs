//! An answer that is not passed on as it came: a decode worker's, with what the prefill said of the prompt put in.
//!
//! Takes the answer and what is put in, gives an outcome like relay's own. Never holds more of a stream than one event,
//! never passes on an answer in one piece before it is whole.

use super::logprobs::{Prefilled, Stream};
use super::{Event, Framing, Until, collect, copy, drain, finish};
use crate::fault::{Fault, What};
use crate::flow::passage::{Answer, Client, Kept, Outcome, Request};
use crate::http1::{self, AnswerBody, Version};
use crate::lane::Lane;
use crate::lane::wire::{Conn, Outgoing, Wire};

/// Passes the answer on to its last byte, with the log probabilities of the prompt.
///
/// # Errors
/// A fault that shows before the client has seen a byte.
pub async fn merged<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &Request,
    answer: Answer<W::Conn>,
    prefilled: Prefilled,
) -> Result<Outcome<W::Conn>, Fault> {
    match request.ask.stream {
        true => stream(lane, client, request, answer, Stream::new(prefilled)).await,
        false => whole(lane, client, request, answer, &prefilled).await,
    }
}

async fn whole<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &Request,
    answer: Answer<W::Conn>,
    prefilled: &Prefilled,
) -> Result<Outcome<W::Conn>, Fault> {
    let head_bytes = answer.chunk[..answer.head_len].to_vec();
    let mut body = Kept::default();
    let until =
        Until { config: &request.config, deadline_us: request.deadline_us(), since_us: request.routed_us.get() };
    let (conn, head) = drain(lane, Some(client), answer, &client.timer, until, Some(&mut body)).await?;
    let mut merged = Vec::new();
    if !prefilled.merge_json(&body.bytes, &mut merged) {
        merged = std::mem::take(&mut body.bytes);
    }
    let mut out = lane.buffers.take();
    begin(lane, request, &head, &head_bytes, AnswerBody::Length(merged.len() as u64), &mut out);
    out.extend_from_slice(&merged);
    client.answer(lane, request, Outgoing::Heap(out));
    request.answered_us.set(lane.wire.now_us());
    request.gave(lane);
    let (then, fault) = finish(lane, client, request, Ok(())).await;
    Ok(Outcome { then, status: head.status, conn, fault, head })
}

/// Writes the head, and notes what becomes of the client's connection.
fn begin<W: Wire>(
    lane: &Lane<W>,
    request: &Request,
    head: &http1::ResponseHead,
    bytes: &[u8],
    framing: AnswerBody,
    out: &mut Vec<u8>,
) {
    let keep_alive = request.keep_alive.get() && framing != AnswerBody::UntilClose && !lane.is_draining();
    request.keep_alive.set(keep_alive);
    let told = http1::Answer { request_id: &request.id, framing, keep_alive, client_version: request.head.version };
    http1::response_head(out, head, bytes, &told);
}

fn frame_text(chunked: bool, text: &[u8], out: &mut Vec<u8>) {
    match (chunked, text) {
        (_, []) => {}
        (true, text) => http1::chunk(out, text),
        (false, text) => out.extend_from_slice(text),
    }
}

fn note_answered<W: Wire>(lane: &Lane<W>, request: &Request) {
    if request.answered_us.get() == 0 {
        request.answered_us.set(lane.wire.now_us());
    }
}

async fn stream<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &Request,
    answer: Answer<W::Conn>,
    mut events: Stream,
) -> Result<Outcome<W::Conn>, Fault> {
    let Answer { conn, head, mut chunk, head_len } = answer;
    let chunked = request.head.version != Version::H10;
    let mut out = lane.buffers.take();
    let framing = if chunked { AnswerBody::Chunked } else { AnswerBody::UntilClose };
    begin(lane, request, &head, &chunk[..head_len], framing, &mut out);
    chunk.advance(head_len);
    let mut frame = Framing::new(head.body);
    let (mut piece, mut text) = (Vec::new(), Vec::new());
    let mut excess = false;
    let ended = loop {
        piece.clear();
        text.clear();
        let done = match frame.unpack(&chunk, &mut piece) {
            Ok(taken) => {
                excess = taken.len < chunk.len();
                taken.done
            }
            Err(_) if request.answered_us.get() == 0 => {
                return Err(Fault::with(What::BadAnswer, "Its body breaks its own framing."));
            }
            Err(fault) => break Err(fault),
        };
        let mut taken = events.push(&piece, &mut text);
        let mut flushed = Ok(());
        while taken < piece.len() && flushed.is_ok() {
            // Each event can be as long as all that the prefill said: the client gets these before more are made.
            frame_text(chunked, &text, &mut out);
            client.set_fragile(!chunked);
            client.answer(lane, request, Outgoing::Heap(std::mem::take(&mut out)));
            request.gave(lane);
            note_answered(lane, request);
            flushed = client.flush(lane).await;
            text.clear();
            taken += events.push(&piece[taken..], &mut text);
        }
        if let Err(what) = flushed {
            break Err(what);
        }
        if done {
            events.finish(&mut text);
        }
        if !text.is_empty() {
            request.gave(lane);
            frame_text(chunked, &text, &mut out);
        }
        if done && chunked {
            out.extend_from_slice(http1::LAST_CHUNK);
        }
        if !out.is_empty() {
            client.set_fragile(!chunked);
            client.answer(lane, request, Outgoing::Heap(std::mem::take(&mut out)));
        }
        note_answered(lane, request);
        if done {
            break Ok(());
        }
        chunk = match copy::next(lane, client, |cx| conn.poll_recv(cx), request, None).await {
            Event::Next(chunk) => chunk,
            Event::WorkerEnded(true) if matches!(frame, Framing::UntilClose) && !conn.met_break() => {
                text.clear();
                events.finish(&mut text);
                frame_text(chunked, &text, &mut out);
                if chunked {
                    out.extend_from_slice(http1::LAST_CHUNK);
                }
                // The last send must be over before another begins.
                if let Err(what) = client.flush(lane).await {
                    break Err(what);
                }
                client.answer(lane, request, Outgoing::Heap(std::mem::take(&mut out)));
                break Ok(());
            }
            Event::WorkerEnded(_) => break Err(What::Cut),
            Event::Fault(fault) => break Err(fault),
            Event::Moved(_) | Event::NoPipe => unreachable!("what is received is not moved unseen"),
        };
    };
    let reusable = ended.is_ok()
        && head.keep_alive
        && !excess
        && !matches!(frame, Framing::UntilClose)
        && collect(lane, &conn) == Some(true);
    let conn = reusable.then_some(conn);
    let (then, fault) = finish(lane, client, request, ended).await;
    Ok(Outcome { then, status: head.status, conn, fault, head })
}
