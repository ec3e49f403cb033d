//! The memory in which keys and values lie, block by block.

use half::{bf16, f16};

use crate::paging::BlockId;

use super::matrix::padded;
use super::plan::{BlockRun, RowPlan};
use super::shared::{Aligned, SharedSlice};
use super::simd::{LANES, Simd};
use super::threads::ThreadPool;

/// An element type of stored keys and values.
pub(crate) trait KvElement: Copy + Send + Sync + Default + std::fmt::Debug + 'static {
    fn from_f32(value: f32) -> Self;
    fn widen<S: Simd>(simd: S, from: &[Self; LANES]) -> S::Lanes;
}

impl KvElement for f32 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn widen<S: Simd>(simd: S, from: &[Self; LANES]) -> S::Lanes {
        simd.load(from)
    }
}

macro_rules! sixteen_bit_element {
    ($element:ty, $load:ident) => {
        impl KvElement for $element {
            #[inline(always)]
            fn from_f32(value: f32) -> Self {
                <$element>::from_f32(value)
            }

            #[inline(always)]
            fn widen<S: Simd>(simd: S, from: &[Self; LANES]) -> S::Lanes {
                // SAFETY: the element is a transparent wrapper of u16.
                let bits = unsafe { &*std::ptr::from_ref(from).cast::<[u16; LANES]>() };
                simd.$load(bits)
            }
        }
    };
}

sixteen_bit_element!(f16, load_f16);
sixteen_bit_element!(bf16, load_bf16);

/// The numbers that fix the size of a block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageShape {
    pub(crate) n_kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl PageShape {
    /// Vectors of one KV head in one block: the keys transposed, then the values in rows.
    pub(super) fn vectors_per_head(self) -> usize {
        self.head_dim + padded(self.head_dim)
    }

    /// Vectors of one block in one layer.
    pub(super) fn vectors_per_block(self) -> usize {
        self.n_kv_heads * self.vectors_per_head()
    }
}

/// Keys and values of all layers.
///
/// A block of one layer holds, for each KV head, `head_dim` vectors of the keys of its sixteen
/// tokens and then the values, a row of `padded(head_dim)` for each token.
#[derive(Debug)]
pub(crate) struct KvPages<E> {
    layers: Vec<Vec<Aligned<[E; LANES]>>>,
    pub(super) shape: PageShape,
    n_blocks: usize,
}

/// Rows that hold keys and values side by side.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KvRows<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) stride: usize,
    /// Column at which the keys of all heads start.
    pub(crate) key_column: usize,
    /// Column at which the values of all heads start.
    pub(crate) value_column: usize,
}

impl<E: KvElement> KvPages<E> {
    pub(crate) fn new(n_layers: usize, n_blocks: usize, shape: PageShape) -> Self {
        let n_vectors = n_blocks * shape.vectors_per_block();
        let layers = (0..n_layers)
            .map(|_| vec![Aligned([E::default(); LANES]); n_vectors])
            .collect();
        Self {
            layers,
            shape,
            n_blocks,
        }
    }

    pub(crate) fn n_blocks(&self) -> usize {
        self.n_blocks
    }

    /// All blocks of one layer.
    pub(super) fn layer(&self, layer_idx: usize) -> &[Aligned<[E; LANES]>] {
        &self.layers[layer_idx]
    }

    pub(crate) fn copy_block(&mut self, from: BlockId, to: BlockId) {
        let n_vectors = self.shape.vectors_per_block();
        let source = from.index() * n_vectors;
        for layer in &mut self.layers {
            layer.copy_within(source..source + n_vectors, to.index() * n_vectors);
        }
    }

    /// Writes the keys and values of the planned rows into their blocks of one layer.
    ///
    /// # Panics
    /// If `rows` is shorter than the plan.
    pub(crate) fn write(
        &mut self,
        pool: &mut ThreadPool,
        layer_idx: usize,
        plan: &RowPlan<'_>,
        rows: KvRows<'_>,
    ) {
        let shape = self.shape;
        let n_vectors = shape.vectors_per_block();
        let vectors = SharedSlice::new(&mut self.layers[layer_idx]);
        pool.run(plan.runs.len(), &|run_idx| {
            let run = &plan.runs[run_idx];
            // SAFETY: a plan has no two runs with one block, and blocks do not overlap.
            let block = unsafe { vectors.slice_mut(run.block.index() * n_vectors, n_vectors) };
            write_run(shape, run, rows, block);
        });
    }
}

fn write_run<E: KvElement>(
    shape: PageShape,
    run: &BlockRun,
    rows: KvRows<'_>,
    block: &mut [Aligned<[E; LANES]>],
) {
    let head_dim = shape.head_dim;
    let row_vectors = padded(head_dim) / LANES;
    for row_idx in 0..run.n_rows {
        let row = &rows.values[(run.first_row + row_idx) * rows.stride..][..rows.stride];
        let lane = run.first_lane + row_idx;
        for (head, vectors) in block.chunks_exact_mut(shape.vectors_per_head()).enumerate() {
            let (keys, values) = vectors.split_at_mut(head_dim);
            let key_row = &row[rows.key_column + head * head_dim..][..head_dim];
            for (vector, &key) in keys.iter_mut().zip(key_row) {
                vector.0[lane] = E::from_f32(key);
            }
            let value_row = &row[rows.value_column + head * head_dim..][..head_dim];
            let token_vectors = &mut values[lane * row_vectors..(lane + 1) * row_vectors];
            for (vector, part) in token_vectors.iter_mut().zip(value_row.chunks(LANES)) {
                for (slot, &value) in vector.0.iter_mut().zip(part) {
                    *slot = E::from_f32(value);
                }
            }
        }
    }
}
