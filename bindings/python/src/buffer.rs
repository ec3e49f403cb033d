//! Arrays by the buffer protocol.

use std::ffi::{c_char, c_int, c_void};
use std::slice;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

use crate::array::ArrayView;
use crate::error::invalid;

/// Of `PyObject_GetBuffer`: shape and strides, whether or not it may be written.
const BUFFER_FULL_READ_ONLY: c_int = 0x0100 | 0x0004 | 0x0018;

/// `Py_buffer`: part of the stable ABI since Python 3.11, and the same in 3.10.
#[repr(C)]
struct Buffer {
    address: *mut c_void,
    object: *mut ffi::PyObject,
    n_bytes: isize,
    item_bytes: isize,
    is_read_only: c_int,
    n_axes: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, buffer: *mut Buffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(buffer: *mut Buffer);
}

/// The memory of an object with the buffer protocol.
///
/// # Errors
/// If it has none, or its items are not at fixed distances.
pub(crate) fn import(object: &Bound<'_, PyAny>) -> PyResult<ArrayView> {
    // It holds the object's buffer until it is dropped.
    let owner = PyMemoryView::from(object).map_err(|_| {
        let allowed = "an object with `__dlpack__` or with the buffer protocol";
        invalid("array", &object.get_type(), allowed)
    })?;
    let mut buffer = std::mem::MaybeUninit::<Buffer>::zeroed();
    // SAFETY: the view is alive, and the structure is what the function writes.
    let status = unsafe { PyObject_GetBuffer(owner.as_ptr(), buffer.as_mut_ptr(), BUFFER_FULL_READ_ONLY) };
    if status != 0 {
        return Err(PyErr::fetch(object.py()));
    }
    // SAFETY: the function wrote it, and said so.
    let mut buffer = unsafe { buffer.assume_init() };
    let view = buffer.view(&owner);
    // SAFETY: it was taken above and is released once. The memory stays, for the view above holds a buffer of its own.
    unsafe { PyBuffer_Release(&raw mut buffer) };
    view
}

impl Buffer {
    fn view(&self, owner: &Bound<'_, PyMemoryView>) -> PyResult<ArrayView> {
        let n_axes = self.n_axes.max(0) as usize;
        if !self.suboffsets.is_null() || (n_axes > 0 && (self.shape.is_null() || self.strides.is_null())) {
            return Err(invalid("array", &"one of pointers", "one whose items are at fixed distances"));
        }
        let numbers = |first: *mut isize| {
            if n_axes == 0 {
                return Vec::new();
            }
            // SAFETY: not null, which is checked above; a buffer has as many numbers as axes.
            unsafe { slice::from_raw_parts(first, n_axes) }.to_vec()
        };
        Ok(ArrayView {
            address: self.address as usize,
            item_bytes: self.item_bytes.max(1).cast_unsigned(),
            shape: numbers(self.shape).into_iter().map(|length| length.max(0).cast_unsigned()).collect(),
            strides: numbers(self.strides),
            is_read_only: self.is_read_only != 0,
            cuda_device: None,
            owner: owner.clone().into_any().unbind(),
        })
    }
}
