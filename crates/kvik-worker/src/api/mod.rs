//! What a worker serves.
//!
//! | path | module |
//! |---|---|
//! | `/v1/completions` | [`completions`] |
//! | `/v1/chat/completions` | [`chat`] |
//! | `/v1/models`, `/tokenize`, `/detokenize` | [`tokenize`] |
//! | `/inference/init`, `step`, `generate`, `finish` | [`inference`] |
//! | `/kv/put`, `/kv/get`, `/kv/stats` | [`kv`] |
//! | `/kv/events`, `/kv/blocks` | [`kv_events`] |
//! | `/sequences/...` | [`sequences`] |
//! | `/cache/...` | [`cache`] |
//! | `/memory/...` | [`memory`] |
//! | `/health`, `/ready`, `/metrics`, `/drain` | [`admin`] |
//!
//! Access: see [`Trust`]. Other workers and gateways, which have the cluster's token, move sequences. `/drain`, `/kv/put`, `/cache/...` and `/memory/...` are the administrator's.

mod admin;
mod answer;
mod cache;
mod chat;
mod completions;
mod inference;
mod journal;
mod kv;
mod kv_events;
mod logprobs;
mod memory;
mod outcome;
mod request;
mod resume;
mod segments;
mod sequences;
mod stream;
mod tokenize;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{delete, get, post, put};
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderValue, StatusCode};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use kvik_runtime::http::{RequestBodyError, discard};
use kvik_runtime::trust::Trust;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::Refusal;
use crate::plan::GenerationPath;
use crate::state::WorkerState;

/// The state as handlers get it.
type Shared = State<Arc<WorkerState>>;
/// Looks whether a body can be read as a part of its request.
type Part = fn(&[u8]) -> Result<(), Refusal>;
/// What handlers give.
type Answer = Result<Response, Refusal>;

/// Paths that need no token.
const OPEN: &[&str] = &["/health", "/ready", "/metrics"];

/// All paths, for callers that `trust` admits.
pub(crate) fn router(state: Arc<WorkerState>, trust: &Arc<Trust>) -> Router {
    let router = Router::new()
        .route(GenerationPath::Completions.as_str(), post(sequences::completions))
        .route(GenerationPath::Chat.as_str(), post(sequences::chat))
        .route("/v1/models", get(tokenize::models))
        .route("/v1/models/{*id}", get(tokenize::model))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/inference/init", post(inference::init))
        .route("/inference/step", post(inference::step))
        .route(GenerationPath::Generate.as_str(), post(sequences::generate))
        .route("/inference/finish", post(inference::finish))
        .route("/sequences", get(sequences::list))
        .route("/sequences/resume", post(sequences::resume))
        .route("/sequences/{id}/move", post(sequences::begin_move))
        .route("/sequences/{id}/thaw", post(sequences::thaw))
        .route("/sequences/moves", post(sequences::offer))
        .route("/sequences/moves/{ticket}", delete(sequences::forget))
        .route("/sequences/moves/{ticket}/kv", put(sequences::put_blocks))
        .route("/kv/get", get(kv::get))
        .route("/kv/stats", get(kv::stats))
        .route("/kv/events", get(kv_events::events))
        .route("/kv/blocks", get(kv_events::blocks))
        .route("/health", get(admin::health))
        .route("/ready", get(admin::ready))
        .route("/metrics", get(admin::metrics))
        .merge(trust.admins_only(admin_router()))
        .fallback(async || Refusal::not_found("there is nothing at this path", None))
        .method_not_allowed_fallback(async || Refusal::wrong_method());
    trust
        .members_only(router, OPEN)
        .layer(middleware::from_fn_with_state(Arc::clone(&state), count_refusals))
        .with_state(state)
}

/// Paths that change what the worker holds, or whether it serves, and that read out its store.
fn admin_router() -> Router<Arc<WorkerState>> {
    Router::new()
        .route("/kv/put", post(kv::put))
        .route("/cache/lookup", post(cache::lookup))
        .route("/cache/explain", post(cache::explain))
        .route("/cache/prefetch", post(cache::prefetch))
        .route("/cache/prefetch/{id}", get(cache::prefetch_status).delete(cache::cancel_prefetch))
        .route("/cache/pin", post(cache::pin))
        .route("/cache/unpin", post(cache::unpin))
        .route("/cache/move", post(cache::relocate))
        .route("/cache/clear", post(cache::clear))
        .route(
            "/cache/compress",
            post(cache::compress).get(cache::compress_status).delete(cache::cancel_compress),
        )
        .route("/cache/retrieve", post(cache::retrieve))
        .route("/cache/store", post(cache::store))
        .route("/cache/segments", post(cache::segments))
        .route("/cache/health", get(cache::health))
        .route("/cache/stats", get(cache::stats))
        .route("/memory", get(memory::report))
        .route("/memory/policy", post(memory::set_policy))
        .route("/memory/trim", post(memory::trim))
        .route("/drain", post(admin::drain))
}

async fn count_refusals(State(state): Shared, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    let status = response.status();
    if (status.is_client_error() || status.is_server_error())
        && let Ok(loaded) = state.loaded()
    {
        loaded.metrics.refused(status.as_u16());
    }
    response
}

/// Reads the body of a request; the listener bounds its time and the bytes of all bodies that arrive.
async fn read_body(state: &WorkerState, request: Request) -> Result<Bytes, Refusal> {
    let limit = state.config.body_limit_bytes;
    let length = request.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    if length.is_some_and(|length: usize| limit < length) {
        return Err(Refusal::too_large(limit));
    }
    let mut body = request.into_body();
    match Limited::new(&mut body, limit).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Refusal::too_large(limit)),
        Err(error) => Err(match RequestBodyError::find(&*error) {
            Some(RequestBodyError::Slow) => Refusal::slow_body(),
            Some(RequestBodyError::NoRoom) => {
                discard(&mut body, limit).await;
                Refusal::unavailable("too many bytes of requests are arriving; try again later", 1)
            }
            _ => Refusal::invalid("the request's body broke off", None),
        }),
    }
}

/// Reads a request's JSON; an error names the field.
async fn read_json<T: DeserializeOwned>(state: &WorkerState, request: Request) -> Result<T, Refusal> {
    parse(&read_body(state, request).await?)
}

/// Reads a request with flattened parts. An error there does not know its field, so a body that
/// cannot be read is read again part by part.
async fn read_json_with<T: DeserializeOwned>(
    state: &WorkerState,
    request: Request,
    parts: &[Part],
) -> Result<T, Refusal> {
    parse_with(&read_body(state, request).await?, parts)
}

/// As [`read_json_with`], from a body that was read.
fn parse_with<T: DeserializeOwned>(body: &[u8], parts: &[Part]) -> Result<T, Refusal> {
    let names_field = |refusal: &Refusal| refusal.body.error.param.is_some();
    parse(body).map_err(|refusal| {
        if names_field(&refusal) {
            return refusal;
        }
        parts.iter().filter_map(|part| part(body).err()).find(names_field).unwrap_or(refusal)
    })
}

/// Reads a body as one part of its request.
fn part<T: DeserializeOwned>(body: &[u8]) -> Result<(), Refusal> {
    parse::<T>(body).map(drop)
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Refusal> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let field = (path != "." && path != "?").then_some(path);
        let reason = error.into_inner();
        match field {
            Some(field) => Refusal::invalid(format!("`{field}`: {reason}"), Some(&field)),
            None => Refusal::invalid(format!("the request cannot be read: {reason}"), None),
        }
    })?;
    json.end().map_err(|error| Refusal::invalid(format!("the request cannot be read: {error}"), None))?;
    Ok(value)
}

/// Answers with JSON.
fn json(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => typed(status, "application/json", Body::from(body)),
        Err(error) => Refusal::failed(error.to_string()).into_response(),
    }
}

fn typed(status: StatusCode, content_type: &'static str, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
