//! From logits to the next token.
//!
//! A token is chosen by (logits, parameters, tokens so far, seed, number of the token) and by
//! nothing else: the random number is a hash of seed and counter, not the state of a generator.
//! The same seed gives the same text in any batch, after a preemption and on another machine.

mod draw;
mod logprobs;
mod params;
mod penalties;
mod random;
mod rank;
mod sampler;

pub use draw::TokenDraw;
pub use logprobs::TokenLogprobs;
pub use params::SamplingParams;
pub(crate) use penalties::TokenCounts;
pub(crate) use random::mix;
pub(crate) use sampler::{Sampler, SamplerInput};
