//! The memory of one layer: the process's own, or pages of a pool that come and go.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use kvik_memory::geometry::PageId;
use kvik_memory::pages::PageMapper as _;
use kvik_memory::pool::KvPool;
use kvik_memory::region::Guard;

/// Elements of one layer, for all blocks that there can be.
#[derive(Debug)]
pub(crate) enum LayerStorage<T> {
    /// Always there.
    Owned(Vec<T>),
    /// There where the pool has handed out a block; elsewhere it reads zeros and must not be written.
    Mapped(MappedLayer<T>),
}

/// One buffer of a pool's region.
#[derive(Debug)]
pub(crate) struct MappedLayer<T> {
    start: *mut T,
    len: usize,
    /// Keeps the addresses reserved.
    _pool: Arc<KvPool>,
    elements: PhantomData<T>,
}

// SAFETY: the pointer stands for a buffer that this value alone reads and writes, by the promise of
// `LayerStorage::mapped`.
unsafe impl<T: Send> Send for MappedLayer<T> {}
// SAFETY: as above; a shared reference only reads.
unsafe impl<T: Sync> Sync for MappedLayer<T> {}

impl<T: Copy> LayerStorage<T> {
    /// `len` elements of `value`; `None` if they do not fit into memory.
    pub(crate) fn owned(len: usize, value: T) -> Option<Self> {
        let mut elements = Vec::new();
        elements.try_reserve_exact(len).ok()?;
        elements.resize(len, value);
        Some(Self::Owned(elements))
    }

    /// Buffer `buffer` of `pool`, of which this must be the only user; `None` if it is shorter than `len`
    /// elements, not aligned for them, not in this process's memory, or without a guard that can be read.
    ///
    /// `T` must be valid for any bytes, as numbers are.
    pub(crate) fn mapped(pool: &Arc<KvPool>, buffer: usize, len: usize) -> Option<Self> {
        let region = pool.region()?;
        let n_bytes = u64::try_from(len.checked_mul(size_of::<T>())?).ok()?;
        // Only memory of this process has zeros behind what is not mapped without a mapping of their own.
        let is_readable = region.vmm().has_zeros_backdrop() && region.guard() == Guard::Zero;
        if !is_readable || region.geometry().buffer_stride_bytes() < n_bytes {
            return None;
        }
        let address = region.address_of(u32::try_from(buffer).ok()?, PageId(0))?;
        let start = usize::try_from(address).ok()? as *mut T;
        if !start.is_aligned() {
            return None;
        }
        Some(Self::Mapped(MappedLayer { start, len, _pool: Arc::clone(pool), elements: PhantomData }))
    }
}

impl<T> Deref for LayerStorage<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Owned(elements) => elements,
            // SAFETY: the buffer has `len` elements and stays reserved while the pool lives. All of it can
            // be read: blocks that were handed out are mapped, the guard lies behind the rest. Pages come
            // and go only under blocks that nobody holds, which nobody reads.
            Self::Mapped(layer) => unsafe { std::slice::from_raw_parts(layer.start, layer.len) },
        }
    }
}

impl<T> DerefMut for LayerStorage<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Owned(elements) => elements,
            // SAFETY: as in `deref`; this is the only user of the buffer, and the engine writes only to
            // blocks that it holds, which are mapped.
            Self::Mapped(layer) => unsafe { std::slice::from_raw_parts_mut(layer.start, layer.len) },
        }
    }
}
