//! What the store of a tenant gives to other nodes.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::time::Instant;

use kvik_store::{LocalRange, LocalRead, Store};
use kvik_tier::peer::{LEASE_TIME, PeerSource, Provided, WantedRange};
use kvik_tier::{ChunkKey, Lease, TokenDigest};
use parking_lot::Mutex;

/// The part of a tenant's memory that peers may keep from being evicted: a sixteenth.
const LEASED_SHARE: u64 = 16;

/// A tenant's store as its peers see it.
#[derive(Debug)]
pub(crate) struct StoreSource {
    store: Store,
    leases: Mutex<Leases>,
    max_leased_bytes: u64,
}

/// Chunks that were announced to peers, until they have read them or the time is over.
#[derive(Debug, Default)]
struct Leases {
    chunks: HashMap<ChunkKey, Leased>,
    /// The ends of leases in their order; one that was renewed has a later end too.
    ends: VecDeque<(Instant, ChunkKey)>,
    n_bytes: u64,
}

#[derive(Debug)]
struct Leased {
    lease: Lease,
    digest: TokenDigest,
    until: Instant,
}

impl StoreSource {
    pub(crate) fn new(store: Store) -> Self {
        let max_leased_bytes = store.arena().stat().capacity_bytes / LEASED_SHARE;
        Self { store, leases: Mutex::default(), max_leased_bytes }
    }

    /// Gives back what was leased for peers that did not come.
    pub(crate) fn end_leases(&self, now: Instant) {
        let ended = self.leases.lock().take_ended(now);
        // Without the lock: memory is freed.
        drop(ended);
    }

    /// Chunks that are leased for peers.
    #[cfg(test)]
    fn n_leased(&self) -> usize {
        self.leases.lock().chunks.len()
    }
}

impl PeerSource for StoreSource {
    fn find(&self, keys: &[ChunkKey]) -> Vec<bool> {
        let now = Instant::now();
        self.end_leases(now);
        let found = keys.iter().map(|key| {
            if let Some((lease, digest)) = self.store.lease_by_key(key) {
                self.leases.lock().add(
                    *key,
                    Leased { lease, digest, until: now + LEASE_TIME },
                    self.max_leased_bytes,
                );
                return true;
            }
            self.store.has_local(key)
        });
        found.collect()
    }

    fn read(&self, wanted: &WantedRange) -> Provided {
        let (Ok(n_bytes), Ok(chunk_bytes)) =
            (usize::try_from(wanted.n_bytes), usize::try_from(wanted.chunk_bytes))
        else {
            return Provided::Miss;
        };
        let range = LocalRange {
            key: wanted.key,
            digest: wanted.digest,
            offset: wanted.offset,
            n_bytes,
            chunk_bytes: (chunk_bytes > 0).then_some(chunk_bytes),
        };
        let leased = self.leases.lock().get(&wanted.key);
        let read = match leased {
            Some((lease, digest)) => range.part_of(lease, digest),
            None => self.store.read_local(&range),
        };
        match read {
            LocalRead::Bytes(lease, part) => Provided::Bytes(lease, part),
            LocalRead::Miss => Provided::Miss,
            LocalRead::TokenMismatch => Provided::TokenMismatch,
            LocalRead::NoRoom => Provided::Busy,
        }
    }
}

impl Leases {
    /// Keeps a chunk where that stays within the bound.
    fn add(&mut self, key: ChunkKey, leased: Leased, max_bytes: u64) {
        let n_bytes = leased.lease.len() as u64;
        let until = leased.until;
        if let Some(known) = self.chunks.get_mut(&key) {
            self.n_bytes = self.n_bytes - known.lease.len() as u64 + n_bytes;
            *known = leased;
        } else if self.n_bytes + n_bytes <= max_bytes {
            self.n_bytes += n_bytes;
            self.chunks.insert(key, leased);
        } else {
            return;
        }
        self.ends.push_back((until, key));
    }

    fn get(&self, key: &ChunkKey) -> Option<(Lease, TokenDigest)> {
        self.chunks.get(key).map(|leased| (leased.lease.clone(), leased.digest))
    }

    fn take_ended(&mut self, now: Instant) -> Vec<Leased> {
        let mut ended = Vec::new();
        while let Some((until, key)) = self.ends.front().copied()
            && until <= now
        {
            self.ends.pop_front();
            if self.chunks.get(&key).is_some_and(|leased| leased.until <= now)
                && let Some(leased) = self.chunks.remove(&key)
            {
                self.n_bytes -= leased.lease.len() as u64;
                ended.push(leased);
            }
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use kvik_store::StoreOptions;
    use kvik_tier::{Arena, ArenaOptions, NamespaceId, RamTier};
    use kvik_types::BlockHash;

    use super::*;

    fn key(number: u8) -> ChunkKey {
        ChunkKey { namespace: NamespaceId(BlockHash([1; 16])), chunk: BlockHash([number; 16]), rank: 0 }
    }

    #[test]
    fn leases_for_peers_end_in_time_and_are_bounded() {
        let arena = Arena::new(ArenaOptions::new(1 << 20)).unwrap();
        let slot = |n_bytes| arena.allocate(n_bytes).unwrap().freeze();
        let start = Instant::now();
        let until = start + LEASE_TIME;
        let digest = TokenDigest([2; 32]);
        let mut leases = Leases::default();
        leases.add(key(1), Leased { lease: slot(6000), digest, until }, 10_000);
        leases.add(key(2), Leased { lease: slot(6000), digest, until }, 10_000);
        assert!(leases.get(&key(1)).is_some() && leases.get(&key(2)).is_none());
        let renewed = until + LEASE_TIME;
        leases.add(key(1), Leased { lease: slot(6000), digest, until: renewed }, 10_000);
        assert_eq!(leases.take_ended(until).len(), 0);
        assert_eq!(leases.take_ended(renewed).len(), 1);
        assert_eq!((leases.n_bytes, leases.ends.len()), (0, 0));
    }

    #[test]
    fn nothing_is_leased_for_chunks_that_are_not_there() {
        let ram = RamTier::new(Arena::new(ArenaOptions::new(1 << 20)).unwrap());
        let source = StoreSource::new(Store::builder(StoreOptions::default(), ram).open().unwrap());
        assert_eq!(source.find(&[key(1), key(2)]), [false, false]);
        assert_eq!(source.n_leased(), 0);
    }
}
