//! The block allocator: the tracker of blocks on pages that are taken and given back as needed.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::tracker::{BlockTracker, Mark};
use super::{BlockCounters, BlocksOutcome, Epoch, Fragmentation};
use crate::geometry::{BlockGeometry, BlockId, PageId};
use crate::pages::{PageAllocator, PagesOutcome};
use crate::{MemoryError, Result};

/// Hands out the blocks of a region.
///
/// Shared between threads. Blocks that are free on pages at hand take one short critical section;
/// pages are mapped outside of it, so a growth does not block frees.
#[derive(Debug)]
pub struct BlockAllocator {
    pages: Arc<PageAllocator>,
    geometry: BlockGeometry,
    tracker: Mutex<BlockTracker>,
}

impl BlockAllocator {
    /// An allocator that takes all its pages from `pages`, of which it must be the only user.
    ///
    /// Fails where the blocks are laid out for another number of pages.
    pub fn try_new(pages: Arc<PageAllocator>, geometry: BlockGeometry) -> Result<Self> {
        if geometry.capacity_pages() != pages.capacity_pages() {
            return Err(MemoryError::Invalid {
                field: "capacity_pages",
                value: geometry.capacity_pages().to_string(),
                allowed: format!("{}, as the pages have it", pages.capacity_pages()),
            });
        }
        Ok(Self { pages, geometry, tracker: Mutex::new(BlockTracker::new(geometry)) })
    }

    /// Takes block 0 for good, for engines that write unused values there.
    ///
    /// Once is enough; again does nothing. Fails where page 0, on which it lies, is in use: it must be
    /// reserved before anything else is taken.
    pub fn reserve_null_block(&self) -> Result<BlocksOutcome> {
        let mut tracker = self.tracker.lock();
        if tracker.has_null_block() {
            return Ok(BlocksOutcome::Allocated);
        }
        if let PagesOutcome::NoMemory(shortage) = self.pages.alloc_page(PageId(0))? {
            return Ok(BlocksOutcome::NoMemory(shortage));
        }
        tracker.adopt(&[PageId(0)]);
        tracker.take_null_block();
        Ok(BlocksOutcome::Allocated)
    }

    /// Appends `n_blocks` blocks to `blocks`, or none.
    ///
    /// Fails where a grant or a mapping is broken, not where there is too little; either way nothing is
    /// taken.
    pub fn alloc(&self, n_blocks: u32, blocks: &mut Vec<BlockId>) -> Result<BlocksOutcome> {
        let mut tracker = self.tracker.lock();
        if n_blocks <= tracker.n_free() {
            tracker.take(n_blocks, blocks);
            return Ok(BlocksOutcome::Allocated);
        }
        self.alloc_with_growth(tracker, n_blocks, blocks)
    }

    /// Takes all blocks of `pages` themselves, or of none; for owners that choose pages and not blocks.
    ///
    /// Fails where a block of them is in use, and as [`PageAllocator::alloc_these`] does.
    pub fn alloc_pages(&self, pages: &[PageId]) -> Result<BlocksOutcome> {
        self.alloc_pages_in_extents(pages, 1)
    }

    /// Takes all blocks of `pages` as [`alloc_pages`](Self::alloc_pages) does, with pages as
    /// [`PageAllocator::alloc_in_extents`] takes them.
    pub fn alloc_pages_in_extents(&self, pages: &[PageId], max_extent_pages: u32) -> Result<BlocksOutcome> {
        // An empty page that is kept may be one of them.
        self.release_empty_pages();
        if let PagesOutcome::NoMemory(shortage) = self.pages.alloc_in_extents(pages, max_extent_pages)? {
            return Ok(BlocksOutcome::NoMemory(shortage));
        }
        let mut tracker = self.tracker.lock();
        tracker.adopt(pages);
        tracker.take_whole(pages);
        Ok(BlocksOutcome::Allocated)
    }

    /// Frees `blocks`, and gives pages back that are empty then.
    ///
    /// Fails where one of them is not in use or is listed twice, and frees none then.
    pub fn free(&self, blocks: &[BlockId]) -> Result<()> {
        let mut tracker = self.tracker.lock();
        tracker.mark(blocks, Mark::Free)?;
        tracker.finish_free(blocks);
        self.give_back(tracker);
        Ok(())
    }

    /// Frees `blocks` when `epoch` is complete; until then they are in limbo and their pages stay mapped.
    ///
    /// Blocks become free in the order of the calls: an epoch before that of an earlier call waits for
    /// that one. Fails as [`free`](Self::free) does.
    pub fn free_after(&self, blocks: &[BlockId], epoch: Epoch) -> Result<()> {
        let mut tracker = self.tracker.lock();
        if tracker.is_complete(epoch) {
            tracker.mark(blocks, Mark::Free)?;
            tracker.finish_free(blocks);
            self.give_back(tracker);
        } else {
            tracker.mark(blocks, Mark::Limbo)?;
            tracker.finish_limbo(blocks, epoch);
        }
        Ok(())
    }

    /// Tells that `epoch` and all before it are complete; returns how many blocks became free.
    pub fn advance(&self, epoch: Epoch) -> u32 {
        let mut tracker = self.tracker.lock();
        let n_freed = tracker.advance(epoch);
        self.give_back(tracker);
        n_freed
    }

    /// The largest number of blocks that [`alloc`](Self::alloc) would give now; asks the grants, never
    /// the device.
    pub fn available_blocks(&self) -> u32 {
        let tracker = self.tracker.lock();
        let n_on_pages = u64::from(self.pages.available_pages()) * u64::from(tracker.min_blocks_per_page());
        u32::try_from(u64::from(tracker.n_free()) + n_on_pages).unwrap_or(u32::MAX)
    }

    /// Which pages would be empty after at most `max_moves` blocks were moved to other pages.
    pub fn fragmentation(&self, max_moves: u32) -> Fragmentation {
        self.tracker.lock().fragmentation(max_moves)
    }

    /// Gives empty pages back, the one that is kept included; they are parked then.
    pub fn release_empty_pages(&self) {
        let mut tracker = self.tracker.lock();
        tracker.release_empty_pages(0);
        self.give_back(tracker);
    }

    /// Unmaps all pages without a block in use; returns how many.
    pub fn trim(&self) -> u32 {
        self.release_empty_pages();
        self.pages.trim_all()
    }

    /// Frees everything but the null block, limbo included: the caller knows that all of it is unused.
    pub fn reset(&self) {
        let mut tracker = self.tracker.lock();
        tracker.reset();
        self.give_back(tracker);
    }

    /// A consistent snapshot of the counts.
    pub fn counters(&self) -> BlockCounters {
        self.tracker.lock().counters()
    }

    /// Where blocks lie on pages.
    pub fn geometry(&self) -> &BlockGeometry {
        &self.geometry
    }

    /// The pages below.
    pub fn pages(&self) -> &Arc<PageAllocator> {
        &self.pages
    }

    #[cold]
    fn alloc_with_growth(
        &self,
        mut tracker: MutexGuard<'_, BlockTracker>,
        n_blocks: u32,
        blocks: &mut Vec<BlockId>,
    ) -> Result<BlocksOutcome> {
        loop {
            let n_missing = n_blocks.saturating_sub(tracker.n_free());
            if n_missing == 0 {
                tracker.take(n_blocks, blocks);
                // Pages may have more blocks than was reckoned with.
                tracker.release_empty_pages(1);
                self.give_back(tracker);
                return Ok(BlocksOutcome::Allocated);
            }
            let n_pages = n_missing.div_ceil(tracker.min_blocks_per_page());
            let mut pages = std::mem::take(&mut tracker.taken);
            let outcome = MutexGuard::unlocked(&mut tracker, || self.pages.alloc(n_pages, &mut pages));
            tracker.adopt(&pages);
            pages.clear();
            tracker.taken = pages;
            match outcome {
                Ok(PagesOutcome::Allocated) => {}
                // Another thread freed enough in the meantime.
                Ok(PagesOutcome::NoMemory(_)) if n_blocks <= tracker.n_free() => {}
                Ok(PagesOutcome::NoMemory(shortage)) => {
                    tracker.release_empty_pages(1);
                    self.give_back(tracker);
                    return Ok(BlocksOutcome::NoMemory(shortage));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Parks the pages that the tracker released. Parking is short, so it happens under the lock; unmapping
    /// what is beyond the limit is not, and comes after it.
    fn give_back(&self, mut tracker: MutexGuard<'_, BlockTracker>) {
        if tracker.released.is_empty() {
            return;
        }
        if let Err(error) = self.pages.park(&tracker.released) {
            tracing::error!(%error, "the trackers of blocks and pages differ");
        }
        tracker.released.clear();
        drop(tracker);
        self.pages.settle();
    }
}
