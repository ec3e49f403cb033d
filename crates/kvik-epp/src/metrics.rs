//! The picker's metrics; those of the choice itself are the gateway's.
//!
//! | name | labels | meaning |
//! |---|---|---|
//! | `kvik_epp_exchanges_total` | `outcome` | requests of data planes that ended: `complete`, `refused` (an answer in place of a worker), `left` (the data plane or its client went away), `wrong` (messages in a wrong order), `timeout` |
//! | `kvik_epp_open_exchanges` | | requests of data planes that have not ended |
//! | `kvik_epp_pick_seconds` | | from the end of a request to the choice, the wait for its turn included |
//! | `kvik_epp_body_bytes_total` | | bytes of request bodies that came |
//! | `kvik_epp_pool_endpoints` | | endpoints of the ready pods of the `InferencePool` |
//! | `kvik_epp_pool_synced` | | 1 once the `InferencePool` and its pods are known |

use metrics::{Counter, Gauge, Histogram};

const EXCHANGES: &str = "kvik_epp_exchanges_total";
const OPEN_EXCHANGES: &str = "kvik_epp_open_exchanges";
const PICK_SECONDS: &str = "kvik_epp_pick_seconds";
const BODY_BYTES: &str = "kvik_epp_body_bytes_total";
pub(crate) const POOL_ENDPOINTS: &str = "kvik_epp_pool_endpoints";
pub(crate) const POOL_SYNCED: &str = "kvik_epp_pool_synced";

/// How an exchange ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Complete,
    Refused,
    Left,
    Wrong,
    Timeout,
}

/// Handles that are looked up once.
pub(crate) struct Metrics {
    outcomes: [Counter; Outcome::ALL.len()],
    pub(crate) open: Gauge,
    pub(crate) pick_seconds: Histogram,
    pub(crate) body_bytes: Counter,
}

impl Outcome {
    const ALL: [Self; 5] = [Self::Complete, Self::Refused, Self::Left, Self::Wrong, Self::Timeout];

    fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Refused => "refused",
            Self::Left => "left",
            Self::Wrong => "wrong",
            Self::Timeout => "timeout",
        }
    }
}

impl Metrics {
    /// Looks the handles up; the process' recorder must be in place.
    pub(crate) fn new() -> Self {
        Self {
            outcomes: Outcome::ALL.map(|outcome| metrics::counter!(EXCHANGES, "outcome" => outcome.as_str())),
            open: metrics::gauge!(OPEN_EXCHANGES),
            pick_seconds: metrics::histogram!(PICK_SECONDS),
            body_bytes: metrics::counter!(BODY_BYTES),
        }
    }

    pub(crate) fn ended(&self, outcome: Outcome) {
        self.outcomes[outcome as usize].increment(1);
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Metrics").finish_non_exhaustive()
    }
}
