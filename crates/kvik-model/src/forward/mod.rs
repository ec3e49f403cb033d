//! The forward pass: token rows in, logits out, keys and values left in their blocks.
//!
//! [`Backend`] is all that the scheduler knows of the arithmetic. A backend gets block tables and
//! reads keys and values where they lie; nothing is gathered into a tensor first.

mod checked;
mod cpu;
#[expect(unsafe_code, reason = "kernels get addresses, and the driver is a C library")]
mod cuda;
mod files;
mod layer_import;
mod layout;
mod logits;
mod place;
mod tensors;

pub use cpu::{CpuBackend, CpuBackendOptions};
pub use cuda::{CudaBackend, CudaBackendOptions, DeviceMonitor, DeviceUsage};
pub use files::{FileBlocks, FileRead, FileReads, KvFile};
pub use layout::KvSharing;
pub use logits::{ChosenToken, Logits, WantedLogits, WantedRow};
pub use place::{DeviceName, KvSize};

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use kvik_types::{Dtype, TokenId};

use crate::config::ModelConfig;
use crate::error::{ModelError, Result};
use crate::paging::{BlockId, BlockMemory};

/// Tokens of one sequence that a forward pass computes.
#[derive(Debug, Clone, Copy)]
pub struct SequenceRows<'a> {
    /// The tokens; at least one.
    pub tokens: &'a [TokenId],
    /// Where they stand in their sequence.
    pub positions: RowPositions<'a>,
    /// The blocks of the sequence from its start through the last of these tokens. Other positions
    /// before the last were computed or placed before; those of `tokens` are written by the pass.
    pub block_table: &'a [BlockId],
    /// Number of rows, counted from the last, whose logits are wanted.
    pub n_logits: usize,
}

/// The positions of the rows of one sequence. A row sees every position up to its own, computed in this pass or before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowPositions<'a> {
    /// One after the other, from this one on.
    From(usize),
    /// Each at its own, rising, one for each row: the others keep the keys and values that they have.
    At(&'a [u32]),
}

/// A run of tokens of a segment, with keys and values that were computed at positions from 0 on.
#[derive(Debug, Clone, Copy)]
pub struct SegmentPart<'a> {
    /// `[n_tokens, n_kv_heads, head_dim]` in the backend's KV dtype, little endian, after rotation.
    pub keys: &'a [u8],
    /// As `keys`.
    pub values: &'a [u8],
}

/// Keys and values of one layer of a sequence, outside of their blocks.
///
/// Each is `[n_tokens, n_kv_heads, head_dim]` in the backend's KV dtype, little endian.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LayerKv {
    /// Number of tokens.
    pub n_tokens: usize,
    /// The keys, after rotation.
    pub keys: Vec<u8>,
    /// The values.
    pub values: Vec<u8>,
}

/// A block of one layer on its way in.
#[derive(Debug, Clone, Copy)]
pub struct BlockImport<'a> {
    /// The layer.
    pub layer_idx: usize,
    /// The block that is written.
    pub block: BlockId,
    /// As [`Backend::export_block`] gave them.
    pub bytes: &'a [u8],
}

/// The bytes of blocks of a prompt.
pub trait BlockSource: Send + Sync + std::fmt::Debug {
    /// The bytes of one block of one layer, as [`Backend::export_block`] gave them; `block_idx` counts from the start of the
    /// prompt. `None` where there is no such block.
    fn block(&self, layer_idx: usize, block_idx: usize) -> Option<&[u8]>;

    /// The blocks, all of the prompt's, that lie with this one in a file; `None` where [`BlockSource::block`] has its bytes. Only a
    /// backend with [`Backend::max_file_section_bytes`] is given a source with files.
    fn file_blocks(&self, block_idx: usize) -> Option<FileBlocks> {
        let _ = block_idx;
        None
    }

    /// Opens the file of a block; `None` where it is not there any more.
    fn open_file(&self, block_idx: usize) -> Option<Box<dyn KvFile>> {
        let _ = block_idx;
        None
    }

    /// How many layers of all its blocks have come. A source of which layers are still to come MUST say after some time that it
    /// has ended.
    fn layers(&self) -> LayerProgress {
        LayerProgress { n_there: usize::MAX, has_ended: true }
    }

    /// Waits until a layer has come, at most for `timeout`; false if it has not.
    fn wait_layer(&self, layer_idx: usize, timeout: Duration) -> bool {
        let _ = timeout;
        layer_idx < self.layers().n_there
    }
}

/// How far a source is whose layers come one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerProgress {
    /// Layers that are there, counted from the first.
    pub n_there: usize,
    /// Whether no more will come.
    pub has_ended: bool,
}

/// Blocks that are copied in beside passes, or within one, layer by layer. Dropping it waits for the end of the copy.
pub trait KvImport: Send + Sync + std::fmt::Debug {
    /// Whether all has come, or no more will: [`Backend::finish_import`] does not wait.
    fn is_done(&self) -> bool;

    /// Layers that are there, counted from the first. A pass may begin before all of them are, if this is not 0.
    fn n_layers_there(&self) -> usize {
        0
    }

    /// Waits for a layer, and hands those of its blocks to `put` that the caller has to write: none where they are written
    /// beside the pass, or were handed out before. For a layer that does not come it returns all the same;
    /// [`KvImport::finish`] fails then.
    fn take_layer(&self, layer_idx: usize, put: &mut dyn FnMut(BlockId, &[u8])) {
        let _ = (layer_idx, put);
    }

    /// How the copy ended; waits for that. All layers have been taken. After a failure any of the blocks may have been written.
    ///
    /// # Errors
    /// If the source does not have a block of the right length, a layer has not come, or the device fails.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// Blocks that stay as they are until this is dropped.
pub trait PinnedKv: Send + Sync + std::fmt::Debug {
    /// As [`Backend::export_block`], of the block at `block_idx` of those that are pinned.
    ///
    /// # Errors
    /// If the device fails; `out` may have any bytes then.
    ///
    /// # Panics
    /// If there is no such layer or block, or `out` is not exactly [`Backend::block_layer_bytes`] long.
    fn read_block(&self, layer_idx: usize, block_idx: usize, out: &mut [u8]) -> Result<()>;

    /// Copies `layers` of `blocks`: layer by layer, and in each block by block.
    ///
    /// # Errors
    /// As [`PinnedKv::read_block`].
    ///
    /// # Panics
    /// As [`PinnedKv::read_block`], if `out` is not exactly as long as all of them.
    fn read_blocks(&self, layers: Range<usize>, blocks: Range<usize>, out: &mut [u8]) -> Result<()> {
        let n_pieces = layers.len() * blocks.len();
        let mut pieces = out.chunks_exact_mut((out.len() / n_pieces.max(1)).max(1));
        for layer_idx in layers {
            for (block_idx, piece) in blocks.clone().zip(&mut pieces) {
                self.read_block(layer_idx, block_idx, piece)?;
            }
        }
        Ok(())
    }

    /// Writes `layers` of `blocks` to a file by the device itself, from `offset` on, a multiple of 4096: layer by layer, and in each block
    /// by block. Returns the CRC-64/NVME of each layer. Only devices with a [`Backend::max_file_section_bytes`] do, for layers of whole
    /// 4096 bytes that are not longer. Default: refused.
    ///
    /// The caller guarantees that the file's bytes are its own.
    ///
    /// # Errors
    /// If the device does not write files, or it or the file fails; the file may have any bytes there then.
    fn write_file(
        &self,
        layers: Range<usize>,
        blocks: Range<usize>,
        file: BorrowedFd<'_>,
        offset: u64,
    ) -> Result<Vec<u64>> {
        let _ = (layers, blocks, file, offset);
        Err(no_file_writes())
    }
}

/// The answer of a device that does not write files.
fn no_file_writes() -> ModelError {
    ModelError::request("kv", "to a file", "a device that moves KV between files and its memory")
}

/// A device that runs the model.
///
/// Every implementation MUST be batch invariant: the logits of a row and the keys and values it
/// leaves are the same to the bit whatever else is in the pass and however its sequence was cut
/// into passes.
pub trait Backend: Send + std::fmt::Debug {
    /// The model.
    fn config(&self) -> &ModelConfig;

    /// Number of blocks that keys and values can lie in.
    fn n_blocks(&self) -> usize;

    /// Where the blocks come from, once; `None` if all of them are there for good.
    ///
    /// A caller that got it uses only blocks that it has taken from there.
    fn take_memory(&mut self) -> Option<Box<dyn BlockMemory>> {
        None
    }

    /// Computes `sequences`, writes their keys and values and the logits asked for.
    ///
    /// The caller guarantees that no two of `sequences` write the same block and that a block
    /// written here is in no other sequence's table unless its tokens there end before it.
    ///
    /// # Errors
    /// If a token is not in the vocabulary, a position is past the context or a block table does
    /// not cover its rows; nothing was written then. [`ModelError::Device`](crate::ModelError::Device) if the device
    /// fails: all blocks are lost then.
    fn forward(&mut self, sequences: &[SequenceRows<'_>], logits: &mut Logits) -> Result<()>;

    /// As [`Backend::forward`] where not all logits are needed: a backend may give [`Logits::chosen`] for rows whose token is
    /// wanted.
    ///
    /// # Errors
    /// As [`Backend::forward`].
    fn forward_wanted(
        &mut self,
        sequences: &[SequenceRows<'_>],
        wanted: WantedLogits<'_>,
        logits: &mut Logits,
    ) -> Result<()> {
        let _ = wanted;
        self.forward(sequences, logits)
    }

    /// As [`Backend::forward`], of the first `n_layers` layers alone and without logits.
    ///
    /// # Errors
    /// As [`Backend::forward`].
    fn forward_layers(&mut self, sequences: &[SequenceRows<'_>], n_layers: usize) -> Result<()>;

    /// As [`Backend::forward`] for one sequence without logits; adds to `weights[position]` the attention that its last
    /// `n_watched` rows pay to a position in `layers`, summed over rows and heads.
    ///
    /// # Errors
    /// As [`Backend::forward`].
    fn forward_watched(
        &mut self,
        sequence: SequenceRows<'_>,
        n_watched: usize,
        layers: Range<usize>,
        weights: &mut [f32],
    ) -> Result<()>;

    /// Writes keys and values of one layer to `first_position` and the positions behind it, with the keys turned by
    /// `turned_by` positions from those that they were computed at; less than 0 turns them back.
    ///
    /// The caller guarantees that the table covers them and that its blocks have no other holder.
    ///
    /// # Errors
    /// If a tensor is not a whole number of tokens long, keys and values differ in length, the table does not cover them or the model's
    /// positions cannot be changed; nothing was written then.
    fn place_kv(
        &mut self,
        layer_idx: usize,
        block_table: &[BlockId],
        first_position: usize,
        turned_by: i64,
        part: SegmentPart<'_>,
    ) -> Result<()>;

    /// Copies the keys and values of all layers from one block to another.
    ///
    /// # Errors
    /// If the device fails.
    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<()>;

    /// Type in which keys and values are kept.
    fn kv_dtype(&self) -> Dtype;

    /// The keys and values of one layer of the first `n_tokens` tokens of `block_table`.
    ///
    /// The caller guarantees that the table covers them and that they were computed.
    ///
    /// # Errors
    /// If the device fails.
    fn export_kv(&self, layer_idx: usize, block_table: &[BlockId], n_tokens: usize) -> Result<LayerKv>;

    /// Puts keys and values of one layer under the first `kv.n_tokens` tokens of `block_table`.
    ///
    /// The caller guarantees that the table covers them and that its blocks have no other holder.
    ///
    /// # Errors
    /// If a tensor has not `n_tokens * n_kv_heads * head_dim` elements; nothing was written then.
    fn import_kv(&mut self, layer_idx: usize, block_table: &[BlockId], kv: &LayerKv) -> Result<()>;

    /// Names the bytes of a block and, with [`KvSharing::Exact`], the arithmetic that makes them.
    ///
    /// Two backends of the same weights with equal names may import and share what the other has exported. Those that share
    /// exactly MUST leave the same bytes for the same tokens.
    fn kv_layout(&self) -> String;

    /// Bytes of one block in one layer, as [`Backend::export_block`] gives them.
    fn block_layer_bytes(&self) -> usize;

    /// Copies a block of one layer to `out`, in the order of the pool. Equal keys and values give equal bytes.
    ///
    /// The caller guarantees that all tokens of the block were computed.
    ///
    /// # Errors
    /// If the device fails; `out` may have any bytes then.
    ///
    /// # Panics
    /// If `out` is not exactly [`Backend::block_layer_bytes`] long.
    fn export_block(&self, layer_idx: usize, block: BlockId, out: &mut [u8]) -> Result<()>;

    /// Keeps blocks as they are until the result is dropped, so that they can be read on another thread while
    /// passes go on.
    ///
    /// The caller guarantees that all tokens of the blocks were computed, and writes none of them before.
    ///
    /// # Errors
    /// If the device fails.
    fn pin_blocks(&mut self, blocks: &[BlockId]) -> Result<Box<dyn PinnedKv>>;

    /// Writes a block of one layer from the bytes that [`Backend::export_block`] gave under the same
    /// [`Backend::kv_layout`].
    ///
    /// The caller guarantees that the block has no other holder.
    ///
    /// # Errors
    /// If there are not exactly [`Backend::block_layer_bytes`] bytes; nothing was written then.
    fn import_block(&mut self, layer_idx: usize, block: BlockId, bytes: &[u8]) -> Result<()>;

    /// As [`Backend::import_block`] for many at a time.
    ///
    /// # Errors
    /// As there; any of the blocks may have been written.
    fn import_blocks(&mut self, imports: &[BlockImport<'_>]) -> Result<()> {
        imports.iter().try_for_each(|import| self.import_block(import.layer_idx, import.block, import.bytes))
    }

    /// Whether blocks can be copied in while passes go on.
    fn imports_beside_passes(&self) -> bool {
        false
    }

    /// The longest section of a [`KvFile`] that blocks are copied in from; `None` where that is not done.
    fn max_file_section_bytes(&self) -> Option<usize> {
        None
    }

    /// Begins to copy all layers of blocks in while passes go on: of each pair, the block of the source with this index
    /// becomes this block. `None` where it cannot be begun; nothing has happened then.
    ///
    /// The caller guarantees that the blocks have no other holder, and uses none of them before the copy has ended.
    fn start_import(
        &mut self,
        source: &Arc<dyn BlockSource>,
        blocks: &[(usize, BlockId)],
    ) -> Option<Box<dyn KvImport>> {
        let _ = (source, blocks);
        None
    }

    /// Waits for the end of a copy.
    ///
    /// # Errors
    /// As [`KvImport::finish`]; any of the blocks may have been written.
    fn finish_import(&mut self, import: Box<dyn KvImport>) -> Result<()> {
        take_layers(self, import.as_ref())?;
        import.finish()
    }

    /// As [`Backend::forward_wanted`], while blocks of the tables are still copied in: a layer is computed when all `imports` have it. If one of them fails, the rows that look at its blocks have no
    /// meaning; the others have.
    ///
    /// # Errors
    /// As [`Backend::forward`].
    fn forward_arriving(
        &mut self,
        sequences: &[SequenceRows<'_>],
        imports: &[&dyn KvImport],
        wanted: WantedLogits<'_>,
        logits: &mut Logits,
    ) -> Result<()> {
        imports.iter().try_for_each(|import| take_layers(self, *import))?;
        self.forward_wanted(sequences, wanted, logits)
    }
}

/// Takes all layers of an import.
fn take_layers<B: Backend + ?Sized>(backend: &mut B, import: &dyn KvImport) -> Result<()> {
    let mut result = Ok(());
    for layer_idx in 0..backend.config().n_layers {
        import.take_layer(layer_idx, &mut |block, bytes| {
            if result.is_ok() {
                result = backend.import_block(layer_idx, block, bytes);
            }
        });
    }
    result
}

impl RowPositions<'_> {
    /// Position of the row `row_idx`.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn get(&self, row_idx: usize) -> usize {
        match self {
            Self::From(first) => first + row_idx,
            Self::At(positions) => positions[row_idx] as usize,
        }
    }

    /// Tokens that the first `n_rows` rows look at, each at its own and all before it.
    pub(crate) fn n_attended(&self, n_rows: usize) -> u64 {
        match self {
            Self::From(first) => (n_rows * first + n_rows * (n_rows + 1) / 2) as u64,
            Self::At(positions) => {
                positions.iter().take(n_rows).map(|position| u64::from(*position) + 1).sum()
            }
        }
    }
}

impl From<usize> for RowPositions<'_> {
    fn from(first: usize) -> Self {
        Self::From(first)
    }
}
