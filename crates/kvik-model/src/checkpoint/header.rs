//! The header of a safetensors file: a length, then JSON that places every tensor.
//!
//! Checked in this order, so that nothing is allocated from a number that was not compared with
//! the real size of the file: the length against the file, the JSON, the offsets of the tensors
//! (contiguous, not overlapping, as long as dtype and shape say), and the end of the data
//! against the end of the file.

use std::collections::BTreeMap;
use std::ops::Range;

use safetensors::tensor::Metadata;

use super::{TensorInfo, WeightDtype};
use crate::error::{ModelError, Result};

/// Bytes of the length that starts a file.
pub(super) const LENGTH_BYTES: u64 = 8;

/// Longest header the format allows, in bytes.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The tensors of one safetensors file, by name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Header {
    /// Tensors of a dtype the engine reads.
    pub tensors: BTreeMap<String, TensorPlace>,
    /// Tensors of other dtypes, with the name of the dtype; they can be listed but not read.
    pub unsupported: BTreeMap<String, String>,
}

/// What a tensor is and where its bytes lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorPlace {
    /// The tensor's dtype and shape.
    pub info: TensorInfo,
    /// The tensor's bytes, as positions in the file.
    pub range: Range<u64>,
}

/// Parses the header at the start of a safetensors file that is `file_len` bytes long.
///
/// `bytes` are the first bytes of the file and may be cut anywhere after the header. Never
/// panics and never allocates more than a small multiple of `bytes`.
pub fn parse_header(bytes: &[u8], file_len: u64) -> Result<Header> {
    parse_named_header("header", bytes, file_len)
}

/// As [`parse_header`], with the file's name for messages.
pub(super) fn parse_named_header(file_name: &str, bytes: &[u8], file_len: u64) -> Result<Header> {
    let invalid = |reason: String| ModelError::weights(file_name, reason);
    let header_len = header_len(file_name, bytes, file_len)?;
    let json_end = (LENGTH_BYTES + header_len) as usize;
    let json = bytes.get(LENGTH_BYTES as usize..json_end).ok_or_else(|| {
        invalid(format!("the header of {header_len} bytes is cut after {} bytes", bytes.len()))
    })?;
    let metadata: Metadata = serde_json::from_slice(json)
        .map_err(|error| invalid(format!("the header does not describe tensors: {error}")))?;
    let data_start = LENGTH_BYTES + header_len;
    let data_end = data_start.checked_add(metadata.data_len() as u64);
    if data_end != Some(file_len) {
        return Err(invalid(format!(
            "the header describes {} bytes of data, the file has {}",
            metadata.data_len(),
            file_len - data_start
        )));
    }
    let mut header = Header::default();
    for (name, info) in metadata.tensors() {
        let Some(dtype) = WeightDtype::from_safetensors(info.dtype) else {
            header.unsupported.insert(name, format!("{:?}", info.dtype));
            continue;
        };
        let (start, end) = info.data_offsets;
        let range = data_start + start as u64..data_start + end as u64;
        header
            .tensors
            .insert(name, TensorPlace { info: TensorInfo { dtype, shape: info.shape.clone() }, range });
    }
    Ok(header)
}

/// Returns the length of the JSON from the first bytes of a file, checked against the file's length.
pub(super) fn header_len(file_name: &str, bytes: &[u8], file_len: u64) -> Result<u64> {
    let invalid = |reason: String| ModelError::weights(file_name, reason);
    let Some(length) = bytes.first_chunk::<{ LENGTH_BYTES as usize }>() else {
        return Err(invalid(format!("the file has {file_len} bytes, too few for a header")));
    };
    let header_len = u64::from_le_bytes(*length);
    if header_len > MAX_HEADER_BYTES {
        let reason = format!("the header claims {header_len} bytes; allowed: at most {MAX_HEADER_BYTES}");
        return Err(invalid(reason));
    }
    if header_len > file_len.saturating_sub(LENGTH_BYTES) {
        return Err(invalid(format!("the header claims {header_len} bytes, the file has {file_len} in all")));
    }
    Ok(header_len)
}
