//! Further attempts: whether there is one, and when.
//!
//! Takes how an attempt ended, gives a pause or nothing. Only before the client has seen a byte, only as many as the
//! configuration allows, and, where a worker has seen the request, only as large a share of all requests as the
//! budget: an outage is not multiplied.

use std::cell::Cell;
use std::future::poll_fn;
use std::task::Poll;

use super::Flow;
use super::passage::{self, Client, Request};
use crate::config::Role;
use crate::config::routes::Answer;
use crate::fault::{Fault, What};
use crate::lane::wire::Wire;
use crate::limits::{FREE_RETRIES, MAX_HOLDER_TRIES, MAX_RETRY_AFTER_US};
use crate::metrics::Tally;
use crate::shared::roster::{Slot, Worker};

/// What a lane may still spend on further attempts.
pub(super) struct Budget(Cell<f64>);

impl Budget {
    pub(super) fn new() -> Self {
        Budget(Cell::new(FREE_RETRIES))
    }

    /// A request came in, which allows for `share` of a further attempt.
    pub(super) fn earn(&self, share: f64) {
        self.0.set((self.0.get() + share).min(FREE_RETRIES.max(FREE_RETRIES * share)));
    }

    fn spend(&self) -> bool {
        let left = self.0.get() - 1.0;
        if left >= 0.0 {
            self.0.set(left);
        }
        left >= 0.0
    }
}

impl<W: Wire> Flow<W> {
    /// Whether a fault is followed by another attempt: the pause before it in microseconds, if so. The worker is noted
    /// as tried. `begun`: another worker may have worked on the request, as a prefill worker has when its partner cannot
    /// be reached.
    pub(super) fn after_fault(&self, request: &mut Request, slot: Slot, fault: &Fault, begun: bool) -> Option<u64> {
        let refused = fault.row().retry;
        let unanswered = matches!(fault.what, What::WorkerReset | What::WorkerGaveUp | What::FirstByteTimeout);
        if !(refused || unanswered && request.config.retry.unanswered) || request.unread.taken() > 0 {
            return None;
        }
        // What no worker has seen costs none of them anything.
        let unseen = refused && !begun;
        let again = request.avoid.contains(&slot);
        request.avoid.push(slot);
        let pause = if unseen { 0 } else { self.backoff_us(request) };
        let may = request.attempts.get() < request.config.max_attempts && !(refused && again);
        (may && (unseen || self.budget.spend())).then(|| self.granted(pause))
    }

    /// Whether an answer is not passed on but tried elsewhere: the pause before that in microseconds, if so. The worker
    /// is noted as tried.
    pub(super) fn after_answer(
        &self,
        request: &mut Request,
        slot: Slot,
        answer: &passage::Answer<W::Conn>,
    ) -> Option<u64> {
        let status = answer.head.status;
        if request.answerer == Answer::Holder && status == 404 {
            return self.another_holder(request, slot).then_some(0);
        }
        let retry = &request.config.retry;
        let is_last = request.attempts.get() >= request.config.max_attempts;
        let unrepeatable = request.unread.taken() > 0 || answer.says_no_retry();
        if !retry.statuses.contains(&status) || is_last || unrepeatable {
            return None;
        }
        request.avoid.push(slot);
        // Another worker did not ask for a pause.
        let asked = if self.has_peer(request, slot) { None } else { answer.retry_after_secs() };
        let asked_us = asked.unwrap_or(0).saturating_mul(1_000_000);
        if asked_us > MAX_RETRY_AFTER_US || !self.budget.spend() {
            return None;
        }
        Some(self.granted(self.backoff_us(request).max(asked_us)))
    }

    fn granted(&self, pause_us: u64) -> u64 {
        self.lane.count(Tally::Retries, 1);
        pause_us
    }

    /// Who has said that it does not know the id is not asked again.
    fn another_holder(&self, request: &mut Request, slot: Slot) -> bool {
        request.avoid.push(slot);
        self.has_other(request, |worker| worker.role != Role::Prefill) && request.attempts.get() < MAX_HOLDER_TRIES
    }

    /// Whether some worker that does what this one does, in its role and for a model of its, is usable and was not
    /// tried.
    fn has_peer(&self, request: &Request, slot: Slot) -> bool {
        let view = self.lane.view.borrow();
        let Some(asked) = view.workers().find(|worker| worker.slot == slot) else { return false };
        let shares = |worker: &Worker| worker.models.iter().any(|model| asked.models.contains(model));
        self.has_other(request, |worker| {
            worker.role == asked.role && (shares(worker) || asked.models.is_empty() && worker.models.is_empty())
        })
    }

    /// Whether some worker that `may` is usable and was not tried.
    fn has_other(&self, request: &Request, may: impl Fn(&Worker) -> bool) -> bool {
        let vitals = &self.lane.shared.vitals;
        let other =
            |worker: &Worker| vitals.usable(worker.slot) && !request.avoid.contains(&worker.slot) && may(worker);
        self.lane.view.borrow().workers().any(other)
    }

    /// The pause before the next attempt, with jitter.
    fn backoff_us(&self, request: &Request) -> u64 {
        let retry = &request.config.retry;
        let grown = retry.backoff_factor.powi(request.attempts.get().saturating_sub(1).min(64) as i32);
        let pause = (retry.backoff.as_micros() as f64 * grown).min(retry.backoff_max.as_micros() as f64);
        let dice = self.lane.rng.borrow_mut().f64() * 2.0 - 1.0;
        (pause * (1.0 + retry.jitter * dice)) as u64
    }

    /// Waits, unless that loses its point: nothing is tried again for a client that has left.
    ///
    /// # Errors
    /// [`What::ClientGone`], [`What::TimeUsedUp`], [`What::ShuttingDown`].
    pub(super) async fn pause(&self, client: &Client<W::Conn>, request: &Request, pause_us: u64) -> Result<(), What> {
        let lane = &*self.lane;
        let until = lane.wire.now_us() + pause_us;
        let deadline = request.deadline_us();
        client.timer.set(until.min(deadline));
        poll_fn(|cx| {
            if client.has_left(cx) {
                return Poll::Ready(Err(What::ClientGone));
            }
            if lane.is_ending() {
                return Poll::Ready(Err(What::ShuttingDown));
            }
            if pause_us == 0 {
                return Poll::Ready(Ok(()));
            }
            client.timer.poll_due(cx).map(|()| if until < deadline { Ok(()) } else { Err(What::TimeUsedUp) })
        })
        .await
    }
}
