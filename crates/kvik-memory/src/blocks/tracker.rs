//! The state of every block: pure bookkeeping under the allocator's lock.

use std::collections::VecDeque;

use super::{BlockCounters, Epoch, Fragmentation};
use crate::geometry::{BlockGeometry, BlockId, PageId};
use crate::pages::bitmap::Bitmap;
use crate::{MemoryError, Result};

/// Empty pages that are kept: one is enough that a lone block bounces no page.
const N_KEPT_EMPTY_PAGES: u32 = 1;

/// End of a list.
const NOWHERE: u32 = u32::MAX;

/// Which blocks are free and which pages have room.
#[derive(Debug)]
pub(super) struct BlockTracker {
    geometry: BlockGeometry,
    min_blocks_per_page: u32,
    words_per_page: usize,
    /// A bit for each block of a page, set while it is free; so many words a page.
    free_words: Vec<u64>,
    /// The same for blocks in limbo.
    limbo_words: Vec<u64>,
    pages: Vec<PageEntry>,
    /// First page of the list of those with so many free blocks.
    heads: Vec<u32>,
    /// Counts whose list is not empty.
    counts: Bitmap,
    /// Blocks in the order of their epochs.
    limbo: VecDeque<(Epoch, BlockId)>,
    completed: Option<Epoch>,
    n_free: u32,
    n_held_blocks: u32,
    n_pages: u32,
    n_empty_pages: u32,
    has_null_block: bool,
    /// Pages to give back, kept for its capacity.
    pub(super) released: Vec<PageId>,
    /// Pages that were taken, kept for its capacity.
    pub(super) taken: Vec<PageId>,
}

/// A page in the lists by free count; `n_blocks` is zero while it is not held.
#[derive(Debug, Clone, Copy, Default)]
struct PageEntry {
    first_block: u32,
    n_blocks: u32,
    n_free: u32,
    prev: u32,
    next: u32,
}

/// What marking a block as given back may set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    Free,
    Limbo,
}

impl BlockTracker {
    /// No page held.
    pub(super) fn new(geometry: BlockGeometry) -> Self {
        let n_pages = geometry.capacity_pages();
        let words_per_page = (geometry.max_blocks_per_page() as usize).div_ceil(64);
        let min_blocks_per_page = (0..n_pages)
            .map(|page| {
                let blocks = geometry.blocks_of_page(PageId(page));
                blocks.end.0 - blocks.start.0
            })
            .min()
            .unwrap_or(1)
            .max(1);
        Self {
            geometry,
            min_blocks_per_page,
            words_per_page,
            free_words: vec![0; n_pages as usize * words_per_page],
            limbo_words: vec![0; n_pages as usize * words_per_page],
            pages: vec![PageEntry::default(); n_pages as usize],
            heads: vec![NOWHERE; geometry.max_blocks_per_page() as usize + 1],
            counts: Bitmap::new(geometry.max_blocks_per_page() + 1),
            limbo: VecDeque::new(),
            completed: None,
            n_free: 0,
            n_held_blocks: 0,
            n_pages: 0,
            n_empty_pages: 0,
            has_null_block: false,
            released: Vec::new(),
            taken: Vec::new(),
        }
    }

    pub(super) fn n_free(&self) -> u32 {
        self.n_free
    }

    /// Blocks that each page has at least.
    pub(super) fn min_blocks_per_page(&self) -> u32 {
        self.min_blocks_per_page
    }

    pub(super) fn has_null_block(&self) -> bool {
        self.has_null_block
    }

    /// Takes block 0 for good; its page is held and block 0 is free.
    pub(super) fn take_null_block(&mut self) {
        self.has_null_block = true;
        self.take_from(PageId(0), 1, &mut Vec::new());
    }

    /// Adds pages that were not held, with all their blocks free; the first of them is used first.
    pub(super) fn adopt(&mut self, pages: &[PageId]) {
        for &page in pages.iter().rev() {
            let blocks = self.geometry.blocks_of_page(page);
            let n_blocks = blocks.end.0 - blocks.start.0;
            self.pages[page.0 as usize] = PageEntry {
                first_block: blocks.start.0,
                n_blocks,
                n_free: n_blocks,
                prev: NOWHERE,
                next: NOWHERE,
            };
            let words = &mut self.free_words[page.0 as usize * self.words_per_page..][..self.words_per_page];
            let mut n_left = n_blocks;
            for word in words {
                let n_bits = n_left.min(64);
                *word = u64::MAX.checked_shr(64 - n_bits).unwrap_or(0);
                n_left -= n_bits;
            }
            self.n_free += n_blocks;
            self.n_held_blocks += n_blocks;
            self.n_pages += 1;
            self.n_empty_pages += 1;
            self.link(page);
        }
    }

    /// Takes `n_blocks` free blocks; the caller has seen that there are so many.
    ///
    /// The fullest page that holds all of them is best; if none does, the emptiest gives what it has,
    /// so that a batch lies on few pages.
    pub(super) fn take(&mut self, n_blocks: u32, blocks: &mut Vec<BlockId>) {
        blocks.reserve(n_blocks as usize);
        let mut n_left = n_blocks;
        while n_left > 0 {
            let Some(count) = self.counts.first_from(n_left).or_else(|| self.counts.last()) else {
                debug_assert!(false, "fewer blocks are free than were promised");
                return;
            };
            let n_here = count.min(n_left);
            self.take_from(PageId(self.heads[count as usize]), n_here, blocks);
            n_left -= n_here;
        }
    }

    /// Takes all blocks of pages that were adopted a moment ago.
    pub(super) fn take_whole(&mut self, pages: &[PageId]) {
        for &page in pages {
            self.take_from(page, self.pages[page.0 as usize].n_free, &mut Vec::new());
        }
    }

    /// Marks all of `blocks` as given back, or none if one of them is not used.
    pub(super) fn mark(&mut self, blocks: &[BlockId], mark: Mark) -> Result<()> {
        let mut page = PageId(NOWHERE);
        for (n_marked, &block) in blocks.iter().enumerate() {
            match self.find_used(block, &mut page) {
                Ok((word_idx, bit)) => match mark {
                    Mark::Free => self.free_words[word_idx] |= bit,
                    Mark::Limbo => self.limbo_words[word_idx] |= bit,
                },
                Err(reason) => {
                    self.unmark(&blocks[..n_marked], mark);
                    return Err(MemoryError::NotAllocated { block, reason });
                }
            }
        }
        Ok(())
    }

    /// Counts blocks that were marked free; pages that are empty then and not kept end up in `released`.
    pub(super) fn finish_free(&mut self, blocks: &[BlockId]) {
        let mut rest = blocks;
        while let Some(&block) = rest.first() {
            let Some(page) = self.geometry.page_of_block(block) else { return };
            let PageEntry { first_block, n_blocks, .. } = self.pages[page.0 as usize];
            let is_here = |block: &BlockId| block.0.wrapping_sub(first_block) < n_blocks;
            let n_here = rest.iter().position(|block| !is_here(block)).unwrap_or(rest.len());
            self.return_to(page, n_here as u32);
            rest = &rest[n_here..];
        }
    }

    /// Whether blocks that were freed after `epoch` are free at once.
    pub(super) fn is_complete(&self, epoch: Epoch) -> bool {
        self.completed.is_some_and(|completed| epoch <= completed)
    }

    /// Queues blocks that were marked as in limbo.
    ///
    /// The queue is in order: blocks whose epoch is before that of others queued earlier wait for those.
    pub(super) fn finish_limbo(&mut self, blocks: &[BlockId], epoch: Epoch) {
        let epoch = self.limbo.back().map_or(epoch, |&(last, _)| last.max(epoch));
        self.limbo.extend(blocks.iter().map(|&block| (epoch, block)));
    }

    /// Frees what waited for `epoch` or an earlier one; returns how many blocks.
    pub(super) fn advance(&mut self, epoch: Epoch) -> u32 {
        self.completed = self.completed.max(Some(epoch));
        let mut n_freed = 0;
        while let Some(&(queued, block)) = self.limbo.front() {
            if !self.is_complete(queued) {
                break;
            }
            self.limbo.pop_front();
            let Some(page) = self.geometry.page_of_block(block) else { continue };
            let (word_idx, bit) = self.bit_of(page, block.0 - self.pages[page.0 as usize].first_block);
            self.limbo_words[word_idx] &= !bit;
            self.free_words[word_idx] |= bit;
            self.return_to(page, 1);
            n_freed += 1;
        }
        n_freed
    }

    /// Moves empty pages to `released` until `n_kept` are left.
    pub(super) fn release_empty_pages(&mut self, n_kept: u32) {
        let mut from = self.min_blocks_per_page;
        while self.n_empty_pages > n_kept {
            let Some(count) = self.counts.first_from(from) else { return };
            from = count + 1;
            let mut page = self.heads[count as usize];
            while page != NOWHERE && self.n_empty_pages > n_kept {
                let entry = self.pages[page as usize];
                if entry.n_free == entry.n_blocks {
                    self.release(PageId(page));
                }
                page = entry.next;
            }
        }
    }

    /// Frees everything, limbo included, but the null block.
    pub(super) fn reset(&mut self) {
        self.limbo.clear();
        self.limbo_words.fill(0);
        for page in 0..self.pages.len() as u32 {
            if self.pages[page as usize].n_blocks > 0 {
                self.release(PageId(page));
            }
        }
        if self.has_null_block {
            self.released.retain(|&page| page != PageId(0));
            self.adopt(&[PageId(0)]);
            self.take_null_block();
        }
    }

    /// Which pages would be empty after at most `max_moves` blocks were moved to others.
    pub(super) fn fragmentation(&self, max_moves: u32) -> Fragmentation {
        let null_page = self.has_null_block.then_some(0);
        // A block in limbo cannot be moved, and is not room either.
        let mut candidates: Vec<(u32, u32)> = (0..self.pages.len() as u32)
            .filter(|&page| Some(page) != null_page)
            .filter(|&page| !self.has_limbo(page))
            .map(|page| (self.pages[page as usize], page))
            .filter(|(entry, _)| entry.n_blocks > entry.n_free)
            .map(|(entry, page)| (entry.n_blocks - entry.n_free, page))
            .collect();
        candidates.sort_unstable();
        // Filling an empty page to empty another gains nothing.
        let n_free_on_empty: u32 =
            self.pages.iter().filter(|entry| entry.n_free == entry.n_blocks).map(|entry| entry.n_free).sum();
        let mut n_room = self.n_free - n_free_on_empty;
        let mut report = Fragmentation::default();
        for (n_used, page) in candidates {
            let n_moves = report.n_moves + n_used;
            // What is free on an emptied page is no longer room.
            let n_room_left = n_room - self.pages[page as usize].n_free;
            if n_moves > max_moves || n_moves > n_room_left {
                break;
            }
            n_room = n_room_left;
            report.n_moves = n_moves;
            report.pages.push(PageId(page));
        }
        report
    }

    pub(super) fn counters(&self) -> BlockCounters {
        let n_limbo = self.limbo.len() as u32;
        BlockCounters {
            n_used: self.n_held_blocks - self.n_free - n_limbo,
            n_free: self.n_free,
            n_limbo,
            n_pages: self.n_pages,
            n_empty_pages: self.n_empty_pages,
        }
    }

    /// Takes blocks of a page that has so many free, the lowest first.
    fn take_from(&mut self, page: PageId, n_blocks: u32, blocks: &mut Vec<BlockId>) {
        self.unlink(page);
        let entry = &mut self.pages[page.0 as usize];
        self.n_empty_pages -= u32::from(entry.n_free == entry.n_blocks);
        entry.n_free -= n_blocks;
        self.n_free -= n_blocks;
        let mut first_block = entry.first_block;
        let mut n_left = n_blocks;
        for word in &mut self.free_words[page.0 as usize * self.words_per_page..][..self.words_per_page] {
            while *word != 0 && n_left > 0 {
                blocks.push(BlockId(first_block + word.trailing_zeros()));
                *word &= *word - 1;
                n_left -= 1;
            }
            if n_left == 0 {
                break;
            }
            first_block += 64;
        }
        self.link(page);
    }

    /// Counts blocks of a page whose bits are set already.
    fn return_to(&mut self, page: PageId, n_blocks: u32) {
        self.unlink(page);
        let entry = &mut self.pages[page.0 as usize];
        entry.n_free += n_blocks;
        self.n_free += n_blocks;
        let is_empty = entry.n_free == entry.n_blocks;
        self.link(page);
        if is_empty {
            self.n_empty_pages += 1;
            if self.n_empty_pages > N_KEPT_EMPTY_PAGES {
                self.release(page);
            }
        }
    }

    /// Stops holding a page, whatever is on it.
    fn release(&mut self, page: PageId) {
        self.unlink(page);
        let entry = std::mem::take(&mut self.pages[page.0 as usize]);
        self.free_words[page.0 as usize * self.words_per_page..][..self.words_per_page].fill(0);
        self.n_empty_pages -= u32::from(entry.n_free == entry.n_blocks);
        self.n_free -= entry.n_free;
        self.n_held_blocks -= entry.n_blocks;
        self.n_pages -= 1;
        self.released.push(page);
    }

    /// Finds the bit of a block that is in use, or says why it is not.
    ///
    /// `page` is where the block before it was found: neighbors in a list are mostly on one page, and
    /// then no division is needed.
    fn find_used(&self, block: BlockId, page: &mut PageId) -> Result<(usize, u64), &'static str> {
        let mut entry = self.pages.get(page.0 as usize).copied().unwrap_or_default();
        if block.0.wrapping_sub(entry.first_block) >= entry.n_blocks {
            *page = self.geometry.page_of_block(block).ok_or("it is out of range or belongs to no page")?;
            entry = self.pages[page.0 as usize];
            if entry.n_blocks == 0 {
                return Err("it is free already");
            }
        }
        if self.has_null_block && block.0 == 0 {
            return Err("it is the null block");
        }
        let (word_idx, bit) = self.bit_of(*page, block.0 - entry.first_block);
        if self.limbo_words[word_idx] & bit != 0 {
            return Err("it is in limbo already or listed twice");
        }
        if self.free_words[word_idx] & bit != 0 {
            return Err("it is free already or listed twice");
        }
        Ok((word_idx, bit))
    }

    fn unmark(&mut self, blocks: &[BlockId], mark: Mark) {
        for &block in blocks {
            let Some(page) = self.geometry.page_of_block(block) else { continue };
            let (word_idx, bit) = self.bit_of(page, block.0 - self.pages[page.0 as usize].first_block);
            match mark {
                Mark::Free => self.free_words[word_idx] &= !bit,
                Mark::Limbo => self.limbo_words[word_idx] &= !bit,
            }
        }
    }

    fn bit_of(&self, page: PageId, idx_in_page: u32) -> (usize, u64) {
        (page.0 as usize * self.words_per_page + idx_in_page as usize / 64, 1 << (idx_in_page % 64))
    }

    fn has_limbo(&self, page: u32) -> bool {
        self.limbo_words[page as usize * self.words_per_page..][..self.words_per_page]
            .iter()
            .any(|&word| word != 0)
    }

    /// Puts a page in front of the list of its free count; a page without a free block is in none.
    fn link(&mut self, page: PageId) {
        let count = self.pages[page.0 as usize].n_free;
        if count == 0 {
            return;
        }
        let next = std::mem::replace(&mut self.heads[count as usize], page.0);
        let entry = &mut self.pages[page.0 as usize];
        entry.prev = NOWHERE;
        entry.next = next;
        if next == NOWHERE {
            self.counts.insert(count);
        } else {
            self.pages[next as usize].prev = page.0;
        }
    }

    /// Takes a page out of the list of its free count.
    fn unlink(&mut self, page: PageId) {
        let PageEntry { n_free: count, prev, next, .. } = self.pages[page.0 as usize];
        if count == 0 {
            return;
        }
        if next != NOWHERE {
            self.pages[next as usize].prev = prev;
        }
        if prev == NOWHERE {
            self.heads[count as usize] = next;
            if next == NOWHERE {
                self.counts.remove(count);
            }
        } else {
            self.pages[prev as usize].next = next;
        }
    }
}
