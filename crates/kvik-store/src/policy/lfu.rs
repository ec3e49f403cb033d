//! Least often used.

use super::Request;
use super::lru::Recency;
use super::ranked::{RankedPolicy, Ranking};

/// Evicts the leaf that was asked for least often while it was resident; of equals, the least recent.
pub type LfuPolicy = RankedPolicy<Frequency>;

/// The order of [`LfuPolicy`].
#[derive(Debug, Default)]
pub struct Frequency {
    recency: Recency,
}

impl Ranking for Frequency {
    /// Number of uses, then time of the last one.
    type Key = (u32, u64);

    fn begin(&mut self, request: &Request<'_>) {
        self.recency.begin(request);
    }

    fn used(&mut self, request: &Request<'_>, index: usize, (n_uses, last): Self::Key) -> Option<Self::Key> {
        Some((n_uses.saturating_add(1), self.recency.used(request, index, last)?))
    }

    fn inserted(&mut self, request: &Request<'_>, index: usize) -> Self::Key {
        (1, self.recency.inserted(request, index))
    }
}
