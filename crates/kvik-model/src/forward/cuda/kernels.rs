//! The kernels of one model: compiled for its numbers, started with arguments in the kernels' own layout.
//!
//! Every `queue_*` method is unsafe for one reason: a kernel reads and writes memory that its arguments name by address. The
//! caller guarantees that until the stream has passed the kernel, that memory is alive and as large as the numbers say.

use std::ffi::c_void;
use std::path::Path;
use std::sync::Arc;

use kvik_types::Dtype;

use crate::checkpoint::WeightDtype;
use crate::config::ModelConfig;
use crate::error::Result;

use super::device::{Device, Function, Module, TensorMap, compile};

/// The text of all kernels; the first file is what the others use.
const SOURCES: [&str; 7] = [
    include_str!("kernels/common.cu"),
    include_str!("kernels/product.cu"),
    include_str!("kernels/rows.cu"),
    include_str!("kernels/attention.cu"),
    include_str!("kernels/attention_wide.cu"),
    include_str!("kernels/blocks.cu"),
    include_str!("kernels/weights.cu"),
];

/// Threads of the kernels that work on single rows, as `rows.cu` has it.
const ROW_THREADS: u32 = 256;

/// Blocks that a grid of kernels over all elements of a matrix has.
const ELEMENT_BLOCKS: u32 = 4096;

/// Positions that one warp sums up before sums are merged, as `attention.cu` has it.
pub(super) const CHUNK_TOKENS: usize = 256;

/// Queries that a block of the kernel for many rows takes, and one that has instructions of a warpgroup.
const MANY_QUERIES: usize = 64;
const WIDE_QUERIES: usize = 128;

/// Queries that a warp of the kernel for few rows takes.
pub(super) const CHUNK_QUERIES: usize = 16;

/// Steps of sixteen inputs, groups of eight rows and tiles of sixteen outputs that the wide product copies at a time.
pub(super) const WIDE_STEPS: u32 = 4;
pub(super) const WIDE_ROW_GROUPS: u32 = 16;
pub(super) const WIDE_WEIGHT_TILES: u32 = 8;

/// What becomes of the outputs of a product, as `product.cu` numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum OutKind {
    Store = 0,
    Add = 1,
    Gate = 2,
    Gelu = 3,
}

/// Arguments of a product.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct ProductArguments {
    pub(super) weights: u64,
    pub(super) inputs: u64,
    /// 0 without.
    pub(super) bias: u64,
    pub(super) out: u64,
    pub(super) n_outputs: i32,
    pub(super) n_rows: i32,
    pub(super) n_padded_inputs: i32,
    pub(super) out_stride: i32,
    pub(super) out_kind: OutKind,
}

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

/// A variant of the product of 16-bit weights for few rows: its numbers in `product.cu`.
struct Variant {
    name: &'static str,
    warps_o: u32,
    warps_r: u32,
    rows: u32,
    steps: u32,
    n_stages: u32,
}

const VARIANTS: [Variant; 4] = [
    Variant { name: "product_8_rows", warps_o: 2, warps_r: 1, rows: 1, steps: 16, n_stages: 5 },
    Variant { name: "product_16_rows", warps_o: 2, warps_r: 1, rows: 2, steps: 8, n_stages: 8 },
    Variant { name: "product_32_rows", warps_o: 2, warps_r: 2, rows: 2, steps: 8, n_stages: 6 },
    Variant { name: "product_64_rows", warps_o: 2, warps_r: 4, rows: 2, steps: 8, n_stages: 4 },
];

/// A product kernel with the tile of results of one of its blocks.
#[derive(Debug)]
struct TileProduct {
    function: Function,
    n_outputs: u32,
    n_rows: u32,
}

/// The product kernels, by the type of weights.
#[derive(Debug)]
enum Products {
    Plain(Function),
    /// For few rows, in rising order, and for many.
    Tiled {
        narrow: Vec<TileProduct>,
        wide: TileProduct,
    },
}

/// The kernels of attention, by the type and shape of heads.
#[derive(Debug)]
enum AttentionKernels {
    Plain(Function),
    Tiled { many: Function, many_queries: usize, chunk: Function, merge: Function },
}

/// All kernels of one model.
#[derive(Debug)]
pub(super) struct Kernels {
    embed: Function,
    normalize: Function,
    rotations: Function,
    place_rows: Function,
    best_tokens: Function,
    place_segment: Function,
    pack_weights: Function,
    fill_weights: Function,
    products: Products,
    attention: AttentionKernels,
    head_dim: usize,
}

/// Pointers to arguments, in the form that the driver takes.
macro_rules! arguments {
    ($($argument:ident),+) => {
        [$((&raw const $argument).cast::<c_void>().cast_mut()),+]
    };
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
            let (many, many_queries) = if matches!(head_dim, 64 | 128) {
                (module.function("attend_wide", 256, 4 * tile_bytes + query_bytes)?, WIDE_QUERIES)
            } else {
                (module.function("attend_many", 128, 2 * tile_bytes)?, MANY_QUERIES)
            };
            AttentionKernels::Tiled {
                many,
                many_queries,
                chunk: module.function("attend_chunk", 32, 2 * tile_bytes)?,
                merge: module.function("merge_chunks", head_dim as u32, 0)?,
            }
        } else {
            AttentionKernels::Plain(module.function("attend_plain", 128, 0)?)
        };
        Ok(Self {
            embed: row_kernel("embed")?,
            normalize: row_kernel("normalize")?,
            rotations: row_kernel("rotations")?,
            place_rows: row_kernel("place_rows")?,
            best_tokens: row_kernel("best_tokens")?,
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
            AttentionKernels::Tiled { many_queries, .. } => Some(*many_queries),
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
    /// See the module.
    pub(super) unsafe fn queue_best_tokens(
        &self,
        n_rows: usize,
        logits: u64,
        best: u64,
        vocab_size: usize,
    ) -> Result<()> {
        let vocab_size = vocab_size as i32;
        let mut arguments = arguments![logits, best, vocab_size];
        // SAFETY: the caller answers for the memory; the arguments are those of the kernel.
        unsafe { self.best_tokens.launch(n_rows as u32, 1, &mut arguments) }
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

    /// Queues a product; `maps` name weights and inputs for many rows of 16-bit weights.
    ///
    /// # Safety
    /// See the module.
    pub(super) unsafe fn queue_product(
        &self,
        product: ProductArguments,
        maps: Option<(&TensorMap, &TensorMap)>,
    ) -> Result<()> {
        let (n_outputs, n_rows) = (product.n_outputs.unsigned_abs(), product.n_rows.unsigned_abs());
        match (&self.products, maps) {
            (Products::Plain(function), _) => {
                let mut arguments = arguments![product];
                // SAFETY: the caller answers for the memory; the arguments are those of the kernel.
                unsafe { function.launch(n_outputs.div_ceil(16), n_rows.div_ceil(16), &mut arguments) }
            }
            (Products::Tiled { narrow, wide }, maps) => {
                let fitting = narrow.iter().find(|kernel| n_rows <= kernel.n_rows);
                let (kernel, maps) = match (fitting, maps) {
                    (None, Some(maps)) => (wide, Some(maps)),
                    (fitting, _) => (fitting.or(narrow.last()).unwrap_or(wide), None),
                };
                let n_tiles = n_outputs.div_ceil(kernel.n_outputs) * n_rows.div_ceil(kernel.n_rows);
                let n_blocks = n_tiles.min(kernel.function.resident_blocks());
                if let Some((weights, inputs)) = maps {
                    let mut arguments = [
                        (&raw const product).cast::<c_void>().cast_mut(),
                        std::ptr::from_ref(weights).cast::<c_void>().cast_mut(),
                        std::ptr::from_ref(inputs).cast::<c_void>().cast_mut(),
                    ];
                    // SAFETY: as above.
                    unsafe { kernel.function.launch(n_blocks, 1, &mut arguments) }
                } else {
                    let mut arguments = arguments![product];
                    // SAFETY: as above.
                    unsafe { kernel.function.launch(n_blocks, 1, &mut arguments) }
                }
            }
        }
    }

    /// Queues attention of `n_many` items of many rows, and of `n_chunks` chunks of few rows, which `n_merged` rows have. The items
    /// lie behind each other from `arguments.items` on.
    ///
    /// # Safety
    /// See the module; `partials` has room for a slot a chunk.
    pub(super) unsafe fn queue_attention(
        &self,
        arguments: AttentionArguments,
        counts: (usize, usize, usize),
        n_query_heads: usize,
    ) -> Result<()> {
        let (n_many, n_chunks, n_merged) = counts;
        let kv_heads = arguments.n_kv_heads.unsigned_abs();
        let item_bytes = 4 * size_of::<u32>() as u64;
        match &self.attention {
            AttentionKernels::Plain(function) => {
                let mut pointers = arguments![arguments];
                // SAFETY: the caller answers for the memory; the arguments are those of the kernel.
                unsafe { function.launch(n_many as u32, n_query_heads as u32, &mut pointers) }
            }
            AttentionKernels::Tiled { many, chunk, merge, .. } => {
                let chunks =
                    AttentionArguments { items: arguments.items + n_many as u64 * item_bytes, ..arguments };
                let merged =
                    AttentionArguments { items: chunks.items + n_chunks as u64 * item_bytes, ..arguments };
                // SAFETY: as above; the kernels run one after the other.
                unsafe {
                    many.launch(n_many as u32, kv_heads, &mut arguments![arguments])?;
                    chunk.launch(n_chunks as u32, kv_heads, &mut arguments![chunks])?;
                    merge.launch(n_merged as u32, n_query_heads as u32, &mut arguments![merged])
                }
            }
        }
    }
}

impl Products {
    fn load(module: &Arc<Module>, weights: WeightDtype) -> Result<Self> {
        if weights == WeightDtype::F32 {
            return Ok(Self::Plain(module.function("product_f32", 256, 0)?));
        }
        let narrow = VARIANTS.iter().map(|variant| {
            let n_threads = (variant.warps_o * variant.warps_r + 1) * 32;
            let stage_bytes = variant.steps * (variant.warps_o * 512 + variant.warps_r * variant.rows * 256);
            // Two barriers a stage.
            let shared_bytes = variant.n_stages * (stage_bytes + 16);
            Ok(TileProduct {
                function: module.function(variant.name, n_threads, shared_bytes)?,
                n_outputs: variant.warps_o * 16,
                n_rows: variant.warps_r * variant.rows * 8,
            })
        });
        let stage_bytes = WIDE_STEPS * (WIDE_WEIGHT_TILES * 512 + WIDE_ROW_GROUPS * 256);
        Ok(Self::Tiled {
            narrow: narrow.collect::<Result<Vec<_>>>()?,
            wide: TileProduct {
                function: module.function("product_128_rows", 384, 6 * (stage_bytes + 16))?,
                n_outputs: WIDE_WEIGHT_TILES * 16,
                n_rows: WIDE_ROW_GROUPS * 8,
            },
        })
    }
}
