//! What a draw depends on, in numbers that every device computes alike.
//!
//! The weight of a token is a whole number: 2 to the power of its exponent, times 2 to the power of 40. An exponent is the token's
//! distance from the largest logit, scaled by the temperature. Sums of whole numbers have no order, and the operations behind a weight
//! are a few multiplications and additions of f64: so a GPU (`forward/cuda/kernels/choice.cu`) chooses the same token as the host.

use kvik_types::TokenId;

use super::params::SamplingParams;
use super::rank::rank_before;

/// Weights are whole numbers up to 2 to this power: a token less likely than that beside the most likely one is not drawn.
const WEIGHT_BITS: i32 = 40;

/// 1 / n! for n from 12 down: the exponential of numbers up to ln 2, to 1e-13 of it.
const TERMS: [f64; 13] = [
    1.0 / 479_001_600.0,
    1.0 / 39_916_800.0,
    1.0 / 3_628_800.0,
    1.0 / 362_880.0,
    1.0 / 40_320.0,
    1.0 / 5_040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
    1.0,
    1.0,
];

/// How one token is chosen from logits alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenDraw {
    /// Of logits, for powers of two; 0 for the most likely token.
    pub(crate) scale: f64,
    /// Exponent of the least likely tokens that are considered.
    pub(crate) least_exponent: f64,
    /// The random number, in `[0, 1)`.
    pub(crate) uniform: f64,
    /// The most likely tokens that are considered; 0: all.
    pub(crate) top_k: u32,
    /// Share of the weights whose most likely tokens are considered.
    pub(crate) top_p: f32,
}

impl TokenDraw {
    /// The most likely token.
    pub const BEST: Self = Self { scale: 0.0, least_exponent: 0.0, uniform: 0.0, top_k: 0, top_p: 1.0 };

    /// The choice that `params` ask for with this random number, in `[0, 1)`.
    pub fn new(params: &SamplingParams, uniform: f64) -> Self {
        if params.temperature <= 0.0 {
            return Self::BEST;
        }
        // p >= min_p * p_max; the logarithm of 0 is below every exponent.
        let least_exponent = f64::from(params.min_p).log2().max(f64::from(-WEIGHT_BITS));
        Self {
            scale: std::f64::consts::LOG2_E / f64::from(params.temperature),
            least_exponent,
            uniform,
            top_k: params.top_k,
            top_p: params.top_p,
        }
    }

    /// Whether the most likely token is taken.
    fn takes_best(&self) -> bool {
        self.scale <= 0.0
    }

    /// The token that is chosen from `logits`, which must be finite and not empty.
    pub fn choose(&self, logits: &[f32]) -> TokenId {
        self.choose_with(logits, &mut Vec::new())
    }

    /// As [`TokenDraw::choose`], with memory for candidates.
    pub(super) fn choose_with(&self, logits: &[f32], candidates: &mut Vec<TokenId>) -> TokenId {
        let best = most_likely(logits);
        if self.takes_best() {
            return best;
        }
        let largest = logits[best as usize];
        self.select(logits, largest, candidates);
        let weight = |token: TokenId| weight_of(self.exponent(logits[token as usize], largest));
        let total: u64 = candidates.iter().map(|&token| weight(token)).sum();
        let target = self.target(total);
        let mut sum = 0;
        let drawn = candidates.iter().find(|&&token| {
            sum += weight(token);
            target < sum
        });
        drawn.copied().unwrap_or(best)
    }

    /// Fills `candidates` with the tokens that are considered, in order of their ids.
    fn select(&self, logits: &[f32], largest: f32, candidates: &mut Vec<TokenId>) {
        let exponent = |token: TokenId| self.exponent(logits[token as usize], largest);
        candidates.clear();
        let tokens = 0..logits.len() as TokenId;
        candidates.extend(tokens.filter(|&token| self.least_exponent <= exponent(token)));
        let top_k = self.top_k as usize;
        let has_top_k = 0 < top_k && top_k < candidates.len();
        if has_top_k {
            candidates.select_nth_unstable_by(top_k - 1, |&a, &b| rank_before(logits, a, b));
            candidates.truncate(top_k);
        }
        if self.top_p < 1.0 {
            candidates.sort_unstable_by(|&a, &b| rank_before(logits, a, b));
            let weight = |token: TokenId| weight_of(exponent(token));
            let wanted = self.wanted(candidates.iter().map(|&token| weight(token)).sum());
            let mut sum = 0;
            let needed = candidates.iter().take_while(|&&token| {
                let is_needed = sum < wanted;
                sum += weight(token);
                is_needed
            });
            let n_needed = needed.count();
            candidates.truncate(n_needed);
        }
        if has_top_k || self.top_p < 1.0 {
            candidates.sort_unstable();
        }
    }

    /// The exponent of a token beside the largest logit.
    fn exponent(&self, logit: f32, largest: f32) -> f64 {
        (f64::from(logit) - f64::from(largest)) * self.scale
    }

    /// The sum that the most likely tokens must reach.
    fn wanted(&self, total: u64) -> u64 {
        ((f64::from(self.top_p) * total as f64).ceil() as u64).clamp(1, total.max(1))
    }

    /// The sum behind which the token lies that is drawn.
    fn target(&self, total: u64) -> u64 {
        ((self.uniform * total as f64) as u64).min(total.saturating_sub(1))
    }
}

/// The weight of a token with this exponent, which is 0 to -40.
fn weight_of(exponent: f64) -> u64 {
    let whole = exponent.floor();
    let part = (exponent - whole) * std::f64::consts::LN_2;
    let power = TERMS[1..].iter().fold(TERMS[0], |power, term| power * part + term);
    // Times 2 to the power of a whole number.
    let bits = power.to_bits().wrapping_add_signed((whole as i64 + i64::from(WEIGHT_BITS)) << 52);
    (f64::from_bits(bits) as u64).max(1)
}

/// The largest logit's token, the first of equals: two passes, which are as fast as memory, where one that keeps the place is not.
fn most_likely(logits: &[f32]) -> TokenId {
    let (vectors, rest) = logits.as_chunks::<16>();
    let mut largest = [f32::NEG_INFINITY; 16];
    for vector in vectors {
        for (largest, logit) in largest.iter_mut().zip(vector) {
            *largest = if *largest < *logit { *logit } else { *largest };
        }
    }
    let largest = largest.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|&logit| largest <= logit).unwrap_or(0) as TokenId
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_powers_of_two_to_many_digits() {
        for step in 0..=40_000 {
            let exponent = -f64::from(step) / 1000.0;
            let exact = (exponent + 40.0).exp2();
            let error = (weight_of(exponent) as f64 - exact).abs();
            assert!(error <= 1.0 + exact * 1e-12, "{exponent}: {error}");
        }
        assert_eq!(weight_of(0.0), 1 << 40);
        assert_eq!(weight_of(-40.0), 1);
    }

    #[test]
    fn every_token_that_is_considered_has_an_exponent_that_a_weight_can_have() {
        for min_p in [0.0, f32::MIN_POSITIVE, 1e-9, 0.5, 1.0] {
            let draw = TokenDraw::new(&SamplingParams { min_p, ..SamplingParams::default() }, 0.0);
            assert!((-40.0..=0.0).contains(&draw.least_exponent), "{min_p}");
        }
        assert!(TokenDraw::new(&SamplingParams::greedy(1), 0.5).takes_best());
    }
}
