//! KV of sequences that are on their way here.
//!
//! Blocks that another engine sends are registered like the engine's own, and held until their sequence has come or will
//! not come. They are for the taking: when a running sequence needs a block and none is free, they are let go after the
//! residents. A sequence whose blocks were let go is computed, to the same output.

use std::collections::BTreeMap;

use kvik_types::hash::KvikChain;
use kvik_types::{CacheSalt, TokenId};

use super::Engine;
use super::hashes::BlockHashes;
use crate::error::{ModelError, Result};
use crate::forward::BlockImport;
use crate::paging::{BLOCK_TOKENS, BlockId, BlockPool};

/// Names the blocks of one sequence that is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StageId(u64);

/// What is here after blocks were staged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Staged {
    /// Blocks from the start of the sequence.
    pub n_blocks: usize,
    /// Whether there was no room for more.
    pub is_full: bool,
}

/// The blocks of one sequence.
#[derive(Debug)]
struct Stage {
    /// Of the blocks in `table`.
    tokens: Vec<TokenId>,
    salt: Option<CacheSalt>,
    hashes: BlockHashes,
    table: Vec<BlockId>,
}

/// All sequences on their way, oldest first.
#[derive(Debug, Default)]
pub(super) struct Stages {
    by_id: BTreeMap<StageId, Stage>,
    n_begun: u64,
}

impl Stages {
    /// Lets the blocks of the oldest go; false if there are none.
    pub(super) fn evict_oldest(&mut self, pool: &mut BlockPool) -> bool {
        let Some((_, mut stage)) = self.by_id.pop_first() else { return false };
        pool.release(&mut stage.table);
        true
    }
}

impl Engine {
    /// Begins to hold the blocks of a sequence that starts with `tokens`, with those that are here already.
    pub fn stage(&mut self, tokens: &[TokenId], salt: Option<CacheSalt>) -> (StageId, Staged) {
        let root = self.root.salted(salt.as_ref());
        let mut hashes = BlockHashes::new(KvikChain::after(root, self.block_size));
        hashes.extend_to(tokens.len() / BLOCK_TOKENS, tokens);
        let table = self.pool.match_prefix(hashes.as_slice(), tokens, salt.as_ref());
        let mut known = BlockHashes::new(KvikChain::after(root, self.block_size));
        let tokens = tokens[..table.len() * BLOCK_TOKENS].to_vec();
        known.extend_to(table.len(), &tokens);
        let staged = Staged { n_blocks: table.len(), is_full: false };
        let id = StageId(self.stages.n_begun);
        self.stages.n_begun += 1;
        self.stages.by_id.insert(id, Stage { tokens, salt, hashes: known, table });
        (id, staged)
    }

    /// Takes blocks of a staged sequence, from the block `first_block` on: `tokens` are theirs, `kv` their bytes, block by
    /// block and of each all layers.
    ///
    /// Blocks that are held already are passed over. Nothing is taken if there would be a gap before them.
    ///
    /// The caller promises that a backend with the layout and weights of this engine has computed `kv` for exactly the tokens
    /// from the start of the sequence.
    ///
    /// # Errors
    /// [`ModelError::InvalidRequest`] if lengths do not fit each other, a token is not in the vocabulary, or nothing is
    /// staged under `id` (any more).
    pub fn stage_blocks(
        &mut self,
        id: StageId,
        first_block: usize,
        tokens: &[TokenId],
        kv: &[u8],
    ) -> Result<Staged> {
        let (n_layers, vocab_size) = (self.backend.config().n_layers, self.backend.config().vocab_size);
        let layer_bytes = self.backend.block_layer_bytes();
        let n_blocks = tokens.len() / BLOCK_TOKENS;
        let block_bytes = n_layers * layer_bytes;
        if !tokens.len().is_multiple_of(BLOCK_TOKENS) || kv.len() != n_blocks * block_bytes {
            let allowed = format!("{n_blocks} blocks of {block_bytes} bytes");
            return Err(ModelError::request("kv", format!("{} bytes", kv.len()), allowed));
        }
        if let Some(token) = tokens.iter().find(|&&token| vocab_size <= token as usize) {
            return Err(ModelError::request("tokens", token, format!("token ids below {vocab_size}")));
        }
        if first_block.saturating_add(n_blocks).saturating_mul(BLOCK_TOKENS) > self.max_sequence_tokens() {
            let allowed = format!("sequences of at most {} tokens", self.max_sequence_tokens());
            return Err(ModelError::request("first_block", first_block, allowed));
        }
        let Some(mut stage) = self.stages.by_id.remove(&id) else {
            return Err(ModelError::request("ticket", "unknown", "one whose blocks are held"));
        };
        let blocks = tokens.as_chunks::<BLOCK_TOKENS>().0.iter().zip(kv.chunks_exact(block_bytes.max(1)));
        let (mut taken, mut imports) = (Vec::new(), Vec::new());
        let mut is_full = false;
        for (block_idx, (tokens, kv)) in (first_block..).zip(blocks) {
            if block_idx < stage.table.len() {
                continue;
            }
            if stage.table.len() + taken.len() < block_idx {
                break;
            }
            let Some(block) = self.take_block() else {
                is_full = true;
                break;
            };
            let layers = kv.chunks_exact(layer_bytes.max(1)).enumerate();
            imports.extend(layers.map(|(layer_idx, bytes)| BlockImport { layer_idx, block, bytes }));
            taken.push((tokens, block));
        }
        if self.backend.import_blocks(&imports).is_ok() {
            for (tokens, block) in taken {
                self.register_staged(&mut stage, tokens, block);
            }
        } else {
            is_full = true;
            for (_, block) in taken {
                self.pool.release_block(block);
            }
        }
        let staged = Staged { n_blocks: stage.table.len(), is_full };
        self.stages.by_id.insert(id, stage);
        Ok(staged)
    }

    /// A block for KV that comes; residents give theirs for it. `None` if there is no room.
    fn take_block(&mut self) -> Option<BlockId> {
        let is_free =
            self.ensure_free(1) || (self.residents.evict_oldest(&mut self.pool) && self.pool.ensure_free(1));
        if is_free { self.pool.allocate() } else { None }
    }

    /// Appends a block whose KV is there.
    fn register_staged(&mut self, stage: &mut Stage, tokens: &[TokenId; BLOCK_TOKENS], block: BlockId) {
        stage.tokens.extend_from_slice(tokens);
        let block_idx = stage.table.len();
        stage.hashes.extend_to(block_idx + 1, &stage.tokens);
        let parent = stage.table.last().copied();
        let hash = stage.hashes.as_slice()[block_idx];
        stage.table.push(self.pool.register(block, hash, tokens, parent, stage.salt.as_ref()));
    }

    /// Lets the blocks of a sequence go: it has come, or will not come.
    pub fn unstage(&mut self, id: StageId) {
        if let Some(mut stage) = self.stages.by_id.remove(&id) {
            self.pool.release(&mut stage.table);
        }
    }

    /// Number of sequences on their way here.
    pub fn n_staged(&self) -> usize {
        self.stages.by_id.len()
    }
}
