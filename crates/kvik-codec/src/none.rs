//! Chunks as they are.

use crate::codec::Codec;
use crate::error::{CodecError, Result};
use crate::shape::ChunkShape;

/// The codec that changes nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Uncoded;

impl Codec for Uncoded {
    fn name(&self) -> &'static str {
        "none"
    }

    fn id(&self) -> u8 {
        0
    }

    fn is_lossless(&self) -> bool {
        true
    }

    fn check(&self, shape: &ChunkShape) -> Result<()> {
        shape.check()
    }

    fn encode_layer(&self, shape: &ChunkShape, _: usize, section: &[u8], out: &mut Vec<u8>) -> Result<()> {
        check_section(shape, section.len())?;
        out.extend_from_slice(section);
        Ok(())
    }

    fn decode_layer(&self, shape: &ChunkShape, _: usize, coded: &[u8], section: &mut [u8]) -> Result<()> {
        check_section(shape, section.len())?;
        if coded.len() != section.len() {
            return Err(CodecError::corrupt("length of a layer"));
        }
        section.copy_from_slice(coded);
        Ok(())
    }
}

/// Fails if the shape is not valid or a section of it is not `n_bytes` long.
pub(crate) fn check_section(shape: &ChunkShape, n_bytes: usize) -> Result<()> {
    shape.check()?;
    if n_bytes == shape.section_bytes() {
        return Ok(());
    }
    let allowed = format!("{} bytes, a layer of the shape", shape.section_bytes());
    Err(CodecError::invalid("section", &format!("{n_bytes} bytes"), allowed))
}
