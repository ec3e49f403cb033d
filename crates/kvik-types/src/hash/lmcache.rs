//! `LMCache`'s chunk hashes, of its multiprocess server and of its in-process engine.
//!
//! Server: `BLAKE3(parent (32 bytes) || tokens (u32 big endian each))`; the first parent is the hash
//! of the number 0 (8 bytes) and the token 0 (4 bytes). With another algorithm the server calls
//! vLLM's function on `(parent, tokens, None)`: use [`VllmChain`](super::VllmChain) with the parent given.
//!
//! In-process with `sha256_cbor`: `SHA-256(CBOR([parent, tokens, []]))` cut to its *first* 8 bytes as
//! a big endian number, which is also the form of the parent. The first parent is vLLM's `NONE_HASH`
//! cut in the same way, or 0 without vLLM. The default algorithm there, Python's own `hash`, is not
//! offered: its value belongs to one build of the interpreter.

use std::fmt;

use sha2::{Digest, Sha256};

use super::cbor::CborEncoder;
use super::value::ValueSink;
use super::{HashChain, VllmHash, fill_buffer, write_hex};
use crate::token::{BlockSize, TokenId};

/// Hash of one chunk in `LMCache`'s multiprocess server.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LmcacheServerHash(pub [u8; 32]);

/// Hash chain of `LMCache`'s multiprocess server with its default algorithm; complete chunks only.
#[derive(Clone, Debug)]
pub struct LmcacheServerChain {
    chunk_size: BlockSize,
    none_hash: LmcacheServerHash,
    parent: LmcacheServerHash,
    buffer: Vec<u8>,
}

/// Hash of one chunk in `LMCache`'s in-process engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LmcacheHash(pub u64);

/// Hash chain of `LMCache`'s in-process engine with `pre_caching_hash_algorithm: sha256_cbor`.
#[derive(Clone, Debug)]
pub struct LmcacheChain {
    chunk_size: BlockSize,
    first_parent: LmcacheHash,
    parent: LmcacheHash,
    buffer: Vec<u8>,
}

// === impl LmcacheServerHash ===

impl fmt::Display for LmcacheServerHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(&self.0, formatter)
    }
}

impl fmt::Debug for LmcacheServerHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "LmcacheServerHash({self})")
    }
}

// === impl LmcacheServerChain ===

impl LmcacheServerChain {
    /// Builds a chain that stands before the first chunk.
    pub fn new(chunk_size: BlockSize) -> Self {
        let none_hash = LmcacheServerHash(blake3::hash(&[0; 12]).into());
        Self { chunk_size, none_hash, parent: none_hash, buffer: Vec::new() }
    }

    /// Returns the parent of the first chunk.
    pub fn none_hash(&self) -> LmcacheServerHash {
        self.none_hash
    }
}

impl HashChain for LmcacheServerChain {
    type Hash = LmcacheServerHash;

    fn block_size(&self) -> BlockSize {
        self.chunk_size
    }

    fn push_block(&mut self, tokens: &[TokenId]) -> LmcacheServerHash {
        fill_buffer(&mut self.buffer, &self.parent.0, tokens, TokenId::to_be_bytes);
        self.parent = LmcacheServerHash(blake3::hash(&self.buffer).into());
        self.parent
    }

    fn restart(&mut self) {
        self.parent = self.none_hash;
    }
}

// === impl LmcacheHash ===

impl LmcacheHash {
    /// Cuts a vLLM hash to the form in which `LMCache` keeps hashes: the first 8 bytes, big endian.
    pub fn from_vllm(hash: &VllmHash) -> Self {
        Self(hash.as_bytes().iter().take(8).fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }
}

impl fmt::Display for LmcacheHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}", self.0)
    }
}

// === impl LmcacheChain ===

impl LmcacheChain {
    /// Builds a chain that stands before the first chunk.
    ///
    /// `first_parent` is [`LmcacheHash::from_vllm`] of vLLM's `NONE_HASH`, or 0 without vLLM.
    pub fn new(chunk_size: BlockSize, first_parent: LmcacheHash) -> Self {
        Self { chunk_size, first_parent, parent: first_parent, buffer: Vec::new() }
    }

    /// Returns the hashes of all chunks of `tokens`, the last of which may be short.
    ///
    /// This is what `LMCache` does with `save_unfull_chunk`, as blending and disaggregated prefill
    /// ask for it; [`block_hashes`](super::block_hashes) leaves the short chunk out.
    pub fn chunk_hashes_with_partial(
        &mut self,
        tokens: &[TokenId],
    ) -> impl ExactSizeIterator<Item = LmcacheHash> {
        tokens.chunks(self.chunk_size.get()).map(|chunk| self.push_block(chunk))
    }
}

impl HashChain for LmcacheChain {
    type Hash = LmcacheHash;

    fn block_size(&self) -> BlockSize {
        self.chunk_size
    }

    fn push_block(&mut self, tokens: &[TokenId]) -> LmcacheHash {
        self.buffer.clear();
        let mut encoder = CborEncoder::new(&mut self.buffer);
        encoder.start_tuple(3);
        encoder.unsigned(self.parent.0);
        encoder.tokens(tokens);
        encoder.start_tuple(0);
        let [a, b, c, d, e, f, g, h, ..]: [u8; 32] = Sha256::digest(&self.buffer).into();
        self.parent = LmcacheHash(u64::from_be_bytes([a, b, c, d, e, f, g, h]));
        self.parent
    }

    fn restart(&mut self) {
        self.parent = self.first_parent;
    }
}
