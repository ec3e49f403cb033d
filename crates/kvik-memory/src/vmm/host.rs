//! Memory of this process with the semantics of a device.
//!
//! Physical memory is a sparse memory file. Creating takes a stretch of offsets, releasing punches a
//! hole there, mapping is a shared mapping at a fixed address. Exportable memory has a file of its own,
//! since a descriptor gives access to the whole file.

use std::collections::HashMap;
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::{fmt, ptr};

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};
use tracing::debug;

use super::{Access, Backdrop, CheckedVmm, Driver, Fence, MemoryInfo, Stream, VirtualRange};
use crate::geometry::UNIT_BYTES;
use crate::{MemoryError, Result};

/// Virtual memory of the host.
pub type HostVmm = CheckedVmm<HostDriver>;

/// A device that is simulated in this process.
#[derive(Debug, Clone, Copy)]
pub struct HostDevice {
    /// How much memory can be created. Nothing is taken of the host before it is written to.
    pub total_bytes: u64,
    /// Whether [`Backdrop::Zeros`] is offered. Without it the host needs guard pieces, as CUDA does.
    pub has_zeros_backdrop: bool,
}

/// The kernel's calls behind [`HostVmm`].
#[derive(Debug)]
pub struct HostDriver {
    device: HostDevice,
    arena: OwnedFd,
    offsets: Mutex<Offsets>,
}

/// Memory of the host.
#[derive(Debug)]
pub struct HostMemory {
    n_bytes: u64,
    backing: Backing,
}

#[derive(Debug)]
enum Backing {
    /// A stretch of the arena, from this offset on.
    Arena(u64),
    /// A whole file of its own.
    File(OwnedFd),
    /// Another process's file, which does not count here.
    Imported(OwnedFd),
}

/// Which offsets of the arena are free.
///
/// A freed stretch is used again for the same size only. That wastes offsets of a sparse file, which cost
/// nothing, and never fragments.
#[derive(Debug, Default)]
struct Offsets {
    used_bytes: u64,
    file_bytes: u64,
    free_by_size: HashMap<u64, Vec<u64>>,
}

/// Work of the host is done when its call returns.
#[derive(Debug)]
struct PassedFence;

impl HostDevice {
    /// A device with `total_bytes` of memory.
    pub fn new(total_bytes: u64) -> Self {
        Self { total_bytes, has_zeros_backdrop: true }
    }
}

impl HostVmm {
    /// Opens a device of this process.
    ///
    /// Fails where the kernel gives no memory file.
    pub fn open(device: HostDevice) -> Result<Self> {
        let arena = new_memory_file()?;
        Ok(Self::new(HostDriver { device, arena, offsets: Mutex::default() }))
    }
}

impl Driver for HostDriver {
    type Memory = HostMemory;

    fn device_name(&self) -> &'static str {
        "host0"
    }

    fn granularity_bytes(&self) -> u64 {
        UNIT_BYTES
    }

    fn has_zeros_backdrop(&self) -> bool {
        self.device.has_zeros_backdrop
    }

    fn reserve(&self, n_bytes: u64, backdrop: Backdrop) -> Result<u64> {
        // The kernel aligns to its own pages: take more, and give back what lies outside of the aligned part.
        let padded_bytes =
            n_bytes.checked_add(UNIT_BYTES).ok_or_else(|| device_error("mmap", Errno::NOMEM))?;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing.
        let start = unsafe {
            mmap_anonymous(ptr::null_mut(), padded_bytes as usize, protection_of(backdrop), backdrop_flags())
        };
        let start = start.map_err(|errno| device_error("mmap", errno))? as u64;
        let address = start.next_multiple_of(UNIT_BYTES);
        let head = VirtualRange { address: start, n_bytes: address - start };
        let tail = VirtualRange { address: address + n_bytes, n_bytes: UNIT_BYTES - head.n_bytes };
        for margin in [head, tail].into_iter().filter(|margin| margin.n_bytes != 0) {
            // SAFETY: both lie in the mapping just made, outside of what is returned and not known elsewhere.
            let trimmed = unsafe { munmap(pointer(margin.address), margin.n_bytes as usize) };
            if let Err(error) = trimmed {
                // Addresses without memory remain taken, no more.
                debug!(range = %margin, %error, "could not trim a reservation");
            }
        }
        Ok(address)
    }

    fn free_reservation(&self, range: VirtualRange) -> Result<()> {
        // SAFETY: the range is a whole reservation with nothing mapped in it; the caller promised that
        // its addresses are unused.
        unsafe { munmap(pointer(range.address), range.n_bytes as usize) }
            .map_err(|errno| device_error("munmap", errno))
    }

    fn create(&self, n_bytes: u64, is_exportable: bool) -> Result<Option<HostMemory>> {
        let mut offsets = self.offsets.lock();
        let used_bytes = offsets.used_bytes.saturating_add(n_bytes);
        if used_bytes > self.device.total_bytes {
            return Ok(None);
        }
        let backing = if is_exportable {
            let file = new_memory_file()?;
            ftruncate(&file, n_bytes).map_err(|errno| device_error("ftruncate", errno))?;
            Backing::File(file)
        } else if let Some(offset) = offsets.free_by_size.get_mut(&n_bytes).and_then(Vec::pop) {
            Backing::Arena(offset)
        } else {
            let offset = offsets.file_bytes;
            ftruncate(&self.arena, offset.saturating_add(n_bytes))
                .map_err(|errno| device_error("ftruncate", errno))?;
            offsets.file_bytes += n_bytes;
            Backing::Arena(offset)
        };
        offsets.used_bytes = used_bytes;
        Ok(Some(HostMemory { n_bytes, backing }))
    }

    fn release(&self, memory: &HostMemory) -> Result<()> {
        let mut offsets = self.offsets.lock();
        match &memory.backing {
            Backing::Arena(offset) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(&self.arena, flags, *offset, memory.n_bytes)
                    .map_err(|errno| device_error("fallocate", errno))?;
                offsets.free_by_size.entry(memory.n_bytes).or_default().push(*offset);
            }
            Backing::File(_) => {}
            Backing::Imported(_) => return Ok(()),
        }
        offsets.used_bytes -= memory.n_bytes;
        Ok(())
    }

    fn map(&self, range: VirtualRange, memory: &HostMemory) -> Result<()> {
        let (file, offset) = match &memory.backing {
            Backing::Arena(offset) => (self.arena.as_fd(), *offset),
            Backing::File(file) | Backing::Imported(file) => (file.as_fd(), 0),
        };
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the range lies in a reservation of this driver where nothing is mapped, so only the
        // backdrop is replaced; the file is at least that long.
        let mapped = unsafe {
            mmap(pointer(range.address), range.n_bytes as usize, ProtFlags::empty(), flags, file, offset)
        };
        mapped.map(drop).map_err(|errno| device_error("mmap", errno))
    }

    fn set_access(&self, range: VirtualRange, access: Access) -> Result<()> {
        let protection = match access {
            Access::ReadWrite => MprotectFlags::READ | MprotectFlags::WRITE,
            Access::ReadOnly => MprotectFlags::READ,
        };
        // SAFETY: the range is a run of mappings of this driver; no reference into it is held here.
        unsafe { mprotect(pointer(range.address), range.n_bytes as usize, protection) }
            .map_err(|errno| device_error("mprotect", errno))
    }

    fn unmap(&self, range: VirtualRange, backdrop: Backdrop) -> Result<()> {
        let flags = backdrop_flags() | MapFlags::FIXED;
        // SAFETY: the range is a run of whole mappings of this driver, and the caller promised that nothing
        // uses it. The backdrop takes their place in one step, so no other thread can get the addresses.
        let replaced = unsafe {
            mmap_anonymous(pointer(range.address), range.n_bytes as usize, protection_of(backdrop), flags)
        };
        replaced.map(drop).map_err(|errno| device_error("mmap", errno))
    }

    fn export(&self, memory: &HostMemory) -> Result<OwnedFd> {
        match &memory.backing {
            Backing::File(file) | Backing::Imported(file) => duplicate(file.as_fd()),
            Backing::Arena(_) => Err(MemoryError::Device {
                call: "export",
                reason: "the memory was not created exportable".to_owned(),
            }),
        }
    }

    fn import(&self, descriptor: BorrowedFd<'_>, n_bytes: u64) -> Result<HostMemory> {
        let stat = fstat(descriptor).map_err(|errno| device_error("fstat", errno))?;
        // A touch of a mapping past the end of a file kills the process.
        if u64::try_from(stat.st_size).unwrap_or(0) < n_bytes {
            return Err(MemoryError::Invalid {
                field: "n_bytes",
                value: n_bytes.to_string(),
                allowed: format!("up to the {} bytes that were exported", stat.st_size),
            });
        }
        Ok(HostMemory { n_bytes, backing: Backing::Imported(duplicate(descriptor)?) })
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        let total_bytes = self.device.total_bytes;
        let used_bytes = self.offsets.lock().used_bytes;
        Ok(MemoryInfo { free_bytes: total_bytes - used_bytes, total_bytes })
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn record(&self, _stream: Stream) -> Result<Box<dyn Fence>> {
        Ok(Box::new(PassedFence))
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: the addresses are readable during the call and `bytes` is no memory of the device.
        // Engines may write at the same time, as on a device; then the bytes are either theirs or older.
        unsafe { ptr::copy_nonoverlapping(pointer(address).cast::<u8>(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: the addresses are writable during the call and `bytes` is no memory of the device.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), pointer(address).cast::<u8>(), bytes.len()) };
        Ok(())
    }

    fn fill(&self, range: VirtualRange, byte: u8) -> Result<()> {
        // SAFETY: the range is writable during the call.
        unsafe { ptr::write_bytes(pointer(range.address).cast::<u8>(), byte, range.n_bytes as usize) };
        Ok(())
    }
}

impl Fence for PassedFence {
    fn is_complete(&self) -> Result<bool> {
        Ok(true)
    }
}

fn new_memory_file() -> Result<OwnedFd> {
    memfd_create("kvik-memory", MemfdFlags::CLOEXEC).map_err(|errno| device_error("memfd_create", errno))
}

fn duplicate(descriptor: BorrowedFd<'_>) -> Result<OwnedFd> {
    descriptor
        .try_clone_to_owned()
        .map_err(|error| MemoryError::Device { call: "dup", reason: error.to_string() })
}

fn protection_of(backdrop: Backdrop) -> ProtFlags {
    match backdrop {
        Backdrop::Nothing => ProtFlags::empty(),
        Backdrop::Zeros => ProtFlags::READ,
    }
}

fn backdrop_flags() -> MapFlags {
    MapFlags::PRIVATE | MapFlags::NORESERVE
}

fn pointer(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

fn device_error(call: &'static str, reason: impl fmt::Display) -> MemoryError {
    MemoryError::Device { call, reason: reason.to_string() }
}
