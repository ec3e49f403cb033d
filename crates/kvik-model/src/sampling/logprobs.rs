//! Log probabilities that are reported with a token.

use kvik_types::TokenId;

use super::rank::rank_before;

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
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
        let log_sum = f64::from(largest) + sum.ln();
        let logprob = |token: TokenId| (f64::from(logits[token as usize]) - log_sum) as f32;
        let mut tokens: Vec<TokenId> = (0..logits.len() as TokenId).collect();
        let n_top = n_top.min(tokens.len());
        if 0 < n_top && n_top < tokens.len() {
            tokens.select_nth_unstable_by(n_top - 1, |&a, &b| rank_before(logits, a, b));
        }
        tokens.truncate(n_top);
        tokens.sort_unstable_by(|&a, &b| rank_before(logits, a, b));
        let top = tokens.into_iter().map(|token| (token, logprob(token))).collect();
        Self { chosen: logprob(chosen), top }
    }
}
