//! Where a model runs and how much memory its keys and values get, as users write it.

use std::fmt;
use std::str::FromStr;

use kvik_types::ByteSize;

use crate::error::ModelError;

/// The device that a model runs on: `cpu`, or `cuda:0` for the first GPU that the process can see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DeviceName {
    /// The processor's cores.
    #[default]
    Cpu,
    /// The NVIDIA GPU with this index.
    Cuda(u32),
}

/// How much memory keys and values get.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum KvSize {
    /// So many blocks of 16 tokens.
    Blocks(usize),
    /// So many bytes.
    Bytes(u64),
    /// What weights and activations leave of this share of the device's memory, above 0 and at most 1.
    Share(f64),
}

impl FromStr for DeviceName {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Self, ModelError> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", ordinal)) if ordinal.bytes().all(|byte| byte.is_ascii_digit()) => {
                ordinal.parse().map(Self::Cuda).map_err(|_| ModelError::request("device", text, DEVICES))
            }
            _ => Err(ModelError::request("device", text, DEVICES)),
        }
    }
}

/// What a device may be called.
const DEVICES: &str = "cpu, or cuda:N with the index of a GPU";

impl fmt::Display for DeviceName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => formatter.write_str("cpu"),
            Self::Cuda(ordinal) => write!(formatter, "cuda:{ordinal}"),
        }
    }
}

/// A number up to 1 is a share, everything else a size such as `40GiB`.
impl FromStr for KvSize {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Self, ModelError> {
        if let Ok(share) = text.parse::<f64>()
            && share <= 1.0
        {
            let allowed = "a share of the device above 0 and at most 1";
            return if 0.0 < share {
                Ok(Self::Share(share))
            } else {
                Err(ModelError::request("kv_memory", text, allowed))
            };
        }
        let allowed = "a share of the device such as 0.9, or a size such as 40GiB";
        let size: ByteSize = text.parse().map_err(|_| ModelError::request("kv_memory", text, allowed))?;
        Ok(Self::Bytes(size.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_and_written_by_their_names() {
        for (text, device) in
            [("cpu", DeviceName::Cpu), ("cuda:0", DeviceName::Cuda(0)), ("cuda:7", DeviceName::Cuda(7))]
        {
            assert_eq!(text.parse::<DeviceName>().unwrap(), device);
            assert_eq!(device.to_string(), text);
        }
        assert_eq!("cuda".parse::<DeviceName>().unwrap(), DeviceName::Cuda(0));
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:99999999999", "cpu:0"] {
            let error = text.parse::<DeviceName>().unwrap_err().to_string();
            assert!(error.starts_with("`device` is ") && error.contains("cuda:N"), "{error}");
        }
    }

    #[test]
    fn a_number_up_to_one_is_a_share_and_everything_else_a_size() {
        assert_eq!("0.9".parse::<KvSize>().unwrap(), KvSize::Share(0.9));
        assert_eq!("1".parse::<KvSize>().unwrap(), KvSize::Share(1.0));
        assert_eq!("40GiB".parse::<KvSize>().unwrap(), KvSize::Bytes(40 << 30));
        assert_eq!("1048576".parse::<KvSize>().unwrap(), KvSize::Bytes(1 << 20));
        for text in ["", "0", "-0.5", "nan", "much", "0.9x"] {
            assert!(text.parse::<KvSize>().is_err(), "{text}");
        }
    }
}
