//! Insertion: a worker becomes an owner of every node of a path.
//!
//! Takes a path and an owner, gives how much of the path it owns now. Never waits for another thread: what another
//! has begun and not finished is finished here, or passed over. Takes memory only within the budget.

use super::Inserted;
use super::MAX_RUN;
use super::node::{Body, Edge, Entry, Level, Link, Ptr, Table, Target, common};
use super::pause::{Pause, Point};
use super::replace::Work;
use super::word::Word;

/// A link on the way, what it held, and how deep in its node's tables it lies.
#[derive(Clone, Copy)]
struct Step<'g> {
    link: &'g Link,
    seen: Ptr<'g>,
    level: Level,
}

/// How one look at a link ended.
enum Turn {
    /// The same link must be read again.
    Again,
    Done,
    Refused,
}

impl<'g, P: Pause> Work<'g, P> {
    /// Makes `owner` an owner of all of `symbols`.
    #[inline]
    pub fn insert(&self, top: &'g Link, symbols: &[u64], owner: Word) -> Inserted {
        if symbols.is_empty() {
            return Inserted::Whole;
        }
        loop {
            if let Some(inserted) = self.pass(top, symbols, owner) {
                return inserted;
            }
        }
    }

    /// One way down; `None` if it must be gone again.
    #[inline]
    fn pass(&self, top: &'g Link, symbols: &[u64], owner: Word) -> Option<Inserted> {
        let (mut link, mut level, mut up, mut rest) = (top, Level::ROOT, None, symbols);
        loop {
            self.at(Point::Step);
            let here = Step { link, seen: link.load(self.guard), level };
            if here.seen.is_frozen() {
                return self.thaw(up);
            }
            let turn = match here.seen.target() {
                Target::Nothing => self.grow(top, here, rest, owner),
                Target::Table(table) => {
                    up = Some(here);
                    (link, level) = (&table.links()[level.index(rest[0])], level.down());
                    continue;
                }
                Target::Edge(edge) => {
                    let n = common(edge.symbols(), rest);
                    if n == edge.symbols().len() {
                        if !self.own(here, edge, owner) {
                            return None;
                        }
                        rest = &rest[n..];
                        if rest.is_empty() {
                            return Some(Inserted::Whole);
                        }
                        (link, level, up) = (&edge.body().children, Level::NODE, Some(here));
                        continue;
                    }
                    self.part(top, here, edge, n, rest, owner)
                }
            };
            match turn {
                Turn::Again => {}
                Turn::Done => return Some(Inserted::Whole),
                Turn::Refused => return Some(Inserted::Refused(symbols.len() - rest.len())),
            }
        }
    }

    /// A frozen link: its container is replaced, then the way begins again. The first frozen link on the way lies in
    /// a container whose own link is not frozen, so one of those who try succeeds.
    #[cold]
    fn thaw(&self, up: Option<Step<'g>>) -> Option<Inserted> {
        if let Some(up) = up {
            self.help(up.link, up.seen, up.level);
        }
        None
    }

    /// Path and edge part after `n` symbols, within the edge.
    fn part(&self, top: &'g Link, here: Step<'g>, edge: Edge<'g>, n: usize, rest: &[u64], owner: Word) -> Turn {
        if n == 0 {
            return self.fork(top, here, edge, rest, owner);
        }
        if n == rest.len() {
            // Who owns the node has all symbols of its edge.
            match edge.body().touch(owner, self.guard) {
                Some(Entry::Known) => return Turn::Done,
                Some(Entry::Written) => return if self.stands(here, edge) { Turn::Done } else { Turn::Again },
                None => {}
            }
        }
        self.split(top, here, edge, n, owner.tick())
    }

    /// Makes `owner` an owner of a node; false if the node may have left its place meanwhile.
    #[inline]
    fn own(&self, here: Step<'g>, edge: Edge<'g>, owner: Word) -> bool {
        let body = edge.body();
        if body.is_young() {
            self.adopt(body);
        }
        let entry = body.touch(owner, self.guard).unwrap_or_else(|| {
            self.at(Point::Own);
            body.put(self.meter, owner, self.guard)
        });
        entry == Entry::Known || self.stands(here, edge)
    }

    /// Whether a node whose owners were written is in its place, so that what was written stays. If it is about to
    /// be replaced, it is when this returns.
    fn stands(&self, here: Step<'g>, edge: Edge<'g>) -> bool {
        self.at(Point::Check);
        // In this order after the entry was written, all SeqCst: a split or a freeze that this does not see comes
        // later and reads the entry (see `Body::owners`).
        if edge.body().children.load(self.guard).is_frozen() {
            self.replace_body(here.link, here.seen, edge);
            return false;
        }
        here.link.load(self.guard) == here.seen
    }

    /// Puts the rest of the path below an empty link.
    fn grow(&self, top: &'g Link, here: Step<'g>, rest: &[u64], owner: Word) -> Turn {
        if !self.has_room(top, rest.len(), owner.tick()) {
            return Turn::Refused;
        }
        let leaf = self.chain(rest, owner);
        self.at(Point::Leaf);
        if here.link.swap(here.seen, leaf) {
            return Turn::Done;
        }
        self.drop_chain(leaf);
        Turn::Again
    }

    /// Nodes for a run of symbols, all owned by `owner`.
    fn chain(&self, run: &[u64], owner: Word) -> Ptr<'g> {
        run.chunks(MAX_RUN).rev().fold(Ptr::NULL, |below, run| {
            let body = Body::new(self.meter, below, false);
            body.put(self.meter, owner, self.guard);
            Edge::new(self.meter, run, &[], body).ptr()
        })
    }

    fn drop_chain(&self, chain: Ptr<'g>) {
        let mut at = chain;
        while let Target::Edge(edge) = at.target() {
            at = edge.body().children.load(self.guard);
            self.drop_body(edge.body());
            self.drop_edge(edge);
        }
    }

    /// Puts a table in the place of a single child, so that there is room for a second.
    fn fork(&self, top: &'g Link, here: Step<'g>, edge: Edge<'g>, rest: &[u64], owner: Word) -> Turn {
        let (old, new) = (edge.symbols()[0], rest[0]);
        if !self.has_room(top, rest.len(), owner.tick()) {
            return Turn::Refused;
        }
        let leaf = self.chain(rest, owner);
        let table = Table::new(self.meter, here.level);
        let mut lowest = (table, here.level);
        while lowest.1.index(old) == lowest.1.index(new) {
            let level = lowest.1.down();
            let below = Table::new(self.meter, level);
            lowest.0.links()[lowest.1.index(old)].swap(Ptr::NULL, below.ptr());
            lowest = (below, level);
        }
        lowest.0.links()[lowest.1.index(old)].swap(Ptr::NULL, here.seen);
        lowest.0.links()[lowest.1.index(new)].swap(Ptr::NULL, leaf);
        self.at(Point::Fork);
        if here.link.swap(here.seen, table.ptr()) {
            return Turn::Done;
        }
        self.drop_tables(table);
        self.drop_chain(leaf);
        Turn::Again
    }

    /// Tables as `fork` makes them: one in the other.
    fn drop_tables(&self, mut table: Table<'g>) {
        loop {
            let below = table.links().iter().find_map(|link| match link.load(self.guard).target() {
                Target::Table(below) => Some(below),
                _ => None,
            });
            self.drop_table(table);
            match below {
                Some(below) => table = below,
                None => return,
            }
        }
    }

    /// Puts a node after the first `n` symbols of an edge.
    fn split(&self, top: &'g Link, here: Step<'g>, edge: Edge<'g>, n: usize, now: u32) -> Turn {
        let (upper, lower) = edge.symbols().split_at(n);
        if !self.has_room(top, edge.symbols().len(), now) {
            return Turn::Refused;
        }
        let lower = Edge::new(self.meter, lower, &[], edge.body());
        let body = Body::new(self.meter, lower.ptr(), true);
        self.copy_owners(edge.body(), body);
        let upper = Edge::new(self.meter, upper, &[], body);
        self.at(Point::Split);
        if !here.link.swap(here.seen, upper.ptr()) {
            self.drop_edge(upper);
            self.drop_edge(lower);
            self.drop_body(body);
            return Turn::Again;
        }
        self.discard_edge(edge);
        self.at(Point::Adopt);
        self.adopt(body);
        Turn::Again
    }
}
