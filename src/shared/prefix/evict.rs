//! Room for an insertion: what it does itself when memory is nearly out.
//!
//! Takes the symbols of a new leaf, gives whether it may be made. Never does more than a few removals a call, and
//! never lets the budget be exceeded by more than what was being made at that moment.
//!
//! The control thread trims earlier and better ([`super::Forest::trim`]); this is for bursts, and for a control
//! thread that has stopped. Of a few random leaves the one that was idle longest goes, as Redis does it.

use super::meter::Meter;
use super::node::{Edge, Link, Ptr, Target};
use super::pause::Pause;
use super::replace::Work;
use super::word::age;

/// Bytes beside the symbols that a leaf may need at most: its parts, and tables on the way to it.
const LEAF_BYTES: u64 = 512;
/// Removals of one call, and leaves that each chooses from.
const REMOVALS: usize = 8;
const SAMPLES: usize = 5;
/// Nodes from the top down to a random leaf, at most; a deeper one is left to the control thread.
const HOPS: usize = 128;

/// A leaf that could go.
struct Victim<'g> {
    link: &'g Link,
    seen: Ptr<'g>,
    edge: Edge<'g>,
    idle: u32,
}

impl<'g, P: Pause> Work<'g, P> {
    /// Whether the budget allows a leaf of `symbols`; near it, removes others first. Counts a refusal.
    pub fn has_room(&self, top: &'g Link, symbols: usize, now: u32) -> bool {
        let need = LEAF_BYTES + symbols as u64 * 8;
        let budget = self.meter.budget;
        if self.meter.bytes_about() + need <= budget - budget / 16 {
            return true;
        }
        self.make_room(top, need, now);
        let room = self.meter.bytes_about() + need <= budget;
        if !room {
            Meter::bump(&self.meter.refused);
        }
        room
    }

    #[cold]
    fn make_room(&self, top: &'g Link, need: u64, now: u32) {
        let mut missing = (self.meter.live_about() + 2 * need).saturating_sub(self.meter.budget / 16 * 15);
        missing = missing.min(4 * need);
        for _ in 0..REMOVALS {
            if missing == 0 {
                break;
            }
            missing = missing.saturating_sub(self.remove_oldest(top, now));
        }
        // What others have unlinked may be freed by now.
        self.guard.flush();
    }

    /// Bytes that went.
    fn remove_oldest(&self, top: &'g Link, now: u32) -> u64 {
        let top = if fastrand::bool() { top } else { self.any_tree().unwrap_or(top) };
        let sample = |_| self.random_leaf(top, now);
        let Some(victim) = (0..SAMPLES).filter_map(sample).max_by_key(|victim| victim.idle) else { return 0 };
        let bytes = victim.edge.bytes() + victim.edge.body().bytes(self.guard);
        if self.remove_leaf(victim.link, victim.seen, |_| false) { bytes as u64 } else { 0 }
    }

    fn any_tree(&self) -> Option<&'g Link> {
        let (first, second) = self.forest.split_at(fastrand::usize(..self.forest.len()));
        second.iter().chain(first).map(|tree| &tree.top).find(|top| top.load(self.guard) != Ptr::NULL)
    }

    fn random_leaf(&self, top: &'g Link, now: u32) -> Option<Victim<'g>> {
        let mut link = top;
        for _ in 0..HOPS {
            let seen = link.load(self.guard);
            match seen.target() {
                Target::Nothing => return None,
                Target::Table(table) => {
                    let (first, second) = table.links().split_at(fastrand::usize(..table.links().len()));
                    link = second.iter().chain(first).find(|each| each.load(self.guard).thawed() != Ptr::NULL)?;
                }
                Target::Edge(edge) if edge.body().children.load(self.guard) == Ptr::NULL => {
                    let idle = edge.body().owners(self.guard).map(|owner| age(now, owner.tick())).min();
                    return Some(Victim { link, seen, edge, idle: idle.unwrap_or(u32::MAX) });
                }
                Target::Edge(edge) => link = &edge.body().children,
            }
        }
        None
    }
}
