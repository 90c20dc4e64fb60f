//! What the user may set about the circuit breaker, as one plain value that transitions take.
//!
//! Takes nothing, gives the type. Defaults stand in the option table.

/// When a worker's breaker opens and closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Breaker {
    /// Whether it opens at all.
    pub on: bool,
    /// Failures in a row that open it.
    pub failures: u8,
    /// Successes of a half-open one that close it.
    pub successes: u8,
    /// Seconds that it stays open.
    pub open_s: u32,
    /// Seconds in which outcomes count for the share of failures that opens it.
    pub window_s: u32,
}

impl Breaker {
    /// The defaults of the option table (the peers').
    pub const DEFAULT: Breaker = Breaker { on: true, failures: 10, successes: 3, open_s: 60, window_s: 120 };
}
