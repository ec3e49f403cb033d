//! The functions of `include/kvcached_trtllm.h`, as thin as they can be: a context is a pool.

use std::ffi::{c_int, c_void};
use std::ptr;

use crate::abi::{answer, call, kvik_alloc_blocks, kvik_close, kvik_free_blocks};
use crate::config::kvik_config;
use crate::environment::memory_config;
use crate::handle::{self, kvik_pool};
use crate::pool::{Names, Pool};
use crate::status::{Failure, kvik_status};

/// A context.
#[derive(Debug)]
pub struct kvcached_ctx {
    _opaque: [u8; 0],
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn kvcached_init_trtllm(
    device_id: c_int,
    max_memory: usize,
    block_size: c_int,
) -> *mut kvcached_ctx {
    let mut context = ptr::null_mut::<kvcached_ctx>();
    answer(|| {
        context = open(device_id, max_memory, block_size)?.cast::<kvcached_ctx>();
        Ok(())
    });
    context
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn kvcached_shutdown_trtllm(ctx: *mut kvcached_ctx) {
    kvik_close(ctx.cast::<kvik_pool>());
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn kvcached_alloc_block_trtllm(ctx: *mut kvcached_ctx) -> *mut c_void {
    let mut block = ptr::null_mut();
    // SAFETY: there is room for one.
    unsafe { kvik_alloc_blocks(ctx.cast::<kvik_pool>(), 1, &raw mut block) };
    block
}

/// See the header.
///
/// # Safety
///
/// The block is no longer used, not even by the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvcached_free_block_trtllm(ctx: *mut kvcached_ctx, ptr: *mut c_void) {
    // SAFETY: there is one; the caller promised that it is unused.
    unsafe { kvik_free_blocks(ctx.cast::<kvik_pool>(), &raw const ptr, 1) };
}

/// See the header.
///
/// # Safety
///
/// out_ptrs is NULL or has room for num_blocks pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvcached_alloc_blocks_trtllm(
    ctx: *mut kvcached_ctx,
    num_blocks: c_int,
    out_ptrs: *mut *mut c_void,
) -> c_int {
    let Ok(n_blocks) = usize::try_from(num_blocks) else { return 0 };
    // SAFETY: the caller promised the room.
    match unsafe { kvik_alloc_blocks(ctx.cast::<kvik_pool>(), n_blocks, out_ptrs) } {
        kvik_status::KVIK_OK => num_blocks,
        _ => 0,
    }
}

/// See the header.
///
/// # Safety
///
/// ptrs is NULL or has num_blocks pointers. The blocks are no longer used, not even by the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvcached_free_blocks_trtllm(
    ctx: *mut kvcached_ctx,
    ptrs: *mut *mut c_void,
    num_blocks: c_int,
) {
    if let Ok(n_blocks) = usize::try_from(num_blocks) {
        // SAFETY: the caller promised the pointers.
        unsafe { kvik_free_blocks(ctx.cast::<kvik_pool>(), ptrs, n_blocks) };
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn kvcached_available_memory_trtllm(ctx: *mut kvcached_ctx) -> usize {
    count_bytes(ctx, |pool| pool.stats().n_available_blocks)
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn kvcached_used_memory_trtllm(ctx: *mut kvcached_ctx) -> usize {
    count_bytes(ctx, |pool| pool.stats().n_used_blocks)
}

fn open(device_id: c_int, max_memory: usize, block_size: c_int) -> Result<*mut kvik_pool, Failure> {
    let block_bytes = u64::try_from(block_size).ok().filter(|&block_bytes| block_bytes > 0);
    let Some(block_bytes) = block_bytes else {
        return Err(Failure::invalid(format!("`block_size` is {block_size}; allowed: bytes, 1 or more")));
    };
    if device_id < -1 {
        return Err(Failure::invalid(format!("`device_id` is {device_id}; allowed: -1 (host) or more")));
    }
    let max_bytes = max_memory as u64;
    let config = kvik_config {
        device: device_id,
        block_bytes,
        n_blocks: max_bytes / block_bytes,
        max_bytes,
        ..kvik_config::new()
    };
    if config.n_blocks == 0 {
        return Err(Failure::invalid(format!(
            "`max_memory` is {max_memory}; allowed: one block of {block_bytes} bytes or more"
        )));
    }
    let names = Names { label: Some("trtllm".to_owned()), ..Names::default() };
    handle::insert(Pool::open(&config, names, &memory_config()?)?)
}

fn count_bytes(ctx: *mut kvcached_ctx, n_blocks: impl FnOnce(&Pool) -> u64) -> usize {
    let mut n_bytes = 0;
    call(ctx.cast::<kvik_pool>(), |pool| {
        n_bytes = n_blocks(pool).saturating_mul(pool.block_bytes());
        Ok(())
    });
    n_bytes as usize
}
