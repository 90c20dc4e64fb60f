//! The admin listener: metrics, readiness, a page of what goes on, and the management of workers, on an address of its own.
//!
//! Takes requests of operators and scrapers, gives text and JSON. Never stands on the public address, never shows a
//! key, never does what a page in somebody's browser asks for; changes workers only through [`Commands`]. Never has
//! more than a few connections, nor for long one that asks for nothing: descriptors are for clients and workers.

mod answers;
mod door;
mod form;
mod workers;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router, middleware};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::time::sleep;

use super::command::Commands;
use super::exposition::{CONTENT_TYPE, Exposition};
use super::fleet::Bases;
use super::page;
use super::reload::Report;
use super::stats::Gauge;
use crate::config::Config;
use crate::limits::MAX_ADMIN_CONNECTIONS;
use crate::shared::Shared;

/// Time for a visitor to send the head of a request, the pause before it included, and then for its body. Longer than
/// scrapers pause.
const SILENCE: Duration = Duration::from_secs(75);
/// Pause after an accept that failed, for lack of descriptors perhaps.
const BREATH: Duration = Duration::from_millis(100);

/// What the handlers read.
#[derive(Clone)]
pub struct Admin {
    shared: &'static Shared,
    config: watch::Receiver<Arc<Config>>,
    commands: Commands,
    exposition: Arc<Exposition>,
    report: Report,
    gauge: Gauge,
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
    pub fn new(
        shared: &'static Shared,
        config: watch::Receiver<Arc<Config>>,
        bases: Bases,
        commands: Commands,
        report: Report,
    ) -> Self {
        let exposition = Arc::new(Exposition::new(shared, bases.clone()));
        Admin { shared, config, commands, exposition, report, gauge: Gauge::new(shared, bases) }
    }

    /// The configuration in effect.
    fn config(&self) -> Arc<Config> {
        self.config.borrow().clone()
    }

    /// Answers requests until the task is dropped.
    pub async fn serve(self, listener: TcpListener) {
        let service = TowerToHyperService::new(self.router());
        let seats = Arc::new(Semaphore::new(MAX_ADMIN_CONNECTIONS));
        loop {
            // Whoever finds no seat waits in the kernel, and takes no descriptor there.
            let Ok(seat) = seats.clone().acquire_owned().await else { return };
            let Ok((stream, _)) = listener.accept().await else {
                sleep(BREATH).await;
                continue;
            };
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(SILENCE);
            let visit = http.serve_connection(TokioIo::new(stream), service.clone());
            tokio::spawn(async move {
                let _seat = seat;
                // What breaks off is the visitor's affair.
                let _ = visit.await;
            });
        }
    }

    fn router(self) -> Router {
        let managing = Router::new()
            .route("/workers", get(workers::list).post(workers::add))
            .route(
                "/workers/{*name}",
                get(workers::show).put(workers::put).patch(workers::patch).delete(workers::remove),
            )
            .route("/list_workers", get(workers::urls))
            .route("/add_worker", post(workers::add_by_query))
            .route("/remove_worker", post(workers::remove_by_query))
            .route("/flush_cache", post(answers::flush_cache))
            .route("/get_loads", get(answers::loads))
            .route("/config", get(config))
            .route("/stats", get(stats))
            .route("/engine_metrics", get(answers::engine_metrics))
            .route_layer(middleware::from_fn_with_state(self.clone(), door::check));
        let alive = || get(|| async { Json(json!({"status": "ok"})) });
        Router::new()
            .route("/", get(|| async { page::response() }))
            .route("/metrics", get(metrics))
            .route("/health", alive())
            .route("/liveness", alive())
            .route("/readiness", get(readiness))
            .merge(managing)
            .fallback(unknown)
            .method_not_allowed_fallback(not_allowed)
            .with_state(self)
    }
}

async fn metrics(State(admin): State<Admin>) -> Response {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], admin.exposition.text()).into_response()
}

/// What the page and `corelane top` show.
async fn stats(State(admin): State<Admin>) -> Response {
    (page::NOT_KEPT, Json(admin.gauge.read())).into_response()
}

/// The same as on the public address, for probes that should not stand in line with clients.
async fn readiness(State(admin): State<Admin>) -> Response {
    let (status, body) = admin.shared.readiness.json(admin.shared.drain.phase());
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// What is in effect, without secrets, and how it came to that.
async fn config(State(admin): State<Admin>) -> Response {
    match admin.report.json() {
        serde_json::Value::Null => {
            error(StatusCode::NOT_FOUND, "not_reloadable", "This process does not read its configuration again.")
        }
        report => Json(report).into_response(),
    }
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

/// The control thread is about to end.
fn ending() -> Response {
    error(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", "corelane is shutting down.")
}
