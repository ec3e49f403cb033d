//! What a tier counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only grows, for people and metrics.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

/// What a tier counts since it was opened.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Bytes of chunks that callers stored.
    pub(crate) put_bytes: Counter,
    /// Bytes of chunks that were appended again because their segment was emptied.
    pub(crate) copied_bytes: Counter,
    /// All bytes written, with headers, footers and padding.
    pub(crate) written_bytes: Counter,
    /// Bytes read for callers.
    pub(crate) get_bytes: Counter,
    /// Segments that were emptied.
    pub(crate) n_reclaimed_segments: Counter,
    /// Times that a segment file could not be made for lack of room on the device.
    pub(crate) n_no_space: Counter,
    /// Writes and syncs that failed.
    pub(crate) n_failed_writes: Counter,
    /// Chunks that could not be read when their segment was emptied, and are forgotten.
    pub(crate) n_lost_chunks: Counter,
    /// Files that were no segment at start, and are used as if empty.
    pub(crate) n_bad_segments: Counter,
    /// Segments without a footer at start, whose batches were walked.
    pub(crate) n_walked_segments: Counter,
}

impl Counter {
    /// Relaxed: nothing follows from a count.
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counters {
    /// All counts by name.
    ///
    /// Write amplification is `written_bytes` by `put_bytes`.
    pub(crate) fn details(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("put_bytes", self.put_bytes.get()),
            ("copied_bytes", self.copied_bytes.get()),
            ("written_bytes", self.written_bytes.get()),
            ("get_bytes", self.get_bytes.get()),
            ("reclaimed_segments", self.n_reclaimed_segments.get()),
            ("no_space", self.n_no_space.get()),
            ("failed_writes", self.n_failed_writes.get()),
            ("lost_chunks", self.n_lost_chunks.get()),
            ("bad_segments", self.n_bad_segments.get()),
            ("walked_segments", self.n_walked_segments.get()),
        ]
    }
}
