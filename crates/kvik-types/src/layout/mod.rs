//! KV layouts and the conversion between any two of them.
//!
//! A layout is an order of the same axes: K or V, layer, token, head, element of the head. The last
//! one is innermost everywhere, so a layout is an address function from (K or V, layer, token, head)
//! to the byte where a run of `head_dim` elements starts. Paged layouts find the token through a
//! block table; all others are dense. [`convert`] copies the longest runs that lie in one piece on
//! both sides.
//!
//! Layouts of MLA models hold one latent vector a token where others hold K and V; the two never
//! convert into each other. A binary frame holds either kind behind a header with a checksum.

mod convert;
mod elements;
mod frame;
mod strides;

pub use convert::convert;
pub use elements::convert_dtype;
pub use frame::{BINARY_HEADER_BYTES, BinaryFrame};

use std::fmt;

use self::strides::Strides;
use crate::dtype::Dtype;
use crate::error::{Result, TypesError};
use crate::token::BlockSize;

/// What a KV buffer holds, whatever its layout.
///
/// Fields are checked where the shape is used: all must be at least 1 and fit in 32 bits, and an
/// MLA layout asks for `n_kv_heads` of 1 with the latent's width as `head_dim`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvShape {
    /// Number of layers.
    pub n_layers: usize,
    /// Number of tokens.
    pub n_tokens: usize,
    /// Number of K (or V) heads of one layer on this rank.
    pub n_kv_heads: usize,
    /// Number of elements of one head.
    pub head_dim: usize,
    /// Type of the elements.
    pub dtype: Dtype,
}

/// Order of the axes of a KV buffer.
///
/// Letters: 2 = K then V, L = layers, T = tokens, D = heads times head size, B = blocks of the pool,
/// S = slots of a block, H = heads, E = elements of a head. A layout that an engine keeps one tensor
/// a layer appears here with all layers one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvLayout {
    /// `[2, L, T, D]`: the canonical dense layout of K and V.
    Kv2Ltd,
    /// `[L, T, 2, D]`: layer by layer, K and V of a token together.
    KvT2d,
    /// `[L, 2, T, D]`: layer by layer, all K and then all V; used by blending.
    Kv2Td,
    /// `[1, L, T, D]`: the canonical dense layout of MLA latents.
    KvMlaFmt,
    /// `Kv2Ltd` or `KvMlaFmt` behind a header with shape, length and checksum; see [`BinaryFrame`].
    Binary,
    /// One of vLLM's paged pools.
    VllmPaged(VllmPagedOrder),
    /// `[B, L, 2, H, S, E]`: TensorRT-LLM's pool, all layers of a block together.
    TrtllmBlockMajor,
}

/// Order of the axes of a paged pool of vLLM, in the letters of [`KvLayout`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum VllmPagedOrder {
    /// `[L, 2, B, S, H, E]`: all blocks of K, then all of V (NHD).
    KvFirstNhd,
    /// `[L, 2, B, H, S, E]`: the same with heads before slots (HND).
    KvFirstHnd,
    /// `[L, B, 2, S, H, E]`: K and V of a block together (NHD).
    BlockFirstNhd,
    /// `[L, B, 2, H, S, E]`: the same with heads before slots (HND).
    BlockFirstHnd,
    /// `[L, B, H, S, 2 E]`: K and V of a head side by side, vLLM 0.32's `LBHNC`.
    ///
    /// CPU attention backends pack the inside of a block for their instruction set; such a pool can
    /// be moved by whole blocks only, never converted.
    PackedHeads,
    /// `[L, B, S, D]`: one latent a token, for MLA models.
    Latent,
}

/// Where the tokens of one sequence lie in a paged pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paging<'a> {
    block_size: BlockSize,
    n_pool_blocks: usize,
    block_table: &'a [u32],
}

/// A layout together with the paging that it needs, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPlacement<'a> {
    layout: KvLayout,
    paging: Option<Paging<'a>>,
}

// === impl KvShape ===

impl KvShape {
    /// Returns the bytes of one head of one token.
    pub(crate) fn head_bytes(&self) -> usize {
        self.head_dim * self.dtype.size_bytes()
    }

    fn check(&self) -> Result<()> {
        for (field, value) in [
            ("n_layers", self.n_layers),
            ("n_tokens", self.n_tokens),
            ("n_kv_heads", self.n_kv_heads),
            ("head_dim", self.head_dim),
        ] {
            if value == 0 || u32::try_from(value).is_err() {
                return Err(TypesError::invalid(field, &value, "1 to 4294967295"));
            }
        }
        Ok(())
    }
}

// === impl KvLayout ===

impl KvLayout {
    /// Returns the name that stands for the layout in fingerprints and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kv2Ltd => "kv_2ltd",
            Self::KvT2d => "kv_t2d",
            Self::Kv2Td => "kv_2td",
            Self::KvMlaFmt => "kv_mla_fmt",
            Self::Binary => "binary",
            Self::VllmPaged(VllmPagedOrder::KvFirstNhd) => "vllm_kv_first_nhd",
            Self::VllmPaged(VllmPagedOrder::KvFirstHnd) => "vllm_kv_first_hnd",
            Self::VllmPaged(VllmPagedOrder::BlockFirstNhd) => "vllm_block_first_nhd",
            Self::VllmPaged(VllmPagedOrder::BlockFirstHnd) => "vllm_block_first_hnd",
            Self::VllmPaged(VllmPagedOrder::PackedHeads) => "vllm_packed_heads",
            Self::VllmPaged(VllmPagedOrder::Latent) => "vllm_latent",
            Self::TrtllmBlockMajor => "trtllm_block_major",
        }
    }

    /// Returns whether tokens are found through a block table.
    pub const fn is_paged(self) -> bool {
        matches!(self, Self::VllmPaged(_) | Self::TrtllmBlockMajor)
    }

    /// Returns whether the layout holds MLA latents; `None` for a binary frame, which may hold either.
    pub const fn is_mla(self) -> Option<bool> {
        match self {
            Self::Binary => None,
            Self::KvMlaFmt | Self::VllmPaged(VllmPagedOrder::Latent) => Some(true),
            _ => Some(false),
        }
    }
}

impl fmt::Display for KvLayout {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

// === impl Paging ===

impl<'a> Paging<'a> {
    /// Describes a sequence whose token `t` lies in slot `t % block_size` of block
    /// `block_table[t / block_size]`, in a pool of `n_pool_blocks`.
    ///
    /// Fails when the table names a block outside of the pool or one block twice.
    pub fn try_new(block_size: BlockSize, n_pool_blocks: usize, block_table: &'a [u32]) -> Result<Self> {
        let mut sorted = block_table.to_vec();
        sorted.sort_unstable();
        if let Some(last) = sorted.last().filter(|last| **last as usize >= n_pool_blocks) {
            return Err(TypesError::invalid(
                "block_table",
                &format!("naming block {last}"),
                format!("block ids below {n_pool_blocks}, the blocks of the pool"),
            ));
        }
        if let Some([repeated, ..]) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(TypesError::invalid(
                "block_table",
                &format!("naming block {repeated} twice"),
                "each block id once",
            ));
        }
        Ok(Self { block_size, n_pool_blocks, block_table })
    }

    /// Returns the number of tokens in one block.
    pub const fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// Returns the number of blocks of the pool.
    pub const fn n_pool_blocks(&self) -> usize {
        self.n_pool_blocks
    }

    /// Returns the block of the pool for each block of the sequence.
    pub const fn block_table(&self) -> &'a [u32] {
        self.block_table
    }

    fn check(&self, shape: &KvShape) -> Result<()> {
        let n_blocks = shape.n_tokens.div_ceil(self.block_size.get());
        if self.block_table.len() == n_blocks {
            return Ok(());
        }
        Err(TypesError::invalid(
            "block_table",
            &format!("{} entries long", self.block_table.len()),
            format!(
                "exactly {n_blocks} entries, for {} tokens in blocks of {}",
                shape.n_tokens, self.block_size
            ),
        ))
    }
}

// === impl KvPlacement ===

impl<'a> KvPlacement<'a> {
    /// Describes a buffer in a layout that is not paged; fails if `layout` is.
    pub fn dense(layout: KvLayout) -> Result<Self> {
        if layout.is_paged() {
            return Err(TypesError::invalid("layout", &layout, "a layout that is not paged"));
        }
        Ok(Self { layout, paging: None })
    }

    /// Describes a sequence inside of a paged pool; fails if `layout` is not paged.
    pub fn paged(layout: KvLayout, paging: Paging<'a>) -> Result<Self> {
        if !layout.is_paged() {
            return Err(TypesError::invalid("layout", &layout, "a paged layout"));
        }
        Ok(Self { layout, paging: Some(paging) })
    }

    /// Returns the layout.
    pub const fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Returns the paging; `None` exactly if the layout is not paged.
    pub const fn paging(&self) -> Option<&Paging<'a>> {
        self.paging.as_ref()
    }

    /// Returns the exact length in bytes of a buffer for `shape`, which is that of the whole pool if
    /// the layout is paged.
    ///
    /// For a binary frame `is_mla` says what it holds; for all other layouts it must be what
    /// [`KvLayout::is_mla`] says. Fails when it is not, when the shape is invalid or does not fit the
    /// paging, or when it needs more bytes than can be addressed.
    pub fn buffer_bytes(&self, shape: &KvShape, is_mla: bool) -> Result<usize> {
        let n_header_bytes = if self.layout == KvLayout::Binary { BINARY_HEADER_BYTES } else { 0 };
        Ok(Strides::of(self, shape, is_mla)?.n_bytes + n_header_bytes)
    }

    /// Returns the text that stands for layout and geometry in a [`Namespace`](crate::Namespace).
    ///
    /// Two caches with equal fingerprints and element types can be read by each other. The number of
    /// tokens and the block table are not part of it; the block size of a paged layout is.
    pub fn fingerprint(&self, shape: &KvShape) -> String {
        let KvShape { n_layers, n_kv_heads, head_dim, .. } = shape;
        let geometry = format!("{}/layers={n_layers}/heads={n_kv_heads}/head_dim={head_dim}", self.layout);
        match &self.paging {
            Some(paging) => format!("{geometry}/block={}", paging.block_size),
            None => geometry,
        }
    }
}
