//! Memory of the host that a GPU reaches by itself.

use std::ptr::NonNull;

use cudarc::driver::sys;
use tracing::warn;

use super::call::check;
use super::context::PrimaryContext;
use crate::Result;

/// Registers memory of this process with the driver, so that copies between it and any GPU run at full speed
/// and beside other work.
#[derive(Debug)]
pub struct CudaHostMemory {
    context: PrimaryContext,
}

impl CudaHostMemory {
    /// Opens the device with this index; what is registered through it is good for all devices.
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`](crate::MemoryError::NoDevice) where there is no driver or no such device.
    pub fn open(ordinal: u32) -> Result<Self> {
        Ok(Self { context: PrimaryContext::retain(ordinal)? })
    }

    /// Registers `n_bytes` from `address` on. The driver pins them and reads and writes nothing by itself.
    ///
    /// The caller keeps them mapped until [`Self::unregister`]; memory that is unmapped before stays pinned
    /// until the process ends.
    ///
    /// # Errors
    /// If the driver refuses, as it does for what is not mapped or registered already.
    pub fn register(&self, address: NonNull<u8>, n_bytes: usize) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the driver checks the range itself and refuses what is not mapped; pinning it changes no byte.
        check("cuMemHostRegister", unsafe {
            sys::cuMemHostRegister_v2(address.as_ptr().cast(), n_bytes, sys::CU_MEMHOSTREGISTER_PORTABLE)
        })
    }

    /// Forgets a range that was registered at this address.
    pub fn unregister(&self, address: NonNull<u8>) {
        let outcome = self.context.enter().and_then(|_current| {
            // SAFETY: the driver looks the address up and refuses what was not registered.
            check("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(address.as_ptr().cast()) })
        });
        if let Err(error) = outcome {
            warn!(%error, "host memory stays registered with the driver");
        }
    }
}
