//! The types of `bindings/c/include/kvik_tier.h`, field for field.

use std::ffi::{c_char, c_void};

use crate::key::ChunkKey;

/// The version of the interface.
pub(super) const ABI_VERSION: u32 = 1;

/// The name of the function that each library has.
pub(super) const OPEN_NAME: &std::ffi::CStr = c"kvik_tier_open";

pub(super) const PENDING: i32 = 0;
pub(super) const STORED: i32 = 1;
pub(super) const PRESENT: i32 = 2;
pub(super) const NO_ROOM: i32 = 3;
pub(super) const HIT: i32 = 4;
pub(super) const MISS: i32 = 5;
pub(super) const FAILED: i32 = 6;
pub(super) const REFUSED: i32 = 7;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct RawKey {
    namespace_id: [u8; 16],
    chunk: [u8; 16],
    rank: u16,
    reserved: [u8; 6],
}

#[repr(C)]
pub(super) struct RawPart {
    pub(super) bytes: *const u8,
    pub(super) n_bytes: usize,
}

#[repr(C)]
pub(super) struct RawPut {
    pub(super) key: RawKey,
    pub(super) parts: *const RawPart,
    pub(super) n_parts: usize,
    pub(super) n_bytes: usize,
    pub(super) outcome: i32,
}

#[repr(C)]
pub(super) struct RawGet {
    pub(super) key: RawKey,
    pub(super) offset: u64,
    pub(super) buffer: *mut u8,
    pub(super) n_wanted: usize,
    pub(super) n_read: usize,
    pub(super) chunk_bytes: u64,
    pub(super) outcome: i32,
}

/// A table of functions as a library gives it: anything may be missing.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct RawFunctions {
    pub(super) abi_version: u32,
    pub(super) struct_bytes: u32,
    pub(super) put: Option<PutFunction>,
    pub(super) get: Option<GetFunction>,
    pub(super) contains: Option<ContainsFunction>,
    pub(super) remove: Option<RemoveFunction>,
    pub(super) flush: Option<FlushFunction>,
    pub(super) close: Option<CloseFunction>,
}

#[repr(C)]
pub(super) struct RawTier {
    pub(super) functions: *const RawFunctions,
    pub(super) state: *mut c_void,
}

pub(super) type OpenFunction =
    unsafe extern "C" fn(u32, *const c_char, *mut RawTier, *mut c_char, usize) -> i32;
pub(super) type PutFunction = unsafe extern "C" fn(*mut c_void, *mut RawPut, usize);
pub(super) type GetFunction = unsafe extern "C" fn(*mut c_void, *mut RawGet, usize);
pub(super) type ContainsFunction = unsafe extern "C" fn(*mut c_void, *const RawKey, usize, *mut u8) -> i32;
pub(super) type RemoveFunction = unsafe extern "C" fn(*mut c_void, *const RawKey, usize) -> i64;
pub(super) type FlushFunction = unsafe extern "C" fn(*mut c_void) -> i32;
pub(super) type CloseFunction = unsafe extern "C" fn(*mut c_void);

impl From<&ChunkKey> for RawKey {
    fn from(key: &ChunkKey) -> Self {
        Self { namespace_id: key.namespace.0.0, chunk: key.chunk.0, rank: key.rank, reserved: [0; 6] }
    }
}
