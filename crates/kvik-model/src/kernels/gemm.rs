//! Rows times a packed weight matrix.
//!
//! Every output element is `fma(x[k], w[k], ...)` over all `k` in rising order, starting from
//! zero, in f32; bias and residual are added once at the end. The tile (how many rows and panels
//! advance together) is chosen for speed by the number of rows at hand and cannot change a bit.

use super::matrix::{PackedMatrix, Panels, padded};
use super::shared::{Aligned, SharedSlice};
use super::simd::{Isa, Kernel, LANES, Simd};
use super::threads::ThreadPool;

/// Most rows that one tile advances together: 5 rows by 4 panels leave room for weights and values
/// in the 32 vector registers of AVX-512, and 5 by 1 in the 16 of AVX2; a sixth row spills.
const MAX_TILE_ROWS: usize = 5;
/// Panels that one thread claims at the least; the widest tile takes this many.
const MIN_PANELS_PER_CHUNK: usize = 8;
/// Chunks for each thread, so that a slow thread leaves work to the others.
const CHUNKS_PER_THREAD: usize = 4;

/// What happens to the value that is already in the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Combine {
    /// It is replaced.
    Replace,
    /// The product is added to it: the residual stream.
    Add,
}

/// Computes `x * matrix^T + bias` for `n_rows` rows and combines it with `out`.
///
/// Rows of `x` and `out` lie `padded(n_inputs)` and `padded(n_outputs)` apart; the padding of
/// `x` must be zero, and that of `out` becomes or stays zero.
///
/// # Panics
/// If a buffer is shorter than its rows.
pub(crate) fn matmul(
    isa: Isa,
    pool: &mut ThreadPool,
    matrix: &PackedMatrix,
    bias: Option<&[f32]>,
    x: &[f32],
    n_rows: usize,
    combine: Combine,
    out: &mut [f32],
) {
    let x_stride = padded(matrix.n_inputs());
    let out_stride = padded(matrix.n_outputs());
    assert!(n_rows * x_stride <= x.len(), "input rows are missing");
    assert!(n_rows * out_stride <= out.len(), "output rows are missing");
    assert!(bias.is_none_or(|bias| bias.len() == out_stride), "the bias is not padded");
    let n_panels = matrix.n_panels();
    let panels_per_chunk =
        n_panels.div_ceil(CHUNKS_PER_THREAD * pool.n_threads()).next_multiple_of(MIN_PANELS_PER_CHUNK);
    let shared_out = SharedSlice::new(out);
    pool.run(n_panels.div_ceil(panels_per_chunk), &|chunk| {
        let first_panel = chunk * panels_per_chunk;
        isa.run(PanelsKernel {
            matrix,
            bias,
            x,
            x_stride,
            n_rows,
            combine,
            out: shared_out,
            out_stride,
            first_panel,
            end_panel: n_panels.min(first_panel + panels_per_chunk),
        });
    });
}

/// All rows times the panels `first_panel..end_panel`.
struct PanelsKernel<'a> {
    matrix: &'a PackedMatrix,
    bias: Option<&'a [f32]>,
    x: &'a [f32],
    x_stride: usize,
    n_rows: usize,
    combine: Combine,
    /// Written only in the columns of `first_panel..end_panel`.
    out: SharedSlice<'a, f32>,
    out_stride: usize,
    first_panel: usize,
    end_panel: usize,
}

/// The weights of one panel for one vector load.
trait PanelChunk {
    /// Inputs that the chunk covers: one, or two.
    const N_INPUTS: usize;

    /// The weights of the covered input number `step`.
    fn widen<S: Simd>(&self, simd: S, step: usize) -> S::Lanes;
}

impl PanelChunk for Aligned<[f32; LANES]> {
    const N_INPUTS: usize = 1;

    #[inline(always)]
    fn widen<S: Simd>(&self, simd: S, _step: usize) -> S::Lanes {
        simd.load(&self.0)
    }
}

/// Sixteen f16; a type of its own because bf16 could have the same shape.
#[repr(transparent)]
struct F16Chunk(Aligned<[u16; LANES]>);

impl PanelChunk for F16Chunk {
    const N_INPUTS: usize = 1;

    #[inline(always)]
    fn widen<S: Simd>(&self, simd: S, _step: usize) -> S::Lanes {
        simd.load_f16(&self.0.0)
    }
}

impl PanelChunk for Aligned<[u16; 2 * LANES]> {
    const N_INPUTS: usize = 2;

    #[inline(always)]
    fn widen<S: Simd>(&self, simd: S, step: usize) -> S::Lanes {
        if step == 0 { simd.load_bf16_even(&self.0) } else { simd.load_bf16_odd(&self.0) }
    }
}

impl Kernel for PanelsKernel<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        match &self.matrix.panels {
            Panels::F32(panels) => self.run_panels(simd, panels),
            Panels::F16(panels) => {
                // SAFETY: `F16Chunk` is a transparent wrapper of the element type.
                let chunks =
                    unsafe { std::slice::from_raw_parts(panels.as_ptr().cast::<F16Chunk>(), panels.len()) };
                self.run_panels(simd, chunks);
            }
            Panels::Bf16(panels) => self.run_panels(simd, panels),
        }
    }
}

impl PanelsKernel<'_> {
    #[inline(always)]
    fn run_panels<S: Simd, C: PanelChunk>(&self, simd: S, chunks: &[C]) {
        let chunks_per_panel = self.matrix.n_inputs().div_ceil(C::N_INPUTS);
        let mut panel = self.first_panel;
        while panel < self.end_panel {
            let n_left = self.end_panel - panel;
            let wide = if S::HAS_WIDE_REGISTERS { wide_tile(self.n_rows) } else { narrow_tile(self.n_rows) };
            let n_panels = if wide <= n_left { wide } else { 1 };
            let panel_chunks = &chunks[panel * chunks_per_panel..(panel + n_panels) * chunks_per_panel];
            let n_tiles = self.n_rows.div_ceil(MAX_TILE_ROWS);
            let mut row = 0;
            for tile_idx in 0..n_tiles {
                // Rows spread evenly: 6 rows are 3 and 3, not 5 and 1.
                let n_rows = (self.n_rows - row).div_ceil(n_tiles - tile_idx);
                self.run_tile(simd, panel_chunks, panel, n_panels, row, n_rows);
                row += n_rows;
            }
            panel += n_panels;
        }
    }

    /// Picks the compiled tile; shapes that [`wide_tile`] and [`narrow_tile`] never ask for go
    /// one panel at a time.
    #[inline(always)]
    fn run_tile<S: Simd, C: PanelChunk>(
        &self,
        simd: S,
        chunks: &[C],
        panel: usize,
        n_panels: usize,
        row: usize,
        n_rows: usize,
    ) {
        match (n_rows, n_panels) {
            (1, 8) => self.tile::<S, C, 1, 8>(simd, chunks, panel, row),
            (1, 4) => self.tile::<S, C, 1, 4>(simd, chunks, panel, row),
            (2, 4) => self.tile::<S, C, 2, 4>(simd, chunks, panel, row),
            (3, 4) => self.tile::<S, C, 3, 4>(simd, chunks, panel, row),
            (4, 4) => self.tile::<S, C, 4, 4>(simd, chunks, panel, row),
            (5, 4) => self.tile::<S, C, 5, 4>(simd, chunks, panel, row),
            (1, _) => self.tile::<S, C, 1, 1>(simd, chunks, panel, row),
            (2, _) => self.tile::<S, C, 2, 1>(simd, chunks, panel, row),
            (3, _) => self.tile::<S, C, 3, 1>(simd, chunks, panel, row),
            (4, _) => self.tile::<S, C, 4, 1>(simd, chunks, panel, row),
            (_, _) => self.tile::<S, C, 5, 1>(simd, chunks, panel, row),
        }
    }

    #[inline(always)]
    fn tile<S: Simd, C: PanelChunk, const ROWS: usize, const PANELS: usize>(
        &self,
        simd: S,
        chunks: &[C],
        panel: usize,
        row: usize,
    ) {
        let chunks_per_panel = self.matrix.n_inputs().div_ceil(C::N_INPUTS);
        assert!(PANELS * chunks_per_panel <= chunks.len());
        assert!(chunks_per_panel * C::N_INPUTS <= self.x_stride);
        let x = &self.x[row * self.x_stride..(row + ROWS) * self.x_stride];
        let mut sums = [[simd.splat(0.0); PANELS]; ROWS];
        for chunk in 0..chunks_per_panel {
            for step in 0..C::N_INPUTS {
                let mut values = [simd.splat(0.0); ROWS];
                for row_idx in 0..ROWS {
                    // SAFETY: `x` is `ROWS` strides long and a stride holds every input, padded
                    // to the chunk, asserted above.
                    let value =
                        unsafe { *x.get_unchecked(row_idx * self.x_stride + chunk * C::N_INPUTS + step) };
                    values[row_idx] = simd.splat(value);
                }
                // Weights are widened one panel at a time: sums and values fill the registers.
                for panel_idx in 0..PANELS {
                    // SAFETY: `chunks` holds `PANELS * chunks_per_panel` chunks, asserted above.
                    let weight_chunk = unsafe { chunks.get_unchecked(panel_idx * chunks_per_panel + chunk) };
                    let weight = weight_chunk.widen(simd, step);
                    for row_idx in 0..ROWS {
                        sums[row_idx][panel_idx] =
                            simd.fma(values[row_idx], weight, sums[row_idx][panel_idx]);
                    }
                }
            }
        }
        for (row_idx, row_sums) in sums.iter().enumerate() {
            for (panel_idx, &sum) in row_sums.iter().enumerate() {
                self.write(simd, row + row_idx, panel + panel_idx, sum);
            }
        }
    }

    #[inline(always)]
    fn write<S: Simd>(&self, simd: S, row: usize, panel: usize, sum: S::Lanes) {
        let column = panel * LANES;
        // SAFETY: this kernel alone writes the columns of its panels, and one tile at a time.
        let slot = unsafe { self.out.slice_mut(row * self.out_stride + column, LANES) };
        let Some(slot) = slot.first_chunk_mut::<LANES>() else {
            return;
        };
        let mut value = sum;
        if let Some(bias) = self.bias.and_then(|bias| bias[column..].first_chunk::<LANES>()) {
            value = simd.add(value, simd.load(bias));
        }
        if self.combine == Combine::Add {
            value = simd.add(simd.load(slot), value);
        }
        simd.store(value, slot);
    }
}

/// Panels that advance together on 32 registers of sixteen lanes: at least eight chains, to hide
/// the latency of the multiply-add.
#[inline(always)]
fn wide_tile(n_rows: usize) -> usize {
    if n_rows <= 1 { 8 } else { 4 }
}

/// Panels that advance together on 16 registers of eight lanes.
#[inline(always)]
fn narrow_tile(n_rows: usize) -> usize {
    if n_rows <= 1 { 4 } else { 1 }
}

#[cfg(test)]
mod tests;
