//! Calls to engines.

use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Method, Request};
use http_body_util::{BodyExt as _, Full, Limited};
use kvik_proto::client::{HttpClient, send};
use serde_json::Value;

/// Longest answer that is read, in bytes.
const MAX_ANSWER_BYTES: usize = 1 << 20;
/// Characters of an answer that an error shows.
const SHOWN_CHARS: usize = 200;

/// Calls to one engine.
#[derive(Debug, Clone)]
pub(crate) struct EngineCalls {
    http: HttpClient,
    base: String,
}

impl EngineCalls {
    pub(crate) fn new(http: HttpClient, base: String) -> Self {
        Self { http, base }
    }

    /// Whether the engine answers at `path` with a success.
    pub(crate) async fn is_good(&self, path: &str, timeout: Duration) -> bool {
        self.call(Method::GET, path, None, timeout).await.is_ok()
    }

    /// Gets a JSON document.
    ///
    /// # Errors
    /// What went wrong, in words.
    pub(crate) async fn get(&self, path: &str, timeout: Duration) -> Result<Value, String> {
        let body = self.call(Method::GET, path, None, timeout).await?;
        serde_json::from_slice(&body)
            .map_err(|error| format!("GET {path}: the answer cannot be read: {error}"))
    }

    /// Posts a JSON document, or nothing.
    ///
    /// # Errors
    /// What went wrong, in words.
    pub(crate) async fn post(
        &self,
        path: &str,
        body: Option<&Value>,
        timeout: Duration,
    ) -> Result<Bytes, String> {
        self.call(Method::POST, path, body, timeout).await
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        timeout: Duration,
    ) -> Result<Bytes, String> {
        let url = format!("{}{path}", self.base);
        let shown = format!("{method} {path}");
        let mut request = Request::builder().method(method).uri(url);
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = request.body(Full::from(body)).map_err(|error| format!("{shown}: {error}"))?;
        let calling = async {
            let response = send(&self.http, request).await.map_err(|error| format!("{shown}: {error}"))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await;
            let body = body.map_err(|error| format!("{shown}: {error}"))?.to_bytes();
            if status.is_success() {
                return Ok(body);
            }
            let text: String = String::from_utf8_lossy(&body).chars().take(SHOWN_CHARS).collect();
            Err(format!("{shown}: {status}: {}", text.trim()))
        };
        let answered = tokio::time::timeout(timeout, calling).await;
        answered.unwrap_or_else(|_| Err(format!("{shown}: no answer within {} s", timeout.as_secs())))
    }
}
