//! A number of blocks that does not change.

use super::{BlockMemory, Need};
use crate::paging::BlockId;

/// All blocks are there from the start, and no other pool shares them.
#[derive(Debug)]
pub struct FixedMemory {
    n_blocks: usize,
    n_taken: usize,
}

impl FixedMemory {
    /// Memory of `n_blocks` blocks.
    pub fn new(n_blocks: usize) -> Self {
        Self { n_blocks, n_taken: 0 }
    }
}

impl BlockMemory for FixedMemory {
    fn capacity_blocks(&self) -> usize {
        self.n_blocks
    }

    fn limit_blocks(&self) -> usize {
        self.n_blocks
    }

    fn take(&mut self, _n_blocks: usize, _need: Need, blocks: &mut Vec<BlockId>) {
        blocks.extend((self.n_taken..self.n_blocks).map(|index| BlockId::new(index as u32)));
        self.n_taken = self.n_blocks;
    }

    fn give_back(&mut self, _blocks: &[BlockId]) {}

    fn take_asked_pages(&mut self) -> usize {
        0
    }

    fn page_of(&self, block: BlockId) -> usize {
        block.index()
    }

    fn set_waker(&mut self, _waker: Box<dyn Fn() + Send + Sync>) {}
}
