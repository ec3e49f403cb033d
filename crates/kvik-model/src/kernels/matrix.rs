//! Weight matrices in the order in which the matrix kernel reads them.
//!
//! A matrix of `n_outputs` rows and `n_inputs` columns is cut into panels of sixteen rows. A
//! panel holds, for each input in rising order, the sixteen weights of its rows side by side, so
//! that one vector load serves sixteen outputs. bf16 panels hold two inputs at a time, pair by
//! pair, because a pair widens to two f32 vectors with one shift and one mask. Weights keep
//! their stored dtype; missing rows and inputs at the edges are zero.

use crate::checkpoint::{Tensor, WeightDtype};
use crate::error::{ModelError, Result};

use super::shared::Aligned;
use super::simd::LANES;

/// The smallest multiple of the vector width that is not below `n`; the stride of every
/// activation row, whose padding is always zero.
pub(crate) const fn padded(n: usize) -> usize {
    n.div_ceil(LANES) * LANES
}

/// A tensor that becomes rows of a [`PackedMatrix`].
#[derive(Debug)]
pub(crate) struct MatrixSource {
    /// The tensor: `[n_outputs, n_inputs]`, or `[n_inputs, n_outputs]` if `is_transposed`.
    pub(crate) tensor: Tensor,
    /// Whether the tensor has its inputs as rows, as GPT-2 stores them.
    pub(crate) is_transposed: bool,
}

/// The panels, by stored dtype.
#[derive(Debug)]
pub(crate) enum Panels {
    F32(Vec<Aligned<[f32; LANES]>>),
    F16(Vec<Aligned<[u16; LANES]>>),
    Bf16(Vec<Aligned<[u16; 2 * LANES]>>),
}

/// A weight matrix, packed.
#[derive(Debug)]
pub(crate) struct PackedMatrix {
    n_outputs: usize,
    n_inputs: usize,
    pub(super) panels: Panels,
}

impl PackedMatrix {
    /// Packs the rows of `sources` into one matrix. Each source starts on a panel of its own, so
    /// output `padded(n)` follows a source of `n` rows. Sources of different dtypes become f32,
    /// which is exact.
    ///
    /// # Errors
    /// If a source has not two dimensions, or the sources differ in their number of inputs.
    pub(crate) fn pack(sources: &[MatrixSource]) -> Result<Self> {
        let (_, n_inputs) = sources.first().map_or(Ok((0, 0)), MatrixSource::shape)?;
        let mut n_outputs = 0;
        for source in sources {
            let (rows, columns) = source.shape()?;
            if columns != n_inputs {
                let reason = format!("{columns} inputs where {n_inputs} are needed");
                return Err(ModelError::weights("fused matrix", reason));
            }
            n_outputs = padded(n_outputs) + rows;
        }
        let n_panels = n_outputs.div_ceil(LANES);
        let dtype = sources.first().map_or(WeightDtype::F32, |source| source.tensor.dtype);
        let is_uniform = sources.iter().all(|source| source.tensor.dtype == dtype);
        let panels = match dtype {
            WeightDtype::BF16 if is_uniform => {
                let n_pairs = n_inputs.div_ceil(2);
                let mut panels = vec![Aligned([0; 2 * LANES]); n_panels * n_pairs];
                for_each_bits16(sources, |output, input, bits| {
                    let chunk = &mut panels[output / LANES * n_pairs + input / 2].0;
                    chunk[2 * (output % LANES) + input % 2] = bits;
                });
                Panels::Bf16(panels)
            }
            WeightDtype::F16 if is_uniform => {
                let mut panels = vec![Aligned([0; LANES]); n_panels * n_inputs];
                for_each_bits16(sources, |output, input, bits| {
                    panels[output / LANES * n_inputs + input].0[output % LANES] = bits;
                });
                Panels::F16(panels)
            }
            _ => {
                let mut panels = vec![Aligned([0.0; LANES]); n_panels * n_inputs];
                for_each_f32(sources, |output, input, weight| {
                    panels[output / LANES * n_inputs + input].0[output % LANES] = weight;
                });
                Panels::F32(panels)
            }
        };
        Ok(Self { n_outputs, n_inputs, panels })
    }

    pub(crate) fn n_outputs(&self) -> usize {
        self.n_outputs
    }

    pub(crate) fn n_inputs(&self) -> usize {
        self.n_inputs
    }

    pub(super) fn n_panels(&self) -> usize {
        self.n_outputs.div_ceil(LANES)
    }

    /// Bytes of the packed weights.
    pub(crate) fn size_bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(panels) => size_of_val(panels.as_slice()),
            Panels::F16(panels) => size_of_val(panels.as_slice()),
            Panels::Bf16(panels) => size_of_val(panels.as_slice()),
        }
    }

    /// Writes row `output` as f32 to the front of `row`: the embedding of a token, where the
    /// embedding is also the output matrix.
    ///
    /// # Panics
    /// If there is no such row or `row` is shorter than the number of inputs.
    pub(crate) fn unpack_row(&self, output: usize, row: &mut [f32]) {
        assert!(output < self.n_outputs, "row {output} of a matrix of {} rows", self.n_outputs);
        let (panel, lane) = (output / LANES, output % LANES);
        for (input, value) in row[..self.n_inputs].iter_mut().enumerate() {
            *value = match &self.panels {
                Panels::F32(panels) => panels[panel * self.n_inputs + input].0[lane],
                Panels::F16(panels) => {
                    half::f16::from_bits(panels[panel * self.n_inputs + input].0[lane]).to_f32()
                }
                Panels::Bf16(panels) => {
                    let chunk = &panels[panel * self.n_inputs.div_ceil(2) + input / 2].0;
                    half::bf16::from_bits(chunk[2 * lane + input % 2]).to_f32()
                }
            };
        }
    }
}

impl MatrixSource {
    /// A source stored as `[n_outputs, n_inputs]`.
    pub(crate) fn rows(tensor: Tensor) -> Self {
        Self { tensor, is_transposed: false }
    }

    /// A source stored as `[n_inputs, n_outputs]`.
    pub(crate) fn columns(tensor: Tensor) -> Self {
        Self { tensor, is_transposed: true }
    }

    /// `(n_outputs, n_inputs)`.
    pub(crate) fn shape(&self) -> Result<(usize, usize)> {
        match (self.tensor.shape.as_slice(), self.is_transposed) {
            (&[rows, columns], false) | (&[columns, rows], true) => Ok((rows, columns)),
            (shape, _) => {
                Err(ModelError::weights("matrix", format!("shape {shape:?} has not two dimensions")))
            }
        }
    }

    /// Calls `place` with (output, input, index of the element in the tensor); returns the first
    /// output of the source after this one.
    fn for_each_index(
        &self,
        first_output: usize,
        mut place: impl FnMut(usize, usize, usize),
    ) -> Result<usize> {
        let (n_outputs, n_inputs) = self.shape()?;
        for output in 0..n_outputs {
            for input in 0..n_inputs {
                let index =
                    if self.is_transposed { input * n_outputs + output } else { output * n_inputs + input };
                place(first_output + output, input, index);
            }
        }
        Ok(padded(first_output + n_outputs))
    }
}

fn for_each_bits16(sources: &[MatrixSource], mut place: impl FnMut(usize, usize, u16)) {
    let mut first_output = 0;
    for source in sources {
        let (bits, _) = source.tensor.bytes.as_chunks::<2>();
        let end = source.for_each_index(first_output, |output, input, index| {
            place(output, input, u16::from_le_bytes(bits[index]));
        });
        first_output = end.unwrap_or(first_output);
    }
}

fn for_each_f32(sources: &[MatrixSource], mut place: impl FnMut(usize, usize, f32)) {
    let mut first_output = 0;
    for source in sources {
        let values = source.tensor.to_f32();
        let end = source.for_each_index(first_output, |output, input, index| {
            place(output, input, values[index]);
        });
        first_output = end.unwrap_or(first_output);
    }
}
