//! Receive: a client's bytes become a request.
//!
//! Takes a connection and its first bytes, gives head, body and what inspection found in it as it
//! arrived. Never holds a buffer while nothing has arrived; never accepts more than the limits say; each
//! deadline runs only while the client is waited for. Large bodies that nobody looks into are left to dispatch, but for those
//! in chunks.

use std::future::poll_fn;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::config::Relay;
use crate::config::routes::{self, ROUTES};
use crate::fault::{Fault, What};
use crate::flow::passage::{Client, KeyRules, Request, give_back, hold};
use crate::http1::{BodyLength, CONTINUE, Chunked, FieldKind, HeadLimits, Method, Parsed, request_id};
use crate::lane::Lane;
use crate::lane::wire::{Chunk, Conn, Outgoing, Wire};
use crate::limits::{
    BODY_TURN_BYTES, CHUNK_FRAMING_FACTOR, MAX_CHUNK_EXTENSION_BYTES, MAX_CHUNK_FRAMING_BYTES, RECV_BUFFER_BYTES,
    SPLICE_BYTES, UPLOAD_BYTES,
};
use crate::metrics::Tally;
use crate::shared::roster::ROLES;

/// What came of waiting for a request.
pub enum Waited {
    /// Its first bytes.
    First(Chunk),
    /// Nothing, until the time was over.
    Late,
    /// The client has closed its connection, or the process drains.
    Over,
}

/// Waits until then for the first bytes of a request. Needs little memory: most connections of a gateway do nothing
/// else.
pub async fn wait<W: Wire>(lane: &Lane<W>, client: &Client<W::Conn>, until_us: u64) -> Waited {
    client.timer.set(until_us);
    poll_fn(|cx| {
        if let Poll::Ready(got) = client.conn.poll_recv(cx) {
            return Poll::Ready(match got {
                Ok(first) if !first.is_empty() => Waited::First(first),
                _ => Waited::Over,
            });
        }
        if lane.is_draining() {
            return Poll::Ready(Waited::Over);
        }
        client.timer.poll_due(cx).map(|()| Waited::Late)
    })
    .await
}

/// Ready when the client has let the deadline pass, or when the process ends and waits for nobody.
fn poll_late<W: Wire>(lane: &Lane<W>, client: &Client<W::Conn>, late: What, cx: &mut Context<'_>) -> Poll<Fault> {
    if lane.is_ending() {
        return Poll::Ready(What::ShuttingDown.into());
    }
    client.timer.poll_due(cx).map(|()| late.into())
}

/// The client's next bytes, or the fault when the deadline passes or the client is gone.
async fn more<W: Wire>(lane: &Lane<W>, client: &Client<W::Conn>, late: What) -> Result<Chunk, Fault> {
    let chunk = poll_fn(|cx| {
        if let Poll::Ready(got) = client.conn.poll_recv(cx) {
            return Poll::Ready(got.map_err(|_| Fault::from(What::ClientGone)));
        }
        poll_late(lane, client, late, cx).map(Err)
    })
    .await?;
    if chunk.is_empty() {
        return Err(What::ClientGone.into());
    }
    lane.count(Tally::ClientBytesIn, chunk.len() as u64);
    Ok(chunk)
}

/// Reads one request, but for what is to follow it.
pub async fn receive<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &mut Request,
    first: Chunk,
) -> Result<(), Fault> {
    let limits = HeadLimits { bytes: request.config.max_head_bytes, fields: request.config.max_headers };
    lane.count(Tally::ClientBytesIn, first.len() as u64);
    client.timer.set(lane.wire.now_us() + request.config.head_timeout.as_micros() as u64);
    let mut chunk = first;
    request.head_len = loop {
        request.input_mut().extend_from_slice(&chunk);
        drop(chunk);
        match request.head.parse(&request.input, &limits)? {
            Parsed::Complete(len) => break len,
            Parsed::Partial => chunk = more(lane, client, What::HeadTimeout).await?,
        }
    };
    request.head_us = lane.wire.now_us();
    identify(lane, request);
    if matches!(request.head.body, BodyLength::None | BodyLength::Length(0)) {
        // Nothing more is to come: whatever is wrong with the request, the next one can follow.
        keep_rest(client, request, request.head_len);
        request.complete = true;
    }
    let found = find_route(request);
    // Before anything is told or read: a stranger's body is not waited for.
    if !is_open(request) {
        authenticate(request)?;
    }
    found?;
    read_body(lane, client, request).await?;
    request.complete = true;
    Ok(())
}

/// Takes the request id over or makes one, and notes what the connection does afterwards.
fn identify<W: Wire>(lane: &Lane<W>, request: &mut Request) {
    request.keep_alive.set(request.head.keep_alive);
    request.id.clear();
    match request_id(&request.head, &request.input, &request.config.request_id_headers) {
        Some(span) => request.id.extend_from_slice(span.of(&request.input)),
        None => {
            let id = lane.rng.borrow_mut().u128(..);
            request.id.extend((0..32).rev().map(|i| b"0123456789abcdef"[(id >> (i * 4)) as usize & 15]));
        }
    }
}

/// Whether the request is for what anybody may ask: how the gateway is.
fn is_open(request: &Request) -> bool {
    let route = ROUTES.get(request.route);
    route.is_some_and(|route| matches!(route.answer, routes::Answer::Alive | routes::Answer::Ready))
}

/// Looks for one of the gateway's keys, where it has any.
fn authenticate(request: &Request) -> Result<(), Fault> {
    let keys = &request.config.api_keys;
    if keys.is_empty() {
        return Ok(());
    }
    // All keys are compared, whichever is right: the time tells nothing.
    let known = |given: &[u8]| keys.iter().fold(false, |known, key| known | key.is(given));
    let brought = request.head.fields.iter().filter_map(|field| {
        let value = field.value.of(&request.input);
        match field.kind {
            FieldKind::ApiKey => Some(value),
            FieldKind::Authorization => bearer(value),
            _ => None,
        }
    });
    match brought.fold(false, |any, given| any | known(given)) {
        true => Ok(()),
        false => Err(What::InvalidApiKey.into()),
    }
}

/// The token of `Bearer TOKEN`; the scheme's name has no case.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii_start())
}

fn find_route(request: &mut Request) -> Result<(), Fault> {
    let path = request.head.path.of(&request.input);
    let method = request.head.method.as_str();
    if let Some(route) = routes::find(path) {
        request.route = route;
        request.answerer = ROUTES[route].answer;
        return match ROUTES[route].methods.contains(&method) {
            true => Ok(()),
            false => Err(What::MethodNotAllowed.into()),
        };
    }
    let extra = request.config.extra_routes.iter().position(|r| routes::matches(r.path.as_bytes(), path));
    request.extra = extra;
    let Some(extra) = extra.map(|i| &request.config.extra_routes[i]) else { return Err(What::PathUnknown.into()) };
    let methods = &extra.methods;
    let allowed = if methods.is_empty() {
        matches!(request.head.method, Method::Get | Method::Head | Method::Post)
    } else {
        methods.iter().any(|m| m == method)
    };
    if allowed { Ok(()) } else { Err(What::MethodNotAllowed.into()) }
}

async fn read_body<W: Wire>(lane: &Lane<W>, client: &Client<W::Conn>, request: &mut Request) -> Result<(), Fault> {
    let kind = request.body_kind();
    let content_type = request.head.first(FieldKind::ContentType).map_or(&[][..], |s| s.of(&request.input));
    request.inspector.begin(kind, content_type);
    if let Some(rules) = key_rules(lane, request) {
        request.inspector.want_key(rules);
    }
    let max = request.config.max_payload_bytes;
    match request.head.body {
        BodyLength::None | BodyLength::Length(0) => Ok(()),
        BodyLength::Length(length) if length > max => Err(too_large(max)),
        BodyLength::Length(length) => {
            // Below the limit, which fits memory; 32-bit systems have no io_uring worth the name.
            read_length(lane, client, request, length as usize).await
        }
        BodyLength::Chunked => read_chunked(lane, client, request, max).await,
    }
}

/// How the prompt's key is made, if there is use for one: only what a worker computes a prompt for gets into its cache.
fn key_rules<W: Wire>(lane: &Lane<W>, request: &Request) -> Option<KeyRules> {
    let policies = ROLES.map(|role| request.config.policy_of(role));
    if !policies.iter().any(|policy| policy.wants_key())
        || !ROUTES.get(request.route).is_some_and(|route| route.prefills())
    {
        return None;
    }
    // Gateways that hash onto one ring must agree; who remembers prompts must not be told which ones to confuse.
    let remembers = policies.iter().any(|policy| policy.wants_key() && !policy.wants_ring());
    let seed = if remembers { lane.shared.seed } else { 0 };
    Some(KeyRules { seed, max_bytes: request.config.routing.prefix_max_bytes })
}

fn too_large(max: u64) -> Fault {
    Fault::with(What::BodyTooLarge, format!("The limit is {max} bytes."))
}

/// Room that a body gets at once when it does not fit what is there. Room becomes memory when bytes are written to
/// it, and those are claimed; still a length is only a promise, so there is a limit.
const FIRST_ROOM_BYTES: usize = 4 * BODY_TURN_BYTES;

/// What lies behind `end` belongs to the next request.
fn keep_rest<C: Conn>(client: &Client<C>, request: &mut Request, end: usize) {
    if request.input.len() > end {
        client.conn.unread(Chunk::heap(request.input[end..].to_vec()));
        request.input_mut().truncate(end);
    }
}

/// Says that the body may come. A client that takes nothing of its answers does not take this either.
async fn invite<W: Wire>(lane: &Lane<W>, client: &Client<W::Conn>, request: &Request) -> Result<(), Fault> {
    if request.head.expect_continue {
        client.conn.start_send(Outgoing::Static(CONTINUE));
        client.flush(lane).await?;
    }
    Ok(())
}

/// Until when the next byte of the body must be there: pauses have a limit, and so has the request.
fn deadline<W: Wire>(lane: &Lane<W>, request: &Request) -> u64 {
    let pause = lane.wire.now_us() + request.config.body_timeout.as_micros() as u64;
    pause.min(request.deadline_us())
}

async fn read_length<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &mut Request,
    length: usize,
) -> Result<(), Fault> {
    let end = request.head_len + length;
    if request.input.len() >= end {
        keep_rest(client, request, end);
        request.complete = true;
        return request.inspector.feed(&request.input[request.head_len..]);
    }
    let missing = end - request.input.len();
    if follows(request, missing) {
        invite(lane, client, request).await?;
        request.unread.expect(missing as u64);
        client.conn.set_lazy(true);
        return request.inspector.feed(&request.input[request.head_len..]);
    }
    if length as u64 > request.config.body_memory_bytes {
        return Err(What::OutOfMemory.into());
    }
    invite(lane, client, request).await?;
    // A length is only a promise: the claim to memory follows the bytes.
    request.inspector.feed(&request.input[request.head_len..])?;
    // The kernel may have the buffer when the client's time is over, and the head with it.
    let Request { head_copy, input, head_len, .. } = request;
    head_copy.clear();
    head_copy.extend_from_slice(&input[..*head_len]);
    let filled = fill(lane, client, request, end).await;
    if filled.is_err() && request.input.len() < request.head_len {
        let head = std::mem::take(&mut request.head_copy);
        *request.input_mut() = head;
    } else {
        request.lost = 0;
    }
    filled
}

/// Reads a body that ends there, into the buffer of its request.
async fn fill<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &mut Request,
    end: usize,
) -> Result<(), Fault> {
    while request.input.len() < end {
        // What the kernel still has when this is given up.
        request.lost = request.input.len() - request.head_len;
        let missing = end - request.input.len();
        let next = missing.min(BODY_TURN_BYTES);
        hold(lane, &mut request.held, request.input.len() - request.head_len + next)?;
        make_room(request.input_mut(), end);
        client.timer.set(deadline(lane, request));
        let input = request.input_mut();
        let n = poll_fn(|cx| {
            if let Poll::Ready(got) = client.conn.poll_fill(cx, input, next) {
                return Poll::Ready(got.map_err(|_| Fault::from(What::ClientGone)));
            }
            poll_late(lane, client, What::BodyTimeout, cx).map(Err)
        })
        .await?;
        if n == 0 {
            return Err(What::ClientGone.into());
        }
        lane.count(Tally::ClientBytesIn, n as u64);
        request.complete = request.input.len() == end;
        request.inspector.feed(&request.input[request.head_len..])?;
    }
    Ok(())
}

/// Whether so much of a body with a length is not held, but follows the request to the worker that is chosen without it:
/// where nobody looks into it, and there is enough of it to be moved by the kernel.
fn follows(request: &Request, missing: usize) -> bool {
    let least = match request.config.relay {
        Relay::Copy => return false,
        Relay::Auto => UPLOAD_BYTES,
        Relay::Splice => SPLICE_BYTES,
    };
    request.extra.is_some() && missing >= least
}

/// Makes room for more of a body that ends at `end`: all of it up to a limit, from there on in steps that double.
fn make_room(input: &mut Vec<u8>, end: usize) {
    let (have, room) = (input.len(), input.capacity());
    if room == have {
        let whole = (room * 2).max(FIRST_ROOM_BYTES).min(end);
        input.reserve_exact(whole - have);
    }
}

async fn read_chunked<W: Wire>(
    lane: &Lane<W>,
    client: &Client<W::Conn>,
    request: &mut Request,
    max: u64,
) -> Result<(), Fault> {
    let mut chunked = Chunked::new();
    let mut payload_end = request.head_len;
    let mut invited = false;
    loop {
        let squeezed =
            chunked.squeeze(&mut request.input_mut()[payload_end..]).map_err(|_| Fault::from(What::BadChunk))?;
        let (raw_end, done) = (payload_end + squeezed.consumed, squeezed.done);
        payload_end += squeezed.payload;
        let payload = (payload_end - request.head_len) as u64;
        // What a chunk's line promises counts as if it were there.
        if payload.saturating_add(chunked.remaining()) > max {
            return Err(too_large(max));
        }
        if chunked.extensions() > MAX_CHUNK_EXTENSION_BYTES
            || chunked.framing() > MAX_CHUNK_FRAMING_BYTES + CHUNK_FRAMING_FACTOR * payload
        {
            return Err(Fault::with(What::BadChunk, "It is mostly framing."));
        }
        if done {
            if request.input.len() > raw_end {
                client.conn.unread(Chunk::heap(request.input[raw_end..].to_vec()));
            }
            request.input_mut().truncate(payload_end);
            request.complete = true;
            return request.inspector.feed(&request.input[request.head_len..]);
        }
        request.input_mut().truncate(payload_end);
        request.inspector.feed(&request.input[request.head_len..])?;
        hold(lane, &mut request.held, payload_end - request.head_len + RECV_BUFFER_BYTES)?;
        if !invited {
            invited = true;
            invite(lane, client, request).await?;
        }
        client.timer.set(deadline(lane, request));
        let chunk = more(lane, client, What::BodyTimeout).await?;
        request.input_mut().extend_from_slice(&chunk);
    }
}

/// Bytes that a client may still send after it was refused.
const LINGER_BYTES: usize = 64 << 20;
/// Microseconds between looks whether it has taken more of its answer. At the first that finds it with all of that, and
/// with no more than before, the goodbye is over.
const LINGER_US: u64 = 2_000_000;

/// Says goodbye to a client that may still be sending: closing over unread bytes would be a reset, and the
/// answer could be lost with it. As long as a client that may send takes of what the kernel has for it, it is waited for, up
/// to `longest`, unless the gateway drains; one that takes nothing for a whole stall timeout is reset.
pub async fn linger<W: Wire>(lane: &Lane<W>, client: &Client<W::Conn>, longest: Duration) {
    let end_us = lane.wire.now_us() + longest.as_micros() as u64;
    client.timer.set(lane.wire.now_us() + LINGER_US);
    // Of an answer that broke off, a piece may be on its way.
    poll_fn(|cx| match client.conn.poll_sent(cx) {
        Poll::Ready(sent) => {
            give_back(lane, sent.ok().flatten());
            Poll::Ready(())
        }
        Poll::Pending => poll_late(lane, client, What::ClientGone, cx).map(|_| ()),
    })
    .await;
    client.conn.shutdown();
    let mut left = LINGER_BYTES;
    let mut taken = client.conn.taken();
    let mut taken_us = lane.wire.now_us();
    while left > 0 {
        let got = poll_fn(|cx| {
            if let Poll::Ready(got) = client.conn.poll_recv(cx) {
                return Poll::Ready(Some(got));
            }
            poll_late(lane, client, What::ClientGone, cx).map(|_| None)
        })
        .await;
        match got {
            Some(Ok(chunk)) if !chunk.is_empty() => left = left.saturating_sub(chunk.len()),
            // It will send nothing that could meet a closed connection.
            Some(_) => return,
            None if lane.is_ending() || lane.is_draining() && !client.conn.is_sending() => return,
            None if lane.wire.now_us() >= end_us => return,
            None => {
                let (now, before) = (lane.wire.now_us(), std::mem::replace(&mut taken, client.conn.taken()));
                if taken != before {
                    taken_us = now;
                } else if client.conn.is_taken() {
                    return;
                } else if now - taken_us >= client.config.write_stall_timeout.as_micros() as u64 {
                    return client.conn.set_abortive(true);
                }
                client.timer.set(now + LINGER_US);
            }
        }
    }
}
