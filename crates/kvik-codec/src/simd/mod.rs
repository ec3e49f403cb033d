//! Kernels that are compiled once for each instruction set.
//!
//! A kernel is plain Rust; the compiler makes vector code of it for AVX-512 and AVX2. It never changes the order or
//! the rounding of float operations, so all of them give the same bits. What it cannot do by itself is in [`Lanes`]:
//! one step of sixteen rANS decoders, in integers.
//!
//! A value of a [`Lanes`] type is the proof that the CPU has that instruction set.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

use std::fmt;

use crate::element::LANES;

/// Bits of a probability: frequencies of a table sum up to `2^PROBABILITY_BITS`.
pub(crate) const PROBABILITY_BITS: u32 = 12;

/// Entries of a [`SlotTable`].
pub(crate) const N_SLOTS: usize = 1 << PROBABILITY_BITS;

/// A state below this takes in a word of 16 bits.
pub(crate) const LOWER_BOUND: u32 = 1 << 16;

/// What a decoder does in each of its slots: the symbol in the lowest 8 bits, then 12 bits of what is left of the
/// slot in the symbol's range, then 12 bits of the symbol's frequency.
pub(crate) type SlotTable = [u32; N_SLOTS];

/// A piece of work that is compiled once for each instruction set.
pub(crate) trait Kernel {
    /// What the work gives back.
    type Output;

    /// Does the work. Implementations MUST be `#[inline(always)]`: only then does the body take on the
    /// instruction set of its caller.
    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// Sixteen rANS decoders that advance together.
pub(crate) trait Lanes: Copy {
    /// Their states.
    type States: Copy;

    /// Runs `kernel` compiled for this instruction set.
    fn dispatch<K: Kernel>(self, kernel: K) -> K::Output;

    fn load(self, states: &[u32; LANES]) -> Self::States;
    fn store(self, states: Self::States, to: &mut [u32; LANES]);

    /// Decodes one symbol a lane. Lanes whose state falls below [`LOWER_BOUND`] take in one word of `words` each,
    /// in the order of the lanes. Returns the new states and how many words were taken.
    fn step(
        self,
        states: Self::States,
        table: &SlotTable,
        words: &[u8; 2 * LANES],
        symbols: &mut [u8; LANES],
    ) -> (Self::States, usize);
}

/// The instruction sets the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX2.
    Avx2,
    /// Plain Rust; correct everywhere.
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
                if let Some(lanes) = avx512::Avx512::detect() {
                    return lanes.dispatch(kernel);
                }
            }
            Self::Avx2 => {
                if let Some(lanes) = avx2::Avx2::detect() {
                    return lanes.dispatch(kernel);
                }
            }
            Self::Scalar => {}
        }
        scalar::Scalar.dispatch(kernel)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Scalar => "scalar",
        })
    }
}
