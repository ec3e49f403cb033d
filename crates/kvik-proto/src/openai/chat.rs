//! `/v1/chat/completions`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::completions::{StreamOptions, Usage};
use super::sampling::SamplingFields;
use super::segments::KvikFields;
use crate::worker::Sampling;

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// The role of its author.
    pub role: String,
    /// What is said.
    #[serde(default)]
    pub content: Option<MessageContent>,
    /// Calls of tools; not honored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Value>,
}

/// What is said: text, or parts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a string or a list of parts")]
pub enum MessageContent {
    /// Text.
    Text(String),
    /// Parts, of which those of type `text` are honored.
    Parts(Vec<ContentPart>),
}

/// A part of a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContentPart {
    /// `text`, or a kind that is not honored.
    #[serde(rename = "type")]
    pub kind: String,
    /// The text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Extension: whether its KV may come from another prompt. Default: false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reusable: bool,
}

/// Asks for answers to a conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatRequest {
    /// The model. Default: the one that is served.
    #[serde(default)]
    pub model: Option<String>,
    /// The conversation.
    pub messages: Vec<ChatMessage>,
    /// Most tokens of an output; wins over `max_tokens`, which is its older name. Default: what the
    /// context leaves.
    #[serde(default)]
    pub max_completion_tokens: Option<u32>,
    /// Whether the answer is a stream. Default: false.
    #[serde(default)]
    pub stream: Option<bool>,
    /// How the stream is told.
    #[serde(default)]
    pub stream_options: Option<StreamOptions>,
    /// Whether log probabilities are reported. Default: false.
    #[serde(default)]
    pub logprobs: Option<bool>,
    /// Number of most likely tokens reported with each token; needs `logprobs`. Default: 0.
    #[serde(default)]
    pub top_logprobs: Option<u32>,
    /// Changes of single logits; not honored.
    #[serde(default)]
    pub logit_bias: Option<Value>,
    /// Tools that may be called; not honored.
    #[serde(default)]
    pub tools: Option<Value>,
    /// Which tool has to be called; only `none` and `auto` are honored.
    #[serde(default)]
    pub tool_choice: Option<Value>,
    /// An older form of `tools`; not honored.
    #[serde(default)]
    pub functions: Option<Value>,
    /// The form of the answer; only the type `text` is honored.
    #[serde(default)]
    pub response_format: Option<Value>,
    /// The kinds of output; only `text` is honored.
    #[serde(default)]
    pub modalities: Option<Value>,
    /// Spoken output; not honored.
    #[serde(default)]
    pub audio: Option<Value>,
    /// The end user; a routing key.
    #[serde(default)]
    pub user: Option<String>,
    /// Extension: whether the prompt ends with the start of the answer. Default: true.
    #[serde(default)]
    pub add_generation_prompt: Option<bool>,
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

/// The answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatResponse {
    /// Unique.
    pub id: String,
    /// Always `chat.completion`.
    pub object: String,
    /// Unix time in seconds.
    pub created: u64,
    /// The model.
    pub model: String,
    /// What the answer depends on besides the request.
    #[serde(default)]
    pub system_fingerprint: Option<String>,
    /// The outputs.
    pub choices: Vec<ChatChoice>,
    /// Tokens used.
    pub usage: Usage,
}

/// An output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatChoice {
    /// Which one, from 0.
    pub index: u32,
    /// What is said.
    pub message: ChatMessage,
    /// Log probabilities, if asked for.
    #[serde(default)]
    pub logprobs: Option<ChatLogprobs>,
    /// `stop` or `length`.
    pub finish_reason: Option<String>,
    /// Extension: the tokens, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// A chunk of a stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatChunk {
    /// The same in all chunks of a stream.
    pub id: String,
    /// Always `chat.completion.chunk`.
    pub object: String,
    /// Unix time in seconds.
    pub created: u64,
    /// The model.
    pub model: String,
    /// What the answer depends on besides the request.
    #[serde(default)]
    pub system_fingerprint: Option<String>,
    /// What the outputs grew by.
    pub choices: Vec<ChatChunkChoice>,
    /// Tokens used; only in the last chunk, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// What an output grew by.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatChunkChoice {
    /// Which one, from 0.
    pub index: u32,
    /// What is new.
    pub delta: ChatDelta,
    /// Log probabilities, if asked for.
    #[serde(default)]
    pub logprobs: Option<ChatLogprobs>,
    /// `stop` or `length`; none while the output grows.
    #[serde(default)]
    pub finish_reason: Option<String>,
    /// Extension: the tokens, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// New parts of a message.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatDelta {
    /// The role of the author; in the first chunk of an output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// Text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
}

/// Log probabilities of the tokens of a choice.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatLogprobs {
    /// Token by token.
    pub content: Vec<ChatTokenLogprob>,
}

/// A token and the alternatives to it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatTokenLogprob {
    /// The token's text.
    pub token: String,
    /// Its log probability.
    pub logprob: f32,
    /// The text's bytes.
    pub bytes: Vec<u8>,
    /// The most likely tokens.
    pub top_logprobs: Vec<TopLogprob>,
}

/// One of the most likely tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TopLogprob {
    /// The token's text.
    pub token: String,
    /// Its log probability.
    pub logprob: f32,
    /// The text's bytes.
    pub bytes: Vec<u8>,
}

impl ChatMessage {
    /// A message that says `content`.
    pub fn text(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: Some(MessageContent::Text(content.into())), tool_calls: None }
    }
}

impl ChatRequest {
    /// How tokens are chosen, in the worker's own words. `max_tokens` is as given.
    pub fn sampling(&self) -> Sampling {
        let wants_logprobs = self.logprobs.unwrap_or(false);
        let sampling = self.sampling_fields.sampling();
        Sampling {
            logprobs: wants_logprobs.then(|| self.top_logprobs.unwrap_or(0)),
            max_tokens: self.max_completion_tokens.or(sampling.max_tokens),
            ..sampling
        }
    }
}
