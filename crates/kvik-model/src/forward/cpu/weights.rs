//! The weights of a model, packed for the CPU kernels.

use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::error::Result;
use crate::forward::tensors::{LayerTensors, LinearPart, NormTensors, TensorReader};
use crate::kernels::{MatrixSource, PackedMatrix, padded};

/// A matrix with its bias.
#[derive(Debug)]
pub(super) struct Linear {
    pub(super) matrix: PackedMatrix,
    /// As long as a padded output row.
    pub(super) bias: Option<Vec<f32>>,
}

/// Scale and shift of a normalization, padded with zeros.
#[derive(Debug)]
pub(super) struct NormWeights {
    pub(super) scale: Vec<f32>,
    /// Empty for a normalization without shift.
    pub(super) shift: Vec<f32>,
}

/// One layer.
#[derive(Debug)]
pub(super) struct LayerWeights {
    pub(super) attention_norm: NormWeights,
    /// Queries, keys and values; each of the three starts at a multiple of the vector width.
    pub(super) qkv: Linear,
    /// Per-head scales of queries and keys, `head_dim` long (Qwen3).
    pub(super) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    pub(super) output: Linear,
    pub(super) mlp_norm: NormWeights,
    /// Gate and up side by side where the activation is gated, else up alone.
    pub(super) up: Linear,
    pub(super) down: Linear,
}

/// All weights.
#[derive(Debug)]
pub(super) struct ModelWeights {
    /// Also the output matrix where `lm_head` is `None`.
    pub(super) embedding: PackedMatrix,
    /// One row a position, where positions are learned.
    pub(super) position_embedding: Option<PackedMatrix>,
    pub(super) layers: Vec<LayerWeights>,
    pub(super) final_norm: NormWeights,
    pub(super) lm_head: Option<PackedMatrix>,
}

impl ModelWeights {
    /// Reads and packs the tensors of `checkpoint`.
    ///
    /// # Errors
    /// If a tensor is missing, has another shape than `config` asks for, or cannot be read.
    pub(super) fn load(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<Self> {
        let reader = TensorReader::new(checkpoint, config);
        let pack = |source: MatrixSource| PackedMatrix::pack(&[source]);
        Ok(Self {
            embedding: pack(reader.embedding()?)?,
            position_embedding: reader.position_embedding()?.map(pack).transpose()?,
            lm_head: reader.lm_head()?.map(pack).transpose()?,
            layers: (0..config.n_layers)
                .map(|layer_idx| LayerWeights::pack(reader.layer(layer_idx)?))
                .collect::<Result<Vec<_>>>()?,
            final_norm: NormWeights::pad(reader.final_norm()?),
        })
    }

    /// The matrix that turns hidden states into logits.
    pub(super) fn output_matrix(&self) -> &PackedMatrix {
        self.lm_head.as_ref().unwrap_or(&self.embedding)
    }

    /// Bytes of all packed matrices.
    pub(super) fn size_bytes(&self) -> usize {
        let layers = self.layers.iter().map(|layer| {
            [&layer.qkv, &layer.output, &layer.up, &layer.down]
                .iter()
                .map(|linear| linear.matrix.size_bytes())
                .sum::<usize>()
        });
        self.embedding.size_bytes()
            + self.position_embedding.as_ref().map_or(0, PackedMatrix::size_bytes)
            + self.lm_head.as_ref().map_or(0, PackedMatrix::size_bytes)
            + layers.sum::<usize>()
    }
}

impl LayerWeights {
    fn pack(tensors: LayerTensors) -> Result<Self> {
        Ok(Self {
            attention_norm: NormWeights::pad(tensors.attention_norm),
            qkv: Linear::pack(tensors.qkv)?,
            qk_norm: tensors.qk_norm,
            output: Linear::pack(vec![tensors.output])?,
            mlp_norm: NormWeights::pad(tensors.mlp_norm),
            up: Linear::pack(tensors.up)?,
            down: Linear::pack(vec![tensors.down])?,
        })
    }
}

impl Linear {
    /// One matrix of all parts, with the bias of each at the place of its outputs.
    fn pack(parts: Vec<LinearPart>) -> Result<Self> {
        let mut bias = Vec::new();
        let mut sources = Vec::with_capacity(parts.len());
        for part in parts {
            bias.extend(part.bias.unwrap_or_default());
            bias.resize(padded(bias.len()), 0.0);
            sources.push(part.source);
        }
        Ok(Self { matrix: PackedMatrix::pack(&sources)?, bias: Some(bias).filter(|bias| !bias.is_empty()) })
    }
}

impl NormWeights {
    fn pad(tensors: NormTensors) -> Self {
        let pad = |mut values: Vec<f32>| {
            values.resize(padded(values.len()), 0.0);
            values
        };
        Self { scale: pad(tensors.scale), shift: pad(tensors.shift.unwrap_or_default()) }
    }
}
