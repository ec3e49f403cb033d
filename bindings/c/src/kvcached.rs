//! The functions of `include/kvcached_trtllm.h`, as thin as they can be: a context is a pool.

use std::ffi::{c_int, c_void};
use std::ptr;

use crate::abi::{kvik_alloc_blocks, kvik_close, kvik_free_blocks};
use crate::allocations::{kvik_alloc, kvik_free, kvik_set_bypass};
use crate::boundary::{answer, call, check_array};
use crate::config::kvik_config;
use crate::environment::memory_config;
use crate::handle::{self, kvik_pool};
use crate::pointers::fill_tables;
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
pub extern "C" fn kvcached_init(device_id: c_int, max_memory: usize) -> *mut kvcached_ctx {
    let mut context = ptr::null_mut::<kvcached_ctx>();
    answer(|| {
        context = open_without_blocks(device_id, max_memory)?.cast::<kvcached_ctx>();
        Ok(())
    });
    context
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn kvcached_alloc(ctx: *mut kvcached_ctx, size: usize, alignment: usize) -> *mut c_void {
    let mut memory = ptr::null_mut();
    // SAFETY: there is room for one.
    unsafe { kvik_alloc(ctx.cast::<kvik_pool>(), size as u64, alignment as u64, &raw mut memory) };
    memory
}

/// See the header.
///
/// # Safety
///
/// The memory is no longer used, not even by the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvcached_free(ctx: *mut kvcached_ctx, ptr: *mut c_void) -> c_int {
    // SAFETY: the caller promised that it is unused.
    let status = unsafe { kvik_free(ctx.cast::<kvik_pool>(), ptr) };
    c_int::from(status == kvik_status::KVIK_OK)
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn kvcached_set_bypass(ctx: *mut kvcached_ctx, is_bypassed: c_int) -> c_int {
    let status = kvik_set_bypass(ctx.cast::<kvik_pool>(), is_bypassed);
    c_int::from(status == kvik_status::KVIK_OK)
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
///
/// # Safety
///
/// blocks is NULL or has num_blocks pointers; k_ptrs, and v_ptrs unless it is NULL, have room for
/// num_layers * num_blocks pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvcached_block_pointers_trtllm(
    ctx: *mut kvcached_ctx,
    num_layers: c_int,
    blocks: *mut *mut c_void,
    num_blocks: c_int,
    k_ptrs: *mut *mut c_void,
    v_ptrs: *mut *mut c_void,
) -> c_int {
    let (Ok(n_layers), Ok(n_blocks)) = (u32::try_from(num_layers), usize::try_from(num_blocks)) else {
        return 0;
    };
    let status = call(ctx.cast::<kvik_pool>(), |pool| {
        check_array("blocks", blocks, n_blocks)?;
        let block_at = |place: usize| {
            // SAFETY: the caller promised that many pointers.
            pool.block_starting_at(unsafe { blocks.add(place).read() }.addr())
        };
        // SAFETY: the caller promised room for the tables.
        unsafe { fill_tables(pool, n_layers, n_blocks, block_at, k_ptrs, v_ptrs) }
    });
    if status == kvik_status::KVIK_OK { num_blocks } else { 0 }
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
    let max_bytes = max_memory as u64;
    let config = kvik_config {
        device: check_device(device_id)?,
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

fn open_without_blocks(device_id: c_int, max_memory: usize) -> Result<*mut kvik_pool, Failure> {
    if max_memory == 0 {
        return Err(Failure::invalid("`max_memory` is 0; allowed: bytes, 1 or more"));
    }
    let config =
        kvik_config { device: check_device(device_id)?, max_bytes: max_memory as u64, ..kvik_config::new() };
    let names = Names { label: Some("trtllm".to_owned()), ..Names::default() };
    handle::insert(Pool::open(&config, names, &memory_config()?)?)
}

fn check_device(device_id: c_int) -> Result<c_int, Failure> {
    if device_id < -1 {
        return Err(Failure::invalid(format!("`device_id` is {device_id}; allowed: -1 (host) or more")));
    }
    Ok(device_id)
}

fn count_bytes(ctx: *mut kvcached_ctx, n_blocks: impl FnOnce(&Pool) -> u64) -> usize {
    let mut n_bytes = 0;
    call(ctx.cast::<kvik_pool>(), |pool| {
        n_bytes = n_blocks(pool).saturating_mul(pool.block_bytes());
        Ok(())
    });
    n_bytes as usize
}
