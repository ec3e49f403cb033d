//! Element types as bytes, widened to f32 and narrowed again.
//!
//! All of it is arithmetic of fixed rounding on fixed widths: the compiler makes vector code of it, and every
//! instruction set gives the same bits.

/// Elements of a vector.
pub(crate) const LANES: usize = 16;

/// An element type of stored keys and values.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    /// Bytes of one element.
    const N_BYTES: usize;
    /// The largest finite number of the type.
    const MAX: f32;

    /// Whether an element, of [`Self::N_BYTES`] bytes, is finite and at most [`MAX_MAGNITUDE`].
    fn is_codable(bytes: &[u8]) -> bool;

    /// Widens as many elements as `values` has. The elements are finite.
    fn load(bytes: &[u8], values: &mut [f32]);

    /// Narrows as many elements as `bytes` has room for, to the nearest, ties to even. Numbers beyond the
    /// largest of the type become that: what was finite stays finite.
    fn store(values: &[f32], bytes: &mut [u8]);
}

/// The largest magnitude that quantizers take; steps and sums of numbers within it are finite.
pub(crate) const MAX_MAGNITUDE: f32 = 1.267_650_6e30; // 2^100

/// The upper half of an f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bf16;

/// IEEE half precision.
#[derive(Clone, Copy, Debug)]
pub(crate) struct F16;

/// IEEE single precision.
#[derive(Clone, Copy, Debug)]
pub(crate) struct F32;

impl Element for Bf16 {
    const N_BYTES: usize = 2;
    const MAX: f32 = 3.389_531_4e38;

    #[inline(always)]
    fn is_codable(bytes: &[u8]) -> bool {
        widen_bf16(u16_of(bytes)).abs() <= MAX_MAGNITUDE
    }

    #[inline(always)]
    fn load(bytes: &[u8], values: &mut [f32]) {
        for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *value = widen_bf16(u16::from_le_bytes(*bytes));
        }
    }

    #[inline(always)]
    fn store(values: &[f32], bytes: &mut [u8]) {
        for (bytes, value) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(values) {
            *bytes = narrow_bf16(clamp(*value, Self::MAX)).to_le_bytes();
        }
    }
}

impl Element for F16 {
    const N_BYTES: usize = 2;
    const MAX: f32 = 65504.0;

    #[inline(always)]
    fn is_codable(bytes: &[u8]) -> bool {
        u16_of(bytes) & 0x7c00 != 0x7c00
    }

    #[inline(always)]
    fn load(bytes: &[u8], values: &mut [f32]) {
        for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *value = widen_f16(u16::from_le_bytes(*bytes));
        }
    }

    #[inline(always)]
    fn store(values: &[f32], bytes: &mut [u8]) {
        for (bytes, value) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(values) {
            *bytes = narrow_f16(clamp(*value, Self::MAX)).to_le_bytes();
        }
    }
}

impl Element for F32 {
    const N_BYTES: usize = 4;
    const MAX: f32 = f32::MAX;

    #[inline(always)]
    fn is_codable(bytes: &[u8]) -> bool {
        f32::from_le_bytes(bytes.first_chunk().copied().unwrap_or_default()).abs() <= MAX_MAGNITUDE
    }

    #[inline(always)]
    fn load(bytes: &[u8], values: &mut [f32]) {
        for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *value = f32::from_le_bytes(*bytes);
        }
    }

    #[inline(always)]
    fn store(values: &[f32], bytes: &mut [u8]) {
        for (bytes, value) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(values) {
            *bytes = value.to_le_bytes();
        }
    }
}

/// The smallest bf16 that is not below a finite `value` of 0 or more.
pub(crate) fn bf16_at_least(value: f32) -> u16 {
    (value.to_bits().wrapping_add(0xffff) >> 16) as u16
}

/// The largest bf16 that is not above a finite `value`.
pub(crate) fn bf16_at_most(value: f32) -> u16 {
    let cut = (value.to_bits() >> 16) as u16;
    let is_exact = value.to_bits().trailing_zeros() >= 16;
    // Away from zero is down where the sign is set.
    if value.is_sign_negative() && !is_exact { cut.wrapping_add(1) } else { cut }
}

#[inline(always)]
pub(crate) fn widen_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds a finite number to the nearest bf16, ties to even.
#[inline(always)]
pub(crate) fn narrow_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Widens a finite f16: its exponent is moved to that of f32 by a multiplication, which makes subnormal numbers
/// normal on the way.
#[inline(always)]
pub(crate) fn widen_f16(bits: u16) -> f32 {
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    f32::from_bits(magnitude.to_bits() | u32::from(bits & 0x8000) << 16)
}

/// Rounds a number of at most 65504 to the nearest f16.
#[inline(always)]
fn narrow_f16(value: f32) -> u16 {
    let bits = (f32::from_bits(value.to_bits() & 0x7fff_ffff) * f32::from_bits((127 - 112) << 23)).to_bits();
    let magnitude = bits.wrapping_add(0xfff + ((bits >> 13) & 1)) >> 13;
    (magnitude | (value.to_bits() >> 16 & 0x8000)) as u16
}

#[inline(always)]
fn clamp(value: f32, max: f32) -> f32 {
    let value = if value < max { value } else { max };
    if value > -max { value } else { -max }
}

#[inline(always)]
fn u16_of(bytes: &[u8]) -> u16 {
    u16::from_le_bytes(bytes.first_chunk().copied().unwrap_or_default())
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "the results are exact")]
mod tests {
    use super::*;

    fn survives<E: Element>(bits: u16) -> bool {
        let mut value = [0.0];
        E::load(&bits.to_le_bytes(), &mut value);
        let mut bytes = [0; 2];
        E::store(&value, &mut bytes);
        u16::from_le_bytes(bytes) == bits
    }

    #[test]
    fn every_finite_half_survives_the_way_through_f32() {
        for bits in 0..=u16::MAX {
            assert!(bits & 0x7c00 == 0x7c00 || survives::<F16>(bits), "f16 {bits:04x}");
            assert!(bits & 0x7f80 == 0x7f80 || survives::<Bf16>(bits), "bf16 {bits:04x}");
            assert_eq!(F16::is_codable(&bits.to_le_bytes()), bits & 0x7c00 != 0x7c00, "{bits:04x}");
        }
        assert_eq!(widen_f16(0x0001), 5.960_464_5e-8);
        assert_eq!(widen_f16(0xfbff), -65504.0);
    }

    #[test]
    fn ties_go_to_even_and_what_is_too_large_becomes_the_largest() {
        let narrowed = |value: f32| {
            let mut bytes = [0; 2];
            F16::store(&[value], &mut bytes);
            widen_f16(u16::from_le_bytes(bytes))
        };
        assert_eq!([narrowed(2049.0), narrowed(2051.0), narrowed(-2051.0)], [2048.0, 2052.0, -2052.0]);
        assert_eq!([narrowed(65520.0), narrowed(-1e9), narrowed(1e-9)], [65504.0, -65504.0, 0.0]);
        let mut bytes = [0; 2];
        Bf16::store(&[f32::MAX], &mut bytes);
        assert_eq!(u16::from_le_bytes(bytes), 0x7f7f);
    }

    #[test]
    fn what_no_quantizer_takes_is_told() {
        for bits in [0x7f80_u16, 0xff80, 0x7fc0, 0x7f00] {
            assert!(!Bf16::is_codable(&bits.to_le_bytes()), "{bits:04x}");
        }
        for value in [f32::NAN, f32::INFINITY, f32::MAX] {
            assert!(!F32::is_codable(&value.to_le_bytes()));
        }
        assert!(F32::is_codable(&f32::from_bits(1).to_le_bytes()));
    }

    #[test]
    fn bounds_of_bf16_hold() {
        for value in [0.0_f32, 1.0, 1.001, 3.3e-12, 77.7] {
            assert!(widen_bf16(bf16_at_least(value)) >= value && widen_bf16(bf16_at_most(value)) <= value);
            assert!(widen_bf16(bf16_at_most(-value)) <= -value);
        }
        assert_eq!(widen_bf16(bf16_at_least(1.0)), 1.0);
        assert_eq!(widen_bf16(bf16_at_most(-1.0)), -1.0);
    }
}
