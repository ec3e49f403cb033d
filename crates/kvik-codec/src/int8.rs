//! Eight bits an element: keys around a center and in steps of their own for each element of each head over the tokens
//! of the chunk, values in steps of their own for each token.
//!
//! A coded layer is: for each key row a center and a step (bf16 each), for each token a step of its values (bf16), and
//! one signed byte for each element, in the order of the section. The error of a key is at most half of
//! 1/254 of its row's range, that of a value half of 1/127 of the largest of its token, each rounded up to a bf16.

use crate::element::{Element, LANES, narrow_bf16, widen_bf16};
use crate::error::Result;
use crate::paged::Pages;
use crate::quantizer::{Place, Quantizer, expect_end, quantized, scale_of, step_bits, take};
use crate::shape::BLOCK_TOKENS;
use crate::simd::Isa;

/// The quantizer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Int8;

impl Quantizer for Int8 {
    const NAME: &'static str = "int8";
    const ID: u8 = 3;

    #[inline(always)]
    fn encode<E: Element>(&self, _: Isa, place: Place, values: &[f32], out: &mut Vec<u8>) {
        let pages = place.pages;
        let keys = key_rows(&pages, values);
        let steps = value_steps(&pages, values);
        for (center, step) in &keys {
            out.extend(narrow_bf16(*center).to_le_bytes());
            out.extend(narrow_bf16(*step).to_le_bytes());
        }
        out.extend(steps.iter().flat_map(|step| narrow_bf16(*step).to_le_bytes()));
        let tiles = values.chunks_exact(pages.tile_elements());
        for ((block, head), tile) in pages.tiles().zip(tiles) {
            let (tile_keys, tile_values) = tile.split_at(tile.len() / 2);
            let rows = &keys[head * pages.head_dim..][..pages.head_dim];
            for ((center, step), vector) in rows.iter().zip(tile_keys.as_chunks::<LANES>().0) {
                let inverse = 1.0 / step;
                out.extend(vector.map(|value| quantized((value - center) * inverse) as u8));
            }
            let steps = &steps[block * BLOCK_TOKENS..][..BLOCK_TOKENS];
            for (step, row) in steps.iter().zip(tile_values.chunks_exact(pages.head_dim)) {
                let inverse = 1.0 / step;
                out.extend(row.iter().map(|value| quantized(value * inverse) as u8));
            }
        }
    }

    #[inline(always)]
    fn decode<E: Element>(&self, _: Isa, place: Place, mut coded: &[u8], section: &mut [u8]) -> Result<()> {
        let pages = place.pages;
        let keys = take(&mut coded, 4 * pages.n_key_rows())?.as_chunks::<4>().0;
        let steps = take(&mut coded, 2 * pages.n_tokens())?.as_chunks::<2>().0;
        let codes = take(&mut coded, pages.n_elements())?;
        expect_end(coded)?;
        let tiles = codes.chunks_exact(pages.tile_elements());
        let outs = section.chunks_exact_mut(pages.tile_elements() * E::N_BYTES);
        for (((block, head), tile), out) in pages.tiles().zip(tiles).zip(outs) {
            let (key_codes, value_codes) = tile.split_at(tile.len() / 2);
            let (key_out, value_out) = out.split_at_mut(out.len() / 2);
            let rows = &keys[head * pages.head_dim..][..pages.head_dim];
            let vectors = key_codes.as_chunks::<LANES>().0.iter();
            for ((row, codes), out) in
                rows.iter().zip(vectors).zip(key_out.chunks_exact_mut(LANES * E::N_BYTES))
            {
                let (center, step) = (scale_of([row[0], row[1]])?, scale_of([row[2], row[3]])?);
                E::store(&codes.map(|code| center + f32::from(code as i8) * step), out);
            }
            let steps = &steps[block * BLOCK_TOKENS..][..BLOCK_TOKENS];
            let rows = value_codes.chunks_exact(pages.head_dim);
            for ((step, codes), out) in
                steps.iter().zip(rows).zip(value_out.chunks_exact_mut(pages.head_dim * E::N_BYTES))
            {
                let step = scale_of(*step)?;
                let (vectors, rest) = codes.as_chunks::<LANES>();
                let (out, out_rest) = out.split_at_mut(vectors.len() * LANES * E::N_BYTES);
                for (codes, out) in vectors.iter().zip(out.chunks_exact_mut(LANES * E::N_BYTES)) {
                    E::store(&codes.map(|code| f32::from(code as i8) * step), out);
                }
                for (code, out) in rest.iter().zip(out_rest.chunks_exact_mut(E::N_BYTES)) {
                    E::store(&[f32::from(*code as i8) * step], out);
                }
            }
        }
        Ok(())
    }
}

/// Center and step of every key row, as they are when they are read back.
#[inline(always)]
fn key_rows(pages: &Pages, values: &[f32]) -> Vec<(f32, f32)> {
    let mut bounds = vec![(f32::INFINITY, f32::NEG_INFINITY); pages.n_key_rows()];
    for ((_, head), tile) in pages.tiles().zip(values.chunks_exact(pages.tile_elements())) {
        let rows = &mut bounds[head * pages.head_dim..][..pages.head_dim];
        for ((low, high), vector) in rows.iter_mut().zip(tile.as_chunks::<LANES>().0) {
            *low = vector.iter().fold(*low, |low, value| if *value < low { *value } else { low });
            *high = vector.iter().fold(*high, |high, value| if *value > high { *value } else { high });
        }
    }
    let row = |(low, high): (f32, f32)| {
        let center = widen_bf16(narrow_bf16(low / 2.0 + high / 2.0));
        let reach = if high - center > center - low { high - center } else { center - low };
        (center, widen_bf16(step_bits(reach / 127.0)))
    };
    bounds.into_iter().map(row).collect()
}

/// Step of the values of every token, as it is when it is read back.
#[inline(always)]
fn value_steps(pages: &Pages, values: &[f32]) -> Vec<f32> {
    let mut largest = vec![0.0; pages.n_tokens()];
    for ((block, _), tile) in pages.tiles().zip(values.chunks_exact(pages.tile_elements())) {
        let rows = tile[tile.len() / 2..].chunks_exact(pages.head_dim);
        for (largest, row) in largest[block * BLOCK_TOKENS..].iter_mut().zip(rows) {
            *largest =
                row.iter().fold(*largest, |most, value| if value.abs() > most { value.abs() } else { most });
        }
    }
    largest.into_iter().map(|most| widen_bf16(step_bits(most / 127.0))).collect()
}
