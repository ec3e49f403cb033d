//! Whole chunks.

use crate::codec::Codec;
use crate::error::{CodecError, Result};
use crate::head::{CodedHead, MAX_LAYERS};
use crate::names::by_id;
use crate::shape::ChunkShape;

/// Appends the coded form of a chunk to `out`: its head and its layers.
///
/// # Errors
/// If the codec does not take the shape, or `raw` does not have its length; `out` is then as it was.
pub fn encode(codec: &dyn Codec, shape: &ChunkShape, raw: &[u8], out: &mut Vec<u8>) -> Result<()> {
    codec.check(shape)?;
    if raw.len() != shape.chunk_bytes() {
        let allowed = format!("{} bytes, a chunk of the shape", shape.chunk_bytes());
        return Err(CodecError::invalid("raw", &format!("{} bytes", raw.len()), allowed));
    }
    if shape.n_layers > MAX_LAYERS {
        return Err(CodecError::invalid("n_layers", &shape.n_layers, format!("1 to {MAX_LAYERS}")));
    }
    let start = out.len();
    let mut head = CodedHead { codec_id: codec.id(), shape: *shape, layer_bytes: vec![0; shape.n_layers] };
    head.write(out);
    for (layer, section) in raw.chunks_exact(shape.section_bytes()).enumerate() {
        let layer_start = out.len();
        let coded = codec.encode_layer(shape, layer, section, out);
        let n_bytes = u32::try_from(out.len() - layer_start)
            .map_err(|_| CodecError::invalid("n_tokens", &shape.n_tokens, "layers of at most 4 GiB"));
        match coded.and(n_bytes) {
            Ok(n_bytes) => head.layer_bytes[layer] = n_bytes,
            Err(error) => {
                out.truncate(start);
                return Err(error);
            }
        }
    }
    let mut head_bytes = Vec::with_capacity(head.head_bytes());
    head.write(&mut head_bytes);
    out[start..start + head_bytes.len()].copy_from_slice(&head_bytes);
    Ok(())
}

/// Decodes one layer of a coded chunk, which is given whole, into `section`.
///
/// # Errors
/// If `coded` is no coded chunk, names a codec that is not known, or has no such layer; or if `section` does not have
/// the length of a layer.
pub fn decode_layer(coded: &[u8], layer: usize, section: &mut [u8]) -> Result<()> {
    let head = CodedHead::decode(coded)?;
    let codec = by_id(head.codec_id).ok_or(CodecError::corrupt("codec of the head"))?;
    if layer >= head.shape.n_layers {
        return Err(CodecError::invalid("layer", &layer, format!("0 to {}", head.shape.n_layers - 1)));
    }
    decode_section(&*codec, &head, coded, layer, section)
}

/// Decodes a whole coded chunk of `shape`.
///
/// # Errors
/// If `coded` is no coded chunk of the shape or names a codec that is not known.
pub fn decode(shape: &ChunkShape, coded: &[u8]) -> Result<Vec<u8>> {
    let head = CodedHead::decode(coded)?;
    let codec = by_id(head.codec_id).ok_or(CodecError::corrupt("codec of the head"))?;
    // A forged head may claim any length: memory is taken for what the caller expects.
    if head.shape != *shape || head.coded_bytes() != coded.len() as u64 {
        return Err(CodecError::corrupt("shape of the chunk"));
    }
    let mut raw = vec![0; shape.chunk_bytes()];
    for (layer, section) in raw.chunks_exact_mut(shape.section_bytes()).enumerate() {
        decode_section(&*codec, &head, coded, layer, section)?;
    }
    Ok(raw)
}

/// What comes back of a chunk that is coded and decoded.
///
/// # Errors
/// As [`encode`].
pub fn round_trip(codec: &dyn Codec, shape: &ChunkShape, raw: &[u8]) -> Result<Vec<u8>> {
    let mut coded = Vec::new();
    encode(codec, shape, raw, &mut coded)?;
    let mut back = vec![0; raw.len()];
    let head = CodedHead::decode(&coded)?;
    for (layer, section) in back.chunks_exact_mut(shape.section_bytes()).enumerate() {
        decode_section(codec, &head, &coded, layer, section)?;
    }
    Ok(back)
}

fn decode_section(
    codec: &dyn Codec,
    head: &CodedHead,
    coded: &[u8],
    layer: usize,
    section: &mut [u8],
) -> Result<()> {
    let range = head.layer_range(layer..layer + 1);
    let layer_bytes = coded
        .get(range.start as usize..range.end as usize)
        .ok_or(CodecError::corrupt("length of the chunk"))?;
    codec.decode_layer(&head.shape, layer, layer_bytes, section)
}
