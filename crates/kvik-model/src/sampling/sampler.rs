//! The choice of one token.
//!
//! Order of the steps: penalties, temperature, `min_p`, `top_k`, `top_p`, draw. Equal logits rank
//! by token id, so that the order never depends on a sort.

use kvik_types::TokenId;

use super::logprobs::TokenLogprobs;
use super::params::SamplingParams;
use super::penalties::TokenCounts;
use super::random::uniform;
use super::rank::rank_before;

/// What one choice depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SamplerInput<'a> {
    pub(crate) params: &'a SamplingParams,
    pub(crate) counts: Option<&'a TokenCounts>,
    pub(crate) seed: u64,
    /// Which of the request's choices.
    pub(crate) choice: u32,
    /// Number of tokens of the output before this one.
    pub(crate) n_generated: u64,
}

/// Scratch memory for choosing tokens.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    adjusted: Vec<f32>,
    candidates: Vec<TokenId>,
    weights: Vec<f64>,
}

impl SamplerInput<'_> {
    /// Whether the choice is the most likely token, reported without log probabilities.
    pub(crate) fn takes_best(&self) -> bool {
        self.params.temperature <= 0.0 && self.counts.is_none() && self.params.logprobs.is_none()
    }
}

impl Sampler {
    /// Chooses the next token from `logits`, which must be finite and not empty.
    pub(crate) fn sample(
        &mut self,
        logits: &[f32],
        input: SamplerInput<'_>,
    ) -> (TokenId, Option<TokenLogprobs>) {
        let token = self.choose(logits, input);
        let logprobs = input.params.logprobs.map(|n_top| TokenLogprobs::of(logits, token, n_top as usize));
        (token, logprobs)
    }

    fn choose(&mut self, logits: &[f32], input: SamplerInput<'_>) -> TokenId {
        let params = input.params;
        if params.temperature <= 0.0 && input.counts.is_none() {
            return most_likely(logits);
        }
        self.adjusted.clear();
        self.adjusted.extend_from_slice(logits);
        if let Some(counts) = input.counts {
            counts.apply(params, &mut self.adjusted);
        }
        let best = most_likely(&self.adjusted);
        if params.temperature <= 0.0 {
            return best;
        }
        let largest = self.adjusted[best as usize];
        let inverse_temperature = 1.0 / f64::from(params.temperature);
        let weight_of = |logit: f32| (f64::from(logit - largest) * inverse_temperature).exp();
        self.select_candidates(params, largest);
        self.weights.clear();
        let adjusted = &self.adjusted;
        self.weights.extend(self.candidates.iter().map(|&token| weight_of(adjusted[token as usize])));
        if params.top_p < 1.0 {
            keep_top_p(params.top_p, &mut self.weights);
        }
        let total: f64 = self.weights.iter().sum();
        let mut left = uniform(input.seed, input.choice, input.n_generated) * total;
        for (&weight, &token) in self.weights.iter().zip(&self.candidates) {
            left -= weight;
            if left < 0.0 {
                return token;
            }
        }
        // Rounding can leave a rest after the last weight.
        best
    }

    /// Fills `candidates` with the tokens that `min_p` and `top_k` allow; in order of rank where
    /// `top_k` or `top_p` asks for it, else by id.
    fn select_candidates(&mut self, params: &SamplingParams, largest: f32) {
        let adjusted = &self.adjusted;
        self.candidates.clear();
        // p >= min_p * p_max, taken to the logits.
        let lowest = if 0.0 < params.min_p {
            f64::from(largest) + f64::from(params.min_p).ln() * f64::from(params.temperature)
        } else {
            f64::NEG_INFINITY
        };
        let tokens = 0..adjusted.len() as TokenId;
        self.candidates.extend(tokens.filter(|&token| lowest <= f64::from(adjusted[token as usize])));
        let top_k = params.top_k as usize;
        let has_top_k = 0 < top_k && top_k < self.candidates.len();
        if has_top_k {
            self.candidates.select_nth_unstable_by(top_k - 1, |&a, &b| rank_before(adjusted, a, b));
            self.candidates.truncate(top_k);
        }
        if has_top_k || params.top_p < 1.0 {
            self.candidates.sort_unstable_by(|&a, &b| rank_before(adjusted, a, b));
        }
    }
}

fn most_likely(logits: &[f32]) -> TokenId {
    let mut best = 0;
    for (token, &logit) in logits.iter().enumerate() {
        if logits[best] < logit {
            best = token;
        }
    }
    best as TokenId
}

/// Keeps the shortest front of `weights`, which are sorted, that reaches `top_p` of their sum.
fn keep_top_p(top_p: f32, weights: &mut Vec<f64>) {
    let wanted = weights.iter().sum::<f64>() * f64::from(top_p);
    let mut sum = 0.0;
    let n_kept = weights.iter().take_while(|&&weight| {
        let is_needed = sum < wanted;
        sum += weight;
        is_needed
    });
    let n_kept = n_kept.count().max(1);
    weights.truncate(n_kept);
}

#[cfg(test)]
mod tests;
