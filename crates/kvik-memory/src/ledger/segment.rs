//! Files in shared memory: opened without surprises, sized before they are mapped.

use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::fs::{FallocateFlags, FileType, Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::layout::SharedWords;
use crate::{MemoryError, Result};

/// A file that is mapped for as long as this lives.
#[derive(Debug)]
struct Mapping {
    address: NonNull<u8>,
    n_bytes: usize,
}

/// A mapped file that starts with a `T`, followed by words.
#[derive(Debug)]
pub(super) struct Segment<T> {
    mapping: Mapping,
    start: PhantomData<T>,
}

/// Whether [`open_or_create`] created the file that it returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// This call did.
    Created,
    /// It was there.
    Found,
}

/// Wraps an error of the kernel with what was tried on which file.
pub(super) fn segment_error(action: &'static str, path: &Path, source: impl Into<io::Error>) -> MemoryError {
    MemoryError::Segment { action, path: path.to_owned(), source: source.into() }
}

/// Opens the file at `path` for reading and writing; `None` if there is none.
///
/// Fails on symbolic links, on anything that is not a plain file, and on files that another user owns
/// or can open: their contents could be changed by a user without the right.
pub(super) fn open(path: &Path) -> Result<Option<OwnedFd>> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => check_owner(&file, path).map(|()| Some(file)),
        Err(rustix::io::Errno::NOENT) => Ok(None),
        Err(error) => Err(segment_error("open", path, error)),
    }
}

/// Creates the file at `path` for its owner alone; `None` if there is something already.
pub(super) fn create(path: &Path) -> Result<Option<OwnedFd>> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => Ok(Some(file)),
        Err(rustix::io::Errno::EXIST) => Ok(None),
        Err(error) => Err(segment_error("create", path, error)),
    }
}

/// Opens the file at `path`, or creates it.
pub(super) fn open_or_create(path: &Path) -> Result<(OwnedFd, Origin)> {
    // A file can come and go between the two calls; ten times in a row is an attack.
    for _ in 0..10 {
        if let Some(file) = open(path)? {
            return Ok((file, Origin::Found));
        }
        if let Some(file) = create(path)? {
            return Ok((file, Origin::Created));
        }
    }
    Err(segment_error("open", path, io::Error::from(io::ErrorKind::ResourceBusy)))
}

/// Makes `file` exactly `n_bytes` long, with memory behind all of it.
///
/// A full filesystem is found here, where it is an error, and not on first touch, where it is a signal.
pub(super) fn allocate(file: &OwnedFd, path: &Path, n_bytes: usize) -> Result<()> {
    rustix::fs::fallocate(file, FallocateFlags::empty(), 0, n_bytes as u64).map_err(|errno| {
        let error = io::Error::from(errno);
        let reason = format!("{n_bytes} bytes are needed: {error}");
        segment_error("allocate", path, io::Error::new(error.kind(), reason))
    })
}

/// The length of `file`.
pub(super) fn length_bytes(file: &OwnedFd, path: &Path) -> Result<u64> {
    let stat = rustix::fs::fstat(file).map_err(|errno| segment_error("stat", path, errno))?;
    Ok(stat.st_size.unsigned_abs())
}

/// Whether `path` still leads to the file that is open as `file`.
pub(super) fn is_same_file(file: impl std::os::fd::AsFd, path: &Path) -> Result<bool> {
    let open = rustix::fs::fstat(file).map_err(|errno| segment_error("stat", path, errno))?;
    match rustix::fs::lstat(path) {
        Ok(named) => Ok(open.st_dev == named.st_dev && open.st_ino == named.st_ino),
        Err(rustix::io::Errno::NOENT) => Ok(false),
        Err(errno) => Err(segment_error("stat", path, errno)),
    }
}

/// Removes the file at `path`; it is no error if it is gone.
pub(super) fn unlink(path: &Path) -> Result<()> {
    match rustix::fs::unlink(path) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
        Err(errno) => Err(segment_error("unlink", path, errno)),
    }
}

/// The first `N` words of `file`, zeros where it is shorter.
pub(super) fn first_words<const N: usize>(file: &OwnedFd, path: &Path) -> Result<[u64; N]> {
    use std::os::unix::fs::FileExt as _;
    let file = File::from(file.try_clone().map_err(|error| segment_error("read", path, error))?);
    let mut words = [0; N];
    for (index, word) in words.iter_mut().enumerate() {
        let mut bytes = [0; 8];
        match file.read_exact_at(&mut bytes, index as u64 * 8) {
            Ok(()) => *word = u64::from_le_bytes(bytes),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(segment_error("read", path, error)),
        }
    }
    Ok(words)
}

fn check_owner(file: &OwnedFd, path: &Path) -> Result<()> {
    let stat = rustix::fs::fstat(file).map_err(|errno| segment_error("stat", path, errno))?;
    let refuse = |reason: String| {
        Err(segment_error("open", path, io::Error::new(io::ErrorKind::PermissionDenied, reason)))
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return refuse("not a plain file".to_owned());
    }
    let user = rustix::process::geteuid().as_raw();
    if stat.st_uid != user {
        return refuse(format!("owned by user {}, this is user {user}", stat.st_uid));
    }
    let mode = stat.st_mode & 0o777;
    if mode & 0o077 != 0 {
        return refuse(format!("mode is {mode:04o}, allowed is 0600"));
    }
    Ok(())
}

// === impl Segment ===

impl<T: SharedWords> Segment<T> {
    /// Maps `n_bytes` of `file`.
    ///
    /// Fails where the file is shorter. The file's owner can still shrink it later, and a process that
    /// touches the lost part is then killed by the kernel: only its owner can open it, and nothing of
    /// kvik ever makes a file shorter.
    pub(super) fn map(file: &OwnedFd, path: &Path, n_bytes: usize) -> Result<Self> {
        let found = length_bytes(file, path)?;
        if n_bytes < size_of::<T>() || found < n_bytes as u64 {
            return Err(MemoryError::ForeignSegment {
                path: path.to_owned(),
                reason: format!("it has {found} bytes, expected {}", n_bytes.max(size_of::<T>())),
            });
        }
        // SAFETY: a new mapping at an address that the kernel chooses touches no existing memory.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                n_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )
        }
        .map_err(|errno| segment_error("map", path, errno))?;
        let address = NonNull::new(address.cast())
            .ok_or_else(|| segment_error("map", path, io::Error::from(io::ErrorKind::AddrNotAvailable)))?;
        Ok(Self { mapping: Mapping { address, n_bytes }, start: PhantomData })
    }

    /// The whole words behind the `T`.
    pub(super) fn tail(&self) -> &[AtomicU64] {
        let n_words = (self.mapping.n_bytes - size_of::<T>()) / size_of::<AtomicU64>();
        // SAFETY: `map` checked that a `T` fits, its size is a multiple of its alignment (8 or more),
        // the words lie inside of the mapping, and atomics may be shared with other processes.
        unsafe {
            let first = self.mapping.address.cast::<T>().add(1).cast::<AtomicU64>();
            std::slice::from_raw_parts(first.as_ptr(), n_words)
        }
    }
}

impl<T: SharedWords> Deref for Segment<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: `map` checked that a `T` fits, mappings are aligned to pages, any bytes are a valid
        // `T` (the trait's promise), and the mapping lives as long as `self`.
        unsafe { self.mapping.address.cast::<T>().as_ref() }
    }
}

// === impl Mapping ===

// SAFETY: the mapping belongs to this value alone and is reached through atomics only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `Segment::map`, and all references borrow from the segment.
        let result = unsafe { rustix::mm::munmap(self.address.as_ptr().cast(), self.n_bytes) };
        debug_assert!(result.is_ok(), "munmap of a whole mapping cannot fail");
    }
}
