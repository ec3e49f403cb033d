//! Memory that direct I/O takes.

use std::fmt;
use std::ops::{Deref, DerefMut};

use super::format::BLOCK_BYTES;

/// Zeroed bytes whose first one lies at a multiple of the block.
pub(crate) struct AlignedBuffer {
    /// One block longer than what is asked for, so that an aligned start lies in it.
    storage: Vec<u8>,
    start: usize,
    n_bytes: usize,
}

impl AlignedBuffer {
    /// So many bytes.
    pub(crate) fn new(n_bytes: usize) -> Self {
        if n_bytes == 0 {
            return Self { storage: Vec::new(), start: 0, n_bytes };
        }
        let storage = vec![0; n_bytes + BLOCK_BYTES as usize];
        let start = storage.as_ptr().addr().next_multiple_of(BLOCK_BYTES as usize) - storage.as_ptr().addr();
        Self { storage, start, n_bytes }
    }

    /// A copy of `bytes`.
    pub(crate) fn copy_of(bytes: &[u8]) -> Self {
        let mut buffer = Self::new(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }
}

/// Whether direct I/O takes memory that starts there.
pub(crate) fn is_aligned(bytes: &[u8]) -> bool {
    (bytes.as_ptr().addr() as u64).is_multiple_of(BLOCK_BYTES)
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.storage[self.start..self.start + self.n_bytes]
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.storage[self.start..self.start + self.n_bytes]
    }
}

impl fmt::Debug for AlignedBuffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("AlignedBuffer").field("n_bytes", &self.n_bytes).finish_non_exhaustive()
    }
}
