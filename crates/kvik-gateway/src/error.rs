//! Errors: of the gateway's own life, and those that clients get.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::header::{CONNECTION, WWW_AUTHENTICATE};
use http::{HeaderValue, StatusCode};
use kvik_proto::openai::ErrorBody;

use crate::management::NotReady;

/// Result of this crate's operations.
pub type Result<T, E = GatewayError> = std::result::Result<T, E>;

/// Why a gateway could not be started or reloaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GatewayError {
    /// A field of the configuration has a value that it cannot have; nothing was changed.
    #[error("`{field}` is {value}; allowed: {allowed}")]
    InvalidConfig {
        /// The field's path.
        field: String,
        /// The value.
        value: String,
        /// What it may be.
        allowed: String,
    },
    /// A file of the TLS towards workers cannot be read.
    #[error("read {}: {source}", path.display())]
    Io {
        /// The file.
        path: std::path::PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The address, the certificate or the telemetry cannot be used.
    #[error(transparent)]
    Runtime(#[from] kvik_runtime::RuntimeError),
    /// The index cannot be started as configured.
    #[error(transparent)]
    Index(#[from] kvik_indexer::IndexerError),
    /// The TLS towards workers cannot be used.
    #[error(transparent)]
    Client(#[from] kvik_proto::client::ClientError),
}

/// A refusal of a request, as the client gets it.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    /// What `kvik_gateway_rejected_total` counts it under.
    pub(crate) reason: &'static str,
    /// In seconds.
    pub(crate) retry_after: Option<u64>,
    /// Whether a part of the request may be unread, so that the connection cannot be used again.
    pub(crate) closes_connection: bool,
    /// Boxed: refusals are rare and results that carry them should stay small.
    pub(crate) body: Box<ErrorBody>,
}

impl Refusal {
    /// The same refusal of a request whose body was not read to its end.
    #[must_use]
    pub(crate) fn before_body(mut self) -> Self {
        self.closes_connection = true;
        self
    }

    /// 400: the request cannot be read, or `param` has a value that it cannot have.
    pub(crate) fn invalid(message: impl Into<String>, param: Option<&str>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid", ErrorBody::invalid_request(message, param))
    }

    /// 401.
    pub(crate) fn unauthorized(message: &str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", ErrorBody::authentication(message))
    }

    /// 404: no worker serves the model.
    pub(crate) fn unknown_model(model: &str) -> Self {
        // The name is the client's: as long as it likes.
        let shown: String = model.chars().take(200).collect();
        Self::new(StatusCode::NOT_FOUND, "unknown_model", ErrorBody::unknown_model(&shown))
    }

    /// 404: no such route.
    pub(crate) fn unknown_route() -> Self {
        let body = ErrorBody::invalid_request("there is nothing at this path; see /openapi.json", None);
        Self::new(StatusCode::NOT_FOUND, "unknown_route", body)
    }

    /// 405.
    pub(crate) fn wrong_method() -> Self {
        let body = ErrorBody::invalid_request("this path does not take this method; see /openapi.json", None);
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "wrong_method", body)
    }

    /// 408: the request's body did not arrive.
    pub(crate) fn slow_body() -> Self {
        let body = ErrorBody::invalid_request("the request's body did not arrive in time", None);
        Self::new(StatusCode::REQUEST_TIMEOUT, "slow_body", body)
    }

    /// 413.
    pub(crate) fn too_large(max_body_bytes: usize) -> Self {
        let message = format!("the request's body is larger than {max_body_bytes} bytes");
        let body = ErrorBody::invalid_request(message, None);
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", body)
    }

    /// 429: as many requests wait as may.
    pub(crate) fn queue_full(retry_after: u64) -> Self {
        let body = ErrorBody::rate_limit("too many requests wait here; try again later");
        Self::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", body).after(retry_after)
    }

    /// 503: as many bytes of other bodies arrive as may.
    pub(crate) fn bodies_full() -> Self {
        let body = ErrorBody::server("too many bytes of requests are arriving; try again later");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "bodies_full", body).after(1)
    }

    /// 503: the request waited as long as it may.
    pub(crate) fn queue_timeout(retry_after: u64) -> Self {
        let body = ErrorBody::server("the request waited too long for its turn; try again later");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "queue_timeout", body).after(retry_after)
    }

    /// 503: no worker can take the request.
    pub(crate) fn no_backend(retry_after: u64) -> Self {
        let body = ErrorBody::server("no worker can take the request now; try again later");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "no_backend", body).after(retry_after)
    }

    /// 503, or 429 where too many wait: the engine of the model cannot take the request.
    pub(crate) fn not_ready(not_ready: NotReady) -> Self {
        let NotReady { message, retry_after_s, is_full } = not_ready;
        let refusal = if is_full {
            Self::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", ErrorBody::rate_limit(message))
        } else {
            Self::new(StatusCode::SERVICE_UNAVAILABLE, "not_ready", ErrorBody::server(message))
        };
        refusal.after(retry_after_s)
    }

    /// 404: the index is switched off.
    pub(crate) fn no_index() -> Self {
        let body = ErrorBody::invalid_request("this gateway has no index; set `index.enabled`", None);
        Self::new(StatusCode::NOT_FOUND, "no_index", body)
    }

    /// 503: the index cannot be asked.
    pub(crate) fn index_away(reason: &str) -> Self {
        let body = ErrorBody::server(format!("the index cannot be asked now: {reason}"));
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "index_away", body).after(1)
    }

    /// 403: the call comes from a page of another site.
    pub(crate) fn other_origin() -> Self {
        let message = "this call comes from another site than the gateway's own page, or without a token by a name of the \
            gateway; call it by its IP address or as localhost, or with a token";
        Self::new(StatusCode::FORBIDDEN, "other_origin", ErrorBody::authentication(message))
    }

    /// 404: no coordinator lists the worker.
    pub(crate) fn unknown_worker(id: &str) -> Self {
        let shown: String = id.chars().take(200).collect();
        let message = format!("no coordinator lists a worker {shown:?}");
        Self::new(StatusCode::NOT_FOUND, "unknown_worker", ErrorBody::invalid_request(message, Some("id")))
    }

    /// 503: as many pages are open as may.
    pub(crate) fn too_many_pages() -> Self {
        let body = ErrorBody::server("too many pages are open; close one or try again later");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_pages", body).after(10)
    }

    /// 502: the worker failed and the request was not tried again.
    pub(crate) fn upstream() -> Self {
        Self::new(StatusCode::BAD_GATEWAY, "upstream", ErrorBody::server("the worker did not answer"))
    }

    /// 504.
    pub(crate) fn deadline() -> Self {
        let body = ErrorBody::server("the request was not answered within its time");
        Self::new(StatusCode::GATEWAY_TIMEOUT, "deadline", body)
    }

    fn new(status: StatusCode, reason: &'static str, body: ErrorBody) -> Self {
        Self { status, reason, retry_after: None, closes_connection: false, body: Box::new(body) }
    }

    fn after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds.max(1));
        self
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = self.body.response(self.status, self.retry_after).map(Body::from);
        let headers = response.headers_mut();
        if self.closes_connection {
            // Without it the client would send its next request into a connection that closes.
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
