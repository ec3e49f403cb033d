//! Segments that a codec has been over.

use kvik_codec::{ChunkLayout, ChunkShape, Codec, CodecError, round_trip};
use kvik_model::{ComputedSegment, LayerKv, ModelConfig};
use kvik_types::Dtype;

/// Tokens that are coded together: those of a chunk.
const CHUNK_TOKENS: usize = 256;

/// What comes back of a segment's keys and values.
///
/// # Errors
/// If the codec refuses them.
pub(super) fn coded(
    codec: &dyn Codec,
    config: &ModelConfig,
    dtype: Dtype,
    segment: &ComputedSegment,
) -> Result<ComputedSegment, CodecError> {
    let (n_kv_heads, head_dim) = (config.n_kv_heads, config.head_dim);
    let layout = ChunkLayout::KeysThenValues { n_kv_heads, head_dim };
    let token_bytes = n_kv_heads * head_dim * dtype.size_bytes();
    let mut layers = vec![LayerKv { n_tokens: segment.tokens.len(), ..LayerKv::default() }; config.n_layers];
    for first in (0..segment.tokens.len()).step_by(CHUNK_TOKENS) {
        let n_tokens = CHUNK_TOKENS.min(segment.tokens.len() - first);
        let range = first * token_bytes..(first + n_tokens) * token_bytes;
        let parts = segment.layers.iter().flat_map(|layer| [&layer.keys, &layer.values]);
        let raw: Vec<u8> = parts.flat_map(|part| &part[range.clone()]).copied().collect();
        let shape = ChunkShape { n_layers: config.n_layers, n_tokens, dtype, layout };
        let back = round_trip(codec, &shape, &raw)?;
        for (layer, section) in layers.iter_mut().zip(back.chunks_exact(shape.section_bytes())) {
            let (keys, values) = section.split_at(section.len() / 2);
            layer.keys.extend_from_slice(keys);
            layer.values.extend_from_slice(values);
        }
    }
    Ok(ComputedSegment { tokens: segment.tokens.clone(), first_position: segment.first_position, layers })
}
