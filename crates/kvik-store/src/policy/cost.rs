//! Recompute time saved per byte.

use super::ranked::Ranked;
use super::{Block, BlockId, Policy, Request, Tree};

/// Evicts the leaf that saves the least recompute time per byte (`GreedyDual`-Size).
///
/// Every use sets a block's value to what it saves per byte plus the value of the last victim, so what is
/// expensive stays longer, and not forever.
#[derive(Debug)]
pub struct CostPolicy {
    /// Value, then time of the last use.
    ranked: Ranked<(u64, u64)>,
    clock: u64,
    floor: u64,
}

impl CostPolicy {
    /// An empty cache.
    pub fn new() -> Self {
        Self { ranked: Ranked::new(), clock: 0, floor: 0 }
    }

    fn key(&self, block: &Block, index: usize) -> (u64, u64) {
        // Fixed point: nanoseconds per KiB keep a block of many MiB distinct from its neighbors.
        let saved = u128::from(block.recompute_us) * 1000 * 1024 / u128::from(block.bytes.max(1));
        let saved = u64::try_from(saved).unwrap_or(u64::MAX);
        (self.floor.saturating_add(saved), self.clock.saturating_sub(index as u64))
    }
}

impl Default for CostPolicy {
    fn default() -> Self {
        Self::new()
    }
}

impl Policy for CostPolicy {
    fn access(&mut self, _now_ms: u64, request: &Request<'_>) {
        self.clock += request.blocks.len() as u64;
        for (index, block) in request.blocks.iter().enumerate() {
            if let Some(slot) = self.ranked.tree().slot(block.id) {
                self.ranked.set_key(slot, self.key(block, index));
            }
        }
    }

    fn insert(&mut self, _now_ms: u64, request: &Request<'_>, index: usize) -> bool {
        let Some(block) = request.blocks.get(index) else { return false };
        self.ranked.insert(request, index, self.key(block, index)).is_some()
    }

    fn victim(&mut self, _now_ms: u64) -> Option<BlockId> {
        let ((value, _), slot) = self.ranked.first()?;
        // A prefix may be worth less than what hung on it, so the floor is a maximum.
        self.floor = self.floor.max(value);
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
