//! The pool of blocks: references, registered content, eviction.
//!
//! Invariants, checked by the model test:
//! - a block is either held (its count is above zero) or in the free list, never both;
//! - a registered block's parent is registered, and stays so while the block is: holders of a
//!   block hold its parents, and a released table gives back its last block first, so a parent is
//!   always younger in the free list than its children;
//! - a match compares tokens and parents, not hashes alone: a hash collision is a miss.

use std::collections::HashMap;

use kvik_types::{BlockHash, TokenId};

use super::{BLOCK_TOKENS, BlockId};

/// End of the free list.
const NONE: u32 = u32::MAX;

/// What a registered block contains.
#[derive(Debug, Clone)]
struct Content {
    hash: BlockHash,
    tokens: [TokenId; BLOCK_TOKENS],
    /// The block before it; `None` for the first of a sequence.
    parent: Option<BlockId>,
}

#[derive(Debug, Clone)]
struct Slot {
    n_holders: u32,
    content: Option<Content>,
    /// Neighbors in the free list while nobody holds the block.
    previous: u32,
    next: u32,
}

/// Counts of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PoolStats {
    /// All blocks.
    pub n_blocks: usize,
    /// Blocks that nobody holds.
    pub n_free: usize,
    /// Registered blocks, held or not.
    pub n_registered: usize,
    /// Registered blocks whose place was taken, since the start.
    pub n_evicted: u64,
}

/// The blocks of one engine.
#[derive(Debug)]
pub struct BlockPool {
    slots: Vec<Slot>,
    by_hash: HashMap<BlockHash, BlockId>,
    /// Oldest free block: the next to be taken.
    free_head: u32,
    free_tail: u32,
    n_free: usize,
    n_evicted: u64,
}

impl BlockPool {
    /// A pool of `n_blocks` free blocks.
    ///
    /// # Panics
    /// If `n_blocks` is not below `u32::MAX`.
    pub fn new(n_blocks: usize) -> Self {
        assert!(n_blocks < NONE as usize, "block ids are 32 bits");
        let empty = Slot { n_holders: 0, content: None, previous: NONE, next: NONE };
        let mut pool = Self {
            slots: vec![empty; n_blocks],
            by_hash: HashMap::new(),
            free_head: NONE,
            free_tail: NONE,
            n_free: 0,
            n_evicted: 0,
        };
        for index in 0..n_blocks {
            pool.push_youngest(BlockId::new(index as u32));
        }
        pool
    }

    /// The pool's counts.
    pub fn stats(&self) -> PoolStats {
        PoolStats {
            n_blocks: self.slots.len(),
            n_free: self.n_free,
            n_registered: self.by_hash.len(),
            n_evicted: self.n_evicted,
        }
    }

    /// Number of blocks that nobody holds.
    pub fn n_free(&self) -> usize {
        self.n_free
    }

    /// Number of holders of `block`.
    pub fn n_holders(&self, block: BlockId) -> u32 {
        self.slots[block.index()].n_holders
    }

    /// Whether the content of `block` can be found by its hash; it must not be changed then.
    pub fn is_registered(&self, block: BlockId) -> bool {
        self.slots[block.index()].content.is_some()
    }

    /// Takes a free block, forgetting what lay in it; `None` when every block is held.
    pub fn allocate(&mut self) -> Option<BlockId> {
        if self.free_head == NONE {
            return None;
        }
        let block = BlockId::new(self.free_head);
        self.unlink(block);
        if let Some(content) = self.slots[block.index()].content.take() {
            self.by_hash.remove(&content.hash);
            self.n_evicted += 1;
        }
        self.slots[block.index()].n_holders = 1;
        Some(block)
    }

    /// Adds a holder to `block`.
    pub fn retain(&mut self, block: BlockId) {
        if self.slots[block.index()].n_holders == 0 {
            self.unlink(block);
        }
        self.slots[block.index()].n_holders += 1;
    }

    /// Gives back the blocks of a table, last block first.
    ///
    /// # Panics
    /// If a block has no holder: the table was given back twice.
    pub fn release(&mut self, table: &mut Vec<BlockId>) {
        while let Some(block) = table.pop() {
            self.release_block(block);
        }
    }

    /// Gives back one reference to `block`.
    ///
    /// # Panics
    /// If the block has no holder.
    pub fn release_block(&mut self, block: BlockId) {
        let slot = &mut self.slots[block.index()];
        assert!(0 < slot.n_holders, "a block was released twice");
        slot.n_holders -= 1;
        if slot.n_holders == 0 {
            if slot.content.is_some() {
                self.push_youngest(block);
            } else {
                self.push_oldest(block);
            }
        }
    }

    /// Takes a reference to each registered block of the longest known prefix and returns them.
    ///
    /// `hashes` are those of the full blocks of `tokens`, from the start.
    pub fn match_prefix(&mut self, hashes: &[BlockHash], tokens: &[TokenId]) -> Vec<BlockId> {
        let mut matched: Vec<BlockId> = Vec::new();
        for (hash, block_tokens) in hashes.iter().zip(tokens.as_chunks::<BLOCK_TOKENS>().0) {
            match self.find(hash, block_tokens, matched.last().copied()) {
                Some(block) => matched.push(block),
                None => break,
            }
        }
        for &block in &matched {
            self.retain(block);
        }
        matched
    }

    /// Registers a full block that its holder has computed.
    ///
    /// Returns the block that holds this content from now on. Where that is another one, computed
    /// by somebody else in the meantime, the caller's reference has moved to it; the content is
    /// the same to the bit. A block whose parent is not registered is not registered either.
    pub fn register(
        &mut self,
        block: BlockId,
        hash: BlockHash,
        tokens: &[TokenId; BLOCK_TOKENS],
        parent: Option<BlockId>,
    ) -> BlockId {
        if self.slots[block.index()].content.is_some() {
            return block;
        }
        if parent.is_some_and(|parent| self.slots[parent.index()].content.is_none()) {
            return block;
        }
        if self.by_hash.contains_key(&hash) {
            let Some(known) = self.find(&hash, tokens, parent) else {
                return block;
            };
            self.retain(known);
            self.release_block(block);
            return known;
        }
        self.by_hash.insert(hash, block);
        self.slots[block.index()].content = Some(Content { hash, tokens: *tokens, parent });
        block
    }

    /// Forgets the content of every block that nobody holds.
    pub fn forget_free(&mut self) {
        let mut index = self.free_head;
        while index != NONE {
            let slot = &mut self.slots[index as usize];
            if let Some(content) = slot.content.take() {
                self.by_hash.remove(&content.hash);
            }
            index = slot.next;
        }
    }

    fn find(
        &self,
        hash: &BlockHash,
        tokens: &[TokenId; BLOCK_TOKENS],
        parent: Option<BlockId>,
    ) -> Option<BlockId> {
        let block = *self.by_hash.get(hash)?;
        let content = self.slots[block.index()].content.as_ref()?;
        (content.tokens == *tokens && content.parent == parent).then_some(block)
    }

    fn push_youngest(&mut self, block: BlockId) {
        let index = block.index() as u32;
        let previous = std::mem::replace(&mut self.free_tail, index);
        self.slots[block.index()].previous = previous;
        self.slots[block.index()].next = NONE;
        match self.slots.get_mut(previous as usize) {
            Some(slot) => slot.next = index,
            None => self.free_head = index,
        }
        self.n_free += 1;
    }

    /// Puts a block without content where it is taken before anything worth keeping.
    fn push_oldest(&mut self, block: BlockId) {
        let index = block.index() as u32;
        let next = std::mem::replace(&mut self.free_head, index);
        self.slots[block.index()].previous = NONE;
        self.slots[block.index()].next = next;
        match self.slots.get_mut(next as usize) {
            Some(slot) => slot.previous = index,
            None => self.free_tail = index,
        }
        self.n_free += 1;
    }

    fn unlink(&mut self, block: BlockId) {
        let Slot { previous, next, .. } = self.slots[block.index()];
        match self.slots.get_mut(previous as usize) {
            Some(slot) => slot.next = next,
            None => self.free_head = next,
        }
        match self.slots.get_mut(next as usize) {
            Some(slot) => slot.previous = previous,
            None => self.free_tail = previous,
        }
        self.n_free -= 1;
    }
}

#[cfg(test)]
mod tests;
