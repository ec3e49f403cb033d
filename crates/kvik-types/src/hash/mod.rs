//! Hash chains over token blocks, one family a file.
//!
//! Every engine names a block by a hash of its tokens and of the block before it, so the hash of a
//! block stands for the whole prefix that ends there. The families differ in the bytes they hash
//! and in the function; each file gives its format.
//!
//! All chains pass over the tokens once and reuse one buffer: after the first block, [`push_block`]
//! does not allocate.
//!
//! [`push_block`]: HashChain::push_block

mod cbor;
mod kvik;
mod llmd;
mod lmcache;
mod pickle;
mod sglang;
mod value;
mod vllm;

pub use kvik::KvikChain;
pub use llmd::{LlmdAlgorithm, LlmdChain, LlmdKey};
pub use lmcache::{LmcacheChain, LmcacheHash, LmcacheServerChain, LmcacheServerHash};
pub use sglang::{SglangChain, SglangHash};
pub use vllm::{ExtraKey, ExtraKeyForm, VLLM_DEFAULT_SEED, VllmAlgorithm, VllmChain, VllmHash, VllmSeed};

use crate::token::{BlockSize, TokenId};

/// A rolling hash over the token blocks of one sequence.
///
/// A chain holds the hash of the last block pushed; clone it to follow a branch.
pub trait HashChain {
    /// The name that the family gives to a block.
    type Hash: Copy + Eq;

    /// Returns the number of tokens by which consecutive blocks are apart.
    fn block_size(&self) -> BlockSize;

    /// Returns the number of tokens that the hash of one block reads, starting at its first token.
    ///
    /// Equal to the block size except where a family looks ahead into the next block.
    fn window_tokens(&self) -> usize {
        self.block_size().get()
    }

    /// Appends a block and returns its hash.
    ///
    /// The caller passes exactly [`window_tokens`](Self::window_tokens) tokens. The implementation
    /// MUST NOT panic on another number: it hashes what it gets, and the result is a name that no
    /// full block has.
    fn push_block(&mut self, tokens: &[TokenId]) -> Self::Hash;

    /// Goes back to the state before the first block and keeps the buffers.
    fn restart(&mut self);
}

/// Iterator over the hashes of full blocks; [`block_hashes`] builds it.
#[derive(Debug)]
pub struct BlockHashes<'a, C> {
    chain: &'a mut C,
    tokens: &'a [TokenId],
}

/// Returns an iterator over the hashes of the full blocks of `tokens`, in order.
///
/// The chain goes on from where it is, so a prompt can be hashed in pieces that are whole numbers
/// of blocks. Tokens after the last full block are not hashed.
pub fn block_hashes<'a, C: HashChain>(chain: &'a mut C, tokens: &'a [TokenId]) -> BlockHashes<'a, C> {
    BlockHashes { chain, tokens }
}

impl<C: HashChain> Iterator for BlockHashes<'_, C> {
    type Item = C::Hash;

    fn next(&mut self) -> Option<Self::Item> {
        let window = self.tokens.get(..self.chain.window_tokens())?;
        let hash = self.chain.push_block(window);
        self.tokens = self.tokens.get(self.chain.block_size().get()..).unwrap_or_default();
        Some(hash)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let window = self.chain.window_tokens();
        let n_blocks = match self.tokens.len().checked_sub(window) {
            Some(n_tokens_after) => n_tokens_after / self.chain.block_size().get() + 1,
            None => 0,
        };
        (n_blocks, Some(n_blocks))
    }
}

impl<C: HashChain> ExactSizeIterator for BlockHashes<'_, C> {}

/// Replaces the content of `buffer` by `prefix` and the tokens, each as four bytes given by `to_bytes`.
///
/// Inlined so that the buffer's length is set once and the loop over tokens becomes a vector copy.
#[inline]
fn fill_buffer(buffer: &mut Vec<u8>, prefix: &[u8], tokens: &[TokenId], to_bytes: fn(TokenId) -> [u8; 4]) {
    buffer.resize(prefix.len() + 4 * tokens.len(), 0);
    let (prefix_bytes, token_bytes) = buffer.split_at_mut(prefix.len());
    prefix_bytes.copy_from_slice(prefix);
    for (bytes, token) in token_bytes.chunks_exact_mut(4).zip(tokens) {
        bytes.copy_from_slice(&to_bytes(*token));
    }
}

/// Writes bytes as lower case hexadecimal digits.
fn write_hex(bytes: &[u8], formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
    bytes.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
}
