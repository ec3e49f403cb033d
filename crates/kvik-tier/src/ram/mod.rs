//! The tier in memory.

mod index;
#[cfg(test)]
mod tests;

use crate::arena::{Arena, Lease, Slot};
use crate::error::Result;
use crate::key::ChunkKey;
use crate::tier::{GetItem, GetOutcome, PutItem, PutOutcome, Tier, TierKind, TierStat};
use index::Index;

/// Chunks in an [`Arena`], found by their keys.
///
/// Beside the operations of a [`Tier`], which copy, it gives out leases, which do not: a writer takes a slot
/// ([`Self::reserve`]), fills it, freezes it and publishes it; a reader leases what is there. Readers keep
/// their leases after a chunk is deleted, and after the tier is gone.
///
/// ```
/// # fn main() -> kvik_tier::Result<()> {
/// # use kvik_tier::{Arena, ArenaOptions, ChunkKey, NamespaceId, RamTier};
/// # let hash = kvik_types::BlockHash([7; 16]);
/// # let key = ChunkKey { namespace: NamespaceId(hash), chunk: hash, rank: 0 };
/// let tier = RamTier::new(Arena::new(ArenaOptions::new(1 << 20))?);
/// if let Some(mut slot) = tier.reserve(5000) {
///     slot.fill(42);
///     tier.publish(key, slot.freeze());
/// }
/// assert_eq!(tier.lease(&key).as_deref(), Some([42; 5000].as_slice()));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RamTier {
    arena: Arena,
    index: Index,
}

// === impl RamTier ===

impl RamTier {
    /// A tier without chunks, in memory of `arena`.
    ///
    /// The arena may have slots that are not the tier's: chunks that were not published, or not yet.
    pub fn new(arena: Arena) -> Self {
        Self { arena, index: Index::new() }
    }

    /// Where the chunks lie.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Leases the chunk `key`; `None` if it is not there.
    pub fn lease(&self, key: &ChunkKey) -> Option<Lease> {
        self.index.get(key)
    }

    /// Makes a chunk visible, as a whole; returns the lease that is visible from now on.
    ///
    /// If the key is present, the earlier chunk stays and is returned: equal keys are equal content. A lease of
    /// another arena is taken as well; its memory is not counted here and never moved.
    pub fn publish(&self, key: ChunkKey, lease: Lease) -> Lease {
        self.index.insert(key, lease).0
    }

    /// Takes memory for a chunk of `n_bytes`; `None` where there is no room.
    ///
    /// Where enough is free, but in pieces, chunks that nobody leases are moved together. While one is moved,
    /// those who look for it, or for one of the same shard of the index, wait for that copy.
    pub fn reserve(&self, n_bytes: usize) -> Option<Slot> {
        self.arena.allocate_among(n_bytes, &self.index)
    }

    fn put_item(&self, item: &PutItem<'_>) -> PutOutcome {
        if self.index.contains(&item.key) {
            return PutOutcome::Present;
        }
        let Some(mut slot) = self.reserve(item.n_bytes()) else {
            return PutOutcome::NoRoom;
        };
        let mut rest = &mut slot[..];
        for part in item.parts {
            let (space, after) = rest.split_at_mut(part.len());
            space.copy_from_slice(part);
            rest = after;
        }
        let (_, is_new) = self.index.insert(item.key, slot.freeze());
        if is_new { PutOutcome::Stored } else { PutOutcome::Present }
    }

    fn get_item(&self, item: &mut GetItem<'_>) -> GetOutcome {
        let Some(lease) = self.lease(&item.key) else {
            return GetOutcome::Miss;
        };
        if item.copy_from(&lease) {
            GetOutcome::Hit
        } else if item.head.is_empty() {
            // Not corrupt: what is there is what was stored, and the caller asks for something else.
            GetOutcome::Miss
        } else {
            GetOutcome::Corrupt("length")
        }
    }
}

impl Tier for RamTier {
    fn kind(&self) -> TierKind {
        TierKind::Ram
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        for item in batch {
            item.outcome = self.put_item(item);
        }
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        for item in batch {
            item.outcome = self.get_item(item);
        }
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        for (key, is_present) in keys.iter().zip(present) {
            *is_present = self.index.contains(key);
        }
        Ok(())
    }

    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        Ok(keys.iter().filter(|key| self.index.remove(key).is_some()).count())
    }

    fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        self.index.visit_lengths(visit);
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    /// Used is all that is taken of the arena, also by leases of chunks that are deleted.
    fn stat(&self) -> TierStat {
        let arena = self.arena.stat();
        TierStat {
            n_chunks: Some(self.index.len() as u64),
            used_bytes: Some(arena.used_bytes),
            capacity_bytes: Some(arena.capacity_bytes),
            details: vec![
                ("committed_bytes", arena.committed_bytes),
                ("n_refusals", arena.n_refusals),
                ("page_bytes", arena.page_bytes),
                ("n_extents", arena.n_extents as u64),
                ("idle_bytes", arena.idle_bytes),
                ("n_moved_chunks", arena.n_moved_chunks),
                ("moved_bytes", arena.moved_bytes),
            ],
            ..TierStat::default()
        }
    }
}
