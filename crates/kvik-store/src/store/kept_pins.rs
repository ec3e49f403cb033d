//! Pins that one store leaves to the next.
//!
//! A pin keeps a chunk and all before it. A store does not know of the chunks that an earlier one left which hang on
//! which; of those that a pin keeps it must, so each of them comes with its parent. They get their places at once, and no
//! chunk that is pinned ever waits among those that leave first.

use std::collections::{HashMap, HashSet};

use kvik_tier::ChunkKey;
use kvik_types::BlockHash;

use super::core::Core;
use crate::chain::{block_id, recompute_us};
use crate::policy::{Block, BlockId};
use crate::residents::Residents;

/// The pins of a store that was taken apart.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KeptPins {
    /// The chunks that pins keep and that hang on others.
    pub parents: Vec<KeptParent>,
    /// One for each time that a chain was pinned.
    pub pins: Vec<KeptPin>,
}

/// What a pinned chunk hangs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeptParent {
    /// The chunk.
    pub chunk: BlockHash,
    /// The one before it.
    pub parent: BlockHash,
}

/// A pin of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeptPin {
    /// The last chunk of the chain.
    pub chain: BlockHash,
    /// The last chunk that the pin keeps in memory; `None` where it keeps none.
    pub chunk: Option<BlockHash>,
    /// Time until it ends by itself, in milliseconds; `None` where it does not. The time that a hand-over takes is added to it.
    pub left_ms: Option<u64>,
}

/// What is known of a chunk that an earlier store left.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    depth: u32,
    /// Those of all ranks.
    n_bytes: u64,
}

impl Core {
    /// The pins, where `names` are those of the chunks that pins keep.
    pub(super) fn kept_pins(&self, names: &HashMap<BlockId, BlockHash>) -> KeptPins {
        let kept = |(chain, block, left_ms): (BlockHash, Option<BlockId>, Option<u64>)| {
            let chunk = block.and_then(|id| names.get(&id)).copied();
            KeptPin { chain, chunk, left_ms }
        };
        let mut pins: Vec<KeptPin> = self.pins.all(self.now_ms()).into_iter().map(kept).collect();
        let residents = self.ram_residents.lock();
        let mut parents = HashSet::new();
        for KeptPin { chunk, .. } in &pins {
            let mut last = *chunk;
            while let Some(chunk) = last {
                let above = residents.parent(block_id(chunk)).and_then(|id| names.get(&id)).copied();
                // What is above one that is in the set is in it too.
                last = above.filter(|parent| parents.insert(KeptParent { chunk, parent: *parent }));
            }
        }
        drop(residents);
        let mut parents: Vec<KeptParent> = parents.into_iter().collect();
        parents.sort_unstable();
        pins.sort_unstable();
        KeptPins { parents, pins }
    }

    /// Pins what was pinned before, `kept` being the chunks that memory had with their places in their chains, and `lengths` those of
    /// their bytes. A pin whose
    /// chunks are not all there is remembered, so that every pin has its unpin, and keeps nothing.
    pub(super) fn learn_pins(
        &self,
        pins: &KeptPins,
        kept: impl Iterator<Item = (ChunkKey, u32)>,
        lengths: &HashMap<ChunkKey, u64>,
        residents: &mut Residents,
    ) {
        if pins.pins.is_empty() {
            return;
        }
        let parents: HashMap<BlockHash, BlockHash> =
            pins.parents.iter().map(|KeptParent { chunk, parent }| (*chunk, *parent)).collect();
        let mut known: HashMap<BlockHash, Known> = HashMap::new();
        for (key, depth) in kept {
            let known = known.entry(key.chunk).or_default();
            known.depth = depth;
            known.n_bytes += lengths.get(&key).copied().unwrap_or(0);
        }
        for KeptPin { chain, chunk, left_ms } in &pins.pins {
            let blocks = chunk.and_then(|chunk| self.blocks_up_to(chunk, &parents, &known));
            let id = blocks.and_then(|blocks| residents.pin_found(self.now_ms(), &blocks));
            self.pins.add_for(*chain, id, self.now_ms(), *left_ms);
        }
    }

    /// The blocks from the first of a chain to `chunk`; `None` where one is missing, or is not at its place.
    fn blocks_up_to(
        &self,
        chunk: BlockHash,
        parents: &HashMap<BlockHash, BlockHash>,
        known: &HashMap<BlockHash, Known>,
    ) -> Option<Vec<Block>> {
        let mut blocks = Vec::new();
        let (mut chunk, mut depth) = (chunk, known.get(&chunk)?.depth);
        // Ends, because each is one less deep than the one before.
        loop {
            let known = known.get(&chunk).filter(|known| known.depth == depth)?;
            let n_tokens = self.options.chunk_tokens.get();
            blocks.push(Block {
                id: block_id(chunk),
                bytes: known.n_bytes,
                recompute_us: recompute_us(depth as usize * n_tokens, n_tokens, self.options.token_us()),
                // A tail is not known as one until a chain shows it.
                is_full: true,
            });
            let Some(above) = depth.checked_sub(1) else { break };
            (chunk, depth) = (*parents.get(&chunk)?, above);
        }
        blocks.reverse();
        Some(blocks)
    }
}
