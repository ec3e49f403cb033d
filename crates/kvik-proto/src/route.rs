//! Where a gateway would send a request now, and why: `POST /route/explain`.
//!
//! The body is the request itself, as `/v1/completions` or `/v1/chat/completions` take it; nothing is sent to a worker.

use serde::{Deserialize, Serialize};

/// Where a request would go.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RouteExplanation {
    /// The model.
    pub model: String,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Whether the prompt was tokenized; otherwise its tokens are estimated from its bytes.
    pub is_exact: bool,
    /// Tokens that the answer is expected to have.
    pub output_tokens: u64,
    /// The backends of the model, by name.
    pub candidates: Vec<RouteCandidate>,
    /// The one that would answer; `null` if none can.
    pub worker: Option<String>,
    /// Why that one, in the words of `kvik_gateway_route_decisions_total`.
    pub reason: Option<String>,
    /// Whether another engine would compute the prompt; `null` if the worker takes whole requests only.
    pub disaggregation: Option<DisaggregationExplanation>,
}

/// A backend that could take a request.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RouteCandidate {
    /// Its name.
    pub worker: String,
    /// `prefill`, `decode` or `both`.
    pub role: String,
    /// How KV moves between it and others; `null` if it does not.
    pub pd: Option<String>,
    /// Whether it may be asked for an answer now.
    pub may_answer: bool,
    /// Whether its breaker lets requests through and it does not drain.
    pub is_usable: bool,
    /// Tokens of the prompt that it has, or gets before this request, as far as the index knows.
    pub cached_tokens: u64,
    /// Estimated tokens of the requests it has.
    pub outstanding_tokens: u64,
    /// Its share of the ring.
    pub weight: f64,
    /// What the request would cost there, in tokens; the lowest within its bound wins where some worker has a part of the prompt.
    pub cost: f64,
}

/// Whether a prompt would be computed elsewhere than its answer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DisaggregationExplanation {
    /// The protocol.
    pub protocol: String,
    /// `disaggregate`, `pull`, or why one engine would do it all, in the words of `kvik_gateway_disaggregation_total`.
    pub decision: String,
    /// The engine that would compute the prompt, or that its KV would be pulled from.
    pub partner: Option<String>,
    /// What in the request does not allow it.
    pub obstacle: Option<String>,
    /// Tokens of the prompt that the worker does not have.
    pub uncached_tokens: u64,
    /// Fewest uncached tokens for which it pays; `null` if KV moves no faster than it is computed.
    pub threshold_tokens: Option<u64>,
    /// Tokens of a prompt that the worker computes in a second.
    pub decode_tokens_per_s: f64,
    /// Tokens whose KV the worker takes over in a second.
    pub transfer_tokens_per_s: f64,
    /// Tokens of a prompt that the other engine computes in a second.
    pub prefill_tokens_per_s: Option<f64>,
    /// Estimated tokens that the other engine has to do before.
    pub prefill_queue_tokens: Option<u64>,
}
