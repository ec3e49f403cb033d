//! Chunks that arrive one by one, the last of a chain first.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::Store;
use super::inquiry::ChunkPlaces;
use super::prefetch::{Prefetch, Purpose, Wish};
use super::retrieve::{Retrieved, RetrievedChunk};
use crate::chain::Chain;
use crate::counters::Counter;
use crate::lower::TierSpeed;
use crate::plan::TierState;

/// Chunks that are on their way to memory, each on its own: one that is lost leaves a hole.
///
/// They are read from the last to the first, for an engine that computes from the first to the last meanwhile. Dropping it
/// gives up the reads that have not begun and that have no other waiter.
#[derive(Debug)]
pub struct Arriving {
    first_chunk: usize,
    /// In the order of the chain.
    pieces: Vec<Piece>,
}

#[derive(Debug)]
struct Piece {
    /// Until it has arrived, or is lost or given up.
    load: Mutex<Option<Prefetch>>,
    arrived: OnceLock<Retrieved>,
}

impl Store {
    /// Begins to read chunks of a chain that lie where `places` says, which begins with the first of `chunks`. What is in
    /// memory is there at once.
    ///
    /// Of those that lie elsewhere only the chunks before `end_of_slow` are read.
    pub fn arrive(
        &self,
        chain: &Chain,
        chunks: Range<usize>,
        places: &ChunkPlaces,
        end_of_slow: usize,
    ) -> Arriving {
        let core = self.core();
        let first_chunk = chunks.start;
        let n_chunks =
            core.n_chunks(chain).min(chunks.end).saturating_sub(first_chunk).min(places.n_chunks());
        let wish = Wish { purpose: Purpose::UsePart, only: None };
        let begin = |place: usize| {
            let chunk_idx = first_chunk + place;
            let is_wanted = places.is_in_memory(place) || chunk_idx < end_of_slow;
            let found = places.ranks_of(place);
            let load =
                is_wanted.then(|| Prefetch::start_range(core, chain, chunk_idx..chunk_idx + 1, found, wish));
            Piece { load: Mutex::new(load), arrived: OnceLock::new() }
        };
        let mut pieces: Vec<Piece> = (0..n_chunks).rev().map(begin).collect();
        pieces.reverse();
        core.counters.add(Counter::Retrieves, 1);
        let asked = chain.tokens_between(first_chunk..first_chunk + n_chunks);
        core.counters.add(Counter::RequestedTokens, asked as u64);
        Arriving { first_chunk, pieces }
    }

    /// The tiers below memory as they are now, in the order of [`Store::tiers`].
    pub fn tier_states(&self) -> Vec<TierState> {
        let state = |lower: &crate::lower::Lower| TierState {
            speed: lower.speed.speed(),
            queued_bytes: lower.reads.n_bytes(),
        };
        self.core().lowers.iter().map(state).collect()
    }

    /// How fast a tier below memory was; `tier` is its place in [`Store::tiers`].
    pub fn tier_speed(&self, tier: usize) -> Option<TierSpeed> {
        self.core().lower(tier)?.speed.speed()
    }
}

impl Arriving {
    /// A chunk, if it is there.
    pub fn chunk(&self, chunk_idx: usize) -> Option<&RetrievedChunk> {
        let piece = self.piece(chunk_idx)?;
        piece.look();
        piece.arrived.get()?.chunks().first()
    }

    /// Whether a chunk is not there and may still come.
    pub fn is_pending(&self, chunk_idx: usize) -> bool {
        self.piece(chunk_idx).is_some_and(|piece| {
            piece.look();
            piece.load.lock().is_some()
        })
    }

    /// The chunks that were asked for.
    pub fn chunks(&self) -> Range<usize> {
        self.first_chunk..self.first_chunk + self.pieces.len()
    }

    /// Gives up the chunks before `chunk_idx` that are not there.
    pub fn give_up_before(&self, chunk_idx: usize) {
        for piece in self.pieces.iter().take(chunk_idx.saturating_sub(self.first_chunk)) {
            drop(piece.load.lock().take());
        }
    }

    /// Calls `callback` for each chunk that is not there, when it has come or is lost: at once, or on a thread of the
    /// store, which it must not hold up.
    pub fn on_each(&self, callback: &Arc<dyn Fn() + Send + Sync>) {
        for piece in &self.pieces {
            if let Some(load) = &*piece.load.lock() {
                let callback = Arc::clone(callback);
                load.on_done(move || callback());
            }
        }
    }

    fn piece(&self, chunk_idx: usize) -> Option<&Piece> {
        self.pieces.get(chunk_idx.checked_sub(self.first_chunk)?)
    }
}

impl Piece {
    /// Takes what has arrived.
    fn look(&self) {
        let mut load = self.load.lock();
        if let Some(done) = load.take_if(|load| load.is_done()) {
            let retrieved = done.wait(std::time::Duration::ZERO);
            if !retrieved.chunks().is_empty() {
                // It is set once, by what takes the load.
                let _ = self.arrived.set(retrieved);
            }
        }
    }
}
