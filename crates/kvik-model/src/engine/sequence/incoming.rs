//! KV that comes into a sequence from outside.

use std::ops::Range;
use std::sync::Arc;

use super::{Cached, Sequence};
use crate::engine::prefix::PrefixKv;
use crate::forward::KvImport;
use crate::paging::{BLOCK_TOKENS, BlockId, BlockPool};

/// Blocks of a prefix that are being copied: their places in the sequence, and the copy.
#[derive(Debug)]
pub(in crate::engine) struct Incoming {
    pub(in crate::engine) blocks: Vec<(usize, BlockId)>,
    pub(in crate::engine) import: Box<dyn KvImport>,
}

impl Incoming {
    /// Gives the blocks back; waits for the end of the copy before.
    pub(in crate::engine) fn discard(self, pool: &mut BlockPool) {
        drop(self.import);
        for (_, block) in self.blocks {
            pool.release_block(block);
        }
    }
}

impl Sequence {
    pub(in crate::engine) fn take_prefix(&mut self) -> Option<Arc<dyn PrefixKv>> {
        self.prefix.take()
    }

    pub(in crate::engine) fn has_prefix(&self) -> bool {
        self.prefix.is_some()
    }

    /// Keeps a prefix whose blocks are being copied.
    pub(in crate::engine) fn hold_prefix(&mut self, prefix: Arc<dyn PrefixKv>) {
        self.prefix = Some(prefix);
    }

    /// Keeps a prefix of which more may come; one of which nothing more can is dropped.
    pub(in crate::engine) fn keep_prefix(&mut self, prefix: Arc<dyn PrefixKv>) {
        let next = prefix.look_again_at(self.n_computed);
        // The last token is computed without it: its pass ends the prompt.
        let is_wanted = next.is_some_and(|at| self.n_computed < at && at < self.tokens.len());
        self.prefix = Some(prefix).filter(|_| is_wanted && !self.is_foreign);
    }

    /// Rows that may be computed before the sequence looks for more KV from outside.
    pub(in crate::engine) fn rows_before_look(&self) -> usize {
        let next = self.prefix.as_ref().and_then(|prefix| prefix.look_again_at(self.n_computed));
        next.map_or(usize::MAX, |at| at.saturating_sub(self.n_computed).max(1))
    }

    /// Lets blocks be copied in; the sequence waits for them.
    pub(in crate::engine) fn expect(&mut self, incoming: Incoming) {
        self.incoming = Some(incoming);
    }

    pub(in crate::engine) fn is_importing(&self) -> bool {
        self.incoming.is_some()
    }

    /// The blocks that were being copied, when the copy has ended.
    pub(in crate::engine) fn take_arrived(&mut self) -> Option<Incoming> {
        self.incoming.take_if(|incoming| incoming.import.is_done())
    }

    /// Whether what comes next may be computed. A copy that has ended since it was last looked at counts only with the next look:
    /// its blocks are not the sequence's yet.
    pub(in crate::engine) fn has_its_kv(&self) -> bool {
        !self.is_importing() && !self.is_waiting_for_kv()
    }

    /// Whether its next KV comes from outside before it could be computed.
    pub(in crate::engine) fn is_waiting_for_kv(&self) -> bool {
        if let Some(incoming) = &self.incoming {
            return !incoming.import.is_done();
        }
        self.prefix.as_ref().is_some_and(|prefix| prefix.is_due(self.n_computed))
    }

    /// The blocks that `prefix` may add now to what the sequence has: none if there is a gap between the two, or
    /// if what it has came from outside, because blocks behind that are never registered. At least the last
    /// token is left to compute.
    pub(in crate::engine) fn loadable_blocks(&self, prefix: &dyn PrefixKv) -> Range<usize> {
        let first = self.n_computed / BLOCK_TOKENS;
        let end_token = prefix.there_until(first * BLOCK_TOKENS);
        let end = (end_token / BLOCK_TOKENS).min((self.tokens.len() - 1) / BLOCK_TOKENS);
        if self.is_foreign { first..first } else { first..end.max(first) }
    }

    /// Goes on after a full block that came in with the request, in the place of a partly filled one if there
    /// is one, and registers it.
    pub(in crate::engine) fn push_loaded(&mut self, block_idx: usize, block: BlockId, pool: &mut BlockPool) {
        match self.table.get_mut(block_idx) {
            Some(partial) => pool.release_block(std::mem::replace(partial, block)),
            None => self.table.push(block),
        }
        let n_more = (block_idx + 1) * BLOCK_TOKENS - self.n_computed;
        self.n_loaded += n_more;
        if let Cached::Counted(n_cached) = &mut self.cached {
            *n_cached += n_more;
        }
        self.advance(n_more, pool);
    }

    /// Remembers, at the first admission, how much of the prompt was found.
    pub(in crate::engine) fn note_cached(&mut self) {
        if let Cached::Unknown = self.cached {
            // Tokens of segments are counted as blended, not as cached.
            self.cached = Cached::Counted(if self.is_exact() { self.n_computed } else { 0 });
        }
    }

    /// How much of the prompt was found and how much of that came in with the request: once, when no more can come.
    pub(in crate::engine) fn take_admitted(&mut self) -> Option<(usize, usize)> {
        let Cached::Counted(n_cached) = self.cached else { return None };
        if self.prefix.is_some() {
            return None;
        }
        self.cached = Cached::Told(n_cached);
        Some((n_cached, self.n_loaded))
    }

    /// Gives back blocks that are being copied, when that has ended.
    pub(in crate::engine) fn end_import(&mut self, pool: &mut BlockPool) {
        if let Some(incoming) = self.incoming.take() {
            incoming.discard(pool);
        }
    }
}
