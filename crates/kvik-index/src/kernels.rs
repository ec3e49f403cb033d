//! What the processor can do and the language has no safe word for.

#![expect(unsafe_code, reason = "the hint to the cache is an intrinsic")]

/// Asks the cache for the line of a value that will be read soon. Does nothing where there is no such hint.
#[inline]
pub(crate) fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is of the processor's base set, changes nothing that a program can see and
    // faults for no address; this one is even that of a value.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}
