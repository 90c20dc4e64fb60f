//! Workers that come and go while the gateway works.
//!
//! Takes nothing, gives verdicts: no request is lost by what operators do, and nothing of a worker outlives it.

#[allow(dead_code, reason = "other test programs use the rest")]
mod rig;

#[path = "manage/admin.rs"]
mod admin;
#[path = "manage/fleet.rs"]
mod fleet;
#[path = "manage/scale.rs"]
mod scale;
#[path = "manage/traffic.rs"]
mod traffic;
