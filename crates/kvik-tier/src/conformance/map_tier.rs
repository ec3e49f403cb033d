//! The plainest tier there is.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::error::Result;
use crate::key::ChunkKey;
use crate::tier::{GetItem, GetOutcome, PutItem, PutOutcome, Tier, TierKind, TierStat};

/// A map in memory, for tests of whatever stands on a tier.
#[derive(Debug, Default)]
pub struct MapTier {
    chunks: RwLock<Chunks>,
    capacity_bytes: Option<u64>,
}

#[derive(Debug, Default)]
struct Chunks {
    by_key: HashMap<ChunkKey, Arc<[u8]>>,
    used_bytes: u64,
}

impl MapTier {
    /// A tier that is never full.
    pub fn new() -> Self {
        Self::default()
    }

    /// A tier for so many bytes.
    pub fn with_capacity_bytes(capacity_bytes: u64) -> Self {
        Self { capacity_bytes: Some(capacity_bytes), ..Self::default() }
    }

    /// The bytes under a key, as they lie here.
    pub fn bytes_of(&self, key: ChunkKey) -> Option<Arc<[u8]>> {
        self.chunks.read().by_key.get(&key).cloned()
    }

    /// Puts other bytes under a key, as a medium does that loses or mixes them.
    pub fn overwrite(&self, key: ChunkKey, bytes: &[u8]) {
        let mut chunks = self.chunks.write();
        chunks.used_bytes += bytes.len() as u64;
        if let Some(replaced) = chunks.by_key.insert(key, bytes.into()) {
            chunks.used_bytes -= replaced.len() as u64;
        }
    }

    fn put_one(&self, item: &PutItem<'_>) -> PutOutcome {
        let n_bytes = item.n_bytes() as u64;
        let bytes: Arc<[u8]> = item.parts.concat().into();
        let mut chunks = self.chunks.write();
        if chunks.by_key.contains_key(&item.key) {
            return PutOutcome::Present;
        }
        if self.capacity_bytes.is_some_and(|capacity_bytes| chunks.used_bytes + n_bytes > capacity_bytes) {
            return PutOutcome::NoRoom;
        }
        chunks.used_bytes += n_bytes;
        chunks.by_key.insert(item.key, bytes);
        PutOutcome::Stored
    }

    fn get_one(&self, item: &mut GetItem<'_>) -> GetOutcome {
        let Some(chunk) = self.bytes_of(item.key) else {
            return GetOutcome::Miss;
        };
        if item.copy_from(&chunk) { GetOutcome::Hit } else { GetOutcome::Corrupt("length") }
    }
}

impl Tier for MapTier {
    fn kind(&self) -> TierKind {
        TierKind::Ram
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        for item in batch {
            item.outcome = self.put_one(item);
        }
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        for item in batch {
            item.outcome = self.get_one(item);
        }
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        let chunks = self.chunks.read();
        for (key, is_present) in keys.iter().zip(present) {
            *is_present = chunks.by_key.contains_key(key);
        }
        Ok(())
    }

    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        let mut chunks = self.chunks.write();
        let mut n_deleted = 0;
        for key in keys {
            if let Some(deleted) = chunks.by_key.remove(key) {
                chunks.used_bytes -= deleted.len() as u64;
                n_deleted += 1;
            }
        }
        Ok(n_deleted)
    }

    fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        let listed: Vec<(ChunkKey, u64)> =
            self.chunks.read().by_key.iter().map(|(key, chunk)| (*key, chunk.len() as u64)).collect();
        for (key, n_bytes) in listed {
            visit(key, n_bytes);
        }
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn stat(&self) -> TierStat {
        let chunks = self.chunks.read();
        TierStat {
            n_chunks: Some(chunks.by_key.len() as u64),
            used_bytes: Some(chunks.used_bytes),
            capacity_bytes: self.capacity_bytes,
            ..TierStat::default()
        }
    }
}
