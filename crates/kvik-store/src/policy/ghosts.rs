//! What is still known of blocks that are not resident, the latest so many.

use std::collections::VecDeque;

use super::BlockId;
use super::tree::BlockMap;

/// A bounded map by block id that forgets the oldest first. Operations take amortized O(1).
#[derive(Debug)]
pub(super) struct Ghosts<V> {
    order: VecDeque<(BlockId, u64)>,
    latest: BlockMap<(u64, V)>,
    n_added: u64,
}

impl<V: Copy> Ghosts<V> {
    pub(super) fn new() -> Self {
        Self { order: VecDeque::new(), latest: BlockMap::default(), n_added: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.latest.len()
    }

    pub(super) fn get(&self, id: BlockId) -> Option<V> {
        self.latest.get(&id).map(|(_, value)| *value)
    }

    pub(super) fn add(&mut self, id: BlockId, value: V, limit: usize) {
        self.n_added += 1;
        self.latest.insert(id, (self.n_added, value));
        self.order.push_back((id, self.n_added));
        self.shrink(limit);
    }

    pub(super) fn take(&mut self, id: BlockId) -> Option<V> {
        self.latest.remove(&id).map(|(_, value)| value)
    }

    fn is_current(&self, entry: (BlockId, u64)) -> bool {
        self.latest.get(&entry.0).is_some_and(|(stamp, _)| *stamp == entry.1)
    }

    fn shrink(&mut self, limit: usize) {
        while let Some(&entry) = self.order.front() {
            if self.is_current(entry) {
                if self.latest.len() <= limit {
                    break;
                }
                self.latest.remove(&entry.0);
            }
            self.order.pop_front();
        }
        // Ids that were taken out leave entries in the middle; they must not outgrow the map.
        if self.order.len() > 2 * self.latest.len() + 64 {
            let latest = &self.latest;
            self.order.retain(|(id, stamp)| latest.get(id).is_some_and(|(current, _)| current == stamp));
        }
    }
}
