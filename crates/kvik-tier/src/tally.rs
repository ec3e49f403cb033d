//! What a remote tier knows of itself: counts of its own operations and whether the last ones worked.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::error::TierError;
use crate::tier::{GetItem, GetOutcome, PutItem, PutOutcome, TierHealth};

/// Counts and health of a remote tier.
///
/// Reads say whether it is up; only a write says that it takes writes again.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    health: Mutex<TierHealth>,
    counts: [AtomicU64; N_COUNTS],
}

const N_COUNTS: usize = 8;
const NAMES: [&str; N_COUNTS] =
    ["hits", "misses", "corrupt", "get_failures", "stored", "present", "no_room", "put_failures"];

impl Tally {
    /// Takes note of a batch that was read.
    pub(crate) fn note_get(&self, batch: &[GetItem<'_>]) {
        let mut failure = None;
        let mut is_answered = false;
        for item in batch {
            let count_idx = match &item.outcome {
                GetOutcome::Hit => 0,
                GetOutcome::Miss | GetOutcome::TokenMismatch => 1,
                GetOutcome::Corrupt(_) => 2,
                GetOutcome::Failed(error) => {
                    failure = Some(error);
                    3
                }
                GetOutcome::Pending | GetOutcome::Skipped => continue,
            };
            is_answered |= count_idx != 3;
            self.count(count_idx);
        }
        self.note(is_answered, failure, false);
    }

    /// Takes note of a batch that was stored; `read_only` is why the server takes no writes.
    pub(crate) fn note_put(&self, batch: &[PutItem<'_>], read_only: Option<String>) {
        let mut failure = None;
        let mut is_answered = false;
        for item in batch {
            let count_idx = match &item.outcome {
                PutOutcome::Stored => 4,
                PutOutcome::Present => 5,
                PutOutcome::NoRoom => 6,
                PutOutcome::Failed(error) => {
                    failure = Some(error);
                    7
                }
                PutOutcome::Pending | PutOutcome::Skipped => continue,
            };
            is_answered |= count_idx != 7;
            self.count(count_idx);
        }
        match read_only {
            Some(reason) => *self.health.lock() = TierHealth::ReadOnly(reason),
            None => self.note(is_answered, failure, true),
        }
    }

    /// Takes note of a question that was answered or failed as a whole.
    pub(crate) fn note_answer(&self, failure: Option<&TierError>) {
        self.note(failure.is_none(), failure, false);
    }

    /// Whether the tier can be used, by the last that is known.
    pub(crate) fn health(&self) -> TierHealth {
        self.health.lock().clone()
    }

    /// The counts by name.
    pub(crate) fn counts(&self) -> Vec<(&'static str, u64)> {
        NAMES.iter().zip(&self.counts).map(|(name, count)| (*name, count.load(Ordering::Relaxed))).collect()
    }

    fn count(&self, count_idx: usize) {
        // Relaxed: counts order nothing.
        self.counts[count_idx].fetch_add(1, Ordering::Relaxed);
    }

    fn note(&self, is_answered: bool, failure: Option<&TierError>, is_write: bool) {
        let mut health = self.health.lock();
        match (is_answered, failure) {
            // An invalid call says nothing about the tier's health.
            (false, None | Some(TierError::Invalid { .. })) => {}
            (false, Some(error)) => *health = TierHealth::Down(error.to_string()),
            (true, _) => {
                if is_write || !matches!(*health, TierHealth::ReadOnly(_)) {
                    *health = TierHealth::Up;
                }
            }
        }
    }
}
