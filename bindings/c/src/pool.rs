//! A pool as the C library has it: an engine's memory, wired to its device and its ledger.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvik_memory::BlockId;
use kvik_memory::blocks::BlocksOutcome;
use kvik_memory::geometry::{BlockGeometry, UNIT_BYTES};
use kvik_memory::ledger::LimitStatus;
use kvik_memory::pages::{Claim, GrantEvents as _, Grants as _, Shortage};
use parking_lot::Mutex;

use crate::backend::Backend;
use crate::block_pool::BlockPool;
use crate::chunks::Chunks;
use crate::grants::EngineGrants;
use crate::heap::Heap;
use crate::plan::Plan;
use crate::planes::Planes;
use crate::rank_region::RankServer;
use crate::reclaim::Reclaimer;
use crate::stats::kvik_stats;
use crate::status::{Failure, kvik_status};

mod opening;
#[cfg(test)]
mod tests;

/// The strings of a `kvik_config`.
#[derive(Debug, Default)]
pub(crate) struct Names {
    pub(crate) ipc_name: Option<String>,
    pub(crate) directory: Option<String>,
    pub(crate) label: Option<String>,
}

/// An open pool.
#[derive(Debug)]
pub(crate) struct Pool {
    /// Goes first: what the leader has mapped here is unmapped before the engine leaves the ledger.
    rank: Option<RankServer>,
    /// Goes before the grants: the agent ends and the pages are unmapped before the engine leaves the ledger.
    blocks: Arc<BlockPool>,
    grants: Arc<EngineGrants>,
    reclaimer: Arc<Reclaimer>,
    chunks: Chunks,
    chunk_bytes: AtomicU64,
    admitted_bytes: AtomicU64,
    heap: Heap,
    plan: Plan,
    block_geometry: BlockGeometry,
    base_address: u64,
    last_message: Mutex<Cow<'static, str>>,
    backend: Backend,
}

thread_local! {
    /// Block ids on their way between the allocator and the engine's array.
    static SCRATCH: RefCell<Vec<BlockId>> = const { RefCell::new(Vec::new()) };
}

impl Pool {
    /// Takes `n_blocks` blocks or none, and hands them to `receive`.
    pub(crate) fn alloc(&self, n_blocks: usize, receive: impl FnOnce(&[BlockId])) -> Result<(), Failure> {
        self.check_not_rank()?;
        self.blocks.poll();
        let n_all = self.block_geometry.n_blocks();
        let Some(n_blocks) = u32::try_from(n_blocks).ok().filter(|&n_blocks| n_blocks <= n_all) else {
            return Err(Failure::new(kvik_status::KVIK_NO_MEMORY, "the pool does not have so many blocks"));
        };
        with_scratch(n_blocks as usize, |blocks| {
            let mut outcome = self.blocks.pool.alloc(n_blocks, blocks)?;
            // Idle pages of the heap are under the same limit.
            if outcome != BlocksOutcome::Allocated && self.heap.trim() > 0 {
                outcome = self.blocks.pool.alloc(n_blocks, blocks)?;
            }
            match outcome {
                BlocksOutcome::Allocated => {
                    receive(blocks);
                    Ok(())
                }
                BlocksOutcome::NoMemory(shortage) => Err(Failure::shortage(shortage)),
            }
        })
    }

    /// Takes `n_bytes` at a multiple of `alignment`; returns the address.
    pub(crate) fn allocate(&self, n_bytes: u64, alignment: u64) -> Result<u64, Failure> {
        let allocate = || {
            let reclaimer = Arc::clone(&self.reclaimer);
            let on_reclaim = move |n_bytes| reclaimer.call(n_bytes);
            self.heap.allocate(n_bytes, alignment, &self.backend, self.grants.member(), on_reclaim)
        };
        match allocate() {
            Err(failure) if failure.status == kvik_status::KVIK_NO_MEMORY && self.blocks.pool.trim() > 0 => {
                allocate()
            }
            outcome => outcome,
        }
    }

    /// Frees what [`allocate`](Self::allocate) gave.
    pub(crate) fn free_allocation(&self, address: usize) -> Result<(), Failure> {
        self.heap.free(address as u64, &self.backend)
    }

    /// Whether allocations come from the device's own allocator, from the next one on.
    pub(crate) fn set_bypass(&self, is_bypassed: bool) {
        self.heap.set_bypass(is_bypassed);
    }

    /// Frees blocks, all or none; with a fence of `event` where it is not over yet.
    ///
    /// # Safety
    ///
    /// On CUDA `event` is NULL or an event of the device that is alive during the call.
    pub(crate) unsafe fn free_after(
        &self,
        n_blocks: usize,
        blocks_of_caller: impl Iterator<Item = Result<BlockId, Failure>>,
        event: *mut c_void,
    ) -> Result<(), Failure> {
        self.check_not_rank()?;
        self.blocks.poll();
        // More than there are must have some twice; do not take memory to find out which.
        if n_blocks > self.block_geometry.n_blocks() as usize {
            return Err(Failure::new(
                kvik_status::KVIK_ERROR_NOT_ALLOCATED,
                format!("free {n_blocks} blocks: the pool does not have so many"),
            ));
        }
        with_scratch(n_blocks, |blocks| {
            for block in blocks_of_caller {
                blocks.push(block?);
            }
            // SAFETY: the caller promised that the event is alive.
            match unsafe { self.backend.fence_after(event) }? {
                None => Ok(self.blocks.pool.free(blocks)?),
                Some(fence) => {
                    self.blocks.free_after(blocks, fence)?;
                    self.grants.interrupt();
                    Ok(())
                }
            }
        })
    }

    /// The block whose first byte in the first buffer is at `address`.
    pub(crate) fn block_starting_at(&self, address: usize) -> Result<BlockId, Failure> {
        let block = self.block_containing(address)?;
        if self.address_of(block)? == address as u64 {
            return Ok(block);
        }
        Err(not_a_block(address))
    }

    /// The block that has `address` in its part of the first buffer.
    pub(crate) fn block_containing(&self, address: usize) -> Result<BlockId, Failure> {
        let geometry = &self.block_geometry;
        (address as u64)
            .checked_sub(self.base_address)
            .map(|offset_bytes| offset_bytes / self.plan.block_bytes)
            .and_then(|index| u32::try_from(index).ok())
            .map(BlockId)
            .filter(|&block| self.plan.has_blocks && geometry.page_of_block(block).is_some())
            .ok_or_else(|| not_a_block(address))
    }

    /// Where `block` starts in the first buffer.
    pub(crate) fn address_of(&self, block: BlockId) -> Result<u64, Failure> {
        let geometry = &self.block_geometry;
        if !self.plan.has_blocks || geometry.page_of_block(block).is_none() {
            return Err(Failure::invalid(format!(
                "block {block}: it is out of range, or lies on the border of two pages"
            )));
        }
        Ok(self.base_address + geometry.offset_bytes(block))
    }

    /// The first address; zero where the pool has no blocks.
    pub(crate) fn base_address(&self) -> u64 {
        if self.plan.has_blocks { self.base_address } else { 0 }
    }

    pub(crate) fn block_bytes(&self) -> u64 {
        self.plan.block_bytes
    }

    /// Where K and V of each layer lie in a block.
    pub(crate) fn planes(&self, n_layers: u32, has_values: bool) -> Result<Planes, Failure> {
        Planes::try_new(&self.plan.geometry, self.plan.block_bytes, n_layers, has_values)
    }

    pub(crate) fn stats(&self) -> kvik_stats {
        self.blocks.poll();
        let counters = self.blocks.pool.counters();
        let geometry = &self.plan.geometry;
        let chunk_bytes = self.chunk_bytes.load(Ordering::Relaxed);
        let admitted_bytes = self.admitted_bytes.load(Ordering::Relaxed);
        let n_blocks = if self.plan.has_blocks { self.block_geometry.n_blocks() } else { 0 };
        let heap = self.heap.usage();
        let rank_bytes = self.rank.as_ref().map_or(0, RankServer::held_bytes);
        let beside_bytes = [admitted_bytes, heap.held_bytes, rank_bytes]
            .iter()
            .fold(chunk_bytes, |sum, n_bytes| sum.saturating_add(*n_bytes));
        kvik_stats {
            size: size_of::<kvik_stats>(),
            block_bytes: self.plan.block_bytes,
            page_bytes: geometry.page_bytes(),
            buffer_stride_bytes: geometry.buffer_stride_bytes(),
            n_blocks: n_blocks.into(),
            n_used_blocks: counters.blocks.n_used.into(),
            n_limbo_blocks: counters.blocks.n_limbo.into(),
            n_available_blocks: self.blocks.pool.available_blocks().into(),
            n_used_pages: counters.pages.n_used.into(),
            n_parked_pages: counters.pages.n_parked.into(),
            n_quarantined_pages: counters.pages.n_quarantined.into(),
            held_bytes: counters.held_bytes.saturating_add(beside_bytes),
            chunk_bytes,
            admitted_bytes,
            // The heap is another member, so its memory is not part of what this one may hold.
            claimable_bytes: self.grants.member().claimable_bytes().saturating_add(heap.held_bytes),
            limit_bytes: self.grants.member().limit_bytes(),
            n_map_calls: counters.pages.n_map_calls,
            n_unmap_calls: counters.pages.n_unmap_calls,
            heap_bytes: heap.held_bytes,
            allocated_bytes: heap.allocated_bytes,
            bypassed_bytes: heap.bypassed_bytes,
            n_allocations: heap.n_allocations,
        }
    }

    /// Sets the limit of the group.
    pub(crate) fn set_limit(&self, limit_bytes: Option<u64>, revision: Option<u64>) -> Result<(), Failure> {
        let member = self.grants.member();
        let change = member.ledger().set_limit(member.ipc_name(), limit_bytes, revision)?;
        match change.status {
            LimitStatus::Applied | LimitStatus::Deferred => Ok(()),
            LimitStatus::Stale => Err(Failure::new(
                kvik_status::KVIK_STALE,
                format!("revision {} is in force", change.revision),
            )),
            LimitStatus::Conflict => Err(Failure::invalid("this revision has another limit")),
            LimitStatus::Rejected => Err(Failure::invalid("the limit is below the group's minimum")),
            LimitStatus::Unavailable => {
                Err(Failure::new(kvik_status::KVIK_ERROR_LEDGER, "the ledger does not have the group"))
            }
        }
    }

    pub(crate) fn reclaimer(&self) -> &Reclaimer {
        &self.reclaimer
    }

    /// Gives back what no block and no allocation lies on; returns how many bytes.
    pub(crate) fn trim(&self) -> u64 {
        self.blocks.poll();
        u64::from(self.blocks.pool.trim()) * self.plan.geometry.page_cost_bytes() + self.heap.trim()
    }

    /// Creates `n_chunks` chunks or none; returns what the engine calls them.
    pub(crate) fn acquire_chunks(&self, n_chunks: usize) -> Result<Vec<u64>, Failure> {
        let chunk_bytes = self.plan.geometry.page_bytes();
        let Some(n_bytes) = chunk_bytes.checked_mul(n_chunks as u64) else {
            return Err(Failure::shortage(Shortage::DeviceFull));
        };
        self.claim_beside(n_bytes)?;
        self.chunk_bytes.fetch_add(n_bytes, Ordering::Relaxed);
        self.chunks.create(&self.backend, chunk_bytes, n_chunks).map_err(|unmade| {
            self.give_back_chunks(n_bytes - unmade.n_stuck * chunk_bytes);
            unmade.failure
        })
    }

    /// Releases chunks; those before one that the device does not release are gone nevertheless.
    pub(crate) fn release_chunks(&self, numbers: &[u64]) -> Result<(), Failure> {
        let (n_released, result) = self.chunks.release(&self.backend, numbers);
        self.give_back_chunks(n_released * self.plan.geometry.page_bytes());
        result
    }

    /// Has `n_bytes` granted that the engine creates by itself.
    pub(crate) fn admit(&self, n_bytes: u64) -> Result<(), Failure> {
        let n_bytes = whole_units(n_bytes);
        self.claim_beside(n_bytes)?;
        self.admitted_bytes.fetch_add(n_bytes, Ordering::AcqRel);
        Ok(())
    }

    /// Gives back what was admitted.
    pub(crate) fn retire(&self, n_bytes: u64) -> Result<(), Failure> {
        let n_bytes = whole_units(n_bytes);
        let less = |admitted_bytes: u64| admitted_bytes.checked_sub(n_bytes);
        match self.admitted_bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, less) {
            Ok(_) => {
                self.grants.give_back_beside(n_bytes);
                Ok(())
            }
            Err(admitted_bytes) => Err(Failure::new(
                kvik_status::KVIK_ERROR_NOT_ALLOCATED,
                format!("retire {n_bytes} bytes: {admitted_bytes} are admitted"),
            )),
        }
    }

    /// Keeps the words of the handle's last failure.
    pub(crate) fn remember(&self, message: Cow<'static, str>) {
        *self.last_message.lock() = message;
    }

    pub(crate) fn last_message(&self) -> Cow<'static, str> {
        self.last_message.lock().clone()
    }

    /// Fails where the blocks are the leader's.
    fn check_not_rank(&self) -> Result<(), Failure> {
        if self.rank.is_none() {
            return Ok(());
        }
        Err(Failure::invalid("the blocks of a rank are its leader's: allocate and free them there"))
    }

    /// Claims memory beside the pages, and gives idle pages up for it.
    fn claim_beside(&self, n_bytes: u64) -> Result<(), Failure> {
        let mut claim = self.grants.claim_beside(n_bytes)?;
        if claim != Claim::Granted && self.trim() > 0 {
            claim = self.grants.claim_beside(n_bytes)?;
        }
        match claim {
            Claim::Granted => Ok(()),
            Claim::Denied(shortage) => Err(Failure::shortage(shortage)),
        }
    }

    fn give_back_chunks(&self, n_bytes: u64) {
        if n_bytes > 0 {
            self.chunk_bytes.fetch_sub(n_bytes, Ordering::Relaxed);
            self.grants.give_back_beside(n_bytes);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.grants.detach();
        // Blocks in limbo are about to be unmapped.
        if self.blocks.has_pending()
            && let Err(error) = self.backend.vmm().synchronize()
        {
            tracing::warn!(%error, "cannot wait for the device on close");
        }
        self.chunks.release_all(&self.backend);
        self.heap.close(&self.backend);
    }
}

/// The ledger counts in units; the last one is granted as a whole.
fn whole_units(n_bytes: u64) -> u64 {
    n_bytes.checked_next_multiple_of(UNIT_BYTES).unwrap_or(u64::MAX / UNIT_BYTES * UNIT_BYTES)
}

fn not_a_block(address: usize) -> Failure {
    Failure::new(kvik_status::KVIK_ERROR_NOT_ALLOCATED, format!("no block of this pool is at {address:#x}"))
}

/// Runs `work` with an empty list that has room for `n_blocks`.
fn with_scratch<T>(
    n_blocks: usize,
    work: impl FnOnce(&mut Vec<BlockId>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    SCRATCH.with_borrow_mut(|blocks| {
        blocks.clear();
        blocks.try_reserve(n_blocks).map_err(|_| Failure::no_heap())?;
        work(blocks)
    })
}
