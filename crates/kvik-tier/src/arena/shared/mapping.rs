//! A file of fixed size, mapped for as long as a value lives.

use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::error::{Result, TierError};

/// A shared mapping of the first bytes of a memory file whose size is sealed.
#[derive(Debug)]
pub(super) struct SealedMapping {
    address: NonNull<u8>,
    n_bytes: usize,
}

// SAFETY: the mapping belongs to this value alone, and it hands out only its address.
unsafe impl Send for SealedMapping {}
// SAFETY: as above; no method changes the mapping itself.
unsafe impl Sync for SealedMapping {}

impl SealedMapping {
    /// Maps `n_bytes`, at least 1.
    ///
    /// # Errors
    /// If the file is shorter, or can still be made shorter by another process.
    pub(super) fn new(file: impl AsFd, n_bytes: usize, protection: ProtFlags) -> Result<Self> {
        let failed = |action: &str| {
            let action = format!("{action} for {n_bytes} shared bytes");
            move |errno: rustix::io::Errno| TierError::io(action, errno.into())
        };
        let refused = |reason: &str| {
            let source = io::Error::new(io::ErrorKind::InvalidData, reason.to_owned());
            TierError::io(format!("map {n_bytes} shared bytes"), source)
        };
        let seals = fcntl_get_seals(&file).map_err(failed("read the seals of a memory file"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(refused("the memory file can be made shorter"));
        }
        let found = fstat(&file).map_err(failed("stat a memory file"))?.st_size;
        if n_bytes == 0 || u64::try_from(found).unwrap_or(0) < n_bytes as u64 {
            return Err(refused(&format!("the memory file has {found} bytes")));
        }
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let address = unsafe { mmap(ptr::null_mut(), n_bytes, protection, MapFlags::SHARED, &file, 0) }
            .map_err(failed("map a memory file"))?;
        let address =
            NonNull::new(address.cast()).ok_or_else(|| refused("the kernel mapped it at address 0"))?;
        Ok(Self { address, n_bytes })
    }

    pub(super) fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// The first address; all `n_bytes` from it on stay mapped as long as this value lives.
    pub(super) fn address(&self) -> NonNull<u8> {
        self.address
    }
}

impl Drop for SealedMapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new`, and users of the address borrow from or own this value.
        let unmapped = unsafe { munmap(self.address.as_ptr().cast(), self.n_bytes) };
        debug_assert!(unmapped.is_ok(), "a mapping is unmapped by the range that was mapped");
    }
}
