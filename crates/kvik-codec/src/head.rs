//! The head of a coded chunk.
//!
//! | bytes | |
//! |---|---|
//! | 0..4 | `KVKC` |
//! | 4 | version, 1 |
//! | 5 | number of the codec |
//! | 6 | element type: 1 f32, 2 f16, 3 bf16 |
//! | 7 | layout: 1 `kvik_paged`, 2 `kv_2td`, 3 opaque |
//! | 8..24 | layers, tokens, heads, elements of a head, u32 each; of an opaque layout 1 and the elements of a token |
//! | 24.. | the bytes of each coded layer, u32 each |
//!
//! The coded layers follow, layer 0 first. All numbers are little endian.

use std::ops::Range;

use kvik_types::Dtype;

use crate::error::{CodecError, Result};
use crate::shape::{ChunkLayout, ChunkShape};

const MAGIC: [u8; 4] = *b"KVKC";

const VERSION: u8 = 1;

/// Bytes before the lengths of layers.
const FIXED_BYTES: usize = 24;

/// The most layers of a coded chunk.
pub const MAX_LAYERS: usize = 4096;

/// What the head of a coded chunk says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodedHead {
    /// Number of the codec; [`by_id`](crate::by_id) finds it.
    pub codec_id: u8,
    /// Shape of the chunk that was coded.
    pub shape: ChunkShape,
    /// Bytes of each coded layer.
    pub layer_bytes: Vec<u32>,
}

/// Length of the head of a coded chunk of `n_layers`.
pub const fn coded_head_bytes(n_layers: usize) -> usize {
    FIXED_BYTES + 4 * n_layers
}

impl CodedHead {
    /// Appends the head.
    pub fn write(&self, out: &mut Vec<u8>) {
        let (dtype_code, layout_code) = codes_of(&self.shape);
        let (n_heads, head_dim) = self.shape.layout.numbers();
        out.extend(MAGIC);
        out.extend([VERSION, self.codec_id, dtype_code, layout_code]);
        for number in [self.shape.n_layers, self.shape.n_tokens, n_heads, head_dim] {
            out.extend((number as u32).to_le_bytes());
        }
        out.extend(self.layer_bytes.iter().flat_map(|n_bytes| n_bytes.to_le_bytes()));
    }

    /// Reads the head at the front of `bytes`, which may go on behind it.
    ///
    /// # Errors
    /// If the bytes are not a head of this version, or of a shape that no chunk has.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let (fixed, rest) =
            bytes.split_first_chunk::<FIXED_BYTES>().ok_or(CodecError::corrupt("length of the head"))?;
        let ([magic, kinds, numbers @ ..], _) = fixed.as_chunks::<4>() else {
            return Err(CodecError::corrupt("length of the head"));
        };
        let [version, codec_id, dtype_code, layout_code] = *kinds;
        if *magic != MAGIC || version != VERSION {
            return Err(CodecError::corrupt("start of the head"));
        }
        let number = |number_idx: usize| {
            numbers.get(number_idx).map_or(0, |bytes| u32::from_le_bytes(*bytes) as usize)
        };
        let (n_kv_heads, head_dim) = (number(2), number(3));
        let shape = ChunkShape {
            n_layers: number(0),
            n_tokens: number(1),
            dtype: match dtype_code {
                1 => Dtype::F32,
                2 => Dtype::F16,
                3 => Dtype::BF16,
                _ => return Err(CodecError::corrupt("element type of the head")),
            },
            layout: match layout_code {
                1 => ChunkLayout::KvikPaged { n_kv_heads, head_dim },
                2 => ChunkLayout::KeysThenValues { n_kv_heads, head_dim },
                3 if n_kv_heads == 1 => ChunkLayout::Opaque { token_elements: head_dim },
                _ => return Err(CodecError::corrupt("layout of the head")),
            },
        };
        if shape.check().is_err() || shape.n_layers > MAX_LAYERS {
            return Err(CodecError::corrupt("shape of the head"));
        }
        let lengths = rest.get(..4 * shape.n_layers).ok_or(CodecError::corrupt("length of the head"))?;
        let layer_bytes = lengths.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        Ok(Self { codec_id, shape, layer_bytes })
    }

    /// Length of the head.
    pub fn head_bytes(&self) -> usize {
        coded_head_bytes(self.shape.n_layers)
    }

    /// Length of the coded chunk with its head.
    pub fn coded_bytes(&self) -> u64 {
        self.head_bytes() as u64 + self.layer_bytes.iter().map(|n_bytes| u64::from(*n_bytes)).sum::<u64>()
    }

    /// Where coded layers lie in the coded chunk; `layers` that are not there are left out.
    pub fn layer_range(&self, layers: Range<usize>) -> Range<u64> {
        let end_of = |n_layers: usize| {
            let before = self.layer_bytes.iter().take(n_layers);
            self.head_bytes() as u64 + before.map(|n_bytes| u64::from(*n_bytes)).sum::<u64>()
        };
        end_of(layers.start)..end_of(layers.end.max(layers.start))
    }
}

fn codes_of(shape: &ChunkShape) -> (u8, u8) {
    let dtype_code = match shape.dtype {
        Dtype::F32 => 1,
        Dtype::F16 => 2,
        _ => 3,
    };
    let layout_code = match shape.layout {
        ChunkLayout::KvikPaged { .. } => 1,
        ChunkLayout::KeysThenValues { .. } => 2,
        ChunkLayout::Opaque { .. } => 3,
    };
    (dtype_code, layout_code)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(dtype: Dtype, layout: ChunkLayout) -> CodedHead {
        let shape = ChunkShape { n_layers: 3, n_tokens: 32, dtype, layout };
        CodedHead { codec_id: 1, shape, layer_bytes: vec![10, 0, 7] }
    }

    #[test]
    fn a_head_is_read_back_and_says_where_layers_lie() {
        let layouts = [
            ChunkLayout::KvikPaged { n_kv_heads: 2, head_dim: 8 },
            ChunkLayout::KeysThenValues { n_kv_heads: 2, head_dim: 8 },
            ChunkLayout::Opaque { token_elements: 24 },
        ];
        for (dtype, layout) in [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter().zip(layouts) {
            let head = head(dtype, layout);
            let mut bytes = Vec::new();
            head.write(&mut bytes);
            assert_eq!(bytes.len(), head.head_bytes());
            bytes.push(9);
            assert_eq!(CodedHead::decode(&bytes).unwrap(), head);
        }
        let head = head(Dtype::F32, layouts[0]);
        assert_eq!((head.head_bytes(), head.coded_bytes()), (36, 53));
        assert_eq!(head.layer_range(0..1), 36..46);
        assert_eq!(head.layer_range(1..3), 46..53);
        assert_eq!(head.layer_range(2..9), 46..53);
        assert_eq!(head.layer_range(7..7), 53..53);
    }

    #[test]
    fn a_head_that_is_cut_or_changed_is_refused() {
        let mut bytes = Vec::new();
        head(Dtype::F16, ChunkLayout::KvikPaged { n_kv_heads: 2, head_dim: 8 }).write(&mut bytes);
        for n_bytes in 0..bytes.len() {
            assert!(CodedHead::decode(&bytes[..n_bytes]).is_err(), "{n_bytes} bytes");
        }
        // Magic, version, types, and numbers that become 0, too large, or no multiple of a block.
        for byte_idx in [0, 4, 6, 7, 11, 12, 19, 23] {
            let mut changed = bytes.clone();
            changed[byte_idx] ^= 0xff;
            assert!(CodedHead::decode(&changed).is_err(), "byte {byte_idx}");
        }
    }
}
