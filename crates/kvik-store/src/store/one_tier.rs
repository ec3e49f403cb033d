//! Chunks that are read from one tier alone, or written to one alone.

use std::sync::Arc;
use std::time::Instant;

use super::Store;
use super::prefetch::{Prefetch, Purpose, Wish};
use super::retrieve::Retrieved;
use super::write::{Commit, Write};
use crate::chain::Chain;
use crate::lower::{ChunkPart, PutJob, WriteJob};
use crate::promise::promise;
use crate::tiers::{RAM, TierIdx, TierName};

/// What became of a chunk that was to be written to one tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierWrite {
    /// The tier has it.
    Stored,
    /// The tier had it before.
    Present,
    /// The tier does not have it: it has no room, fails, is only read, lacks the chunk before it, or has a chunk
    /// of other tokens under the name; or the store has no such tier, chunk or rank.
    Refused,
}

impl Store {
    /// Gets as much of a chain from `first_chunk` on as one tier has and arrives in time; `None` where there is
    /// no such tier.
    ///
    /// As [`Store::retrieve`] otherwise. Where another caller waits for the same read and the tier fails, the chunk may
    /// come from another tier.
    pub fn retrieve_from(&self, chain: &Chain, first_chunk: usize, tier: &TierName) -> Option<Retrieved> {
        let prefetch = self.prefetch_from(chain, first_chunk, tier)?;
        Some(prefetch.wait(self.core().options.retrieve_timeout))
    }

    /// Starts to read what one tier has of a chain from `first_chunk` on; `None` where there is no such tier.
    ///
    /// As [`Store::prefetch`] and [`Store::retrieve_from`] otherwise.
    pub fn prefetch_from(&self, chain: &Chain, first_chunk: usize, tier: &TierName) -> Option<Prefetch> {
        let wish = Wish { purpose: Purpose::Use, only: Some(self.core().tier_idx(tier)?) };
        Some(Prefetch::start(self.core(), chain, first_chunk, wish))
    }

    /// Writes what a rank holds of a chunk to one tier and to no other, and waits for it, at most
    /// [`retrieve_timeout`](crate::StoreOptions::retrieve_timeout).
    ///
    /// `fill` gets the memory of the payload, whose bytes are undefined, and fills all of it; it is not called
    /// where the tier has the chunk or cannot take it. In a local tier a chunk needs the one before it: write them
    /// in the order of the chain. Others leave a full local tier below memory for it.
    pub fn write_to(
        &self,
        chain: &Chain,
        chunk_idx: usize,
        rank: u16,
        tier: &TierName,
        fill: impl FnOnce(&mut [u8]),
    ) -> TierWrite {
        match self.core().tier_idx(tier) {
            None => TierWrite::Refused,
            Some(RAM) => self.write_to_memory(chain, chunk_idx, rank, fill),
            Some(tier) => self.write_to_lower(chain, chunk_idx, rank, tier, fill),
        }
    }

    fn write_to_memory(
        &self,
        chain: &Chain,
        chunk_idx: usize,
        rank: u16,
        fill: impl FnOnce(&mut [u8]),
    ) -> TierWrite {
        let mut writer = match self.begin_write(chain, chunk_idx, rank) {
            Write::Slot(writer) => writer,
            Write::Present => return TierWrite::Present,
            Write::NoRoom | Write::NoParent | Write::Collision => return TierWrite::Refused,
        };
        fill(writer.payload_mut());
        match writer.commit_to(false).0 {
            Commit::Stored => TierWrite::Stored,
            Commit::Present => TierWrite::Present,
            Commit::NoParent | Commit::Cleared | Commit::Collision => TierWrite::Refused,
        }
    }

    fn write_to_lower(
        &self,
        chain: &Chain,
        chunk_idx: usize,
        rank: u16,
        tier: TierIdx,
        fill: impl FnOnce(&mut [u8]),
    ) -> TierWrite {
        let core = self.core();
        let Some(lower) = core.lower(tier).filter(|lower| !lower.tier.is_read_only()) else {
            return TierWrite::Refused;
        };
        if chunk_idx >= core.n_chunks(chain) || chain.key(chunk_idx, rank).is_none() {
            return TierWrite::Refused;
        }
        let generation = chain.namespace().generation();
        if core.directory.view(chain.hash(chunk_idx)).ranks[tier] & (1 << rank) != 0 {
            return TierWrite::Present;
        }
        if lower.is_local() && !core.has_parent_in(tier, chain, chunk_idx, rank) {
            return TierWrite::Refused;
        }
        let Some(mut slot) = core.reserve(chain.payload_bytes(chunk_idx)) else { return TierWrite::Refused };
        fill(&mut slot);
        let lease = slot.freeze();
        let n_bytes = lease.len() as u64;
        let part = ChunkPart { chain: chain.clone(), chunk_idx, rank, generation };
        let job = PutJob { part, lease, _pin: None, is_requested: true };
        let (promise, answer) = promise();
        let writing = Arc::clone(core);
        let task = WriteJob::Task(Box::new(move |lower| {
            if promise.is_wanted() {
                promise.keep(writing.write_down(lower, vec![job]) == 1);
            }
        }));
        // A full queue drops the promise.
        let _ = lower.writes.push(n_bytes, task);
        match answer.wait(Instant::now() + core.options.retrieve_timeout) {
            Some(true) => TierWrite::Stored,
            _ => TierWrite::Refused,
        }
    }
}
