//! The memory of one layer: the process's own, or pages of a pool that come and go.

use std::ops::Deref;
use std::sync::Arc;

use kvik_memory::geometry::PageId;
use kvik_memory::pages::PageMapper as _;
use kvik_memory::pool::KvPool;
use kvik_memory::region::Guard;

/// Elements of one layer, for all blocks that there can be.
///
/// Elements are written in parts, through [`LayerStorage::slice_mut`], while others are read.
#[derive(Debug)]
pub(crate) struct LayerStorage<T> {
    start: *mut T,
    len: usize,
    owner: Owner,
}

/// Whose memory it is.
#[derive(Debug)]
enum Owner {
    /// The storage's own, a boxed slice.
    Storage,
    /// A buffer of the pool's region: there where the pool has handed out a block; elsewhere it reads zeros and
    /// must not be written. The pool keeps the addresses reserved.
    Pool { _pool: Arc<KvPool> },
}

// SAFETY: the pointer stands for a buffer that this value alone reads and writes: its own, or by the promise
// of `LayerStorage::mapped`.
unsafe impl<T: Send> Send for LayerStorage<T> {}
// SAFETY: a shared reference reads; a writer through one promises that no other touches those elements.
unsafe impl<T: Send + Sync> Sync for LayerStorage<T> {}

impl<T: Copy> LayerStorage<T> {
    /// `len` elements of `value`; `None` if they do not fit into memory.
    pub(crate) fn owned(len: usize, value: T) -> Option<Self> {
        let mut elements = Vec::new();
        elements.try_reserve_exact(len).ok()?;
        elements.resize(len, value);
        let start = Box::into_raw(elements.into_boxed_slice()).cast::<T>();
        Some(Self { start, len, owner: Owner::Storage })
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
        Some(Self { start, len, owner: Owner::Pool { _pool: Arc::clone(pool) } })
    }
}

impl<T> LayerStorage<T> {
    /// The elements `start..start + len`.
    ///
    /// # Panics
    /// If the range is not inside.
    pub(crate) fn slice(&self, start: usize, len: usize) -> &[T] {
        assert!(start <= self.len && len <= self.len - start, "range outside of the layer");
        // SAFETY: the range is inside of the buffer, which stays while `self` does. All of it can be read:
        // blocks that were handed out are mapped, the guard lies behind the rest. Pages come and go only under
        // blocks without holders, which are not read. A writer promises that these are not read.
        unsafe { std::slice::from_raw_parts(self.start.add(start), len) }
    }

    /// The elements `start..start + len`, to be written.
    ///
    /// # Safety
    /// While the result lives, nothing else touches any of these elements: no other result of this method or of
    /// [`Self::slice`], and no reference to the whole. They belong to a block that the pool has handed out.
    ///
    /// # Panics
    /// If the range is not inside.
    #[expect(clippy::mut_from_ref, reason = "that is the purpose; the caller promises disjointness")]
    pub(crate) unsafe fn slice_mut(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "range outside of the layer");
        // SAFETY: as in `slice`; the caller promises that nothing else touches the range and that it is mapped.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}

impl<T> Deref for LayerStorage<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.slice(0, self.len)
    }
}

impl<T> Drop for LayerStorage<T> {
    fn drop(&mut self) {
        if let Owner::Storage = self.owner {
            let elements = std::ptr::slice_from_raw_parts_mut(self.start, self.len);
            // SAFETY: it came out of a box of this length, and nothing refers to it any more.
            drop(unsafe { Box::from_raw(elements) });
        }
    }
}
