//! Chunks by their names alone, for other nodes that read them.
//!
//! Another node has computed the names itself and proves with its digests that it means the same tokens. It is given what
//! memory and local tiers have: what remote tiers have it can ask for itself.

use std::ops::Range;

use kvik_tier::{ChunkKey, GetItem, GetOutcome, Lease, TokenDigest};

use super::Store;
use super::core::Core;
use crate::tiers::{RAM, TierIdx};

/// A range of what a rank holds of a chunk.
#[derive(Debug, Clone, Copy)]
pub struct LocalRange {
    /// Whose bytes.
    pub key: ChunkKey,
    /// The tokens that the chunk must be for.
    pub digest: TokenDigest,
    /// The first byte.
    pub offset: u64,
    /// Bytes from there on.
    pub n_bytes: usize,
    /// The length that the whole must have; `None` for any.
    pub chunk_bytes: Option<usize>,
}

/// What became of the read of a [`LocalRange`].
#[derive(Debug)]
pub enum LocalRead {
    /// The bytes are this part of the memory.
    Bytes(Lease, Range<usize>),
    /// No local tier has it, or what it has is shorter.
    Miss,
    /// The name is that of a chunk for other tokens.
    TokenMismatch,
    /// There is no memory to read it into.
    NoRoom,
}

impl Store {
    /// Whether memory or a local tier has what `key` names. Does no I/O. What is kept for some time only is not given out:
    /// another node would keep it longer.
    pub fn has_local(&self, key: &ChunkKey) -> bool {
        self.core().local_tiers(key).next().is_some()
    }

    /// Leases what `key` names, with the digest of its tokens, where it is in memory without a time.
    pub fn lease_by_key(&self, key: &ChunkKey) -> Option<(Lease, TokenDigest)> {
        let core = self.core();
        if core.directory.view(key.chunk).is_timed() {
            return None;
        }
        core.ram.lease_with_digest(key)
    }

    /// Reads from memory, which copies nothing, or from a local tier, on the caller's thread.
    pub fn read_local(&self, wanted: &LocalRange) -> LocalRead {
        let core = self.core();
        if let Some((lease, digest)) = self.lease_by_key(&wanted.key) {
            return wanted.part_of(lease, digest);
        }
        let mut read = LocalRead::Miss;
        for tier in core.local_tiers(&wanted.key).filter(|tier| *tier != RAM) {
            read = core.read_from(tier, wanted);
            if matches!(read, LocalRead::Bytes(..)) {
                break;
            }
        }
        read
    }
}

impl LocalRange {
    /// The part of a chunk in memory that is wanted, if the chunk is the right one.
    pub fn part_of(&self, lease: Lease, digest: TokenDigest) -> LocalRead {
        if digest != self.digest {
            return LocalRead::TokenMismatch;
        }
        if self.chunk_bytes.is_some_and(|chunk_bytes| chunk_bytes != lease.len()) {
            return LocalRead::Miss;
        }
        let start = usize::try_from(self.offset).unwrap_or(usize::MAX);
        match start.checked_add(self.n_bytes).filter(|end| *end <= lease.len()) {
            Some(end) => LocalRead::Bytes(lease, start..end),
            None => LocalRead::Miss,
        }
    }
}

impl Core {
    /// The local tiers that have what a key names, memory first.
    fn local_tiers(&self, key: &ChunkKey) -> impl Iterator<Item = TierIdx> {
        let entry = self.directory.view(key.chunk);
        let is_ours = u32::from(key.rank) < u64::BITS
            && self.namespaces.find_id(entry.namespace_idx) == Some(key.namespace);
        let bit = if is_ours { 1_u64 << key.rank } else { 0 };
        let lowers = self.lowers.iter().filter(|lower| lower.is_local()).map(|lower| lower.tier_idx);
        let is_given = move |tier: &TierIdx| *tier != RAM || !entry.is_timed();
        std::iter::once(RAM).chain(lowers).filter(is_given).filter(move |tier| entry.ranks[*tier] & bit != 0)
    }

    fn read_from(&self, tier: TierIdx, wanted: &LocalRange) -> LocalRead {
        let Some(lower) = self.lower(tier) else { return LocalRead::Miss };
        let Some(mut slot) = self.reserve(wanted.n_bytes) else { return LocalRead::NoRoom };
        let is_whole = wanted.chunk_bytes == Some(wanted.n_bytes);
        let item = GetItem::range(wanted.key, wanted.offset, &mut slot[..]).for_tokens(wanted.digest);
        let mut items = [GetItem { is_whole, ..item }];
        lower.tier.get(&mut items);
        let [GetItem { outcome, .. }] = items;
        match outcome {
            GetOutcome::Hit => LocalRead::Bytes(slot.freeze(), 0..wanted.n_bytes),
            GetOutcome::TokenMismatch => LocalRead::TokenMismatch,
            _ => LocalRead::Miss,
        }
    }
}
