//! What a pool is held against.

use std::collections::{BTreeMap, BTreeSet};

use kvik_types::{BlockHash, TokenId};

use super::super::{BlockId, Content, Need};
use super::paged_memory::PagedMemory;

/// Blocks as the specification sees them: slow and obvious.
#[derive(Debug, Default)]
pub(super) struct NaivePool {
    pub(super) pages: PagedMemory,
    pub(super) n_holders: BTreeMap<BlockId, u32>,
    /// Oldest first.
    pub(super) free: Vec<BlockId>,
    pub(super) registered: BTreeMap<BlockId, Content>,
    pub(super) n_evicted: u64,
    pub(super) n_given_back: u64,
}

impl NaivePool {
    /// All of `n_blocks` from the start, each on a page of its own.
    pub(super) fn fixed(n_blocks: u32) -> Self {
        let n_pages = n_blocks as usize;
        let pages = PagedMemory { n_pages, page_blocks: 1, limit_pages: n_pages, ..PagedMemory::default() };
        let mut naive = Self { pages, ..Self::default() };
        naive.grow(n_pages, Need::Required);
        naive
    }

    pub(super) fn grow(&mut self, n_blocks: usize, need: Need) {
        let taken = self.pages.take(n_blocks, need);
        self.free.splice(0..0, taken);
    }

    /// The pages without a held block, those used longest ago first.
    pub(super) fn idle_pages(&self) -> Vec<usize> {
        let mut idle = self.pages.held_pages();
        idle.retain(|&page| !self.n_holders.keys().any(|&block| self.pages.page_of(block) == page));
        let mut idle: Vec<usize> = idle.into_iter().collect();
        idle.sort_by_key(|&page| self.free.iter().rposition(|&block| self.pages.page_of(block) == page));
        idle
    }

    pub(super) fn give_back_pages(&mut self, n_pages: usize) -> usize {
        let given: Vec<usize> = self.idle_pages().into_iter().take(n_pages).collect();
        let is_lost = |block: &BlockId| given.contains(&(block.index() / self.pages.page_blocks));
        let n_before = self.pages.taken.len();
        self.free.retain(|block| !is_lost(block));
        self.registered.retain(|block, _| !is_lost(block));
        self.pages.taken.retain(|block| !is_lost(block));
        self.n_given_back += (n_before - self.pages.taken.len()) as u64;
        // Orphans, their orphans, and so on.
        let mut orphans: BTreeSet<BlockId> = BTreeSet::new();
        loop {
            let known: BTreeSet<BlockId> = self.registered.keys().copied().collect();
            let is_orphan = |content: &Content| content.parent.is_some_and(|parent| !known.contains(&parent));
            let n_known = known.len();
            orphans.extend(
                self.registered.extract_if(.., |_, content| is_orphan(content)).map(|(block, _)| block),
            );
            if self.registered.len() == n_known {
                break;
            }
        }
        assert!(orphans.iter().all(|block| !self.n_holders.contains_key(block)), "an orphan is held");
        let (mut moved, kept): (Vec<BlockId>, Vec<BlockId>) =
            self.free.iter().partition(|block| orphans.contains(block));
        // Moved to the front one by one, the youngest first: they keep their order.
        moved.extend(kept);
        self.free = moved;
        given.len()
    }

    pub(super) fn allocate(&mut self) -> Option<BlockId> {
        match self.free.first() {
            None => self.grow(1, Need::Required),
            Some(oldest) if self.registered.contains_key(oldest) => self.grow(1, Need::Spare),
            Some(_) => {}
        }
        if self.free.is_empty() {
            return None;
        }
        let block = self.free.remove(0);
        self.n_evicted += u64::from(self.registered.remove(&block).is_some());
        self.n_holders.insert(block, 1);
        Some(block)
    }

    pub(super) fn retain(&mut self, block: BlockId) {
        self.free.retain(|&free| free != block);
        *self.n_holders.entry(block).or_default() += 1;
    }

    pub(super) fn release(&mut self, block: BlockId) {
        let count = self.n_holders.get_mut(&block).unwrap();
        *count -= 1;
        if *count == 0 {
            self.n_holders.remove(&block);
            let place = if self.registered.contains_key(&block) { self.free.len() } else { 0 };
            self.free.insert(place, block);
        }
    }

    pub(super) fn find(
        &self,
        hash: BlockHash,
        tokens: &[TokenId],
        parent: Option<BlockId>,
    ) -> Option<BlockId> {
        let is_it =
            |content: &Content| content.hash == hash && content.tokens == *tokens && content.parent == parent;
        let mut found = self.registered.iter().filter(|(_, content)| is_it(content));
        found.next().map(|(&block, _)| block)
    }
}
