//! Attention that reads keys and values in place from their blocks.
//!
//! A block of one layer holds, for each KV head, the keys of its sixteen tokens transposed
//! (`head_dim` vectors of sixteen tokens) and the values (sixteen rows of `padded(head_dim)`).
//! Scores of sixteen tokens are then one vector, and an output is a sum of value rows.
//!
//! For one query the order is fixed by the context alone: each score is one chain over the head's
//! dimensions; the largest score is taken over the whole visible context; the exponentials are
//! summed lane by lane over the blocks and then as a tree; each output element is one chain over
//! the visible tokens. Blocks are aligned to absolute positions, so neither the chunk a row was
//! computed in nor its neighbors can move a bit. Tokens a row must not see are never multiplied
//! into it, not even by zero: they may be anything, also NaN.

use std::cell::RefCell;

use super::math;
use super::matrix::padded;
use super::pages::{KvElement, KvPages, PageShape};
use super::plan::{RowPlan, RowTile};
use super::shared::{Aligned, SharedSlice};
use super::simd::{Isa, Kernel, LANES, Simd};
use super::threads::ThreadPool;

/// Queries that advance together: with two vectors of output each they fill 16 accumulators.
const MAX_QUERIES: usize = 8;

/// Tokens that one thread reads at the least, so that a section of short contexts does not cost
/// more than it gives: about ten microseconds of work.
const MIN_VISIBLE_PER_CHUNK: usize = 256;

/// The attention of one layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionShape {
    pub(crate) n_query_heads: usize,
    /// A token sees itself and the `window - 1` tokens before it.
    pub(crate) window: Option<usize>,
}

/// Computes the attention outputs of the planned rows.
///
/// Rows of `q` lie `q_stride` apart and begin with the query heads, side by side; those of `out`
/// lie `padded(n_query_heads * head_dim)` apart.
///
/// # Panics
/// If `q` or `out` is shorter than the plan.
pub(crate) fn attend<E: KvElement>(
    isa: Isa,
    pool: &mut ThreadPool,
    shape: AttentionShape,
    pages: &KvPages<E>,
    layer_idx: usize,
    plan: &RowPlan<'_>,
    q: &[f32],
    q_stride: usize,
    out: &mut [f32],
) {
    let n_kv_heads = pages.shape.n_kv_heads;
    let n_tasks = plan.tiles.len() * n_kv_heads;
    let n_chunks = (plan.n_visible * n_kv_heads / MIN_VISIBLE_PER_CHUNK).clamp(1, n_tasks.max(1));
    let out_stride = padded(shape.n_query_heads * pages.shape.head_dim);
    assert!(plan.n_rows * q_stride <= q.len(), "query rows are missing");
    let shared_out = SharedSlice::new(out);
    pool.run(n_chunks, &|chunk| {
        SCORES.with_borrow_mut(|scores| {
            for task in (chunk * n_tasks / n_chunks)..((chunk + 1) * n_tasks / n_chunks) {
                isa.run(AttendTile {
                    shape,
                    page_shape: pages.shape,
                    vectors: pages.layer(layer_idx),
                    tile: plan.tiles[task / n_kv_heads],
                    kv_head: task % n_kv_heads,
                    q,
                    q_stride,
                    out: shared_out,
                    out_stride,
                    scores,
                });
            }
        });
    });
}

thread_local! {
    /// Scores, then probabilities, of the queries at hand; kept because a task is too short to
    /// pay for an allocation.
    static SCORES: RefCell<Vec<Aligned<[f32; LANES]>>> = const { RefCell::new(Vec::new()) };
}

/// One tile of rows and one KV head.
struct AttendTile<'a, E> {
    shape: AttentionShape,
    page_shape: PageShape,
    /// All blocks of the layer.
    vectors: &'a [Aligned<[E; LANES]>],
    tile: RowTile<'a>,
    kv_head: usize,
    q: &'a [f32],
    q_stride: usize,
    /// Written only in the tile's rows and the columns of the KV head's queries; no other tile
    /// has both.
    out: SharedSlice<'a, f32>,
    out_stride: usize,
    scores: &'a mut Vec<Aligned<[f32; LANES]>>,
}

impl<E: KvElement> Kernel for AttendTile<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let n_queries = self.tile.n_rows * self.queries_per_kv_head();
        let mut query = 0;
        while query < n_queries {
            match n_queries - query {
                MAX_QUERIES.. => {
                    self.attend_queries::<S, MAX_QUERIES, 1>(simd, query);
                    query += MAX_QUERIES;
                }
                4.. => {
                    self.attend_queries::<S, 4, 2>(simd, query);
                    query += 4;
                }
                2.. => {
                    self.attend_queries::<S, 2, 4>(simd, query);
                    query += 2;
                }
                _ => {
                    self.attend_queries::<S, 1, 8>(simd, query);
                    query += 1;
                }
            }
        }
    }
}

impl<E: KvElement> AttendTile<'_, E> {
    #[inline(always)]
    fn queries_per_kv_head(&self) -> usize {
        self.shape.n_query_heads / self.page_shape.n_kv_heads
    }

    /// Row inside the tile and query head of the tile's `query`.
    #[inline(always)]
    fn row_and_head(&self, query: usize) -> (usize, usize) {
        let per_head = self.queries_per_kv_head();
        (query / per_head, self.kv_head * per_head + query % per_head)
    }

    /// Positions that the tile's `query` sees.
    #[inline(always)]
    fn visible(&self, query: usize) -> std::ops::Range<usize> {
        let position = self.tile.first_position + self.row_and_head(query).0;
        let start = self.shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
        start..position + 1
    }

    /// Index of the first vector of this tile's KV head in the block of position `16 * block_idx`.
    #[inline(always)]
    fn head_start(&self, block_idx: usize) -> usize {
        let block = self.tile.block_table[block_idx].index();
        block * self.page_shape.vectors_per_block() + self.kv_head * self.page_shape.vectors_per_head()
    }

    /// The queries `first..first + QUERIES`; `BLOCKS` blocks advance together in the score phase
    /// so that there are at least eight chains.
    #[inline(always)]
    fn attend_queries<S: Simd, const QUERIES: usize, const BLOCKS: usize>(&mut self, simd: S, first: usize) {
        let start_block = self.visible(first).start / LANES;
        let end_block = self.visible(first + QUERIES - 1).end.div_ceil(LANES);
        let n_blocks = end_block - start_block;
        if self.scores.len() < QUERIES * n_blocks {
            self.scores.resize(QUERIES * n_blocks, Aligned([0.0; LANES]));
        }
        let mut block_idx = start_block;
        while block_idx < end_block {
            if block_idx + BLOCKS <= end_block {
                self.score_blocks::<S, QUERIES, BLOCKS>(simd, first, block_idx, start_block, n_blocks);
                block_idx += BLOCKS;
            } else {
                self.score_blocks::<S, QUERIES, 1>(simd, first, block_idx, start_block, n_blocks);
                block_idx += 1;
            }
        }
        let mut sums = [0.0; QUERIES];
        for query in 0..QUERIES {
            sums[query] = self.soften::<S>(simd, first + query, query, start_block, n_blocks);
        }
        let n_value_vectors = padded(self.page_shape.head_dim) / LANES;
        let mut vector = 0;
        while vector < n_value_vectors {
            if vector + 2 <= n_value_vectors {
                self.mix_values::<S, QUERIES, 2>(simd, first, vector, start_block, n_blocks, &sums);
                vector += 2;
            } else {
                self.mix_values::<S, QUERIES, 1>(simd, first, vector, start_block, n_blocks, &sums);
                vector += 1;
            }
        }
    }

    /// Writes the scaled scores of `BLOCKS` blocks; lanes outside of a query's view get minus
    /// infinity.
    #[inline(always)]
    fn score_blocks<S: Simd, const QUERIES: usize, const BLOCKS: usize>(
        &mut self,
        simd: S,
        first: usize,
        block_idx: usize,
        start_block: usize,
        n_blocks: usize,
    ) {
        let head_dim = self.page_shape.head_dim;
        let scale = simd.splat(1.0 / (head_dim as f32).sqrt());
        let mut queries: [&[f32]; QUERIES] = [&[]; QUERIES];
        for (query, slice) in queries.iter_mut().enumerate() {
            let (row, head) = self.row_and_head(first + query);
            let q_start = (self.tile.first_row + row) * self.q_stride + head * head_dim;
            *slice = &self.q[q_start..q_start + head_dim];
        }
        let mut keys: [&[Aligned<[E; LANES]>]; BLOCKS] = [&[]; BLOCKS];
        for (block, slice) in keys.iter_mut().enumerate() {
            let head_start = self.head_start(block_idx + block);
            *slice = &self.vectors[head_start..head_start + head_dim];
        }
        let mut dots = [[simd.splat(0.0); BLOCKS]; QUERIES];
        for dim in 0..head_dim {
            let mut key = [simd.splat(0.0); BLOCKS];
            for block in 0..BLOCKS {
                // SAFETY: each slice of `keys` is `head_dim` long.
                key[block] = E::widen(simd, unsafe { &keys[block].get_unchecked(dim).0 });
            }
            for query in 0..QUERIES {
                // SAFETY: each slice of `queries` is `head_dim` long.
                let value = simd.splat(unsafe { *queries[query].get_unchecked(dim) });
                for block in 0..BLOCKS {
                    dots[query][block] = simd.fma(value, key[block], dots[query][block]);
                }
            }
        }
        for (query, query_dots) in dots.iter().enumerate() {
            let visible = self.visible(first + query);
            for (block, &dot) in query_dots.iter().enumerate() {
                let position = (block_idx + block) * LANES;
                let slot = &mut self.scores[query * n_blocks + block_idx + block - start_block].0;
                simd.store(simd.mul(dot, scale), slot);
                if position < visible.start || visible.end < position + LANES {
                    for (lane, score) in slot.iter_mut().enumerate() {
                        if !visible.contains(&(position + lane)) {
                            *score = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }

    /// Turns the scores of one query into exponentials and returns their sum.
    #[inline(always)]
    fn soften<S: Simd>(
        &mut self,
        simd: S,
        query: usize,
        query_idx: usize,
        start_block: usize,
        n_blocks: usize,
    ) -> f32 {
        let visible = self.visible(query);
        let first = query_idx * n_blocks + (visible.start / LANES - start_block);
        let end = query_idx * n_blocks + (visible.end.div_ceil(LANES) - start_block);
        let scores = &mut self.scores[first..end];
        let mut largest = simd.splat(f32::NEG_INFINITY);
        for vector in &*scores {
            largest = simd.max(largest, simd.load(&vector.0));
        }
        let largest = simd.splat(simd.max_lane(largest));
        let mut sum = simd.splat(0.0);
        for vector in scores {
            let exponential = math::exp(simd, simd.sub(simd.load(&vector.0), largest));
            sum = simd.add(sum, exponential);
            simd.store(exponential, &mut vector.0);
        }
        simd.sum(sum)
    }

    /// Sums the value rows, weighted, for `VECTORS` vectors of the output of each query.
    #[inline(always)]
    fn mix_values<S: Simd, const QUERIES: usize, const VECTORS: usize>(
        &mut self,
        simd: S,
        first: usize,
        vector: usize,
        start_block: usize,
        n_blocks: usize,
        sums: &[f32; QUERIES],
    ) {
        let mut mixed = [[simd.splat(0.0); VECTORS]; QUERIES];
        // Rows follow each other, so the first query starts first and ends first.
        let start = self.visible(first).start;
        let all_start = self.visible(first + QUERIES - 1).start;
        let all_end = self.visible(first).end;
        let end = self.visible(first + QUERIES - 1).end;
        let row_vectors = padded(self.page_shape.head_dim) / LANES;
        for block_idx in start_block..start_block + n_blocks {
            let values_start = self.head_start(block_idx) + self.page_shape.head_dim + vector;
            let block_start = block_idx * LANES;
            let rows = start.max(block_start)..end.min(block_start + LANES);
            let values = &self.vectors[values_start..values_start + (LANES - 1) * row_vectors + VECTORS];
            for position in rows {
                let lane = position - block_start;
                let mut value = [simd.splat(0.0); VECTORS];
                for part in 0..VECTORS {
                    // SAFETY: `values` spans sixteen rows and `lane` is below sixteen.
                    value[part] =
                        E::widen(simd, unsafe { &values.get_unchecked(lane * row_vectors + part).0 });
                }
                let everyone_sees = all_start <= position && position < all_end;
                for query in 0..QUERIES {
                    if everyone_sees || self.visible(first + query).contains(&position) {
                        // SAFETY: the scores of `QUERIES * n_blocks` blocks were written.
                        let weight = unsafe {
                            self.scores.get_unchecked(query * n_blocks + block_idx - start_block).0[lane]
                        };
                        let weight = simd.splat(weight);
                        for part in 0..VECTORS {
                            mixed[query][part] = simd.fma(weight, value[part], mixed[query][part]);
                        }
                    }
                }
            }
        }
        for query in 0..QUERIES {
            let (row, head) = self.row_and_head(first + query);
            let out_row = (self.tile.first_row + row) * self.out_stride;
            for part in 0..VECTORS {
                let mut normalized = [0.0; LANES];
                simd.store(simd.div(mixed[query][part], simd.splat(sums[query])), &mut normalized);
                let dim = (vector + part) * LANES;
                let n_dims = LANES.min(self.page_shape.head_dim - dim);
                // SAFETY: no other task has this tile's rows and this KV head's queries.
                let out =
                    unsafe { self.out.slice_mut(out_row + head * self.page_shape.head_dim + dim, n_dims) };
                out.copy_from_slice(&normalized[..n_dims]);
            }
        }
    }
}

#[cfg(test)]
mod tests;
