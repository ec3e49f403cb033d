//! Element types that KV tensors are stored in.

mod names;

use std::fmt;

/// Element type of a KV tensor.
///
/// `Display` gives the canonical name, which is part of the namespace and therefore of every block
/// hash: it never changes. `FromStr` also takes the names that engines print.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 half precision.
    F16,
    /// The upper half of a single precision number.
    BF16,
    /// 8 bits: 4 of exponent, 3 of mantissa, finite values only.
    Fp8E4M3,
    /// 8 bits: 5 of exponent, 2 of mantissa.
    Fp8E5M2,
    /// Raw bytes of a quantized cache, opaque to this crate.
    U8,
}

impl Dtype {
    /// Every element type, in declaration order.
    pub const ALL: [Self; 6] = [Self::F32, Self::F16, Self::BF16, Self::Fp8E4M3, Self::Fp8E5M2, Self::U8];

    /// Returns the size of one element in bytes.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Fp8E4M3 | Self::Fp8E5M2 | Self::U8 => 1,
        }
    }

    /// Returns the canonical name, which `FromStr` reads back.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::Fp8E4M3 => "fp8_e4m3",
            Self::Fp8E5M2 => "fp8_e5m2",
            Self::U8 => "u8",
        }
    }

    /// The byte that stands for this type in a binary frame; part of the format, never reused.
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::F32 => 1,
            Self::F16 => 2,
            Self::BF16 => 3,
            Self::Fp8E4M3 => 4,
            Self::Fp8E5M2 => 5,
            Self::U8 => 6,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.code() == code)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_reads_back_its_own_name_and_code() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
            assert_eq!(Dtype::from_code(dtype.code()), Some(dtype));
        }
        assert_eq!(Dtype::from_code(0), None);
    }
}
