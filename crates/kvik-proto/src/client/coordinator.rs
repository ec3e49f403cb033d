//! Calls to a coordinator.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::{Method, Request, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{ClientError, HttpClient};
use crate::coordinator::{
    DeregisterRequest, HeartbeatRequest, HeartbeatResponse, RegisterRequest, RegisterResponse, RingView,
    RouteResponse, Snapshot, WatchEvent,
};
use crate::openai::ErrorBody;
use crate::sse::SseDecoder;

/// Longest answer that is read, in bytes: a snapshot of ten thousand workers is a few megabytes.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Time for a whole call; a coordinator answers from memory.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Talks to one coordinator.
#[derive(Debug, Clone)]
pub struct CoordinatorClient {
    http: HttpClient,
    /// Without a slash at the end.
    base: String,
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
        Self { http, base: base.trim_end_matches('/').to_owned() }
    }

    /// Where the coordinator is.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// Makes a worker a member.
    ///
    /// # Errors
    /// If the coordinator cannot be reached or refuses.
    pub async fn register(&self, request: &RegisterRequest) -> Result<RegisterResponse, ClientError> {
        self.post("/register", request).await
    }

    /// Says that a member lives.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with status 404 if the coordinator does not know the member.
    pub async fn heartbeat(&self, request: &HeartbeatRequest) -> Result<HeartbeatResponse, ClientError> {
        self.post("/heartbeat", request).await
    }

    /// Ends a membership.
    ///
    /// # Errors
    /// If the coordinator cannot be reached or refuses.
    pub async fn deregister(&self, request: &DeregisterRequest) -> Result<(), ClientError> {
        let (url, response) = self.send("/deregister", Method::POST, json_body(request)?).await?;
        read_body(&url, response).await.map(|_| ())
    }

    /// Makes a member drain: it finishes what it has and gets nothing new.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with status 404 if the coordinator does not know the member.
    pub async fn drain(&self, id: &str) -> Result<(), ClientError> {
        let path = format!("/workers/{}/drain", percent_encoded(id));
        let (url, response) = self.send(&path, Method::POST, Bytes::new()).await?;
        read_body(&url, response).await.map(|_| ())
    }

    /// The members now.
    ///
    /// # Errors
    /// If the coordinator cannot be reached or refuses.
    pub async fn workers(&self) -> Result<Snapshot, ClientError> {
        self.get("/workers").await
    }

    /// How much of the ring each member owns now.
    ///
    /// # Errors
    /// If the coordinator cannot be reached or refuses.
    pub async fn ring(&self) -> Result<RingView, ClientError> {
        self.get("/ring").await
    }

    /// The worker that a sequence belongs to now, and why if `explain` is set.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with status 503 if no worker is ready.
    pub async fn route(&self, seq_id: &str, explain: bool) -> Result<RouteResponse, ClientError> {
        self.get(&format!("/route?seq_id={}&explain={explain}", percent_encoded(seq_id))).await
    }

    /// Opens a stream of snapshots, the current one first.
    ///
    /// # Errors
    /// If the coordinator cannot be reached or refuses.
    pub async fn watch(&self) -> Result<Watch, ClientError> {
        let (url, response) = self.send("/watch", Method::GET, Bytes::new()).await?;
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

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let (url, response) = self.send(path, Method::GET, Bytes::new()).await?;
        parse(&url, &read_body(&url, response).await?)
    }

    async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, ClientError> {
        let (url, response) = self.send(path, Method::POST, json_body(body)?).await?;
        parse(&url, &read_body(&url, response).await?)
    }

    async fn send(
        &self,
        path: &str,
        method: Method,
        body: Bytes,
    ) -> Result<(String, Response<Incoming>), ClientError> {
        let url = format!("{}{path}", self.base);
        let unreachable = |reason: String| ClientError::Unreachable { url: url.clone(), reason };
        let request = Request::builder()
            .method(method)
            .uri(&url)
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| ClientError::Configuration(format!("{url}: {error}")))?;
        let response = tokio::time::timeout(CALL_TIMEOUT, self.http.request(request))
            .await
            .map_err(|_| unreachable(format!("no answer within {} s", CALL_TIMEOUT.as_secs())))?
            .map_err(|error| unreachable(error.to_string()))?;
        Ok((url, response))
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

/// Text as it can stand in a path or a query: all but letters, digits and `-._~` as `%XX`.
fn percent_encoded(text: &str) -> String {
    const DIGITS: [char; 16] =
        ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'A', 'B', 'C', 'D', 'E', 'F'];
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.extend(['%', DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
        }
    }
    encoded
}

fn json_body(value: &impl Serialize) -> Result<Bytes, ClientError> {
    serde_json::to_vec(value).map(Bytes::from).map_err(|error| ClientError::Configuration(error.to_string()))
}

fn parse<T: DeserializeOwned>(url: &str, bytes: &[u8]) -> Result<T, ClientError> {
    serde_json::from_slice(bytes)
        .map_err(|error| ClientError::Malformed { url: url.to_owned(), reason: error.to_string() })
}

async fn read_body(url: &str, response: Response<Incoming>) -> Result<Bytes, ClientError> {
    let status = response.status();
    let reading = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect();
    let body = tokio::time::timeout(CALL_TIMEOUT, reading)
        .await
        .map_err(|_| "the body did not come in time".to_owned())
        .and_then(|body| body.map_err(|error| error.to_string()))
        .map_err(|reason| ClientError::Unreachable { url: url.to_owned(), reason })?
        .to_bytes();
    if status.is_success() {
        return Ok(body);
    }
    let message = serde_json::from_slice::<ErrorBody>(&body).map_or_else(
        |_| String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned(),
        |body| body.error.message,
    );
    Err(ClientError::Refused { url: url.to_owned(), status: status.as_u16(), message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_in_an_address_cannot_change_its_meaning() {
        assert_eq!(percent_encoded("seq-1.a_b~"), "seq-1.a_b~");
        assert_eq!(percent_encoded("a/b?c=d&e #%+"), "a%2Fb%3Fc%3Dd%26e%20%23%25%2B");
        assert_eq!(percent_encoded("\u{e9}"), "%C3%A9");
    }
}
