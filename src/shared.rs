//! What every core sees: atomics and immutable snapshots, nothing else.
//!
//! Takes plain values from lanes and the control thread, gives them to each other. Never blocks, never
//! does I/O, never holds anything that belongs to one core (`Rc`, `RefCell`). Each object names its writer.

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
pub mod ring;
pub mod roster;
pub mod rotation;
pub mod sticky;
pub mod tallies;
pub mod vitals;

use std::hash::{BuildHasher, Hasher, RandomState};

/// All cross-core state of the process. Made once at start and leaked, so that guards may hold a plain
/// `&'static` and no reference count is touched on the request path.
pub struct Shared {
    /// Which workers exist. Writer: control.
    pub roster: roster::Roster,
    /// In-flight counts and processed work by slot. Writers: every lane, through [`load::Load`].
    pub load: load::Load,
    /// Health by slot. Writers: control (probes, pauses) and every lane (outcomes of requests).
    pub vitals: vitals::Vitals,
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
    /// Memory for buffered bodies. Writers: receive, every lane.
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
        Box::leak(Box::new(Shared {
            roster: roster::Roster::new(lanes),
            load: load::Load::new(),
            vitals: vitals::Vitals::new(),
            prefix: prefix::Forest::new(prefix_bytes),
            rotation: rotation::Rotation::new(),
            sticky: sticky::Sticky::new(),
            buckets: buckets::Buckets::new(),
            // The standard library's keys come from the operating system.
            seed: RandomState::new().build_hasher().finish(),
            tallies: tallies::Tallies::new(lanes),
            memory: memory::Memory::default(),
            handover: handover::Handover::new(lanes),
            drain: drain::Drain::new(),
            readiness: readiness::Readiness::new(),
        }))
    }
}
