//! What rows pay attention to.

use crate::error::Result;
use crate::forward::SequenceRows;

use super::CudaBackend;
use super::activations::qkv_width;

impl CudaBackend {
    /// Adds the attention that the last `n_watched` rows of the pass under way pay to each position in one layer.
    ///
    /// Computed on the host, from queries and keys of the device: a question has few rows.
    pub(super) fn add_attention(
        &self,
        sequence: SequenceRows<'_>,
        n_watched: usize,
        layer_idx: usize,
        weights: &mut [f32],
    ) -> Result<()> {
        let config = &self.config;
        let n_rows = sequence.tokens.len();
        let Some(last_row) = n_rows.checked_sub(1) else { return Ok(()) };
        let n_tokens = sequence.positions.get(last_row) + 1;
        let stride = qkv_width(config);
        let first_row = n_rows.saturating_sub(n_watched);
        let mut bytes = vec![0; (n_rows - first_row) * stride * 4];
        // Behind the layer's kernels: the queries are those after rotation.
        self.device.read(self.activations.qkv.address() + (first_row * stride * 4) as u64, &mut bytes)?;
        let (queries, _) = bytes.as_chunks::<4>();
        let queries: Vec<f32> = queries.iter().map(|value| f32::from_le_bytes(*value)).collect();
        let keys = self.pages.export(layer_idx, sequence.block_table, n_tokens)?.keys;
        let keys = widened(self.kv_dtype, &keys);
        let (head_dim, kv_width) = (config.head_dim, config.n_kv_heads * config.head_dim);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let queries_per_kv_head = config.n_query_heads / config.n_kv_heads;
        for row_idx in first_row..n_rows {
            let position = sequence.positions.get(row_idx);
            let window = config.sliding_windows[layer_idx];
            let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
            for head in 0..config.n_query_heads {
                let query = &queries[(row_idx - first_row) * stride + head * head_dim..][..head_dim];
                let column = head / queries_per_kv_head * head_dim;
                let mut scores: Vec<f32> = (first..=position)
                    .map(|seen| {
                        let key = &keys[seen * kv_width + column..][..head_dim];
                        query.iter().zip(key).map(|(query, key)| query * key).sum::<f32>() * scale
                    })
                    .collect();
                let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                for score in &mut scores {
                    *score = (*score - largest).exp();
                }
                let sum: f32 = scores.iter().sum();
                for (weight, score) in weights.iter_mut().skip(first).zip(&scores) {
                    *weight += score / sum;
                }
            }
        }
        Ok(())
    }
}

/// Elements in little endian as f32.
fn widened(dtype: kvik_types::Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        kvik_types::Dtype::F16 => {
            bytes.as_chunks::<2>().0.iter().map(|bits| half::f16::from_le_bytes(*bits).to_f32()).collect()
        }
        kvik_types::Dtype::BF16 => {
            bytes.as_chunks::<2>().0.iter().map(|bits| half::bf16::from_le_bytes(*bits).to_f32()).collect()
        }
        _ => bytes.as_chunks::<4>().0.iter().map(|bits| f32::from_le_bytes(*bits)).collect(),
    }
}
