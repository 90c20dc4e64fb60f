//! Cache-aware: who has the longest part of the prompt in its cache, unless it is overloaded.
//!
//! Takes a field, gives a guard: on the least loaded of the workers that have the deepest part of the prompt, if that
//! is more than the threshold's share of it; of those that have less, down to the threshold, if all above are
//! overloaded; else on the member that has processed the least work of those that have few in flight. An owner is
//! charged for the part that it does not have, anybody else for the whole prompt. Whoever it is is reserved first and
//! noted in the tree second, in every branch, so that a prompt that spills over has one more owner. Never notes a
//! prompt without a whole block.
//!
//! While the engines say that their KV caches are used too unevenly, or that an owner has too much, everybody goes by
//! least load, or that owner is passed over.
//!
//! In fleet mode (the peers' classic rule) no owner is passed over, but while the most and the least loaded worker
//! differ by both thresholds everybody goes by least load. That takes a look at all words, so it costs more the
//! larger the fleet is.

use super::{Candidates, Field, least_load};
use crate::config::BalanceMode;
use crate::lane::view::{self, By, CLOSED, Choice};
use crate::metrics::{Scale, Tally};
use crate::shared::load::{LoadGuard, Word};
use crate::shared::prefix::{self, Guard, Inserted, MAX_FOUND};
use crate::shared::roster::Slot;

pub(super) fn choose(field: &mut Field) -> Option<LoadGuard> {
    if field.want.symbols.is_empty() {
        let chosen = least_load::choose(field);
        return count(field, chosen, Tally::DecisionShort);
    }
    let pinned = prefix::pin();
    let (chosen, reason) = prefer(field, &pinned);
    let chosen = chosen.or_else(|| {
        field.till.work = work(field, 0);
        least_load::choose_by(field, By::Work)
    });
    if let Some(guard) = &chosen {
        note(field, guard, &pinned);
    }
    count(field, chosen, reason)
}

/// What the prompt brings to a worker that has so many symbols of it.
fn work(field: &Field, depth: u32) -> u64 {
    1 + (field.want.symbols.len() as u64).saturating_sub(depth.into())
}

fn count(field: &mut Field, chosen: Option<LoadGuard>, reason: Tally) -> Option<LoadGuard> {
    if chosen.is_some() {
        field.choice.reason = Some(reason);
        field.till.tallies.add(reason, 1);
    }
    chosen
}

/// An owner, or why there is none to be had.
fn prefer(field: &mut Field, pinned: &Guard) -> (Option<LoadGuard>, Tally) {
    if field.want.routing.balance_mode == BalanceMode::Fleet && is_imbalanced(field) {
        return (None, Tally::DecisionImbalanced);
    }
    if field.is_uneven() {
        return (None, Tally::DecisionUneven);
    }
    look_up(field, pinned);
    // Fewer symbols are not worth a preference.
    let least = field.want.routing.cache_threshold * field.want.symbols.len() as f64;
    let mut from = 0;
    let mut passed_over = None;
    while let Some(holder) = field.reading.found.holders().get(from).copied() {
        if f64::from(holder.depth) <= least {
            break;
        }
        let mut level = Level::default();
        while let Some(next) = field.reading.found.holders().get(from).filter(|h| h.depth == holder.depth).copied() {
            // That an engine says it is full says more than a count.
            let why = level.admit(field, next.slot, next.era);
            passed_over = if passed_over == Some(Tally::DecisionShed) { passed_over } else { why.or(passed_over) };
            from += 1;
        }
        field.till.work = work(field, holder.depth);
        if let Some(guard) = level.reserve(field) {
            return (Some(guard), Tally::DecisionHit);
        }
    }
    (None, passed_over.unwrap_or(Tally::DecisionMiss))
}

fn look_up(field: &mut Field, pinned: &Guard) {
    let tree = field.reading.tree(field.want.kind);
    let (vitals, avoid) = (&field.till.shared.vitals, field.till.avoid);
    let pool = field.pool;
    // Groups share the tree of their model.
    let member = |slot, era| pool.team.is_none() || pool.place(slot, era).is_some();
    let usable = |slot, era| vitals.usable(slot) && !avoid.contains(&slot) && member(slot, era);
    field.till.shared.prefix.matched_in(tree, field.want.symbols, usable, &mut field.reading.found, pinned);
    // Deepest first.
    let matched = field.reading.found.holders().first().map_or(0, |holder| holder.depth);
    let symbols = field.want.symbols.len();
    field.choice = Choice { reason: None, matched, symbols: symbols as u32 };
    field.till.tallies.matched.observe(Scale::Share, u64::from(matched) * 100 / symbols as u64);
}

fn note(field: &Field, guard: &LoadGuard, pinned: &Guard) {
    let tree = field.reading.tree(field.want.kind);
    let (symbols, now) = (field.want.symbols, field.now_s());
    let inserted = field.till.shared.prefix.insert_in(tree, symbols, guard.slot(), guard.era(), now, pinned);
    if let Inserted::Refused(_) = inserted {
        field.till.tallies.add(Tally::PrefixRefused, 1);
    }
}

/// Whether the most loaded member exceeds the least loaded one by both thresholds.
fn is_imbalanced(field: &mut Field) -> bool {
    field.reading.freshen(&field.pool.slots, field.till.shared, field.till.reach, field.now_us);
    let words = field.reading.words.iter().filter(|&&word| word != CLOSED);
    let loads = words.map(|&word| Word(word).in_flight());
    let (least, most) = loads.fold((u32::MAX, 0), |(least, most), load| (least.min(load), most.max(load)));
    least <= most && field.want.routing.exceeds(f64::from(most), f64::from(least))
}

/// Owners of equally much that are not overloaded.
struct Level {
    slots: [Slot; MAX_FOUND],
    eras: [u32; MAX_FOUND],
    words: [u64; MAX_FOUND],
    len: usize,
}

impl Default for Level {
    fn default() -> Self {
        Level { slots: [0; MAX_FOUND], eras: [0; MAX_FOUND], words: [CLOSED; MAX_FOUND], len: 0 }
    }
}

impl Level {
    /// Takes an owner in, in slot order; why it had to be passed over for its load, if it had.
    fn admit(&mut self, field: &mut Field, slot: Slot, era: u32) -> Option<Tally> {
        // It may have gone, or not serve the model any more.
        field.pool.place(slot, era)?;
        let shared = field.till.shared;
        let vital = shared.vitals.vital(slot);
        let word = view::weighed(shared.load.offer(slot), vital, field.till.reach);
        if word == CLOSED {
            return (vital.usable() && vital.is_shed()).then_some(Tally::DecisionShed);
        }
        if field.want.routing.balance_mode == BalanceMode::Worker && field.is_overload(Word(word).in_flight()) {
            return Some(Tally::DecisionSpill);
        }
        let at = self.slots[..self.len].partition_point(|&s| s < slot);
        self.slots.copy_within(at..self.len, at + 1);
        self.eras.copy_within(at..self.len, at + 1);
        self.words.copy_within(at..self.len, at + 1);
        (self.slots[at], self.eras[at], self.words[at]) = (slot, era, word);
        self.len += 1;
        None
    }

    fn reserve(&mut self, field: &mut Field) -> Option<LoadGuard> {
        let Level { slots, eras, words, len } = self;
        let (slots, eras, words) = (&slots[..*len], &eras[..*len], &mut words[..*len]);
        field.till.reserve(Candidates { slots, eras, words, by: By::Load, start: &mut 0 })
    }
}
