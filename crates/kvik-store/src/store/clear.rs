//! Chunks that are removed on request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_tier::{ChunkKey, NamespaceId};
use kvik_types::Namespace;

use super::Store;
use super::core::Core;
use crate::chain::Chain;
use crate::lower::{Lower, WriteJob};
use crate::policy::BlockId;
use crate::promise::promise;
use crate::tiers::{RAM, TierIdx, TierName, TierSet};

/// Blocks that leave the residents in one turn of their lock.
const REMOVAL_TURN: usize = 1024;

/// What is to be cleared: everything, unless narrowed.
#[derive(Debug, Clone, Default)]
pub struct Clear {
    /// Only this namespace.
    pub namespace: Option<Namespace>,
    /// Only this chain, from its end to the first chunk on which other chains hang.
    pub chain: Option<Chain>,
    /// Only these tiers.
    pub tiers: Option<Vec<TierName>>,
}

/// What was cleared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cleared {
    /// Chunks that were known to be in each tier and are not any more.
    pub chunks: Vec<(TierName, usize)>,
}

impl Store {
    /// Removes chunks, pinned ones included. A lease on them keeps the bytes; once this
    /// returns, no lookup finds them.
    ///
    /// Reads and writes of the namespace that are under way are not published. Of a remote tier, which knows
    /// no list of its keys, a chain is removed whole, and of everything else what local tiers know. A lower
    /// tier that does not answer in [`retrieve_timeout`](crate::StoreOptions::retrieve_timeout) goes on
    /// removing later; its chunks are forgotten until the next start.
    pub fn clear(&self, clear: &Clear) -> Cleared {
        let core = self.core();
        let deadline = Instant::now() + core.options.retrieve_timeout;
        let is_meant = |name: &TierName| clear.tiers.as_ref().is_none_or(|names| names.contains(name));
        let tiers: Vec<TierIdx> =
            (0..core.labels.len()).filter(|tier| is_meant(&core.labels[*tier].name)).collect();
        let namespace = clear.namespace.as_ref();
        let namespace = namespace.map(|namespace| NamespaceId::from(&core.options.namespace_of(namespace)));
        core.begin_generation(clear.chain.as_ref(), namespace);
        let mut cleared = Cleared::default();
        // The slowest first: what is in a remote tier is known only as long as a local one has it too.
        for tier in tiers.iter().rev() {
            let n_chunks = match &clear.chain {
                Some(chain) => core.remove_chunks(*tier, chain, core.n_chunks(chain), deadline),
                None => core.remove_all(*tier, namespace, deadline),
            };
            cleared.chunks.insert(0, (core.name_of(*tier), n_chunks));
        }
        if tiers.iter().any(|tier| core.lower(*tier).is_some_and(|lower| !lower.is_local())) {
            // Meanwhile a reader may have read from a remote tier what was not removed yet.
            core.begin_generation(clear.chain.as_ref(), namespace);
            for tier in tiers.iter().filter(|tier| core.residents(**tier).is_some()) {
                match &clear.chain {
                    Some(chain) => core.remove_chunks(*tier, chain, core.n_chunks(chain), deadline),
                    None => core.remove_all(*tier, namespace, deadline),
                };
            }
        }
        cleared
    }

    /// Removes a chain from all tiers and disturbs nothing else in its namespace, unlike [`Self::clear`]. Lower tiers
    /// remove it after what is queued for them, also where it is the chain itself that is queued; that is waited for, at most
    /// `timeout` in all.
    ///
    /// A read of it that is under way may bring it back into memory. A writer that has to be sure looks whether what it
    /// begins to write is present.
    pub fn forget(&self, chain: &Chain, timeout: Duration) {
        let core = self.core();
        let now = Instant::now();
        let deadline = now.checked_add(timeout).unwrap_or(now);
        let n_chunks = core.n_chunks(chain);
        // Now, so that no reader finds it, and again after what is queued.
        for tier in (0..core.labels.len()).rev() {
            core.take_out_chunks(tier, chain, n_chunks);
        }
        let keys = |chunk_idx| (0..chain.n_ranks()).map(move |rank| chain.key_of(chunk_idx, rank));
        let keys: Vec<ChunkKey> = (0..n_chunks).flat_map(keys).collect();
        let mut answers = Vec::new();
        for lower in &core.lowers {
            let (promise, answer) = promise();
            let (core, chain, keys) = (Arc::clone(core), chain.clone(), keys.clone());
            let task = move |lower: &Lower| {
                core.take_out_chunks(lower.tier_idx, &chain, n_chunks);
                // What cannot be deleted is unknown here, and found again by the next start at the earliest.
                let _ = lower.tier.delete(&keys);
                promise.keep(());
            };
            if lower.writes.push(0, WriteJob::Task(Box::new(task))).is_ok() {
                answers.push(answer);
            }
        }
        for answer in answers {
            let _ = answer.wait(deadline);
        }
    }
}

impl Core {
    fn begin_generation(&self, chain: Option<&Chain>, namespace: Option<NamespaceId>) {
        let namespaces = match (chain, namespace) {
            (Some(chain), _) if self.n_chunks(chain) == 0 => Vec::new(),
            (Some(chain), _) => vec![Arc::clone(chain.namespace())],
            (None, Some(id)) => self.namespaces.find(id).into_iter().collect(),
            (None, None) => self.namespaces.all(),
        };
        for namespace in namespaces {
            namespace.begin_generation();
        }
    }

    /// Removes the first `n_chunks` chunks of a chain from a tier, the last first, up to one on which others
    /// hang; returns how many were there.
    pub(crate) fn remove_chunks(
        &self,
        tier: TierIdx,
        chain: &Chain,
        n_chunks: usize,
        deadline: Instant,
    ) -> usize {
        let (keys, n_removed) = self.take_out_chunks(tier, chain, n_chunks);
        self.delete_from(tier, keys, deadline);
        n_removed
    }

    /// Forgets the first `n_chunks` chunks of a chain in a tier, as [`Self::remove_chunks`] does; the keys that are to be
    /// deleted there, and how many chunks were there.
    fn take_out_chunks(&self, tier: TierIdx, chain: &Chain, n_chunks: usize) -> (Vec<ChunkKey>, usize) {
        let mut keys = Vec::new();
        let mut n_removed = 0;
        if let Some(residents) = self.residents(tier) {
            let mut residents = residents.lock();
            // A pinned block stays in the tree after it is gone, and does not keep its parent.
            let mut n_gone_children = 0;
            for chunk_idx in (0..n_chunks).rev() {
                let id = chain.id(chunk_idx);
                if residents.n_children(id) > n_gone_children {
                    break;
                }
                let removed = self.take_out(tier, id);
                n_removed += usize::from(!removed.is_empty());
                keys.extend(removed);
                residents.remove(id);
                n_gone_children = usize::from(residents.contains(id));
            }
        } else {
            for chunk_idx in 0..n_chunks {
                let removed = self.take_out(tier, chain.id(chunk_idx));
                n_removed += usize::from(!removed.is_empty());
                keys.extend((0..chain.n_ranks()).map(|rank| chain.key_of(chunk_idx, rank)));
            }
        }
        (keys, n_removed)
    }

    /// Removes all chunks, or those of a namespace, from a tier; returns how many were there.
    fn remove_all(&self, tier: TierIdx, namespace: Option<NamespaceId>, deadline: Instant) -> usize {
        let namespace_idx = match namespace.map(|id| self.namespaces.find(id)) {
            None => None,
            Some(Some(namespace)) => Some(namespace.idx),
            Some(None) => return 0,
        };
        let mut keys = Vec::new();
        let mut removed: Vec<(u32, BlockId)> = Vec::new();
        for shard_idx in 0..self.directory.n_shards() {
            let _residents = self.residents(tier).map(|residents| residents.lock());
            self.directory.sweep_shard(shard_idx, |hash, entry| {
                let ranks = entry.ranks[tier];
                if ranks == 0 || namespace_idx.is_some_and(|idx| idx != entry.namespace_idx) {
                    return;
                }
                entry.ranks[tier] = 0;
                let gone = self.keys(hash, entry, ranks);
                if tier == RAM {
                    entry.left_tiers = TierSet::default();
                    self.delete_from_ram(&gone);
                } else {
                    keys.extend(gone);
                }
                removed.push((entry.depth, crate::chain::block_id(hash)));
            });
        }
        // Children before their parents.
        removed.sort_unstable_by(|left, right| right.cmp(left));
        if let Some(residents) = self.residents(tier) {
            for turn in removed.chunks(REMOVAL_TURN) {
                let mut residents = residents.lock();
                for (_, id) in turn {
                    // It may have been stored again.
                    if self.directory.ranks(*id, tier) == 0 {
                        residents.remove(*id);
                    }
                }
            }
        }
        self.delete_from(tier, keys, deadline);
        removed.len()
    }

    /// Forgets a chunk of a tier; returns the keys that are to be deleted there. The caller has locked the tier's residents.
    fn take_out(&self, tier: TierIdx, id: BlockId) -> Vec<ChunkKey> {
        let removed = self.directory.update_known(id, |hash, entry| {
            let ranks = std::mem::take(&mut entry.ranks[tier]);
            let keys = self.keys(hash, entry, ranks);
            if tier == RAM {
                entry.left_tiers = TierSet::default();
                self.delete_from_ram(&keys);
            }
            keys
        });
        removed.unwrap_or_default()
    }

    /// Deletes from a lower tier, after what is queued for it; waits until that is done or the deadline.
    fn delete_from(&self, tier: TierIdx, keys: Vec<ChunkKey>, deadline: Instant) {
        let Some(lower) = self.lower(tier).filter(|_| !keys.is_empty()) else { return };
        let (promise, answer) = promise();
        let task = move |lower: &Lower| {
            // What cannot be deleted is unknown here, and found again by the next start at the earliest.
            let _ = lower.tier.delete(&keys);
            promise.keep(());
        };
        if lower.writes.push(0, WriteJob::Task(Box::new(task))).is_ok() {
            let _ = answer.wait(deadline);
        }
    }
}
