//! Conversion of elements between floating point types.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::dtype::Dtype;
use crate::error::{Result, TypesError};

/// Elements converted at a time: small enough for the stack and the first cache, large enough for the
/// vector instructions of the half precision conversion.
const BATCH_ELEMENTS: usize = 256;

/// Converts little endian elements of one floating point type into another.
///
/// Works between any two of f32, f16 and bf16, rounding to nearest even where precision is lost; a
/// number too large for f16 becomes infinity. Equal types, of any kind, are copied. Fails, before the
/// first byte is written, on other pairs and on buffers that do not hold the same number of elements.
pub fn convert_dtype(source: &[u8], source_dtype: Dtype, dest: &mut [u8], dest_dtype: Dtype) -> Result<()> {
    let convertible = |dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16);
    if source_dtype != dest_dtype && !(convertible(source_dtype) && convertible(dest_dtype)) {
        return Err(TypesError::UnsupportedDtypeConversion { from: source_dtype, to: dest_dtype });
    }
    let (source_size, dest_size) = (source_dtype.size_bytes(), dest_dtype.size_bytes());
    let n_elements = source.len() / source_size;
    if n_elements * source_size != source.len() {
        return Err(TypesError::BufferSize {
            field: "source",
            found: source.len(),
            expected: n_elements * source_size,
        });
    }
    if n_elements.checked_mul(dest_size) != Some(dest.len()) {
        let expected = n_elements.saturating_mul(dest_size);
        return Err(TypesError::BufferSize { field: "dest", found: dest.len(), expected });
    }
    if source_dtype == dest_dtype {
        dest.copy_from_slice(source);
        return Ok(());
    }
    let mut numbers = [0.0; BATCH_ELEMENTS];
    let source_batches = source.chunks(BATCH_ELEMENTS * source_size);
    let dest_batches = dest.chunks_mut(BATCH_ELEMENTS * dest_size);
    for (source_batch, dest_batch) in source_batches.zip(dest_batches) {
        let numbers = &mut numbers[..source_batch.len() / source_size];
        read_numbers(source_batch, source_dtype, numbers);
        write_numbers(numbers, dest_batch, dest_dtype);
    }
    Ok(())
}

fn read_numbers(bytes: &[u8], dtype: Dtype, numbers: &mut [f32]) {
    match dtype {
        Dtype::F16 => {
            let mut halves = [f16::ZERO; BATCH_ELEMENTS];
            for (half, bytes) in halves.iter_mut().zip(bytes.chunks_exact(2)) {
                *half = f16::from_le_bytes([bytes[0], bytes[1]]);
            }
            halves[..numbers.len()].convert_to_f32_slice(numbers);
        }
        Dtype::BF16 => {
            for (number, bytes) in numbers.iter_mut().zip(bytes.chunks_exact(2)) {
                *number = bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
            }
        }
        _ => {
            for (number, bytes) in numbers.iter_mut().zip(bytes.chunks_exact(4)) {
                *number = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
        }
    }
}

fn write_numbers(numbers: &[f32], bytes: &mut [u8], dtype: Dtype) {
    match dtype {
        Dtype::F16 => {
            let mut halves = [f16::ZERO; BATCH_ELEMENTS];
            let halves = &mut halves[..numbers.len()];
            halves.convert_from_f32_slice(numbers);
            for (bytes, half) in bytes.chunks_exact_mut(2).zip(halves) {
                bytes.copy_from_slice(&half.to_le_bytes());
            }
        }
        Dtype::BF16 => {
            for (bytes, number) in bytes.chunks_exact_mut(2).zip(numbers) {
                bytes.copy_from_slice(&bf16::from_f32(*number).to_le_bytes());
            }
        }
        _ => {
            for (bytes, number) in bytes.chunks_exact_mut(4).zip(numbers) {
                bytes.copy_from_slice(&number.to_le_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(source: &[u8], from: Dtype, to: Dtype) -> Vec<u8> {
        let mut dest = vec![0; source.len() / from.size_bytes() * to.size_bytes()];
        convert_dtype(source, from, &mut dest, to).unwrap();
        dest
    }

    #[test]
    fn every_half_survives_the_way_through_f32() {
        let patterns: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for (dtype, is_nan) in [
            (Dtype::F16, (|bits| f16::from_bits(bits).is_nan()) as fn(u16) -> bool),
            (Dtype::BF16, |bits| bf16::from_bits(bits).is_nan()),
        ] {
            let wide = converted(&patterns, dtype, Dtype::F32);
            let narrow = converted(&wide, Dtype::F32, dtype);
            for (before, after) in patterns.chunks_exact(2).zip(narrow.chunks_exact(2)) {
                let bits = u16::from_le_bytes([before[0], before[1]]);
                let bits_after = u16::from_le_bytes([after[0], after[1]]);
                assert!(bits == bits_after || is_nan(bits) && is_nan(bits_after), "{dtype} {bits:04x}");
            }
        }
    }

    #[test]
    fn narrowing_rounds_to_the_nearest_even_value() {
        let source: Vec<u8> = [1.0f32, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 1e6]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        let bf16_bits = [0x3f80u16, 0x3f80, 0x3f82, 0x4974];
        let f16_bits = [0x3c00u16, 0x3c04, 0x3c0c, 0x7c00];
        let bytes_of = |bits: [u16; 4]| bits.iter().flat_map(|bits| bits.to_le_bytes()).collect::<Vec<_>>();
        assert_eq!(converted(&source, Dtype::F32, Dtype::BF16), bytes_of(bf16_bits));
        assert_eq!(converted(&source, Dtype::F32, Dtype::F16), bytes_of(f16_bits));
    }

    #[test]
    fn a_conversion_that_needs_a_scale_is_refused() {
        let error = convert_dtype(&[0; 2], Dtype::F16, &mut [0; 1], Dtype::Fp8E4M3).unwrap_err();
        assert_eq!(error, TypesError::UnsupportedDtypeConversion { from: Dtype::F16, to: Dtype::Fp8E4M3 });
        assert_eq!(converted(&[1, 2, 3], Dtype::U8, Dtype::U8), [1, 2, 3]);
    }

    #[test]
    fn buffers_of_another_length_are_refused() {
        let odd = convert_dtype(&[0; 3], Dtype::F16, &mut [0; 4], Dtype::F32).unwrap_err();
        assert_eq!(odd, TypesError::BufferSize { field: "source", found: 3, expected: 2 });
        let short = convert_dtype(&[0; 4], Dtype::F16, &mut [0; 4], Dtype::F32).unwrap_err();
        assert_eq!(short, TypesError::BufferSize { field: "dest", found: 4, expected: 8 });
    }
}
