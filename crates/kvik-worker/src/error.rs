//! Errors: of the worker's own life, and those that clients get.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use kvik_model::ModelError;
use kvik_proto::openai::ErrorBody;
use kvik_proto::worker::SamplingConflict;
use kvik_tokens::TokensError;

/// Result of this crate's operations.
pub type Result<T, E = WorkerError> = std::result::Result<T, E>;

/// Why a worker cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// A field of the configuration has a value that it cannot have.
    #[error("`{field}` is {value}; allowed: {allowed}")]
    InvalidConfig {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        allowed: &'static str,
    },
    /// The address cannot be listened on, or a certificate or key cannot be used.
    #[error(transparent)]
    Runtime(#[from] kvik_runtime::RuntimeError),
    /// The TLS towards coordinators cannot be used.
    #[error(transparent)]
    Client(#[from] kvik_proto::client::ClientError),
    /// The model is neither a folder nor to be had from a hub.
    #[error("find the model: {0}")]
    Hub(#[from] kvik_runtime::hub::HubError),
    /// The model cannot be loaded.
    #[error("load the model: {0}")]
    Model(#[from] ModelError),
    /// The store cannot be used as configured.
    #[error(transparent)]
    Node(#[from] kvik_node::NodeError),
    /// The store of KV cannot be opened.
    #[error("open the KV store: {reason}")]
    Store {
        /// What it said.
        reason: String,
    },
    /// A file of the TLS towards coordinators cannot be read, or a thread cannot be started.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The engine ended by itself, and the worker with it; a new process may be able to go on.
    #[error("the engine failed: {reason}")]
    EngineFailed {
        /// Why it ended.
        reason: String,
    },
    /// The worker was stopped before its model was loaded, or loading it failed badly.
    #[error("the worker stopped while it loaded its model")]
    Stopped,
}

/// A refusal of a request, as the client gets it.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    /// In seconds.
    retry_after: Option<u64>,
    /// Boxed: refusals are rare and results that carry them should stay small.
    pub(crate) body: Box<ErrorBody>,
}

impl Refusal {
    /// 400: the request cannot be read, or `param` has a value that it cannot have.
    pub(crate) fn invalid(message: impl Into<String>, param: Option<&str>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, ErrorBody::invalid_request(message, param))
    }

    /// 400: `field` is `value`, which is not allowed.
    pub(crate) fn field(field: &str, value: impl std::fmt::Display, allowed: &str) -> Self {
        Self::invalid(
            format!("`{field}` is {}; allowed: {allowed}", shorten(&value.to_string())),
            Some(field),
        )
    }

    /// 400: the prompt leaves no room for an output.
    pub(crate) fn context_length(field: &str, n_tokens: usize, longest: usize) -> Self {
        let message = format!(
            "`{field}` is {n_tokens} tokens long; allowed: at most {}, because the longest sequence has {longest}",
            longest.saturating_sub(1)
        );
        Self::new(StatusCode::BAD_REQUEST, ErrorBody::context_length(message, field))
    }

    /// 404: the model is not the one that is served.
    pub(crate) fn unknown_model(model: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, ErrorBody::unknown_model(&shorten(model)))
    }

    /// 404: `what` is not here.
    pub(crate) fn not_found(message: impl Into<String>, param: Option<&str>) -> Self {
        Self::new(StatusCode::NOT_FOUND, ErrorBody::invalid_request(message, param))
    }

    /// 405.
    pub(crate) fn wrong_method() -> Self {
        let body = ErrorBody::invalid_request("this path does not take this method", None);
        Self::new(StatusCode::METHOD_NOT_ALLOWED, body)
    }

    /// 408: the request's body did not arrive.
    pub(crate) fn slow_body() -> Self {
        let body = ErrorBody::invalid_request("the request's body did not arrive in time", None);
        Self::new(StatusCode::REQUEST_TIMEOUT, body)
    }

    /// 409: the request does not fit the state of what it names.
    pub(crate) fn conflict(message: impl Into<String>, param: Option<&str>) -> Self {
        Self::new(StatusCode::CONFLICT, ErrorBody::invalid_request(message, param))
    }

    /// 413.
    pub(crate) fn too_large(limit_bytes: usize) -> Self {
        let message = format!("the request's body is larger than {limit_bytes} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, ErrorBody::invalid_request(message, None))
    }

    /// 429: as much waits here as may.
    pub(crate) fn too_many(message: impl Into<String>, retry_after: u64) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, ErrorBody::rate_limit(message)).after(retry_after)
    }

    /// 500.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, ErrorBody::server(message))
    }

    /// 503: not now.
    pub(crate) fn unavailable(message: impl Into<String>, retry_after: u64) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, ErrorBody::server(message)).after(retry_after)
    }

    /// 503: the engine has ended.
    pub(crate) fn engine_gone() -> Self {
        Self::unavailable("the engine has ended; this worker serves nothing more", 10)
    }

    fn new(status: StatusCode, body: ErrorBody) -> Self {
        Self { status, retry_after: None, body: Box::new(body) }
    }

    fn after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds.max(1));
        self
    }
}

impl From<SamplingConflict> for Refusal {
    fn from(conflict: SamplingConflict) -> Self {
        Self::invalid(conflict.to_string(), Some(conflict.field))
    }
}

impl From<ModelError> for Refusal {
    fn from(error: ModelError) -> Self {
        match &error {
            // Room in the pool comes back; nothing is wrong with the request.
            ModelError::NoRoom { .. } => Self::unavailable(error.to_string(), 1),
            // Nor is there here: another worker can serve it.
            ModelError::Device { .. } | ModelError::DeviceLost { .. } => {
                Self::unavailable(error.to_string(), 10)
            }
            ModelError::InvalidRequest { field, value, allowed }
            | ModelError::Tokens(TokensError::InvalidRequest { field, value, allowed }) => {
                Self::field(field, value, allowed)
            }
            _ => Self::failed(error.to_string()),
        }
    }
}

impl From<TokensError> for Refusal {
    fn from(error: TokensError) -> Self {
        ModelError::from(error).into()
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        self.body.response(self.status, self.retry_after).map(Body::from)
    }
}

/// A value of the client's in a message: as long as it likes, but not in an answer or a log.
fn shorten(value: &str) -> String {
    const LONGEST: usize = 200;
    if value.chars().nth(LONGEST).is_none() {
        return value.to_owned();
    }
    let mut shown: String = value.chars().take(LONGEST).collect();
    shown.push_str("...");
    shown
}
