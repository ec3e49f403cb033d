//! The admin API of the store.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use http::StatusCode;
use kvik_proto::cache::{CacheHealth, ClearRequest, MoveRequest};
use kvik_proto::worker::PromptInput;
use serde::{Deserialize, Serialize};

use super::request::input_tokens;
use super::{Answer, Shared, json, part, read_body, read_json, read_json_with, typed};
use crate::cache::Cache;
use crate::error::Refusal;
use crate::state::{Loaded, WorkerState};

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RetrieveQuery {
    layer: Option<usize>,
}

/// `POST /cache/lookup`.
pub(super) async fn lookup(State(state): Shared, request: Request) -> Answer {
    let (loaded, tokens) = read_prompt(&state, request).await?;
    answer(&loaded, move |cache| Ok(cache.lookup(&tokens))).await
}

/// `POST /cache/prefetch`.
pub(super) async fn prefetch(State(state): Shared, request: Request) -> Answer {
    let (loaded, tokens) = read_prompt(&state, request).await?;
    answer(&loaded, move |cache| Ok(cache.prefetch(&tokens))).await
}

/// `GET /cache/prefetch/{id}`.
pub(super) async fn prefetch_status(State(state): Shared, Path(id): Path<String>) -> Answer {
    answer(state.loaded()?, move |cache| cache.prefetch_status(&id)).await
}

/// `DELETE /cache/prefetch/{id}`.
pub(super) async fn cancel_prefetch(State(state): Shared, Path(id): Path<String>) -> Answer {
    answer(state.loaded()?, move |cache| cache.cancel_prefetch(&id)).await
}

/// `POST /cache/pin`.
pub(super) async fn pin(State(state): Shared, request: Request) -> Answer {
    let (loaded, tokens) = read_prompt(&state, request).await?;
    answer(&loaded, move |cache| Ok(cache.pin(&tokens))).await
}

/// `POST /cache/unpin`.
pub(super) async fn unpin(State(state): Shared, request: Request) -> Answer {
    let (loaded, tokens) = read_prompt(&state, request).await?;
    answer(&loaded, move |cache| cache.unpin(&tokens)).await
}

/// `POST /cache/move`.
pub(super) async fn relocate(State(state): Shared, request: Request) -> Answer {
    let loaded = Arc::clone(state.loaded()?);
    let parts = &[part::<PromptInput> as super::Part];
    let MoveRequest { input, from, to, copy } = read_json_with(&state, request, parts).await?;
    let tokens = input_tokens(&loaded, input).await?;
    answer(&loaded, move |cache| cache.relocate(&tokens, &from, &to, copy)).await
}

/// `POST /cache/clear`.
pub(super) async fn clear(State(state): Shared, request: Request) -> Answer {
    let loaded = Arc::clone(state.loaded()?);
    let parts = &[part::<PromptInput> as super::Part];
    let ClearRequest { input, tiers } = read_json_with(&state, request, parts).await?;
    let tokens =
        if input == PromptInput::default() { None } else { Some(input_tokens(&loaded, input).await?) };
    answer(&loaded, move |cache| cache.clear(tokens.as_deref(), tiers.as_deref())).await
}

/// `POST /cache/retrieve`.
pub(super) async fn retrieve(State(state): Shared, request: Request) -> Answer {
    let axum::extract::Query(RetrieveQuery { layer }) = axum::extract::Query::try_from_uri(request.uri())
        .map_err(|error| Refusal::invalid(format!("the query cannot be read: {error}"), Some("layer")))?;
    let (loaded, tokens) = read_prompt(&state, request).await?;
    let bytes = with_cache(&loaded, move |cache| cache.retrieve(&tokens, layer)).await?;
    Ok(typed(StatusCode::OK, "application/octet-stream", Body::from(bytes)))
}

/// `POST /cache/store`.
pub(super) async fn store(State(state): Shared, request: Request) -> Answer {
    let loaded = Arc::clone(state.loaded()?);
    let body = read_body(&state, request).await?;
    answer(&loaded, move |cache| cache.store(&body)).await
}

/// `GET /cache/health`; also answers where there is no store.
pub(super) async fn health(State(state): Shared) -> Answer {
    let loaded = state.loaded()?;
    if loaded.cache.is_none() {
        return Ok(json(StatusCode::OK, &CacheHealth { status: "off".to_owned(), tiers: Vec::new() }));
    }
    answer(loaded, |cache| Ok(cache.health())).await
}

/// `GET /cache/stats`.
pub(super) async fn stats(State(state): Shared) -> Answer {
    answer(state.loaded()?, |cache| Ok(cache.stats())).await
}

/// The tokens of a request that is a prompt.
async fn read_prompt(state: &WorkerState, request: Request) -> Result<(Arc<Loaded>, Vec<u32>), Refusal> {
    let loaded = Arc::clone(state.loaded()?);
    let input: PromptInput = read_json(state, request).await?;
    let tokens = input_tokens(&loaded, input).await?;
    Ok((loaded, tokens))
}

/// Answers with what `ask` gives, on a thread that may block.
async fn answer<T: Serialize + Send + 'static>(
    loaded: &Arc<Loaded>,
    ask: impl FnOnce(&Cache) -> Result<T, Refusal> + Send + 'static,
) -> Answer {
    Ok(json(StatusCode::OK, &with_cache(loaded, ask).await?))
}

async fn with_cache<T: Send + 'static>(
    loaded: &Arc<Loaded>,
    ask: impl FnOnce(&Cache) -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    let loaded = Arc::clone(loaded);
    let asking = tokio::task::spawn_blocking(move || match &loaded.cache {
        Some(cache) => ask(cache),
        None => {
            Err(Refusal::not_found("this worker has no KV store; see `store` in its configuration", None))
        }
    });
    asking.await.map_err(|_| Refusal::failed("the store failed"))?
}
