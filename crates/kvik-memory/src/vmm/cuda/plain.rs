//! Memory of the driver's own allocator, for what must not go through virtual memory.

use cudarc::driver::sys;

use super::CudaVmm;
use super::call::check;
use crate::Result;

impl CudaVmm {
    /// Takes `n_bytes` of the driver's own allocator, as an engine without this library would; nothing where the
    /// device has none left.
    ///
    /// The space does not see such memory, and nothing grants it. The address is a multiple of 256.
    pub fn allocate_plain(&self, n_bytes: u64) -> Result<Option<u64>> {
        let _current = self.driver().context.enter()?;
        let mut address = 0;
        // SAFETY: the address goes to a local.
        let result = unsafe { sys::cuMemAlloc_v2(&raw mut address, n_bytes as usize) };
        if result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Ok(None);
        }
        check("cuMemAlloc", result)?;
        Ok(Some(address))
    }

    /// Gives memory back that [`allocate_plain`](Self::allocate_plain) took.
    ///
    /// # Safety
    ///
    /// It was taken of this device, is not freed yet, and nothing uses it.
    pub unsafe fn free_plain(&self, address: u64) -> Result<()> {
        let _current = self.driver().context.enter()?;
        // SAFETY: the caller promised that the driver's allocator gave it and that it is unused.
        check("cuMemFree", unsafe { sys::cuMemFree_v2(address) })
    }
}
