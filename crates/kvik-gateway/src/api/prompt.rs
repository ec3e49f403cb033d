//! Which worker has which tokens of a prompt.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use kvik_proto::index::PromptHoldersRequest;
use tokio::time::Instant;

use super::index::{answer, indexer, refusal};
use crate::answer::refuse;
use crate::config::millis;
use crate::error::Refusal;
use crate::request::body::read_body;
use crate::state::Shared;

/// `POST /index/prompt`.
pub(super) async fn prompt(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    find(&shared, request).await.unwrap_or_else(refuse)
}

async fn find(shared: &Shared, request: Request) -> Result<Response, Refusal> {
    let config = Arc::clone(&shared.view().config);
    let (parts, body) = request.into_parts();
    let indexer = indexer(shared, &parts.headers).map_err(Refusal::before_body)?;
    let deadline = Instant::now() + millis(config.timeouts.request_ms);
    let reading = read_body(body, &parts.headers, config.max_body_bytes, deadline);
    let body = reading.await.map_err(Refusal::before_body)?;
    let request: PromptHoldersRequest =
        serde_json::from_slice(&body).map_err(|error| Refusal::invalid(error.to_string(), None))?;
    let response = indexer.prompt_holders(request).await.map_err(refusal)?;
    Ok(answer(&response))
}
