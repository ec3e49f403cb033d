//! The pool of blocks: references, registered content, eviction.
//!
//! Invariants, checked by the model test:
//! - a block is either held (its count is above zero) or in the free list, never both;
//! - a registered block's parent is registered, and stays so while the block is: holders of a
//!   block hold its parents, and a released table gives back its last block first, so a parent is
//!   always younger in the free list than its children;
//! - a match compares tokens, parents and the salt of the first block, not hashes alone: a hash collision is
//!   a miss;
//! - a block that is absent, because its memory was not taken or was given back, is neither held nor
//!   free nor registered.
//!
//! A pool grows before it forgets: as long as its memory has blocks to spare, registered content stays.
//!
//! For a copy elsewhere of what is registered, the pool records its changes; applied in order they give
//! exactly the registered hashes, which the model test checks too.

mod free_list;
mod pages;

use std::collections::HashMap;

use kvik_types::{BlockHash, CacheSalt, TokenId};

use super::memory::{BlockMemory, FixedMemory, Need};
use super::{BLOCK_TOKENS, BlockId};
use free_list::FreeList;
use pages::Page;

/// What a registered block contains.
#[derive(Debug, Clone)]
struct Content {
    hash: BlockHash,
    tokens: [TokenId; BLOCK_TOKENS],
    /// The block before it; `None` for the first of a sequence.
    parent: Option<BlockId>,
    /// What keeps its sequence apart from others with the same tokens; kept by first blocks alone, since the
    /// others are found through them.
    salt: Option<CacheSalt>,
}

#[derive(Debug, Clone)]
struct Slot {
    n_holders: u32,
    /// Whether the pool has its memory.
    is_present: bool,
    content: Option<Content>,
}

/// A block that can be found by its hash since now, or not any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockChange {
    /// The hash of its content, which covers all tokens up to its end.
    pub hash: BlockHash,
    /// The block before it; `None` for the first of a sequence, and where it is found no more.
    pub parent: Option<BlockHash>,
    /// Whether it can be found.
    pub is_registered: bool,
}

/// Counts of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PoolStats {
    /// Blocks that the pool has the memory of.
    pub n_blocks: usize,
    /// The most blocks that it could have.
    pub limit_blocks: usize,
    /// Blocks without a holder.
    pub n_free: usize,
    /// Registered blocks, held or not.
    pub n_registered: usize,
    /// Registered blocks whose place was taken, since the start.
    pub n_evicted: u64,
    /// Blocks that were given back because others asked, since the start.
    pub n_given_back: u64,
}

/// The blocks of one engine.
#[derive(Debug)]
pub struct BlockPool {
    memory: Box<dyn BlockMemory>,
    slots: Vec<Slot>,
    n_present: usize,
    /// Of every page that the pool ever had a block of.
    pages: Vec<Page>,
    n_idle_pages: usize,
    by_hash: HashMap<BlockHash, BlockId>,
    /// Blocks without a holder.
    free: FreeList,
    n_evicted: u64,
    n_given_back: u64,
    /// Kept between growths.
    taken: Vec<BlockId>,
    records_changes: bool,
    changes: Vec<BlockChange>,
}

impl BlockPool {
    /// A pool of `n_blocks` free blocks, whose number does not change.
    ///
    /// # Panics
    /// If `n_blocks` is not below `u32::MAX`.
    pub fn new(n_blocks: usize) -> Self {
        let mut pool = Self::with_memory(Box::new(FixedMemory::new(n_blocks)));
        pool.grow(n_blocks, Need::Required);
        pool
    }

    /// A pool that takes its blocks from `memory` when it needs them, and gives them back when it is asked.
    ///
    /// # Panics
    /// If the memory has not fewer than `u32::MAX` blocks.
    pub fn with_memory(memory: Box<dyn BlockMemory>) -> Self {
        let capacity_blocks = memory.capacity_blocks();
        let absent = Slot { n_holders: 0, is_present: false, content: None };
        Self {
            memory,
            slots: vec![absent; capacity_blocks],
            n_present: 0,
            pages: Vec::new(),
            n_idle_pages: 0,
            by_hash: HashMap::new(),
            free: FreeList::new(capacity_blocks),
            n_evicted: 0,
            n_given_back: 0,
            taken: Vec::new(),
            records_changes: false,
            changes: Vec::new(),
        }
    }

    /// Writes down from now on what is registered and forgotten, beginning with what is registered.
    ///
    /// The caller takes it with [`Self::take_changes`] after every few operations: it is kept until then.
    pub fn record_changes(&mut self) {
        if std::mem::replace(&mut self.records_changes, true) {
            return;
        }
        for slot in &self.slots {
            if let Some(content) = &slot.content {
                self.changes.push(self.registration(content));
            }
        }
    }

    /// Takes what was written down, in the order in which it happened.
    pub fn take_changes(&mut self) -> std::vec::Drain<'_, BlockChange> {
        self.changes.drain(..)
    }

    /// The hashes of all registered blocks, in no order.
    pub fn registered(&self) -> impl Iterator<Item = BlockHash> {
        self.by_hash.keys().copied()
    }

    /// Sets what is called, on another thread, when others ask for memory: give back then.
    pub fn set_waker(&mut self, waker: Box<dyn Fn() + Send + Sync>) {
        self.memory.set_waker(waker);
    }

    /// The most blocks that the pool could have if all others gave back what they can.
    pub fn limit_blocks(&self) -> usize {
        self.memory.limit_blocks()
    }

    /// The pool's counts.
    pub fn stats(&self) -> PoolStats {
        PoolStats {
            n_blocks: self.n_present,
            limit_blocks: self.limit_blocks(),
            n_free: self.n_free(),
            n_registered: self.by_hash.len(),
            n_evicted: self.n_evicted,
            n_given_back: self.n_given_back,
        }
    }

    /// Number of blocks without a holder.
    pub fn n_free(&self) -> usize {
        self.free.n_blocks()
    }

    /// Number of holders of `block`.
    pub fn n_holders(&self, block: BlockId) -> u32 {
        self.slots[block.index()].n_holders
    }

    /// Whether the content of `block` can be found by its hash; it must not be changed then.
    pub fn is_registered(&self, block: BlockId) -> bool {
        self.slots[block.index()].content.is_some()
    }

    /// Takes a free block, forgetting what lay in it if there is no memory for another; `None` when every
    /// block is held and there is no more.
    pub fn allocate(&mut self) -> Option<BlockId> {
        match self.free.oldest() {
            None => self.grow(1, Need::Required),
            Some(oldest) if self.is_registered(oldest) => self.grow(1, Need::Spare),
            Some(_) => {}
        }
        let block = self.free.oldest()?;
        self.free.unlink(block);
        if self.forget(block) {
            self.n_evicted += 1;
        }
        self.slots[block.index()].n_holders = 1;
        self.note_held(block);
        Some(block)
    }

    /// Adds a holder to `block`.
    pub fn retain(&mut self, block: BlockId) {
        if self.slots[block.index()].n_holders == 0 {
            self.free.unlink(block);
            self.note_held(block);
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
                self.free.push_youngest(block);
            } else {
                // Taken before anything worth keeping.
                self.free.push_oldest(block);
            }
            self.note_free(block);
        }
    }

    /// Takes a reference to each registered block of the longest known prefix and returns them.
    ///
    /// `hashes` are those of the full blocks of `tokens`, from the start.
    pub fn match_prefix(
        &mut self,
        hashes: &[BlockHash],
        tokens: &[TokenId],
        salt: Option<&CacheSalt>,
    ) -> Vec<BlockId> {
        let matched: Vec<BlockId> = self.known_prefix(hashes, tokens, salt).collect();
        for &block in &matched {
            self.retain(block);
        }
        matched
    }

    /// The registered blocks of the longest known prefix; no reference is taken.
    ///
    /// `hashes` are those of the full blocks of `tokens`, from the start.
    pub fn known_prefix(
        &self,
        hashes: &[BlockHash],
        tokens: &[TokenId],
        salt: Option<&CacheSalt>,
    ) -> impl Iterator<Item = BlockId> {
        let mut parent = None;
        hashes.iter().zip(tokens.as_chunks::<BLOCK_TOKENS>().0).map_while(move |(hash, block_tokens)| {
            parent = Some(self.find(hash, block_tokens, parent, salt)?);
            parent
        })
    }

    /// Registers a full block that its holder has computed.
    ///
    /// Returns the block that holds this content from now on. Where that is another one, computed by
    /// another sequence in the meantime, the caller's reference has moved to it; the content is the same
    /// to the bit. A block whose parent is not registered is not registered either.
    pub fn register(
        &mut self,
        block: BlockId,
        hash: BlockHash,
        tokens: &[TokenId; BLOCK_TOKENS],
        parent: Option<BlockId>,
        salt: Option<&CacheSalt>,
    ) -> BlockId {
        if self.slots[block.index()].content.is_some() {
            return block;
        }
        if parent.is_some_and(|parent| self.slots[parent.index()].content.is_none()) {
            return block;
        }
        if self.by_hash.contains_key(&hash) {
            let Some(known) = self.find(&hash, tokens, parent, salt) else {
                return block;
            };
            self.retain(known);
            self.release_block(block);
            return known;
        }
        self.by_hash.insert(hash, block);
        let salt = if parent.is_none() { salt.cloned() } else { None };
        let content = Content { hash, tokens: *tokens, parent, salt };
        if self.records_changes {
            self.changes.push(self.registration(&content));
        }
        self.slots[block.index()].content = Some(content);
        block
    }

    /// Forgets the content of every block without a holder.
    pub fn forget_free(&mut self) {
        let mut next = self.free.oldest();
        while let Some(block) = next {
            self.forget(block);
            next = self.free.younger(block);
        }
    }

    fn find(
        &self,
        hash: &BlockHash,
        tokens: &[TokenId; BLOCK_TOKENS],
        parent: Option<BlockId>,
        salt: Option<&CacheSalt>,
    ) -> Option<BlockId> {
        let block = *self.by_hash.get(hash)?;
        let content = self.slots[block.index()].content.as_ref()?;
        let has_salt = parent.is_some() || content.salt.as_ref() == salt;
        (content.tokens == *tokens && content.parent == parent && has_salt).then_some(block)
    }

    /// Forgets what lies in `block`; says whether there was anything.
    fn forget(&mut self, block: BlockId) -> bool {
        let content = self.slots[block.index()].content.take();
        if let Some(content) = &content {
            self.by_hash.remove(&content.hash);
            if self.records_changes {
                let Content { hash, .. } = *content;
                self.changes.push(BlockChange { hash, parent: None, is_registered: false });
            }
        }
        content.is_some()
    }

    fn registration(&self, content: &Content) -> BlockChange {
        let parent = content.parent.and_then(|parent| self.slots[parent.index()].content.as_ref());
        BlockChange { hash: content.hash, parent: parent.map(|parent| parent.hash), is_registered: true }
    }
}

#[cfg(test)]
mod tests;
