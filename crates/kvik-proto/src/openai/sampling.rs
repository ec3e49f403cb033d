//! The fields about sampling that all requests for outputs have.

use serde::{Deserialize, Serialize};

use crate::worker::Sampling;

/// Texts that end an output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a string or a list of strings")]
pub enum Stop {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

/// How tokens are chosen and when an output ends, field by field beside the others of a request.
///
/// A part of requests by `flatten`. An error in a flattened part does not know its field: a caller that
/// has to name it reads the part for itself.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplingFields {
    /// Most tokens of an output.
    pub max_tokens: Option<u32>,
    /// See [`Sampling`].
    pub temperature: Option<f32>,
    /// See [`Sampling`].
    pub top_p: Option<f32>,
    /// Outputs for each prompt. Default: 1.
    pub n: Option<u32>,
    /// Texts that end an output.
    pub stop: Option<Stop>,
    /// See [`Sampling`].
    pub presence_penalty: Option<f32>,
    /// See [`Sampling`].
    pub frequency_penalty: Option<f32>,
    /// Fixes the random choices.
    pub seed: Option<i64>,
    /// Extension: see [`Sampling`]; negative for all tokens, as 0.
    pub top_k: Option<i64>,
    /// Extension: see [`Sampling`].
    pub min_p: Option<f32>,
    /// Extension: see [`Sampling`].
    pub repetition_penalty: Option<f32>,
    /// Extension: whether end tokens are ordinary ones.
    pub ignore_eos: Option<bool>,
    /// Extension: tokens that end an output.
    pub stop_token_ids: Option<Vec<u32>>,
}

impl Stop {
    /// All of them.
    pub fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

impl SamplingFields {
    /// The same in the worker's own words; log probabilities are not among the fields.
    pub fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k.map(top_k),
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed.map(i64::cast_unsigned),
            stop: self.stop.clone().map(Stop::into_vec),
            stop_token_ids: self.stop_token_ids.clone(),
            ignore_eos: self.ignore_eos,
            logprobs: None,
            n: self.n,
            max_tokens: self.max_tokens,
        }
    }
}

/// Negative numbers mean all tokens, as 0 does.
fn top_k(given: i64) -> u32 {
    u32::try_from(given.max(0)).unwrap_or(u32::MAX)
}
