//! What the lossy codecs have in common.
//!
//! A coded layer begins with one byte: 1 before what the quantizer wrote, 0 before the section as it is. A section is
//! kept as it is where it has a number that is not finite or larger than 2^100, because no scale would fit its neighbors.

use std::fmt;

use kvik_types::Dtype;

use crate::codec::Codec;
use crate::element::{Bf16, Element, F16, F32, MAX_MAGNITUDE, bf16_at_least, widen_bf16};
use crate::error::{CodecError, Result};
use crate::none::check_section;
use crate::paged::{Pages, widened};
use crate::repack::{pages_to_rows, rows_to_pages};
use crate::shape::{BLOCK_TOKENS, ChunkLayout, ChunkShape, MAX_HEAD_DIM};
use crate::simd::{Isa, Kernel, Lanes};

/// The smallest step: what differs by less than half of it is the same.
pub(crate) const MIN_STEP: f32 = 8.673_617e-19; // 2^-60

/// First byte of a layer that is kept as it is.
const AS_IT_IS: u8 = 0;

/// First byte of a layer that was quantized.
const QUANTIZED: u8 = 1;

/// A way to code the elements of a section in the built-in engine's layout.
pub(crate) trait Quantizer: Copy + fmt::Debug + Send + Sync + 'static {
    const NAME: &'static str;
    const ID: u8;

    /// Appends the coded form of the values, which are finite and at most [`MAX_MAGNITUDE`]. Implementations MUST be
    /// `#[inline(always)]`.
    fn encode<E: Element>(&self, isa: Isa, place: Place, values: &[f32], out: &mut Vec<u8>);

    /// Decodes into a section of elements. Implementations MUST be `#[inline(always)]`.
    ///
    /// # Errors
    /// If `coded` is nothing that [`Self::encode`] gives.
    fn decode<E: Element>(&self, isa: Isa, place: Place, coded: &[u8], section: &mut [u8]) -> Result<()>;
}

/// Which section is coded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) pages: Pages,
    pub(crate) layer: usize,
    pub(crate) n_layers: usize,
}

/// The codec of a quantizer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quantized<Q> {
    quantizer: Q,
    isa: Isa,
}

struct EncodeSection<'a, Q> {
    codec: Quantized<Q>,
    place: Place,
    dtype: Dtype,
    section: &'a [u8],
    out: &'a mut Vec<u8>,
}

struct DecodeSection<'a, Q> {
    codec: Quantized<Q>,
    place: Place,
    dtype: Dtype,
    coded: &'a [u8],
    section: &'a mut [u8],
}

impl<Q: Quantizer> Quantized<Q> {
    pub(crate) fn new(quantizer: Q, isa: Isa) -> Self {
        Self { quantizer, isa }
    }

    /// The numbers of a section as pages; of rows, what they are when they are packed so.
    fn place(shape: &ChunkShape, layer: usize) -> Result<Place> {
        shape.check()?;
        let (ChunkLayout::KvikPaged { n_kv_heads, head_dim }
        | ChunkLayout::KeysThenValues { n_kv_heads, head_dim }) = shape.layout
        else {
            let allowed = format!("kvik_paged or kv_2td for the codec `{}`", Q::NAME);
            return Err(CodecError::invalid("layout", &shape.layout, allowed));
        };
        if head_dim > MAX_HEAD_DIM || head_dim % 2 != 0 {
            let allowed = format!("even, 2 to {MAX_HEAD_DIM}, for the codec `{}`", Q::NAME);
            return Err(CodecError::invalid("head_dim", &head_dim, allowed));
        }
        let n_blocks = shape.n_tokens.div_ceil(BLOCK_TOKENS);
        let pages = Pages { n_blocks, n_heads: n_kv_heads, head_dim };
        Ok(Place { pages, layer, n_layers: shape.n_layers })
    }
}

impl<Q: Quantizer> Codec for Quantized<Q> {
    fn name(&self) -> &'static str {
        Q::NAME
    }

    fn id(&self) -> u8 {
        Q::ID
    }

    fn is_lossless(&self) -> bool {
        false
    }

    fn check(&self, shape: &ChunkShape) -> Result<()> {
        Self::place(shape, 0).map(|_| ())
    }

    fn encode_layer(
        &self,
        shape: &ChunkShape,
        layer: usize,
        section: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let place = Self::place(shape, layer)?;
        check_section(shape, section.len())?;
        let packed = match shape.layout {
            ChunkLayout::KeysThenValues { .. } => {
                Some(rows_to_pages(&place.pages, shape.n_tokens, shape.dtype.size_bytes(), section))
            }
            _ => None,
        };
        let start = out.len();
        out.push(QUANTIZED);
        let encode = EncodeSection {
            codec: *self,
            place,
            dtype: shape.dtype,
            section: packed.as_deref().unwrap_or(section),
            out,
        };
        if !self.isa.run(encode) {
            out.truncate(start);
            out.push(AS_IT_IS);
            out.extend_from_slice(section);
        }
        Ok(())
    }

    fn decode_layer(&self, shape: &ChunkShape, layer: usize, coded: &[u8], section: &mut [u8]) -> Result<()> {
        let place = Self::place(shape, layer)?;
        check_section(shape, section.len())?;
        let (form, coded) = coded.split_first().ok_or(CodecError::corrupt("length of a layer"))?;
        if *form == AS_IT_IS && coded.len() == section.len() {
            section.copy_from_slice(coded);
            return Ok(());
        }
        if *form != QUANTIZED {
            return Err(CodecError::corrupt("form of a layer"));
        }
        let dtype = shape.dtype;
        if let ChunkLayout::KeysThenValues { .. } = shape.layout {
            let mut packed = vec![0; place.pages.n_elements() * dtype.size_bytes()];
            self.isa.run(DecodeSection { codec: *self, place, dtype, coded, section: &mut packed })?;
            pages_to_rows(&place.pages, shape.n_tokens, dtype.size_bytes(), &packed, section);
            return Ok(());
        }
        self.isa.run(DecodeSection { codec: *self, place, dtype, coded, section })
    }
}

impl<Q: Quantizer> Kernel for EncodeSection<'_, Q> {
    /// Whether it was quantized.
    type Output = bool;

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) -> bool {
        match self.dtype {
            Dtype::F32 => self.encode::<F32>(),
            Dtype::F16 => self.encode::<F16>(),
            _ => self.encode::<Bf16>(),
        }
    }
}

impl<Q: Quantizer> EncodeSection<'_, Q> {
    #[inline(always)]
    fn encode<E: Element>(self) -> bool {
        if !self.section.chunks_exact(E::N_BYTES).all(E::is_codable) {
            return false;
        }
        let values = widened::<E>(self.section);
        self.codec.quantizer.encode::<E>(self.codec.isa, self.place, &values, self.out);
        true
    }
}

impl<Q: Quantizer> Kernel for DecodeSection<'_, Q> {
    type Output = Result<()>;

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) -> Result<()> {
        let Self { codec: Quantized { quantizer, isa }, place, dtype, coded, section } = self;
        match dtype {
            Dtype::F32 => quantizer.decode::<F32>(isa, place, coded, section),
            Dtype::F16 => quantizer.decode::<F16>(isa, place, coded, section),
            _ => quantizer.decode::<Bf16>(isa, place, coded, section),
        }
    }
}

/// The bf16 of a step that is at least `step`.
#[inline(always)]
pub(crate) fn step_bits(step: f32) -> u16 {
    bf16_at_least(if step > MIN_STEP { step } else { MIN_STEP })
}

/// A step or a center that was written as bf16.
///
/// # Errors
/// If it is not within what an encoder writes.
#[inline(always)]
pub(crate) fn scale_of(bytes: [u8; 2]) -> Result<f32> {
    let value = widen_bf16(u16::from_le_bytes(bytes));
    // Twice the bound: centers and steps are rounded.
    if value.abs() <= 2.0 * MAX_MAGNITUDE { Ok(value) } else { Err(CodecError::corrupt("scale")) }
}

/// Rounds to the nearest integer, ties to even, and limits it to -127 to 127.
#[inline(always)]
pub(crate) fn quantized(value: f32) -> i8 {
    // Adding and subtracting 1.5 * 2^23 leaves no place for a fraction.
    const NO_FRACTION: f32 = 12_582_912.0;
    let limited = if value > -127.0 { value } else { -127.0 };
    let limited = if limited < 127.0 { limited } else { 127.0 };
    (limited + NO_FRACTION - NO_FRACTION) as i8
}

/// Splits `n_bytes` off the front.
pub(crate) fn take<'a>(coded: &mut &'a [u8], n_bytes: usize) -> Result<&'a [u8]> {
    let (front, rest) = coded.split_at_checked(n_bytes).ok_or(CodecError::corrupt("length of a layer"))?;
    *coded = rest;
    Ok(front)
}

/// Fails if anything is left.
pub(crate) fn expect_end(coded: &[u8]) -> Result<()> {
    if coded.is_empty() { Ok(()) } else { Err(CodecError::corrupt("length of a layer")) }
}
