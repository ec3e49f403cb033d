//! Normalization of one row.

use super::simd::{Isa, Kernel, LANES, Simd};

/// Writes `x / rms(x) * weight` to `out`; the padding of `out` becomes zero because that of
/// `weight` is.
///
/// # Panics
/// If the slices are not of one length, a multiple of the vector width.
pub(crate) fn rms_norm_row(isa: Isa, n: usize, epsilon: f32, weight: &[f32], x: &[f32], out: &mut [f32]) {
    isa.run(RmsNorm { n, epsilon, weight, x, out });
}

/// Writes `(x - mean) / sqrt(variance + epsilon) * weight + bias` to `out`; the padding of `out`
/// becomes zero because that of `weight` and `bias` is.
///
/// # Panics
/// If the slices are not of one length, a multiple of the vector width.
pub(crate) fn layer_norm_row(
    isa: Isa,
    n: usize,
    epsilon: f32,
    weight: &[f32],
    bias: &[f32],
    x: &[f32],
    out: &mut [f32],
) {
    isa.run(LayerNorm { n, epsilon, weight, bias, x, out });
}

struct RmsNorm<'a> {
    n: usize,
    epsilon: f32,
    weight: &'a [f32],
    x: &'a [f32],
    out: &'a mut [f32],
}

struct LayerNorm<'a> {
    n: usize,
    epsilon: f32,
    weight: &'a [f32],
    bias: &'a [f32],
    x: &'a [f32],
    out: &'a mut [f32],
}

/// The slice as whole vectors.
#[inline(always)]
fn vectors(slice: &[f32]) -> &[[f32; LANES]] {
    let (vectors, rest) = slice.as_chunks::<LANES>();
    assert!(rest.is_empty(), "a row is not padded");
    vectors
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (x, weight) = (vectors(self.x), vectors(self.weight));
        let (out, _) = self.out.as_chunks_mut::<LANES>();
        assert!(x.len() == weight.len() && x.len() == out.len());
        let mut squares = simd.splat(0.0);
        for vector in x {
            let vector = simd.load(vector);
            squares = simd.fma(vector, vector, squares);
        }
        let mean_square = simd.sum(squares) / self.n as f32;
        let scale = simd.splat(1.0 / (mean_square + self.epsilon).sqrt());
        for idx in 0..x.len() {
            let normalized = simd.mul(simd.load(&x[idx]), scale);
            simd.store(simd.mul(normalized, simd.load(&weight[idx])), &mut out[idx]);
        }
    }
}

impl Kernel for LayerNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (x, weight, bias) = (vectors(self.x), vectors(self.weight), vectors(self.bias));
        let (out, _) = self.out.as_chunks_mut::<LANES>();
        assert!(x.len() == weight.len() && x.len() == bias.len() && x.len() == out.len());
        let mut sum = simd.splat(0.0);
        for vector in x {
            sum = simd.add(sum, simd.load(vector));
        }
        let mean = simd.splat(simd.sum(sum) / self.n as f32);
        for idx in 0..x.len() {
            simd.store(simd.sub(simd.load(&x[idx]), mean), &mut out[idx]);
        }
        // The padding now holds minus the mean, which must not count towards the variance.
        if let Some(last) = out.last_mut() {
            last[LANES - (x.len() * LANES - self.n)..].fill(0.0);
        }
        let mut squares = simd.splat(0.0);
        for vector in &*out {
            let vector = simd.load(vector);
            squares = simd.fma(vector, vector, squares);
        }
        let variance = simd.sum(squares) / self.n as f32;
        let scale = simd.splat(1.0 / (variance + self.epsilon).sqrt());
        for idx in 0..x.len() {
            let normalized = simd.mul(simd.load(&out[idx]), scale);
            let shifted = simd.fma(normalized, simd.load(&weight[idx]), simd.load(&bias[idx]));
            simd.store(shifted, &mut out[idx]);
        }
    }
}
