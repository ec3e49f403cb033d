//! The worker's own API, beside the OpenAI-compatible one.
//!
//! | call | body | answer |
//! |---|---|---|
//! | `POST /inference/init` | [`InitRequest`] | [`InitResponse`] after the prompt is computed |
//! | `POST /inference/step` | [`StepRequest`] | [`StepResponse`] |
//! | `POST /inference/generate` | [`GenerateRequest`] | server-sent [`GenerateEvent`]s |
//! | `POST /inference/finish` | [`FinishRequest`] | [`FinishResponse`] |
//! | `POST /kv/put?seq_id=..&layer=..&mode=append\|replace` | safetensors: `k`, `v`, `token_ids` | [`KvPutResponse`] |
//! | `GET /kv/get?seq_id=..&layer=..` | none | safetensors: `k`, `v`, `token_ids` |
//! | `GET /kv/stats` | none | [`KvStats`] |
//! | `GET /kv/blocks?group=..&after=..&limit=..` | none | [`KvBlocksPage`] |
//! | `GET /kv/events?epoch=..&from=..` | none | an endless [`kv_stream`](crate::kv_stream) |
//! | `POST /drain` | none, or [`DrainRequest`](crate::moves::DrainRequest) | 202, or [`DrainReport`](crate::moves::DrainReport)s |
//! | `/sequences/...` | | see [`moves`](crate::moves) |
//!
//! `k` and `v` are `[seq_len, kv_heads, head_dim]` in the worker's KV dtype.

use serde::{Deserialize, Serialize};

use crate::kv_stream::{KvKey, KvTier};
use crate::openai::{KvikFields, SamplingFields};

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The role of its author.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// What a sequence starts from; exactly one of `prompt`, `token_ids` and `messages`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptInput {
    /// Text; special tokens are added as the tokenizer does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// Tokens, taken as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// A conversation, rendered by the model's chat template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub messages: Option<Vec<Message>>,
    /// Keeps the KV apart from that of requests with other salts or none; 1 to 1024 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
    /// Parts of the prompt whose KV may be used at any place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kvik: Option<KvikFields>,
}

/// How tokens are chosen and when an output ends; absent fields have the engine's defaults.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sampling {
    /// See the engine's `SamplingParams`; 0 takes the most likely token.
    pub temperature: Option<f32>,
    /// Most likely tokens considered.
    pub top_k: Option<u32>,
    /// Probability mass considered.
    pub top_p: Option<f32>,
    /// Lowest probability relative to the most likely token.
    pub min_p: Option<f32>,
    /// Penalty on tokens of prompt and output.
    pub repetition_penalty: Option<f32>,
    /// Penalty on tokens of the output.
    pub presence_penalty: Option<f32>,
    /// Penalty on tokens of the output for each occurrence.
    pub frequency_penalty: Option<f32>,
    /// Fixes the random choices.
    pub seed: Option<u64>,
    /// Texts that end the output.
    pub stop: Option<Vec<String>>,
    /// Tokens that end the output.
    pub stop_token_ids: Option<Vec<u32>>,
    /// Whether end tokens are ordinary ones.
    pub ignore_eos: Option<bool>,
    /// Alternatives reported with each token.
    pub logprobs: Option<u32>,
    /// Number of outputs; only `/inference/generate` takes more than one.
    pub n: Option<u32>,
    /// Most tokens of an output.
    pub max_tokens: Option<u32>,
}

/// How tokens are chosen, as a request says it: inside of `sampling`, or field by field beside it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SamplingInput {
    /// All fields.
    #[serde(default)]
    pub sampling: Sampling,
    /// As that of `sampling`.
    #[serde(default)]
    pub logprobs: Option<u32>,
    /// As those of `sampling`.
    #[serde(flatten)]
    pub fields: SamplingFields,
}

/// A field that a request has inside of `sampling` and beside it, with different values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("`{field}` and `sampling.{field}` are given with different values; allowed: one of them")]
pub struct SamplingConflict {
    /// The field.
    pub field: &'static str,
}

/// Starts a sequence that is stepped by its client.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InitRequest {
    /// Names the sequence; a resident one of this name whose tokens start the prompt is continued.
    pub seq_id: String,
    /// What it starts from.
    #[serde(flatten)]
    pub input: PromptInput,
    /// How tokens are chosen.
    #[serde(flatten)]
    pub sampling: SamplingInput,
}

/// A sequence is ready to be stepped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InitResponse {
    /// The sequence.
    pub seq_id: String,
    /// Always `ready`.
    pub status: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, tokens whose KV was there already.
    pub cached_tokens: usize,
    /// The output so far: its first token.
    pub tokens_so_far: Vec<u32>,
    /// Text of the output so far, as far as it is final.
    pub text: String,
    /// Whether the output has ended.
    pub finished: bool,
    /// Why, if it has.
    pub finish_reason: Option<String>,
}

/// Grants decode steps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepRequest {
    /// The sequence.
    pub seq_id: String,
    /// Tokens to decode. Default: 1.
    #[serde(default = "one_step")]
    pub n: u32,
    /// Number of tokens of the output before this step; a step that was already made is answered
    /// with the same tokens again. Default: the current number.
    #[serde(default)]
    pub step_index: Option<u64>,
}

/// The tokens of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepResponse {
    /// The sequence.
    pub seq_id: String,
    /// Number of tokens of the output before the first one here.
    pub step_index: u64,
    /// The token of a step that asks for one; absent where the output has ended before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<u32>,
    /// The tokens; fewer than asked for where the output ended.
    pub tokens: Vec<u32>,
    /// Text that became final.
    pub text: String,
    /// Whether the output has ended.
    pub finished: bool,
    /// Why, if it has.
    pub finish_reason: Option<String>,
}

/// Generates an output as a stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequest {
    /// Names the sequence, for continuation; without it nothing stays resident under a name.
    #[serde(default)]
    pub seq_id: Option<String>,
    /// What it starts from.
    #[serde(flatten)]
    pub input: PromptInput,
    /// How tokens are chosen.
    #[serde(flatten)]
    pub sampling: SamplingInput,
}

/// A piece of a generated stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum GenerateEvent {
    /// The output grew.
    Token {
        /// Which output, from 0.
        choice: u32,
        /// The token.
        token: u32,
        /// Text that became final.
        text: String,
    },
    /// An output ended.
    Finished {
        /// Which output, from 0.
        choice: u32,
        /// Text that was held back.
        text: String,
        /// `stop` or `length`.
        finish_reason: String,
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Of these, tokens whose KV was there already.
        cached_tokens: usize,
        /// Tokens of the output.
        completion_tokens: usize,
    },
    /// The stream cannot go on; its last event.
    Error {
        /// What happened.
        message: String,
    },
}

/// Ends a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FinishRequest {
    /// The sequence.
    pub seq_id: String,
    /// Whether its KV may be forgotten at once instead of staying resident. Default: false.
    #[serde(default)]
    pub forget: bool,
}

/// A sequence has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FinishResponse {
    /// The sequence.
    pub seq_id: String,
    /// Tokens, prompt and output, whose KV stays resident.
    pub resident_tokens: usize,
}

/// KV of a sequence was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvPutResponse {
    /// The sequence.
    pub seq_id: String,
    /// Tokens of this layer.
    pub seq_len: usize,
    /// Whether every layer has this many tokens, so that the sequence can be continued.
    pub is_complete: bool,
}

/// The state of a worker's KV.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KvStats {
    /// Tokens in a block.
    pub block_tokens: usize,
    /// Blocks that the engine has the memory of.
    pub blocks: usize,
    /// The most blocks that it could have: more than `blocks` where memory is shared with others.
    pub limit_blocks: usize,
    /// Blocks without a holder.
    pub free_blocks: usize,
    /// Blocks findable by their hash, held or not.
    pub registered_blocks: usize,
    /// Registered blocks whose place was taken, since the start.
    pub evicted_blocks: u64,
    /// Sequences in the batch.
    pub running_sequences: usize,
    /// Sequences that wait for admission.
    pub waiting_sequences: usize,
    /// Ended sequences that are still resident.
    pub resident_sequences: usize,
    /// Bytes of KV of one token.
    pub bytes_per_token: usize,
    /// Type of a KV element.
    pub dtype: String,
}

/// Some of the blocks that a worker holds now, in the order of their keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvBlocksPage {
    /// The worker's epoch.
    pub epoch: u64,
    /// The group that was asked for.
    pub group: u32,
    /// Its blocks behind the key that was asked for, as many as the limit allows.
    pub blocks: Vec<HeldBlock>,
    /// Whether there are more behind the last of them.
    pub has_more: bool,
}

/// A block that a worker holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldBlock {
    /// The block.
    pub key: KvKey,
    /// Where it is, fastest first.
    pub tiers: Vec<KvTier>,
}

impl SamplingInput {
    /// The fields from both places.
    ///
    /// # Errors
    /// If a field has two values.
    pub fn merge(self) -> Result<Sampling, SamplingConflict> {
        let inside = self.sampling;
        let beside = Sampling { logprobs: self.logprobs, ..self.fields.sampling() };
        Ok(Sampling {
            temperature: either("temperature", inside.temperature, beside.temperature)?,
            top_k: either("top_k", inside.top_k, beside.top_k)?,
            top_p: either("top_p", inside.top_p, beside.top_p)?,
            min_p: either("min_p", inside.min_p, beside.min_p)?,
            repetition_penalty: either(
                "repetition_penalty",
                inside.repetition_penalty,
                beside.repetition_penalty,
            )?,
            presence_penalty: either("presence_penalty", inside.presence_penalty, beside.presence_penalty)?,
            frequency_penalty: either(
                "frequency_penalty",
                inside.frequency_penalty,
                beside.frequency_penalty,
            )?,
            seed: either("seed", inside.seed, beside.seed)?,
            stop: either("stop", inside.stop, beside.stop)?,
            stop_token_ids: either("stop_token_ids", inside.stop_token_ids, beside.stop_token_ids)?,
            ignore_eos: either("ignore_eos", inside.ignore_eos, beside.ignore_eos)?,
            logprobs: either("logprobs", inside.logprobs, beside.logprobs)?,
            n: either("n", inside.n, beside.n)?,
            max_tokens: either("max_tokens", inside.max_tokens, beside.max_tokens)?,
        })
    }
}

fn either<T: PartialEq>(
    field: &'static str,
    inside: Option<T>,
    beside: Option<T>,
) -> Result<Option<T>, SamplingConflict> {
    match (&inside, &beside) {
        (Some(one), Some(other)) if one != other => Err(SamplingConflict { field }),
        _ => Ok(inside.or(beside)),
    }
}

fn one_step() -> u32 {
    1
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn merged(body: Value) -> Result<Sampling, SamplingConflict> {
        serde_json::from_value::<GenerateRequest>(body).unwrap().sampling.merge()
    }

    #[test]
    fn sampling_is_read_inside_and_beside_its_object() {
        let expected = Sampling { max_tokens: Some(3), temperature: Some(0.5), ..Sampling::default() };
        for body in [
            json!({"prompt": "a", "max_tokens": 3, "temperature": 0.5}),
            json!({"prompt": "a", "sampling": {"max_tokens": 3, "temperature": 0.5}}),
            json!({"prompt": "a", "max_tokens": 3, "sampling": {"temperature": 0.5}}),
            json!({"prompt": "a", "max_tokens": 3, "sampling": {"max_tokens": 3, "temperature": 0.5}}),
            json!({"prompt": "a", "max_tokens": null, "temperature": 0.5, "sampling": {"max_tokens": 3}}),
        ] {
            assert_eq!(merged(body.clone()), Ok(expected.clone()), "{body}");
        }
    }

    #[test]
    fn every_field_that_has_two_values_is_named() {
        let values = json!({
            "temperature": [0.1, 0.2], "top_k": [1, 2], "top_p": [0.1, 0.2], "min_p": [0.1, 0.2],
            "repetition_penalty": [1.1, 1.2], "presence_penalty": [0.1, 0.2], "frequency_penalty": [0.1, 0.2],
            "seed": [1, 2], "stop": [["a"], ["b"]], "stop_token_ids": [[1], [2]], "ignore_eos": [true, false],
            "logprobs": [1, 2], "n": [1, 2], "max_tokens": [1, 2],
        });
        let all = serde_json::to_value(Sampling::default()).unwrap();
        assert_eq!(all.as_object().unwrap().len(), values.as_object().unwrap().len());
        for (field, pair) in values.as_object().unwrap() {
            let mut body = json!({"prompt": "a", "sampling": {}});
            body["sampling"][field] = pair[0].clone();
            body[field] = pair[0].clone();
            assert!(merged(body.clone()).is_ok(), "{body}");
            body[field] = pair[1].clone();
            assert_eq!(merged(body).unwrap_err().field, field);
        }
    }
}
