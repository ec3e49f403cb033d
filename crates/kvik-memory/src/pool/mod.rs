//! One engine's KV memory: blocks, pages, grants and region wired together, with an agent thread.
//!
//! The engine calls [`KvPool`] from its own threads; the agent does what must not wait for the engine: it
//! keeps pages ready, gives back what lies idle, and obeys limits and requests of others also while the
//! engine sleeps.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use self::waiters::Waiters;
use crate::blocks::{BlockAllocator, BlockCounters, BlocksOutcome, Epoch, Fragmentation};
use crate::geometry::{BlockGeometry, BlockId, PageId};
use crate::pages::{
    GrantEvents, Grants, PageAllocator, PageCounters, PageMapper, PageObserver, PageSettings, Shortage,
};
use crate::region::Region;
use crate::{MemoryError, Result};

mod agent;
mod open;
mod overhead;
mod waiters;

#[cfg(test)]
mod tests;

pub use open::PoolOptions;

/// How often a waiter for memory asks again, so that the ledger knows that it still waits.
///
/// It forgets after a second.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(250);

/// How a pool keeps its memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSettings {
    /// Bytes of a block in one buffer.
    pub block_bytes: u64,
    /// Whether block 0 is taken for good before anything else; no by default.
    pub has_null_block: bool,
    /// Whether the agent keeps `low_watermark_pages` ready; yes by default. Limits and requests are
    /// obeyed either way.
    pub is_preallocating: bool,
    /// Parked pages that are kept ready; 5 by default.
    pub low_watermark_pages: u32,
    /// Parked pages above which the agent trims; 10 by default.
    pub high_watermark_pages: u32,
    /// How long pages above the high watermark must lie idle; 1 s by default.
    pub trim_after: Duration,
    /// The most pages to hold; by default as many as the reservation has.
    pub limit_pages: Option<u32>,
}

/// What a pool is made of.
#[derive(Debug)]
pub struct PoolParts {
    /// Maps the pages.
    pub mapper: Arc<dyn PageMapper>,
    /// Grants the memory; usually the same object as `events`.
    pub grants: Arc<dyn Grants>,
    /// Tells what others want of it.
    pub events: Arc<dyn GrantEvents>,
    /// Sees the states of pages.
    pub observer: Option<Arc<dyn PageObserver>>,
}

/// Called with the bytes that the engine is asked to free; see [`KvPool::set_reclaim_callback`].
pub type ReclaimCallback = dyn Fn(u64) + Send + Sync;

/// Counts of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolCounters {
    /// Of blocks.
    pub blocks: BlockCounters,
    /// Of pages.
    pub pages: PageCounters,
    /// Bytes that are held.
    pub held_bytes: u64,
    /// Bytes that may be held now.
    pub claimable_bytes: u64,
    /// Bytes that may be held if all others gave back what they can.
    pub limit_bytes: u64,
}

/// One engine's KV memory.
///
/// Shared between threads. Dropping it ends the agent, unmaps everything and gives the grants back; a copy
/// in a forked child has no part in any of this and must not be used.
#[derive(Debug)]
pub struct KvPool {
    /// Comes before `shared`: the region goes with the allocators there, and after it the grants.
    region: Option<Arc<Region>>,
    shared: Arc<Shared>,
    agent: Option<JoinHandle<()>>,
    /// Which process may release the memory: not a forked child.
    owner_pid: u32,
}

/// What the engine's threads and the agent share.
pub(crate) struct Shared {
    blocks: BlockAllocator,
    grants: Arc<dyn Grants>,
    events: Arc<dyn GrantEvents>,
    settings: PoolSettings,
    waiters: Waiters,
    on_reclaim: Mutex<Option<Arc<ReclaimCallback>>>,
    is_stopping: AtomicBool,
    /// Whether the agent was woken and did not look yet.
    is_poked: AtomicBool,
    /// Whether the agent wants to know of pages that are freed: a claim waits for them.
    wants_freed_pages: AtomicBool,
    /// Whether preparing pages has a chance: it is in vain after a denial until something moves.
    can_prepare: AtomicBool,
}

impl PoolSettings {
    /// The defaults, for blocks of `block_bytes`.
    pub fn new(block_bytes: u64) -> Self {
        Self {
            block_bytes,
            has_null_block: false,
            is_preallocating: true,
            low_watermark_pages: 5,
            high_watermark_pages: 10,
            trim_after: Duration::from_secs(1),
            limit_pages: None,
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Shared")
            .field("blocks", &self.blocks)
            .field("grants", &self.grants)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

impl KvPool {
    /// Makes a pool of its parts and starts the agent.
    ///
    /// The null block is taken before any page is prepared. Fails where the geometry does not hold the
    /// blocks, where there is no memory for the null block, or where no thread can be started.
    pub fn start(parts: PoolParts, settings: PoolSettings) -> Result<Self> {
        Self::start_on(parts, settings, None)
    }

    pub(crate) fn start_on(
        parts: PoolParts,
        settings: PoolSettings,
        region: Option<Arc<Region>>,
    ) -> Result<Self> {
        let geometry = BlockGeometry::try_new(parts.mapper.geometry(), settings.block_bytes)?;
        let page_settings = PageSettings {
            limit_pages: settings.limit_pages,
            low_watermark_pages: settings.low_watermark_pages,
            high_watermark_pages: settings.high_watermark_pages,
        };
        let pages = PageAllocator::try_new(parts.mapper, Arc::clone(&parts.grants), page_settings)?;
        if let Some(observer) = parts.observer {
            pages.set_observer(observer);
        }
        let blocks = BlockAllocator::try_new(Arc::new(pages), geometry)?;
        if settings.has_null_block
            && let BlocksOutcome::NoMemory(shortage) = blocks.reserve_null_block()?
        {
            return Err(MemoryError::Invalid {
                field: "limit",
                value: format!("too low ({shortage:?})"),
                allowed: format!("{} bytes or more, for the null block", blocks.pages().page_cost_bytes()),
            });
        }
        let shared = Arc::new(Shared {
            blocks,
            grants: parts.grants,
            events: parts.events,
            settings,
            waiters: Waiters::default(),
            on_reclaim: Mutex::new(None),
            is_stopping: AtomicBool::new(false),
            is_poked: AtomicBool::new(false),
            wants_freed_pages: AtomicBool::new(false),
            can_prepare: AtomicBool::new(true),
        });
        let agent = thread::Builder::new()
            .name("kvik-memory".to_owned())
            .spawn({
                let shared = Arc::clone(&shared);
                move || agent::run(&shared)
            })
            .map_err(|error| MemoryError::Device { call: "start thread", reason: error.to_string() })?;
        Ok(Self { shared, agent: Some(agent), owner_pid: std::process::id(), region })
    }

    /// Appends `n_blocks` blocks to `blocks`, or none; see [`BlockAllocator::alloc`].
    pub fn alloc(&self, n_blocks: u32, blocks: &mut Vec<BlockId>) -> Result<BlocksOutcome> {
        let outcome = self.shared.blocks.alloc(n_blocks, blocks);
        self.shared.after_alloc();
        outcome
    }

    /// Like [`alloc`](Self::alloc), but waits until `deadline` for others to give memory back.
    ///
    /// The thread sleeps until blocks of this pool are freed, or the ledger reports memory or a new
    /// limit; meanwhile the ledger counts the pool as waiting.
    pub fn alloc_wait(
        &self,
        n_blocks: u32,
        deadline: Instant,
        blocks: &mut Vec<BlockId>,
    ) -> Result<BlocksOutcome> {
        let mut refused = Shortage::DeviceFull;
        let answer = self.wait_for(deadline, || match self.alloc(n_blocks, blocks) {
            Ok(BlocksOutcome::NoMemory(shortage)) => {
                refused = shortage;
                None
            }
            answer => Some(answer),
        });
        answer.unwrap_or_else(|| {
            self.stop_waiting();
            Ok(BlocksOutcome::NoMemory(refused))
        })
    }

    /// Calls `attempt` until it returns something, and a last time at `deadline`.
    ///
    /// Between two calls the thread sleeps until blocks of this pool are freed, the ledger reports memory or a new limit, or
    /// [`wake`](Self::wake) is called; it calls four times a second in any case, so that the ledger knows that it still waits.
    pub fn wait_for<T>(&self, deadline: Instant, mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
        let mut waiter = self.shared.waiters.join();
        loop {
            if let Some(answer) = attempt() {
                return Some(answer);
            }
            if Instant::now() >= deadline {
                return None;
            }
            waiter.wait(deadline.min(Instant::now() + ASK_AGAIN_AFTER));
        }
    }

    /// Lets all threads that wait for memory try again at once.
    pub fn wake(&self) {
        self.shared.waiters.notify();
    }

    /// Tells that what was refused last is not waited for any more, so that nothing is kept for it.
    pub fn stop_waiting(&self) {
        self.shared.grants.stop_waiting();
    }

    /// Tells that the owner can do nothing until what was refused last is there; see [`Grants::note_starved`].
    pub fn note_starved(&self) {
        self.shared.grants.note_starved();
    }

    /// Takes all blocks of `pages` themselves, or of none; see [`BlockAllocator::alloc_pages`].
    pub fn alloc_pages(&self, pages: &[PageId]) -> Result<BlocksOutcome> {
        let outcome = self.shared.blocks.alloc_pages(pages);
        self.shared.after_alloc();
        outcome
    }

    /// Takes all blocks of `pages` themselves, which come back together; see [`BlockAllocator::alloc_pages_in_extents`].
    pub fn alloc_pages_in_extents(&self, pages: &[PageId], max_extent_pages: u32) -> Result<BlocksOutcome> {
        let outcome = self.shared.blocks.alloc_pages_in_extents(pages, max_extent_pages);
        self.shared.after_alloc();
        outcome
    }

    /// Frees `blocks`; see [`BlockAllocator::free`].
    pub fn free(&self, blocks: &[BlockId]) -> Result<()> {
        let outcome = self.shared.blocks.free(blocks);
        self.shared.after_free();
        outcome
    }

    /// Frees `blocks` when `epoch` is complete; see [`BlockAllocator::free_after`].
    pub fn free_after(&self, blocks: &[BlockId], epoch: Epoch) -> Result<()> {
        let outcome = self.shared.blocks.free_after(blocks, epoch);
        self.shared.after_free();
        outcome
    }

    /// Tells that `epoch` is complete; returns how many blocks became free.
    pub fn advance(&self, epoch: Epoch) -> u32 {
        let n_freed = self.shared.blocks.advance(epoch);
        if n_freed > 0 {
            self.shared.after_free();
        }
        n_freed
    }

    /// The largest number of blocks that [`alloc`](Self::alloc) would give now.
    pub fn available_blocks(&self) -> u32 {
        self.shared.blocks.available_blocks()
    }

    /// Moves this pool's own limit; what is parked beyond it is unmapped before this returns.
    pub fn resize(&self, limit_pages: u32) {
        let pages = self.shared.blocks.pages();
        pages.resize(limit_pages);
        if pages.counters().n_used > limit_pages {
            self.shared.blocks.release_empty_pages();
        }
        self.shared.can_prepare.store(true, Ordering::Relaxed);
        self.shared.waiters.notify();
    }

    /// Unmaps all pages without a block in use; returns how many.
    pub fn trim(&self) -> u32 {
        self.shared.blocks.trim()
    }

    /// Frees everything but the null block: the caller knows that all of it is unused.
    pub fn reset(&self) {
        self.shared.blocks.reset();
        self.shared.after_free();
    }

    /// Which pages would be empty after at most `max_moves` blocks were moved.
    pub fn fragmentation(&self, max_moves: u32) -> Fragmentation {
        self.shared.blocks.fragmentation(max_moves)
    }

    /// Sets what is called, by the agent, when parked pages are not enough for what others are entitled
    /// to: the engine frees as much as it can of the bytes named, now or later.
    ///
    /// The callback may free blocks; it must not wait for memory.
    pub fn set_reclaim_callback(&self, callback: impl Fn(u64) + Send + Sync + 'static) {
        *self.shared.on_reclaim.lock() = Some(Arc::new(callback));
    }

    /// The counts of now.
    pub fn counters(&self) -> PoolCounters {
        PoolCounters {
            blocks: self.shared.blocks.counters(),
            pages: self.shared.blocks.pages().counters(),
            held_bytes: self.shared.blocks.pages().held_bytes(),
            claimable_bytes: self.shared.grants.claimable_bytes(),
            limit_bytes: self.shared.grants.limit_bytes(),
        }
    }

    /// Where blocks lie on pages.
    pub fn block_geometry(&self) -> &BlockGeometry {
        self.shared.blocks.geometry()
    }

    /// The addresses behind the pool, if it was [opened](Self::open) on a device.
    pub fn region(&self) -> Option<&Region> {
        self.region.as_deref()
    }
}

impl Drop for KvPool {
    fn drop(&mut self) {
        let agent = self.agent.take();
        if self.owner_pid != std::process::id() {
            // A forked child has no agent, and the memory behind the region is its parent's: releasing it
            // here would take it from the parent too.
            std::mem::forget((agent, Arc::clone(&self.shared), self.region.clone()));
            return;
        }
        // Sequentially consistent, so that the agent sees it after the interrupt.
        self.shared.is_stopping.store(true, Ordering::SeqCst);
        self.shared.events.interrupt();
        // The agent itself may drop the last handle, in the engine's callback. Its panics were printed when
        // they happened.
        if let Some(agent) = agent.filter(|agent| agent.thread().id() != thread::current().id()) {
            let _ = agent.join();
        }
    }
}

impl Shared {
    /// Wakes the agent where pages should be prepared.
    fn after_alloc(&self) {
        let is_low = self.blocks.pages().n_parked_hint() < self.settings.low_watermark_pages;
        // The flags only save wakeups: the agent looks at the pages themselves.
        if is_low && self.settings.is_preallocating && self.can_prepare.load(Ordering::Relaxed) {
            self.poke();
        }
    }

    /// Wakes waiters for blocks, and the agent where others wait for pages.
    fn after_free(&self) {
        self.waiters.notify();
        // Set by the agent before it looked at the pages last; a free that it did not see comes after.
        if self.wants_freed_pages.load(Ordering::SeqCst) {
            self.poke();
        }
    }

    fn poke(&self) {
        if !self.is_poked.swap(true, Ordering::SeqCst) {
            self.events.interrupt();
        }
    }
}
