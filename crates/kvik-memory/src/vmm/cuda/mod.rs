//! Memory of an NVIDIA GPU through the driver's virtual memory calls.
//!
//! The driver library is looked for when a device is opened; without it, or without a device, opening
//! says so and nothing else of the process is affected. All work happens in the device's primary context,
//! which engines use as well; a thread that had another context current has it again afterwards.

use std::ffi::{c_int, c_void};
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::sys;

use self::call::{check, no_device};
use self::context::PrimaryContext;
use self::fence::EventFence;
use super::{Access, Backdrop, CheckedVmm, Driver, Fence, MemoryInfo, PhysicalHandle, Stream, VirtualRange};
use crate::{MemoryError, Result};

mod call;
mod context;
mod copier;
mod copy_kernel;
mod copy_piece;
mod fence;
mod host;
mod pinned;
mod plain;
mod staging;

pub use self::copier::{CopyWay, CudaCopier};
pub use self::copy_piece::CopyPiece;
pub use self::host::CudaHostMemory;
pub use self::pinned::PinnedCopies;

/// Virtual memory of an NVIDIA GPU.
pub type CudaVmm = CheckedVmm<CudaDriver>;

/// The driver's calls behind [`CudaVmm`].
#[derive(Debug)]
pub struct CudaDriver {
    context: Arc<PrimaryContext>,
    device_name: String,
    granularity_bytes: u64,
}

/// Memory of the GPU, as the driver names it.
#[derive(Debug)]
pub struct CudaMemory(sys::CUmemGenericAllocationHandle);

impl CudaVmm {
    /// Opens the device with this index, among those that the process can see.
    ///
    /// Fails with [`MemoryError::NoDevice`] where there is no driver or no such device, or where the
    /// device has no virtual memory management.
    pub fn open(ordinal: u32) -> Result<Self> {
        let context = PrimaryContext::retain(ordinal)?;
        let has_virtual_memory = context
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?;
        if has_virtual_memory == 0 {
            return Err(no_device(ordinal, "the device has no virtual memory management"));
        }
        let device_name = context.device_name()?;
        let mut granularity_bytes = 0;
        let properties = allocation_properties(context.device(), true);
        // SAFETY: both pointers are to locals of the right types.
        check("cuMemGetAllocationGranularity", unsafe {
            sys::cuMemGetAllocationGranularity(
                &raw mut granularity_bytes,
                &raw const properties,
                sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        })?;
        if granularity_bytes == 0 {
            return Err(no_device(ordinal, "the driver says that its granularity is 0"));
        }
        let granularity_bytes = granularity_bytes as u64;
        Ok(Self::new(CudaDriver { context: Arc::new(context), device_name, granularity_bytes }))
    }

    /// The memory's `CUmemGenericAllocationHandle`, for an engine that maps it by itself.
    ///
    /// It is the driver's until [`release`](super::Vmm::release); the space does not see such mappings, so
    /// the code that releases the memory has undone them.
    pub fn raw_handle(&self, handle: PhysicalHandle) -> Result<u64> {
        self.look_at(handle, |memory| memory.0)
    }

    /// The work that `event`, a `CUevent` as an integer, stands for now.
    ///
    /// The event may be recorded again or destroyed as soon as this returns.
    ///
    /// # Safety
    ///
    /// It is an event of the device's primary context that is alive during the call.
    pub unsafe fn fence_after(&self, event: u64) -> Result<Box<dyn Fence>> {
        let event = std::ptr::with_exposed_provenance_mut(event as usize);
        // SAFETY: the caller promised that the event is alive.
        let fence = unsafe { EventFence::after(&self.driver().context, event) }?;
        Ok(Box::new(fence))
    }
}

impl Driver for CudaDriver {
    type Memory = CudaMemory;

    fn device_name(&self) -> &str {
        &self.device_name
    }

    fn granularity_bytes(&self) -> u64 {
        self.granularity_bytes
    }

    fn has_zeros_backdrop(&self) -> bool {
        false
    }

    fn reserve(&self, n_bytes: u64, _backdrop: Backdrop) -> Result<u64> {
        let _current = self.context.enter()?;
        let mut address = 0;
        // SAFETY: the address goes to a local; 0 leaves its choice to the driver.
        let result = unsafe {
            sys::cuMemAddressReserve(
                &raw mut address,
                n_bytes as usize,
                self.granularity_bytes as usize,
                0,
                0,
            )
        };
        check("cuMemAddressReserve", result)?;
        Ok(address)
    }

    fn free_reservation(&self, range: VirtualRange) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the range is a whole reservation of the driver with nothing mapped in it.
        check("cuMemAddressFree", unsafe { sys::cuMemAddressFree(range.address, range.n_bytes as usize) })
    }

    fn create(&self, n_bytes: u64, is_exportable: bool) -> Result<Option<CudaMemory>> {
        let _current = self.context.enter()?;
        let properties = allocation_properties(self.context.device(), is_exportable);
        let mut handle = 0;
        // SAFETY: the handle goes to a local; the properties are a local.
        let result = unsafe { sys::cuMemCreate(&raw mut handle, n_bytes as usize, &raw const properties, 0) };
        if result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Ok(None);
        }
        check("cuMemCreate", result)?;
        Ok(Some(CudaMemory(handle)))
    }

    fn release(&self, memory: &CudaMemory) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the handle is the driver's and is released once: success strikes it from the space.
        check("cuMemRelease", unsafe { sys::cuMemRelease(memory.0) })
    }

    fn map(&self, range: VirtualRange, memory: &CudaMemory) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the range is a bare part of a reservation, the handle is alive and at least that large.
        check("cuMemMap", unsafe { sys::cuMemMap(range.address, range.n_bytes as usize, 0, memory.0, 0) })
    }

    fn set_access(&self, range: VirtualRange, access: Access) -> Result<()> {
        let _current = self.context.enter()?;
        let flags = match access {
            Access::ReadWrite => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            Access::ReadOnly => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
        };
        let description = sys::CUmemAccessDesc { location: location_of(self.context.device()), flags };
        // SAFETY: the range is a run of whole mappings; the description is a local and its count is 1.
        check("cuMemSetAccess", unsafe {
            sys::cuMemSetAccess(range.address, range.n_bytes as usize, &raw const description, 1)
        })
    }

    fn unmap(&self, range: VirtualRange, _backdrop: Backdrop) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the range is a run of whole mappings, and the caller promised that it is unused.
        check("cuMemUnmap", unsafe { sys::cuMemUnmap(range.address, range.n_bytes as usize) })
    }

    fn export(&self, memory: &CudaMemory) -> Result<OwnedFd> {
        let _current = self.context.enter()?;
        let mut descriptor: c_int = -1;
        // SAFETY: the handle is alive; for this type of handle the driver writes one int.
        check("cuMemExportToShareableHandle", unsafe {
            sys::cuMemExportToShareableHandle(
                (&raw mut descriptor).cast::<c_void>(),
                memory.0,
                sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                0,
            )
        })?;
        if descriptor < 0 {
            return Err(MemoryError::Device {
                call: "cuMemExportToShareableHandle",
                reason: "the driver gave no descriptor".to_owned(),
            });
        }
        // SAFETY: the driver has just opened it for us and not known elsewhere.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    fn import(&self, descriptor: BorrowedFd<'_>, _n_bytes: u64) -> Result<CudaMemory> {
        let _current = self.context.enter()?;
        let mut handle = 0;
        let os_handle = std::ptr::without_provenance_mut::<c_void>(descriptor.as_raw_fd() as usize);
        // SAFETY: for this type of handle the pointer is the descriptor itself, which is open during the
        // call; the handle goes to a local.
        check("cuMemImportFromShareableHandle", unsafe {
            sys::cuMemImportFromShareableHandle(
                &raw mut handle,
                os_handle,
                sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            )
        })?;
        Ok(CudaMemory(handle))
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        let _current = self.context.enter()?;
        let (mut free_bytes, mut total_bytes) = (0, 0);
        // SAFETY: both pointers are to locals.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free_bytes, &raw mut total_bytes) })?;
        Ok(MemoryInfo { free_bytes: free_bytes as u64, total_bytes: total_bytes as u64 })
    }

    fn synchronize(&self) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the call has no arguments.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    fn record(&self, stream: Stream) -> Result<Box<dyn Fence>> {
        Ok(Box::new(EventFence::record(Arc::clone(&self.context), stream)?))
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the addresses are mapped with access and stay so; `bytes` has the length given.
        check("cuMemcpyDtoH", unsafe {
            sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast::<c_void>(), address, bytes.len())
        })
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the addresses are mapped with write access and stay so; `bytes` has the length given.
        check("cuMemcpyHtoD", unsafe {
            sys::cuMemcpyHtoD_v2(address, bytes.as_ptr().cast::<c_void>(), bytes.len())
        })?;
        wait_for_default_stream()
    }

    fn fill(&self, range: VirtualRange, byte: u8) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the range is mapped with write access and stays so until the wait below is over.
        check("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(range.address, byte, range.n_bytes as usize) })?;
        wait_for_default_stream()
    }
}

/// Copies and fills may return before the device is done, and the range may be unmapped next.
fn wait_for_default_stream() -> Result<()> {
    // SAFETY: null is the default stream of the current context.
    check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(std::ptr::null_mut()) })
}

fn location_of(device: sys::CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

fn allocation_properties(device: sys::CUdevice, is_exportable: bool) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: if is_exportable {
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        } else {
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE
        },
        location: location_of(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

// The driver's addresses and sizes are 64 bits wide, and so are this process's.
const _: () = assert!(size_of::<usize>() == size_of::<u64>());
