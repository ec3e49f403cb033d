//! Chunks in the hands of a reader.

use std::ops::Range;
use std::sync::Arc;

use kvik_tier::{Lease, TierKind};

use crate::chain::Chain;
use crate::flight::Flight;
use crate::gather::Gathered;
use crate::residents::ResidentPin;
use crate::tiers::{TierIdx, TierLabel, TierName};

/// The longest part of a chain, without a gap, that a retrieve could get.
///
/// It holds leases: its bytes stay as they are until it is dropped, whatever is evicted or cleared meanwhile.
/// So long as it is held, the store does not choose its chunks as victims.
#[derive(Debug)]
pub struct Retrieved {
    chunks: Vec<RetrievedChunk>,
    n_tokens: usize,
    is_truncated: bool,
    labels: Arc<[TierLabel]>,
    /// Lets others join what was read and did not stay in memory.
    _flights: Vec<Arc<Flight>>,
    _pin: Option<ResidentPin>,
}

/// One chunk of a [`Retrieved`].
#[derive(Debug)]
pub struct RetrievedChunk {
    token_range: Range<usize>,
    tier: TierKind,
    tier_idx: TierIdx,
    section_bytes: usize,
    leases: Vec<Lease>,
}

impl Retrieved {
    pub(crate) fn new(
        chain: &Chain,
        first_chunk: usize,
        gathered: Gathered,
        labels: &Arc<[TierLabel]>,
        pin: Option<ResidentPin>,
    ) -> Self {
        let chunks: Vec<RetrievedChunk> = gathered
            .cells
            .into_iter()
            .enumerate()
            .map(|(place, cell)| RetrievedChunk {
                token_range: chain.tokens_of(first_chunk + place),
                tier: labels[cell.tier].kind,
                tier_idx: cell.tier,
                section_bytes: chain.section_bytes(first_chunk + place),
                leases: cell.leases.into_iter().flatten().collect(),
            })
            .collect();
        let n_tokens = chunks.iter().map(|chunk| chunk.token_range.len()).sum();
        let is_truncated = gathered.is_truncated;
        let labels = Arc::clone(labels);
        Self { chunks, n_tokens, is_truncated, labels, _flights: gathered.flights, _pin: pin }
    }

    /// Tokens of its chunks.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Its chunks, in the order of the chain.
    pub fn chunks(&self) -> &[RetrievedChunk] {
        &self.chunks
    }

    /// Whether more was found than arrived: a tier failed or was too slow, or there was no memory.
    pub fn is_truncated(&self) -> bool {
        self.is_truncated
    }

    /// The slowest tier that a chunk came from; `None` without chunks.
    pub fn slowest_tier(&self) -> Option<&TierName> {
        let tier = self.chunks.iter().map(|chunk| chunk.tier_idx).max()?;
        Some(&self.labels[tier].name)
    }
}

impl RetrievedChunk {
    /// The tokens whose KV it is, as places in the sequence.
    pub fn token_range(&self) -> Range<usize> {
        self.token_range.clone()
    }

    /// What the slowest tier that a rank came from is made of.
    pub fn tier(&self) -> TierKind {
        self.tier
    }

    /// What a rank holds; empty where there is no such rank.
    pub fn payload(&self, rank: u16) -> &[u8] {
        self.leases.get(usize::from(rank)).map_or(&[], |lease| &lease[..])
    }

    /// Where what a rank holds starts in the arena's memory file, for a reader in another process.
    pub fn offset(&self, rank: u16) -> Option<u64> {
        self.leases.get(usize::from(rank)).map(Lease::offset)
    }

    /// One layer of what a rank holds; empty where there is no such rank or layer.
    pub fn layer(&self, rank: u16, layer_idx: usize) -> &[u8] {
        let start = layer_idx.saturating_mul(self.section_bytes);
        self.payload(rank).get(start..start.saturating_add(self.section_bytes)).unwrap_or_default()
    }

    pub(crate) fn tier_idx(&self) -> TierIdx {
        self.tier_idx
    }

    pub(crate) fn lease(&self, rank: u16) -> Option<&Lease> {
        self.leases.get(usize::from(rank))
    }
}
