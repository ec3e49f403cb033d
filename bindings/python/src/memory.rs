//! The KV memory of an engine: a list of pieces, each of blocks at equal distances.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::error::invalid;
use crate::gpu::Gpu;

/// Blocks of an engine's KV memory, in pieces.
///
/// `pieces` has an address, the bytes of a block and the bytes from one block to the next. It has one entry for each layer
/// where a block of a layer is contiguous, or the same number of entries for each layer, one layer after the other.
/// `owner` is kept alive as long as this is, and must keep the memory where it is. With `cuda_device` the addresses are those of
/// that GPU. Blocks that a running job names must
/// not be used otherwise until it is done: a save reads them, a load writes them.
#[pyclass(frozen, module = "kvik")]
#[derive(Debug)]
pub(crate) struct EngineMemory {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) n_blocks: usize,
    pub(crate) block_tokens: usize,
    /// The memory is that of a GPU.
    pub(crate) gpu: Option<Arc<Gpu>>,
    _owner: Py<PyAny>,
}

/// Where a piece of every block lies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) address: usize,
    pub(crate) block_bytes: usize,
    pub(crate) block_stride: usize,
}

#[pymethods]
impl EngineMemory {
    #[new]
    #[pyo3(signature = (pieces, *, n_blocks, block_tokens, owner, cuda_device=None))]
    fn new(
        pieces: Vec<(usize, usize, usize)>,
        n_blocks: usize,
        block_tokens: usize,
        owner: Py<PyAny>,
        cuda_device: Option<u32>,
    ) -> PyResult<Self> {
        if pieces.is_empty() {
            return Err(invalid("pieces", &"empty", "at least one"));
        }
        if block_tokens == 0 || n_blocks == 0 {
            return Err(invalid("block_tokens or n_blocks", &0, "at least 1"));
        }
        let pieces: Vec<Piece> = pieces
            .into_iter()
            .map(|(address, block_bytes, block_stride)| Piece { address, block_bytes, block_stride })
            .collect();
        for Piece { address, block_bytes, block_stride } in &pieces {
            let end = block_stride
                .checked_mul(n_blocks - 1)
                .and_then(|last| last.checked_add(*block_bytes))
                .and_then(|n_bytes| address.checked_add(n_bytes));
            if *address == 0 || end.is_none_or(|end| isize::try_from(end - address).is_err()) {
                return Err(invalid("address", address, "memory of this process"));
            }
            if *block_bytes == 0 {
                return Err(invalid("bytes of a block", block_bytes, "at least 1"));
            }
            if block_stride < block_bytes && n_blocks > 1 {
                return Err(invalid("distance of blocks", block_stride, "at least the bytes of a block"));
            }
        }
        let gpu = cuda_device.map(Gpu::open).transpose()?.map(Arc::new);
        Ok(Self { pieces, n_blocks, block_tokens, gpu, _owner: owner })
    }

    /// Number of blocks.
    #[getter]
    fn n_blocks(&self) -> usize {
        self.n_blocks
    }

    /// Bytes of a block in all pieces.
    #[getter]
    pub(crate) fn block_bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.block_bytes).sum()
    }

    fn __repr__(&self) -> String {
        let (n_pieces, n_blocks) = (self.pieces.len(), self.n_blocks);
        format!("EngineMemory(n_pieces={n_pieces}, n_blocks={n_blocks}, block_tokens={})", self.block_tokens)
    }
}
