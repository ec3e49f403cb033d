//! Arrays of other libraries by `DLPack`, the protocol of `__dlpack__`, versions 0 and 1.

use std::ffi::{CStr, c_void};
use std::slice;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMemoryView};

use crate::array::ArrayView;
use crate::error::invalid;

/// The name of a capsule with a [`ManagedTensor`].
const CAPSULE: &CStr = c"dltensor";

/// The name of a capsule with a [`VersionedTensor`].
const VERSIONED_CAPSULE: &CStr = c"dltensor_versioned";

/// The version whose structures these are; later minor versions only add to them.
const MAJOR_VERSION: u32 = 1;

/// Memory of the processor.
const DEVICE_CPU: i32 = 1;

/// Memory of a CUDA device.
const DEVICE_CUDA: i32 = 2;

/// Memory of the processor that a CUDA device can read.
const DEVICE_CUDA_HOST: i32 = 3;

/// Of [`DataType::code`]: whole numbers from 0 on.
const CODE_UNSIGNED: u8 = 1;

/// Of [`VersionedTensor::flags`]: it must not be written.
const FLAG_READ_ONLY: u64 = 1;

/// Of [`VersionedTensor::flags`]: it is a copy of the array.
const FLAG_COPIED: u64 = 2;

/// The most axes: more than any library has.
const MAX_AXES: i32 = 64;

#[repr(C)]
struct Device {
    kind: i32,
    ordinal: i32,
}

#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    n_axes: i32,
    dtype: DataType,
    shape: *mut i64,
    /// In items; null where the array is contiguous in C's order.
    strides: *mut i64,
    offset_bytes: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct ManagedTensor {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct VersionedTensor {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut VersionedTensor)>,
    flags: u64,
    tensor: Tensor,
}

/// Memory of this module for other libraries: bytes in two axes, without gaps.
#[derive(Debug)]
pub(crate) struct Exported {
    pub(crate) address: usize,
    pub(crate) shape: [i64; 2],
    /// The CUDA device that has it; `None` for memory of this process.
    pub(crate) cuda_device: Option<u32>,
    /// Keeps it where it is.
    pub(crate) owner: Py<PyAny>,
}

/// What a capsule has: the structure, and what it points to.
#[repr(C)]
struct Lent<T> {
    /// The first field: its address is that of the whole.
    managed: T,
    shape: [i64; 2],
    strides: [i64; 2],
    _owner: Py<PyAny>,
}

/// The memory of an object with `__dlpack__`; `None` where it has none, or does not export this array.
///
/// The capsule is the owner and is never marked as used, so its destructor gives the array back.
pub(crate) fn import(object: &Bound<'_, PyAny>) -> PyResult<Option<ArrayView>> {
    if !object.hasattr("__dlpack__")? {
        return Ok(None);
    }
    let py = object.py();
    let (kind, _): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    let is_cuda = kind == DEVICE_CUDA;
    if !is_cuda && kind != DEVICE_CPU && kind != DEVICE_CUDA_HOST {
        let given = format!("one of DLPack's kind {kind}");
        return Err(invalid("device of the array", &given, "the CPU or a CUDA device"));
    }
    let arguments = PyDict::new(py);
    if is_cuda {
        // The bytes are used later, in order with streams: there is nothing to wait for now.
        arguments.set_item("stream", -1)?;
    }
    let plain = arguments.copy()?;
    arguments.set_item("max_version", (MAJOR_VERSION, 0))?;
    let exported = object.call_method("__dlpack__", (), Some(&arguments)).or_else(|error| {
        // Of a library that is older than versions.
        let is_old = error.is_instance_of::<PyTypeError>(py);
        if is_old { object.call_method("__dlpack__", (), Some(&plain)) } else { Err(error) }
    });
    match exported {
        Ok(capsule) => view_of(&capsule).map(Some),
        // Such as an array that must not be written, of a library without versions: its buffer says so.
        Err(error) if error.is_instance_of::<PyBufferError>(py) && PyMemoryView::from(object).is_ok() => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn view_of(capsule: &Bound<'_, PyAny>) -> PyResult<ArrayView> {
    let address = |name: &CStr| {
        // SAFETY: the object is alive, and the pointer is asked for only of a capsule with this name.
        unsafe {
            let is_named = ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) != 0;
            is_named.then(|| ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()))
        }
    };
    if let Some(managed) = address(VERSIONED_CAPSULE) {
        // SAFETY: a capsule of this name has this structure, at least up to its version, which is the same in all of them.
        let (major, minor) = unsafe {
            let managed = managed.cast::<VersionedTensor>();
            ((*managed).major, (*managed).minor)
        };
        if major != MAJOR_VERSION {
            let given = format!("{major}.{minor}");
            return Err(invalid("DLPack's version", &given, &format!("{MAJOR_VERSION}, or none")));
        }
        // SAFETY: as above; the version is the one of this structure. The capsule keeps it.
        let VersionedTensor { flags, tensor, .. } = unsafe { &*managed.cast::<VersionedTensor>() };
        if flags & FLAG_COPIED != 0 {
            return Err(invalid("array", &"exported as a copy", "one that is exported where it is"));
        }
        return tensor.view(capsule, flags & FLAG_READ_ONLY != 0);
    }
    if let Some(managed) = address(CAPSULE) {
        // SAFETY: a capsule of this name has this structure, and keeps it.
        let ManagedTensor { tensor, .. } = unsafe { &*managed.cast::<ManagedTensor>() };
        return tensor.view(capsule, false);
    }
    Err(invalid("result of `__dlpack__`", &capsule.get_type(), "a capsule with a tensor"))
}

impl Tensor {
    fn view(&self, capsule: &Bound<'_, PyAny>, is_read_only: bool) -> PyResult<ArrayView> {
        let item_bits = usize::from(self.dtype.bits) * usize::from(self.dtype.lanes);
        if item_bits == 0 || !item_bits.is_multiple_of(8) {
            return Err(invalid("item of the array", &format!("{item_bits} bits"), "whole bytes"));
        }
        let item_bytes = item_bits / 8;
        if !(0..=MAX_AXES).contains(&self.n_axes) || (self.n_axes > 0 && self.shape.is_null()) {
            return Err(invalid("axes of the array", &self.n_axes, &format!("0 to {MAX_AXES}")));
        }
        let n_axes = self.n_axes as usize;
        let numbers = |first: *mut i64| {
            if n_axes == 0 {
                return Vec::new();
            }
            // SAFETY: not null, which is checked here and below; the exporter has as many numbers as axes, which the
            // capsule keeps.
            unsafe { slice::from_raw_parts(first, n_axes) }.to_vec()
        };
        let too_long = || invalid("axes of the array", &"longer than memory", "what memory can hold");
        let shape: Vec<usize> = numbers(self.shape)
            .into_iter()
            .map(|length| usize::try_from(length).map_err(|_| too_long()))
            .collect::<PyResult<_>>()?;
        let strides = if self.strides.is_null() {
            ArrayView::contiguous_strides(&shape, item_bytes).ok_or_else(too_long)?
        } else {
            let in_bytes = |stride: i64| (stride as isize).checked_mul(item_bytes as isize);
            numbers(self.strides).into_iter().map(in_bytes).collect::<Option<_>>().ok_or_else(too_long)?
        };
        let address = (self.data as usize).checked_add(self.offset_bytes as usize).ok_or_else(too_long)?;
        let cuda_device = (self.device.kind == DEVICE_CUDA).then(|| self.device.ordinal.cast_unsigned());
        let owner = capsule.clone().unbind();
        Ok(ArrayView { address, item_bytes, shape, strides, is_read_only, cuda_device, owner })
    }
}

// === impl Exported ===

impl Exported {
    /// The device of memory, in numbers of the protocol.
    pub(crate) fn device(cuda_device: Option<u32>) -> (i32, u32) {
        cuda_device.map_or((DEVICE_CPU, 0), |ordinal| (DEVICE_CUDA, ordinal))
    }

    /// A capsule that owns what it points to, until another library takes it over.
    pub(crate) fn into_capsule(self, py: Python<'_>, is_versioned: bool) -> PyResult<Bound<'_, PyAny>> {
        let (kind, ordinal) = Self::device(self.cuda_device);
        let Self { address, shape, owner, .. } = self;
        let tensor = Tensor {
            data: address as *mut c_void,
            device: Device { kind, ordinal: ordinal.cast_signed() },
            n_axes: 2,
            dtype: DataType { code: CODE_UNSIGNED, bits: 8, lanes: 1 },
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            offset_bytes: 0,
        };
        let strides = [shape[1], 1];
        if is_versioned {
            let (major, minor, flags) = (MAJOR_VERSION, 0, 0);
            let (context, deleter) = (std::ptr::null_mut(), Some(VersionedTensor::delete as _));
            let managed = VersionedTensor { major, minor, context, deleter, flags, tensor };
            let lent = Box::into_raw(Box::new(Lent { managed, shape, strides, _owner: owner }));
            // SAFETY: just made, and known to nothing else; the pointers are to the same allocation, which does not move.
            unsafe {
                (*lent).managed.tensor.shape = (&raw mut (*lent).shape).cast();
                (*lent).managed.tensor.strides = (&raw mut (*lent).strides).cast();
            }
            return capsule_of(py, lent.cast(), VERSIONED_CAPSULE, VersionedTensor::destroy);
        }
        let (context, deleter) = (std::ptr::null_mut(), Some(ManagedTensor::delete as _));
        let managed = ManagedTensor { tensor, context, deleter };
        let lent = Box::into_raw(Box::new(Lent { managed, shape, strides, _owner: owner }));
        // SAFETY: as above.
        unsafe {
            (*lent).managed.tensor.shape = (&raw mut (*lent).shape).cast();
            (*lent).managed.tensor.strides = (&raw mut (*lent).strides).cast();
        }
        capsule_of(py, lent.cast(), CAPSULE, ManagedTensor::destroy)
    }
}

fn capsule_of<'py>(
    py: Python<'py>,
    lent: *mut c_void,
    name: &'static CStr,
    destroy: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the pointer is not null, the name lives for ever, and the destructor is that of the structure. A null result has
    // raised an exception. What is lent is lost then, which costs memory and nothing else.
    unsafe {
        let capsule = ffi::PyCapsule_New(lent, name.as_ptr(), Some(destroy));
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}

impl ManagedTensor {
    /// Gives the memory back; called by the library that took it over, in any thread.
    unsafe extern "C" fn delete(managed: *mut Self) {
        // SAFETY: this module made it as the first field of a box, and the protocol has it deleted once.
        drop(unsafe { Box::from_raw(managed.cast::<Lent<Self>>()) });
    }

    /// The destructor of its capsule.
    unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
        // SAFETY: Python calls it with the capsule of this structure. One that was taken over has another name.
        unsafe {
            if ffi::PyCapsule_IsValid(capsule, CAPSULE.as_ptr()) != 0 {
                Self::delete(ffi::PyCapsule_GetPointer(capsule, CAPSULE.as_ptr()).cast());
            }
        }
    }
}

impl VersionedTensor {
    /// As that of [`ManagedTensor`].
    unsafe extern "C" fn delete(managed: *mut Self) {
        // SAFETY: as there.
        drop(unsafe { Box::from_raw(managed.cast::<Lent<Self>>()) });
    }

    /// As that of [`ManagedTensor`].
    unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
        // SAFETY: as there.
        unsafe {
            if ffi::PyCapsule_IsValid(capsule, VERSIONED_CAPSULE.as_ptr()) != 0 {
                Self::delete(ffi::PyCapsule_GetPointer(capsule, VERSIONED_CAPSULE.as_ptr()).cast());
            }
        }
    }
}
