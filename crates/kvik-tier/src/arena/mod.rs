//! Memory for chunks: one reservation that is divided into slots.
//!
//! The arena is a memory file of fixed size that is mapped once. [`Arena::allocate`] hands out a [`Slot`],
//! which has one owner. The owner writes it, then freezes it into a [`Lease`], which has many readers.
//! Both give their memory back when they are dropped, and both keep the arena: there is no double free and
//! no use after free.
//!
//! # Memory
//!
//! Addresses are reserved at the start; memory is taken from the kernel in steps of 2 MiB when a slot first
//! needs it, and kept. A machine that has none left makes [`Arena::allocate`] answer `None`, as a full arena
//! does: the memory is asked for with a call that can fail and never by touching a page. Huge pages are
//! reserved at the start as well, so that their lack is an error or a fallback there. (A kernel that
//! overcommits may end a process before an allocation fails. [`Commitment::AtStart`] avoids that: it takes
//! all memory at the start.)
//!
//! The memory file can be handed to other processes. They must not write to it.

mod adoption;
mod bits;
mod buddy;
mod commit;
mod compaction;
mod mapping;
mod numa;
mod run;
pub mod shared;
mod slab;
mod slabs;
mod slot;
#[cfg(test)]
pub(crate) mod tests;

use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

pub use adoption::ChunkPlace;
pub(crate) use compaction::Tenants;
pub use slot::{Lease, Slot};

use crate::error::{Result, TierError};
use buddy::Buddy;
use commit::Committed;
use compaction::{Moved, NoTenants};
use mapping::{HUGE_PAGE_BYTES, Mapping};
use run::{Run, UNIT_BYTES, units_for};
use slab::{Slab, SlabStat};
use slabs::Slabs;
use slot::{Held, Home};

/// How an arena is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaOptions {
    /// Its size; rounded down to a multiple of 4096, or of 2 MiB in huge pages. At most 8 TiB.
    pub capacity_bytes: u64,
    /// Whether it lies in reserved huge pages. Default: [`HugePages::Auto`].
    pub huge_pages: HugePages,
    /// Which NUMA nodes its memory is on. Default: [`NumaPlacement::Auto`].
    pub numa: NumaPlacement,
    /// When its memory is taken. Default: [`Commitment::OnDemand`].
    pub commitment: Commitment,
}

/// Whether an arena lies in the huge pages that the machine has reserved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// If enough of them are free; else in ordinary pages that the kernel may join.
    #[default]
    Auto,
    /// In ordinary pages.
    Never,
    /// If not enough of them are free, there is no arena.
    Required,
}

/// Which NUMA nodes the memory of an arena is on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NumaPlacement {
    /// On all that have memory, in turn, where there is more than one and the kernel allows it.
    #[default]
    Auto,
    /// On the node of the thread that first needs it.
    Local,
    /// On this node, which must have memory.
    Node(u32),
}

/// When the memory of an arena is taken from the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Commitment {
    /// When it is first handed out: a start is quick, and a first use is slower than later ones.
    #[default]
    OnDemand,
    /// All of it, before the arena is returned.
    AtStart,
}

/// A shared handle to memory for chunks.
///
/// The memory lives as long as a handle, a slot or a lease.
#[derive(Clone)]
pub struct Arena {
    shared: Arc<Shared>,
}

/// Counts of an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaStat {
    /// Its size.
    pub capacity_bytes: u64,
    /// Bytes in slots and leases, with what they are rounded up by.
    pub used_bytes: u64,
    /// Bytes that were taken from the kernel.
    pub committed_bytes: u64,
    /// Times the kernel had no memory for a slot.
    pub n_refusals: u64,
    /// Extents that are divided into slots of one size.
    pub n_extents: usize,
    /// Free bytes in them.
    pub idle_bytes: u64,
    /// Chunks that were moved to join free memory.
    pub n_moved_chunks: u64,
    /// Their bytes.
    pub moved_bytes: u64,
    /// The size of its pages.
    pub page_bytes: u64,
    /// NUMA nodes that its memory is spread over.
    pub n_numa_nodes: usize,
}

/// Something that wants to know where the memory of an arena lies, such as a driver that copies faster from
/// memory that it has registered.
pub trait HostRegistrar: fmt::Debug + Send + Sync {
    /// Registers `n_bytes` from `address` on.
    ///
    /// The implementation must not write there. The range stays mapped until [`Self::unregister`].
    ///
    /// # Errors
    /// If the range cannot be registered; it then is used unregistered.
    fn register(&self, address: NonNull<u8>, n_bytes: usize) -> Result<()>;

    /// Forgets a range that was registered; it is unmapped next.
    fn unregister(&self, address: NonNull<u8>, n_bytes: usize);
}

/// What handles, slots and leases share.
struct Shared {
    mapping: Mapping,
    registrars: Mutex<Vec<Arc<dyn HostRegistrar>>>,
    committed: Committed,
    /// Taken after the lock of a slab, never before it.
    buddy: Mutex<Buddy>,
    slabs: Slabs,
    /// Held while chunks are moved. Taken before any other lock of the arena or its tenants.
    compaction: Mutex<()>,
    moved: Moved,
    n_refusals: AtomicU64,
    n_units: u32,
    n_numa_nodes: usize,
}

// === impl ArenaOptions ===

impl ArenaOptions {
    /// An arena of `capacity_bytes` with the defaults.
    pub fn new(capacity_bytes: u64) -> Self {
        Self {
            capacity_bytes,
            huge_pages: HugePages::default(),
            numa: NumaPlacement::default(),
            commitment: Commitment::default(),
        }
    }
}

// === impl Arena ===

impl Arena {
    /// The most bytes of an arena: the number of a unit has 31 bits.
    const MAX_BYTES: u64 = (1 << 31) * UNIT_BYTES as u64;

    /// Reserves an arena.
    ///
    /// # Errors
    /// [`TierError::Invalid`] if the capacity is not allowed; [`TierError::Io`] if the kernel refuses, or has
    /// not what [`HugePages::Required`] or [`Commitment::AtStart`] ask for.
    pub fn new(options: ArenaOptions) -> Result<Self> {
        let capacity_bytes = options.capacity_bytes;
        if !(UNIT_BYTES as u64..=Self::MAX_BYTES).contains(&capacity_bytes) {
            let allowed = format!("{UNIT_BYTES} to {}", Self::MAX_BYTES);
            return Err(TierError::invalid("capacity_bytes", &capacity_bytes, allowed));
        }
        if options.huge_pages == HugePages::Required && capacity_bytes < HUGE_PAGE_BYTES as u64 {
            let allowed = format!("{HUGE_PAGE_BYTES} or more in huge pages");
            return Err(TierError::invalid("capacity_bytes", &capacity_bytes, allowed));
        }
        if let NumaPlacement::Node(node) = options.numa
            && !numa::nodes_with_memory().contains(&node)
        {
            let allowed = format!("one with memory: {:?}", numa::nodes_with_memory());
            return Err(TierError::invalid("NUMA node", &node, allowed));
        }
        let unit_bytes = capacity_bytes as usize - capacity_bytes as usize % UNIT_BYTES;
        let mapping = Mapping::new(unit_bytes, options.huge_pages)?;
        let shared = Shared::new(mapping, options.numa);
        if options.commitment == Commitment::AtStart {
            shared.commit_all()?;
        }
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Takes memory for `n_bytes`, rounded up to a multiple of 4096; an empty slot takes as much as one byte.
    ///
    /// `None` where no free run is long enough, where the machine has no memory left, and for more bytes than
    /// the arena has.
    pub fn allocate(&self, n_bytes: usize) -> Option<Slot> {
        self.allocate_among(n_bytes, &NoTenants)
    }

    /// As [`Self::allocate`], and moves unleased chunks of `tenants` if that gives a run that is long enough.
    pub(crate) fn allocate_among<T: Tenants>(&self, n_bytes: usize, tenants: &T) -> Option<Slot> {
        let n_units = units_for(n_bytes)?;
        let shared = &self.shared;
        let (run, home) = shared
            .take(n_units)
            // Asking the tenants takes longer than looking at what is free.
            .or_else(|| shared.take_cleared(n_units, &NoTenants))
            .or_else(|| shared.take_cleared(n_units, tenants))?;
        let held = Held { shared: Arc::clone(shared), run, home, n_bytes };
        if shared.commit(run).is_err() {
            // Relaxed: the count is for people and orders nothing.
            shared.n_refusals.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(Slot::new(held))
    }

    /// The arena's counts.
    pub fn stat(&self) -> ArenaStat {
        let shared = &self.shared;
        let slabs = shared.slab_stat();
        let n_used_units = shared.n_units.saturating_sub(shared.n_free_units());
        ArenaStat {
            capacity_bytes: shared.mapping.n_bytes() as u64,
            used_bytes: bytes_of(n_used_units),
            committed_bytes: shared.committed.n_bytes(),
            n_refusals: shared.n_refusals.load(Ordering::Relaxed),
            n_extents: slabs.n_extents,
            idle_bytes: bytes_of(slabs.n_idle_units),
            n_moved_chunks: shared.moved.n_chunks(),
            moved_bytes: shared.moved.n_bytes(),
            page_bytes: if shared.mapping.is_huge() { HUGE_PAGE_BYTES } else { UNIT_BYTES } as u64,
            n_numa_nodes: shared.n_numa_nodes,
        }
    }

    /// Whether a lease lies in this arena and has no other clone.
    pub(crate) fn is_only_lease(&self, lease: &Lease) -> bool {
        lease.movable_run(&self.shared).is_some()
    }

    /// The memory file, for processes that read leases at their offsets.
    ///
    /// Its size is sealed. A process that gets it must not write to it and must not punch holes into it.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.mapping.as_fd()
    }

    /// Registers all of the arena with `registrar` until the arena is gone.
    ///
    /// Registered memory cannot be taken on demand: what is missing is taken now.
    ///
    /// # Errors
    /// If the machine has not enough memory or the registrar refuses; the arena works as before.
    pub fn register_with(&self, registrar: Arc<dyn HostRegistrar>) -> Result<()> {
        let shared = &self.shared;
        shared.commit_all()?;
        registrar.register(shared.mapping.address(), shared.mapping.n_bytes())?;
        shared.registrars.lock().push(registrar);
        Ok(())
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Arena").field("stat", &self.stat()).finish()
    }
}

// === impl Shared ===

impl Shared {
    /// The state of an arena all of which is free.
    fn new(mapping: Mapping, numa: NumaPlacement) -> Self {
        let n_units = (mapping.n_bytes() / UNIT_BYTES) as u32;
        let nodes = match numa {
            NumaPlacement::Auto => Some(numa::nodes_with_memory()).filter(|nodes| nodes.len() > 1),
            NumaPlacement::Local => None,
            NumaPlacement::Node(node) => Some(vec![node]),
        };
        let nodes = nodes.unwrap_or_default();
        let is_interleaved = !nodes.is_empty() && mapping.interleave(&nodes).is_ok();
        Self {
            mapping,
            registrars: Mutex::default(),
            committed: Committed::new(n_units),
            buddy: Mutex::new(Buddy::new(n_units)),
            slabs: Slabs::new(n_units),
            compaction: Mutex::default(),
            moved: Moved::default(),
            n_refusals: AtomicU64::new(0),
            n_units,
            n_numa_nodes: if is_interleaved { nodes.len() } else { 1 },
        }
    }

    /// Takes what lies ready: a slot of the size's slab, or a free block.
    fn take(&self, n_units: u32) -> Option<(Run, Home)> {
        if let Some((slab_id, slab)) = self.slabs.for_size(n_units)
            && let Some((run, slot)) = slab.take(&self.buddy)
        {
            return Some((run, Home::Slab(slab_id, slot)));
        }
        let run = self.buddy.lock().take(n_units)?;
        Some((run, Home::Own))
    }

    /// Takes what can be made free in one run by moving chunks of `tenants`.
    fn take_cleared<T: Tenants>(self: &Arc<Self>, n_units: u32, tenants: &T) -> Option<(Run, Home)> {
        if self.n_free_units() < n_units {
            return None;
        }
        let _alone = self.compaction.lock();
        // The previous holder of the lock may have made room for more than one.
        if let Some(taken) = self.take(n_units) {
            return Some(taken);
        }
        if let Some((slab_id, slab)) = self.slabs.for_size(n_units) {
            let n_extent_units = Slabs::cleared_units(n_units);
            if n_extent_units > n_units
                && let Some(run) = self.clear(n_extent_units, tenants)
            {
                let (run, slot) = slab.take_of_new_extent(run);
                return Some((run, Home::Slab(slab_id, slot)));
            }
        }
        let run = self.clear(n_units, tenants)?;
        Some((run, Home::Own))
    }

    fn give(&self, run: Run, home: Home) {
        match home {
            Home::Own => self.buddy.lock().give(run),
            Home::Slab(slab, slot) => {
                if let Some(slab) = self.slabs.get(slab) {
                    slab.give(slot, run, &self.buddy);
                }
            }
        }
    }

    /// Free units, also those in extents. Not exact while other threads take and give.
    fn n_free_units(&self) -> u32 {
        let n_idle_units = self.slab_stat().n_idle_units;
        self.buddy.lock().n_free_units().saturating_add(n_idle_units)
    }

    fn slab_stat(&self) -> SlabStat {
        self.slabs.iter().map(Slab::stat).fold(SlabStat::default(), |sum, stat| SlabStat {
            n_extents: sum.n_extents + stat.n_extents,
            n_idle_units: sum.n_idle_units + stat.n_idle_units,
        })
    }

    fn commit(&self, run: Run) -> std::io::Result<()> {
        self.committed.ensure(run, |part| self.mapping.populate(part))
    }

    fn commit_all(&self) -> Result<()> {
        self.commit(Run::new(0, self.n_units))
            .map_err(|error| TierError::io(format!("take {} bytes of memory", self.mapping.n_bytes()), error))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        for registrar in self.registrars.get_mut().drain(..).rev() {
            registrar.unregister(self.mapping.address(), self.mapping.n_bytes());
        }
    }
}

fn bytes_of(n_units: u32) -> u64 {
    u64::from(n_units) * UNIT_BYTES as u64
}
