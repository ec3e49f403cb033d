//! The kernels of matrix products, and which of them takes how many rows.

use std::sync::Arc;

use crate::checkpoint::WeightDtype;
use crate::config::Activation;
use crate::error::Result;

use super::device::{Function, Module, Swizzle, TensorMap, TensorShape, arguments};

/// Steps of sixteen inputs, and tiles of sixteen outputs, that the copy engine fetches at a time, as `product_wide.cu` has it.
const BOX_STEPS: u32 = 4;
const BOX_WEIGHT_TILES: u32 = 4;

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

/// A variant of the product for few rows: its numbers in `product.cu`.
struct Narrow {
    name: &'static str,
    rows: u32,
    steps: u32,
    n_stages: u32,
}

const NARROW: [Narrow; 2] = [
    Narrow { name: "product_8_rows", rows: 1, steps: 16, n_stages: 5 },
    Narrow { name: "product_16_rows", rows: 2, steps: 8, n_stages: 8 },
];

/// Warps that compute in the variants for few rows, each a tile of sixteen outputs.
const NARROW_WARPS: u32 = 2;

/// A variant of the product for more rows: its numbers in `product_wide.cu`.
struct Wide {
    n_rows: u32,
    n_threads: u32,
    warpgroups: u32,
    /// Rows of one instruction.
    group_rows: u32,
    steps: u32,
    n_stages: u32,
    /// What one round of blocks takes, in rounds of blocks of 128 rows; measured on an H200.
    cost: f32,
}

const WIDE: [Wide; 4] = [
    Wide { n_rows: 32, n_threads: 160, warpgroups: 1, group_rows: 32, steps: 8, n_stages: 4, cost: 0.0 },
    Wide { n_rows: 64, n_threads: 160, warpgroups: 1, group_rows: 64, steps: 8, n_stages: 3, cost: 0.0 },
    Wide { n_rows: 128, n_threads: 384, warpgroups: 2, group_rows: 128, steps: 4, n_stages: 6, cost: 1.0 },
    Wide { n_rows: 256, n_threads: 384, warpgroups: 2, group_rows: 128, steps: 4, n_stages: 4, cost: 1.7 },
];

/// A kernel with the tile of results of one of its blocks.
#[derive(Debug)]
pub(super) struct TileProduct {
    function: Function,
    n_outputs: u32,
    n_rows: u32,
}

/// The kernels for more than a few rows, by what becomes of the outputs.
#[derive(Debug)]
pub(super) struct WideProduct {
    /// Outputs that stay rows.
    rows: Function,
    /// Outputs that become activations.
    activation: Function,
    n_outputs: u32,
    n_rows: u32,
    /// Which of [`InputMaps`] it takes.
    map_idx: usize,
    cost: f32,
}

/// The kernels of products, by the type of weights.
#[derive(Debug)]
pub(super) enum Products {
    Plain(Function),
    /// In rising order of rows.
    Tiled {
        narrow: Vec<TileProduct>,
        wide: Vec<WideProduct>,
    },
}

/// Names activations to the copy engine, by the number of rows of an instruction: 32, 64, 128.
#[derive(Debug, Clone, Copy)]
pub(super) struct InputMaps([TensorMap; 3]);

impl OutKind {
    /// What becomes of the first products of an MLP.
    pub(super) fn of(activation: Activation) -> Self {
        match activation {
            Activation::SiluGated => Self::Gate,
            Activation::GeluTanh => Self::Gelu,
        }
    }
}

impl InputMaps {
    /// Names the activations at `address`, in tiles of eight rows and eight inputs.
    pub(super) fn new(address: u64, n_row_groups: usize, n_padded_inputs: usize) -> Result<Self> {
        let map = |rows: u32| tile_map(address, 128, n_row_groups, n_padded_inputs, rows / 8);
        Ok(Self([map(32)?, map(64)?, map(128)?]))
    }
}

/// Names the weights at `address`, in tiles of sixteen outputs and sixteen inputs.
pub(super) fn weight_map(address: u64, n_tiles: usize, n_padded_inputs: usize) -> Result<TensorMap> {
    tile_map(address, 256, n_tiles, n_padded_inputs, BOX_WEIGHT_TILES)
}

/// For each group the tiles of all steps of sixteen inputs behind each other, `box_groups` of them at a time.
fn tile_map(
    address: u64,
    tile_elements: u64,
    n_groups: usize,
    n_padded_inputs: usize,
    box_groups: u32,
) -> Result<TensorMap> {
    let n_steps = (n_padded_inputs / 16) as u64;
    let tile_bytes = tile_elements * 2;
    let shape = TensorShape {
        elements: [tile_elements, n_groups as u64, n_steps],
        stride_bytes: [n_steps * tile_bytes, tile_bytes],
        box_elements: [tile_elements as u32, box_groups, BOX_STEPS],
        swizzle: Swizzle::None,
    };
    TensorMap::of(address, shape)
}

impl Products {
    pub(super) fn load(module: &Arc<Module>, weights: WeightDtype) -> Result<Self> {
        if weights == WeightDtype::F32 {
            return Ok(Self::Plain(module.function("product_f32", 256, 0)?));
        }
        let narrow = NARROW.iter().map(|variant| {
            let stage_bytes = variant.steps * (NARROW_WARPS * 512 + variant.rows * 256);
            // Two barriers a stage; one more warp copies.
            let shared_bytes = variant.n_stages * (stage_bytes + 16);
            Ok(TileProduct {
                function: module.function(variant.name, (NARROW_WARPS + 1) * 32, shared_bytes)?,
                n_outputs: NARROW_WARPS * 16,
                n_rows: variant.rows * 8,
            })
        });
        let wide = WIDE.iter().map(|variant| {
            let stage_bytes = variant.steps * (variant.warpgroups * 2048 + variant.n_rows * 32);
            let shared_bytes = variant.n_stages * (stage_bytes + 16);
            let function = |kind: &str| {
                let name = format!("product_{}_{kind}", variant.n_rows);
                module.function(&name, variant.n_threads, shared_bytes)
            };
            Ok(WideProduct {
                rows: function("rows")?,
                activation: function("activation")?,
                n_outputs: variant.warpgroups * 64,
                n_rows: variant.n_rows,
                map_idx: (variant.group_rows / 64) as usize,
                cost: variant.cost,
            })
        });
        Ok(Self::Tiled { narrow: narrow.collect::<Result<_>>()?, wide: wide.collect::<Result<_>>()? })
    }

    /// Queues a product; `maps` name weights and inputs where they are of 16 bits.
    ///
    /// # Safety
    /// Until the stream has passed the kernel, the memory that `product` names is alive and as large as its numbers say.
    pub(super) unsafe fn queue(
        &self,
        product: ProductArguments,
        maps: Option<(&TensorMap, &InputMaps)>,
    ) -> Result<()> {
        let (n_outputs, n_rows) = (product.n_outputs.unsigned_abs(), product.n_rows.unsigned_abs());
        match (self, maps) {
            (Self::Plain(function), _) => {
                // SAFETY: the caller answers for the memory; the arguments are those of the kernel.
                unsafe {
                    function.launch(n_outputs.div_ceil(16), n_rows.div_ceil(16), &mut arguments![product])
                }
            }
            (Self::Tiled { narrow, wide }, maps) => {
                let fitting = narrow.iter().find(|kernel| n_rows <= kernel.n_rows);
                if let (None, Some((weights, inputs))) = (fitting, maps)
                    && let Some(kernel) = fastest(wide, n_outputs, n_rows)
                {
                    let function = kernel.function(product.out_kind);
                    let n_tiles = n_outputs.div_ceil(kernel.n_outputs) * n_rows.div_ceil(kernel.n_rows);
                    let inputs = &inputs.0[kernel.map_idx];
                    let mut pointers = arguments![product, *weights, *inputs];
                    // SAFETY: as above.
                    return unsafe {
                        function.launch(n_tiles.min(function.resident_blocks()), 1, &mut pointers)
                    };
                }
                let Some(kernel) = fitting.or(narrow.last()) else { return Ok(()) };
                let n_tiles = n_outputs.div_ceil(kernel.n_outputs) * n_rows.div_ceil(kernel.n_rows);
                let n_blocks = n_tiles.min(kernel.function.resident_blocks());
                // SAFETY: as above.
                unsafe { kernel.function.launch(n_blocks, 1, &mut arguments![product]) }
            }
        }
    }
}

impl WideProduct {
    fn function(&self, kind: OutKind) -> &Function {
        match kind {
            OutKind::Store | OutKind::Add => &self.rows,
            OutKind::Gate | OutKind::Gelu => &self.activation,
        }
    }

    /// What all rounds of blocks take.
    fn cost(&self, n_outputs: u32, n_rows: u32) -> f32 {
        let n_tiles = n_outputs.div_ceil(self.n_outputs) * n_rows.div_ceil(self.n_rows);
        n_tiles.div_ceil(self.rows.resident_blocks()) as f32 * self.cost
    }
}

/// The smallest kernel that takes all rows at once, or of the two largest the one that is done first: larger tiles read less, and
/// smaller ones leave fewer multiprocessors without work.
fn fastest(kernels: &[WideProduct], n_outputs: u32, n_rows: u32) -> Option<&WideProduct> {
    let takes_all = |kernel: &&WideProduct| n_rows <= kernel.n_rows && kernel.n_rows < 128;
    let by_cost =
        |a: &&WideProduct, b: &&WideProduct| a.cost(n_outputs, n_rows).total_cmp(&b.cost(n_outputs, n_rows));
    kernels
        .iter()
        .find(takes_all)
        .or_else(|| kernels.iter().filter(|kernel| kernel.n_rows >= 128).min_by(by_cost))
}
