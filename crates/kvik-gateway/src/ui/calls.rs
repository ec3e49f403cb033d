//! Calls to a worker that the page makes for an operator.
//!
//! | call | goes to the worker's |
//! |---|---|
//! | `GET /ui/workers/{id}/sequences` | `GET /sequences` |
//! | `POST /ui/workers/{id}/sequences/{sequence}/move` | `POST /sequences/{sequence}/move`; `to` is the name of a worker |
//! | `POST /ui/workers/{id}/drain` | `POST /drain` |
//! | `POST /ui/workers/{id}/cache/{action}` | `POST /cache/{action}`: `lookup`, `pin`, `unpin`, `clear` |
//! | `GET /ui/workers/{id}/memory` | `GET /memory` |
//! | `POST /ui/workers/{id}/memory/{action}` | `POST /memory/{action}`: `policy`, `trim` |
//!
//! The operator's own token goes along, so that the worker decides as if it had been called directly; without one the gateway
//! shows that of the cluster. Only workers that a coordinator lists are called: an address in `backends` never gets a token.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::response::Response;
use axum::routing::{get, post};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method};
use http_body_util::{BodyExt as _, Full, Limited};
use kvik_proto::client::send;
use kvik_proto::moves::MoveRequest;
use kvik_runtime::trust::TOKEN_HEADER;
use tokio::time::Instant;

use crate::answer::refuse;
use crate::error::Refusal;
use crate::request::body::read_body;
use crate::state::Shared;
use crate::upstream::backend::{Backend, BackendKind};

/// Longest question, in bytes: the tokens of a long prompt.
const MAX_QUESTION_BYTES: usize = 16 << 20;
/// Longest answer, in bytes.
const MAX_ANSWER_BYTES: usize = 16 << 20;
/// Time for a call: the KV of a long sequence may have to be copied first.
const TIMEOUT: Duration = Duration::from_mins(1);
/// What may be done with the chunks of a prompt.
const CACHE_ACTIONS: &[&str] = &["lookup", "pin", "unpin", "clear"];
/// What may be done with memory that engines share.
const MEMORY_ACTIONS: &[&str] = &["policy", "trim"];

type Answer = Result<Response, Refusal>;

/// The routes.
pub(super) fn router() -> Router<Arc<Shared>> {
    Router::new()
        .route("/ui/workers/{id}/sequences", get(sequences))
        .route("/ui/workers/{id}/sequences/{sequence}/move", post(move_sequence))
        .route("/ui/workers/{id}/drain", post(drain))
        .route("/ui/workers/{id}/cache/{action}", post(cache))
        .route("/ui/workers/{id}/memory", get(memory))
        .route("/ui/workers/{id}/memory/{action}", post(change_memory))
}

async fn sequences(State(shared): State<Arc<Shared>>, Path(id): Path<String>, request: Request) -> Response {
    pass(&shared, &id, "/sequences", request).await.unwrap_or_else(refuse)
}

async fn drain(State(shared): State<Arc<Shared>>, Path(id): Path<String>, request: Request) -> Response {
    pass(&shared, &id, "/drain", request).await.unwrap_or_else(refuse)
}

async fn memory(State(shared): State<Arc<Shared>>, Path(id): Path<String>, request: Request) -> Response {
    pass(&shared, &id, "/memory", request).await.unwrap_or_else(refuse)
}

async fn cache(
    State(shared): State<Arc<Shared>>,
    Path((id, action)): Path<(String, String)>,
    request: Request,
) -> Response {
    act(&shared, &id, ("/cache", CACHE_ACTIONS), &action, request).await.unwrap_or_else(refuse)
}

async fn change_memory(
    State(shared): State<Arc<Shared>>,
    Path((id, action)): Path<(String, String)>,
    request: Request,
) -> Response {
    act(&shared, &id, ("/memory", MEMORY_ACTIONS), &action, request).await.unwrap_or_else(refuse)
}

async fn move_sequence(
    State(shared): State<Arc<Shared>>,
    Path((id, sequence)): Path<(String, String)>,
    request: Request,
) -> Response {
    let answer = async {
        // It becomes a part of a path.
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if sequence.is_empty() || !sequence.bytes().all(is_name) {
            return Err(Refusal::invalid(
                "`sequence` must be the `id` of a running sequence",
                Some("sequence"),
            ));
        }
        let from = find(&shared, &id)?;
        let (parts, body) = request.into_parts();
        let body = read(body, &parts.headers).await?;
        let request: MoveRequest =
            serde_json::from_slice(&body).map_err(|error| Refusal::invalid(error.to_string(), Some("to")))?;
        let to = find(&shared, &request.to)?;
        if Arc::ptr_eq(&from, &to) {
            return Err(Refusal::invalid(
                "`to` must be another worker than the sequence runs on",
                Some("to"),
            ));
        }
        let body = serde_json::to_vec(&MoveRequest { to: to.base.clone() });
        let body = body.map_err(|error| Refusal::invalid(error.to_string(), Some("to")))?;
        call(
            &shared,
            &from,
            &format!("/sequences/{sequence}/move"),
            (parts.method, &parts.headers),
            body.into(),
        )
        .await
    };
    answer.await.unwrap_or_else(refuse)
}

/// Passes a call on whose path ends with one of `allowed`.
async fn act(
    shared: &Shared,
    id: &str,
    (folder, allowed): (&str, &[&str]),
    action: &str,
    request: Request,
) -> Answer {
    if !allowed.contains(&action) {
        return Err(Refusal::unknown_route());
    }
    pass(shared, id, &format!("{folder}/{action}"), request).await
}

async fn pass(shared: &Shared, id: &str, path: &str, request: Request) -> Answer {
    let worker = find(shared, id)?;
    let (parts, body) = request.into_parts();
    let body = read(body, &parts.headers).await?;
    call(shared, &worker, path, (parts.method, &parts.headers), body).await
}

async fn read(body: Body, headers: &HeaderMap) -> Result<Bytes, Refusal> {
    let deadline = Instant::now() + TIMEOUT;
    read_body(body, headers, MAX_QUESTION_BYTES, deadline).await.map_err(Refusal::before_body)
}

/// The worker of this name.
fn find(shared: &Shared, id: &str) -> Result<Arc<Backend>, Refusal> {
    let view = shared.view();
    let mut seats = view.fleet.groups.iter().flat_map(|group| &group.seats);
    let found = seats.find(|seat| seat.backend.kind == BackendKind::Worker && seat.backend.id == id);
    found.map(|seat| Arc::clone(&seat.backend)).ok_or_else(|| Refusal::unknown_worker(id))
}

async fn call(
    shared: &Shared,
    worker: &Backend,
    path: &str,
    (method, headers): (Method, &HeaderMap),
    body: Bytes,
) -> Answer {
    let is_change = method != Method::GET;
    let mut request = http::Request::new(Full::new(body));
    *request.method_mut() = method;
    *request.uri_mut() = format!("{}{path}", worker.base).parse().map_err(|_| Refusal::upstream())?;
    request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    match headers.get(TOKEN_HEADER) {
        Some(token) => {
            request.headers_mut().insert(TOKEN_HEADER, token.clone());
        }
        None => request.headers_mut().extend(shared.cluster_header.clone()),
    }
    let calling = async {
        let response = send(&shared.http, request).await.map_err(|_| Refusal::upstream())?;
        let (parts, body) = response.into_parts();
        let body = Limited::new(body, MAX_ANSWER_BYTES).collect().await.map_err(|_| Refusal::upstream())?;
        Ok((parts, body.to_bytes()))
    };
    let (parts, body) = tokio::time::timeout(TIMEOUT, calling).await.map_err(|_| Refusal::deadline())??;
    if is_change {
        tracing::info!(worker = %worker.id, path, status = parts.status.as_u16(), "called a worker for the page");
    }
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = parts.status;
    response.headers_mut().extend(parts.headers.get(CONTENT_TYPE).map(|kind| (CONTENT_TYPE, kind.clone())));
    Ok(response)
}
