//! What a request sends, to whichever worker.

use bytes::Bytes;
use http::HeaderMap;
use kvik_proto::moves::ResumeHead;
use tokio::time::Instant;

use crate::config::{GatewayConfig, millis};
use crate::route::Route;
use crate::upstream::backend::BackendKind;
use crate::upstream::exchange::Call;

/// Where workers go on with requests that others have begun.
const RESUME_PATH: &str = "/sequences/resume";

/// What a request sends.
#[derive(Debug, Clone)]
pub(crate) struct Outgoing {
    pub(crate) route: Route,
    pub(crate) headers: HeaderMap,
    pub(crate) query: Option<String>,
    pub(crate) body: Bytes,
    pub(crate) is_stream: bool,
    pub(crate) deadline: Instant,
    /// How far another worker has come with it.
    pub(crate) resumed: Option<ResumeHead>,
}

/// The path at which a worker serves a route, as a request that goes on names it.
pub(crate) fn worker_path(route: Route) -> &'static str {
    BackendKind::Worker.path(route)
}

impl Outgoing {
    /// The request as a call, with a route and body of its own for this kind of backend.
    pub(crate) fn call(&self, config: &GatewayConfig, route: Route, body: Bytes) -> Call<'_> {
        // An answer that is no stream has no head before it is complete.
        let until = if self.is_stream {
            self.deadline.min(Instant::now() + millis(config.timeouts.response_header_ms))
        } else {
            self.deadline
        };
        let query = self.query.as_deref();
        Call {
            route,
            path: None,
            headers: &self.headers,
            query,
            body,
            decode_at: None,
            until,
            deadline: self.deadline,
        }
    }

    /// The call of a request that goes on: how far it has come, and its own body. `None` if it does not.
    pub(crate) fn resume_call(&self, config: &GatewayConfig) -> Option<Call<'_>> {
        let resumed = self.resumed.as_ref()?;
        let mut body = serde_json::to_vec(resumed).ok()?;
        body.reserve_exact(self.body.len() + 1);
        body.push(b'\n');
        body.extend_from_slice(&self.body);
        let call = self.call(config, self.route, Bytes::from(body));
        Some(Call { path: Some(RESUME_PATH), query: None, ..call })
    }
}
