//! corelane: a thread-per-core LLM inference gateway. The map, in reading order:
//!
//! * `flow` — the walk of one request; whoever reads it has read the proxy. `flow::pair` — the same with two workers.
//! * `lane` — what one core owns: the ring, connections, pools, timers, buffers, its view of the fleet.
//! * [`shared`] — what every core sees: roster and pairing, settings, load, vitals, prefixes, admission, tallies.
//! * `control` — the other plane: probes, admin listener, reloads, the access log's lines, the only writer of the roster.
//! * [`http1`] — sans-I/O HTTP/1.1. [`config`] — one row an option. [`metrics`] — one row a metric.
//! * [`fault`] — every way to fail, in one table. [`limits`] — every bound, named.
//! * [`json`] — raw pieces of workers' answers. [`span`] — pieces of buffers.
//! * `boot` — cores become lanes; the service manager is told. `cli` — subcommands. `mock` — the mock inference engine.

pub mod boot;
pub mod cli;
pub mod config;
pub mod control;
pub mod fault;
pub mod flow;
pub mod http1;
pub mod json;
pub mod lane;
pub mod limits;
pub mod metrics;
pub mod mock;
pub mod shared;
pub mod span;
