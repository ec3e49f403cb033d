//! The KV cache of a mock worker.

use std::collections::{BTreeMap, HashMap};

/// Blocks in the order of their last use, of a chain the deepest first.
#[derive(Debug)]
pub(super) struct Cache {
    capacity_blocks: usize,
    entries: HashMap<u64, Entry>,
    /// Blocks without a holder, by last use.
    evictable: BTreeMap<u64, u64>,
    /// Rises with every use of a block.
    clock: u64,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    last_use: u64,
    n_holds: u32,
}

impl Cache {
    pub(super) fn new(capacity_blocks: usize) -> Self {
        Self { capacity_blocks, entries: HashMap::new(), evictable: BTreeMap::new(), clock: 0 }
    }

    /// Holds the longest prefix of `blocks` that is there, and gives its length.
    pub(super) fn hold_prefix(&mut self, blocks: &[u64]) -> usize {
        let n_there = blocks.iter().take_while(|block| self.entries.contains_key(block)).count();
        // From the end: so the deepest of a chain is always its oldest.
        for block in blocks[..n_there].iter().rev() {
            self.clock += 1;
            if let Some(entry) = self.entries.get_mut(block) {
                self.evictable.remove(&entry.last_use);
                *entry = Entry { last_use: self.clock, n_holds: entry.n_holds + 1 };
            }
        }
        n_there
    }

    /// Stores what follows the first `n_held` of `blocks`, as far as there is room, and holds it too. Gives the
    /// number of blocks that are held now, and appends what was new and what had to leave.
    pub(super) fn store_rest(
        &mut self,
        blocks: &[u64],
        n_held: usize,
        stored: &mut Vec<u64>,
        evicted: &mut Vec<u64>,
    ) -> usize {
        let mut n_now = n_held;
        for &block in &blocks[n_held..] {
            if !self.entries.contains_key(&block) {
                if self.entries.len() >= self.capacity_blocks {
                    let Some((_, leaving)) = self.evictable.pop_first() else { break };
                    self.entries.remove(&leaving);
                    evicted.push(leaving);
                }
                self.entries.insert(block, Entry { last_use: 0, n_holds: 0 });
                stored.push(block);
            }
            if let Some(entry) = self.entries.get_mut(&block) {
                self.evictable.remove(&entry.last_use);
                entry.n_holds += 1;
            }
            n_now += 1;
        }
        self.use_again(&blocks[..n_now]);
        n_now
    }

    /// Lets `blocks` go that were held.
    pub(super) fn release(&mut self, blocks: &[u64]) {
        for block in blocks {
            if let Some(entry) = self.entries.get_mut(block) {
                entry.n_holds -= 1;
            }
        }
        self.use_again(blocks);
        for block in blocks {
            if let Some(entry) = self.entries.get(block)
                && entry.n_holds == 0
            {
                self.evictable.insert(entry.last_use, *block);
            }
        }
    }

    fn use_again(&mut self, blocks: &[u64]) {
        for block in blocks.iter().rev() {
            self.clock += 1;
            if let Some(entry) = self.entries.get_mut(block) {
                entry.last_use = self.clock;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(cache: &mut Cache, blocks: &[u64]) -> (usize, Vec<u64>) {
        let (mut stored, mut evicted) = (Vec::new(), Vec::new());
        let n_there = cache.hold_prefix(blocks);
        let n_held = cache.store_rest(blocks, n_there, &mut stored, &mut evicted);
        cache.release(&blocks[..n_held]);
        (n_there, evicted)
    }

    #[test]
    fn the_deepest_block_of_the_oldest_chain_leaves_first() {
        let mut cache = Cache::new(6);
        pass(&mut cache, &[1, 2, 3]);
        pass(&mut cache, &[1, 4, 5]);
        assert_eq!(pass(&mut cache, &[6, 7]), (0, vec![3]), "one place was free");
        assert_eq!(pass(&mut cache, &[8]), (0, vec![2]));
        assert_eq!(pass(&mut cache, &[1, 4, 5]), (3, vec![]));
    }

    #[test]
    fn what_is_held_stays_and_what_has_no_room_is_not_stored() {
        let mut cache = Cache::new(2);
        let (mut stored, mut evicted) = (Vec::new(), Vec::new());
        assert_eq!(cache.store_rest(&[1, 2, 3], 0, &mut stored, &mut evicted), 2);
        assert_eq!(cache.store_rest(&[4], 0, &mut stored, &mut evicted), 0);
        assert_eq!((stored, evicted), (vec![1, 2], vec![]));
        cache.release(&[1, 2]);
        assert_eq!(pass(&mut cache, &[4]), (0, vec![2]));
    }

    #[test]
    fn a_block_that_two_hold_stays_until_both_let_go() {
        let mut cache = Cache::new(1);
        assert_eq!(pass(&mut cache, &[1]), (0, vec![]));
        assert_eq!((cache.hold_prefix(&[1]), cache.hold_prefix(&[1])), (1, 1));
        cache.release(&[1]);
        assert_eq!(pass(&mut cache, &[2]), (0, vec![]), "still held");
        cache.release(&[1]);
        assert_eq!(pass(&mut cache, &[2]), (0, vec![1]));
    }
}
