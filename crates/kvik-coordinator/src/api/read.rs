//! Calls that change nothing.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use http::{StatusCode, header};
use kvik_proto::coordinator::{RingView, RouteResponse, Snapshot, WatchEvent};
use kvik_runtime::shutdown::Shutdown;
use kvik_runtime::telemetry::render_metrics;
use serde::Deserialize;
use tokio::sync::watch::Receiver;

use super::error::ApiError;
use super::{ALIVE_INTERVAL, Api};
use crate::publish::{Published, encode};

/// What `/route` is asked with.
#[derive(Debug, Deserialize)]
pub(super) struct RouteQuery {
    seq_id: Option<String>,
    #[serde(default)]
    explain: Option<String>,
}

pub(super) async fn workers(State(api): State<Arc<Api>>) -> Result<Json<Snapshot>, ApiError> {
    Ok(Json(held(&api)?.snapshot.clone()))
}

pub(super) async fn ring(State(api): State<Arc<Api>>) -> Result<Json<RingView>, ApiError> {
    Ok(Json(held(&api)?.ring_view()))
}

pub(super) async fn route(
    State(api): State<Arc<Api>>,
    query: Result<Query<RouteQuery>, QueryRejection>,
) -> Result<Json<RouteResponse>, ApiError> {
    let Query(query) =
        query.map_err(|rejection| ApiError::rejected(rejection.status(), rejection.body_text()))?;
    let seq_id = query
        .seq_id
        .filter(|seq_id| !seq_id.is_empty())
        .ok_or_else(|| ApiError::invalid("seq_id", "`seq_id` is missing; allowed: the id of a sequence"))?;
    let with_explanation = match query.explain.as_deref() {
        None | Some("false") => false,
        Some("true") => true,
        Some(other) => {
            return Err(ApiError::invalid("explain", format!("`explain` is {other}; allowed: true, false")));
        }
    };
    let response = held(&api)?.route(seq_id.as_bytes(), with_explanation);
    response.map(Json).ok_or_else(|| ApiError::unavailable("no worker is ready", "no_worker"))
}

pub(super) async fn watch(State(api): State<Arc<Api>>) -> Response {
    let events = events(api.publisher.subscribe(), api.shutdown.clone());
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    (headers, Body::from_stream(events)).into_response()
}

/// Lives: the process answers.
pub(super) async fn health() -> &'static str {
    "ok\n"
}

/// Can be asked: it holds a snapshot and does not end.
pub(super) async fn ready(State(api): State<Arc<Api>>) -> Result<&'static str, ApiError> {
    if api.shutdown.is_draining() {
        return Err(ApiError::unavailable("the coordinator is ending", "draining"));
    }
    held(&api).map(|_| "ready\n")
}

pub(super) async fn metrics() -> Response {
    let headers = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (StatusCode::OK, headers, render_metrics()).into_response()
}

pub(super) fn held(api: &Api) -> Result<Arc<Published>, ApiError> {
    api.publisher.current().ok_or_else(ApiError::no_leader)
}

/// The snapshot held, then each later one, and signs of life in between. Ends when the service
/// drains. A watcher that reads slowly has one event waiting and skips to the newest.
fn events(
    receiver: Receiver<Option<Arc<Published>>>,
    shutdown: Shutdown,
) -> impl stream::Stream<Item = Result<Bytes, Infallible>> {
    stream::unfold((receiver, shutdown), |(mut receiver, shutdown)| async move {
        loop {
            let frame = tokio::select! {
                changed = receiver.changed() => match changed {
                    Ok(()) => receiver.borrow_and_update().as_ref().map(|published| published.frame.clone()),
                    Err(_) => return None,
                },
                () = tokio::time::sleep(ALIVE_INTERVAL) => Some(encode(&WatchEvent::Alive)),
                () = shutdown.draining() => return None,
            };
            if let Some(frame) = frame {
                return Some((Ok(frame), (receiver, shutdown)));
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt as _;
    use kvik_proto::coordinator::RingConfig;
    use tokio::time::Instant;

    use super::*;
    use crate::publish::Publisher;

    fn snapshot(term: u64, version: u64) -> Snapshot {
        Snapshot {
            incarnation: 0,
            term,
            version,
            ring: RingConfig::default(),
            members: Vec::new(),
            stores: Vec::new(),
        }
    }

    async fn next(
        events: &mut (impl stream::Stream<Item = Result<Bytes, Infallible>> + Unpin),
    ) -> WatchEvent {
        let frame = events.next().await.unwrap().unwrap();
        let text = std::str::from_utf8(&frame).unwrap();
        serde_json::from_str(text.strip_prefix("data:").unwrap().trim()).unwrap()
    }

    #[tokio::test]
    async fn a_slow_watcher_gets_the_newest_snapshot_and_no_queue() {
        let publisher = Publisher::new();
        let mut events = Box::pin(events(publisher.subscribe(), Shutdown::new()));
        for version in 1..=1000 {
            publisher.offer(snapshot(1, version));
        }
        assert_eq!(next(&mut events).await, WatchEvent::Snapshot(snapshot(1, 1000)));
        publisher.offer(snapshot(2, 1));
        publisher.offer(snapshot(1, 2000));
        assert_eq!(next(&mut events).await, WatchEvent::Snapshot(snapshot(2, 1)), "an earlier term is stale");
    }

    #[tokio::test(start_paused = true)]
    async fn a_quiet_watch_says_every_five_seconds_that_it_lives() {
        let publisher = Publisher::new();
        let shutdown = Shutdown::new();
        let mut events = Box::pin(events(publisher.subscribe(), shutdown.clone()));
        let began = Instant::now();
        assert_eq!(next(&mut events).await, WatchEvent::Alive);
        assert_eq!(next(&mut events).await, WatchEvent::Alive);
        assert_eq!(began.elapsed().as_secs(), 10);
        shutdown.drain();
        assert!(events.next().await.is_none(), "a service that drains ends its streams");
    }
}
