//! Questions about the routing of a gateway.

use std::time::Duration;

use http::{HeaderName, HeaderValue};
use serde_json::value::RawValue;

use super::calls::Calls;
use super::{ClientError, HttpClient};
use crate::route::RouteExplanation;

/// Time for a whole call.
const CALL_TIMEOUT: Duration = Duration::from_mins(1);

/// Asks one gateway how it routes.
#[derive(Debug, Clone)]
pub struct RouteClient {
    calls: Calls,
}

impl RouteClient {
    /// A client of the gateway at `base`, such as `http://host:8080`.
    pub fn new(http: HttpClient, base: &str) -> Self {
        Self { calls: Calls::new(http, base, CALL_TIMEOUT) }
    }

    /// The same client with a header that every call carries, such as a token.
    #[must_use]
    pub fn with_header(self, header: Option<(HeaderName, HeaderValue)>) -> Self {
        Self { calls: self.calls.with_header(header) }
    }

    /// Where a request with this body would go now.
    pub async fn explain(&self, body: &RawValue) -> Result<RouteExplanation, ClientError> {
        self.calls.post("/route/explain", &body).await
    }
}
