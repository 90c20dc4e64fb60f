//! The admin listener: metrics, readiness and the list of workers, on an address of its own.
//!
//! Takes GET requests of operators and scrapers, gives text and JSON. Never stands on the public address,
//! never changes anything, never shows a key.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Serialize;
use serde_json::json;
use tokio::net::TcpListener;

use super::exposition::{CONTENT_TYPE, Exposition};
use super::fleet::{Bases, Note, Notes};
use crate::shared::Shared;
use crate::shared::roster::{DpRank, Role, Worker};

/// What the handlers read.
#[derive(Clone)]
pub struct Admin {
    shared: &'static Shared,
    bases: Bases,
    notes: Notes,
    exposition: Arc<Exposition>,
}

/// A worker in the list.
#[derive(Serialize)]
struct Entry {
    /// Slot and tenancy: names this worker and no later one.
    id: String,
    url: Box<str>,
    role: &'static str,
    backend: &'static str,
    /// Prefill and decode workers of one group and backend are paired; `null` for regular workers.
    group: Option<Box<str>>,
    /// The data-parallel rank that it stands for; `null` for an engine as a whole.
    dp: Option<Rank>,
    models: Box<[Box<str>]>,
    state: &'static str,
    /// Why the state is what it is; `null` before the first change.
    reason: Option<Box<str>>,
    /// Requests that failed on it since one last succeeded.
    failures_in_row: u32,
    /// `closed`, `half_open`, `open`, or `held`: it would be open, but half of its pool is.
    breaker: &'static str,
    /// Seconds until it is half-open; `null` while it is not open.
    breaker_open_s: Option<u32>,
    /// Requests that a half-open breaker has let in and that have not ended.
    breaker_trials: u32,
    /// Since its newest probe ended; `null` before the first.
    last_probe_ms_ago: Option<u64>,
    in_flight: u32,
    selected_total: u64,
}

/// A data-parallel rank in the list.
#[derive(Serialize)]
struct Rank {
    rank: u32,
    size: u32,
}

/// Opens the admin listener.
///
/// # Errors
/// The system's error, with a sentence that names the option to change.
pub async fn bind(host: IpAddr, port: u16) -> io::Result<TcpListener> {
    let addr = SocketAddr::new(host, port);
    TcpListener::bind(addr).await.map_err(|e| {
        let option =
            if e.kind() == io::ErrorKind::AddrNotAvailable { "--prometheus-host" } else { "--prometheus-port" };
        io::Error::new(e.kind(), format!("cannot open the admin listener on {addr}: {e}; change {option}"))
    })
}

impl Admin {
    /// Handlers over the process's shared state.
    pub fn new(shared: &'static Shared, bases: Bases, notes: Notes) -> Self {
        Admin { shared, notes, exposition: Arc::new(Exposition::new(shared, bases.clone())), bases }
    }

    /// Answers requests until the task is dropped.
    pub async fn serve(self, listener: TcpListener) {
        // axum's loop retries failed accepts and does not return.
        let _ = axum::serve(listener, self.router()).await;
    }

    fn router(self) -> Router {
        Router::new()
            .route("/metrics", get(metrics))
            .route("/workers", get(workers))
            .route("/health", get(|| async { Json(json!({"status": "ok"})) }))
            .route("/readiness", get(readiness))
            .fallback(unknown)
            .method_not_allowed_fallback(not_allowed)
            .with_state(self)
    }
}

async fn metrics(State(admin): State<Admin>) -> Response {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], admin.exposition.text()).into_response()
}

async fn workers(State(admin): State<Admin>) -> Response {
    let shared = admin.shared;
    let snapshot = shared.roster.snapshot();
    let entry = |w: &Arc<Worker>, note: Note| Entry {
        id: format!("{}-{}", w.slot, w.era),
        url: w.url.clone(),
        role: w.role.name(),
        backend: w.pairing.backend.name(),
        group: (w.role != Role::Regular).then(|| w.pairing.group.clone()),
        dp: w.pairing.dp.map(|DpRank { rank, size }| Rank { rank, size }),
        models: w.models.clone(),
        state: shared.vitals.health(w.slot).name(),
        reason: note.reason,
        failures_in_row: shared.vitals.vital(w.slot).failures(),
        breaker: shared.vitals.vital(w.slot).state().name(),
        breaker_open_s: Some(shared.vitals.vital(w.slot).open_left_s()).filter(|&left| left > 0),
        breaker_trials: shared.vitals.vital(w.slot).trials(),
        last_probe_ms_ago: note.probed.map(|at| at.elapsed().as_millis() as u64),
        in_flight: shared.load.word(w.slot).in_flight(),
        selected_total: admin.bases.selected(shared, w.slot),
    };
    let workers: Vec<Entry> = snapshot.workers.iter().map(|w| entry(w, admin.notes.of(w.slot))).collect();
    Json(json!({"total": workers.len(), "workers": workers})).into_response()
}

/// The same as on the public address, for probes that should not stand in line with clients.
async fn readiness(State(admin): State<Admin>) -> Response {
    let (status, body) = admin.shared.readiness.json(admin.shared.drain.phase());
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

async fn unknown(uri: Uri) -> Response {
    error(StatusCode::NOT_FOUND, "not_found", &format!("No such route on the admin listener: {}", uri.path()))
}

async fn not_allowed() -> Response {
    error(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "This route does not support the method.")
}

fn error(status: StatusCode, code: &str, message: &str) -> Response {
    let body = json!({"error": {"message": message, "type": "invalid_request_error", "code": code, "param": null}});
    (status, Json(body)).into_response()
}
