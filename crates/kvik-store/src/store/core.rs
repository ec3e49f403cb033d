//! The state that all parts of a store share.

use std::sync::Arc;
use std::time::Instant;

use kvik_tier::{ChunkKey, RamTier, TierKind};
use kvik_types::BlockHash;

use super::pin_list::Pins;
use super::time_list::Times;
use crate::chain::Chain;
use crate::counters::Counters;
use crate::directory::{Directory, Entry};
use crate::flight::Flights;
use crate::lower::Lower;
use crate::namespaces::Namespaces;
use crate::options::StoreOptions;
use crate::residents::{ResidentPin, SharedResidents};
use crate::tiers::{TierIdx, TierLabel, TierName, TierRanks};
use crate::wake::Wake;

/// What all clones of a store, its threads and its guards share.
///
/// Locks are taken in this order, each for a few operations on memory, and none while a lower tier is called:
/// the residents of a tier, a shard of the directory, the index of the memory tier. Of the residents those of
/// one tier are locked at most.
///
/// What is resident changes under the lock of the tier's residents, so that they and the directory agree; it becomes
/// visible under the lock of the directory's shard, together with the check of the generation, so that
/// nothing slips past a clear.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) options: StoreOptions,
    pub(crate) ram: RamTier,
    pub(crate) ram_residents: SharedResidents,
    pub(crate) directory: Directory,
    /// The tiers below memory. A lower tier's index is one less than its [`TierIdx`].
    pub(crate) lowers: Vec<Lower>,
    /// What memory and the lower tiers are called, by their [`TierIdx`].
    pub(crate) labels: Arc<[TierLabel]>,
    pub(crate) flights: Arc<Flights>,
    pub(crate) namespaces: Namespaces,
    pub(crate) pins: Pins,
    pub(crate) times: Times,
    /// Wakes the thread that keeps a share of the memory free.
    pub(crate) reclaim_wake: Wake,
    pub(crate) counters: Counters,
    pub(crate) opened: Instant,
}

// === impl Core ===

impl Core {
    /// Milliseconds since the store was opened.
    pub(crate) fn now_ms(&self) -> u64 {
        self.opened.elapsed().as_millis() as u64
    }

    /// Seconds since the store was opened.
    pub(crate) fn now_s(&self) -> u32 {
        u32::try_from(self.opened.elapsed().as_secs()).unwrap_or(u32::MAX)
    }

    /// Takes note of a chunk that is retrieved, of which `entry` was known; at most once a second.
    pub(crate) fn note_used(&self, chain: &Chain, chunk_idx: usize, entry: &Entry) {
        let now_s = self.now_s();
        if !entry.was_used || entry.used_s < now_s {
            self.directory.update_known(chain.id(chunk_idx), |_, entry| {
                entry.was_used = true;
                entry.used_s = now_s;
            });
        }
    }

    /// The lower tier of an index; `None` for memory.
    pub(crate) fn lower(&self, tier: TierIdx) -> Option<&Lower> {
        tier.checked_sub(1).and_then(|lower_idx| self.lowers.get(lower_idx))
    }

    /// The lower tiers that take chunks.
    pub(crate) fn written_lowers(&self) -> impl Iterator<Item = &Lower> {
        self.lowers.iter().filter(|lower| !lower.tier.is_read_only())
    }

    pub(crate) fn kind_of(&self, tier: TierIdx) -> TierKind {
        self.labels[tier].kind
    }

    pub(crate) fn name_of(&self, tier: TierIdx) -> TierName {
        self.labels[tier].name.clone()
    }

    pub(crate) fn tier_idx(&self, name: &TierName) -> Option<TierIdx> {
        self.labels.iter().position(|label| label.name == *name)
    }

    /// The kinds of the tiers that have all ranks of a chunk, each once, memory first.
    pub(crate) fn kinds_having(&self, ranks: &TierRanks, all_ranks: u64) -> Vec<TierKind> {
        let mut kinds = Vec::new();
        for (label, ranks) in self.labels.iter().zip(ranks) {
            if *ranks == all_ranks && !kinds.contains(&label.kind) {
                kinds.push(label.kind);
            }
        }
        kinds
    }

    /// The residents of a local tier.
    pub(crate) fn residents(&self, tier: TierIdx) -> Option<&SharedResidents> {
        match self.lower(tier) {
            None => Some(&self.ram_residents),
            Some(lower) => lower.residents.as_ref(),
        }
    }

    /// Keys of those ranks of a chunk whose bits are set.
    pub(crate) fn keys(&self, hash: BlockHash, entry: &Entry, ranks: u64) -> Vec<ChunkKey> {
        let namespace = self.namespaces.id(entry.namespace_idx);
        ranks_of(ranks).map(|rank| ChunkKey { namespace, chunk: hash, rank }).collect()
    }

    /// The chunks of a chain; none of one that another store made, whose keys mean nothing here.
    pub(crate) fn n_chunks(&self, chain: &Chain) -> usize {
        if self.namespaces.is_ours(chain.namespace()) { chain.n_chunks() } else { 0 }
    }

    /// Whether a chunk may be in a local tier: its parent is.
    pub(crate) fn has_parent_in(&self, tier: TierIdx, chain: &Chain, chunk_idx: usize, rank: u16) -> bool {
        match chunk_idx.checked_sub(1) {
            None => true,
            Some(parent_idx) => self.directory.view(chain.hash(parent_idx)).ranks[tier] & (1 << rank) != 0,
        }
    }

    /// Whether what memory has under a chunk's name is of the chunk's tokens; `None` where it has nothing.
    pub(crate) fn is_in_memory(&self, chain: &Chain, chunk_idx: usize, rank: u16) -> Option<bool> {
        self.ram.is_for(&chain.key_of(chunk_idx, rank), chain.digest_of(chunk_idx))
    }

    /// Pins a chunk of memory; one that memory had at the start gets its place first. `None` where it is no resident.
    pub(crate) fn pin_placed(&self, chain: &Chain, chunk_idx: usize) -> Option<ResidentPin> {
        let id = chain.id(chunk_idx);
        ResidentPin::new(&self.ram_residents, id).or_else(|| {
            self.ram_residents.lock().place(self.now_ms(), chain, chunk_idx + 1);
            ResidentPin::new(&self.ram_residents, id)
        })
    }

    /// Pins the deepest of the first `n_chunks` chunks that is resident in memory.
    pub(crate) fn pin_deepest(&self, chain: &Chain, n_chunks: usize) -> Option<ResidentPin> {
        // A chunk that memory had at the start can be pinned once it has its place.
        self.ram_residents.lock().place(self.now_ms(), chain, n_chunks);
        ResidentPin::deepest(&self.ram_residents, chain, n_chunks)
    }
}

/// The ranks whose bits are set.
pub(crate) fn ranks_of(ranks: u64) -> impl Iterator<Item = u16> {
    (0..64).filter(move |rank| ranks & (1 << rank) != 0)
}
