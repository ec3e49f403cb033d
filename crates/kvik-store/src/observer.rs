//! Observers of which chunks are where.

use std::fmt;
use std::sync::Arc;

use kvik_tier::TierKind;
use kvik_types::BlockHash;

use crate::tiers::{TierIdx, TierLabel, TierRanks};

/// A chunk that the tiers of a kind have since now, or have no more.
///
/// They have a chunk when every rank of it can be read from one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkChange {
    /// The chunk.
    pub hash: BlockHash,
    /// The chunk before it in its chain, where that is known.
    pub parent: Option<BlockHash>,
    /// The kind.
    pub tier: TierKind,
    /// Whether one of its tiers has it.
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
    pub(crate) tiers: Vec<TiersOfKind>,
    pub(crate) observer: Arc<dyn ChunkObserver>,
}

/// The tiers that an observer does not tell apart.
#[derive(Debug)]
pub(crate) struct TiersOfKind {
    kind: TierKind,
    tiers: Vec<TierIdx>,
}

impl TiersOfKind {
    /// The kinds of tiers, in the order of their first tier.
    pub(crate) fn group(labels: &[TierLabel]) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for (tier, TierLabel { kind, .. }) in labels.iter().enumerate() {
            match groups.iter_mut().find(|group| group.kind == *kind) {
                Some(group) => group.tiers.push(tier),
                None => groups.push(Self { kind: *kind, tiers: vec![tier] }),
            }
        }
        groups
    }
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
        for TiersOfKind { kind, tiers } in &self.tiers {
            let is_held = self.is_whole(after, tiers);
            if self.is_whole(before, tiers) != is_held {
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

    fn is_whole(&self, ranks: &TierRanks, tiers: &[TierIdx]) -> bool {
        tiers.iter().any(|tier| ranks[*tier] == self.all_ranks)
    }
}
