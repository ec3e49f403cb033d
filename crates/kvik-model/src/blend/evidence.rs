//! What selectors know of a prompt beside its tokens.

use std::ops::Range;

use crate::error::Result;
use crate::forward::{Backend, LayerKv, RowPositions, SequenceRows};
use crate::paging::BlockId;

use kvik_types::{Dtype, TokenId};

/// A score for every token of the placed segments, which takes a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Evidence {
    /// How far the keys of a layer are from those that the tokens have behind all that stands before them.
    Deviation { layer_idx: usize },
    /// How much the tokens behind the last segment look at a token in the last layer.
    Attention,
}

/// A prompt whose segments lie in their places, and the passes over it.
pub(crate) struct Assembled<'a> {
    pub(crate) backend: &'a mut dyn Backend,
    pub(crate) tokens: &'a [TokenId],
    pub(crate) table: &'a [BlockId],
    pub(crate) segments: &'a [Range<usize>],
    /// Most rows of one pass.
    pub(crate) max_rows: usize,
}

impl Assembled<'_> {
    /// The scores by position; 0 outside of segments.
    pub(crate) fn scores(&mut self, evidence: Evidence) -> Result<Vec<f32>> {
        match evidence {
            Evidence::Deviation { layer_idx } => self.deviations(layer_idx),
            Evidence::Attention => self.attention(),
        }
    }

    /// Leaves the layers before `layer_idx` as they are behind all that stands before, which is nearer to the truth, and
    /// `layer_idx` itself as it was.
    fn deviations(&mut self, layer_idx: usize) -> Result<Vec<f32>> {
        let layer_idx = layer_idx.min(self.backend.config().n_layers - 1);
        let end = self.segments.last().map_or(0, |segment| segment.end);
        let before = self.backend.export_kv(layer_idx, self.table, end)?;
        let mut first = 0;
        while first < end {
            let last = end.min(first + self.max_rows);
            let rows = SequenceRows {
                tokens: &self.tokens[first..last],
                positions: RowPositions::From(first),
                block_table: self.table,
                n_logits: 0,
            };
            self.backend.forward_layers(&[rows], layer_idx + 1)?;
            first = last;
        }
        let after = self.backend.export_kv(layer_idx, self.table, end)?;
        self.backend.import_kv(layer_idx, self.table, &before)?;
        let mut scores = vec![0.0; self.tokens.len()];
        let dtype = self.backend.kv_dtype();
        for segment in self.segments {
            for position in segment.clone() {
                scores[position] = squared_distance(dtype, &before, &after, position);
            }
        }
        Ok(scores)
    }

    fn attention(&mut self) -> Result<Vec<f32>> {
        let n_layers = self.backend.config().n_layers;
        let end = self.segments.last().map_or(0, |segment| segment.end);
        let mut outside: Vec<u32> = Vec::new();
        let mut first = 0;
        for segment in self.segments {
            outside.extend(first as u32..segment.start as u32);
            first = segment.end;
        }
        for positions in outside.chunks(self.max_rows) {
            let tokens: Vec<TokenId> = positions.iter().map(|&at| self.tokens[at as usize]).collect();
            let rows = SequenceRows {
                tokens: &tokens,
                positions: RowPositions::At(positions),
                block_table: self.table,
                n_logits: 0,
            };
            self.backend.forward_layers(&[rows], n_layers)?;
        }
        let mut scores = vec![0.0; self.tokens.len()];
        let mut first = end;
        while first < self.tokens.len() {
            let last = self.tokens.len().min(first + self.max_rows);
            let rows = SequenceRows {
                tokens: &self.tokens[first..last],
                positions: RowPositions::From(first),
                block_table: self.table,
                n_logits: 0,
            };
            self.backend.forward_watched(rows, last - first, n_layers - 1..n_layers, &mut scores)?;
            first = last;
        }
        Ok(scores)
    }
}

fn squared_distance(dtype: Dtype, before: &LayerKv, after: &LayerKv, position: usize) -> f32 {
    let token_bytes = before.keys.len() / before.n_tokens.max(1);
    let range = position * token_bytes..(position + 1) * token_bytes;
    let element_bytes = dtype.size_bytes();
    let values = |kv: &LayerKv| -> Vec<f32> {
        kv.keys[range.clone()].chunks_exact(element_bytes).map(|bytes| widen(dtype, bytes)).collect()
    };
    values(before).iter().zip(values(after)).map(|(a, b)| (a - b) * (a - b)).sum()
}

fn widen(dtype: Dtype, bytes: &[u8]) -> f32 {
    let half = bytes.first_chunk().copied().map(u16::from_le_bytes).unwrap_or_default();
    match dtype {
        Dtype::BF16 => half::bf16::from_bits(half).to_f32(),
        Dtype::F16 => half::f16::from_bits(half).to_f32(),
        _ => f32::from_le_bytes(bytes.first_chunk().copied().unwrap_or_default()),
    }
}
