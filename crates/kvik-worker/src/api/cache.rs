//! The admin API of the store.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use http::StatusCode;
use kvik_proto::cache::{
    CacheHealth, ClearRequest, CompressRequest, MoveRequest, SegmentsRequest, SegmentsResponse,
};
use kvik_proto::worker::PromptInput;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::request::{cache_salt, read_input};
use super::segments::segment_tokens;
use super::{Answer, Shared, json, part, read_body, read_json, read_json_with, typed};
use crate::engine_thread::{AddedSegment, SegmentKey};
use crate::error::Refusal;
use crate::prompt::Prompt;
use crate::state::{Loaded, WorkerState};
use crate::store_admin::{StoreAdmin, no_session};

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RetrieveQuery {
    layer: Option<usize>,
    tier: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct TierQuery {
    tier: Option<String>,
}

/// `POST /cache/lookup`.
pub(super) async fn lookup(State(state): Shared, request: Request) -> Answer {
    let (loaded, prompt) = read_prompt(&state, request).await?;
    answer(&loaded, move |admin| admin.lookup(&prompt)).await
}

/// `POST /cache/explain`.
pub(super) async fn explain(State(state): Shared, request: Request) -> Answer {
    let (loaded, prompt) = read_prompt(&state, request).await?;
    answer(&loaded, move |admin| admin.explain(&prompt)).await
}

/// `POST /cache/prefetch`.
pub(super) async fn prefetch(State(state): Shared, request: Request) -> Answer {
    let TierQuery { tier } = read_query(&request, "tier")?;
    let (loaded, prompt) = read_prompt(&state, request).await?;
    answer(&loaded, move |admin| admin.prefetch(&prompt, tier.as_deref())).await
}

/// `GET /cache/prefetch/{id}`.
pub(super) async fn prefetch_status(State(state): Shared, Path(id): Path<String>) -> Answer {
    answer(state.loaded()?, move |admin| admin.prefetch_status(&id)).await
}

/// `DELETE /cache/prefetch/{id}`.
pub(super) async fn cancel_prefetch(State(state): Shared, Path(id): Path<String>) -> Answer {
    answer(state.loaded()?, move |admin| admin.cancel_prefetch(&id)).await
}

/// `POST /cache/pin`.
pub(super) async fn pin(State(state): Shared, request: Request) -> Answer {
    let (loaded, prompt) = read_prompt(&state, request).await?;
    answer(&loaded, move |admin| admin.pin(&prompt)).await
}

/// `POST /cache/unpin`.
pub(super) async fn unpin(State(state): Shared, request: Request) -> Answer {
    let (loaded, prompt) = read_prompt(&state, request).await?;
    answer(&loaded, move |admin| admin.unpin(&prompt)).await
}

/// `POST /cache/move`.
pub(super) async fn relocate(State(state): Shared, request: Request) -> Answer {
    let loaded = Arc::clone(state.loaded()?);
    let parts = &[part::<PromptInput> as super::Part];
    let MoveRequest { input, from, to, copy } = read_json_with(&state, request, parts).await?;
    let prompt = read_input(&loaded, input).await?;
    answer(&loaded, move |admin| admin.relocate(&prompt, &from, &to, copy)).await
}

/// `POST /cache/clear`.
pub(super) async fn clear(State(state): Shared, request: Request) -> Answer {
    let loaded = Arc::clone(state.loaded()?);
    let parts = &[part::<PromptInput> as super::Part];
    let ClearRequest { input, tiers } = read_json_with(&state, request, parts).await?;
    let prompt = if input == PromptInput::default() { None } else { Some(read_input(&loaded, input).await?) };
    answer(&loaded, move |admin| admin.clear(prompt.as_ref(), tiers.as_deref())).await
}

/// `POST /cache/compress`.
pub(super) async fn compress(State(state): Shared, request: Request) -> Answer {
    let loaded = Arc::clone(state.loaded()?);
    let request: CompressRequest = read_json(&state, request).await?;
    answer(&loaded, move |admin| admin.compress(&request)).await
}

/// `GET /cache/compress`.
pub(super) async fn compress_status(State(state): Shared) -> Answer {
    answer(state.loaded()?, |admin| Ok(admin.compress_status())).await
}

/// `DELETE /cache/compress`.
pub(super) async fn cancel_compress(State(state): Shared) -> Answer {
    answer(state.loaded()?, |admin| Ok(admin.cancel_compress())).await
}

/// `POST /cache/retrieve`.
pub(super) async fn retrieve(State(state): Shared, request: Request) -> Answer {
    let RetrieveQuery { layer, tier } = read_query(&request, "layer")?;
    let (loaded, prompt) = read_prompt(&state, request).await?;
    let bytes = with_store(&loaded, move |admin| admin.retrieve(&prompt, layer, tier.as_deref())).await?;
    Ok(typed(StatusCode::OK, "application/octet-stream", Body::from(bytes)))
}

/// `POST /cache/store`.
pub(super) async fn store(State(state): Shared, request: Request) -> Answer {
    let loaded = Arc::clone(state.loaded()?);
    let TierQuery { tier } = read_query(&request, "tier")?;
    let body = read_body(&state, request).await?;
    answer(&loaded, move |admin| admin.store(&body, tier.as_deref())).await
}

/// `POST /cache/segments`: has segments computed and kept.
pub(super) async fn segments(State(state): Shared, request: Request) -> Answer {
    let request: SegmentsRequest = read_json(&state, request).await?;
    let loaded = state.ready()?;
    let Some(store) = &loaded.store else {
        let message = "this worker keeps no segments: it has no KV store; see `store` in its configuration";
        return Err(Refusal::not_found(message, None));
    };
    if !store.segments().is_there() {
        return Err(no_session());
    }
    let salt = cache_salt(request.cache_salt.as_deref())?;
    let mut added = SegmentsResponse::default();
    for (idx, part) in request.segments.into_iter().enumerate() {
        let field = format!("segments[{idx}]");
        let tokens = segment_tokens(loaded, &field, part).await?;
        added.tokens += tokens.len();
        let count = match loaded.engine.add_segment(SegmentKey::new(tokens, salt.clone())).await? {
            AddedSegment::Computed => &mut added.computed_segments,
            AddedSegment::Present => &mut added.present_segments,
            AddedSegment::Refused => &mut added.refused_segments,
        };
        *count += 1;
    }
    Ok(json(StatusCode::OK, &added))
}

/// `GET /cache/health`; also answers where there is no store.
pub(super) async fn health(State(state): Shared) -> Answer {
    let loaded = state.loaded()?;
    if loaded.store_admin.is_none() {
        return Ok(json(StatusCode::OK, &CacheHealth { status: "off".to_owned(), tiers: Vec::new() }));
    }
    answer(loaded, StoreAdmin::health).await
}

/// `GET /cache/stats`.
pub(super) async fn stats(State(state): Shared) -> Answer {
    answer(state.loaded()?, StoreAdmin::stats).await
}

/// Reads what stands behind the path; an error is about `field`.
fn read_query<T: DeserializeOwned>(request: &Request, field: &'static str) -> Result<T, Refusal> {
    let query = axum::extract::Query::try_from_uri(request.uri())
        .map_err(|error| Refusal::invalid(format!("the query cannot be read: {error}"), Some(field)))?;
    Ok(query.0)
}

/// Reads a request that is a prompt.
async fn read_prompt(state: &WorkerState, request: Request) -> Result<(Arc<Loaded>, Prompt), Refusal> {
    let loaded = Arc::clone(state.loaded()?);
    let input: PromptInput = read_json(state, request).await?;
    let prompt = read_input(&loaded, input).await?;
    Ok((loaded, prompt))
}

/// Answers with what `ask` gives, on a thread that may block.
async fn answer<T: Serialize + Send + 'static>(
    loaded: &Arc<Loaded>,
    ask: impl FnOnce(&StoreAdmin) -> Result<T, Refusal> + Send + 'static,
) -> Answer {
    Ok(json(StatusCode::OK, &with_store(loaded, ask).await?))
}

async fn with_store<T: Send + 'static>(
    loaded: &Arc<Loaded>,
    ask: impl FnOnce(&StoreAdmin) -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    let loaded = Arc::clone(loaded);
    let asking = tokio::task::spawn_blocking(move || match &loaded.store_admin {
        Some(admin) => ask(admin),
        None => {
            Err(Refusal::not_found("this worker has no KV store; see `store` in its configuration", None))
        }
    });
    asking.await.map_err(|_| Refusal::failed("the store failed"))?
}
