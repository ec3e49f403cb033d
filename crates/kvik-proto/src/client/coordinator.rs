//! Calls to a coordinator.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use http_body_util::BodyExt as _;
use hyper::Method;
use hyper::body::Incoming;

use super::calls::{Calls, json_body, parse, percent_encoded};
use super::{ClientError, HttpClient};
use crate::coordinator::{
    DeregisterRequest, HeartbeatRequest, HeartbeatResponse, RegisterRequest, RegisterResponse, RingView,
    RouteResponse, Snapshot, WatchEvent,
};
use crate::sse::SseDecoder;
use crate::stores::{RegisterStoreRequest, StoreHeartbeatRequest, StoreList};

/// Time for a whole call; a coordinator answers from memory.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Talks to one coordinator.
#[derive(Debug, Clone)]
pub struct CoordinatorClient {
    calls: Calls,
}

/// A stream of snapshots.
#[derive(Debug)]
pub struct Watch {
    body: Incoming,
    decoder: SseDecoder,
    pending: std::collections::VecDeque<String>,
    url: String,
}

impl CoordinatorClient {
    /// A client of the coordinator at `base`, such as `http://host:8081`.
    pub fn new(http: HttpClient, base: &str) -> Self {
        Self { calls: Calls::new(http, base, CALL_TIMEOUT) }
    }

    /// The same client with a header that every call carries, such as a token.
    #[must_use]
    pub fn with_header(self, header: Option<(HeaderName, HeaderValue)>) -> Self {
        Self { calls: self.calls.with_header(header) }
    }

    /// Where the coordinator is.
    pub fn base(&self) -> &str {
        self.calls.base()
    }

    /// Makes a worker a member.
    ///
    /// # Errors
    /// If the coordinator cannot be reached or refuses.
    pub async fn register(&self, request: &RegisterRequest) -> Result<RegisterResponse, ClientError> {
        self.calls.post("/register", request).await
    }

    /// Says that a member lives.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with status 404 if the coordinator does not know the member.
    pub async fn heartbeat(&self, request: &HeartbeatRequest) -> Result<HeartbeatResponse, ClientError> {
        self.calls.post("/heartbeat", request).await
    }

    /// Ends a membership.
    ///
    /// # Errors
    /// If the coordinator cannot be reached or refuses.
    pub async fn deregister(&self, request: &DeregisterRequest) -> Result<(), ClientError> {
        let (url, response) = self.calls.send("/deregister", Method::POST, json_body(request)?).await?;
        self.calls.read(&url, response).await.map(|_| ())
    }

    /// Makes a member drain: it finishes what it has and gets nothing new.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with status 404 if the coordinator does not know the member.
    pub async fn drain(&self, id: &str) -> Result<(), ClientError> {
        let path = format!("/workers/{}/drain", percent_encoded(id));
        let (url, response) = self.calls.send(&path, Method::POST, Bytes::new()).await?;
        self.calls.read(&url, response).await.map(|_| ())
    }

    /// The members now.
    ///
    /// # Errors
    /// If the coordinator cannot be reached or refuses.
    pub async fn workers(&self) -> Result<Snapshot, ClientError> {
        self.calls.get("/workers").await
    }

    /// How much of the ring each member owns now.
    ///
    /// # Errors
    /// If the coordinator cannot be reached or refuses.
    pub async fn ring(&self) -> Result<RingView, ClientError> {
        self.calls.get("/ring").await
    }

    /// The worker that a sequence belongs to now, and why if `explain` is set.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with status 503 if no worker is ready.
    pub async fn route(&self, seq_id: &str, explain: bool) -> Result<RouteResponse, ClientError> {
        self.calls.get(&format!("/route?seq_id={}&explain={explain}", percent_encoded(seq_id))).await
    }

    /// Has a store daemon listed.
    ///
    /// # Errors
    /// If the coordinator cannot be reached or refuses.
    pub async fn register_store(
        &self,
        request: &RegisterStoreRequest,
    ) -> Result<RegisterResponse, ClientError> {
        self.calls.post("/stores/register", request).await
    }

    /// Says that a store daemon lives.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with status 404 if the coordinator does not know the daemon.
    pub async fn store_heartbeat(
        &self,
        request: &StoreHeartbeatRequest,
    ) -> Result<HeartbeatResponse, ClientError> {
        self.calls.post("/stores/heartbeat", request).await
    }

    /// Takes a store daemon off the list.
    ///
    /// # Errors
    /// If the coordinator cannot be reached or refuses.
    pub async fn deregister_store(&self, request: &DeregisterRequest) -> Result<(), ClientError> {
        let (url, response) =
            self.calls.send("/stores/deregister", Method::POST, json_body(request)?).await?;
        self.calls.read(&url, response).await.map(|_| ())
    }

    /// The store daemons now.
    ///
    /// # Errors
    /// If the coordinator cannot be reached or refuses.
    pub async fn stores(&self) -> Result<StoreList, ClientError> {
        self.calls.get("/stores").await
    }

    /// Opens a stream of snapshots, the current one first.
    ///
    /// # Errors
    /// If the coordinator cannot be reached or refuses.
    pub async fn watch(&self) -> Result<Watch, ClientError> {
        let (url, response) = self.calls.send("/watch", Method::GET, Bytes::new()).await?;
        if !response.status().is_success() {
            let status = response.status().as_u16();
            return Err(ClientError::Refused { url, status, message: String::new() });
        }
        Ok(Watch {
            body: response.into_body(),
            decoder: SseDecoder::default(),
            pending: std::collections::VecDeque::new(),
            url,
        })
    }
}

impl Watch {
    /// Waits for the next event; `None` when the coordinator ends the stream.
    ///
    /// Cancel safe: an event is lost only with the watch itself.
    ///
    /// # Errors
    /// If the connection breaks or carries something else.
    pub async fn next(&mut self) -> Result<Option<WatchEvent>, ClientError> {
        loop {
            if let Some(data) = self.pending.pop_front() {
                return parse(&self.url, data.as_bytes()).map(Some);
            }
            let Some(frame) = self.body.frame().await else { return Ok(None) };
            let frame = frame.map_err(|error| ClientError::Unreachable {
                url: self.url.clone(),
                reason: error.to_string(),
            })?;
            if let Some(bytes) = frame.data_ref() {
                let pending = &mut self.pending;
                self.decoder.push(bytes, |data| pending.push_back(data.to_owned())).map_err(|error| {
                    ClientError::Malformed { url: self.url.clone(), reason: error.to_string() }
                })?;
            }
        }
    }
}
