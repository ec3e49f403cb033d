//! The lanes in one AVX-512 register.

use std::arch::x86_64::{
    __m256i, __m512, _CMP_GE_OQ, _mm256_loadu_si256, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512,
    _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepu16_epi32, _mm512_cvtph_ps,
    _mm512_div_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_maskz_mov_ps, _mm512_max_ps,
    _mm512_min_ps, _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_slli_epi32, _mm512_storeu_ps,
    _mm512_sub_ps,
};

use super::{Kernel, LANES, Simd};

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
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has_all.then_some(Self(()))
    }
}

/// # Safety
/// The CPU has the named features; an [`Avx512`] is the proof.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn run_with_features<K: Kernel>(simd: Avx512, kernel: K) -> K::Output {
    kernel.run(simd)
}

impl Simd for Avx512 {
    type Lanes = __m512;

    const HAS_WIDE_REGISTERS: bool = true;

    #[inline(always)]
    fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` proves the features.
        unsafe { run_with_features(self, kernel) }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Lanes {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::Lanes {
        // SAFETY: `self` proves the features; the array is 64 bytes.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, lanes: Self::Lanes, to: &mut [f32; LANES]) {
        // SAFETY: `self` proves the features; the array is 64 bytes.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), lanes) }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; LANES]) -> Self::Lanes {
        // SAFETY: `self` proves the features; the array is 32 bytes.
        unsafe {
            let bits = _mm256_loadu_si256(from.as_ptr().cast::<__m256i>());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
        }
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16; LANES]) -> Self::Lanes {
        // SAFETY: `self` proves the features; the array is 32 bytes.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast::<__m256i>())) }
    }

    #[inline(always)]
    fn load_bf16_even(self, from: &[u16; 2 * LANES]) -> Self::Lanes {
        // SAFETY: `self` proves the features; the array is 64 bytes.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_loadu_si512(from.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn load_bf16_odd(self, from: &[u16; 2 * LANES]) -> Self::Lanes {
        // SAFETY: `self` proves the features; the array is 64 bytes.
        unsafe {
            let high_half = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(from.as_ptr().cast()), high_half))
        }
    }

    #[inline(always)]
    fn add(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn add_exponent(self, value: Self::Lanes, exponent: Self::Lanes) -> Self::Lanes {
        // SAFETY: `self` proves the features.
        unsafe {
            let shifted = _mm512_slli_epi32::<23>(_mm512_castps_si512(exponent));
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(value), shifted))
        }
    }

    #[inline(always)]
    fn keep_where_at_least(self, value: Self::Lanes, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(a, b), value) }
    }
}
