//! Scores: what a row of an answer is worth. Pure functions.

use super::matches::{Walk, WorkerMatch};
use super::{N_TIERS, Tier};

/// What a block is worth in each tier; by default gpu 1.0, cpu 0.8, disk 0.5, remote 0.3.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TierWeights {
    weights: [f64; N_TIERS],
}

/// Which of the tiers that have a block counts for it; by default the fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierOrder {
    /// The best tier of each combination of tiers.
    best: [u8; 1 << N_TIERS],
}

/// A rule that turns what a source has of a prompt into a number; the highest is the best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scorer {
    /// The weight of each block from the first on, as long as the source has every one.
    LongestPrefix,
    /// The 1-based place of the highest block that the source has, whatever is before it.
    HighestBlockHit,
    /// The weight of every block that the source has, wherever it is.
    Coverage,
}

/// What a request costs on a worker, apart from what the index knows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostQuery {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens of a block.
    pub block_tokens: u64,
    /// Bytes of a block's KV.
    pub block_bytes: u64,
    /// Tokens that the worker has to compute before it gets to this request.
    pub queued_tokens: u64,
}

/// What work takes, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostModel {
    /// To compute one token of a prompt.
    pub prefill_token_s: f64,
    /// To work off one token of the queue.
    pub queued_token_s: f64,
    /// To bring one byte from each tier to the device; 0 for the device itself.
    pub move_byte_s: [f64; N_TIERS],
    /// How much of a match counts if the source is unsure, from 0 to 1.
    pub unsure_credit: f64,
}

impl Default for TierWeights {
    fn default() -> Self {
        Self { weights: [1.0, 0.8, 0.5, 0.3] }
    }
}

impl Default for TierOrder {
    fn default() -> Self {
        // The lowest bit of each combination: what the default weights come to, without computing it
        // for every lookup.
        Self { best: [0, 0, 1, 0, 2, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0] }
    }
}

impl TierWeights {
    /// Takes one weight a tier, in the order of [`Tier::ALL`]; `None` if one is negative or not a number.
    pub fn try_new(weights: [f64; N_TIERS]) -> Option<Self> {
        weights.iter().all(|weight| weight.is_finite() && *weight >= 0.0).then_some(Self { weights })
    }

    /// The weight of a block in a tier.
    pub fn weight(&self, tier: Tier) -> f64 {
        self.weights[tier.as_index()]
    }

    /// The order in which the tier with the largest weight counts, of equal ones the fastest.
    pub fn order(&self) -> TierOrder {
        let mut best = [0; 1 << N_TIERS];
        for (tiers, best) in best.iter_mut().enumerate() {
            let present = (0..N_TIERS).filter(|tier| tiers >> tier & 1 == 1);
            let heaviest = present.reduce(|a, b| if self.weights[b] > self.weights[a] { b } else { a });
            *best = heaviest.unwrap_or(0) as u8;
        }
        TierOrder { best }
    }

    fn sum(&self, n_blocks: impl Fn(Tier) -> u32) -> f64 {
        Tier::ALL.iter().map(|tier| self.weight(*tier) * f64::from(n_blocks(*tier))).sum()
    }
}

impl TierOrder {
    #[inline]
    pub(super) fn best(self, tiers: u8) -> usize {
        usize::from(self.best[usize::from(tiers) % (1 << N_TIERS)])
    }
}

impl Scorer {
    /// How far a lookup must look for this score.
    pub fn walk(self) -> Walk {
        match self {
            Self::LongestPrefix => Walk::Prefix,
            Self::HighestBlockHit | Self::Coverage => Walk::All,
        }
    }

    /// The score of a row of a lookup made with
    /// [`LookupOptions::for_scorer`](super::LookupOptions::for_scorer) for the same weights.
    pub fn score(self, row: &WorkerMatch, weights: &TierWeights) -> f64 {
        match self {
            Self::LongestPrefix => weights.sum(|tier| row.prefix_in(tier)),
            Self::HighestBlockHit => f64::from(row.highest_block()),
            Self::Coverage => weights.sum(|tier| row.covered_in(tier)),
        }
    }
}

impl CostModel {
    /// The seconds until a worker has computed the prompt: its queue, what is left of the prompt, and
    /// what must be moved to the device. The lowest is the best; `None` is a worker without a match.
    pub fn cost_s(&self, row: Option<&WorkerMatch>, query: &CostQuery) -> f64 {
        let credit =
            row.map_or(0.0, |row| if row.is_unsure() { self.unsure_credit.clamp(0.0, 1.0) } else { 1.0 });
        let matched = |row: &WorkerMatch| u64::from(row.prefix_blocks()).saturating_mul(query.block_tokens);
        let matched_tokens = row.map_or(0, matched).min(query.prompt_tokens) as f64 * credit;
        let move_s: f64 = row.map_or(0.0, |row| {
            Tier::ALL
                .iter()
                .map(|tier| f64::from(row.prefix_in(*tier)) * self.move_byte_s[tier.as_index()])
                .sum::<f64>()
                * query.block_bytes as f64
        });
        (query.prompt_tokens as f64 - matched_tokens) * self.prefill_token_s
            + query.queued_tokens as f64 * self.queued_token_s
            + move_s * credit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_order_is_that_of_the_default_weights() {
        assert_eq!(TierOrder::default(), TierWeights::default().order());
    }

    #[test]
    fn the_heaviest_tier_counts_and_bad_weights_are_refused() {
        let order = TierWeights::try_new([0.1, 0.9, 0.9, 0.2]).map(|weights| weights.order());
        let order = order.unwrap_or_default();
        assert_eq!((order.best(0b1001), order.best(0b0110), order.best(0b1111)), (3, 1, 1));
        assert!(TierWeights::try_new([1.0, f64::NAN, 0.0, 0.0]).is_none());
        assert!(TierWeights::try_new([1.0, -0.5, 0.0, 0.0]).is_none());
    }
}
