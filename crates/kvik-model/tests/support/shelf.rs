//! A place for KV between engines, as simple as can be: blocks by all tokens up to their end.

use std::collections::HashMap;
use std::sync::Arc;

use kvik_model::{BLOCK_TOKENS, BlockSource, EndedSequence, KvSink, PrefixKv};
use parking_lot::Mutex;

/// The bytes of one block, layer by layer; `None` for a layer that is missing.
pub type BlockLayers = Vec<Option<Vec<u8>>>;

/// What a sink was told of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The tokens whose KV was there.
    pub tokens: Vec<u32>,
    /// How many of them were the prompt's.
    pub n_prompt_tokens: usize,
    /// How many of them were generated.
    pub n_generated_tokens: usize,
    /// The blocks.
    pub blocks: Vec<BlockLayers>,
}

#[derive(Debug, Default)]
struct Contents {
    blocks: HashMap<Vec<u32>, BlockLayers>,
    offers: Vec<Offer>,
}

/// Keeps everything that it is offered.
#[derive(Debug, Clone, Default)]
pub struct Shelf(Arc<Mutex<Contents>>);

/// Blocks of a prompt. A test may damage them.
#[derive(Debug, Clone)]
pub struct ShelfKv {
    /// Position of the first token.
    pub first_token: usize,
    /// Number of tokens that it says to have.
    pub n_tokens: usize,
    /// Blocks from `first_token` on.
    pub blocks: Vec<BlockLayers>,
    /// Tells how many are alive.
    pub alive: Arc<()>,
}

impl Shelf {
    /// A sink that puts everything on this shelf.
    pub fn sink(&self) -> Box<dyn KvSink> {
        Box::new(self.clone())
    }

    /// What was offered since the last call, in order.
    pub fn take_offers(&self) -> Vec<Offer> {
        std::mem::take(&mut self.0.lock().offers)
    }

    /// The longest run of blocks of `tokens` from `first_token` on.
    pub fn prefix(&self, tokens: &[u32], first_token: usize) -> ShelfKv {
        let contents = self.0.lock();
        let ends = (first_token + BLOCK_TOKENS..=tokens.len()).step_by(BLOCK_TOKENS);
        let blocks: Vec<BlockLayers> =
            ends.map_while(|end| contents.blocks.get(&tokens[..end]).cloned()).collect();
        let n_tokens = blocks.len() * BLOCK_TOKENS;
        ShelfKv { first_token, n_tokens, blocks, alive: Arc::new(()) }
    }
}

impl KvSink for Shelf {
    /// # Panics
    /// If the same tokens come with other bytes than before, or the counts do not add up.
    fn offer(&mut self, sequence: EndedSequence) {
        let tokens = sequence.tokens();
        assert_eq!(tokens.len(), sequence.n_blocks() * BLOCK_TOKENS);
        assert_eq!(sequence.block_hashes().len(), sequence.n_blocks());
        let read = |block_idx| {
            let layers = 0..sequence.n_layers();
            let read_layer = |layer_idx| {
                let mut bytes = vec![0xa5; sequence.block_layer_bytes()];
                sequence.read_block(layer_idx, block_idx, &mut bytes).unwrap();
                Some(bytes)
            };
            layers.map(read_layer).collect()
        };
        let blocks: Vec<BlockLayers> = (0..sequence.n_blocks()).map(read).collect();
        let mut at_once = vec![0x5a; sequence.n_bytes()];
        sequence.read_blocks(0..sequence.n_blocks(), &mut at_once).unwrap();
        let in_layer =
            |layer_idx: usize| blocks.iter().filter_map(move |layers| layers[layer_idx].as_deref());
        let by_layers: Vec<&[u8]> = (0..sequence.n_layers()).flat_map(in_layer).collect();
        assert!(at_once == by_layers.concat(), "all blocks at once have other bytes than one by one");
        let mut contents = self.0.lock();
        for (block_idx, layers) in blocks.iter().enumerate() {
            let key = tokens[..(block_idx + 1) * BLOCK_TOKENS].to_vec();
            let known = contents.blocks.entry(key).or_insert_with(|| layers.clone());
            assert!(known == layers, "block {block_idx} of {tokens:?} has other bytes than before");
        }
        contents.offers.push(Offer {
            tokens: tokens.to_vec(),
            n_prompt_tokens: sequence.n_prompt_tokens(),
            n_generated_tokens: sequence.n_generated_tokens(),
            blocks,
        });
    }
}

impl BlockSource for ShelfKv {
    fn block(&self, layer_idx: usize, block_idx: usize) -> Option<&[u8]> {
        let idx = block_idx.checked_sub(self.first_token / BLOCK_TOKENS)?;
        self.blocks.get(idx)?.get(layer_idx)?.as_deref()
    }
}

impl PrefixKv for ShelfKv {
    fn there_until(&self, token: usize) -> usize {
        if self.first_token <= token { self.first_token.saturating_add(self.n_tokens) } else { token }
    }
}
