//! The functions of `include/kvik.h` about a pool that is spread over the processes of several ranks.

use std::ffi::c_char;
use std::path::PathBuf;
use std::time::Duration;

use crate::abi::open_pool;
use crate::boundary::{answer, check_array};
use crate::config::{kvik_config, text_of};
use crate::handle::kvik_pool;
use crate::rank_region::Role;
use crate::status::{Failure, kvik_status};

/// More ranks than any group of processes has.
const MAX_RANKS: usize = 4096;

/// Opens a pool whose blocks have memory on several ranks: on this process' device, which is rank 0, and on those of the
/// ranks 1, 2 and so on, which kvik_open_rank serves at these sockets. It waits up to timeout_ms for them to start, and
/// as long for each change; 0 is 60 s. A block is allocated on all ranks or on none; kvik_block_address and
/// kvik_block_pointers of a rank's pool tell where it lies there. All ranks have the same configuration but for device,
/// ipc_name, directory, label and limits. A rank that ends takes the pool with it: open all of them again.
///
/// # Safety
///
/// As kvik_open; sockets is NULL or has n_sockets C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_open_leader(
    config: *const kvik_config,
    sockets: *const *const c_char,
    n_sockets: usize,
    timeout_ms: u32,
    pool: *mut *mut kvik_pool,
) -> kvik_status {
    answer(|| {
        check_array("sockets", sockets, n_sockets)?;
        if n_sockets == 0 || n_sockets >= MAX_RANKS {
            return Err(Failure::invalid(format!(
                "`n_sockets` is {n_sockets}; allowed: 1 to {}",
                MAX_RANKS - 1
            )));
        }
        let mut paths = Vec::with_capacity(n_sockets);
        for place in 0..n_sockets {
            // SAFETY: the caller promised that many C strings.
            paths.push(unsafe { path_of("sockets", sockets.add(place).read()) }?);
        }
        let timeout_ms = if timeout_ms == 0 { 60_000 } else { timeout_ms };
        let role = Role::Leader { sockets: paths, timeout: Duration::from_millis(timeout_ms.into()) };
        // SAFETY: the caller promised a whole configuration and room for the handle.
        unsafe { open_pool(config, role, pool) }
    })
}

/// Opens this process' part of a pool that a leader opens (kvik_open_leader), and serves it at socket: rank is 1 or more
/// and below n_ranks. The socket lies in a folder that only this user can enter. The leader maps and unmaps; blocks are
/// not allocated here. What is mapped is granted by the ledger of this device: where it does not, the leader's allocation
/// answers KVIK_NO_MEMORY. Everything else of the pool works as ever, the callback for memory that others need included.
///
/// # Safety
///
/// As kvik_open; socket is NULL or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvik_open_rank(
    config: *const kvik_config,
    rank: u32,
    n_ranks: u32,
    socket: *const c_char,
    pool: *mut *mut kvik_pool,
) -> kvik_status {
    answer(|| {
        if rank == 0 || rank >= n_ranks || n_ranks as usize > MAX_RANKS {
            return Err(Failure::invalid(format!(
                "`rank` is {rank} of `n_ranks` {n_ranks}; allowed: 1 or more, below n_ranks, which is up to {MAX_RANKS}"
            )));
        }
        // SAFETY: the caller promised a C string.
        let role = Role::Rank { rank, n_ranks, socket: unsafe { path_of("socket", socket) }? };
        // SAFETY: the caller promised a whole configuration and room for the handle.
        unsafe { open_pool(config, role, pool) }
    })
}

/// # Safety
///
/// `text` is NULL or a C string that lives during the call.
unsafe fn path_of(argument: &'static str, text: *const c_char) -> Result<PathBuf, Failure> {
    // SAFETY: the caller promised it.
    let text = unsafe { text_of(argument, text) }?;
    text.map(PathBuf::from).ok_or_else(|| Failure::null(argument))
}
