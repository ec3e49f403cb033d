//! One pass through the layers: all rows of a batch together.

use crate::config::{Activation, ModelConfig, Norm};
use crate::kernels::{
    AttentionShape, Combine, Isa, KvElement, KvPages, KvRows, RotaryTable, RowPlan, ThreadPool, attend,
    for_each_chunk_mut, gelu_tanh_rows, layer_norm_row, matmul, padded, rms_norm_row, silu_gate_rows,
};

use super::super::{Logits, SequenceRows};
use super::watch::Watch;
use super::weights::{LayerWeights, ModelWeights, NormWeights};

/// Rows that one thread takes of the cheap row-by-row work.
const ROWS_PER_CHUNK: usize = 8;

/// The activations of one pass.
#[derive(Debug, Default)]
pub(super) struct Activations {
    /// The residual stream.
    pub(super) hidden: Vec<f32>,
    normalized: Vec<f32>,
    qkv: Vec<f32>,
    attended: Vec<f32>,
    up: Vec<f32>,
    activated: Vec<f32>,
}

/// What the layers of one pass share.
pub(super) struct Pass<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) activations: &'a mut Activations,
    pub(super) rotary: Option<&'a RotaryTable>,
    pub(super) pool: &'a mut ThreadPool,
    pub(super) isa: Isa,
    pub(super) plan: &'a RowPlan<'a>,
    pub(super) n_rows: usize,
}

impl Activations {
    /// Makes room for `n_rows` rows. New elements are zero, and nothing ever writes another value
    /// into the padding of a row.
    pub(super) fn resize(&mut self, config: &ModelConfig, n_rows: usize) {
        let hidden = padded(config.hidden_size);
        let query_width = padded(config.n_query_heads * config.head_dim);
        let kv_width = padded(config.n_kv_heads * config.head_dim);
        let intermediate = padded(config.intermediate_size);
        let up = match config.activation {
            Activation::SiluGated => 2 * intermediate,
            Activation::GeluTanh => intermediate,
        };
        self.hidden.resize(n_rows * hidden, 0.0);
        self.normalized.resize(n_rows * hidden, 0.0);
        self.qkv.resize(n_rows * (query_width + 2 * kv_width), 0.0);
        self.attended.resize(n_rows * query_width, 0.0);
        self.up.resize(n_rows * up, 0.0);
        self.activated.resize(n_rows * intermediate, 0.0);
    }
}

impl Pass<'_> {
    pub(super) fn layer<E: KvElement>(
        &mut self,
        layer_idx: usize,
        layer: &LayerWeights,
        pages: &mut KvPages<E>,
        watch: Option<&mut Watch<'_>>,
    ) {
        let config = self.config;
        let query_width = padded(config.n_query_heads * config.head_dim);
        let kv_width = padded(config.n_kv_heads * config.head_dim);
        let stride = query_width + 2 * kv_width;

        self.normalize(&layer.attention_norm);
        let activations = &mut *self.activations;
        let (bias, matrix) = (layer.qkv.bias.as_deref(), &layer.qkv.matrix);
        let (x, out) = (&activations.normalized, &mut activations.qkv);
        matmul(self.isa, self.pool, matrix, bias, x, self.n_rows, Combine::Replace, out);
        self.position_queries_and_keys(layer, stride, query_width);

        let activations = &mut *self.activations;
        let rows = KvRows {
            values: &activations.qkv,
            stride,
            key_column: query_width,
            value_column: query_width + kv_width,
        };
        pages.write(self.pool, layer_idx, self.plan, rows);
        let shape =
            AttentionShape { n_query_heads: config.n_query_heads, window: config.sliding_windows[layer_idx] };
        let (q, out) = (&activations.qkv, &mut activations.attended);
        attend(self.isa, self.pool, shape, pages, layer_idx, self.plan, q, stride, out);
        if let Some(watch) = watch.filter(|watch| watch.layers.contains(&layer_idx)) {
            watch.add(config, layer_idx, pages, &activations.qkv[..self.n_rows * stride], stride);
        }
        let (bias, matrix) = (layer.output.bias.as_deref(), &layer.output.matrix);
        let (x, out) = (&activations.attended, &mut activations.hidden);
        matmul(self.isa, self.pool, matrix, bias, x, self.n_rows, Combine::Add, out);

        self.normalize(&layer.mlp_norm);
        let activations = &mut *self.activations;
        let (bias, matrix) = (layer.up.bias.as_deref(), &layer.up.matrix);
        let (x, out) = (&activations.normalized, &mut activations.up);
        matmul(self.isa, self.pool, matrix, bias, x, self.n_rows, Combine::Replace, out);
        self.activate();
        let activations = &mut *self.activations;
        let x = match config.activation {
            Activation::SiluGated => &activations.activated,
            Activation::GeluTanh => &activations.up,
        };
        let (bias, matrix) = (layer.down.bias.as_deref(), &layer.down.matrix);
        matmul(self.isa, self.pool, matrix, bias, x, self.n_rows, Combine::Add, &mut activations.hidden);
    }

    /// Writes the normalized residual stream.
    fn normalize(&mut self, weights: &NormWeights) {
        let stride = padded(self.config.hidden_size);
        let (isa, config, hidden) = (self.isa, self.config, &self.activations.hidden);
        let chunk_len = ROWS_PER_CHUNK * stride;
        for_each_chunk_mut(self.pool, &mut self.activations.normalized, chunk_len, |chunk_idx, rows| {
            for (row_idx, out) in rows.chunks_exact_mut(stride).enumerate() {
                let row = &hidden[chunk_idx * chunk_len + row_idx * stride..][..stride];
                normalize_row(isa, config, weights, row, out);
            }
        });
    }

    /// Normalizes the heads of queries and keys where the model does, and rotates them.
    fn position_queries_and_keys(&mut self, layer: &LayerWeights, stride: usize, query_width: usize) {
        if self.rotary.is_none() && layer.qk_norm.is_none() {
            return;
        }
        let config = self.config;
        let n_query = config.n_query_heads * config.head_dim;
        let n_key = config.n_kv_heads * config.head_dim;
        let rotary = self.rotary;
        let chunk_len = ROWS_PER_CHUNK * stride;
        for_each_chunk_mut(self.pool, &mut self.activations.qkv, chunk_len, |chunk_idx, rows| {
            for (row_idx, row) in rows.chunks_exact_mut(stride).enumerate() {
                let (queries, keys) = row.split_at_mut(query_width);
                let (queries, keys) = (&mut queries[..n_query], &mut keys[..n_key]);
                if let (Some((query_scale, key_scale)), Norm::Rms { epsilon }) = (&layer.qk_norm, config.norm)
                {
                    normalize_heads(epsilon, query_scale, queries);
                    normalize_heads(epsilon, key_scale, keys);
                }
                if let Some(rotary) = rotary {
                    rotary.rotate(chunk_idx * ROWS_PER_CHUNK + row_idx, queries);
                    rotary.rotate(chunk_idx * ROWS_PER_CHUNK + row_idx, keys);
                }
            }
        });
    }

    /// Applies the nonlinearity to the rows of `up`.
    fn activate(&mut self) {
        let intermediate = padded(self.config.intermediate_size);
        let (isa, activations) = (self.isa, &mut *self.activations);
        let chunk_len = ROWS_PER_CHUNK.min(self.n_rows.div_ceil(self.pool.n_threads())) * intermediate;
        match self.config.activation {
            Activation::SiluGated => {
                let up = &activations.up;
                for_each_chunk_mut(self.pool, &mut activations.activated, chunk_len, |chunk_idx, rows| {
                    for (row_idx, out) in rows.chunks_exact_mut(intermediate).enumerate() {
                        let start = 2 * (chunk_idx * chunk_len + row_idx * intermediate);
                        let (gate, up) = up[start..start + 2 * intermediate].split_at(intermediate);
                        silu_gate_rows(isa, gate, up, out);
                    }
                });
            }
            Activation::GeluTanh => {
                for_each_chunk_mut(self.pool, &mut activations.up, chunk_len, |_, rows| {
                    gelu_tanh_rows(isa, rows);
                });
            }
        }
    }

    /// Computes the logits of the rows that were asked for, and of no others: the output matrix
    /// is often the largest of the model.
    pub(super) fn logits(
        &mut self,
        weights: &ModelWeights,
        sequences: &[SequenceRows<'_>],
        logits: &mut Logits,
    ) {
        let stride = padded(self.config.hidden_size);
        let activations = &mut *self.activations;
        let (mut row, mut n_logits) = (0, 0);
        for sequence in sequences {
            row += sequence.tokens.len();
            let n_wanted = sequence.n_logits.min(sequence.tokens.len());
            for wanted in row - n_wanted..row {
                let hidden = &activations.hidden[wanted * stride..][..stride];
                let out = &mut activations.normalized[n_logits * stride..][..stride];
                normalize_row(self.isa, self.config, &weights.final_norm, hidden, out);
                n_logits += 1;
            }
        }
        logits.reset(n_logits, self.config.vocab_size);
        let x = &activations.normalized;
        let matrix = weights.output_matrix();
        matmul(self.isa, self.pool, matrix, None, x, n_logits, Combine::Replace, &mut logits.values);
    }
}

fn normalize_row(isa: Isa, config: &ModelConfig, weights: &NormWeights, row: &[f32], out: &mut [f32]) {
    let n = config.hidden_size;
    match config.norm {
        Norm::Rms { epsilon } => rms_norm_row(isa, n, epsilon, &weights.scale, row, out),
        Norm::Layer { epsilon } => layer_norm_row(isa, n, epsilon, &weights.scale, &weights.shift, row, out),
    }
}

/// Divides each head by its root mean square and scales it.
fn normalize_heads(epsilon: f32, scale: &[f32], heads: &mut [f32]) {
    for head in heads.chunks_exact_mut(scale.len()) {
        let squares: f32 = head.iter().map(|value| value * value).sum();
        let factor = 1.0 / (squares / scale.len() as f32 + epsilon).sqrt();
        head.iter_mut().zip(scale).for_each(|(value, &scale)| *value = *value * factor * scale);
    }
}
