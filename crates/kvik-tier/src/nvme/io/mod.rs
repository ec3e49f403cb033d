//! Transfers between memory and segment files.
//!
//! A segment file knows nothing of what moves its bytes: implementations see the file, and the file counts the writes.

mod positional;
mod uring;

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;

pub(crate) use positional::Positional;
pub(crate) use uring::Uring;

use super::file::SegmentFile;
use crate::error::{Result, TierError};

/// Which system calls move the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoKind {
    /// `io_uring` where it is allowed, else positional.
    #[default]
    Auto,
    /// `io_uring`: all pieces of a call are under way at a time, up to the queue depth.
    Uring,
    /// `preadv` and `pwritev`, one after the other.
    Positional,
}

/// What moves bytes between memory and segment files.
///
/// Calls block until every run has its outcome; no implementation touches a run's memory after that. The
/// caller hands in slices whose addresses and lengths, and offsets, are multiples of the block, because files
/// may be open for direct I/O.
pub(crate) trait Io: fmt::Debug + Send + Sync {
    /// Fills the slices of every run and sets its outcome.
    fn read(&self, runs: &mut [ReadRun<'_>]);

    /// Writes the slices of every run and sets its outcome.
    ///
    /// After a failure any part of the run may have been written.
    fn write(&self, runs: &mut [WriteRun<'_>]);

    /// Makes what was written to the file survive a loss of power.
    fn sync(&self, file: &SegmentFile) -> io::Result<()>;
}

/// Bytes of a file, one after the other, and where they go.
#[derive(Debug)]
pub(crate) struct ReadRun<'a> {
    pub(crate) file: &'a SegmentFile,
    pub(crate) offset: u64,
    pub(crate) slices: Vec<IoSliceMut<'a>>,
    pub(crate) outcome: io::Result<()>,
}

/// Bytes of a file, one after the other, and where they come from.
#[derive(Debug)]
pub(crate) struct WriteRun<'a> {
    pub(crate) file: &'a SegmentFile,
    pub(crate) offset: u64,
    pub(crate) slices: Vec<IoSlice<'a>>,
    pub(crate) outcome: io::Result<()>,
}

/// The implementation for a kind.
///
/// # Errors
/// If `io_uring` was asked for by name and the kernel does not allow it.
pub(crate) fn open(kind: IoKind, queue_depth: u32) -> Result<Arc<dyn Io>> {
    match kind {
        IoKind::Positional => Ok(Arc::new(Positional)),
        IoKind::Uring => match Uring::new(queue_depth) {
            Ok(uring) => Ok(Arc::new(uring)),
            Err(error) => Err(TierError::io("set up io_uring", error)),
        },
        IoKind::Auto => match Uring::new(queue_depth) {
            Ok(uring) => Ok(Arc::new(uring)),
            Err(error) => {
                tracing::info!(%error, "io_uring is not available; using positional reads and writes");
                Ok(Arc::new(Positional))
            }
        },
    }
}

impl dyn Io + '_ {
    /// Reads one slice.
    pub(crate) fn read_one(&self, file: &SegmentFile, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut runs = [ReadRun { file, offset, slices: vec![IoSliceMut::new(bytes)], outcome: Ok(()) }];
        self.read(&mut runs);
        let [run] = runs;
        run.outcome
    }

    /// Writes one slice.
    pub(crate) fn write_one(&self, file: &SegmentFile, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut runs = [WriteRun { file, offset, slices: vec![IoSlice::new(bytes)], outcome: Ok(()) }];
        self.write(&mut runs);
        let [run] = runs;
        run.outcome
    }

    /// Makes all writes of a file that have ended survive a loss of power, unless a sync that has ended did.
    pub(crate) fn sync_writes(&self, file: &SegmentFile) -> io::Result<()> {
        if let Some(n_writes) = file.unsynced_writes() {
            self.sync(file)?;
            file.note_synced(n_writes);
        }
        Ok(())
    }
}
