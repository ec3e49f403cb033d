//! Sequences that have ended, on their way out of the engine.
//!
//! Their KV is copied on another thread while the engine goes on. Until that is done, the pool counts them as
//! holders of their blocks and the backend keeps those as they are, so what is copied is what was computed.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use kvik_types::{BlockHash, CacheSalt, TokenId};

use crate::error::Result;
use crate::forward::PinnedKv;
use crate::paging::{BlockId, BlockPool};

/// Called when blocks come back.
type Waker = Arc<dyn Fn() + Send + Sync>;

/// Takes the KV of ended sequences.
///
/// It is asked on the engine's thread, between two passes, and must not hold that up: it hands sequences to a
/// thread of its own and returns.
pub trait KvSink: Send + fmt::Debug {
    /// Whether a sequence with `n_bytes` of KV would be taken now.
    fn has_room(&mut self, n_bytes: usize) -> bool {
        let _ = n_bytes;
        true
    }

    /// Offers a sequence that has ended or was ended by its client. Its blocks are missing to the engine until
    /// it is dropped.
    ///
    /// The same tokens may be offered again by another sequence, and have the same bytes then.
    fn offer(&mut self, sequence: EndedSequence);

    /// Drops the sequences that were not begun, and soon the one that is under way: the engine needs blocks.
    fn give_up(&mut self) {}
}

/// The full blocks of a sequence that has ended.
pub struct EndedSequence {
    pub(super) tokens: Vec<TokenId>,
    pub(super) n_prompt_tokens: usize,
    pub(super) salt: Option<CacheSalt>,
    pub(super) hashes: Vec<BlockHash>,
    pub(super) attachment: Option<Arc<dyn Any + Send + Sync>>,
    pub(super) n_layers: usize,
    pub(super) block_layer_bytes: usize,
    // Before the loan: what is pinned is not written until it is let go here, also if it is handed out again.
    pub(super) kv: Box<dyn PinnedKv>,
    pub(super) _loan: Loan,
}

/// Blocks that ended sequences hold.
#[derive(Debug)]
pub(super) struct Loans {
    by_id: HashMap<u64, Vec<BlockId>>,
    n_given: u64,
    sender: Sender<u64>,
    ended: Receiver<u64>,
    waker: LoanWaker,
}

/// The blocks of one ended sequence; they come back when it is dropped.
#[derive(Debug)]
pub(super) struct Loan {
    id: u64,
    sender: Sender<u64>,
    waker: LoanWaker,
}

#[derive(Clone, Default)]
struct LoanWaker(Option<Waker>);

// === impl EndedSequence ===

impl EndedSequence {
    /// The tokens whose KV is there: the sequence from its start to the end of its last full block.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Of these, tokens of the prompt.
    pub fn n_prompt_tokens(&self) -> usize {
        self.n_prompt_tokens
    }

    /// Of these, tokens that were generated.
    pub fn n_generated_tokens(&self) -> usize {
        self.tokens.len() - self.n_prompt_tokens
    }

    /// What keeps its KV apart from that of requests with other salts or none.
    pub fn salt(&self) -> Option<&CacheSalt> {
        self.salt.as_ref()
    }

    /// What was attached to its request.
    pub fn attachment(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.attachment.as_deref()
    }

    /// The hash of each block in the engine's namespace, which covers the salt and all tokens up to the
    /// block's end.
    pub fn block_hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// Number of blocks; at least one.
    pub fn n_blocks(&self) -> usize {
        self.hashes.len()
    }

    /// Number of layers.
    pub fn n_layers(&self) -> usize {
        self.n_layers
    }

    /// Bytes of one block in one layer.
    pub fn block_layer_bytes(&self) -> usize {
        self.block_layer_bytes
    }

    /// Bytes of all blocks in all layers.
    pub fn n_bytes(&self) -> usize {
        self.n_blocks() * self.n_layers * self.block_layer_bytes
    }

    /// Copies one block of one layer to `out`.
    ///
    /// # Errors
    /// If the device fails; `out` may have any bytes then and MUST not be kept as KV.
    ///
    /// # Panics
    /// If there is no such layer or block, or `out` is not exactly [`EndedSequence::block_layer_bytes`] long.
    pub fn read_block(&self, layer_idx: usize, block_idx: usize, out: &mut [u8]) -> Result<()> {
        self.kv.read_block(layer_idx, block_idx, out)
    }

    /// Copies some of the blocks to `out`: layer by layer, and in each block by block.
    ///
    /// # Errors
    /// As [`EndedSequence::read_block`].
    ///
    /// # Panics
    /// As [`EndedSequence::read_block`], if `out` is not exactly as long as all of them.
    pub fn read_blocks(&self, blocks: Range<usize>, out: &mut [u8]) -> Result<()> {
        self.kv.read_blocks(0..self.n_layers, blocks, out)
    }

    /// Has the device write some of the blocks to a file by itself, from `offset` on, a multiple of 4096: layer by layer, and in each
    /// block by block. Returns the CRC-64/NVME of each layer. A device that reads files does this too
    /// ([`Engine::max_file_section_bytes`](super::Engine::max_file_section_bytes)), for layers of whole 4096 bytes.
    ///
    /// # Errors
    /// If the device does not write files, or it or the file fails; the file may have any bytes there then.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn write_file(&self, blocks: Range<usize>, file: BorrowedFd<'_>, offset: u64) -> Result<Vec<u64>> {
        self.kv.write_file(0..self.n_layers, blocks, file, offset)
    }
}

impl fmt::Debug for EndedSequence {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("EndedSequence")
            .field("n_tokens", &self.tokens.len())
            .field("n_blocks", &self.n_blocks())
            .finish_non_exhaustive()
    }
}

// === impl Loans ===

impl Loans {
    /// Sets what is called, on another thread, when blocks come back.
    pub(super) fn set_waker(&mut self, waker: Waker) {
        self.waker = LoanWaker(Some(waker));
    }

    /// Holds `blocks` until the result is dropped and [`Self::take_back`] is called.
    pub(super) fn give(&mut self, blocks: &[BlockId], pool: &mut BlockPool) -> Loan {
        for &block in blocks {
            pool.retain(block);
        }
        let id = self.n_given;
        self.n_given += 1;
        self.by_id.insert(id, blocks.to_vec());
        Loan { id, sender: self.sender.clone(), waker: self.waker.clone() }
    }

    /// Takes back what is not used any more; says whether there was anything.
    pub(super) fn take_back(&mut self, pool: &mut BlockPool) -> bool {
        let mut has_taken = false;
        while let Ok(id) = self.ended.try_recv() {
            if let Some(mut blocks) = self.by_id.remove(&id) {
                pool.release(&mut blocks);
                has_taken = true;
            }
        }
        has_taken
    }

    /// Number of blocks that will be free when they come back.
    pub(super) fn n_blocks(&self, pool: &BlockPool) -> usize {
        self.by_id.values().flatten().filter(|&&block| pool.n_holders(block) == 1).count()
    }
}

impl Default for Loans {
    fn default() -> Self {
        let (sender, ended) = mpsc::channel();
        Self { by_id: HashMap::new(), n_given: 0, sender, ended, waker: LoanWaker::default() }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        // An engine that has ended needs no blocks.
        if self.sender.send(self.id).is_ok()
            && let Some(waker) = &self.waker.0
        {
            waker();
        }
    }
}

impl fmt::Debug for LoanWaker {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("LoanWaker").field(&self.0.is_some()).finish()
    }
}
