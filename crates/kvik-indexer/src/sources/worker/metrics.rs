//! What is counted of a worker's source. Names that other engines' sources have too mean the same there.
//!
//! | name | meaning |
//! |---|---|
//! | `kvik_index_source_connected` | 1 while the worker is listened to |
//! | `kvik_index_source_connections_total` | times that the worker was reached |
//! | `kvik_index_source_batches_total` | batches that came |
//! | `kvik_index_source_snapshots_total` | times that the index took all that the worker holds at once |
//! | `kvik_index_source_restarts_total` | restarts of the worker that were seen |
//! | `kvik_index_source_gaps_total` | times that batches were missing |
//!
//! The label `source` is the worker's id as the membership has it, with ` store` behind it where a store daemon reports the
//! KV that it keeps for the worker; `rank` is 0. The series of a source end with
//! it, and start again at 0 with the worker's next life.

use kvik_runtime::telemetry::MetricSet;
use metrics::{Counter, Gauge};

/// The counts of one source.
pub(super) struct Tallies {
    connected: Gauge,
    pub(super) connections: Counter,
    pub(super) batches: Counter,
    pub(super) snapshots: Counter,
    pub(super) restarts: Counter,
    pub(super) gaps: Counter,
    /// What `/metrics` shows of them while they exist.
    _metrics: MetricSet,
}

impl Tallies {
    pub(super) fn new(worker: &str) -> Self {
        let metrics = MetricSet::new(&[("source", worker), ("rank", "0")]);
        Self {
            connected: metrics.gauge("kvik_index_source_connected"),
            connections: metrics.counter("kvik_index_source_connections_total"),
            batches: metrics.counter("kvik_index_source_batches_total"),
            snapshots: metrics.counter("kvik_index_source_snapshots_total"),
            restarts: metrics.counter("kvik_index_source_restarts_total"),
            gaps: metrics.counter("kvik_index_source_gaps_total"),
            _metrics: metrics,
        }
    }

    /// Notes whether the worker is listened to.
    pub(super) fn set_connected(&self, is_connected: bool) {
        self.connected.set(f64::from(u8::from(is_connected)));
    }
}
