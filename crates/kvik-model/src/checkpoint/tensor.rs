//! A tensor's bytes and what they mean.

use std::borrow::Cow;
use std::fmt;

use half::{bf16, f16};
use safetensors::tensor::Dtype;

/// The element types the engine reads from a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightDtype {
    /// 32 bit IEEE float.
    F32,
    /// 16 bit IEEE float.
    F16,
    /// The upper 16 bits of an IEEE float.
    BF16,
}

/// A tensor's element type and shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The element type.
    pub dtype: WeightDtype,
    /// The shape, outermost dimension first.
    pub shape: Vec<usize>,
}

/// A tensor read from a checkpoint.
///
/// Guaranteed by [`Checkpoint`](super::Checkpoint): `bytes` is exactly as long as `dtype` and `shape` say.
#[derive(Clone, PartialEq, Eq)]
pub struct Tensor {
    /// The element type.
    pub dtype: WeightDtype,
    /// The shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// The elements in row-major order, little endian.
    pub bytes: Cow<'static, [u8]>,
}

impl WeightDtype {
    /// Returns the bytes that one element takes.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    pub(super) fn from_safetensors(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(Self::F32),
            Dtype::F16 => Some(Self::F16),
            Dtype::BF16 => Some(Self::BF16),
            _ => None,
        }
    }
}

impl fmt::Display for WeightDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
        })
    }
}

impl TensorInfo {
    /// Returns the number of elements.
    pub fn n_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl Tensor {
    /// Returns the elements as `f32`, which holds every value of the three dtypes exactly.
    pub fn to_f32(&self) -> Vec<f32> {
        match self.dtype {
            WeightDtype::F32 => convert(&self.bytes, f32::from_le_bytes),
            WeightDtype::F16 => convert(&self.bytes, |bytes| f16::from_le_bytes(bytes).to_f32()),
            WeightDtype::BF16 => convert(&self.bytes, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {:?}, {} bytes)", self.dtype, self.shape, self.bytes.len())
    }
}

fn convert<const N: usize>(bytes: &[u8], element: impl Fn([u8; N]) -> f32) -> Vec<f32> {
    let (elements, _) = bytes.as_chunks::<N>();
    elements.iter().map(|bytes| element(*bytes)).collect()
}
