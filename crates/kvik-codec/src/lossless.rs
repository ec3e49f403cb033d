//! The same bytes in less: planes of bytes, each coded on its own.
//!
//! Every element is rotated left by one bit, which puts the sign behind the mantissa and makes the exponent of f32 and bf16
//! the first byte. Plane 0 has the first byte of all elements, and so on. Exponents of KV take few values; mantissas are
//! noise.
//!
//! A coded layer is, for each plane, its form (one byte), its length (u32) and its bytes: 0 the plane as it is, 1
//! frequencies and a stream of them, 2 the one byte that all are. In the built-in engine's layout keys and values have
//! frequencies of their own. Sixteen elements are a unit; what the last one lacks is the last element again.

use kvik_types::Dtype;

use crate::codec::Codec;
use crate::element::LANES;
use crate::error::{CodecError, Result};
use crate::none::check_section;
use crate::quantizer::{expect_end, take};
use crate::rans::{Decoder, Frequencies, N_SYMBOLS, encode};
use crate::shape::{ChunkLayout, ChunkShape};
use crate::simd::{Isa, Kernel, Lanes, SlotTable};

/// Units that are decoded at a time, so that all planes of them are in the first cache.
const PART_UNITS: usize = 128;

const PART: usize = PART_UNITS * LANES;

/// The most bytes of an element.
const MAX_PLANES: usize = 4;

const AS_IT_IS: u8 = 0;
const STREAM: u8 = 1;
const CONSTANT: u8 = 2;

/// The codec.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lossless {
    isa: Isa,
}

/// Which units have which frequencies.
#[derive(Debug, Clone, Copy)]
struct Classes {
    /// Units of keys, and of values behind them; 0 where the two are not told apart.
    run_units: usize,
}

/// A plane as it is decoded, part by part.
#[derive(Debug)]
enum Plane<'a> {
    AsItIs(&'a [u8]),
    Constant(u8),
    Stream(Vec<SlotTable>, Decoder<'a>),
}

/// Puts the planes of a part together.
struct Merge<'a> {
    planes: &'a [[u8; PART]; MAX_PLANES],
    n_planes: usize,
    out: &'a mut [u8],
}

impl Lossless {
    pub(crate) fn new(isa: Isa) -> Self {
        Self { isa }
    }
}

impl Codec for Lossless {
    fn name(&self) -> &'static str {
        "lossless"
    }

    fn id(&self) -> u8 {
        1
    }

    fn is_lossless(&self) -> bool {
        true
    }

    fn check(&self, shape: &ChunkShape) -> Result<()> {
        shape.check()
    }

    fn encode_layer(&self, shape: &ChunkShape, _: usize, section: &[u8], out: &mut Vec<u8>) -> Result<()> {
        check_section(shape, section.len())?;
        let classes = Classes::of(shape);
        for plane_idx in 0..shape.dtype.size_bytes() {
            let plane = plane_of(section, shape.dtype, plane_idx);
            let start = out.len();
            out.extend([0; 5]);
            let form = match plane.split_first() {
                Some((first, rest)) if rest.iter().all(|byte| byte == first) => {
                    out.push(*first);
                    CONSTANT
                }
                _ if write_stream(&plane, classes, out) => STREAM,
                _ => {
                    out.truncate(start + 5);
                    out.extend_from_slice(&plane);
                    AS_IT_IS
                }
            };
            let n_bytes = (out.len() - start - 5) as u32;
            out[start] = form;
            out[start + 1..start + 5].copy_from_slice(&n_bytes.to_le_bytes());
        }
        Ok(())
    }

    fn decode_layer(&self, shape: &ChunkShape, _: usize, mut coded: &[u8], section: &mut [u8]) -> Result<()> {
        check_section(shape, section.len())?;
        let n_planes = shape.dtype.size_bytes();
        let classes = Classes::of(shape);
        let mut planes = Vec::with_capacity(n_planes);
        for _ in 0..n_planes {
            planes.push(Plane::read(self.isa, shape.section_elements(), classes, &mut coded)?);
        }
        expect_end(coded)?;
        let mut bytes = [[0; PART]; MAX_PLANES];
        for (part_idx, part) in section.chunks_mut(PART * n_planes).enumerate() {
            let n_elements = part.len() / n_planes;
            let first_unit = part_idx * PART_UNITS;
            let mut unit_classes = [0; PART_UNITS];
            for (unit_idx, class) in unit_classes.iter_mut().enumerate() {
                *class = classes.class_of(first_unit + unit_idx);
            }
            for (plane, bytes) in planes.iter_mut().zip(&mut bytes) {
                plane.next(&unit_classes, n_elements, bytes)?;
            }
            self.isa.run(Merge { planes: &bytes, n_planes, out: part });
        }
        planes.into_iter().try_for_each(Plane::finish)
    }
}

// === impl Classes ===

impl Classes {
    fn of(shape: &ChunkShape) -> Self {
        // Sixteen tokens of a head are `head_dim` units, of keys and then of values.
        let run_units = if let ChunkLayout::KvikPaged { head_dim, .. } = shape.layout { head_dim } else { 0 };
        Self { run_units }
    }

    fn n_classes(self) -> usize {
        if self.run_units == 0 { 1 } else { 2 }
    }

    fn class_of(self, unit_idx: usize) -> u8 {
        unit_idx.checked_div(self.run_units).map_or(0, |run_idx| (run_idx % 2) as u8)
    }
}

// === impl Plane ===

impl<'a> Plane<'a> {
    /// Reads the start of a plane of `n_elements` from the front of `coded`.
    fn read(isa: Isa, n_elements: usize, classes: Classes, coded: &mut &'a [u8]) -> Result<Self> {
        let form = take(coded, 1)?[0];
        let n_bytes = take(coded, 4)?.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes) as usize);
        let mut bytes = take(coded, n_bytes)?;
        match (form, bytes) {
            (AS_IT_IS, bytes) if bytes.len() == n_elements => Ok(Self::AsItIs(bytes)),
            (CONSTANT, [byte]) => Ok(Self::Constant(*byte)),
            (STREAM, _) => {
                let read = |_| Ok(Frequencies::read(&mut bytes)?.slots());
                let tables = (0..classes.n_classes()).map(read).collect::<Result<Vec<SlotTable>>>()?;
                Ok(Self::Stream(tables, Decoder::new(isa, bytes)?))
            }
            _ => Err(CodecError::corrupt("plane of bytes")),
        }
    }

    /// Gives the next `n_elements` bytes.
    fn next(&mut self, classes: &[u8; PART_UNITS], n_elements: usize, out: &mut [u8; PART]) -> Result<()> {
        match self {
            Self::AsItIs(bytes) => out[..n_elements].copy_from_slice(take(bytes, n_elements)?),
            Self::Constant(byte) => out[..n_elements].fill(*byte),
            Self::Stream(tables, decoder) => {
                let n_units = n_elements.div_ceil(LANES);
                let (units, _) = out.as_chunks_mut::<LANES>();
                decoder.decode(tables, &classes[..n_units], &mut units[..n_units])?;
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<()> {
        if let Self::Stream(_, decoder) = self { decoder.finish() } else { Ok(()) }
    }
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        let [first, second, third, fourth] = self.planes;
        if self.n_planes == 2 {
            let (out, _) = self.out.as_chunks_mut::<2>();
            for ((out, high), low) in out.iter_mut().zip(first).zip(second) {
                *out = u16::from_be_bytes([*high, *low]).rotate_right(1).to_le_bytes();
            }
        } else {
            let (out, _) = self.out.as_chunks_mut::<4>();
            let high = first.iter().zip(second);
            for ((out, (a, b)), (c, d)) in out.iter_mut().zip(high).zip(third.iter().zip(fourth)) {
                *out = u32::from_be_bytes([*a, *b, *c, *d]).rotate_right(1).to_le_bytes();
            }
        }
    }
}

/// One byte of every element, the first at 0.
fn plane_of(section: &[u8], dtype: Dtype, plane_idx: usize) -> Vec<u8> {
    if dtype.size_bytes() == 2 {
        let (elements, _) = section.as_chunks::<2>();
        elements
            .iter()
            .map(|bytes| u16::from_le_bytes(*bytes).rotate_left(1).to_be_bytes()[plane_idx])
            .collect()
    } else {
        let (elements, _) = section.as_chunks::<4>();
        elements
            .iter()
            .map(|bytes| u32::from_le_bytes(*bytes).rotate_left(1).to_be_bytes()[plane_idx])
            .collect()
    }
}

/// Appends frequencies and stream of a plane, unless they are not smaller than it; what was appended is then nothing
/// of use.
fn write_stream(plane: &[u8], classes: Classes, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    let mut units = plane.to_vec();
    units.resize(plane.len().next_multiple_of(LANES), plane.last().copied().unwrap_or_default());
    let unit_classes: Vec<u8> = (0..units.len() / LANES).map(|unit_idx| classes.class_of(unit_idx)).collect();
    let mut weights = vec![[0; N_SYMBOLS]; classes.n_classes()];
    for (unit, class) in units.as_chunks::<LANES>().0.iter().zip(&unit_classes) {
        for symbol in unit {
            weights[usize::from(*class)][usize::from(*symbol)] += 1;
        }
    }
    let frequencies: Vec<Frequencies> = weights.iter().map(Frequencies::of_weights).collect();
    for class_frequencies in &frequencies {
        class_frequencies.write(out);
    }
    let ranges: Vec<_> = frequencies.iter().map(Frequencies::ranges).collect();
    encode(&units, &unit_classes, &ranges, out);
    out.len() - start < plane.len()
}
