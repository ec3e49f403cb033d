//! What rows pay attention to.

use std::ops::Range;

use crate::config::ModelConfig;
use crate::forward::SequenceRows;
use crate::kernels::{KvElement, KvPages};

/// Sums the attention of the last rows of a sequence, by the position that they look at.
pub(super) struct Watch<'a> {
    pub(super) sequence: SequenceRows<'a>,
    pub(super) n_watched: usize,
    pub(super) layers: Range<usize>,
    pub(super) weights: &'a mut [f32],
}

impl Watch<'_> {
    /// Adds one layer. Rows of `queries` lie `stride` apart and begin with the query heads, after rotation.
    pub(super) fn add<E: KvElement>(
        &mut self,
        config: &ModelConfig,
        layer_idx: usize,
        pages: &KvPages<E>,
        queries: &[f32],
        stride: usize,
    ) {
        let n_rows = self.sequence.tokens.len();
        let Some(last_row) = n_rows.checked_sub(1) else { return };
        let n_tokens = self.sequence.positions.get(last_row) + 1;
        let keys = pages.widened_keys(layer_idx, self.sequence.block_table, n_tokens);
        let (head_dim, kv_width) = (config.head_dim, config.n_kv_heads * config.head_dim);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let queries_per_kv_head = config.n_query_heads / config.n_kv_heads;
        let mut scores = Vec::with_capacity(n_tokens);
        for row_idx in n_rows.saturating_sub(self.n_watched)..n_rows {
            let position = self.sequence.positions.get(row_idx);
            let window = config.sliding_windows[layer_idx];
            let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
            for head in 0..config.n_query_heads {
                let query = &queries[row_idx * stride + head * head_dim..][..head_dim];
                let column = head / queries_per_kv_head * head_dim;
                scores.clear();
                scores.extend((first..=position).map(|seen| {
                    let key = &keys[seen * kv_width + column..][..head_dim];
                    query.iter().zip(key).map(|(query, key)| query * key).sum::<f32>() * scale
                }));
                let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                for score in &mut scores {
                    *score = (*score - largest).exp();
                }
                let sum: f32 = scores.iter().sum();
                for (weight, score) in self.weights.iter_mut().skip(first).zip(&scores) {
                    *weight += score / sum;
                }
            }
        }
    }
}
