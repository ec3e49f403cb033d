//! Calls to a worker about the KV that it holds.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use http_body_util::BodyExt as _;
use hyper::Method;
use hyper::body::Incoming;

use super::calls::{Calls, percent_encoded};
use super::{ClientError, HttpClient};
use crate::kv_stream::{Frame, FrameDecoder, KvKey};
use crate::worker::{KvBlocksPage, KvStats};

/// Time for the head of an answer: a worker answers between two steps of its engine.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Talks to one worker.
#[derive(Debug, Clone)]
pub struct WorkerClient {
    calls: Calls,
}

/// What a worker holds, as it changes.
#[derive(Debug)]
pub struct KvStream {
    body: Incoming,
    decoder: FrameDecoder,
    url: String,
}

impl WorkerClient {
    /// A client of the worker at `base`, such as `http://host:8082`.
    pub fn new(http: HttpClient, base: &str) -> Self {
        Self { calls: Calls::new(http, base, CALL_TIMEOUT) }
    }

    /// The same client with a header that every call carries, such as a token.
    #[must_use]
    pub fn with_header(self, header: Option<(HeaderName, HeaderValue)>) -> Self {
        Self { calls: self.calls.with_header(header) }
    }

    /// Where the worker is.
    pub fn base(&self) -> &str {
        self.calls.base()
    }

    /// The state of the worker's KV.
    ///
    /// # Errors
    /// If the worker cannot be reached or refuses.
    pub async fn kv_stats(&self) -> Result<KvStats, ClientError> {
        self.calls.get("/kv/stats").await
    }

    /// Up to `limit` blocks of a group that the worker holds now, behind the key `after`.
    ///
    /// # Errors
    /// If the worker cannot be reached or refuses; [`ClientError::Refused`] with status 404 if it has no such
    /// group.
    pub async fn kv_blocks(
        &self,
        group: u32,
        after: Option<KvKey>,
        limit: usize,
    ) -> Result<KvBlocksPage, ClientError> {
        let after = after.map(|key| format!("&after={key}")).unwrap_or_default();
        self.calls.get(&format!("/kv/blocks?group={group}{after}&limit={limit}")).await
    }

    /// Opens the stream of what the worker holds, from the batch `from` of `epoch` on if it still has that
    /// one, and with a snapshot otherwise.
    ///
    /// # Errors
    /// If the worker cannot be reached or refuses.
    pub async fn kv_events(&self, resume: Option<(u64, u64)>) -> Result<KvStream, ClientError> {
        let query = resume.map(|(epoch, from)| format!("?epoch={epoch}&from={from}")).unwrap_or_default();
        self.listen(&format!("/kv/events{query}")).await
    }

    /// As [`Self::kv_events`], from a store daemon: the chunks that it has of a model.
    ///
    /// # Errors
    /// If the daemon cannot be reached or refuses.
    pub async fn store_events(
        &self,
        model: &str,
        resume: Option<(u64, u64)>,
    ) -> Result<KvStream, ClientError> {
        let model = percent_encoded(model);
        let query = resume.map(|(epoch, from)| format!("&epoch={epoch}&from={from}")).unwrap_or_default();
        self.listen(&format!("/kv/events?model={model}{query}")).await
    }

    async fn listen(&self, path: &str) -> Result<KvStream, ClientError> {
        let (url, response) = self.calls.send(path, Method::GET, Bytes::new()).await?;
        if !response.status().is_success() {
            let status = response.status().as_u16();
            return Err(match self.calls.read(&url, response).await {
                Err(error) => error,
                Ok(_) => ClientError::Refused { url, status, message: String::new() },
            });
        }
        Ok(KvStream { body: response.into_body(), decoder: FrameDecoder::default(), url })
    }
}

impl KvStream {
    /// Waits for the next frame; `None` when the worker ends the stream.
    ///
    /// Cancel safe: a frame is lost only with the stream itself.
    ///
    /// # Errors
    /// If the connection breaks or carries something else; the stream cannot be read on then.
    pub async fn next(&mut self) -> Result<Option<Frame>, ClientError> {
        loop {
            let frame = self.decoder.next_frame().map_err(|error| ClientError::Malformed {
                url: self.url.clone(),
                reason: error.to_string(),
            })?;
            if frame.is_some() {
                return Ok(frame);
            }
            let Some(piece) = self.body.frame().await else { return Ok(None) };
            let piece = piece.map_err(|error| ClientError::Unreachable {
                url: self.url.clone(),
                reason: error.to_string(),
            })?;
            if let Some(bytes) = piece.data_ref() {
                self.decoder.push(bytes);
            }
        }
    }
}
