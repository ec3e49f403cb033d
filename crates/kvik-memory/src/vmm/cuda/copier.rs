//! Copies of many pieces between a GPU and memory of the host.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys;
use parking_lot::Mutex;
use tracing::warn;

use super::call::{check, words_of};
use super::context::PrimaryContext;
use super::copy_kernel::{ALIGNMENT, CopyKernel};
use super::copy_piece::CopyPiece;
use super::staging::{Staging, is_for_staging};
use crate::Result;

/// Pieces that are given to the driver at a time. More cost nothing less, and some drivers fail with tens of thousands.
const BATCH_PIECES: usize = 4096;

/// The version of the driver's interface that has copies of many pieces.
const BATCH_VERSION: i32 = 12_080;

/// Pieces below this many bytes, on the whole, are copied by a kernel that reads memory of the host, where that is allowed:
/// above it the driver's own copies are as fast.
const KERNEL_BYTES: usize = 128 << 10;

/// Pieces below this many bytes, on the whole, are copied by way of memory of the GPU, where that is allowed: above it the
/// driver's own copies reach the rate of the bus.
const STAGED_BYTES: usize = 4 << 20;

/// Copies in a stream of its own, beside the work of other streams.
#[derive(Debug)]
pub struct CudaCopier {
    context: PrimaryContext,
    /// One copy at a time; others wait.
    stream: Mutex<CopyStream>,
    batch: Option<BatchCopy>,
}

/// How pieces may be copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyWay {
    /// Piece by piece: any memory of the host.
    Single,
    /// Many pieces at a time: memory of the host that is registered with the driver.
    Batch,
    /// To the GPU, as `Batch` or, if the pieces are small, by a kernel.
    BatchOrKernel,
    /// From memory of the GPU to memory of the GPU, by a kernel where there is one.
    Inside,
}

#[derive(Debug)]
struct CopyStream {
    stream: sys::CUstream,
    kernel: Option<CopyKernel>,
    staging: Option<Staging>,
}

// SAFETY: a stream can be used by any thread of its process.
unsafe impl Send for CopyStream {}

type BatchCopy = unsafe extern "C" fn(
    *mut sys::CUdeviceptr,
    *mut sys::CUdeviceptr,
    *mut usize,
    usize,
    *mut sys::CUmemcpyAttributes,
    *mut usize,
    usize,
    *mut usize,
    sys::CUstream,
) -> sys::CUresult;

impl CudaCopier {
    /// Opens the device with this index.
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`](crate::MemoryError::NoDevice) where there is no driver or no such device.
    pub fn open(ordinal: u32) -> Result<Self> {
        Self::open_with(ordinal, false)
    }

    /// Opens the device as [`Self::open`] does, and takes 48 MiB of its memory where it has them, by way of which copies of
    /// small pieces to the GPU are as fast as those of large ones.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub fn open_staged(ordinal: u32) -> Result<Self> {
        Self::open_with(ordinal, true)
    }

    fn open_with(ordinal: u32, is_staged: bool) -> Result<Self> {
        let context = PrimaryContext::retain(ordinal)?;
        let current = context.enter()?;
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the stream goes to a local.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
        // Without it the driver copies small pieces too, which takes longer.
        let kernel =
            CopyKernel::load().inspect_err(|error| warn!(%error, "there is no kernel for small pieces")).ok();
        let new_staging = || {
            let staging = Staging::new();
            let staging = staging.inspect_err(|error| warn!(%error, "copies to the GPU are not staged"));
            staging.ok()
        };
        let staging = if is_staged && kernel.is_some() { new_staging() } else { None };
        drop(current);
        let stream = Mutex::new(CopyStream { stream, kernel, staging });
        Ok(Self { context, stream, batch: find_batch_copy() })
    }

    /// Whether many pieces are copied by one call of the driver.
    pub fn has_batches(&self) -> bool {
        self.batch.is_some()
    }

    /// Copies all pieces behind the work that `after`, a `CUevent` as an integer, stands for, and waits for the end.
    ///
    /// # Safety
    /// All bytes of all pieces are alive and used by nothing else until this returns, beside the work before `after`, and are
    /// memory that `way` allows; `after` is an event of this device's primary context that is alive.
    ///
    /// # Errors
    /// If the driver refuses. Any of the targets may have been written then.
    pub unsafe fn copy(&self, pieces: &[CopyPiece], way: CopyWay, after: Option<u64>) -> Result<()> {
        let _current = self.context.enter()?;
        let mut locked = self.stream.lock();
        let CopyStream { stream, kernel, staging } = &mut *locked;
        let after = after.map(|event| ptr::with_exposed_provenance_mut(event as usize));
        let is_small = way == CopyWay::BatchOrKernel && is_aligned(pieces);
        let is_inside = way == CopyWay::Inside && is_aligned(pieces);
        if is_small
            && mean_bytes(pieces) < STAGED_BYTES
            && let (Some(kernel), Some(staging)) = (kernel.as_mut(), staging.as_mut())
            && is_for_staging(pieces)
        {
            // SAFETY: the caller answers for the pieces and the event; both streams have ended before this returns.
            let queued = unsafe { staging.queue(kernel, pieces, *stream, after) };
            let spread = staging.wait();
            return queued.and(spread).and(wait(*stream));
        }
        if let Some(event) = after {
            // SAFETY: the caller answers for the event, and the stream is this value's.
            check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(*stream, event, 0) })?;
        }
        let queued = match kernel {
            Some(kernel) if is_inside || (is_small && mean_bytes(pieces) < KERNEL_BYTES) => {
                // SAFETY: the caller answers for the pieces; the stream has ended its work before it is unlocked.
                unsafe { kernel.queue(pieces, *stream) }
            }
            _ => pieces.chunks(BATCH_PIECES).try_for_each(|pieces| {
                // SAFETY: the caller answers for the pieces.
                unsafe { self.queue(pieces, way, *stream) }
            }),
        };
        // Also after a failure: what was queued must not touch the bytes any more.
        let ended = wait(*stream);
        queued.and(ended)
    }

    /// # Safety
    /// As for [`Self::copy`], until the stream has ended.
    unsafe fn queue(&self, pieces: &[CopyPiece], way: CopyWay, stream: sys::CUstream) -> Result<()> {
        let Some(batch) = self.batch.filter(|_| way != CopyWay::Single) else {
            return pieces.iter().try_for_each(|piece| {
                // SAFETY: the caller answers for the bytes.
                check("cuMemcpyAsync", unsafe {
                    sys::cuMemcpyAsync(piece.target, piece.source, piece.n_bytes, stream)
                })
            });
        };
        let mut targets: Vec<sys::CUdeviceptr> = pieces.iter().map(|piece| piece.target).collect();
        let mut sources: Vec<sys::CUdeviceptr> = pieces.iter().map(|piece| piece.source).collect();
        let mut lengths: Vec<usize> = pieces.iter().map(|piece| piece.n_bytes).collect();
        let nowhere =
            sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        // The sources are read in the order of the stream: they may still be written by what comes before `after`.
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        let (mut first, mut failed) = (0, 0);
        // SAFETY: the lists have as many entries as is said, and are read before the call returns; one entry of attributes
        // is for all pieces from the first on. The caller answers for the bytes.
        check("cuMemcpyBatchAsync", unsafe {
            batch(
                targets.as_mut_ptr(),
                sources.as_mut_ptr(),
                lengths.as_mut_ptr(),
                pieces.len(),
                &raw mut attributes,
                &raw mut first,
                1,
                &raw mut failed,
                stream,
            )
        })
    }
}

impl Drop for CudaCopier {
    fn drop(&mut self) {
        let mut locked = self.stream.lock();
        if let Some(kernel) = &mut locked.kernel {
            kernel.unload(&self.context);
        }
        if let Some(staging) = &mut locked.staging {
            staging.close(&self.context);
        }
        // SAFETY: created once in `open`, destroyed once here, with no work left in it.
        let result = unsafe { sys::cuStreamDestroy_v2(locked.stream) };
        if result != sys::CUresult::CUDA_SUCCESS {
            warn!(error = words_of(result), "could not destroy a stream");
        }
    }
}

/// Whether the pieces are such as the kernel copies.
fn is_aligned(pieces: &[CopyPiece]) -> bool {
    let is_aligned = |piece: &CopyPiece| {
        (piece.target | piece.source | piece.n_bytes as u64).is_multiple_of(ALIGNMENT as u64)
    };
    u32::try_from(pieces.len()).is_ok() && pieces.iter().all(is_aligned)
}

fn mean_bytes(pieces: &[CopyPiece]) -> usize {
    pieces.iter().map(|piece| piece.n_bytes).sum::<usize>() / pieces.len().max(1)
}

/// Waits for the end of the work of a stream, whose context must be current.
fn wait(stream: sys::CUstream) -> Result<()> {
    // SAFETY: the callers have the stream, alive.
    check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })
}

/// The driver's call for many pieces, where it has one.
fn find_batch_copy() -> Option<BatchCopy> {
    let mut address: *mut c_void = ptr::null_mut();
    let mut status = sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    // SAFETY: the name ends with a null byte, and the answers go to locals.
    let result = unsafe {
        sys::cuGetProcAddress_v2(
            c"cuMemcpyBatchAsync".as_ptr(),
            &raw mut address,
            BATCH_VERSION,
            0,
            &raw mut status,
        )
    };
    if result != sys::CUresult::CUDA_SUCCESS || address.is_null() {
        return None;
    }
    // SAFETY: the driver gives the function of this name in the asked version, which has this signature.
    Some(unsafe { std::mem::transmute::<*mut c_void, BatchCopy>(address) })
}
