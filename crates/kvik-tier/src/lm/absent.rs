//! Keys whose values are known to be gone although a server says that they are there.

use std::collections::{HashMap, VecDeque};

use parking_lot::Mutex;

use crate::key::ChunkKey;

/// Keys that are remembered; the oldest are forgotten first, which costs a read that misses.
const MAX_KEYS: usize = 1 << 16;

/// Keys that were deleted, or found to be deleted or broken.
#[derive(Debug, Default)]
pub(super) struct AbsentKeys {
    keys: Mutex<Keys>,
}

#[derive(Debug, Default)]
struct Keys {
    /// With the number under which each came last.
    known: HashMap<ChunkKey, u64>,
    /// In the order in which they came, also those that left meanwhile.
    order: VecDeque<(u64, ChunkKey)>,
    next_number: u64,
}

impl AbsentKeys {
    pub(super) fn insert(&self, key: ChunkKey) {
        let mut keys = self.keys.lock();
        let Keys { known, order, next_number } = &mut *keys;
        if known.contains_key(&key) {
            return;
        }
        known.insert(key, *next_number);
        order.push_back((*next_number, key));
        *next_number += 1;
        while order.len() > MAX_KEYS {
            if let Some((number, oldest)) = order.pop_front()
                && known.get(&oldest) == Some(&number)
            {
                known.remove(&oldest);
            }
        }
    }

    pub(super) fn remove(&self, key: &ChunkKey) {
        self.keys.lock().known.remove(key);
    }

    pub(super) fn contains(&self, key: &ChunkKey) -> bool {
        self.keys.lock().known.contains_key(key)
    }
}

#[cfg(test)]
mod tests {
    use kvik_types::BlockHash;

    use super::*;
    use crate::key::NamespaceId;

    fn key(number: usize) -> ChunkKey {
        let mut chunk = [0; 16];
        chunk[..8].copy_from_slice(&number.to_le_bytes());
        ChunkKey { namespace: NamespaceId(BlockHash([1; 16])), chunk: BlockHash(chunk), rank: 0 }
    }

    #[test]
    fn so_many_keys_are_remembered_and_no_more() {
        let absent = AbsentKeys::default();
        for number in 0..MAX_KEYS + 10 {
            absent.insert(key(number));
        }
        assert!(!absent.contains(&key(9)) && absent.contains(&key(10)));
        assert!(absent.contains(&key(MAX_KEYS + 9)));
        for _ in 0..2 * MAX_KEYS {
            absent.remove(&key(50));
            absent.insert(key(50));
        }
        assert!(absent.contains(&key(50)) && absent.keys.lock().order.len() <= MAX_KEYS);
    }
}
