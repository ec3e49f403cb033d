//! Liveness: locks that the kernel drops with their owner, and what a fork does to them.
//!
//! A lock belongs to an open file description, so it lives until the last descriptor of it is closed.
//! A forked child has copies of all descriptors: a child that kept them would keep a dead parent's
//! grants. So every descriptor is listed in a registry, and a handler closes them in the child; the
//! child's handles know that they are copies and refuse to work.

use std::cell::UnsafeCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::segment::{self, segment_error};
use crate::{MemoryError, Result};

/// How long a process may hold a lock that is only ever held for a few system calls.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// How often a lock that is taken is tried again.
const LOCK_RETRY: Duration = Duration::from_micros(200);

/// How a range of bytes is locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LockKind {
    /// Others may share it.
    Shared,
    /// It has one holder.
    Exclusive,
}

/// A descriptor whose locks die with this process, forks or not.
#[derive(Debug)]
pub(super) struct LockFile {
    descriptor: RawFd,
    life: Life,
    path: PathBuf,
}

/// The process in which a handle was made, told apart from its forked children.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Life(u64);

/// A process as it can be recognized from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProcessIdentity {
    /// Its id in its namespace.
    pub(super) pid: u64,
    /// When it started, in clock ticks since boot; zero if unknown.
    pub(super) started_ticks: u64,
    /// The inode of its pid namespace; zero if unknown.
    pub(super) namespace: u64,
}

/// How many forks lie between the first process of this image and this one.
static N_FORKS: AtomicU64 = AtomicU64::new(0);

static DESCRIPTORS: Registry =
    Registry { is_locked: AtomicBool::new(false), list: UnsafeCell::new(Vec::new()) };

static HANDLERS: Once = Once::new();

/// The descriptors that a child must close.
///
/// Opening and closing happen under a lock that a fork takes as well: so a child never inherits a
/// descriptor that is not listed, nor closes a number that stands for another file by now. The lock
/// is a plain flag because the child must be able to open it without any thread of the parent.
struct Registry {
    is_locked: AtomicBool,
    list: UnsafeCell<Vec<RawFd>>,
}

// === impl Registry ===

// SAFETY: the list is reached only between `lock` and `unlock`.
unsafe impl Sync for Registry {}

impl Registry {
    fn lock(&self) {
        while self.is_locked.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            std::thread::yield_now();
        }
    }

    fn unlock(&self) {
        self.is_locked.store(false, Ordering::Release);
    }

    fn with<R>(&self, change: impl FnOnce(&mut Vec<RawFd>) -> R) -> R {
        register_handlers();
        self.lock();
        // SAFETY: the flag is held, so this is the only reference; `change` does not panic: it opens or
        // closes a file and changes a vector.
        let result = change(unsafe { &mut *self.list.get() });
        self.unlock();
        result
    }
}

fn register_handlers() {
    HANDLERS.call_once(|| {
        // SAFETY: the handlers are functions without arguments that live as long as the program. In the
        // child only `close` and stores to atomics run, which is allowed there.
        let code = unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child)) };
        if code != 0 {
            tracing::warn!(code, "no handler for forks: a forked child may keep the grants of its parent");
        }
    });
}

extern "C" fn before_fork() {
    DESCRIPTORS.lock();
}

extern "C" fn after_fork() {
    DESCRIPTORS.unlock();
}

extern "C" fn in_child() {
    N_FORKS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the parent's `before_fork` took the flag and this thread is the only one here.
    let list = unsafe { &mut *DESCRIPTORS.list.get() };
    for descriptor in list.iter() {
        // SAFETY: the number is listed, so it is a copy of the parent's descriptor; no handle of this
        // process closes it, because all of them are of another life now.
        unsafe { libc::close(*descriptor) };
    }
    list.clear();
    DESCRIPTORS.unlock();
}

// === impl Life ===

impl Life {
    /// This process.
    pub(super) fn current() -> Self {
        register_handlers();
        // A fork is a synchronization point of its own: the child has one thread.
        Self(N_FORKS.load(Ordering::Relaxed))
    }

    /// Fails with [`MemoryError::Forked`] in a child of the process that made this.
    pub(super) fn check(self) -> Result<()> {
        if N_FORKS.load(Ordering::Relaxed) == self.0 { Ok(()) } else { Err(MemoryError::Forked) }
    }
}

// === impl LockFile ===

impl LockFile {
    /// Opens the lock file at `path` with a description of its own, and creates it if needed.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let descriptor = DESCRIPTORS.with(|list| {
            let (file, _) = segment::open_or_create(path)?;
            let descriptor = file.into_raw_fd();
            list.push(descriptor);
            Ok::<_, MemoryError>(descriptor)
        })?;
        Ok(Self { descriptor, life: Life::current(), path: path.to_owned() })
    }

    /// Opens the lock file at `path` if it is there.
    pub(super) fn open_existing(path: &Path) -> Result<Option<Self>> {
        let descriptor = DESCRIPTORS.with(|list| {
            Ok::<_, MemoryError>(segment::open(path)?.map(OwnedFd::into_raw_fd).inspect(|&fd| list.push(fd)))
        })?;
        Ok(descriptor.map(|descriptor| Self { descriptor, life: Life::current(), path: path.to_owned() }))
    }

    /// Whether the path still leads to this file; if not, its locks mean nothing.
    pub(super) fn is_current(&self) -> Result<bool> {
        self.life.check()?;
        segment::is_same_file(self.as_fd(), &self.path)
    }

    /// Locks `n_bytes` from `first`, or says that another process has them; zero means to the end.
    pub(super) fn try_lock(&self, first: usize, n_bytes: usize, kind: LockKind) -> Result<bool> {
        let kind = match kind {
            LockKind::Shared => libc::F_RDLCK,
            LockKind::Exclusive => libc::F_WRLCK,
        };
        let mut range = lock_range(kind, first, n_bytes);
        match self.control(libc::F_OFD_SETLK, &mut range) {
            Ok(()) => Ok(true),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
            Err(error) => Err(segment_error("lock", &self.path, error)),
        }
    }

    /// Locks `n_bytes` from `first`, and waits a bounded time for their holder.
    pub(super) fn lock(&self, first: usize, n_bytes: usize, kind: LockKind) -> Result<()> {
        let deadline = Instant::now() + LOCK_PATIENCE;
        while !self.try_lock(first, n_bytes, kind)? {
            if Instant::now() > deadline {
                return Err(segment_error("lock", &self.path, io::Error::from(io::ErrorKind::TimedOut)));
            }
            std::thread::sleep(LOCK_RETRY);
        }
        Ok(())
    }

    /// Opens the lock of `n_bytes` from `first`.
    pub(super) fn unlock(&self, first: usize, n_bytes: usize) {
        let mut range = lock_range(libc::F_UNLCK, first, n_bytes);
        if let Err(error) = self.control(libc::F_OFD_SETLK, &mut range) {
            tracing::warn!(path = %self.path.display(), %error, "cannot unlock");
        }
    }

    /// Whether another process has a lock on byte `first`.
    pub(super) fn is_locked_by_other(&self, first: usize) -> Result<bool> {
        let mut range = lock_range(libc::F_WRLCK, first, 1);
        self.control(libc::F_OFD_GETLK, &mut range)
            .map_err(|error| segment_error("lock", &self.path, error))?;
        Ok(range.l_type != libc::F_UNLCK as libc::c_short)
    }

    fn control(&self, command: libc::c_int, range: &mut libc::flock) -> io::Result<()> {
        if self.life.check().is_err() {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        // SAFETY: the descriptor is open while `self` lives in its process, and `range` is a valid flock.
        let code = unsafe { libc::fcntl(self.descriptor, command, std::ptr::from_mut(range)) };
        if code == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl AsFd for LockFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open while `self` lives; callers checked that this is its process.
        unsafe { BorrowedFd::borrow_raw(self.descriptor) }
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        if self.life.check().is_err() {
            // The handler closed it when this process began; the number may be another file's.
            return;
        }
        DESCRIPTORS.with(|list| {
            list.retain(|&descriptor| descriptor != self.descriptor);
            // SAFETY: `open` made this descriptor for `self` alone, and it is not used afterwards.
            unsafe { libc::close(self.descriptor) };
        });
    }
}

fn lock_range(kind: libc::c_int, first: usize, n_bytes: usize) -> libc::flock {
    // SAFETY: flock is a plain struct of integers, for which zeros are valid; OFD locks need `l_pid` 0.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = kind as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    range.l_start = first as libc::off_t;
    range.l_len = n_bytes as libc::off_t;
    range
}

// === impl ProcessIdentity ===

impl ProcessIdentity {
    /// This process.
    pub(super) fn current() -> Self {
        let pid = std::process::id();
        Self { pid: pid.into(), started_ticks: started_ticks(pid).unwrap_or(0), namespace: pid_namespace() }
    }

    /// Whether this process is certainly gone: same namespace, and no such process or another one.
    ///
    /// What cannot be known counts as alive.
    pub(super) fn is_gone(self) -> bool {
        if self.namespace == 0 || self.started_ticks == 0 || self.namespace != pid_namespace() {
            return false;
        }
        let Some(pid) = i32::try_from(self.pid).ok().and_then(rustix::process::Pid::from_raw) else {
            return false;
        };
        // The kernel knows best whether there is one; /proc may hide it.
        if rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH) {
            return true;
        }
        started_ticks(pid.as_raw_nonzero().get().unsigned_abs())
            .is_ok_and(|started_ticks| started_ticks != self.started_ticks)
    }
}

/// Field 22 of `/proc/<pid>/stat`.
fn started_ticks(pid: u32) -> io::Result<u64> {
    let stat = std::fs::read(format!("/proc/{pid}/stat"))?;
    // The second field is the program's name in parentheses, with anything in it.
    let after_name = stat.iter().rposition(|&byte| byte == b')').map_or(&[][..], |end| &stat[end + 1..]);
    let field = after_name.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty()).nth(19);
    field
        .and_then(|field| std::str::from_utf8(field).ok()?.parse().ok())
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// The inode of this process's pid namespace; zero if `/proc` shows the processes of another one.
fn pid_namespace() -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let own_pid = std::process::id().to_string();
    if std::fs::read_link("/proc/self").is_ok_and(|link| link.as_os_str() == own_pid.as_str()) {
        std::fs::metadata("/proc/self/ns/pid").map_or(0, |metadata| metadata.ino())
    } else {
        0
    }
}

#[cfg(test)]
mod tests;
