//! A prompt as the parts of a worker hand it on.

use std::ops::Range;

use kvik_types::{CacheSalt, TokenId};

/// Tokens, and what keeps their KV apart from that of other requests with the same ones.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) salt: Option<CacheSalt>,
    /// Where KV of other prompts may be used.
    pub(crate) segments: Vec<Range<usize>>,
}
