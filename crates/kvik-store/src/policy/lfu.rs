//! Least often used.

use super::ranked::Ranked;
use super::{BlockId, Policy, Request, Tree};

/// Evicts the leaf that was asked for least often while it was resident; of equals, the least recent.
#[derive(Debug)]
pub struct LfuPolicy {
    /// Number of uses, then time of the last one.
    ranked: Ranked<(u32, u64)>,
    clock: u64,
}

impl LfuPolicy {
    /// An empty cache.
    pub fn new() -> Self {
        Self { ranked: Ranked::new(), clock: 0 }
    }
}

impl Default for LfuPolicy {
    fn default() -> Self {
        Self::new()
    }
}

impl Policy for LfuPolicy {
    fn access(&mut self, _now_ms: u64, request: &Request<'_>) {
        self.clock += request.blocks.len() as u64;
        for (index, block) in request.blocks.iter().enumerate() {
            if let Some(slot) = self.ranked.tree().slot(block.id) {
                let (n_uses, _) = self.ranked.key(slot);
                self.ranked.set_key(slot, (n_uses.saturating_add(1), self.clock - index as u64));
            }
        }
    }

    fn insert(&mut self, _now_ms: u64, request: &Request<'_>, index: usize) -> bool {
        let key = (1, self.clock.saturating_sub(index as u64));
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
