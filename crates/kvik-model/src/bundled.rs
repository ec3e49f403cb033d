//! The model that the binary carries.

use std::sync::OnceLock;

use crate::error::{ModelError, Result};

/// Name of the bundled model.
pub(crate) const NAME: &str = "kvik-tiny";

pub(crate) const CONFIG: &str = include_str!("../bundled/config.json");
pub(crate) const GENERATION_CONFIG: &[u8] = include_bytes!("../bundled/generation_config.json");
pub(crate) const TOKENIZER_CONFIG: &[u8] = include_bytes!("../bundled/tokenizer_config.json");

/// `tokenizer.json` as the build script deflates it.
const DEFLATED_TOKENIZER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/tokenizer.deflated"));

/// More than the tokenizer of a small model has.
const MAX_TOKENIZER_BYTES: usize = 16 << 20;

/// The weights as the build script packs them.
const PACKED_WEIGHTS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kvik-tiny.packed"));

/// The bytes of `model.safetensors`, unpacked at the first call.
pub(crate) fn weights() -> Result<&'static [u8]> {
    static WEIGHTS: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    let weights = WEIGHTS.get_or_init(|| unpack(PACKED_WEIGHTS)).as_deref();
    weights.ok_or_else(damaged)
}

/// The bytes of `tokenizer.json`.
pub(crate) fn tokenizer() -> Result<Vec<u8>> {
    let inflated =
        miniz_oxide::inflate::decompress_to_vec_with_limit(DEFLATED_TOKENIZER, MAX_TOKENIZER_BYTES);
    inflated.map_err(|_| damaged())
}

fn damaged() -> ModelError {
    ModelError::InvalidWeights {
        what: "the bundled model".to_owned(),
        reason: "the packed bytes do not match their lengths".to_owned(),
    }
}

fn unpack(packed: &[u8]) -> Option<Vec<u8>> {
    let (n_bytes, packed) = packed.split_first_chunk()?;
    let (n_deflated, packed) = packed.split_first_chunk()?;
    let n_bytes = usize::try_from(u64::from_le_bytes(*n_bytes)).ok()?;
    let n_deflated = usize::try_from(u64::from_le_bytes(*n_deflated)).ok()?;
    let (deflated, low) = packed.split_at_checked(n_deflated)?;
    let high = miniz_oxide::inflate::decompress_to_vec_with_limit(deflated, n_bytes / 2).ok()?;
    if low.len() != n_bytes.div_ceil(2) || high.len() != n_bytes / 2 {
        return None;
    }
    let mut weights = vec![0; n_bytes];
    weights.iter_mut().step_by(2).zip(low).for_each(|(byte, low)| *byte = *low);
    weights.iter_mut().skip(1).step_by(2).zip(high).for_each(|(byte, high)| *byte = high);
    Some(weights)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_binary_carries_the_weights_of_the_repository() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/kvik-tiny/model.safetensors");
        assert!(weights().unwrap() == std::fs::read(file).unwrap());
    }

    #[test]
    fn the_binary_carries_the_tokenizer_of_the_repository() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/kvik-tiny/tokenizer.json");
        assert!(tokenizer().unwrap() == std::fs::read(file).unwrap());
    }

    #[test]
    fn packed_weights_that_are_cut_or_wrong_are_refused() {
        for n_bytes in [0, 7, 15, 16, 1000, PACKED_WEIGHTS.len() - 1] {
            assert_eq!(unpack(&PACKED_WEIGHTS[..n_bytes]), None, "{n_bytes}");
        }
        let mut longer = PACKED_WEIGHTS.to_vec();
        longer.push(0);
        assert_eq!(unpack(&longer), None);
        let huge = [&u64::MAX.to_le_bytes()[..], &u64::MAX.to_le_bytes()].concat();
        assert_eq!(unpack(&huge), None);
    }
}
