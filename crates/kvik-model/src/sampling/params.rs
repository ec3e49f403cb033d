//! What a request asks of the sampler.

use kvik_types::TokenId;

use crate::error::{ModelError, Result};

/// Most choices of one request; each is a sequence of its own.
const MAX_CHOICES: u32 = 128;
/// Most alternatives whose log probability a token reports.
const MAX_LOGPROBS: u32 = 1024;
/// How tokens are chosen and when a sequence ends.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 takes the most likely token. Range: 0 to 100. Default: 1.
    pub temperature: f32,
    /// Only the `top_k` most likely tokens are considered; 0: all. Default: 0.
    pub top_k: u32,
    /// Only the most likely tokens whose probabilities sum up to `top_p`. Range: above 0 to 1. Default: 1.
    pub top_p: f32,
    /// Only tokens at least `min_p` times as likely as the most likely one. Range: 0 to 1. Default: 0.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output. Range: above 0
    /// to 100. Default: 1.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the output. Range: -2 to 2. Default: 0.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens in the output, once for each occurrence. Range: -2 to 2.
    /// Default: 0.
    pub frequency_penalty: f32,
    /// Fixes the random choices. Default: none; the engine takes another for each request.
    pub seed: Option<u64>,
    /// Texts that end a sequence; they are not part of the output. At most 64, each of 1 to 4096
    /// bytes. Default: none.
    pub stop: Vec<String>,
    /// Tokens that end a sequence besides those of the model. Default: none.
    pub stop_token_ids: Vec<TokenId>,
    /// Whether the model's own end tokens are ordinary tokens. Default: false.
    pub ignore_eos: bool,
    /// Number of most likely tokens reported with each token, beside the chosen one. Default: none.
    pub logprobs: Option<u32>,
    /// Number of independent outputs for the prompt. Range: 1 to 128. Default: 1.
    pub n: u32,
    /// Most tokens of an output. At least 1. Default: 128.
    pub max_tokens: u32,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            n: 1,
            max_tokens: 128,
        }
    }
}

impl SamplingParams {
    /// The most likely token at each step.
    pub fn greedy(max_tokens: u32) -> Self {
        Self { temperature: 0.0, max_tokens, ..Self::default() }
    }

    /// Checks every field but `stop`, which [`TextStream`](kvik_tokens::TextStream) checks.
    ///
    /// # Errors
    /// [`ModelError::InvalidRequest`] for the first field out of its range.
    pub fn validate(&self) -> Result<()> {
        within("temperature", self.temperature, 0.0, 100.0)?;
        within("min_p", self.min_p, 0.0, 1.0)?;
        within("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        above_zero("top_p", self.top_p, 1.0)?;
        above_zero("repetition_penalty", self.repetition_penalty, 100.0)?;
        if self.max_tokens == 0 {
            return Err(ModelError::request("max_tokens", 0, "at least 1"));
        }
        if self.n == 0 || MAX_CHOICES < self.n {
            return Err(ModelError::request("n", self.n, format!("1 to {MAX_CHOICES}")));
        }
        if let Some(n) = self.logprobs.filter(|&n| MAX_LOGPROBS < n) {
            return Err(ModelError::request("logprobs", n, format!("0 to {MAX_LOGPROBS}")));
        }
        Ok(())
    }
}

fn within(field: &'static str, value: f32, lowest: f32, highest: f32) -> Result<()> {
    if (lowest..=highest).contains(&value) {
        return Ok(());
    }
    Err(ModelError::request(field, value, format!("{lowest} to {highest}")))
}

fn above_zero(field: &'static str, value: f32, highest: f32) -> Result<()> {
    if 0.0 < value && value <= highest {
        return Ok(());
    }
    Err(ModelError::request(field, value, format!("above 0 to {highest}")))
}
