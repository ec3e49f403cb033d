//! Whether the worker lives, and its end.

use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use http::StatusCode;
use kvik_proto::moves::{DrainReport, DrainRequest};
use kvik_runtime::telemetry::render_metrics;
use serde_json::json;

use super::{Answer, Shared, parse, read_body, typed};
use crate::error::Refusal;
use crate::store_admin::StoreAdmin;

/// Time between two reports of a drain: a bar that moves smoothly.
const REPORT_INTERVAL: Duration = Duration::from_millis(200);
/// Longest deadline of a drain, in seconds: a day.
const MAX_DEADLINE_S: u64 = 86_400;

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
    if let Ok(loaded) = state.loaded() {
        if let Some(stats) = loaded.store_admin.as_ref().and_then(StoreAdmin::stats_in_process) {
            loaded.metrics.store(&stats);
        }
        if let Some(device) = loaded.device.clone() {
            // The driver may take its time.
            let usage = tokio::task::spawn_blocking(move || device.read()).await;
            loaded.metrics.device(usage.unwrap_or_default());
        }
    }
    typed(StatusCode::OK, "text/plain; version=0.0.4", Body::from(render_metrics()))
}

/// `POST /drain`: the worker takes nothing new and ends when its requests have ended or gone elsewhere.
pub(super) async fn drain(State(state): Shared, request: Request) -> Answer {
    let body = read_body(&state, request).await?;
    let DrainRequest { deadline_s, follow } =
        if body.trim_ascii().is_empty() { DrainRequest::default() } else { parse(&body)? };
    if let Some(deadline_s) = deadline_s {
        if !(1..=MAX_DEADLINE_S).contains(&deadline_s) {
            return Err(Refusal::field("deadline_s", deadline_s, &format!("1 to {MAX_DEADLINE_S}")));
        }
        state.drain_grace.store(deadline_s, Ordering::Relaxed);
    }
    state.draining.cancel();
    if !follow {
        return Ok(super::json(StatusCode::ACCEPTED, &json!({"status": "draining"})));
    }
    let reports = stream::unfold(Some(state), |state| async move {
        let state = state?;
        let is_over = tokio::time::timeout(REPORT_INTERVAL, state.drained.cancelled()).await.is_ok();
        let report = state.loaded_at_end().map(|loaded| loaded.running.drain_report()).unwrap_or_default();
        let mut line = serde_json::to_vec(&DrainReport { is_over, ..report }).unwrap_or_default();
        line.push(b'\n');
        Some((Ok::<Bytes, Infallible>(Bytes::from(line)), (!is_over).then_some(state)))
    });
    Ok(typed(StatusCode::OK, "application/x-ndjson", Body::from_stream(reports)))
}
