//! Compiled kernels on a device.

use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::{Device, check, warn_of};
use crate::error::{ModelError, Result};

/// Pointers to the arguments of a kernel, in the form that the driver takes.
macro_rules! arguments {
    ($($argument:expr),+) => {
        [$((&raw const $argument).cast::<::std::ffi::c_void>().cast_mut()),+]
    };
}
pub(in super::super) use arguments;

/// Kernels that were loaded together.
#[derive(Debug)]
pub(in super::super) struct Module {
    device: Arc<Device>,
    module: sys::CUmodule,
}

// SAFETY: modules can be used by any thread of the process.
unsafe impl Send for Module {}
// SAFETY: as above; nothing changes them.
unsafe impl Sync for Module {}

/// A kernel.
#[derive(Debug)]
pub(in super::super) struct Function {
    module: Arc<Module>,
    raw: sys::CUfunction,
    n_threads: u32,
    shared_bytes: u32,
    /// Blocks that run on one multiprocessor at a time.
    blocks_per_multiprocessor: u32,
}

// SAFETY: as for `Module`, which it keeps.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// Names a tensor to the copy engine; the layout is the driver's.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct TensorMap([u64; 16]);

/// A tensor of 16-bit elements in three dimensions, the innermost first, and the box of it that is copied at a time.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct TensorShape {
    pub(in super::super) elements: [u64; 3],
    /// Bytes from one line to the next, and from one plane to the next.
    pub(in super::super) stride_bytes: [u64; 2],
    pub(in super::super) box_elements: [u32; 3],
    pub(in super::super) swizzle: Swizzle,
}

/// How the copy engine exchanges units of sixteen bytes in shared memory, so that matrix instructions read them without conflicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Swizzle {
    None,
    /// In lines of 32 bytes.
    Lines32,
    /// In lines of 128 bytes.
    Lines128,
}

impl Module {
    /// Loads compiled code.
    pub(in super::super) fn load(device: &Arc<Device>, code: &[u8]) -> Result<Arc<Self>> {
        device.enter()?;
        let mut module = ptr::null_mut();
        // SAFETY: the module goes to a local; the driver checks the code, whose length stands in its header.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut module, code.as_ptr().cast()) })?;
        Ok(Arc::new(Self { device: Arc::clone(device), module }))
    }

    /// The kernel `name`, to be started with these numbers.
    pub(in super::super) fn function(
        self: &Arc<Self>,
        name: &str,
        n_threads: u32,
        shared_bytes: u32,
    ) -> Result<Function> {
        self.device.enter()?;
        let c_name = CString::new(name)
            .map_err(|error| ModelError::Device { call: "cuModuleGetFunction", reason: error.to_string() })?;
        let mut function = ptr::null_mut();
        // SAFETY: the module is alive, and the name ends with a null byte.
        check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&raw mut function, self.module, c_name.as_ptr())
        })?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is alive.
        check("cuFuncSetAttribute", unsafe {
            sys::cuFuncSetAttribute(function, attribute, shared_bytes.cast_signed())
        })?;
        let mut n_blocks = 0;
        // SAFETY: the number goes to a local, and the function is alive.
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut n_blocks,
                function,
                n_threads.cast_signed(),
                shared_bytes as usize,
            )
        })?;
        let blocks_per_multiprocessor = n_blocks.max(1).unsigned_abs();
        Ok(Function {
            module: Arc::clone(self),
            raw: function,
            n_threads,
            shared_bytes,
            blocks_per_multiprocessor,
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: loaded once, unloaded once here; functions keep the module.
            warn_of("cuModuleUnload", unsafe { sys::cuModuleUnload(self.module) });
        }
    }
}

impl Function {
    /// Blocks that run on the whole device at a time.
    pub(in super::super) fn resident_blocks(&self) -> u32 {
        self.blocks_per_multiprocessor * self.module.device.n_multiprocessors()
    }

    /// Queues the kernel with a grid of `columns` by `rows` blocks; the device's context must be current. The kernel may be started
    /// while the one before it still runs: it waits for it by itself.
    ///
    /// # Safety
    /// `arguments` points to the kernel's arguments in their order and types. Until the stream has passed the kernel, all memory
    /// that these name is alive and large enough for what the kernel does with it. All blocks of the kernel wait for the kernels
    /// before it.
    pub(in super::super) unsafe fn launch(
        &self,
        columns: u32,
        rows: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        if columns == 0 || rows == 0 {
            return Ok(());
        }
        let mut starts_early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: columns,
            gridDimY: rows,
            gridDimZ: 1,
            blockDimX: self.n_threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: self.module.device.stream(),
            attrs: &raw mut starts_early,
            numAttrs: 1,
        };
        // SAFETY: configuration and arguments are read before the call returns; the caller answers for the arguments.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(&raw const config, self.raw, arguments.as_mut_ptr(), ptr::null_mut())
        })
    }
}

impl Function {
    /// Queues the kernel with so many blocks beside the stream of passes; the device's context must be current.
    ///
    /// # Safety
    /// As for [`Self::launch`], until [`Device::synchronize_copies`] has returned; no queued work writes what it reads.
    pub(in super::super) unsafe fn launch_beside(
        &self,
        n_blocks: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        // SAFETY: the arguments are read before the call returns; the caller answers for them.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                self.raw,
                n_blocks,
                1,
                1,
                self.n_threads,
                1,
                1,
                self.shared_bytes,
                self.module.device.copies,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
    }
}

impl TensorMap {
    /// Names the tensor of 16-bit elements at `address`.
    pub(in super::super) fn of(address: u64, shape: TensorShape) -> Result<Self> {
        let swizzle = match shape.swizzle {
            Swizzle::None => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            Swizzle::Lines32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            Swizzle::Lines128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        let element_strides = [1_u32; 3];
        let mut map = Self([0; 16]);
        // SAFETY: the map is as large and as aligned as the driver's type, and the lists have one entry a dimension (strides:
        // one less), which are read before the call returns. The address is only written down.
        check("cuTensorMapEncodeTiled", unsafe {
            sys::cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
                3,
                ptr::with_exposed_provenance_mut(address as usize),
                shape.elements.as_ptr(),
                shape.stride_bytes.as_ptr(),
                shape.box_elements.as_ptr(),
                element_strides.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        })?;
        Ok(map)
    }
}
