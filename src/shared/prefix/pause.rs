//! Where an operation on the tree may be stopped by a test.
//!
//! Takes a point by name, gives nothing. Never does anything in production: [`Never`] has no size and no code.

/// A place between two steps of an operation that other threads can see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Point {
    /// Before a link is read on the way down.
    Step,
    /// Before an owner is written into a node.
    Own,
    /// After that, before the node is checked to be in its place still.
    Check,
    /// Before a new leaf is published.
    Leaf,
    /// Before a table takes the place of a single child.
    Fork,
    /// Before a split is published.
    Split,
    /// After that, before late owners are copied to the new upper node.
    Adopt,
    /// Before a body or a table is frozen.
    Freeze,
    /// After that, before its fate is published.
    Decide,
    /// After something was unlinked, before it is handed to the collector.
    Unlinked,
}

/// What happens at a point. Called with no lock held; may block for as long as it likes.
pub trait Pause: Send + Sync + 'static {
    /// The calling thread has come to `point`.
    fn at(&self, point: Point);
}

/// Nothing happens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Never;

impl Pause for Never {
    #[inline(always)]
    fn at(&self, _: Point) {}
}
