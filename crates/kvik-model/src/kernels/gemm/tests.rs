use half::{bf16, f16};
use proptest::prelude::*;

use super::super::matrix::MatrixSource;
use super::*;
use crate::checkpoint::{Tensor, WeightDtype};

const DTYPES: [WeightDtype; 3] = [WeightDtype::F32, WeightDtype::F16, WeightDtype::BF16];

/// Numbers in -1..1 that look random.
fn numbers(n: usize, salt: u64) -> Vec<f32> {
    let mut state = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(n).collect()
}

fn tensor(dtype: WeightDtype, shape: [usize; 2], values: &[f32]) -> Tensor {
    let bytes: Vec<u8> = match dtype {
        WeightDtype::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        WeightDtype::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        WeightDtype::BF16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
    };
    Tensor { dtype, shape: shape.to_vec(), bytes: bytes.into() }
}

/// A product and everything it needs.
struct Case {
    n_outputs: usize,
    n_inputs: usize,
    n_rows: usize,
    matrix: PackedMatrix,
    /// The weights as stored, widened.
    weights: Vec<f32>,
    bias: Option<Vec<f32>>,
    x: Vec<f32>,
    combine: Combine,
    before: Vec<f32>,
}

impl Case {
    fn new(dtype: WeightDtype, n_outputs: usize, n_inputs: usize, n_rows: usize, salt: u64) -> Self {
        let stored = tensor(dtype, [n_outputs, n_inputs], &numbers(n_outputs * n_inputs, salt));
        let weights = stored.to_f32();
        let matrix = PackedMatrix::pack(&[MatrixSource::rows(stored)]).unwrap();
        let rows_of = |n: usize, salt| {
            let mut rows = vec![0.0; n_rows * padded(n)];
            for (row, values) in rows.chunks_exact_mut(padded(n)).zip(numbers(n_rows * n, salt).chunks(n)) {
                row[..n].copy_from_slice(values);
            }
            rows
        };
        let bias = salt.is_multiple_of(2).then(|| {
            let mut bias = numbers(n_outputs, salt + 3);
            bias.resize(padded(n_outputs), 0.0);
            bias
        });
        Self {
            n_outputs,
            n_inputs,
            n_rows,
            matrix,
            weights,
            bias,
            x: rows_of(n_inputs, salt + 1),
            combine: if salt.is_multiple_of(3) { Combine::Add } else { Combine::Replace },
            before: rows_of(n_outputs, salt + 2),
        }
    }

    fn run(&self, isa: Isa, pool: &mut ThreadPool) -> Vec<f32> {
        let mut out = self.before.clone();
        let bias = self.bias.as_deref();
        matmul(isa, pool, &self.matrix, bias, &self.x, self.n_rows, self.combine, &mut out);
        out
    }

    /// The rows `first..first + n_rows` alone.
    fn run_rows(&self, isa: Isa, pool: &mut ThreadPool, first: usize, n_rows: usize) -> Vec<f32> {
        let mut out = self.before[first * padded(self.n_outputs)..].to_vec();
        let x = &self.x[first * padded(self.n_inputs)..];
        let bias = self.bias.as_deref();
        matmul(isa, pool, &self.matrix, bias, x, n_rows, self.combine, &mut out);
        out.truncate(n_rows * padded(self.n_outputs));
        out
    }

    /// The element of the definition: one chain of fused multiply-adds over rising `k`.
    fn element(&self, row: usize, output: usize) -> f32 {
        let mut sum = 0.0_f32;
        for k in 0..self.n_inputs {
            let weight = self.weights[output * self.n_inputs + k];
            sum = self.x[row * padded(self.n_inputs) + k].mul_add(weight, sum);
        }
        if let Some(bias) = &self.bias {
            sum += bias[output];
        }
        match self.combine {
            Combine::Add => self.before[row * padded(self.n_outputs) + output] + sum,
            Combine::Replace => sum,
        }
    }

    fn exact_element(&self, row: usize, output: usize) -> f64 {
        let mut sum = 0.0_f64;
        for k in 0..self.n_inputs {
            let x = f64::from(self.x[row * padded(self.n_inputs) + k]);
            sum += x * f64::from(self.weights[output * self.n_inputs + k]);
        }
        sum += self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[output]));
        match self.combine {
            Combine::Add => sum + f64::from(self.before[row * padded(self.n_outputs) + output]),
            Combine::Replace => sum,
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn every_element_is_one_chain_over_rising_inputs_and_near_the_exact_product() {
    let mut pool = ThreadPool::new(2);
    for (idx, dtype) in DTYPES.into_iter().enumerate() {
        for (n_outputs, n_inputs) in [(1, 1), (16, 16), (17, 3), (40, 33), (130, 65), (151, 100)] {
            for n_rows in [1, 2, 3, 7] {
                let salt = (idx + n_outputs + n_rows) as u64;
                let case = Case::new(dtype, n_outputs, n_inputs, n_rows, salt);
                let out = case.run(Isa::detect(), &mut pool);
                for (row, values) in out.chunks_exact(padded(n_outputs)).enumerate() {
                    for (output, value) in values.iter().enumerate() {
                        let place = format!("{dtype} {n_outputs}x{n_inputs} row {row} output {output}");
                        if n_outputs <= output {
                            assert_eq!(value.to_bits(), 0, "{place}: the padding");
                            continue;
                        }
                        assert_eq!(value.to_bits(), case.element(row, output).to_bits(), "{place}");
                        let error = (f64::from(*value) - case.exact_element(row, output)).abs();
                        // Each of the `n_inputs` steps rounds a sum below `n_inputs`.
                        let tolerance = 1e-7 * (n_inputs + 2) as f64;
                        assert!(error <= tolerance, "{place}: off by {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn rows_have_the_same_bits_in_every_number_of_rows() {
    let mut pool = ThreadPool::new(1);
    for dtype in DTYPES {
        // 13 panels: one wide tile of eight, one of four and a rest of one.
        let case = Case::new(dtype, 13 * LANES - 5, 37, 20, 6);
        for isa in Isa::available() {
            let whole = case.run(isa, &mut pool);
            for n_rows in 1..=20 {
                for first in [0, 20 - n_rows] {
                    let rows = case.run_rows(isa, &mut pool, first, n_rows);
                    let start = first * padded(case.n_outputs);
                    assert_eq!(
                        bits(&rows),
                        bits(&whole[start..start + rows.len()]),
                        "{isa} {dtype} {n_rows}"
                    );
                }
            }
        }
    }
}

#[test]
fn many_panels_have_the_same_bits_on_every_number_of_threads() {
    for dtype in DTYPES {
        let case = Case::new(dtype, 1000, 48, 3, 9);
        let expected = case.run(Isa::detect(), &mut ThreadPool::new(1));
        for n_threads in 2..=5 {
            let mut pool = ThreadPool::new(n_threads);
            for _ in 0..20 {
                assert_eq!(bits(&case.run(Isa::detect(), &mut pool)), bits(&expected));
            }
        }
    }
}

#[test]
fn a_transposed_source_and_stacked_sources_give_the_products_of_their_rows() {
    let (n_inputs, sizes) = (21, [20, 16, 7]);
    let x = {
        let mut x = numbers(n_inputs, 1);
        x.resize(padded(n_inputs), 0.0);
        x
    };
    for dtypes in [[WeightDtype::BF16; 3], [WeightDtype::F16; 3], DTYPES] {
        let stored: Vec<Tensor> = sizes
            .iter()
            .zip(dtypes)
            .map(|(&n, dtype)| tensor(dtype, [n, n_inputs], &numbers(n * n_inputs, n as u64)))
            .collect();
        let sources: Vec<MatrixSource> = stored
            .iter()
            .enumerate()
            .map(|(idx, stored)| {
                if idx % 2 == 0 {
                    return MatrixSource::rows(stored.clone());
                }
                let values = stored.to_f32();
                let n = sizes[idx];
                let columns: Vec<f32> = (0..n_inputs)
                    .flat_map(|input| (0..n).map(move |output| output * n_inputs + input))
                    .map(|index| values[index])
                    .collect();
                MatrixSource::columns(tensor(stored.dtype, [n_inputs, n], &columns))
            })
            .collect();
        let matrix = PackedMatrix::pack(&sources).unwrap();
        let mut out = vec![0.0; padded(matrix.n_outputs())];
        let mut pool = ThreadPool::new(1);
        matmul(Isa::detect(), &mut pool, &matrix, None, &x, 1, Combine::Replace, &mut out);
        let mut first = 0;
        for (stored, n) in stored.iter().zip(sizes) {
            for (output, weights) in stored.to_f32().chunks(n_inputs).enumerate() {
                let chain = x.iter().zip(weights).fold(0.0_f32, |sum, (x, w)| x.mul_add(*w, sum));
                assert_eq!(out[first + output].to_bits(), chain.to_bits());
                let mut unpacked = vec![0.0; n_inputs];
                matrix.unpack_row(first + output, &mut unpacked);
                assert_eq!(bits(&unpacked), bits(weights));
            }
            first += padded(n);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_shape_has_the_same_bits_on_every_instruction_set_and_thread_count(
        dtype in prop::sample::select(DTYPES.to_vec()),
        n_outputs in 1..300_usize,
        n_inputs in 1..70_usize,
        n_rows in 1..20_usize,
        salt in 0..1000_u64,
        n_threads in 1..4_usize,
    ) {
        let case = Case::new(dtype, n_outputs, n_inputs, n_rows, salt);
        let expected = case.run(Isa::Scalar, &mut ThreadPool::new(1));
        let mut pool = ThreadPool::new(n_threads);
        for isa in Isa::available() {
            prop_assert_eq!(bits(&case.run(isa, &mut pool)), bits(&expected));
        }
        let (row, output) = (salt as usize % n_rows, salt as usize % n_outputs);
        let value = expected[row * padded(n_outputs) + output];
        prop_assert_eq!(value.to_bits(), case.element(row, output).to_bits());
    }
}
