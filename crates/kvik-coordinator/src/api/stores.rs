//! Calls of store daemons: they are members of a list of their own.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::StatusCode;
use kvik_proto::coordinator::{DeregisterRequest, HeartbeatResponse, RegisterResponse};
use kvik_proto::stores::{RegisterStoreRequest, StoreHeartbeatRequest, StoreInfo, StoreList};
use kvik_runtime::trust::Scope;

use super::Api;
use super::error::ApiError;
use super::read::held;
use super::write::{check_id, command, parse, pass_on};
use crate::leader::Command;

/// Longest address of a daemon, in bytes: a name of the longest kind and a port.
const MAX_ADDRESS_BYTES: usize = 261;

pub(super) async fn list(State(api): State<Arc<Api>>) -> Result<Json<StoreList>, ApiError> {
    let held = held(&api)?;
    let snapshot = &held.snapshot;
    let attached = snapshot.members.iter().filter_map(|member| {
        let worker = &member.worker;
        Some((worker.id.clone(), worker.store.clone()?))
    });
    Ok(Json(StoreList {
        term: snapshot.term,
        version: snapshot.version,
        stores: snapshot.stores.clone(),
        workers: attached.collect(),
    }))
}

pub(super) async fn register(
    State(api): State<Arc<Api>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = body.map_err(|rejection| ApiError::unread(&rejection))?;
    let request: RegisterStoreRequest = parse(&body)?;
    check_store(&request.store)?;
    if let Some(response) = pass_on(&api, &headers, "/stores/register", body, Scope::Cluster).await? {
        return Ok(response);
    }
    let id = request.store.id.clone();
    let ((), term) = command(&api, &id, |reply| Command::RegisterStore(request, reply)).await?;
    Ok(Json(RegisterResponse { heartbeat_interval_ms: api.heartbeat_interval_ms, term }).into_response())
}

pub(super) async fn heartbeat(
    State(api): State<Arc<Api>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = body.map_err(|rejection| ApiError::unread(&rejection))?;
    let request: StoreHeartbeatRequest = parse(&body)?;
    if let Some(response) = pass_on(&api, &headers, "/stores/heartbeat", body, Scope::Cluster).await? {
        return Ok(response);
    }
    let id = request.id.clone();
    let (state, term) = command(&api, &id, |reply| Command::StoreHeartbeat(request, reply)).await?;
    Ok(Json(HeartbeatResponse { state, term }).into_response())
}

pub(super) async fn deregister(
    State(api): State<Arc<Api>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = body.map_err(|rejection| ApiError::unread(&rejection))?;
    let request: DeregisterRequest = parse(&body)?;
    if let Some(response) = pass_on(&api, &headers, "/stores/deregister", body, Scope::Cluster).await? {
        return Ok(response);
    }
    let id = request.id.clone();
    command(&api, &id, |reply| Command::DeregisterStore(request, reply)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

fn check_store(store: &StoreInfo) -> Result<(), ApiError> {
    check_id("store.id", &store.id)?;
    let port = store.address.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    let is_port = port.is_some_and(|(_, port)| port.parse::<u16>().is_ok_and(|port| port != 0));
    let is_plain = store.address.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/');
    if is_port && is_plain && store.address.len() <= MAX_ADDRESS_BYTES {
        return Ok(());
    }
    let shown: String = store.address.chars().take(MAX_ADDRESS_BYTES).collect();
    let message = format!("`store.address` is `{shown}`; allowed: host:port, such as node-2:9106");
    Err(ApiError::invalid("store.address", message))
}
