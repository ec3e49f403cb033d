//! The hashes of a sequence's blocks.

use kvik_types::hash::{HashChain as _, KvikChain};
use kvik_types::{BlockHash, TokenId};

use crate::paging::BLOCK_TOKENS;

/// The hashes of the full blocks of a sequence from its start. Each block is hashed once, when it is first
/// asked for.
#[derive(Debug, Clone)]
pub(super) struct BlockHashes {
    hashes: Vec<BlockHash>,
    /// Stands after the last of them.
    chain: KvikChain,
}

impl BlockHashes {
    /// No hashes; `chain` stands before the first block.
    pub(super) fn new(chain: KvikChain) -> Self {
        Self { hashes: Vec::new(), chain }
    }

    /// Hashes the first `n_blocks` blocks of `tokens`, as far as that was not done before.
    ///
    /// All calls MUST be with the same tokens, to which more may have been appended.
    pub(super) fn extend_to(&mut self, n_blocks: usize, tokens: &[TokenId]) {
        let n_known = self.hashes.len();
        for block in tokens.as_chunks::<BLOCK_TOKENS>().0.iter().take(n_blocks).skip(n_known) {
            #[cfg(test)]
            N_HASHED.set(N_HASHED.get() + 1);
            self.hashes.push(self.chain.push_block(block));
        }
    }

    pub(super) fn as_slice(&self) -> &[BlockHash] {
        &self.hashes
    }
}

#[cfg(test)]
thread_local! {
    /// Blocks hashed on this thread.
    pub(super) static N_HASHED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}
