//! llm-d's request keys.
//!
//! `cbor-fnv`: `FNV-1a-64(CBOR([parent, tokens, extra]))`, where extra is null or one map
//! `{"Hash": identifier}` for each multimodal item that overlaps the block. The first parent is the
//! key of `[FNV-1a-64(hash seed), null, model]`.
//!
//! `xxh64`: `XXH64(parent (u64 little endian) || tokens (u32 little endian each) || length (u64
//! little endian) and bytes of each extra)`; the first parent hashes the seed's XXH64 and the model
//! in the place of an extra.
//!
//! An adapter's name takes the place of the model's.

use std::fmt;

use xxhash_rust::xxh64::xxh64;

use super::cbor::CborEncoder;
use super::value::ValueSink;
use super::{HashChain, fill_buffer};
use crate::token::{BlockSize, TokenId};

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0100_0000_01b3;

/// Value of llm-d's `hashAlgorithm`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LlmdAlgorithm {
    /// `cbor-fnv`, llm-d's default.
    #[default]
    CborFnv,
    /// `xxh64`.
    Xxh64,
}

/// Key of one block in llm-d's index; llm-d reserves 0 for "no key".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LlmdKey(pub u64);

/// Hash chain of llm-d's index.
#[derive(Clone, Debug)]
pub struct LlmdChain {
    algorithm: LlmdAlgorithm,
    block_size: BlockSize,
    root: LlmdKey,
    parent: LlmdKey,
    buffer: Vec<u8>,
}

impl fmt::Display for LlmdKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl LlmdChain {
    /// Builds a chain that stands before the first block.
    ///
    /// `hash_seed` is llm-d's `hashSeed` (its default is empty); `model` is the name of the model or
    /// of the adapter.
    pub fn new(algorithm: LlmdAlgorithm, block_size: BlockSize, hash_seed: &str, model: &str) -> Self {
        let mut buffer = Vec::new();
        let root = match algorithm {
            LlmdAlgorithm::CborFnv => {
                let mut encoder = CborEncoder::new(&mut buffer);
                encoder.start_tuple(3);
                encoder.unsigned(fnv1a_64(hash_seed.as_bytes()));
                encoder.none();
                encoder.text(model);
                fnv1a_64(&buffer)
            }
            LlmdAlgorithm::Xxh64 => {
                buffer.extend_from_slice(&xxh64(hash_seed.as_bytes(), 0).to_le_bytes());
                append_sized(&mut buffer, model);
                xxh64(&buffer, 0)
            }
        };
        Self { algorithm, block_size, root: LlmdKey(root), parent: LlmdKey(root), buffer }
    }

    /// Returns the parent of the first block.
    pub fn root(&self) -> LlmdKey {
        self.root
    }

    /// Appends a block that multimodal items overlap and returns its key.
    ///
    /// `identifiers` are those of the items in the order of their placeholders; where they start
    /// does not enter the key. Without identifiers this is [`push_block`](HashChain::push_block).
    pub fn push_block_with_multimodal(&mut self, tokens: &[TokenId], identifiers: &[&str]) -> LlmdKey {
        let key = match self.algorithm {
            LlmdAlgorithm::CborFnv => {
                self.buffer.clear();
                let mut encoder = CborEncoder::new(&mut self.buffer);
                encoder.start_tuple(3);
                encoder.unsigned(self.parent.0);
                encoder.tokens(tokens);
                if identifiers.is_empty() {
                    encoder.none();
                } else {
                    encoder.start_tuple(identifiers.len());
                    for identifier in identifiers {
                        encoder.start_map(1);
                        encoder.text("Hash");
                        encoder.text(identifier);
                    }
                }
                fnv1a_64(&self.buffer)
            }
            LlmdAlgorithm::Xxh64 => {
                fill_buffer(&mut self.buffer, &self.parent.0.to_le_bytes(), tokens, TokenId::to_le_bytes);
                for identifier in identifiers {
                    append_sized(&mut self.buffer, identifier);
                }
                xxh64(&self.buffer, 0)
            }
        };
        self.parent = LlmdKey(key);
        self.parent
    }
}

impl HashChain for LlmdChain {
    type Hash = LlmdKey;

    fn block_size(&self) -> BlockSize {
        self.block_size
    }

    fn push_block(&mut self, tokens: &[TokenId]) -> LlmdKey {
        self.push_block_with_multimodal(tokens, &[])
    }

    fn restart(&mut self) {
        self.parent = self.root;
    }
}

fn append_sized(buffer: &mut Vec<u8>, text: &str) {
    buffer.extend_from_slice(&(text.len() as u64).to_le_bytes());
    buffer.extend_from_slice(text.as_bytes());
}

fn fnv1a_64(bytes: &[u8]) -> u64 {
    bytes.iter().fold(FNV_OFFSET, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(FNV_PRIME))
}
