//! The lanes in two AVX2 registers.

use std::arch::x86_64::{
    __m128i, __m256, __m256i, _CMP_GE_OQ, _mm_loadu_si128, _mm256_add_epi32, _mm256_add_ps, _mm256_and_ps,
    _mm256_and_si256, _mm256_castps_si256, _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cvtepu16_epi32,
    _mm256_cvtph_ps, _mm256_div_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_max_ps,
    _mm256_min_ps, _mm256_mul_ps, _mm256_set1_epi32, _mm256_set1_ps, _mm256_slli_epi32, _mm256_storeu_ps,
    _mm256_sub_ps,
};

use super::{Kernel, LANES, Simd};

/// Lanes of one register.
const HALF: usize = LANES / 2;

/// Proof that the CPU has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    #[inline]
    pub(crate) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has_all.then_some(Self(()))
    }
}

/// # Safety
/// The CPU has the named features; an [`Avx2`] is the proof.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_with_features<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
    kernel.run(simd)
}

/// Applies a two-register intrinsic to both halves.
macro_rules! both_halves {
    ($intrinsic:ident, $a:expr, $b:expr) => {
        // SAFETY: an `Avx2` value, the receiver of every caller, proves the features.
        unsafe { [$intrinsic($a[0], $b[0]), $intrinsic($a[1], $b[1])] }
    };
}

impl Simd for Avx2 {
    type Lanes = [__m256; 2];

    const HAS_WIDE_REGISTERS: bool = false;

    #[inline(always)]
    fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` proves the features.
        unsafe { run_with_features(self, kernel) }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Lanes {
        // SAFETY: `self` proves the features.
        unsafe { [_mm256_set1_ps(value); 2] }
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::Lanes {
        // SAFETY: `self` proves the features; the array is two registers long.
        unsafe { [_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(HALF))] }
    }

    #[inline(always)]
    fn store(self, lanes: Self::Lanes, to: &mut [f32; LANES]) {
        // SAFETY: `self` proves the features; the array is two registers long.
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), lanes[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(HALF), lanes[1]);
        }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; LANES]) -> Self::Lanes {
        // SAFETY: `self` proves the features; the array is two half registers long.
        unsafe {
            let low = _mm_loadu_si128(from.as_ptr().cast::<__m128i>());
            let high = _mm_loadu_si128(from.as_ptr().add(HALF).cast::<__m128i>());
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(low))),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(high))),
            ]
        }
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16; LANES]) -> Self::Lanes {
        // SAFETY: `self` proves the features; the array is two half registers long.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast::<__m128i>())),
                _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().add(HALF).cast::<__m128i>())),
            ]
        }
    }

    #[inline(always)]
    fn load_bf16_even(self, from: &[u16; 2 * LANES]) -> Self::Lanes {
        // SAFETY: `self` proves the features; the array is two registers long.
        unsafe {
            let low = _mm256_loadu_si256(from.as_ptr().cast::<__m256i>());
            let high = _mm256_loadu_si256(from.as_ptr().add(LANES).cast::<__m256i>());
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }
    }

    #[inline(always)]
    fn load_bf16_odd(self, from: &[u16; 2 * LANES]) -> Self::Lanes {
        // SAFETY: `self` proves the features; the array is two registers long.
        unsafe {
            let low = _mm256_loadu_si256(from.as_ptr().cast::<__m256i>());
            let high = _mm256_loadu_si256(from.as_ptr().add(LANES).cast::<__m256i>());
            let odd_mask = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            [
                _mm256_castsi256_ps(_mm256_and_si256(low, odd_mask)),
                _mm256_castsi256_ps(_mm256_and_si256(high, odd_mask)),
            ]
        }
    }

    #[inline(always)]
    fn add(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        both_halves!(_mm256_add_ps, a, b)
    }

    #[inline(always)]
    fn sub(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        both_halves!(_mm256_sub_ps, a, b)
    }

    #[inline(always)]
    fn mul(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        both_halves!(_mm256_mul_ps, a, b)
    }

    #[inline(always)]
    fn div(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        both_halves!(_mm256_div_ps, a, b)
    }

    #[inline(always)]
    fn fma(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes {
        // SAFETY: `self` proves the features.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    fn max(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        both_halves!(_mm256_max_ps, a, b)
    }

    #[inline(always)]
    fn min(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        both_halves!(_mm256_min_ps, a, b)
    }

    #[inline(always)]
    fn add_exponent(self, value: Self::Lanes, exponent: Self::Lanes) -> Self::Lanes {
        // SAFETY: `self` proves the features.
        unsafe {
            let low = _mm256_slli_epi32::<23>(_mm256_castps_si256(exponent[0]));
            let high = _mm256_slli_epi32::<23>(_mm256_castps_si256(exponent[1]));
            [
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(value[0]), low)),
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(value[1]), high)),
            ]
        }
    }

    #[inline(always)]
    fn keep_where_at_least(self, value: Self::Lanes, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        // SAFETY: `self` proves the features.
        unsafe {
            [
                _mm256_and_ps(value[0], _mm256_cmp_ps::<_CMP_GE_OQ>(a[0], b[0])),
                _mm256_and_ps(value[1], _mm256_cmp_ps::<_CMP_GE_OQ>(a[1], b[1])),
            ]
        }
    }
}
