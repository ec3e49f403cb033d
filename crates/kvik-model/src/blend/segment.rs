//! The keys and values of a segment.

use std::fmt;

use kvik_types::TokenId;

use crate::forward::{LayerKv, SegmentPart};

/// Keys and values of a run of tokens, computed apart from the prompts that they are used in.
///
/// The implementation MUST give only bytes that a backend with the KV layout and the weights of the engine has computed for
/// exactly the segment's tokens, with no others before them than the engine's
/// [priming context](crate::EngineOptions::segment_priming).
pub trait SegmentKv: fmt::Debug + Send + Sync {
    /// Number of tokens.
    fn n_tokens(&self) -> usize;

    /// Position that its first key is rotated to: the number of tokens that stood before it.
    fn first_position(&self) -> usize;

    /// Number of parts that they lie in, one behind the other; the same in every layer.
    fn n_parts(&self) -> usize;

    /// One part of one layer; `None` makes the segment a miss: its tokens are computed.
    fn part(&self, layer_idx: usize, part_idx: usize) -> Option<SegmentPart<'_>>;
}

/// A segment as the engine has computed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ComputedSegment {
    /// Its tokens.
    pub tokens: Vec<TokenId>,
    /// Position that its first key is rotated to.
    pub first_position: usize,
    /// Of every layer.
    pub layers: Vec<LayerKv>,
}

impl SegmentKv for ComputedSegment {
    fn n_tokens(&self) -> usize {
        self.tokens.len()
    }

    fn first_position(&self) -> usize {
        self.first_position
    }

    fn n_parts(&self) -> usize {
        1
    }

    fn part(&self, layer_idx: usize, _: usize) -> Option<SegmentPart<'_>> {
        self.layers.get(layer_idx).map(|layer| SegmentPart { keys: &layer.keys, values: &layer.values })
    }
}
