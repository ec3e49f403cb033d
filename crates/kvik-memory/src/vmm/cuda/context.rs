//! The primary context of a device, current only while it is used.

use std::fmt::Write;
use std::marker::PhantomData;
use std::ptr;

use cudarc::driver::sys;
use tracing::warn;

use super::call::{check, no_device, words_of};
use crate::Result;

/// A hold on the primary context of a device.
#[derive(Debug)]
pub(super) struct PrimaryContext {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

/// Keeps the primary context current on this thread.
#[derive(Debug)]
pub(super) struct CurrentContext {
    is_pushed: bool,
    /// What is current is a property of the thread.
    _not_send: PhantomData<*const ()>,
}

// SAFETY: the driver's contexts can be used by any thread once they are current there.
unsafe impl Send for PrimaryContext {}
// SAFETY: as above; the fields are never written to.
unsafe impl Sync for PrimaryContext {}

impl PrimaryContext {
    pub(super) fn retain(ordinal: u32) -> Result<Self> {
        // SAFETY: looking for the library runs its initializers, which is what opening it is for.
        if !unsafe { sys::is_culib_present() } {
            return Err(no_device(ordinal, "libcuda.so.1 was not found"));
        }
        let opened = |result| match result {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            error => Err(no_device(ordinal, words_of(error))),
        };
        // SAFETY: 0 is the only value that is allowed.
        opened(unsafe { sys::cuInit(0) })?;
        let ordinal = i32::try_from(ordinal).map_err(|_| no_device(ordinal, "there is no such device"))?;
        let mut device = 0;
        // SAFETY: the device goes to a local.
        opened(unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
        let mut context = ptr::null_mut();
        // SAFETY: the context goes to a local, and the device is one.
        opened(unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) })?;
        Ok(Self { device, context })
    }

    pub(super) fn device(&self) -> sys::CUdevice {
        self.device
    }

    pub(super) fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: the value goes to a local.
        check("cuDeviceGetAttribute", unsafe {
            sys::cuDeviceGetAttribute(&raw mut value, attribute, self.device)
        })?;
        Ok(value)
    }

    /// `GPU-` and the device's UUID, as the vendor's tools print it.
    pub(super) fn device_name(&self) -> Result<String> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: the UUID goes to a local.
        check("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, self.device) })?;
        let mut name = "GPU".to_owned();
        for (idx, byte) in uuid.bytes.iter().enumerate() {
            if matches!(idx, 0 | 4 | 6 | 8 | 10) {
                name.push('-');
            }
            // Writing to a string cannot fail.
            let _ = write!(name, "{:02x}", *byte as u8);
        }
        Ok(name)
    }

    /// Makes the context current on this thread until the answer is dropped.
    pub(super) fn enter(&self) -> Result<CurrentContext> {
        let mut current = ptr::null_mut();
        // SAFETY: the context goes to a local.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&raw mut current) })?;
        let is_pushed = current != self.context;
        if is_pushed {
            // SAFETY: the context is retained as long as `self` lives.
            check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(self.context) })?;
        }
        Ok(CurrentContext { is_pushed, _not_send: PhantomData })
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // SAFETY: retained once in `retain`, released once here.
        let result = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
        if result != sys::CUresult::CUDA_SUCCESS {
            warn!(device = self.device, error = words_of(result), "could not release the primary context");
        }
    }
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        if self.is_pushed {
            let mut popped = ptr::null_mut();
            // SAFETY: pushed on this thread by `enter`, and the value cannot leave the thread.
            let result = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
            if result != sys::CUresult::CUDA_SUCCESS {
                warn!(error = words_of(result), "could not restore the thread's context");
            }
        }
    }
}
