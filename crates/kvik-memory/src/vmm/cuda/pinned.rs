//! What plain copies between a GPU and pinned memory of the host give.

use std::ffi::c_void;
use std::ptr;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use tracing::warn;

use super::call::check;
use super::context::PrimaryContext;
use crate::Result;

/// As many bytes of a GPU as of pinned memory, to copy between the two: what other copies are compared with.
#[derive(Debug)]
pub struct PinnedCopies {
    context: PrimaryContext,
    device: sys::CUdeviceptr,
    host: *mut c_void,
    n_bytes: usize,
}

impl PinnedCopies {
    /// Takes `n_bytes` of the device with this index and of the host.
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`](crate::MemoryError::NoDevice) where there is no driver or no such device; others where one of the
    /// two has not so much.
    pub fn open(ordinal: u32, n_bytes: usize) -> Result<Self> {
        let context = PrimaryContext::retain(ordinal)?;
        let current = context.enter()?;
        let mut device = 0;
        // SAFETY: the address goes to a local.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut device, n_bytes.max(1)) })?;
        let mut copies = Self { context, device, host: ptr::null_mut(), n_bytes };
        // SAFETY: the address goes to a field.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut copies.host, n_bytes.max(1), 0) })?;
        drop(current);
        Ok(copies)
    }

    /// Copies all bytes to the GPU; says how long it took.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn to_device(&self) -> Result<Duration> {
        self.timed(|| {
            // SAFETY: both ranges are this value's, and as long.
            check("cuMemcpyHtoD", unsafe { sys::cuMemcpyHtoD_v2(self.device, self.host, self.n_bytes) })
        })
    }

    /// Copies all bytes to the host; says how long it took.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn to_host(&mut self) -> Result<Duration> {
        self.timed(|| {
            // SAFETY: both ranges are this value's, and as long.
            check("cuMemcpyDtoH", unsafe { sys::cuMemcpyDtoH_v2(self.host, self.device, self.n_bytes) })
        })
    }

    fn timed(&self, copy: impl FnOnce() -> Result<()>) -> Result<Duration> {
        let _current = self.context.enter()?;
        let begin = Instant::now();
        copy()?;
        // SAFETY: the context is current; a copy from pinned memory may return before its end.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })?;
        Ok(begin.elapsed())
    }
}

impl Drop for PinnedCopies {
    fn drop(&mut self) {
        let freed = self.context.enter().and_then(|_current| {
            if !self.host.is_null() {
                // SAFETY: allocated once, freed once here; copies were waited for.
                check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(self.host) })?;
            }
            // SAFETY: as above.
            check("cuMemFree", unsafe { sys::cuMemFree_v2(self.device) })
        });
        if let Err(error) = freed {
            warn!(%error, "memory of a measurement is not given back");
        }
    }
}
