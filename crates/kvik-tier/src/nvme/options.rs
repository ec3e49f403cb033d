//! What a user chooses.

use std::path::PathBuf;

use super::format::BLOCK_BYTES;
use super::io::IoKind;
use crate::error::{Result, TierError};

/// Fewer segments than this leave too little room beside those that are open, spare or mostly dead.
pub(super) const MIN_SEGMENTS: u64 = 8;

/// Room for the blocks that describe a segment and for some of a chunk.
const MIN_SEGMENT_BYTES: u64 = 16 * BLOCK_BYTES;

/// Places in a segment are counted in blocks with 32 bits.
const MAX_SEGMENT_BYTES: u64 = 1 << 40;

/// The share of the usable capacity that chunks may take, in percent; the rest is what makes emptying a segment
/// cheap. At this share, with deletions spread evenly, every byte is moved about five times at worst.
const MAX_LIVE_PERCENT: u64 = 85;

/// How an [`NvmeTier`](super::NvmeTier) is opened.
#[derive(Clone, Debug)]
pub struct NvmeOptions {
    /// The directory of its files, made if missing, or a block device. One tier at a time uses it.
    pub dir: PathBuf,
    /// The most bytes that its files take. A part of it is for moving chunks: up to 85 % of what two segments
    /// leave can be chunks. On a device it is chosen when it is formatted, and [`NvmeOptions::WHOLE_DEVICE`] later.
    pub capacity_bytes: u64,
    /// Length of a segment, in bytes; less where the capacity has no eight of them. Default: 256 MiB.
    ///
    /// A chunk is not longer than a segment. Files of another length from an earlier start are read and then
    /// replaced.
    pub segment_bytes: u64,
    /// Which system calls move the bytes. Default: `io_uring` where it is allowed.
    pub io: IoKind,
    /// The most requests that one call has under way at a time. Default: 32.
    pub queue_depth: u32,
    /// When written bytes are made to survive a loss of power. Default: when a segment is sealed.
    pub sync: SyncMode,
    /// Whether a device without kvik's header is formatted, which loses what is on it. One with a mark of a file
    /// system, or that is in use, never is. Default: false.
    pub formats_device: bool,
}

/// When written bytes are made to survive a loss of power.
///
/// Whatever is chosen, no loss of power makes a chunk wrong: it is there whole or it is a miss. The death of the
/// process alone loses no chunk whose `put` has returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SyncMode {
    /// Only by [`flush`](crate::Tier::flush); a flushed chunk can be lost when it moves.
    Never,
    /// When a segment is sealed, and by `flush`. A flushed chunk stays.
    #[default]
    AtSeal,
    /// Before a `put` returns.
    EveryBatch,
}

impl NvmeOptions {
    /// As many bytes as the device has.
    pub const WHOLE_DEVICE: u64 = u64::MAX;

    /// The defaults for a directory and a capacity.
    pub fn new(dir: impl Into<PathBuf>, capacity_bytes: u64) -> Self {
        Self {
            dir: dir.into(),
            capacity_bytes,
            segment_bytes: 256 << 20,
            io: IoKind::default(),
            queue_depth: 32,
            sync: SyncMode::default(),
            formats_device: false,
        }
    }

    /// The length of a segment for the capacity.
    ///
    /// # Errors
    /// If a value is not allowed.
    pub(crate) fn checked_segment_bytes(&self) -> Result<u64> {
        let Self { capacity_bytes, segment_bytes, queue_depth, .. } = self;
        if *capacity_bytes < MIN_SEGMENTS * MIN_SEGMENT_BYTES {
            let allowed = format!("{} bytes or more", MIN_SEGMENTS * MIN_SEGMENT_BYTES);
            return Err(TierError::invalid("capacity_bytes", capacity_bytes, allowed));
        }
        if !(MIN_SEGMENT_BYTES..=MAX_SEGMENT_BYTES).contains(segment_bytes) {
            let allowed = format!("{MIN_SEGMENT_BYTES} to {MAX_SEGMENT_BYTES} bytes");
            return Err(TierError::invalid("segment_bytes", segment_bytes, allowed));
        }
        if !(1..=1024).contains(queue_depth) {
            return Err(TierError::invalid("queue_depth", queue_depth, "1 to 1024"));
        }
        let segment_bytes = (*segment_bytes).min(capacity_bytes / MIN_SEGMENTS);
        Ok(segment_bytes - segment_bytes % BLOCK_BYTES)
    }

    /// The most bytes that chunks may take.
    pub(crate) fn max_live_bytes(&self, segment_bytes: u64) -> u64 {
        // One segment is open and one is the spare.
        let n_usable = self.capacity_bytes / segment_bytes - 2;
        n_usable * ((segment_bytes - 2 * BLOCK_BYTES) / 100 * MAX_LIVE_PERCENT)
    }
}
