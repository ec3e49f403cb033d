//! Chunks that stay in memory on request.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvik_types::BlockHash;
use parking_lot::Mutex;

use super::Store;
use super::core::Core;
use super::publish::{Arrival, Origin, Published};
use super::retrieve::Retrieved;
use crate::chain::Chain;
use crate::policy::BlockId;
use crate::residents::ResidentPin;

/// Stands for the end of a pin without one.
const NEVER_MS: u64 = u64::MAX;

/// The pins of users.
#[derive(Debug)]
pub(crate) struct Pins {
    state: Mutex<PinsState>,
    /// No pin ends before this time.
    first_end_ms: AtomicU64,
}

#[derive(Debug, Default)]
struct PinsState {
    /// By the last chunk of the chain that was pinned.
    by_chain: HashMap<BlockHash, Vec<Pin>>,
    /// Those with an end, by it and their number.
    by_end: BTreeMap<(u64, u64), BlockHash>,
    n_pins: usize,
    next_number: u64,
}

#[derive(Debug, Clone, Copy)]
struct Pin {
    /// The deepest block that is kept; `None` where nothing of the chain could be.
    block: Option<BlockId>,
    /// When it ends, in the time of the store.
    end_ms: u64,
    /// No other pin has it.
    number: u64,
}

impl Store {
    /// Brings a chain to memory and keeps it from being evicted until it is unpinned as often as it was
    /// pinned; returns the tokens that are kept.
    ///
    /// What does not arrive in time is not kept. A clear removes pinned chunks too.
    pub fn pin(&self, chain: &Chain) -> usize {
        self.pin_until(chain, NEVER_MS)
    }

    /// As [`pin`](Self::pin), for some time at most: after that the chain may be evicted when room is needed.
    pub fn pin_for(&self, chain: &Chain, time: Duration) -> usize {
        let n_ms = u64::try_from(time.as_millis()).unwrap_or(NEVER_MS);
        self.pin_until(chain, self.core().now_ms().saturating_add(n_ms))
    }

    fn pin_until(&self, chain: &Chain, end_ms: u64) -> usize {
        let core = self.core();
        let Some(last_idx) = core.n_chunks(chain).checked_sub(1) else { return 0 };
        let generation = chain.namespace().generation();
        let retrieved = core.bring(chain, None);
        let n_chunks = core.settle(chain, generation, &retrieved);
        let pin = core.pin_deepest(chain, n_chunks);
        let n_tokens = match &pin {
            Some(_) => chain.tokens_between(0..n_chunks),
            None => 0,
        };
        // A chain of which nothing could be kept is remembered too, so that every pin has its unpin.
        let block = pin.map(ResidentPin::into_id);
        core.pins.add(chain.hash(last_idx), block, end_ms);
        n_tokens
    }

    /// Takes one pin of a chain away, one without an end before one with; false where it has none.
    pub fn unpin(&self, chain: &Chain) -> bool {
        let core = self.core();
        core.end_pins();
        let Some(last_idx) = core.n_chunks(chain).checked_sub(1) else { return false };
        let Some(pin) = core.pins.take(chain.hash(last_idx)) else { return false };
        if let Some(id) = pin.block {
            core.ram_residents.lock().unpin(id);
        }
        true
    }

    /// Pins of all chains.
    pub fn n_pins(&self) -> usize {
        self.core().end_pins();
        self.core().pins.state.lock().n_pins
    }
}

impl Pins {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::default(), first_end_ms: AtomicU64::new(NEVER_MS) }
    }

    fn add(&self, chain: BlockHash, block: Option<BlockId>, end_ms: u64) {
        let mut state = self.state.lock();
        let number = state.next_number;
        state.next_number += 1;
        state.n_pins += 1;
        state.by_chain.entry(chain).or_default().push(Pin { block, end_ms, number });
        if end_ms != NEVER_MS {
            state.by_end.insert((end_ms, number), chain);
        }
        self.note_first_end(&state);
    }

    /// Adds a pin that ends by itself after so many milliseconds, if it does.
    pub(super) fn add_for(
        &self,
        chain: BlockHash,
        block: Option<BlockId>,
        now_ms: u64,
        left_ms: Option<u64>,
    ) {
        self.add(chain, block, left_ms.map_or(NEVER_MS, |left_ms| now_ms.saturating_add(left_ms)));
    }

    /// All pins: the chain, the deepest block that is kept, and the milliseconds that are left of those with an end.
    pub(super) fn all(&self, now_ms: u64) -> Vec<(BlockHash, Option<BlockId>, Option<u64>)> {
        let state = self.state.lock();
        let left_ms = |end_ms: u64| (end_ms != NEVER_MS).then(|| end_ms.saturating_sub(now_ms));
        let pins = state.by_chain.iter().flat_map(|(chain, pins)| pins.iter().map(move |pin| (*chain, pin)));
        pins.map(|(chain, pin)| (chain, pin.block, left_ms(pin.end_ms))).collect()
    }

    /// Takes away the pin of a chain that would end last.
    fn take(&self, chain: BlockHash) -> Option<Pin> {
        let mut state = self.state.lock();
        let last = state.by_chain.get(&chain)?.iter().max_by_key(|pin| pin.end_ms)?.number;
        let pin = state.remove(chain, last)?;
        state.by_end.remove(&(pin.end_ms, pin.number));
        self.note_first_end(&state);
        Some(pin)
    }

    /// Takes away those that have ended; returns their blocks.
    fn take_ended(&self, now_ms: u64) -> Vec<BlockId> {
        let mut blocks = Vec::new();
        // Relaxed: it decides alone whether to look. An eviction that misses a change is followed by others.
        if self.first_end_ms.load(Ordering::Relaxed) > now_ms {
            return blocks;
        }
        let mut state = self.state.lock();
        while let Some((&(end_ms, number), &chain)) = state.by_end.first_key_value()
            && end_ms <= now_ms
        {
            state.by_end.pop_first();
            blocks.extend(state.remove(chain, number).and_then(|pin| pin.block));
        }
        self.note_first_end(&state);
        blocks
    }

    fn note_first_end(&self, state: &PinsState) {
        let first_end_ms = state.by_end.first_key_value().map_or(NEVER_MS, |((end_ms, _), _)| *end_ms);
        self.first_end_ms.store(first_end_ms, Ordering::Relaxed);
    }
}

impl PinsState {
    fn remove(&mut self, chain: BlockHash, number: u64) -> Option<Pin> {
        let pins = self.by_chain.get_mut(&chain)?;
        let idx = pins.iter().position(|pin| pin.number == number)?;
        let pin = pins.swap_remove(idx);
        if pins.is_empty() {
            self.by_chain.remove(&chain);
        }
        self.n_pins -= 1;
        Some(pin)
    }
}

impl Core {
    /// Ends the pins whose time is over. Called before room is made, so a pin that has ended keeps nothing; the caller holds no
    /// lock of residents.
    pub(crate) fn end_pins(&self) {
        let blocks = self.pins.take_ended(self.now_ms());
        if blocks.is_empty() {
            return;
        }
        let mut residents = self.ram_residents.lock();
        for id in blocks {
            residents.unpin(id);
        }
    }

    /// Makes retrieved chunks, which start with the chain's first, resident in memory; returns how many of
    /// them, from the first on, are.
    pub(crate) fn settle(self: &Arc<Self>, chain: &Chain, generation: u64, retrieved: &Retrieved) -> usize {
        let is_settled = |chunk_idx: usize| {
            (0..chain.n_ranks()).all(|rank| {
                let chunk = &retrieved.chunks()[chunk_idx];
                let Some(lease) = chunk.lease(rank) else { return false };
                let arrival = Arrival { lease: lease.clone(), origin: Origin::Tier(chunk.tier()) };
                let published = self.publish(chain, chunk_idx, rank, generation, arrival);
                matches!(published, Published::Stored(_) | Published::Present)
            })
        };
        (0..retrieved.chunks().len()).take_while(|chunk_idx| is_settled(*chunk_idx)).count()
    }
}
