//! Elastic memory by pages: one buffer of addresses, with memory behind the pages that its owner takes.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvik_memory::blocks::BlocksOutcome;
use kvik_memory::geometry::Geometry;
use kvik_memory::pool::{KvPool, PoolSettings};
use kvik_memory::{BlockId, PageId};
use parking_lot::{Condvar, Mutex};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;

use crate::dlpack::Exported;
use crate::elastic::Place;
use crate::error::{invalid, memory_exception_of};
use crate::job::wait_for;

/// How long a page that is given back stays ready to be taken again, unless others need its memory.
const READY_FOR: Duration = Duration::from_secs(1);

/// One buffer of addresses, with memory behind the pages that are taken: for an engine that chooses its blocks itself.
///
/// Pages that are given back are kept for a second, or until others of the device need their memory. With `cuda_device` the
/// memory is that of a GPU, and else of this machine. With `group` it is granted by the ledger of the device, which engines in other
/// processes share (`kvctl`). Never more than `max_bytes` is held. Pages that are not taken read as zeros; to write there ends the
/// process. Libraries with `DLPack` take the whole buffer without a copy, as bytes with axes of pages and bytes, and keep it alive.
#[pyclass(frozen, module = "kvik")]
#[derive(Debug)]
pub(crate) struct PagedMemory {
    pool: KvPool,
    geometry: Geometry,
    cuda_device: Option<u32>,
    wanted: Arc<Wanted>,
    /// Held while pages are taken or given back, and not while memory is waited for: what is given back in one thread may be
    /// taken in another.
    changes: Mutex<()>,
    /// Whether the next wait ends at once. Sequentially consistent: it is set before waiters are woken and read after they
    /// joined, so a wait that does not see it is woken.
    is_interrupted: AtomicBool,
}

/// What the agent is to ask of the engine.
#[derive(Debug, Default)]
struct Wanted {
    n_bytes: Mutex<u64>,
    changed: Condvar,
}

#[pymethods]
impl PagedMemory {
    #[new]
    #[pyo3(signature = (*, n_bytes, page_bytes=2 << 20, max_bytes=None, cuda_device=None, group=None,
        directory=PathBuf::from("/dev/shm")))]
    fn new(
        py: Python<'_>,
        n_bytes: u64,
        page_bytes: u64,
        max_bytes: Option<u64>,
        cuda_device: Option<u32>,
        group: Option<String>,
        directory: PathBuf,
    ) -> PyResult<Self> {
        let n_pages = u32::try_from(n_bytes.div_ceil(page_bytes.max(1)));
        let n_pages = n_pages.map_err(|_| invalid("n_bytes", &n_bytes, "fewer, or larger pages"))?;
        let settings = PoolSettings {
            is_preallocating: false,
            low_watermark_pages: 0,
            high_watermark_pages: 0,
            trim_after: READY_FOR,
            // The block of this pool is the page.
            ..PoolSettings::new(page_bytes)
        };
        let place = Place { cuda_device, group, directory };
        let geometry = Geometry::try_new(1, page_bytes, n_pages);
        let opened = geometry.and_then(|geometry| {
            let pool = py.detach(|| place.open_pool(geometry, settings, max_bytes))?;
            Ok((pool, geometry))
        });
        let (pool, geometry) = opened.map_err(|error| memory_exception_of(&error))?;
        let wanted = Arc::new(Wanted::default());
        pool.set_reclaim_callback({
            let wanted = Arc::clone(&wanted);
            move |n_bytes| wanted.ask(n_bytes)
        });
        Ok(Self {
            pool,
            geometry,
            cuda_device,
            wanted,
            changes: Mutex::new(()),
            is_interrupted: AtomicBool::new(false),
        })
    }

    /// Takes pages, all of them or none; says whether there was memory for them. Their bytes are whatever was there.
    ///
    /// Waits up to `timeout_s` for others to give memory back, without the interpreter's lock; other threads may take and give
    /// back meanwhile. Raises where a page is taken already, is listed twice or does not exist.
    #[pyo3(signature = (pages, *, timeout_s=0.0))]
    fn take(&self, py: Python<'_>, pages: Vec<u32>, timeout_s: f64) -> PyResult<bool> {
        let pages: Vec<PageId> = pages.into_iter().map(PageId).collect();
        let is_taken = |outcome: kvik_memory::Result<BlocksOutcome>| {
            outcome.map(|outcome| outcome == BlocksOutcome::Allocated)
        };
        let ask = |until| {
            self.pool.wait_for(until, || match self.try_take(&pages) {
                Ok(BlocksOutcome::NoMemory(_)) if !self.is_interrupted.swap(false, Ordering::SeqCst) => None,
                answer => Some(is_taken(answer)),
            })
        };
        let outcome = if timeout_s > 0.0 {
            wait_for(py, Some(timeout_s), ask)?.unwrap_or(Ok(false))
        } else {
            py.detach(|| is_taken(self.try_take(&pages)))
        };
        outcome.map_err(|error| memory_exception_of(&error))
    }

    /// Makes a `take` that waits, or else the next one that would, return at once.
    fn interrupt(&self) {
        self.is_interrupted.store(true, Ordering::SeqCst);
        self.pool.wake();
    }

    /// Tells that the pages that were refused last are not waited for any more, so that others give nothing up for them.
    fn stop_waiting(&self, py: Python<'_>) {
        py.detach(|| self.pool.stop_waiting());
    }

    /// Gives pages back; nothing may read or write them any more. Raises and gives none back where one is not taken.
    fn give_back(&self, py: Python<'_>, pages: Vec<u32>) -> PyResult<()> {
        let pages: Vec<BlockId> = pages.into_iter().map(BlockId).collect();
        let outcome = py.detach(|| {
            let _changes = self.changes.lock();
            self.pool.free(&pages)
        });
        outcome.map_err(|error| memory_exception_of(&error))
    }

    /// Tells that the engine can do nothing until it gets the pages that were refused last. Of engines that wait for each
    /// other one is then given what the others hold.
    fn note_starved(&self) {
        self.pool.note_starved();
    }

    /// Unmaps all pages that are not taken; returns how many.
    fn trim(&self, py: Python<'_>) -> u32 {
        py.detach(|| self.pool.trim())
    }

    /// Waits up to `timeout_s` until others want memory that is taken here, or less may be held; returns the bytes that are to be
    /// given back, once.
    #[pyo3(signature = (*, timeout_s=0.0))]
    fn wanted_bytes(&self, py: Python<'_>, timeout_s: f64) -> PyResult<u64> {
        let n_bytes = wait_for(py, Some(timeout_s), |until| {
            Some(self.wanted.take(until)).filter(|n_bytes| *n_bytes > 0)
        })?;
        Ok(n_bytes.unwrap_or(0))
    }

    /// Number of pages.
    #[getter]
    fn n_pages(&self) -> u32 {
        self.geometry.capacity_pages()
    }

    /// Bytes of a page.
    #[getter]
    fn page_bytes(&self) -> u64 {
        self.geometry.page_bytes()
    }

    /// Where the first page lies.
    #[getter]
    fn address(&self) -> PyResult<u64> {
        let address = self.pool.region().and_then(|region| region.address_of(0, PageId(0)));
        address.ok_or_else(|| invalid("memory", &"without addresses", "one with addresses"))
    }

    /// Bytes of all pages that are mapped.
    #[getter]
    fn held_bytes(&self) -> u64 {
        self.pool.counters().held_bytes
    }

    /// Bytes that may be held now, beside what others hold.
    #[getter]
    fn claimable_bytes(&self) -> u64 {
        self.bounded(self.pool.counters().claimable_bytes)
    }

    /// Bytes that may be held if all others gave back what they can.
    #[getter]
    fn limit_bytes(&self) -> u64 {
        self.bounded(self.pool.counters().limit_bytes)
    }

    fn __dlpack_device__(&self) -> (i32, u32) {
        Exported::device(self.cuda_device)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        slf: &Bound<'py, Self>,
        stream: Option<Py<PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, u32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // Pages are mapped when `take` returns: there is nothing in a stream to wait for.
        drop(stream);
        let memory = slf.get();
        let is_elsewhere = dl_device.is_some_and(|device| device != memory.__dlpack_device__());
        if copy == Some(true) || is_elsewhere {
            return Err(PyBufferError::new_err("this memory is exported where it is, without a copy"));
        }
        let exported = Exported {
            address: memory.address()? as usize,
            shape: [i64::from(memory.n_pages()), memory.page_bytes().cast_signed()],
            cuda_device: memory.cuda_device,
            owner: slf.clone().unbind().into_any(),
        };
        exported.into_capsule(slf.py(), max_version.is_some_and(|(major, _)| major >= 1))
    }

    fn __repr__(&self) -> String {
        let (n_pages, page_bytes) = (self.n_pages(), self.page_bytes());
        format!("PagedMemory(n_pages={n_pages}, page_bytes={page_bytes}, held_bytes={})", self.held_bytes())
    }
}

impl PagedMemory {
    fn try_take(&self, pages: &[PageId]) -> kvik_memory::Result<BlocksOutcome> {
        let _changes = self.changes.lock();
        self.pool.alloc_pages(pages)
    }

    /// What the pool's own limit leaves of `n_bytes`.
    fn bounded(&self, n_bytes: u64) -> u64 {
        let limit_pages = self.pool.counters().pages.limit_pages;
        n_bytes.min(u64::from(limit_pages) * self.geometry.page_cost_bytes())
    }
}

impl Wanted {
    fn ask(&self, n_bytes: u64) {
        let mut wanted_bytes = self.n_bytes.lock();
        // A request that was not answered yet is repeated, not added to.
        *wanted_bytes = n_bytes.max(*wanted_bytes);
        self.changed.notify_all();
    }

    fn take(&self, deadline: Instant) -> u64 {
        let mut wanted_bytes = self.n_bytes.lock();
        while *wanted_bytes == 0 && !self.changed.wait_until(&mut wanted_bytes, deadline).timed_out() {}
        std::mem::take(&mut *wanted_bytes)
    }
}
