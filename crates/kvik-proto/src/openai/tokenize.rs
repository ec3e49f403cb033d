//! `/tokenize` and `/detokenize`, as vLLM has them.

use serde::{Deserialize, Serialize};

use super::chat::ChatMessage;

/// Asks for the tokens of a text or a conversation; exactly one of the two.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TokenizeRequest {
    /// The model. Default: the one that is served.
    pub model: Option<String>,
    /// A text.
    pub prompt: Option<String>,
    /// A conversation.
    pub messages: Option<Vec<ChatMessage>>,
    /// Whether the special tokens are added that the tokenizer puts around a text. Default: true for
    /// a text, false for a conversation, whose template writes them.
    pub add_special_tokens: Option<bool>,
    /// Whether a conversation ends with the start of the answer. Default: true.
    pub add_generation_prompt: Option<bool>,
}

/// The tokens of a text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizeResponse {
    /// How many.
    pub count: usize,
    /// Longest sequence, prompt and output together.
    pub max_model_len: usize,
    /// The tokens.
    pub tokens: Vec<u32>,
}

/// Asks for the text of tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DetokenizeRequest {
    /// The model. Default: the one that is served.
    #[serde(default)]
    pub model: Option<String>,
    /// The tokens.
    pub tokens: Vec<u32>,
}

/// The text of tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DetokenizeResponse {
    /// The text.
    pub prompt: String,
}
