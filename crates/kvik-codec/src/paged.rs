//! Where rows of keys and values lie in a section of the built-in engine's layout.
//!
//! A section is a sequence of *tiles*, one for each block and head, block by block: first the keys, a vector of sixteen tokens
//! for each element of the head, then the values, a row for each of the sixteen tokens. A *key row* is one element of one
//! head over all tokens of the chunk; it has a vector in each block.

use crate::element::{Element, LANES};
use crate::shape::BLOCK_TOKENS;

/// The numbers of a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pages {
    pub(crate) n_blocks: usize,
    pub(crate) n_heads: usize,
    pub(crate) head_dim: usize,
}

impl Pages {
    /// Key rows of the section: each element of each head.
    pub(crate) fn n_key_rows(&self) -> usize {
        self.n_heads * self.head_dim
    }

    pub(crate) fn n_tokens(&self) -> usize {
        self.n_blocks * BLOCK_TOKENS
    }

    /// Elements of one tile, of which the first half are keys.
    pub(crate) fn tile_elements(&self) -> usize {
        2 * BLOCK_TOKENS * self.head_dim
    }

    pub(crate) fn n_elements(&self) -> usize {
        self.n_blocks * self.n_heads * self.tile_elements()
    }

    /// Vectors of sixteen that hold a row of values.
    pub(crate) fn vectors_per_value_row(&self) -> usize {
        self.head_dim.div_ceil(LANES)
    }

    /// Block and head of every tile, in the order in which they lie.
    pub(crate) fn tiles(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let n_heads = self.n_heads;
        (0..self.n_blocks).flat_map(move |block| (0..n_heads).map(move |head| (block, head)))
    }
}

/// Widens a section to f32.
#[inline(always)]
pub(crate) fn widened<E: Element>(section: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; section.len() / E::N_BYTES];
    E::load(section, &mut values);
    values
}
