//! A chunk where it lies in a file, for what reads files past the CPU.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::aligned::AlignedBuffer;
use super::index::Location;
use super::io::Io;
use super::segment::Segment;
use crate::error::TierError;
use crate::tier::GetOutcome;

/// A chunk in an open file, with what proves its bytes: whoever reads them compares the checksums itself.
///
/// Until this is dropped the bytes stay where they are, whatever is deleted, moved or emptied meanwhile. A tier waits for that
/// before it uses the file again, so the holder waits for nothing but its own reading.
pub struct ChunkFile {
    segment: Arc<Segment>,
    io: Arc<dyn Io>,
    /// In the segment.
    offset: u64,
    n_bytes: u64,
    section_bytes: u64,
    checksums: Vec<u64>,
    /// Counts reads that gave other bytes than were stored.
    n_corrupt: Option<Arc<AtomicU64>>,
}

impl ChunkFile {
    /// All bytes at a place, of which nothing is proven.
    pub(super) fn new(location: Location, io: &Arc<dyn Io>) -> Self {
        let Location { segment, offset, n_bytes } = location;
        let (io, checksums) = (Arc::clone(io), Vec::new());
        Self { segment, io, offset, n_bytes, section_bytes: 0, checksums, n_corrupt: None }
    }

    /// The open file. It is open past the page cache where its file system can do that.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.segment.file.handle().as_fd()
    }

    /// Where the chunk begins in the file, a multiple of 4096. The file has whole blocks of 4096 up to the chunk's end.
    pub fn offset(&self) -> u64 {
        self.segment.file.position(self.offset)
    }

    /// Length of the chunk.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Length of its sections but the last, which may be shorter.
    pub fn section_bytes(&self) -> u64 {
        self.section_bytes
    }

    /// CRC-64/NVME of each section; none where nothing is known of them.
    pub fn checksums(&self) -> &[u64] {
        &self.checksums
    }

    /// Tells that a section did not have its checksum.
    pub fn note_corrupt(&self) {
        if let Some(n_corrupt) = &self.n_corrupt {
            // Relaxed: a count for people.
            n_corrupt.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The first bytes of the chunk.
    ///
    /// # Errors
    /// The outcome of a read that gives none.
    pub(crate) fn read_head<const N: usize>(&self) -> Result<[u8; N], GetOutcome> {
        if self.n_bytes < N as u64 {
            return Err(GetOutcome::Corrupt("length"));
        }
        let mut head = AlignedBuffer::new(N.next_multiple_of(super::format::BLOCK_BYTES as usize));
        let read = self.io.read_one(&self.segment.file, self.offset, &mut head);
        read.map_err(|error| GetOutcome::Failed(TierError::io("read a chunk", error)))?;
        let mut bytes = [0; N];
        bytes.copy_from_slice(&head[..N]);
        Ok(bytes)
    }

    /// What lies behind the first `n_head_bytes`, which is in sections with these checksums.
    #[must_use]
    pub(crate) fn behind(
        self,
        n_head_bytes: usize,
        section_bytes: u64,
        checksums: Vec<u64>,
        n_corrupt: &Arc<AtomicU64>,
    ) -> Self {
        let n_head_bytes = n_head_bytes as u64;
        Self {
            offset: self.offset + n_head_bytes,
            n_bytes: self.n_bytes.saturating_sub(n_head_bytes),
            section_bytes,
            checksums,
            n_corrupt: Some(Arc::clone(n_corrupt)),
            ..self
        }
    }
}

impl fmt::Debug for ChunkFile {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ChunkFile")
            .field("segment", &self.segment.file.number())
            .field("offset", &self.offset)
            .field("n_bytes", &self.n_bytes)
            .finish_non_exhaustive()
    }
}
