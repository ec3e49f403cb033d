//! One stretch of addresses over a memory file.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs,
    ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::run::Run;
use super::{HugePages, numa};
use crate::error::{Result, TierError};

/// The size of the huge pages that are asked for: every x86-64 and most arm64 machines have it.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The type of file systems whose files lie in huge pages.
const HUGE_FILE_SYSTEM: i64 = 0x9584_58F6;

/// How often addresses are looked for: another thread must map memory within microseconds for one to be lost.
const MAX_ALIGNED_TRIES: usize = 16;

/// A shared mapping of a whole memory file, which it owns.
///
/// The file cannot be resized any more, so no address of the mapping ever lies past its end. A child of
/// `fork` does not get the mapping: a copy of the allocator there would hand out the same bytes.
#[derive(Debug)]
pub(super) struct Mapping {
    address: NonNull<u8>,
    n_bytes: usize,
    file: OwnedFd,
    is_huge: bool,
}

// SAFETY: the mapping is plain memory that belongs to no thread. It hands out addresses, no references;
// only `Held` makes references of them, and upholds their rules.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method changes the mapping itself.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reserves `n_bytes`, in huge pages if `huge_pages` says so and the machine has as many free.
    ///
    /// Huge pages are reserved here, so that their lack is known now; memory of ordinary pages is not.
    /// `n_bytes` is a multiple of the ordinary page size; with huge pages it is rounded down to theirs.
    pub(super) fn new(n_bytes: usize, huge_pages: HugePages) -> Result<Self> {
        if huge_pages == HugePages::Never {
            return Self::with_pages(n_bytes, false);
        }
        let huge_bytes = n_bytes - n_bytes % HUGE_PAGE_BYTES;
        match Self::with_pages(huge_bytes, true) {
            Err(_) if huge_pages == HugePages::Auto => Self::with_pages(n_bytes, false),
            outcome => outcome,
        }
    }

    /// Maps all of a memory file that another mapping was made with.
    ///
    /// # Errors
    /// If it is empty, or if its size is not sealed.
    pub(super) fn adopt(file: OwnedFd) -> Result<Self> {
        let failed = |errno: Errno| TierError::io("adopt a memory file", errno.into());
        let refused = |reason: &str| {
            TierError::io(
                "adopt a memory file",
                io::Error::new(io::ErrorKind::InvalidData, reason.to_owned()),
            )
        };
        let seals = fcntl_get_seals(&file).map_err(failed)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(refused("its size is not sealed"));
        }
        let found = fstat(&file).map_err(failed)?.st_size;
        let n_bytes = usize::try_from(found).ok().filter(|n_bytes| *n_bytes > 0);
        let n_bytes = n_bytes.ok_or_else(|| refused("it is empty"))?;
        let is_huge = fstatfs(&file).map_err(failed)?.f_type == HUGE_FILE_SYSTEM;
        Self::map(file, n_bytes, is_huge).map_err(failed)
    }

    pub(super) fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    pub(super) fn is_huge(&self) -> bool {
        self.is_huge
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The first address.
    pub(super) fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// The address of the byte `offset`, which must be at most the mapping's length.
    pub(super) fn at(&self, offset: usize) -> NonNull<u8> {
        debug_assert!(offset <= self.n_bytes);
        // SAFETY: the result lies inside of the mapping, or one past its end; all callers pass an offset of
        // a run, and runs lie inside of the arena, which is as long as the mapping.
        unsafe { self.address.add(offset) }
    }

    /// Spreads the memory that is still to come over `nodes` in turn.
    pub(super) fn interleave(&self, nodes: &[u32]) -> io::Result<()> {
        numa::interleave(self.address, self.n_bytes, nodes)
    }

    /// Gets memory for `run` from the kernel, and its page table entries with it.
    ///
    /// What has memory already keeps it, with its content.
    ///
    /// # Errors
    /// If there is no memory: touching the run would have killed the process.
    pub(super) fn populate(&self, run: Run) -> io::Result<()> {
        let range = run.byte_range();
        let address = self.at(range.start).as_ptr().cast::<c_void>();
        loop {
            // SAFETY: the range is inside of the mapping; this advice changes no byte of it.
            match unsafe { madvise(address, range.len(), Advice::LinuxPopulateWrite) } {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => {}
                // A kernel before 5.14: it can give the memory, without the page table.
                Err(Errno::INVAL) => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        loop {
            match fallocate(&self.file, FallocateFlags::empty(), range.start as u64, range.len() as u64) {
                Err(Errno::INTR) => {}
                outcome => return outcome.map_err(io::Error::from),
            }
        }
    }

    fn with_pages(n_bytes: usize, is_huge: bool) -> Result<Self> {
        let failed = |action: &str| {
            let action = format!(
                "{action} for {n_bytes} bytes of {} pages",
                if is_huge { "huge" } else { "ordinary" }
            );
            move |errno: Errno| TierError::io(action, errno.into())
        };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let flags = if is_huge { flags | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB } else { flags };
        let file = memfd_create("kvik-arena", flags).map_err(failed("create a memory file"))?;
        ftruncate(&file, n_bytes as u64).map_err(failed("size a memory file"))?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(failed("seal a memory file"))?;
        Self::map(file, n_bytes, is_huge).map_err(failed("map a memory file"))
    }

    /// Maps a file of this length, of which no child of `fork` gets a copy.
    fn map(file: OwnedFd, n_bytes: usize, is_huge: bool) -> rustix::io::Result<Self> {
        let address = map_aligned(&file, n_bytes)?;
        let mapping = Self { address, n_bytes, file, is_huge };
        mapping.advise(Advice::LinuxDontFork)?;
        if !is_huge {
            // A kernel that is built or set up without them goes on with ordinary pages.
            let _ = mapping.advise(Advice::LinuxHugepage);
        }
        Ok(mapping)
    }

    fn advise(&self, advice: Advice) -> rustix::io::Result<()> {
        // SAFETY: the range is the whole mapping; neither of the two advices that are given changes what
        // this process reads there.
        unsafe { madvise(self.address.as_ptr().cast(), self.n_bytes, advice) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping that `map_aligned` made. Every reference into it was made through
        // a `Held`, which keeps the mapping, so there is none left.
        let unmapped = unsafe { munmap(self.address.as_ptr().cast(), self.n_bytes) };
        debug_assert!(unmapped.is_ok(), "a mapping is unmapped by the range that was mapped");
    }
}

/// Maps all of `file` at a multiple of the huge page size, so that its huge pages can be mapped as such.
///
/// If other threads keep taking the addresses that were found free, the mapping lies wherever the kernel puts it, which
/// costs time and nothing else.
fn map_aligned(file: &OwnedFd, n_bytes: usize) -> rustix::io::Result<NonNull<u8>> {
    let padded_bytes = n_bytes.checked_add(HUGE_PAGE_BYTES).ok_or(Errno::NOMEM)?;
    for _ in 0..MAX_ALIGNED_TRIES {
        let start = free_address(padded_bytes)?;
        match map_at(start, n_bytes, MapFlags::FIXED_NOREPLACE, file) {
            // A kernel before 4.17 takes the address as a hint.
            Ok(mapped) if mapped.as_ptr().cast() != start => unmap(mapped, n_bytes),
            Err(Errno::EXIST) => {}
            outcome => return outcome,
        }
    }
    map_at(ptr::null_mut(), n_bytes, MapFlags::empty(), file)
}

/// A multiple of the huge page size from which on `padded_bytes`, less one huge page, were free a moment ago.
///
/// The addresses are given back before they are used. The other way, `MAP_FIXED` over a reservation, leaves a hole if
/// it fails half way, as it does for lack of huge pages; another thread may map memory there, and releasing the
/// reservation would take it away.
fn free_address(padded_bytes: usize) -> rustix::io::Result<*mut c_void> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing.
    let found = unsafe { mmap_anonymous(ptr::null_mut(), padded_bytes, ProtFlags::empty(), flags) }?;
    // SAFETY: the range is the mapping just made, which no other code knows.
    unsafe { munmap(found, padded_bytes) }?;
    Ok(found.wrapping_byte_add(found.cast::<u8>().align_offset(HUGE_PAGE_BYTES)))
}

/// Maps all of `file` at `start`, or anywhere if it is null; `flags` never let it replace another mapping.
fn map_at(
    start: *mut c_void,
    n_bytes: usize,
    flags: MapFlags,
    file: &OwnedFd,
) -> rustix::io::Result<NonNull<u8>> {
    debug_assert!(!flags.contains(MapFlags::FIXED));
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: without `MAP_FIXED` a new mapping takes the place of no other.
    let mapped = unsafe { mmap(start, n_bytes, protection, MapFlags::SHARED | flags, file, 0) }?;
    NonNull::new(mapped.cast()).ok_or(Errno::NOMEM)
}

/// Unmaps what `map_at` has just mapped.
fn unmap(mapped: NonNull<u8>, n_bytes: usize) {
    // SAFETY: the range is one mapping, which no other code knows.
    let unmapped = unsafe { munmap(mapped.as_ptr().cast(), n_bytes) };
    debug_assert!(unmapped.is_ok(), "a mapping is unmapped by the range that was mapped");
}
