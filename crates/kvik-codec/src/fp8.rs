//! Eight bits an element in the form of E4M3, with a scale for the keys and one for the values of each head.
//!
//! A coded layer is: for each head the scale of its keys and that of its values (f32 each), and one byte for each
//! element, in the order of the section. The largest of a head is 448, the largest of E4M3; the error is at most 1/16 of an element, or
//! 2^-10 of the scale.

use crate::element::{Element, LANES, widen_f16};
use crate::error::{CodecError, Result};
use crate::quantizer::{Place, Quantizer, expect_end, take};
use crate::simd::Isa;

/// The largest number of E4M3.
const LARGEST: f32 = 448.0;

/// The smallest scale: a head whose numbers are all smaller is zero.
const MIN_SCALE: f32 = 8.673_617e-19; // 2^-60

/// The largest scale that is read: above what an encoder writes, and far below what overflows.
const MAX_SCALE: f32 = 1.267_650_6e30; // 2^100

/// The quantizer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fp8;

impl Quantizer for Fp8 {
    const NAME: &'static str = "fp8";
    const ID: u8 = 2;

    #[inline(always)]
    fn encode<E: Element>(&self, _: Isa, place: Place, values: &[f32], out: &mut Vec<u8>) {
        let pages = place.pages;
        // Keys and values of a head, one after the other.
        let half_elements = pages.tile_elements() / 2;
        let mut largest = vec![0.0_f32; 2 * pages.n_heads];
        for (half_idx, half) in values.chunks_exact(half_elements).enumerate() {
            let most = &mut largest[half_idx % (2 * pages.n_heads)];
            *most =
                half.iter().fold(*most, |most, value| if value.abs() > most { value.abs() } else { most });
        }
        let scales: Vec<f32> = largest.iter().map(|most| (most / LARGEST).max(MIN_SCALE)).collect();
        out.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
        for (half_idx, half) in values.chunks_exact(half_elements).enumerate() {
            let inverse = 1.0 / scales[half_idx % scales.len()];
            out.extend(half.iter().map(|value| to_e4m3(value * inverse)));
        }
    }

    #[inline(always)]
    fn decode<E: Element>(&self, _: Isa, place: Place, mut coded: &[u8], section: &mut [u8]) -> Result<()> {
        let pages = place.pages;
        let scales = take(&mut coded, 8 * pages.n_heads)?.as_chunks::<4>().0;
        let codes = take(&mut coded, pages.n_elements())?;
        expect_end(coded)?;
        let half_elements = pages.tile_elements() / 2;
        let outs = section.chunks_exact_mut(half_elements * E::N_BYTES);
        for (half_idx, (codes, out)) in codes.chunks_exact(half_elements).zip(outs).enumerate() {
            let scale = f32::from_le_bytes(scales[half_idx % scales.len()]);
            if !(0.0..=MAX_SCALE).contains(&scale) {
                return Err(CodecError::corrupt("scale"));
            }
            // Half of a tile is sixteen tokens: always whole vectors.
            let vectors = codes.as_chunks::<LANES>().0.iter();
            for (codes, out) in vectors.zip(out.chunks_exact_mut(LANES * E::N_BYTES)) {
                E::store(&codes.map(|code| from_e4m3(code) * scale), out);
            }
        }
        Ok(())
    }
}

/// Rounds to the nearest of E4M3, ties to even; what is too large becomes the largest.
#[inline(always)]
fn to_e4m3(value: f32) -> u8 {
    let magnitude = if value.abs() < LARGEST { value.abs() } else { LARGEST };
    // The exponent's bias goes from 127 to 7, and three bits of the mantissa stay.
    let bits = (magnitude * f32::from_bits((127 - 120) << 23)).to_bits();
    let code = bits.wrapping_add(0x7_ffff + ((bits >> 20) & 1)) >> 20;
    (code | (value.to_bits() >> 24 & 0x80)) as u8
}

#[inline(always)]
fn from_e4m3(code: u8) -> f32 {
    let code = u16::from(code);
    // An f16 whose exponent has a bias of 15 in the place of 7.
    widen_f16((code & 0x80) << 8 | (code & 0x7f) << 7) * 256.0
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "the results are exact")]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_e4m3_comes_back() {
        for code in 0..=u8::MAX {
            // 0x7f would be NaN; no encoder writes it.
            if code & 0x7f != 0x7f {
                assert_eq!(to_e4m3(from_e4m3(code)), code, "{code:02x} is {}", from_e4m3(code));
            }
        }
        let numbers = [0x01, 0x08, 0x38, 0x7e, 0xc0].map(from_e4m3);
        assert_eq!(numbers, [0.001_953_125, 0.015_625, 1.0, 448.0, -2.0]);
    }

    #[test]
    fn rounding_is_to_the_nearest_and_ties_to_even() {
        assert_eq!(
            [1.06, 1.0625, 1.19, 1e9, -1e9].map(|value| from_e4m3(to_e4m3(value))),
            [1.0, 1.0, 1.25, 448.0, -448.0]
        );
        assert_eq!(from_e4m3(to_e4m3(1.1875)), 1.25);
        assert_eq!(from_e4m3(to_e4m3(0.0009)), 0.0);
        assert_eq!(from_e4m3(to_e4m3(0.0011)), 0.001_953_125);
    }
}
