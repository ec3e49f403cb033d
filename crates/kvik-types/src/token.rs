//! Tokens, token blocks and byte quantities.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use crate::error::{Result, TypesError};

/// Id of one token.
///
/// An alias and not a newtype: token slices come straight from tokenizers and engines, and must be
/// hashed where they lie, without a copy.
pub type TokenId = u32;

/// Units of [`ByteSize`], largest first within each of the two systems.
const UNITS: [(&str, u64); 15] = [
    ("eib", 1 << 60),
    ("pib", 1 << 50),
    ("tib", 1 << 40),
    ("gib", 1 << 30),
    ("mib", 1 << 20),
    ("kib", 1 << 10),
    ("tb", 1_000_000_000_000),
    ("gb", 1_000_000_000),
    ("mb", 1_000_000),
    ("kb", 1_000),
    ("t", 1_000_000_000_000),
    ("g", 1_000_000_000),
    ("m", 1_000_000),
    ("k", 1_000),
    ("b", 1),
];

/// Number of tokens in one token block: never zero, fits in 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockSize(NonZeroU32);

/// A quantity of bytes.
///
/// `Display` gives one decimal in binary units (`2.0 GiB`); `FromStr` takes a plain number of bytes
/// or a decimal number with a unit, binary (`KiB` to `EiB`) or decimal (`kB`, `MB`, `GB`,
/// `TB`, or without the `B`), in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

// === impl BlockSize ===

impl BlockSize {
    /// Builds a block size from a number of tokens.
    ///
    /// Fails when `n_tokens` is zero or does not fit in 32 bits.
    pub fn try_new(n_tokens: usize) -> Result<Self> {
        u32::try_from(n_tokens)
            .ok()
            .and_then(NonZeroU32::new)
            .map(Self)
            .ok_or_else(|| TypesError::invalid("block_size", &n_tokens, "1 to 4294967295 tokens"))
    }

    /// Returns the number of tokens in one block.
    pub const fn get(self) -> usize {
        self.0.get() as usize
    }
}

impl fmt::Display for BlockSize {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

// === impl ByteSize ===

impl ByteSize {
    /// Returns the quantity of `n` KiB; saturates.
    pub const fn kib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 10))
    }

    /// Returns the quantity of `n` MiB; saturates.
    pub const fn mib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 20))
    }

    /// Returns the quantity of `n` GiB; saturates.
    pub const fn gib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 30))
    }

    /// Returns the number of bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl From<u64> for ByteSize {
    fn from(n_bytes: u64) -> Self {
        Self(n_bytes)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 1024 {
            return formatter.pad(&format!("{} B", self.0));
        }
        let names = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        // Rounded in tenths of a unit, so that 1023.97 KiB prints as 1.0 MiB and not as 1024.0 KiB.
        let tenths_of = |exponent: usize| {
            let unit = 1u128 << (10 * (exponent + 1));
            (u128::from(self.0) * 10 + unit / 2) / unit
        };
        let mut exponent = 0;
        while exponent + 1 < names.len() && tenths_of(exponent) >= 10 * 1024 {
            exponent += 1;
        }
        let tenths = tenths_of(exponent);
        formatter.pad(&format!("{}.{} {}", tenths / 10, tenths % 10, names[exponent]))
    }
}

impl FromStr for ByteSize {
    type Err = TypesError;

    /// Reads a size; a fraction of a byte that remains after applying the unit is dropped.
    fn from_str(text: &str) -> Result<Self> {
        parse_byte_size(text.trim()).map(Self).ok_or_else(|| {
            TypesError::invalid(
                "byte size",
                &format!("`{text}`"),
                "a number of bytes up to 18446744073709551615, or a decimal number followed by B, KiB, MiB, \
                 GiB, TiB, PiB, EiB (powers of 1024) or kB, MB, GB, TB (powers of 1000), such as `1024`, `512MiB`, `1.5GB`",
            )
        })
    }
}

fn parse_byte_size(text: &str) -> Option<u64> {
    let unit_start = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit_name) = text.split_at(unit_start);
    let unit_name = unit_name.trim_start().to_ascii_lowercase();
    let unit = if unit_name.is_empty() { 1 } else { UNITS.iter().find(|(name, _)| *name == unit_name)?.1 };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    // 18 digits keep the product of fraction and unit inside 128 bits.
    if whole.is_empty() || fraction.is_empty() || fraction.len() > 18 {
        return None;
    }
    let scale = 10u128.pow(fraction.len() as u32);
    let whole_bytes = u128::from(whole.parse::<u64>().ok()?) * u128::from(unit);
    let fraction_bytes = u128::from(fraction.parse::<u64>().ok()?) * u128::from(unit) / scale;
    u64::try_from(whole_bytes + fraction_bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_size_of_zero_is_refused_with_what_is_allowed() {
        let message = BlockSize::try_new(0).unwrap_err().to_string();
        assert_eq!(message, "`block_size` is 0; allowed: 1 to 4294967295 tokens");
        assert_eq!(BlockSize::try_new(16).unwrap().get(), 16);
        assert_eq!(BlockSize::try_new(16).unwrap().to_string(), "16");
    }

    #[test]
    fn sizes_print_with_one_decimal_in_binary_units() {
        for (n_bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (2 << 30, "2.0 GiB"),
            (512 << 20, "512.0 MiB"),
            (1536, "1.5 KiB"),
            ((1 << 20) - 1, "1.0 MiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(ByteSize(n_bytes).to_string(), text);
        }
    }

    #[test]
    fn sizes_are_read_in_bytes_binary_and_decimal_units() {
        for (text, n_bytes) in [
            ("1024", 1024),
            ("2GiB", 2 << 30),
            ("2.0 GiB", 2 << 30),
            ("512MiB", 512 << 20),
            ("512mib", 512 << 20),
            ("1.5GB", 1_500_000_000),
            ("7k", 7_000),
            ("10 B", 10),
            (" 3KiB ", 3072),
            ("18446744073709551615", u64::MAX),
            ("0.5KiB", 512),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(n_bytes)), "{text}");
        }
    }

    #[test]
    fn a_size_that_is_not_one_is_refused_by_name() {
        for text in
            ["", "GiB", "-1", "1..5GB", "1.", ".5GB", "2 XB", "18446744073709551616", "99999999TiB", "1e3"]
        {
            let message = text.parse::<ByteSize>().unwrap_err().to_string();
            assert!(message.contains(&format!("`{text}`")) && message.contains("allowed"), "{message}");
        }
    }
}
