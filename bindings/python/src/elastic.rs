//! Elastic KV memory: addresses for many blocks, with memory behind those that are used.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_memory::blocks::BlocksOutcome;
use kvik_memory::geometry::Geometry;
use kvik_memory::ledger::{JoinOptions, Ledger, LedgerOptions};
use kvik_memory::machine::memory_bytes;
use kvik_memory::pages::FixedGrants;
use kvik_memory::pool::{KvPool, PoolOptions, PoolSettings};
use kvik_memory::region::Guard;
use kvik_memory::vmm::Vmm;
use kvik_memory::vmm::cuda::CudaVmm;
use kvik_memory::vmm::host::{HostDevice, HostVmm};
use kvik_memory::{BlockId, MemoryError, PageId};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;

use crate::dlpack::Exported;
use crate::error::{invalid, memory_exception_of};

/// Longest wait between two looks for Python's signals.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// The part of a device's memory that the engines of a ledger share.
const UTILIZATION: f64 = 0.95;

/// KV memory that is as large as what is in use: addresses are reserved for all blocks, and pages are mapped behind those that are
/// allocated.
///
/// A block has `block_bytes` in each of `n_buffers` buffers, for example one a layer. With `cuda_device` the memory is that of a GPU,
/// and else of this machine. With `group` it is granted by the ledger of the device, which engines in other processes share
/// (`kvctl`); without, `max_bytes` is its own. With `has_null_block`, block 0 is taken for good. Blocks that are not allocated read as zeros; to write there ends the process.
#[pyclass(frozen, module = "kvik")]
#[derive(Debug)]
pub(crate) struct Memory {
    pool: KvPool,
    geometry: Geometry,
    cuda_device: Option<u32>,
}

/// All blocks of one buffer of a `Memory`, as bytes with axes of blocks and bytes; `torch.from_dlpack` and others take it without a
/// copy. It keeps the memory alive, also by what they make of it.
#[pyclass(frozen, module = "kvik")]
#[derive(Debug)]
pub(crate) struct MemoryTensor {
    memory: Py<Memory>,
    address: u64,
}

#[pymethods]
impl Memory {
    #[new]
    #[pyo3(signature = (*, n_buffers, block_bytes, n_blocks, page_bytes=2 << 20, max_bytes=None, cuda_device=None,
        group=None, directory=PathBuf::from("/dev/shm"), has_null_block=false))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn new(
        py: Python<'_>,
        n_buffers: u32,
        block_bytes: u64,
        n_blocks: u32,
        page_bytes: u64,
        max_bytes: Option<u64>,
        cuda_device: Option<u32>,
        group: Option<String>,
        directory: PathBuf,
        has_null_block: bool,
    ) -> PyResult<Self> {
        let n_pages = u128::from(n_blocks) * u128::from(block_bytes);
        let n_pages = u32::try_from(n_pages.div_ceil(u128::from(page_bytes.max(1))));
        let n_pages = n_pages.map_err(|_| invalid("n_blocks", &n_blocks, "fewer, or larger pages"))?;
        let geometry = Geometry::try_new(n_buffers, page_bytes, n_pages);
        let geometry = geometry.map_err(|error| memory_exception_of(&error))?;
        let settings = PoolSettings { has_null_block, ..PoolSettings::new(block_bytes) };
        let place = Place { cuda_device, group, directory };
        let pool = py.detach(|| place.open_pool(geometry, settings, max_bytes));
        Ok(Self { pool: pool.map_err(|error| memory_exception_of(&error))?, geometry, cuda_device })
    }

    /// Takes blocks, and maps pages where there are none for them; waits up to `timeout_s` for others of the group to give memory back.
    /// Returns all of the blocks, or `None` where there is not enough memory. Their bytes are whatever was there.
    #[pyo3(signature = (n_blocks, *, timeout_s=0.0))]
    fn alloc(&self, py: Python<'_>, n_blocks: u32, timeout_s: f64) -> PyResult<Option<Vec<u32>>> {
        let timeout = Duration::try_from_secs_f64(timeout_s.max(0.0)).unwrap_or(Duration::from_hours(1));
        let deadline = Instant::now() + timeout.min(Duration::from_hours(24));
        loop {
            let mut blocks = Vec::new();
            let until = deadline.min(Instant::now() + SIGNAL_INTERVAL);
            let outcome = py.detach(|| {
                if timeout.is_zero() {
                    self.pool.alloc(n_blocks, &mut blocks)
                } else {
                    self.pool.alloc_wait(n_blocks, until, &mut blocks)
                }
            });
            match outcome.map_err(|error| memory_exception_of(&error))? {
                BlocksOutcome::Allocated => {
                    return Ok(Some(blocks.into_iter().map(|block| block.0).collect()));
                }
                BlocksOutcome::NoMemory(_) if Instant::now() >= deadline => return Ok(None),
                BlocksOutcome::NoMemory(_) => py.check_signals()?,
            }
        }
    }

    /// Gives blocks back; pages without a used block are unmapped or kept for the next. Raises and frees none where one is not
    /// allocated.
    fn free(&self, py: Python<'_>, blocks: Vec<u32>) -> PyResult<()> {
        let blocks: Vec<BlockId> = blocks.into_iter().map(BlockId).collect();
        py.detach(|| self.pool.free(&blocks)).map_err(|error| memory_exception_of(&error))
    }

    /// Bounds the memory to `max_bytes`, whole pages of all buffers; blocks in use stay, and more are not given meanwhile.
    fn resize(&self, py: Python<'_>, max_bytes: u64) {
        let n_pages = max_bytes / self.geometry.page_cost_bytes();
        py.detach(|| self.pool.resize(u32::try_from(n_pages).unwrap_or(u32::MAX)));
    }

    /// Unmaps all pages without a block in use; returns how many.
    fn trim(&self, py: Python<'_>) -> u32 {
        py.detach(|| self.pool.trim())
    }

    /// One tensor for each buffer, of all blocks.
    fn tensors(slf: &Bound<'_, Self>) -> PyResult<Vec<MemoryTensor>> {
        let memory = slf.get();
        let region = memory.pool.region();
        let address = |buffer| region.and_then(|region| region.address_of(buffer, PageId(0)));
        (0..memory.geometry.n_buffers())
            .map(|buffer| {
                let address =
                    address(buffer).ok_or_else(|| invalid("buffer", &buffer, "one of the memory"))?;
                Ok(MemoryTensor { memory: slf.clone().unbind(), address })
            })
            .collect()
    }

    /// Numbers of blocks, as many as whole pages have; those that lie on two pages are never given.
    #[getter]
    fn n_blocks(&self) -> u32 {
        self.pool.block_geometry().n_blocks()
    }

    /// Blocks that are in use.
    #[getter]
    fn n_used_blocks(&self) -> u32 {
        self.pool.counters().blocks.n_used
    }

    /// The most blocks that `alloc` would give now.
    #[getter]
    fn n_available_blocks(&self) -> u32 {
        self.pool.available_blocks()
    }

    /// Bytes of all pages that are mapped.
    #[getter]
    fn held_bytes(&self) -> u64 {
        self.pool.counters().held_bytes
    }

    /// The most bytes that may be held, if all others of the group and of the device gave back what they can.
    #[getter]
    fn limit_bytes(&self) -> u64 {
        let counters = self.pool.counters();
        let own_bytes = u64::from(counters.pages.limit_pages) * self.geometry.page_cost_bytes();
        counters.limit_bytes.min(own_bytes)
    }

    /// Bytes of a page in all buffers.
    #[getter]
    fn page_bytes(&self) -> u64 {
        self.geometry.page_cost_bytes()
    }

    /// Pages with a block in use.
    #[getter]
    fn n_used_pages(&self) -> u32 {
        self.pool.counters().pages.n_used
    }

    /// Pages that are mapped and free.
    #[getter]
    fn n_parked_pages(&self) -> u32 {
        self.pool.counters().pages.n_parked
    }

    fn __repr__(&self) -> String {
        let (n_blocks, n_used) = (self.n_blocks(), self.n_used_blocks());
        format!("Memory(n_blocks={n_blocks}, n_used_blocks={n_used}, held_bytes={})", self.held_bytes())
    }
}

#[pymethods]
impl MemoryTensor {
    /// Where its first block lies.
    #[getter]
    fn address(&self) -> u64 {
        self.address
    }

    /// Blocks, and bytes of a block.
    #[getter]
    fn shape(&self) -> (u64, u64) {
        let geometry = self.memory.get().pool.block_geometry();
        (geometry.n_blocks().into(), geometry.block_bytes())
    }

    fn __dlpack_device__(&self) -> (i32, u32) {
        Exported::device(self.memory.get().cuda_device)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Py<PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, u32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // Pages are mapped before their blocks are given: there is nothing in a stream to wait for.
        drop(stream);
        let is_elsewhere = dl_device.is_some_and(|device| device != self.__dlpack_device__());
        if copy == Some(true) || is_elsewhere {
            return Err(PyBufferError::new_err("this memory is exported where it is, without a copy"));
        }
        let (n_blocks, block_bytes) = self.shape();
        let exported = Exported {
            address: self.address as usize,
            shape: [n_blocks.cast_signed(), block_bytes.cast_signed()],
            cuda_device: self.memory.get().cuda_device,
            owner: self.memory.clone_ref(py).into_any(),
        };
        exported.into_capsule(py, max_version.is_some_and(|(major, _)| major >= 1))
    }
}

/// The device that memory is on, and what grants it.
#[derive(Debug)]
pub(crate) struct Place {
    /// `None` for memory of this machine.
    pub(crate) cuda_device: Option<u32>,
    /// The IPC name in the device's ledger; `None` for a budget of its own.
    pub(crate) group: Option<String>,
    /// Where the ledger is.
    pub(crate) directory: PathBuf,
}

impl Place {
    /// Opens a pool that holds at most `max_bytes`, or all of its addresses.
    pub(crate) fn open_pool(
        self,
        geometry: Geometry,
        settings: PoolSettings,
        max_bytes: Option<u64>,
    ) -> Result<KvPool, MemoryError> {
        let limit_pages = max_bytes.map(|bytes| bytes / geometry.page_cost_bytes());
        let limit_pages = limit_pages.map(|n_pages| u32::try_from(n_pages).unwrap_or(u32::MAX));
        let settings = PoolSettings { limit_pages, ..settings };
        let options = PoolOptions { geometry, guard: Guard::Zero, settings };
        let machine_bytes = memory_bytes();
        let vmm: Arc<dyn Vmm> = match self.cuda_device {
            Some(ordinal) => Arc::new(CudaVmm::open(ordinal)?),
            None => Arc::new(HostVmm::open(HostDevice::new(machine_bytes))?),
        };
        let Some(group) = self.group else {
            let budget_bytes = max_bytes.unwrap_or(geometry.region_bytes());
            return KvPool::open_alone(vmm, Arc::new(FixedGrants::new(budget_bytes)), &options);
        };
        let is_host = self.cuda_device.is_none();
        let budget_bytes = is_host.then_some((machine_bytes as f64 * UTILIZATION) as u64);
        let ledger = Ledger::open(&LedgerOptions {
            dir: self.directory,
            budget_bytes,
            ..LedgerOptions::new(vmm.device_name())
        })?;
        if !is_host {
            ledger.reconcile(vmm.memory_info()?, UTILIZATION)?;
        }
        KvPool::open(vmm, ledger.join(&JoinOptions::new(group, "python"))?, &options)
    }
}
