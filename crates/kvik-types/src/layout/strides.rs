//! The address function of each layout.

use super::{KvLayout, KvPlacement, KvShape, VllmPagedOrder};
use crate::error::{Result, TypesError};

/// Distances in bytes between neighbors along each axis.
///
/// The head run at (kv, layer, token, head) starts at
/// `kv * self.kv + layer * self.layer + block * self.block + slot * self.slot + head * self.head`,
/// where block and slot come from the block table. A dense layout is one block that holds all tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Strides {
    pub(super) kv: usize,
    pub(super) layer: usize,
    pub(super) block: usize,
    pub(super) slot: usize,
    pub(super) head: usize,
    /// K and V, or one latent.
    pub(super) n_kv: usize,
    pub(super) slots_per_block: usize,
    /// Length of the whole buffer, without the header of a binary frame.
    pub(super) n_bytes: usize,
}

/// Axes around a head run, as an index into the arrays of [`Strides::of`].
#[derive(Clone, Copy)]
enum Axis {
    Kv,
    Layer,
    Block,
    Slot,
    Head,
}

impl Strides {
    /// Derives the strides of `placement` for `shape`.
    ///
    /// Fails when the shape is invalid, does not fit the paging or the kind of layout, or the buffer
    /// would be longer than can be addressed. After success every address inside the block table lies
    /// below `n_bytes`, so no later arithmetic on them can overflow.
    pub(super) fn of(placement: &KvPlacement<'_>, shape: &KvShape, is_mla: bool) -> Result<Self> {
        use Axis::{Block, Head, Kv, Layer, Slot};

        shape.check()?;
        if let Some(expected) = placement.layout().is_mla().filter(|expected| *expected != is_mla) {
            return Err(TypesError::invalid(
                "is_mla",
                &is_mla,
                format!("{expected} for {}", placement.layout()),
            ));
        }
        if is_mla && shape.n_kv_heads != 1 {
            return Err(TypesError::invalid(
                "n_kv_heads",
                &shape.n_kv_heads,
                "1, as MLA has one latent a token",
            ));
        }
        let (n_blocks, slots_per_block) = match placement.paging() {
            Some(paging) => {
                paging.check(shape)?;
                (paging.n_pool_blocks(), paging.block_size().get())
            }
            None => (1, shape.n_tokens),
        };
        // Outermost first. The axis K/V has one entry in an MLA layout, wherever it stands.
        let order = match placement.layout() {
            KvLayout::Kv2Ltd | KvLayout::KvMlaFmt | KvLayout::Binary => [Kv, Layer, Block, Slot, Head],
            KvLayout::KvT2d => [Layer, Block, Slot, Kv, Head],
            KvLayout::Kv2Td | KvLayout::VllmPaged(VllmPagedOrder::KvFirstNhd | VllmPagedOrder::Latent) => {
                [Layer, Kv, Block, Slot, Head]
            }
            KvLayout::VllmPaged(VllmPagedOrder::KvFirstHnd) => [Layer, Kv, Block, Head, Slot],
            KvLayout::VllmPaged(VllmPagedOrder::BlockFirstNhd) => [Layer, Block, Kv, Slot, Head],
            KvLayout::VllmPaged(VllmPagedOrder::BlockFirstHnd) => [Layer, Block, Kv, Head, Slot],
            KvLayout::VllmPaged(VllmPagedOrder::PackedHeads) => [Layer, Block, Head, Slot, Kv],
            KvLayout::TrtllmBlockMajor => [Block, Layer, Kv, Head, Slot],
        };
        let n_kv = if is_mla { 1 } else { 2 };
        let lengths = [n_kv, shape.n_layers, n_blocks, slots_per_block, shape.n_kv_heads];
        let too_large = || {
            TypesError::invalid(
                "shape",
                &format!("{shape:?} in {}", placement.layout()),
                format!("at most {} bytes", isize::MAX),
            )
        };
        let mut strides = [0; 5];
        let mut n_bytes = shape.head_dim.checked_mul(shape.dtype.size_bytes()).ok_or_else(too_large)?;
        for axis in order.into_iter().rev() {
            strides[axis as usize] = n_bytes;
            n_bytes = n_bytes.checked_mul(lengths[axis as usize]).ok_or_else(too_large)?;
        }
        if isize::try_from(n_bytes).is_err() {
            return Err(too_large());
        }
        let [kv, layer, block, slot, head] = strides;
        Ok(Self { kv, layer, block, slot, head, n_kv, slots_per_block, n_bytes })
    }

    /// Returns the first byte of a token's runs and how many tokens from there on, at most
    /// `n_tokens_left`, lie one slot stride apart.
    ///
    /// Goes over block boundaries where the table names neighboring blocks and the pool has nothing
    /// between them.
    pub(super) fn token_run(
        &self,
        block_table: Option<&[u32]>,
        token: usize,
        n_tokens_left: usize,
    ) -> (usize, usize) {
        let slot = token % self.slots_per_block;
        let first_block = token / self.slots_per_block;
        let Some(table) = block_table else {
            return (token * self.slot, n_tokens_left);
        };
        let start = table[first_block] as usize * self.block + slot * self.slot;
        let mut n_tokens = self.slots_per_block - slot;
        if self.block == self.slots_per_block * self.slot {
            let neighbors =
                table[first_block..].windows(2).take_while(|pair| pair[0].checked_add(1) == Some(pair[1]));
            for _ in neighbors {
                if n_tokens >= n_tokens_left {
                    break;
                }
                n_tokens += self.slots_per_block;
            }
        }
        (start, n_tokens.min(n_tokens_left))
    }
}
