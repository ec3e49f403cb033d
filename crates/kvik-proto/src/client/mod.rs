//! Typed clients over HTTP/1.1.

mod cache;
mod calls;
mod coordinator;
mod http;
mod index;
mod route;
mod worker;

pub use cache::CacheClient;
pub use coordinator::{CoordinatorClient, Watch};
pub use http::{HttpClient, TlsClientConfig, http_client, send};
pub use index::{BlocksQuery, IndexClient};
pub use route::RouteClient;
pub use worker::{DrainStream, KvStream, WorkerClient};

/// Why a call gave no answer that can be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The server could not be reached or did not answer; trying again may help.
    #[error("reach {url}: {reason}")]
    Unreachable {
        /// What was asked.
        url: String,
        /// What went wrong.
        reason: String,
    },
    /// The server refused.
    #[error("{url} answered {status}: {message}")]
    Refused {
        /// What was asked.
        url: String,
        /// The HTTP status.
        status: u16,
        /// What the server said.
        message: String,
    },
    /// The answer is not what the API says.
    #[error("{url} gave an answer that cannot be read: {reason}")]
    Malformed {
        /// What was asked.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The client itself is set up wrongly.
    #[error("client configuration: {0}")]
    Configuration(String),
}

impl ClientError {
    /// Whether the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Refused { status, .. } => matches!(status, 429 | 502 | 503 | 504),
            Self::Malformed { .. } | Self::Configuration(_) => false,
        }
    }
}
