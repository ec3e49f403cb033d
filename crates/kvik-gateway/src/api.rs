//! The routes.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, StatusCode};
use kvik_runtime::telemetry;
use serde_json::json;

use crate::backend::BackendKind;
use crate::error::Refusal;
use crate::index_api;
use crate::metrics::Metrics;
use crate::proxy;
use crate::routing::Seat;
use crate::state::Shared;

/// The document that `/openapi.json` serves.
pub const OPENAPI: &str = include_str!("openapi.json");

/// A path whose requests go to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    Completions,
    Chat,
    Generate,
    Tokenize,
    Detokenize,
}

impl Route {
    /// In the order of their numbers.
    pub(crate) const ALL: [Self; 5] =
        [Self::Completions, Self::Chat, Self::Generate, Self::Tokenize, Self::Detokenize];

    /// The path, which is also its name in metrics and logs.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
            Self::Generate => "/generate",
            Self::Tokenize => "/tokenize",
            Self::Detokenize => "/detokenize",
        }
    }

    /// Where a backend has it. Engines without `/generate` get it as one of the others.
    pub(crate) fn upstream_path(self, kind: BackendKind) -> &'static str {
        match (self, kind) {
            (Self::Generate, BackendKind::Worker) => "/inference/generate",
            (Self::Generate, BackendKind::OpenAi) => Self::Completions.name(),
            (route, _) => route.name(),
        }
    }

    /// Whether a request keeps a worker generating.
    pub(crate) fn is_generation(self) -> bool {
        matches!(self, Self::Completions | Self::Chat | Self::Generate)
    }
}

/// All routes.
pub(crate) fn router(shared: Arc<Shared>) -> Router {
    let mut router = Router::new();
    for route in Route::ALL {
        let forward =
            move |State(shared): State<Arc<Shared>>, request: Request| proxy::forward(shared, route, request);
        router = router.route(route.name(), post(forward));
    }
    router
        .route("/v1/models", get(models))
        .route("/v1/models/{*model}", get(model))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(openapi))
        .route("/v1/score", post(index_api::score))
        .route("/index/stats", get(index_api::stats))
        .route("/index/blocks", get(index_api::blocks))
        .fallback(async || refuse(Refusal::unknown_route()))
        .method_not_allowed_fallback(async || refuse(Refusal::wrong_method()))
        .with_state(shared)
}

/// Counts and answers a refusal.
pub(crate) fn refuse(refusal: Refusal) -> Response {
    Metrics::rejected(refusal.reason);
    refusal.into_response()
}

async fn models(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    let view = shared.view();
    if !view.keys.accepts(&headers) {
        return refuse(Refusal::unauthorized(WRONG_KEY));
    }
    let groups = view.fleet.groups.iter().filter(|group| !group.seats.is_empty());
    let data: Vec<_> = groups.map(|group| model_object(&group.model)).collect();
    json_answer(StatusCode::OK, &json!({ "object": "list", "data": data }))
}

async fn model(State(shared): State<Arc<Shared>>, Path(model): Path<String>, headers: HeaderMap) -> Response {
    let view = shared.view();
    if !view.keys.accepts(&headers) {
        return refuse(Refusal::unauthorized(WRONG_KEY));
    }
    if view.fleet.group(&model).is_none_or(|group| group.seats.is_empty()) {
        return refuse(Refusal::unknown_model(&model));
    }
    json_answer(StatusCode::OK, &model_object(&model))
}

/// The process lives.
async fn health() -> Response {
    json_answer(StatusCode::OK, &json!({ "status": "ok" }))
}

/// Requests can be served.
async fn ready(State(shared): State<Arc<Shared>>) -> Response {
    let view = shared.view();
    let seats = || view.fleet.groups.iter().flat_map(|group| &group.seats);
    let counts = json!({
        "backends": seats().count(),
        "usable_backends": seats().filter(|seat| Seat::is_usable(seat)).count(),
    });
    let (status, word) = if shared.shutdown.is_draining() {
        (StatusCode::SERVICE_UNAVAILABLE, "draining")
    } else if view.fleet.is_usable() {
        (StatusCode::OK, "ready")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "no backend")
    };
    let mut answer = json!({ "status": word });
    if let (Some(answer), Some(counts)) = (answer.as_object_mut(), counts.as_object()) {
        answer.extend(counts.clone());
    }
    json_answer(status, &answer)
}

async fn metrics() -> Response {
    text_answer("text/plain; version=0.0.4", telemetry::render_metrics())
}

async fn openapi() -> Response {
    text_answer("application/json", OPENAPI.to_owned())
}

/// What a client without an accepted key is told.
pub(crate) const WRONG_KEY: &str =
    "the API key is missing or wrong; send it as `Authorization: Bearer <key>`";

fn model_object(model: &str) -> serde_json::Value {
    json!({ "id": model, "object": "model", "created": 0, "owned_by": "kvik" })
}

pub(crate) fn json_answer(status: StatusCode, value: &serde_json::Value) -> Response {
    (status, [content_type("application/json")], value.to_string()).into_response()
}

fn text_answer(kind: &'static str, text: String) -> Response {
    ([content_type(kind)], text).into_response()
}

fn content_type(kind: &'static str) -> (HeaderName, &'static str) {
    (CONTENT_TYPE, kind)
}
