//! Recency and frequency in a balance that follows the ghosts.

use super::ghosts::Ghosts;
use super::ranked::Ranked;
use super::{BlockId, Policy, Request, Tree};

/// ARC over leaves: one list for what was used once, one for what was used again, and the names of what
/// either evicted. A block that comes back shows which list was too short.
#[derive(Debug)]
pub struct ArcPolicy {
    ranked: Ranked<(List, u64)>,
    clock: u64,
    capacity_blocks: usize,
    n_once: usize,
    /// How many of the resident blocks the list of those used once should have.
    once_target: usize,
    once_ghosts: Ghosts<()>,
    often_ghosts: Ghosts<()>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum List {
    Once,
    Often,
}

impl ArcPolicy {
    /// An empty cache of about that many blocks.
    pub fn new(capacity_blocks: usize) -> Self {
        Self {
            ranked: Ranked::new(),
            clock: 0,
            capacity_blocks,
            n_once: 0,
            once_target: 0,
            once_ghosts: Ghosts::new(),
            often_ghosts: Ghosts::new(),
        }
    }

    fn forget(&mut self, slot: u32) -> BlockId {
        if self.ranked.key(slot).0 == List::Once {
            self.n_once -= 1;
        }
        self.ranked.remove_leaf(slot)
    }
}

impl Policy for ArcPolicy {
    fn access(&mut self, _now_ms: u64, request: &Request<'_>) {
        self.clock += request.blocks.len() as u64;
        for (index, block) in request.blocks.iter().enumerate() {
            if let Some(slot) = self.ranked.tree().slot(block.id) {
                self.n_once -= usize::from(self.ranked.key(slot).0 == List::Once);
                self.ranked.set_key(slot, (List::Often, self.clock - index as u64));
            }
        }
    }

    fn insert(&mut self, _now_ms: u64, request: &Request<'_>, index: usize) -> bool {
        let Some(block) = request.blocks.get(index) else { return false };
        let (n_once_ghosts, n_often_ghosts) = (self.once_ghosts.len(), self.often_ghosts.len());
        let list = if self.once_ghosts.take(block.id).is_some() {
            let step = (n_often_ghosts / n_once_ghosts.max(1)).max(1);
            self.once_target = (self.once_target + step).min(self.capacity_blocks);
            List::Often
        } else if self.often_ghosts.take(block.id).is_some() {
            let step = (n_once_ghosts / n_often_ghosts.max(1)).max(1);
            self.once_target = self.once_target.saturating_sub(step);
            List::Often
        } else {
            List::Once
        };
        let key = (list, self.clock.saturating_sub(index as u64));
        let is_new = self.ranked.insert(request, index, key).is_some();
        self.n_once += usize::from(is_new && list == List::Once);
        is_new
    }

    fn victim(&mut self, _now_ms: u64) -> Option<BlockId> {
        let once = self.ranked.first().filter(|((list, _), _)| *list == List::Once);
        let often = self.ranked.first_from((List::Often, 0));
        let from_once = once.filter(|_| self.n_once > self.once_target || often.is_none());
        let first = from_once.or(often)?;
        let is_candidate = |((list, _), _): &((List, u64), u32)| *list == first.0.0;
        let ((list, _), slot) = self.ranked.spare(first, is_candidate);
        let id = self.forget(slot);
        match list {
            List::Once => {
                self.once_ghosts.add(id, (), self.capacity_blocks.saturating_sub(self.n_once));
            }
            List::Often => {
                let n_often = self.ranked.tree().n_blocks() - self.n_once;
                let n_others = self.n_once + n_often + self.once_ghosts.len();
                self.often_ghosts.add(id, (), (2 * self.capacity_blocks).saturating_sub(n_others));
            }
        }
        Some(id)
    }

    fn remove(&mut self, id: BlockId) -> bool {
        self.ranked.removable(id).map(|slot| self.forget(slot)).is_some()
    }

    fn pin(&mut self, id: BlockId) -> bool {
        self.ranked.pin(id)
    }

    fn unpin(&mut self, id: BlockId) -> bool {
        self.ranked.unpin(id)
    }

    fn set_copy(&mut self, id: BlockId, is_copy: bool) -> bool {
        self.ranked.set_copy(id, is_copy)
    }

    fn tree(&self) -> &Tree {
        self.ranked.tree()
    }
}
