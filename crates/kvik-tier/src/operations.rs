//! What a tier was asked, by operation.

use crate::histogram::Latencies;

/// The counts of one operation.
#[derive(Debug, Clone)]
pub struct OperationMetrics {
    /// Its name in metrics.
    pub operation: &'static str,
    /// Outcomes by their names in metrics, and the number of items that had them; of calls, where items have none.
    pub outcomes: Vec<(&'static str, u64)>,
    /// Bytes that were stored or read; 0 for other operations.
    pub n_bytes: u64,
    /// How long the calls took.
    pub latencies: Latencies,
}

impl OperationMetrics {
    /// How often an outcome was counted, by its name; 0 if there is no such outcome.
    pub fn n_outcomes(&self, name: &str) -> u64 {
        self.outcomes.iter().find(|(outcome, _)| *outcome == name).map_or(0, |(_, count)| *count)
    }
}
