//! The kernels of one model: compiled for its numbers, started with arguments in the kernels' own layout.
//!
//! Every `queue_*` method is unsafe for one reason: a kernel reads and writes memory that its arguments name by address. The
//! caller guarantees that until the stream has passed the kernel, that memory is alive and as large as the numbers say.

use std::path::Path;
use std::sync::Arc;

use kvik_types::Dtype;

use crate::checkpoint::WeightDtype;
use crate::config::ModelConfig;
use crate::error::{ModelError, Result};

use super::device::{Device, Function, Module, TensorMap, arguments, compile};
use super::pages::{KvMaps, has_wide_attention};
use super::products::{InputMaps, OutKind, ProductArguments, Products};

/// The text of all kernels; the first file is what the others use.
const SOURCES: [&str; 10] = [
    include_str!("kernels/common.cu"),
    include_str!("kernels/product.cu"),
    include_str!("kernels/product_wide.cu"),
    include_str!("kernels/rows.cu"),
    include_str!("kernels/choice.cu"),
    include_str!("kernels/attention.cu"),
    include_str!("kernels/attention_wide.cu"),
    include_str!("kernels/attention_plain.cu"),
    include_str!("kernels/blocks.cu"),
    include_str!("kernels/weights.cu"),
];

/// Threads of the kernels that work on single rows, as `rows.cu` has it.
const ROW_THREADS: u32 = 256;

/// Threads that choose a token, as `choice.cu` has it.
const CHOICE_THREADS: u32 = 1024;

/// Blocks that fetch words of the host, at most: enough for the rate of the bus.
const MAX_FETCH_BLOCKS: usize = 64;

/// Blocks that a grid of kernels over all elements of a matrix has.
const ELEMENT_BLOCKS: u32 = 4096;

/// Positions that one warp sums up before sums are merged, as `attention.cu` has it.
pub(super) const CHUNK_TOKENS: usize = 256;

/// Queries that a block of the kernel for many rows takes, and one that has instructions of a warpgroup.
const MANY_QUERIES: usize = 64;
const WIDE_QUERIES: usize = 128;

/// Tiles of keys and values that the latter has room for, as `attention_wide.cu` has it.
const WIDE_STAGES: u32 = 5;

/// Queries that a warp of the kernel for few rows takes.
pub(super) const CHUNK_QUERIES: usize = 16;

/// Arguments of the kernels of attention.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionArguments {
    pub(super) queries: u64,
    pub(super) pages: u64,
    pub(super) tables: u64,
    pub(super) positions: u64,
    pub(super) items: u64,
    pub(super) out: u64,
    pub(super) partials: u64,
    pub(super) query_stride: i32,
    pub(super) out_padded: i32,
    pub(super) n_kv_heads: i32,
    /// 0 for all positions.
    pub(super) window: i32,
    /// Of scores, for powers of two.
    pub(super) scale: f32,
}

/// How much attention there is to queue.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionCounts {
    pub(super) many_items: usize,
    /// Of few rows.
    pub(super) chunks: usize,
    /// Rows that have chunks.
    pub(super) merged_rows: usize,
    pub(super) query_heads: usize,
}

/// Arguments of `place_rows`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct PlacingArguments {
    pub(super) rows: u64,
    pub(super) rotations: u64,
    pub(super) query_scale: u64,
    pub(super) key_scale: u64,
    pub(super) pages: u64,
    pub(super) tables: u64,
    pub(super) table_starts: u64,
    pub(super) positions: u64,
    pub(super) n_query_heads: i32,
    pub(super) n_kv_heads: i32,
    pub(super) epsilon: f32,
}

/// Arguments of `normalize`.
#[derive(Debug, Clone, Copy)]
pub(super) struct NormalizeArguments {
    pub(super) hidden: u64,
    /// Rows in this order; 0 for all.
    pub(super) chosen: u64,
    pub(super) scale: u64,
    /// 0 without.
    pub(super) shift: u64,
    pub(super) out: u64,
    pub(super) hidden_size: i32,
    pub(super) n_padded: i32,
    pub(super) epsilon: f32,
}

/// Arguments of `place_segment`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct SegmentArguments {
    pub(super) keys: u64,
    pub(super) values: u64,
    pub(super) rotation: u64,
    pub(super) pages: u64,
    pub(super) table: u64,
    pub(super) n_kv_heads: i32,
    pub(super) first_position: i32,
}

/// Arguments of `pack_weights`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct PackingArguments {
    pub(super) source: u64,
    pub(super) target: u64,
    pub(super) source_type: i32,
    pub(super) is_transposed: i32,
    pub(super) n_outputs: i32,
    pub(super) n_inputs: i32,
    pub(super) n_padded: i32,
    pub(super) span: i32,
    pub(super) stride: i32,
    pub(super) offset: i32,
}

/// The kernels of attention, by the type and shape of heads.
#[derive(Debug)]
enum AttentionKernels {
    Plain(Function),
    Tiled { many: ManyRows, chunk: Function, merge: Function },
}

/// The kernel for many rows: of a warp's instructions, or of a warpgroup's.
#[derive(Debug)]
enum ManyRows {
    Warps(Function),
    Warpgroups(Function),
}

/// All kernels of one model.
#[derive(Debug)]
pub(super) struct Kernels {
    fetch_words: Function,
    embed: Function,
    normalize: Function,
    rotations: Function,
    place_rows: Function,
    choose_tokens: Function,
    place_segment: Function,
    pack_weights: Function,
    fill_weights: Function,
    products: Products,
    attention: AttentionKernels,
    head_dim: usize,
}

/// A number of a weight type in the kernels' texts.
pub(super) fn weight_type(dtype: WeightDtype) -> i32 {
    match dtype {
        WeightDtype::F32 => 0,
        WeightDtype::F16 => 1,
        WeightDtype::BF16 => 2,
    }
}

fn kv_type(dtype: Dtype) -> i32 {
    match dtype {
        Dtype::F16 => 1,
        Dtype::BF16 => 2,
        _ => 0,
    }
}

impl Kernels {
    /// Compiles and loads the kernels.
    ///
    /// # Errors
    /// If there is no compiler, or compiler or driver refuse.
    pub(super) fn load(
        device: &Arc<Device>,
        config: &ModelConfig,
        weights: WeightDtype,
        kv_dtype: Dtype,
        cache: Option<&Path>,
    ) -> Result<Self> {
        let group = config.n_query_heads / config.n_kv_heads;
        let head_dim = config.head_dim;
        let is_tiled =
            kv_dtype != Dtype::F32 && head_dim.is_multiple_of(16) && head_dim <= 128 && group <= MANY_QUERIES;
        let definitions = [
            format!("-DWEIGHT={}", weight_type(weights)),
            format!("-DKV={}", kv_type(kv_dtype)),
            format!("-DACTIVATION={}", OutKind::of(config.activation) as i32),
            format!("-DHEAD_DIM={head_dim}"),
            format!("-DGROUP={group}"),
            format!("-DTILED={}", i32::from(is_tiled)),
        ];
        let code = compile(&SOURCES.concat(), &definitions, cache)?;
        let module = Module::load(device, &code)?;
        let row_kernel = |name: &str| module.function(name, ROW_THREADS, 0);
        let attention = if is_tiled {
            let tile_bytes = (2 * 64 * head_dim * 2) as u32;
            let query_bytes = (WIDE_QUERIES * head_dim * 2) as u32;
            // Tiles of keys and values: one that is computed with, the others on their way.
            let many = if has_wide_attention(config, kv_dtype) {
                // Two barriers a tile.
                let shared_bytes = WIDE_STAGES * (tile_bytes + 16) + query_bytes;
                ManyRows::Warpgroups(module.function("attend_wide", 384, shared_bytes)?)
            } else {
                ManyRows::Warps(module.function("attend_many", 128, 2 * tile_bytes)?)
            };
            AttentionKernels::Tiled {
                many,
                chunk: module.function("attend_chunk", 32, 2 * (tile_bytes + 8))?,
                merge: module.function("merge_chunks", head_dim as u32, 0)?,
            }
        } else {
            AttentionKernels::Plain(module.function("attend_plain", 128, 0)?)
        };
        Ok(Self {
            fetch_words: row_kernel("fetch_words")?,
            embed: row_kernel("embed")?,
            normalize: row_kernel("normalize")?,
            rotations: row_kernel("rotations")?,
            place_rows: row_kernel("place_rows")?,
            choose_tokens: module.function("choose_tokens", CHOICE_THREADS, 0)?,
            place_segment: row_kernel("place_segment")?,
            pack_weights: row_kernel("pack_weights")?,
            fill_weights: row_kernel("fill_weights")?,
            products: Products::load(&module, weights)?,
            attention,
            head_dim,
        })
    }

    /// Queries that a block takes of many rows, where attention runs on matrix instructions.
    pub(super) fn many_queries(&self) -> Option<usize> {
        match &self.attention {
            AttentionKernels::Plain(_) => None,
            AttentionKernels::Tiled { many: ManyRows::Warps(_), .. } => Some(MANY_QUERIES),
            AttentionKernels::Tiled { many: ManyRows::Warpgroups(_), .. } => Some(WIDE_QUERIES),
        }
    }

    /// # Safety
    /// See the module; `hidden` has room for `n_rows` rows.
    pub(super) unsafe fn queue_embed(
        &self,
        n_rows: usize,
        matrices: (u64, u64),
        lists: (u64, u64),
        hidden: u64,
        sizes: (i32, i32),
    ) -> Result<()> {
        let ((embedding, position_embedding), (tokens, positions)) = (matrices, lists);
        let (hidden_size, n_padded) = sizes;
        let mut arguments =
            arguments![embedding, position_embedding, tokens, positions, hidden, hidden_size, n_padded];
        // SAFETY: the caller answers for the memory; the arguments are those of the kernel.
        unsafe { self.embed.launch(n_rows as u32, 1, &mut arguments) }
    }

    /// # Safety
    /// See the module.
    pub(super) unsafe fn queue_normalize(&self, n_rows: usize, arguments: NormalizeArguments) -> Result<()> {
        let NormalizeArguments { hidden, chosen, scale, shift, out, hidden_size, n_padded, epsilon } =
            arguments;
        let mut arguments = arguments![hidden, chosen, scale, shift, out, hidden_size, n_padded, epsilon];
        // SAFETY: the caller answers for the memory; the arguments are those of the kernel.
        unsafe { self.normalize.launch(n_rows as u32, 1, &mut arguments) }
    }

    /// # Safety
    /// See the module.
    pub(super) unsafe fn queue_rotations(
        &self,
        n_rows: usize,
        positions: u64,
        frequencies: u64,
        rotations: u64,
    ) -> Result<()> {
        let n_rows = n_rows as i32;
        let n_blocks = (n_rows as usize * self.head_dim / 2).div_ceil(ROW_THREADS as usize);
        let mut arguments = arguments![positions, frequencies, rotations, n_rows];
        // SAFETY: the caller answers for the memory; the arguments are those of the kernel.
        unsafe { self.rotations.launch(n_blocks as u32, 1, &mut arguments) }
    }

    /// # Safety
    /// See the module.
    pub(super) unsafe fn queue_place_rows(&self, n_rows: usize, placing: PlacingArguments) -> Result<()> {
        let mut arguments = arguments![placing];
        // SAFETY: the caller answers for the memory; the arguments are those of the kernel.
        unsafe { self.place_rows.launch(n_rows as u32, 1, &mut arguments) }
    }

    /// # Safety
    /// See the module; `host` is memory of the host that the device reaches, and is not written meanwhile.
    pub(super) unsafe fn queue_fetch_words(&self, host: u64, words: u64, n_words: usize) -> Result<()> {
        let n_blocks = n_words.div_ceil(ROW_THREADS as usize).clamp(1, MAX_FETCH_BLOCKS) as u32;
        let n_words = n_words as i32;
        let mut arguments = arguments![host, words, n_words];
        // SAFETY: the caller answers for the memory; the arguments are those of the kernel.
        unsafe { self.fetch_words.launch(n_blocks, 1, &mut arguments) }
    }

    /// Queues the choice of a token for each row of `logits`, by the draws at `draws`.
    ///
    /// # Safety
    /// See the module.
    pub(super) unsafe fn queue_choose_tokens(
        &self,
        n_rows: usize,
        logits: u64,
        draws: u64,
        chosen: u64,
        vocab_size: usize,
    ) -> Result<()> {
        let vocab_size = vocab_size as i32;
        let mut arguments = arguments![logits, draws, chosen, vocab_size];
        // SAFETY: the caller answers for the memory; the arguments are those of the kernel.
        unsafe { self.choose_tokens.launch(n_rows as u32, 1, &mut arguments) }
    }

    /// # Safety
    /// See the module.
    pub(super) unsafe fn queue_place_segment(
        &self,
        n_tokens: usize,
        segment: SegmentArguments,
    ) -> Result<()> {
        let mut arguments = arguments![segment];
        // SAFETY: the caller answers for the memory; the arguments are those of the kernel.
        unsafe { self.place_segment.launch(n_tokens as u32, 1, &mut arguments) }
    }

    /// # Safety
    /// See the module.
    pub(super) unsafe fn queue_pack(&self, packing: PackingArguments) -> Result<()> {
        let mut arguments = arguments![packing];
        // SAFETY: the caller answers for the memory; the arguments are those of the kernel.
        unsafe { self.pack_weights.launch(ELEMENT_BLOCKS, 1, &mut arguments) }
    }

    /// # Safety
    /// See the module; `target` has room for a matrix of these sizes.
    pub(super) unsafe fn queue_fill(
        &self,
        target: u64,
        sizes: (i32, i32, i32),
        range: f32,
        seed: u64,
    ) -> Result<()> {
        let (n_outputs, n_inputs, n_padded) = sizes;
        let mut arguments = arguments![target, n_outputs, n_inputs, n_padded, range, seed];
        // SAFETY: the caller answers for the memory; the arguments are those of the kernel.
        unsafe { self.fill_weights.launch(ELEMENT_BLOCKS, 1, &mut arguments) }
    }

    /// Queues a product of `weights` and `inputs`; `maps` name them to the copy engine where they are of 16 bits.
    ///
    /// # Safety
    /// See the module.
    pub(super) unsafe fn queue_product(
        &self,
        product: ProductArguments,
        maps: Option<(&TensorMap, &InputMaps)>,
    ) -> Result<()> {
        // SAFETY: the caller answers for the memory.
        unsafe { self.products.queue(product, maps) }
    }

    /// Queues attention. The items lie behind each other from `arguments.items` on: those of many rows, of chunks, and of rows that
    /// have chunks. `maps` name the pages to the copy engine where the kernel fetches them by it.
    ///
    /// # Safety
    /// See the module; `partials` has room for a slot a chunk.
    pub(super) unsafe fn queue_attention(
        &self,
        arguments: AttentionArguments,
        counts: AttentionCounts,
        maps: Option<&KvMaps>,
    ) -> Result<()> {
        let [n_many, n_chunks, n_merged, n_query_heads] =
            [counts.many_items, counts.chunks, counts.merged_rows, counts.query_heads]
                .map(|count| count as u32);
        let kv_heads = arguments.n_kv_heads.unsigned_abs();
        let item_bytes = 4 * size_of::<u32>() as u64;
        match &self.attention {
            AttentionKernels::Plain(function) => {
                // SAFETY: the caller answers for the memory; the arguments are those of the kernel.
                unsafe { function.launch(n_many, n_query_heads, &mut arguments![arguments]) }
            }
            AttentionKernels::Tiled { many, chunk, merge } => {
                let chunks = AttentionArguments {
                    items: arguments.items + u64::from(n_many) * item_bytes,
                    ..arguments
                };
                let merged = AttentionArguments {
                    items: chunks.items + u64::from(n_chunks) * item_bytes,
                    ..arguments
                };
                // SAFETY: as above; the kernels run one after the other.
                unsafe {
                    match (many, maps) {
                        (ManyRows::Warpgroups(many), Some(KvMaps { keys, values })) => {
                            many.launch(kv_heads, n_many, &mut arguments![arguments, *keys, *values])?;
                            chunk.launch(n_chunks, kv_heads, &mut arguments![chunks, *keys, *values])?;
                        }
                        (ManyRows::Warpgroups(_), None) => {
                            let reason = "pages that are not named to the copy engine".to_owned();
                            return Err(ModelError::Device { call: "attend_wide", reason });
                        }
                        (ManyRows::Warps(many), _) => {
                            many.launch(n_many, kv_heads, &mut arguments![arguments])?;
                            chunk.launch(n_chunks, kv_heads, &mut arguments![chunks])?;
                        }
                    }
                    merge.launch(n_merged, n_query_heads, &mut arguments![merged])
                }
            }
        }
    }
}
