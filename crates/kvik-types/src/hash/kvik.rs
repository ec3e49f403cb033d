//! kvik's own block hashes.
//!
//! `hash = XXH3-128(parent (16 bytes) || tokens (u32 little endian each))`, kept in canonical big
//! endian order; the parent of the first block is the seed of the namespace.

use xxhash_rust::xxh3::xxh3_128;

use super::{HashChain, fill_buffer};
use crate::namespace::{BlockHash, Namespace};
use crate::token::{BlockSize, TokenId};

/// Hash chain of kvik's store and index.
#[derive(Clone, Debug)]
pub struct KvikChain {
    block_size: BlockSize,
    first_parent: BlockHash,
    parent: BlockHash,
    buffer: Vec<u8>,
}

impl KvikChain {
    /// Builds a chain that stands before the first block of a sequence in `namespace`.
    pub fn new(namespace: &Namespace, block_size: BlockSize) -> Self {
        Self::after(namespace.seed(), block_size)
    }

    /// Builds a chain that goes on after the block `parent`.
    pub fn after(parent: BlockHash, block_size: BlockSize) -> Self {
        Self { block_size, first_parent: parent, parent, buffer: Vec::new() }
    }
}

impl HashChain for KvikChain {
    type Hash = BlockHash;

    fn block_size(&self) -> BlockSize {
        self.block_size
    }

    fn push_block(&mut self, tokens: &[TokenId]) -> BlockHash {
        fill_buffer(&mut self.buffer, self.parent.as_bytes(), tokens, TokenId::to_le_bytes);
        self.parent = BlockHash::from_u128(xxh3_128(&self.buffer));
        self.parent
    }

    fn restart(&mut self) {
        self.parent = self.first_parent;
    }
}
