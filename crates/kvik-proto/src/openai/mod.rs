//! The OpenAI-compatible API.
//!
//! Requests carry the fields that kvik honors, those of vLLM's extensions that it shares, and those
//! that it has to refuse; all others are ignored. Absent and `null` are the same.

mod chat;
mod completions;
mod error;
mod models;
mod sampling;
mod segments;
mod tokenize;

pub use chat::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatMessage, ChatRequest, ChatResponse,
    ChatTokenLogprob, ContentPart, MessageContent, TopLogprob,
};
pub use completions::{
    CachedTiers, CompletionChoice, CompletionLogprobs, CompletionRequest, CompletionResponse, Prompt,
    PromptTokensDetails, StreamOptions, Usage,
};
pub use error::{ErrorBody, ErrorDetail};
pub use models::{ModelCard, ModelList};
pub use sampling::{SamplingFields, Stop};
pub use segments::{BlendField, KvikFields, PromptPart};
pub use tokenize::{DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse};

#[cfg(test)]
mod tests;
