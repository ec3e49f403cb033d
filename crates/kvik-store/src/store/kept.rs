//! Memory that outlives its store: what one store leaves to the next.
//!
//! A store that is taken apart ends its threads and closes its lower tiers, so that another one can open them. Its memory
//! stays, with the chunks in it and the order in which they would have left. The next store learns them as residents
//! whose parents are unknown: each finds its place when a chain shows it, and until then it leaves in that order, before all
//! others.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kvik_tier::{ChunkKey, RamTier, Tier as _};

use super::core::Core;
use super::kept_pins::KeptPins;
use super::times::KeptTime;
use super::{Store, StoreBuilder};
use crate::chain::block_id;
use crate::options::StoreOptions;
use crate::policy::BlockId;
use crate::tiers::RAM;

/// The memory of a store that was taken apart.
#[derive(Debug)]
pub struct KeptMemory {
    /// The chunks, with their bytes.
    pub ram: RamTier,
    /// The chunks in the order in which they leave when there is no room, those that hang on others first.
    pub chunks: Vec<KeptChunk>,
    /// The pins of its users.
    pub pins: KeptPins,
    /// The chunks that are kept for some time only.
    pub times: Vec<KeptTime>,
}

/// A chunk as one store leaves it to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptChunk {
    /// What a rank holds of it.
    pub key: ChunkKey,
    /// Its place in its chain.
    pub depth: u32,
}

impl KeptMemory {
    /// Memory that no store has used.
    pub fn new(ram: RamTier) -> Self {
        Self { ram, chunks: Vec::new(), pins: KeptPins::default(), times: Vec::new() }
    }
}

impl Store {
    /// Begins to put a store together on memory that another one left.
    pub fn builder_on(options: StoreOptions, memory: KeptMemory) -> StoreBuilder {
        StoreBuilder::new(options, memory)
    }

    /// Whether there is another handle of this store, which keeps it from being taken apart.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.threads) > 1
    }

    /// Ends the store as [`Self::close`] does, closes its lower tiers and returns its memory with all its chunks.
    ///
    /// # Errors
    /// Gives the store back where it has another user: a handle, a lease, a slot that is being filled, or a thread
    /// that hangs in a tier. If another handle is the reason, the store goes on; otherwise it goes on as a closed one.
    pub fn take_apart(self) -> Result<KeptMemory, Self> {
        let threads = Arc::try_unwrap(self.threads).map_err(|threads| Self { threads })?;
        threads.close();
        match threads.into_core() {
            Ok(core) => Ok(core.into_memory()),
            Err(threads) => Err(Self { threads: Arc::new(threads) }),
        }
    }
}

impl Core {
    /// Whether no lease and no slot is in use, so that only the index knows of memory.
    pub(super) fn has_only_chunks(&self) -> bool {
        self.ram.inventory().is_some()
    }

    fn into_memory(self) -> KeptMemory {
        let mut keys: HashMap<BlockId, Vec<KeptChunk>> = HashMap::new();
        self.directory.visit(|hash, entry| {
            let depth = entry.depth;
            let of_entry = self.keys(hash, entry, entry.ranks[RAM]);
            let chunks: Vec<KeptChunk> = of_entry.into_iter().map(|key| KeptChunk { key, depth }).collect();
            if !chunks.is_empty() {
                keys.insert(block_id(hash), chunks);
            }
        });
        let mut chunks = Vec::new();
        {
            let now_ms = self.now_ms();
            let mut residents = self.ram_residents.lock();
            while let Some(id) = residents.victim(now_ms) {
                chunks.extend(keys.remove(&id).unwrap_or_default());
            }
        }
        let names = keys.iter().filter_map(|(id, chunks)| Some((*id, chunks.first()?.key.chunk))).collect();
        let (pins, times) = (self.kept_pins(&names), self.kept_times());
        // Those that a pin kept leave last, children first.
        let mut pinned: Vec<KeptChunk> = keys.into_values().flatten().collect();
        pinned.sort_unstable_by_key(|chunk| (u32::MAX - chunk.depth, chunk.key));
        chunks.extend(pinned);
        KeptMemory { ram: self.ram, chunks, pins, times }
    }

    /// Makes residents of the chunks that memory had before the store was opened, and pins those that were. What is not
    /// listed is deleted: it would never leave.
    pub(super) fn learn_kept(&self, kept: &[KeptChunk], pins: &KeptPins, times: &[KeptTime]) {
        let mut residents = self.ram_residents.lock();
        let mut lengths = HashMap::new();
        self.ram.visit_keys(&mut |key, n_bytes| {
            lengths.insert(key, n_bytes);
        });
        let mut unlisted: HashSet<ChunkKey> = lengths.keys().copied().collect();
        for KeptChunk { key, depth } in kept {
            if u32::from(key.rank) >= u64::BITS || !unlisted.contains(key) {
                continue;
            }
            let namespace = self.namespaces.intern(key.namespace);
            let noted = self.directory.update_hash(key.chunk, None, namespace.idx, *depth, |entry| {
                entry.ranks[RAM] |= 1 << key.rank;
            });
            if noted.is_some() {
                residents.add_unplaced(block_id(key.chunk));
                unlisted.remove(key);
            }
        }
        self.learn_times(times);
        let places = kept.iter().map(|KeptChunk { key, depth }| (*key, *depth));
        self.learn_pins(pins, places, &lengths, &mut residents);
        self.delete_from_ram(&unlisted.into_iter().collect::<Vec<_>>());
    }
}
