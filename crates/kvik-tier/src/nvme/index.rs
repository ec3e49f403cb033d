//! Where the chunks are.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::format::padded;
use super::segment::Segment;
use crate::key::ChunkKey;

/// Locks of the index; a power of two, enough that lookups of a few threads rarely meet.
const N_SHARDS: usize = 16;

/// Where the chunks are, and how much room they take.
///
/// Locks are held for a lookup or a change of one key, never during I/O.
#[derive(Debug)]
pub(crate) struct Index {
    shards: Vec<Mutex<HashMap<ChunkKey, Location>>>,
    /// Blocks of all chunks that are placed or claimed, in bytes.
    live_bytes: AtomicU64,
    max_live_bytes: u64,
}

/// Where a chunk is.
#[derive(Clone, Debug)]
pub(crate) struct Location {
    pub(crate) segment: Arc<Segment>,
    pub(crate) offset: u64,
    pub(crate) n_bytes: u64,
}

impl Index {
    pub(crate) fn new(max_live_bytes: u64) -> Self {
        let shards = (0..N_SHARDS).map(|_| Mutex::default()).collect();
        Self { shards, live_bytes: AtomicU64::new(0), max_live_bytes }
    }

    /// Where a chunk is.
    pub(crate) fn get(&self, key: &ChunkKey) -> Option<Location> {
        self.shard(key).lock().get(key).cloned()
    }

    /// Whether a chunk is anywhere.
    pub(crate) fn contains(&self, key: &ChunkKey) -> bool {
        self.shard(key).lock().contains_key(key)
    }

    /// Takes room for a chunk before it has a place; false if that would be more than the limit.
    pub(crate) fn claim(&self, n_bytes: u64) -> bool {
        let claim = |live_bytes: u64| {
            live_bytes.checked_add(padded(n_bytes)).filter(|sum| *sum <= self.max_live_bytes)
        };
        // Relaxed: the number guards no memory.
        self.live_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claim).is_ok()
    }

    /// Takes room for a chunk that is there already, over the limit if need be.
    pub(crate) fn claim_found(&self, n_bytes: u64) {
        self.live_bytes.fetch_add(padded(n_bytes), Ordering::Relaxed);
    }

    /// Gives claimed room back.
    pub(crate) fn unclaim(&self, n_bytes: u64) {
        self.live_bytes.fetch_sub(padded(n_bytes), Ordering::Relaxed);
    }

    /// Places a chunk whose room is claimed; false, and the room is given back, if it has a place already.
    pub(crate) fn insert(&self, key: ChunkKey, location: Location) -> bool {
        match self.shard(&key).lock().entry(key) {
            MapEntry::Occupied(_) => {
                self.unclaim(location.n_bytes);
                false
            }
            MapEntry::Vacant(vacant) => {
                location.segment.add_live(location.n_bytes);
                vacant.insert(location);
                true
            }
        }
    }

    /// Gives a chunk another place, whose room is claimed, and gives the room of the old one back; false, and the claimed room is
    /// given back, if it has none.
    pub(crate) fn replace(&self, key: ChunkKey, location: Location) -> bool {
        match self.shard(&key).lock().entry(key) {
            MapEntry::Occupied(mut occupied) => {
                location.segment.add_live(location.n_bytes);
                let old = occupied.insert(location);
                self.forget(&old);
                true
            }
            MapEntry::Vacant(_) => {
                self.unclaim(location.n_bytes);
                false
            }
        }
    }

    /// Takes a chunk out; returns what `number` gives while no other thread can place it again.
    pub(crate) fn remove<T>(&self, key: &ChunkKey, number: impl FnOnce() -> T) -> Option<T> {
        let mut shard = self.shard(key).lock();
        let location = shard.remove(key)?;
        self.forget(&location);
        Some(number())
    }

    /// Whether a chunk is at this place.
    pub(crate) fn is_at(&self, key: &ChunkKey, segment: &Arc<Segment>, offset: u64) -> bool {
        self.shard(key).lock().get(key).is_some_and(|location| location.is_at(segment, offset))
    }

    /// Takes a chunk out if it is at this place.
    pub(crate) fn remove_at(&self, key: &ChunkKey, segment: &Arc<Segment>, offset: u64) -> bool {
        let mut shard = self.shard(key).lock();
        let removed = match shard.entry(*key) {
            MapEntry::Occupied(occupied) if occupied.get().is_at(segment, offset) => occupied.remove(),
            _ => return false,
        };
        self.forget(&removed);
        true
    }

    /// Gives a chunk another place if it is still at this one.
    pub(crate) fn relocate(&self, key: &ChunkKey, from: (&Arc<Segment>, u64), to: (&Arc<Segment>, u64)) {
        let mut shard = self.shard(key).lock();
        if let Some(location) = shard.get_mut(key)
            && location.is_at(from.0, from.1)
        {
            from.0.remove_live(location.n_bytes);
            to.0.add_live(location.n_bytes);
            location.segment = Arc::clone(to.0);
            location.offset = to.1;
        }
    }

    /// Calls `visit` with every key and length, in the order in which they lie in the log; no lock is held
    /// meanwhile.
    pub(crate) fn visit(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        let mut known = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock();
            known.extend(shard.iter().map(|(key, location)| {
                let place = (location.segment.first_sequence, location.offset);
                (place, *key, location.n_bytes)
            }));
        }
        known.sort_unstable_by_key(|(place, ..)| *place);
        for (_, key, n_bytes) in known {
            visit(key, n_bytes);
        }
    }

    /// Number of chunks.
    pub(crate) fn n_chunks(&self) -> u64 {
        self.shards.iter().map(|shard| shard.lock().len() as u64).sum()
    }

    /// Blocks of all chunks, in bytes.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.live_bytes.load(Ordering::Relaxed)
    }

    /// The most that may be claimed.
    pub(crate) fn max_live_bytes(&self) -> u64 {
        self.max_live_bytes
    }

    fn forget(&self, location: &Location) {
        location.segment.remove_live(location.n_bytes);
        self.unclaim(location.n_bytes);
    }

    /// Keys are hashes: any of their bytes spreads them.
    fn shard(&self, key: &ChunkKey) -> &Mutex<HashMap<ChunkKey, Location>> {
        &self.shards[usize::from(key.chunk.0[0] ^ key.rank as u8) % N_SHARDS]
    }
}

impl Location {
    fn is_at(&self, segment: &Arc<Segment>, offset: u64) -> bool {
        Arc::ptr_eq(&self.segment, segment) && self.offset == offset
    }
}
