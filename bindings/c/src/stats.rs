//! What a pool has: `kvik_stats`.

use std::mem::offset_of;

/// What a pool has at one moment. Bytes are physical: a page costs page_bytes in every buffer.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kvik_stats {
    /// sizeof(kvik_stats), set by the caller; no more is written.
    pub size: usize,
    /// Bytes of a block in one buffer.
    pub block_bytes: u64,
    /// Bytes of a page in one buffer.
    pub page_bytes: u64,
    /// Bytes from one buffer to the next.
    pub buffer_stride_bytes: u64,
    /// Block indices are below this; not every one can be allocated.
    pub n_blocks: u64,
    /// Blocks that are allocated, the null block included.
    pub n_used_blocks: u64,
    /// Blocks that wait for their event.
    pub n_limbo_blocks: u64,
    /// The most blocks that one call would get now.
    pub n_available_blocks: u64,
    /// Pages with blocks.
    pub n_used_pages: u64,
    /// Pages that are mapped and free.
    pub n_parked_pages: u64,
    /// Pages that could not be unmapped and are never used again.
    pub n_quarantined_pages: u64,
    /// What is held in all: pages, chunks, what was admitted, heap_bytes, and on a rank what its leader mapped.
    pub held_bytes: u64,
    /// What chunks take.
    pub chunk_bytes: u64,
    /// What was admitted.
    pub admitted_bytes: u64,
    /// How much may be held in all now, by the limit and by what others hold. Less than held_bytes means
    /// that the limit fell below it.
    pub claimable_bytes: u64,
    /// How much may be held if others gave back all they can: the limit of the group, or the device.
    pub limit_bytes: u64,
    /// Calls to map so far.
    pub n_map_calls: u64,
    /// Calls to unmap so far.
    pub n_unmap_calls: u64,
    /// What the pages of kvik_alloc take, allocated or idle.
    pub heap_bytes: u64,
    /// What kvik_alloc was asked for and kvik_free did not get back, as far as it is on pages.
    pub allocated_bytes: u64,
    /// The same for what came from the device's own allocator while the elastic one was bypassed.
    pub bypassed_bytes: u64,
    /// Allocations of both kinds.
    pub n_allocations: u64,
}

impl kvik_stats {
    /// The bytes of the first version of the structure, which callers may have.
    pub(crate) const fn min_bytes() -> usize {
        offset_of!(Self, heap_bytes)
    }
}
