//! Buffers that the threads of one parallel section write together.

use std::marker::PhantomData;

use super::threads::ThreadPool;

/// A value that starts on a cache line, so that a vector load touches one line.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C, align(64))]
pub(crate) struct Aligned<T>(pub(crate) T);

/// A mutable slice that several threads may write at disjoint places.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedSlice<'a, T> {
    start: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer stands for an exclusive borrow of a slice of `T`; each access
// through it promises disjointness.
unsafe impl<T: Send> Send for SharedSlice<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), owner: PhantomData }
    }

    /// The elements `start..start + len`.
    ///
    /// # Safety
    /// While the result lives, no other thread and no other result of this method touches any
    /// of these elements.
    ///
    /// # Panics
    /// If the range is not inside the slice.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "that is the purpose; the caller promises disjointness")]
    pub(crate) unsafe fn slice_mut(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "range outside of the shared slice");
        // SAFETY: the range is inside the slice; the caller promises that no other thread or result touches it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}

/// Calls `work` with the index and the elements of each `chunk_len` elements of `slice`, on any
/// thread of `pool`.
///
/// # Panics
/// If `chunk_len` is zero, or `work` panics.
pub(crate) fn for_each_chunk_mut<T: Send>(
    pool: &mut ThreadPool,
    slice: &mut [T],
    chunk_len: usize,
    work: impl Fn(usize, &mut [T]) + Sync,
) {
    let len = slice.len();
    let shared = SharedSlice::new(slice);
    pool.run(len.div_ceil(chunk_len), &|chunk_idx| {
        let start = chunk_idx * chunk_len;
        // SAFETY: each chunk index is handed out once and the chunks do not overlap.
        let chunk = unsafe { shared.slice_mut(start, chunk_len.min(len - start)) };
        work(chunk_idx, chunk);
    });
}
