//! Memory of a pool that its test sees too.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;

use super::super::{BlockId, BlockMemory, Need};

/// Memory in pages that come and go.
#[derive(Debug, Clone, Default)]
pub(super) struct PagedMemory {
    pub(super) n_pages: usize,
    pub(super) page_blocks: usize,
    /// The most pages that may be held now.
    pub(super) limit_pages: usize,
    /// The most pages that may be held without need.
    pub(super) spare_pages: usize,
    pub(super) taken: BTreeSet<BlockId>,
    pub(super) n_idle_noted: usize,
}

/// The pages of a pool, which its test sees too.
#[derive(Debug, Clone)]
pub(super) struct MemoryOfPool(pub(super) Arc<Mutex<PagedMemory>>);

impl PagedMemory {
    pub(super) fn page_of(&self, block: BlockId) -> usize {
        block.index() / self.page_blocks
    }

    pub(super) fn held_pages(&self) -> BTreeSet<usize> {
        self.taken.iter().map(|&block| self.page_of(block)).collect()
    }

    /// Takes blocks of held pages before others, the lowest first.
    pub(super) fn take(&mut self, n_blocks: usize, need: Need) -> Vec<BlockId> {
        let max_pages = match need {
            Need::Spare => self.spare_pages.min(self.limit_pages),
            Need::Required => self.limit_pages,
        };
        let mut taken = Vec::new();
        for may_add_pages in [false, true] {
            for index in 0..self.n_pages * self.page_blocks {
                let block = BlockId::new(index as u32);
                let held = self.held_pages();
                let is_there = held.contains(&self.page_of(block)) || may_add_pages && held.len() < max_pages;
                if taken.len() < n_blocks && is_there && self.taken.insert(block) {
                    taken.push(block);
                }
            }
        }
        taken
    }
}

impl BlockMemory for MemoryOfPool {
    fn capacity_blocks(&self) -> usize {
        let pages = self.0.lock();
        pages.n_pages * pages.page_blocks
    }

    fn limit_blocks(&self) -> usize {
        let pages = self.0.lock();
        pages.limit_pages * pages.page_blocks
    }

    fn take(&mut self, n_blocks: usize, need: Need, blocks: &mut Vec<BlockId>) {
        blocks.extend(self.0.lock().take(n_blocks, need));
    }

    fn give_back(&mut self, blocks: &[BlockId]) {
        let mut pages = self.0.lock();
        for block in blocks {
            assert!(pages.taken.remove(block), "{block:?} was not taken");
        }
    }

    fn take_asked_pages(&mut self) -> usize {
        0
    }

    fn page_of(&self, block: BlockId) -> usize {
        self.0.lock().page_of(block)
    }

    fn note_idle_pages(&mut self, n_pages: usize) {
        self.0.lock().n_idle_noted = n_pages;
    }

    fn set_waker(&mut self, _waker: Box<dyn Fn() + Send + Sync>) {}
}
