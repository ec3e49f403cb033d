//! Sequences of tokens as chains of chunks.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvik_tier::{ChunkKey, NamespaceId};
use kvik_types::hash::{HashChain, KvikChain};
use kvik_types::{BlockHash, BlockSize, CacheSalt, TokenId};

use crate::format::ChunkFormat;
use crate::policy::{Block, BlockId};

/// Tokens before a chunk after which attention to them costs as much as everything else in the model; it
/// makes late chunks worth more to a policy. About right for models of 7 to 70 billion parameters.
const ATTENTION_TOKENS: f64 = 32_768.0;

/// A namespace with a format: where chains are made.
#[derive(Debug, Clone)]
pub struct Space {
    shared: Arc<SpaceShared>,
}

/// The chunks of one sequence, each the parent of the next.
///
/// The tokens are hashed once, when the chain is made; everything else works on the chain. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Chain {
    shared: Arc<ChainShared>,
}

/// A namespace as the store knows it.
#[derive(Debug)]
pub(crate) struct NamespaceState {
    pub(crate) id: NamespaceId,
    /// Its place in the list of namespaces.
    pub(crate) idx: u32,
    /// Counts clears. What began under an earlier count is not published.
    generation: AtomicU64,
}

#[derive(Debug)]
struct SpaceShared {
    namespace: Arc<NamespaceState>,
    format: ChunkFormat,
    chunk_tokens: BlockSize,
    stores_tails: bool,
    token_us: f64,
    /// The parent of the first chunk: namespace, format and chunk length.
    seed: BlockHash,
}

#[derive(Debug)]
struct ChainShared {
    space: Space,
    /// The parent of its first chunk.
    root: BlockHash,
    hashes: Vec<BlockHash>,
    blocks: Vec<Block>,
    n_tokens: usize,
}

// === impl NamespaceState ===

impl NamespaceState {
    pub(crate) fn new(id: NamespaceId, idx: u32) -> Self {
        Self { id, idx, generation: AtomicU64::new(0) }
    }

    /// Acquire and release, so that who reads a new count also sees what was cleared before it.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    pub(crate) fn begin_generation(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }
}

// === impl Space ===

impl Space {
    pub(crate) fn new(
        namespace: Arc<NamespaceState>,
        format: ChunkFormat,
        chunk_tokens: BlockSize,
        stores_tails: bool,
        prefill_tokens_per_s: f64,
        seed: BlockHash,
    ) -> Self {
        let token_us = 1e6 / prefill_tokens_per_s;
        Self {
            shared: Arc::new(SpaceShared { namespace, format, chunk_tokens, stores_tails, token_us, seed }),
        }
    }

    /// The format of the chunks in it.
    pub fn format(&self) -> &ChunkFormat {
        &self.shared.format
    }

    /// Tokens of a full chunk.
    pub fn chunk_tokens(&self) -> usize {
        self.shared.chunk_tokens.get()
    }

    /// The namespace in the keys of its chunks.
    pub fn namespace_id(&self) -> NamespaceId {
        self.shared.namespace.id
    }

    /// The parent of the first chunk of every chain without a salt in it.
    pub fn root(&self) -> BlockHash {
        self.shared.seed
    }

    pub(crate) fn namespace_idx(&self) -> u32 {
        self.shared.namespace.idx
    }

    /// Hashes a sequence that has no salt; see [`Self::salted_chain`].
    pub fn chain(&self, tokens: &[TokenId]) -> Chain {
        self.salted_chain(tokens, None)
    }

    /// Hashes a sequence. Chains with different salts, or with and without one, share no chunk.
    ///
    /// Tokens after the last full chunk are a tail where the store keeps tails, as many as whole token
    /// blocks hold, and belong to no chunk otherwise.
    pub fn salted_chain(&self, tokens: &[TokenId], salt: Option<&CacheSalt>) -> Chain {
        self.chain_after(self.shared.seed.salted(salt), &[], tokens)
    }

    /// The chain of `tokens` that begins at `root`, of whose first full chunks the hashes are known.
    fn chain_after(&self, root: BlockHash, known: &[BlockHash], tokens: &[TokenId]) -> Chain {
        let chunk_tokens = self.chunk_tokens();
        let block_tokens = self.format().block_tokens.get();
        let n_full = tokens.len() / chunk_tokens;
        let n_tail_tokens = if self.shared.stores_tails {
            (tokens.len() % chunk_tokens) / block_tokens * block_tokens
        } else {
            0
        };
        let n_tokens = n_full * chunk_tokens + n_tail_tokens;
        let n_chunks = n_tokens.div_ceil(chunk_tokens);
        let mut hashes = Vec::with_capacity(n_chunks);
        let mut blocks = Vec::with_capacity(n_chunks);
        let mut hasher = KvikChain::after(known.last().copied().unwrap_or(root), self.shared.chunk_tokens);
        for (chunk_idx, chunk) in tokens[..n_tokens].chunks(chunk_tokens).enumerate() {
            let hash = known.get(chunk_idx).copied().unwrap_or_else(|| hasher.push_block(chunk));
            blocks.push(self.block(hash, chunk_idx, chunk.len()));
            hashes.push(hash);
        }
        Chain { shared: Arc::new(ChainShared { space: self.clone(), root, hashes, blocks, n_tokens }) }
    }

    fn block(&self, hash: BlockHash, chunk_idx: usize, n_tokens: usize) -> Block {
        let format = self.format();
        let first_token = (chunk_idx * self.chunk_tokens()) as f64;
        let recompute_us = n_tokens as f64 * self.shared.token_us * (1.0 + first_token / ATTENTION_TOKENS);
        Block {
            id: block_id(hash),
            bytes: format.payload_bytes(n_tokens) as u64 * u64::from(format.n_ranks),
            recompute_us: recompute_us as u64,
            is_full: n_tokens == self.chunk_tokens(),
        }
    }
}

/// The name of a chunk in policies and in the directory.
pub(crate) fn block_id(hash: BlockHash) -> BlockId {
    BlockId((hash.to_u128() >> 64) as u64)
}

// === impl Chain ===

impl Chain {
    /// The chain of `tokens`, which begin with the tokens of this one, and have the same salt.
    ///
    /// Full chunks that this chain has are not hashed again.
    #[must_use]
    pub fn extended(&self, tokens: &[TokenId]) -> Self {
        let n_full =
            (self.n_tokens() / self.space().chunk_tokens()).min(tokens.len() / self.space().chunk_tokens());
        self.space().chain_after(self.shared.root, &self.shared.hashes[..n_full], tokens)
    }

    /// Where the chain was made.
    pub fn space(&self) -> &Space {
        &self.shared.space
    }

    /// Number of its chunks.
    pub fn n_chunks(&self) -> usize {
        self.shared.hashes.len()
    }

    /// Tokens of all its chunks.
    pub fn n_tokens(&self) -> usize {
        self.shared.n_tokens
    }

    /// The tokens of a chunk; empty behind the end.
    pub fn tokens_of(&self, chunk_idx: usize) -> Range<usize> {
        let chunk_tokens = self.space().chunk_tokens();
        let end_of = |n_chunks: usize| n_chunks.saturating_mul(chunk_tokens).min(self.n_tokens());
        end_of(chunk_idx)..end_of(chunk_idx.saturating_add(1))
    }

    /// The name of what a rank holds of a chunk; `None` behind the end.
    pub fn key(&self, chunk_idx: usize, rank: u16) -> Option<ChunkKey> {
        let is_inside = chunk_idx < self.n_chunks() && rank < self.space().format().n_ranks;
        is_inside.then(|| self.key_of(chunk_idx, rank))
    }

    /// Bytes that one rank holds of a chunk.
    pub fn payload_bytes(&self, chunk_idx: usize) -> usize {
        self.space().format().payload_bytes(self.tokens_of(chunk_idx).len())
    }

    /// Bytes of one layer of what one rank holds of a chunk.
    pub fn section_bytes(&self, chunk_idx: usize) -> usize {
        self.space().format().section_bytes(self.tokens_of(chunk_idx).len())
    }

    /// The caller knows that chunk and rank exist.
    pub(crate) fn key_of(&self, chunk_idx: usize, rank: u16) -> ChunkKey {
        ChunkKey { namespace: self.space().namespace_id(), chunk: self.shared.hashes[chunk_idx], rank }
    }

    pub(crate) fn hash(&self, chunk_idx: usize) -> BlockHash {
        self.shared.hashes[chunk_idx]
    }

    pub(crate) fn id(&self, chunk_idx: usize) -> BlockId {
        self.shared.blocks[chunk_idx].id
    }

    pub(crate) fn blocks(&self) -> &[Block] {
        &self.shared.blocks
    }

    pub(crate) fn namespace(&self) -> &Arc<NamespaceState> {
        &self.space().shared.namespace
    }

    pub(crate) fn n_ranks(&self) -> u16 {
        self.space().format().n_ranks
    }

    /// Tokens of the chunks `range`.
    pub(crate) fn tokens_between(&self, range: Range<usize>) -> usize {
        self.tokens_of(range.end).start.saturating_sub(self.tokens_of(range.start).start)
    }
}
