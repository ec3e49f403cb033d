//! Memory of any size and alignment: for an engine whose allocator is replaced and not its block manager.
//!
//! [`elastic`] takes it from pages that the ledger grants, [`plain`] from the device's own allocator while the
//! other is bypassed. What one gave is freed by that one, whatever the switch says then.
//!
//! The elastic part is a member of the ledger of its own, in the group of its pool: it and the blocks share one
//! limit. It joins with the first allocation, so that a pool without any takes no place in the ledger for it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use kvik_memory::config::MemoryConfig;
use kvik_memory::ledger::{JoinOptions, Member};
use parking_lot::Mutex;

use self::elastic::Elastic;
use self::plain::PlainAllocations;
use self::space::{QUANTUM_BYTES, Request};
use crate::backend::Backend;
use crate::status::{Failure, kvik_status};

mod elastic;
mod plain;
mod space;

/// The largest alignment: that of the driver's largest pages.
const MAX_ALIGNMENT: u64 = 1 << 30;

/// The allocations of a pool.
#[derive(Debug)]
pub(crate) struct Heap {
    join_options: JoinOptions,
    environment: MemoryConfig,
    is_bypassed: AtomicBool,
    elastic: OnceLock<Elastic>,
    /// Held while the elastic part is opened, which happens once.
    opening: Mutex<()>,
    plain: PlainAllocations,
}

/// What the allocations of a pool take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct HeapUsage {
    /// Of pages that have memory.
    pub(crate) held_bytes: u64,
    /// That were asked for and came from pages.
    pub(crate) allocated_bytes: u64,
    /// That were asked for and came from the device's own allocator.
    pub(crate) bypassed_bytes: u64,
    /// Of both kinds.
    pub(crate) n_allocations: u64,
}

impl Heap {
    /// A heap without allocations; it joins the ledger by `join_options` when it needs memory.
    pub(crate) fn new(join_options: JoinOptions, environment: MemoryConfig) -> Self {
        Self {
            is_bypassed: AtomicBool::new(environment.is_bypassed),
            join_options,
            environment,
            elastic: OnceLock::new(),
            opening: Mutex::new(()),
            plain: PlainAllocations::default(),
        }
    }

    /// Takes `n_bytes` at a multiple of `alignment`, 0 for the smallest there is.
    pub(crate) fn allocate(
        &self,
        n_bytes: u64,
        alignment: u64,
        backend: &Backend,
        member: &Member,
        on_reclaim: impl Fn(u64) + Send + Sync + 'static,
    ) -> Result<u64, Failure> {
        if n_bytes == 0 {
            return Err(Failure::invalid("`size` is 0; allowed: 1 or more"));
        }
        let alignment = if alignment == 0 { QUANTUM_BYTES } else { alignment };
        if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
            return Err(Failure::invalid(format!(
                "`alignment` is {alignment}; allowed: 0, or a power of two up to {MAX_ALIGNMENT}"
            )));
        }
        let request = Request { n_bytes, alignment };
        if self.is_bypassed.load(Ordering::Relaxed) {
            return self.plain.allocate(backend, request);
        }
        self.elastic(backend, member, on_reclaim)?.allocate(request)
    }

    /// Frees what starts at `address`.
    pub(crate) fn free(&self, address: u64, backend: &Backend) -> Result<(), Failure> {
        let is_freed = self.elastic.get().is_some_and(|elastic| elastic.free(address))
            || self.plain.free(backend, address)?;
        if is_freed {
            return Ok(());
        }
        Err(Failure::new(
            kvik_status::KVIK_ERROR_NOT_ALLOCATED,
            format!("free {address:#x}: no allocation of this pool starts there"),
        ))
    }

    /// Where allocations come from, from the next one on.
    pub(crate) fn set_bypass(&self, is_bypassed: bool) {
        self.is_bypassed.store(is_bypassed, Ordering::Relaxed);
    }

    /// Unmaps pages without an allocation; returns how many bytes.
    pub(crate) fn trim(&self) -> u64 {
        self.elastic.get().map_or(0, Elastic::trim)
    }

    pub(crate) fn usage(&self) -> HeapUsage {
        let (held_bytes, (allocated_bytes, n_elastic)) = match self.elastic.get() {
            Some(elastic) => (elastic.held_bytes(), elastic.allocated()),
            None => (0, (0, 0)),
        };
        let (bypassed_bytes, n_plain) = self.plain.allocated();
        HeapUsage { held_bytes, allocated_bytes, bypassed_bytes, n_allocations: n_elastic + n_plain }
    }

    /// Frees what the device's own allocator gave; pages go with the heap.
    pub(crate) fn close(&self, backend: &Backend) {
        self.plain.free_all(backend);
    }

    fn elastic(
        &self,
        backend: &Backend,
        member: &Member,
        on_reclaim: impl Fn(u64) + Send + Sync + 'static,
    ) -> Result<&Elastic, Failure> {
        if let Some(elastic) = self.elastic.get() {
            return Ok(elastic);
        }
        let _opening = self.opening.lock();
        if let Some(elastic) = self.elastic.get() {
            return Ok(elastic);
        }
        let member = member.ledger().join(&self.join_options)?;
        let elastic = Elastic::open(backend, member, &self.environment, on_reclaim)?;
        Ok(self.elastic.get_or_init(|| elastic))
    }
}
