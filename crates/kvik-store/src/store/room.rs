//! Room in memory: what leaves it for something else.

use kvik_tier::{ChunkKey, Slot, Tier};

use super::core::Core;
use crate::counters::Counter;
use crate::policy::BlockId;
use crate::tiers::{RAM, TierSet};

/// Doublings of the number of victims before room is given up: some thousand victims for one slot.
const MAX_ROUNDS: u32 = 12;

impl Core {
    /// Takes memory; what is worth least leaves for it. `None` where too much is leased, pinned or to be
    /// written.
    pub(crate) fn reserve(&self, n_bytes: usize) -> Option<Slot> {
        let stat = self.ram.arena().stat();
        if n_bytes as u64 > stat.capacity_bytes {
            return None;
        }
        for round in 0..=MAX_ROUNDS {
            if let Some(slot) = self.ram.reserve(n_bytes) {
                if self.free_bytes() < self.reserve_bytes() {
                    self.reclaim_wake.wake();
                }
                return Some(slot);
            }
            let n_wanted = 1 << round.saturating_sub(1);
            if self.evict_from_ram(n_wanted) == 0 {
                return None;
            }
        }
        None
    }

    /// Makes chunks leave memory; says how many did.
    pub(crate) fn evict_from_ram(&self, n_wanted: usize) -> usize {
        self.end_pins();
        self.end_times();
        let mut residents = self.ram_residents.lock();
        let mut n_evicted = 0;
        while n_evicted < n_wanted
            && let Some(id) = residents.victim(self.now_ms())
        {
            // A block that was cleared while it was pinned has nothing behind it.
            n_evicted += usize::from(self.unpublish(id));
        }
        drop(residents);
        self.counters.add(Counter::EvictedChunks(RAM), n_evicted as u64);
        n_evicted
    }

    /// Takes a chunk out of sight; a lease keeps it. The caller has locked the residents of memory.
    pub(crate) fn unpublish(&self, id: BlockId) -> bool {
        let was_there = self.directory.update_known(id, |hash, entry| {
            let ranks = std::mem::take(&mut entry.ranks[RAM]);
            // What brings it back may also bring it to the tiers that it left.
            entry.left_tiers = TierSet::default();
            self.delete_from_ram(&self.keys(hash, entry, ranks));
            ranks != 0
        });
        was_there.unwrap_or(false)
    }

    pub(crate) fn delete_from_ram(&self, keys: &[ChunkKey]) {
        // Memory does not fail.
        let _ = self.ram.delete(keys);
    }

    /// Whether a chunk can stay without pushing the free memory to where eviction begins.
    pub(crate) fn has_spare_room(&self, n_bytes: usize) -> bool {
        self.free_bytes() >= (2 * self.reserve_bytes()).max(n_bytes as u64)
    }

    fn free_bytes(&self) -> u64 {
        let stat = self.ram.arena().stat();
        stat.capacity_bytes.saturating_sub(stat.used_bytes)
    }

    /// Bytes that are kept free.
    fn reserve_bytes(&self) -> u64 {
        (self.ram.arena().stat().capacity_bytes as f64 * self.options.ram_free_share) as u64
    }

    /// Keeps a share of the memory free until the store is closed.
    pub(crate) fn run_reclaimer(&self) {
        while self.reclaim_wake.wait() {
            while self.free_bytes() < self.reserve_bytes() && self.evict_from_ram(1) > 0 {}
        }
    }
}
