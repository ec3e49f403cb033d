//! Log probabilities that are reported with a token.

use kvik_types::TokenId;

use super::rank::{order_of, rank_before};
use crate::kernels::{Isa, summarize_logits};

/// The log probabilities at one step, before penalties and temperature.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Of the chosen token.
    pub chosen: f32,
    /// Of the most likely tokens, most likely first.
    pub top: Vec<(TokenId, f32)>,
}

impl TokenLogprobs {
    /// The log probability of `chosen` and those of the `n_top` most likely tokens.
    pub(super) fn of(logits: &[f32], chosen: TokenId, n_top: usize) -> Self {
        let summary = summarize_logits(Isa::detect(), logits);
        let log_sum = f64::from(summary.largest) + summary.sum.ln();
        let logprob = |token: TokenId| (f64::from(logits[token as usize]) - log_sum) as f32;
        let top = most_likely(logits, n_top).into_iter().map(|token| (token, logprob(token))).collect();
        Self { chosen: logprob(chosen), top }
    }
}

/// The `n_top` most likely tokens in the order of their rank: few of a large vocabulary, so one pass looks only for what is
/// above the last of those found so far.
fn most_likely(logits: &[f32], n_top: usize) -> Vec<TokenId> {
    let n_top = n_top.min(logits.len());
    let mut top: Vec<TokenId> = (0..n_top as TokenId).collect();
    top.sort_unstable_by(|&a, &b| rank_before(logits, a, b));
    let Some(&last) = top.last() else { return top };
    let mut least = order_of(logits[last as usize]);
    for (token, &logit) in logits.iter().enumerate().skip(n_top) {
        // Of equals, the one found before ranks before.
        if least < order_of(logit) {
            let token = token as TokenId;
            let place = top.partition_point(|&other| rank_before(logits, other, token).is_lt());
            top.pop();
            top.insert(place, token);
            least = top.last().map_or(least, |&last| order_of(logits[last as usize]));
        }
    }
    top
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_most_likely_tokens_are_those_of_a_whole_sort(
            // Few values, so that many are equal, with both zeros.
            logits in prop::collection::vec(
                prop_oneof![(-3_i32..3).prop_map(|value| value as f32), Just(-0.0_f32), -9.0_f32..9.0], 1..300),
            n_top in 0_usize..40,
        ) {
            let mut sorted: Vec<TokenId> = (0..logits.len() as TokenId).collect();
            sorted.sort_by(|&a, &b| rank_before(&logits, a, b));
            sorted.truncate(n_top);
            prop_assert_eq!(most_likely(&logits, n_top), sorted);
        }
    }

    #[test]
    fn log_probabilities_are_those_of_the_softmax() {
        let logits: Vec<f32> = (0..5000).map(|token| ((token * 37) % 101) as f32 / 7.0).collect();
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let found = TokenLogprobs::of(&logits, 17, 5);
        let exact = |token: TokenId| f64::from(logits[token as usize]) - sum.ln();
        assert!((f64::from(found.chosen) - exact(17)).abs() < 1e-5);
        assert_eq!(found.top.len(), 5);
        for (token, logprob) in found.top {
            assert!((f64::from(logprob) - exact(token)).abs() < 1e-5, "token {token}");
        }
    }
}
