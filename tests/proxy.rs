//! The whole proxy over real sockets: a gateway in this process between mock engines and a client that is
//! written by hand. One module a theme; the reports of the field that a test answers stand in its comment.

mod rig;

#[path = "proxy/access.rs"]
mod access;
#[path = "proxy/admission.rs"]
mod admission;
#[path = "proxy/auth.rs"]
mod auth;
#[path = "proxy/balance.rs"]
mod balance;
#[path = "proxy/breaker.rs"]
mod breaker;
#[path = "proxy/busy_poll.rs"]
mod busy_poll;
#[path = "proxy/churn.rs"]
mod churn;
#[path = "proxy/clients.rs"]
mod clients;
#[path = "proxy/engine_load.rs"]
mod engine_load;
#[path = "proxy/hostile.rs"]
mod hostile;
#[cfg(debug_assertions)]
#[path = "proxy/panics.rs"]
mod panics;
#[path = "proxy/process.rs"]
mod process;
#[path = "proxy/protocol.rs"]
mod protocol;
#[path = "proxy/relay.rs"]
mod relay;
#[path = "proxy/retries.rs"]
mod retries;
#[path = "proxy/routes.rs"]
mod routes;
#[path = "proxy/stats.rs"]
mod stats;
#[path = "proxy/streams.rs"]
mod streams;
#[path = "proxy/timeouts.rs"]
mod timeouts;
#[path = "proxy/uploads.rs"]
mod uploads;
#[path = "proxy/verbatim.rs"]
mod verbatim;
#[path = "proxy/workers.rs"]
mod workers;
