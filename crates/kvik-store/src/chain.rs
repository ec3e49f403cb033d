//! Sequences of tokens as chains of chunks.
//!
//! A chain has the names and the digests that its space gives to its tokens, salt and extra keys, whether it was hashed
//! here, went on from another chain, or came by its names from another process.

#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use kvik_tier::{ChunkKey, TokenDigest};
use kvik_types::hash::{HashChain, KvikChain};
use kvik_types::{BlockHash, CacheSalt, TokenId};
use parking_lot::{Mutex, MutexGuard};

use crate::digest::{DigestChain, name_of_engine_key, salted_digest};
use crate::extras::{ExtraKey, ExtraKeys};
use crate::namespaces::NamespaceState;
use crate::policy::{Block, BlockId};
use crate::space::{Space, SpaceShared};

/// Tokens before a chunk after which attention to them costs as much as everything else in the model; it
/// makes late chunks worth more to a policy. About right for models of 7 to 70 billion parameters.
const ATTENTION_TOKENS: f64 = 32_768.0;

/// The chunks of one sequence, each the parent of the next.
///
/// The names of the chunks are computed once, when the chain is made, and their digests once, when a read or write
/// first needs them: a lookup needs none, and a read those of the chunks that are there. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Chain {
    shared: Arc<ChainShared>,
}

/// The names of a chain whose tokens and digests are not known here: enough to look up, not to read or write.
#[derive(Debug, Clone)]
pub struct NamedChain(Chain);

#[derive(Debug)]
struct ChainShared {
    space: Space,
    /// What its first chunk goes on from.
    root: Root,
    /// The tokens of all chunks; empty where only names are known.
    tokens: Vec<TokenId>,
    /// What else the KV depends on.
    extras: ExtraKeys,
    n_tokens: usize,
    /// The names of all chunks.
    names: Vec<BlockHash>,
    /// The digests of the first chunks, as many as were asked for; of all where the tokens are not known.
    digests: Mutex<Vec<TokenDigest>>,
    blocks: Vec<Block>,
}

/// What the first chunk of a chain goes on from.
#[derive(Debug, Clone, Copy)]
struct Root {
    name: BlockHash,
    digest: TokenDigest,
}

// === impl Space ===

impl Space {
    /// Hashes a sequence that has no salt; see [`Self::salted_chain`].
    pub fn chain(&self, tokens: &[TokenId]) -> Chain {
        self.salted_chain(tokens, None)
    }

    /// Hashes a sequence. Chains with different salts, or with and without one, share no chunk.
    ///
    /// Tokens after the last full chunk are a tail where the store keeps tails, as many as whole token
    /// blocks hold, and belong to no chunk otherwise.
    pub fn salted_chain(&self, tokens: &[TokenId], salt: Option<&CacheSalt>) -> Chain {
        self.chain_with_extras(tokens, salt, Vec::new())
    }

    /// Hashes a sequence whose KV depends on more than its tokens, such as images. Chains with different extra keys share
    /// the chunks before the first that differs, and no others; otherwise as [`Self::salted_chain`].
    pub fn chain_with_extras(
        &self,
        tokens: &[TokenId],
        salt: Option<&CacheSalt>,
        extras: Vec<ExtraKey>,
    ) -> Chain {
        let SpaceShared { seed, root_digest, digest_key, .. } = &*self.shared;
        let digest = salted_digest(digest_key.as_ref(), *root_digest, salt);
        let root = Root { name: seed.salted(salt), digest };
        self.chain_after(root, &[], Vec::new(), tokens, ExtraKeys::new(extras))
    }

    /// The full chunks that an engine has keys for, one key a chunk, such as hashes that commit to all tokens before.
    ///
    /// A chunk is found by its key alone, whatever other chunks it is asked for with: what a chain begins with does not
    /// matter. Chunks of different keys never have the same name and digest, nor have chunks of tokens. `None` where a
    /// key is there twice, because a chunk is no parent of itself.
    pub fn chain_of_keys<'a>(&self, keys: impl IntoIterator<Item = &'a [u8]>) -> Option<Chain> {
        let SpaceShared { seed, root_digest, digest_key, .. } = &*self.shared;
        let (names, digests): (Vec<BlockHash>, Vec<TokenDigest>) =
            keys.into_iter().map(|key| name_of_engine_key(digest_key.as_ref(), *root_digest, key)).unzip();
        let distinct: HashSet<BlockHash> = names.iter().copied().collect();
        if distinct.len() < names.len() {
            return None;
        }
        let root = Root { name: *seed, digest: *root_digest };
        let n_tokens = names.len() * self.chunk_tokens();
        Some(self.chain_with(root, Default::default(), n_tokens, names, digests))
    }

    /// The chain of `tokens` that begins at `root`, of whose first full chunks these names and digests are known.
    fn chain_after(
        &self,
        root: Root,
        known_names: &[BlockHash],
        known_digests: Vec<TokenDigest>,
        tokens: &[TokenId],
        extras: ExtraKeys,
    ) -> Chain {
        let chunk_tokens = self.chunk_tokens();
        let block_tokens = self.format().block_tokens.get();
        let n_full = tokens.len() / chunk_tokens;
        let n_tail_tokens = if self.shared.stores_tails {
            (tokens.len() % chunk_tokens) / block_tokens * block_tokens
        } else {
            0
        };
        let n_tokens = n_full * chunk_tokens + n_tail_tokens;
        let tokens = &tokens[..n_tokens];
        let last = known_names.last().copied().unwrap_or(root.name);
        let mut hasher = KvikChain::after(last, self.shared.chunk_tokens);
        let mut names = Vec::with_capacity(n_tokens.div_ceil(chunk_tokens));
        names.extend_from_slice(known_names);
        let new_chunks = tokens.chunks(chunk_tokens).enumerate().skip(known_names.len());
        names.extend(new_chunks.map(|(idx, chunk)| {
            let name = hasher.push_block(chunk);
            let words = extras.words_of(idx * chunk_tokens, chunk.len());
            words.map_or(name, |words| hasher.push_block(&words))
        }));
        self.chain_with(root, (tokens.to_vec(), extras), n_tokens, names, known_digests)
    }

    /// The chain whose chunks have these names, of tokens that are not known here: what a client in another process
    /// sends of a chain of its own. `None` where so many tokens do not have so many chunks.
    pub fn named_chain(&self, names: Vec<BlockHash>, n_tokens: usize) -> Option<NamedChain> {
        let n_tail_tokens = n_tokens % self.chunk_tokens();
        let has_tail = n_tail_tokens > 0;
        let is_tail_allowed =
            self.shared.stores_tails && n_tail_tokens.is_multiple_of(self.format().block_tokens.get());
        if n_tokens.div_ceil(self.chunk_tokens()) != names.len() || (has_tail && !is_tail_allowed) {
            return None;
        }
        let root = Root { name: self.shared.seed, digest: self.shared.root_digest };
        Some(NamedChain(self.chain_with(root, Default::default(), n_tokens, names, Vec::new())))
    }

    fn chain_with(
        &self,
        root: Root,
        (tokens, extras): (Vec<TokenId>, ExtraKeys),
        n_tokens: usize,
        names: Vec<BlockHash>,
        digests: Vec<TokenDigest>,
    ) -> Chain {
        let chunk_tokens = self.chunk_tokens();
        let block = |(idx, name): (usize, &BlockHash)| {
            self.block(*name, idx, (n_tokens - idx * chunk_tokens).min(chunk_tokens))
        };
        let blocks = names.iter().enumerate().map(block).collect();
        let digests = Mutex::new(digests);
        let shared =
            ChainShared { space: self.clone(), root, tokens, extras, n_tokens, names, digests, blocks };
        Chain { shared: Arc::new(shared) }
    }

    fn block(&self, hash: BlockHash, chunk_idx: usize, n_tokens: usize) -> Block {
        let format = self.format();
        Block {
            id: block_id(hash),
            bytes: format.payload_bytes(n_tokens) as u64 * u64::from(format.n_ranks),
            recompute_us: recompute_us(chunk_idx * self.chunk_tokens(), n_tokens, self.shared.token_us),
            is_full: n_tokens == self.chunk_tokens(),
        }
    }
}

/// The name of a chunk in policies and in the directory.
pub(crate) fn block_id(hash: BlockHash) -> BlockId {
    BlockId((hash.to_u128() >> 64) as u64)
}

/// Time to compute `n_tokens` tokens behind the first `n_before` of a sequence.
pub(crate) fn recompute_us(n_before: usize, n_tokens: usize, token_us: f64) -> u64 {
    (n_tokens as f64 * token_us * (1.0 + n_before as f64 / ATTENTION_TOKENS)) as u64
}

// === impl Chain ===

impl Chain {
    /// Where the chain was made.
    pub fn space(&self) -> &Space {
        &self.shared.space
    }

    /// Number of its chunks.
    pub fn n_chunks(&self) -> usize {
        self.shared.names.len()
    }

    /// Tokens of all its chunks.
    pub fn n_tokens(&self) -> usize {
        self.shared.n_tokens
    }

    /// The name of each chunk, for [`Space::named_chain`] in another process.
    pub fn names(&self) -> &[BlockHash] {
        &self.shared.names
    }

    /// What proves each of the first `n_chunks` chunks, for [`NamedChain::proven`] in another process; of all where it
    /// has fewer.
    pub fn digests(&self, n_chunks: usize) -> Vec<TokenDigest> {
        let n_chunks = n_chunks.min(self.n_chunks());
        self.known_digests(n_chunks)[..n_chunks].to_vec()
    }

    /// The chain of a sequence with the same salt and extra keys that may begin as this one does; the full chunks that
    /// both share are compared and not hashed again.
    #[must_use]
    pub fn extended(&self, tokens: &[TokenId]) -> Self {
        let chunk_tokens = self.space().chunk_tokens();
        let own = self.shared.tokens.chunks_exact(chunk_tokens);
        let n_shared = own.zip(tokens.chunks_exact(chunk_tokens)).take_while(|(own, other)| own == other);
        let n_shared = n_shared.count();
        let digests = self.shared.digests.lock().iter().take(n_shared).copied().collect();
        let ChainShared { root, names, extras, .. } = &*self.shared;
        self.space().chain_after(*root, &names[..n_shared], digests, tokens, extras.clone())
    }

    /// Its names alone.
    pub fn named(&self) -> NamedChain {
        NamedChain(self.clone())
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

    /// What proves the tokens of the first `n_chunks` chunks, and the salt; of all where it has fewer.
    pub fn digest_up_to(&self, n_chunks: usize) -> TokenDigest {
        let last_chunk = n_chunks.min(self.n_chunks()).checked_sub(1);
        last_chunk.map_or(self.shared.root.digest, |chunk_idx| self.digest_of(chunk_idx))
    }

    /// What proves that a chunk is of this chain's tokens; `None` behind the end.
    pub fn digest(&self, chunk_idx: usize) -> Option<TokenDigest> {
        (chunk_idx < self.n_chunks()).then(|| self.digest_of(chunk_idx))
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
        ChunkKey { namespace: self.space().namespace_id(), chunk: self.hash(chunk_idx), rank }
    }

    pub(crate) fn hash(&self, chunk_idx: usize) -> BlockHash {
        self.shared.names[chunk_idx]
    }

    /// The caller knows that the chunk exists.
    pub(crate) fn digest_of(&self, chunk_idx: usize) -> TokenDigest {
        self.known_digests(chunk_idx + 1)[chunk_idx]
    }

    /// The digests of at least the first `n_chunks` chunks, which the caller knows to exist.
    fn known_digests(&self, n_chunks: usize) -> MutexGuard<'_, Vec<TokenDigest>> {
        let ChainShared { space, root, tokens, extras, digests, .. } = &*self.shared;
        let mut digests = digests.lock();
        if digests.len() < n_chunks {
            let last = digests.last().copied().unwrap_or(root.digest);
            let mut chain = DigestChain::after(space.shared.digest_key.as_ref(), last);
            let chunk_tokens = space.chunk_tokens();
            let chunks = tokens.chunks(chunk_tokens).enumerate().take(n_chunks).skip(digests.len());
            digests.extend(chunks.map(|(idx, chunk)| {
                let digest = chain.push_chunk(chunk);
                let words = extras.words_of(idx * chunk_tokens, chunk.len());
                words.map_or(digest, |words| chain.push_chunk(&words))
            }));
        }
        digests
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

// === impl NamedChain ===

impl NamedChain {
    /// Number of its chunks.
    pub fn n_chunks(&self) -> usize {
        self.0.n_chunks()
    }

    /// The chain of the first chunks, as many as there are digests; `None` where there are more of them.
    ///
    /// The digests are taken as they are. What is stored under them is proven by them to readers, as any chunk.
    pub fn proven(&self, digests: Vec<TokenDigest>) -> Option<Chain> {
        let ChainShared { space, root, names, .. } = &*self.0.shared;
        let names = names.get(..digests.len())?.to_vec();
        let n_tokens = self.0.tokens_of(digests.len()).start;
        Some(space.chain_with(*root, Default::default(), n_tokens, names, digests))
    }

    pub(crate) fn chain(&self) -> &Chain {
        &self.0
    }
}
