//! KV that leaves the engine with an ended sequence, and KV that comes in with a request.
//!
//! Both go by whole blocks, as bytes that only a backend with the same layout understands. Because of batch
//! invariance they are the bytes that this engine would have computed, so blocks that came in are registered
//! like its own. Where they are kept in between is not the engine's business; that they belong to the same
//! model, layout and tokens is the promise of whoever hands them in. KV that came in by name carries no such
//! promise and never leaves this way.

use std::fmt;

use kvik_types::hash::block_hashes;
use kvik_types::{BlockHash, Namespace, TokenId};

use super::Engine;
use super::sequence::Sequence;
use crate::forward::Backend;
use crate::paging::{BLOCK_TOKENS, BlockChange, BlockId};

/// Takes the KV of sequences that give their blocks back.
///
/// It is asked on the engine's thread, between two passes: an implementation copies what it wants to have and
/// returns.
pub trait KvSink: Send + fmt::Debug {
    /// Offers a sequence that has ended, was ended by its client, or is preempted.
    ///
    /// The same tokens may be offered again, by another sequence or by the same one after a preemption, and
    /// have the same bytes then.
    fn offer(&mut self, sequence: &EndedSequence<'_>);
}

/// KV of consecutive blocks of a prompt, from outside of the engine.
///
/// The implementation MUST give only bytes that a backend with the layout and the weights of this engine has
/// exported for exactly the prompt's tokens from its start to the end of the block.
pub trait PrefixKv: Send + fmt::Debug {
    /// Position of the first token; a multiple of [`BLOCK_TOKENS`].
    fn first_token(&self) -> usize;

    /// Number of tokens from there; a multiple of [`BLOCK_TOKENS`].
    fn n_tokens(&self) -> usize;

    /// The bytes of one block of one layer; `block_idx` counts from the start of the prompt.
    ///
    /// `None`, or another length than [`Engine::block_layer_bytes`], ends the prefix before this block.
    fn block(&self, layer_idx: usize, block_idx: usize) -> Option<&[u8]>;
}

/// The full blocks of a sequence that is about to give them back.
#[derive(Debug, Clone, Copy)]
pub struct EndedSequence<'a> {
    pub(super) backend: &'a dyn Backend,
    /// Whole blocks.
    pub(super) tokens: &'a [TokenId],
    pub(super) n_prompt_tokens: usize,
    /// One for each block, as are `table`.
    pub(super) hashes: &'a [BlockHash],
    pub(super) table: &'a [BlockId],
}

impl EndedSequence<'_> {
    /// The tokens whose KV is there: the sequence from its start to the end of its last full block.
    pub fn tokens(&self) -> &[TokenId] {
        self.tokens
    }

    /// Of these, tokens of the prompt.
    pub fn n_prompt_tokens(&self) -> usize {
        self.n_prompt_tokens
    }

    /// Of these, tokens that were generated.
    pub fn n_generated_tokens(&self) -> usize {
        self.tokens.len() - self.n_prompt_tokens
    }

    /// The hash of each block in the engine's namespace, which covers all tokens up to the block's end.
    pub fn block_hashes(&self) -> &[BlockHash] {
        self.hashes
    }

    /// Number of blocks; at least one.
    pub fn n_blocks(&self) -> usize {
        self.table.len()
    }

    /// Number of layers.
    pub fn n_layers(&self) -> usize {
        self.backend.config().n_layers
    }

    /// Bytes of one block in one layer.
    pub fn block_layer_bytes(&self) -> usize {
        self.backend.block_layer_bytes()
    }

    /// Copies one block of one layer to `out`.
    ///
    /// # Panics
    /// If there is no such layer or block, or `out` is not exactly [`EndedSequence::block_layer_bytes`] long.
    pub fn read_block(&self, layer_idx: usize, block_idx: usize, out: &mut [u8]) {
        self.backend.export_block(layer_idx, self.table[block_idx], out);
    }
}

impl Engine {
    /// Sets who is offered the KV of sequences that give their blocks back.
    pub fn set_kv_sink(&mut self, sink: Box<dyn KvSink>) {
        self.kv_sink = Some(sink);
    }

    /// What KV may be mixed with that of this engine.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Names the bytes of a block; see [`Backend::kv_layout`].
    pub fn kv_layout(&self) -> String {
        self.backend.kv_layout()
    }

    /// Bytes of one block in one layer, as they leave and come in.
    pub fn block_layer_bytes(&self) -> usize {
        self.backend.block_layer_bytes()
    }

    /// How many tokens of the prompt `tokens` a request would find in the pool now; whole blocks.
    ///
    /// Nothing is held: they may be gone when the request is admitted.
    pub fn matched_tokens(&self, tokens: &[TokenId]) -> usize {
        if !self.options.reuses_prefixes {
            return 0;
        }
        let mut chain = self.first_chain.clone();
        // The last token is computed in any case, because its logits are needed.
        let usable = &tokens[..tokens.len().saturating_sub(1)];
        let n_blocks = self.pool.known_prefix(block_hashes(&mut chain, usable), usable).count();
        n_blocks * BLOCK_TOKENS
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

    /// Offers the blocks of a sequence that is about to give them back.
    pub(super) fn offer(&mut self, sequence: &Sequence) {
        if let Some(sink) = &mut self.kv_sink
            && let Some(ended) = sequence.ended(self.backend.as_ref())
        {
            sink.offer(&ended);
        }
    }

    /// Copies the KV that came in with the sequence into blocks of its own and drops it, as far as it goes on
    /// from what the sequence has and blocks can be had without taking them from anybody; the rest is computed.
    pub(super) fn load_prefix(&mut self, sequence: &mut Sequence) {
        let Some(prefix) = sequence.take_prefix() else { return };
        for block_idx in sequence.loadable_blocks(prefix.as_ref()) {
            let Some(block) = self.pool.allocate() else { return };
            if !self.load_block(prefix.as_ref(), block_idx, block) {
                self.pool.release_block(block);
                return;
            }
            sequence.push_loaded(block_idx, block, &mut self.pool);
        }
    }

    /// Writes one block in all layers; false if one is missing or has the wrong size. The block has no
    /// meaning then.
    fn load_block(&mut self, prefix: &dyn PrefixKv, block_idx: usize, block: BlockId) -> bool {
        (0..self.backend.config().n_layers).all(|layer_idx| {
            let bytes = prefix.block(layer_idx, block_idx);
            bytes.is_some_and(|bytes| self.backend.import_block(layer_idx, block, bytes).is_ok())
        })
    }
}
