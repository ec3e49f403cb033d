//! What the tests share.

#[path = "../../../../tests/support/poll.rs"]
pub(crate) mod poll;

use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use kvik_coordinator::CoordinatorConfig;
use kvik_proto::client::{CoordinatorClient, HttpClient, TlsClientConfig, http_client};
use kvik_proto::coordinator::{
    HeartbeatRequest, RegisterRequest, Snapshot, WorkerInfo, WorkerLoad, WorkerState,
};
use serde_json::Value;

use poll::poll;

pub(crate) fn http() -> HttpClient {
    http_client(&TlsClientConfig::default()).unwrap()
}

pub(crate) fn client(base: &str) -> CoordinatorClient {
    CoordinatorClient::new(http(), base)
}

/// Members stay without heartbeats for as long as a test can take.
pub(crate) fn config() -> CoordinatorConfig {
    CoordinatorConfig {
        listen: "127.0.0.1:0".to_owned(),
        heartbeat_interval_ms: 60_000,
        slow_start_ms: 0,
        ..CoordinatorConfig::default()
    }
}

pub(crate) fn worker(id: &str, epoch: u64) -> WorkerInfo {
    WorkerInfo {
        id: id.to_owned(),
        epoch,
        address: format!("http://{id}.test:8082"),
        model: "kvik-tiny".to_owned(),
        capacity_tokens: 1000,
        weight: 1.0,
        role: kvik_proto::coordinator::WorkerRole::default(),
        store: None,
    }
}

pub(crate) fn registration(id: &str, epoch: u64) -> RegisterRequest {
    RegisterRequest { worker: worker(id, epoch), load: WorkerLoad::default(), state: WorkerState::Ready }
}

pub(crate) fn beat(id: &str, epoch: u64, outstanding_tokens: u64) -> HeartbeatRequest {
    let load = WorkerLoad { outstanding_tokens, ..WorkerLoad::default() };
    HeartbeatRequest { id: id.to_owned(), epoch, load }
}

pub(crate) fn ids(snapshot: &Snapshot) -> Vec<&str> {
    snapshot.members.iter().map(|member| member.worker.id.as_str()).collect()
}

/// Status and body of a call; a body that is no JSON comes as a string.
pub(crate) async fn call(method: &str, url: &str, body: &str) -> Result<(u16, Value), String> {
    let request = http::Request::builder()
        .method(method)
        .uri(url)
        .body(Full::new(Bytes::from(body.to_owned())))
        .unwrap();
    let response = http().request(request).await.map_err(|error| error.to_string())?;
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.map_err(|error| error.to_string())?.to_bytes();
    let text = String::from_utf8_lossy(&body).into_owned();
    Ok((status, serde_json::from_str(&text).unwrap_or(Value::String(text))))
}

/// Asks until there is an answer; returns it and how long it took.
pub(crate) async fn eventually<T>(
    within: Duration,
    what: &str,
    ask: impl AsyncFnMut() -> Option<T>,
) -> (T, Duration) {
    let began = Instant::now();
    (poll(within, what, ask).await, began.elapsed())
}
