//! The KV memory of an engine: a list of pieces, each of blocks at equal distances.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::array::{ArrayView, Piece, check_n_pieces, share_bytes};
use crate::error::invalid;
use crate::gpu::Gpu;
use crate::{buffer, dlpack};

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

    /// The blocks of arrays, which are used where they lie and kept alive. `arrays` has one for each layer, or the same number for
    /// each layer: objects with `__dlpack__`, in memory of the CPU or of one CUDA device, or with the buffer protocol.
    ///
    /// `block_axis` is the axis of the blocks. Axes behind it are the bytes of a block, without gaps and in C's order; each place of
    /// the axes before it is a piece of its own. Both may have any stride. What is stored depends on shape and axis, so
    /// the `layout` of the store must name them.
    #[staticmethod]
    #[pyo3(signature = (arrays, *, block_tokens, block_axis=0))]
    fn from_tensors(
        py: Python<'_>,
        arrays: Vec<Bound<'_, PyAny>>,
        block_tokens: usize,
        block_axis: usize,
    ) -> PyResult<Self> {
        let views: Vec<ArrayView> = arrays.iter().map(view_of).collect::<PyResult<_>>()?;
        let Some(first) = views.first() else {
            return Err(invalid("arrays", &"empty", "at least one"));
        };
        let (cuda_device, n_blocks) = (first.cuda_device, first.shape.get(block_axis).copied().unwrap_or(0));
        let mut pieces: Vec<Piece> = Vec::new();
        for view in &views {
            let of_view = view.pieces(block_axis)?;
            if view.is_read_only {
                return Err(invalid("array", &"read-only", "one that can be written"));
            }
            if view.shape.get(block_axis) != Some(&n_blocks) || view.cuda_device != cuda_device {
                return Err(invalid("arrays", &"different", "as many blocks in each, on one device"));
            }
            check_n_pieces(pieces.len() + of_view.len())?;
            let is_shared =
                |piece: &Piece| pieces.iter().any(|other| share_bytes(piece, other, n_blocks.max(1)));
            if of_view.iter().any(is_shared) {
                return Err(invalid("arrays", &"of the same memory", "arrays that share no bytes"));
            }
            pieces.extend(of_view);
        }
        let owners: Vec<Py<PyAny>> = views.into_iter().map(|view| view.owner).collect();
        let pieces = pieces.into_iter().map(Piece::into_parts).collect();
        let owner = owners.into_pyobject(py)?.into_any().unbind();
        Self::new(pieces, n_blocks, block_tokens, owner, cuda_device)
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

impl EngineMemory {
    /// The tokens of an array as blocks: contiguous with one axis, or with axes of layers and tokens first. `None` where it has no
    /// whole block.
    ///
    /// # Errors
    /// If it is not in memory of this process, or has other layers or tokens than the store.
    pub(crate) fn of_tokens(
        array: &Bound<'_, PyAny>,
        n_layers: usize,
        token_layer_bytes: usize,
        block_tokens: usize,
        is_written: bool,
    ) -> PyResult<Option<Self>> {
        let view = view_of(array)?.with_layers(n_layers, token_layer_bytes)?;
        if view.cuda_device.is_some() {
            let allowed = "one in memory of the CPU; for a GPU `EngineMemory.from_tensors`";
            return Err(invalid("array", &"one of a CUDA device", allowed));
        }
        if view.is_read_only && is_written {
            return Err(invalid("array", &"read-only", "one that can be written"));
        }
        if view.shape.len() < 2 || view.shape[0] != n_layers {
            let allowed = format!("one axis, or {n_layers} layers, then tokens, then the bytes of each");
            return Err(invalid("shape of the array", &format!("{:?}", view.shape), &allowed));
        }
        let mut pieces = view.pieces(1)?;
        let n_tokens = view.shape[1];
        for piece in &mut pieces {
            if piece.block_bytes != token_layer_bytes
                || (n_tokens > 1 && piece.block_stride != piece.block_bytes)
            {
                let given = format!("{} bytes, each {} from the next", piece.block_bytes, piece.block_stride);
                return Err(invalid(
                    "token of the array",
                    &given,
                    &format!("{token_layer_bytes} bytes without gaps"),
                ));
            }
            piece.block_bytes = block_tokens * token_layer_bytes;
            piece.block_stride = piece.block_bytes;
        }
        let n_blocks = n_tokens / block_tokens;
        if n_blocks == 0 {
            return Ok(None);
        }
        let pieces = pieces.into_iter().map(Piece::into_parts).collect();
        Self::new(pieces, n_blocks, block_tokens, view.owner, None).map(Some)
    }
}

impl Piece {
    fn into_parts(self) -> (usize, usize, usize) {
        (self.address, self.block_bytes, self.block_stride)
    }
}

/// The memory of an array, which must not be changed otherwise while it is used.
///
/// # Errors
/// If it is no array, or lies where this module cannot use it.
fn view_of(array: &Bound<'_, PyAny>) -> PyResult<ArrayView> {
    match dlpack::import(array)? {
        Some(view) => Ok(view),
        None => buffer::import(array),
    }
}
