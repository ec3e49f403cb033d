//! What lies where in memory, for a tier that goes on with the same memory file.

use std::os::fd::OwnedFd;

use super::RamTier;
use super::index::Index;
use crate::arena::{Arena, ChunkPlace};
use crate::error::{Result, TierError};
use crate::key::{ChunkKey, TokenDigest};

/// A chunk, and where it lies in the arena's memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedChunk {
    /// Its name.
    pub key: ChunkKey,
    /// The tokens that it is for.
    pub digest: TokenDigest,
    /// Its bytes.
    pub place: ChunkPlace,
}

impl RamTier {
    /// All chunks and their places; `None` while the memory has any other user: a lease on a chunk, a slot that is being
    /// filled, or a chunk of another arena.
    ///
    /// The list describes all memory that is in use as long as the tier and its arena are left alone.
    pub fn inventory(&self) -> Option<Vec<PlacedChunk>> {
        let mut chunks = Vec::new();
        let (mut n_listed_bytes, mut is_alone) = (0, true);
        self.index.visit_chunks(&mut |key, digest, lease| {
            is_alone &= self.arena.is_only_lease(lease);
            n_listed_bytes += lease.padded().len() as u64;
            let place = ChunkPlace { offset: lease.offset(), n_bytes: lease.len() as u64 };
            chunks.push(PlacedChunk { key, digest, place });
        });
        (is_alone && n_listed_bytes == self.arena.stat().used_bytes).then_some(chunks)
    }

    /// A tier on the memory file of another one, with the chunks of its [inventory](Self::inventory).
    ///
    /// The caller has the right to the file, as [`Arena::adopt`] asks for it.
    ///
    /// # Errors
    /// If the file cannot be mapped, or if chunks overlap, lie outside or have one key.
    pub fn adopt(file: OwnedFd, chunks: &[PlacedChunk]) -> Result<Self> {
        let places: Vec<ChunkPlace> = chunks.iter().map(|chunk| chunk.place).collect();
        let (arena, leases) = Arena::adopt(file, &places)?;
        let index = Index::new();
        for (PlacedChunk { key, digest, .. }, lease) in chunks.iter().zip(leases) {
            let (_, is_new) = index.insert(*key, *digest, lease);
            if !is_new {
                return Err(TierError::invalid("chunk", key, "one place for a key"));
            }
        }
        Ok(Self { index, ..Self::new(arena) })
    }
}

#[cfg(test)]
mod tests {
    use kvik_types::BlockHash;

    use super::*;
    use crate::arena::ArenaOptions;
    use crate::key::NamespaceId;
    use crate::tier::Tier as _;

    fn key(number: u8) -> ChunkKey {
        ChunkKey { namespace: NamespaceId(BlockHash([9; 16])), chunk: BlockHash([number; 16]), rank: 0 }
    }

    fn put(tier: &RamTier, number: u8) {
        let mut slot = tier.reserve(3000 + usize::from(number)).unwrap();
        slot.fill(number);
        tier.publish(key(number), TokenDigest([number; 32]), slot.freeze()).unwrap();
    }

    #[test]
    fn a_tier_goes_on_with_the_chunks_of_another() {
        let tier = RamTier::new(Arena::new(ArenaOptions::new(1 << 20)).unwrap());
        (0..100).for_each(|number| put(&tier, number));
        tier.delete(&[key(7)]).unwrap();
        let chunks = tier.inventory().unwrap();
        assert_eq!(chunks.len(), 99);
        let file = tier.arena().as_fd().try_clone_to_owned().unwrap();
        let next = RamTier::adopt(file, &chunks).unwrap();
        drop(tier);
        for number in (0..100).filter(|number| *number != 7) {
            let lease = next.lease(&key(number), TokenDigest([number; 32])).unwrap();
            assert_eq!(*lease, vec![number; 3000 + usize::from(number)]);
            assert!(next.lease(&key(number), TokenDigest([0xFF; 32])).is_none(), "tokens are still compared");
        }
        assert!(next.lease(&key(7), TokenDigest([7; 32])).is_none());
        // It is left to a third one in the same way.
        put(&next, 7);
        assert_eq!(next.inventory().unwrap().len(), 100);
    }

    #[test]
    fn there_is_no_inventory_while_memory_has_another_user() {
        let tier = RamTier::new(Arena::new(ArenaOptions::new(1 << 20)).unwrap());
        put(&tier, 1);
        let lease = tier.lease(&key(1), TokenDigest([1; 32])).unwrap();
        assert!(tier.inventory().is_none(), "a reader has a lease");
        tier.delete(&[key(1)]).unwrap();
        assert!(tier.inventory().is_none(), "a reader has a lease on a chunk that is deleted");
        drop(lease);
        assert_eq!(tier.inventory().unwrap(), []);
        let slot = tier.reserve(10).unwrap();
        assert!(tier.inventory().is_none(), "a writer has a slot");
        drop(slot);
        let other = Arena::new(ArenaOptions::new(1 << 20)).unwrap();
        tier.publish(key(2), TokenDigest([2; 32]), other.allocate(10).unwrap().freeze()).unwrap();
        assert!(tier.inventory().is_none(), "a chunk lies in another arena");
    }

    #[test]
    fn a_key_that_is_listed_twice_is_refused() {
        let tier = RamTier::new(Arena::new(ArenaOptions::new(1 << 20)).unwrap());
        put(&tier, 1);
        put(&tier, 2);
        let mut chunks = tier.inventory().unwrap();
        chunks[1].key = chunks[0].key;
        let file = tier.arena().as_fd().try_clone_to_owned().unwrap();
        let error = RamTier::adopt(file, &chunks).unwrap_err().to_string();
        assert!(error.contains("one place for a key"), "{error}");
    }
}
