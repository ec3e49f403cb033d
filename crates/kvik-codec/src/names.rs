//! How codecs are found.

use crate::cachegen::Cachegen;
use crate::codec::Codec;
use crate::error::{CodecError, Result};
use crate::fp8::Fp8;
use crate::int4::Int4;
use crate::int8::Int8;
use crate::lossless::Lossless;
use crate::none::Uncoded;
use crate::quantizer::Quantized;
use crate::simd::Isa;

/// The names of all codecs, weakest first.
pub const NAMES: [&str; 6] = ["none", "lossless", "fp8", "int8", "int4", "cachegen"];

/// The codec of a name, for the CPU that this runs on.
///
/// # Errors
/// If no codec has the name; the message lists the names.
pub fn by_name(name: &str) -> Result<Box<dyn Codec>> {
    by_name_on(name, Isa::detect())
}

/// The codec of a name on an instruction set, or on plain Rust where the CPU lacks it.
///
/// # Errors
/// If no codec has the name; the message lists the names.
pub fn by_name_on(name: &str, isa: Isa) -> Result<Box<dyn Codec>> {
    Ok(match name {
        "none" => Box::new(Uncoded),
        "lossless" => Box::new(Lossless::new(isa)),
        "fp8" => Box::new(Quantized::new(Fp8, isa)),
        "int8" => Box::new(Quantized::new(Int8, isa)),
        "int4" => Box::new(Quantized::new(Int4, isa)),
        "cachegen" => Box::new(Quantized::new(Cachegen::default(), isa)),
        _ => {
            return Err(CodecError::invalid("codec", &format!("`{name}`"), NAMES.join(", ")));
        }
    })
}

/// The codec whose number stands in the head of a coded chunk; `None` for an unknown number.
pub fn by_id(id: u8) -> Option<Box<dyn Codec>> {
    NAMES.into_iter().filter_map(|name| by_name(name).ok()).find(|codec| codec.id() == id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_gives_its_codec_and_every_number_too() {
        let mut ids: Vec<u8> = Vec::new();
        for name in NAMES {
            let codec = by_name(name).unwrap();
            assert_eq!(codec.name(), name);
            assert_eq!(by_id(codec.id()).unwrap().name(), name);
            assert_eq!(codec.is_lossless(), matches!(name, "none" | "lossless"));
            ids.push(codec.id());
        }
        assert_eq!(ids, [0, 1, 2, 3, 4, 5]);
        assert!(by_id(6).is_none());
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_allowed_ones() {
        let message = by_name("zstd").unwrap_err().to_string();
        assert_eq!(message, "`codec` is `zstd`; allowed: none, lossless, fp8, int8, int4, cachegen");
    }
}
