//! One life of a segment file.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::file::{FreeFiles, SegmentFile};
use super::format::{
    BLOCK_BYTES, Content, Entry, MAX_BATCH_ENTRIES, batch_header_bytes, footer_bytes, padded,
};
use crate::key::ChunkKey;

/// One life of a segment file, from its header to the last reader after it was emptied.
///
/// Each possible reader or writer of the file holds an `Arc` of it: the index for each chunk, and calls for as
/// long as they run. When the last is gone the file can be used again.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) file: Arc<SegmentFile>,
    pub(crate) generation: u64,
    pub(crate) first_sequence: u64,
    /// Blocks of the chunks that the index places here, in bytes.
    live_bytes: AtomicU64,
    returns_to: Arc<FreeFiles>,
}

/// A segment that is or was appended to, and is not sealed.
#[derive(Debug)]
pub(crate) struct OpenSegment {
    pub(crate) segment: Arc<Segment>,
    /// Where the next batch begins.
    pub(crate) end: u64,
    /// What its batches said whose writes have ended well.
    pub(crate) entries: Vec<Entry>,
    /// Entries of batches whose writes have not ended.
    pub(crate) n_reserved_entries: usize,
    /// Batches whose writes have not ended.
    pub(crate) n_writers: usize,
}

/// A segment with a footer.
#[derive(Clone, Debug)]
pub(crate) struct SealedSegment {
    pub(crate) segment: Arc<Segment>,
    pub(crate) entries: Arc<[Entry]>,
}

/// Room in a segment for a batch.
#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) segment: Arc<Segment>,
    pub(crate) offset: u64,
    pub(crate) end: u64,
    /// First what is gone, then the chunks in their order.
    pub(crate) entries: Vec<Entry>,
    pub(crate) n_gone: usize,
}

impl Segment {
    pub(crate) fn new(
        file: Arc<SegmentFile>,
        generation: u64,
        first_sequence: u64,
        returns_to: Arc<FreeFiles>,
    ) -> Self {
        Self { file, generation, first_sequence, live_bytes: AtomicU64::new(0), returns_to }
    }

    /// Blocks of the chunks that the index places here, in bytes.
    ///
    /// Relaxed: the number chooses the segment to reclaim, and a choice that is a little old is as good.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.live_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn add_live(&self, n_bytes: u64) {
        self.live_bytes.fetch_add(padded(n_bytes), Ordering::Relaxed);
    }

    pub(crate) fn remove_live(&self, n_bytes: u64) {
        self.live_bytes.fetch_sub(padded(n_bytes), Ordering::Relaxed);
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        self.returns_to.put_back(Arc::clone(&self.file));
    }
}

impl OpenSegment {
    /// A segment after its header.
    pub(crate) fn new(segment: Arc<Segment>) -> Self {
        Self { segment, end: BLOCK_BYTES, entries: Vec::new(), n_reserved_entries: 0, n_writers: 0 }
    }

    /// Takes room for as many of the chunks as fit, at least one, and for what is gone.
    ///
    /// `next_sequence` gives each chunk its number. Returns nothing if not even the first chunk fits.
    pub(crate) fn reserve(
        &mut self,
        chunks: &[(ChunkKey, u64)],
        gone: &[Entry],
        mut next_sequence: impl FnMut() -> u64,
    ) -> Option<Reservation> {
        let mut n_chunks = 0;
        let mut chunk_bytes = 0;
        for (_, n_bytes) in chunks.iter().take(MAX_BATCH_ENTRIES - gone.len()) {
            let with_this = u64::saturating_add(chunk_bytes, padded(*n_bytes));
            if self.left_after(gone.len() + n_chunks + 1, with_this).is_none() {
                break;
            }
            n_chunks += 1;
            chunk_bytes = with_this;
        }
        if n_chunks == 0 && !chunks.is_empty() {
            return None;
        }
        let n_entries = gone.len() + n_chunks;
        self.left_after(n_entries, chunk_bytes)?;
        let offset = self.end;
        let mut at = offset + batch_header_bytes(n_entries);
        let mut entries = gone.to_vec();
        for (key, n_bytes) in &chunks[..n_chunks] {
            let content = Content::Chunk { offset: at, n_bytes: *n_bytes };
            entries.push(Entry { key: *key, sequence: next_sequence(), content });
            at += padded(*n_bytes);
        }
        self.end = at;
        self.n_writers += 1;
        self.n_reserved_entries += n_entries;
        Some(Reservation { segment: Arc::clone(&self.segment), offset, end: at, entries, n_gone: gone.len() })
    }

    /// Room that is left once a batch of that size and the footer are written.
    pub(crate) fn left_after(&self, n_entries: usize, chunk_bytes: u64) -> Option<u64> {
        let footer = footer_bytes(self.entries.len() + self.n_reserved_entries + n_entries);
        let batch = batch_header_bytes(n_entries).checked_add(chunk_bytes)?;
        self.segment.file.n_bytes().checked_sub(self.end.checked_add(batch)?.checked_add(footer)?)
    }

    /// Notes that the writes of a batch have ended.
    pub(crate) fn finish(&mut self, reservation: &Reservation, is_written: bool) {
        self.n_writers -= 1;
        self.n_reserved_entries -= reservation.entries.len();
        if is_written {
            self.entries.extend_from_slice(&reservation.entries);
        }
    }
}

impl Reservation {
    /// The chunks of the batch.
    pub(crate) fn chunks(&self) -> &[Entry] {
        &self.entries[self.n_gone..]
    }
}

/// The longest chunk that fits a segment of so many bytes.
pub(crate) fn max_chunk_bytes(segment_bytes: u64) -> u64 {
    segment_bytes.saturating_sub(BLOCK_BYTES + batch_header_bytes(1) + footer_bytes(1))
}
