//! Memory of the device between a file and the blocks.

use std::sync::Arc;

use super::super::device::{Buffer, CuFile, Device, FileHandle, Function, HostBuffer, arguments};
use super::{CALL_BYTES, FILE_BLOCK_BYTES, failed};
use crate::error::Result;

/// Threads of a block of the kernel, as `checksum.cu` has it.
pub(super) const CHECKSUM_THREADS: u32 = 256;

/// Most sections of a read or a write.
pub(super) const MAX_SECTIONS: usize = 512;

/// Where one read or write goes.
#[derive(Debug)]
pub(super) struct Lane {
    device: Arc<Device>,
    library: &'static CuFile,
    memory: Buffer,
    checksums: HostBuffer,
}

/// Arguments of `checksum_sections`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct SectionArguments {
    words: u64,
    checksums: u64,
    n_words: u64,
}

impl Lane {
    /// Room for [`CALL_BYTES`] and a block of a file on each side. The memory is there when the device has done what is queued.
    pub(super) fn new(device: &Arc<Device>, library: &'static CuFile) -> Result<Self> {
        // A read begins and ends with whole blocks of the file.
        let memory = Buffer::zeroed(device, CALL_BYTES + 2 * FILE_BLOCK_BYTES as usize)?;
        let checksums = HostBuffer::zeroed(device, MAX_SECTIONS * 8)?;
        // SAFETY: the memory is alive until this is dropped, and so is the registration.
        if let Err(error) = unsafe { library.register_memory(memory.address(), memory.n_bytes()) } {
            tracing::debug!(%error, "memory for files is mapped for each call");
        }
        Ok(Self { device: Arc::clone(device), library, memory, checksums })
    }

    /// Where its memory begins.
    pub(super) fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Reads from `offset` of a file on to the start of its memory.
    pub(super) fn read(&mut self, file: &FileHandle<'_>, n_bytes: usize, offset: u64) -> Result<()> {
        self.check_room(n_bytes)?;
        // SAFETY: there are so many bytes, and they are the caller's alone; all kernels that used them have ended.
        unsafe { file.read(self.address(), n_bytes, offset) }
    }

    /// Writes the start of its memory to a file, from `offset` on.
    pub(super) fn write(&mut self, file: &FileHandle<'_>, n_bytes: usize, offset: u64) -> Result<()> {
        self.check_room(n_bytes)?;
        // SAFETY: there are so many bytes, which are the caller's alone; all copies and kernels that used them have ended.
        unsafe { file.write(self.address(), n_bytes, offset) }
    }

    /// The checksums of sections that lie one behind the other from `address` on, inside of its memory.
    pub(super) fn checksums_of(
        &mut self,
        checksum: &Function,
        address: u64,
        section_bytes: usize,
        n_sections: usize,
    ) -> Result<Vec<u64>> {
        let start = address.checked_sub(self.address()).map(|start| start as usize);
        let end = start.and_then(|start| start.checked_add(section_bytes.checked_mul(n_sections)?));
        self.check_room(end.unwrap_or(usize::MAX))?;
        if MAX_SECTIONS < n_sections || !section_bytes.is_multiple_of(8) {
            return Err(failed(format!("up to {MAX_SECTIONS} sections of whole words")));
        }
        let sections = SectionArguments {
            words: address,
            checksums: self.checksums.address(),
            n_words: section_bytes as u64 / 8,
        };
        // SAFETY: the lane has so many sections of whole words, and room for as many checksums; it is the caller's until the kernel
        // has ended.
        unsafe { checksum.launch_beside(n_sections as u32, &mut arguments![sections])? };
        self.device.synchronize_copies()?;
        let (words, _) = self.checksums.bytes()[..n_sections * 8].as_chunks::<8>();
        Ok(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }

    fn check_room(&self, n_bytes: usize) -> Result<()> {
        if self.memory.n_bytes() < n_bytes {
            return Err(failed(format!("up to {} bytes at a time", self.memory.n_bytes())));
        }
        Ok(())
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: nothing reads or writes any more. What was not registered is refused.
            unsafe { self.library.deregister_memory(self.memory.address()) };
        }
    }
}
