//! Sixteen f32 lanes on every instruction set.
//!
//! A kernel is written once against [`Simd`] and runs on AVX-512, AVX2 or plain Rust. All
//! three do the same IEEE operations in the same order, so a kernel's result is the same to
//! the bit on each of them: a sequence may move between machines without changing its text.
//!
//! A value of a [`Simd`] type is the proof that the CPU has that instruction set; that is what
//! makes the methods safe to call.

#[cfg(target_arch = "x86_64")]
#[expect(clippy::cast_ptr_alignment, reason = "the loads are unaligned; the intrinsics' types are not")]
mod avx2;
#[cfg(target_arch = "x86_64")]
#[expect(clippy::cast_ptr_alignment, reason = "the loads are unaligned; the intrinsics' types are not")]
mod avx512;
mod scalar;

/// Number of f32 in one [`Simd::Lanes`].
pub(crate) const LANES: usize = 16;

/// A piece of work that is compiled once for each instruction set.
pub(crate) trait Kernel {
    /// What the work gives back.
    type Output;

    /// Does the work. Implementations MUST be `#[inline(always)]`: only then does the body
    /// take on the instruction set of its caller.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Operations on sixteen f32 lanes.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen f32.
    type Lanes: Copy;

    /// Whether 20 accumulators of sixteen lanes fit into registers; decides the tile of the
    /// matrix kernels, never their result.
    const HAS_WIDE_REGISTERS: bool;

    /// Runs `kernel` compiled for this instruction set.
    fn dispatch<K: Kernel>(self, kernel: K) -> K::Output;

    fn splat(self, value: f32) -> Self::Lanes;
    fn load(self, from: &[f32; LANES]) -> Self::Lanes;
    fn store(self, lanes: Self::Lanes, to: &mut [f32; LANES]);
    /// Widens sixteen bf16, given as bits; exact.
    fn load_bf16(self, from: &[u16; LANES]) -> Self::Lanes;
    /// Widens sixteen f16, given as bits; exact.
    fn load_f16(self, from: &[u16; LANES]) -> Self::Lanes;
    /// Widens the first of each of sixteen pairs of bf16; exact.
    fn load_bf16_even(self, from: &[u16; 2 * LANES]) -> Self::Lanes;
    /// Widens the second of each of sixteen pairs of bf16; exact.
    fn load_bf16_odd(self, from: &[u16; 2 * LANES]) -> Self::Lanes;
    fn add(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    fn sub(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    fn mul(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    fn div(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// `a * b + c` with one rounding.
    fn fma(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes;
    /// The larger of each pair; `b` where either is NaN.
    fn max(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// The smaller of each pair; `b` where either is NaN.
    fn min(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// Adds the low bits of `exponent`, shifted to the exponent's place, to `value`'s bits:
    /// `value * 2^n` where the mantissa of `exponent` ends in the integer `n`.
    fn add_exponent(self, value: Self::Lanes, exponent: Self::Lanes) -> Self::Lanes;
    /// `value` where `a >= b`, zero elsewhere.
    fn keep_where_at_least(self, value: Self::Lanes, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;

    /// The sum of the lanes, always added as the same tree.
    #[inline(always)]
    fn sum(self, lanes: Self::Lanes) -> f32 {
        let mut values = [0.0; LANES];
        self.store(lanes, &mut values);
        let mut width = LANES / 2;
        while 0 < width {
            for lane in 0..width {
                values[lane] += values[lane + width];
            }
            width /= 2;
        }
        values[0]
    }

    /// The largest lane.
    #[inline(always)]
    fn max_lane(self, lanes: Self::Lanes) -> f32 {
        let mut values = [0.0; LANES];
        self.store(lanes, &mut values);
        values.iter().fold(f32::NEG_INFINITY, |a, &b| if a < b { b } else { a })
    }
}

/// The instruction sets the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// Plain Rust; correct everywhere, fast nowhere.
    Scalar,
}

impl Isa {
    /// The fastest instruction set of this CPU.
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// The instruction sets of this CPU, fastest first; never empty.
    pub fn available() -> Vec<Self> {
        [Self::Avx512, Self::Avx2, Self::Scalar].into_iter().filter(|isa| isa.is_available()).collect()
    }

    #[cfg(target_arch = "x86_64")]
    fn is_available(self) -> bool {
        match self {
            Self::Avx512 => avx512::Avx512::detect().is_some(),
            Self::Avx2 => avx2::Avx2::detect().is_some(),
            Self::Scalar => true,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_available(self) -> bool {
        self == Self::Scalar
    }

    /// Runs `kernel` on this instruction set, or on the scalar one if the CPU lacks it.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[cfg(target_arch = "x86_64")]
        match self {
            Self::Avx512 => {
                if let Some(simd) = avx512::Avx512::detect() {
                    return simd.dispatch(kernel);
                }
            }
            Self::Avx2 => {
                if let Some(simd) = avx2::Avx2::detect() {
                    return simd.dispatch(kernel);
                }
            }
            Self::Scalar => {}
        }
        scalar::Scalar.dispatch(kernel)
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Scalar => "scalar",
        })
    }
}

#[cfg(test)]
mod tests;
