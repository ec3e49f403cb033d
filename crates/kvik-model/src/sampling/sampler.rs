//! The choice of one token.
//!
//! Order of the steps: penalties, temperature, `min_p`, `top_k`, `top_p`, draw. Equal logits rank
//! by token id, so that the order never depends on a sort. The draw goes through the tokens that are left in the order of their ids.

use kvik_types::TokenId;

use super::draw::TokenDraw;
use super::logprobs::TokenLogprobs;
use super::params::SamplingParams;
use super::penalties::TokenCounts;
use super::random::uniform;

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
}

impl SamplerInput<'_> {
    /// The draw, where the choice depends on the logits alone.
    pub(crate) fn draw_alone(&self) -> Option<TokenDraw> {
        self.counts.is_none().then(|| self.draw())
    }

    /// What is reported with a token that was chosen from `logits`.
    pub(crate) fn logprobs(&self, logits: &[f32], token: TokenId) -> Option<TokenLogprobs> {
        self.params.logprobs.map(|n_top| TokenLogprobs::of(logits, token, n_top as usize))
    }

    fn draw(&self) -> TokenDraw {
        TokenDraw::new(self.params, uniform(self.seed, self.choice, self.n_generated))
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
        (token, input.logprobs(logits, token))
    }

    fn choose(&mut self, logits: &[f32], input: SamplerInput<'_>) -> TokenId {
        let draw = input.draw();
        let Some(counts) = input.counts else { return draw.choose_with(logits, &mut self.candidates) };
        self.adjusted.clear();
        self.adjusted.extend_from_slice(logits);
        counts.apply(input.params, &mut self.adjusted);
        draw.choose_with(&self.adjusted, &mut self.candidates)
    }
}

#[cfg(test)]
mod tests;
