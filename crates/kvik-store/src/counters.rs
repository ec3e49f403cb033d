//! What a store counts.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::tiers::{MAX_TIERS, TierIdx};

/// What is counted.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Counter {
    Lookups,
    Retrieves,
    RequestedTokens,
    Truncated,
    Timeouts,
    StoredPayloads,
    StoredBefore,
    StoredBytes,
    Refused,
    PromotedChunks,
    Flights,
    JoinedFlights,
    DirectChunks,
    DirectBytes,
    FailedDirectReads,
    DirectWrites,
    DirectWrittenBytes,
    FailedDirectWrites,
    HitTokens(TierIdx),
    Written(TierIdx),
    DroppedWrites(TierIdx),
    Loaded(TierIdx),
    FailedLoads(TierIdx),
    EvictedChunks(TierIdx),
    TokenMismatches(TierIdx),
}

const N_PLAIN: usize = 18;
const N_COUNTERS: usize = N_PLAIN + 7 * MAX_TIERS;

/// All counts. They order nothing, so they are relaxed.
#[derive(Debug)]
pub(crate) struct Counters {
    values: [AtomicU64; N_COUNTERS],
}

impl Counter {
    fn place(self) -> usize {
        let of_tier = |group: usize, tier: TierIdx| N_PLAIN + group * MAX_TIERS + tier;
        match self {
            Self::Lookups => 0,
            Self::Retrieves => 1,
            Self::RequestedTokens => 2,
            Self::Truncated => 3,
            Self::Timeouts => 4,
            Self::StoredPayloads => 5,
            Self::StoredBefore => 6,
            Self::StoredBytes => 7,
            Self::Refused => 8,
            Self::PromotedChunks => 9,
            Self::Flights => 10,
            Self::JoinedFlights => 11,
            Self::DirectChunks => 12,
            Self::DirectBytes => 13,
            Self::FailedDirectReads => 14,
            Self::DirectWrites => 15,
            Self::DirectWrittenBytes => 16,
            Self::FailedDirectWrites => 17,
            Self::HitTokens(tier) => of_tier(0, tier),
            Self::Written(tier) => of_tier(1, tier),
            Self::DroppedWrites(tier) => of_tier(2, tier),
            Self::Loaded(tier) => of_tier(3, tier),
            Self::FailedLoads(tier) => of_tier(4, tier),
            Self::EvictedChunks(tier) => of_tier(5, tier),
            Self::TokenMismatches(tier) => of_tier(6, tier),
        }
    }
}

impl Counters {
    pub(crate) fn new() -> Self {
        Self { values: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    pub(crate) fn add(&self, counter: Counter, n: u64) {
        self.values[counter.place()].fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self, counter: Counter) -> u64 {
        self.values[counter.place()].load(Ordering::Relaxed)
    }
}
