//! KV out of the engine.

use kvik_model::{BLOCK_TOKENS, EndedSequence, KvSink};
use kvik_store::{Space, Store, Write};

use super::Fuse;

/// Copies the KV of ended sequences into the store's memory.
///
/// Runs on the engine's thread and never waits: where the store has no room, the rest of the sequence is not
/// stored.
#[derive(Debug)]
pub(super) struct StoreSink {
    store: Store,
    space: Space,
    fuse: Fuse,
}

impl StoreSink {
    pub(super) fn new(store: Store, space: Space, fuse: Fuse) -> Self {
        Self { store, space, fuse }
    }

    fn copy(&self, sequence: &EndedSequence<'_>) {
        let chain = self.space.chain(sequence.tokens());
        if chain.n_chunks() == 0 {
            return;
        }
        self.store.note_request(&chain, u32::try_from(sequence.n_generated_tokens()).ok());
        let block_bytes = sequence.block_layer_bytes();
        for chunk_idx in 0..chain.n_chunks() {
            let mut writer = match self.store.begin_write(&chain, chunk_idx, 0) {
                Write::Slot(writer) => writer,
                Write::Present => continue,
                Write::NoRoom | Write::NoParent => return,
            };
            let first_block = chain.tokens_of(chunk_idx).start / BLOCK_TOKENS;
            for layer_idx in 0..sequence.n_layers() {
                let blocks = writer.layer_mut(layer_idx).chunks_exact_mut(block_bytes);
                for (block_idx, block) in (first_block..).zip(blocks) {
                    sequence.read_block(layer_idx, block_idx, block);
                }
            }
            writer.commit();
        }
    }
}

impl KvSink for StoreSink {
    fn offer(&mut self, sequence: &EndedSequence<'_>) {
        self.fuse.run(|| self.copy(sequence));
    }
}
