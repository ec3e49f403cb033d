//! The function of `include/kvik.h` that tells where K and V of each layer lie in blocks.

use std::ffi::c_void;
use std::ptr;

use kvik_memory::BlockId;
use kvik_memory::geometry::Geometry;

use crate::abi::{call, check_array};
use crate::handle::kvik_pool;
use crate::pool::Pool;
use crate::status::{Failure, kvik_status};

#[cfg(test)]
mod tests;

/// Where the planes of a block lie, relative to its start in the first buffer.
///
/// A plane is K or V of one layer. The planes of a block are of one size and follow each other, layer by layer, through
/// its bytes in all buffers: so one buffer has all of them, each layer has its own, or each plane has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Planes {
    n_per_layer: u64,
    n_per_buffer: u64,
    plane_bytes: u64,
    buffer_stride_bytes: u64,
}

impl Planes {
    /// Fails where the planes cannot be of one size, or one would lie in two buffers.
    pub(crate) fn try_new(
        geometry: &Geometry,
        block_bytes: u64,
        n_layers: u32,
        has_values: bool,
    ) -> Result<Self, Failure> {
        let n_per_layer = if has_values { 2 } else { 1 };
        let n_planes = u64::from(n_layers) * n_per_layer;
        let n_buffers = u64::from(geometry.n_buffers());
        if n_planes == 0 || !n_planes.is_multiple_of(n_buffers) {
            return Err(Failure::invalid(format!(
                "`n_layers` is {n_layers}; allowed: 1 or more, {n_per_layer} planes each, as a multiple of the \
                 {n_buffers} buffers"
            )));
        }
        let n_per_buffer = n_planes / n_buffers;
        if !block_bytes.is_multiple_of(n_per_buffer) {
            return Err(Failure::invalid(format!(
                "`n_layers` is {n_layers}; allowed: as many as divide a block of {block_bytes} bytes into \
                 {n_per_buffer} planes"
            )));
        }
        Ok(Self {
            n_per_layer,
            n_per_buffer,
            plane_bytes: block_bytes / n_per_buffer,
            buffer_stride_bytes: geometry.buffer_stride_bytes(),
        })
    }

    /// Bytes from the block's start to K (`part` 0) or V (1) of `layer`.
    pub(crate) fn offset_bytes(&self, layer: u32, part: u64) -> u64 {
        let plane = u64::from(layer) * self.n_per_layer + part;
        plane / self.n_per_buffer * self.buffer_stride_bytes + plane % self.n_per_buffer * self.plane_bytes
    }
}

/// Fills tables with the addresses of K and V: that of layer l and blocks[i] is keys[l * n_blocks + i], and the same in
/// values. The planes of a block, K and V of a layer, are of one size and follow each other, layer by layer, through
/// its bytes in all buffers: one buffer has all of them (TensorRT-LLM's pool), each layer has a buffer, or each plane
/// has. values is NULL for latents of MLA, of which a layer has one plane. The blocks may be allocated or not.
///
/// # Safety
///
/// blocks is NULL or has n_blocks numbers; keys, and values unless it is NULL, have room for n_layers * n_blocks
/// pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_block_pointers(
    pool: *mut kvik_pool,
    n_layers: u32,
    blocks: *const u32,
    n_blocks: usize,
    keys: *mut *mut c_void,
    values: *mut *mut c_void,
) -> kvik_status {
    call(pool, |pool| {
        check_array("blocks", blocks, n_blocks)?;
        // SAFETY: the caller promised that many numbers.
        let block_at = |place: usize| Ok(BlockId(unsafe { blocks.add(place).read() }));
        // SAFETY: the caller promised room for the tables.
        unsafe { fill_tables(pool, n_layers, n_blocks, block_at, keys, values) }
    })
}

/// Fills the tables as [`kvik_block_pointers`] does, all or nothing; `block_at` tells the block of a place.
///
/// # Safety
///
/// `keys`, and `values` unless it is NULL, have room for `n_layers * n_blocks` pointers.
pub(crate) unsafe fn fill_tables(
    pool: &Pool,
    n_layers: u32,
    n_blocks: usize,
    block_at: impl Fn(usize) -> Result<BlockId, Failure>,
    keys: *mut *mut c_void,
    values: *mut *mut c_void,
) -> Result<(), Failure> {
    let n_pointers = (n_layers as usize).checked_mul(n_blocks);
    let n_pointers = n_pointers.ok_or_else(|| Failure::invalid("the tables are larger than memory"))?;
    check_array("keys", keys, n_pointers)?;
    if !values.is_null() {
        check_array("values", values, n_pointers)?;
    }
    let planes = pool.planes(n_layers, !values.is_null())?;
    // All are looked at before anything is written.
    for place in 0..n_blocks {
        pool.address_of(block_at(place)?)?;
    }
    for place in 0..n_blocks {
        let start = pool.address_of(block_at(place)?)?;
        for layer in 0..n_layers {
            let entry = layer as usize * n_blocks + place;
            for (part, table) in [(0, keys), (1, values)] {
                if !table.is_null() {
                    let address = start + planes.offset_bytes(layer, part);
                    // SAFETY: the caller promised room for n_layers * n_blocks, of which this is one.
                    unsafe { table.add(entry).write(ptr::with_exposed_provenance_mut(address as usize)) };
                }
            }
        }
    }
    Ok(())
}
