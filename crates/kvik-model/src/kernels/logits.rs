//! What is said of a row of logits as a whole.

use super::math::exp;
use super::simd::{Isa, Kernel, LANES, Simd};

/// Vectors that are summed up in f32 before the sum is added in f64: few enough that it keeps its digits.
const VECTORS_AT_A_TIME: usize = 64;

/// A row of logits as a whole.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LogitSummary {
    /// The largest logit.
    pub(crate) largest: f32,
    /// The sum of `e^(logit - largest)` over all of them, to about one part in a million.
    pub(crate) sum: f64,
}

/// Sums up `logits`, which are finite; the same on every instruction set.
pub(crate) fn summarize_logits(isa: Isa, logits: &[f32]) -> LogitSummary {
    isa.run(Summarize { logits })
}

struct Summarize<'a> {
    logits: &'a [f32],
}

impl Kernel for Summarize<'_> {
    type Output = LogitSummary;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> LogitSummary {
        let (vectors, rest) = self.logits.as_chunks::<LANES>();
        // What is not there weighs nothing.
        let mut last = [f32::NEG_INFINITY; LANES];
        last[..rest.len()].copy_from_slice(rest);
        let mut largest = simd.load(&last);
        for vector in vectors {
            largest = simd.max(simd.load(vector), largest);
        }
        let largest = simd.max_lane(largest);
        let shift = simd.splat(largest);
        let mut sum = f64::from(simd.sum(weights(simd, &last, shift)));
        for vectors in vectors.chunks(VECTORS_AT_A_TIME) {
            let mut part = simd.splat(0.0);
            for vector in vectors {
                part = simd.add(part, weights(simd, vector, shift));
            }
            sum += f64::from(simd.sum(part));
        }
        LogitSummary { largest, sum }
    }
}

/// `e^(logit - shift)` of each. Not a closure: the compiler gives those no instruction set.
#[inline(always)]
fn weights<S: Simd>(simd: S, logits: &[f32; LANES], shift: S::Lanes) -> S::Lanes {
    exp(simd, simd.sub(simd.load(logits), shift))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn sums_are_exact_to_a_part_in_a_million_and_the_same_on_every_instruction_set(
            logits in prop::collection::vec(-60.0_f32..60.0, 1..3000),
        ) {
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let exact: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
            let scalar = summarize_logits(Isa::Scalar, &logits);
            prop_assert_eq!(scalar.largest.to_bits(), largest.to_bits());
            prop_assert!((scalar.sum / exact - 1.0).abs() < 1e-6, "{} is not {}", scalar.sum, exact);
            for isa in Isa::available() {
                prop_assert_eq!(summarize_logits(isa, &logits), scalar);
            }
        }
    }

    #[test]
    fn logits_far_below_the_largest_weigh_nothing() {
        for (logits, sum) in
            [(vec![f32::MIN, 3.0], 1.0), (vec![-2.0; 70_000], 70_000.0), (vec![f32::MAX], 1.0)]
        {
            let found = summarize_logits(Isa::detect(), &logits);
            assert!((found.sum / sum - 1.0_f64).abs() < 1e-6, "{found:?}");
        }
    }
}
