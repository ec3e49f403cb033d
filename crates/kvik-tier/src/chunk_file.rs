//! A chunk where it lies in a file, for what reads files past the CPU.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::TierError;

/// A chunk in an open file, with what proves its bytes: a reader compares the checksums itself.
///
/// Until this is dropped the bytes stay where they are, whatever is deleted, moved or emptied meanwhile. A tier waits for that
/// before it uses the file again, so the holder waits for nothing but its own reading.
pub struct ChunkFile {
    file: Box<dyn HeldFile>,
    /// In the part of the file that is held.
    offset: u64,
    n_bytes: u64,
    section_bytes: u64,
    checksums: Vec<u64>,
    /// Counts reads that gave other bytes than were stored.
    n_corrupt: Option<Arc<AtomicU64>>,
}

/// A part of a file that keeps its bytes until this is dropped.
pub(crate) trait HeldFile: fmt::Debug + Send + Sync {
    /// The open file.
    fn file(&self) -> BorrowedFd<'_>;

    /// Where a place of the part lies in the file.
    fn position(&self, offset: u64) -> u64;

    /// Reads from `offset` of the part on, a multiple of 4096.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;
}

impl ChunkFile {
    /// All bytes at a place, of which nothing is proven.
    pub(crate) fn new(file: Box<dyn HeldFile>, offset: u64, n_bytes: u64) -> Self {
        Self { file, offset, n_bytes, section_bytes: 0, checksums: Vec::new(), n_corrupt: None }
    }

    /// The open file. It is open past the page cache where its file system can do that.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.file()
    }

    /// Where the chunk begins in the file, a multiple of 4096. The file has whole blocks of 4096 up to the chunk's end.
    pub fn offset(&self) -> u64 {
        self.file.position(self.offset)
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

    /// The first bytes of the chunk; `None` where it is shorter.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn read_head<const N: usize>(&self) -> Result<Option<[u8; N]>, TierError> {
        if self.n_bytes < N as u64 {
            return Ok(None);
        }
        let mut head = [0; N];
        let read = self.file.read(self.offset, &mut head);
        read.map_err(|error| TierError::io("read a chunk", error))?;
        Ok(Some(head))
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
            .field("file", &self.file)
            .field("offset", &self.offset)
            .field("n_bytes", &self.n_bytes)
            .finish_non_exhaustive()
    }
}
