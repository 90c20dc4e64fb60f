//! Questions that go to all engines: flush, loads, metrics.
//!
//! Takes requests, gives the engines' answers put together, with who did not answer. Never passes an engine's own text
//! on, but for its metrics.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper::Method;
use serde::Serialize;
use serde_json::{Value, json};

use super::{Admin, ending};
use crate::config::Engine;
use crate::control::command::Command;
use crate::control::exposition::escape;
use crate::control::fanout::{self, Target};
use crate::control::fetch::Reply;
use crate::control::load_report::{Report, metrics, sglang};
use crate::control::merge::{self, Page};
use crate::limits::MAX_MERGED_BYTES;

/// What an engine answered with 200, whole.
fn good(reply: Reply) -> Result<Vec<u8>, String> {
    match reply {
        Reply { status: 200, truncated: false, body } => Ok(body),
        Reply { status: 200, .. } => Err("its answer is too long".into()),
        Reply { status, .. } => Err(format!("it answers {status}")),
    }
}

async fn get(target: &Target, path: &str) -> Result<Vec<u8>, String> {
    target.ask(Method::GET, path).await.map_err(|failure| failure.to_string()).and_then(good)
}

/// `POST /flush_cache`: SGLang's engines forget their caches, and what is known here of who has which prefix is
/// forgotten too. 200 when all have, else 206.
pub async fn flush_cache(State(admin): State<Admin>) -> Response {
    let mut targets = fanout::targets(&admin.shared.roster.snapshot());
    targets.retain(|target| target.backend.engine() == Engine::Sglang);
    let answers = fanout::each(&targets, |target| async move {
        let answer = target.ask(Method::POST, "/flush_cache").await;
        answer.map_err(|failure| failure.to_string()).and_then(good).map(drop)
    })
    .await;
    let (mut successful, mut failed, mut slots) = (Vec::new(), Vec::new(), Vec::new());
    for (target, answer) in &answers {
        match answer {
            Ok(()) => {
                successful.push(&target.url);
                slots.extend(&target.slots);
            }
            Err(why) => failed.push((&target.url, why)),
        }
    }
    if admin.commands.give(|reply| Command::Forget(slots, reply)).await.is_err() {
        return ending();
    }
    let status = if failed.is_empty() { StatusCode::OK } else { StatusCode::PARTIAL_CONTENT };
    let message = format!("{} of {} SGLang engines have flushed their cache.", successful.len(), answers.len());
    let body = json!({
        "successful": successful, "failed": failed, "total_workers": answers.len(), "http_workers": answers.len(),
        "message": message,
    });
    (status, Json(body)).into_response()
}

/// An engine in the list of loads.
#[derive(Serialize)]
struct Load {
    worker: Box<str>,
    worker_type: &'static str,
    /// Requests that it runs or keeps waiting; -1: it has not said.
    load: i64,
    #[serde(flatten)]
    report: Report,
    /// Requests that this process has there.
    in_flight: u64,
    error: Option<String>,
}

/// `GET /get_loads`: what every engine says of its load.
pub async fn loads(State(admin): State<Admin>) -> Response {
    let shared = admin.shared;
    let targets = fanout::targets(&shared.roster.snapshot());
    let answers = fanout::each(&targets, |target| async move { report(&target).await }).await;
    let of = |(target, answer): &(Arc<Target>, Result<Report, String>)| Load {
        worker: target.url.clone(),
        worker_type: target.role.name(),
        load: answer.as_ref().map_or(-1, |report| (report.running + report.waiting) as i64),
        report: answer.clone().unwrap_or_default(),
        in_flight: target.slots.iter().map(|&slot| u64::from(shared.load.word(slot).in_flight())).sum(),
        error: answer.as_ref().err().cloned(),
    };
    let loads: Vec<Load> = answers.iter().map(of).collect();
    let failed = loads.iter().filter(|load| load.error.is_some()).count();
    let successful = loads.len() - failed;
    let body = json!({"total_workers": loads.len(), "successful": successful, "failed": failed, "loads": loads});
    Json(body).into_response()
}

async fn report(target: &Target) -> Result<Report, String> {
    if target.backend.engine() == Engine::Vllm {
        let text = get(target, "/metrics").await?;
        let ranks = metrics(&String::from_utf8_lossy(&text));
        return ranks.map(|ranks| ranks.total()).ok_or_else(|| "its metrics say no load".into());
    }
    let reply = target.ask(Method::GET, "/v1/loads").await.map_err(|failure| failure.to_string())?;
    let body = match reply.status {
        // Older engines have another route.
        404 => get(target, "/get_load").await?,
        _ => good(reply)?,
    };
    let said: Value = serde_json::from_slice(&body).map_err(|_| "its answer is no JSON".to_owned())?;
    sglang(&said).map(|ranks| ranks.total()).ok_or_else(|| "its answer says no load".into())
}

/// `GET /engine_metrics`: the metrics of all engines, each sample with the worker's URL as a label.
pub async fn engine_metrics(State(admin): State<Admin>) -> Response {
    // No sample may stand there twice.
    let targets = fanout::addresses(&admin.shared.roster.snapshot());
    // What has come and waits for the rest is bounded too.
    let room = Arc::new(AtomicUsize::new(MAX_MERGED_BYTES));
    let answers = fanout::each(&targets, |target| {
        let room = room.clone();
        async move {
            let text = get(&target, "/metrics").await.ok()?;
            // Relaxed: it is a count, nothing is published through it.
            let fits = room.fetch_update(Relaxed, Relaxed, |room| room.checked_sub(text.len())).is_ok();
            fits.then_some(text)
        }
    })
    .await;
    let mut page = Page::default();
    let mut up = String::from("# TYPE corelane_engine_metrics_up gauge\n");
    for (target, text) in &answers {
        let dropped = text.as_ref().map_or(0, |text| page.add(&target.url, &String::from_utf8_lossy(text)));
        if dropped > 0 {
            tracing::debug!(worker = %target.url, lines = dropped, "metrics of the worker that make no sense");
        }
        let up_now = u8::from(text.is_some());
        up += &format!("corelane_engine_metrics_up{{worker=\"{}\"}} {up_now}\n", escape(&target.url));
    }
    ([(header::CONTENT_TYPE, merge::CONTENT_TYPE)], page.text() + &up).into_response()
}
