//! The files of segments.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;

const PREFIX: &str = "segment-";
const SUFFIX: &str = ".kvik";

/// A file that is one segment at a time.
#[derive(Debug)]
pub(crate) struct SegmentFile {
    number: u32,
    n_bytes: u64,
    path: PathBuf,
    /// Where the segment begins in the file: 0, or its place on a device.
    base: u64,
    file: Arc<File>,
    /// Writes that have begun.
    n_writes: AtomicU64,
    /// Of those, as many as a sync has covered that has ended.
    n_synced_writes: AtomicU64,
}

/// Files that are free for a new segment.
#[derive(Debug, Default)]
pub(crate) struct FreeFiles {
    files: Mutex<Vec<Arc<SegmentFile>>>,
    changed: Condvar,
}

impl SegmentFile {
    /// Opens a file that is there.
    pub(crate) fn open(dir: &Path, number: u32, is_writable: bool) -> io::Result<Self> {
        let path = path_of(dir, number);
        let file = open_direct(OpenOptions::new().read(true).write(is_writable), &path)?;
        let n_bytes = file.metadata()?.len();
        Ok(Self {
            number,
            n_bytes,
            path,
            base: 0,
            file: Arc::new(file),
            n_writes: AtomicU64::new(0),
            n_synced_writes: AtomicU64::new(0),
        })
    }

    /// Makes a file with all of its room, and makes its name and length survive a loss of power.
    ///
    /// # Errors
    /// If the room is not there; nothing is left behind then.
    pub(crate) fn create(dir: &Path, number: u32, n_bytes: u64, is_synced: bool) -> io::Result<Self> {
        let path = path_of(dir, number);
        let file = open_direct(OpenOptions::new().read(true).write(true).create_new(true), &path)?;
        let allocate = || {
            match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, n_bytes) {
                Ok(()) => {}
                // The room then is taken block by block, and a write can find that there is none.
                Err(Errno::OPNOTSUPP) => file.set_len(n_bytes)?,
                Err(errno) => return Err(errno.into()),
            }
            if is_synced {
                file.sync_all()?;
                File::open(dir)?.sync_all()?;
            }
            Ok(())
        };
        if let Err(error) = allocate() {
            let _ = fs::remove_file(&path);
            return Err(error);
        }
        Ok(Self {
            number,
            n_bytes,
            path,
            base: 0,
            file: Arc::new(file),
            n_writes: AtomicU64::new(0),
            n_synced_writes: AtomicU64::new(0),
        })
    }

    /// The part of a device that is one segment at a time.
    pub(crate) fn of_device(path: &Path, file: &Arc<File>, number: u32, base: u64, n_bytes: u64) -> Self {
        Self {
            number,
            n_bytes,
            path: path.to_owned(),
            base,
            file: Arc::clone(file),
            n_writes: AtomicU64::new(0),
            n_synced_writes: AtomicU64::new(0),
        }
    }

    /// Where a byte of the segment lies in the open file.
    pub(crate) fn position(&self, offset: u64) -> u64 {
        self.base + offset
    }

    /// The number in its name.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Its length.
    pub(crate) fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// The open file.
    pub(crate) fn handle(&self) -> &File {
        &self.file
    }

    /// Notes that a write begins.
    ///
    /// Relaxed: a thread that syncs another thread's write learns of that write through the lock of the log.
    pub(crate) fn begin_write(&self) {
        self.n_writes.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of writes that have begun, if no sync that has ended covers all of them.
    pub(crate) fn unsynced_writes(&self) -> Option<u64> {
        let n_writes = self.n_writes.load(Ordering::Relaxed);
        (self.n_synced_writes.load(Ordering::Relaxed) < n_writes).then_some(n_writes)
    }

    /// Notes that a sync has ended which began after so many writes ([`Self::unsynced_writes`]).
    pub(crate) fn note_synced(&self, n_writes: u64) {
        self.n_synced_writes.fetch_max(n_writes, Ordering::Relaxed);
    }

    /// Removes the file.
    ///
    /// # Errors
    /// If it cannot be removed, as no part of a device can.
    pub(crate) fn remove(&self) -> io::Result<()> {
        if self.base > 0 {
            return Err(ErrorKind::Unsupported.into());
        }
        fs::remove_file(&self.path)
    }
}

/// Numbers of the segment files in a directory; other files are ignored.
pub(crate) fn list(dir: &Path) -> io::Result<Vec<u32>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let digits = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX));
        if let Some(number) = digits.filter(|digits| digits.len() == 8).and_then(|text| text.parse().ok()) {
            numbers.push(number);
        }
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Whether an error says that the device or the quota is full.
pub(crate) fn is_no_space(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge)
}

/// Whether an error says that nothing can be written here.
pub(crate) fn is_read_only(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied)
}

impl FreeFiles {
    /// Number of files that can be taken.
    pub(crate) fn len(&self) -> usize {
        self.files.lock().len()
    }

    /// Takes the file with the lowest number, so that a tier that is mostly empty uses few files.
    pub(crate) fn take(&self) -> Option<Arc<SegmentFile>> {
        let mut files = self.files.lock();
        let lowest_idx = (0..files.len()).min_by_key(|file_idx| files[*file_idx].number)?;
        Some(files.swap_remove(lowest_idx))
    }

    /// Takes all files that have another length.
    pub(crate) fn take_of_other_size(&self, n_bytes: u64) -> Vec<Arc<SegmentFile>> {
        self.files.lock().extract_if(.., |file| file.n_bytes != n_bytes).collect()
    }

    /// Waits until there are more than so many.
    pub(crate) fn wait_for_more_than(&self, n_files: usize) {
        let mut files = self.files.lock();
        while files.len() <= n_files {
            self.changed.wait(&mut files);
        }
    }

    /// Puts a file back.
    pub(crate) fn put_back(&self, file: Arc<SegmentFile>) {
        self.files.lock().push(file);
        self.changed.notify_all();
    }
}

fn path_of(dir: &Path, number: u32) -> PathBuf {
    dir.join(format!("{PREFIX}{number:08}{SUFFIX}"))
}

/// Opens a file past the page cache where the file system can do that.
fn open_direct(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let direct = options.clone().custom_flags(OFlags::DIRECT.bits().cast_signed()).open(path);
    match direct {
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
            // Some file systems make the file before they refuse the flag.
            let mut buffered = options.clone();
            buffered.create_new(false).create(true);
            if fs::metadata(path).is_ok() {
                buffered.create(false);
            }
            buffered.open(path)
        }
        outcome => outcome,
    }
}
