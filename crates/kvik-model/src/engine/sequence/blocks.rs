//! The block table of a sequence: what it starts from, how it grows, and what is left of it.
//!
//! A block that another sequence holds or may find is never written: it is copied first. A full block is registered once,
//! after its parents, and never if some of the sequence's KV came from outside.

use super::{Kind, Phase, Sequence, n_reusable_blocks};
use crate::engine::resident::Resident;
use crate::paging::{BLOCK_TOKENS, BlockId, BlockPool};

impl Sequence {
    /// Blocks that the first `n_tokens` tokens need beyond those in the table.
    pub(in crate::engine) fn n_missing_blocks(&self, n_tokens: usize) -> usize {
        n_tokens.div_ceil(BLOCK_TOKENS).saturating_sub(self.table.len())
    }

    /// Whether writing the next token would change a block that another sequence holds or may find.
    pub(in crate::engine) fn writes_shared_block(&self, pool: &BlockPool) -> bool {
        self.next_block_idx().is_some_and(|idx| {
            let block = self.table[idx];
            1 < pool.n_holders(block) || pool.is_registered(block)
        })
    }

    /// Index in the table of the partly filled block that the next token goes to.
    fn next_block_idx(&self) -> Option<usize> {
        let idx = self.n_computed / BLOCK_TOKENS;
        (!self.n_computed.is_multiple_of(BLOCK_TOKENS) && idx < self.table.len()).then_some(idx)
    }

    /// Puts `copy` in the place of the shared block that the next token goes to; returns the block
    /// that has to be copied there.
    pub(in crate::engine) fn replace_shared_block(
        &mut self,
        copy: BlockId,
        pool: &mut BlockPool,
    ) -> Option<BlockId> {
        let idx = self.next_block_idx()?;
        let shared = std::mem::replace(&mut self.table[idx], copy);
        pool.release_block(shared);
        Some(shared)
    }

    pub(in crate::engine) fn push_block(&mut self, block: BlockId) {
        self.table.push(block);
    }

    /// Starts from the registered blocks of the longest known prefix. At least the last token is
    /// left to compute, because its logits are needed.
    pub(in crate::engine) fn reuse_prefix(&mut self, pool: &mut BlockPool) {
        let n_reusable = n_reusable_blocks(self.tokens.len());
        self.hashes.extend_to(n_reusable, &self.tokens);
        let usable = &self.hashes.as_slice()[..n_reusable];
        self.table = pool.match_prefix(usable, &self.tokens, self.salt.as_ref());
        self.n_registered = self.table.len();
        self.n_computed = self.table.len() * BLOCK_TOKENS;
    }

    /// Starts from the blocks of `resident` as far as its tokens start this sequence, if it has the same salt
    /// and that is further than the registered blocks reach; gives back the blocks of the other.
    pub(in crate::engine) fn reuse_resident(&mut self, mut resident: Resident, pool: &mut BlockPool) {
        let usable = &self.tokens[..self.tokens.len() - 1];
        let n_common = usable.iter().zip(&resident.tokens).take_while(|(a, b)| a == b).count();
        if resident.salt != self.salt || n_common <= self.n_computed {
            pool.release(&mut resident.table);
            return;
        }
        let mut unused = resident.table.split_off(n_common.div_ceil(BLOCK_TOKENS));
        pool.release(&mut unused);
        pool.release(&mut self.table);
        self.table = resident.table;
        self.n_computed = n_common;
        // Full blocks whose parents are registered are so already, or never will be.
        self.n_registered = n_common / BLOCK_TOKENS;
        self.is_foreign = resident.is_foreign;
        self.has_resident = true;
        self.hashes.extend_to(self.n_registered, &self.tokens);
    }

    /// Number of its full blocks that may be kept when it has ended: none if some of its KV came from outside
    /// by name, or if it has failed.
    pub(in crate::engine) fn n_offered_blocks(&self) -> usize {
        if self.is_foreign || !self.is_exact() || self.phase == Phase::Failed {
            0
        } else {
            self.n_computed / BLOCK_TOKENS
        }
    }

    /// What stays of a sequence that has ended, and its name.
    pub(in crate::engine) fn into_resident(mut self) -> (Option<String>, Resident) {
        self.tokens.truncate(self.n_computed);
        let Self { name, tokens, table, is_foreign, salt, .. } = self;
        (name, Resident { tokens, table, is_foreign, salt })
    }

    /// Takes what was computed out of the sequence, with its name if it stands on a resident.
    pub(in crate::engine) fn take_computed(&mut self) -> (Option<String>, Resident) {
        let name = self.name.clone().filter(|_| self.has_resident);
        let table = if name.is_some() { std::mem::take(&mut self.table) } else { Vec::new() };
        let resident = Resident {
            tokens: self.computed_tokens().to_vec(),
            table,
            is_foreign: self.is_foreign,
            salt: self.salt.clone(),
        };
        (name, resident)
    }

    /// Marks `n_rows` more tokens as computed and registers the blocks that became full.
    pub(in crate::engine) fn advance(&mut self, n_rows: usize, pool: &mut BlockPool) {
        self.n_computed = match &mut self.kind {
            Kind::Blended(blended) if 0 < blended.n_pending() => {
                blended.advance(n_rows).unwrap_or(self.tokens.len())
            }
            _ => self.n_computed + n_rows,
        };
        if self.is_foreign || !self.is_exact() {
            return;
        }
        let n_full = self.n_computed / BLOCK_TOKENS;
        self.hashes.extend_to(n_full, &self.tokens);
        for idx in self.n_registered..n_full {
            let Some(tokens) = self.tokens[idx * BLOCK_TOKENS..].first_chunk::<BLOCK_TOKENS>() else {
                break;
            };
            let parent = idx.checked_sub(1).map(|parent_idx| self.table[parent_idx]);
            let hash = self.hashes.as_slice()[idx];
            self.table[idx] = pool.register(self.table[idx], hash, tokens, parent, self.salt.as_ref());
        }
        self.n_registered = self.n_registered.max(n_full);
    }

    /// Gives all blocks back; the sequence can be computed again.
    pub(in crate::engine) fn preempt(&mut self, pool: &mut BlockPool) {
        self.end_import(pool);
        pool.release(&mut self.table);
        self.n_computed = 0;
        self.n_registered = 0;
        self.has_resident = false;
        self.is_foreign = false;
        if let Kind::Blended(blended) = &mut self.kind {
            blended.reset();
        }
    }

    /// Gives all blocks back for good.
    pub(in crate::engine) fn release(mut self, pool: &mut BlockPool) {
        self.end_import(pool);
        pool.release(&mut self.table);
    }
}
