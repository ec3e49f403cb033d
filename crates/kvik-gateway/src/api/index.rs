//! The routes of the global KV index.

use std::sync::Arc;

use axum::extract::{Query, Request, State};
use axum::response::{IntoResponse as _, Response};
use http::{HeaderMap, StatusCode};
use kvik_index::holders::SourceName;
use kvik_indexer::{Indexer, IndexerError, is_same_worker};
use kvik_proto::index::{IndexStats, ScoreRequest};
use serde::Deserialize;
use tokio::time::Instant;

use crate::answer::{WRONG_KEY, json_answer, refuse};
use crate::config::millis;
use crate::error::Refusal;
use crate::request::body::read_body;
use crate::state::Shared;

/// Blocks of a page where the caller does not say.
const DEFAULT_PAGE_BLOCKS: usize = 1000;

/// Which blocks are asked for.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BlocksArguments {
    model: String,
    worker: String,
    #[serde(default)]
    rank: u32,
    keys: String,
    after: Option<String>,
    limit: Option<usize>,
}

/// Which worker has how much of a prompt.
pub(crate) async fn score(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    match answer_score(&shared, request).await {
        Ok(response) => response,
        Err(refusal) => refuse(refusal),
    }
}

/// What the index knows.
pub(crate) async fn stats(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    let answer = async {
        let indexer = indexer(&shared, &headers)?;
        let models = indexer.stats().await.map_err(refusal)?;
        let (backend, counters) = (indexer.backend_kind().to_owned(), indexer.counters());
        Ok(answer(&IndexStats { backend, models, counters }))
    };
    answer.await.unwrap_or_else(refuse)
}

/// Some blocks of a worker.
pub(crate) async fn blocks(
    State(shared): State<Arc<Shared>>,
    headers: HeaderMap,
    arguments: Result<Query<BlocksArguments>, axum::extract::rejection::QueryRejection>,
) -> Response {
    let answer = async {
        let indexer = indexer(&shared, &headers)?;
        let Query(arguments) = arguments.map_err(|error| Refusal::invalid(error.body_text(), None))?;
        let after = arguments.after.as_deref().map(parse_cursor).transpose()?;
        let source = SourceName { worker: arguments.worker.into(), rank: arguments.rank };
        let limit = arguments.limit.unwrap_or(DEFAULT_PAGE_BLOCKS);
        let page = indexer.blocks(&arguments.model, &source, &arguments.keys, after, limit).await;
        Ok(answer(&page.map_err(refusal)?))
    };
    answer.await.unwrap_or_else(refuse)
}

async fn answer_score(shared: &Shared, request: Request) -> Result<Response, Refusal> {
    let view = shared.view();
    let (parts, body) = request.into_parts();
    let indexer = indexer(shared, &parts.headers).map_err(Refusal::before_body)?;
    let deadline = Instant::now() + millis(view.config.timeouts.request_ms);
    let reading = read_body(body, &parts.headers, view.config.max_body_bytes, deadline);
    let body = reading.await.map_err(Refusal::before_body)?;
    let request: ScoreRequest =
        serde_json::from_slice(&body).map_err(|error| Refusal::invalid(error.to_string(), None))?;
    let group = view.fleet.group(&request.model).cloned();
    let queued_tokens = |worker: &str| {
        let seats = group.iter().flat_map(|group| &group.seats);
        let mut backends = seats.map(|seat| &seat.backend);
        let backend = backends.find(|backend| backend.id == worker || is_same_worker(&backend.base, worker));
        backend.map_or(0, |backend| backend.outstanding_tokens())
    };
    let response = indexer.score(request, &queued_tokens).await.map_err(refusal)?;
    Ok(answer(&response))
}

pub(super) fn indexer<'a>(shared: &'a Shared, headers: &HeaderMap) -> Result<&'a Indexer, Refusal> {
    // A token stands for the cluster or its administrator; neither needs a key.
    if !shared.trust.is_shown_token(headers) && !shared.view().keys.accepts(headers) {
        return Err(Refusal::unauthorized(WRONG_KEY));
    }
    shared.indexer.as_deref().ok_or_else(Refusal::no_index)
}

pub(super) fn answer(value: &impl serde::Serialize) -> Response {
    match serde_json::to_value(value) {
        Ok(value) => json_answer(StatusCode::OK, &value),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

fn parse_cursor(text: &str) -> Result<u64, Refusal> {
    let digits = Some(text).filter(|text| text.len() == 16);
    let cursor = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    cursor.ok_or_else(|| {
        Refusal::invalid("`after` must be the `next` of a page: 16 hexadecimal digits", Some("after"))
    })
}

#[expect(clippy::needless_pass_by_value, reason = "it turns an error into another")]
pub(super) fn refusal(error: IndexerError) -> Refusal {
    match &error {
        IndexerError::Invalid { field, .. } => Refusal::invalid(error.to_string(), Some(field)),
        IndexerError::Tokens(_) => Refusal::invalid(error.to_string(), Some("prompt")),
        _ => Refusal::index_away(&error.to_string()),
    }
}
