//! The memory of a pool: pages are taken when blocks are needed, and given back when others ask.

use std::collections::HashMap;

use super::BlockPool;
use crate::paging::BlockId;
use crate::paging::memory::Need;

/// How many blocks of a page the pool has.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Page {
    n_present: u32,
    /// Those with a holder.
    n_held: u32,
}

/// A page without a held block, while pages are chosen to be given back.
#[derive(Debug, Default)]
struct IdlePage {
    /// Place of its youngest block in the free list.
    last_used: usize,
    blocks: Vec<BlockId>,
}

impl BlockPool {
    /// Whether `n_blocks` are free, after taking more memory for them if needed and possible.
    pub fn ensure_free(&mut self, n_blocks: usize) -> bool {
        let n_free = self.n_free();
        if n_free < n_blocks {
            self.grow(n_blocks - n_free, Need::Required);
        }
        n_blocks <= self.n_free()
    }

    /// Tells that nothing can be computed until what [`Self::ensure_free`] could not give is there.
    pub fn note_starved(&mut self) {
        self.memory.note_starved();
    }

    /// Tells that what [`Self::ensure_free`] or [`Self::allocate`] could not give is no longer needed.
    pub fn stop_waiting(&mut self) {
        self.memory.stop_waiting();
    }

    /// How many pages others ask for, returned once, or a limit forbids.
    pub fn take_asked_pages(&mut self) -> usize {
        self.memory.take_asked_pages()
    }

    /// Gives back up to `n_pages` pages without a held block; returns how many.
    ///
    /// Pages whose content was used longest ago go first. Content that hangs on what is lost is forgotten.
    pub fn give_back_pages(&mut self, n_pages: usize) -> usize {
        let mut idle: HashMap<usize, IdlePage> = HashMap::new();
        let mut next = self.free.oldest();
        let mut age = 0;
        while let Some(block) = next {
            let page_idx = self.memory.page_of(block);
            if self.pages[page_idx].n_held == 0 {
                let page = idle.entry(page_idx).or_default();
                page.last_used = age;
                page.blocks.push(block);
            }
            age += 1;
            next = self.free.younger(block);
        }
        let mut idle: Vec<(usize, IdlePage)> = idle.into_iter().collect();
        idle.sort_unstable_by_key(|(_, page)| page.last_used);
        idle.truncate(n_pages);
        for (page_idx, page) in &idle {
            for &block in &page.blocks {
                self.free.unlink(block);
                self.forget(block);
                self.slots[block.index()].is_present = false;
            }
            self.pages[*page_idx] = Page::default();
            self.n_present -= page.blocks.len();
            self.n_given_back += page.blocks.len() as u64;
        }
        self.forget_orphans();
        for (_, page) in &idle {
            self.memory.give_back(&page.blocks);
        }
        if !idle.is_empty() {
            self.n_idle_pages -= idle.len();
            self.memory.note_idle_pages(self.n_idle_pages);
        }
        idle.len()
    }

    /// Takes memory for `n_blocks` more blocks, as far as there is any.
    pub(super) fn grow(&mut self, n_blocks: usize, need: Need) {
        if self.n_present == self.slots.len() {
            return;
        }
        let mut taken = std::mem::take(&mut self.taken);
        taken.clear();
        self.memory.take(n_blocks, need, &mut taken);
        // Pushed to the front one by one: the first of them is taken first.
        for &block in taken.iter().rev() {
            let slot = &mut self.slots[block.index()];
            assert!(!slot.is_present, "the memory gave a block twice");
            slot.is_present = true;
            self.n_present += 1;
            let page_idx = self.memory.page_of(block);
            if self.pages.len() <= page_idx {
                self.pages.resize(page_idx + 1, Page::default());
            }
            let page = &mut self.pages[page_idx];
            self.n_idle_pages += usize::from(page.n_present == 0);
            page.n_present += 1;
            self.free.push_oldest(block);
        }
        if !taken.is_empty() {
            self.memory.note_idle_pages(self.n_idle_pages);
        }
        self.taken = taken;
    }

    /// Notes the first holder of `block`.
    pub(super) fn note_held(&mut self, block: BlockId) {
        let page = &mut self.pages[self.memory.page_of(block)];
        page.n_held += 1;
        if page.n_held == 1 {
            self.n_idle_pages -= 1;
            self.memory.note_idle_pages(self.n_idle_pages);
        }
    }

    /// Notes that the last holder of `block` has left.
    pub(super) fn note_free(&mut self, block: BlockId) {
        let page = &mut self.pages[self.memory.page_of(block)];
        page.n_held -= 1;
        if page.n_held == 0 {
            self.n_idle_pages += 1;
            self.memory.note_idle_pages(self.n_idle_pages);
        }
    }

    /// Forgets the content of every free block whose parent is forgotten: no lookup can find it any more.
    fn forget_orphans(&mut self) {
        // A parent is younger than its children, so one walk from the youngest on sees parents first.
        let mut next = self.free.youngest();
        while let Some(block) = next {
            let content = self.slots[block.index()].content.as_ref();
            let parent = content.and_then(|content| content.parent);
            next = self.free.older(block);
            if parent.is_some_and(|parent| self.slots[parent.index()].content.is_none()) {
                self.forget(block);
                self.free.unlink(block);
                self.free.push_oldest(block);
            }
        }
    }
}
