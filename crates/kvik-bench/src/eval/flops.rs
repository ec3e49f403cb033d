//! Operations of a forward pass.

use kvik_model::{Activation, ModelConfig};

/// Floating point operations of the parts of a pass; a multiply and an add are two.
#[derive(Debug, Clone, Copy)]
pub(super) struct Flops {
    /// The matrices of all layers, for one row.
    matrices: f64,
    /// Attention of one row in all layers to one position.
    attention: f64,
    /// The logits of one row.
    pub(super) logits: f64,
}

impl Flops {
    pub(super) fn of(config: &ModelConfig) -> Self {
        let (hidden, layers) = (config.hidden_size as f64, config.n_layers as f64);
        let query = (config.n_query_heads * config.head_dim) as f64;
        let kv = (config.n_kv_heads * config.head_dim) as f64;
        let n_up = match config.activation {
            Activation::SiluGated => 2.0,
            Activation::GeluTanh => 1.0,
        };
        let mlp = (n_up + 1.0) * hidden * config.intermediate_size as f64;
        Self {
            matrices: 2.0 * layers * (hidden * (query + 2.0 * kv) + query * hidden + mlp),
            attention: 4.0 * layers * query,
            logits: 2.0 * hidden * config.vocab_size as f64,
        }
    }

    /// All layers for a row that sees `n_visible` positions.
    pub(super) fn row(&self, n_visible: usize) -> f64 {
        self.matrices + self.attention * n_visible as f64
    }
}
