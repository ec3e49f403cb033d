//! The HTTP API, as the tables in [`kvik_proto::coordinator`] and [`kvik_proto::stores`] say.
//!
//! Any coordinator can be asked. Reads are answered from the snapshot held, which a follower has
//! from its leader. Writes that reach a follower are passed on to the leader and its answer is
//! passed back, so a client needs to follow no redirects and to know no leader. A write that was
//! passed on once is not passed on again: two coordinators that take each other for the leader must not pass it back and forth. Without
//! a leader a write is answered with 503 and `Retry-After`.

mod error;
mod read;
mod stores;
mod write;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};
use kvik_proto::client::HttpClient;
use kvik_runtime::shutdown::Shutdown;
use kvik_runtime::telemetry::Tracer;
use kvik_runtime::trust::Trust;
use tokio::sync::{mpsc, watch};

use crate::leader::Command;
use crate::publish::Publisher;
use crate::state::Role;

/// Time between two signs of life on `/watch`.
pub(crate) const ALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Largest body of a request, in bytes; the messages have a few hundred.
const MAX_BODY_BYTES: usize = 64 << 10;

/// What the handlers share.
#[derive(Debug)]
pub(crate) struct Api {
    pub(crate) publisher: Publisher,
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) role: watch::Receiver<Role>,
    pub(crate) http: HttpClient,
    pub(crate) trust: Arc<Trust>,
    pub(crate) heartbeat_interval_ms: u64,
    /// The largest weight that the ring takes.
    pub(crate) max_weight: f64,
    pub(crate) shutdown: Shutdown,
}

/// Paths that need no token.
const OPEN: &[&str] = &["/health", "/ready", "/metrics"];

/// Builds the routes, for callers that may use them: draining is the administrator's, the rest is for members.
///
/// Changes of the members have spans. Heartbeats have none: they would be nearly all of them, and say nothing.
pub(crate) fn router(api: Api, tracer: &Tracer) -> Router {
    let trust = Arc::clone(&api.trust);
    let admin = Router::new().route("/workers/{id}/drain", post(write::drain));
    let admin = trust.admins_only(tracer.trace_requests(admin));
    let changes = Router::new()
        .route("/register", post(write::register))
        .route("/deregister", post(write::deregister))
        .route("/stores/register", post(stores::register))
        .route("/stores/deregister", post(stores::deregister));
    let router = tracer
        .trace_requests(changes)
        .route("/heartbeat", post(write::heartbeat))
        .route("/workers", get(read::workers))
        .route("/stores", get(stores::list))
        .route("/stores/heartbeat", post(stores::heartbeat))
        .route("/ring", get(read::ring))
        .route("/route", get(read::route))
        .route("/watch", get(read::watch))
        .route("/health", get(read::health))
        .route("/ready", get(read::ready))
        .route("/metrics", get(read::metrics))
        .merge(admin)
        .fallback(error::unknown_path)
        .method_not_allowed_fallback(error::wrong_method);
    trust.members_only(router, OPEN).layer(DefaultBodyLimit::max(MAX_BODY_BYTES)).with_state(Arc::new(api))
}
