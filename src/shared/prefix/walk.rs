//! Matching: down the tree along a path, then back up over the owners.
//!
//! Takes a path and says who has how much of it. Never writes to the tree, waits or allocates.

use crossbeam::epoch::Guard;

use super::node::{Body, Level, Link, Target, common};
use super::word::Word;

/// Most holders that one match gives.
pub const MAX_FOUND: usize = 32;
/// Nodes with different owners that are remembered on the way down. Where a path has more of them and nobody is
/// found in these, the way is gone again for the ones above.
const TRAIL: usize = 16;

/// A worker that has a part of the path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holder {
    pub slot: u16,
    pub era: u32,
    /// Symbols of the path that it has, from the first on.
    pub depth: u32,
}

/// What a match gives: a fixed place, to be used again.
#[derive(Clone, Debug)]
pub struct Found {
    /// Symbols of the path that the tree knows, whoever owns them.
    pub known: u32,
    len: usize,
    holders: [Holder; MAX_FOUND],
    /// One bit a slot modulo 64: where it is clear, the slot is surely not among the holders.
    seen: u64,
}

impl Default for Found {
    fn default() -> Self {
        Found { known: 0, len: 0, holders: [Holder::default(); MAX_FOUND], seen: 0 }
    }
}

impl Found {
    /// Who has a part of the path: deepest first, at most [`MAX_FOUND`].
    #[inline]
    pub fn holders(&self) -> &[Holder] {
        &self.holders[..self.len]
    }

    /// Those that have the deepest part that anybody has.
    pub fn deepest(&self) -> &[Holder] {
        let depth = self.depth();
        let end = self.holders().iter().position(|holder| holder.depth != depth);
        &self.holders[..end.unwrap_or(self.len)]
    }

    /// Symbols that the deepest holders have; 0 when there are none.
    #[inline]
    pub fn depth(&self) -> u32 {
        self.holders().first().map_or(0, |holder| holder.depth)
    }

    pub(super) fn clear(&mut self) {
        (self.known, self.len, self.seen) = (0, 0, 0);
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.len == MAX_FOUND
    }

    #[inline]
    fn note(&mut self, word: Word, depth: u32, usable: &mut impl FnMut(u16, u32) -> bool) {
        let (slot, era) = (word.slot(), word.era());
        let bit = 1 << (slot % 64);
        let known = self.seen & bit != 0 && self.holders().iter().any(|h| h.slot == slot && h.era == era);
        if !known && !self.is_full() && usable(slot, era) {
            self.holders[self.len] = Holder { slot, era, depth };
            self.len += 1;
            self.seen |= bit;
        }
    }
}

/// One node on the way.
#[derive(Clone, Copy)]
struct Stop<'g> {
    body: &'g Body,
    sole: Option<Word>,
    /// Symbols of the path before its edge, and to where the path and the edge agree.
    start: u32,
    depth: u32,
}

/// The last nodes on the way whose owners differ.
struct Trail<'g> {
    stops: [Option<Stop<'g>>; TRAIL],
    len: usize,
}

impl<'g> Trail<'g> {
    #[inline]
    fn push(&mut self, stop: Stop<'g>) {
        let last = self.len.checked_sub(1).and_then(|last| self.stops[last % TRAIL]);
        if let Some(last) = last
            && let (Some(a), Some(b)) = (last.sole, stop.sole)
            && a.is_owner(b)
        {
            // The node above adds nobody.
            self.len -= 1;
        }
        self.stops[self.len % TRAIL] = Some(stop);
        self.len += 1;
    }

    /// From the deepest up.
    fn up(&self) -> impl Iterator<Item = Stop<'g>> + '_ {
        (self.len.saturating_sub(TRAIL)..self.len).rev().filter_map(|i| self.stops[i % TRAIL])
    }

    /// Where the path ends for whoever wants to know about the nodes that are not remembered.
    fn rest(&self) -> Option<usize> {
        self.up().last().filter(|_| self.len > TRAIL).map(|stop| stop.start as usize)
    }
}

/// Fills `found`; `step` is called before each link is read.
#[inline]
pub(super) fn matched(
    top: &Link,
    symbols: &[u64],
    mut usable: impl FnMut(u16, u32) -> bool,
    found: &mut Found,
    guard: &Guard,
    step: impl Fn(),
) {
    let mut path = symbols;
    loop {
        let (trail, known) = descend(top, path, guard, &step);
        found.known = found.known.max(known);
        for stop in trail.up() {
            gather(stop.body, stop.depth, &mut usable, found, guard);
            if found.is_full() {
                return;
            }
        }
        match trail.rest() {
            Some(rest) if found.len == 0 => path = &path[..rest.min(path.len())],
            _ => return,
        }
    }
}

/// Notes the owners of a body. Those of a young one may be missing in it; then its child has them.
#[inline]
fn gather(body: &Body, depth: u32, usable: &mut impl FnMut(u16, u32) -> bool, found: &mut Found, guard: &Guard) {
    // Youth is asked before owners are read: who is grown has all of them.
    let young = body.is_young();
    body.owners(guard).for_each(|word| found.note(word, depth, usable));
    if young {
        gather_young(body, depth, usable, found, guard);
    }
}

#[cold]
fn gather_young(body: &Body, depth: u32, usable: &mut impl FnMut(u16, u32) -> bool, found: &mut Found, guard: &Guard) {
    let mut young = body;
    while young.is_young()
        && let Target::Edge(child) = young.children.load(guard).target()
    {
        young = child.body();
        young.owners(guard).for_each(|word| found.note(word, depth, usable));
    }
    if !body.is_young() {
        // It grew up meanwhile, so its child may be another one.
        body.owners(guard).for_each(|word| found.note(word, depth, usable));
    }
}

#[inline]
fn descend<'g>(top: &'g Link, symbols: &[u64], guard: &'g Guard, step: &impl Fn()) -> (Trail<'g>, u32) {
    let mut trail = Trail { stops: [None; TRAIL], len: 0 };
    let (mut link, mut level, mut at) = (top, Level::ROOT, 0);
    while let Some(&symbol) = symbols.get(at) {
        step();
        match link.load(guard).target() {
            Target::Nothing => break,
            Target::Table(table) => {
                link = &table.links()[level.index(symbol)];
                level = level.down();
            }
            Target::Edge(edge) => {
                // The body is loaded while the symbols are compared.
                let (run, body) = (edge.symbols(), edge.body());
                let sole = body.sole_owner();
                let n = common(run, &symbols[at..]);
                if n == 0 {
                    break;
                }
                trail.push(Stop { body, sole, start: at as u32, depth: (at + n) as u32 });
                at += n;
                if n < run.len() {
                    break;
                }
                (link, level) = (&edge.body().children, Level::NODE);
            }
        }
    }
    (trail, at as u32)
}
