//! Results of driver calls as errors.

use std::ffi::CStr;
use std::ptr;

use cudarc::driver::sys;

use crate::{MemoryError, Result};

/// The driver's answer as a result, with its words for an error.
pub(super) fn check(call: &'static str, result: sys::CUresult) -> Result<()> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(MemoryError::Device { call, reason: words_of(error) }),
    }
}

/// The error of a device that cannot be opened.
pub(super) fn no_device(ordinal: u32, reason: impl Into<String>) -> MemoryError {
    MemoryError::NoDevice { device: format!("cuda:{ordinal}"), reason: reason.into() }
}

/// The driver's name and description of an error.
pub(super) fn words_of(error: sys::CUresult) -> String {
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
