//! First in, first out.

use super::ranked::Ranked;
use super::{BlockId, Policy, Request, Tree};

/// Evicts the leaf that was inserted first, however often it was used.
#[derive(Debug)]
pub struct FifoPolicy {
    ranked: Ranked<u64>,
    n_inserted: u64,
}

impl FifoPolicy {
    /// An empty cache.
    pub fn new() -> Self {
        Self { ranked: Ranked::new(), n_inserted: 0 }
    }
}

impl Default for FifoPolicy {
    fn default() -> Self {
        Self::new()
    }
}

impl Policy for FifoPolicy {
    fn access(&mut self, _now_ms: u64, _request: &Request<'_>) {}

    fn insert(&mut self, _now_ms: u64, request: &Request<'_>, index: usize) -> bool {
        self.n_inserted += 1;
        self.ranked.insert(request, index, self.n_inserted).is_some()
    }

    fn victim(&mut self, _now_ms: u64) -> Option<BlockId> {
        let (_, slot) = self.ranked.first()?;
        Some(self.ranked.remove_leaf(slot))
    }

    fn remove(&mut self, id: BlockId) -> bool {
        self.ranked.removable(id).map(|slot| self.ranked.remove_leaf(slot)).is_some()
    }

    fn pin(&mut self, id: BlockId) -> bool {
        self.ranked.pin(id)
    }

    fn unpin(&mut self, id: BlockId) -> bool {
        self.ranked.unpin(id)
    }

    fn tree(&self) -> &Tree {
        self.ranked.tree()
    }
}
