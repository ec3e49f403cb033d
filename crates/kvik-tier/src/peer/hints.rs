//! What something else knows of where chunks are, which spares questions to peers that have nothing.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::PeerAddress;
use crate::key::ChunkKey;

/// The part of the time for a lookup that an answer may take: a fifth.
const HINT_SHARE: u32 = 5;

/// Says which peers may have chunks. A hint is no proof: a peer is asked before anything is read from it.
pub trait PeerHints: fmt::Debug + Send + Sync {
    /// Peers that may have some of these chunks, those that have most of them first. Empty where nothing is known, or
    /// where there is no answer until `deadline`.
    fn holders(&self, keys: &[ChunkKey], deadline: Instant) -> Vec<PeerAddress>;
}

/// What became of hints.
#[derive(Debug, Default)]
pub(super) struct HintCounts {
    /// Lookups that asked the peers of a hint first.
    used: AtomicU64,
    /// Those of them in which one of these peers had something.
    right: AtomicU64,
    /// Those in which none had.
    wrong: AtomicU64,
}

impl HintCounts {
    /// Takes note of a lookup that asked the peers of a hint.
    pub(super) fn note(&self, is_right: bool) {
        self.used.fetch_add(1, Ordering::Relaxed);
        let counter = if is_right { &self.right } else { &self.wrong };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn details(&self) -> [(&'static str, u64); 3] {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [("hints", read(&self.used)), ("right_hints", read(&self.right)), ("wrong_hints", read(&self.wrong))]
    }
}

/// Until when a hint is of use to a lookup that begins now.
pub(super) fn hint_deadline(now: Instant, lookup_timeout: Duration) -> Instant {
    now + lookup_timeout / HINT_SHARE
}
