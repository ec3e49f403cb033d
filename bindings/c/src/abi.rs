//! The functions of `include/kvik.h`.

use std::ffi::{c_char, c_void};
use std::panic::catch_unwind;
use std::{ptr, slice};

use kvik_memory::BlockId;

use crate::boundary::{answer, call, check_array};
use crate::config::{kvik_config, text_of};
use crate::environment::memory_config;
use crate::handle::{self, kvik_pool};
use crate::pool::{Names, Pool};
use crate::rank_region::Role;
use crate::reclaim;
use crate::stats::kvik_stats;
use crate::status::{self, Failure, kvik_status};

/// The version of this interface. Programs and libraries of one version fit together.
pub const KVIK_ABI_VERSION: u32 = 1;

/// Asks the engine to free n_bytes, now or later: others are entitled to them, or the limit fell.
///
/// It is called by a thread of the library, one call at a time. It may free, trim and retire; it must not
/// close the pool, wait for a thread that closes it, or throw.
pub type kvik_reclaim_callback = Option<unsafe extern "C" fn(user_data: *mut c_void, n_bytes: u64)>;

/// Returns KVIK_ABI_VERSION of the library.
#[unsafe(no_mangle)]
pub extern "C" fn kvik_abi_version() -> u32 {
    KVIK_ABI_VERSION
}

/// Returns the name of a kvik_status, which lives as long as the library.
#[unsafe(no_mangle)]
pub extern "C" fn kvik_status_name(status: i32) -> *const c_char {
    status::name_of(status).as_ptr()
}

/// Fills in the defaults; size is sizeof(kvik_config) of the caller.
///
/// # Safety
///
/// config is NULL or points to size writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_config_init(config: *mut kvik_config, size: usize) -> kvik_status {
    answer(|| {
        if config.is_null() {
            return Err(Failure::null("config"));
        }
        if size < size_of::<kvik_config>() {
            return Err(Failure::invalid(format!(
                "`size` is {size}; allowed: {} or more",
                size_of::<kvik_config>()
            )));
        }
        let defaults = kvik_config { size, ..kvik_config::new() };
        // SAFETY: the caller promised `size` bytes, which is at least what is written.
        unsafe {
            ptr::write_bytes(config.cast::<u8>(), 0, size);
            config.write_unaligned(defaults);
        }
        Ok(())
    })
}

/// Opens a pool and joins the ledger of its device. On failure *pool is NULL, and kvik_last_error(NULL) says
/// why.
///
/// # Safety
///
/// config is NULL or points to config->size readable bytes, its strings are NULL or C strings; pool is NULL
/// or points to a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_open(config: *const kvik_config, pool: *mut *mut kvik_pool) -> kvik_status {
    answer(|| {
        // SAFETY: the caller promised what this asks for.
        unsafe { open_pool(config, Role::Alone, pool) }
    })
}

/// Closes a pool: waits for calls that are in it, unmaps everything, releases its chunks and gives all grants
/// back. The device must be done with its memory, but for what was freed after an event. NULL is allowed and
/// does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn kvik_close(pool: *mut kvik_pool) -> kvik_status {
    answer(|| {
        if pool.is_null() {
            return Ok(());
        }
        reclaim::check_not_calling()?;
        drop(handle::remove(pool)?);
        Ok(())
    })
}

/// Returns words about the last call on this pool that did not answer KVIK_OK, or about that of this thread
/// where pool is NULL. Never NULL; lives until this thread asks again.
#[unsafe(no_mangle)]
pub extern "C" fn kvik_last_error(pool: *const kvik_pool) -> *const c_char {
    catch_unwind(|| {
        let message = if pool.is_null() {
            status::last_message()
        } else {
            handle::with(pool, Pool::last_message).unwrap_or_else(|failure| failure.message)
        };
        status::hand_out(&message)
    })
    .unwrap_or(c"a defect of the library".as_ptr())
}

/// Takes n_blocks blocks or none, and writes their addresses in the first buffer.
///
/// # Safety
///
/// blocks is NULL or has room for n_blocks pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_alloc_blocks(
    pool: *mut kvik_pool,
    n_blocks: usize,
    blocks: *mut *mut c_void,
) -> kvik_status {
    call(pool, |pool| {
        check_array("blocks", blocks, n_blocks)?;
        pool.alloc(n_blocks, |taken| {
            for (place, &block) in taken.iter().enumerate() {
                // Whatever was allocated has an address.
                let address = pool.address_of(block).unwrap_or(0);
                // SAFETY: the caller promised room for as many as were taken.
                unsafe { blocks.add(place).write(ptr::with_exposed_provenance_mut(address as usize)) };
            }
        })
    })
}

/// Takes n_blocks blocks or none, and writes their indices.
///
/// # Safety
///
/// blocks is NULL or has room for n_blocks numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_alloc_block_indices(
    pool: *mut kvik_pool,
    n_blocks: usize,
    blocks: *mut u32,
) -> kvik_status {
    call(pool, |pool| {
        check_array("blocks", blocks, n_blocks)?;
        pool.alloc(n_blocks, |taken| {
            for (place, block) in taken.iter().enumerate() {
                // SAFETY: the caller promised room for as many as were taken.
                unsafe { blocks.add(place).write(block.0) };
            }
        })
    })
}

/// Frees blocks by their addresses, all or none: one that is not allocated or is listed twice is an error
/// and frees nothing. A NULL among them is passed over.
///
/// # Safety
///
/// blocks is NULL or has n_blocks pointers. The blocks are no longer used, not even by the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_free_blocks(
    pool: *mut kvik_pool,
    blocks: *const *mut c_void,
    n_blocks: usize,
) -> kvik_status {
    // SAFETY: the caller promised the pointers; there is no event.
    unsafe { kvik_free_blocks_after(pool, blocks, n_blocks, ptr::null_mut()) }
}

/// Frees blocks by their indices, as kvik_free_blocks does.
///
/// # Safety
///
/// blocks is NULL or has n_blocks numbers. The blocks are no longer used, not even by the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_free_block_indices(
    pool: *mut kvik_pool,
    blocks: *const u32,
    n_blocks: usize,
) -> kvik_status {
    // SAFETY: the caller promised the numbers; there is no event.
    unsafe { kvik_free_block_indices_after(pool, blocks, n_blocks, ptr::null_mut()) }
}

/// Frees blocks when the device has passed event, a CUevent of its primary context. Until then they are in
/// limbo: not allocated, not available, still mapped. Blocks become free in the order of the calls. The event
/// may be recorded again or destroyed when this returns. NULL, and any event of the host, has passed.
///
/// # Safety
///
/// blocks is NULL or has n_blocks pointers; on CUDA event is NULL or a live event. The blocks are not used
/// after the event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_free_blocks_after(
    pool: *mut kvik_pool,
    blocks: *const *mut c_void,
    n_blocks: usize,
    event: *mut c_void,
) -> kvik_status {
    call(pool, |pool| {
        check_array("blocks", blocks, n_blocks)?;
        // SAFETY: the caller promised that many pointers.
        let blocks = (0..n_blocks).map(|place| unsafe { blocks.add(place).read() });
        let blocks = blocks.filter(|block| !block.is_null());
        let blocks = blocks.map(|block| pool.block_starting_at(block.addr()));
        // SAFETY: the caller promised that the event is alive.
        unsafe { pool.free_after(n_blocks, blocks, event) }
    })
}

/// Frees blocks by their indices, as kvik_free_blocks_after does.
///
/// # Safety
///
/// blocks is NULL or has n_blocks numbers; on CUDA event is NULL or a live event. The blocks are not used
/// after the event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_free_block_indices_after(
    pool: *mut kvik_pool,
    blocks: *const u32,
    n_blocks: usize,
    event: *mut c_void,
) -> kvik_status {
    call(pool, |pool| {
        check_array("blocks", blocks, n_blocks)?;
        // SAFETY: the caller promised that many numbers.
        let blocks = (0..n_blocks).map(|place| Ok(BlockId(unsafe { blocks.add(place).read() })));
        // SAFETY: the caller promised that the event is alive.
        unsafe { pool.free_after(n_blocks, blocks, event) }
    })
}

/// Returns the address of block 0 in the first buffer, which stays as long as the pool; NULL where the pool
/// has no blocks or is not a pool. Block i of buffer b is at base + b * buffer_stride_bytes + i * block_bytes.
#[unsafe(no_mangle)]
pub extern "C" fn kvik_base_address(pool: *mut kvik_pool) -> *mut c_void {
    let mut address = 0;
    call(pool, |pool| {
        address = pool.base_address();
        Ok(())
    });
    ptr::with_exposed_provenance_mut(address as usize)
}

/// Tells where a block starts in the first buffer, allocated or not.
///
/// # Safety
///
/// address is NULL or points to a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_block_address(
    pool: *mut kvik_pool,
    block: u32,
    address: *mut *mut c_void,
) -> kvik_status {
    call(pool, |pool| {
        check_array("address", address, 1)?;
        let start = pool.address_of(BlockId(block))?;
        // SAFETY: the caller promised room for one.
        unsafe { address.write(ptr::with_exposed_provenance_mut(start as usize)) };
        Ok(())
    })
}

/// Tells which block of the first buffer an address lies in, allocated or not.
///
/// # Safety
///
/// block is NULL or points to a writable number. address is not looked at.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_block_index(
    pool: *mut kvik_pool,
    address: *const c_void,
    block: *mut u32,
) -> kvik_status {
    call(pool, |pool| {
        check_array("block", block, 1)?;
        let index = pool.block_containing(address.addr())?.0;
        // SAFETY: the caller promised room for one.
        unsafe { block.write(index) };
        Ok(())
    })
}

/// Tells what the pool has. The caller sets stats->size to sizeof(kvik_stats); no more is written, and what the
/// library does not know is set to zero.
///
/// # Safety
///
/// stats is NULL or points to stats->size writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_get_stats(pool: *mut kvik_pool, stats: *mut kvik_stats) -> kvik_status {
    call(pool, |pool| {
        if stats.is_null() {
            return Err(Failure::null("stats"));
        }
        // SAFETY: not NULL, so there is at least the first word.
        let size = unsafe { stats.cast::<usize>().read_unaligned() };
        if size < kvik_stats::min_bytes() {
            return Err(Failure::invalid(format!(
                "`stats.size` is {size}; allowed: {} or more",
                kvik_stats::min_bytes()
            )));
        }
        let answer = kvik_stats { size, ..pool.stats() };
        let n_known_bytes = size.min(size_of::<kvik_stats>());
        // SAFETY: the caller promised `size` bytes, and the answer has at least as many as are copied of it.
        unsafe {
            ptr::write_bytes(stats.cast::<u8>(), 0, size);
            ptr::copy_nonoverlapping((&raw const answer).cast::<u8>(), stats.cast::<u8>(), n_known_bytes);
        }
        Ok(())
    })
}

/// Sets the limit of the pool's group, for all of its engines, from the next allocation on; what is held above
/// it is asked for. UINT64_MAX is all that the device has. A revision above 0 makes the call safe to repeat and
/// to reorder: KVIK_STALE if a newer one is in force. With 0 the call is the newest.
#[unsafe(no_mangle)]
pub extern "C" fn kvik_set_limit(pool: *mut kvik_pool, limit_bytes: u64, revision: u64) -> kvik_status {
    call(pool, |pool| {
        let limit_bytes = (limit_bytes != u64::MAX).then_some(limit_bytes);
        pool.set_limit(limit_bytes, (revision != 0).then_some(revision))
    })
}

/// Sets what is called when others are entitled to memory that blocks, allocations, chunks or admitted memory hold; NULL
/// removes it. When this returns the former callback does not run any more, unless it is the caller.
///
/// # Safety
///
/// Until it is replaced or the pool is closed, any thread may call callback with user_data.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_set_reclaim_callback(
    pool: *mut kvik_pool,
    callback: kvik_reclaim_callback,
    user_data: *mut c_void,
) -> kvik_status {
    call(pool, |pool| {
        // SAFETY: the caller promised that any thread may call it.
        unsafe { pool.reclaimer().set(callback, user_data) };
        Ok(())
    })
}

/// Gives back the memory of pages without blocks and allocations, and tells how many bytes; trimmed_bytes may be NULL.
///
/// # Safety
///
/// trimmed_bytes is NULL or points to a writable number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_trim(pool: *mut kvik_pool, trimmed_bytes: *mut u64) -> kvik_status {
    call(pool, |pool| {
        let n_bytes = pool.trim();
        if !trimmed_bytes.is_null() {
            // SAFETY: not NULL, so it can be written to.
            unsafe { trimmed_bytes.write_unaligned(n_bytes) };
        }
        Ok(())
    })
}

/// Creates n_chunks chunks of page_bytes physical memory or none, for an engine that maps them by itself. On
/// CUDA a chunk is a CUmemGenericAllocationHandle; on the host it is the descriptor of a memory file to be
/// mapped shared. Both belong to the pool.
///
/// # Safety
///
/// chunks is NULL or has room for n_chunks numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_acquire_chunks(
    pool: *mut kvik_pool,
    n_chunks: usize,
    chunks: *mut u64,
) -> kvik_status {
    call(pool, |pool| {
        check_array("chunks", chunks, n_chunks)?;
        let numbers = pool.acquire_chunks(n_chunks)?;
        // SAFETY: the caller promised room for as many as there are.
        unsafe { ptr::copy_nonoverlapping(numbers.as_ptr(), chunks, numbers.len()) };
        Ok(())
    })
}

/// Releases chunks, which the engine has unmapped. One that is not a chunk of this pool, or is listed twice, is an error and
/// releases nothing. Where the driver refuses one, those before it are released.
///
/// # Safety
///
/// chunks is NULL or has n_chunks numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_release_chunks(
    pool: *mut kvik_pool,
    chunks: *const u64,
    n_chunks: usize,
) -> kvik_status {
    call(pool, |pool| {
        check_array("chunks", chunks, n_chunks)?;
        if n_chunks == 0 {
            return Ok(());
        }
        // SAFETY: the caller promised that many numbers.
        pool.release_chunks(unsafe { slice::from_raw_parts(chunks, n_chunks) })
    })
}

/// Has n_bytes granted, or nothing, before the engine creates that much memory by itself. Rounded up to 2 MiB.
#[unsafe(no_mangle)]
pub extern "C" fn kvik_admit(pool: *mut kvik_pool, n_bytes: u64) -> kvik_status {
    call(pool, |pool| pool.admit(n_bytes))
}

/// Gives back what was admitted, after the engine released the memory. Rounded up to 2 MiB.
#[unsafe(no_mangle)]
pub extern "C" fn kvik_retire(pool: *mut kvik_pool, n_bytes: u64) -> kvik_status {
    call(pool, |pool| pool.retire(n_bytes))
}

/// Opens a pool that is `role` among ranks, and writes its handle, or NULL where it fails.
///
/// # Safety
///
/// As [`kvik_open`].
pub(crate) unsafe fn open_pool(
    config: *const kvik_config,
    role: Role,
    pool: *mut *mut kvik_pool,
) -> Result<(), Failure> {
    if pool.is_null() {
        return Err(Failure::null("pool"));
    }
    // SAFETY: not NULL, so it can be written to.
    unsafe { pool.write(ptr::null_mut()) };
    // SAFETY: the caller promised a whole structure.
    let config = unsafe { kvik_config::read(config) }?;
    // SAFETY: the caller promised C strings.
    let names = unsafe {
        Names {
            ipc_name: text_of("config.ipc_name", config.ipc_name)?,
            directory: text_of("config.directory", config.directory)?,
            label: text_of("config.label", config.label)?,
        }
    };
    let handle = handle::insert(Pool::open_as(role, &config, names, &memory_config()?)?)?;
    // SAFETY: as above.
    unsafe { pool.write(handle) };
    Ok(())
}
