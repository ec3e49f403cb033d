//! KV that leaves the engine with an ended sequence, and KV that comes in with a request.
//!
//! Both go by whole blocks, as bytes that only a backend with the same layout understands. Because of batch
//! invariance they are the bytes that this engine would have computed, so blocks that came in are registered
//! like its own. Where they are kept in between is not the engine's business; the caller that hands them in
//! promises that they belong to the same model, layout and tokens. KV that came in by name carries no such
//! promise and never leaves this way.

use std::ops::Range;
use std::sync::Arc;

use kvik_types::{BlockHash, Namespace};
use tracing::warn;

use super::Engine;
use super::ended::{EndedSequence, KvSink};
use super::lost_device::lose;
use super::prefix::PrefixKv;
use super::request::{EngineEvent, PreparedRequest};
use super::sequence::{Incoming, Sequence};
use crate::forward::{BlockImport, BlockSource, RowPositions};
use crate::paging::{BLOCK_TOKENS, BlockChange, BlockId};

/// Blocks that are copied at a time: enough for a device's copy engine, few enough that little is lost where one is missing.
const BLOCKS_AT_A_TIME: usize = 256;

/// Fewer blocks are copied at once: the next pass need not wait for another.
const MIN_IMPORTED_BLOCKS: usize = 4;

impl Engine {
    /// Sets what is offered the KV of ended sequences.
    pub fn set_kv_sink(&mut self, sink: Box<dyn KvSink>) {
        self.kv_sink = Some(sink);
    }

    /// Sets what is called, on another thread, when an ended sequence gives its blocks back: step then, if there
    /// is work.
    pub fn set_loan_waker(&mut self, waker: Box<dyn Fn() + Send + Sync>) {
        self.loans.set_waker(Arc::from(waker));
    }

    /// What KV may be mixed with that of this engine.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Names the bytes of a block; see [`Backend::kv_layout`](crate::Backend::kv_layout).
    pub fn kv_layout(&self) -> String {
        self.backend.kv_layout()
    }

    /// Bytes of one block in one layer, as they leave and come in.
    pub fn block_layer_bytes(&self) -> usize {
        self.backend.block_layer_bytes()
    }

    /// The longest section of a [`KvFile`](crate::KvFile) that KV comes in from; `None` where it comes from memory alone.
    pub fn max_file_section_bytes(&self) -> Option<usize> {
        self.backend.max_file_section_bytes()
    }

    /// How many tokens of its prompt a request would find in the pool now; whole blocks.
    ///
    /// Nothing is held: they may be gone when the request is admitted.
    pub fn matched_tokens(&self, prepared: &PreparedRequest) -> usize {
        if !self.options.reuses_prefixes {
            return 0;
        }
        let (hashes, salt) = (prepared.hashes.as_slice(), prepared.options.salt.as_ref());
        self.pool.known_prefix(hashes, &prepared.request.prompt, salt).count() * BLOCK_TOKENS
    }

    /// Writes down from now on which blocks can be found by their hash; see [`BlockPool::record_changes`](crate::BlockPool::record_changes).
    pub fn record_block_changes(&mut self) {
        self.pool.record_changes();
    }

    /// Takes what was written down; call it after every step and whatever else changes the engine.
    pub fn take_block_changes(&mut self) -> std::vec::Drain<'_, BlockChange> {
        self.pool.take_changes()
    }

    /// The hashes of all blocks that a prompt could find, in no order.
    pub fn registered_blocks(&self) -> impl Iterator<Item = BlockHash> {
        self.pool.registered()
    }

    /// Offers the full blocks of a sequence that has ended, and lends them for as long as that takes.
    pub(super) fn offer(&mut self, sequence: &Sequence) {
        let Some(sink) = self.kv_sink.as_mut().filter(|_| self.lost_device.is_none()) else { return };
        let n_blocks = sequence.n_offered_blocks();
        let (n_layers, block_layer_bytes) =
            (self.backend.config().n_layers, self.backend.block_layer_bytes());
        if n_blocks == 0 || !sink.has_room(n_blocks * n_layers * block_layer_bytes) {
            return;
        }
        let blocks = &sequence.table()[..n_blocks];
        let kv = match self.backend.pin_blocks(blocks) {
            Ok(kv) => kv,
            Err(error) => return lose(&mut self.lost_device, &error),
        };
        let tokens = sequence.computed_tokens()[..n_blocks * BLOCK_TOKENS].to_vec();
        sink.offer(EndedSequence {
            n_prompt_tokens: sequence.n_prompt().min(tokens.len()),
            tokens,
            salt: sequence.salt().cloned(),
            hashes: sequence.hashes()[..n_blocks].to_vec(),
            attachment: sequence.attachment(),
            n_layers,
            block_layer_bytes,
            kv,
            _loan: self.loans.give(blocks, &mut self.pool),
        });
        self.loans.take_back(&mut self.pool);
    }

    /// Whether `n_blocks` are free, with those that ended sequences have given back.
    pub(super) fn ensure_free(&mut self, n_blocks: usize) -> bool {
        self.pool.ensure_free(n_blocks)
            || (self.loans.take_back(&mut self.pool) && self.pool.ensure_free(n_blocks))
    }

    /// Makes ended sequences give their blocks back before they are copied; says whether some came back.
    pub(super) fn end_loans(&mut self) -> bool {
        if let Some(sink) = &mut self.kv_sink {
            sink.give_up();
        }
        self.loans.take_back(&mut self.pool)
    }

    /// Copies the KV that came in with the sequence into blocks of its own, as far as it is there, goes on from what the
    /// sequence has, and blocks can be had without a preemption; the rest is computed. The KV is dropped unless more of it
    /// may come.
    pub(super) fn load_prefix(&mut self, sequence: &mut Sequence) {
        if sequence.is_importing() && !self.take_imported(sequence) {
            return;
        }
        let Some(prefix) = sequence.take_prefix() else { return };
        let first_token = sequence.n_computed();
        let block_idxs = sequence.loadable_blocks(prefix.as_ref());
        let is_beside = (MIN_IMPORTED_BLOCKS <= block_idxs.len() && self.backend.imports_beside_passes())
            || (!block_idxs.is_empty() && !prefix.layers().has_ended);
        let is_whole = if is_beside {
            self.start_import(sequence, &prefix, block_idxs)
        } else {
            self.load_blocks(sequence, prefix.as_ref(), block_idxs)
        };
        if first_token < sequence.n_computed() {
            prefix.note_taken(first_token..sequence.n_computed());
        }
        if sequence.is_importing() {
            sequence.hold_prefix(prefix);
        } else if is_whole {
            sequence.keep_prefix(prefix);
        }
    }

    /// Has the blocks of a prefix copied in beside passes; false if none of it can be copied.
    fn start_import(
        &mut self,
        sequence: &mut Sequence,
        prefix: &Arc<dyn PrefixKv>,
        block_idxs: Range<usize>,
    ) -> bool {
        let blocks: Vec<(usize, BlockId)> =
            block_idxs.map_while(|block_idx| Some((block_idx, self.pool.allocate()?))).collect();
        let source: Arc<dyn BlockSource> = Arc::clone(prefix) as Arc<dyn BlockSource>;
        if let Some(&(last_idx, _)) = blocks.last()
            && let Some(import) = self.backend.start_import(&source, &blocks)
        {
            let pass_s = self.expected_pass_s(sequence, (last_idx + 1) * BLOCK_TOKENS);
            let incoming = Incoming::new(import, self.backend.config().n_layers, pass_s);
            sequence.expect(incoming, blocks, &mut self.pool);
            return true;
        }
        for (_, block) in blocks {
            self.pool.release_block(block);
        }
        false
    }

    /// Goes on after blocks that were copied in beside passes; false while they still are.
    fn take_imported(&mut self, sequence: &mut Sequence) -> bool {
        let Some(incoming) = sequence.take_arrived() else { return false };
        self.end_copy(sequence, incoming);
        true
    }

    /// Goes on after blocks that were copied in; false if that has failed: they are computed then.
    pub(super) fn end_copy(&mut self, sequence: &mut Sequence, incoming: Incoming) -> bool {
        let (tokens, import) = incoming.into_parts();
        if let Err(error) = self.backend.finish_import(import) {
            warn!(%error, "could not copy KV in; it is computed");
            // What has lost its end meanwhile is tried again without it, and what is still coming when more of it is there.
            let is_wanted = |prefix: &Arc<dyn PrefixKv>| {
                prefix.there_until(tokens.start) < tokens.end || !prefix.layers().has_ended
            };
            if let Some(prefix) = sequence.take_prefix().filter(is_wanted) {
                sequence.hold_prefix(prefix);
            }
            return false;
        }
        sequence.note_loaded(tokens.clone(), &mut self.pool);
        if let Some(prefix) = sequence.take_prefix() {
            prefix.note_taken(tokens);
            sequence.keep_prefix(prefix);
        }
        true
    }

    /// Seconds that a pass over the rows of a sequence from `first_token` on should take.
    fn expected_pass_s(&self, sequence: &Sequence, first_token: usize) -> f64 {
        let n_left = sequence.tokens().len().saturating_sub(first_token);
        let n_rows = n_left.min(self.options.max_batched_tokens);
        let n_attended = RowPositions::From(first_token).n_attended(n_rows);
        self.pass_times.expected_s(n_rows, n_attended)
    }

    /// Copies what is there of a prefix; false if not all of it could be copied.
    fn load_blocks(
        &mut self,
        sequence: &mut Sequence,
        prefix: &dyn PrefixKv,
        block_idxs: Range<usize>,
    ) -> bool {
        let block_idxs: Vec<usize> = block_idxs.collect();
        let (n_layers, layer_bytes) = (self.backend.config().n_layers, self.backend.block_layer_bytes());
        for group in block_idxs.chunks(BLOCKS_AT_A_TIME) {
            let mut blocks = Vec::with_capacity(group.len());
            let mut imports = Vec::with_capacity(group.len() * n_layers);
            for &block_idx in group {
                let bytes_of =
                    |layer_idx| prefix.block(layer_idx, block_idx).filter(|bytes| bytes.len() == layer_bytes);
                let Some(layers) = (0..n_layers).map(bytes_of).collect::<Option<Vec<&[u8]>>>() else { break };
                let Some(block) = self.pool.allocate() else { break };
                blocks.push(block);
                let layers = layers.into_iter().enumerate();
                imports.extend(layers.map(|(layer_idx, bytes)| BlockImport { layer_idx, block, bytes }));
            }
            if self.backend.import_blocks(&imports).is_err() {
                // What they hold has no meaning.
                for block in blocks {
                    self.pool.release_block(block);
                }
                return false;
            }
            let is_whole = blocks.len() == group.len();
            for (&block_idx, block) in group.iter().zip(blocks) {
                sequence.push_loaded(block_idx, block, &mut self.pool);
            }
            if !is_whole {
                return false;
            }
        }
        true
    }

    /// Copies what has arrived for running sequences, and reports by an event those for which nothing more comes.
    pub(super) fn take_arrived(&mut self, events: &mut Vec<EngineEvent>) {
        for idx in 0..self.running.len() {
            if !self.running[idx].has_prefix() || self.running[idx].is_paused() {
                continue;
            }
            let mut sequence = self.running.remove(idx);
            self.load_prefix(&mut sequence);
            self.tell_admitted(&mut sequence, events);
            self.running.insert(idx, sequence);
        }
    }

    /// Reports a sequence that runs for the first time, when it is known how much of its prompt came in with it.
    pub(super) fn tell_admitted(&mut self, sequence: &mut Sequence, events: &mut Vec<EngineEvent>) {
        if let Some((cached_tokens, loaded_tokens)) = sequence.take_admitted() {
            self.stats.n_cached_tokens += cached_tokens as u64;
            self.stats.n_loaded_tokens += loaded_tokens as u64;
            let request = sequence.request;
            events.push(EngineEvent::Admitted { request, cached_tokens, loaded_tokens });
        }
    }
}
