//! The sixteen states in two AVX2 registers.

use std::arch::x86_64::{
    __m256i, _mm_loadl_epi64, _mm_loadu_si128, _mm_packus_epi16, _mm_packus_epi32, _mm_storeu_si128,
    _mm256_add_epi32, _mm256_and_si256, _mm256_blendv_epi8, _mm256_castsi256_ps, _mm256_castsi256_si128,
    _mm256_cmpeq_epi32, _mm256_cvtepu8_epi32, _mm256_cvtepu16_epi32, _mm256_extracti128_si256,
    _mm256_i32gather_epi32, _mm256_loadu_si256, _mm256_movemask_ps, _mm256_mullo_epi32, _mm256_or_si256,
    _mm256_permutevar8x32_epi32, _mm256_set1_epi32, _mm256_setzero_si256, _mm256_slli_epi32,
    _mm256_srli_epi32, _mm256_storeu_si256,
};

use super::{Kernel, Lanes, N_SLOTS, PROBABILITY_BITS, SlotTable};
use crate::element::LANES;

/// Lanes of one register.
const HALF: usize = LANES / 2;

/// For each set of lanes that take a word: which of the next words each lane takes.
static WORD_OF_LANE: [[u8; HALF]; 1 << HALF] = word_of_lane();

/// Proof that the CPU has AVX2.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    #[inline]
    pub(crate) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("popcnt");
        has_all.then_some(Self(()))
    }

    /// One step of eight lanes, of which `words` are at least enough.
    #[inline(always)]
    #[expect(clippy::unused_self, reason = "it is the proof that the CPU has the features")]
    fn half_step(self, states: __m256i, table: &SlotTable, words: &[u8; LANES]) -> (__m256i, __m256i, usize) {
        // SAFETY: `self` proves the features. The indices of the gather are below the table's length, because they
        // are masked by it less one; 16 bytes are read from `words` and 8 from a row of `WORD_OF_LANE`.
        unsafe {
            let slot_mask = _mm256_set1_epi32(N_SLOTS as i32 - 1);
            let slots = _mm256_and_si256(states, slot_mask);
            let entries = _mm256_i32gather_epi32::<4>(table.as_ptr().cast(), slots);
            let frequencies = _mm256_srli_epi32::<20>(entries);
            let rest = _mm256_and_si256(_mm256_srli_epi32::<8>(entries), slot_mask);
            let quotients = _mm256_srli_epi32::<{ PROBABILITY_BITS as i32 }>(states);
            let next = _mm256_add_epi32(_mm256_mullo_epi32(frequencies, quotients), rest);
            // Below 2^16: nothing is left above.
            let takes = _mm256_cmpeq_epi32(_mm256_srli_epi32::<16>(next), _mm256_setzero_si256());
            let mask = _mm256_movemask_ps(_mm256_castsi256_ps(takes)) as u8;
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(words.as_ptr().cast()));
            let places = _mm_loadl_epi64(WORD_OF_LANE[usize::from(mask)].as_ptr().cast());
            let taken = _mm256_permutevar8x32_epi32(words, _mm256_cvtepu8_epi32(places));
            let refilled = _mm256_or_si256(_mm256_slli_epi32::<16>(next), taken);
            (_mm256_blendv_epi8(next, refilled, takes), entries, mask.count_ones() as usize)
        }
    }
}

/// # Safety
/// The CPU has the named features; an [`Avx2`] is the proof.
#[target_feature(enable = "avx2,popcnt")]
unsafe fn run_with_features<K: Kernel>(lanes: Avx2, kernel: K) -> K::Output {
    kernel.run(lanes)
}

impl Lanes for Avx2 {
    type States = [__m256i; 2];

    #[inline(always)]
    fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` proves the features.
        unsafe { run_with_features(self, kernel) }
    }

    #[inline(always)]
    fn load(self, states: &[u32; LANES]) -> Self::States {
        // SAFETY: `self` proves the features; the array is two registers long.
        unsafe {
            [_mm256_loadu_si256(states.as_ptr().cast()), _mm256_loadu_si256(states.as_ptr().add(HALF).cast())]
        }
    }

    #[inline(always)]
    fn store(self, states: Self::States, to: &mut [u32; LANES]) {
        // SAFETY: `self` proves the features; the array is two registers long.
        unsafe {
            _mm256_storeu_si256(to.as_mut_ptr().cast(), states[0]);
            _mm256_storeu_si256(to.as_mut_ptr().add(HALF).cast(), states[1]);
        }
    }

    #[inline(always)]
    fn step(
        self,
        states: Self::States,
        table: &SlotTable,
        words: &[u8; 2 * LANES],
        symbols: &mut [u8; LANES],
    ) -> (Self::States, usize) {
        let (low_words, _) = words.split_first_chunk::<LANES>().unwrap_or((&[0; LANES], &[]));
        let (low, low_entries, n_low) = self.half_step(states[0], table, low_words);
        // The lower lanes took at most eight of sixteen words: eight are left.
        let high_words = words[2 * n_low.min(HALF)..].first_chunk::<LANES>().unwrap_or(&[0; LANES]);
        let (high, high_entries, n_high) = self.half_step(states[1], table, high_words);
        // SAFETY: `self` proves the features; 16 bytes are written to `symbols`.
        unsafe {
            let byte_mask = _mm256_set1_epi32(0xff);
            let packed = [low_entries, high_entries].map(|entries| {
                let bytes = _mm256_and_si256(entries, byte_mask);
                _mm_packus_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes))
            });
            _mm_storeu_si128(symbols.as_mut_ptr().cast(), _mm_packus_epi16(packed[0], packed[1]));
        }
        ([low, high], n_low + n_high)
    }
}

const fn word_of_lane() -> [[u8; HALF]; 1 << HALF] {
    let mut table = [[0; HALF]; 1 << HALF];
    let mut mask = 0;
    while mask < table.len() {
        let (mut lane, mut n_taken) = (0, 0);
        while lane < HALF {
            table[mask][lane] = n_taken;
            n_taken += (mask >> lane & 1) as u8;
            lane += 1;
        }
        mask += 1;
    }
    table
}
