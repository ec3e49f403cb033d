//! Chunks whose bytes are read from the file, or put into it, past this tier.
//!
//! What is read is in a segment that stays as it is meanwhile.
//!
//! Room is reserved as for any batch; the batch header that names the chunk is written when the writer has ended. So a death before
//! that, or a writer that fails, leaves room without a name, which is never looked at.

use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;

use super::aligned::AlignedBuffer;
use super::format::{BLOCK_BYTES, Entry};
use super::index::Location;
use super::io::Io;
use super::log::Log;
use super::segment::{Reservation, Segment};
use super::{NvmeTier, Writing, file};
use crate::chunk_file::{ChunkFile, HeldFile};
use crate::tier::{FileItem, Fill, PutOutcome};

/// A segment that is not used again until this is dropped.
struct HeldSegment {
    segment: Arc<Segment>,
    io: Arc<dyn Io>,
}

/// Room of a chunk that is given back unless the chunk gets it.
struct Claim<'a> {
    tier: &'a NvmeTier,
    n_bytes: u64,
    is_used: bool,
}

/// Room of a batch that has no header yet; given back unless that is written.
struct Room<'a> {
    log: &'a Log,
    reservation: Option<Reservation>,
}

/// A chunk where it lies, of which nothing is proven.
pub(super) fn held(location: Location, io: &Arc<dyn Io>) -> ChunkFile {
    let Location { segment, offset, n_bytes } = location;
    ChunkFile::new(Box::new(HeldSegment { segment, io: Arc::clone(io) }), offset, n_bytes)
}

impl HeldFile for HeldSegment {
    fn file(&self) -> BorrowedFd<'_> {
        self.segment.file.handle().as_fd()
    }

    fn position(&self, offset: u64) -> u64 {
        self.segment.file.position(offset)
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut blocks = AlignedBuffer::new(bytes.len().next_multiple_of(BLOCK_BYTES as usize));
        self.io.read_one(&self.segment.file, offset, &mut blocks)?;
        bytes.copy_from_slice(&blocks[..bytes.len()]);
        Ok(())
    }
}

impl fmt::Debug for HeldSegment {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("HeldSegment").field(&self.segment.file.number()).finish()
    }
}

impl NvmeTier {
    /// Stores a chunk whose room is claimed.
    pub(super) fn put_claimed(&self, item: &FileItem, fill: Fill<'_>) -> PutOutcome {
        let mut claim = Claim { tier: self, n_bytes: item.n_bytes, is_used: false };
        let reservation = match self.log.reserve_alone((item.key, item.n_bytes)) {
            Ok(Some(reservation)) => reservation,
            Ok(None) => return PutOutcome::NoRoom,
            Err(error) => return PutOutcome::Failed(error),
        };
        let segment = Arc::clone(&reservation.segment);
        let Some(offset) = reservation.chunks().first().map(Entry::offset) else {
            return PutOutcome::NoRoom;
        };
        let room = Room { log: &self.log, reservation: Some(reservation) };
        let failed = |error| {
            let is_no_room = file::is_no_space(&error);
            let error = self.log.note("write a chunk", error);
            if is_no_room { PutOutcome::NoRoom } else { PutOutcome::Failed(error) }
        };
        if let Err(error) = fill(segment.file.handle().as_fd(), segment.file.position(offset)) {
            return failed(error);
        }
        let Some(mut writing) = room.into_writing() else { return PutOutcome::NoRoom };
        if let Err(error) = self.log.write(&writing.reservation, &[]) {
            return failed(error);
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

impl<'a> Room<'a> {
    /// From here on the segment ends with this batch if it fails: a header may be there in part.
    fn into_writing(mut self) -> Option<Writing<'a>> {
        let reservation = self.reservation.take()?;
        Some(Writing { log: self.log, reservation, is_written: false })
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        if let Some(reservation) = &self.reservation {
            self.log.give_back(reservation);
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if !self.is_used {
            self.tier.log.index.unclaim(self.n_bytes);
        }
    }
}
