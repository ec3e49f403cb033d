//! Values to streams.

use super::classes::{Classes, IS_DIFFERENCE, MAX_SYMBOL};
use crate::element::{Element, LANES, narrow_bf16, widen_bf16};
use crate::paged::Pages;
use crate::quantizer::{MIN_STEP, quantized, step_bits};
use crate::rans;
use crate::shape::BLOCK_TOKENS;

/// A key row as it is when it is read back.
#[derive(Debug, Clone, Copy, Default)]
struct KeyRow {
    center: f32,
    step: f32,
}

/// Appends the coded layer.
#[inline(always)]
pub(super) fn encode<E: Element>(
    pages: &Pages,
    (key_levels, value_levels): (f32, f32),
    values: &[f32],
    out: &mut Vec<u8>,
) {
    let tile_vectors = pages.head_dim + BLOCK_TOKENS * pages.vectors_per_value_row();
    let n_vectors = pages.n_blocks * pages.n_heads * tile_vectors;
    let mut symbols = vec![[0_i8; LANES]; n_vectors];
    let mut classes = vec![0; n_vectors];
    let key_rows = key_rows(pages, key_levels, values);
    let key_classes = encode_keys::<E>(pages, &key_rows, values, &mut symbols);
    let steps = value_steps(pages, value_levels, values);
    let value_classes = encode_values::<E>(pages, &steps, values, &mut symbols);
    for (row, class) in key_rows.iter().zip(&key_classes) {
        out.extend(narrow_bf16(row.center).to_le_bytes());
        out.extend(narrow_bf16(row.step).to_le_bytes());
        out.push(*class);
    }
    out.extend(steps.iter().flat_map(|step| narrow_bf16(*step).to_le_bytes()));
    out.extend_from_slice(&value_classes);
    let tiles = pages.tiles().zip(classes.chunks_exact_mut(tile_vectors));
    for (((_, head), classes), tile_value_classes) in tiles.zip(value_classes.chunks_exact(BLOCK_TOKENS)) {
        expand_classes(pages, &key_classes[head * pages.head_dim..], tile_value_classes, classes);
    }
    let symbols: Vec<u8> = symbols.as_flattened().iter().map(|symbol| *symbol as u8).collect();
    rans::encode(&symbols, &classes, &Classes::get().ranges, out);
}

/// The class of every vector of a tile.
#[inline(always)]
pub(super) fn expand_classes(pages: &Pages, key_classes: &[u8], value_classes: &[u8], out: &mut [u8]) {
    let (keys, values) = out.split_at_mut(pages.head_dim);
    for (out, class) in keys.iter_mut().zip(key_classes) {
        *out = class & !IS_DIFFERENCE;
    }
    for (row, class) in values.chunks_exact_mut(pages.vectors_per_value_row()).zip(value_classes) {
        row.fill(class & !IS_DIFFERENCE);
    }
}

#[inline(always)]
fn key_rows(pages: &Pages, levels: f32, values: &[f32]) -> Vec<KeyRow> {
    let n_tokens = pages.n_tokens() as f32;
    let for_each_row = |visit: &mut dyn FnMut(usize, &[f32; LANES])| {
        for ((_, head), tile) in pages.tiles().zip(values.chunks_exact(pages.tile_elements())) {
            let vectors = tile.as_chunks::<LANES>().0.iter().take(pages.head_dim);
            vectors.enumerate().for_each(|(dim, vector)| visit(head * pages.head_dim + dim, vector));
        }
    };
    // Magnitudes are at most 2^100, so that sums are finite; squares are taken of what is divided by the largest.
    let mut rows = vec![KeyRow::default(); pages.n_key_rows()];
    for_each_row(&mut |row, vector| rows[row].center += vector.iter().sum::<f32>() / n_tokens);
    for row in &mut rows {
        row.center = widen_bf16(narrow_bf16(row.center));
    }
    let mut reaches = vec![0.0_f32; pages.n_key_rows()];
    for_each_row(&mut |row, vector| {
        let center = rows[row].center;
        let reach = vector.iter().fold(reaches[row], |most, value| most.max((value - center).abs()));
        reaches[row] = reach;
    });
    let mut squares = vec![0.0_f32; pages.n_key_rows()];
    for_each_row(&mut |row, vector| {
        let inverse = inverse_of(reaches[row]);
        let deviation = |value: &f32| (value - rows[row].center) * inverse;
        squares[row] += vector.iter().map(|value| deviation(value) * deviation(value)).sum::<f32>();
    });
    for ((row, reach), square) in rows.iter_mut().zip(&reaches).zip(&squares) {
        row.step = step_of(*reach, (square / n_tokens).sqrt() * reach, levels);
    }
    rows
}

#[inline(always)]
fn value_steps(pages: &Pages, levels: f32, values: &[f32]) -> Vec<f32> {
    let mut reaches = vec![0.0_f32; pages.n_tokens()];
    let mut squares = vec![0.0_f32; pages.n_tokens()];
    let for_each_row = |visit: &mut dyn FnMut(usize, &[f32])| {
        for ((block, _), tile) in pages.tiles().zip(values.chunks_exact(pages.tile_elements())) {
            let rows = tile[tile.len() / 2..].chunks_exact(pages.head_dim);
            rows.enumerate().for_each(|(slot, row)| visit(block * BLOCK_TOKENS + slot, row));
        }
    };
    for_each_row(&mut |token, row| {
        reaches[token] = row.iter().fold(reaches[token], |most, value| most.max(value.abs()));
    });
    for_each_row(&mut |token, row| {
        let inverse = inverse_of(reaches[token]);
        squares[token] += row.iter().map(|value| (value * inverse) * (value * inverse)).sum::<f32>();
    });
    let n_elements = pages.n_key_rows() as f32;
    let scales = reaches.iter().zip(&squares);
    scales.map(|(reach, square)| step_of(*reach, (square / n_elements).sqrt() * reach, levels)).collect()
}

/// What makes a row's numbers 1 or less; 0 where they are too small for any step.
#[inline(always)]
fn inverse_of(reach: f32) -> f32 {
    if reach > MIN_STEP { 1.0 / reach } else { 0.0 }
}

/// The step for numbers of this reach and spread: no symbol is larger than the largest.
#[inline(always)]
fn step_of(reach: f32, spread: f32, levels: f32) -> f32 {
    let smallest = reach / f32::from(MAX_SYMBOL);
    let wanted = spread / levels;
    widen_bf16(step_bits(if wanted > smallest { wanted } else { smallest }))
}

/// Fills in the symbols of all keys; returns the class of each row.
#[inline(always)]
fn encode_keys<E: Element>(
    pages: &Pages,
    rows: &[KeyRow],
    values: &[f32],
    symbols: &mut [[i8; LANES]],
) -> Vec<u8> {
    let tile_vectors = symbols.len() / (pages.n_blocks * pages.n_heads);
    let mut plain = vec![[0_i8; LANES]; pages.n_blocks];
    let mut differences = vec![[0_i8; LANES]; pages.n_blocks];
    let mut classes = Vec::with_capacity(rows.len());
    for (row_idx, row) in rows.iter().enumerate() {
        let (head, dim) = (row_idx / pages.head_dim, row_idx % pages.head_dim);
        let inverse = 1.0 / row.step;
        let mut fits = true;
        for (block, (plain, differences)) in plain.iter_mut().zip(&mut differences).enumerate() {
            let tile = &values[(block * pages.n_heads + head) * pages.tile_elements()..];
            let vector = &tile.as_chunks::<LANES>().0[dim];
            *plain = vector.map(|value| quantized((value - row.center) * inverse));
            let anchor = stored::<E>(row.center + f32::from(plain[0]) * row.step);
            *differences = vector.map(|value| quantized((value - anchor) * inverse));
            fits &= vector.iter().all(|value| ((value - anchor) * inverse).abs() <= f32::from(MAX_SYMBOL));
            differences[0] = plain[0];
        }
        let takes_differences = fits && magnitudes(&differences) < magnitudes(&plain);
        let chosen = if takes_differences { &differences } else { &plain };
        for (block, vector) in chosen.iter().enumerate() {
            symbols[(block * pages.n_heads + head) * tile_vectors + dim] = *vector;
        }
        let class = Classes::get().cheapest(chosen.as_flattened());
        classes.push(if takes_differences { class | IS_DIFFERENCE } else { class });
    }
    classes
}

/// Fills in the symbols of all values; returns the class of each head of each token, tile by tile.
#[inline(always)]
fn encode_values<E: Element>(
    pages: &Pages,
    steps: &[f32],
    values: &[f32],
    symbols: &mut [[i8; LANES]],
) -> Vec<u8> {
    let tile_vectors = symbols.len() / (pages.n_blocks * pages.n_heads);
    let mut classes = Vec::with_capacity(pages.n_blocks * pages.n_heads * BLOCK_TOKENS);
    let mut anchor = vec![0.0; pages.head_dim];
    let tiles = values.chunks_exact(pages.tile_elements()).zip(symbols.chunks_exact_mut(tile_vectors));
    for ((block, _), (tile, symbols)) in pages.tiles().zip(tiles) {
        let rows = tile[tile.len() / 2..].chunks_exact(pages.head_dim);
        let outs = symbols[pages.head_dim..].chunks_exact_mut(pages.vectors_per_value_row());
        for (slot, (row, out)) in rows.zip(outs).enumerate() {
            let step = steps[block * BLOCK_TOKENS + slot];
            let inverse = 1.0 / step;
            let out = &mut out.as_flattened_mut()[..pages.head_dim];
            let (mut plain_sum, mut difference_sum, mut fits) = (0_u32, 0_u32, slot > 0);
            for (value, anchor) in row.iter().zip(&anchor) {
                plain_sum += u32::from(quantized(value * inverse).unsigned_abs());
                let difference = (value - anchor) * inverse;
                difference_sum += u32::from(quantized(difference).unsigned_abs());
                fits &= difference.abs() <= f32::from(MAX_SYMBOL);
            }
            let takes_differences = fits && difference_sum < plain_sum;
            for ((out, value), anchor) in out.iter_mut().zip(row).zip(&anchor) {
                let base = if takes_differences { *anchor } else { 0.0 };
                *out = quantized((value - base) * inverse);
            }
            let class = Classes::get().cheapest(out);
            classes.push(if takes_differences { class | IS_DIFFERENCE } else { class });
            if slot == 0 {
                for (anchor, symbol) in anchor.iter_mut().zip(out) {
                    *anchor = stored::<E>(f32::from(*symbol) * step);
                }
            }
        }
    }
    classes
}

/// What a decoder has of a value when it is stored.
#[inline(always)]
pub(super) fn stored<E: Element>(value: f32) -> f32 {
    let mut bytes = [0; 4];
    let mut back = [0.0];
    E::store(&[value], &mut bytes[..E::N_BYTES]);
    E::load(&bytes[..E::N_BYTES], &mut back);
    back[0]
}

#[inline(always)]
fn magnitudes(symbols: &[[i8; LANES]]) -> u32 {
    symbols.as_flattened().iter().map(|symbol| u32::from(symbol.unsigned_abs())).sum()
}
