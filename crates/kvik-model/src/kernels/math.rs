//! Exponential and the nonlinearities built on it, lane by lane.
//!
//! Written here rather than taken from libm so that every instruction set and every position
//! in a vector gives the same bits.

use super::simd::Simd;

/// Below this the true exponential is less than the smallest normal f32; it becomes zero.
const EXP_LOWEST: f32 = -87.336;
/// Above this the exponential would overflow; it stays at its value here.
const EXP_HIGHEST: f32 = 88.0;
/// Adding this rounds a small f32 to an integer that then sits in the low mantissa bits.
const ROUND_TO_INTEGER: f32 = 12_582_912.0;
/// The high bits of ln 2, exact when multiplied by a small integer.
const LN_2_HIGH: f32 = 0.693_359_4;
/// ln 2 less [`LN_2_HIGH`].
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// Coefficients of `(exp(r) - 1 - r) / r^2` for `|r| <= ln 2 / 2`, highest power first.
const EXP_POLYNOMIAL: [f32; 6] =
    [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// `e^x` to about one unit in the last place; zero below [`EXP_LOWEST`].
#[inline(always)]
pub(crate) fn exp<S: Simd>(simd: S, x: S::Lanes) -> S::Lanes {
    let lowest = simd.splat(EXP_LOWEST);
    let clamped = simd.max(simd.min(x, simd.splat(EXP_HIGHEST)), lowest);
    let shift = simd.splat(ROUND_TO_INTEGER);
    let shifted = simd.fma(clamped, simd.splat(std::f32::consts::LOG2_E), shift);
    let n = simd.sub(shifted, shift);
    let r = simd.fma(n, simd.splat(-LN_2_HIGH), clamped);
    let r = simd.fma(n, simd.splat(-LN_2_LOW), r);
    let mut polynomial = simd.splat(EXP_POLYNOMIAL[0]);
    for &coefficient in &EXP_POLYNOMIAL[1..] {
        polynomial = simd.fma(polynomial, r, simd.splat(coefficient));
    }
    let mantissa = simd.fma(polynomial, simd.mul(r, r), simd.add(r, simd.splat(1.0)));
    simd.keep_where_at_least(simd.add_exponent(mantissa, shifted), x, lowest)
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn silu<S: Simd>(simd: S, x: S::Lanes) -> S::Lanes {
    let denominator = simd.add(exp(simd, simd.sub(simd.splat(0.0), x)), simd.splat(1.0));
    simd.div(x, denominator)
}

/// `x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))`, computed as `x * sigmoid(2 * inner)`.
#[inline(always)]
pub(crate) fn gelu_tanh<S: Simd>(simd: S, x: S::Lanes) -> S::Lanes {
    const TWICE_SQRT_2_OVER_PI: f32 = 1.595_769;
    let cube = simd.mul(simd.mul(x, x), x);
    let inner = simd.fma(cube, simd.splat(0.044_715), x);
    let exponent = simd.mul(inner, simd.splat(-TWICE_SQRT_2_OVER_PI));
    simd.div(x, simd.add(exp(simd, exponent), simd.splat(1.0)))
}
