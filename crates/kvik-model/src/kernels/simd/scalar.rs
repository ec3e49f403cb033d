//! The lanes in plain Rust: the definition that the other instruction sets must match.

use super::{Kernel, LANES, Simd};

/// Needs nothing of the CPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scalar;

#[inline(always)]
fn map2(a: [f32; LANES], b: [f32; LANES], op: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|lane| op(a[lane], b[lane]))
}

impl Simd for Scalar {
    type Lanes = [f32; LANES];

    const HAS_WIDE_REGISTERS: bool = false;

    #[inline(always)]
    fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Lanes {
        [value; LANES]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::Lanes {
        *from
    }

    #[inline(always)]
    fn store(self, lanes: Self::Lanes, to: &mut [f32; LANES]) {
        *to = lanes;
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; LANES]) -> Self::Lanes {
        from.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16; LANES]) -> Self::Lanes {
        from.map(|bits| half::f16::from_bits(bits).to_f32())
    }

    #[inline(always)]
    fn load_bf16_even(self, from: &[u16; 2 * LANES]) -> Self::Lanes {
        std::array::from_fn(|lane| f32::from_bits(u32::from(from[2 * lane]) << 16))
    }

    #[inline(always)]
    fn load_bf16_odd(self, from: &[u16; 2 * LANES]) -> Self::Lanes {
        std::array::from_fn(|lane| f32::from_bits(u32::from(from[2 * lane + 1]) << 16))
    }

    #[inline(always)]
    fn add(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        map2(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        map2(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        map2(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        map2(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn fma(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes {
        std::array::from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
    }

    #[inline(always)]
    fn max(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        map2(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        map2(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn add_exponent(self, value: Self::Lanes, exponent: Self::Lanes) -> Self::Lanes {
        map2(value, exponent, |value, exponent| {
            f32::from_bits(value.to_bits().wrapping_add(exponent.to_bits() << 23))
        })
    }

    #[inline(always)]
    fn keep_where_at_least(self, value: Self::Lanes, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        std::array::from_fn(|lane| if a[lane] >= b[lane] { value[lane] } else { 0.0 })
    }
}
