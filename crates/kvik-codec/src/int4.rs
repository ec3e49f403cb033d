//! Four bits an element, in groups of thirty-two with a lowest number and a step of their own.
//!
//! A group of keys is one element of one head over 32 tokens, a group of values 32 elements of one head of one token.
//! A coded layer is: for each pair of blocks the lowest and the step (bf16 each) of each key row, for each tile and token
//! those of each group of values, and half a byte for each element in vectors of sixteen, eight bytes each: the first eight elements in the
//! lower halves. A row of values that ends within a vector is filled with zeros. The error is at most half of 1/15 of the group's range, rounded
//! up to a bf16.

use crate::element::{Element, LANES, bf16_at_most, narrow_bf16, widen_bf16};
use crate::error::Result;
use crate::paged::Pages;
use crate::quantizer::{Place, Quantizer, expect_end, quantized, scale_of, step_bits, take};
use crate::shape::BLOCK_TOKENS;
use crate::simd::Isa;

/// Elements of a group.
const GROUP: usize = 32;

/// Blocks of a group of keys.
const GROUP_BLOCKS: usize = GROUP / BLOCK_TOKENS;

/// Bytes of a vector of sixteen.
const VECTOR_BYTES: usize = LANES / 2;

/// The largest code.
const LARGEST: f32 = 15.0;

/// The quantizer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Int4;

/// What the codes of a group mean: `lowest + code * step`.
#[derive(Debug, Clone, Copy)]
struct Group {
    lowest: f32,
    step: f32,
    /// 1 / `step`.
    inverse: f32,
}

impl Quantizer for Int4 {
    const NAME: &'static str = "int4";
    const ID: u8 = 4;

    #[inline(always)]
    fn encode<E: Element>(&self, _: Isa, place: Place, values: &[f32], out: &mut Vec<u8>) {
        let pages = place.pages;
        let key_groups = key_groups(&pages, values);
        let value_groups: Vec<Group> = values
            .chunks_exact(pages.tile_elements())
            .flat_map(|tile| tile[tile.len() / 2..].chunks_exact(pages.head_dim))
            .flat_map(|row| row.chunks(GROUP))
            .map(|group| Group::of(bounds((f32::INFINITY, f32::NEG_INFINITY), group)))
            .collect();
        for group in key_groups.iter().chain(&value_groups) {
            out.extend(narrow_bf16(group.lowest).to_le_bytes());
            out.extend(narrow_bf16(group.step).to_le_bytes());
        }
        let mut value_groups = value_groups.chunks_exact(pages.head_dim.div_ceil(GROUP));
        for ((block, head), tile) in pages.tiles().zip(values.chunks_exact(pages.tile_elements())) {
            let (tile_keys, tile_values) = tile.split_at(tile.len() / 2);
            let groups = &key_groups[block / GROUP_BLOCKS * pages.n_key_rows() + head * pages.head_dim..];
            for (group, vector) in groups.iter().zip(tile_keys.as_chunks::<LANES>().0) {
                out.extend(packed(&vector.map(|value| group.code(value))));
            }
            for row in tile_values.chunks_exact(pages.head_dim) {
                let groups = value_groups.next().unwrap_or_default();
                for (group, part) in groups.iter().zip(row.chunks(GROUP)) {
                    for vector in part.chunks(LANES) {
                        let mut codes = [0; LANES];
                        for (code, value) in codes.iter_mut().zip(vector) {
                            *code = group.code(*value);
                        }
                        out.extend(packed(&codes));
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn decode<E: Element>(&self, _: Isa, place: Place, mut coded: &[u8], section: &mut [u8]) -> Result<()> {
        let pages = place.pages;
        let n_tiles = pages.n_blocks * pages.n_heads;
        let n_key_groups = pages.n_blocks.div_ceil(GROUP_BLOCKS) * pages.n_key_rows();
        let groups_per_row = pages.head_dim.div_ceil(GROUP);
        let key_groups = take(&mut coded, 4 * n_key_groups)?.as_chunks::<4>().0;
        let value_groups = take(&mut coded, 4 * n_tiles * BLOCK_TOKENS * groups_per_row)?.as_chunks::<4>().0;
        let row_vectors = pages.vectors_per_value_row();
        let tile_vectors = pages.head_dim + BLOCK_TOKENS * row_vectors;
        let vectors = take(&mut coded, n_tiles * tile_vectors * VECTOR_BYTES)?.as_chunks::<VECTOR_BYTES>().0;
        expect_end(coded)?;
        let outs = section.chunks_exact_mut(pages.tile_elements() * E::N_BYTES);
        let tiles = pages.tiles().zip(vectors.chunks_exact(tile_vectors)).zip(outs);
        let mut value_groups = value_groups.chunks_exact(groups_per_row);
        for (((block, head), vectors), out) in tiles {
            let (key_vectors, value_vectors) = vectors.split_at(pages.head_dim);
            let (key_out, value_out) = out.split_at_mut(out.len() / 2);
            let groups = &key_groups[block / GROUP_BLOCKS * pages.n_key_rows() + head * pages.head_dim..];
            let outs = key_out.chunks_exact_mut(LANES * E::N_BYTES);
            for ((group, vector), out) in groups.iter().zip(key_vectors).zip(outs) {
                E::store(&Group::read(*group)?.values(*vector), out);
            }
            let rows = value_vectors.chunks_exact(row_vectors);
            for (vectors, out) in rows.zip(value_out.chunks_exact_mut(pages.head_dim * E::N_BYTES)) {
                let groups = value_groups.next().unwrap_or_default();
                let outs = out.chunks_mut(LANES * E::N_BYTES);
                for (vector_idx, (vector, out)) in vectors.iter().zip(outs).enumerate() {
                    // A vector that is wider than what is left of its row stores as much as there is.
                    E::store(&Group::read(groups[vector_idx * LANES / GROUP])?.values(*vector), out);
                }
            }
        }
        Ok(())
    }
}

impl Group {
    #[inline(always)]
    fn new(lowest: f32, step: f32) -> Self {
        Self { lowest, step, inverse: 1.0 / step }
    }

    #[inline(always)]
    fn of((low, high): (f32, f32)) -> Self {
        let lowest = widen_bf16(bf16_at_most(low));
        Self::new(lowest, widen_bf16(step_bits((high - lowest) / LARGEST)))
    }

    #[inline(always)]
    fn read([lowest_0, lowest_1, step_0, step_1]: [u8; 4]) -> Result<Self> {
        Ok(Self::new(scale_of([lowest_0, lowest_1])?, scale_of([step_0, step_1])?))
    }

    #[inline(always)]
    fn code(self, value: f32) -> u8 {
        let code = (value - self.lowest) * self.inverse;
        quantized(if code < LARGEST { code } else { LARGEST }) as u8 & 0xf
    }

    #[inline(always)]
    fn values(self, vector: [u8; VECTOR_BYTES]) -> [f32; LANES] {
        std::array::from_fn(|lane| {
            let code = vector[lane % VECTOR_BYTES] >> (lane / VECTOR_BYTES * 4) & 0xf;
            self.lowest + f32::from(code) * self.step
        })
    }
}

#[inline(always)]
fn packed(codes: &[u8; LANES]) -> [u8; VECTOR_BYTES] {
    std::array::from_fn(|idx| codes[idx] | codes[idx + VECTOR_BYTES] << 4)
}

#[inline(always)]
fn bounds(start: (f32, f32), values: &[f32]) -> (f32, f32) {
    values.iter().fold(start, |(low, high), value| {
        (if *value < low { *value } else { low }, if *value > high { *value } else { high })
    })
}

/// The groups of keys: for each pair of blocks those of all rows.
#[inline(always)]
fn key_groups(pages: &Pages, values: &[f32]) -> Vec<Group> {
    let n_groups = pages.n_blocks.div_ceil(GROUP_BLOCKS) * pages.n_key_rows();
    let mut found = vec![(f32::INFINITY, f32::NEG_INFINITY); n_groups];
    for ((block, head), tile) in pages.tiles().zip(values.chunks_exact(pages.tile_elements())) {
        let first = block / GROUP_BLOCKS * pages.n_key_rows() + head * pages.head_dim;
        let rows = &mut found[first..][..pages.head_dim];
        for (row, vector) in rows.iter_mut().zip(tile.as_chunks::<LANES>().0) {
            *row = bounds(*row, vector);
        }
    }
    found.into_iter().map(Group::of).collect()
}
