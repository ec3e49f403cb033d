//! Blocks on memory that engines of one host share.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvik_memory::blocks::BlocksOutcome;
use kvik_memory::geometry::{self, Geometry};
use kvik_memory::ledger::{JoinOptions, Ledger, LedgerOptions, Member, Policy};
use kvik_memory::pages::{Claim, Grants, Usage};
use kvik_memory::pool::{KvPool, PoolOptions, PoolSettings};
use kvik_memory::region::Guard;
use kvik_memory::vmm::Vmm;
use kvik_memory::vmm::host::{HostDevice, HostVmm};
use parking_lot::Mutex;

use super::{BlockMemory, Need};
use crate::error::{ModelError, Result};
use crate::paging::BlockId;

/// The memory that engines with one name share.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoryGroup {
    /// The name: engines of one host that say the same share one limit.
    pub ipc_name: String,
    /// What the engine calls itself, for tools.
    pub label: String,
    /// The most bytes that the group may hold; `None` for all that the device has.
    pub limit_bytes: Option<u64>,
    /// Bytes of the device, if its ledger was not opened before.
    pub device_bytes: u64,
    /// Bytes of a page in one layer, a multiple of 2 MiB; `None` for the smallest that holds sixteen blocks
    /// well.
    pub page_bytes: Option<u64>,
    /// Whether pages are kept ready beyond those in use.
    pub is_preallocating: bool,
    /// The folder of the ledger's files.
    pub dir: PathBuf,
}

/// Blocks of an engine on the host's shared memory.
#[derive(Debug)]
pub struct ElasticMemory {
    pool: Arc<KvPool>,
    capacity_blocks: usize,
    blocks_per_page: usize,
    page_cost_bytes: u64,
    grants: Arc<CacheGrants>,
    asks: Arc<Asks>,
    /// Whether the last blocks that were required were not all there. Idle pages do not count as such then:
    /// they are a part of what is needed.
    is_waiting: bool,
    /// Whether the engine can compute nothing until these are there. It then takes all or nothing: with a part of them it
    /// can do no more, and another engine might.
    is_starved: bool,
    idle_bytes: u64,
    /// Blocks that were taken and not given back.
    n_taken: usize,
    buffer: Vec<geometry::BlockId>,
}

/// An engine's grants, of which what only its cache is on counts as parked: an engine that needs memory
/// comes before one that has none but remembers.
#[derive(Debug)]
struct CacheGrants {
    member: Arc<Member>,
    published: Mutex<Published>,
}

/// What was published last to tools and other engines.
#[derive(Debug, Default)]
struct Published {
    /// As the pool sees it, to which every block of the cache is used.
    usage: Usage,
    idle_bytes: u64,
}

/// What others asked for and was not answered yet.
struct Asks {
    /// What the engine may use afterwards: unlike a number of bytes to give back, it stays right when the same is
    /// asked twice or some of it went back in the meantime. What is held does not count: a free page that was mapped together
    /// with a used one goes back only with that.
    target_bytes: AtomicU64,
    waker: Mutex<Option<Arc<dyn Fn() + Send + Sync>>>,
}

impl std::fmt::Debug for Asks {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Asks").field("target_bytes", &self.target_bytes).finish_non_exhaustive()
    }
}

impl CacheGrants {
    /// Tells how much of what is used is only the cache.
    fn set_idle_bytes(&self, idle_bytes: u64) {
        let mut published = self.published.lock();
        published.idle_bytes = idle_bytes;
        self.member.publish(published.visible());
    }
}

impl Grants for CacheGrants {
    fn claim(&self, n_bytes: u64) -> kvik_memory::Result<Claim> {
        self.member.claim(n_bytes)
    }

    fn give_back(&self, n_bytes: u64) {
        self.member.give_back(n_bytes);
    }

    fn claimable_bytes(&self) -> u64 {
        self.member.claimable_bytes()
    }

    fn limit_bytes(&self) -> u64 {
        self.member.limit_bytes()
    }

    fn publish(&self, usage: Usage) {
        let mut published = self.published.lock();
        published.usage = usage;
        self.member.publish(published.visible());
    }

    fn note_starved(&self) {
        self.member.note_starved();
    }

    fn stop_waiting(&self) {
        self.member.stop_waiting();
    }
}

impl Published {
    fn visible(&self) -> Usage {
        // The two numbers are of two moments: pages may be gone that still count as idle.
        let idle_bytes = self.idle_bytes.min(self.usage.used_bytes);
        Usage {
            used_bytes: self.usage.used_bytes - idle_bytes,
            parked_bytes: self.usage.parked_bytes.saturating_add(idle_bytes),
        }
    }
}

impl ElasticMemory {
    /// Joins `group` with room for at least `n_blocks` blocks of `block_bytes` in each of `n_layers` layers.
    ///
    /// # Errors
    /// If the ledger cannot be joined or the addresses cannot be reserved.
    pub(crate) fn open(
        group: &MemoryGroup,
        n_layers: usize,
        block_bytes: usize,
        n_blocks: usize,
    ) -> Result<Self> {
        let host = |region_bytes| {
            let vmm = HostVmm::open(HostDevice::new(region_bytes));
            vmm.map(|vmm| Arc::new(vmm) as Arc<dyn Vmm>)
        };
        Self::open_with(host, group, n_layers, block_bytes, n_blocks)
    }

    /// As [`ElasticMemory::open`], in the memory of the device of `vmm`.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn open_on(
        vmm: Arc<dyn Vmm>,
        group: &MemoryGroup,
        n_layers: usize,
        block_bytes: usize,
        n_blocks: usize,
    ) -> Result<Self> {
        Self::open_with(|_| Ok(vmm), group, n_layers, block_bytes, n_blocks)
    }

    fn open_with(
        device: impl FnOnce(u64) -> kvik_memory::Result<Arc<dyn Vmm>>,
        group: &MemoryGroup,
        n_layers: usize,
        block_bytes: usize,
        n_blocks: usize,
    ) -> Result<Self> {
        let memory_error = |error: kvik_memory::MemoryError| ModelError::Memory(Box::new(error));
        let page_bytes = group.page_bytes.unwrap_or_else(|| page_bytes_for(block_bytes as u64));
        if page_bytes < 2 * block_bytes as u64 && page_bytes != block_bytes as u64 {
            // Of a page that blocks straddle, less than one would be left.
            let allowed = format!("at least {} bytes, two blocks of a layer", 2 * block_bytes);
            return Err(ModelError::request("page size", page_bytes, allowed));
        }
        // A block that straddles two pages is not used, so a page has one block less than fits.
        let blocks_per_page = (page_bytes / block_bytes as u64).max(1) as usize;
        let usable =
            if page_bytes.is_multiple_of(block_bytes as u64) { blocks_per_page } else { blocks_per_page - 1 };
        let n_pages = u32::try_from(n_blocks.div_ceil(usable.max(1))).unwrap_or(u32::MAX);
        let n_layers = u32::try_from(n_layers).unwrap_or(u32::MAX);
        let geometry = Geometry::try_new(n_layers, page_bytes, n_pages).map_err(memory_error)?;
        let vmm = device(geometry.region_bytes()).map_err(memory_error)?;
        let ledger = Ledger::open(&LedgerOptions {
            dir: group.dir.clone(),
            budget_bytes: Some(group.device_bytes),
            ..LedgerOptions::new(vmm.device_name())
        })
        .map_err(memory_error)?;
        let policy = Policy { max_bytes: group.limit_bytes, ..Policy::default() };
        let options = JoinOptions { policy, ..JoinOptions::new(&*group.ipc_name, &*group.label) };
        let member = ledger.join(&options).map_err(memory_error)?;
        let settings = PoolSettings::new(block_bytes as u64);
        let settings = if group.is_preallocating {
            settings
        } else {
            // An engine that does nothing holds nothing.
            PoolSettings {
                is_preallocating: false,
                low_watermark_pages: 0,
                high_watermark_pages: 0,
                ..settings
            }
        };
        let options = PoolOptions { geometry, guard: Guard::Zero, settings };
        let states = member.create_page_states(geometry.capacity_pages(), geometry.page_cost_bytes());
        let states = Arc::new(states.map_err(memory_error)?);
        let member = Arc::new(member);
        let grants = Arc::new(CacheGrants { member: Arc::clone(&member), published: Mutex::default() });
        let pool = KvPool::open_with(vmm, grants.clone(), member, Some(states), &options);
        let pool = Arc::new(pool.map_err(memory_error)?);
        let page_cost_bytes = geometry.page_cost_bytes();
        let asks = Arc::new(Asks { target_bytes: AtomicU64::new(u64::MAX), waker: Mutex::new(None) });
        pool.set_reclaim_callback({
            let asks = Arc::clone(&asks);
            // Weak: the pool owns this.
            let pool = Arc::downgrade(&pool);
            move |n_bytes| {
                let Some(pool) = pool.upgrade() else { return };
                let target_bytes = u64::from(pool.counters().pages.n_used)
                    .saturating_mul(page_cost_bytes)
                    .saturating_sub(n_bytes);
                asks.target_bytes.fetch_min(target_bytes, Ordering::SeqCst);
                let waker = asks.waker.lock().clone();
                if let Some(waker) = waker {
                    waker();
                }
            }
        });
        let capacity_blocks = pool.block_geometry().n_blocks() as usize;
        Ok(Self {
            pool,
            capacity_blocks,
            blocks_per_page: usable.max(1),
            page_cost_bytes: geometry.page_cost_bytes(),
            grants,
            asks,
            is_waiting: false,
            is_starved: false,
            idle_bytes: 0,
            n_taken: 0,
            buffer: Vec::new(),
        })
    }

    /// The pool below, for the reader and writer of the blocks.
    pub(crate) fn pool(&self) -> &Arc<KvPool> {
        &self.pool
    }

    /// Adds pages to `buffer` until it has `n_blocks`; returns how many are not there.
    ///
    /// A whole page even for one block, so that a pool does not grow for every block, and one page at a time:
    /// pages that were taken together would go back only together.
    fn take_pages(&mut self, n_blocks: usize) -> usize {
        while self.buffer.len() < n_blocks {
            let n_next = self.pool.available_blocks().min(self.blocks_per_page as u32);
            if n_next == 0 {
                break;
            }
            match self.pool.alloc(n_next, &mut self.buffer) {
                Ok(BlocksOutcome::Allocated) => {}
                Ok(BlocksOutcome::NoMemory(_)) => break,
                Err(error) => {
                    tracing::warn!(%error, "cannot take memory");
                    break;
                }
            }
        }
        n_blocks.saturating_sub(self.buffer.len())
    }

    /// Adds whole pages for `n_blocks` to `buffer` by one claim, or none; returns how many blocks are not there.
    ///
    /// One claim: the turn of a starved member ends with the claim that is served.
    fn take_all(&mut self, n_blocks: usize) -> usize {
        let n_left = self.capacity_blocks.saturating_sub(self.n_taken);
        let n_wanted = n_blocks.next_multiple_of(self.blocks_per_page).min(n_left).max(n_blocks);
        let Ok(n_wanted) = u32::try_from(n_wanted) else { return n_blocks };
        match self.pool.alloc(n_wanted, &mut self.buffer) {
            Ok(BlocksOutcome::Allocated) => 0,
            Ok(BlocksOutcome::NoMemory(_)) => n_blocks,
            Err(error) => {
                tracing::warn!(%error, "cannot take memory");
                n_blocks
            }
        }
    }

    /// Makes members above their share give back enough for `n_blocks`; says whether so much is free
    /// already, as after the death of its holder.
    fn ask_others(&self, n_blocks: usize) -> bool {
        let n_bytes = (n_blocks.div_ceil(self.blocks_per_page) as u64).saturating_mul(self.page_cost_bytes);
        match self.grants.claim(n_bytes) {
            Ok(Claim::Granted) => {
                self.grants.give_back(n_bytes);
                true
            }
            Ok(Claim::Denied(_)) => false,
            Err(error) => {
                tracing::warn!(%error, "cannot ask for memory");
                false
            }
        }
    }

    fn publish_idle(&self) {
        if !self.is_waiting {
            self.grants.set_idle_bytes(self.idle_bytes);
        }
    }
}

impl BlockMemory for ElasticMemory {
    fn capacity_blocks(&self) -> usize {
        self.capacity_blocks
    }

    fn limit_blocks(&self) -> usize {
        let n_pages = self.pool.counters().limit_bytes / self.page_cost_bytes;
        self.capacity_blocks
            .min(usize::try_from(n_pages).unwrap_or(usize::MAX).saturating_mul(self.blocks_per_page))
    }

    fn take(&mut self, n_blocks: usize, need: Need, blocks: &mut Vec<BlockId>) {
        if need == Need::Required {
            // Before the claim, which is judged by what is used.
            self.grants.set_idle_bytes(0);
        }
        self.buffer.clear();
        let takes_all = self.is_starved && need == Need::Required;
        let mut n_missing = if takes_all { self.take_all(n_blocks) } else { self.take_pages(n_blocks) };
        match need {
            Need::Required => {
                if 0 < n_missing && !takes_all && self.ask_others(n_missing) {
                    n_missing = self.take_pages(n_blocks);
                }
                self.is_waiting = 0 < n_missing;
                self.is_starved &= self.is_waiting;
                self.publish_idle();
            }
            // Another member was faster or has a better claim: no member gives up memory for these.
            Need::Spare if 0 < n_missing && !self.is_waiting => self.grants.stop_waiting(),
            Need::Spare => {}
        }
        self.n_taken += self.buffer.len();
        blocks.extend(self.buffer.iter().map(|block| BlockId::new(block.0)));
    }

    fn give_back(&mut self, blocks: &[BlockId]) {
        self.buffer.clear();
        self.buffer.extend(blocks.iter().map(|block| geometry::BlockId(block.index() as u32)));
        if let Err(error) = self.pool.free(&self.buffer) {
            // The books differ: the blocks stay taken, which loses memory and never mixes KV.
            tracing::error!(%error, "cannot give memory back");
        }
        self.n_taken = self.n_taken.saturating_sub(blocks.len());
    }

    fn take_asked_pages(&mut self) -> usize {
        let target_bytes = self.asks.target_bytes.swap(u64::MAX, Ordering::SeqCst);
        // A limit that fell is reported once, and holds also for what could not go back then.
        let counters = self.pool.counters();
        let excess_bytes = counters.held_bytes.saturating_sub(self.grants.claimable_bytes());
        let used_bytes = u64::from(counters.pages.n_used).saturating_mul(self.page_cost_bytes);
        let allowed_bytes = target_bytes.min(used_bytes.saturating_sub(excess_bytes));
        let n_allowed = allowed_bytes / self.page_cost_bytes;
        let n_held = self.n_taken.div_ceil(self.blocks_per_page);
        n_held.saturating_sub(usize::try_from(n_allowed).unwrap_or(usize::MAX))
    }

    fn page_of(&self, block: BlockId) -> usize {
        let page = self.pool.block_geometry().page_of_block(geometry::BlockId(block.index() as u32));
        page.map_or(usize::MAX, |page| page.0 as usize)
    }

    fn note_idle_pages(&mut self, n_pages: usize) {
        self.idle_bytes = (n_pages as u64).saturating_mul(self.page_cost_bytes);
        self.publish_idle();
    }

    fn note_starved(&mut self) {
        if self.is_waiting {
            self.is_starved = true;
            self.grants.note_starved();
        }
    }

    fn stop_waiting(&mut self) {
        self.is_starved = false;
        if self.is_waiting {
            self.is_waiting = false;
            self.grants.stop_waiting();
            self.publish_idle();
        }
    }

    fn set_waker(&mut self, waker: Box<dyn Fn() + Send + Sync>) {
        *self.asks.waker.lock() = Some(Arc::from(waker));
    }
}

/// A page that holds at least sixteen blocks, so that straddling blocks waste little.
fn page_bytes_for(block_bytes: u64) -> u64 {
    let unit = geometry::UNIT_BYTES;
    if unit.is_multiple_of(block_bytes) {
        return unit;
    }
    (block_bytes * 16).next_multiple_of(unit)
}
