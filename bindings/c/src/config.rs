//! How a pool is opened: `kvik_config`.

use std::ffi::{CStr, c_char};
use std::ptr;

use crate::sized::read_sized;
use crate::status::Failure;

/// The device of a pool in the memory of the host.
pub const KVIK_DEVICE_HOST: i32 = -1;

/// Block 0 is taken for good, for engines that write unused values there.
pub const KVIK_FLAG_NULL_BLOCK: u32 = 1;

/// No pages are mapped ahead of need.
pub const KVIK_FLAG_NO_PREALLOCATION: u32 = 2;

const KNOWN_FLAGS: u32 = KVIK_FLAG_NULL_BLOCK | KVIK_FLAG_NO_PREALLOCATION;

/// How a pool is opened. kvik_config_init fills in the defaults; strings are copied by kvik_open.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvik_config {
    /// sizeof(kvik_config) of the caller; kvik_config_init sets it.
    pub size: usize,
    /// The index of the CUDA device, or KVIK_DEVICE_HOST, the default.
    pub device: i32,
    /// Any of KVIK_FLAG_..., default 0.
    pub flags: u32,
    /// The group: engines with one name share one limit. NULL, the default, is KVIK_MEMORY_IPC_NAME, then
    /// KVCACHED_IPC_NAME, then a name of the process group.
    pub ipc_name: *const c_char,
    /// Where the files of the ledger are. NULL, the default, is KVIK_MEMORY_DIR, then /dev/shm.
    pub directory: *const c_char,
    /// What tools call this engine. NULL, the default, is "proc".
    pub label: *const c_char,
    /// Bytes of one block in one buffer. A block never straddles two pages.
    pub block_bytes: u64,
    /// How many blocks the pool has addresses for. With 0, the default, it has none: such a pool is for
    /// kvik_alloc, kvik_acquire_chunks and kvik_admit.
    pub n_blocks: u64,
    /// Bytes of a page in one buffer, a multiple of 2 MiB. 0, the default, is KVIK_MEMORY_PAGE_SIZE_MB, then
    /// KVCACHED_PAGE_SIZE_MB, then 2 MiB, and more where a block needs more.
    pub page_bytes: u64,
    /// How many buffers there are; a block has its bytes in each. Default 1.
    pub n_buffers: u32,
    /// The weight of the group when memory is scarce, 1 or more; default 1.
    pub weight: u32,
    /// Higher is served first among waiting claims; default 0.
    pub priority: u32,
    /// Zero.
    pub reserved: u32,
    /// What the group gets before weights count; default 0.
    pub min_bytes: u64,
    /// The limit of the group. UINT64_MAX, the default, is all that the device has. This one, min_bytes,
    /// weight and priority count only for the first member of the group: what a member or an operator set
    /// before holds.
    pub max_bytes: u64,
    /// What all engines on the host may hold together, for KVIK_DEVICE_HOST. 0, the default, leaves it as it
    /// is, or sets a part of the memory that this process may use if it is not set.
    pub host_bytes: u64,
}

impl kvik_config {
    /// The defaults.
    pub(crate) fn new() -> Self {
        Self {
            size: size_of::<Self>(),
            device: KVIK_DEVICE_HOST,
            flags: 0,
            ipc_name: ptr::null(),
            directory: ptr::null(),
            label: ptr::null(),
            block_bytes: 0,
            n_blocks: 0,
            page_bytes: 0,
            n_buffers: 1,
            weight: 1,
            priority: 0,
            reserved: 0,
            min_bytes: 0,
            max_bytes: u64::MAX,
            host_bytes: 0,
        }
    }

    /// Copies what the caller has, whose structure may be of a newer library.
    ///
    /// # Safety
    ///
    /// `config` is NULL or points to as many readable bytes as its first word says.
    pub(crate) unsafe fn read(config: *const Self) -> Result<Self, Failure> {
        // SAFETY: the caller promised the bytes; the structure begins with its size, and its fields can have any bits.
        let config = unsafe { read_sized("config", config) }?;
        if config.flags & !KNOWN_FLAGS != 0 || config.reserved != 0 {
            return Err(Failure::invalid(format!(
                "`config.flags` is {:#x} and `config.reserved` {}; allowed: flags {KNOWN_FLAGS:#x}, reserved 0",
                config.flags, config.reserved
            )));
        }
        Ok(config)
    }

    pub(crate) fn has_flag(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

/// The text behind a string of the caller's; nothing where it is NULL.
///
/// # Safety
///
/// `text` is NULL or a C string that lives during the call.
pub(crate) unsafe fn text_of(field: &'static str, text: *const c_char) -> Result<Option<String>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL, so the caller promised a C string.
    let text = unsafe { CStr::from_ptr(text) };
    match text.to_str() {
        Ok(text) => Ok(Some(text.to_owned())),
        Err(_) => Err(Failure::invalid(format!("`{field}` is not UTF-8"))),
    }
}
