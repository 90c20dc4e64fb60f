//! Trimming: what is old, dead or of no use goes.
//!
//! Takes bounded numbers of steps from the control thread, gives what was done. Never holds up anybody: between two
//! calls nothing is pinned, and every removal is one that others can finish.
//!
//! A *round* visits every node of every tree, children before parents and in the order of their first symbols, so
//! that a call can go on where the last one ended whatever has happened in between. A node is visited late, or
//! twice, when it was split or merged meanwhile; it is not left out.

use crossbeam::epoch::{Guard, pin};

use super::ages::Ages;
use super::meter::Counts;
use super::node::{Body, Edge, Level, Link, Ptr, Table, Target};
use super::pause::{Pause, Point};
use super::replace::Work;
use super::word::{Word, age};
use super::{DYING, FREE, Forest, MAX_RUN, Tree};
use std::sync::atomic::Ordering;

/// What one call of [`Forest::trim`] is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trim {
    /// The clock that insertions are stamped with.
    pub now: u32,
    /// Leaves are removed, the oldest first, while more bytes than this are linked.
    pub until_bytes: u64,
    /// Owners that were not used for longer go whatever memory there is; 0: never.
    pub ttl_ticks: u32,
    /// Most nodes to visit; one costs 50 to 300 ns.
    pub max_steps: usize,
}

/// What one call did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trimmed {
    /// Nodes visited.
    pub steps: usize,
    /// Whether the round ended with this call.
    pub round: bool,
    /// Whether there is nothing to do until something changes.
    pub idle: bool,
}

/// Where a round stands: the caller's, so that no thread can hold it up. The first round only learns ages; removal
/// for want of memory begins with the second.
#[derive(Debug, Default)]
pub struct Trimmer {
    place: usize,
    /// The nodes above the next one: first symbol, and symbols from the top to the end of the edge.
    marks: Vec<(u64, usize)>,
    /// Lowest first symbol that the next node may have; `None` when all children were visited.
    from: Option<u64>,
    /// Ages of this round, and of the one before.
    ages: Ages,
    before: Option<Ages>,
    /// Tick up to which leaves go for want of memory.
    cut: Option<u32>,
    /// Whether this round has changed anything.
    changed: bool,
    begun: Option<State>,
    settled: Option<State>,
}

/// What must differ for a further round to find anything.
type State = (u64, u64, u64, u64);

/// One node on the way to the next.
struct Frame<'g> {
    link: &'g Link,
    seen: Ptr<'g>,
    edge: Edge<'g>,
    end: usize,
}

impl<P: Pause> Forest<P> {
    /// Goes on with a round: clears entries that are dead or older than the limit, removes leaves that nobody owns or
    /// that are the oldest while memory is short, merges what was split in vain, takes down released trees.
    pub fn trim(&self, trimmer: &mut Trimmer, want: &Trim) -> Trimmed {
        let mut done = Trimmed::default();
        if trimmer.begun.is_none() && self.is_settled(trimmer, want) {
            done.idle = true;
            return done;
        }
        let guard = pin();
        trimmer.begin(self.state(), want.now);
        while done.steps < want.max_steps && !done.round {
            let tree = &self.trees[trimmer.place];
            if (Sweep { forest: self, work: self.work(&guard), want, trimmer, done: &mut done }).tree(tree) {
                done.round = trimmer.next_place(self.trees.len());
            }
        }
        guard.flush();
        done
    }

    fn state(&self) -> State {
        let Counts { nodes, owners, trimmed, .. } = self.meter.counts();
        (nodes, owners, trimmed, self.chores.load(Ordering::Relaxed))
    }

    fn is_settled(&self, trimmer: &Trimmer, want: &Trim) -> bool {
        want.ttl_ticks == 0 && self.meter.live_about() <= want.until_bytes && trimmer.settled == Some(self.state())
    }
}

impl Trimmer {
    /// A new round, with everything before it.
    pub fn new() -> Self {
        Trimmer::default()
    }

    fn begin(&mut self, state: State, now: u32) {
        if self.begun.is_none() {
            self.begun = Some(state);
            (self.place, self.from, self.changed, self.cut) = (0, Some(0), false, None);
            self.ages = Ages::new(now);
        }
    }

    /// Whether the round is over.
    fn next_place(&mut self, places: usize) -> bool {
        self.marks.clear();
        self.from = Some(0);
        self.place += 1;
        if self.place < places {
            return false;
        }
        let begun = self.begun.take();
        self.settled = begun.filter(|_| !self.changed);
        self.before = Some(std::mem::take(&mut self.ages));
        true
    }
}

/// One call's work on one tree.
struct Sweep<'a, 'g, P: Pause> {
    forest: &'g Forest<P>,
    work: Work<'g, P>,
    want: &'a Trim,
    trimmer: &'a mut Trimmer,
    done: &'a mut Trimmed,
}

impl<'g, P: Pause> Sweep<'_, 'g, P> {
    /// Goes on with a tree; whether it is through.
    fn tree(&mut self, tree: &'g Tree) -> bool {
        // Relaxed: a tree that is released at this moment is taken down by the next round.
        let dying = tree.key.load(Ordering::Relaxed) == DYING;
        let mut stack = self.resume(tree);
        while self.done.steps < self.want.max_steps {
            self.done.steps += usize::from(!stack.is_empty());
            match self.next(tree, &stack) {
                Some(frame) => {
                    stack.push(frame);
                    self.trimmer.from = Some(0);
                }
                None => {
                    let Some(frame) = stack.pop() else { return self.finish(tree, dying) };
                    self.trimmer.from = frame.edge.symbols()[0].checked_add(1);
                    self.visit(&frame, stack.last(), dying);
                }
            }
        }
        self.trimmer.marks = stack.iter().map(|frame| (frame.edge.symbols()[0], frame.end)).collect();
        false
    }

    /// A tree that was to go and is empty gives its place back.
    fn finish(&self, tree: &Tree, dying: bool) -> bool {
        if dying && tree.top.load(self.work.guard) == Ptr::NULL {
            // Release pairs with the acquire in `Forest::tree`.
            let _ = tree.key.compare_exchange(DYING, FREE, Ordering::Release, Ordering::Relaxed);
        }
        true
    }

    /// The nodes above the next one, as far as they are what they were; below that the visit begins anew.
    fn resume(&mut self, tree: &'g Tree) -> Vec<Frame<'g>> {
        let mut stack = Vec::new();
        for &(first, end) in &std::mem::take(&mut self.trimmer.marks) {
            let (link, level) = below(tree, &stack);
            match find(link, level, first, self.work.guard) {
                Some((link, seen, edge)) if end_of(&stack) + edge.symbols().len() == end => {
                    stack.push(Frame { link, seen, edge, end });
                }
                _ => {
                    self.trimmer.from = Some(first);
                    break;
                }
            }
        }
        stack
    }

    fn next(&mut self, tree: &'g Tree, stack: &[Frame<'g>]) -> Option<Frame<'g>> {
        let (link, level) = below(tree, stack);
        let (link, seen, edge) = self.child(link, level, self.trimmer.from?)?;
        Some(Frame { link, seen, edge, end: end_of(stack) + edge.symbols().len() })
    }

    /// The first child whose first symbol is `from` or higher. Tables that turn out to be through are made smaller.
    fn child(&mut self, link: &'g Link, level: Level, from: u64) -> Option<(&'g Link, Ptr<'g>, Edge<'g>)> {
        let seen = link.load(self.work.guard);
        match seen.target() {
            Target::Nothing => None,
            Target::Edge(edge) => (edge.symbols()[0] >= from).then_some((link, seen, edge)),
            Target::Table(table) => {
                let start = level.index(from);
                let found = (start..table.links().len())
                    .find_map(|i| self.child(&table.links()[i], level.down(), if i == start { from } else { 0 }));
                if found.is_none() {
                    self.shrink(link, table, level);
                }
                found
            }
        }
    }

    /// Replaces a table that holds one child or none, and one that somebody has begun to replace.
    fn shrink(&mut self, link: &Link, table: Table<'g>, level: Level) {
        let (mut children, mut tables, mut frozen) = (0, 0, false);
        for held in table.links().iter().map(|each| each.load(self.work.guard)) {
            frozen |= held.is_frozen();
            children += usize::from(matches!(held.target(), Target::Edge(_)));
            tables += usize::from(matches!(held.target(), Target::Table(_)));
        }
        if frozen || (tables == 0 && children <= 1) {
            self.trimmer.changed = true;
            self.work.replace_table(link, table.ptr(), table, level);
        }
    }

    /// One node whose children have been visited.
    fn visit(&mut self, frame: &Frame<'g>, above: Option<&Frame<'g>>, dying: bool) {
        let (body, guard) = (frame.edge.body(), self.work.guard);
        let (forest, want) = (self.forest, *self.want);
        let gone = |word: Word| {
            let old = want.ttl_ticks > 0 && age(want.now, word.tick()) > want.ttl_ticks;
            dying || old || forest.is_dead(word.slot(), word.era())
        };
        body.clear(self.work.meter, gone, guard);
        let idle = idle_ticks(body, want.now, guard);
        let bytes = frame.edge.bytes() + body.bytes(guard);
        self.trimmer.ages.add(idle.unwrap_or(0), bytes as u64);
        let children = body.children.load(guard);
        if frame.seen.is_frozen() {
            // What the link lies in is replaced first: the node above, later in this round, or a table.
        } else if children.is_frozen() {
            self.work.replace_body(frame.link, frame.seen, frame.edge);
        } else {
            match children.target() {
                Target::Nothing => self.leaf(frame, idle),
                Target::Edge(child) => self.merge(frame, above, children, child),
                Target::Table(_) => {}
            }
        }
    }

    fn leaf(&mut self, frame: &Frame<'g>, idle: Option<u32>) {
        let cut = self.cut();
        let goes = |idle: Option<u32>| idle.is_none_or(|idle| cut.is_some_and(|cut| idle >= cut));
        if goes(idle) {
            self.trimmer.changed = true;
            let (now, guard) = (self.want.now, self.work.guard);
            self.work.remove_leaf(frame.link, frame.seen, |body| !goes(idle_ticks(body, now, guard)));
        }
    }

    /// Idle ticks from which on a leaf goes for want of memory; `None` while there is enough.
    fn cut(&mut self) -> Option<u32> {
        let over = self.work.meter.live_about().checked_sub(self.want.until_bytes).filter(|over| *over > 0)?;
        if self.trimmer.cut.is_none() {
            self.trimmer.cut = self.trimmer.before.as_ref().map(|ages| ages.cut(over));
        }
        self.trimmer.cut.map(|tick| age(self.want.now, tick))
    }

    /// Merges a node with its only child, and what hangs on that in the same way. The uppermost node of such a run
    /// does it, so that symbols are copied once.
    fn merge(&mut self, frame: &Frame<'g>, above: Option<&Frame<'g>>, children: Ptr<'g>, child: Edge<'g>) {
        let (work, guard) = (&self.work, self.work.guard);
        let leads_here = |above: &&Frame<'g>| above.edge.body().children.load(guard) == frame.seen;
        let is_upper = above.filter(leads_here).is_none_or(|above| !work.mergeable(above.edge, frame.edge));
        let has_room = work.meter.bytes_about() + (MAX_RUN as u64 * 8) < work.meter.budget;
        if !is_upper || !has_room || !work.mergeable(frame.edge, child) || frame.link.load(guard) != frame.seen {
            return;
        }
        self.trimmer.changed = true;
        work.at(Point::Freeze);
        if frame.edge.body().children.swap(children, children.frozen()) {
            work.replace_body(frame.link, frame.seen, frame.edge);
        }
    }
}

/// The link to the children of the last node, or of the tree.
fn below<'g>(tree: &'g Tree, stack: &[Frame<'g>]) -> (&'g Link, Level) {
    stack.last().map_or((&tree.top, Level::ROOT), |frame| (&frame.edge.body().children, Level::NODE))
}

fn end_of(stack: &[Frame]) -> usize {
    stack.last().map_or(0, |frame| frame.end)
}

/// The child that begins with `first`.
fn find<'g>(
    mut link: &'g Link,
    mut level: Level,
    first: u64,
    guard: &'g Guard,
) -> Option<(&'g Link, Ptr<'g>, Edge<'g>)> {
    loop {
        let seen = link.load(guard);
        match seen.target() {
            Target::Nothing => return None,
            Target::Edge(edge) => return (edge.symbols()[0] == first).then_some((link, seen, edge)),
            Target::Table(table) => (link, level) = (&table.links()[level.index(first)], level.down()),
        }
    }
}

/// Ticks since anybody used the node; `None` when nobody owns it.
fn idle_ticks(body: &Body, now: u32, guard: &Guard) -> Option<u32> {
    body.owners(guard).map(|owner| age(now, owner.tick())).min()
}
