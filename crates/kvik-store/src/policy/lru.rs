//! Least recently used.

use super::Request;
use super::ranked::{RankedPolicy, Ranking};

/// Evicts the leaf that was not asked for the longest.
///
/// Within a chain the end counts as used before the root, so an old chain leaves from its end.
pub type LruPolicy = RankedPolicy<Recency>;

/// The order of [`LruPolicy`].
#[derive(Debug, Default)]
pub struct Recency {
    clock: u64,
}

impl Ranking for Recency {
    type Key = u64;

    fn begin(&mut self, request: &Request<'_>) {
        self.clock += request.blocks.len() as u64;
    }

    fn used(&mut self, _request: &Request<'_>, index: usize, _old: u64) -> Option<u64> {
        Some(self.clock - index as u64)
    }

    fn inserted(&mut self, _request: &Request<'_>, index: usize) -> u64 {
        self.clock.saturating_sub(index as u64)
    }
}
