//! Intrinsics of the processor, and zeroed memory.

#![expect(unsafe_code, reason = "intrinsics of the processor and memory that is zero already")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Eight numbers that one miss of the cache brings.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Line(pub(crate) [AtomicU64; 8]);

/// So many lines of zeros, in untouched pages where the allocator has some.
pub(crate) fn zeroed_lines(n_lines: usize) -> Arc<[Line]> {
    // SAFETY: all bits zero is a value of an atomic number, and a line has nothing else.
    unsafe { Arc::new_zeroed_slice(n_lines).assume_init() }
}

/// So many zeros, as [`zeroed_lines`].
pub(crate) fn zeroed_words(n_words: usize) -> Box<[AtomicU64]> {
    // SAFETY: all bits zero is a value of an atomic number.
    unsafe { Box::new_zeroed_slice(n_words).assume_init() }
}

/// So many zeros of half the size, as [`zeroed_lines`].
pub(crate) fn zeroed_half_words(n_half_words: usize) -> Box<[AtomicU32]> {
    // SAFETY: all bits zero is a value of an atomic number.
    unsafe { Box::new_zeroed_slice(n_half_words).assume_init() }
}

/// A bit for each of the words whose upper half is `upper`, and a bit for each whose lower half is zero.
#[inline]
pub(crate) fn halves_masks(words: &[u64; 8], upper: u32) -> (u32, u32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE2 is in the processor's base set.
    unsafe {
        halves_masks_sse2(words, upper)
    }
    #[cfg(not(target_arch = "x86_64"))]
    halves_masks_plain(words, upper)
}

#[cfg(any(test, not(target_arch = "x86_64")))]
fn halves_masks_plain(words: &[u64; 8], upper: u32) -> (u32, u32) {
    (0..).zip(words).fold((0, 0), |(equal, zero), (lane, word)| {
        let is_equal = (word >> 32) as u32 == upper;
        (equal | u32::from(is_equal) << lane, zero | u32::from(*word as u32 == 0) << lane)
    })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse2")]
#[inline]
fn halves_masks_sse2(words: &[u64; 8], upper: u32) -> (u32, u32) {
    use std::arch::x86_64::{
        _mm_castps_si128, _mm_castsi128_ps, _mm_cmpeq_epi32, _mm_movemask_epi8, _mm_packs_epi16,
        _mm_packs_epi32, _mm_set_epi64x, _mm_set1_epi32, _mm_setzero_si128, _mm_shuffle_ps,
    };
    const LOWER: i32 = 0b10_00_10_00;
    const UPPER: i32 = 0b11_01_11_01;
    let pair = |at: usize| _mm_castsi128_ps(_mm_set_epi64x(words[at + 1] as i64, words[at] as i64));
    let (a, b, c, d) = (pair(0), pair(2), pair(4), pair(6));
    let wanted = _mm_set1_epi32(upper as i32);
    let none = _mm_setzero_si128();
    // Ones where four numbers are as wanted, then eight of them in 16 bits each.
    let equal = _mm_packs_epi32(
        _mm_cmpeq_epi32(_mm_castps_si128(_mm_shuffle_ps::<UPPER>(a, b)), wanted),
        _mm_cmpeq_epi32(_mm_castps_si128(_mm_shuffle_ps::<UPPER>(c, d)), wanted),
    );
    let zero = _mm_packs_epi32(
        _mm_cmpeq_epi32(_mm_castps_si128(_mm_shuffle_ps::<LOWER>(a, b)), none),
        _mm_cmpeq_epi32(_mm_castps_si128(_mm_shuffle_ps::<LOWER>(c, d)), none),
    );
    let masks = _mm_movemask_epi8(_mm_packs_epi16(equal, zero)) as u32;
    (masks & 0xff, masks >> 8)
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_masks_of_halves_name_each_word_by_its_place() {
        let words = [7 << 32 | 1, 0, 7 << 32, 8 << 32 | 7, u64::MAX, 7, 1 << 63 | 5, 7 << 32 | 9];
        assert_eq!(halves_masks(&words, 7), (0b1000_0101, 0b0000_0110));
        assert_eq!(halves_masks(&words, u32::MAX), (0b0001_0000, 0b0000_0110));
        assert_eq!(halves_masks(&words, 1 << 31), (0b0100_0000, 0b0000_0110));
        assert_eq!(halves_masks(&[0; 8], 0), (255, 255));
        for upper in [0, 1, 7, 8, 1 << 31, u32::MAX] {
            assert_eq!(halves_masks(&words, upper), halves_masks_plain(&words, upper));
        }
    }
}
