//! The trait of all codecs.

use std::fmt;

use crate::error::Result;
use crate::shape::ChunkShape;

/// A way to make the sections of a chunk smaller.
pub trait Codec: fmt::Debug + Send + Sync {
    /// The name in configuration and messages.
    fn name(&self) -> &'static str;

    /// The number in the head of a coded chunk; never used for another codec.
    fn id(&self) -> u8;

    /// Whether decoding gives back the same bytes.
    fn is_lossless(&self) -> bool;

    /// Whether chunks of this shape can be coded.
    ///
    /// # Errors
    /// If the shape is not valid, or the codec does not know its layout.
    fn check(&self, shape: &ChunkShape) -> Result<()>;

    /// Appends the coded form of one section to `out`.
    ///
    /// # Errors
    /// If the shape cannot be coded, or `section` does not have its length; `out` is then as it was.
    fn encode_layer(&self, shape: &ChunkShape, layer: usize, section: &[u8], out: &mut Vec<u8>)
    -> Result<()>;

    /// Decodes a section of `shape` that [`Self::encode_layer`] made.
    ///
    /// # Errors
    /// If the shape cannot be coded, `section` does not have its length, or `coded` is not what such a section gives;
    /// `section` then has any content.
    fn decode_layer(&self, shape: &ChunkShape, layer: usize, coded: &[u8], section: &mut [u8]) -> Result<()>;
}
