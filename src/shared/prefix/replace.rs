//! Taking parts of a tree out and putting others in their place.
//!
//! Takes a link and the part it leads to, gives the link a part that says the same in another form, or less. Never
//! decides alone: what is frozen may be replaced by any thread, and the first one wins.

use std::ptr::NonNull;
use std::sync::Arc;

use crossbeam::epoch::Guard;

use super::meter::Meter;
use super::node::{Body, Edge, Level, Link, Ptr, Table, Target};
use super::pause::{Pause, Point};
use super::{MAX_RUN, Tree};

/// What an operation works with.
pub(super) struct Work<'g, P> {
    pub meter: &'g Arc<Meter>,
    pub pause: &'g P,
    pub guard: &'g Guard,
    pub forest: &'g [Tree],
}

impl<'g, P: Pause> Work<'g, P> {
    #[inline(always)]
    pub fn at(&self, point: Point) {
        self.pause.at(point);
    }

    /// Hands an edge to the collector that a link no longer leads to.
    pub fn discard_edge(&self, edge: Edge<'g>) {
        self.at(Point::Unlinked);
        let (meter, bytes, raw) = (Arc::clone(self.meter), edge.bytes(), Private(edge.ptr()));
        meter.discarded(bytes);
        let free = move || {
            if let Target::Edge(edge) = raw.get().target() {
                // SAFETY: unlinked once (by the winner of one swap), and no guard of that time is left.
                unsafe { edge.free(&meter) };
            }
            meter.discarded(-bytes);
        };
        // SAFETY: as said inside; the meter is owned by the closure.
        unsafe { self.guard.defer_unchecked(free) };
    }

    /// The same with a body.
    pub fn discard_body(&self, body: &'g Body) {
        let (meter, bytes, body) = (Arc::clone(self.meter), body.bytes(self.guard), NonNull::from(body));
        meter.discarded(bytes);
        let free = move || {
            // SAFETY: its last edge was unlinked, once, and no guard of that time is left.
            unsafe { Body::free(body, &meter) };
            meter.discarded(-bytes);
        };
        // SAFETY: as said inside; the meter is owned by the closure.
        unsafe { self.guard.defer_unchecked(free) };
    }

    fn discard_table(&self, table: Table<'g>) {
        self.at(Point::Unlinked);
        let (meter, bytes, raw) = (Arc::clone(self.meter), table.bytes(), Private(table.ptr()));
        meter.discarded(bytes);
        let free = move || {
            if let Target::Table(table) = raw.get().target() {
                // SAFETY: unlinked once (by the winner of one swap), and no guard of that time is left.
                unsafe { table.free(&meter) };
            }
            meter.discarded(-bytes);
        };
        // SAFETY: as said inside; the meter is owned by the closure.
        unsafe { self.guard.defer_unchecked(free) };
    }

    /// Frees an edge, and a body, that were never published.
    pub fn drop_edge(&self, edge: Edge<'_>) {
        // SAFETY: only called with what the caller has just made and failed to publish.
        unsafe { edge.free(self.meter) };
    }

    /// As above.
    pub fn drop_body(&self, body: &Body) {
        // SAFETY: only called with what the caller has just made and failed to publish.
        unsafe { Body::free(NonNull::from(body), self.meter) };
    }

    /// As above.
    pub fn drop_table(&self, table: Table<'_>) {
        // SAFETY: only called with what the caller has just made and failed to publish.
        unsafe { table.free(self.meter) };
    }

    /// Makes every owner of `from` one of `to`.
    pub fn copy_owners(&self, from: &Body, to: &Body) {
        for owner in from.owners(self.guard) {
            to.put(self.meter, owner, self.guard);
        }
    }

    /// Completes the owners of the upper body of a split. Anybody may, at any time: an owner of a child owns the
    /// node above it.
    pub fn adopt(&self, young: &Body) {
        if let Target::Edge(child) = young.children.load(self.guard).target() {
            if child.body().is_young() {
                self.adopt(child.body());
            }
            self.copy_owners(child.body(), young);
        }
        young.grown();
    }

    /// Replaces the frozen container that `link` held when it was read, so that it can be written again.
    pub fn help(&self, link: &Link, seen: Ptr<'g>, level: Level) {
        match seen.target() {
            Target::Edge(edge) => self.replace_body(link, seen, edge),
            Target::Table(table) => self.replace_table(link, seen, table, level),
            Target::Nothing => {}
        }
    }

    /// Replaces an edge whose body is frozen: by one that reaches over the only child, its only child, and so on, as
    /// long as the owners are the same and the run is short enough; by a copy if it is not even one.
    pub fn replace_body(&self, link: &Link, seen: Ptr<'g>, edge: Edge<'g>) {
        self.at(Point::Decide);
        let children = edge.body().children.load(self.guard).thawed();
        let run = self.run_of(edge);
        match run.len() {
            1 => self.publish_copy(link, seen, edge, children),
            _ => self.publish_merge(link, seen, &run),
        }
    }

    /// The edges, from a frozen one on, that can be one. All their bodies but the last one's are frozen, so their
    /// links and those that lead to them do not change any more.
    fn run_of(&self, edge: Edge<'g>) -> Vec<Edge<'g>> {
        let (mut run, mut len, mut last) = (vec![edge], edge.symbols().len(), edge);
        loop {
            let children = last.body().children.load(self.guard);
            let Target::Edge(child) = children.target() else { return run };
            // Short enough first: what is frozen here is merged here.
            if len + child.symbols().len() > MAX_RUN || !self.have_same_owners(last, child) {
                return run;
            }
            if !children.is_frozen() {
                self.at(Point::Freeze);
                if !last.body().children.swap(children, children.frozen()) {
                    return run;
                }
                // Who was added before the freeze can be seen now, and after it nobody stays.
                if !self.have_same_owners(last, child) {
                    return run;
                }
            }
            run.push(child);
            len += child.symbols().len();
            last = child;
        }
    }

    /// Whether an edge and its only child can be one.
    pub fn mergeable(&self, edge: Edge, child: Edge) -> bool {
        edge.symbols().len() + child.symbols().len() <= MAX_RUN && self.have_same_owners(edge, child)
    }

    fn have_same_owners(&self, edge: Edge, child: Edge) -> bool {
        let (upper, lower) = (edge.body(), child.body());
        !upper.is_young() && self.within(upper, lower) && self.within(lower, upper)
    }

    fn within(&self, some: &Body, all: &Body) -> bool {
        some.owners(self.guard).all(|owner| all.owners(self.guard).any(|other| other.is_owner(owner)))
    }

    fn publish_merge(&self, link: &Link, seen: Ptr<'g>, run: &[Edge<'g>]) {
        let symbols: Vec<u64> = run.iter().flat_map(|edge| edge.symbols()).copied().collect();
        let (last, upper) = run.split_last().expect("two at least");
        let merged = Edge::new(self.meter, &symbols, &[], last.body());
        if !link.swap(seen, merged.ptr()) {
            return self.drop_edge(merged);
        }
        for edge in upper {
            for owner in edge.body().owners(self.guard) {
                last.body().touch(owner, self.guard);
            }
            Meter::bump(&self.meter.merged);
            self.discard_edge(*edge);
            self.discard_body(edge.body());
        }
        self.discard_edge(*last);
    }

    fn publish_copy(&self, link: &Link, seen: Ptr<'g>, edge: Edge<'g>, children: Ptr<'g>) {
        let young = edge.body().is_young();
        let body = Body::new(self.meter, children, young);
        self.copy_owners(edge.body(), body);
        let copy = Edge::new(self.meter, edge.symbols(), &[], body);
        if !link.swap(seen, copy.ptr()) {
            self.drop_edge(copy);
            return self.drop_body(body);
        }
        self.discard_edge(edge);
        self.discard_body(edge.body());
    }

    /// Freezes the links of a table and puts in its place nothing, its only edge, or a copy.
    pub fn replace_table(&self, link: &Link, seen: Ptr<'g>, table: Table<'g>, level: Level) {
        for each in table.links() {
            self.at(Point::Freeze);
            each.freeze(self.guard);
        }
        self.at(Point::Decide);
        let held = || table.links().iter().map(|each| each.load(self.guard).thawed());
        let mut some = held().filter(|held| *held != Ptr::NULL);
        let instead = match (some.next(), some.next()) {
            (None, _) => Ptr::NULL,
            (Some(only), None) if matches!(only.target(), Target::Edge(_)) => only,
            _ => return self.publish_table(link, seen, table, Table::filled(self.meter, level, held())),
        };
        if link.swap(seen, instead) {
            self.discard_table(table);
        }
    }

    fn publish_table(&self, link: &Link, seen: Ptr<'g>, table: Table<'g>, copy: Table<'g>) {
        if link.swap(seen, copy.ptr()) {
            self.discard_table(table);
        } else {
            self.drop_table(copy);
        }
    }

    /// Takes out a leaf, unless `keep` says otherwise when nobody can give it children any more; whether it is out.
    pub fn remove_leaf(&self, link: &Link, seen: Ptr<'g>, keep: impl Fn(&Body) -> bool) -> bool {
        let Target::Edge(edge) = seen.target() else { return false };
        self.at(Point::Freeze);
        if !edge.body().children.swap(Ptr::NULL, Ptr::NULL.frozen()) {
            return false;
        }
        self.at(Point::Decide);
        if keep(edge.body()) {
            self.publish_copy(link, seen, edge, Ptr::NULL);
            return false;
        }
        let out = link.swap(seen, Ptr::NULL);
        if out {
            Meter::bump(&self.meter.trimmed);
            self.discard_edge(edge);
            self.discard_body(edge.body());
        }
        out
    }
}

/// A pointer that goes with its closure to whichever thread runs it.
struct Private<'g>(Ptr<'g>);

// SAFETY: what it leads to is unlinked; the closure that holds it is the only one that touches it.
unsafe impl Send for Private<'_> {}

impl<'g> Private<'g> {
    fn get(&self) -> Ptr<'g> {
        self.0
    }
}

/// Frees everything below a link.
///
/// # Safety
/// Nobody else can reach it, now or later.
pub(super) unsafe fn free_all(top: &Link, meter: &Meter) {
    // SAFETY: the caller's promise is what a guard is for.
    let guard = unsafe { crossbeam::epoch::unprotected() };
    let mut todo = vec![top.load(guard)];
    while let Some(at) = todo.pop() {
        match at.target() {
            Target::Nothing => {}
            Target::Table(table) => {
                todo.extend(table.links().iter().map(|link| link.load(guard)));
                // SAFETY: the caller's promise; each part hangs on one link.
                unsafe { table.free(meter) };
            }
            Target::Edge(edge) => {
                todo.push(edge.body().children.load(guard));
                // SAFETY: as above.
                unsafe {
                    Body::free(NonNull::from(edge.body()), meter);
                    edge.free(meter);
                }
            }
        }
    }
}
