//! Calls to the global KV index of a gateway.

use std::time::Duration;

use http::{HeaderName, HeaderValue};

use super::calls::{Calls, percent_encoded};
use super::{ClientError, HttpClient};
use crate::index::{BlocksPage, HoldersRequest, HoldersResponse, IndexStats, ScoreRequest, ScoreResponse};

/// Time for a whole call: a page of blocks may walk the whole index.
const CALL_TIMEOUT: Duration = Duration::from_mins(1);

/// Talks to the index of one gateway.
#[derive(Debug, Clone)]
pub struct IndexClient {
    calls: Calls,
}

/// Which blocks are asked for.
#[derive(Debug, Clone, Copy)]
pub struct BlocksQuery<'a> {
    /// The model.
    pub model: &'a str,
    /// The worker.
    pub worker: &'a str,
    /// Its data parallel rank.
    pub rank: u32,
    /// How the blocks are named, as [`IndexStats`] says it.
    pub keys: &'a str,
    /// The `next` of the page before, 16 hexadecimal digits; absent for the first page.
    pub after: Option<&'a str>,
}

impl IndexClient {
    /// A client of the gateway at `base`, such as `http://host:8080`.
    pub fn new(http: HttpClient, base: &str) -> Self {
        Self { calls: Calls::new(http, base, CALL_TIMEOUT) }
    }

    /// The same client with a header that every call carries, such as a token.
    #[must_use]
    pub fn with_header(self, header: Option<(HeaderName, HeaderValue)>) -> Self {
        Self { calls: self.calls.with_header(header) }
    }

    /// How much of a prompt each worker has.
    pub async fn score(&self, request: &ScoreRequest) -> Result<ScoreResponse, ClientError> {
        self.calls.post("/v1/score", request).await
    }

    /// Which workers are known to have chunks of a store.
    pub async fn holders(&self, request: &HoldersRequest) -> Result<HoldersResponse, ClientError> {
        self.calls.post("/index/holders", request).await
    }

    /// What the index knows.
    pub async fn stats(&self) -> Result<IndexStats, ClientError> {
        self.calls.get("/index/stats").await
    }

    /// Some blocks of a source.
    pub async fn blocks(&self, query: &BlocksQuery<'_>) -> Result<BlocksPage, ClientError> {
        let BlocksQuery { model, worker, rank, keys, after } = query;
        let mut path = format!(
            "/index/blocks?model={}&worker={}&rank={rank}&keys={}",
            percent_encoded(model),
            percent_encoded(worker),
            percent_encoded(keys)
        );
        if let Some(after) = after {
            path.push_str("&after=");
            path.push_str(&percent_encoded(after));
        }
        self.calls.get(&path).await
    }
}
