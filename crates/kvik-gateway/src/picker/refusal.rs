//! The error response to a request that gets no worker.

use bytes::Bytes;
use http::{HeaderMap, StatusCode};

use crate::error::Refusal;

/// The error response to a request that gets no worker.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PickRefusal {
    /// The status of the answer.
    pub status: StatusCode,
    /// What `kvik_gateway_rejected_total` counts it under.
    pub reason: &'static str,
    /// The headers of the answer.
    pub headers: HeaderMap,
    /// The body of the answer: an error as the `OpenAI` API has it.
    pub body: Bytes,
}

impl PickRefusal {
    pub(super) fn new(refusal: &Refusal) -> Self {
        let (parts, body) = refusal.body.response(refusal.status, refusal.retry_after).into_parts();
        Self { status: parts.status, reason: refusal.reason, headers: parts.headers, body }
    }
}
