//! The keys and values of a segment.

use std::fmt;

use kvik_types::TokenId;

use crate::forward::{LayerKv, SegmentPart};

/// Keys and values of a run of tokens, computed alone from position 0 on.
///
/// The implementation MUST give only bytes that a backend with the KV layout and the weights of the engine has computed for
/// exactly the segment's tokens, with no others before them.
pub trait SegmentKv: fmt::Debug + Send + Sync {
    /// Number of tokens.
    fn n_tokens(&self) -> usize;

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
    /// Of every layer, with keys as at positions from 0 on.
    pub layers: Vec<LayerKv>,
}

impl SegmentKv for ComputedSegment {
    fn n_tokens(&self) -> usize {
        self.tokens.len()
    }

    fn n_parts(&self) -> usize {
        1
    }

    fn part(&self, layer_idx: usize, _: usize) -> Option<SegmentPart<'_>> {
        self.layers.get(layer_idx).map(|layer| SegmentPart { keys: &layer.keys, values: &layer.values })
    }
}
