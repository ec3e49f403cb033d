//! Calls to a worker about the KV that it holds.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use http_body_util::BodyExt as _;
use hyper::Method;
use hyper::body::Incoming;

use super::calls::{Calls, json_body, parse, percent_encoded};
use super::{ClientError, HttpClient};
use crate::journal::MoveNotice;
use crate::kv_stream::{Frame, FrameDecoder, KvKey};
use crate::moves::{DrainReport, DrainRequest, MoveRequest, RunningSequences};
use crate::worker::{KvBlocksPage, KvStats};

/// Time for the head of an answer: a worker answers between two steps of its engine.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest report of a drain, in bytes; it is a few numbers.
const MAX_REPORT_BYTES: usize = 64 << 10;

/// Talks to one worker.
#[derive(Debug, Clone)]
pub struct WorkerClient {
    calls: Calls,
}

/// The reports of a worker that drains.
#[derive(Debug)]
pub struct DrainStream {
    body: Incoming,
    /// What has come of the next one.
    line: Vec<u8>,
    url: String,
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

    /// The running requests.
    ///
    /// # Errors
    /// If the worker cannot be reached or refuses.
    pub async fn sequences(&self) -> Result<RunningSequences, ClientError> {
        self.calls.get("/sequences").await
    }

    /// Moves a running request; returns when it is frozen and its KV is at the other worker.
    ///
    /// # Errors
    /// If the worker cannot be reached or refuses; the request stays then.
    pub async fn move_sequence(&self, id: &str, request: &MoveRequest) -> Result<MoveNotice, ClientError> {
        self.calls.post(&format!("/sequences/{}/move", percent_encoded(id)), request).await
    }

    /// Has the worker drain and follows it.
    ///
    /// # Errors
    /// If the worker cannot be reached or refuses.
    pub async fn drain(&self, deadline_s: Option<u64>) -> Result<DrainStream, ClientError> {
        let body = json_body(&DrainRequest { deadline_s, follow: true })?;
        let (url, response) = self.calls.send("/drain", Method::POST, body).await?;
        if !response.status().is_success() {
            let status = response.status().as_u16();
            let refused = self.calls.read(&url, response).await.err();
            return Err(refused.unwrap_or(ClientError::Refused { url, status, message: String::new() }));
        }
        Ok(DrainStream { body: response.into_body(), line: Vec::new(), url })
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

impl DrainStream {
    /// Waits for the next report; `None` when the worker has ended.
    ///
    /// # Errors
    /// If the connection breaks or carries something else.
    pub async fn next(&mut self) -> Result<Option<DrainReport>, ClientError> {
        loop {
            if let Some(end) = self.line.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.line.drain(..=end).collect();
                return parse(&self.url, &line).map(Some);
            }
            let unreachable = |reason: String| ClientError::Unreachable { url: self.url.clone(), reason };
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(unreachable(error.to_string())),
                Some(Ok(frame)) => self.line.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new())),
            }
            if MAX_REPORT_BYTES < self.line.len() {
                return Err(unreachable("a report without an end".to_owned()));
            }
        }
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
