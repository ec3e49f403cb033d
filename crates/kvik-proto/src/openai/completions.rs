//! `/v1/completions`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::sampling::SamplingFields;
use super::segments::KvikFields;
use crate::worker::Sampling;

/// What is completed: one text or several, as text or as tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a string, a list of strings, a list of tokens or a list of lists of tokens")]
pub enum Prompt {
    /// One text.
    Text(String),
    /// Several texts; also the empty list.
    Texts(Vec<String>),
    /// One text as tokens.
    Tokens(Vec<u32>),
    /// Several texts as tokens.
    TokenLists(Vec<Vec<u32>>),
}

/// How a stream is told.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StreamOptions {
    /// Whether a last chunk without choices tells the usage. Default: false.
    pub include_usage: Option<bool>,
}

/// Asks for completions of one or several prompts, by default of 16 tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CompletionRequest {
    /// The model. Default: the one that is served.
    #[serde(default)]
    pub model: Option<String>,
    /// What is completed.
    pub prompt: Prompt,
    /// Outputs made to choose `n` from; only `n` itself is honored.
    #[serde(default)]
    pub best_of: Option<u32>,
    /// Whether the answer is a stream. Default: false.
    #[serde(default)]
    pub stream: Option<bool>,
    /// How the stream is told.
    #[serde(default)]
    pub stream_options: Option<StreamOptions>,
    /// Number of most likely tokens reported with each token. Default: none.
    #[serde(default)]
    pub logprobs: Option<u32>,
    /// Whether the prompt comes before the output. Default: false.
    #[serde(default)]
    pub echo: Option<bool>,
    /// Text after the output; not honored.
    #[serde(default)]
    pub suffix: Option<String>,
    /// Changes of single logits; not honored.
    #[serde(default)]
    pub logit_bias: Option<serde_json::Value>,
    /// The end user; a routing key.
    #[serde(default)]
    pub user: Option<String>,
    /// Extension: whether text prompts get the special tokens that the tokenizer adds. Default: true.
    #[serde(default)]
    pub add_special_tokens: Option<bool>,
    /// Extension: whether choices carry their tokens. Default: false.
    #[serde(default)]
    pub return_token_ids: Option<bool>,
    /// Extension: names the sequence, so that the next turn continues it.
    #[serde(default)]
    pub seq_id: Option<String>,
    /// Extension of vLLM: keeps the KV apart from that of requests with other salts or none; 1 to 1024 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
    /// Extension: parts of the prompt whose KV may be used at any place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kvik: Option<KvikFields>,
    /// How tokens are chosen.
    #[serde(flatten)]
    pub sampling_fields: SamplingFields,
}

/// The answer, or a chunk of a stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CompletionResponse {
    /// Unique; all chunks of a stream share it.
    pub id: String,
    /// Always `text_completion`.
    pub object: String,
    /// Unix time in seconds.
    pub created: u64,
    /// The model.
    pub model: String,
    /// What the answer depends on besides the request.
    #[serde(default)]
    pub system_fingerprint: Option<String>,
    /// The outputs, or what they grew by.
    pub choices: Vec<CompletionChoice>,
    /// Tokens used; in streams only in the last chunk, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// An output, or what it grew by.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CompletionChoice {
    /// Which one: the outputs of the first prompt come first.
    pub index: u32,
    /// The text.
    pub text: String,
    /// Log probabilities, if asked for.
    #[serde(default)]
    pub logprobs: Option<CompletionLogprobs>,
    /// `stop` or `length`; none while the output grows.
    #[serde(default)]
    pub finish_reason: Option<String>,
    /// Extension: the tokens, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// Log probabilities of the tokens of a choice, field by field.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CompletionLogprobs {
    /// The tokens.
    pub tokens: Vec<String>,
    /// Their log probabilities.
    pub token_logprobs: Vec<Option<f32>>,
    /// The most likely tokens at each place.
    pub top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Where each token starts, in characters.
    pub text_offset: Vec<usize>,
}

/// Tokens that a request used.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompts.
    pub prompt_tokens: usize,
    /// Tokens of the outputs.
    pub completion_tokens: usize,
    /// Both.
    pub total_tokens: usize,
    /// More about the prompts.
    #[serde(default)]
    pub prompt_tokens_details: PromptTokensDetails,
}

/// What the tokens of prompts cost.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptTokensDetails {
    /// Tokens whose KV was there already.
    #[serde(default)]
    pub cached_tokens: usize,
    /// The same by where the KV was; absent where there was none.
    #[serde(default, skip_serializing_if = "CachedTiers::is_empty")]
    pub cached_tokens_by_tier: CachedTiers,
    /// Tokens whose KV is that of segments; absent where there were none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub blended_tokens: usize,
    /// Of these, tokens that were computed again.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub recomputed_tokens: usize,
    /// The selector that chose them; absent where the prompt was computed as any other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blend: Option<String>,
}

/// Cached tokens by where their KV was; absent where there were none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CachedTiers {
    /// In the engine's own memory.
    #[serde(skip_serializing_if = "is_zero")]
    pub engine: usize,
    /// In the store's memory.
    #[serde(skip_serializing_if = "is_zero")]
    pub ram: usize,
    /// On a local disk.
    #[serde(skip_serializing_if = "is_zero")]
    pub nvme: usize,
    /// On other nodes of the cluster.
    #[serde(skip_serializing_if = "is_zero")]
    pub peer: usize,
    /// On a Redis server or cluster.
    #[serde(skip_serializing_if = "is_zero")]
    pub redis: usize,
    /// In an object store.
    #[serde(skip_serializing_if = "is_zero")]
    pub object: usize,
    /// On a server of LMCache's protocol.
    #[serde(skip_serializing_if = "is_zero")]
    pub lm: usize,
    /// In a library that was loaded at run time.
    #[serde(skip_serializing_if = "is_zero")]
    pub plugin: usize,
}

impl CompletionRequest {
    /// How tokens are chosen, in the worker's own words. `max_tokens` is as given.
    pub fn sampling(&self) -> Sampling {
        Sampling { logprobs: self.logprobs, ..self.sampling_fields.sampling() }
    }
}

impl CachedTiers {
    /// Adds the counts of another prompt.
    pub fn add(&mut self, other: Self) {
        // By name, so that a new tier is not left out.
        let Self { engine, ram, nvme, peer, redis, object, lm, plugin } = other;
        self.engine += engine;
        self.ram += ram;
        self.nvme += nvme;
        self.peer += peer;
        self.redis += redis;
        self.object += object;
        self.lm += lm;
        self.plugin += plugin;
    }

    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl Usage {
    /// Adds one prompt and its outputs.
    pub fn add(&mut self, prompt_tokens: usize, cached_tokens: usize, completion_tokens: usize) {
        self.prompt_tokens += prompt_tokens;
        self.completion_tokens += completion_tokens;
        self.total_tokens += prompt_tokens + completion_tokens;
        self.prompt_tokens_details.cached_tokens += cached_tokens;
    }
}
