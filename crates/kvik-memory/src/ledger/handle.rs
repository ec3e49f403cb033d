//! An open ledger: its files, its locks and its groups.

mod slots;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

use super::claim::GrantTable as _;
use super::ipc;
use super::layout::{
    GROUP_FREE, GROUP_OPEN, LEDGER_BYTES, LEDGER_MAGIC, LEDGER_VERSION, LedgerLayout, N_GROUPS, N_SLOTS,
};
use super::liveness::{Life, LockFile, LockKind};
use super::name::{LEDGER_PREFIX, check_device_name, store_name};
use super::policy::Policy;
use super::segment::{self, Segment, segment_error};
use super::steps;
use crate::geometry::UNIT_BYTES;
use crate::{MemoryError, Result};

/// Where ledgers are unless a setting says otherwise: memory that all processes of a machine share.
pub const DEFAULT_DIR: &str = "/dev/shm";

/// Held for a few system calls by a process that changes groups or files.
const ADMIN_BYTE: usize = 2 * N_SLOTS;

/// Which ledger to open.
#[derive(Debug, Clone)]
pub struct LedgerOptions {
    /// The directory of the files; by default [`DEFAULT_DIR`].
    pub dir: PathBuf,
    /// The device: `host0`, or `GPU-` and its UUID.
    pub device: String,
    /// What all members together may hold, for a ledger that has no budget yet; by default none, and
    /// nothing can be claimed before [`Ledger::reconcile`].
    pub budget_bytes: Option<u64>,
}

/// The shared table of grants of one device.
#[derive(Debug, Clone)]
pub struct Ledger {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    device: String,
    layout: Segment<LedgerLayout>,
    file_id: FileId,
    /// For what is done to slots and groups of others; threads of this process take turns, since a
    /// kernel lock excludes only other descriptions.
    lock: Mutex<LockFile>,
    /// When a reap in passing last looked at pids, on the monotonic clock.
    pids_checked_ms: AtomicU64,
    life: Life,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileId {
    device: u64,
    inode: u64,
}

/// What happens to an unused ledger of another version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stale {
    /// A new one takes its place.
    Replace,
    /// It is refused and left alone: a read-only tool must not lose what an operator set.
    Refuse,
}

/// The right to change groups and files of a ledger, until it is dropped.
#[derive(Debug)]
pub(super) struct Exclusive<'a> {
    lock: MutexGuard<'a, LockFile>,
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        self.lock.unlock(ADMIN_BYTE, 1);
    }
}

// === impl LedgerOptions ===

impl LedgerOptions {
    /// The ledger of `device` in the default directory, without a budget.
    pub fn new(device: impl Into<String>) -> Self {
        Self { dir: PathBuf::from(DEFAULT_DIR), device: device.into(), budget_bytes: None }
    }
}

// === impl Ledger ===

impl Ledger {
    /// Opens the ledger of a device, and creates it if there is none.
    ///
    /// An unused ledger of another version is replaced. Fails where its files are not ours,
    /// are in use by another version, cannot be opened safely, or do not fit.
    pub fn open(options: &LedgerOptions) -> Result<Self> {
        Self::open_as(options, Stale::Replace)
    }

    fn open_as(options: &LedgerOptions, stale: Stale) -> Result<Self> {
        check_device_name(&options.device)?;
        let lock_path = lock_path(&options.dir, &options.device);
        let lock = lock_current(&lock_path)?;
        let result = Self::open_locked(options, &lock, stale);
        match result {
            Ok((layout, file_id)) => {
                lock.unlock(ADMIN_BYTE, 1);
                let ledger = Self {
                    shared: Arc::new(Shared {
                        dir: options.dir.clone(),
                        device: options.device.clone(),
                        layout,
                        file_id,
                        lock: Mutex::new(lock),
                        pids_checked_ms: AtomicU64::new(0),
                        life: Life::current(),
                    }),
                };
                if let Some(budget_bytes) = options.budget_bytes {
                    let budget_units = budget_bytes / UNIT_BYTES;
                    let budget = &ledger.layout().header.budget_units;
                    let _ = budget.compare_exchange(0, budget_units, Ordering::SeqCst, Ordering::SeqCst);
                }
                Ok(ledger)
            }
            Err(error) => {
                // If no process has a lock on it, it was made for this attempt, or is as good as new.
                if lock.try_lock(0, 0, LockKind::Exclusive).unwrap_or(false) {
                    let _ = segment::unlink(&lock_path);
                }
                Err(error)
            }
        }
    }

    /// Opens the ledger of a device if there is one; one of another version is left alone.
    pub fn open_existing(dir: &Path, device: &str) -> Result<Option<Self>> {
        check_device_name(device)?;
        if segment::open(&segment_path(dir, device))?.is_none() {
            return Ok(None);
        }
        let options = LedgerOptions { dir: dir.to_owned(), ..LedgerOptions::new(device) };
        Self::open_as(&options, Stale::Refuse).map(Some)
    }

    /// The caller holds the administrator's byte of `lock`.
    fn open_locked(
        options: &LedgerOptions,
        lock: &LockFile,
        stale: Stale,
    ) -> Result<(Segment<LedgerLayout>, FileId)> {
        let path = segment_path(&options.dir, &options.device);
        if let Some(file) = segment::open(&path)? {
            let n_bytes = segment::length_bytes(&file, &path)?;
            let [magic, version, size_bytes, unit_bytes, ready] = segment::first_words::<5>(&file, &path)?;
            if n_bytes == 0
                || (n_bytes == LEDGER_BYTES as u64 && ready == 0 && [0, LEDGER_MAGIC].contains(&magic))
            {
                // Its maker died before it was ready, or it would still hold the lock.
                return initialize(&file, &path);
            }
            let is_ours = magic == LEDGER_MAGIC;
            let has_our_shape = version == LEDGER_VERSION
                && size_bytes == LEDGER_BYTES as u64
                && n_bytes == LEDGER_BYTES as u64
                && unit_bytes == UNIT_BYTES;
            if is_ours && has_our_shape {
                let layout = Segment::map(&file, &path, LEDGER_BYTES)?;
                return Ok((layout, FileId::of(&file, &path)?));
            }
            let is_unused = stale == Stale::Replace && lock.try_lock(0, ADMIN_BYTE, LockKind::Exclusive)?;
            if !is_ours || !is_unused {
                return Err(MemoryError::ForeignSegment {
                    path,
                    reason: format!(
                        "found magic {magic:#018x}, version {version}, {n_bytes} bytes, unit {unit_bytes}; expected \
                         magic {LEDGER_MAGIC:#018x}, version {LEDGER_VERSION}, {LEDGER_BYTES} bytes, unit {UNIT_BYTES}"
                    ),
                });
            }
            tracing::info!(path = %path.display(), version, n_bytes, "replacing an unused ledger of another version");
            segment::unlink(&path)?;
            lock.unlock(0, ADMIN_BYTE);
        }
        let Some(file) = segment::create(&path)? else {
            return Err(segment_error(
                "create",
                &path,
                std::io::Error::from(std::io::ErrorKind::ResourceBusy),
            ));
        };
        steps::step();
        initialize(&file, &path).inspect_err(|_| {
            let _ = segment::unlink(&path);
        })
    }

    /// The directory of the ledger's files.
    pub fn dir(&self) -> &Path {
        &self.shared.dir
    }

    /// The device.
    pub fn device(&self) -> &str {
        &self.shared.device
    }

    /// What all members together may hold.
    pub fn budget_bytes(&self) -> u64 {
        super::checked::bytes(self.layout().budget_units())
    }

    pub(super) fn layout(&self) -> &LedgerLayout {
        &self.shared.layout
    }

    /// Fails in a forked child.
    pub(super) fn check_life(&self) -> Result<()> {
        self.shared.life.check()
    }

    /// Takes the right to change groups and files; waits a bounded time for its holder.
    pub(super) fn exclusive(&self) -> Result<Exclusive<'_>> {
        self.check_life()?;
        let lock = self.shared.lock.lock();
        lock.lock(ADMIN_BYTE, 1, LockKind::Exclusive)?;
        let exclusive = Exclusive { lock };
        let path = segment_path(self.dir(), self.device());
        let is_current = exclusive.lock.is_current()?
            && segment::open(&path)?.map(|file| FileId::of(&file, &path)).transpose()?
                == Some(self.shared.file_id);
        if is_current {
            Ok(exclusive)
        } else {
            let reason = "it was removed or replaced since it was opened: open it again".to_owned();
            Err(MemoryError::ForeignSegment { path, reason })
        }
    }

    /// Opens a description of the lock file for the owner of a slot.
    ///
    /// The caller holds `exclusive`, so the path leads to the file that all processes use.
    pub(super) fn owner_lock(&self, _exclusive: &Exclusive<'_>) -> Result<LockFile> {
        LockFile::open(&lock_path(self.dir(), self.device()))
    }

    /// The group called `name`, which is made with `policy` if there is none.
    pub(super) fn find_or_make_group(
        &self,
        exclusive: &Exclusive<'_>,
        name: &str,
        policy: &Policy,
        state: u64,
    ) -> Result<usize> {
        if let Some(index) = self.layout().find_group(name) {
            return Ok(index);
        }
        self.collect_groups(exclusive)?;
        let groups = self.layout().groups.iter();
        let Some(index) = groups.clone().position(|group| group.name_if_used().is_none()) else {
            return Err(MemoryError::Invalid {
                field: "ipc_name",
                value: name.to_owned(),
                allowed: format!("one of the {N_GROUPS} groups that exist: delete one to make another"),
            });
        };
        let group = &self.layout().groups[index];
        group.state.store(GROUP_FREE, Ordering::SeqCst);
        store_name(&group.name, name);
        policy.store(group);
        group.revision.store(0, Ordering::SeqCst);
        steps::step();
        group.state.store(state, Ordering::SeqCst);
        Ok(index)
    }

    /// Removes groups that went with their last member, and the files of groups without members.
    pub(super) fn collect_groups(&self, _exclusive: &Exclusive<'_>) -> Result<Vec<PathBuf>> {
        let mut removed = Vec::new();
        for (index, group) in self.layout().groups.iter().enumerate() {
            let Some(name) = group.name_if_used() else { continue };
            if self.layout().members_of(index).next().is_some() {
                continue;
            }
            removed.extend(ipc::remove_unused(self.dir(), &name)?);
            steps::step();
            if group.state.load(Ordering::Acquire) == GROUP_OPEN {
                group.state.store(GROUP_FREE, Ordering::SeqCst);
            }
        }
        Ok(removed)
    }

    /// Removes the ledger's own files if it has neither members nor groups; says which.
    pub(super) fn remove_if_empty(&self, exclusive: &Exclusive<'_>) -> Result<Vec<PathBuf>> {
        let has_group = self.layout().groups.iter().any(|group| group.name_if_used().is_some());
        if has_group
            || self.layout().taken_slots().next().is_some()
            || !exclusive.lock.try_lock(0, 0, LockKind::Exclusive)?
        {
            return Ok(Vec::new());
        }
        let paths = vec![segment_path(self.dir(), self.device()), lock_path(self.dir(), self.device())];
        for path in &paths {
            segment::unlink(path)?;
        }
        exclusive.lock.unlock(0, ADMIN_BYTE);
        Ok(paths)
    }
}

/// Opens the lock file and takes the administrator's byte, on the file that the path leads to.
fn lock_current(path: &Path) -> Result<LockFile> {
    loop {
        let lock = LockFile::open(path)?;
        lock.lock(ADMIN_BYTE, 1, LockKind::Exclusive)?;
        if lock.is_current()? {
            return Ok(lock);
        }
    }
}

fn initialize(file: &OwnedFd, path: &Path) -> Result<(Segment<LedgerLayout>, FileId)> {
    segment::allocate(file, path, LEDGER_BYTES)?;
    steps::step();
    let layout = Segment::<LedgerLayout>::map(file, path, LEDGER_BYTES)?;
    let header = &layout.header;
    header.version.store(LEDGER_VERSION, Ordering::Relaxed);
    header.size_bytes.store(LEDGER_BYTES as u64, Ordering::Relaxed);
    header.unit_bytes.store(UNIT_BYTES, Ordering::Relaxed);
    header.magic.store(LEDGER_MAGIC, Ordering::Relaxed);
    steps::step();
    header.ready.store(1, Ordering::Release);
    let file_id = FileId::of(file, path)?;
    Ok((layout, file_id))
}

fn segment_path(dir: &Path, device: &str) -> PathBuf {
    dir.join(format!("{LEDGER_PREFIX}{device}"))
}

fn lock_path(dir: &Path, device: &str) -> PathBuf {
    dir.join(format!("{LEDGER_PREFIX}{device}_lock"))
}

impl FileId {
    fn of(file: &OwnedFd, path: &Path) -> Result<Self> {
        let stat = rustix::fs::fstat(file).map_err(|errno| segment_error("stat", path, errno))?;
        Ok(Self { device: stat.st_dev, inode: stat.st_ino })
    }
}
