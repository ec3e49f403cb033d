//! Chunks of a lower tier that get a stronger codec when they are cold.

use std::time::Duration;

use kvik_tier::{ChunkKey, Result, Rewritten, TierError};

use super::Store;
use super::core::ranks_of;
use crate::tiers::TierName;

impl Store {
    /// What a tier has that was neither stored nor retrieved for so long, in no order; none where there is no such tier
    /// below memory. What it had when the store was opened counts as used then.
    pub fn cold_chunks(&self, tier: &TierName, idle: Duration) -> Vec<ChunkKey> {
        let core = self.core();
        let Some(lower) = core.tier_idx(tier).and_then(|tier| core.lower(tier)) else { return Vec::new() };
        let now_s = u64::from(core.now_s());
        let mut cold = Vec::new();
        core.directory.visit(|hash, entry| {
            let ranks = entry.ranks[lower.tier_idx];
            if ranks != 0 && idle.as_secs() <= now_s.saturating_sub(u64::from(entry.used_s)) {
                let namespace = core.namespaces.id(entry.namespace_idx);
                cold.extend(ranks_of(ranks).map(|rank| ChunkKey { namespace, chunk: hash, rank }));
            }
        });
        cold
    }

    /// Codes what a tier has of a chunk by another codec, as [`Tier::recode`](kvik_tier::Tier::recode).
    ///
    /// # Errors
    /// As that, and if there is no such tier below memory.
    pub fn recode(&self, tier: &TierName, key: ChunkKey, codec: &str) -> Result<Rewritten> {
        let core = self.core();
        let lower = core.tier_idx(tier).and_then(|tier| core.lower(tier));
        let lower = lower.ok_or_else(|| TierError::invalid("tier", tier, "a tier below memory"))?;
        lower.tier.recode(key, codec)
    }

    /// The codec of a tier below memory; `None` where it has none.
    pub fn codec_of(&self, tier: &TierName) -> Option<&str> {
        let core = self.core();
        core.lower(core.tier_idx(tier)?)?.tier.codec()
    }
}
