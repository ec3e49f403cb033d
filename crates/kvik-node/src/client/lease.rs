//! Chunks that a client may read.

use std::ops::Range;

use kvik_store::Chain;
use kvik_tier::TierKind;
use parking_lot::Mutex;

use super::{Handle, offset_of};
use crate::error::{NodeError, Result};
use crate::operation::place_of;

/// Chunks that stay as they are until this is dropped.
#[derive(Debug)]
pub struct RemoteLease {
    handle: Handle,
    chain: Chain,
    first_chunk: usize,
    offsets: Vec<u64>,
    tiers: Vec<TierKind>,
}

impl RemoteLease {
    pub(super) fn new(handle: Handle, chain: &Chain, first_chunk: usize, words: &[u64]) -> Self {
        let (offsets, tiers) = words.iter().map(|word| place_of(*word)).unzip();
        Self { handle, chain: chain.clone(), first_chunk, offsets, tiers }
    }

    /// Number of its chunks.
    pub fn n_chunks(&self) -> usize {
        self.offsets.len()
    }

    /// The tokens of a chunk in the chain; empty behind the last one.
    pub fn token_range(&self, place: usize) -> Range<usize> {
        self.chain.tokens_of(self.first_chunk.saturating_add(place.min(self.n_chunks())))
    }

    /// Bytes that this rank holds of a chunk.
    pub fn payload_bytes(&self, place: usize) -> usize {
        self.chain.payload_bytes(self.first_chunk.saturating_add(place))
    }

    /// Where a chunk lies in the arena; `None` behind the last one.
    pub fn offset(&self, place: usize) -> Option<u64> {
        self.offsets.get(place).copied()
    }

    /// The tier that a chunk came from.
    pub fn tier(&self, place: usize) -> TierKind {
        self.tiers.get(place).copied().unwrap_or(TierKind::Ram)
    }

    /// Copies bytes of a chunk, from `start` of what this rank holds on.
    ///
    /// # Errors
    /// If there is no such chunk, or it is not in the arena.
    pub fn copy_out(&self, place: usize, start: usize, target: &mut [u8]) -> Result<()> {
        let offset = offset_of(&self.offsets, place, start)?;
        let n_bytes = self.payload_bytes(place);
        if target.len() < n_bytes {
            self.handle.client.shared.reading.prepare(offset_of(&self.offsets, place, 0)?, n_bytes)?;
        }
        Ok(self.handle.client.shared.reading.copy_out(offset, target)?)
    }

    /// As [`Self::copy_out`], for a piece that must lie inside of the chunk.
    ///
    /// # Errors
    /// If there is no such chunk, or the piece ends behind it.
    pub fn copy_piece(&self, place: usize, start: usize, piece: &mut [u8]) -> Result<()> {
        let end = start.saturating_add(piece.len());
        if end > self.payload_bytes(place) {
            let allowed = self.payload_bytes(place).to_string();
            return Err(NodeError::invalid("length of a chunk", &end, allowed));
        }
        self.copy_out(place, start, piece)
    }

    /// Copies chunks into pieces, on several threads: those of the first chunk first, each with its start in the chunk.
    ///
    /// # Errors
    /// If there are more chunks than it has, or a piece ends behind its chunk.
    pub fn copy_all(&self, n_threads: usize, chunks: Vec<Vec<(usize, &mut [u8])>>) -> Result<()> {
        let n_threads = n_threads.clamp(1, chunks.len().max(1));
        let chunks = Mutex::new(chunks.into_iter().enumerate());
        let copy_next = || {
            loop {
                let next = chunks.lock().next();
                let Some((place, pieces)) = next else { return Ok(()) };
                for (start, piece) in pieces {
                    self.copy_piece(place, start, piece)?;
                }
            }
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..n_threads).map(|_| scope.spawn(copy_next)).collect();
            let own = copy_next();
            let others = others.into_iter().map(|thread| {
                thread.join().unwrap_or(Err(NodeError::Gone { reason: "a copying thread panicked" }))
            });
            others.fold(own, Result::and)
        })
    }
}
