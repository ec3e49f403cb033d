//! The memory in which keys and values lie, block by block.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use half::{bf16, f16};
use kvik_memory::pool::KvPool;

use crate::paging::BlockId;

use super::matrix::padded;
use super::plan::{BlockRun, RowPlan};
use super::shared::Aligned;
use super::simd::{LANES, Simd};
use super::storage::LayerStorage;
use super::threads::ThreadPool;

/// An element type of stored keys and values.
pub(crate) trait KvElement: Copy + Send + Sync + Default + std::fmt::Debug + 'static {
    /// Bytes of one element on the wire.
    const N_BYTES: usize;

    fn from_f32(value: f32) -> Self;
    fn to_f32(self) -> f32;
    /// Appends the element in little endian.
    fn push_le(self, out: &mut Vec<u8>);
    /// Reads an element of [`KvElement::N_BYTES`] bytes in little endian.
    fn from_le(bytes: &[u8]) -> Self;
    /// Writes elements in little endian, as many as both sides have.
    fn write_le(elements: &[Self], out: &mut [u8]);
    /// Reads elements in little endian, as many as both sides have.
    fn read_le(bytes: &[u8], elements: &mut [Self]);
    fn widen<S: Simd>(simd: S, from: &[Self; LANES]) -> S::Lanes;
}

/// The methods that read and write an element's bytes.
macro_rules! little_endian {
    ($n_bytes:literal) => {
        const N_BYTES: usize = $n_bytes;

        #[inline(always)]
        fn push_le(self, out: &mut Vec<u8>) {
            out.extend_from_slice(&self.to_le_bytes());
        }

        #[inline(always)]
        fn from_le(bytes: &[u8]) -> Self {
            Self::from_le_bytes(bytes.first_chunk().copied().unwrap_or_default())
        }

        #[inline(always)]
        fn write_le(elements: &[Self], out: &mut [u8]) {
            for (slot, element) in out.as_chunks_mut::<$n_bytes>().0.iter_mut().zip(elements) {
                *slot = element.to_le_bytes();
            }
        }

        #[inline(always)]
        fn read_le(bytes: &[u8], elements: &mut [Self]) {
            if cfg!(target_endian = "little") {
                let n_bytes = bytes.len().min(size_of_val(elements));
                let start = elements.as_mut_ptr().cast::<u8>();
                // SAFETY: so many bytes belong to `elements`, whose type has no padding and takes any bits.
                let to = unsafe { std::slice::from_raw_parts_mut(start, n_bytes) };
                return to.copy_from_slice(&bytes[..n_bytes]);
            }
            for (element, slot) in elements.iter_mut().zip(bytes.as_chunks::<$n_bytes>().0) {
                *element = Self::from_le_bytes(*slot);
            }
        }
    };
}

impl KvElement for f32 {
    little_endian!(4);

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn widen<S: Simd>(simd: S, from: &[Self; LANES]) -> S::Lanes {
        simd.load(from)
    }
}

macro_rules! sixteen_bit_element {
    ($element:ty, $load:ident) => {
        impl KvElement for $element {
            little_endian!(2);

            #[inline(always)]
            fn from_f32(value: f32) -> Self {
                <$element>::from_f32(value)
            }

            #[inline(always)]
            fn to_f32(self) -> f32 {
                self.to_f32()
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

    /// Vectors of the values of one token in one KV head.
    fn vectors_per_row(self) -> usize {
        padded(self.head_dim) / LANES
    }

    /// Keys and values of one block in one layer, without what pads them.
    fn elements_per_block(self) -> usize {
        2 * self.n_kv_heads * self.head_dim * LANES
    }
}

/// Keys and values of all layers.
///
/// A block of one layer holds, for each KV head, `head_dim` vectors of the keys of its sixteen
/// tokens and then the values, a row of `padded(head_dim)` for each token.
///
/// This value alone writes. Blocks that are pinned are not written, so they can be read meanwhile, on other
/// threads too.
#[derive(Debug)]
pub(crate) struct KvPages<E> {
    memory: Arc<PageMemory<E>>,
    pub(super) shape: PageShape,
    n_blocks: usize,
}

/// Blocks that stay as they are until this is dropped.
#[derive(Debug)]
pub(crate) struct PinnedBlocks<E> {
    memory: Arc<PageMemory<E>>,
    blocks: Vec<BlockId>,
}

#[derive(Debug)]
struct PageMemory<E> {
    layers: Vec<LayerStorage<Aligned<[E; LANES]>>>,
    shape: PageShape,
    /// Of each block. Only `&mut KvPages`, which could write the block instead, counts up; any thread counts down.
    n_pins: Box<[AtomicU32]>,
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
    /// Pages for `n_blocks` blocks; `None` if they do not fit into the address space.
    pub(crate) fn try_new(n_layers: usize, n_blocks: usize, shape: PageShape) -> Option<Self> {
        let n_vectors = n_blocks.checked_mul(shape.vectors_per_block())?;
        let mut layers = Vec::with_capacity(n_layers);
        for _ in 0..n_layers {
            layers.push(LayerStorage::owned(n_vectors, Aligned([E::default(); LANES]))?);
        }
        Some(Self::new(layers, shape, n_blocks))
    }

    /// Pages on the blocks of `pool`, a buffer for each layer; `None` if it is not laid out for them.
    pub(crate) fn on_pool(pool: &Arc<KvPool>, n_layers: usize, shape: PageShape) -> Option<Self> {
        let n_blocks = pool.block_geometry().n_blocks() as usize;
        let n_vectors = n_blocks.checked_mul(shape.vectors_per_block())?;
        let layer = |layer_idx| LayerStorage::mapped(pool, layer_idx, n_vectors);
        let layers = (0..n_layers).map(layer).collect::<Option<Vec<_>>>()?;
        Some(Self::new(layers, shape, n_blocks))
    }

    fn new(layers: Vec<LayerStorage<Aligned<[E; LANES]>>>, shape: PageShape, n_blocks: usize) -> Self {
        let n_pins = (0..n_blocks).map(|_| AtomicU32::new(0)).collect();
        Self { memory: Arc::new(PageMemory { layers, shape, n_pins }), shape, n_blocks }
    }

    /// Keeps `blocks` as they are until the result is dropped: writing one of them before is a defect of the
    /// caller and panics.
    pub(crate) fn pin(&mut self, blocks: &[BlockId]) -> PinnedBlocks<E> {
        for block in blocks {
            // Relaxed: the same thread writes, or a later one that got `&mut self` from it.
            self.memory.n_pins[block.index()].fetch_add(1, Ordering::Relaxed);
        }
        PinnedBlocks { memory: Arc::clone(&self.memory), blocks: blocks.to_vec() }
    }

    /// Bytes of one block in one layer.
    pub(crate) fn block_bytes(shape: PageShape) -> usize {
        shape.vectors_per_block() * size_of::<Aligned<[E; LANES]>>()
    }

    pub(crate) fn n_blocks(&self) -> usize {
        self.n_blocks
    }

    /// All blocks of one layer.
    pub(super) fn layer(&self, layer_idx: usize) -> &[Aligned<[E; LANES]>] {
        &self.memory.layers[layer_idx]
    }

    /// One block of one layer.
    fn block(&self, layer_idx: usize, block: BlockId) -> &[Aligned<[E; LANES]>] {
        self.memory.block(layer_idx, block)
    }

    /// One block of one layer, to be written.
    ///
    /// # Panics
    /// If the block is pinned.
    fn block_mut(&mut self, layer_idx: usize, block: BlockId) -> &mut [Aligned<[E; LANES]>] {
        self.memory.assert_unpinned(block);
        let n_vectors = self.shape.vectors_per_block();
        // SAFETY: other threads read pinned blocks alone. This one is not pinned, and does not become so while
        // `self` is borrowed; nor is anything else read or written through `self`.
        unsafe { self.memory.layers[layer_idx].slice_mut(block.index() * n_vectors, n_vectors) }
    }

    pub(crate) fn copy_block(&mut self, from: BlockId, to: BlockId) {
        if from == to {
            return;
        }
        let memory = Arc::clone(&self.memory);
        for layer_idx in 0..memory.layers.len() {
            // Two blocks: what is read is not written.
            self.block_mut(layer_idx, to).copy_from_slice(memory.block(layer_idx, from));
        }
    }

    /// The keys of one layer of the first `n_tokens` tokens of a block table: `[n_tokens, n_kv_heads, head_dim]`.
    pub(crate) fn widened_keys(
        &self,
        layer_idx: usize,
        block_table: &[BlockId],
        n_tokens: usize,
    ) -> Vec<f32> {
        let mut keys = Vec::with_capacity(n_tokens * self.shape.n_kv_heads * self.shape.head_dim);
        for position in 0..n_tokens {
            let block = self.block(layer_idx, block_table[position / LANES]);
            for head in block.chunks_exact(self.shape.vectors_per_head()) {
                keys.extend(
                    head[..self.shape.head_dim].iter().map(|vector| vector.0[position % LANES].to_f32()),
                );
            }
        }
        keys
    }

    /// Appends the keys and values of the first `n_tokens` tokens of a block table to `keys` and
    /// `values`, each `[n_tokens, n_kv_heads, head_dim]` in little endian.
    pub(crate) fn export(
        &self,
        layer_idx: usize,
        block_table: &[BlockId],
        n_tokens: usize,
        keys: &mut Vec<u8>,
        values: &mut Vec<u8>,
    ) {
        let row_vectors = padded(self.shape.head_dim) / LANES;
        for position in 0..n_tokens {
            let lane = position % LANES;
            let block = self.block(layer_idx, block_table[position / LANES]);
            for head in block.chunks_exact(self.shape.vectors_per_head()) {
                let (key_vectors, value_vectors) = head.split_at(self.shape.head_dim);
                for vector in key_vectors {
                    vector.0[lane].push_le(keys);
                }
                for dim in 0..self.shape.head_dim {
                    value_vectors[lane * row_vectors + dim / LANES].0[dim % LANES].push_le(values);
                }
            }
        }
    }

    /// Writes the keys and values of `n_tokens` tokens, in the form that [`KvPages::export`] gives,
    /// into the blocks of one layer.
    ///
    /// # Panics
    /// If `keys` or `values` is not exactly `n_tokens` long.
    pub(crate) fn import(
        &mut self,
        layer_idx: usize,
        block_table: &[BlockId],
        n_tokens: usize,
        keys: &[u8],
        values: &[u8],
    ) {
        let head_dim = self.shape.head_dim;
        let token_bytes = self.shape.n_kv_heads * head_dim * E::N_BYTES;
        assert!(keys.len() == n_tokens * token_bytes && values.len() == n_tokens * token_bytes);
        let row_vectors = padded(head_dim) / LANES;
        let vectors_per_head = self.shape.vectors_per_head();
        let tokens = keys.chunks_exact(token_bytes).zip(values.chunks_exact(token_bytes));
        for (position, (key_row, value_row)) in tokens.enumerate() {
            let lane = position % LANES;
            let block = self.block_mut(layer_idx, block_table[position / LANES]);
            for (head, vectors) in block.chunks_exact_mut(vectors_per_head).enumerate() {
                let (key_vectors, value_vectors) = vectors.split_at_mut(head_dim);
                for dim in 0..head_dim {
                    let at = (head * head_dim + dim) * E::N_BYTES;
                    key_vectors[dim].0[lane] = E::from_le(&key_row[at..at + E::N_BYTES]);
                    value_vectors[lane * row_vectors + dim / LANES].0[dim % LANES] =
                        E::from_le(&value_row[at..at + E::N_BYTES]);
                }
            }
        }
    }

    /// Bytes of one block in one layer outside of the pages.
    pub(crate) fn packed_block_bytes(&self) -> usize {
        self.shape.elements_per_block() * E::N_BYTES
    }

    /// Copies a block of one layer to `out`: the elements in the order in which they lie in the block, in
    /// little endian, without padding, which may be anything.
    ///
    /// # Panics
    /// If `out` is not exactly [`KvPages::packed_block_bytes`] long.
    pub(crate) fn export_block(&self, layer_idx: usize, block: BlockId, out: &mut [u8]) {
        self.memory.export_block(layer_idx, block, out);
    }

    /// Writes a block of one layer from the bytes that [`KvPages::export_block`] gives.
    ///
    /// # Panics
    /// If `bytes` is not exactly [`KvPages::packed_block_bytes`] long.
    pub(crate) fn import_block(&mut self, layer_idx: usize, block: BlockId, bytes: &[u8]) {
        assert!(bytes.len() == self.packed_block_bytes(), "bytes that are not as long as a block");
        let shape = self.shape;
        let vectors = self.block_mut(layer_idx, block);
        let heads = vectors.chunks_exact_mut(shape.vectors_per_head());
        let head_bytes = shape.head_dim * LANES * E::N_BYTES;
        for (head, bytes) in heads.zip(bytes.chunks_exact(2 * head_bytes)) {
            let (keys, values) = head.split_at_mut(shape.head_dim);
            let (key_bytes, value_bytes) = bytes.split_at(head_bytes);
            for (vector, bytes) in keys.iter_mut().zip(key_bytes.chunks_exact(LANES * E::N_BYTES)) {
                E::read_le(bytes, &mut vector.0);
            }
            let rows = values.chunks_exact_mut(shape.vectors_per_row());
            for (row, bytes) in rows.zip(value_bytes.chunks_exact(shape.head_dim * E::N_BYTES)) {
                for (vector, bytes) in row.iter_mut().zip(bytes.chunks(LANES * E::N_BYTES)) {
                    E::read_le(bytes, &mut vector.0);
                }
            }
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
        let memory = &*self.memory;
        for run in &plan.runs {
            memory.assert_unpinned(run.block);
        }
        let layer = &memory.layers[layer_idx];
        pool.run(plan.run_groups.len(), &|group_idx| {
            let runs = &plan.runs[plan.run_groups[group_idx].clone()];
            // SAFETY: a plan has no two groups with one block, and blocks do not overlap. Other threads read
            // pinned blocks alone, and none of these is or becomes one while `self` is borrowed.
            let block = unsafe { layer.slice_mut(runs[0].block.index() * n_vectors, n_vectors) };
            for run in runs {
                write_run(shape, run, rows, block);
            }
        });
    }
}

impl<E: KvElement> PageMemory<E> {
    fn block(&self, layer_idx: usize, block: BlockId) -> &[Aligned<[E; LANES]>] {
        let n_vectors = self.shape.vectors_per_block();
        self.layers[layer_idx].slice(block.index() * n_vectors, n_vectors)
    }

    fn assert_unpinned(&self, block: BlockId) {
        // Acquire: what a reader has read before it let go stays before what is written now.
        let n_pins = self.n_pins[block.index()].load(Ordering::Acquire);
        assert!(n_pins == 0, "a pinned block is written");
    }

    fn export_block(&self, layer_idx: usize, block: BlockId, out: &mut [u8]) {
        let shape = self.shape;
        let n_bytes = shape.elements_per_block() * E::N_BYTES;
        assert!(out.len() == n_bytes, "a buffer that is not as long as a block");
        let heads = self.block(layer_idx, block).chunks_exact(shape.vectors_per_head());
        let head_bytes = shape.head_dim * LANES * E::N_BYTES;
        for (head, out) in heads.zip(out.chunks_exact_mut(2 * head_bytes)) {
            let (keys, values) = head.split_at(shape.head_dim);
            let (key_bytes, value_bytes) = out.split_at_mut(head_bytes);
            for (vector, out) in keys.iter().zip(key_bytes.chunks_exact_mut(LANES * E::N_BYTES)) {
                E::write_le(&vector.0, out);
            }
            let rows = values.chunks_exact(shape.vectors_per_row());
            for (row, out) in rows.zip(value_bytes.chunks_exact_mut(shape.head_dim * E::N_BYTES)) {
                // The last vector of a row may be wider than what is left of its bytes.
                for (vector, out) in row.iter().zip(out.chunks_mut(LANES * E::N_BYTES)) {
                    E::write_le(&vector.0, out);
                }
            }
        }
    }
}

impl<E: KvElement> PinnedBlocks<E> {
    /// As [`KvPages::export_block`], of the block at `block_idx` of those that are pinned.
    ///
    /// # Panics
    /// If there is no such block, or `out` is not exactly as long as one.
    pub(crate) fn export_block(&self, layer_idx: usize, block_idx: usize, out: &mut [u8]) {
        self.memory.export_block(layer_idx, self.blocks[block_idx], out);
    }
}

impl<E> Drop for PinnedBlocks<E> {
    fn drop(&mut self) {
        for block in &self.blocks {
            // Release: see `assert_unpinned`.
            self.memory.n_pins[block.index()].fetch_sub(1, Ordering::Release);
        }
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

#[cfg(test)]
mod tests;
