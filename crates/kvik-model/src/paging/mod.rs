//! Which blocks exist, how many holders they have and what lies in them.
//!
//! The bookkeeping of paged KV: no memory, no arithmetic. A sequence holds one reference to each
//! block of its table; sequences with one prefix hold the same blocks. A full block is registered
//! under its hash and stays findable after its last holder has left, until its place is needed.

mod memory;
mod pool;

pub use memory::{BlockMemory, ElasticMemory, FixedMemory, MemoryGroup, Need};
pub use pool::{BlockChange, BlockPool, PoolStats};

/// Tokens in a block. Sixteen, so that the keys of a block are one vector per dimension on the
/// widest instruction set and a partly filled block wastes little.
pub const BLOCK_TOKENS: usize = 16;

/// A place for the keys and values of [`BLOCK_TOKENS`] tokens in every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(u32);

impl BlockId {
    /// The block at `index`.
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// The block's place in the pool.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}
