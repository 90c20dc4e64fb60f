//! The walk of one request. The only file that knows the order of the rooms; whoever reads it has read the proxy.
//!
//! ```text
//! client ─▶ accept ─▶ receive ─▶ inspect ─▶ admit ─▶ route ─▶ dispatch ─▶ relay ─▶ settle ─▶ next request, or close
//!                                                       ▲          │
//!                                                       └──────────┘  another attempt: bounded, only before the first byte
//! ```
//!
//! A request that two workers serve, prefill and decode, walks the same rooms; how its two legs keep step stands in
//! `flow/pair.rs`.
//!
//! Takes a client's connection, gives it answers until one side has had enough. Never holds a buffer for a
//! connection that is idle, never lets a load guard outlive its leg, never ends a cut answer cleanly.

pub mod accept;
pub mod admit;
pub mod dispatch;
pub mod inspect;
pub mod local;
mod pair;
pub mod passage;
pub mod receive;
pub mod relay;
mod retry;
pub mod route;
pub mod settle;

use std::cell::RefCell;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use crate::config::routes::{Answer, ROUTES};
use crate::config::{Config, Policy, Role};
use crate::fault::{Fault, Side, What};
use crate::http1::{self, Extra, FieldKind};
use crate::lane::Lane;
use crate::lane::timers::Timer;
use crate::lane::view::{PoolId, View};
use crate::lane::wire::{Chunk, Conn, Outgoing, Wire};
use crate::metrics::Tally;
use crate::shared::load::LoadGuard;
use crate::shared::roster::{Slot, Worker};
use crate::span::Span;

use dispatch::patch::Rooms;
use passage::{Client, Follow, Leg, Request, Reuse, Then};
use receive::Waited;
use retry::Budget;

/// A lane with the requests that go round in it.
pub struct Flow<W: Wire> {
    pub lane: Rc<Lane<W>>,
    /// Requests at rest: what a walk needs in memory, reused.
    #[allow(clippy::vec_box, reason = "a walk holds the box: its future stays small and the request does not move")]
    spare: RefCell<Vec<Box<Request>>>,
    /// Starts a task of its own on the lane.
    start: Box<dyn Fn(Task)>,
    /// Numbers of the rooms in which SGLang's pairs meet.
    rooms: Rooms,
    budget: Budget,
}

/// What goes on when its request has ended.
pub type Task = Pin<Box<dyn Future<Output = ()>>>;

/// Header of the secret that lets a request name its worker.
const TARGET_SECRET: &str = "x-corelane-target-secret";

/// A request that goes its walk. One that a panic ends is counted and logged as others are.
struct Going<'a, W: Wire> {
    lane: &'a Lane<W>,
    request: &'a mut Request,
}

impl<W: Wire> Drop for Going<'_, W> {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.request.counted.get() {
            let count = || {
                self.lane.tallies().fault(What::Panic);
                settle::count(self.lane, self.request, 0, Some(What::Panic));
            };
            // It may be as broken as what panicked over it, and a second panic would end the process.
            let _ = catch_unwind(AssertUnwindSafe(count));
        }
    }
}

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

/// How long a connection keeps what a walk needs in memory, for its next request; then it is at rest.
const REST_AFTER: Duration = Duration::from_secs(1);

/// Requests kept at rest per lane.
const SPARE: usize = 256;

impl<W: Wire> Flow<W> {
    /// A flow over a lane; `start` gives a task of its own to what outlives its request.
    pub fn new(lane: Rc<Lane<W>>, start: impl Fn(Task) + 'static) -> Rc<Self> {
        Rc::new(Flow {
            rooms: Rooms::new(lane.shared.seed, lane.index),
            lane,
            spare: RefCell::default(),
            budget: Budget::new(),
            start: Box::new(start),
        })
    }

    fn request(&self, config: &Rc<Config>) -> Box<Request> {
        let Some(mut request) = self.spare.borrow_mut().pop() else { return Box::new(Request::new(config.clone())) };
        if !Rc::ptr_eq(&request.config, config) {
            request.config.clone_from(config);
        }
        request
    }

    fn client(&self, conn: W::Conn, peer: SocketAddr) -> Client<W::Conn> {
        let (timer, config) = (self.lane.timers.timer(), self.lane.config());
        Client::new(conn, peer, timer, config)
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
        let lane = &*self.lane;
        let mut client = self.client(conn, peer);
        let mut patience = client.config.keep_alive;
        loop {
            let until_us = lane.wire.now_us() + patience.as_micros() as u64;
            let Waited::First(first) = receive::wait(lane, &client, until_us).await else { return };
            // Boxed: a connection at rest has no room for a walk.
            match Box::pin(self.busy(&mut client, first)).await {
                Then::Keep => patience = client.config.keep_alive.saturating_sub(REST_AFTER),
                Then::Close => return receive::linger(lane, &client, client.config.request_timeout).await,
                Then::Cut => return client.conn.set_abortive(true),
                Then::Gone => return,
            }
        }
    }

    /// One request after the other, until none has come for a while.
    async fn busy(&self, client: &mut Client<W::Conn>, mut first: Chunk) -> Then {
        let lane = &*self.lane;
        loop {
            lane.renew(&mut client.config);
            let mut request = self.request(&client.config);
            let going = Going { lane, request: &mut request };
            let then = self.walk(client, going.request, first).await;
            drop(going);
            self.rest(request);
            if then != Then::Keep {
                return then;
            }
            let rest_us = client.config.keep_alive.min(REST_AFTER).as_micros() as u64;
            let waited = receive::wait(lane, client, lane.wire.now_us() + rest_us).await;
            // The last answer may still be on its way into the kernel.
            match (waited, client.flush(lane).await) {
                (Waited::First(next), Ok(())) => first = next,
                (Waited::Late, Ok(())) => return Then::Keep,
                (_, Err(What::ClientStalled)) => return Then::Cut,
                (_, Err(_)) | (Waited::Over, _) => return Then::Gone,
            }
        }
    }

    /// Tells a client that there is no room for its connection, whatever it is going to ask.
    pub async fn turn_away(self: Rc<Self>, conn: W::Conn, peer: SocketAddr) {
        let lane = &*self.lane;
        let client = self.client(conn, peer);
        lane.tallies().fault(What::TooManyConnections);
        let mut out = lane.buffers.take();
        http1::error(&mut out, &What::TooManyConnections.into(), &Extra::default());
        client.send(lane, Outgoing::Heap(out));
        if client.flush(lane).await.is_ok() {
            // Few can be told at a time.
            receive::linger(lane, &client, Duration::ZERO).await;
        }
    }

    /// One request, from its first byte to the last of its answer.
    async fn walk(&self, client: &Client<W::Conn>, request: &mut Request, first: Chunk) -> Then {
        let lane = &*self.lane;
        request.started_us = lane.wire.now_us();
        request.peer = client.peer;
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
        request.body_us = lane.wire.now_us();
        if request.answerer == Answer::Worker {
            self.label(request);
        }
        match request.answerer {
            Answer::Worker | Answer::AnyWorker | Answer::Holder => {
                if let Err(fault) = admit::admit(lane, client, request).await {
                    return self.refuse(client, request, fault).await;
                }
                self.proxy(client, request).await
            }
            by => {
                let mut out = lane.buffers.take();
                match local::answer(lane, request, by, &mut out) {
                    Ok(status) => self.say(client, request, out, status, None).await,
                    Err(fault) => {
                        lane.buffers.give(out);
                        self.refuse(client, request, fault).await
                    }
                }
            }
        }
    }

    /// Notes where the request's model is counted.
    fn label(&self, request: &mut Request) {
        let mut scratch = self.lane.buffers.take();
        request.label = self.lane.view.borrow().label(request.ask.model(request.body(), &mut scratch));
        self.lane.buffers.give(scratch);
    }

    /// Route, dispatch, relay and settle, with further attempts while the client has not seen a byte.
    async fn proxy(&self, client: &Client<W::Conn>, request: &mut Request) -> Then {
        let lane = &*self.lane;
        request.avoid.clear();
        self.budget.earn(request.config.retry.budget);
        if self.pairs(request).is_some() {
            // Boxed: few requests need the room that two legs take, and every walk would have it.
            return Box::pin(self.proxy_pair(client, request)).await;
        }
        if let Err(fault) = self.hold_copies(request, &[false]) {
            return self.refuse(client, request, fault).await;
        }
        let (guard, answer, upload) = loop {
            let guard = match self.route(request) {
                Ok(guard) => guard,
                Err(fault) => return self.refuse(client, request, fault).await,
            };
            let to = (guard.slot(), guard.era());
            let head = std::mem::take(&mut request.spare_head);
            let leg = self.leg(request, to, &client.timer, request.config.first_byte_timeout);
            let patch = request.ask.private.then_some(&dispatch::PRIVATE);
            let parcel = || dispatch::parcel(lane, client, request, to, patch);
            let mut upload = None;
            let pause = match dispatch::dispatch(lane, Some(client), leg, head, &mut upload, parcel).await {
                Ok(answer) => {
                    let Some(pause) = self.after_answer(request, guard.slot(), &answer) else {
                        // It may end before the rest of the body, and nobody knows then where the next request begins.
                        request.keep_alive.set(request.keep_alive.get() && request.is_whole());
                        break (guard, answer, upload);
                    };
                    settle::leg(lane, to, None, Ok(answer.head.status));
                    drop((guard, answer));
                    pause
                }
                Err(fault) => {
                    settle::judge(lane, guard.slot(), Err(fault.what));
                    let pause = self.after_fault(request, guard.slot(), &fault, false);
                    drop(guard);
                    match pause {
                        Some(pause) => pause,
                        None => return self.refuse(client, request, fault).await,
                    }
                }
            };
            if let Err(what) = self.pause(client, request, pause).await {
                return self.refuse(client, request, what.into()).await;
            }
        };
        self.pass(client, request, guard, answer, upload.map(|upload| upload.follow(lane)), None).await
    }

    /// Relays an answer and settles its request.
    #[allow(
        clippy::manual_async_fn,
        reason = "an async fn keeps what it is given twice, and every walk has room for it"
    )]
    fn pass<'a>(
        &'a self,
        client: &'a Client<W::Conn>,
        request: &'a mut Request,
        guard: LoadGuard,
        answer: passage::Answer<W::Conn>,
        follow: Option<Follow<'a, W::Conn>>,
        side: Option<Side>,
    ) -> impl Future<Output = Then> + 'a {
        async move {
            let lane = &*self.lane;
            match relay::relay(lane, client, request, answer, follow).await {
                Ok(outcome) => {
                    let then = settle::settle(lane, request, guard.slot(), guard.era(), outcome);
                    drop(guard);
                    then
                }
                Err(fault) => {
                    settle::judge(lane, guard.slot(), Err(fault.what));
                    drop(guard);
                    let fault = match side {
                        Some(side) => fault.of(side),
                        None => fault,
                    };
                    self.refuse(client, request, fault).await
                }
            }
        }
    }

    /// Claims memory for the copies that legs get of the body where it has members that they must not carry; for each
    /// leg, whether it is bare.
    ///
    /// # Errors
    /// [`What::OutOfMemory`].
    fn hold_copies(&self, request: &mut Request, legs: &[bool]) -> Result<(), Fault> {
        let copies = legs.iter().filter(|bare| dispatch::is_cut(request, **bare)).count();
        let bytes = request.body().len() * (1 + copies);
        if copies == 0 { Ok(()) } else { passage::hold(&self.lane, &mut request.held, bytes) }
    }

    /// How the request goes to a worker.
    fn leg<'a>(
        &self,
        request: &'a Request,
        (slot, era): (Slot, u32),
        timer: &'a Timer,
        first_byte: Duration,
    ) -> Leg<'a> {
        Leg {
            config: &request.config,
            slot,
            era,
            method: request.head.method,
            deadline_us: request.deadline_us(),
            first_byte_us: first_byte.as_micros() as u64,
            timer,
            attempts: &request.attempts,
            // What follows is sent once, so the connection must be a sound one.
            reuse: if request.unread.left() > 0 { Reuse::Never } else { Reuse::Replay },
            unread: Some(&request.unread),
        }
    }

    /// The pool of prefill workers, where the request's model is served by pairs and its route is one for them.
    fn pairs(&self, request: &Request) -> Option<PoolId> {
        let mut view = self.lane.view.borrow_mut();
        view.refresh();
        if !view.has_pairs() || !ROUTES.get(request.route).is_some_and(|route| route.generates) {
            return None;
        }
        let mut scratch = self.lane.buffers.take();
        let pool = view.pairs(request.ask.model(request.body(), &mut scratch));
        self.lane.buffers.give(scratch);
        pool
    }

    /// Chooses and charges a worker; a plain function from request and view to guard.
    fn route(&self, request: &Request) -> Result<LoadGuard, Fault> {
        let lane = &*self.lane;
        self.may_route()?;
        let mut scratch = lane.buffers.take();
        let model = match request.answerer {
            Answer::Worker => request.ask.model(request.body(), &mut scratch),
            _ => None,
        };
        let mut view = lane.view.borrow_mut();
        let want = self.want(request, model, self.role(&view, request), request.config.policy);
        let now = lane.wire.now_us();
        let chosen = route::choose(&mut view, &want, now, &mut lane.rng.borrow_mut(), lane.tallies());
        request.choice.set(view.choice);
        lane.buffers.give(scratch);
        let guard = chosen?;
        request.routed_us.set(now);
        request.workers.set([Some((guard.slot(), guard.era())), None]);
        Ok(guard)
    }

    /// The role of the workers that a request without a pair goes to. What answers left behind is with who gave them:
    /// of pairs that is the decode worker, which is asked before regular ones.
    fn role(&self, view: &View, request: &Request) -> Role {
        let vitals = &self.lane.shared.vitals;
        let untried = |worker: &Worker| {
            worker.role == Role::Decode && vitals.usable(worker.slot) && !request.avoid.contains(&worker.slot)
        };
        match request.answerer {
            Answer::Holder if view.has_pairs() && view.workers().any(untried) => Role::Decode,
            _ => Role::Regular,
        }
    }

    fn may_route(&self) -> Result<(), Fault> {
        match self.lane.shared.drain.phase() > crate::shared::drain::Phase::Draining {
            true => Err(What::ShuttingDown.into()),
            false => Ok(()),
        }
    }

    /// What a request wants of a worker.
    fn want<'a>(
        &'a self,
        request: &'a Request,
        model: Option<&'a [u8]>,
        role: Role,
        policy: Policy,
    ) -> route::Want<'a> {
        let (kind, symbols) = request.inspector.key();
        let value = |span: Option<Span>| span.map(|span| span.of(&request.input));
        route::Want {
            model,
            anyone: request.answerer != Answer::Worker || request.extra.is_some(),
            role,
            policy,
            routing: &request.config.routing,
            avoid: &request.avoid,
            symbols,
            kind,
            routing_key: value(request.head.first(FieldKind::RoutingKey)).unwrap_or_default(),
            target: value(self.target(request)),
            length: request.body().len().saturating_add(request.unread.left() as usize),
        }
    }

    /// Where the request names its worker, if it may.
    fn target(&self, request: &Request) -> Option<Span> {
        let secret = request.config.target_worker_secret.as_ref()?;
        let named = request.head.first(FieldKind::TargetWorker)?;
        let given = request.head.named(&request.input, TARGET_SECRET)?;
        secret.is(given.of(&request.input)).then_some(named)
    }

    /// Answers a fault, where an answer is possible.
    async fn refuse(&self, client: &Client<W::Conn>, request: &mut Request, fault: Fault) -> Then {
        let lane = &*self.lane;
        lane.tallies().fault(fault.what);
        let row = fault.row();
        if row.status == 0 {
            settle::count(lane, request, 0, Some(fault.what));
            lane.count(Tally::ClientsLeft, 1);
            return client.broken(fault.what);
        }
        let mut out = lane.buffers.take();
        request.keep_alive.set(request.keep_alive.get() && request.is_whole() && !lane.is_draining());
        let allow = match fault.what {
            What::MethodNotAllowed => request.allow(),
            _ => Vec::new(),
        };
        let extra = Extra {
            request_id: Some(&request.id).filter(|id| !id.is_empty()).map(Vec::as_slice),
            keep_alive: request.keep_alive.get(),
            allow: &allow,
            head_only: request.is_head(),
            version: request.head.version,
        };
        http1::error(&mut out, &fault, &extra);
        self.say(client, request, out, row.status, Some(fault.what)).await
    }

    /// Sends an answer of the gateway's own, which a fault may be the reason for.
    async fn say(
        &self,
        client: &Client<W::Conn>,
        request: &mut Request,
        out: Vec<u8>,
        status: u16,
        fault: Option<What>,
    ) -> Then {
        let lane = &*self.lane;
        client.answer(lane, request, Outgoing::Heap(out));
        // No worker works on it any more.
        drop(request.permit.take());
        let sent = if request.keep_alive.get() { Ok(()) } else { client.flush(lane).await };
        settle::count(lane, request, status, fault.or(sent.err()));
        match sent {
            Err(what) => client.broken(what),
            Ok(()) if request.keep_alive.get() => Then::Keep,
            Ok(()) => Then::Close,
        }
    }
}
