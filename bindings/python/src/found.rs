//! What a lookup found.

use kvik_node::OpenChain;
use pyo3::prelude::*;

/// How much of a sequence the store has.
#[pyclass(frozen, get_all, module = "kvik")]
#[derive(Debug, Clone)]
pub(crate) struct Found {
    /// Chunks, from the first on.
    n_chunks: usize,
    /// Their tokens.
    pub(crate) n_tokens: usize,
    /// The first of these tokens, which are in memory.
    n_memory_tokens: usize,
    /// The slowest tier that has one of them, such as `ram` or `nvme`.
    slowest_tier: &'static str,
}

impl Found {
    pub(crate) fn nothing() -> Self {
        Self { n_chunks: 0, n_tokens: 0, n_memory_tokens: 0, slowest_tier: "ram" }
    }

    /// What was found of a chain, without a tail: jobs move whole chunks.
    pub(crate) fn of(opened: &OpenChain) -> Self {
        let chunk_tokens = opened.chain().space().chunk_tokens();
        let n_chunks = opened.n_found_tokens() / chunk_tokens;
        Self {
            n_chunks,
            n_tokens: n_chunks * chunk_tokens,
            n_memory_tokens: opened.n_memory_tokens() / chunk_tokens * chunk_tokens,
            slowest_tier: opened.slowest_tier().name(),
        }
    }
}
