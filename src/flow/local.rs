//! Answers that need no worker.
//!
//! Takes a request for one of the gateway's own routes, gives a whole answer. Never asks a worker: what is
//! said of workers was learnt by the control thread.

use std::borrow::Cow;

use percent_encoding::percent_decode;

use crate::config::Config;
use crate::config::routes::Answer;
use crate::fault::{Fault, What};
use crate::flow::passage::Request;
use crate::http1::{self, Extra};
use crate::lane::Lane;
use crate::lane::wire::Wire;

/// Appends the answer; gives its status.
///
/// # Errors
/// [`What::ModelUnknown`] where a model is asked for that no usable worker serves.
pub fn answer<W: Wire>(lane: &Lane<W>, request: &mut Request, by: Answer, out: &mut Vec<u8>) -> Result<u16, Fault> {
    request.keep_alive.set(request.keep_alive.get() && !lane.is_draining());
    let (status, body) = match by {
        Answer::Ready => lane.shared.readiness.json(lane.shared.drain.phase()),
        Answer::Models => (200, models(lane)),
        Answer::Model => (200, model(lane, request.head.path.of(&request.input))?),
        Answer::ServerInfo => (200, server_info(lane, &request.config)),
        _ => (200, r#"{"status":"ok"}"#.to_string()),
    };
    let extra = Extra {
        request_id: Some(&request.id),
        keep_alive: request.keep_alive.get(),
        allow: &[],
        head_only: request.is_head(),
        version: request.head.version,
    };
    http1::local(out, status, "application/json", body.as_bytes(), &extra);
    Ok(status)
}

/// What is said of a model.
fn entry(id: &str) -> serde_json::Value {
    serde_json::json!({"id": id, "object": "model", "created": 0, "owned_by": "corelane"})
}

/// One model, named by the end of the path.
fn model<W: Wire>(lane: &Lane<W>, path: &[u8]) -> Result<String, Fault> {
    let name = path.strip_prefix(b"/v1/models/").unwrap_or_default();
    let name: Cow<'_, [u8]> = percent_decode(name).into();
    let snapshot = lane.shared.roster.snapshot();
    let mut usable = snapshot.workers.iter().filter(|w| lane.shared.vitals.usable(w.slot));
    let known = usable.find_map(|w| w.models.iter().find(|m| m.as_bytes() == &*name));
    known.map(|id| entry(id).to_string()).ok_or(What::ModelUnknown.into())
}

/// The union of the models of all usable workers, in the OpenAI shape.
fn models<W: Wire>(lane: &Lane<W>) -> String {
    let snapshot = lane.shared.roster.snapshot();
    let usable = snapshot.workers.iter().filter(|w| lane.shared.vitals.usable(w.slot));
    let mut names: Vec<&str> = usable.flat_map(|w| w.models.iter().map(|m| &**m)).collect();
    names.sort_unstable();
    names.dedup();
    let data: Vec<_> = names.into_iter().map(entry).collect();
    serde_json::json!({"object": "list", "data": data}).to_string()
}

/// The harmless part of what usable workers say of themselves; an engine with ranks says it once.
fn server_info<W: Wire>(lane: &Lane<W>, config: &Config) -> String {
    let snapshot = lane.shared.roster.snapshot();
    let workers: Vec<serde_json::Value> = snapshot
        .workers
        .iter()
        .filter(|w| lane.shared.vitals.usable(w.slot) && w.pairing.dp.is_none_or(|dp| dp.rank == 0))
        .filter_map(|w| serde_json::from_str(w.server_info.as_deref()?).ok())
        .collect();
    serde_json::json!({
        "version": env!("CARGO_PKG_VERSION"),
        "policy": config.policy.name(),
        "workers": workers,
    })
    .to_string()
}
