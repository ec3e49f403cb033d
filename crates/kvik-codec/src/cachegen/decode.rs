//! Streams to elements.

use super::classes::{Classes, IS_DIFFERENCE};
use super::encode::{expand_classes, stored};
use crate::element::{Element, LANES};
use crate::error::Result;
use crate::paged::Pages;
use crate::quantizer::{scale_of, take};
use crate::rans::Decoder;
use crate::shape::{BLOCK_TOKENS, MAX_HEAD_DIM};
use crate::simd::Isa;

/// The most vectors of a tile.
const MAX_TILE_VECTORS: usize = 2 * MAX_HEAD_DIM;

/// Bytes of a key row before the stream: center, step and class.
const KEY_ROW_BYTES: usize = 5;

/// Decodes a coded layer.
#[inline(always)]
pub(super) fn decode<E: Element>(
    isa: Isa,
    pages: &Pages,
    mut coded: &[u8],
    section: &mut [u8],
) -> Result<()> {
    let n_tiles = pages.n_blocks * pages.n_heads;
    let key_rows = take(&mut coded, KEY_ROW_BYTES * pages.n_key_rows())?.as_chunks::<KEY_ROW_BYTES>().0;
    let steps = take(&mut coded, 2 * pages.n_tokens())?.as_chunks::<2>().0;
    let value_classes = take(&mut coded, n_tiles * BLOCK_TOKENS)?;
    let mut decoder = Decoder::new(isa, coded)?;
    let tables = &Classes::get().slots;
    let key_classes: Vec<u8> = key_rows.iter().map(|row| row[4]).collect();
    let tile_vectors = pages.head_dim + BLOCK_TOKENS * pages.vectors_per_value_row();
    let mut classes = [0; MAX_TILE_VECTORS];
    let mut symbols = [[0; LANES]; MAX_TILE_VECTORS];
    let (classes, symbols) = (&mut classes[..tile_vectors], &mut symbols[..tile_vectors]);
    let tiles = pages.tiles().zip(value_classes.chunks_exact(BLOCK_TOKENS));
    let outs = section.chunks_exact_mut(pages.tile_elements() * E::N_BYTES);
    for (((block, head), value_classes), out) in tiles.zip(outs) {
        let first_row = head * pages.head_dim;
        expand_classes(pages, &key_classes[first_row..], value_classes, classes);
        decoder.decode(tables, classes, symbols)?;
        let (key_symbols, value_symbols) = symbols.split_at(pages.head_dim);
        let (key_out, value_out) = out.split_at_mut(out.len() / 2);
        let outs = key_out.chunks_exact_mut(LANES * E::N_BYTES);
        for ((row, symbols), out) in key_rows[first_row..].iter().zip(key_symbols).zip(outs) {
            decode_keys::<E>(*row, symbols, out)?;
        }
        let steps = &steps[block * BLOCK_TOKENS..][..BLOCK_TOKENS];
        decode_values::<E>(pages, steps, value_classes, value_symbols, value_out)?;
    }
    decoder.finish()
}

/// Decodes the keys of a row in one block.
#[inline(always)]
fn decode_keys<E: Element>(row: [u8; KEY_ROW_BYTES], symbols: &[u8; LANES], out: &mut [u8]) -> Result<()> {
    let [center_0, center_1, step_0, step_1, class] = row;
    let (center, step) = (scale_of([center_0, center_1])?, scale_of([step_0, step_1])?);
    let mut steps = symbols.map(|symbol| f32::from(symbol as i8));
    let mut base = center;
    if class & IS_DIFFERENCE != 0 {
        base = stored::<E>(center + steps[0] * step);
        steps[0] = 0.0;
    }
    E::store(&steps.map(|n_steps| base + n_steps * step), out);
    Ok(())
}

/// Decodes the values of one tile, a row for each token.
#[inline(always)]
fn decode_values<E: Element>(
    pages: &Pages,
    steps: &[[u8; 2]],
    classes: &[u8],
    symbols: &[[u8; LANES]],
    out: &mut [u8],
) -> Result<()> {
    let row_bytes = pages.head_dim * E::N_BYTES;
    // The first row is the anchor; what stands before it is nothing's anchor.
    let (anchor_row, other_rows) = out.split_at_mut(row_bytes);
    let mut rows = symbols.chunks_exact(pages.vectors_per_value_row()).zip(steps).zip(classes);
    if let Some(((symbols, step), _)) = rows.next() {
        let step = scale_of(*step)?;
        for (symbols, out) in symbols.iter().zip(anchor_row.chunks_mut(LANES * E::N_BYTES)) {
            E::store(&symbols.map(|symbol| f32::from(symbol as i8) * step), out);
        }
    }
    for (((symbols, step), class), out) in rows.zip(other_rows.chunks_exact_mut(row_bytes)) {
        let step = scale_of(*step)?;
        let is_difference = class & IS_DIFFERENCE != 0;
        let anchors = anchor_row.chunks(LANES * E::N_BYTES);
        for ((symbols, out), anchor) in symbols.iter().zip(out.chunks_mut(LANES * E::N_BYTES)).zip(anchors) {
            let mut base = [0.0; LANES];
            if is_difference {
                E::load(anchor, &mut base);
            }
            E::store(
                &std::array::from_fn::<f32, LANES, _>(|lane| {
                    base[lane] + f32::from(symbols[lane] as i8) * step
                }),
                out,
            );
        }
    }
    Ok(())
}
