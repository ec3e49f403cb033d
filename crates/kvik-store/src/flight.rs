//! Reads that many may wait for.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use kvik_tier::{ChunkKey, Lease, TierKind};
use parking_lot::Mutex;

use crate::chain::Chain;
use crate::directory::TierIdx;
use crate::gather::Gather;
use crate::store::core::BookPin;

/// Enough that the threads of a large machine seldom meet.
const N_SHARDS: usize = 64;

/// The flights by what they read.
///
/// A flight is known as long as anybody holds it: who waits for it, and who has what it brought. So a chunk
/// that is not made resident is still read once for all who want it at a time.
#[derive(Debug)]
pub(crate) struct Flights {
    shards: Box<[Mutex<Shard>]>,
}

type Shard = HashMap<ChunkKey, Weak<Flight>>;

/// One read of what one rank holds of one chunk.
///
/// Queues know it weakly: when nobody waits any more before it begins, it does not begin.
#[derive(Debug)]
pub(crate) struct Flight {
    table: Arc<Flights>,
    pub(crate) chain: Chain,
    pub(crate) chunk_idx: usize,
    pub(crate) rank: u16,
    /// The namespace's generation before it was looked up where the chunk is.
    pub(crate) generation: u64,
    /// Whether it may stay in memory although another chunk has to leave.
    may_displace: AtomicBool,
    /// Keeps the chunk from being a victim as long as anybody has what the flight brought.
    pin: OnceLock<BookPin>,
    state: Mutex<State>,
}

/// How a flight ended.
#[derive(Debug, Clone)]
pub(crate) enum Landing {
    /// It brought the chunk from a tier.
    Arrived { lease: Lease, tier: TierKind },
    /// No tier gave it.
    Lost,
}

/// Who is told of a landing: a cell of a gather.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) gather: Weak<Gather>,
    /// Counted from the gather's first chunk.
    pub(crate) cell_idx: usize,
}

#[derive(Debug)]
struct State {
    landing: Option<Landing>,
    waiters: Vec<Waiter>,
    /// Tiers that may have it and were not asked yet.
    sources: VecDeque<TierIdx>,
}

// === impl Flights ===

impl Flights {
    pub(crate) fn new() -> Self {
        Self { shards: (0..N_SHARDS).map(|_| Mutex::default()).collect() }
    }

    /// Finds the flight for a key that can still be joined.
    pub(crate) fn find(&self, key: &ChunkKey, generation: u64) -> Option<Arc<Flight>> {
        let found = self.shard(key).lock().get(key).and_then(Weak::upgrade);
        found.filter(|flight| flight.can_be_joined(generation))
    }

    /// Joins the flight for a key, or makes one; says whether it is new.
    pub(crate) fn board(
        self: &Arc<Self>,
        chain: &Chain,
        chunk_idx: usize,
        rank: u16,
        generation: u64,
        may_displace: bool,
        sources: VecDeque<TierIdx>,
    ) -> (Arc<Flight>, bool) {
        let key = chain.key_of(chunk_idx, rank);
        let new = Arc::new(Flight {
            table: Arc::clone(self),
            chain: chain.clone(),
            chunk_idx,
            rank,
            generation,
            may_displace: AtomicBool::new(may_displace),
            pin: OnceLock::new(),
            state: Mutex::new(State { landing: None, waiters: Vec::new(), sources }),
        });
        let mut shard = self.shard(&key).lock();
        let found = shard.get(&key).and_then(Weak::upgrade);
        // A flight's drop takes the shard's lock, so no flight is dropped before the lock is.
        match found {
            Some(flight) if flight.can_be_joined(generation) => {
                drop(shard);
                flight.may_displace.fetch_or(may_displace, Ordering::Relaxed);
                (flight, false)
            }
            other => {
                shard.insert(key, Arc::downgrade(&new));
                drop(shard);
                drop(other);
                (new, true)
            }
        }
    }

    fn shard(&self, key: &ChunkKey) -> &Mutex<Shard> {
        &self.shards[(key.chunk.to_u128() >> 32) as usize % N_SHARDS]
    }
}

// === impl Flight ===

impl Flight {
    pub(crate) fn key(&self) -> ChunkKey {
        self.chain.key_of(self.chunk_idx, self.rank)
    }

    pub(crate) fn n_bytes(&self) -> usize {
        self.chain.payload_bytes(self.chunk_idx)
    }

    /// Whether its namespace was cleared since it was asked for.
    pub(crate) fn is_stale(&self) -> bool {
        self.generation != self.chain.namespace().generation()
    }

    /// Whether it may stay in memory although another chunk has to leave: anybody who joined may say so. A
    /// hint, so it is relaxed.
    pub(crate) fn may_displace(&self) -> bool {
        self.may_displace.load(Ordering::Relaxed)
    }

    /// Takes a pin on its chunk, where it has none.
    pub(crate) fn hold(&self, pin: impl FnOnce() -> Option<BookPin>) {
        if self.pin.get().is_none()
            && let Some(pin) = pin()
        {
            // Another thread may have been faster; then this pin goes.
            let _ = self.pin.set(pin);
        }
    }

    /// The next tier that may have it.
    pub(crate) fn next_source(&self) -> Option<TierIdx> {
        self.state.lock().sources.pop_front()
    }

    pub(crate) fn landing(&self) -> Option<Landing> {
        self.state.lock().landing.clone()
    }

    /// Gives the landing if there is one, and tells the waiter of it later otherwise.
    pub(crate) fn wait_for(&self, waiter: Waiter) -> Option<Landing> {
        let mut state = self.state.lock();
        if state.landing.is_none() {
            state.waiters.push(waiter);
        }
        state.landing.clone()
    }

    /// Ends the flight and tells all who wait. Only the first landing counts.
    pub(crate) fn land(&self, landing: &Landing) {
        let waiters = {
            let mut state = self.state.lock();
            if state.landing.is_some() {
                return;
            }
            state.landing = Some(landing.clone());
            std::mem::take(&mut state.waiters)
        };
        for waiter in waiters {
            if let Some(gather) = waiter.gather.upgrade() {
                gather.land(waiter.cell_idx, self.rank, landing);
            }
        }
    }

    fn can_be_joined(&self, generation: u64) -> bool {
        self.generation == generation && !matches!(self.state.lock().landing, Some(Landing::Lost))
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let key = self.key();
        let mut shard = self.table.shard(&key).lock();
        // Another flight may have taken the place.
        if shard.get(&key).is_some_and(|flight| flight.strong_count() == 0) {
            shard.remove(&key);
        }
    }
}
