//! The functions of `include/kvik.h` about memory of any size and alignment.

use std::ffi::c_void;
use std::ptr;

use crate::boundary::{call, check_array};
use crate::handle::kvik_pool;
use crate::status::kvik_status;

/// Takes size bytes at a multiple of alignment, a power of two up to 1 GiB; 0 is 256, and less than that is 256 too.
/// More than half of a page gets pages for itself, less shares a page with others. The pool needs no blocks for
/// this; blocks and allocations are under one limit. The contents are whatever was there.
///
/// # Safety
///
/// memory is NULL or points to a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_alloc(
    pool: *mut kvik_pool,
    size: u64,
    alignment: u64,
    memory: *mut *mut c_void,
) -> kvik_status {
    call(pool, |pool| {
        check_array("memory", memory, 1)?;
        let address = pool.allocate(size, alignment)?;
        // SAFETY: the caller promised room for one.
        unsafe { memory.write(ptr::with_exposed_provenance_mut(address as usize)) };
        Ok(())
    })
}

/// Frees what kvik_alloc gave. Pages without an allocation are idle then: the next allocation has them, kvik_trim, a
/// lower limit or the need of others unmaps them at once, and time does above a watermark. What is not allocated, or
/// was freed before, is an error and changes nothing. NULL is allowed and does nothing.
///
/// # Safety
///
/// The memory is no longer used, not even by the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_free(pool: *mut kvik_pool, memory: *mut c_void) -> kvik_status {
    call(pool, |pool| if memory.is_null() { Ok(()) } else { pool.free_allocation(memory.addr()) })
}

/// Switches kvik_alloc of this pool to the device's own allocator (not 0) or back to pages (0), from the next
/// allocation on; kvik_free takes the memory of both. What is bypassed is not granted, and counts for no limit.
/// KVIK_MEMORY_BYPASS in the environment says how a pool starts; by default it is not bypassed.
#[unsafe(no_mangle)]
pub extern "C" fn kvik_set_bypass(pool: *mut kvik_pool, is_bypassed: i32) -> kvik_status {
    call(pool, |pool| {
        pool.set_bypass(is_bypassed != 0);
        Ok(())
    })
}
