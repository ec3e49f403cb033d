//! What is counted of an engine's source.
//!
//! | name | meaning |
//! |---|---|
//! | `kvik_index_source_connected` | 1 while the engine is listened to |
//! | `kvik_index_source_connections_total` | times that the engine was reached |
//! | `kvik_index_source_messages_total` | live messages that came |
//! | `kvik_index_source_malformed_total` | messages, live or replayed, that could not be read |
//! | `kvik_index_source_refused_total` | messages of a worker without a usable name, or of one too many |
//! | `kvik_index_source_dropped_total` | batches that the index did not take |
//! | `kvik_index_source_restarts_total` | restarts of the engine that were seen |
//! | `kvik_index_source_gaps_total` | times that batches were missing |
//! | `kvik_index_source_replays_total` | times that the engine was asked for what was missing |
//! | `kvik_index_source_failed_replays_total` | those that it did not answer to the end |
//! | `kvik_index_source_replayed_batches_total` | batches that came so |
//! | `kvik_index_source_skipped_gaps_total` | gaps that were given up |
//!
//! The label `source` is the worker's name where it is configured or discovered, else the endpoint, and `rank` is
//! the configured one: nothing that comes over the wire makes a label. The series of a source end with it.

use std::sync::atomic::{AtomicU64, Ordering};

use kvik_runtime::telemetry::MetricSet;
use metrics::{Counter, Gauge};

/// What has been counted of a source since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineCounters {
    /// Times that the engine was reached.
    pub connections: u64,
    /// Live messages that came.
    pub messages: u64,
    /// Messages, live or replayed, that could not be read.
    pub malformed: u64,
    /// Messages of a worker without a usable name, or of one too many.
    pub refused: u64,
    /// Batches that the index did not take.
    pub dropped: u64,
    /// Restarts of the engine that were seen.
    pub restarts: u64,
    /// Times that batches were missing.
    pub gaps: u64,
    /// Times that the engine was asked for what was missing.
    pub replays: u64,
    /// Those that it did not answer to the end.
    pub failed_replays: u64,
    /// Batches that came so.
    pub replayed_batches: u64,
    /// Gaps that were given up.
    pub skipped_gaps: u64,
}

/// A count of this source, and the same in the metrics of the process.
pub(super) struct Tally {
    count: AtomicU64,
    metric: Counter,
}

/// The counts of one source.
pub(super) struct Tallies {
    pub(super) connected: Gauge,
    pub(super) connections: Tally,
    pub(super) messages: Tally,
    pub(super) malformed: Tally,
    pub(super) refused: Tally,
    pub(super) dropped: Tally,
    pub(super) restarts: Tally,
    pub(super) gaps: Tally,
    pub(super) replays: Tally,
    pub(super) failed_replays: Tally,
    pub(super) replayed_batches: Tally,
    pub(super) skipped_gaps: Tally,
    /// What `/metrics` shows of them while they exist.
    _metrics: MetricSet,
}

impl Tallies {
    pub(super) fn new(source: &str, rank: u32) -> Self {
        let metrics = MetricSet::new(&[("source", source), ("rank", &rank.to_string())]);
        let tally = |name: &'static str| Tally { count: AtomicU64::new(0), metric: metrics.counter(name) };
        Self {
            connected: metrics.gauge("kvik_index_source_connected"),
            connections: tally("kvik_index_source_connections_total"),
            messages: tally("kvik_index_source_messages_total"),
            malformed: tally("kvik_index_source_malformed_total"),
            refused: tally("kvik_index_source_refused_total"),
            dropped: tally("kvik_index_source_dropped_total"),
            restarts: tally("kvik_index_source_restarts_total"),
            gaps: tally("kvik_index_source_gaps_total"),
            replays: tally("kvik_index_source_replays_total"),
            failed_replays: tally("kvik_index_source_failed_replays_total"),
            replayed_batches: tally("kvik_index_source_replayed_batches_total"),
            skipped_gaps: tally("kvik_index_source_skipped_gaps_total"),
            _metrics: metrics,
        }
    }

    pub(super) fn counters(&self) -> EngineCounters {
        EngineCounters {
            connections: self.connections.get(),
            messages: self.messages.get(),
            malformed: self.malformed.get(),
            refused: self.refused.get(),
            dropped: self.dropped.get(),
            restarts: self.restarts.get(),
            gaps: self.gaps.get(),
            replays: self.replays.get(),
            failed_replays: self.failed_replays.get(),
            replayed_batches: self.replayed_batches.get(),
            skipped_gaps: self.skipped_gaps.get(),
        }
    }
}

impl Tally {
    pub(super) fn add_one(&self) {
        // Relaxed: a count orders nothing.
        self.count.fetch_add(1, Ordering::Relaxed);
        self.metric.increment(1);
    }

    fn get(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

impl std::fmt::Debug for Tallies {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.counters().fmt(formatter)
    }
}

#[cfg(test)]
mod tests {
    use kvik_runtime::telemetry::{render_metrics, start_metrics};

    use super::*;

    #[test]
    fn the_series_of_a_source_end_with_it() {
        start_metrics().unwrap();
        let is_shown = || render_metrics().contains(r#"{source="tallied-engine",rank="3"}"#);
        let tallies = Tallies::new("tallied-engine", 3);
        tallies.messages.add_one();
        let shown = r#"kvik_index_source_messages_total{source="tallied-engine",rank="3"} 1"#;
        assert!(render_metrics().contains(shown));
        drop(tallies);
        assert!(!is_shown());
    }
}
