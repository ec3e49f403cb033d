//! Whether the worker lives, and its end.

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use kvik_runtime::telemetry::render_metrics;
use serde_json::json;

use super::{Answer, Shared, typed};
use crate::store_admin::StoreAdmin;

/// `GET /health`: the process lives.
pub(super) async fn health() -> Response {
    super::json(StatusCode::OK, &json!({"status": "ok"}))
}

/// `GET /ready`: the model is loaded and requests are taken.
pub(super) async fn ready(State(state): Shared) -> Answer {
    let loaded = state.ready()?;
    let body = json!({"status": "ready", "id": state.id, "model": loaded.model_name});
    Ok(super::json(StatusCode::OK, &body))
}

/// `GET /metrics`: those of the whole process, in Prometheus' text format.
pub(super) async fn metrics(State(state): Shared) -> Response {
    if let Ok(loaded) = state.loaded()
        && let Some(stats) = loaded.store_admin.as_ref().and_then(StoreAdmin::stats_in_process)
    {
        loaded.metrics.store(&stats);
    }
    typed(StatusCode::OK, "text/plain; version=0.0.4", Body::from(render_metrics()))
}

/// `POST /drain`: the worker takes nothing new and ends when its requests have.
pub(super) async fn drain(State(state): Shared) -> Response {
    state.draining.cancel();
    super::json(StatusCode::ACCEPTED, &json!({"status": "draining"}))
}
