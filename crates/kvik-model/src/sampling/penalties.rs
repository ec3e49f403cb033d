//! Penalties on tokens that have already appeared.

use std::collections::HashMap;

use kvik_types::TokenId;

use super::params::SamplingParams;

/// How often each token has appeared in one sequence.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenCounts {
    /// Occurrences in the output; zero for tokens of the prompt alone.
    n_in_output: HashMap<TokenId, u32>,
}

impl TokenCounts {
    /// The counts of a sequence that starts with `prompt`, or nothing if `params` has no penalty.
    pub(crate) fn try_new(params: &SamplingParams, prompt: &[TokenId]) -> Option<Self> {
        #[expect(clippy::float_cmp, reason = "these exact values switch a penalty off")]
        let is_needed = params.repetition_penalty != 1.0
            || params.presence_penalty != 0.0
            || params.frequency_penalty != 0.0;
        is_needed.then(|| Self { n_in_output: prompt.iter().map(|&token| (token, 0)).collect() })
    }

    /// Counts a token of the output.
    pub(crate) fn push(&mut self, token: TokenId) {
        *self.n_in_output.entry(token).or_default() += 1;
    }

    /// Lowers the logits of the tokens that have appeared.
    pub(super) fn apply(&self, params: &SamplingParams, logits: &mut [f32]) {
        for (&token, &count) in &self.n_in_output {
            let Some(logit) = logits.get_mut(token as usize) else {
                continue;
            };
            if *logit > 0.0 {
                *logit /= params.repetition_penalty;
            } else {
                *logit *= params.repetition_penalty;
            }
            if 0 < count {
                *logit -= params.presence_penalty + count as f32 * params.frequency_penalty;
            }
        }
    }
}
