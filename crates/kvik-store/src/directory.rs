//! What is known of every chunk: which ranks of it are where.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use kvik_types::BlockHash;
use parking_lot::RwLock;

use crate::chain::{Chain, block_id};
use crate::observer::Observed;
use crate::policy::BlockId;
use crate::retention::NEVER_MS;
use crate::tiers::{MAX_TIERS, RAM, TierIdx, TierRanks, TierSet};

/// Enough that threads on all cores of a large machine seldom meet, and a small part of a small store.
const N_SHARDS: usize = 256;

/// The directory: one entry for each chunk that a local tier holds or that is being written.
///
/// Entries are found by the first half of the chunk's hash and hold the second; a chunk that shares its first
/// half with another one is as good as absent, and is never stored. For local tiers the ranks are exact: they
/// change in the same critical section of the shard as the index of the memory tier. For remote tiers they
/// are what was written or seen.
///
/// Every change of ranks goes through here, so an observer is notified under the lock of the shard.
#[derive(Debug)]
pub(crate) struct Directory {
    shards: Box<[RwLock<Shard>]>,
    /// Memory and the local tiers.
    local_tiers: TierSet,
}

/// What is known of one chunk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    second_half: u64,
    /// The ranks that are in each tier, one bit for each.
    pub(crate) ranks: TierRanks,
    /// The place of its namespace in the list.
    pub(crate) namespace_idx: u32,
    /// Its place in its chain: children are deeper than their parents.
    pub(crate) depth: u32,
    /// Writers that have a slot for it.
    pub(crate) n_writers: u16,
    /// Whether it was retrieved before.
    pub(crate) was_used: bool,
    /// When it was stored in memory or retrieved last, in seconds of the store's clock.
    pub(crate) used_s: u32,
    /// The lower tiers that it left for others: it is not written there again while it is in memory.
    pub(crate) left_tiers: TierSet,
    /// Whether it came from another node, which has it too as far as is known here.
    pub(crate) is_copy: bool,
    /// Whether its writer said that it may leave early.
    pub(crate) is_low: bool,
    /// When what memory has of it is not served any more, in milliseconds of the store's clock.
    pub(crate) end_ms: u64,
}

#[derive(Debug, Default)]
struct Shard {
    entries: HashMap<BlockId, Entry, BuildHasherDefault<IdHasher>>,
    observed: Vec<Arc<Observed>>,
}

/// Ids are hashes: their bits are the hash.
#[derive(Debug, Default)]
struct IdHasher(u64);

impl Directory {
    pub(crate) fn new(local_tiers: TierSet) -> Self {
        Self { shards: (0..N_SHARDS).map(|_| RwLock::default()).collect(), local_tiers }
    }

    /// What is known of a chunk; an empty entry where nothing is.
    pub(crate) fn view(&self, hash: BlockHash) -> Entry {
        let id = block_id(hash);
        let shard = self.shard(id).read();
        let entry = shard.entries.get(&id).filter(|entry| entry.second_half == second_half(hash)).copied();
        entry.unwrap_or_else(|| Entry::new(hash, 0, 0))
    }

    /// Says which ranks of a block are in a tier.
    pub(crate) fn ranks(&self, id: BlockId, tier: TierIdx) -> u64 {
        self.shard(id).read().entries.get(&id).map_or(0, |entry| entry.ranks[tier])
    }

    /// Changes the entry of a chunk of a chain, which is made if there is none.
    ///
    /// `None` where another chunk has the place. An entry that says nothing afterwards is removed.
    pub(crate) fn update<R>(
        &self,
        chain: &Chain,
        chunk_idx: usize,
        change: impl FnOnce(&mut Entry) -> R,
    ) -> Option<R> {
        let depth = u32::try_from(chunk_idx).unwrap_or(u32::MAX);
        let parent = chunk_idx.checked_sub(1).map(|parent_idx| chain.hash(parent_idx));
        self.update_hash(chain.hash(chunk_idx), parent, chain.namespace().idx, depth, change)
    }

    pub(crate) fn update_hash<R>(
        &self,
        hash: BlockHash,
        parent: Option<BlockHash>,
        namespace_idx: u32,
        depth: u32,
        change: impl FnOnce(&mut Entry) -> R,
    ) -> Option<R> {
        let id = block_id(hash);
        let mut shard = self.shard(id).write();
        let Shard { entries, observed } = &mut *shard;
        match entries.entry(id) {
            MapEntry::Occupied(mut place) => {
                if place.get().second_half != second_half(hash) {
                    return None;
                }
                let entry = place.get_mut();
                // A chunk that was found on disk has no depth before a chain shows it.
                entry.depth = entry.depth.max(depth);
                let before = *entry;
                let result = change(entry);
                let after = *entry;
                if after.is_empty(self.local_tiers) {
                    place.remove();
                }
                self.tell(observed, hash, parent, &before, &after);
                Some(result)
            }
            MapEntry::Vacant(place) => {
                let before = Entry::new(hash, namespace_idx, depth);
                let mut after = before;
                let result = change(&mut after);
                if !after.is_empty(self.local_tiers) {
                    place.insert(after);
                }
                self.tell(observed, hash, parent, &before, &after);
                Some(result)
            }
        }
    }

    /// Changes the entry of a block that is known; `None` where it is not.
    pub(crate) fn update_known<R>(
        &self,
        id: BlockId,
        change: impl FnOnce(BlockHash, &mut Entry) -> R,
    ) -> Option<R> {
        let mut shard = self.shard(id).write();
        let Shard { entries, observed } = &mut *shard;
        let MapEntry::Occupied(mut place) = entries.entry(id) else { return None };
        let before = *place.get();
        let hash = before.hash(id);
        let result = change(hash, place.get_mut());
        let after = *place.get();
        if after.is_empty(self.local_tiers) {
            place.remove();
        }
        self.tell(observed, hash, None, &before, &after);
        Some(result)
    }

    /// Calls `visit` with the entries of one shard; those that say nothing afterwards are removed.
    pub(crate) fn sweep_shard(&self, shard_idx: usize, mut visit: impl FnMut(BlockHash, &mut Entry)) {
        let mut shard = self.shards[shard_idx].write();
        let Shard { entries, observed } = &mut *shard;
        let mut changes = vec![Vec::new(); observed.len()];
        entries.retain(|id, entry| {
            let before = *entry;
            let hash = entry.hash(*id);
            visit(hash, entry);
            for (observed, changes) in observed.iter().zip(&mut changes) {
                if observed.is_about(entry.namespace_idx) {
                    observed.compare(hash, None, &self.known(&before), &self.known(entry), changes);
                }
            }
            !entry.is_empty(self.local_tiers)
        });
        for (observed, changes) in observed.iter().zip(&changes) {
            observed.tell(changes);
        }
    }

    /// Tells an observer of everything that is there and of every later change.
    pub(crate) fn observe(&self, observer: &Arc<Observed>) {
        for shard in &self.shards {
            let mut shard = shard.write();
            let mut changes = Vec::new();
            for (id, entry) in
                shard.entries.iter().filter(|(_, entry)| observer.is_about(entry.namespace_idx))
            {
                let nothing = [0; MAX_TIERS];
                observer.compare(entry.hash(*id), None, &nothing, &self.known(entry), &mut changes);
            }
            observer.tell(&changes);
            shard.observed.push(Arc::clone(observer));
        }
    }

    /// Tells an observer of nothing any more.
    pub(crate) fn stop_observing(&self, observer: &Arc<Observed>) {
        for shard in &self.shards {
            shard.write().observed.retain(|other| !Arc::ptr_eq(other, observer));
        }
    }

    /// Calls `visit` with every entry, shard by shard.
    pub(crate) fn visit(&self, mut visit: impl FnMut(BlockHash, &Entry)) {
        for shard in &self.shards {
            for (id, entry) in &shard.read().entries {
                visit(entry.hash(*id), entry);
            }
        }
    }

    /// Tells what changed of one entry.
    fn tell(
        &self,
        observed: &[Arc<Observed>],
        hash: BlockHash,
        parent: Option<BlockHash>,
        before: &Entry,
        after: &Entry,
    ) {
        if observed.is_empty() {
            return;
        }
        let namespace_idx = after.namespace_idx;
        let (before, after) = (self.known(before), self.known(after));
        if before == after {
            return;
        }
        for observed in observed.iter().filter(|observed| observed.is_about(namespace_idx)) {
            let mut changes = Vec::new();
            observed.compare(hash, parent, &before, &after, &mut changes);
            observed.tell(&changes);
        }
    }

    /// The ranks that are known of an entry: none once it is removed.
    fn known(&self, entry: &Entry) -> TierRanks {
        if entry.is_empty(self.local_tiers) { [0; MAX_TIERS] } else { entry.ranks }
    }

    pub(crate) fn local_tiers(&self) -> TierSet {
        self.local_tiers
    }

    pub(crate) fn n_shards(&self) -> usize {
        self.shards.len()
    }

    pub(crate) fn n_entries(&self) -> usize {
        self.shards.iter().map(|shard| shard.read().entries.len()).sum()
    }

    /// Memory of the tables, free places included.
    pub(crate) fn memory_bytes(&self) -> usize {
        // One byte of control beside each place; capacity leaves out the eighth that the table keeps free.
        let place_bytes = size_of::<(BlockId, Entry)>() + 1;
        self.shards.iter().map(|shard| shard.read().entries.capacity() * 8 / 7 * place_bytes).sum()
    }

    fn shard(&self, id: BlockId) -> &RwLock<Shard> {
        // The table takes its bucket from the lowest bits and its tag from the highest.
        &self.shards[(id.0 >> 40) as usize % N_SHARDS]
    }
}

fn second_half(hash: BlockHash) -> u64 {
    hash.to_u128() as u64
}

impl Entry {
    fn new(hash: BlockHash, namespace_idx: u32, depth: u32) -> Self {
        Self {
            second_half: second_half(hash),
            ranks: [0; MAX_TIERS],
            namespace_idx,
            depth,
            n_writers: 0,
            was_used: false,
            used_s: 0,
            left_tiers: TierSet::default(),
            is_copy: false,
            is_low: false,
            end_ms: NEVER_MS,
        }
    }

    fn hash(&self, id: BlockId) -> BlockHash {
        BlockHash::from_u128(u128::from(id.0) << 64 | u128::from(self.second_half))
    }

    /// Whether memory has it for some time only: it is not given to other tiers and nodes.
    pub(crate) fn is_timed(&self) -> bool {
        self.ranks[RAM] != 0 && self.end_ms != NEVER_MS
    }

    /// Whether it leaves before chunks that are hardly worth more.
    pub(crate) fn leaves_early(&self) -> bool {
        self.is_copy || self.is_low
    }

    /// Whether a local tier has any rank of it.
    pub(crate) fn is_local(&self, local_tiers: TierSet) -> bool {
        let is_held = |(tier, ranks): (TierIdx, &u64)| *ranks != 0 && local_tiers.contains(tier);
        self.ranks.iter().enumerate().any(is_held)
    }

    /// Remote tiers alone keep no entry: they are asked.
    fn is_empty(&self, local_tiers: TierSet) -> bool {
        self.n_writers == 0 && !self.is_local(local_tiers)
    }
}

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}
