//! What passes between the rooms: plain values, and the little that can be asked of a client anywhere.
//!
//! Takes nothing of its own, gives rooms the words in which they speak to each other. Never decides.

use std::cell::Cell;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::config::routes::{Answer as Answerer, Body, ROUTES};
use crate::config::{ExtraRoute, HalfClose};
use crate::fault::What;
pub use crate::flow::inspect::KeyRules;
use crate::flow::inspect::{Ask, Inspector};
use crate::http1::{Method, RequestHead, ResponseHead};
use crate::lane::Lane;
use crate::lane::timers::Timer;
use crate::lane::wire::{Chunk, Conn, Outgoing, Wire};
use crate::metrics::Tally;
use crate::shared::memory::Held;
use crate::shared::roster::Slot;

/// A client's connection and what belongs to it while it lives.
pub struct Client<C: Conn> {
    pub conn: C,
    pub peer: SocketAddr,
    /// The one deadline of the connection: each room sets it for the side that it waits for.
    pub timer: Timer,
    /// An answer has begun that only a reset can mark as incomplete: one that ends with the connection.
    pub fragile: Cell<bool>,
}

impl<C: Conn> Drop for Client<C> {
    /// However the walk ends, by a panic too, an answer that broke off does not look whole.
    fn drop(&mut self) {
        if self.fragile.get() {
            self.conn.reset();
        }
    }
}

/// What becomes of the client's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Another request may follow.
    Keep,
    /// Everything was sent: say goodbye, let it arrive, close.
    Close,
    /// The answer is incomplete: make that visible.
    Cut,
}

impl<C: Conn> Client<C> {
    /// Starts sending, and counts the bytes.
    pub fn send<W: Wire<Conn = C>>(&self, lane: &Lane<W>, what: Outgoing) {
        lane.count(Tally::ClientBytesOut, what.len() as u64);
        self.conn.start_send(what);
    }

    /// Whether the client is known to have left; wakes the task when it leaves.
    pub fn has_left<W: Wire<Conn = C>>(&self, lane: &Lane<W>, cx: &mut Context<'_>) -> bool {
        match lane.config.half_close {
            HalfClose::Abort => self.conn.poll_gone(cx).is_ready(),
            HalfClose::Serve => self.conn.poll_broken(cx).is_ready(),
        }
    }

    /// Waits until the client has taken what was sent.
    ///
    /// # Errors
    /// [`What::ClientLeft`], or [`What::ClientStalled`] after a whole stall timeout without progress.
    pub async fn flush<W: Wire<Conn = C>>(&self, lane: &Lane<W>) -> Result<(), What> {
        let mut stall = Stall::default();
        poll_fn(|cx| match self.conn.poll_sent(cx) {
            Poll::Ready(Ok(sent)) => {
                give_back(lane, sent);
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(_)) => Poll::Ready(Err(What::ClientLeft)),
            Poll::Pending => stall.poll(lane, self, u64::MAX, cx).map(Err),
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
        if now >= deadline_us {
            return Poll::Ready(What::CutTimeout);
        }
        if self.running && taken == self.progress {
            return Poll::Ready(What::ClientStalled);
        }
        (self.running, self.progress) = (true, taken);
        client.timer.set((now + lane.config.write_stall_timeout.as_micros() as u64).min(deadline_us));
        client.timer.poll_due(cx).map(|()| What::ClientStalled)
    }
}

/// Returns a sent buffer to the lane's stock.
pub fn give_back<W: Wire>(lane: &Lane<W>, sent: Option<Outgoing>) {
    if let Some(Outgoing::Heap(v)) = sent {
        lane.buffers.give(v);
    }
}

/// A request and everything that a walk keeps in memory for it; reused from walk to walk.
pub struct Request {
    /// Head and body as they came, one behind the other (a chunked body without its framing).
    /// Shared with a send in flight, when the body is large.
    pub input: Rc<Vec<u8>>,
    pub head: RequestHead,
    /// Where the body begins in `input`.
    pub head_len: usize,
    /// Head of the worker's answer.
    pub answer: ResponseHead,
    pub inspector: Inspector,
    pub ask: Ask,
    /// Row of the route table, or its length for extra and unknown routes.
    pub route: usize,
    /// Which extra route of the configuration, if one.
    pub extra: Option<usize>,
    pub answerer: Answerer,
    /// Taken over from the client or made here.
    pub id: Vec<u8>,
    pub keep_alive: bool,
    /// Whether the client's request was read to its end.
    pub complete: bool,
    /// Clock at the first byte, in microseconds.
    pub started_us: u64,
    /// Clock at the first byte to the client; 0 before.
    pub answered_us: u64,
    /// Workers that were tried.
    pub avoid: Vec<Slot>,
    /// Times it was given to a worker, or was going to be.
    pub attempts: u32,
    /// Share of the process's memory for bodies.
    pub held: Option<Held>,
}

impl Default for Request {
    fn default() -> Self {
        Request {
            input: Rc::default(),
            head: RequestHead::new(),
            head_len: 0,
            answer: ResponseHead::new(),
            inspector: Inspector::new(),
            ask: Ask::default(),
            route: ROUTES.len(),
            extra: None,
            answerer: Answerer::Worker,
            id: Vec::new(),
            keep_alive: false,
            complete: false,
            started_us: 0,
            answered_us: 0,
            avoid: Vec::new(),
            attempts: 0,
            held: None,
        }
    }
}

/// Capacity of the input buffer that a resting request may keep.
const REST_BYTES: usize = 64 * 1024;

impl Request {
    /// Makes it ready for the next walk.
    pub fn reset(&mut self) {
        match Rc::get_mut(&mut self.input) {
            Some(input) if input.capacity() <= REST_BYTES => input.clear(),
            // Too large to keep, or still being sent for a request that was given up.
            _ => self.input = Rc::default(),
        }
        self.head.reset();
        self.answer.reset();
        self.head_len = 0;
        self.ask = Ask::default();
        self.route = ROUTES.len();
        self.extra = None;
        self.answerer = Answerer::Worker;
        self.id.clear();
        self.keep_alive = false;
        self.complete = false;
        self.answered_us = 0;
        self.avoid.clear();
        self.attempts = 0;
        self.held = None;
    }

    /// The input, to be written: before anything is sent of it.
    pub fn input_mut(&mut self) -> &mut Vec<u8> {
        Rc::get_mut(&mut self.input).expect("nothing is sent before all is received")
    }

    /// The body's bytes.
    pub fn body(&self) -> &[u8] {
        &self.input[self.head_len..]
    }

    /// Whether the answer has no body because of the method.
    pub fn is_head(&self) -> bool {
        self.head.method == Method::Head
    }

    /// What the route's body is.
    pub fn body_kind(&self) -> Body {
        ROUTES.get(self.route).map_or(Body::Opaque, |r| r.body)
    }

    /// Methods of the route, for 405.
    pub fn allow<'a>(&self, extra: &'a [ExtraRoute]) -> Vec<&'a str> {
        match (ROUTES.get(self.route), self.extra) {
            (Some(route), _) => route.methods.to_vec(),
            (None, Some(i)) if extra[i].methods.is_empty() => vec!["GET", "HEAD", "POST"],
            (None, Some(i)) => extra[i].methods.iter().map(String::as_str).collect(),
            (None, None) => Vec::new(),
        }
    }
}

/// A worker's answer up to its head, and the connection on which the rest comes.
pub struct Answer<C> {
    pub conn: C,
    /// The head (parsed into the request's `answer`) and what came with it.
    pub chunk: Chunk,
    pub head_len: usize,
}

/// How the answer of a worker ended.
pub struct Outcome<C> {
    pub then: Then,
    /// The worker's connection, when it may serve another request.
    pub conn: Option<C>,
    pub fault: Option<What>,
}
