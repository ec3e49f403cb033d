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
//! The label `source` is the worker's id as the membership has it, and `rank` is 0.

use metrics::{Counter, Gauge};

/// The counts of one source.
pub(super) struct Tallies {
    connected: Gauge,
    is_connected: bool,
    pub(super) connections: Counter,
    pub(super) batches: Counter,
    pub(super) snapshots: Counter,
    pub(super) restarts: Counter,
    pub(super) gaps: Counter,
}

impl Tallies {
    pub(super) fn new(worker: &str) -> Self {
        let labels = [("source", worker.to_owned()), ("rank", "0".to_owned())];
        Self {
            connected: metrics::gauge!("kvik_index_source_connected", &labels),
            is_connected: false,
            connections: metrics::counter!("kvik_index_source_connections_total", &labels),
            batches: metrics::counter!("kvik_index_source_batches_total", &labels),
            snapshots: metrics::counter!("kvik_index_source_snapshots_total", &labels),
            restarts: metrics::counter!("kvik_index_source_restarts_total", &labels),
            gaps: metrics::counter!("kvik_index_source_gaps_total", &labels),
        }
    }

    /// Says whether the worker is listened to.
    pub(super) fn set_connected(&mut self, is_connected: bool) {
        // Added and not set: two lives of a worker may be listened to at a time while one replaces the other.
        match (std::mem::replace(&mut self.is_connected, is_connected), is_connected) {
            (false, true) => self.connected.increment(1),
            (true, false) => self.connected.decrement(1),
            (false, false) | (true, true) => {}
        }
    }
}

impl Drop for Tallies {
    fn drop(&mut self) {
        self.set_connected(false);
    }
}
