//! A library in this process, and calls to its functions: the only unsafe code of plugins.
//!
//! What a call writes into memory that it was not given cannot be found out; everything else that it says is a number
//! for the caller to judge, and none of them is used as a length or a place here.

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr;

use super::abi::{
    ABI_VERSION, CloseFunction, ContainsFunction, FlushFunction, GetFunction, OPEN_NAME, OpenFunction,
    PENDING, PutFunction, RawFunctions, RawGet, RawKey, RawPart, RawPut, RawTier, RemoveFunction,
};
use crate::error::{Result, TierError};
use crate::key::ChunkKey;
use crate::tier::PutItem;

/// The longest reason of a library that does not open.
const MESSAGE_BYTES: usize = 512;

/// A tier of a library. Dropping it closes the tier; the library stays loaded, because code of it may still run.
#[derive(Debug)]
pub(super) struct Library {
    state: *mut c_void,
    put: PutFunction,
    get: GetFunction,
    contains: ContainsFunction,
    remove: RemoveFunction,
    flush: Option<FlushFunction>,
    close: CloseFunction,
}

/// Bytes of a chunk that are wanted.
#[derive(Debug)]
pub(super) struct WantedBytes<'a> {
    pub(super) key: ChunkKey,
    pub(super) offset: u64,
    pub(super) buffer: &'a mut [u8],
}

/// What a library says of bytes that were wanted.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadAnswer {
    pub(super) outcome: i32,
    pub(super) n_read: usize,
    pub(super) chunk_bytes: u64,
}

// SAFETY: the interface demands that its functions can be called from any thread; the state is theirs alone.
unsafe impl Send for Library {}
// SAFETY: as above, and at the same time.
unsafe impl Sync for Library {}

impl Library {
    /// Loads a library and opens its tier.
    ///
    /// # Errors
    /// If it cannot be loaded, is none of a tier, has another version, or refuses.
    pub(super) fn open(path: &Path, options: &str) -> Result<Self> {
        let refused = |reason: &dyn std::fmt::Display| {
            TierError::remote(format!("open the plugin {}", path.display()), reason, false)
        };
        let (Ok(name), Ok(options)) = (CString::new(path.as_os_str().as_bytes()), CString::new(options))
        else {
            return Err(refused(&"a NUL in the path or the options"));
        };
        // SAFETY: the name ends with a NUL. Loading runs code of the library, for which the operator that configures it vouches.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(refused(&loader_message()));
        }
        // SAFETY: the handle is that of a loaded library, which is never unloaded, and the name ends with a NUL.
        let symbol = unsafe { libc::dlsym(handle, OPEN_NAME.as_ptr()) };
        if symbol.is_null() {
            return Err(refused(&"it has no function kvik_tier_open"));
        }
        // SAFETY: the interface says of which type the function of that name is, and it is not null.
        let open = unsafe { std::mem::transmute::<*mut c_void, OpenFunction>(symbol) };
        let mut tier = RawTier { functions: ptr::null(), state: ptr::null_mut() };
        let mut message: [c_char; MESSAGE_BYTES] = [0; MESSAGE_BYTES];
        // SAFETY: all pointers are valid for the call, and the length is that of the message.
        let status = unsafe {
            open(ABI_VERSION, options.as_ptr(), &raw mut tier, message.as_mut_ptr(), MESSAGE_BYTES)
        };
        if status != 0 {
            return Err(refused(&message_text(&message)));
        }
        if tier.functions.is_null() || !tier.functions.is_aligned() {
            return Err(refused(&"it gives no table of functions"));
        }
        // SAFETY: a table begins with two numbers in every version, and it is not null and aligned.
        let (abi_version, struct_bytes) = unsafe {
            (
                (&raw const (*tier.functions).abi_version).read(),
                (&raw const (*tier.functions).struct_bytes).read(),
            )
        };
        if abi_version != ABI_VERSION || (struct_bytes as usize) < size_of::<RawFunctions>() {
            let reason =
                format!("its table has version {abi_version} and {struct_bytes} bytes; allowed: version 1");
            return Err(refused(&reason));
        }
        // SAFETY: a table of this version and length has all these fields.
        let functions = unsafe { tier.functions.read() };
        let RawFunctions { put, get, contains, remove, flush, close, .. } = functions;
        let (Some(put), Some(get), Some(contains), Some(remove), Some(close)) =
            (put, get, contains, remove, close)
        else {
            return Err(refused(&"its table lacks put, get, contains, remove or close"));
        };
        Ok(Self { state: tier.state, put, get, contains, remove, flush, close })
    }

    /// Stores chunks; the numbers that the library gives for them.
    pub(super) fn put(&self, batch: &[PutItem<'_>]) -> Vec<i32> {
        let part = |part: &&[u8]| RawPart { bytes: part.as_ptr(), n_bytes: part.len() };
        let parts: Vec<Vec<RawPart>> =
            batch.iter().map(|item| item.parts.iter().map(part).collect()).collect();
        let mut items: Vec<RawPut> = batch
            .iter()
            .zip(&parts)
            .map(|(item, parts)| RawPut {
                key: RawKey::from(&item.key),
                parts: parts.as_ptr(),
                n_parts: parts.len(),
                n_bytes: item.n_bytes(),
                outcome: PENDING,
            })
            .collect();
        // SAFETY: items and parts live through the call and have the lengths that are said.
        unsafe { (self.put)(self.state, items.as_mut_ptr(), items.len()) };
        items.iter().map(|item| item.outcome).collect()
    }

    /// Reads bytes of chunks; what the library says of them.
    pub(super) fn get(&self, wanted: &mut [WantedBytes<'_>]) -> Vec<ReadAnswer> {
        let mut items: Vec<RawGet> = wanted
            .iter_mut()
            .map(|wanted| RawGet {
                key: RawKey::from(&wanted.key),
                offset: wanted.offset,
                buffer: wanted.buffer.as_mut_ptr(),
                n_wanted: wanted.buffer.len(),
                n_read: 0,
                chunk_bytes: 0,
                outcome: PENDING,
            })
            .collect();
        // SAFETY: items and buffers live through the call, have the lengths that are said, and no two buffers overlap.
        unsafe { (self.get)(self.state, items.as_mut_ptr(), items.len()) };
        let answer = |item: &RawGet| {
            let RawGet { outcome, n_read, chunk_bytes, .. } = *item;
            ReadAnswer { outcome, n_read, chunk_bytes }
        };
        items.iter().map(answer).collect()
    }

    /// Asks which keys are there; the status, and a number for each.
    pub(super) fn contains(&self, keys: &[ChunkKey]) -> (i32, Vec<u8>) {
        let keys: Vec<RawKey> = keys.iter().map(RawKey::from).collect();
        let mut present = vec![0; keys.len()];
        // SAFETY: both live through the call and have the length that is said.
        let status = unsafe { (self.contains)(self.state, keys.as_ptr(), keys.len(), present.as_mut_ptr()) };
        (status, present)
    }

    /// Removes keys; the number that the library gives.
    pub(super) fn remove(&self, keys: &[ChunkKey]) -> i64 {
        let keys: Vec<RawKey> = keys.iter().map(RawKey::from).collect();
        // SAFETY: the keys live through the call and have the length that is said.
        unsafe { (self.remove)(self.state, keys.as_ptr(), keys.len()) }
    }

    /// Makes durable what was stored; the status.
    pub(super) fn flush(&self) -> i32 {
        // SAFETY: the state is that of an open tier.
        self.flush.map_or(0, |flush| unsafe { flush(self.state) })
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: no other call runs, because this is the only reference, and none follows.
        unsafe { (self.close)(self.state) };
    }
}

/// Why the loader has failed.
fn loader_message() -> String {
    // SAFETY: it returns null or a text with a NUL at its end, which stays until this thread's next call of the loader.
    let message = unsafe {
        let message = libc::dlerror();
        if message.is_null() { None } else { Some(CStr::from_ptr(message)) }
    };
    message.map_or_else(|| "the loader says nothing".to_owned(), |text| text.to_string_lossy().into_owned())
}

/// The text of a message, up to its NUL or its end.
fn message_text(message: &[c_char]) -> String {
    let bytes: Vec<u8> = message.iter().map(|letter| *letter as u8).take_while(|byte| *byte != 0).collect();
    match String::from_utf8_lossy(&bytes).into_owned() {
        text if text.is_empty() => "it says no reason".to_owned(),
        text => text,
    }
}
