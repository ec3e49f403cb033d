//! Calls that change the membership: done here by the leader, passed on to it by the others.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderName, StatusCode, header};
use http_body_util::Full;
use kvik_proto::coordinator::{
    DeregisterRequest, HeartbeatRequest, HeartbeatResponse, RegisterRequest, RegisterResponse, WorkerInfo,
};
use kvik_runtime::secret::redacted_url;
use kvik_runtime::trust::Scope;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Api;
use super::error::ApiError;
use crate::config::is_base_address;
use crate::leader::{Command, Reply};
use crate::state::Role;

/// Marks a write that another coordinator passed on.
const FORWARDED: HeaderName = HeaderName::from_static("x-kvik-forwarded");
/// Time for the leader's answer: less than the caller waits for ours.
const FORWARD_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest id of a worker, in bytes.
const MAX_ID_BYTES: usize = 128;

pub(super) async fn register(
    State(api): State<Arc<Api>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = body.map_err(|rejection| ApiError::unread(&rejection))?;
    let request: RegisterRequest = parse(&body)?;
    check_worker(&request.worker, api.max_weight)?;
    if let Some(response) = pass_on(&api, &headers, "/register", body, Scope::Cluster).await? {
        return Ok(response);
    }
    let id = request.worker.id.clone();
    let ((), term) = command(&api, &id, |reply| Command::Register(request, reply)).await?;
    Ok(Json(RegisterResponse { heartbeat_interval_ms: api.heartbeat_interval_ms, term }).into_response())
}

pub(super) async fn heartbeat(
    State(api): State<Arc<Api>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = body.map_err(|rejection| ApiError::unread(&rejection))?;
    let request: HeartbeatRequest = parse(&body)?;
    if let Some(response) = pass_on(&api, &headers, "/heartbeat", body, Scope::Cluster).await? {
        return Ok(response);
    }
    let id = request.id.clone();
    let (state, term) = command(&api, &id, |reply| Command::Heartbeat(request, reply)).await?;
    Ok(Json(HeartbeatResponse { state, term }).into_response())
}

pub(super) async fn deregister(
    State(api): State<Arc<Api>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = body.map_err(|rejection| ApiError::unread(&rejection))?;
    let request: DeregisterRequest = parse(&body)?;
    if let Some(response) = pass_on(&api, &headers, "/deregister", body, Scope::Cluster).await? {
        return Ok(response);
    }
    let id = request.id.clone();
    command(&api, &id, |reply| Command::Deregister(request, reply)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub(super) async fn drain(
    State(api): State<Arc<Api>>,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let Path(id) = id.map_err(|rejection| ApiError::rejected(rejection.status(), rejection.body_text()))?;
    check_id("id", &id)?;
    // The id is made of characters that stand for themselves in a path.
    let path = format!("/workers/{id}/drain");
    if let Some(response) = pass_on(&api, &headers, &path, Bytes::new(), Scope::Admin).await? {
        return Ok(response);
    }
    command(&api, &id, |reply| Command::Drain(id.clone(), reply)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Has a command of member `id` done by the leader's task.
pub(super) async fn command<T>(
    api: &Api,
    id: &str,
    command: impl FnOnce(Reply<T>) -> Command,
) -> Result<(T, u64), ApiError> {
    let (reply, answer) = oneshot::channel();
    // Both fail only when the service ends.
    api.commands.send(command(reply)).await.map_err(|_| ApiError::no_leader())?;
    let answer = answer.await.map_err(|_| ApiError::no_leader())?;
    answer.map_err(|error| ApiError::of_command(id, error))
}

/// Passes a write on to the leader and returns its answer; `None` if this is the leader. It goes with the token that
/// the caller had to show here.
pub(super) async fn pass_on(
    api: &Api,
    headers: &HeaderMap,
    path: &str,
    body: Bytes,
    scope: Scope,
) -> Result<Option<Response>, ApiError> {
    let role = api.role.borrow().clone();
    let leader = match role {
        _ if role.leads(Instant::now()) => return Ok(None),
        Role::Follower { leader: Some(leader) } if !headers.contains_key(FORWARDED) => leader,
        _ => return Err(ApiError::no_leader()),
    };
    let mut request = http::Request::post(format!("{}{path}", leader.trim_end_matches('/')))
        .header(header::CONTENT_TYPE, "application/json")
        .header(FORWARDED, "1")
        .body(Full::new(body))
        .map_err(|_| ApiError::no_leader())?;
    let token = match scope {
        Scope::Cluster => api.trust.cluster_header(),
        Scope::Admin => api.trust.admin_header(),
    };
    request.headers_mut().extend(token);
    match tokio::time::timeout(FORWARD_TIMEOUT, kvik_proto::client::send(&api.http, request)).await {
        Ok(Ok(response)) => Ok(Some(response.map(Body::new))),
        Ok(Err(_)) | Err(_) => Err(ApiError::no_leader()),
    }
}

/// Reads a body; an error names the field.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let field = error.path().to_string();
        // Text that is no JSON has no fields.
        if error.inner().is_data() {
            ApiError::invalid(&field, format!("`{field}`: {}", error.inner()))
        } else {
            ApiError::rejected(StatusCode::BAD_REQUEST, format!("the body is no JSON: {}", error.inner()))
        }
    })?;
    deserializer.end().map_err(|error| {
        ApiError::rejected(StatusCode::BAD_REQUEST, format!("the body is no JSON: {error}"))
    })?;
    Ok(value)
}

fn check_worker(worker: &WorkerInfo, max_weight: f64) -> Result<(), ApiError> {
    check_id("worker.id", &worker.id)?;
    if !is_base_address(&worker.address) {
        let message =
            format!("`worker.address` is `{}`; allowed: http://host:port", redacted_url(&worker.address));
        return Err(ApiError::invalid("worker.address", message));
    }
    if !(0.0..=max_weight).contains(&worker.weight) {
        let message = format!("`worker.weight` is {}; allowed: 0 to {max_weight}", worker.weight);
        return Err(ApiError::invalid("worker.weight", message));
    }
    Ok(())
}

/// Ids go into paths, keys and metrics as they are.
pub(super) fn check_id(field: &str, id: &str) -> Result<(), ApiError> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:@".contains(&byte);
    if (1..=MAX_ID_BYTES).contains(&id.len()) && id.bytes().all(fits) {
        return Ok(());
    }
    let shown: String = id.chars().take(MAX_ID_BYTES).collect();
    let allowed = "1 to 128 of letters, digits and -_.:@";
    Err(ApiError::invalid(field, format!("`{field}` is `{shown}`; allowed: {allowed}")))
}
