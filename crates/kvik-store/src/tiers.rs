//! Places in a store's list of tiers.

/// Tiers that a store can have, memory included.
pub(crate) const MAX_TIERS: usize = 5;

/// A place in the list of tiers; memory is the first, then local tiers, then remote ones.
pub(crate) type TierIdx = usize;

/// Memory.
pub(crate) const RAM: TierIdx = 0;

/// The ranks that each tier has of one chunk, one bit for each.
pub(crate) type TierRanks = [u64; MAX_TIERS];
