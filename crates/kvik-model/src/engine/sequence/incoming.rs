//! KV that comes into a sequence from outside.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::{Cached, Sequence, n_reusable_blocks};
use crate::engine::prefix::PrefixKv;
use crate::forward::KvImport;
use crate::paging::{BLOCK_TOKENS, BlockId, BlockPool};

/// Blocks of a prefix that are being copied. They are in the table of their sequence, behind what is computed.
#[derive(Debug)]
pub(in crate::engine) struct Incoming {
    import: Box<dyn KvImport>,
    /// Tokens of the sequence that had KV when the copy began.
    first_token: usize,
    /// Behind its last token.
    end_token: usize,
    n_layers: usize,
    /// Layers that were there when it began: how fast they came is not known.
    n_first_layers: usize,
    begun_at: Instant,
    /// What a pass over the tokens behind it should take.
    pass_s: f64,
    /// Whether the next pass computes the tokens behind it, and waits for each layer of it.
    is_ahead: bool,
}

impl Incoming {
    pub(in crate::engine) fn new(import: Box<dyn KvImport>, n_layers: usize, pass_s: f64) -> Self {
        Self {
            n_first_layers: import.n_layers_there(),
            import,
            first_token: 0,
            end_token: 0,
            n_layers,
            begun_at: Instant::now(),
            pass_s,
            is_ahead: false,
        }
    }

    /// Its tokens, and the copy.
    pub(in crate::engine) fn into_parts(self) -> (Range<usize>, Box<dyn KvImport>) {
        (self.first_token..self.end_token, self.import)
    }

    /// Whether the layers that have not come should be there before a pass that begins now needs them: other sequences of the pass
    /// do not wait for the copy then.
    fn keeps_pace(&self) -> bool {
        let n_there = self.import.n_layers_there();
        let n_left = self.n_layers.saturating_sub(n_there);
        let n_come = n_there.saturating_sub(self.n_first_layers);
        if n_left == 0 || n_come == 0 {
            return n_left == 0;
        }
        let layer_s = self.begun_at.elapsed().as_secs_f64() / n_come as f64;
        // The pass is done with all layers but the last when it needs the last.
        let before_last = self.n_layers.saturating_sub(1) as f64 / self.n_layers.max(1) as f64;
        n_left as f64 * layer_s <= self.pass_s * before_last
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
        let next_token = self.next_token();
        let next = self.prefix.as_ref().and_then(|prefix| prefix.look_again_at(next_token));
        next.map_or(usize::MAX, |at| at.saturating_sub(next_token).max(1))
    }

    /// Lets blocks be copied in; the sequence waits for them. They follow on what is computed, in the place of a partly filled
    /// block if there is one: what that has comes with them.
    pub(in crate::engine) fn expect(
        &mut self,
        mut incoming: Incoming,
        blocks: Vec<(usize, BlockId)>,
        pool: &mut BlockPool,
    ) {
        incoming.first_token = self.n_computed;
        for (block_idx, block) in blocks {
            self.n_computed = self.n_computed.min(block_idx * BLOCK_TOKENS);
            incoming.end_token = (block_idx + 1) * BLOCK_TOKENS;
            self.set_block(block_idx, block, pool);
        }
        self.incoming = Some(incoming);
    }

    fn set_block(&mut self, block_idx: usize, block: BlockId, pool: &mut BlockPool) {
        match self.table.get_mut(block_idx) {
            Some(partial) => pool.release_block(std::mem::replace(partial, block)),
            None => self.table.push(block),
        }
    }

    /// Whether the tokens behind a copy can be computed while it goes on: it keeps pace, and what lies behind it does not come
    /// from outside too.
    fn may_run_ahead(&self) -> bool {
        let Some(incoming) = &self.incoming else { return false };
        let (end, usable_end) = (incoming.end_token, n_reusable_blocks(self.tokens.len()) * BLOCK_TOKENS);
        let has_more = |prefix: &Arc<dyn PrefixKv>| {
            end < usable_end && (end < prefix.there_until(end) || prefix.is_due(end))
        };
        incoming.keeps_pace() && !self.prefix.as_ref().is_some_and(has_more)
    }

    /// Makes the next pass compute the tokens behind a copy, if there is one, or not. Invariant: none is ahead between steps.
    pub(in crate::engine) fn set_ahead(&mut self, is_ahead: bool) {
        if let Some(incoming) = &mut self.incoming {
            incoming.is_ahead = is_ahead;
        }
    }

    /// The copy that the next pass waits for.
    pub(in crate::engine) fn awaited(&self) -> Option<&dyn KvImport> {
        self.incoming.as_ref().filter(|incoming| incoming.is_ahead).map(|incoming| incoming.import.as_ref())
    }

    /// Takes the copy that a pass has waited for.
    pub(in crate::engine) fn take_awaited(&mut self) -> Option<Incoming> {
        self.incoming.take_if(|incoming| incoming.is_ahead)
    }

    /// The first token that is computed next.
    pub(super) fn next_token(&self) -> usize {
        let ahead = self.incoming.as_ref().filter(|incoming| incoming.is_ahead);
        ahead.map_or(self.n_computed, |incoming| incoming.end_token)
    }

    pub(in crate::engine) fn is_importing(&self) -> bool {
        self.incoming.is_some()
    }

    /// The blocks that were being copied, when the copy has ended.
    pub(in crate::engine) fn take_arrived(&mut self) -> Option<Incoming> {
        self.incoming.take_if(|incoming| incoming.import.is_done())
    }

    /// Whether what comes next may be computed, in a pass without other sequences while KV is copied in. A copy that has ended since it
    /// was last looked at counts only with the next look: its blocks are not the sequence's yet.
    pub(in crate::engine) fn has_its_kv(&self, is_alone: impl FnOnce() -> bool) -> bool {
        if self.is_importing() { self.may_run_ahead() && is_alone() } else { !self.is_waiting_for_kv() }
    }

    /// Whether its next KV comes from outside before it could be computed.
    pub(in crate::engine) fn is_waiting_for_kv(&self) -> bool {
        if let Some(incoming) = &self.incoming {
            return !incoming.import.is_done() && !self.may_run_ahead();
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
        self.set_block(block_idx, block, pool);
        self.note_loaded(self.n_computed..(block_idx + 1) * BLOCK_TOKENS, pool);
    }

    /// Goes on after tokens whose KV came in with the request: their blocks are in the table.
    pub(in crate::engine) fn note_loaded(&mut self, tokens: Range<usize>, pool: &mut BlockPool) {
        self.n_loaded += tokens.len();
        if let Cached::Counted(n_cached) = &mut self.cached {
            *n_cached += tokens.len();
        }
        self.advance(tokens.end - self.n_computed, pool);
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
            drop(incoming);
            let n_used = self.n_computed.div_ceil(BLOCK_TOKENS).min(self.table.len());
            pool.release(&mut self.table.split_off(n_used));
        }
    }
}
