//! Observers of which chunks are where.

use std::fmt;
use std::sync::Arc;

use kvik_tier::TierKind;
use kvik_types::BlockHash;

use crate::tiers::{TierIdx, TierRanks};

/// A chunk that a tier has since now, or has no more.
///
/// A tier has a chunk when every rank of it can be read there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkChange {
    /// The chunk.
    pub hash: BlockHash,
    /// The chunk before it in its chain, where that is known.
    pub parent: Option<BlockHash>,
    /// The tier.
    pub tier: TierKind,
    /// Whether the tier has it.
    pub is_held: bool,
}

/// Observes what changes in the tiers.
pub trait ChunkObserver: Send + Sync + fmt::Debug {
    /// Takes changes, in order. Each one differs from the state before it.
    ///
    /// The store calls it with the lock that made the changes, so that the changes of one chunk arrive in order.
    /// The implementation MUST NOT block or call the store.
    fn changed(&self, changes: &[ChunkChange]);
}

/// An observer of the chunks of one namespace.
#[derive(Debug)]
pub(crate) struct Observed {
    pub(crate) namespace_idx: u32,
    /// The ranks that a chunk has.
    pub(crate) all_ranks: u64,
    /// The tiers in the order of the directory.
    pub(crate) kinds: Vec<TierKind>,
    pub(crate) observer: Arc<dyn ChunkObserver>,
}

impl Observed {
    /// Appends what it means that the ranks of a chunk in each tier were `before` and are `after`.
    pub(crate) fn compare(
        &self,
        hash: BlockHash,
        parent: Option<BlockHash>,
        before: &TierRanks,
        after: &TierRanks,
        changes: &mut Vec<ChunkChange>,
    ) {
        for (tier, kind) in self.kinds.iter().enumerate() {
            let is_held = self.is_whole(after, tier);
            if self.is_whole(before, tier) != is_held {
                changes.push(ChunkChange { hash, parent, tier: *kind, is_held });
            }
        }
    }

    /// Whether the chunks of a namespace are observed.
    pub(crate) fn is_about(&self, namespace_idx: u32) -> bool {
        namespace_idx == self.namespace_idx
    }

    /// Tells the observer, if there is anything.
    pub(crate) fn tell(&self, changes: &[ChunkChange]) {
        if !changes.is_empty() {
            self.observer.changed(changes);
        }
    }

    fn is_whole(&self, ranks: &TierRanks, tier: TierIdx) -> bool {
        ranks[tier] == self.all_ranks
    }
}
