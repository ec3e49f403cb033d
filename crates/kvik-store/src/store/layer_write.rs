//! Writing layer by layer: the model computes the next layer while one is copied.

use super::Store;
use super::write::{ChunkWriter, Commit, Write};
use crate::chain::Chain;

/// The answer to a wish to write layer by layer.
#[derive(Debug)]
pub enum LayerWrite {
    /// Memory to be filled.
    Slot(LayerWriter),
    /// As [`Write::Present`].
    Present,
    /// As [`Write::NoRoom`].
    NoRoom,
    /// As [`Write::NoParent`].
    NoParent,
    /// As [`Write::Collision`].
    Collision,
}

/// Takes the layers of one chunk as they are computed, in any order. The chunk becomes visible when the last
/// is there; dropping the writer before leaves nothing behind.
#[derive(Debug)]
pub struct LayerWriter {
    writer: Option<ChunkWriter>,
    is_written: Vec<bool>,
}

impl Store {
    /// Takes memory for what a rank holds of a chunk, to be filled layer by layer.
    ///
    /// As [`Store::begin_write`] otherwise.
    pub fn begin_layer_write(&self, chain: &Chain, chunk_idx: usize, rank: u16) -> LayerWrite {
        match self.begin_write(chain, chunk_idx, rank) {
            Write::Slot(writer) => {
                let is_written = vec![false; chain.space().format().n_layers as usize];
                LayerWrite::Slot(LayerWriter { writer: Some(writer), is_written })
            }
            Write::Present => LayerWrite::Present,
            Write::NoRoom => LayerWrite::NoRoom,
            Write::NoParent => LayerWrite::NoParent,
            Write::Collision => LayerWrite::Collision,
        }
    }
}

impl LayerWriter {
    /// Lets `fill` write one layer, all of it. Returns what became of the chunk when it was the last one that
    /// was missing, and `None` before, after, and where there is no such layer.
    pub fn write_layer(&mut self, layer_idx: usize, fill: impl FnOnce(&mut [u8])) -> Option<Commit> {
        let writer = self.writer.as_mut()?;
        let is_written = self.is_written.get_mut(layer_idx)?;
        fill(writer.layer_mut(layer_idx));
        *is_written = true;
        if self.is_written.iter().all(|is_written| *is_written) {
            return self.writer.take().map(ChunkWriter::commit);
        }
        None
    }
}
