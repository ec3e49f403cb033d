mod naive_pool;
mod operations;
mod paged_memory;

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use proptest::prelude::*;

use super::*;
use naive_pool::NaivePool;
use operations::{Operation, block_tokens, elastic_operations, operations, weak_hash};
use paged_memory::{MemoryOfPool, PagedMemory};

#[derive(Debug, Clone)]
struct Table {
    stem: usize,
    blocks: Vec<BlockId>,
    /// A partly filled block ends the table.
    is_closed: bool,
}

struct Both {
    pool: BlockPool,
    naive: NaivePool,
    /// Where the pool's memory comes and goes.
    pages: Option<MemoryOfPool>,
    tables: Vec<Table>,
    /// What the recorded changes say is registered.
    replayed: BTreeSet<BlockHash>,
}

impl Both {
    fn fixed(n_blocks: u32) -> Self {
        let mut pool = BlockPool::new(n_blocks as usize);
        pool.record_changes();
        let naive = NaivePool::fixed(n_blocks);
        Self { pool, naive, pages: None, tables: Vec::new(), replayed: BTreeSet::new() }
    }

    fn elastic(pages: PagedMemory) -> Self {
        let shared = MemoryOfPool(Arc::new(Mutex::new(pages.clone())));
        let mut pool = BlockPool::with_memory(Box::new(shared.clone()));
        pool.record_changes();
        Self {
            pool,
            naive: NaivePool { pages, ..NaivePool::default() },
            pages: Some(shared),
            tables: Vec::new(),
            replayed: BTreeSet::new(),
        }
    }

    fn apply(&mut self, operation: &Operation) {
        match *operation {
            Operation::Start { stem } => self.start(stem),
            Operation::Grow { table } => self.grow(table, true),
            Operation::GrowPartly { table } => self.grow(table, false),
            Operation::Fork { table } => {
                if let Some(table) = self.tables.get(table).cloned() {
                    for &block in &table.blocks {
                        self.pool.retain(block);
                        self.naive.retain(block);
                    }
                    self.tables.push(table);
                }
            }
            Operation::End { table } => {
                if table < self.tables.len() {
                    let mut table = self.tables.swap_remove(table);
                    for &block in table.blocks.iter().rev() {
                        self.naive.release(block);
                    }
                    self.pool.release(&mut table.blocks);
                    assert!(table.blocks.is_empty());
                }
            }
            Operation::Forget => {
                self.pool.forget_free();
                let held = &self.naive.n_holders;
                self.naive.registered.retain(|block, _| held.contains_key(block));
            }
            Operation::Limit { limit_pages, spare_pages } => {
                let mut of_pool = self.pages.as_ref().map(|pages| pages.0.lock());
                for pages in [of_pool.as_deref_mut(), Some(&mut self.naive.pages)].into_iter().flatten() {
                    pages.limit_pages = limit_pages.min(pages.n_pages);
                    pages.spare_pages = spare_pages;
                }
            }
            Operation::Ensure { n_blocks } => {
                let n_missing = n_blocks.saturating_sub(self.naive.free.len());
                if 0 < n_missing {
                    self.naive.grow(n_missing, Need::Required);
                }
                assert_eq!(self.pool.ensure_free(n_blocks), n_blocks <= self.naive.free.len());
            }
            Operation::GiveBack { n_pages } => {
                assert_eq!(self.pool.give_back_pages(n_pages), self.naive.give_back_pages(n_pages));
            }
        }
    }

    fn start(&mut self, stem: usize) {
        let n_blocks = 8;
        let hashes: Vec<BlockHash> = (0..n_blocks).map(|idx| weak_hash(stem, idx)).collect();
        let tokens: Vec<TokenId> = (0..n_blocks).flat_map(|idx| block_tokens(stem, idx)).collect();
        let blocks = self.pool.match_prefix(&hashes, &tokens, None);
        let mut expected: Vec<BlockId> = Vec::new();
        for idx in 0..n_blocks {
            let parent = expected.last().copied();
            match self.naive.find(weak_hash(stem, idx), &block_tokens(stem, idx), parent) {
                Some(block) => expected.push(block),
                None => break,
            }
        }
        for &block in &expected {
            self.naive.retain(block);
        }
        assert_eq!(blocks, expected);
        self.tables.push(Table { stem, blocks, is_closed: false });
    }

    fn grow(&mut self, table: usize, fills: bool) {
        let Some(table) = self.tables.get_mut(table).filter(|table| !table.is_closed) else {
            return;
        };
        let block = self.pool.allocate();
        assert_eq!(block, self.naive.allocate());
        let Some(block) = block else { return };
        table.is_closed = !fills;
        if !fills {
            table.blocks.push(block);
            return;
        }
        let (idx, parent) = (table.blocks.len(), table.blocks.last().copied());
        let (hash, tokens) = (weak_hash(table.stem, idx), block_tokens(table.stem, idx));
        let holder = self.pool.register(block, hash, &tokens, parent, None);
        let naive = &mut self.naive;
        let parent_is_known = parent.is_none_or(|parent| naive.registered.contains_key(&parent));
        let is_taken = naive.registered.values().any(|content| content.hash == hash);
        let mut expected = block;
        if let Some(known) = naive.find(hash, &tokens, parent).filter(|_| parent_is_known) {
            naive.retain(known);
            naive.release(block);
            expected = known;
        } else if parent_is_known && !is_taken {
            naive.registered.insert(block, Content { hash, tokens, parent, salt: None });
        }
        assert_eq!(holder, expected);
        table.blocks.push(holder);
    }

    /// Applies the recorded changes, none of which may say what was so before.
    fn replay(&mut self) {
        for BlockChange { hash, parent, is_registered } in self.pool.take_changes() {
            if is_registered {
                assert!(self.replayed.insert(hash), "{hash} was registered twice");
                assert!(parent.is_none_or(|parent| self.replayed.contains(&parent)), "{hash} has no parent");
            } else {
                assert!(self.replayed.remove(&hash), "{hash} was forgotten twice");
            }
        }
    }

    fn check(&mut self) {
        self.replay();
        let registered: BTreeSet<BlockHash> =
            self.naive.registered.values().map(|content| content.hash).collect();
        assert_eq!(self.replayed, registered);
        assert_eq!(self.pool.registered().collect::<BTreeSet<_>>(), registered);
        let stats = self.pool.stats();
        assert_eq!(stats.n_free, self.naive.free.len());
        assert_eq!(stats.n_registered, self.naive.registered.len());
        assert_eq!(stats.n_evicted, self.naive.n_evicted);
        assert_eq!(stats.n_given_back, self.naive.n_given_back);
        assert_eq!(stats.n_blocks, self.naive.pages.taken.len());
        assert_eq!(self.free_list(), self.naive.free);
        if let Some(pages) = &self.pages {
            let pages = pages.0.lock();
            assert_eq!(pages.taken, self.naive.pages.taken);
            assert_eq!(pages.n_idle_noted, self.naive.idle_pages().len());
        }
        for index in 0..self.pool.slots.len() as u32 {
            let block = BlockId::new(index);
            let is_present = self.naive.pages.taken.contains(&block);
            assert_eq!(self.pool.slots[block.index()].is_present, is_present);
            if !is_present {
                assert_eq!(self.pool.n_holders(block), 0, "an absent block is held");
                assert!(!self.pool.is_registered(block), "an absent block is registered");
                continue;
            }
            let n_in_tables = self.tables.iter().flat_map(|table| &table.blocks);
            let n_in_tables = n_in_tables.filter(|&&held| held == block).count();
            assert_eq!(self.pool.n_holders(block) as usize, n_in_tables);
            assert_eq!(n_in_tables == 0, self.naive.free.contains(&block));
        }
        for (index, slot) in self.pool.slots.iter().enumerate() {
            let Some(content) = &slot.content else { continue };
            assert_eq!(self.pool.by_hash[&content.hash].index(), index);
            if let Some(parent) = content.parent {
                let parent_slot = &self.pool.slots[parent.index()];
                assert!(parent_slot.content.is_some(), "a parent went before its child");
            }
        }
    }

    /// The free list from both ends.
    fn free_list(&self) -> Vec<BlockId> {
        let free = &self.pool.free;
        let walk = |first, step: fn(&FreeList, BlockId) -> Option<BlockId>| {
            std::iter::successors(first, |block| step(free, *block)).collect::<Vec<BlockId>>()
        };
        let forwards = walk(free.oldest(), FreeList::younger);
        let mut backwards = walk(free.youngest(), FreeList::older);
        backwards.reverse();
        assert_eq!(forwards, backwards);
        forwards
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_operations_give_what_the_naive_pool_gives(n_blocks in 1..14_u32, operations in operations()) {
        let mut both = Both::fixed(n_blocks);
        for operation in &operations {
            both.apply(operation);
            both.check();
        }
        while !both.tables.is_empty() {
            both.apply(&Operation::End { table: 0 });
        }
        both.check();
        prop_assert_eq!(both.pool.n_free(), n_blocks as usize);
    }

    #[test]
    fn memory_that_grows_and_shrinks_at_random_gives_what_the_naive_pool_gives(
        n_pages in 1..6_usize,
        page_blocks in 1..5_usize,
        operations in elastic_operations(),
    ) {
        let pages = PagedMemory { n_pages, page_blocks, limit_pages: n_pages, ..PagedMemory::default() };
        let mut both = Both::elastic(pages);
        for operation in &operations {
            both.apply(operation);
            both.check();
        }
        while !both.tables.is_empty() {
            both.apply(&Operation::End { table: 0 });
        }
        both.apply(&Operation::GiveBack { n_pages: usize::MAX });
        both.check();
        prop_assert_eq!(both.pool.stats().n_blocks, 0);
        prop_assert_eq!(both.pool.stats().n_registered, 0);
    }
}

fn hash(value: u128) -> BlockHash {
    BlockHash::from_u128(value)
}

#[test]
fn a_forged_hash_with_other_tokens_or_another_parent_is_a_miss() {
    let mut pool = BlockPool::new(4);
    let (first, second) = (pool.allocate().unwrap(), pool.allocate().unwrap());
    assert_eq!(pool.register(first, hash(1), &[1; BLOCK_TOKENS], None, None), first);
    assert_eq!(pool.register(second, hash(2), &[2; BLOCK_TOKENS], Some(first), None), second);
    let mut tokens = vec![1; BLOCK_TOKENS];
    tokens.extend([2; BLOCK_TOKENS]);
    assert_eq!(pool.match_prefix(&[hash(1), hash(2)], &tokens, None), [first, second]);
    tokens[BLOCK_TOKENS + 15] = 3;
    assert_eq!(pool.match_prefix(&[hash(1), hash(2)], &tokens, None), [first]);
    assert_eq!(pool.match_prefix(&[hash(2)], &[2; BLOCK_TOKENS], None), []);
    assert_eq!(pool.match_prefix(&[hash(1)], &[9; BLOCK_TOKENS], None), []);
    // Neither does the forger get the place of the registered block, nor its children one.
    let forger = pool.allocate().unwrap();
    let salt = CacheSalt::try_new("a").unwrap();
    assert_eq!(pool.match_prefix(&[hash(1)], &tokens, Some(&salt)), []);
    assert_eq!(pool.register(forger, hash(1), &[9; BLOCK_TOKENS], None, None), forger);
    let child = pool.allocate().unwrap();
    assert_eq!(pool.register(child, hash(5), &[5; BLOCK_TOKENS], Some(forger), None), child);
    assert_eq!(pool.stats().n_registered, 2);
}

#[test]
fn a_block_computed_twice_is_kept_once() {
    let mut pool = BlockPool::new(2);
    let (first, second) = (pool.allocate().unwrap(), pool.allocate().unwrap());
    pool.register(first, hash(1), &[1; BLOCK_TOKENS], None, None);
    assert_eq!(pool.register(second, hash(1), &[1; BLOCK_TOKENS], None, None), first);
    assert_eq!((pool.n_holders(first), pool.n_holders(second)), (2, 0));
    assert_eq!(pool.n_free(), 1);
}

#[test]
fn the_least_recently_held_block_is_taken_first_and_children_before_parents() {
    let mut pool = BlockPool::new(4);
    let mut tables: Vec<Vec<BlockId>> = Vec::new();
    for stem in 0..2_u32 {
        let parent = pool.allocate().unwrap();
        let tokens = [stem; BLOCK_TOKENS];
        pool.register(parent, hash(u128::from(stem)), &tokens, None, None);
        let child = pool.allocate().unwrap();
        pool.register(child, hash(u128::from(10 + stem)), &tokens, Some(parent), None);
        tables.push(vec![parent, child]);
    }
    let expected = [tables[1][1], tables[1][0], tables[0][1], tables[0][0]];
    pool.release(&mut tables[1]);
    pool.release(&mut tables[0]);
    for block in expected {
        assert_eq!(pool.allocate(), Some(block));
    }
    assert_eq!(pool.allocate(), None);
    assert_eq!(pool.stats().n_evicted, 4);
}

#[test]
fn changes_that_are_recorded_late_begin_with_what_is_registered() {
    let mut pool = BlockPool::new(2);
    let (parent, child) = (pool.allocate().unwrap(), pool.allocate().unwrap());
    pool.register(parent, hash(1), &[1; BLOCK_TOKENS], None, None);
    pool.register(child, hash(2), &[2; BLOCK_TOKENS], Some(parent), None);
    assert_eq!(pool.take_changes().count(), 0);
    pool.record_changes();
    pool.record_changes();
    pool.release(&mut vec![parent, child]);
    pool.allocate();
    let registered = |hash, parent| BlockChange { hash, parent, is_registered: true };
    let changes: Vec<BlockChange> = pool.take_changes().collect();
    assert_eq!(changes[..2], [registered(hash(1), None), registered(hash(2), Some(hash(1)))]);
    let forgotten = BlockChange { hash: hash(2), parent: None, is_registered: false };
    assert_eq!(changes[2..], [forgotten]);
}

#[test]
#[should_panic(expected = "released twice")]
fn a_second_release_is_a_defect_of_the_caller() {
    let mut pool = BlockPool::new(1);
    let block = pool.allocate().unwrap();
    pool.release_block(block);
    pool.release_block(block);
}
