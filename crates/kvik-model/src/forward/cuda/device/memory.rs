//! Memory of the device and of the host beside it.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::{Device, check, warn_of};
use crate::error::Result;

/// Memory of the device.
#[derive(Debug)]
pub(in super::super) struct Buffer {
    device: Arc<Device>,
    address: u64,
    n_bytes: usize,
}

/// Memory of the host that the device's copy engine and its kernels reach by themselves.
#[derive(Debug)]
pub(in super::super) struct HostBuffer {
    device: Arc<Device>,
    start: *mut u8,
    n_bytes: usize,
}

// SAFETY: the bytes belong to this value alone.
unsafe impl Send for HostBuffer {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for HostBuffer {}

impl Buffer {
    /// `n_bytes` bytes of zeros, there before anything that is queued later; at least one.
    ///
    /// The engine's stream zeroes them, so only the engine's thread makes buffers once passes are recorded: a recording takes in what
    /// any thread queues there.
    pub(in super::super) fn zeroed(device: &Arc<Device>, n_bytes: usize) -> Result<Self> {
        device.enter()?;
        let mut address = 0;
        // SAFETY: the address goes to a local.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut address, n_bytes.max(1)) })?;
        let buffer = Self { device: Arc::clone(device), address, n_bytes };
        // SAFETY: the range is the buffer's.
        check("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(address, 0, n_bytes.max(1), device.stream())
        })?;
        Ok(buffer)
    }

    /// `bytes` in the device's memory, there when this returns.
    pub(in super::super) fn holding(device: &Arc<Device>, bytes: &[u8]) -> Result<Self> {
        let buffer = Self::zeroed(device, bytes.len())?;
        device.write(buffer.address, bytes)?;
        Ok(buffer)
    }

    /// The first byte's address on the device.
    pub(in super::super) fn address(&self) -> u64 {
        self.address
    }

    /// Number of bytes.
    pub(in super::super) fn n_bytes(&self) -> usize {
        self.n_bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // The driver waits for kernels that still use it.
            // SAFETY: allocated once, freed once here.
            let result = unsafe { sys::cuMemFree_v2(self.address) };
            warn_of("cuMemFree", result);
        }
    }
}

impl HostBuffer {
    /// `n_bytes` bytes of zeros; at least one.
    pub(in super::super) fn zeroed(device: &Arc<Device>, n_bytes: usize) -> Result<Self> {
        device.enter()?;
        let mut start = ptr::null_mut();
        // SAFETY: the pointer goes to a local.
        check("cuMemHostAlloc", unsafe {
            sys::cuMemHostAlloc(&raw mut start, n_bytes.max(1), sys::CU_MEMHOSTALLOC_PORTABLE)
        })?;
        let start = start.cast::<u8>();
        // SAFETY: the bytes were just allocated.
        unsafe { ptr::write_bytes(start, 0, n_bytes.max(1)) };
        Ok(Self { device: Arc::clone(device), start, n_bytes })
    }

    /// The first byte's address, for the device too: host and device share one address space.
    pub(in super::super) fn address(&self) -> u64 {
        self.start.expose_provenance() as u64
    }

    /// Number of bytes.
    pub(in super::super) fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// Writes words from the start on. The caller has waited for what reads or writes them on the device.
    ///
    /// # Panics
    /// If the words do not fit.
    pub(in super::super) fn put_words(&mut self, words: &[u32]) {
        assert!(size_of_val(words) <= self.n_bytes, "words past their buffer");
        // SAFETY: the bytes live as long as `self`, are this value's alone, and are as many as the words have.
        unsafe { ptr::copy_nonoverlapping(words.as_ptr().cast::<u8>(), self.start, size_of_val(words)) };
    }

    /// The bytes. The caller has waited for copies to them.
    pub(in super::super) fn bytes(&self) -> &[u8] {
        // SAFETY: the bytes are initialized and live as long as `self`; copies to them have ended.
        unsafe { std::slice::from_raw_parts(self.start, self.n_bytes) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: allocated once, freed once here; copies to it were waited for or are ended by the driver.
            let result = unsafe { sys::cuMemFreeHost(self.start.cast()) };
            warn_of("cuMemFreeHost", result);
        }
    }
}

impl Device {
    /// Copies `bytes` to the device behind what is queued; they are taken when this returns.
    ///
    /// The caller guarantees that `address` and what follows is live memory of the device.
    pub(in super::super) fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the source is ordinary memory, which the driver has read when the call returns; the caller answers for the
        // target.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(address, bytes.as_ptr().cast(), bytes.len(), self.stream())
        })?;
        // The driver may still read from ordinary memory: what it says of small copies is not a promise for all.
        // SAFETY: the stream lives as long as `self`.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream()) })
    }

    /// Copies from the device, behind what is queued, and waits for it.
    ///
    /// The caller guarantees that `address` and what follows is live memory of the device.
    pub(in super::super) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the target is this call's until it returns, and the stream is waited for; the caller answers for the source.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), address, bytes.len(), self.stream())
        })?;
        self.synchronize()
    }

    /// Copies from the device beside what is queued, and waits for it.
    ///
    /// The caller guarantees that `address` and what follows is live memory of the device that no queued work writes.
    pub(in super::super) fn read_beside(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the target is this call's until it returns, and the stream is waited for; the caller answers for the source.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), address, bytes.len(), self.copies)
        })?;
        self.synchronize_copies()
    }

    /// Queues a copy from the device to `target`, from `offset` on.
    ///
    /// The caller guarantees that `address` and what follows is live memory of the device, and looks at the bytes only after it
    /// has waited for the copy.
    ///
    /// # Panics
    /// If the bytes do not fit.
    pub(in super::super) fn queue_read(
        &self,
        address: u64,
        target: &mut HostBuffer,
        offset: usize,
        n_bytes: usize,
    ) -> Result<()> {
        assert!(offset <= target.n_bytes && n_bytes <= target.n_bytes - offset, "a copy past its buffer");
        if n_bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the range is inside of the buffer; the caller answers for the rest.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(target.start.add(offset).cast(), address, n_bytes, self.stream())
        })
    }

    /// The memory of the host around `bytes` that is registered with the driver, so that the copy engine reaches it by itself;
    /// `None` where they are not. At least the first byte is in the answer.
    pub(in super::super) fn registered_around(&self, bytes: &[u8]) -> Option<Range<usize>> {
        self.enter().ok()?;
        let address = bytes.as_ptr().expose_provenance();
        let mut kind = 0_u32;
        let mut start = 0_u64;
        let mut n_bytes = 0_usize;
        let mut attributes = [
            sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        ];
        let mut answers =
            [(&raw mut kind).cast::<c_void>(), (&raw mut start).cast(), (&raw mut n_bytes).cast()];
        // SAFETY: there are as many attributes as answers, and each answer goes to a local of its size; the driver only looks the
        // address up, and answers with zeros for one that it does not know.
        let asked = unsafe {
            sys::cuPointerGetAttributes(
                attributes.len() as u32,
                attributes.as_mut_ptr(),
                answers.as_mut_ptr(),
                address as sys::CUdeviceptr,
            )
        };
        if asked != sys::CUresult::CUDA_SUCCESS || kind != sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32 {
            return None;
        }
        let start = start as usize;
        let range = start..start.saturating_add(n_bytes);
        // A driver that does not tell the range knows at least the address.
        if range.contains(&address) { Some(range) } else { Some(address..address + bytes.len()) }
    }

    /// Queues a copy inside of the device's memory.
    ///
    /// The caller guarantees that both ranges are live memory of the device and do not overlap.
    pub(in super::super) fn queue_copy(&self, from: u64, to: u64, n_bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller answers for both ranges.
        check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, n_bytes, self.stream()) })
    }
}
