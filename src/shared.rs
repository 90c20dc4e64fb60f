//! What every core sees: atomics and immutable snapshots, nothing else.
//!
//! Takes plain values from lanes and the control thread, gives them to each other. Never blocks, never
//! does I/O, never holds anything that belongs to one core (`Rc`, `RefCell`). Each object names its writer.

pub mod drain;
pub mod handover;
pub mod load;
pub mod memory;
pub mod readiness;
pub mod roster;
pub mod rotation;
pub mod tallies;
pub mod vitals;

/// All cross-core state of the process. Made once at start and leaked, so that guards may hold a plain
/// `&'static` and no reference count is touched on the request path.
pub struct Shared {
    /// Which workers exist. Writer: control.
    pub roster: roster::Roster,
    /// In-flight and processed counts by slot. Writers: every lane, through [`load::Load`].
    pub load: load::Load,
    /// Health by slot. Writers: control (probes), settle (breaker).
    pub vitals: vitals::Vitals,
    /// Round-robin positions per (model, role). Writers: route, every lane.
    pub rotation: rotation::Rotation,
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
    /// State for `lanes` lanes, leaked for the life of the process.
    pub fn leak(lanes: usize) -> &'static Shared {
        Box::leak(Box::new(Shared {
            roster: roster::Roster::new(lanes),
            load: load::Load::new(),
            vitals: vitals::Vitals::new(),
            rotation: rotation::Rotation::new(),
            tallies: tallies::Tallies::new(lanes),
            memory: memory::Memory::default(),
            handover: handover::Handover::new(lanes),
            drain: drain::Drain::new(),
            readiness: readiness::Readiness::new(),
        }))
    }
}
