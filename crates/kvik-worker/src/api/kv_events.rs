//! `/kv/events` and `/kv/blocks`: what the worker holds, as it changes and as it is.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use bytes::Bytes;
use futures_util::stream;
use http::header::CACHE_CONTROL;
use http::{HeaderValue, StatusCode};
use kvik_node::{KvListener, kv_tier};
use kvik_proto::kv_stream::{KvKey, KvTier};
use kvik_proto::worker::{HeldBlock, KvBlocksPage};
use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use super::{Answer, Shared, json, typed};
use crate::block_groups::BLOCKS;
use crate::engine_thread::EngineHandle;
use crate::error::Refusal;
use crate::key_page::KeyPage;
use crate::state::Loaded;

/// Blocks of a page where the request does not say.
const DEFAULT_LIMIT: usize = 1000;
/// The most blocks of a page: some megabytes of JSON.
const MAX_LIMIT: usize = 65_536;

/// Where a stream is to begin.
#[derive(Debug, Deserialize)]
struct EventsQuery {
    epoch: Option<u64>,
    from: Option<u64>,
}

/// Which blocks are wanted.
#[derive(Debug, Deserialize)]
struct BlocksQuery {
    #[serde(default)]
    group: u32,
    after: Option<KvKey>,
    limit: Option<usize>,
}

/// A listener with what ends it.
struct Subscription {
    listener: KvListener,
    engine: EngineHandle,
    draining: CancellationToken,
}

/// `GET /kv/events`. The stream ends when the worker drains: no new requests are sent to it. It also ends when there are
/// blocks of another group from now on, which its next start names.
pub(super) async fn events(State(state): Shared, request: Request) -> Answer {
    let EventsQuery { epoch, from } = query(&request)?;
    let loaded = state.ready()?;
    let resume = match (epoch, from) {
        (Some(epoch), Some(from)) => Some((epoch, from)),
        (None, None) => None,
        (Some(_), None) => return Err(Refusal::field("from", "missing", "given together with `epoch`")),
        (None, Some(_)) => return Err(Refusal::field("epoch", "missing", "given together with `from`")),
    };
    let Some(listener) = loaded.kv_log.listen(resume) else {
        return Err(Refusal::too_many("too many listen to this worker's KV; try again later", 5));
    };
    let subscription =
        Subscription { listener, engine: loaded.engine.clone(), draining: state.draining.clone() };
    let frames = stream::unfold(subscription, |mut subscription| async move {
        let frames = subscription.next().await?;
        Some((Ok::<Bytes, Infallible>(frames), subscription))
    });
    let mut response = typed(StatusCode::OK, "application/octet-stream", Body::from_stream(frames));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(response)
}

/// `GET /kv/blocks`: asks the engine and the store themselves, not what was reported of them.
pub(super) async fn blocks(State(state): Shared, request: Request) -> Answer {
    let BlocksQuery { group, after, limit } = query(&request)?;
    let loaded = Arc::clone(state.loaded()?);
    let limit = limit.unwrap_or(DEFAULT_LIMIT);
    if !(1..=MAX_LIMIT).contains(&limit) {
        return Err(Refusal::field("limit", limit, &format!("1 to {MAX_LIMIT}")));
    }
    if !loaded.kv_log.has_group(group) {
        return Err(Refusal::not_found(
            format!("`group` is {group}, which this worker has not"),
            Some("group"),
        ));
    }
    let epoch = loaded.kv_log.epoch();
    let page = KeyPage::new(after, limit);
    let page =
        if group == BLOCKS { loaded.engine.blocks(page).await? } else { chunks(&loaded, page).await? };
    let (blocks, has_more) = page.finish();
    let blocks = blocks.into_iter().map(|(key, tiers)| HeldBlock { key, tiers }).collect();
    Ok(json(StatusCode::OK, &KvBlocksPage { epoch, group, blocks, has_more }))
}

/// Fills a page from the store, on a thread that may block.
async fn chunks(loaded: &Arc<Loaded>, page: KeyPage<Vec<KvTier>>) -> Result<KeyPage<Vec<KvTier>>, Refusal> {
    let loaded = Arc::clone(loaded);
    let filling = tokio::task::spawn_blocking(move || {
        let mut page = page;
        if let Some(admin) = &loaded.store_admin {
            admin.visit_chunks(|hash, tiers| {
                page.offer(KvKey::from(hash), || tiers.iter().map(|tier| kv_tier(*tier)).collect());
            })?;
        }
        Ok(page)
    });
    filling.await.map_err(|_| Refusal::failed("the store failed"))?
}

fn query<T: serde::de::DeserializeOwned>(request: &Request) -> Result<T, Refusal> {
    axum::extract::Query::try_from_uri(request.uri())
        .map(|axum::extract::Query(query)| query)
        .map_err(|error| Refusal::invalid(format!("the query cannot be read: {error}"), None))
}

impl Subscription {
    /// The next frames; `None` at the end.
    async fn next(&mut self) -> Option<Bytes> {
        let frames = tokio::select! {
            biased;
            () = self.draining.cancelled() => return None,
            frames = self.listener.next() => frames,
        };
        // The KV of an engine that is gone is gone too.
        frames.filter(|_| self.engine.is_alive()).map(Bytes::from)
    }
}
