//! The ends of chunks that are kept for some time only.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::policy::BlockId;
use crate::retention::NEVER_MS;

/// The ends of chunks. One that was moved is here twice: the directory says which counts.
#[derive(Debug)]
pub(crate) struct Times {
    by_end: Mutex<BTreeSet<(u64, BlockId)>>,
    /// No chunk ends before this time.
    first_end_ms: AtomicU64,
}

impl Times {
    pub(crate) fn new() -> Self {
        Self { by_end: Mutex::default(), first_end_ms: AtomicU64::new(NEVER_MS) }
    }

    /// Adds an end; nothing where it is never.
    pub(super) fn add(&self, end_ms: u64, id: BlockId) {
        if end_ms == NEVER_MS {
            return;
        }
        let mut by_end = self.by_end.lock();
        by_end.insert((end_ms, id));
        self.note_first_end(&by_end);
    }

    /// Takes those that have come.
    pub(super) fn take_ended(&self, now_ms: u64) -> Vec<BlockId> {
        let mut ended = Vec::new();
        // Relaxed: the caller that sets an end sees it, and to others it counts from the moment at which they do.
        if self.first_end_ms.load(Ordering::Relaxed) > now_ms {
            return ended;
        }
        let mut by_end = self.by_end.lock();
        while let Some((end_ms, id)) = by_end.first().copied()
            && end_ms <= now_ms
        {
            by_end.pop_first();
            ended.push(id);
        }
        self.note_first_end(&by_end);
        ended
    }

    fn note_first_end(&self, by_end: &BTreeSet<(u64, BlockId)>) {
        let first_end_ms = by_end.first().map_or(NEVER_MS, |(end_ms, _)| *end_ms);
        self.first_end_ms.store(first_end_ms, Ordering::Relaxed);
    }
}
