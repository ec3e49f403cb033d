//! What clients of the gateway can ask about engines, under the paths of kvcached's controller.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use http::StatusCode;
use http::header::CONTENT_TYPE;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use crate::actions;
use crate::engine::handle::EngineHandle;
use crate::engine::machine::Phase;
use crate::status::{self, EngineStatus};
use crate::supervisor::Supervisor;

/// Time without a request after which a model counts as idle where the caller names none, in seconds.
const IDLE_THRESHOLD_S: f64 = 300.0;
/// The window of rates where the caller names none, in seconds.
const WINDOW_S: u64 = 60;

#[derive(Debug, Deserialize)]
struct Looked {
    threshold: Option<f64>,
    window: Option<u64>,
}

/// Routes that every caller gets.
pub(crate) fn routes(supervisor: &Arc<Supervisor>) -> Router {
    Router::new().route("/health/{*model}", get(health)).with_state(Arc::clone(supervisor))
}

/// Routes for administrators.
pub(crate) fn admin_routes(supervisor: &Arc<Supervisor>) -> Router {
    Router::new()
        .route("/engines", get(engines))
        .route("/models", get(models))
        .route("/models/idle", get(idle))
        .route("/models/active", get(active))
        .route("/traffic/stats", get(traffic))
        .route("/traffic/stats/{*model}", get(traffic_of))
        .route("/sleep/status", get(sleep_status))
        .route("/sleep/candidates", get(candidates))
        .route("/action/sleep/{*model}", post(put_to_sleep))
        .route("/action/wakeup/{*model}", post(wake_up))
        .with_state(Arc::clone(supervisor))
}

pub(crate) fn answer(status: StatusCode, value: &Value) -> Response {
    (status, [(CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

fn ok(value: &Value) -> Response {
    answer(StatusCode::OK, value)
}

/// An error in the form that those of the `OpenAI` API have.
pub(crate) fn refused(status: StatusCode, message: &str) -> Response {
    let kind = if status.is_client_error() { "invalid_request_error" } else { "server_error" };
    answer(status, &json!({ "error": { "message": message, "type": kind, "param": null, "code": null } }))
}

fn unknown(model: &str) -> Response {
    let shown: String = model.chars().take(200).collect();
    refused(StatusCode::NOT_FOUND, &format!("no engine serves the model {shown:?}"))
}

async fn engines(State(supervisor): State<Arc<Supervisor>>) -> Response {
    ok(&json!({ "engines": status::engines(&supervisor) }))
}

async fn health(State(supervisor): State<Arc<Supervisor>>, Path(model): Path<String>) -> Response {
    if model == "all" {
        let engines = supervisor.engines();
        let health =
            |engine: &Arc<EngineHandle>| (engine.config.model.clone(), health_of(&supervisor, engine).1);
        return ok(&json!({ "models": engines.iter().map(health).collect::<Map<String, Value>>() }));
    }
    match supervisor.find_model(&model) {
        Some(engine) => {
            let (status, value) = health_of(&supervisor, &engine);
            answer(status, &value)
        }
        None => unknown(&model),
    }
}

fn health_of(supervisor: &Supervisor, engine: &EngineHandle) -> (StatusCode, Value) {
    let phase = supervisor.phase(engine.name());
    // A model that sleeps is served: the next request wakes it.
    let (status, word) = match phase {
        Some(Phase::Ready | Phase::GivingWay) => (StatusCode::OK, "healthy"),
        Some(Phase::Asleep | Phase::Queued | Phase::Starting | Phase::FallingAsleep) => {
            (StatusCode::OK, "sleeping")
        }
        Some(Phase::Stopping | Phase::Failed) | None => (StatusCode::SERVICE_UNAVAILABLE, "unhealthy"),
    };
    let state = phase.map_or("gone", Phase::as_str);
    (status, json!({ "model": engine.config.model, "status": word, "state": state }))
}

async fn models(State(supervisor): State<Arc<Supervisor>>) -> Response {
    let engines = status::engines(&supervisor);
    let model = |engine: &EngineStatus| {
        let value = json!({ "name": engine.name, "endpoint": engine.url, "engine": engine.kind, "state": engine.state });
        (engine.model.clone(), value)
    };
    ok(&json!({ "models": engines.iter().map(model).collect::<Map<String, Value>>() }))
}

async fn traffic(State(supervisor): State<Arc<Supervisor>>, Query(looked): Query<Looked>) -> Response {
    let window_s = looked.window.unwrap_or(WINDOW_S);
    let engines = supervisor.engines();
    let models = engines
        .iter()
        .map(|engine| (engine.config.model.clone(), traffic_report(&supervisor, engine, window_s)));
    ok(&json!({ "window_seconds": window_s, "models": models.collect::<Map<String, Value>>() }))
}

async fn traffic_of(
    State(supervisor): State<Arc<Supervisor>>,
    Path(model): Path<String>,
    Query(looked): Query<Looked>,
) -> Response {
    let window_s = looked.window.unwrap_or(WINDOW_S);
    match supervisor.find_any(&model) {
        Some(engine) => ok(&traffic_report(&supervisor, &engine, window_s)),
        None => unknown(&model),
    }
}

fn traffic_report(supervisor: &Supervisor, engine: &EngineHandle, window_s: u64) -> Value {
    let now = Instant::now();
    let report = engine.traffic.lock().report(window_s, now);
    let state = supervisor.look(|machine, _| machine.engine(engine.name()).cloned());
    let (in_flight, waiting) = state.as_ref().map_or((0, 0), |state| (state.in_flight, state.waiting));
    let idle_s = state
        .filter(|state| state.in_flight == 0)
        .map_or(0.0, |state| now.saturating_duration_since(state.last_used).as_secs_f64());
    let mut value = json!({
        "model": engine.config.model, "in_flight": in_flight, "waiting": waiting, "idle_seconds": idle_s,
    });
    if let (Some(value), Ok(Value::Object(report))) = (value.as_object_mut(), serde_json::to_value(report)) {
        value.extend(report);
    }
    value
}

async fn idle(State(supervisor): State<Arc<Supervisor>>, Query(looked): Query<Looked>) -> Response {
    let threshold_s = looked.threshold.unwrap_or(IDLE_THRESHOLD_S);
    let engines = status::engines(&supervisor);
    let is_idle = |engine: &&EngineStatus| {
        engine.in_flight == 0 && engine.waiting == 0 && threshold_s <= engine.idle_seconds
    };
    ok(&json!({ "threshold_seconds": threshold_s, "models": listed(engines.iter().filter(is_idle)) }))
}

async fn active(State(supervisor): State<Arc<Supervisor>>, Query(looked): Query<Looked>) -> Response {
    let threshold_s = looked.threshold.unwrap_or(IDLE_THRESHOLD_S);
    let engines = status::engines(&supervisor);
    let is_active = |engine: &&EngineStatus| {
        let is_used = 0 < engine.in_flight + engine.waiting;
        is_used || (0 < engine.total_requests && engine.idle_seconds < threshold_s)
    };
    ok(&json!({ "threshold_seconds": threshold_s, "models": listed(engines.iter().filter(is_active)) }))
}

fn listed<'a>(engines: impl Iterator<Item = &'a EngineStatus>) -> Vec<Value> {
    let entry = |engine: &EngineStatus| {
        json!({
            "model": engine.model, "state": engine.state, "idle_seconds": engine.idle_seconds,
            "in_flight": engine.in_flight, "requests_per_second": engine.requests_per_second,
        })
    };
    engines.map(entry).collect()
}

async fn sleep_status(State(supervisor): State<Arc<Supervisor>>) -> Response {
    let engines = status::engines(&supervisor);
    let entry = |engine: &EngineStatus| {
        let value = json!({
            "state": engine.state, "is_sleeping": engine.state == "asleep", "state_seconds": engine.state_seconds,
            "wakes": engine.wakes, "last_wake_seconds": engine.last_wake_seconds,
        });
        (engine.model.clone(), value)
    };
    ok(&json!({ "models": engines.iter().map(entry).collect::<Map<String, Value>>() }))
}

/// The models that could sleep now, the longest idle first.
async fn candidates(State(supervisor): State<Arc<Supervisor>>) -> Response {
    let mut engines = status::engines(&supervisor);
    engines.retain(|engine| {
        let sleeps = supervisor.find(&engine.name).is_some_and(|engine| engine.config.sleeps());
        sleeps && engine.state == "ready" && engine.in_flight == 0 && engine.waiting == 0
    });
    engines.sort_by(|left, right| right.idle_seconds.total_cmp(&left.idle_seconds));
    ok(&json!({ "models": listed(engines.iter()) }))
}

pub(crate) async fn put_to_sleep(
    State(supervisor): State<Arc<Supervisor>>,
    Path(model): Path<String>,
) -> Response {
    let Some(engine) = supervisor.find_any(&model) else { return unknown(&model) };
    match actions::sleep(&supervisor, &engine).await {
        Ok(()) => ok(&json!({ "model": engine.config.model, "status": "asleep" })),
        Err(why) => refused(StatusCode::CONFLICT, &format!("{} does not sleep: {why}", engine.config.model)),
    }
}

pub(crate) async fn wake_up(
    State(supervisor): State<Arc<Supervisor>>,
    Path(model): Path<String>,
) -> Response {
    let Some(engine) = supervisor.find_any(&model) else { return unknown(&model) };
    match actions::wake(&supervisor, &engine).await {
        Ok(()) => ok(&json!({ "model": engine.config.model, "status": "ready" })),
        Err(why) => {
            refused(StatusCode::SERVICE_UNAVAILABLE, &format!("{} does not wake: {why}", engine.config.model))
        }
    }
}
