//! What passes between the rooms: plain values, and the little that can be asked of a client anywhere.
//!
//! Takes nothing of its own, gives rooms the words in which they speak to each other. Never decides.

use std::cell::Cell;
use std::future::poll_fn;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::config::routes::{Answer as Answerer, Body, ROUTES};
use crate::config::{Config, HalfClose};
use crate::fault::{Fault, What};
use crate::flow::inspect::{Ask, Inspector};
pub use crate::flow::inspect::{KeyRules, Mark, Marked};
use crate::http1::{AnswerBody, Field, Method, RequestHead, ResponseHead};
use crate::lane::Lane;
use crate::lane::timers::Timer;
use crate::lane::view::Choice;
use crate::lane::wire::{Chunk, Conn, Outgoing, Wire};
use crate::limits::BODY_TURN_BYTES;
use crate::metrics::{Tally, Time};
use crate::shared::admission::Permit;
use crate::shared::memory::Held;
use crate::shared::roster::{Label, Slot};

/// A client's connection and what belongs to it while it lives.
pub struct Client<C: Conn> {
    pub conn: C,
    pub peer: SocketAddr,
    /// The one deadline of the connection: each room sets it for the side that it waits for.
    pub timer: Timer,
    /// An answer has begun that only a reset can mark as incomplete: one that ends with the connection.
    fragile: Cell<bool>,
    /// It took nothing of an answer for a whole stall timeout.
    stalled: Cell<bool>,
    /// What its newest request goes by.
    pub config: Rc<Config>,
}

/// What becomes of the client's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Another request may follow.
    Keep,
    /// Everything was sent, or what was not is missed by the framing: say goodbye, let it arrive, close.
    Close,
    /// The answer is incomplete and would look whole, or is not taken: a reset.
    Cut,
    /// The client has left, or does not take what it asked for, or the process ends: close.
    Gone,
}

impl<C: Conn> Client<C> {
    /// A connection of which nothing is known yet.
    pub fn new(conn: C, peer: SocketAddr, timer: Timer, config: Rc<Config>) -> Self {
        Client { conn, peer, timer, fragile: Cell::new(false), stalled: Cell::new(false), config }
    }

    /// Notes that the answer which begins now ends with the connection, or that it is whole and with the kernel. However
    /// the walk ends meanwhile, by a panic or the end of the process too, it does not look whole.
    pub fn set_fragile(&self, fragile: bool) {
        if self.fragile.replace(fragile) != fragile {
            self.conn.set_abortive(fragile);
        }
    }

    /// Starts sending something of a request's answer, and counts the bytes.
    pub fn answer<W: Wire<Conn = C>>(&self, lane: &Lane<W>, request: &Request, what: Outgoing) {
        request.sent.set(request.sent.get() + what.len() as u64);
        self.send(lane, what);
    }

    /// Starts sending, and counts the bytes.
    pub fn send<W: Wire<Conn = C>>(&self, lane: &Lane<W>, what: Outgoing) {
        lane.count(Tally::ClientBytesOut, what.len() as u64);
        self.conn.start_send(what);
    }

    /// What becomes of the connection when its newest answer broke off for this fault. A reset would discard what the
    /// client has not taken yet, of whole answers before it too: it is left for those whose framing a FIN would
    /// complete, and for a client that takes nothing, so that the kernel need not keep it.
    pub fn broken(&self, fault: What) -> Then {
        match fault {
            _ if self.fragile.get() => Then::Cut,
            _ if self.stalled.get() => Then::Cut,
            // There is no time for goodbyes.
            What::CutEnding => Then::Gone,
            _ => Then::Close,
        }
    }

    /// Whether the client is known to have left; wakes the task when it leaves.
    pub fn has_left(&self, cx: &mut Context<'_>) -> bool {
        match self.config.half_close {
            HalfClose::Abort => self.conn.poll_gone(cx).is_ready(),
            HalfClose::Serve => self.conn.poll_broken(cx).is_ready(),
        }
    }

    /// Waits until the client has taken what was sent.
    ///
    /// # Errors
    /// [`What::ClientLeft`], or [`What::ClientStalled`] after a whole stall timeout without progress.
    pub async fn flush<W: Wire<Conn = C>>(&self, lane: &Lane<W>) -> Result<(), What> {
        self.flush_until(lane, u64::MAX).await
    }

    /// The same, up to `deadline_us` on the lane's clock.
    ///
    /// # Errors
    /// As [`flush`](Self::flush); [`What::ClientStalled`] at the deadline too.
    pub async fn flush_until<W: Wire<Conn = C>>(&self, lane: &Lane<W>, deadline_us: u64) -> Result<(), What> {
        let mut stall = Stall::default();
        poll_fn(|cx| match self.conn.poll_sent(cx) {
            Poll::Ready(Ok(sent)) => {
                give_back(lane, sent);
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(_)) => Poll::Ready(Err(What::ClientLeft)),
            Poll::Pending => stall.poll(lane, self, deadline_us, cx).map(Err),
        })
        .await
    }
}

/// The clock that runs while a client is waited for, and starts again whenever it took something.
#[derive(Default)]
pub struct Stall {
    running: bool,
    progress: usize,
}

impl Stall {
    /// Ready when the client took nothing for a whole stall timeout, when `deadline_us` has passed, or when the
    /// process ends.
    pub fn poll<W: Wire>(
        &mut self,
        lane: &Lane<W>,
        client: &Client<W::Conn>,
        deadline_us: u64,
        cx: &mut Context<'_>,
    ) -> Poll<What> {
        if lane.is_ending() {
            return Poll::Ready(What::CutEnding);
        }
        let now = lane.wire.now_us();
        if self.running && client.timer.poll_due(cx).is_pending() {
            return Poll::Pending;
        }
        let taken = client.conn.taken();
        // At the deadline it is the client that is waited for, so the worker is not to blame.
        if now >= deadline_us {
            return Poll::Ready(What::ClientStalled);
        }
        if self.running && taken == self.progress {
            client.stalled.set(true);
            return Poll::Ready(What::ClientStalled);
        }
        (self.running, self.progress) = (true, taken);
        client.timer.set((now + client.config.write_stall_timeout.as_micros() as u64).min(deadline_us));
        client.timer.poll_due(cx).map(|()| What::ClientStalled)
    }
}

/// Returns a sent buffer to the lane's stock.
pub fn give_back<W: Wire>(lane: &Lane<W>, sent: Option<Outgoing>) {
    if let Some(Outgoing::Heap(v) | Outgoing::Ahead(v)) = sent {
        lane.buffers.give(v);
    }
}

/// Whether a worker that has had so many microseconds of a request's time is to blame when that is over. With less than
/// half of it, it is not: a slow client, the queue, or workers before it had the rest.
fn had_its_time(config: &Config, had_us: u64) -> bool {
    had_us >= config.request_timeout.as_micros() as u64 / 2
}

/// What it means that a request's time was over before its answer began, of which its worker has had so much.
pub fn time_over(config: &Config, had_us: u64) -> What {
    if had_its_time(config, had_us) { What::RequestTimeout } else { What::TimeUsedUp }
}

/// Capacity of the input buffer that a resting request may keep.
const REST_BYTES: usize = 64 * 1024;

/// Claims `bytes` in all for something that holds bodies, of the memory that the process has for them. The first 64 KiB
/// are nobody's concern: what holds more than one of them is bounded by other means.
///
/// # Errors
/// [`What::OutOfMemory`]; what was claimed before stays claimed.
pub fn hold<W: Wire>(lane: &Lane<W>, held: &mut Option<Held>, bytes: usize) -> Result<(), Fault> {
    if bytes <= BODY_TURN_BYTES {
        return Ok(());
    }
    let most = lane.config().body_memory_bytes;
    let held = held.get_or_insert_with(|| lane.shared.memory.none());
    if held.grow(bytes as u64, most) { Ok(()) } else { Err(What::OutOfMemory.into()) }
}

/// A worker's answer that is read whole, with its share of the process's memory for bodies.
#[derive(Default)]
pub struct Kept {
    pub bytes: Vec<u8>,
    held: Option<Held>,
}

impl Kept {
    /// Claims memory for what has come.
    ///
    /// # Errors
    /// [`What::OutOfMemory`].
    pub fn hold<W: Wire>(&mut self, lane: &Lane<W>) -> Result<(), Fault> {
        hold(lane, &mut self.held, self.bytes.len())
    }
}

/// What the client has yet to send of a body that is not held: it follows the request to the worker.
#[derive(Default)]
pub struct Unread {
    left: Cell<u64>,
    taken: Cell<u64>,
    whole_us: Cell<u64>,
    awaited_us: Cell<u64>,
}

impl Unread {
    /// So much is still to come.
    pub fn expect(&self, bytes: u64) {
        self.left.set(bytes);
        self.taken.set(0);
        self.whole_us.set(0);
        self.awaited_us.set(0);
    }

    /// Notes for how long in all, in microseconds, the worker that it goes to has waited for the client.
    pub fn awaited(&self, us: u64) {
        self.awaited_us.set(us);
    }

    /// Bytes that the client has yet to send.
    pub fn left(&self) -> u64 {
        self.left.get()
    }

    /// So much was taken from the client at this time, and will not come again.
    ///
    /// # Panics
    /// When it is more than was left: a bug of ours.
    pub fn take(&self, bytes: u64, now_us: u64) {
        self.left.set(self.left.get().checked_sub(bytes).expect("no more is taken than is left"));
        self.taken.set(self.taken.get() + bytes);
        if self.left.get() == 0 {
            self.whole_us.set(now_us);
        }
    }

    /// Clock when the last of it was taken; 0 before, and where there was nothing.
    pub fn whole_us(&self) -> u64 {
        self.whole_us.get()
    }

    /// Bytes that were taken from the client. If there are any, no other worker can be sent the same.
    pub fn taken(&self) -> u64 {
        self.taken.get()
    }
}

/// A request and everything that a walk keeps in memory for it; reused from walk to walk.
pub struct Request {
    /// What it goes by to its end, whatever is changed meanwhile.
    pub config: Rc<Config>,
    /// Head and body as they came, one behind the other (a chunked body without its framing).
    /// Shared with a send in flight, when the body is large.
    pub input: Rc<Vec<u8>>,
    pub head: RequestHead,
    /// The head's bytes, for a body during whose arrival `input` can get lost.
    pub head_copy: Vec<u8>,
    /// Bytes of the body that came and were lost with `input`.
    pub lost: usize,
    /// Where the body begins in `input`.
    pub head_len: usize,
    /// A head for the worker's answer, while nobody has taken it.
    pub spare_head: ResponseHead,
    pub inspector: Inspector,
    pub ask: Ask,
    /// Row of the route table, or its length for extra and unknown routes.
    pub route: usize,
    /// Which extra route of the configuration, if one.
    pub extra: Option<usize>,
    pub answerer: Answerer,
    /// Taken over from the client or made here.
    pub id: Vec<u8>,
    pub keep_alive: Cell<bool>,
    /// Whether all was read that a worker is chosen by.
    pub complete: bool,
    /// What was not, and is not held.
    pub unread: Rc<Unread>,
    /// Clock at the first byte, in microseconds.
    pub started_us: u64,
    /// Where the client is.
    pub peer: SocketAddr,
    /// Clock when the head was complete; 0 before.
    pub head_us: u64,
    /// Clock when all of the body that is held was there and read; 0 before.
    pub body_us: u64,
    /// Time in the queue of the admission, in microseconds.
    pub queued_us: Cell<u64>,
    /// Clock when it was last given to a worker; 0 before.
    pub routed_us: Cell<u64>,
    /// Clock at the first byte to the client; 0 before.
    pub answered_us: Cell<u64>,
    /// Whether bytes of an answer's body have been given to the client.
    pub body_begun: Cell<bool>,
    /// Clock when that was last so, of an answer that is a stream, as far as the walk knows; 0 before.
    pub event_us: Cell<u64>,
    /// Bytes that the client has been sent, as far as the walk knows: not what passes meanwhile.
    pub sent: Cell<u64>,
    /// Whether its end was counted.
    pub counted: Cell<bool>,
    /// Where its model is counted.
    pub label: Label,
    /// Workers that it was last given to: one, or prefill and decode.
    pub workers: Cell<[Option<(Slot, u32)>; 2]>,
    /// What that choice went by.
    pub choice: Cell<Choice>,
    /// Pooled connections turned out dead: fresh ones are used from now on.
    pub fresh: bool,
    /// Workers that were tried.
    pub avoid: Vec<Slot>,
    /// Times it was given to a worker, or was going to be.
    pub attempts: Cell<u32>,
    /// Share of the process's memory for bodies.
    pub held: Option<Held>,
    /// The right to go to a worker, where that is limited: from the admission to the end of the answer, or of a
    /// prefill leg that outlives it.
    pub permit: Cell<Option<Permit>>,
}

impl Request {
    /// One that waits for its first walk.
    pub fn new(config: Rc<Config>) -> Self {
        Request {
            config,
            input: Rc::default(),
            head: RequestHead::new(),
            head_copy: Vec::new(),
            lost: 0,
            head_len: 0,
            spare_head: ResponseHead::new(),
            inspector: Inspector::new(),
            ask: Ask::default(),
            route: ROUTES.len(),
            extra: None,
            answerer: Answerer::Worker,
            id: Vec::new(),
            keep_alive: Cell::new(false),
            complete: false,
            unread: Rc::default(),
            started_us: 0,
            peer: SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
            head_us: 0,
            body_us: 0,
            queued_us: Cell::new(0),
            routed_us: Cell::new(0),
            answered_us: Cell::new(0),
            body_begun: Cell::new(false),
            event_us: Cell::new(0),
            sent: Cell::new(0),
            counted: Cell::new(false),
            label: Label::default(),
            workers: Cell::default(),
            choice: Cell::default(),
            fresh: false,
            avoid: Vec::new(),
            attempts: Cell::new(0),
            held: None,
            permit: Cell::new(None),
        }
    }

    /// Makes it ready for the next walk.
    pub fn reset(&mut self) {
        match Rc::get_mut(&mut self.input) {
            Some(input) if input.capacity() <= REST_BYTES => input.clear(),
            // Too large to keep, or still being sent for a request that was given up.
            _ => self.input = Rc::default(),
        }
        self.head.reset();
        self.spare_head.reset();
        (self.head_len, self.lost) = (0, 0);
        self.ask = Ask::default();
        self.route = ROUTES.len();
        self.extra = None;
        self.answerer = Answerer::Worker;
        self.id.clear();
        self.keep_alive.set(false);
        self.complete = false;
        self.unread.expect(0);
        (self.head_us, self.body_us) = (0, 0);
        for clock in [&self.queued_us, &self.routed_us, &self.answered_us, &self.event_us, &self.sent] {
            clock.set(0);
        }
        self.body_begun.set(false);
        self.counted.set(false);
        self.label = Label::default();
        self.workers.set([None; 2]);
        self.choice.set(Choice::default());
        self.fresh = false;
        self.avoid.clear();
        self.attempts.set(0);
        self.held = None;
        self.permit.set(None);
    }

    /// The input, to be written: before anything is sent of it.
    pub fn input_mut(&mut self) -> &mut Vec<u8> {
        Rc::get_mut(&mut self.input).expect("nothing is sent before all is received")
    }

    /// Whether the client's request was read to its end, so that another one can follow.
    pub fn is_whole(&self) -> bool {
        self.complete && self.unread.left() == 0
    }

    /// The bytes of the body that are held: all of it, but for what is [`unread`](Self::unread).
    pub fn body(&self) -> &[u8] {
        &self.input[self.head_len..]
    }

    /// When the answer has to be complete, on the lane's clock.
    pub fn deadline_us(&self) -> u64 {
        self.started_us + self.config.request_timeout.as_micros() as u64
    }

    /// What it means that a worker whose answer has begun was waited for until its silence or the request was too long.
    pub fn ran_out(&self, now_us: u64) -> What {
        if now_us < self.deadline_us() {
            return What::CutStalled;
        }
        let had_us = now_us.saturating_sub(self.routed_us.get() + self.unread.awaited_us.get());
        if had_its_time(&self.config, had_us) { What::CutTimeout } else { What::CutUsedUp }
    }

    /// For how long a worker whose answer has begun may be silent; zero: for any time, as while it may wait for the rest of
    /// the body.
    pub fn stall_timeout(&self) -> Duration {
        if self.unread.left() > 0 { Duration::ZERO } else { self.config.stall_timeout }
    }

    /// Counts what it took, in microseconds, by its route and its model.
    pub fn took<W: Wire>(&self, lane: &Lane<W>, time: Time, us: u64) {
        lane.tallies().took(self.route, lane.view.borrow().label_place(self.label), time, us);
    }

    /// Notes that the client has been given something of the answer's body.
    pub fn gave<W: Wire>(&self, lane: &Lane<W>) {
        self.body_begun.set(true);
        if self.ask.stream {
            let now = lane.wire.now_us();
            match self.event_us.replace(now) {
                0 => self.took(lane, Time::FirstToken, now.saturating_sub(self.started_us)),
                last => self.took(lane, Time::Gap, now.saturating_sub(last)),
            }
        }
    }

    /// Whether the answer has no body because of the method.
    pub fn is_head(&self) -> bool {
        self.head.method == Method::Head
    }

    /// Whether it came on the route of this path.
    pub fn is(&self, path: &str) -> bool {
        ROUTES.get(self.route).is_some_and(|route| route.path == path)
    }

    /// What the route's body is.
    pub fn body_kind(&self) -> Body {
        ROUTES.get(self.route).map_or(Body::Opaque, |r| r.body)
    }

    /// Methods of the route, for 405.
    pub fn allow(&self) -> Vec<&str> {
        let extra = &self.config.extra_routes;
        match (ROUTES.get(self.route), self.extra) {
            (Some(route), _) => route.methods.to_vec(),
            (None, Some(i)) if extra[i].methods.is_empty() => vec!["GET", "HEAD", "POST"],
            (None, Some(i)) => extra[i].methods.iter().map(String::as_str).collect(),
            (None, None) => Vec::new(),
        }
    }
}

/// One sending of a request to one worker: what a room needs to know to send it and to wait for the answer.
#[derive(Clone, Copy)]
pub struct Leg<'a> {
    /// The request's.
    pub config: &'a Config,
    pub slot: Slot,
    pub era: u32,
    /// The request's method, on which the framing of the answer depends.
    pub method: Method,
    /// When the answer has to be complete, on the lane's clock.
    pub deadline_us: u64,
    /// From the last byte sent to the first one of the answer; 0: no limit but the deadline.
    pub first_byte_us: u64,
    /// The deadline of the side that is waited for.
    pub timer: &'a Timer,
    /// Attempts of the request so far; counted up.
    pub attempts: &'a Cell<u32>,
    pub reuse: Reuse,
    /// What follows of the body while it is sent.
    pub unread: Option<&'a Rc<Unread>>,
}

/// Whether a leg may go out on a pooled connection, and what is done when that turns out dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reuse {
    /// The same is sent once more, on a fresh connection.
    Replay,
    /// The leg fails with [`What::StaleConnection`]: what was sent names a room, and a worker that did see it would
    /// see it twice.
    Fail,
    /// It goes out on a fresh connection.
    Never,
}

/// What goes on towards the worker while its answer passes: the rest of the body, asked with the worker's connection.
/// Ready when there is no more of it, or when the client ends the answer with it. Boxed twice: few answers have one, and
/// all have room for it.
pub type Follow<'a, C> = Box<Box<dyn FnMut(&C, &mut Context<'_>) -> Poll<Result<(), What>> + 'a>>;

/// What is sent on one leg, in order.
pub struct Parcel {
    pub first: Outgoing,
    pub rest: [Option<Outgoing>; 2],
}

impl Parcel {
    /// The same, kept so that it can be sent [`again`](Self::again).
    pub fn kept(self) -> Parcel {
        let keep = |piece| match piece {
            Outgoing::Heap(bytes) | Outgoing::Ahead(bytes) => {
                let len = bytes.len();
                Outgoing::Shared(Rc::new(bytes), 0, len)
            }
            piece => piece,
        };
        Parcel { first: keep(self.first), rest: self.rest.map(|piece| piece.map(keep)) }
    }

    /// What was [`kept`](Self::kept), once more.
    ///
    /// # Panics
    /// When it was not kept: a bug of ours.
    pub fn again(&self) -> Parcel {
        let copy = |piece: &Outgoing| match piece {
            Outgoing::Shared(bytes, start, end) => Outgoing::Shared(bytes.clone(), *start, *end),
            Outgoing::Static(bytes) => Outgoing::Static(bytes),
            Outgoing::Heap(_) | Outgoing::Ahead(_) | Outgoing::Chunk(_) => {
                panic!("a parcel that was not kept is sent again")
            }
        };
        Parcel { first: copy(&self.first), rest: [0, 1].map(|at| self.rest[at].as_ref().map(copy)) }
    }
}

/// A worker's answer up to its head, and the connection on which the rest comes.
pub struct Answer<C> {
    pub conn: C,
    pub head: ResponseHead,
    /// The head's bytes and what came with it.
    pub chunk: Chunk,
    pub head_len: usize,
}

impl<C> Answer<C> {
    /// Whether the body has begun, or there is none.
    pub fn has_body(&self) -> bool {
        self.chunk.len() > self.head_len || matches!(self.head.body, AnswerBody::None | AnswerBody::Length(0))
    }

    /// Seconds after which the worker wants to be asked again; `None` where it does not say so in seconds.
    pub fn retry_after_secs(&self) -> Option<u64> {
        std::str::from_utf8(self.named(b"retry-after")?).ok()?.trim().parse().ok()
    }

    /// Whether the worker says that asking again is of no use, as the OpenAI API does.
    pub fn says_no_retry(&self) -> bool {
        self.named(b"x-should-retry").is_some_and(|value| value.eq_ignore_ascii_case(b"false"))
    }

    fn named(&self, name: &[u8]) -> Option<&[u8]> {
        let named = |field: &&Field| field.name.of(&self.chunk).eq_ignore_ascii_case(name);
        Some(self.head.fields.iter().find(named)?.value.of(&self.chunk))
    }

    /// Puts the next bytes behind those that came with the head.
    pub fn append(&mut self, next: Chunk) {
        let mut bytes = std::mem::replace(&mut self.chunk, Chunk::empty()).into_vec();
        bytes.extend_from_slice(&next);
        self.chunk = Chunk::heap(bytes);
    }
}

/// How the answer of a worker ended.
pub struct Outcome<C> {
    pub then: Then,
    pub status: u16,
    /// The worker's connection, when it may serve another request.
    pub conn: Option<C>,
    pub fault: Option<What>,
    /// The answer's head, to be used again.
    pub head: ResponseHead,
}
