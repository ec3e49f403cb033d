//! The sixteen states in one AVX-512 register.

use std::arch::x86_64::{
    __m512i, _mm_storeu_si128, _mm256_loadu_si256, _mm512_add_epi32, _mm512_and_si512,
    _mm512_cmplt_epu32_mask, _mm512_cvtepi32_epi8, _mm512_cvtepu16_epi32, _mm512_i32gather_epi32,
    _mm512_loadu_si512, _mm512_mask_or_epi32, _mm512_maskz_expand_epi32, _mm512_mullo_epi32,
    _mm512_set1_epi32, _mm512_slli_epi32, _mm512_srli_epi32, _mm512_storeu_si512,
};

use super::{Kernel, LOWER_BOUND, Lanes, N_SLOTS, PROBABILITY_BITS, SlotTable};
use crate::element::LANES;

/// Proof that the CPU has AVX-512 F, BW, DQ and VL.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    #[inline]
    pub(crate) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("popcnt");
        has_all.then_some(Self(()))
    }
}

/// # Safety
/// The CPU has the named features; an [`Avx512`] is the proof.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,popcnt")]
unsafe fn run_with_features<K: Kernel>(lanes: Avx512, kernel: K) -> K::Output {
    kernel.run(lanes)
}

impl Lanes for Avx512 {
    type States = __m512i;

    #[inline(always)]
    fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` proves the features.
        unsafe { run_with_features(self, kernel) }
    }

    #[inline(always)]
    fn load(self, states: &[u32; LANES]) -> Self::States {
        // SAFETY: `self` proves the features; the array is 64 bytes.
        unsafe { _mm512_loadu_si512(states.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store(self, states: Self::States, to: &mut [u32; LANES]) {
        // SAFETY: `self` proves the features; the array is 64 bytes.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), states) }
    }

    #[inline(always)]
    fn step(
        self,
        states: Self::States,
        table: &SlotTable,
        words: &[u8; 2 * LANES],
        symbols: &mut [u8; LANES],
    ) -> (Self::States, usize) {
        // SAFETY: `self` proves the features. The indices of the gather are below the table's length, because they
        // are masked by it less one; 32 bytes are read from `words` and 16 written to `symbols`.
        unsafe {
            let slot_mask = _mm512_set1_epi32(N_SLOTS as i32 - 1);
            let slots = _mm512_and_si512(states, slot_mask);
            let entries = _mm512_i32gather_epi32::<4>(slots, table.as_ptr().cast());
            _mm_storeu_si128(symbols.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(entries));
            let frequencies = _mm512_srli_epi32::<20>(entries);
            let rest = _mm512_and_si512(_mm512_srli_epi32::<8>(entries), slot_mask);
            let quotients = _mm512_srli_epi32::<PROBABILITY_BITS>(states);
            let next = _mm512_add_epi32(_mm512_mullo_epi32(frequencies, quotients), rest);
            let takes = _mm512_cmplt_epu32_mask(next, _mm512_set1_epi32(LOWER_BOUND as i32));
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(words.as_ptr().cast()));
            let taken = _mm512_maskz_expand_epi32(takes, words);
            let states = _mm512_mask_or_epi32(next, takes, _mm512_slli_epi32::<16>(next), taken);
            (states, takes.count_ones() as usize)
        }
    }
}
