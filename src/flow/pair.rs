//! A request that two workers serve: how its legs keep step.
//!
//! Takes a request whose model is served by pairs, gives it the walk of `flow.rs` with two legs. A leg's guard is born
//! with the choice and dies when that leg has ended: the prefill's with the last byte of its own answer, the decode's
//! with the last byte of the client's. Never lets one leg wait for another that has failed, never blames a worker for
//! its partner, and gives the client nothing before it is sure that the prefill was accepted or that tokens come.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};

use super::dispatch::patch::{self, Bootstrap};
use super::passage::{Answer, Client, Kept, Leg, Outcome, Parcel, Request, Reuse, Then, time_over};
use super::relay::logprobs::Prefilled;
use super::{Flow, dispatch, relay, route, settle};
use crate::config::{Backend, ClientLeaves, Config, Role};
use crate::fault::{Fault, Side, What};
use crate::http1::{AnswerBody, Method, ResponseHead};
use crate::lane::Lane;
use crate::lane::timers::Timer;
use crate::lane::wire::{Conn, Wire};
use crate::metrics::Tally;
use crate::shared::load::LoadGuard;
use crate::shared::roster::{Pairing, Slot};

/// Both workers, chosen and charged.
struct Pair {
    prefill: LoadGuard,
    decode: LoadGuard,
    backend: Backend,
}

/// What came of both legs.
enum End<C: Conn> {
    /// The decode worker's answer went to the client, or as much of it as was possible.
    Passed(Outcome<C>, LoadGuard),
    /// A worker answered with an error, which is the client's.
    Refused(Side, Answer<C>, LoadGuard),
    /// A leg failed before the client was given a byte.
    Failed(Side, Slot, Fault),
    /// The prefill failed when the client had been given a head and nothing else.
    Cut(What),
    /// Nobody is there to be answered.
    Left(What),
}

/// What came of a prefill leg.
enum Prefill<C: Conn> {
    /// Its answer is complete; its body, if that was wanted.
    Done(Kept),
    /// It answered with an error.
    Refused(Answer<C>, LoadGuard),
    /// It failed. The worker has been blamed where it is to blame.
    Failed(Fault),
}

/// A prefill leg under way; it can outlive its request.
type PrefillLeg<C> = Pin<Box<dyn Future<Output = Prefill<C>>>>;

/// Microseconds that a decode worker has to answer a client that has left: long enough to be sent the request, so
/// that it fetches or frees what was prefilled for it.
const ABANDON_US: u64 = 1_000_000;

impl<W: Wire> Flow<W> {
    /// Route, dispatch, relay and settle with two legs, with further attempts while the client has not seen a byte.
    pub(super) async fn proxy_pair(&self, client: &Client<W::Conn>, request: &mut Request) -> Then {
        let lane = &*self.lane;
        loop {
            let pair = match self.route_pair(request) {
                Ok(pair) => pair,
                Err(fault) => return self.refuse(client, request, fault).await,
            };
            // SGLang's workers take what is the client's own; vLLM's prefill gets a body that is cut.
            if let Err(fault) = self.hold_copies(request, &[pair.backend != Backend::Sglang, false]) {
                return self.refuse(client, request, fault).await;
            }
            let head = std::mem::take(&mut request.spare_head);
            let attempt = request.attempts.get() + 1;
            let end = match pair.backend {
                Backend::VllmNixl => self.in_turn(client, request, pair, head).await,
                Backend::Sglang | Backend::VllmMooncake => self.side_by_side(client, request, pair, head).await,
            };
            // A pair is one attempt, however many of its legs went out.
            request.attempts.set(attempt);
            let pause = match end {
                End::Passed(outcome, guard) => {
                    let then = settle::settle(lane, request, guard.slot(), guard.era(), outcome);
                    drop(guard);
                    return then;
                }
                End::Refused(side, answer, guard) => {
                    let Some(pause) = self.after_answer(request, guard.slot(), &answer) else {
                        return self.pass(client, request, guard, answer, None, Some(side)).await;
                    };
                    settle::leg(lane, (guard.slot(), guard.era()), None, Ok(answer.head.status));
                    drop((answer, guard));
                    pause
                }
                End::Failed(_, _, fault) if fault.what == What::StaleConnection && self.may_restart(request) => {
                    request.fresh = true;
                    lane.count(Tally::Replays, 1);
                    0
                }
                End::Failed(side, slot, fault) => match self.after_fault(request, slot, &fault, side == Side::Decode) {
                    Some(pause) => pause,
                    None => return self.refuse(client, request, fault.of(side)).await,
                },
                End::Cut(what) => {
                    lane.tallies().fault(what);
                    lane.count(Tally::Cuts, 1);
                    settle::count(lane, request, 0, Some(what));
                    return client.broken(what);
                }
                End::Left(what) => return self.refuse(client, request, what.into()).await,
            };
            if let Err(what) = self.pause(client, request, pause).await {
                return self.refuse(client, request, what.into()).await;
            }
        }
    }

    fn may_restart(&self, request: &Request) -> bool {
        !request.fresh && request.attempts.get() < request.config.max_attempts
    }

    /// Chooses and charges both workers.
    fn route_pair(&self, request: &Request) -> Result<Pair, Fault> {
        let lane = &*self.lane;
        self.may_route()?;
        // Asked anew each time: the roster may have moved since the last attempt.
        let pool = self.pairs(request).ok_or(What::NoWorker)?;
        let mut scratch = lane.buffers.take();
        let model = request.ask.model(request.body(), &mut scratch);
        let prefill = self.want(request, model, Role::Prefill, request.config.policy_of(Role::Prefill));
        let decode =
            route::Want { role: Role::Decode, policy: request.config.policy_of(Role::Decode), target: None, ..prefill };
        let mut view = lane.view.borrow_mut();
        let now = lane.wire.now_us();
        let chosen =
            route::choose_pair(&mut view, pool, &prefill, &decode, now, &mut lane.rng.borrow_mut(), lane.tallies());
        request.choice.set(view.choice);
        lane.buffers.give(scratch);
        let (prefill, decode) = chosen?;
        request.routed_us.set(now);
        request.workers.set([&prefill, &decode].map(|guard| Some((guard.slot(), guard.era()))));
        let worker = view.worker(prefill.slot(), prefill.era());
        let backend = worker.map_or(Backend::default(), |worker| worker.pairing.backend);
        if backend == Backend::Sglang && request.ask.n > 1 {
            return Err(What::PairSamples.into());
        }
        Ok(Pair { prefill, decode, backend })
    }

    /// What the two workers are told beyond the client's body: members for prefill and for decode.
    fn words(&self, request: &Request, pair: &Pair) -> Result<[Vec<u8>; 2], (Side, Fault)> {
        let lane = &*self.lane;
        let view = lane.view.borrow();
        let of = |guard: &LoadGuard, side| {
            let worker = view.worker(guard.slot(), guard.era());
            worker.map(|worker| &worker.pairing).ok_or((side, Fault::from(What::ConnectFailed)))
        };
        let prefill: &Pairing = of(&pair.prefill, Side::Prefill)?;
        let decode: &Pairing = of(&pair.decode, Side::Decode)?;
        let (mut first, mut second) = (lane.buffers.take(), lane.buffers.take());
        let (marks, responses) = (request.inspector.marks(), request.is("/v1/responses"));
        match pair.backend {
            Backend::Sglang => {
                let bootstrap = Bootstrap {
                    host: &prefill.bootstrap_host,
                    port: prefill.bootstrap_port,
                    rooms: &self.rooms,
                    draw: self.rooms.draw(request.ask.batch).map_err(|fault| (Side::Prefill, fault))?,
                    prefill: prefill.dp,
                    decode: decode.dp,
                };
                bootstrap.write_prefill(&mut first);
                bootstrap.write_decode(&mut second);
            }
            Backend::VllmMooncake => {
                let Some(engine) = prefill.engine_id.as_deref() else {
                    return Err((Side::Prefill, What::ConnectFailed.into()));
                };
                let at = format!("http://{}:{}", prefill.bootstrap_host, prefill.mooncake_port());
                // Clients may send one id twice, and a retry does: a transfer must be the only one of its name.
                let draw = self.rooms.draw(0).map_err(|fault| (Side::Prefill, fault))?;
                let id = [&request.id, format!("-{:x}", self.rooms.room(draw, 0, None)).as_bytes()].concat();
                patch::mooncake_prefill(&mut first, marks, responses, &id);
                patch::mooncake_decode(&mut second, &id, engine, &at);
            }
            Backend::VllmNixl => patch::nixl_prefill(&mut first, marks, responses),
        }
        Ok([first, second])
    }

    /// A pair's request with its prefill leg begun.
    ///
    /// # Errors
    /// Whose fault ended it before anything was sent, and that worker.
    fn begin<'a>(
        &'a self,
        client: &'a Client<W::Conn>,
        request: &'a Request,
        pair: Pair,
    ) -> Result<Walk<'a, W>, (Side, Slot, Fault)> {
        let slots = [pair.prefill.slot(), pair.decode.slot()];
        let failed = |(side, fault)| (side, slots[side as usize], fault);
        let [first_add, add] = self.words(request, &pair).map_err(failed)?;
        let Pair { prefill, decode, backend } = pair;
        let merges = backend == Backend::Sglang && request.ask.logprobs && request.is("/generate");
        let lane = self.lane.clone();
        let bare = backend != Backend::Sglang;
        // SGLang is told the ranks in the body, vLLM by the header.
        let patch = dispatch::Patch { bare, add: &first_add, names_rank: backend == Backend::Sglang };
        let to = (prefill.slot(), prefill.era());
        let parcel = dispatch::parcel(&lane, client, request, to, Some(&patch));
        let parcel = parcel.map_err(|fault| failed((Side::Prefill, fault)))?.kept();
        lane.buffers.give(first_add);
        let accepted = Rc::new(Cell::new(false));
        let errand = Errand {
            timer: lane.timers.timer(),
            lane,
            config: request.config.clone(),
            guard: prefill,
            parcel,
            method: request.head.method,
            deadline_us: request.deadline_us(),
            attempts: Cell::new(request.attempts.get()),
            reuse: reuse(request),
            keep: merges || backend == Backend::VllmNixl,
            accepted: accepted.clone(),
        };
        let first = Running { leg: Some(Box::pin(errand.run())), body: Kept::default() };
        let leaving = Leaving::new(&request.config, backend);
        Ok(Walk { flow: self, client, request, prefill_slot: slots[0], decode, add, first, accepted, merges, leaving })
    }

    /// Both legs at once: SGLang's pairs, which meet in a room, and Mooncake's.
    async fn side_by_side(
        &self,
        client: &Client<W::Conn>,
        request: &Request,
        pair: Pair,
        head: ResponseHead,
    ) -> End<W::Conn> {
        let names_rank = pair.backend == Backend::Sglang;
        let mut walk = match self.begin(client, request, pair) {
            Ok(walk) => walk,
            Err((side, slot, fault)) => return End::Failed(side, slot, fault),
        };
        let add = std::mem::take(&mut walk.add);
        let answered = {
            let mut second = pin!(walk.flow.decode(
                client,
                request,
                (walk.decode.slot(), walk.decode.era()),
                (&add, names_rank),
                head
            ));
            poll_fn(|cx| match walk.poll(cx) {
                Poll::Ready(end) => Poll::Ready(Err(end)),
                Poll::Pending => second.as_mut().poll(cx).map(Ok),
            })
            .await
        };
        self.lane.buffers.give(add);
        let answer = match answered {
            Ok(answered) => answered,
            Err(end) => return end,
        };
        match answer {
            Ok(answer) if answer.head.status < 300 => walk.pass(answer).await,
            Ok(answer) => End::Refused(Side::Decode, answer, walk.decode),
            Err(fault) => walk.failed(fault),
        }
    }

    /// Sends the decode leg and waits for the head of its answer. `names_rank`: see [`dispatch::Patch`].
    async fn decode(
        &self,
        client: &Client<W::Conn>,
        request: &Request,
        to: (Slot, u32),
        (add, names_rank): (&[u8], bool),
        head: ResponseHead,
    ) -> Result<Answer<W::Conn>, Fault> {
        let patch = dispatch::Patch { bare: false, add, names_rank };
        let parcel = || dispatch::parcel(&self.lane, client, request, to, Some(&patch));
        let leg = self.leg(request, to, &client.timer, request.config.decode_first_byte_timeout);
        // The client is watched by the pair: one that leaves may have to wait for the prefill.
        dispatch::dispatch(&self.lane, None, Leg { reuse: reuse(request), ..leg }, head, &mut None, parcel).await
    }

    /// One leg after the other: vLLM with NIXL, where the prefill's answer says where its cache lies.
    async fn in_turn(
        &self,
        client: &Client<W::Conn>,
        request: &Request,
        pair: Pair,
        head: ResponseHead,
    ) -> End<W::Conn> {
        let lane = &*self.lane;
        let mut walk = match self.begin(client, request, pair) {
            Ok(walk) => walk,
            Err((side, slot, fault)) => return End::Failed(side, slot, fault),
        };
        let ended = poll_fn(|cx| match walk.first.poll(cx) {
            Poll::Ready(end) => Poll::Ready(Some(end.into_end(walk.prefill_slot))),
            Poll::Pending if walk.first.is_over() => Poll::Ready(None),
            Poll::Pending => walk.leaving.poll(client, false, cx).map(|()| Some(End::Left(What::ClientGone))),
        })
        .await;
        if let Some(end) = ended {
            return end;
        }
        let mut add = std::mem::take(&mut walk.add);
        patch::nixl_decode(&mut add, patch::transfer_params(&walk.first.body.bytes));
        // What was prefilled lies in the engine until somebody fetches it: the decode worker learns of the request
        // even when the client has left, and then of that.
        let abandon = lane.timers.timer();
        let mut since = None;
        let answered = {
            let mut second =
                pin!(self.decode(client, request, (walk.decode.slot(), walk.decode.era()), (&add, false), head));
            poll_fn(|cx| {
                if let Poll::Ready(answered) = second.as_mut().poll(cx) {
                    return Poll::Ready(Some(answered));
                }
                if walk.leaving.has_left(client, cx) && since.is_none() {
                    if !walk.leaving.may_finish {
                        return Poll::Ready(None);
                    }
                    since = Some(lane.wire.now_us());
                    abandon.set(lane.wire.now_us() + ABANDON_US);
                }
                abandon.poll_due(cx).map(|()| None)
            })
            .await
        };
        lane.buffers.give(add);
        match answered {
            None => End::Left(What::ClientGone),
            Some(Err(fault)) => walk.failed(fault),
            Some(Ok(answer)) if answer.head.status >= 300 => End::Refused(Side::Decode, answer, walk.decode),
            Some(Ok(answer)) => match relay::relay(lane, client, request, answer, None).await {
                Ok(outcome) => End::Passed(outcome, walk.decode),
                Err(fault) => walk.failed(fault),
            },
        }
    }
}

/// A request between its two legs.
struct Walk<'a, W: Wire> {
    flow: &'a Flow<W>,
    client: &'a Client<W::Conn>,
    request: &'a Request,
    prefill_slot: Slot,
    decode: LoadGuard,
    /// Members that the decode worker is told beyond the client's.
    add: Vec<u8>,
    first: Running<W::Conn>,
    /// The prefill worker has answered that all is well.
    accepted: Rc<Cell<bool>>,
    /// The prefill's log probabilities are put into the decode's answer.
    merges: bool,
    leaving: Leaving,
}

impl<W: Wire> Walk<'_, W> {
    /// The decode leg failed: its worker is blamed while its guard holds the slot, where it is to blame.
    fn failed(&self, fault: Fault) -> End<W::Conn> {
        settle::judge(&self.flow.lane, self.decode.slot(), Err(fault.what));
        End::Failed(Side::Decode, self.decode.slot(), fault)
    }

    /// Moves the prefill leg on and looks whether the client is there. Ready when that ends the request.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<End<W::Conn>> {
        if let Poll::Ready(end) = self.first.poll(cx) {
            return Poll::Ready(end.into_end(self.prefill_slot));
        }
        let over = self.first.is_over();
        self.leaving.poll(self.client, over, cx).map(|()| End::Left(What::ClientGone))
    }

    /// Passes the decode worker's answer on, with the prefill leg beside it.
    async fn pass(mut self, mut answer: Answer<W::Conn>) -> End<W::Conn> {
        if let Some(end) = self.hold(&mut answer).await {
            return end;
        }
        let (lane, client, request) = (&*self.flow.lane, self.client, self.request);
        let merges = self.merges && answer.head.body != AnswerBody::None;
        let prefilled = if merges { Prefilled::read(&self.first.body.bytes, request.ask.stream) } else { None };
        let mut passing = pin!(async {
            match prefilled {
                Some(prefilled) => relay::merged(lane, client, request, answer, prefilled).await,
                None => relay::relay(lane, client, request, answer, None).await,
            }
        });
        let passed = poll_fn(|cx| {
            if let Poll::Ready(end) = self.first.poll(cx) {
                let what = end.too_late(lane);
                // Tokens that come show that the decode worker has what it needs.
                if !request.body_begun.get() {
                    return Poll::Ready(Err(what));
                }
                lane.tallies().fault(what);
            }
            passing.as_mut().poll(cx).map(Ok)
        })
        .await;
        match passed {
            Ok(Ok(outcome)) => {
                if let Some(leg) = self.first.leg
                    && (outcome.fault.is_none() || self.leaving.may_finish)
                {
                    // The client need not wait for what only the prefill's worker has still to say.
                    let (permit, lane) = (request.permit.take(), self.flow.lane.clone());
                    (self.flow.start)(Box::pin(async move {
                        if let end @ Prefill::Refused(..) = leg.await {
                            end.too_late(&lane);
                        }
                        drop(permit);
                    }));
                }
                End::Passed(outcome, self.decode)
            }
            Ok(Err(fault)) => self.failed(fault),
            Err(what) => End::Cut(what),
        }
    }

    /// The decode worker may say 200 before the prefill fails: its head waits until the prefill has been accepted, or
    /// until tokens come, which they do not without a prefill. Gives an end where there is one.
    async fn hold(&mut self, answer: &mut Answer<W::Conn>) -> Option<End<W::Conn>> {
        let (lane, client) = (&*self.flow.lane, self.client);
        client.timer.set(self.request.deadline_us());
        poll_fn(|cx| {
            if let Poll::Ready(end) = self.poll(cx) {
                return Poll::Ready(Some(end));
            }
            if lane.is_ending() {
                return Poll::Ready(Some(End::Left(What::ShuttingDown)));
            }
            if self.first.is_over() || !self.merges && (self.accepted.get() || answer.has_body()) {
                return Poll::Ready(None);
            }
            if !self.merges
                && let Poll::Ready(got) = answer.conn.poll_recv(cx)
            {
                return Poll::Ready(match got {
                    Ok(chunk) if !chunk.is_empty() => {
                        answer.append(chunk);
                        None
                    }
                    _ => Some(self.failed(What::WorkerReset.into())),
                });
            }
            client.timer.poll_due(cx).map(|()| {
                let had_us = lane.wire.now_us() - self.request.routed_us.get();
                Some(self.failed(time_over(&self.request.config, had_us).into()))
            })
        })
        .await
    }
}

/// A dead connection is no reason to send a room's number twice.
fn reuse(request: &Request) -> Reuse {
    if request.fresh { Reuse::Never } else { Reuse::Fail }
}

impl<C: Conn> Prefill<C> {
    /// The end of the request that it means.
    fn into_end(self, slot: Slot) -> End<C> {
        match self {
            Prefill::Refused(answer, guard) => End::Refused(Side::Prefill, answer, guard),
            Prefill::Failed(fault) if fault.what == What::ShuttingDown => End::Left(fault.what),
            Prefill::Failed(fault) => End::Failed(Side::Prefill, slot, fault),
            Prefill::Done(_) => unreachable!("Running keeps what is done"),
        }
    }

    /// Settles an end that comes too late to be the client's; gives what went wrong, for counting.
    fn too_late<W: Wire<Conn = C>>(self, lane: &Lane<W>) -> What {
        match self {
            Prefill::Refused(answer, guard) => {
                settle::leg(lane, (guard.slot(), guard.era()), None, Ok(answer.head.status));
                What::BadAnswer
            }
            Prefill::Failed(fault) => fault.what,
            Prefill::Done(_) => unreachable!("Running keeps what is done"),
        }
    }
}

/// A prefill leg beside the other one.
struct Running<C: Conn> {
    /// `None` once it has ended.
    leg: Option<PrefillLeg<C>>,
    /// The body of its answer, where that was wanted.
    body: Kept,
}

impl<C: Conn> Running<C> {
    fn is_over(&self) -> bool {
        self.leg.is_none()
    }

    /// Moves the leg on. Ready once, when it ended otherwise than well.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Prefill<C>> {
        let Some(leg) = &mut self.leg else { return Poll::Pending };
        let Poll::Ready(end) = leg.as_mut().poll(cx) else { return Poll::Pending };
        self.leg = None;
        match end {
            Prefill::Done(body) => {
                self.body = body;
                Poll::Pending
            }
            end => Poll::Ready(end),
        }
    }
}

/// What a client's leaving means for a pair.
struct Leaving {
    /// The prefill may finish first.
    may_finish: bool,
    left: bool,
}

impl Leaving {
    fn new(config: &Config, backend: Backend) -> Self {
        let may_finish = config.client_leaves(backend) == ClientLeaves::FinishPrefill;
        Leaving { may_finish, left: false }
    }

    fn has_left<C: Conn>(&mut self, client: &Client<C>, cx: &mut Context<'_>) -> bool {
        self.left = self.left || client.has_left(cx);
        self.left
    }

    /// Ready when the client has left and nothing is waited for any more.
    fn poll<C: Conn>(&mut self, client: &Client<C>, prefilled: bool, cx: &mut Context<'_>) -> Poll<()> {
        match self.has_left(client, cx) && (prefilled || !self.may_finish) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }
}

/// A prefill leg: all that it needs, so that it can outlive its request.
struct Errand<W: Wire> {
    lane: Rc<Lane<W>>,
    config: Rc<Config>,
    guard: LoadGuard,
    timer: Timer,
    parcel: Parcel,
    method: Method,
    deadline_us: u64,
    attempts: Cell<u32>,
    reuse: Reuse,
    /// Whether the answer's body is wanted.
    keep: bool,
    /// Set when the worker has answered that all is well.
    accepted: Rc<Cell<bool>>,
}

impl<W: Wire> Errand<W> {
    async fn run(self) -> Prefill<W::Conn> {
        let lane = &*self.lane;
        let (slot, era) = (self.guard.slot(), self.guard.era());
        let leg = Leg {
            config: &self.config,
            slot,
            era,
            method: self.method,
            deadline_us: self.deadline_us,
            first_byte_us: self.config.prefill_first_byte_timeout.as_micros() as u64,
            timer: &self.timer,
            attempts: &self.attempts,
            reuse: self.reuse,
            unread: None,
        };
        let begun_us = lane.wire.now_us();
        let fail = |fault: Fault| {
            settle::judge(lane, slot, Err(fault.what));
            Prefill::Failed(fault)
        };
        let answer =
            match dispatch::dispatch(lane, None, leg, ResponseHead::new(), &mut None, || Ok(self.parcel.again())).await
            {
                Ok(answer) => answer,
                Err(fault) => return fail(fault),
            };
        let status = answer.head.status;
        if status >= 300 {
            return Prefill::Refused(answer, self.guard);
        }
        self.accepted.set(true);
        // It can be as large as the client's body, whose memory is free when the request ends.
        drop(self.parcel);
        let mut body = Kept::default();
        let keep = self.keep.then_some(&mut body);
        let until = relay::Until { config: &self.config, deadline_us: self.deadline_us, since_us: begun_us };
        match relay::drain(lane, None, answer, &self.timer, until, keep).await {
            Ok((conn, _)) => settle::leg(lane, (slot, era), conn, Ok(status)),
            Err(fault) => {
                lane.tallies().worker_response(slot, 0);
                return fail(fault);
            }
        }
        Prefill::Done(body)
    }
}
