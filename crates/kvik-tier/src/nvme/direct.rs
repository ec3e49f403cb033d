//! Chunks whose bytes their writer puts into the file by itself.
//!
//! Room is reserved as for any batch; the batch header that names the chunk is written when the writer has ended. So a death before
//! that leaves room without a name, which is never looked at.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use super::format::Entry;
use super::index::Location;
use super::{NvmeTier, Writing, file};
use crate::tier::{FileItem, Fill, PutOutcome};

/// Room of a chunk that is given back unless the chunk gets it.
struct Claim<'a> {
    tier: &'a NvmeTier,
    n_bytes: u64,
    is_used: bool,
}

impl NvmeTier {
    /// Stores a chunk whose room is claimed.
    pub(super) fn put_claimed(&self, item: &FileItem, fill: Fill<'_>) -> PutOutcome {
        let mut claim = Claim { tier: self, n_bytes: item.n_bytes, is_used: false };
        let reservation = match self.log.reserve(&[(item.key, item.n_bytes)]) {
            Ok(Some(reservation)) => reservation,
            Ok(None) => return PutOutcome::NoRoom,
            Err(error) => return PutOutcome::Failed(error),
        };
        let mut writing = Writing { log: &self.log, reservation, is_written: false };
        let segment = Arc::clone(&writing.reservation.segment);
        let Some(offset) = writing.reservation.chunks().first().map(Entry::offset) else {
            return PutOutcome::NoRoom;
        };
        let filled = fill(segment.file.handle().as_fd(), segment.file.position(offset));
        if let Err(error) = filled.and_then(|_| self.log.write(&writing.reservation, &[])) {
            let is_no_room = file::is_no_space(&error);
            let error = self.log.note("write a chunk", error);
            return if is_no_room { PutOutcome::NoRoom } else { PutOutcome::Failed(error) };
        }
        self.log.trouble.lock().take();
        // The index has the room from here on, or gives it back.
        claim.is_used = true;
        let is_first = self.log.index.insert(item.key, Location { segment, offset, n_bytes: item.n_bytes });
        self.log.counters.put_bytes.add(item.n_bytes);
        writing.is_written = true;
        if is_first { PutOutcome::Stored } else { PutOutcome::Present }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if !self.is_used {
            self.tier.log.index.unclaim(self.n_bytes);
        }
    }
}
