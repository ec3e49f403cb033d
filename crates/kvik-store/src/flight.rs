//! Reads that many may wait for.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use kvik_tier::{ChunkKey, Lease, TokenDigest};
use parking_lot::Mutex;

use crate::chain::Chain;
use crate::residents::ResidentPin;
use crate::tiers::{TierIdx, TierSet};

/// Enough that the threads of a large machine seldom meet.
const N_SHARDS: usize = 64;

/// The flights by what they read: a name and the tokens that it must be for.
///
/// A flight is known as long as a handle exists: of a waiter, or of a reader of what it brought. So a chunk
/// that is not made resident is still read once for all its readers at a time.
#[derive(Debug)]
pub(crate) struct Flights {
    shards: Box<[Mutex<Shard>]>,
}

type Shard = HashMap<(ChunkKey, TokenDigest), Weak<Flight>>;

/// One read of what one rank holds of one chunk.
///
/// Queues know it weakly: without a waiter, it does not begin.
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
    /// Keeps the chunk from being a victim as long as a reader has what the flight brought.
    pin: OnceLock<ResidentPin>,
    state: Mutex<State>,
}

/// How a flight ended.
#[derive(Debug, Clone)]
pub(crate) enum FlightEnd {
    /// It brought the chunk from a tier.
    Arrived { lease: Lease, tier: TierIdx },
    /// No tier gave it.
    Lost,
}

/// Something that waits for the chunks of flights, each in a cell of its own.
pub(crate) trait FlightWaiter: fmt::Debug + Send + Sync {
    /// Takes the end of the flight for one rank of a chunk.
    fn flight_ended(&self, cell_idx: usize, rank: u16, end: &FlightEnd);
}

/// A cell that waits for a flight.
#[derive(Debug)]
pub(crate) struct WaitingCell {
    pub(crate) waiter: Weak<dyn FlightWaiter>,
    pub(crate) cell_idx: usize,
}

/// The tiers that a reader may have a chunk from.
#[derive(Debug)]
pub(crate) struct Sources {
    pub(crate) tiers: VecDeque<TierIdx>,
    /// Whether it wants it from these and no others.
    pub(crate) is_alone: bool,
}

#[derive(Debug)]
struct State {
    end: Option<FlightEnd>,
    waiting: Vec<WaitingCell>,
    /// Tiers that may have it and were not asked yet.
    sources: VecDeque<TierIdx>,
    /// All that were ever among them.
    known_sources: TierSet,
}

// === impl Flights ===

impl Flights {
    pub(crate) fn new() -> Self {
        Self { shards: (0..N_SHARDS).map(|_| Mutex::default()).collect() }
    }

    /// Finds the flight for what a rank holds of a chunk that can still be joined.
    pub(crate) fn find(
        &self,
        chain: &Chain,
        chunk_idx: usize,
        rank: u16,
        generation: u64,
    ) -> Option<Arc<Flight>> {
        let name = (chain.key_of(chunk_idx, rank), chain.digest_of(chunk_idx));
        let found = self.shard(&name).lock().get(&name).and_then(Weak::upgrade);
        found.filter(|flight| flight.can_be_joined(generation))
    }

    /// Joins the flight for what a rank holds of a chunk, or makes one; says whether it is new. One that wants a single
    /// tier joins none.
    pub(crate) fn join_or_start(
        self: &Arc<Self>,
        chain: &Chain,
        chunk_idx: usize,
        rank: u16,
        generation: u64,
        may_displace: bool,
        sources: Sources,
    ) -> (Arc<Flight>, bool) {
        let Sources { tiers: sources, is_alone } = sources;
        let name = (chain.key_of(chunk_idx, rank), chain.digest_of(chunk_idx));
        let known_sources = sources.iter().copied().collect();
        let new = Arc::new(Flight {
            table: Arc::clone(self),
            chain: chain.clone(),
            chunk_idx,
            rank,
            generation,
            may_displace: AtomicBool::new(may_displace),
            pin: OnceLock::new(),
            state: Mutex::new(State {
                end: None,
                waiting: Vec::new(),
                sources: sources.clone(),
                known_sources,
            }),
        });
        let mut shard = self.shard(&name).lock();
        let found = shard.get(&name).and_then(Weak::upgrade);
        // A flight's drop takes the shard's lock, so no flight is dropped before the lock is.
        match found {
            Some(flight) if !is_alone && flight.can_be_joined(generation) => {
                drop(shard);
                flight.may_displace.fetch_or(may_displace, Ordering::Relaxed);
                flight.add_sources(&sources);
                (flight, false)
            }
            other => {
                shard.insert(name, Arc::downgrade(&new));
                drop(shard);
                drop(other);
                (new, true)
            }
        }
    }

    fn shard(&self, (key, _): &(ChunkKey, TokenDigest)) -> &Mutex<Shard> {
        &self.shards[(key.chunk.to_u128() >> 32) as usize % N_SHARDS]
    }
}

// === impl Flight ===

impl Flight {
    pub(crate) fn key(&self) -> ChunkKey {
        self.chain.key_of(self.chunk_idx, self.rank)
    }

    pub(crate) fn digest(&self) -> TokenDigest {
        self.chain.digest_of(self.chunk_idx)
    }

    pub(crate) fn n_bytes(&self) -> usize {
        self.chain.payload_bytes(self.chunk_idx)
    }

    /// Whether its namespace was cleared since it was asked for.
    pub(crate) fn is_stale(&self) -> bool {
        self.generation != self.chain.namespace().generation()
    }

    /// Whether it may stay in memory although another chunk has to leave: one joined reader that allows it
    /// is enough. A hint, so it is relaxed.
    pub(crate) fn may_displace(&self) -> bool {
        self.may_displace.load(Ordering::Relaxed)
    }

    /// Takes a pin on its chunk, where it has none.
    pub(crate) fn hold(&self, pin: impl FnOnce() -> Option<ResidentPin>) {
        if self.pin.get().is_none()
            && let Some(pin) = pin()
        {
            // Another thread may have been faster; then this pin goes.
            let _ = self.pin.set(pin);
        }
    }

    /// Adds tiers that another reader may have it from: the first may have wanted one tier alone.
    fn add_sources(&self, sources: &VecDeque<TierIdx>) {
        let mut state = self.state.lock();
        for source in sources {
            if !state.known_sources.contains(*source) {
                state.known_sources.insert(*source);
                state.sources.push_back(*source);
            }
        }
    }

    /// The next tier that may have it.
    pub(crate) fn next_source(&self) -> Option<TierIdx> {
        self.state.lock().sources.pop_front()
    }

    /// Its end, once there is one.
    pub(crate) fn ended(&self) -> Option<FlightEnd> {
        self.state.lock().end.clone()
    }

    /// Gives the end if there is one; the cell gets it later otherwise.
    pub(crate) fn wait_for(&self, cell: WaitingCell) -> Option<FlightEnd> {
        let mut state = self.state.lock();
        if state.end.is_none() {
            state.waiting.push(cell);
        }
        state.end.clone()
    }

    /// Ends the flight for all cells that wait. Only the first end counts.
    pub(crate) fn end(&self, end: &FlightEnd) {
        let waiting = {
            let mut state = self.state.lock();
            if state.end.is_some() {
                return;
            }
            state.end = Some(end.clone());
            std::mem::take(&mut state.waiting)
        };
        for WaitingCell { waiter, cell_idx } in waiting {
            if let Some(waiter) = waiter.upgrade() {
                waiter.flight_ended(cell_idx, self.rank, end);
            }
        }
    }

    fn can_be_joined(&self, generation: u64) -> bool {
        self.generation == generation && !matches!(self.state.lock().end, Some(FlightEnd::Lost))
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let name = (self.key(), self.digest());
        let mut shard = self.table.shard(&name).lock();
        // Another flight may have taken the place.
        if shard.get(&name).is_some_and(|flight| flight.strong_count() == 0) {
            shard.remove(&name);
        }
    }
}
