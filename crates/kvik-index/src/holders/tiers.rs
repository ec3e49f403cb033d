//! Weights of tiers, and which of several tiers counts for a block.

use super::types::{N_TIERS, Tier};

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

    pub(super) fn sum(&self, n_blocks: impl Fn(Tier) -> u32) -> f64 {
        Tier::ALL.iter().map(|tier| self.weight(*tier) * f64::from(n_blocks(*tier))).sum()
    }
}

impl TierOrder {
    #[inline]
    pub(super) fn best(self, tiers: u8) -> usize {
        usize::from(self.best[usize::from(tiers) % (1 << N_TIERS)])
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
