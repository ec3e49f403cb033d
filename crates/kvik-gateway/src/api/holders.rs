//! Which workers have chunks of a store: a question of store daemons.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use kvik_index::holders::BlockKey;
use kvik_proto::index::{HoldersRequest, HoldersResponse, MAX_HOLDER_KEYS};
use kvik_runtime::trust::Scope;
use tokio::time::Instant;

use super::index::{answer, indexer, refusal};
use crate::answer::refuse;
use crate::config::millis;
use crate::error::Refusal;
use crate::request::body::read_body;
use crate::state::Shared;

/// Longest body, in bytes: all keys in quotes, with room for spaces.
const MAX_BODY_BYTES: usize = MAX_HOLDER_KEYS * 32;

/// Which workers have some of the chunks. For services of the cluster: names of chunks tell whether a prompt was seen.
pub(super) async fn holders(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let peer = request.extensions().get::<SocketAddr>().copied();
    if let Err(denied) = shared.trust.check(request.headers(), peer, Scope::Cluster) {
        return denied.response();
    }
    find(&shared, request).await.unwrap_or_else(refuse)
}

async fn find(shared: &Shared, request: Request) -> Result<Response, Refusal> {
    let (parts, body) = request.into_parts();
    // Where there is no token, a key keeps out those that `/v1/score` does.
    let indexer = indexer(shared, &parts.headers).map_err(Refusal::before_body)?;
    let deadline = Instant::now() + millis(shared.view().config.timeouts.request_ms);
    let reading = read_body(body, &parts.headers, MAX_BODY_BYTES, deadline);
    let body = reading.await.map_err(Refusal::before_body)?;
    let request: HoldersRequest =
        serde_json::from_slice(&body).map_err(|error| Refusal::invalid(error.to_string(), None))?;
    let keys: Option<Vec<BlockKey>> = request.keys.iter().map(|text| parse_key(text)).collect();
    let keys = keys.filter(|keys| keys.len() <= MAX_HOLDER_KEYS).ok_or_else(|| {
        let allowed = format!("`keys` must be at most {MAX_HOLDER_KEYS} keys of 16 hexadecimal digits");
        Refusal::invalid(allowed, Some("keys"))
    })?;
    let holders = indexer.holders(&keys).await.map_err(refusal)?;
    Ok(answer(&HoldersResponse { holders }))
}

fn parse_key(text: &str) -> Option<BlockKey> {
    let is_key = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    u64::from_str_radix(text, 16).ok().filter(|_| is_key).map(BlockKey)
}
