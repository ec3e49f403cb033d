//! The admin API of a worker's store of KV.
//!
//! | call | body | answer |
//! |---|---|---|
//! | `POST /cache/lookup` | [`PromptInput`] | [`LookupResponse`] |
//! | `POST /cache/explain` | [`PromptInput`] | [`ExplainResponse`] |
//! | `POST /cache/prefetch[?tier=..]` | [`PromptInput`] | [`PrefetchStatus`], at once |
//! | `GET /cache/prefetch/{id}` | none | [`PrefetchStatus`] |
//! | `DELETE /cache/prefetch/{id}` | none | [`PrefetchStatus`], cancelled |
//! | `POST /cache/pin`, `POST /cache/unpin` | [`PromptInput`] | [`PinResponse`] |
//! | `POST /cache/move` | [`MoveRequest`] | [`MoveResponse`] |
//! | `POST /cache/clear` | [`ClearRequest`] | [`ClearResponse`] |
//! | `POST /cache/compress` | [`CompressRequest`] | [`CompressStatus`], at once |
//! | `GET /cache/compress` | none | [`CompressStatus`] |
//! | `DELETE /cache/compress` | none | [`CompressStatus`], cancelled |
//! | `POST /cache/retrieve[?layer=..&tier=..]` | [`PromptInput`] | safetensors: `token_ids`, `chunk.N.layer.N` |
//! | `POST /cache/store[?tier=..]` | safetensors as `retrieve` gives them, all layers | [`StoreResponse`] |
//! | `POST /cache/segments` | [`SegmentsRequest`] | [`SegmentsResponse`] |
//! | `GET /cache/health` | none | [`CacheHealth`] |
//! | `GET /cache/stats` | none | [`CacheStats`] |
//!
//! `tier` is the name of a tier: KV is read from it alone, or written to it alone.
//!
//! The bytes of `chunk.N.layer.N` lie as the engine keeps them; the metadata field `namespace` says for
//! which model, type and layout they are good, and `store` takes no others.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::openai::PromptPart;
use crate::worker::PromptInput;

/// How much of a prompt is in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookupResponse {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, from the first on, tokens whose KV is in some tier.
    pub cached_tokens: usize,
    /// The same by tier; a chunk that is in several counts for the fastest.
    pub tiers: BTreeMap<String, usize>,
    /// Tokens in a chunk.
    pub chunk_tokens: usize,
}

/// Whether the KV of a prompt would be loaded or computed now, and why.
///
/// It is for an engine that has nothing of the prompt and nothing else to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExplainResponse {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens in a chunk.
    pub chunk_tokens: usize,
    /// The setting `store.planner`: where it is not `auto`, the decision is not followed.
    pub planner: String,
    /// `load`: all of it before anything is computed; `layers`: all of it layer by layer, while what lies behind it is computed;
    /// `meet`: the front is computed while the back loads; `compute`: nothing is loaded from below memory.
    pub decision: String,
    /// `whole`: chunks are read as a whole; `layers`: layer by layer, by this decision or because `store.layerwise` says so for all
    /// chunks.
    #[serde(default)]
    pub reads: String,
    /// Times that were compared; missing where a tier or the engine was never measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<PredictedTimes>,
    /// How fast the engine computes; missing before its first prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<PrefillEstimate>,
    /// The tiers below memory, fastest first.
    pub tiers: Vec<TierEstimate>,
    /// The chunks that some tier has, from the first on.
    pub chunks: Vec<ExplainedChunk>,
}

/// Times until the prompt is computed, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PredictedTimes {
    /// As decided.
    pub plan_ms: f64,
    /// If all chunks were loaded.
    pub load_all_ms: f64,
    /// If none was, also none from memory.
    pub compute_all_ms: f64,
    /// At best, if all chunks were loaded layer by layer by an engine that computes each layer when it is there. kvik's own engine
    /// is none.
    #[serde(default)]
    pub load_layers_ms: f64,
}

/// How fast an engine computes KV.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PrefillEstimate {
    /// Microseconds that a pass takes beside those of its tokens.
    #[serde(default)]
    pub pass_us: f64,
    /// Microseconds for a token, whatever stands before it.
    pub token_us: f64,
    /// Microseconds more for a thousand tokens before it.
    pub thousand_before_us: f64,
}

/// How fast a tier gives chunks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TierEstimate {
    /// Its name.
    pub tier: String,
    /// Bytes a second as they lie in memory, decoding included; missing before the first read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_s: Option<f64>,
    /// What a read takes before its first byte.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_ms: Option<f64>,
    /// Bytes that are being read, or wait for that.
    pub queued_bytes: u64,
}

/// What is done with a chunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainedChunk {
    /// Its first token.
    pub first_token: usize,
    /// Number of its tokens.
    pub tokens: usize,
    /// Its bytes in memory.
    pub bytes: u64,
    /// The fastest tier that has it.
    pub tier: String,
    /// `load` or `compute`, as planned; what arrives earlier or later moves the place where the two meet.
    pub action: String,
}

/// Where a prefetch stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefetchStatus {
    /// Names the prefetch for a while.
    pub id: String,
    /// Whether it still loads.
    pub state: PrefetchState,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, from the first on, tokens whose KV is in memory now.
    pub loaded_tokens: usize,
}

/// The states of a prefetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefetchState {
    /// Chunks are on their way.
    Loading,
    /// All that could be loaded is there.
    Done,
    /// It was ended before.
    Cancelled,
}

/// What is kept in memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinResponse {
    /// Tokens of the prompt, from the first on, that the call pinned or unpinned.
    pub tokens: usize,
}

/// Puts the chunks of a prompt into another tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveRequest {
    /// The prompt.
    #[serde(flatten)]
    pub input: PromptInput,
    /// The tier that has them, such as `ram`.
    pub from: String,
    /// The tier that shall have them.
    pub to: String,
    /// Whether they also stay where they are. Default: false.
    #[serde(default)]
    pub copy: bool,
}

/// What was moved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveResponse {
    /// Chunks that are in the new tier now.
    pub chunks: usize,
}

/// Removes chunks from the tiers of a store.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClearRequest {
    /// Only the chunks of this prompt: from its end to the first one that other stored prompts share, which stays; of remote tiers, which
    /// know no other prompts, all of them. Default: everything of the model.
    #[serde(flatten)]
    pub input: PromptInput,
    /// Only in these tiers. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tiers: Option<Vec<String>>,
}

/// What was forgotten.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClearResponse {
    /// Chunks by tier.
    pub chunks: BTreeMap<String, usize>,
}

/// Codes cold chunks of a tier by another codec, in the background.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CompressRequest {
    /// Name of the tier; it has a codec and is a disk. Default: `nvme`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier: Option<String>,
    /// The codec; a lossy one only where `store.allow_lossy` names it. Default: that of the tier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub codec: Option<String>,
    /// Seconds for which a chunk was not used to be cold. Default: 3600.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_s: Option<u64>,
    /// Bytes a second that are read from the tier for it, at least 1. Default: 33554432.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_s: Option<u64>,
}

/// How far the coding of cold chunks has come.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompressStatus {
    /// `idle` before the first, `running`, `done`, `cancelled` or `failed`.
    pub state: String,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The tier.
    pub tier: String,
    /// The codec.
    pub codec: String,
    /// Chunks that were cold at the start.
    pub cold_chunks: u64,
    /// Of these, chunks that were looked at.
    pub seen_chunks: u64,
    /// Of these, chunks that are smaller now.
    pub recoded_chunks: u64,
    /// What the smaller ones took before.
    pub bytes_before: u64,
    /// What they take now.
    pub bytes_after: u64,
}

/// What was stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreResponse {
    /// Chunks that are new.
    pub stored_chunks: usize,
    /// Chunks that were there before.
    pub present_chunks: usize,
}

/// The state of the store.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CacheHealth {
    /// `ok`, `degraded` if some tier is not up, `off` if there is no store.
    pub status: String,
    /// Fastest first.
    pub tiers: Vec<TierReport>,
}

/// The state of a tier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TierReport {
    /// Its name: `ram` for memory, and what it was called, or its kind, for the others.
    pub tier: String,
    /// What it is made of: `ram`, `nvme`, `peer`, `redis`, `object`, `lm` or `plugin`.
    #[serde(default)]
    pub kind: String,
    /// `up`, `read_only` or `down`.
    pub state: String,
    /// Why it is not up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Chunks that are there; absent where the tier does not know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunks: Option<u64>,
    /// Bytes they take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// The most bytes they may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_bytes: Option<u64>,
    /// Further counts by name.
    #[serde(default)]
    pub details: BTreeMap<String, u64>,
    /// What the tier was asked since its start, by operation; empty where nothing counts that.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub operations: Vec<TierOperation>,
}

/// What a tier was asked of one operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TierOperation {
    /// `put`, `get`, `contains`, `delete` or `flush`.
    pub operation: String,
    /// Items by outcome, such as `hit`, `corrupt` or `skipped`; calls where items have none.
    pub outcomes: BTreeMap<String, u64>,
    /// Bytes that were stored or read.
    pub bytes: u64,
    /// Calls.
    pub calls: u64,
    /// What half of the calls took at most, in microseconds.
    pub p50_us: u64,
    /// What 99 of 100 calls took at most, in microseconds.
    pub p99_us: u64,
}

/// Counts of the store since its start, by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CacheStats {
    /// Tokens in a chunk.
    pub chunk_tokens: usize,
    /// Counts by name.
    pub counts: BTreeMap<String, u64>,
    /// The tiers.
    pub tiers: Vec<TierReport>,
    /// Names the memory of the store: workers that say the same have one store. Empty where it is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub store_id: String,
}

/// Has segments computed and kept, for prompts that will name them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SegmentsRequest {
    /// The segments, each a text or tokens; `reusable` means nothing here.
    pub segments: Vec<PromptPart>,
    /// Keeps them apart from those of requests with other salts or none; 1 to 1024 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
}

/// What became of segments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentsResponse {
    /// Segments that were computed.
    pub computed_segments: usize,
    /// Segments that were there.
    pub present_segments: usize,
    /// Segments that the model cannot compute, such as ones longer than its context.
    pub refused_segments: usize,
    /// Tokens of all.
    pub tokens: usize,
}
