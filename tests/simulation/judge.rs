//! What must hold whatever happens.
//!
//! Takes the facts of a seed, gives the first thing that is wrong with them. Never excuses a broken answer without a
//! name for what broke it.

use std::collections::BTreeMap;

use corelane::config::{Backend, ClientLeaves, HalfClose, Role};
use corelane::limits::FREE_RETRIES;

use crate::client::Route;
use crate::facts::{Answer, Asked, Delivery, Facts, Given, Kind};
use crate::plan::{Fleet, Mood, Plan};
use crate::worker::shown;

/// How late a gateway may be that acts at once: the network's way and the timers' ticks.
const AT_ONCE_US: u64 = 100_000;

/// Why a request that reached the gateway whole may stay without a whole answer.
fn is_excused(asked: &Asked, deliveries: &[&Delivery], given: &[&Given], facts: &Facts, plan: &Plan) -> bool {
    let at_us = asked.end.borrow().as_ref().map_or(0, |end| end.at_us);
    let by = |when: Option<u64>| when.is_some_and(|when| when <= at_us + AT_ONCE_US);
    let idle = asked.begun_us.get().unwrap_or(0) + AT_ONCE_US >= plan.config.keep_alive.as_micros() as u64;
    by(facts.ending_us.get())
        || by(facts.draining_us.get()) && deliveries.is_empty()
        || asked.slow.get()
        || asked.left_us.get().is_some()
        || facts.turned_away.borrow().contains(&asked.client)
        || deliveries.iter().any(|delivery| !delivery.well.get())
        || given.iter().any(|given| !given.complete.get())
        // A prefill that refuses cuts what its partner has begun.
        || given.iter().any(|given| given.role == Role::Prefill && given.status >= 300)
        || matches!(plan.fleet, Fleet::Pairs(_)) && !facts.unconnected_us.borrow().is_empty()
        // The gateway may have closed the idle connection while the request was on its way.
        || deliveries.is_empty() && idle
}

/// Looks at everything.
pub fn judge(facts: &Facts, plan: &Plan) -> Result<(), String> {
    let (all_deliveries, all_given) = (facts.deliveries.borrow(), facts.given.borrow());
    let mut deliveries: BTreeMap<usize, Vec<&Delivery>> = BTreeMap::new();
    all_deliveries.iter().for_each(|delivery| deliveries.entry(delivery.token).or_default().push(delivery));
    let mut given: BTreeMap<usize, Vec<&Given>> = BTreeMap::new();
    all_given.iter().for_each(|one| given.entry(one.token).or_default().push(one));
    let mut spent = 0.0;
    // When the last request of each client ended.
    let mut ended_us = BTreeMap::new();
    for (token, asked) in facts.asked.borrow().iter().enumerate() {
        let none = Vec::new();
        let of = deliveries.get(&token).unwrap_or(&none);
        let none = Vec::new();
        let said = given.get(&token).unwrap_or(&none);
        let named = |what: String| format!("request {token} (client {}, its {}.): {what}", asked.client, asked.nth);
        if asked.begun_us.get().is_none() {
            continue;
        }
        let end = asked.end.borrow();
        let Some(end) = &*end else { return Err(named("it never ended".into())) };
        match &end.kind {
            Kind::Answer(answer) => whole(asked, token, answer, &all_given, plan).map_err(named)?,
            Kind::Cut { answer, partial_head, .. } => {
                if let Some(answer) = answer {
                    begun(token, answer, asked, &all_given, plan).map_err(named)?;
                }
                if asked.ask.malformed.is_none()
                    && asked.sent_us.get().is_some()
                    && !is_excused(asked, of, said, facts, plan)
                    && end.at_us < asked.begun_us.get().unwrap_or(0) + plan.config.request_timeout.as_micros() as u64
                {
                    return Err(named(format!("it was cut for no reason, behind {partial_head} bytes of a head")));
                }
            }
            Kind::Left | Kind::Unserved => {}
        }
        if plan.mood == Mood::Calm && plan.drain.is_none() {
            calm(asked, &end.kind).map_err(named)?;
        }
        in_time(asked, end.at_us, ended_us.insert(asked.client, end.at_us), plan).map_err(named)?;
        spent += attempts(asked, of, said, facts, plan).map_err(named)?;
        left(asked, of, plan).map_err(named)?;
    }
    let asked = facts.asked.borrow().len() as f64;
    if spent > FREE_RETRIES * plan.lanes as f64 + plan.config.retry.budget * asked {
        return Err(format!("{spent} attempts were added to {asked} requests"));
    }
    Ok(())
}

/// An answer that its client takes for whole.
fn whole(
    asked: &Asked,
    token: usize,
    answer: &Answer,
    given: &[std::rc::Rc<Given>],
    plan: &Plan,
) -> Result<(), String> {
    let Some(of) = answer.of else { return own(asked, answer) };
    let Some(given) = given.get(of as usize) else { return Err(format!("its answer {of} is nobody's")) };
    begun(token, answer, asked, std::slice::from_ref(given), plan)?;
    if !given.complete.get() {
        return Err(format!("answer {of} broke off, and ended cleanly for the client: {}", shown(&answer.body)));
    }
    let merged = is_merged(asked, given, plan);
    if !merged && answer.body != *given.body.borrow() {
        let want = given.body.borrow();
        return Err(format!("answer {of} arrived as {}, not {}", shown(&answer.body), shown(&want)));
    }
    if merged {
        let plain = |body: &[u8]| {
            let mut json: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
            let probs = json["meta_info"]["input_token_logprobs"].take();
            (json, probs)
        };
        let (was, is) = (plain(&given.body.borrow()), plain(&answer.body));
        if was.0 != is.0 || !is.1.is_array() {
            return Err(format!("answer {of} was merged to {}", shown(&answer.body)));
        }
    }
    Ok(())
}

/// Whether an answer has got what only the prefill knows.
fn is_merged(asked: &Asked, given: &Given, plan: &Plan) -> bool {
    plan.fleet == Fleet::Pairs(Backend::Sglang)
        && asked.ask.logprobs
        && given.role == Role::Decode
        && given.status == 200
        && given.complete.get()
        // One that ends with its connection can end anywhere; what is no JSON passes as it is.
        && serde_json::from_slice::<serde_json::Value>(&given.body.borrow()).is_ok()
}

/// What has come of an answer, be it whole or not.
fn begun(
    token: usize,
    answer: &Answer,
    asked: &Asked,
    given: &[std::rc::Rc<Given>],
    plan: &Plan,
) -> Result<(), String> {
    let Some(of) = answer.of else { return Ok(()) };
    // Either all of them, or the one.
    let Some(given) = (if given.len() == 1 { given.first() } else { given.get(of as usize) }) else {
        return Err(format!("its answer {of} is nobody's"));
    };
    if given.token != token || given.status != answer.status || !asked.ask.may_be_seen(plan) {
        return Err(format!("it got the answer {of}, which is to request {}", given.token));
    }
    let paired = matches!(plan.fleet, Fleet::Pairs(_)) && asked.ask.route.generates();
    if paired && given.role == Role::Prefill && given.status < 300 {
        return Err("it got the answer of a prefill".into());
    }
    let body = given.body.borrow();
    if !is_merged(asked, given, plan) && !body.starts_with(&answer.body) {
        return Err(format!("answer {of} arrived as {}, not {}", shown(&answer.body), shown(&body)));
    }
    Ok(())
}

/// An answer of the gateway's own.
fn own(asked: &Asked, answer: &Answer) -> Result<(), String> {
    let text = || format!("an answer {} of nobody's: {}", answer.status, shown(&answer.body));
    if asked.ask.is_head && answer.body.is_empty() && answer.fault.is_some() {
        return Ok(());
    }
    let json: serde_json::Value = serde_json::from_slice(&answer.body).map_err(|_| text())?;
    match &answer.fault {
        Some(code) if code == "internal_error" => Err(text()),
        Some(code) if answer.status >= 400 && json["error"]["code"] == code.as_str() => Ok(()),
        None if matches!(asked.ask.route, Route::Models | Route::Health) && answer.status == 200 => Ok(()),
        _ => Err(text()),
    }
}

/// Where nothing goes wrong, nothing may come of it but answers, unless there is no room.
fn calm(asked: &Asked, kind: &Kind) -> Result<(), String> {
    const NO_ROOM: &[&str] =
        &["queue_full", "queue_timeout", "workers_full", "body_too_large", "out_of_buffers", "not_found"];
    let Kind::Answer(answer) = kind else {
        return match kind {
            Kind::Unserved => Ok(()),
            _ => Err(format!("it ended without an answer: {kind:?}")),
        };
    };
    match &answer.fault {
        Some(code) if NO_ROOM.contains(&code.as_str()) => Ok(()),
        Some(code) => Err(format!("it was refused although nothing is wrong: {code}")),
        None if answer.status == 200 || asked.ask.route == Route::Holder && answer.status == 404 => Ok(()),
        None => Err(format!("status {}", answer.status)),
    }
}

/// Who reads what comes has all of it, or knows that it will not come, when the time for a request is over.
fn in_time(asked: &Asked, end_us: u64, before_us: Option<u64>, plan: &Plan) -> Result<(), String> {
    let begun_us = asked.begun_us.get().unwrap_or(0).max(before_us.unwrap_or(0));
    let most_us = plan.config.request_timeout.as_micros() as u64 + AT_ONCE_US;
    if asked.slow.get() || asked.left_us.get().is_some() || end_us <= begun_us + most_us {
        return Ok(());
    }
    Err(format!("it took {} µs, at most {most_us} are allowed", end_us - begun_us))
}

/// How often a request went to workers, and whether it may have. Gives how many of them the budget paid for.
fn attempts(
    asked: &Asked,
    deliveries: &[&Delivery],
    given: &[&Given],
    facts: &Facts,
    plan: &Plan,
) -> Result<f64, String> {
    let retry = &plan.config.retry;
    let holder = asked.ask.route == Route::Holder;
    let paired = matches!(plan.fleet, Fleet::Pairs(_)) && asked.ask.route.generates();
    let most = if holder { 16 } else { plan.config.max_attempts as usize };
    let mut spent = 0.0;
    for role in Role::ALL {
        let legs: Vec<&&Delivery> = deliveries.iter().filter(|d| d.role == role || !paired).collect();
        if legs.len() > most {
            return Err(format!("it was sent {} times, at most {most} are allowed", legs.len()));
        }
        if !paired && role != Role::Regular {
            continue;
        }
        let mut restarted = false;
        for (before, after) in legs.iter().zip(&legs[1.min(legs.len())..]) {
            let status = before.status.get();
            let refused = status.is_some_and(|status| retry.statuses.contains(&status));
            // What a reset took with it did not refuse anything.
            spent += f64::from(u8::from(refused && !paired && !before.silent.get()));
            if !before.whole.get() || !after.whole.get() {
                continue;
            }
            let unsaid = before.silent.get() || status.is_none() || paired && before.empty.get();
            let stale = before.silent.get() && before.nth > 0;
            let unanswered = retry.unanswered && (unsaid || before.late.get());
            let other_holder = holder && status == Some(404);
            // Of a pair the other leg can be the reason.
            let during = |when: &u64| (before.at_us..=after.at_us + AT_ONCE_US).contains(when);
            let partner = paired
                && (facts.unconnected_us.borrow().iter().any(|when| during(&(when + 10_000)) || during(when))
                    || deliveries.iter().any(|d| {
                        d.role != role
                            && (d.status.get().is_some_and(|status| retry.statuses.contains(&status))
                                || d.silent.get() && d.nth > 0
                                || retry.unanswered && (d.silent.get() || d.status.get().is_none() || d.late.get()))
                    })
                    // A prefill's answer is nobody's until it is whole.
                    || retry.unanswered && given.iter().any(|given| !given.complete.get()));
            // Once, a pair starts anew because a kept connection of the other leg was dead: on fresh ones.
            let mut restarts = || paired && before.nth.min(after.nth) == 0 && !std::mem::replace(&mut restarted, true);
            if !(refused || stale || unanswered || other_holder || partner || restarts()) {
                return Err(format!(
                    "it was given to worker {} and then to worker {} for no reason (status {status:?}, silent {}, its {}. \
                     on the connection)",
                    before.worker,
                    after.worker,
                    before.silent.get(),
                    before.nth
                ));
            }
        }
    }
    Ok(spent)
}

/// A worker that has said nothing is let go as soon as its client has left.
fn left(asked: &Asked, deliveries: &[&Delivery], plan: &Plan) -> Result<(), String> {
    let Some(left_us) = asked.left_us.get().and_then(|us| asked.line.left_us(us)) else { return Ok(()) };
    let at_once = plan.config.half_close == HalfClose::Abort
        && match plan.fleet {
            Fleet::Regular => true,
            Fleet::Pairs(backend) => plan.config.client_leaves(backend) == ClientLeaves::Close,
        };
    // What a prefill's worker has still to say is waited for without the client, once its partner has answered.
    let answered = |delivery: &&Delivery| {
        delivery.role == Role::Prefill
            && deliveries.iter().any(|by| by.role == Role::Decode && by.said_us.get().is_some_and(|us| us <= left_us))
    };
    for delivery in deliveries.iter().filter(|delivery| !answered(delivery)) {
        let Some(stalls_us) = delivery.stalls_us.get() else { continue };
        let Some(gone_us) = delivery.left_us.get() else { return Err("a worker is waited for, for ever".into()) };
        if at_once && delivery.silent.get() && gone_us > stalls_us.max(left_us) + AT_ONCE_US {
            return Err(format!("its client left at {left_us} µs, its worker was let go at {gone_us} µs"));
        }
    }
    Ok(())
}
