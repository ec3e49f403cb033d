//! What can go wrong with memory, by what the caller can do about it.

use std::io;
use std::path::PathBuf;

use crate::geometry::BlockId;

/// The result of this crate.
pub type Result<T, E = MemoryError> = std::result::Result<T, E>;

/// An error of the memory.
///
/// Not enough memory is none of these: operations that can run out say so in their value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A value is outside of what is allowed: correct it.
    #[error("`{field}` is {value}; allowed: {allowed}")]
    Invalid {
        /// The setting or argument.
        field: &'static str,
        /// What was given.
        value: String,
        /// What would have been taken.
        allowed: String,
    },
    /// A block that was given back is not allocated here; nothing was freed.
    #[error("free block {block}: {reason}")]
    NotAllocated {
        /// The first block at fault.
        block: BlockId,
        /// Whether it is out of range, free already, listed twice or still in limbo.
        reason: &'static str,
    },
    /// The backend's device or library is not there: use another backend.
    #[error("open device {device}: {reason}")]
    NoDevice {
        /// The device as it was asked for.
        device: String,
        /// What is missing.
        reason: String,
    },
    /// A call to the driver or the kernel failed; what it had done was undone.
    #[error("{call} failed: {reason}")]
    Device {
        /// The call.
        call: &'static str,
        /// The driver's or the kernel's words.
        reason: String,
    },
    /// A file of the ledger could not be used.
    #[error("{action} {}: {source}", path.display())]
    Segment {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A file of the ledger has contents that this version cannot read; it was left alone.
    #[error("read {}: {reason}", path.display())]
    ForeignSegment {
        /// The file.
        path: PathBuf,
        /// What was found and what was expected.
        reason: String,
    },
    /// All slots of the ledger are taken by live engines: stop one, or run `kvctl gc`.
    #[error("join ledger of {device}: all {n_slots} slots are taken")]
    NoSlot {
        /// The device.
        device: String,
        /// How many slots there are.
        n_slots: usize,
    },
    /// This handle was made before a fork and the process is the child: open a new one.
    #[error("this handle belongs to the parent process: open a new one after fork")]
    Forked,
    /// A rank of the group failed or died; the transaction was undone on the others.
    #[error("rank {rank}: {reason}")]
    Rank {
        /// The rank at fault.
        rank: u32,
        /// What happened.
        reason: String,
    },
}
