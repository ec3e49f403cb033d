//! The requests of the bench.

use serde_json::{Value, json};

use super::fleet::MODEL;

/// Tokens that prompts are made of: neither special ones nor single bytes.
const PROMPT_TOKENS: std::ops::Range<u64> = 300..4000;

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
            "prompt": self.prompt(),
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

    /// Random tokens, the same on every machine (`SplitMix64`).
    fn prompt(&self) -> Vec<u64> {
        let mut state = self.number.wrapping_mul(0x2545_f491_4f6c_dd1d);
        let mut next_token = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = state;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            PROMPT_TOKENS.start + (mixed ^ (mixed >> 31)) % (PROMPT_TOKENS.end - PROMPT_TOKENS.start)
        };
        (0..self.prompt_tokens).map(|_| next_token()).collect()
    }
}
