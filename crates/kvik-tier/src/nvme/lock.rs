//! The lock that keeps a directory or a device to one tier.

use std::fs::File;
use std::io;
use std::sync::Arc;

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use tracing::debug;

/// A file that is locked as long as this value lives.
///
/// The kernel gives up such a lock when the last descriptor of the file is closed, and a child between `fork` and
/// `exec` has one more; so the lock is given up by name.
#[derive(Debug)]
pub(super) struct FileLock(Arc<File>);

impl FileLock {
    /// Locks a file; `None` if another holder has it locked.
    ///
    /// # Errors
    /// If its file system has no locks.
    pub(super) fn take(file: File) -> io::Result<Option<Self>> {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self(Arc::new(file)))),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    pub(super) fn file(&self) -> &Arc<File> {
        &self.0
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        if let Err(error) = rustix::fs::flock(&self.0, FlockOperation::Unlock) {
            // The lock goes with the last descriptor then.
            debug!(%error, "could not give up a lock");
        }
    }
}
