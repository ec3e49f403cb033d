//! The functions of `include/kvik.h` about the order of KV in memory: conversion between any two.

use std::ffi::c_void;
use std::slice;

use kvik_types::layout::{KvLayout, KvPlacement, KvShape, Paging, VllmPagedOrder, convert};
use kvik_types::{BlockSize, Dtype, TypesError};

use crate::boundary::{answer, check_array};
use crate::sized::read_sized;
use crate::status::{Failure, kvik_status};

#[cfg(test)]
mod tests;

/// [2, L, T, H * E]: K of all layers, then V. In this and all layouts: 2 is K then V, L layers, T tokens, B blocks of
/// a pool, S tokens of a block, H heads, E elements of a head.
pub const KVIK_LAYOUT_2LTD: u32 = 1;

/// [L, T, 2, H * E]: layer by layer, K and V of a token together.
pub const KVIK_LAYOUT_LT2D: u32 = 2;

/// [L, 2, T, H * E]: layer by layer, all K and then all V.
pub const KVIK_LAYOUT_L2TD: u32 = 3;

/// [L, T, E]: one latent a token, of MLA models.
pub const KVIK_LAYOUT_LATENT: u32 = 4;

/// [L, 2, B, S, H, E]: a paged pool of vLLM, and of kvcached; with one layer [2, B, S, H, E].
pub const KVIK_LAYOUT_KV_FIRST_NHD: u32 = 16;

/// [L, 2, B, H, S, E]: the same with heads before tokens. With blocks as long as the longest sequence: tensors of K
/// and of V, each [B, H, S, E].
pub const KVIK_LAYOUT_KV_FIRST_HND: u32 = 17;

/// [L, B, 2, S, H, E]: K and V of a block together.
pub const KVIK_LAYOUT_BLOCK_FIRST_NHD: u32 = 18;

/// [L, B, 2, H, S, E]: the same with heads before tokens.
pub const KVIK_LAYOUT_BLOCK_FIRST_HND: u32 = 19;

/// [L, B, H, S, 2 * E]: K and V of a head side by side.
pub const KVIK_LAYOUT_PACKED_HEADS: u32 = 20;

/// [L, B, S, E]: a paged pool of latents.
pub const KVIK_LAYOUT_PAGED_LATENT: u32 = 21;

/// [B, L, 2, H, S, E]: TensorRT-LLM's pool, all layers of a block together.
pub const KVIK_LAYOUT_TRTLLM: u32 = 32;

const ALLOWED_LAYOUTS: &str = "one of KVIK_LAYOUT_...";

/// What KV buffers hold, whatever their layout.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvik_kv_shape {
    /// sizeof(kvik_kv_shape).
    pub size: usize,
    /// Layers, 1 or more.
    pub n_layers: u32,
    /// Tokens of the sequence, 1 or more.
    pub n_tokens: u32,
    /// Heads of K, and of V, on this rank; 1 for latents.
    pub n_kv_heads: u32,
    /// Elements of a head, or of a latent.
    pub head_dim: u32,
    /// Bytes of an element: 4, 2 (FP16, BF16) or 1 (FP8, INT8).
    pub element_bytes: u32,
    /// Zero.
    pub reserved: u32,
}

/// A buffer of KV in the memory of the host.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvik_kv_buffer {
    /// sizeof(kvik_kv_buffer).
    pub size: usize,
    /// One of KVIK_LAYOUT_....
    pub layout: u32,
    /// Tokens of a block; 0 where the layout has none.
    pub block_tokens: u32,
    /// The bytes: all of the pool where the layout has blocks. Those of a source are only read.
    pub bytes: *mut c_void,
    /// How many, exactly as many as kvik_kv_bytes says.
    pub n_bytes: u64,
    /// Blocks of the pool; 0 where the layout has none.
    pub n_pool_blocks: u64,
    /// Block i of the sequence is block_table[i] of the pool; NULL where the layout has none.
    pub block_table: *const u32,
    /// Blocks of the sequence: as many as its tokens need.
    pub n_table_blocks: u64,
}

/// Tells how many bytes a buffer of this layout has; bytes and n_bytes of it are not looked at.
///
/// # Safety
///
/// shape and buffer are NULL or point to as many readable bytes as their size says; the block table has
/// n_table_blocks numbers; n_bytes is NULL or points to a writable number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_kv_bytes(
    shape: *const kvik_kv_shape,
    buffer: *const kvik_kv_buffer,
    n_bytes: *mut u64,
) -> kvik_status {
    answer(|| {
        check_array("n_bytes", n_bytes, 1)?;
        // SAFETY: the caller promised whole structures, which begin with their size.
        let (shape, buffer) = unsafe { (kvik_kv_shape::read(shape)?, read_sized("buffer", buffer)?) };
        // SAFETY: the caller promised the table.
        let placement = unsafe { buffer.placement("buffer") }?;
        let is_mla = placement.layout().is_mla().unwrap_or(false);
        let length = placement.buffer_bytes(&shape, is_mla)? as u64;
        // SAFETY: the caller promised room for one.
        unsafe { n_bytes.write(length) };
        Ok(())
    })
}

/// Copies the KV of a sequence from source to dest, whose layouts, block sizes and block tables may differ. Elements
/// are moved, never changed. In a dest with blocks only the tokens of the table are written. On the host only; latents
/// and K with V do not become each other. On failure nothing is written.
///
/// # Safety
///
/// shape, source and dest are NULL or point to as many readable bytes as their size says; their block tables have
/// n_table_blocks numbers; their bytes are n_bytes of memory of this process, which no other thread writes to
/// meanwhile, nor reads where they are those of dest.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_convert_kv(
    shape: *const kvik_kv_shape,
    source: *const kvik_kv_buffer,
    dest: *const kvik_kv_buffer,
) -> kvik_status {
    answer(|| {
        // SAFETY: the caller promised whole structures, which begin with their size.
        let (shape, source, dest) = unsafe {
            (kvik_kv_shape::read(shape)?, read_sized("source", source)?, read_sized("dest", dest)?)
        };
        let (source_length, dest_length) = (source.check_bytes("source")?, dest.check_bytes("dest")?);
        let (source_start, dest_start) = (source.bytes.addr(), dest.bytes.addr());
        if source_start < dest_start.saturating_add(dest_length)
            && dest_start < source_start.saturating_add(source_length)
        {
            return Err(Failure::invalid("`dest.bytes` overlaps source.bytes; allowed: memory of its own"));
        }
        // SAFETY: the caller promised the tables.
        let placements = unsafe { (source.placement("source")?, dest.placement("dest")?) };
        // SAFETY: the caller promised the bytes, which are not NULL and do not overlap.
        let (source_bytes, dest_bytes) = unsafe {
            (
                slice::from_raw_parts(source.bytes.cast::<u8>(), source_length),
                slice::from_raw_parts_mut(dest.bytes.cast::<u8>(), dest_length),
            )
        };
        Ok(convert(&shape, &placements.0, source_bytes, &placements.1, dest_bytes)?)
    })
}

impl kvik_kv_shape {
    /// # Safety
    ///
    /// As [`read_sized`].
    unsafe fn read(shape: *const Self) -> Result<KvShape, Failure> {
        // SAFETY: the caller promised it.
        let shape = unsafe { read_sized("shape", shape) }?;
        // Bytes are moved and not looked at, so any type of the size will do.
        let dtype = match shape.element_bytes {
            1 => Dtype::U8,
            2 => Dtype::F16,
            4 => Dtype::F32,
            other => {
                return Err(Failure::invalid(format!("`shape.element_bytes` is {other}; allowed: 1, 2, 4")));
            }
        };
        if shape.reserved != 0 {
            return Err(Failure::invalid(format!("`shape.reserved` is {}; allowed: 0", shape.reserved)));
        }
        Ok(KvShape {
            n_layers: shape.n_layers as usize,
            n_tokens: shape.n_tokens as usize,
            n_kv_heads: shape.n_kv_heads as usize,
            head_dim: shape.head_dim as usize,
            dtype,
        })
    }
}

impl kvik_kv_buffer {
    /// Where the tokens lie.
    ///
    /// # Safety
    ///
    /// The table is NULL or has `n_table_blocks` numbers, which do not change while the placement lives.
    unsafe fn placement<'a>(&self, name: &'static str) -> Result<KvPlacement<'a>, Failure> {
        let Some(layout) = layout_of(self.layout) else {
            return Err(Failure::invalid(format!(
                "`{name}.layout` is {}; allowed: {ALLOWED_LAYOUTS}",
                self.layout
            )));
        };
        if !layout.is_paged() {
            let has_blocks = self.block_tokens != 0 || self.n_pool_blocks != 0 || self.n_table_blocks != 0;
            if has_blocks || !self.block_table.is_null() {
                return Err(Failure::invalid(format!("`{name}` has blocks; allowed in {layout}: none")));
            }
            return Ok(KvPlacement::dense(layout)?);
        }
        let too_large = |field: &str, value: u64| {
            Failure::invalid(format!("`{name}.{field}` is {value}; allowed: what memory has room for"))
        };
        let n_table_blocks = usize::try_from(self.n_table_blocks)
            .map_err(|_| too_large("n_table_blocks", self.n_table_blocks))?;
        let n_pool_blocks = usize::try_from(self.n_pool_blocks)
            .map_err(|_| too_large("n_pool_blocks", self.n_pool_blocks))?;
        check_array("block_table", self.block_table, n_table_blocks)?;
        let table = if n_table_blocks == 0 {
            &[]
        } else {
            // SAFETY: the caller promised that many numbers, and they are not NULL.
            unsafe { slice::from_raw_parts(self.block_table, n_table_blocks) }
        };
        let paging = Paging::try_new(BlockSize::try_new(self.block_tokens as usize)?, n_pool_blocks, table)?;
        Ok(KvPlacement::paged(layout, paging)?)
    }

    /// The number of bytes, which can be those of one piece of memory.
    fn check_bytes(&self, name: &'static str) -> Result<usize, Failure> {
        let length = usize::try_from(self.n_bytes).ok().filter(|&length| isize::try_from(length).is_ok());
        match length {
            _ if self.bytes.is_null() => Err(Failure::invalid(format!("`{name}.bytes` is NULL"))),
            Some(length) => Ok(length),
            None => Err(Failure::invalid(format!(
                "`{name}.n_bytes` is {}; allowed: up to {}",
                self.n_bytes,
                isize::MAX
            ))),
        }
    }
}

fn layout_of(number: u32) -> Option<KvLayout> {
    Some(match number {
        KVIK_LAYOUT_2LTD => KvLayout::Kv2Ltd,
        KVIK_LAYOUT_LT2D => KvLayout::KvT2d,
        KVIK_LAYOUT_L2TD => KvLayout::Kv2Td,
        KVIK_LAYOUT_LATENT => KvLayout::KvMlaFmt,
        KVIK_LAYOUT_KV_FIRST_NHD => KvLayout::VllmPaged(VllmPagedOrder::KvFirstNhd),
        KVIK_LAYOUT_KV_FIRST_HND => KvLayout::VllmPaged(VllmPagedOrder::KvFirstHnd),
        KVIK_LAYOUT_BLOCK_FIRST_NHD => KvLayout::VllmPaged(VllmPagedOrder::BlockFirstNhd),
        KVIK_LAYOUT_BLOCK_FIRST_HND => KvLayout::VllmPaged(VllmPagedOrder::BlockFirstHnd),
        KVIK_LAYOUT_PACKED_HEADS => KvLayout::VllmPaged(VllmPagedOrder::PackedHeads),
        KVIK_LAYOUT_PAGED_LATENT => KvLayout::VllmPaged(VllmPagedOrder::Latent),
        KVIK_LAYOUT_TRTLLM => KvLayout::TrtllmBlockMajor,
        _ => return None,
    })
}

impl From<TypesError> for Failure {
    fn from(error: TypesError) -> Self {
        Self::invalid(error.to_string())
    }
}
