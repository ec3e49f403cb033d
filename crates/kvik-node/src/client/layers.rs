//! Chunks that a client reads layer by layer.

use kvik_store::Chain;

use super::{Handle, offset_of};
use crate::error::Result;
use crate::operation::Operation;

/// Gives the layers of a chain one after the other, each for all chunks, as they arrive.
///
/// A chunk of which a layer does not come ends the hit before it: from then on there are fewer chunks, and the caller
/// computes the tokens of the others itself, from the first layer on.
#[derive(Debug)]
pub struct RemoteLayers {
    handle: Handle,
    chain: Chain,
    first_chunk: usize,
    n_chunks: usize,
    /// The next layer, counted from 0.
    next_layer: usize,
    /// Where the sections of the layer before it are.
    offsets: Vec<u64>,
}

impl RemoteLayers {
    pub(super) fn new(handle: Handle, chain: &Chain, first_chunk: usize, n_chunks: usize) -> Self {
        Self { handle, chain: chain.clone(), first_chunk, n_chunks, next_layer: 0, offsets: Vec::new() }
    }

    /// Chunks that still hold.
    pub fn n_chunks(&self) -> usize {
        self.n_chunks
    }

    /// Bytes of a layer of a chunk.
    pub fn section_bytes(&self, place: usize) -> usize {
        self.chain.section_bytes(self.first_chunk.saturating_add(place))
    }

    /// Waits for the next layer and gives the one before it back; its number, or `None` behind the last one.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn next_layer(&mut self) -> Result<Option<usize>> {
        self.offsets.clear();
        if self.n_chunks == 0 || self.next_layer == self.chain.space().format().n_layers as usize {
            return Ok(None);
        }
        let reader = self.handle.number;
        let operation = |span| Operation::NextLayer { reader, span };
        let exchange = self.handle.client.exchange();
        let (_, offsets) = exchange.ask_with(self.n_chunks, |_| {}, operation, self.n_chunks)?;
        self.n_chunks = offsets.len();
        self.offsets = offsets;
        let layer_idx = self.next_layer;
        self.next_layer += 1;
        Ok((self.n_chunks > 0).then_some(layer_idx))
    }

    /// Copies the current layer of a chunk, from its start on.
    ///
    /// # Errors
    /// If there is no such chunk, or it is not in the arena.
    pub fn copy_out(&self, place: usize, target: &mut [u8]) -> Result<()> {
        let offset = offset_of(&self.offsets, place, 0)?;
        Ok(self.handle.client.shared.reading.copy_out(offset, target)?)
    }
}
