//! Which chunk lies where.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};

use parking_lot::Mutex;

use crate::arena::{Lease, Tenants};
use crate::key::{ChunkKey, TokenDigest};

/// Parts of the index with a lock each; a power of two. Many more than there are threads that would meet.
const N_SHARDS: usize = 64;

/// A map from keys to leases and the tokens they are for, that many threads use at a time.
///
/// A lock is held for a look into one table, or while a chunk is moved; no memory is freed under it.
#[derive(Debug)]
pub(super) struct Index {
    shards: Box<[Shard]>,
}

/// On cache lines of its own: threads that take the locks of neighbors would slow each other down.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard {
    chunks: Mutex<HashMap<ChunkKey, Chunk, BuildHasherDefault<KeyHasher>>>,
}

#[derive(Debug)]
struct Chunk {
    lease: Lease,
    digest: TokenDigest,
}

/// What is there under a key.
#[derive(Debug)]
pub(super) enum Held {
    /// A chunk for the tokens that were asked for.
    Same(Lease),
    /// A chunk for other tokens.
    Other,
    Nothing,
}

/// Takes the bits of a key as they are: they come from a hash.
#[derive(Debug, Default)]
struct KeyHasher {
    state: u64,
}

impl Index {
    pub(super) fn new() -> Self {
        Self { shards: (0..N_SHARDS).map(|_| Shard::default()).collect() }
    }

    pub(super) fn get(&self, key: &ChunkKey, digest: TokenDigest) -> Held {
        self.shard(key).chunks.lock().get(key).map_or(Held::Nothing, |chunk| chunk.held_for(digest))
    }

    pub(super) fn get_any(&self, key: &ChunkKey) -> Option<(Lease, TokenDigest)> {
        self.shard(key).chunks.lock().get(key).map(|chunk| (chunk.lease.clone(), chunk.digest))
    }

    pub(super) fn contains(&self, key: &ChunkKey) -> bool {
        self.shard(key).chunks.lock().contains_key(key)
    }

    /// Adds a lease if the key has none; returns what the key has now and whether it is the new one.
    pub(super) fn insert(&self, key: ChunkKey, digest: TokenDigest, lease: Lease) -> (Held, bool) {
        match self.shard(&key).chunks.lock().entry(key) {
            Entry::Occupied(entry) => (entry.get().held_for(digest), false),
            Entry::Vacant(entry) => (entry.insert(Chunk { lease, digest }).held_for(digest), true),
        }
    }

    /// Removes a key; returns its lease.
    pub(super) fn remove(&self, key: &ChunkKey) -> Option<Lease> {
        self.shard(key).chunks.lock().remove(key).map(|chunk| chunk.lease)
    }

    pub(super) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.chunks.lock().len()).sum()
    }

    /// Calls `visit` with every key and its length, under no lock.
    pub(super) fn visit_lengths(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        for shard in &self.shards {
            let chunks: Vec<(ChunkKey, u64)> =
                shard.chunks.lock().iter().map(|(key, chunk)| (*key, chunk.lease.len() as u64)).collect();
            for (key, n_bytes) in chunks {
                visit(key, n_bytes);
            }
        }
    }

    /// Calls `visit` with every chunk, under the lock of its shard.
    pub(super) fn visit_chunks(&self, visit: &mut dyn FnMut(ChunkKey, TokenDigest, &Lease)) {
        for shard in &self.shards {
            shard.chunks.lock().iter().for_each(|(key, chunk)| visit(*key, chunk.digest, &chunk.lease));
        }
    }

    fn shard(&self, key: &ChunkKey) -> &Shard {
        // The tables use other bytes of the hash, so that the keys of one shard are spread over its table.
        &self.shards[usize::from(key.chunk.0[0]) % N_SHARDS]
    }
}

impl Chunk {
    fn held_for(&self, digest: TokenDigest) -> Held {
        if self.digest == digest { Held::Same(self.lease.clone()) } else { Held::Other }
    }
}

impl Tenants for Index {
    type Name = ChunkKey;

    fn visit(&self, visit: &mut dyn FnMut(ChunkKey, &Lease)) {
        for shard in &self.shards {
            shard.chunks.lock().iter().for_each(|(key, chunk)| visit(*key, &chunk.lease));
        }
    }

    fn with_lease(&self, key: ChunkKey, act: &mut dyn FnMut(&mut Lease) -> bool) -> bool {
        self.shard(&key).chunks.lock().get_mut(&key).is_some_and(|chunk| act(&mut chunk.lease))
    }
}

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        // The last bytes of a hash: the first choose the shard.
        let mut last = [0; 8];
        let n_bytes = bytes.len().min(last.len());
        last[..n_bytes].copy_from_slice(&bytes[bytes.len() - n_bytes..]);
        self.write_u64(u64::from_le_bytes(last));
    }

    fn write_u64(&mut self, bits: u64) {
        self.state = self.state.rotate_left(23) ^ bits;
    }

    fn write_u16(&mut self, rank: u16) {
        self.write_u64(u64::from(rank));
    }

    // A fixed length that says nothing about the key.
    fn write_usize(&mut self, _length: usize) {}

    fn finish(&self) -> u64 {
        self.state
    }
}
