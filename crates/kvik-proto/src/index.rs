//! The API of the global KV index, on a gateway.
//!
//! | call | body | answer |
//! |---|---|---|
//! | `POST /v1/score` | [`ScoreRequest`] | [`ScoreResponse`] |
//! | `GET /index/stats` | none | [`IndexStats`] |
//! | `POST /index/prompt` | [`PromptHoldersRequest`] | [`PromptHoldersResponse`] |
//! | `POST /index/holders` | [`HoldersRequest`] | [`HoldersResponse`] |
//! | `GET /index/blocks?model=..&worker=..&rank=..&keys=..&after=..&limit=..` | none | [`BlocksPage`] |

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Asks how much of a prompt each worker has.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScoreRequest {
    /// The model.
    pub model: String,
    /// Text; special tokens are added as the tokenizer does. Exactly one of the three.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// A conversation, a list of messages as the `OpenAI` API has them, rendered by the model's chat template. As it was
    /// written: templates care for the order of fields.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub messages: Option<Box<serde_json::value::RawValue>>,
    /// Tokens, taken as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// The `cache_salt` of the request: blocks of other salts, and of none, are not counted. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
    /// The only workers that are asked for; default and empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<String>,
    /// `longest_prefix`, `highest_block_hit`, `coverage` or `cost`, or the names that llm-d has for them.
    /// Default: `longest_prefix`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scorer: Option<String>,
}

/// How much of a prompt each worker has.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ScoreResponse {
    /// The model.
    pub model: String,
    /// The scorer.
    pub scorer: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// By worker. Without `pods` only workers that have something of the prompt.
    pub scores: BTreeMap<String, f64>,
    /// By worker: tokens from the first on that it has in some tier.
    pub matched_tokens: BTreeMap<String, u64>,
    /// By worker and tier, where the worker has something: the same by the fastest tier.
    pub matched_by_tier: BTreeMap<String, BTreeMap<String, u64>>,
    /// The worker with the best score; of equals the first by name. `null` if no worker has anything.
    pub best: Option<String>,
}

/// Asks which tokens of a prompt each worker has. The prompt is in exactly one of its three forms, as that of a [`ScoreRequest`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptHoldersRequest {
    /// The model.
    pub model: String,
    /// Text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// A conversation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub messages: Option<Box<serde_json::value::RawValue>>,
    /// Tokens, taken as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// The `cache_salt` of the request. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
}

/// Which tokens of a prompt each worker has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptHoldersResponse {
    /// The model.
    pub model: String,
    /// Tokens that are told apart at most: the longest length that all blocks are a multiple of.
    pub block_tokens: usize,
    /// Whether everything was looked up; otherwise workers may have more than the answer says.
    pub is_complete: bool,
    /// The tokens of the prompt.
    pub token_ids: Vec<u32>,
    /// By worker, where it has something: what it has, in order.
    pub workers: BTreeMap<String, Vec<HeldRun>>,
}

/// Tokens in a row that a worker has in one tier.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldRun {
    /// The place of the first one in the prompt.
    pub first_token: usize,
    /// How many.
    pub tokens: usize,
    /// The fastest tier that has them: `gpu`, `cpu`, `disk`, `remote`.
    pub tier: String,
}

/// Chunks of one question for holders.
pub const MAX_HOLDER_KEYS: usize = 4096;

/// Asks which workers are known to have chunks of a store, by the chunks' names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HoldersRequest {
    /// The first halves of the chunks' names, 16 hexadecimal digits each; at most [`MAX_HOLDER_KEYS`].
    pub keys: Vec<String>,
}

/// The workers that are known to have some of the chunks in memory or on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldersResponse {
    /// By worker: how many of the chunks.
    pub holders: BTreeMap<String, u64>,
}

/// What the index knows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct IndexStats {
    /// Where it is kept: `memory` or `redis`.
    pub backend: String,
    /// Its models, by name.
    pub models: Vec<ModelStats>,
    /// Counts since the start, by name.
    pub counters: BTreeMap<String, u64>,
}

/// What is known of one model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelStats {
    /// The model.
    pub model: String,
    /// Whether its prompts can be turned into tokens here.
    pub has_tokenizer: bool,
    /// One for each way in which its engines name blocks.
    pub books: Vec<BookStats>,
}

/// A book of the index.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BookStats {
    /// How its blocks are named.
    pub keys: String,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// The sources of its events.
    pub sources: Vec<SourceStats>,
}

/// A worker and rank whose events are in a book.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceStats {
    /// The worker.
    pub worker: String,
    /// Its data parallel rank.
    pub rank: u32,
    /// The life of the worker, where it has reported one.
    pub epoch: Option<u64>,
    /// The number of the batch that is due.
    pub due_sequence: Option<u64>,
    /// Whether events are missing.
    pub is_unsure: bool,
    /// Pairs of block and tier; absent where they are not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_blocks: Option<u64>,
}

/// Some blocks of a source, in the index's own order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlocksPage {
    /// The blocks.
    pub blocks: Vec<BlockStats>,
    /// The `after` of the next page, 16 hexadecimal digits; absent on the last. It is a
    /// cursor of the index and not a key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A block that a source has.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockStats {
    /// Its key, 16 hexadecimal digits.
    pub key: String,
    /// The tiers that have it: `gpu`, `cpu`, `disk`, `remote`.
    pub tiers: Vec<String>,
}
