//! The walk of one request. The only file that knows the order of the rooms; whoever reads it has read the proxy.
//!
//! ```text
//! client ─▶ accept ─▶ receive ─▶ inspect ─▶ route ─▶ dispatch ─▶ relay ─▶ settle ─▶ next request, or close
//!                                             ▲          │
//!                                             └──────────┘  another attempt: bounded, only before the first byte
//! ```
//!
//! Takes a client's connection, gives it answers until one side has had enough. Never holds a buffer for a
//! connection that is idle, never lets a load guard outlive its leg, never ends a cut answer cleanly.

pub mod accept;
pub mod dispatch;
pub mod inspect;
pub mod local;
pub mod passage;
pub mod receive;
pub mod relay;
pub mod route;
pub mod settle;

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::Poll;

use crate::config::Role;
use crate::config::routes::Answer;
use crate::fault::{Fault, What};
use crate::http1::{self, Extra, FieldKind};
use crate::lane::Lane;
use crate::lane::wire::{Conn, Outgoing, Wire};
use crate::metrics::Tally;
use crate::shared::load::LoadGuard;
use crate::shared::roster::Slot;
use crate::span::Span;

use passage::{Client, Request, Then};

/// A lane with the requests that go round in it.
pub struct Flow<W: Wire> {
    pub lane: Rc<Lane<W>>,
    /// Requests at rest: what a walk needs in memory, reused.
    #[allow(clippy::vec_box, reason = "a walk holds the box: its future stays small and the request does not move")]
    spare: RefCell<Vec<Box<Request>>>,
}

/// Header of the secret that lets a request name its worker.
const TARGET_SECRET: &str = "x-corelane-target-secret";

/// Lets the lane's other tasks go first.
async fn give_way() {
    let mut gave = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut gave, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

/// Requests kept at rest per lane.
const SPARE: usize = 256;

impl<W: Wire> Flow<W> {
    /// A flow over a lane.
    pub fn new(lane: Rc<Lane<W>>) -> Rc<Self> {
        Rc::new(Flow { lane, spare: RefCell::default() })
    }

    fn request(&self) -> Box<Request> {
        self.spare.borrow_mut().pop().unwrap_or_default()
    }

    fn rest(&self, mut request: Box<Request>) {
        request.reset();
        let mut spare = self.spare.borrow_mut();
        if spare.len() < SPARE {
            spare.push(request);
        }
    }

    /// Serves one client's connection to its end.
    pub async fn serve(self: Rc<Self>, conn: W::Conn, peer: SocketAddr) {
        let client = Client { conn, peer, timer: self.lane.timers.timer(), fragile: Cell::new(false) };
        loop {
            let first = receive::wait(&self.lane, &client).await;
            // The last answer may still be on its way into the kernel.
            let flushed = client.flush(&self.lane).await;
            let (Some(first), Ok(())) = (first, flushed) else { return };
            let mut request = self.request();
            let then = self.walk(&client, &mut request, first).await;
            self.rest(request);
            match then {
                Then::Keep => {}
                Then::Close => return receive::linger(&self.lane, &client).await,
                Then::Cut => return client.conn.reset(),
            }
        }
    }

    /// One request, from its first byte to the last of its answer.
    async fn walk(&self, client: &Client<W::Conn>, request: &mut Request, first: crate::lane::wire::Chunk) -> Then {
        let lane = &*self.lane;
        request.started_us = lane.wire.now_us();
        if let Err(fault) = receive::receive(lane, client, request, first).await {
            return self.refuse(client, request, fault).await;
        }
        match request.inspector.finish(&request.input[request.head_len..]) {
            Ok(ask) => request.ask = ask,
            Err(fault) => return self.refuse(client, request, fault).await,
        }
        while !request.inspector.hash(&request.ask, &request.input[request.head_len..]) {
            give_way().await;
        }
        match request.answerer {
            Answer::Worker | Answer::AnyWorker | Answer::Holder => self.proxy(client, request).await,
            by => {
                let mut out = lane.buffers.take();
                let status = local::answer(lane, request, by, &mut out);
                self.say(client, request, out, status).await
            }
        }
    }

    /// Route, dispatch, relay and settle, with further attempts while the client has not seen a byte.
    async fn proxy(&self, client: &Client<W::Conn>, request: &mut Request) -> Then {
        let lane = &*self.lane;
        request.avoid.clear();
        let (guard, answer) = loop {
            let guard = match self.route(request) {
                Ok(guard) => guard,
                Err(fault) => return self.refuse(client, request, fault).await,
            };
            let (slot, era) = (guard.slot(), guard.era());
            match dispatch::dispatch(lane, client, request, slot, era).await {
                Ok(answer) => {
                    let elsewhere = request.answerer == Answer::Holder && request.answer.status == 404;
                    if elsewhere && self.another(request, slot) {
                        continue;
                    }
                    break (guard, answer);
                }
                Err(fault) => {
                    settle::judge(lane, slot, Err(fault.what));
                    if fault.row().retry && self.another(request, slot) {
                        lane.count(Tally::Retries, 1);
                        continue;
                    }
                    drop(guard);
                    return self.refuse(client, request, fault).await;
                }
            }
        };
        let (slot, era) = (guard.slot(), guard.era());
        let outcome = match relay::relay(lane, client, request, answer).await {
            Ok(outcome) => outcome,
            Err(fault) => {
                settle::judge(lane, slot, Err(fault.what));
                drop(guard);
                return self.refuse(client, request, fault).await;
            }
        };
        let then = settle::settle(lane, request, slot, era, outcome);
        drop(guard);
        then
    }

    /// Chooses and charges a worker; a plain function from request and view to guard.
    fn route(&self, request: &Request) -> Result<LoadGuard, Fault> {
        let lane = &*self.lane;
        if lane.shared.drain.phase() > crate::shared::drain::Phase::Draining {
            return Err(What::ShuttingDown.into());
        }
        let mut scratch = lane.buffers.take();
        let model = match request.answerer {
            Answer::Worker => request.ask.model(request.body(), &mut scratch),
            _ => None,
        };
        let (kind, symbols) = request.inspector.key();
        let value = |span: Option<Span>| span.map(|span| span.of(&request.input));
        let want = route::Want {
            model,
            anyone: request.answerer != Answer::Worker || request.extra.is_some(),
            role: Role::Regular,
            policy: lane.config.policy,
            routing: &lane.config.routing,
            avoid: &request.avoid,
            symbols,
            kind,
            routing_key: value(request.head.first(FieldKind::RoutingKey)).unwrap_or_default(),
            target: value(self.target(request)),
            length: request.body().len(),
        };
        let mut view = lane.view.borrow_mut();
        let chosen = route::choose(&mut view, &want, lane.wire.now_us(), &mut lane.rng.borrow_mut(), lane.tallies());
        lane.buffers.give(scratch);
        chosen
    }

    /// Where the request names its worker, if it may.
    fn target(&self, request: &Request) -> Option<Span> {
        let secret = self.lane.config.target_worker_secret.as_ref()?;
        let named = request.head.first(FieldKind::TargetWorker)?;
        let given = request.head.named(&request.input, TARGET_SECRET)?;
        secret.is(given.of(&request.input)).then_some(named)
    }

    /// Notes a worker as tried; whether there is reason to go on.
    fn another(&self, request: &mut Request, slot: Slot) -> bool {
        let again = request.avoid.contains(&slot);
        request.avoid.push(slot);
        if request.answerer == Answer::Holder {
            // Who has said that it does not know the id is not asked again.
            let shared = self.lane.shared;
            let asked = |slot| request.avoid.contains(&slot) || !shared.vitals.usable(slot);
            let left = shared.roster.snapshot().workers.iter().any(|w| !asked(w.slot));
            return left && request.attempts < crate::limits::MAX_HOLDER_TRIES;
        }
        !again && request.attempts < self.lane.config.max_attempts
    }

    /// Answers a fault, where an answer is possible.
    async fn refuse(&self, client: &Client<W::Conn>, request: &mut Request, fault: Fault) -> Then {
        let lane = &*self.lane;
        lane.tallies().fault(fault.what);
        let row = fault.row();
        if row.status == 0 {
            settle::count(lane, request, 0);
            lane.count(Tally::ClientsLeft, 1);
            return Then::Cut;
        }
        let mut out = lane.buffers.take();
        request.keep_alive &= request.complete && !lane.is_draining();
        let allow = match fault.what {
            What::MethodNotAllowed => request.allow(&lane.config.extra_routes),
            _ => Vec::new(),
        };
        let extra = Extra {
            request_id: Some(&request.id).filter(|id| !id.is_empty()).map(Vec::as_slice),
            keep_alive: request.keep_alive,
            allow: &allow,
            head_only: request.is_head(),
            version: request.head.version,
        };
        http1::error(&mut out, &fault, &extra);
        self.say(client, request, out, row.status).await
    }

    /// Sends an answer of the gateway's own.
    async fn say(&self, client: &Client<W::Conn>, request: &mut Request, out: Vec<u8>, status: u16) -> Then {
        let lane = &*self.lane;
        client.send(lane, Outgoing::Heap(out));
        let sent = if request.keep_alive { Ok(()) } else { client.flush(lane).await };
        settle::count(lane, request, status);
        match sent {
            Err(_) => Then::Cut,
            Ok(()) if request.keep_alive => Then::Keep,
            Ok(()) => Then::Close,
        }
    }
}
