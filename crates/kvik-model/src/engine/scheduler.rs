//! Which rows the next forward pass computes.
//!
//! Policy. There is one budget of token rows. First every sequence that waits for one token gets
//! its row, oldest first, so that running outputs never stall behind a long prompt. Then prompts
//! that are partly computed take what is left, oldest first. Then waiting sequences are admitted,
//! oldest first and only while no sequence was preempted in this step: each takes the registered blocks
//! of its prefix and needs free blocks for all its tokens, so that an admission does not cause the
//! next preemption; KV that came in with its request goes into some of those. Sequences that wait
//! for credits, or are frozen, are passed over, and so are those whose next KV comes from outside before it could be
//! computed; while it is copied in, what lies behind it is computed as soon as the layers keep pace with the pass, if no other
//! sequence has rows. A prompt of which more may come is computed up to where that would go on. Blocks of ended sequences whose KV is being copied come back soon: an
//! admission that they are enough for waits. If no block is free for a running sequence, residents
//! give theirs back, oldest first, and then sequences that are on their way here; then ended sequences, which are not copied then; then a sequence
//! that waits for credits; then the youngest one, at worst the sequence itself. The oldest sequence with credits can thus always take every block, and
//! submission refuses what would not fit then: some sequence always advances. With memory that is shared
//! with other engines, every block means every block that the others leave: the oldest sequence may
//! have to wait for them.

use super::lost_device::lose;
use super::sequence::{Sequence, SequenceKey};
use super::{Engine, EngineEvent};

/// Rows of one sequence in the next pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct ScheduledRows {
    pub(super) key: SequenceKey,
    pub(super) n_rows: usize,
}

impl Engine {
    /// Chooses the rows of the next pass and takes the blocks that they write. The result is in
    /// the order in which its sequences run, and empty only if the engine is idle or others hold the
    /// memory. Admissions are appended to `events`.
    pub(super) fn schedule(&mut self, events: &mut Vec<EngineEvent>) -> Vec<ScheduledRows> {
        self.take_arrived(events);
        let mut budget = self.options.max_batched_tokens;
        let mut scheduled: Vec<ScheduledRows> = Vec::new();
        let n_preemptions = self.stats.n_preemptions;
        for wants_one_row in [true, false] {
            let keys: Vec<SequenceKey> = self.running.iter().map(Sequence::key).collect();
            for key in keys {
                // Gone if it was preempted for an older sequence.
                let Some(idx) = self.index_of(key) else { continue };
                let n_pending = self.running[idx].n_pending();
                let sequence = &self.running[idx];
                let has_its_kv = || sequence.has_its_kv(|| self.is_alone(key));
                if (n_pending == 1) != wants_one_row || sequence.is_paused() || !has_its_kv() {
                    continue;
                }
                if budget == 0 {
                    break;
                }
                let sequence = &mut self.running[idx];
                sequence.set_ahead(true);
                let n_rows = sequence.n_pending().min(budget).min(sequence.rows_before_look());
                if self.reserve_or_preempt(key, n_rows, &mut scheduled, &mut budget) {
                    scheduled.push(ScheduledRows { key, n_rows });
                    budget -= n_rows;
                }
            }
        }
        if n_preemptions == self.stats.n_preemptions {
            self.admit(&mut scheduled, &mut budget, events);
        }
        scheduled
    }

    /// Whether no other sequence has rows to compute that wait for no copy: a pass that waits for layers would make it wait.
    fn is_alone(&self, key: SequenceKey) -> bool {
        let has_rows =
            |other: &Sequence| !other.is_paused() && !other.is_importing() && !other.is_waiting_for_kv();
        !self.running.iter().any(|other| other.key() != key && has_rows(other))
    }

    fn index_of(&self, key: SequenceKey) -> Option<usize> {
        self.running.iter().position(|sequence| sequence.key() == key)
    }

    /// Admits waiting sequences while there is room.
    fn admit(
        &mut self,
        scheduled: &mut Vec<ScheduledRows>,
        budget: &mut usize,
        events: &mut Vec<EngineEvent>,
    ) {
        let n_admitted =
            |running: &[Sequence]| running.iter().filter(|sequence| !sequence.is_paused()).count();
        while 0 < *budget && n_admitted(&self.running) < self.options.max_sequences {
            let next = self.waiting.iter().position(|sequence| !sequence.is_paused());
            let Some(mut sequence) = next.and_then(|idx| self.waiting.remove(idx)) else { return };
            if self.options.reuses_prefixes && sequence.is_exact() {
                sequence.reuse_prefix(&mut self.pool);
            }
            if let Some(resident) = sequence.name().and_then(|name| self.residents.take(name)) {
                sequence.reuse_resident(resident, &mut self.pool);
            }
            let n_tokens = sequence.n_computed() + sequence.n_pending();
            let n_missing = sequence.n_missing_blocks(n_tokens);
            let is_free = self.ensure_free(n_missing);
            let will_be_free = !is_free && n_missing <= self.pool.n_free() + self.loans.n_blocks(&self.pool);
            if !will_be_free {
                while !self.pool.ensure_free(n_missing)
                    && (self.residents.evict_oldest(&mut self.pool)
                        || self.stages.evict_oldest(&mut self.pool))
                {}
            }
            let others_run = self.running.iter().any(|other| !other.is_paused());
            // A sequence that is alone may begin with less. It came to its end with that once if the engine is starved: then
            // it waits for all that it needs, which another engine may need less of.
            if self.pool.n_free() < n_missing && (will_be_free || others_run || self.is_starved) {
                // Nothing was computed on them yet: the blocks of a resident stay a resident's.
                if let (Some(name), resident) = sequence.take_computed() {
                    self.residents.insert(name, resident, &mut self.pool);
                }
                self.wait_again(sequence);
                return;
            }
            self.load_prefix(&mut sequence);
            if !self.assemble_or_fail(&mut sequence, events) {
                self.wait_again(sequence);
                return;
            }
            if sequence.is_finished() {
                sequence.release(&mut self.pool);
                continue;
            }
            let key = sequence.key();
            sequence.note_cached();
            self.tell_admitted(&mut sequence, events);
            let is_waiting = !sequence.has_its_kv(|| self.is_alone(key));
            sequence.set_ahead(!is_waiting);
            let n_rows = sequence.n_pending().min(*budget).min(sequence.rows_before_look());
            let place = self.running.partition_point(|other| other.key() < key);
            self.running.insert(place, sequence);
            if is_waiting {
                continue;
            }
            if self.reserve_or_preempt(key, n_rows, scheduled, budget) {
                scheduled.push(ScheduledRows { key, n_rows });
                *budget -= n_rows;
            } else {
                return;
            }
        }
    }

    /// Takes the blocks for the next `n_rows` rows of the sequence `key`, preempting the youngest
    /// sequences as needed; false if the sequence itself had to be preempted.
    fn reserve_or_preempt(
        &mut self,
        key: SequenceKey,
        n_rows: usize,
        scheduled: &mut Vec<ScheduledRows>,
        budget: &mut usize,
    ) -> bool {
        while let Some(idx) = self.index_of(key) {
            if self.try_reserve(idx, n_rows) {
                return true;
            }
            if self.loans.take_back(&mut self.pool)
                || self.residents.evict_oldest(&mut self.pool)
                || self.stages.evict_oldest(&mut self.pool)
                || self.end_loans()
            {
                continue;
            }
            let paused = self.running.iter().rposition(Sequence::is_paused);
            let victim_idx = paused.unwrap_or(self.running.len() - 1);
            let victim = self.running[victim_idx].key();
            for rows in scheduled.extract_if(.., |rows| rows.key == victim) {
                *budget += rows.n_rows;
            }
            self.preempt(victim_idx);
        }
        false
    }

    /// Takes the blocks for the next `n_rows` rows of the sequence at `idx`, all or none.
    fn try_reserve(&mut self, idx: usize, n_rows: usize) -> bool {
        let sequence = &mut self.running[idx];
        let n_missing = sequence.n_missing_blocks(sequence.n_covered(n_rows));
        let needs_copy = sequence.writes_shared_block(&self.pool);
        if !self.pool.ensure_free(n_missing + usize::from(needs_copy)) {
            return false;
        }
        if needs_copy
            && let Some(copy) = self.pool.allocate()
            && let Some(shared) = sequence.replace_shared_block(copy, &mut self.pool)
        {
            if let Err(error) = self.backend.copy_block(shared, copy) {
                lose(&mut self.lost_device, &error);
            }
            self.stats.n_block_copies += 1;
        }
        for _ in 0..n_missing {
            if let Some(block) = self.pool.allocate() {
                sequence.push_block(block);
            }
        }
        true
    }

    /// Takes the sequence at `idx` out of the running ones.
    fn preempt(&mut self, idx: usize) {
        // Not offered: its blocks are needed at once, and it will be offered when it ends.
        let mut sequence = self.running.remove(idx);
        // What has come of it is registered, and may be found again.
        drop(sequence.take_prefix());
        self.wait_again(sequence);
        self.stats.n_preemptions += 1;
    }

    /// Makes a sequence give its blocks back and wait in its order of arrival.
    fn wait_again(&mut self, mut sequence: Sequence) {
        sequence.preempt(&mut self.pool);
        let place = self.waiting.partition_point(|other| other.key() < sequence.key());
        self.waiting.insert(place, sequence);
    }
}
