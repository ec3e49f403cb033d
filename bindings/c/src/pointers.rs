//! The function of `include/kvik.h` that tells where K and V of each layer lie in blocks.

use std::ffi::c_void;
use std::ptr;

use kvik_memory::BlockId;

use crate::boundary::{call, check_array};
use crate::handle::kvik_pool;
use crate::pool::Pool;
use crate::status::{Failure, kvik_status};

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
