//! Recompute time saved per byte.

use super::Request;
use super::lru::Recency;
use super::ranked::{RankedPolicy, Ranking};

/// Evicts the leaf that saves the least recompute time per byte (`GreedyDual`-Size).
///
/// Every use sets a block's value to what it saves per byte plus the value of the last victim, so what is
/// expensive stays longer, and not forever.
pub type CostPolicy = RankedPolicy<Saving>;

/// The order of [`CostPolicy`].
#[derive(Debug, Default)]
pub struct Saving {
    recency: Recency,
    floor: u64,
}

impl Saving {
    fn value(&self, request: &Request<'_>, index: usize) -> u64 {
        // Fixed point: nanoseconds per KiB keep a block of many MiB distinct from its neighbors.
        let saved = request
            .blocks
            .get(index)
            .map_or(0, |block| u128::from(block.recompute_us) * 1000 * 1024 / u128::from(block.bytes.max(1)));
        self.floor.saturating_add(u64::try_from(saved).unwrap_or(u64::MAX))
    }
}

impl Ranking for Saving {
    /// Value, then time of the last use.
    type Key = (u64, u64);

    fn begin(&mut self, request: &Request<'_>) {
        self.recency.begin(request);
    }

    fn used(&mut self, request: &Request<'_>, index: usize, (_, last): Self::Key) -> Option<Self::Key> {
        Some((self.value(request, index), self.recency.used(request, index, last)?))
    }

    fn inserted(&mut self, request: &Request<'_>, index: usize) -> Self::Key {
        (self.value(request, index), self.recency.inserted(request, index))
    }

    fn evicted(&mut self, (value, _): Self::Key) {
        // A prefix may be worth less than what hung on it, so the floor is a maximum.
        self.floor = self.floor.max(value);
    }
}
