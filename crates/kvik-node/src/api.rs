//! What a daemon answers over HTTP: metrics, health, and what it holds.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use futures_util::stream;
use kvik_runtime::shutdown::Shutdown;
use kvik_runtime::telemetry::render_metrics;
use kvik_runtime::trust::Trust;
use serde::Deserialize;
use serde_json::json;

use crate::kv_streams::NotHeard;
use crate::lm::LmServer;
use crate::metrics::DaemonMetrics;
use crate::peers::PeerServer;
use crate::server::NodeServer;

/// Longest name of a model, in bytes: names come from outside and are kept.
const MAX_MODEL_BYTES: usize = 1024;

/// What handlers have.
#[derive(Debug, Clone)]
struct Served {
    server: Arc<NodeServer>,
    shutdown: Shutdown,
}

/// Whose stream is asked for, and where it is to begin.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct EventsQuery {
    model: String,
    #[serde(default)]
    tenant: String,
    epoch: Option<u64>,
    from: Option<u64>,
}

/// All routes. What the daemon holds is sent to callers on loopback, and to those with the cluster's token.
pub(crate) fn router(
    server: Arc<NodeServer>,
    (peers, lm): (Option<Arc<PeerServer>>, Option<Arc<LmServer>>),
    trust: &Arc<Trust>,
    shutdown: &Shutdown,
) -> Router {
    let metrics = Arc::new(DaemonMetrics::new(Arc::clone(&server), peers, lm));
    let render = move || {
        metrics.update();
        std::future::ready(([(CONTENT_TYPE, "text/plain; version=0.0.4")], render_metrics()))
    };
    let served = Served { server, shutdown: shutdown.clone() };
    let told = Router::new().route("/kv/events", get(events)).with_state(served);
    trust.admins_only(told).route("/metrics", get(render)).route("/health", get(|| async { "ok\n" }))
}

/// `GET /kv/events`: the chunks of a model as they come and go. The stream ends with the daemon, and when another space of
/// the model is used from now on, which the next start of the stream names.
async fn events(State(served): State<Served>, query: Query<EventsQuery>) -> Response {
    let Query(EventsQuery { model, tenant, epoch, from }) = query;
    if !(1..=MAX_MODEL_BYTES).contains(&model.len()) {
        let text = format!("`model` has {} bytes; allowed: 1 to {MAX_MODEL_BYTES}", model.len());
        return refusal(StatusCode::BAD_REQUEST, &text);
    }
    let resume = match (epoch, from) {
        (Some(epoch), Some(from)) => Some((epoch, from)),
        (None, None) => None,
        _ => return refusal(StatusCode::BAD_REQUEST, "`epoch` and `from` are given together, or neither"),
    };
    let listener = match served.server.listen_to(&tenant, &model, resume) {
        Ok(listener) => listener,
        Err(NotHeard::UnknownTenant) => {
            let text = format!("`tenant` is `{tenant}`, which this daemon has not");
            return refusal(StatusCode::NOT_FOUND, &text);
        }
        Err(NotHeard::TooMany) => {
            return refusal(StatusCode::TOO_MANY_REQUESTS, "too many listen to this daemon; try again later");
        }
    };
    let frames = stream::unfold((listener, served.shutdown), |(mut listener, shutdown)| async move {
        let frames = tokio::select! {
            biased;
            () = shutdown.draining() => None,
            frames = listener.next() => frames,
        };
        Some((Ok::<Bytes, Infallible>(Bytes::from(frames?)), (listener, shutdown)))
    });
    let mut response = Body::from_stream(frames).into_response();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

fn refusal(status: StatusCode, message: &str) -> Response {
    let body = json!({"error": {"message": message, "code": status.as_u16()}});
    (status, [(CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}
