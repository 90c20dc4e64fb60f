//! What every core sees: atomics and immutable snapshots, nothing else.
//!
//! Takes plain values from lanes and the control thread, gives them to each other. Never blocks, never
//! does I/O, never holds anything that belongs to one core (`Rc`, `RefCell`). Each object names its writer.

pub mod access;
pub mod admission;
mod atomic;
pub mod buckets;
pub mod drain;
pub mod handover;
pub mod load;
#[cfg(test)]
mod load_tests;
pub mod memory;
pub mod prefix;
pub mod readiness;
pub mod reported;
pub mod ring;
pub mod roster;
pub mod rotation;
pub mod settings;
pub mod sticky;
pub mod tallies;
pub mod vitals;

use std::hash::{BuildHasher, Hasher, RandomState};

/// All cross-core state of the process. Made once at start and leaked, so that guards may hold a plain
/// `&'static` and no reference count is touched on the request path.
pub struct Shared {
    /// Which workers exist. Writer: control; each lane says which generation it has seen.
    pub roster: roster::Roster,
    /// The configuration in effect. Writers: boot, then control.
    pub settings: settings::Settings,
    /// In-flight counts and processed work by slot. Writers: every lane, through [`load::Load`]; control (starting
    /// credits, fading, the limit).
    pub load: load::Load,
    /// Health and breaker by slot. Writers: control (probes, seconds, windows, rules) and every lane (outcomes of
    /// requests).
    pub vitals: vitals::Vitals,
    /// What engines say of their load. Writer: control.
    pub reported: reported::Reported,
    /// Which worker has which prefix. Writers: route (inserts), control (trims, purges).
    pub prefix: prefix::Forest,
    /// Round-robin positions per (model, role). Writers: route, every lane.
    pub rotation: rotation::Rotation,
    /// Workers of routing keys. Writers: route, every lane; control forgets.
    pub sticky: sticky::Sticky,
    /// Lengths of requests per (model, role). Writers: route, every lane.
    pub buckets: buckets::Buckets,
    /// Seed of the hashes of prompts; another one in every process. Written once.
    pub seed: u64,
    /// Counters, one cache-padded block a lane. Writer: that lane.
    pub tallies: tallies::Tallies,
    /// Records for the access log. Writers: settle, every lane; the log's thread (what became of lines), control (the
    /// wish for a new file).
    pub access: access::Access,
    /// Requests that may go to workers at a time, and who waits. Writers: admit, every lane; boot, then control (the
    /// limit).
    pub admission: admission::Admission,
    /// Memory for buffered bodies of requests and answers. Writers: every lane.
    pub memory: memory::Memory,
    /// New connections on their way to another lane. Writer: accept.
    pub handover: handover::Handover,
    /// Where the process stands between start and exit. Writer: boot.
    pub drain: drain::Drain,
    /// Counts behind `/readiness`. Writer: control.
    pub readiness: readiness::Readiness,
}

impl Shared {
    /// State for `lanes` lanes, leaked for the life of the process, with [`prefix::DEFAULT_BYTES`] for prefix trees.
    pub fn leak(lanes: usize) -> &'static Shared {
        Shared::leak_with(lanes, prefix::DEFAULT_BYTES)
    }

    /// The same with `prefix_bytes` for prefix trees.
    pub fn leak_with(lanes: usize, prefix_bytes: u64) -> &'static Shared {
        // The standard library's keys come from the operating system.
        let seed = RandomState::new().build_hasher().finish();
        Box::leak(Box::new(Shared::new(lanes, prefix_bytes, seed)))
    }

    /// State that is not leaked, with a given seed of the hashes of prompts: for who wants the same twice.
    pub fn new(lanes: usize, prefix_bytes: u64, seed: u64) -> Shared {
        Shared {
            roster: roster::Roster::new(lanes),
            settings: settings::Settings::default(),
            load: load::Load::new(),
            vitals: vitals::Vitals::new(),
            reported: reported::Reported::new(),
            prefix: prefix::Forest::new(prefix_bytes),
            rotation: rotation::Rotation::new(),
            sticky: sticky::Sticky::new(),
            buckets: buckets::Buckets::new(),
            seed,
            tallies: tallies::Tallies::new(lanes),
            access: access::Access::default(),
            admission: admission::Admission::new(lanes),
            memory: memory::Memory::default(),
            handover: handover::Handover::new(lanes),
            drain: drain::Drain::new(),
            readiness: readiness::Readiness::new(),
        }
    }

    /// Limits requests to `permits` at a time (0: not), with `places` for those that wait (boot and control only).
    pub fn limit_requests(&self, permits: u32, places: u32) {
        // Who goes by a configuration with a limit, when there is none any more, does not have to wait.
        let permits = if permits == 0 { admission::UNLIMITED } else { permits };
        for lane in self.admission.open(permits, places) {
            self.handover.ring(lane);
        }
    }

    /// Opens the breaker of a slot's worker that would be open, if no more than half of each of its pools is out then.
    /// Whether it did; also says no when another thread decides something of the kind: control tries again within a
    /// second.
    ///
    /// That the half holds is sure: only who has the turn opens breakers, and it counts by the newest roster.
    #[cold]
    pub fn try_open(&self, slot: roster::Slot) -> bool {
        let Some(turn) = self.vitals.turn() else { return false };
        self.roster.snapshot().has_room_out(slot, &self.vitals) && turn.open(slot)
    }

    /// Lets every worker in that is out for its breaker, because none may open any more (control only).
    pub fn close_breakers(&self) {
        let turn = self.wait_for_turn();
        for worker in &self.roster.snapshot().workers {
            turn.make_yield(worker.slot);
        }
    }

    fn wait_for_turn(&self) -> vitals::Turn<'_> {
        loop {
            // Whoever has it gives it back within microseconds.
            match self.vitals.turn() {
                Some(turn) => return turn,
                None => std::thread::yield_now(),
            }
        }
    }

    /// Makes breakers yield where pools have shrunk so that more than half of one is out (control only, after each
    /// publication).
    pub fn keep_half(&self) {
        let turn = self.wait_for_turn();
        let snapshot = self.roster.snapshot();
        while let Some(slot) = snapshot.too_many_out(&self.vitals) {
            turn.make_yield(slot);
        }
    }
}
