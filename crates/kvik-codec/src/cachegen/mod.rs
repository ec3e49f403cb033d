//! After `CacheGen` (Liu et al., SIGCOMM 2024): differences against anchor tokens, steps by layer, and an entropy coder.
//! The bytes are kvik's own.
//!
//! The first token of every block of sixteen is its *anchor*. An element is coded as it is, around its row's center, or as
//! the difference against the same element of the decoded anchor: each row of keys and each head of values of each
//! token takes what is smaller. Differences are counted in steps: of a key row, a share of its standard deviation over the chunk; of
//! the values of a token, a share of their root mean square. Early layers have smaller steps, and keys smaller ones than
//! values. What results are small integers, coded with one of sixteen fixed distributions ([`classes`]).
//!
//! A coded layer is: for each key row its center and step (bf16 each) and its class; for each token the step of its values (bf16);
//! for each tile and token the class of its values; and one stream. Bit 7 of a class says that differences against anchors were
//! coded. The stream has the vectors of each tile: those of its keys, and the rows of its values, filled up
//! with zeros. The error is at most half a step.

mod classes;
mod decode;
mod encode;

use crate::element::Element;
use crate::error::Result;
use crate::quantizer::{Place, Quantizer};
use crate::simd::Isa;

/// The quantizer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cachegen {
    /// Steps in a standard deviation of a key row, for the first, second and last third of the layers.
    key_levels: [f32; 3],
    /// Steps in the root mean square of the values of a token, likewise.
    value_levels: [f32; 3],
}

impl Default for Cachegen {
    fn default() -> Self {
        Self { key_levels: [7.0, 6.0, 6.0], value_levels: [6.0, 5.0, 5.0] }
    }
}

impl Cachegen {
    fn levels(&self, place: &Place) -> (f32, f32) {
        let third = (place.layer * 3 / place.n_layers.max(1)).min(2);
        (self.key_levels[third], self.value_levels[third])
    }
}

impl Quantizer for Cachegen {
    const NAME: &'static str = "cachegen";
    const ID: u8 = 5;

    #[inline(always)]
    fn encode<E: Element>(&self, _: Isa, place: Place, values: &[f32], out: &mut Vec<u8>) {
        encode::encode::<E>(&place.pages, self.levels(&place), values, out);
    }

    #[inline(always)]
    fn decode<E: Element>(&self, isa: Isa, place: Place, coded: &[u8], section: &mut [u8]) -> Result<()> {
        decode::decode::<E>(isa, &place.pages, coded, section)
    }
}
