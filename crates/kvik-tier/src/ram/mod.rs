//! The tier in memory.

mod index;
mod inventory;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};

use crate::arena::{Arena, Lease, Slot};
use crate::error::Result;
use crate::key::{ChunkKey, TokenDigest};
use crate::tier::{GetItem, GetOutcome, PutItem, PutOutcome, Tier, TierKind, TierStat};
use index::{Held, Index};
pub use inventory::PlacedChunk;

/// Chunks in an [`Arena`], found by their keys.
///
/// Beside the operations of a [`Tier`], which copy, it gives out leases, which do not: a writer takes a slot
/// ([`Self::reserve`]), fills it, freezes it and publishes it; a reader leases what is there. Readers keep
/// their leases after a chunk is deleted, and after the tier is gone.
///
/// ```
/// # fn main() -> kvik_tier::Result<()> {
/// # use kvik_tier::{Arena, ArenaOptions, ChunkKey, NamespaceId, RamTier, TokenDigest};
/// # let hash = kvik_types::BlockHash([7; 16]);
/// # let key = ChunkKey { namespace: NamespaceId(hash), chunk: hash, rank: 0 };
/// # let (digest, other) = (TokenDigest([1; 32]), TokenDigest([2; 32]));
/// let tier = RamTier::new(Arena::new(ArenaOptions::new(1 << 20))?);
/// if let Some(mut slot) = tier.reserve(5000) {
///     slot.fill(42);
///     tier.publish(key, digest, slot.freeze());
/// }
/// assert_eq!(tier.lease(&key, digest).as_deref(), Some([42; 5000].as_slice()));
/// assert!(tier.lease(&key, other).is_none());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RamTier {
    arena: Arena,
    index: Index,
    n_token_mismatches: AtomicU64,
}

// === impl RamTier ===

impl RamTier {
    /// A tier without chunks, in memory of `arena`.
    ///
    /// The arena may have slots that are not the tier's: chunks that were not published, or not yet.
    pub fn new(arena: Arena) -> Self {
        Self { arena, index: Index::new(), n_token_mismatches: AtomicU64::new(0) }
    }

    /// Where the chunks lie.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Leases the chunk `key`; `None` if it is not there, or is there for other tokens, which is counted.
    pub fn lease(&self, key: &ChunkKey, digest: TokenDigest) -> Option<Lease> {
        match self.index.get(key, digest) {
            Held::Same(lease) => Some(lease),
            Held::Other => {
                // Relaxed: a count for people.
                self.n_token_mismatches.fetch_add(1, Ordering::Relaxed);
                None
            }
            Held::Nothing => None,
        }
    }

    /// Leases the chunk `key` for whatever tokens it is, with their digest: for a reader that compares it later.
    pub fn lease_with_digest(&self, key: &ChunkKey) -> Option<(Lease, TokenDigest)> {
        self.index.get_any(key)
    }

    /// Whether the chunk `key` is there for the tokens of `digest`; `None` if it is not there at all.
    pub fn is_for(&self, key: &ChunkKey, digest: TokenDigest) -> Option<bool> {
        match self.index.get(key, digest) {
            Held::Same(_) => Some(true),
            Held::Other => Some(false),
            Held::Nothing => None,
        }
    }

    /// Leases that were refused because the chunk was there for other tokens.
    pub fn n_token_mismatches(&self) -> u64 {
        self.n_token_mismatches.load(Ordering::Relaxed)
    }

    /// Makes a chunk visible, as a whole; returns the lease that is visible from now on.
    ///
    /// If the key is present, the earlier chunk stays; it is returned if it is for the same tokens, and `None`
    /// is returned if it is not. A lease of another arena is taken as well; its memory is not counted here and
    /// never moved.
    pub fn publish(&self, key: ChunkKey, digest: TokenDigest, lease: Lease) -> Option<Lease> {
        match self.index.insert(key, digest, lease).0 {
            Held::Same(lease) => Some(lease),
            Held::Other | Held::Nothing => None,
        }
    }

    /// Takes memory for a chunk of `n_bytes`; `None` where there is no room.
    ///
    /// Where enough is free, but in pieces, unleased chunks are moved together. While one is moved, lookups
    /// of it, and of others in the same shard of the index, wait for that copy.
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
        let (_, is_new) = self.index.insert(item.key, item.digest, slot.freeze());
        if is_new { PutOutcome::Stored } else { PutOutcome::Present }
    }

    fn get_item(&self, item: &mut GetItem<'_>) -> GetOutcome {
        let lease = match self.index.get(&item.key, item.digest) {
            Held::Same(lease) => lease,
            Held::Other => return GetOutcome::TokenMismatch,
            Held::Nothing => return GetOutcome::Miss,
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
                ("token_mismatches", self.n_token_mismatches()),
            ],
            ..TierStat::default()
        }
    }
}
