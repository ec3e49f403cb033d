//! A GPU: its context, its memory, its queue of work and the kernels on it.
//!
//! The driver is loaded when a device is opened; without it opening says so. All work of one [`Device`] goes through one
//! stream, in order, but for copies beside it. [`Device::enter`] makes the context current on the calling thread; every method here does so itself.

mod compiler;
mod cufile;
mod graph;
mod memory;
mod module;

use std::ffi::CStr;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use tracing::warn;

use crate::error::{ModelError, Result};

pub(super) use compiler::compile;
pub(super) use cufile::{CuFile, FileHandle};
pub(super) use graph::Graph;
pub(super) use memory::{Buffer, HostBuffer};
pub(super) use module::{Function, Module, Swizzle, TensorMap, TensorShape, arguments};

/// The oldest compute capability whose copy engine and matrix instructions the kernels use: Hopper's.
const MIN_CAPABILITY: (i32, i32) = (9, 0);

/// An open GPU with one stream.
#[derive(Debug)]
pub(super) struct Device {
    ordinal: u32,
    raw: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// For copies of memory that no queued work writes.
    copies: sys::CUstream,
    n_multiprocessors: u32,
}

// SAFETY: contexts and streams can be used by any thread of the process.
unsafe impl Send for Device {}
// SAFETY: as above; the driver orders calls of several threads.
unsafe impl Sync for Device {}

/// What a GPU has of memory, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryInfo {
    pub(super) free_bytes: u64,
    pub(super) total_bytes: u64,
}

impl Device {
    /// Opens the GPU with this index among those that the process can see.
    ///
    /// # Errors
    /// [`ModelError::NoDevice`] without a driver or such a device, and for one too old for the kernels.
    pub(super) fn open(ordinal: u32) -> Result<Arc<Self>> {
        let refused = |reason: String| ModelError::NoDevice { device: format!("cuda:{ordinal}"), reason };
        // SAFETY: looking for the library runs its initializers, which is what opening it is for.
        if !unsafe { sys::is_culib_present() } {
            return Err(refused("libcuda.so.1 was not found; install NVIDIA's driver".to_owned()));
        }
        let opened = |result| match result {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            error => Err(refused(words_of(error))),
        };
        // SAFETY: 0 is the only value that is allowed.
        opened(unsafe { sys::cuInit(0) })?;
        let index = i32::try_from(ordinal).map_err(|_| refused("there is no such device".to_owned()))?;
        let mut device = 0;
        // SAFETY: the device goes to a local.
        opened(unsafe { sys::cuDeviceGet(&raw mut device, index) })?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: the value goes to a local, and the device is one.
            opened(unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) })?;
            Ok::<i32, ModelError>(value)
        };
        let capability = (
            attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        // Matrix instructions of a warpgroup exist on Hopper alone, before and after it they are others.
        if capability.0 != MIN_CAPABILITY.0 {
            let (major, minor) = capability;
            return Err(refused(format!(
                "compute capability {major}.{minor}; the kernels are for 9.0 (Hopper)"
            )));
        }
        let n_multiprocessors =
            attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs();
        let mut context = ptr::null_mut();
        // SAFETY: the context goes to a local, and the device is one.
        opened(unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) })?;
        let mut opened_device = Self {
            ordinal,
            raw: device,
            context,
            stream: ptr::null_mut(),
            copies: ptr::null_mut(),
            n_multiprocessors,
        };
        opened_device.enter()?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        for stream in [&mut opened_device.stream, &mut opened_device.copies] {
            // SAFETY: the stream goes to a field.
            check("cuStreamCreate", unsafe { sys::cuStreamCreate(stream, flags) })?;
        }
        Ok(Arc::new(opened_device))
    }

    /// Makes the context current on this thread.
    pub(super) fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained as long as `self` lives.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// The index under which it was opened.
    pub(super) fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Number of multiprocessors.
    pub(super) fn n_multiprocessors(&self) -> u32 {
        self.n_multiprocessors
    }

    /// What the device has of memory.
    pub(super) fn memory_info(&self) -> Result<MemoryInfo> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both values go to locals.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
    }

    /// Waits until the stream has done all that was queued.
    pub(super) fn synchronize(&self) -> Result<()> {
        self.enter()?;
        // SAFETY: the stream lives as long as `self`.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    /// Waits until all that was queued beside the stream is done.
    pub(super) fn synchronize_copies(&self) -> Result<()> {
        self.enter()?;
        // SAFETY: the stream lives as long as `self`.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.copies) })
    }

    fn stream(&self) -> sys::CUstream {
        self.stream
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        for stream in [self.stream, self.copies] {
            if self.enter().is_ok() && !stream.is_null() {
                // SAFETY: created once, destroyed once here; buffers hold the device, so none is in use any more.
                warn_of("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(stream) });
            }
        }
        // SAFETY: retained once in `open`, released once here.
        let result = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.raw) };
        warn_of("cuDevicePrimaryCtxRelease", result);
    }
}

/// The driver's answer as a result, with its words for an error.
fn check(call: &'static str, result: sys::CUresult) -> Result<()> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            Err(ModelError::Device { call, reason: "the device has not so much memory left".to_owned() })
        }
        error => Err(ModelError::Device { call, reason: words_of(error) }),
    }
}

/// A failure where nothing can be done about it any more.
fn warn_of(call: &'static str, result: sys::CUresult) {
    if result != sys::CUresult::CUDA_SUCCESS {
        warn!(call, error = words_of(result), "cannot give back what belongs to the device");
    }
}

/// The driver's name and description of an error.
fn words_of(error: sys::CUresult) -> String {
    let mut words = ptr::null();
    // SAFETY: the pointer goes to a local; on success it is a string that lives as long as the library.
    let described = unsafe { sys::cuGetErrorString(error, &raw mut words) };
    if described != sys::CUresult::CUDA_SUCCESS || words.is_null() {
        return format!("{error:?}");
    }
    // SAFETY: as above; the driver's strings end with a null byte.
    let words = unsafe { CStr::from_ptr(words) };
    format!("{error:?} ({})", words.to_string_lossy())
}
