//! The names of element types that are read: kvik's own, and those that engines print.

use std::str::FromStr;

use super::Dtype;
use crate::error::TypesError;

impl FromStr for Dtype {
    type Err = TypesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text.to_ascii_lowercase().as_str() {
            "f32" | "fp32" | "float32" | "float" => Self::F32,
            "f16" | "fp16" | "float16" | "half" => Self::F16,
            "bf16" | "bfloat16" => Self::BF16,
            "fp8" | "fp8_e4m3" | "f8e4m3" | "float8_e4m3fn" => Self::Fp8E4M3,
            "fp8_e5m2" | "f8e5m2" | "float8_e5m2" => Self::Fp8E5M2,
            "u8" | "uint8" => Self::U8,
            _ => {
                return Err(TypesError::invalid(
                    "dtype",
                    &format!("`{text}`"),
                    "f32 (float32), f16 (float16, half), bf16 (bfloat16), fp8_e4m3 (fp8, float8_e4m3fn), \
                     fp8_e5m2 (float8_e5m2), u8 (uint8)",
                ));
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_printed_by_engines_are_taken() {
        for (name, dtype) in [
            ("float32", Dtype::F32),
            ("float16", Dtype::F16),
            ("half", Dtype::F16),
            ("bfloat16", Dtype::BF16),
            ("BF16", Dtype::BF16),
            ("float8_e4m3fn", Dtype::Fp8E4M3),
            ("fp8", Dtype::Fp8E4M3),
            ("float8_e5m2", Dtype::Fp8E5M2),
        ] {
            assert_eq!(name.parse(), Ok(dtype), "{name}");
        }
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_allowed_ones() {
        let message = "int4".parse::<Dtype>().unwrap_err().to_string();
        assert!(message.starts_with("`dtype` is `int4`; allowed: f32"), "{message}");
    }
}
