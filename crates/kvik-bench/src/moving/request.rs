//! The requests of the bench.

use serde_json::{Value, json};

use super::fleet::MODEL;
use crate::stream::random_prompt;

/// A request for a stream.
#[derive(Debug, Clone)]
pub(super) struct Request {
    /// Chooses its prompt and, of sampled ones, its seed: equal numbers give equal texts.
    pub(super) number: u64,
    /// Tokens of its prompt.
    pub(super) prompt_tokens: usize,
    /// Tokens of its output.
    pub(super) output_tokens: usize,
    /// Whether tokens are drawn at random with a seed; greedy otherwise.
    pub(super) is_sampled: bool,
}

impl Request {
    /// Its body. KV is shared by requests with equal `salt` alone.
    pub(super) fn body(&self, seq_id: &str, salt: &str) -> Value {
        let mut body = json!({
            "model": MODEL,
            "prompt": random_prompt(self.number, self.prompt_tokens),
            "max_tokens": self.output_tokens,
            "ignore_eos": true,
            "temperature": 0,
            "stream": true,
            "seq_id": seq_id,
            "cache_salt": salt,
        });
        if self.is_sampled {
            body["temperature"] = json!(0.9);
            body["top_p"] = json!(0.95);
            body["seed"] = json!(self.number);
        }
        body
    }
}
