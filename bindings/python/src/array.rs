//! Arrays of other libraries, used where they lie.

use pyo3::prelude::*;

use crate::error::invalid;

/// The most pieces of an engine's memory that are made of arrays: each is compared with each.
const MAX_PIECES: usize = 4096;

/// The memory of an array, which stays where it is as long as the owner lives.
#[derive(Debug)]
pub(crate) struct ArrayView {
    pub(crate) address: usize,
    pub(crate) item_bytes: usize,
    pub(crate) shape: Vec<usize>,
    /// In bytes, as many as axes.
    pub(crate) strides: Vec<isize>,
    pub(crate) is_read_only: bool,
    /// The CUDA device that has it; `None` for memory of this process.
    pub(crate) cuda_device: Option<u32>,
    pub(crate) owner: Py<PyAny>,
}

/// Where a piece of every block lies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) address: usize,
    pub(crate) block_bytes: usize,
    pub(crate) block_stride: usize,
}

impl ArrayView {
    /// The strides of a contiguous array in C's order; `None` where it is longer than memory.
    pub(crate) fn contiguous_strides(shape: &[usize], item_bytes: usize) -> Option<Vec<isize>> {
        let mut strides = Vec::with_capacity(shape.len());
        let mut stride = isize::try_from(item_bytes).ok()?;
        for length in shape.iter().rev() {
            strides.push(stride);
            stride = stride.checked_mul(isize::try_from((*length).max(1)).ok()?)?;
        }
        strides.reverse();
        Some(strides)
    }

    /// The array as layers and tokens, where it has one axis and is contiguous; else itself.
    ///
    /// # Errors
    /// If the bytes of an array with one axis are no whole number of tokens.
    pub(crate) fn with_layers(mut self, n_layers: usize, token_layer_bytes: usize) -> PyResult<Self> {
        let [length] = self.shape[..] else { return Ok(self) };
        if length > 1 && self.strides[0].cast_unsigned() != self.item_bytes {
            return Err(invalid(
                "array",
                &"one with gaps",
                "one axis without gaps, or axes of layers and tokens",
            ));
        }
        let token_bytes = n_layers.saturating_mul(token_layer_bytes);
        let n_bytes = length.saturating_mul(self.item_bytes);
        if !n_bytes.is_multiple_of(token_bytes) {
            let allowed = format!("a multiple of {token_bytes}, for {n_layers} layers of a token");
            return Err(invalid("bytes of the array", &n_bytes, &allowed));
        }
        self.shape = vec![n_layers, n_bytes / token_bytes, token_layer_bytes];
        let layer_bytes = (n_bytes / n_layers) as isize;
        self.strides = vec![layer_bytes, token_layer_bytes as isize, 1];
        self.item_bytes = 1;
        Ok(self)
    }

    /// Where the pieces of its blocks lie: one for each place of the axes before that of the blocks, in C's order.
    ///
    /// # Errors
    /// If the axes behind that of the blocks have gaps or another order, or blocks share bytes.
    pub(crate) fn pieces(&self, block_axis: usize) -> PyResult<Vec<Piece>> {
        let Self { shape, strides, .. } = self;
        if block_axis >= shape.len() {
            let allowed = format!("less than the axes of the array, {}", shape.len());
            return Err(invalid("axis of the blocks", &block_axis, &allowed));
        }
        let shape_text = || format!("{shape:?} with strides of {strides:?} bytes");
        let mut block_bytes = self.item_bytes;
        for (length, stride) in shape.iter().zip(strides).skip(block_axis + 1).rev() {
            if *length != 1 && stride.cast_unsigned() != block_bytes {
                let allowed = format!("without gaps and in C's order behind axis {block_axis}");
                return Err(invalid("shape of the array", &shape_text(), &allowed));
            }
            block_bytes = block_bytes.saturating_mul(*length);
        }
        let outer = || shape.iter().zip(strides).take(block_axis + 1);
        let mut by_stride: Vec<(usize, isize)> =
            outer().map(|(length, stride)| (*length, *stride)).filter(|(length, _)| *length > 1).collect();
        by_stride.sort_unstable_by_key(|(_, stride)| *stride);
        let mut extent = block_bytes;
        for (length, stride) in by_stride {
            let is_apart = usize::try_from(stride).is_ok_and(|stride| stride >= extent);
            let longer = (length - 1).checked_mul(stride.unsigned_abs()).and_then(|n| n.checked_add(extent));
            match longer.filter(|n_bytes| is_apart && isize::try_from(*n_bytes).is_ok()) {
                Some(longer) => extent = longer,
                None => {
                    return Err(invalid("shape of the array", &shape_text(), "blocks that share no bytes"));
                }
            }
        }
        let n_pieces = shape[..block_axis].iter().fold(1_usize, |n, length| n.saturating_mul(*length));
        if n_pieces > MAX_PIECES {
            let allowed = format!("at most {MAX_PIECES}");
            return Err(invalid("places before the axis of the blocks", &n_pieces, &allowed));
        }
        // The extent has room in memory, and with it every place inside.
        let block_stride = strides[block_axis].unsigned_abs();
        let place = |mut idx: usize| {
            let mut offset = 0;
            for (length, stride) in shape.iter().zip(strides).take(block_axis).rev() {
                offset += idx % length * stride.unsigned_abs();
                idx /= length;
            }
            Piece { address: self.address + offset, block_bytes, block_stride }
        };
        Ok((0..n_pieces).map(place).collect())
    }
}

/// Whether some bytes of two pieces with `n_blocks` blocks are the same.
pub(crate) fn share_bytes(left: &Piece, right: &Piece, n_blocks: usize) -> bool {
    let (left, right) = if left.address <= right.address { (left, right) } else { (right, left) };
    let distance = right.address - left.address;
    if distance >= left.block_stride * (n_blocks - 1) + left.block_bytes {
        return false;
    }
    // Both are repeated at the same distance: then they are apart everywhere or nowhere.
    let is_interleaved = left.block_stride == right.block_stride && n_blocks > 1;
    let within = distance % left.block_stride.max(1);
    !is_interleaved || within < left.block_bytes || within + right.block_bytes > left.block_stride
}

/// The bound on pieces, for messages.
pub(crate) fn check_n_pieces(n_pieces: usize) -> PyResult<()> {
    if n_pieces > MAX_PIECES {
        return Err(invalid("pieces of the arrays", &n_pieces, &format!("at most {MAX_PIECES}")));
    }
    Ok(())
}
