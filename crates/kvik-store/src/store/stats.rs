//! Counts of a store.

use kvik_tier::{Tier, TierStat};

use super::Store;
use crate::counters::Counter;
use crate::tiers::{RAM, TierIdx, TierLabel, TierName};

/// Counts of a store since it was opened, and what its directory takes now.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct StoreStats {
    /// Lookups that were asked.
    pub n_lookups: u64,
    /// Retrieves that were answered.
    pub n_retrieves: u64,
    /// Tokens that were asked for by retrieves.
    pub requested_tokens: u64,
    /// Tokens that retrieves gave, by the slowest tier that a rank of their chunk came from.
    pub hit_tokens: Vec<(TierName, u64)>,
    /// Retrieves that gave less than was found.
    pub n_truncated: u64,
    /// Retrieves whose wait ended before all was there.
    pub n_timeouts: u64,
    /// Payloads that were stored.
    pub n_stored: u64,
    /// Payloads that were given to commit and were there already.
    pub n_stored_before: u64,
    /// Slots that were refused for want of memory, to stores and to loads.
    pub n_refused: u64,
    /// Bytes of the payloads that were stored.
    pub stored_bytes: u64,
    /// Payloads that each lower tier has taken.
    pub written: Vec<(TierName, u64)>,
    /// Payloads that each lower tier should have taken and did not: no room in the queue or the tier, no
    /// parent there, or a failure.
    pub dropped_writes: Vec<(TierName, u64)>,
    /// Payloads that each lower tier gave.
    pub loaded: Vec<(TierName, u64)>,
    /// Payloads that each lower tier should have given and did not.
    pub failed_loads: Vec<(TierName, u64)>,
    /// Chunks that left each local tier for others.
    pub evicted_chunks: Vec<(TierName, u64)>,
    /// Payloads that each tier had under the right name for other tokens, so that they were not given out:
    /// names that were made to collide, or another digest key.
    pub token_mismatches: Vec<(TierName, u64)>,
    /// Payloads from lower tiers that stayed in memory.
    pub n_promoted: u64,
    /// Reads that were begun.
    pub n_flights: u64,
    /// Reads that were not begun because another one was under way.
    pub n_joined_flights: u64,
    /// Payloads that readers fetched from files by themselves.
    pub n_direct: u64,
    /// Their bytes.
    pub direct_bytes: u64,
    /// Payloads that readers could not fetch from files, or found wrong.
    pub n_failed_direct: u64,
    /// Payloads that writers put into files by themselves.
    pub n_direct_writes: u64,
    /// Their bytes.
    pub direct_written_bytes: u64,
    /// Payloads that writers could not put into files.
    pub n_failed_direct_writes: u64,
    /// Chunks in the directory.
    pub n_entries: u64,
    /// Memory of the directory, in bytes.
    pub directory_bytes: u64,
}

impl Store {
    /// The store's counts.
    pub fn stats(&self) -> StoreStats {
        let core = self.core();
        let count = |counter| core.counters.get(counter);
        let of_lowers = |counter: fn(TierIdx) -> Counter| {
            core.lowers
                .iter()
                .map(|lower| (core.name_of(lower.tier_idx), count(counter(lower.tier_idx))))
                .collect::<Vec<_>>()
        };
        let of_all = |counter: fn(TierIdx) -> Counter| {
            let mut counts = vec![(core.name_of(RAM), count(counter(RAM)))];
            counts.extend(of_lowers(counter));
            counts
        };
        let mut token_mismatches = vec![(core.name_of(RAM), core.ram.n_token_mismatches())];
        token_mismatches.extend(of_lowers(Counter::TokenMismatches));
        StoreStats {
            token_mismatches,
            n_lookups: count(Counter::Lookups),
            n_retrieves: count(Counter::Retrieves),
            requested_tokens: count(Counter::RequestedTokens),
            hit_tokens: of_all(Counter::HitTokens),
            n_truncated: count(Counter::Truncated),
            n_timeouts: count(Counter::Timeouts),
            n_stored: count(Counter::StoredPayloads),
            n_stored_before: count(Counter::StoredBefore),
            n_refused: count(Counter::Refused),
            stored_bytes: count(Counter::StoredBytes),
            written: of_lowers(Counter::Written),
            dropped_writes: of_lowers(Counter::DroppedWrites),
            loaded: of_lowers(Counter::Loaded),
            failed_loads: of_lowers(Counter::FailedLoads),
            evicted_chunks: of_all(Counter::EvictedChunks),
            n_promoted: count(Counter::PromotedChunks),
            n_flights: count(Counter::Flights),
            n_joined_flights: count(Counter::JoinedFlights),
            n_direct: count(Counter::DirectChunks),
            direct_bytes: count(Counter::DirectBytes),
            n_failed_direct: count(Counter::FailedDirectReads),
            n_direct_writes: count(Counter::DirectWrites),
            direct_written_bytes: count(Counter::DirectWrittenBytes),
            n_failed_direct_writes: count(Counter::FailedDirectWrites),
            n_entries: core.directory.n_entries() as u64,
            directory_bytes: core.directory.memory_bytes() as u64,
        }
    }

    /// Every tier with its counts and state, memory first, without I/O.
    pub fn health(&self) -> Vec<(TierLabel, TierStat)> {
        let core = self.core();
        let stats = std::iter::once(core.ram.stat()).chain(core.lowers.iter().map(|lower| lower.tier.stat()));
        core.labels.iter().cloned().zip(stats).collect()
    }

    /// What the tiers are called, memory first.
    pub fn tiers(&self) -> &[TierLabel] {
        &self.core().labels
    }
}
