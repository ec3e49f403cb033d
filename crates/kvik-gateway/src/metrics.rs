//! The gateway's metrics.
//!
//! | name | labels | meaning |
//! |---|---|---|
//! | `kvik_gateway_requests_total` | `route`, `status` | requests that ended |
//! | `kvik_gateway_request_seconds` | `route` | from the request's head to the end of the answer's body |
//! | `kvik_gateway_ttft_seconds` | `route` | from the request's head to the first byte of the answer's body, streams only |
//! | `kvik_gateway_outstanding_requests` | | requests that have not ended |
//! | `kvik_gateway_outstanding_tokens` | `worker` | estimated tokens of the requests that a worker has, prompts up to the first token |
//! | `kvik_gateway_route_decisions_total` | `reason` | choices of a worker: `owner`, `bound`, `unusable`, `least_loaded`, and by the index `holder`, `spread` |
//! | `kvik_gateway_index_lookups_total` | `outcome` | questions to the index before a choice: `found`, `nothing`, `slow`, `failed` |
//! | `kvik_gateway_retries_total` | | requests tried on another worker |
//! | `kvik_gateway_continued_total` | `outcome` | answers that had to go on elsewhere: `moved` with their KV, `replayed` from their tokens, `stayed` after all, `failed` |
//! | `kvik_gateway_breaker_state` | `worker` | 0 closed, 1 half open, 2 open |
//! | `kvik_gateway_queue_length` | | requests that wait for their turn |
//! | `kvik_gateway_queue_wait_seconds` | | time waited by those that had to |
//! | `kvik_gateway_rejected_total` | `reason` | requests that the gateway itself refused |
//! | `kvik_gateway_disaggregation_total` | `protocol`, `outcome` | requests to backends with `pd`: `disaggregated`, `prefill_refused` (the engine for prompts found the request wrong), or why one engine did it: `off`, `unsuited`, `short`, `slow_transfer`, `no_prefill`, `prefill_busy`, `decode_idle` |
//! | `kvik_gateway_disaggregation_fallbacks_total` | `protocol`, `reason` | what failed and was done in another way: `prefill_failed`, `prefill_slow`, `prefill_unavailable`, `nothing_handed_over`, `decode_failed`, `lease_over` |
//! | `kvik_gateway_prefill_seconds` | `protocol` | of prompts that were computed on another engine: from the request to its answer |
//! | `kvik_gateway_hand_over_seconds` | `protocol` | from that answer to the first byte of the decoding engine's stream |
//! | `kvik_gateway_coordinator_connected` | | 1 while a coordinator is watched |
//!
//! A request ends when its answer's body does, and everything is measured there. `status` is the
//! one in the answer's head; a stream that broke later is in the access log.

use std::time::Duration;

use kvik_index::ring::Reason;
use metrics::{Counter, Gauge, Histogram};

use crate::route::Route;

pub(crate) const QUEUE_LENGTH: &str = "kvik_gateway_queue_length";
pub(crate) const OUTSTANDING_TOKENS: &str = "kvik_gateway_outstanding_tokens";
pub(crate) const BREAKER_STATE: &str = "kvik_gateway_breaker_state";
const REQUESTS: &str = "kvik_gateway_requests_total";
const REQUEST_SECONDS: &str = "kvik_gateway_request_seconds";
const TTFT_SECONDS: &str = "kvik_gateway_ttft_seconds";
const OUTSTANDING_REQUESTS: &str = "kvik_gateway_outstanding_requests";
const ROUTE_DECISIONS: &str = "kvik_gateway_route_decisions_total";
const INDEX_LOOKUPS: &str = "kvik_gateway_index_lookups_total";
const RETRIES: &str = "kvik_gateway_retries_total";
const CONTINUED: &str = "kvik_gateway_continued_total";
const QUEUE_WAIT_SECONDS: &str = "kvik_gateway_queue_wait_seconds";
const REJECTED: &str = "kvik_gateway_rejected_total";
const DISAGGREGATION: &str = "kvik_gateway_disaggregation_total";
const DISAGGREGATION_FALLBACKS: &str = "kvik_gateway_disaggregation_fallbacks_total";
const PREFILL_SECONDS: &str = "kvik_gateway_prefill_seconds";
const HAND_OVER_SECONDS: &str = "kvik_gateway_hand_over_seconds";
const COORDINATOR_CONNECTED: &str = "kvik_gateway_coordinator_connected";

/// Handles that are looked up once: a lookup by name and labels costs more than a measurement.
pub(crate) struct Metrics {
    /// By the number of the route.
    routes: Vec<RouteMetrics>,
    decisions: [Counter; REASONS.len()],
    pub(crate) outstanding_requests: Gauge,
    pub(crate) retries: Counter,
    pub(crate) queue_wait_seconds: Histogram,
    pub(crate) coordinator_connected: Gauge,
}

pub(crate) struct RouteMetrics {
    name: &'static str,
    ok: Counter,
    pub(crate) seconds: Histogram,
    pub(crate) ttft_seconds: Histogram,
}

const REASONS: [Reason; 6] =
    [Reason::Owner, Reason::Bound, Reason::Unusable, Reason::LeastLoaded, Reason::Holder, Reason::Spread];

impl Metrics {
    /// Looks the handles up; the process' recorder must be in place.
    pub(crate) fn new() -> Self {
        Self {
            routes: Route::ALL.into_iter().chain([Route::Other]).map(RouteMetrics::new).collect(),
            decisions: REASONS.map(|reason| metrics::counter!(ROUTE_DECISIONS, "reason" => reason.as_str())),
            outstanding_requests: metrics::gauge!(OUTSTANDING_REQUESTS),
            retries: metrics::counter!(RETRIES),
            queue_wait_seconds: metrics::histogram!(QUEUE_WAIT_SECONDS),
            coordinator_connected: metrics::gauge!(COORDINATOR_CONNECTED),
        }
    }

    pub(crate) fn route(&self, route: Route) -> &RouteMetrics {
        &self.routes[route as usize]
    }

    pub(crate) fn decision(&self, reason: Reason) {
        if let Some(place) = REASONS.iter().position(|&known| known == reason) {
            self.decisions[place].increment(1);
        }
    }

    pub(crate) fn lookup(outcome: &'static str) {
        metrics::counter!(INDEX_LOOKUPS, "outcome" => outcome).increment(1);
    }

    pub(crate) fn continued(outcome: &'static str) {
        metrics::counter!(CONTINUED, "outcome" => outcome).increment(1);
    }

    /// Counts how a request to a backend with a part was done.
    pub(crate) fn disaggregation(protocol: &'static str, outcome: &'static str) {
        metrics::counter!(DISAGGREGATION, "protocol" => protocol, "outcome" => outcome).increment(1);
    }

    /// Counts a leg that failed.
    pub(crate) fn disaggregation_fallback(protocol: &'static str, reason: &'static str) {
        metrics::counter!(DISAGGREGATION_FALLBACKS, "protocol" => protocol, "reason" => reason).increment(1);
    }

    /// Measures a prompt that was computed on another engine.
    pub(crate) fn prefill_ended(protocol: &'static str, time: Duration) {
        metrics::histogram!(PREFILL_SECONDS, "protocol" => protocol).record(time.as_secs_f64());
    }

    /// Measures the time from there to the first byte of the answer.
    pub(crate) fn handed_over(protocol: &'static str, time: Duration) {
        metrics::histogram!(HAND_OVER_SECONDS, "protocol" => protocol).record(time.as_secs_f64());
    }

    pub(crate) fn rejected(reason: &'static str) {
        metrics::counter!(REJECTED, "reason" => reason).increment(1);
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl RouteMetrics {
    fn new(route: Route) -> Self {
        let name = route.name();
        Self {
            name,
            ok: metrics::counter!(REQUESTS, "route" => name, "status" => "200"),
            seconds: metrics::histogram!(REQUEST_SECONDS, "route" => name),
            ttft_seconds: metrics::histogram!(TTFT_SECONDS, "route" => name),
        }
    }

    /// Counts a request that ended with `status`.
    pub(crate) fn ended(&self, status: u16) {
        if status == 200 {
            self.ok.increment(1);
        } else {
            metrics::counter!(REQUESTS, "route" => self.name, "status" => status.to_string()).increment(1);
        }
    }
}
