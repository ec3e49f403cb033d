//! Calls to the store of a worker.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use hyper::Method;

use super::calls::{Calls, json_body, parse, percent_encoded};
use super::{ClientError, HttpClient};
use crate::cache::{
    CacheHealth, CacheStats, ClearRequest, ClearResponse, CompressRequest, CompressStatus, ExplainResponse,
    LookupResponse, MoveRequest, MoveResponse, PinResponse, PrefetchStatus, SegmentsRequest,
    SegmentsResponse, StoreResponse,
};
use crate::worker::PromptInput;

/// Time for a whole call: some of them wait for disks and remote tiers.
const CALL_TIMEOUT: Duration = Duration::from_mins(2);

/// Talks to the store of one worker.
///
/// Every call fails with [`ClientError::Refused`] and status 404 where the worker has no store.
#[derive(Debug, Clone)]
pub struct CacheClient {
    calls: Calls,
}

impl CacheClient {
    /// A client of the worker at `base`, such as `http://host:8082`.
    pub fn new(http: HttpClient, base: &str) -> Self {
        Self { calls: Calls::new(http, base, CALL_TIMEOUT) }
    }

    /// The same client with a header that every call carries, such as a token.
    #[must_use]
    pub fn with_header(self, header: Option<(HeaderName, HeaderValue)>) -> Self {
        Self { calls: self.calls.with_header(header) }
    }

    /// How much of a prompt is in the store.
    pub async fn lookup(&self, input: &PromptInput) -> Result<LookupResponse, ClientError> {
        self.calls.post("/cache/lookup", input).await
    }

    /// Whether a prompt's KV would be loaded or computed now, and why.
    pub async fn explain(&self, input: &PromptInput) -> Result<ExplainResponse, ClientError> {
        self.calls.post("/cache/explain", input).await
    }

    /// Starts coding the cold chunks of a tier by another codec.
    pub async fn compress(&self, request: &CompressRequest) -> Result<CompressStatus, ClientError> {
        self.calls.post("/cache/compress", request).await
    }

    /// How far that has come.
    pub async fn compress_status(&self) -> Result<CompressStatus, ClientError> {
        self.calls.get("/cache/compress").await
    }

    /// Ends it.
    pub async fn cancel_compress(&self) -> Result<CompressStatus, ClientError> {
        let (url, response) = self.calls.send("/cache/compress", Method::DELETE, Bytes::new()).await?;
        parse(&url, &self.calls.read(&url, response).await?)
    }

    /// Starts loading a prompt's KV into memory.
    pub async fn prefetch(
        &self,
        input: &PromptInput,
        tier: Option<&str>,
    ) -> Result<PrefetchStatus, ClientError> {
        self.calls.post(&format!("/cache/prefetch{}", query([tier_of(tier)])), input).await
    }

    /// Where a prefetch stands.
    pub async fn prefetch_status(&self, id: &str) -> Result<PrefetchStatus, ClientError> {
        self.calls.get(&format!("/cache/prefetch/{}", percent_encoded(id))).await
    }

    /// Ends a prefetch.
    pub async fn cancel_prefetch(&self, id: &str) -> Result<PrefetchStatus, ClientError> {
        let path = format!("/cache/prefetch/{}", percent_encoded(id));
        let (url, response) = self.calls.send(&path, Method::DELETE, Bytes::new()).await?;
        parse(&url, &self.calls.read(&url, response).await?)
    }

    /// Keeps a prompt's KV in memory until it is unpinned.
    pub async fn pin(&self, input: &PromptInput) -> Result<PinResponse, ClientError> {
        self.calls.post("/cache/pin", input).await
    }

    /// Takes one pin away.
    pub async fn unpin(&self, input: &PromptInput) -> Result<PinResponse, ClientError> {
        self.calls.post("/cache/unpin", input).await
    }

    /// Puts a prompt's KV into another tier.
    pub async fn relocate(&self, request: &MoveRequest) -> Result<MoveResponse, ClientError> {
        self.calls.post("/cache/move", request).await
    }

    /// Forgets KV.
    pub async fn clear(&self, request: &ClearRequest) -> Result<ClearResponse, ClientError> {
        self.calls.post("/cache/clear", request).await
    }

    /// A prompt's KV, of one layer or of all, as safetensors.
    pub async fn retrieve(
        &self,
        input: &PromptInput,
        layer: Option<usize>,
        tier: Option<&str>,
    ) -> Result<Bytes, ClientError> {
        let layer = layer.map(|layer| format!("layer={layer}"));
        let path = format!("/cache/retrieve{}", query([layer, tier_of(tier)]));
        let (url, response) = self.calls.send(&path, Method::POST, json_body(input)?).await?;
        self.calls.read(&url, response).await
    }

    /// Stores what [`Self::retrieve`] gave, of all layers.
    pub async fn store(&self, safetensors: Bytes, tier: Option<&str>) -> Result<StoreResponse, ClientError> {
        let path = format!("/cache/store{}", query([tier_of(tier)]));
        let (url, response) = self.calls.send(&path, Method::POST, safetensors).await?;
        parse(&url, &self.calls.read(&url, response).await?)
    }

    /// Has segments computed and kept.
    pub async fn add_segments(&self, request: &SegmentsRequest) -> Result<SegmentsResponse, ClientError> {
        self.calls.post("/cache/segments", request).await
    }

    /// The state of every tier.
    pub async fn health(&self) -> Result<CacheHealth, ClientError> {
        self.calls.get("/cache/health").await
    }

    /// Counts since the worker's start.
    pub async fn stats(&self) -> Result<CacheStats, ClientError> {
        self.calls.get("/cache/stats").await
    }
}

/// What stands behind the path, of the parts that are there.
fn query<const N: usize>(parts: [Option<String>; N]) -> String {
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() { String::new() } else { format!("?{}", parts.join("&")) }
}

fn tier_of(tier: Option<&str>) -> Option<String> {
    tier.map(|tier| format!("tier={}", percent_encoded(tier)))
}
