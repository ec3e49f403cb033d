//! What all clients do: send a request, read an answer, tell a refusal.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::{Method, Request, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{ClientError, HttpClient, send};
use crate::openai::ErrorBody;

/// Longest answer that is read, in bytes: a snapshot of ten thousand workers is a few megabytes, the KV of
/// a long prompt can be some hundreds.
const MAX_ANSWER_BYTES: usize = 1 << 30;

/// Calls to one server.
#[derive(Debug, Clone)]
pub(super) struct Calls {
    http: HttpClient,
    /// Without a slash at the end.
    base: String,
    /// Time for the head of an answer, and again for its body.
    timeout: Duration,
}

impl Calls {
    pub(super) fn new(http: HttpClient, base: &str, timeout: Duration) -> Self {
        Self { http, base: base.trim_end_matches('/').to_owned(), timeout }
    }

    pub(super) fn base(&self) -> &str {
        &self.base
    }

    pub(super) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let (url, response) = self.send(path, Method::GET, Bytes::new()).await?;
        parse(&url, &self.read(&url, response).await?)
    }

    pub(super) async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        let (url, response) = self.send(path, Method::POST, json_body(body)?).await?;
        parse(&url, &self.read(&url, response).await?)
    }

    pub(super) async fn send(
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
        let response = tokio::time::timeout(self.timeout, send(&self.http, request))
            .await
            .map_err(|_| unreachable(format!("no answer within {} s", self.timeout.as_secs())))?
            .map_err(|error| unreachable(error.to_string()))?;
        Ok((url, response))
    }

    /// The body of an answer, or the refusal that it tells.
    pub(super) async fn read(&self, url: &str, response: Response<Incoming>) -> Result<Bytes, ClientError> {
        let status = response.status();
        let reading = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect();
        let body = tokio::time::timeout(self.timeout, reading)
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
}

pub(super) fn json_body(value: &impl Serialize) -> Result<Bytes, ClientError> {
    serde_json::to_vec(value).map(Bytes::from).map_err(|error| ClientError::Configuration(error.to_string()))
}

pub(super) fn parse<T: DeserializeOwned>(url: &str, bytes: &[u8]) -> Result<T, ClientError> {
    serde_json::from_slice(bytes)
        .map_err(|error| ClientError::Malformed { url: url.to_owned(), reason: error.to_string() })
}

/// Text as it can stand in a path or a query: all but letters, digits and `-._~` as `%XX`.
pub(super) fn percent_encoded(text: &str) -> String {
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
