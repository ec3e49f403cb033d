//! Least recently used.

use super::ranked::Ranked;
use super::{BlockId, Policy, Request, Tree};

/// Evicts the leaf that was not asked for the longest.
///
/// Within a chain the end counts as used before the root, so an old chain leaves from its end.
#[derive(Debug)]
pub struct LruPolicy {
    ranked: Ranked<u64>,
    clock: u64,
}

impl LruPolicy {
    /// An empty cache.
    pub fn new() -> Self {
        Self { ranked: Ranked::new(), clock: 0 }
    }
}

impl Default for LruPolicy {
    fn default() -> Self {
        Self::new()
    }
}

impl Policy for LruPolicy {
    fn access(&mut self, _now_ms: u64, request: &Request<'_>) {
        self.clock += request.blocks.len() as u64;
        for (index, block) in request.blocks.iter().enumerate() {
            if let Some(slot) = self.ranked.tree().slot(block.id) {
                self.ranked.set_key(slot, self.clock - index as u64);
            }
        }
    }

    fn insert(&mut self, _now_ms: u64, request: &Request<'_>, index: usize) -> bool {
        let key = self.clock.saturating_sub(index as u64);
        self.ranked.insert(request, index, key).is_some()
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
