//! The blocks that are held now.

use std::collections::HashMap;
use std::sync::Arc;

use kvik_proto::kv_stream::{KvKey, KvTier};

/// Parts that are copied one by one where a snapshot shares them. A worker with a million blocks copies four
/// thousand at a time, which takes some microseconds.
const N_SHARDS: usize = 256;

/// Which tiers have which blocks. A clone shares everything until one of the two changes.
#[derive(Debug, Clone)]
pub(super) struct Holding {
    shards: Vec<Arc<Shard>>,
}

/// The tiers that have a block of a group, one bit for each.
pub(super) type Shard = HashMap<(u32, KvKey), u8>;

impl Default for Holding {
    fn default() -> Self {
        Self { shards: (0..N_SHARDS).map(|_| Arc::default()).collect() }
    }
}

impl Holding {
    /// Says that a tier has a block or not; false if that was so before.
    pub(super) fn set(&mut self, group: u32, tier: KvTier, key: KvKey, is_held: bool) -> bool {
        // Keys are hashes, so any bits will do.
        let shard = &mut self.shards[key.0 as usize % N_SHARDS];
        let bit = 1_u8 << tier.as_index();
        let tiers = shard.get(&(group, key)).copied().unwrap_or(0);
        if (tiers & bit != 0) == is_held {
            return false;
        }
        let shard = Arc::make_mut(shard);
        match tiers ^ bit {
            0 => shard.remove(&(group, key)),
            changed => shard.insert((group, key), changed),
        };
        true
    }

    /// Its parts, to be looked at one by one.
    pub(super) fn into_shards(self) -> std::vec::IntoIter<Arc<Shard>> {
        self.shards.into_iter()
    }
}
