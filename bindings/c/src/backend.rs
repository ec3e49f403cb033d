//! The devices that a pool can be on.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use kvik_memory::Result;
use kvik_memory::vmm::cuda::CudaVmm;
use kvik_memory::vmm::host::{HostDevice, HostVmm};
use kvik_memory::vmm::{Created, Fence, PhysicalHandle, Vmm};

/// What the device's own allocator aligns to: on CUDA it does so by itself.
const PLAIN_ALIGNMENT: usize = 256;

/// A device, with what only its kind can do.
#[derive(Debug)]
pub(crate) enum Backend {
    Host(Arc<HostVmm>),
    Cuda(Arc<CudaVmm>),
}

/// Physical memory that an engine maps by itself.
#[derive(Debug)]
pub(crate) struct Chunk {
    handle: PhysicalHandle,
    /// What the engine calls it.
    pub(crate) number: u64,
    /// Keeps the number of a chunk of the host open.
    _descriptor: Option<OwnedFd>,
}

impl Backend {
    /// Opens a CUDA device, or the host with `host_bytes` where `device` is below zero.
    pub(crate) fn open(device: i32, host_bytes: u64) -> Result<Self> {
        match u32::try_from(device) {
            Ok(ordinal) => Ok(Self::Cuda(Arc::new(CudaVmm::open(ordinal)?))),
            Err(_) => Ok(Self::Host(Arc::new(HostVmm::open(HostDevice::new(host_bytes))?))),
        }
    }

    pub(crate) fn vmm(&self) -> Arc<dyn Vmm> {
        match self {
            Self::Host(vmm) => Arc::<HostVmm>::clone(vmm),
            Self::Cuda(vmm) => Arc::<CudaVmm>::clone(vmm),
        }
    }

    /// What must be over before memory is free: the work before `event`, or nothing on the host, which has
    /// no work of its own.
    ///
    /// # Safety
    ///
    /// On CUDA `event` is NULL or an event of the device that is alive during the call.
    pub(crate) unsafe fn fence_after(&self, event: *mut c_void) -> Result<Option<Box<dyn Fence>>> {
        match self {
            Self::Cuda(vmm) if !event.is_null() => {
                // SAFETY: the caller promised that the event is alive.
                let fence = unsafe { vmm.fence_after(event.expose_provenance() as u64) }?;
                Ok((!fence.is_complete()?).then_some(fence))
            }
            Self::Cuda(_) | Self::Host(_) => Ok(None),
        }
    }

    /// Creates memory for the engine to map; nothing where the device has none.
    pub(crate) fn create_chunk(&self, n_bytes: u64) -> Result<Option<Chunk>> {
        let vmm = self.vmm();
        let Created::Memory(handle) = vmm.create_exportable(n_bytes)? else { return Ok(None) };
        let named = match self {
            Self::Host(vmm) => vmm.export(handle).map(|file| (file.as_raw_fd() as u64, Some(file))),
            Self::Cuda(vmm) => vmm.raw_handle(handle).map(|number| (number, None)),
        };
        match named {
            Ok((number, descriptor)) => Ok(Some(Chunk { handle, number, _descriptor: descriptor })),
            Err(error) => {
                // The error of the call that failed first says more.
                let _ = vmm.release(handle);
                Err(error)
            }
        }
    }

    pub(crate) fn release_chunk(&self, chunk: &Chunk) -> Result<()> {
        self.vmm().release(chunk.handle)
    }

    /// Takes memory of the device's own allocator, without a grant, at a multiple of 256; nothing where it has none.
    pub(crate) fn allocate_plain(&self, n_bytes: u64) -> Result<Option<u64>> {
        match self {
            Self::Host(_) => {
                let mut start = ptr::null_mut();
                // SAFETY: the address goes to a local; the alignment is a power of two and a multiple of a pointer.
                let error =
                    unsafe { libc::posix_memalign(&raw mut start, PLAIN_ALIGNMENT, n_bytes as usize) };
                Ok((error == 0).then(|| start.expose_provenance() as u64))
            }
            Self::Cuda(vmm) => vmm.allocate_plain(n_bytes),
        }
    }

    /// Gives back what [`allocate_plain`](Self::allocate_plain) took.
    ///
    /// # Safety
    ///
    /// It was taken of this device, is not freed yet, and nothing uses it.
    pub(crate) unsafe fn free_plain(&self, start: u64) -> Result<()> {
        match self {
            Self::Host(_) => {
                // SAFETY: the caller promised that the allocator gave it.
                unsafe { libc::free(ptr::with_exposed_provenance_mut(start as usize)) };
                Ok(())
            }
            // SAFETY: as above.
            Self::Cuda(vmm) => unsafe { vmm.free_plain(start) },
        }
    }
}
