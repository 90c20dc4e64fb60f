//! The targets of fuzzing: each takes any bytes and panics where a property of the crate does not hold.
//!
//! Takes bytes that libFuzzer or the smoke test (`tests/fuzz_smoke.rs`) made up, gives nothing. Never depends on
//! anything but those bytes: where an input is cut into pieces is drawn from a hash of it, so seeds are plain messages.

pub mod chunked;
pub mod config_file;
mod cuts;
pub mod json_pieces;
pub mod json_scan;
pub mod logprobs;
pub mod multipart;
pub mod patch;
mod plain;
pub mod request_head;
pub mod response_head;

/// A target by its name.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const ALL: &[Target] = &[
    ("chunked", chunked::chunked),
    ("config_file", config_file::config_file),
    ("json_pieces", json_pieces::json_pieces),
    ("json_scan", json_scan::json_scan),
    ("logprobs", logprobs::logprobs),
    ("multipart", multipart::multipart),
    ("patch", patch::patch),
    ("request_head", request_head::request_head),
    ("response_head", response_head::response_head),
];
