//! Allocations on pages of elastic memory, which the ledger grants and gets back.

use std::ops::Range;

use kvik_memory::blocks::BlocksOutcome;
use kvik_memory::config::MemoryConfig;
use kvik_memory::geometry::Geometry;
use kvik_memory::ledger::Member;
use kvik_memory::pages::Shortage;
use kvik_memory::pool::{KvPool, PoolOptions, PoolSettings};
use kvik_memory::region::Guard;
use kvik_memory::{BlockId, PageId};
use parking_lot::Mutex;

use super::space::{Begun, Freed, HeapSpace, Request};
use crate::backend::Backend;
use crate::signals::SignalsBlocked;
use crate::status::Failure;

/// Addresses for each byte of the device, so that runs of pages are found however they are fragmented.
const ADDRESSES_PER_BYTE: u64 = 4;

/// The most addresses of a heap, which leaves as many for everything else of the process.
const MAX_ADDRESS_BYTES: u64 = 1 << 46;

/// The most bytes that are mapped as one: the driver takes as long for them as for 2 MiB.
const MAX_EXTENT_BYTES: u64 = 16 << 20;

/// Allocations from this size on, which are weights rather than activations, are mapped by such extents. The pages of
/// others are mapped one by one: an extent stays mapped for one page that is used again, and counts for the limit.
const MIN_BYTES_FOR_EXTENTS: u64 = 64 << 20;

/// Allocations on pages of their own pool.
#[derive(Debug)]
pub(super) struct Elastic {
    pool: KvPool,
    page_bytes: u64,
    max_extent_pages: u32,
    /// Not held while pages are mapped or unmapped.
    space: Mutex<HeapSpace>,
}

impl Elastic {
    /// Reserves addresses; memory is taken with the first allocation.
    pub(super) fn open(
        backend: &Backend,
        member: Member,
        environment: &MemoryConfig,
        on_reclaim: impl Fn(u64) + Send + Sync + 'static,
    ) -> Result<Self, Failure> {
        let vmm = backend.vmm();
        let page_bytes = environment.page_bytes;
        let total_bytes = vmm.memory_info()?.total_bytes;
        let address_bytes = total_bytes.saturating_mul(ADDRESSES_PER_BYTE).min(MAX_ADDRESS_BYTES);
        let n_pages = u32::try_from(address_bytes / page_bytes).unwrap_or(u32::MAX).max(1);
        let options = PoolOptions {
            geometry: Geometry::try_new(1, page_bytes, n_pages)?,
            // What is freed faults as soon as its pages are unmapped.
            guard: Guard::None,
            settings: PoolSettings {
                // Allocations choose their pages, so none can be mapped ahead of them.
                is_preallocating: false,
                low_watermark_pages: 0,
                high_watermark_pages: environment.high_watermark_pages,
                trim_after: environment.trim_after,
                // The block of this pool is the page.
                ..PoolSettings::new(page_bytes)
            },
        };
        // The agent's thread does not belong to the engine.
        let signals_blocked = SignalsBlocked::new();
        let pool = KvPool::open(vmm, member, &options)?;
        drop(signals_blocked);
        pool.set_reclaim_callback(on_reclaim);
        let base_address = pool.region().map_or(0, |region| region.range().address);
        let space = Mutex::new(HeapSpace::new(base_address, page_bytes, n_pages));
        let max_extent_pages = (MAX_EXTENT_BYTES / page_bytes).max(1) as u32;
        Ok(Self { pool, page_bytes, max_extent_pages, space })
    }

    /// Takes memory; the address is aligned as asked.
    pub(super) fn allocate(&self, request: Request) -> Result<u64, Failure> {
        let begun = self.space.lock().begin(request);
        let pages = match begun {
            Begun::Placed(address) => return Ok(address),
            Begun::Full => return Err(Failure::shortage(Shortage::DeviceFull)),
            Begun::NeedsPages(pages) => pages,
        };
        match self.take_pages(&pages) {
            Ok(()) => Ok(self.space.lock().finish(request, pages)),
            Err(failure) => {
                self.space.lock().return_pages(pages);
                Err(failure)
            }
        }
    }

    /// Frees what starts at `address`; `false` where nothing does.
    pub(super) fn free(&self, address: u64) -> bool {
        let freed = self.space.lock().free(address);
        match freed {
            None => return false,
            Some(Freed::Gap) => {}
            Some(Freed::Pages(pages)) => {
                let blocks: Vec<BlockId> = pages.clone().map(BlockId).collect();
                match self.pool.free(&blocks) {
                    // Only now: the next owner of these pages takes them from the pool.
                    Ok(()) => self.space.lock().return_pages(pages),
                    Err(error) => tracing::error!(%error, "the heap and its pages differ"),
                }
            }
        }
        true
    }

    /// Unmaps pages without an allocation; returns how many bytes.
    pub(super) fn trim(&self) -> u64 {
        u64::from(self.pool.trim()) * self.page_bytes
    }

    /// Bytes of pages that have memory.
    pub(super) fn held_bytes(&self) -> u64 {
        self.pool.counters().held_bytes
    }

    /// Bytes that were asked for, and in how many allocations.
    pub(super) fn allocated(&self) -> (u64, u64) {
        let space = self.space.lock();
        (space.allocated_bytes(), space.n_allocations() as u64)
    }

    fn take_pages(&self, pages: &Range<u32>) -> Result<(), Failure> {
        let pages: Vec<PageId> = pages.clone().map(PageId).collect();
        let is_large = pages.len() as u64 * self.page_bytes >= MIN_BYTES_FOR_EXTENTS;
        let max_extent_pages = if is_large { self.max_extent_pages } else { 1 };
        match self.pool.alloc_pages_in_extents(&pages, max_extent_pages)? {
            BlocksOutcome::Allocated => Ok(()),
            BlocksOutcome::NoMemory(shortage) => Err(Failure::shortage(shortage)),
        }
    }
}
