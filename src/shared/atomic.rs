//! The atomics of what is model-checked: the standard library's, and a model checker's in the model checks, which compile
//! the same sources (`tests/models.rs`).
//!
//! Takes nothing, gives types. Never more than what those sources use.

pub use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
