//! Which peers were seen to have which chunks.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::key::ChunkKey;

/// How long a peer's answer counts: longer than the peer keeps what it has announced, because the chunks of a long prompt
/// are read one after the other. A peer that has evicted one by then says so.
pub(super) const LOCATION_LIFE: Duration = Duration::from_mins(1);

/// Chunks that are remembered: some prompts of a million tokens.
const MAX_LOCATIONS: usize = 32_768;

/// Peers that are remembered for a chunk; the others are not needed.
const MAX_HOLDERS: usize = 4;

/// Names a peer as long as a tier knows it; never given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct PeerId(pub(super) u64);

/// What peers have said of chunks, for a short time.
#[derive(Debug, Default)]
pub(super) struct Locations {
    chunks: Mutex<HashMap<ChunkKey, Location>>,
}

#[derive(Debug)]
struct Location {
    holders: Vec<PeerId>,
    until: Instant,
}

impl Locations {
    /// Takes note that a peer has a chunk.
    pub(super) fn note(&self, key: ChunkKey, peer: PeerId, now: Instant) {
        let mut chunks = self.chunks.lock();
        if chunks.len() >= MAX_LOCATIONS {
            chunks.retain(|_, location| location.until > now);
            if chunks.len() >= MAX_LOCATIONS {
                // The chunk is asked for again, which is as right.
                return;
            }
        }
        let until = now + LOCATION_LIFE;
        let location = chunks.entry(key).or_insert_with(|| Location { holders: Vec::new(), until });
        if location.until <= now {
            location.holders.clear();
        }
        location.until = until;
        if !location.holders.contains(&peer) && location.holders.len() < MAX_HOLDERS {
            location.holders.push(peer);
        }
    }

    /// The peers that have a chunk.
    pub(super) fn holders(&self, key: &ChunkKey, now: Instant) -> Vec<PeerId> {
        let chunks = self.chunks.lock();
        chunks
            .get(key)
            .filter(|location| location.until > now)
            .map(|location| location.holders.clone())
            .unwrap_or_default()
    }

    /// Takes note that a peer does not have a chunk.
    pub(super) fn forget(&self, key: &ChunkKey, peer: PeerId) {
        let mut chunks = self.chunks.lock();
        if let Some(location) = chunks.get_mut(key) {
            location.holders.retain(|holder| *holder != peer);
            if location.holders.is_empty() {
                chunks.remove(key);
            }
        }
    }

    /// Forgets chunks.
    pub(super) fn forget_all(&self, keys: &[ChunkKey]) -> usize {
        let mut chunks = self.chunks.lock();
        keys.iter().filter(|key| chunks.remove(key).is_some()).count()
    }
}

#[cfg(test)]
mod tests {
    use kvik_types::BlockHash;

    use super::*;
    use crate::key::NamespaceId;

    fn key(number: u32) -> ChunkKey {
        let mut hash = [0; 16];
        hash[..4].copy_from_slice(&number.to_le_bytes());
        ChunkKey { namespace: NamespaceId(BlockHash([1; 16])), chunk: BlockHash(hash), rank: 0 }
    }

    #[test]
    fn what_a_peer_said_counts_for_a_while_and_until_it_is_denied() {
        let (locations, start) = (Locations::default(), Instant::now());
        locations.note(key(1), PeerId(1), start);
        locations.note(key(1), PeerId(2), start);
        locations.note(key(1), PeerId(2), start);
        assert_eq!(locations.holders(&key(1), start), [PeerId(1), PeerId(2)]);
        locations.forget(&key(1), PeerId(1));
        assert_eq!(locations.holders(&key(1), start), [PeerId(2)]);
        let later = start + LOCATION_LIFE;
        assert_eq!(locations.holders(&key(1), later), []);
        locations.note(key(1), PeerId(3), later);
        assert_eq!(locations.holders(&key(1), later), [PeerId(3)]);
        assert_eq!(locations.forget_all(&[key(1), key(2)]), 1);
        assert_eq!(locations.holders(&key(1), later), []);
    }

    #[test]
    fn the_memory_of_locations_is_bounded_and_used_again() {
        let (locations, start) = (Locations::default(), Instant::now());
        for number in 0..MAX_LOCATIONS as u32 + 10 {
            locations.note(key(number), PeerId(1), start);
        }
        assert_eq!(locations.chunks.lock().len(), MAX_LOCATIONS);
        assert_eq!(locations.holders(&key(MAX_LOCATIONS as u32 + 5), start), []);
        let later = start + LOCATION_LIFE;
        locations.note(key(MAX_LOCATIONS as u32 + 5), PeerId(1), later);
        assert_eq!(locations.holders(&key(MAX_LOCATIONS as u32 + 5), later), [PeerId(1)]);
    }
}
