//! Calls to other workers.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderName, HeaderValue, Method, Request};
use http_body_util::{BodyExt as _, Full, Limited};
use kvik_model::{BLOCK_TOKENS, LentBlocks, ModelError};
use kvik_proto::client::{ClientError, HttpClient, send};
use kvik_proto::moves::{KV_CHECKSUM, KvTaken, Offer, OfferAnswer};
use kvik_tier::shared::checksum;
use serde::de::DeserializeOwned;

/// Time for one call: a worker that needs longer to take a few megabytes is no place to move to.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest answer, in bytes; all are a few numbers.
const MAX_ANSWER_BYTES: usize = 1 << 20;

/// Blocks as they are sent: their tokens and, block by block, the bytes of all layers.
#[derive(Debug)]
pub(crate) struct Blocks {
    bytes: Bytes,
    /// CRC-64/NVME of all bytes.
    sum: u64,
}

/// Calls other workers of the cluster.
#[derive(Debug, Clone)]
pub(crate) struct PeerClient {
    http: HttpClient,
    /// The cluster's token.
    header: Option<(HeaderName, HeaderValue)>,
}

impl Blocks {
    /// Copies some of the blocks.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn read(lent: &LentBlocks, blocks: Range<usize>) -> Result<Self, ModelError> {
        let tokens = lent.tokens().iter().skip(blocks.start * BLOCK_TOKENS).take(blocks.len() * BLOCK_TOKENS);
        let n_bytes = blocks.len() * (BLOCK_TOKENS * size_of::<u32>() + lent.block_bytes());
        let mut bytes = Vec::with_capacity(size_of::<u32>() + n_bytes);
        bytes.extend_from_slice(&(tokens.len() as u32).to_le_bytes());
        bytes.extend(tokens.flat_map(|token| token.to_le_bytes()));
        lent.read(blocks, &mut bytes)?;
        // While they are in the processor's caches.
        let sum = checksum(&bytes).0;
        Ok(Self { bytes: bytes.into(), sum })
    }
}

impl PeerClient {
    pub(crate) fn new(http: HttpClient, header: Option<(HeaderName, HeaderValue)>) -> Self {
        Self { http, header }
    }

    /// Offers a request to the worker at `base`.
    pub(crate) async fn offer(
        &self,
        base: &str,
        offer: &Offer,
        body: &Bytes,
    ) -> Result<OfferAnswer, ClientError> {
        let url = format!("{base}/sequences/moves");
        let mut bytes = serde_json::to_vec(offer)
            .map_err(|error| ClientError::Malformed { url: url.clone(), reason: error.to_string() })?;
        bytes.push(b'\n');
        bytes.extend_from_slice(body);
        self.call(Method::POST, url, bytes.into(), None).await
    }

    /// Sends blocks.
    pub(crate) async fn put_blocks(
        &self,
        base: &str,
        ticket: &str,
        (part, choice, first_block): (usize, u32, usize),
        blocks: Blocks,
    ) -> Result<KvTaken, ClientError> {
        let query = format!("part={part}&choice={choice}&first_block={first_block}");
        let url = format!("{base}/sequences/moves/{ticket}/kv?{query}");
        let sum = format!("{:016x}", blocks.sum);
        self.call(Method::PUT, url, blocks.bytes, Some(sum)).await
    }

    /// Tells that a request does not come.
    pub(crate) async fn forget(&self, base: &str, ticket: &str) -> Result<(), ClientError> {
        let url = format!("{base}/sequences/moves/{ticket}");
        self.call::<serde_json::Value>(Method::DELETE, url, Bytes::new(), None).await.map(drop)
    }

    pub(crate) async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        url: String,
        body: Bytes,
        sum: Option<String>,
    ) -> Result<T, ClientError> {
        let unreachable = |reason: String| ClientError::Unreachable { url: url.clone(), reason };
        let mut request =
            Request::builder().method(method).uri(&url).header(CONTENT_TYPE, "application/octet-stream");
        if let Some(sum) = sum {
            request = request.header(KV_CHECKSUM, sum);
        }
        if let Some((name, value)) = &self.header {
            request = request.header(name, value);
        }
        let request = request
            .body(Full::new(body))
            .map_err(|error| ClientError::Configuration(format!("address {url}: {error}")))?;
        let asking = async {
            let response = send(&self.http, request).await.map_err(|error| unreachable(error.to_string()))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await;
            let body = body.map_err(|error| unreachable(error.to_string()))?.to_bytes();
            Ok((status, body))
        };
        let (status, body) = tokio::time::timeout(CALL_TIMEOUT, asking)
            .await
            .unwrap_or_else(|_| Err(unreachable("no answer in time".to_owned())))?;
        if !status.is_success() {
            let message = String::from_utf8_lossy(&body).chars().take(300).collect();
            return Err(ClientError::Refused { url, status: status.as_u16(), message });
        }
        serde_json::from_slice(&body)
            .map_err(|error| ClientError::Malformed { url: url.clone(), reason: error.to_string() })
    }
}
