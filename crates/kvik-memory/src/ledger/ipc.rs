//! The files of one IPC name: what existing tools read and write, and the lock that its users hold.
//!
//! The first 24 bytes are `total`, `used` and `prealloc` in bytes. Tools set a limit by writing
//! `total`. To tell their write from ours, ours is announced in `intent_total` before and noted in
//! `published_total` afterwards: a `total` that is neither was written by a tool.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::{NameWords, SharedWords};
use super::liveness::{LockFile, LockKind};
use super::name::{load_name, store_name};
use super::segment::{self, Segment, segment_error};
use super::steps;
use crate::{MemoryError, Result};

const IPC_MAGIC: u64 = u64::from_le_bytes(*b"KVIKIPC\0");
const IPC_VERSION: u64 = 1;
const LOCK_MAGIC: u64 = u64::from_le_bytes(*b"KVIKLOCK");

/// Read-locked by every member for its life; a write lock proves that there are no others.
const BYTE_USERS: usize = 0;
/// Write-locked for a few stores by the process that writes `total`.
const BYTE_WRITER: usize = 1;

#[derive(Debug)]
#[repr(C)]
struct IpcLayout {
    total_bytes: AtomicU64,
    used_bytes: AtomicU64,
    prealloc_bytes: AtomicU64,
    magic: AtomicU64,
    version: AtomicU64,
    size_bytes: AtomicU64,
    intent_total_bytes: AtomicU64,
    published_total_bytes: AtomicU64,
    device: NameWords,
}

const IPC_BYTES: usize = size_of::<IpcLayout>();

const _: () = assert!(IPC_BYTES == 128 && std::mem::offset_of!(IpcLayout, magic) == 24);

// SAFETY: repr(C), atomics only.
unsafe impl SharedWords for IpcLayout {}

/// A member's hold on the files of its group.
#[derive(Debug)]
pub(super) struct IpcFile {
    segment: Segment<IpcLayout>,
    lock: LockFile,
    /// Whether the numbers in the file are of this member's device; one name may be used on several.
    is_of_this_device: bool,
}

/// The path of the file of `ipc_name`.
pub(super) fn ipc_path(dir: &Path, ipc_name: &str) -> PathBuf {
    dir.join(ipc_name)
}

/// The path of the lock of `ipc_name`.
pub(super) fn ipc_lock_path(dir: &Path, ipc_name: &str) -> PathBuf {
    dir.join(format!("{ipc_name}_lock"))
}

/// Removes the files of `ipc_name` that are ours, if no live process uses them; says which.
pub(super) fn remove_unused(dir: &Path, ipc_name: &str) -> Result<Vec<PathBuf>> {
    let lock_path = ipc_lock_path(dir, ipc_name);
    let mut removed = Vec::new();
    let Some(lock) = LockFile::open_existing(&lock_path)? else { return Ok(removed) };
    if !lock.try_lock(BYTE_USERS, 0, LockKind::Exclusive)? || !lock.is_current()? {
        return Ok(removed);
    }
    let prefix = format!("{ipc_name}_page_");
    for entry in std::fs::read_dir(dir).map_err(|error| segment_error("list", dir, error))?.flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(&prefix)?.parse::<u32>().ok());
        if number.is_some() && super::page_states::is_page_file(&entry.path()) {
            segment::unlink(&entry.path())?;
            removed.push(entry.path());
        }
    }
    steps::step();
    let path = ipc_path(dir, ipc_name);
    if is_ipc_file(&path)? {
        segment::unlink(&path)?;
        removed.push(path);
    }
    steps::step();
    // The lock goes last: a process that finds it gone after locking it starts over.
    if is_lock_file(&lock_path)? {
        segment::unlink(&lock_path)?;
        removed.push(lock_path);
    }
    Ok(removed)
}

/// Whether `path` is an IPC file of ours, of any version.
pub(super) fn is_ipc_file(path: &Path) -> Result<bool> {
    let Some(file) = segment::open(path)? else { return Ok(false) };
    Ok(segment::first_words::<4>(&file, path)?[3] == IPC_MAGIC)
}

fn is_lock_file(path: &Path) -> Result<bool> {
    let Some(file) = segment::open(path)? else { return Ok(false) };
    Ok(segment::first_words::<1>(&file, path)?[0] == LOCK_MAGIC)
}

// === impl IpcFile ===

impl IpcFile {
    /// Opens the files of `ipc_name` or creates them, and holds them until this is dropped.
    ///
    /// Fails where the file is not ours, or is of another version and in use.
    pub(super) fn open(dir: &Path, ipc_name: &str, device: &str, total_bytes: u64) -> Result<Self> {
        let path = ipc_path(dir, ipc_name);
        let lock = Self::hold(&ipc_lock_path(dir, ipc_name))?;
        lock.lock(BYTE_WRITER, 1, LockKind::Exclusive)?;
        let segment = match Self::open_segment(&path, &lock, device, total_bytes) {
            Ok(segment) => segment,
            Err(error) => {
                drop(lock);
                // What was made for this attempt goes; a file that is not ours stays.
                let _ = remove_unused(dir, ipc_name);
                return Err(error);
            }
        };
        lock.unlock(BYTE_WRITER, 1);
        let is_of_this_device = load_name(&segment.device) == device;
        Ok(Self { segment, lock, is_of_this_device })
    }

    fn hold(lock_path: &Path) -> Result<LockFile> {
        loop {
            let lock = LockFile::open(lock_path)?;
            // A process that removes the files holds the lock for a few system calls.
            lock.lock(BYTE_USERS, 1, LockKind::Shared)?;
            if !lock.is_current()? {
                continue;
            }
            if let Err(errno) = rustix::io::pwrite(&lock, &LOCK_MAGIC.to_le_bytes(), 0) {
                if lock.try_lock(BYTE_USERS, 0, LockKind::Exclusive)? {
                    segment::unlink(lock_path)?;
                }
                return Err(segment_error("write 8 bytes to", lock_path, errno));
            }
            return Ok(lock);
        }
    }

    /// The caller holds both bytes of the lock, the first one shared.
    fn open_segment(
        path: &Path,
        lock: &LockFile,
        device: &str,
        total_bytes: u64,
    ) -> Result<Segment<IpcLayout>> {
        if let Some(file) = segment::open(path)? {
            let n_bytes = segment::length_bytes(&file, path)?;
            let words = segment::first_words::<6>(&file, path)?;
            let is_unfinished = n_bytes == 0 || (n_bytes == IPC_BYTES as u64 && words[3] == 0);
            let is_ours = words[3] == IPC_MAGIC;
            if !is_unfinished && !is_ours {
                return Err(foreign(path, &format!("{n_bytes} bytes, magic {:#018x}", words[3])));
            }
            let is_alone = lock.try_lock(BYTE_USERS, 1, LockKind::Exclusive)?;
            if is_alone {
                // Left behind by dead processes: its limit and counts are stale.
                segment::unlink(path)?;
            }
            let has_our_shape = words[4] == IPC_VERSION && n_bytes == IPC_BYTES as u64;
            if !is_alone && !has_our_shape {
                return Err(foreign(path, &format!("version {}, {n_bytes} bytes", words[4])));
            }
            if !is_alone {
                return Segment::map(&file, path, IPC_BYTES);
            }
            lock.lock(BYTE_USERS, 1, LockKind::Shared)?;
        }
        steps::step();
        let Some(file) = segment::create(path)? else {
            return Err(segment_error(
                "create",
                path,
                std::io::Error::from(std::io::ErrorKind::ResourceBusy),
            ));
        };
        if let Err(error) = segment::allocate(&file, path, IPC_BYTES) {
            segment::unlink(path)?;
            return Err(error);
        }
        let segment = Segment::<IpcLayout>::map(&file, path, IPC_BYTES)?;
        store_name(&segment.device, device);
        for word in [&segment.total_bytes, &segment.intent_total_bytes, &segment.published_total_bytes] {
            word.store(total_bytes, Ordering::Relaxed);
        }
        segment.size_bytes.store(IPC_BYTES as u64, Ordering::Relaxed);
        segment.version.store(IPC_VERSION, Ordering::Relaxed);
        steps::step();
        segment.magic.store(IPC_MAGIC, Ordering::Release);
        Ok(segment)
    }

    /// Writes what the group uses and has parked.
    pub(super) fn publish_usage(&self, used_bytes: u64, parked_bytes: u64) {
        if self.is_of_this_device {
            self.segment.used_bytes.store(used_bytes, Ordering::Relaxed);
            self.segment.prealloc_bytes.store(parked_bytes, Ordering::Relaxed);
        }
    }

    /// Brings `total` and the group's limit together: a change by a tool is handed to `adopt`, else
    /// `total` becomes `expected_bytes`.
    ///
    /// The caller makes one call at a time. Does nothing while another member is at it.
    pub(super) fn sync_total(&self, expected_bytes: u64, adopt: impl FnOnce(u64)) -> Result<()> {
        let words = &*self.segment;
        let total_bytes = words.total_bytes.load(Ordering::SeqCst);
        if !self.is_of_this_device
            || (total_bytes == expected_bytes
                && words.published_total_bytes.load(Ordering::SeqCst) == expected_bytes)
            || !self.lock.try_lock(BYTE_WRITER, 1, LockKind::Exclusive)?
        {
            return Ok(());
        }
        let total_bytes = words.total_bytes.load(Ordering::SeqCst);
        let is_ours = [&words.published_total_bytes, &words.intent_total_bytes]
            .iter()
            .any(|word| word.load(Ordering::SeqCst) == total_bytes);
        // A tool's number is signed; a negative one is no limit.
        if !is_ours && i64::try_from(total_bytes).is_ok() {
            adopt(total_bytes);
            steps::step();
            words.intent_total_bytes.store(total_bytes, Ordering::SeqCst);
            words.published_total_bytes.store(total_bytes, Ordering::SeqCst);
        } else {
            words.intent_total_bytes.store(expected_bytes, Ordering::SeqCst);
            steps::step();
            // A tool that wrote in between is found by the next call.
            let _ = words.total_bytes.compare_exchange(
                total_bytes,
                expected_bytes,
                Ordering::SeqCst,
                Ordering::SeqCst,
            );
            steps::step();
            words.published_total_bytes.store(expected_bytes, Ordering::SeqCst);
        }
        self.lock.unlock(BYTE_WRITER, 1);
        Ok(())
    }
}

fn foreign(path: &Path, found: &str) -> MemoryError {
    MemoryError::ForeignSegment {
        path: path.to_owned(),
        reason: format!(
            "found {found}; expected {IPC_BYTES} bytes, magic {IPC_MAGIC:#018x}, version {IPC_VERSION}"
        ),
    }
}
