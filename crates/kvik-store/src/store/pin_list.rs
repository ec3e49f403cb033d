//! The list of pins, by their chains and by their ends.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};

use kvik_types::BlockHash;
use parking_lot::Mutex;

use crate::policy::BlockId;
use crate::retention::NEVER_MS;

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
pub(super) struct Pin {
    /// The deepest block that is kept; `None` where nothing of the chain could be.
    pub(super) block: Option<BlockId>,
    /// When it ends, in the time of the store.
    end_ms: u64,
    /// No other pin has it.
    number: u64,
}

impl Pins {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::default(), first_end_ms: AtomicU64::new(NEVER_MS) }
    }

    /// Pins of all chains, those that have ended and were not taken away included.
    pub(super) fn n_pins(&self) -> usize {
        self.state.lock().n_pins
    }

    /// Adds a pin that ends at a time of the store.
    pub(super) fn add(&self, chain: BlockHash, block: Option<BlockId>, end_ms: u64) {
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
    pub(super) fn take(&self, chain: BlockHash) -> Option<Pin> {
        let mut state = self.state.lock();
        let last = state.by_chain.get(&chain)?.iter().max_by_key(|pin| pin.end_ms)?.number;
        let pin = state.remove(chain, last)?;
        state.by_end.remove(&(pin.end_ms, pin.number));
        self.note_first_end(&state);
        Some(pin)
    }

    /// Takes away those that have ended; returns their blocks.
    pub(super) fn take_ended(&self, now_ms: u64) -> Vec<BlockId> {
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
