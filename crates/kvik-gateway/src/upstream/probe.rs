//! The task that asks workers for their health and engines for their models.
//!
//! Every backend is asked for `/health` at an interval, and when its breaker wants to know. A
//! worker that is stopped keeps its connections and accepts new ones, and an answer that is not a
//! stream can rightly take minutes: only questions tell that it is not there. A worker that has left
//! is asked for as long as it answers requests: it may have left because it is not there.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full, Limited};
use kvik_proto::client::{HttpClient, send};
use serde::Deserialize;
use tokio::time::Instant;

use crate::config::millis;
use crate::state::Shared;
use crate::upstream::backend::Backend;

/// Precision of all intervals here.
const TICK: Duration = Duration::from_millis(50);
/// Time between two questions for the models of an engine that has answered before.
const MODELS_INTERVAL: Duration = Duration::from_secs(10);
/// Longest answer that is read, in bytes.
const MAX_ANSWER_BYTES: usize = 4 << 20;

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ModelEntry>,
}

#[derive(Deserialize)]
struct ModelEntry {
    id: String,
}

/// Asks until everything stops.
pub(crate) async fn run(shared: Arc<Shared>) {
    let shutdown = shared.shutdown.clone();
    let mut ticks = tokio::time::interval(TICK);
    let mut models_asked: Option<Instant> = None;
    let mut next_retained = Instant::now();
    loop {
        tokio::select! {
            now = ticks.tick() => {
                let interval = millis(shared.view().config.health.interval_ms);
                probe_due(&shared, now);
                if next_retained <= now {
                    next_retained = now + interval;
                    check_retained(&shared, now);
                }
                let is_some_unknown = shared.read_members(|book| book.engines_to_ask().iter().any(|(_, known)| !known));
                let models_interval = if is_some_unknown { interval } else { MODELS_INTERVAL };
                if models_asked.is_none_or(|asked| asked + models_interval <= now) {
                    models_asked = Some(now);
                    ask_models(&shared);
                }
            }
            () = shutdown.stopping() => return,
        }
    }
}

fn probe_due(shared: &Arc<Shared>, now: Instant) {
    for backend in shared.read_members(crate::upstream::members::MemberBook::probed_backends) {
        // Relaxed: only this task sets it, and a probe that is seen late is asked a tick later.
        if !backend.is_probed.load(Ordering::Relaxed) && backend.is_probe_due(now) {
            backend.is_probed.store(true, Ordering::Relaxed);
            let shared_task = Arc::clone(shared);
            spawn(shared, async move { probe(&shared_task, &backend).await });
        }
    }
}

async fn probe(shared: &Shared, backend: &Backend) {
    let config = Arc::clone(&shared.view().config);
    let answer =
        get(&shared.http, &format!("{}/health", backend.base), millis(config.health.timeout_ms)).await;
    let interval = millis(config.health.interval_ms);
    backend.end_probe(answer.is_some(), config.health.failures, interval, &config.breaker);
    backend.is_probed.store(false, Ordering::Relaxed);
}

fn check_retained(shared: &Arc<Shared>, now: Instant) {
    let retained = shared.read_members(crate::upstream::members::MemberBook::retained);
    if retained.is_empty() {
        return;
    }
    shared.change_members(|book| book.expire_retained(now));
    for (id, address) in retained {
        let shared_task = Arc::clone(shared);
        spawn(shared, async move {
            let timeout = millis(shared_task.view().config.health.timeout_ms);
            let url = format!("{}/ready", address.trim_end_matches('/'));
            if get(&shared_task.http, &url, timeout).await.is_none() {
                tracing::info!(worker = %id, "a member that the coordinator does not list is gone");
                shared_task.change_members(|book| book.drop_retained(&id));
            }
        });
    }
}

fn ask_models(shared: &Arc<Shared>) {
    for (url, _) in shared.read_members(crate::upstream::members::MemberBook::engines_to_ask) {
        let shared_task = Arc::clone(shared);
        spawn(shared, async move {
            let timeout = millis(shared_task.view().config.health.timeout_ms);
            let answer = get(&shared_task.http, &format!("{url}/v1/models"), timeout).await;
            // An engine that does not answer keeps its models; its breaker says whether it is used.
            let Some(list) = answer.and_then(|answer| serde_json::from_slice::<ModelList>(&answer).ok())
            else {
                tracing::debug!(%url, "the engine does not list its models");
                return;
            };
            let models: Vec<String> = list.data.into_iter().map(|model| model.id).collect();
            shared_task.change_members(|book| {
                let is_new = book.learn_models(&url, models.clone());
                if is_new {
                    tracing::info!(%url, ?models, "learned the models of an engine");
                }
                is_new
            });
        });
    }
}

fn spawn(shared: &Shared, task: impl Future<Output = ()> + Send + 'static) {
    let shutdown = shared.shutdown.clone();
    shared.shutdown.spawn(async move {
        tokio::select! {
            () = task => {}
            () = shutdown.stopping() => {}
        }
    });
}

/// The body of a good answer within `timeout`.
async fn get(http: &HttpClient, url: &str, timeout: Duration) -> Option<Bytes> {
    let request = Request::get(url).body(Full::default()).ok()?;
    let asking = async {
        let response = send(http, request).await.ok()?;
        let is_success = response.status().is_success();
        let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await.ok()?;
        is_success.then(|| body.to_bytes())
    };
    tokio::time::timeout(timeout, asking).await.ok()?
}
