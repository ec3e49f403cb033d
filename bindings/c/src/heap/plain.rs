//! Allocations of the device's own allocator, while the elastic ones are bypassed.

use std::collections::HashMap;

use kvik_memory::pages::Shortage;
use parking_lot::Mutex;

use super::space::{QUANTUM_BYTES, Request};
use crate::backend::Backend;
use crate::status::Failure;

/// What came from the device's own allocator, by the address that the engine has.
#[derive(Debug, Default)]
pub(super) struct PlainAllocations {
    by_address: Mutex<HashMap<u64, Plain>>,
}

#[derive(Debug, Clone, Copy)]
struct Plain {
    n_bytes: u64,
    /// What the allocator gave, which lies at the engine's address or before it.
    start: u64,
}

impl PlainAllocations {
    /// Takes memory; the address is aligned as asked.
    pub(super) fn allocate(&self, backend: &Backend, request: Request) -> Result<u64, Failure> {
        let no_memory = || Failure::shortage(Shortage::DeviceFull);
        // The allocator aligns to the quantum by itself.
        let padding_bytes = request.alignment.saturating_sub(QUANTUM_BYTES);
        let padded_bytes = request.n_bytes.checked_add(padding_bytes).ok_or_else(no_memory)?;
        let start = backend.allocate_plain(padded_bytes)?.ok_or_else(no_memory)?;
        let address = start.next_multiple_of(request.alignment);
        self.by_address.lock().insert(address, Plain { n_bytes: request.n_bytes, start });
        Ok(address)
    }

    /// Frees what starts at `address`; `false` where nothing does.
    pub(super) fn free(&self, backend: &Backend, address: u64) -> Result<bool, Failure> {
        // Taken out first: of two threads that free one address, one does.
        let Some(plain) = self.by_address.lock().remove(&address) else { return Ok(false) };
        // SAFETY: the allocator gave it, and it was in the table once.
        unsafe { backend.free_plain(plain.start) }?;
        Ok(true)
    }

    /// Frees everything.
    pub(super) fn free_all(&self, backend: &Backend) {
        for plain in std::mem::take(&mut *self.by_address.lock()).into_values() {
            // SAFETY: as above; the pool is about to go, and the engine is done with its memory.
            if let Err(error) = unsafe { backend.free_plain(plain.start) } {
                tracing::warn!(%error, "could not free an allocation on close");
            }
        }
    }

    /// Bytes that were asked for, and in how many allocations.
    pub(super) fn allocated(&self) -> (u64, u64) {
        let by_address = self.by_address.lock();
        (by_address.values().map(|plain| plain.n_bytes).sum(), by_address.len() as u64)
    }
}
