//! Room in memory: what becomes resident, and what leaves for it.

use std::sync::Arc;

use kvik_tier::{ChunkKey, Lease, Slot, Tier};
use parking_lot::{Condvar, Mutex};

use super::core::Core;
use super::stats::Counter;
use crate::chain::Chain;
use crate::directory::{RAM, TierIdx};
use crate::flight::{Flight, Landing};
use crate::policy::BlockId;

/// Doublings of the number of victims before room is given up: some thousand victims for one slot.
const MAX_ROUNDS: u32 = 12;

/// Wakes the thread that keeps a share of the memory free.
#[derive(Debug, Default)]
pub(crate) struct Reclaimer {
    state: Mutex<Wake>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Wake {
    is_wanted: bool,
    is_closed: bool,
}

/// What became of a chunk that was to be made visible in memory.
#[derive(Debug)]
pub(crate) enum Published {
    /// It is there; the lease is the one that all see.
    Stored(Lease),
    /// It was there before.
    Present,
    /// Its parent is not there.
    NoParent,
    /// Its namespace was cleared since.
    Stale,
}

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
                    self.reclaimer.wake();
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
        let mut book = self.ram_book.lock();
        let mut n_evicted = 0;
        while n_evicted < n_wanted
            && let Some(id) = book.victim(self.now_ms())
        {
            // A block that was cleared while it was pinned has nothing behind it.
            n_evicted += usize::from(self.unpublish(id));
        }
        drop(book);
        self.counters.add(Counter::EvictedChunks(RAM), n_evicted as u64);
        n_evicted
    }

    /// Takes a chunk out of sight; who leases it keeps it. The caller holds the book of the memory tier.
    pub(crate) fn unpublish(&self, id: BlockId) -> bool {
        let was_there = self.directory.update_known(id, |hash, entry| {
            let ranks = std::mem::take(&mut entry.ranks[RAM]);
            self.delete_from_ram(&self.keys(hash, entry, ranks));
            ranks != 0
        });
        was_there.unwrap_or(false)
    }

    pub(crate) fn delete_from_ram(&self, keys: &[ChunkKey]) {
        // Memory does not fail.
        let _ = self.ram.delete(keys);
    }

    /// Makes what a rank holds of a chunk resident and visible, unless its namespace was cleared since
    /// `generation`.
    pub(crate) fn publish(
        &self,
        chain: &Chain,
        chunk_idx: usize,
        rank: u16,
        generation: u64,
        lease: Lease,
    ) -> Published {
        let mut book = self.ram_book.lock();
        if !self.has_parent_in(RAM, chain, chunk_idx, rank) || !book.insert(self.now_ms(), chain, chunk_idx) {
            return Published::NoParent;
        }
        let bit = 1 << rank;
        let published = self.directory.update(chain, chunk_idx, |entry| {
            if chain.namespace().generation() != generation {
                return Published::Stale;
            }
            let was_there = entry.ranks[RAM] & bit != 0;
            let visible = self.ram.publish(chain.key_of(chunk_idx, rank), lease);
            entry.ranks[RAM] |= bit;
            if was_there { Published::Present } else { Published::Stored(visible) }
        });
        // Another chunk with the same half of a hash has the place, or the namespace was cleared.
        let published = published.unwrap_or(Published::Stale);
        if matches!(published, Published::Stale) && self.directory.ranks(chain.id(chunk_idx), RAM) == 0 {
            book.remove(chain.id(chunk_idx));
        }
        published
    }

    /// Makes what a flight brought resident if that is worth it, and what waited for it to be.
    pub(crate) fn keep(self: &Arc<Self>, flight: &Arc<Flight>) {
        let mut next = Some(Arc::clone(flight));
        while let Some(flight) = next.take() {
            let Some(Landing::Arrived { lease, .. }) = flight.landing() else { return };
            if !self.keep_one(&flight, &lease) || flight.chunk_idx + 1 >= flight.chain.n_chunks() {
                return;
            }
            let child = flight.chain.key_of(flight.chunk_idx + 1, flight.rank);
            next = self.flights.find(&child, flight.generation);
        }
    }

    /// Makes what flights brought, in the order of their chain, resident as far as that is worth it.
    ///
    /// A chunk that landed before its parent was kept is found by its parent's thread only as long as
    /// somebody holds it; who has them all holds them.
    pub(crate) fn keep_all(self: &Arc<Self>, flights: &[Arc<Flight>]) {
        for flight in flights {
            if let Some(Landing::Arrived { lease, .. }) = flight.landing() {
                self.keep_one(flight, &lease);
            }
        }
    }

    /// Makes what a flight brought resident if that is worth it; says whether it is.
    pub(crate) fn keep_one(self: &Arc<Self>, flight: &Flight, lease: &Lease) -> bool {
        let (chain, chunk_idx) = (&flight.chain, flight.chunk_idx);
        let is_worth_it = self.has_spare_room(lease.len())
            || (flight.may_displace() && self.ram_book.lock().admits(self.now_ms(), chain, chunk_idx));
        if !is_worth_it {
            return false;
        }
        let published = self.publish(chain, chunk_idx, flight.rank, flight.generation, lease.clone());
        if let Published::Stored(_) = published {
            self.counters.add(Counter::PromotedChunks, 1);
        }
        let is_kept = matches!(published, Published::Stored(_) | Published::Present);
        if is_kept {
            // Its memory is leased: as a victim it would give no room.
            flight.hold(|| {
                let id = chain.id(chunk_idx);
                self.ram_book.lock().pin(id).then(|| self.adopt_pin(id))
            });
        }
        is_kept
    }

    /// Whether a chunk can stay without pushing the free memory to where eviction begins.
    fn has_spare_room(&self, n_bytes: usize) -> bool {
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

    /// Forgets what a lower tier turned out not to have.
    pub(crate) fn forget_lower(&self, tier: TierIdx, chain: &Chain, chunk_idx: usize, rank: u16) {
        let mut book = self.book(tier).map(|book| book.lock());
        let is_gone = self.directory.update(chain, chunk_idx, |entry| {
            entry.ranks[tier] &= !(1 << rank);
            entry.ranks[tier] == 0
        });
        if let Some(book) = &mut book
            && is_gone == Some(true)
        {
            book.remove(chain.id(chunk_idx));
        }
    }

    /// Keeps a share of the memory free until the store is closed.
    pub(crate) fn run_reclaimer(&self) {
        while self.reclaimer.wait() {
            while self.free_bytes() < self.reserve_bytes() && self.evict_from_ram(1) > 0 {}
        }
    }
}

// === impl Reclaimer ===

impl Reclaimer {
    pub(crate) fn wake(&self) {
        self.state.lock().is_wanted = true;
        self.changed.notify_one();
    }

    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Waits until it is wanted; false at the end.
    fn wait(&self) -> bool {
        let mut state = self.state.lock();
        while !state.is_wanted && !state.is_closed {
            self.changed.wait(&mut state);
        }
        state.is_wanted = false;
        !state.is_closed
    }
}
