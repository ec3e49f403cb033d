//! The routes.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::response::Response;
use axum::routing::{get, post};
use http::{HeaderMap, StatusCode};
use kvik_runtime::telemetry;
use serde_json::json;

mod explain;
mod holders;
mod index;
mod prompt;

use crate::answer::forward;
use crate::answer::{WRONG_KEY, json_answer, refuse, text_answer};
use crate::error::Refusal;
use crate::held;
use crate::management::Management;
use crate::route::Route;
use crate::state::Shared;
use crate::ui::{self, same_origin};
use crate::upstream::fleet::Seat;

/// The document that `/openapi.json` serves.
pub const OPENAPI: &str = include_str!("openapi.json");

/// All routes.
pub(crate) fn router(shared: Arc<Shared>, management: Option<&Management>) -> Router {
    let mut router = Router::new();
    for route in Route::ALL {
        let serve = async move |State(shared): State<Arc<Shared>>, request: Request| {
            if route.is_held() {
                held::serve(shared, route, request).await
            } else {
                forward::forward(shared, route, request).await
            }
        };
        router = router.route(route.name(), post(serve));
    }
    router = router
        .route("/v1/models", get(models))
        .route("/v1/models/{*model}", get(model))
        .route("/ready", get(ready));
    if shared.view().config.ui.enabled {
        router = router.merge(ui::router(&shared));
    }
    let admin = Router::new().route("/route/explain", post(explain::explain));
    router = router.merge(shared.trust.admins_only(admin));
    if let Some(management) = management {
        let admin = shared.trust.admins_only(same_origin::only(management.admin_routes.clone()));
        router = router.merge(management.routes.clone().with_state(())).merge(admin.with_state(()));
    }
    with_index(router, shared)
}

/// The routes beside a picker, which is asked in another way.
pub(crate) fn picker_router(shared: Arc<Shared>) -> Router {
    let admin = Router::new().route("/route/explain", post(explain::explain));
    let router = Router::new().route("/ready", get(ready)).merge(shared.trust.admins_only(admin));
    with_index(router, shared)
}

/// The routes of the index alone.
pub(crate) fn index_router(shared: Arc<Shared>) -> Router {
    with_index(Router::new().route("/ready", get(index_ready)), shared)
}

fn with_index(router: Router<Arc<Shared>>, shared: Arc<Shared>) -> Router {
    let admin = Router::new()
        .route("/index/stats", get(index::stats))
        .route("/index/blocks", get(index::blocks))
        .route("/index/prompt", post(prompt::prompt));
    router
        .merge(shared.trust.admins_only(admin))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(openapi))
        .route("/v1/score", post(index::score))
        .route("/index/holders", post(holders::holders))
        .fallback(async || refuse(Refusal::unknown_route()))
        .method_not_allowed_fallback(async || refuse(Refusal::wrong_method()))
        .with_state(shared)
}

async fn models(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    let view = shared.view();
    if !view.keys.accepts(&headers) {
        return refuse(Refusal::unauthorized(WRONG_KEY));
    }
    let groups = view.fleet.groups.iter().filter(|group| group.is_served());
    let data: Vec<_> = groups.map(|group| model_object(&group.model)).collect();
    json_answer(StatusCode::OK, &json!({ "object": "list", "data": data }))
}

async fn model(State(shared): State<Arc<Shared>>, Path(model): Path<String>, headers: HeaderMap) -> Response {
    let view = shared.view();
    if !view.keys.accepts(&headers) {
        return refuse(Refusal::unauthorized(WRONG_KEY));
    }
    if view.fleet.group(&model).is_none_or(|group| !group.is_served()) {
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

/// Scores can be asked for: an index that knows nothing yet says so in its answers.
async fn index_ready(State(shared): State<Arc<Shared>>) -> Response {
    if shared.shutdown.is_draining() {
        return json_answer(StatusCode::SERVICE_UNAVAILABLE, &json!({ "status": "draining" }));
    }
    json_answer(StatusCode::OK, &json!({ "status": "ready" }))
}

async fn metrics() -> Response {
    text_answer("text/plain; version=0.0.4", telemetry::render_metrics())
}

async fn openapi() -> Response {
    text_answer("application/json", OPENAPI.to_owned())
}

fn model_object(model: &str) -> serde_json::Value {
    json!({ "id": model, "object": "model", "created": 0, "owned_by": "kvik" })
}
