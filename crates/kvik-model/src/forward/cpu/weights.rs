//! The weights of a model, packed for the CPU kernels.

use crate::checkpoint::{Checkpoint, Tensor};
use crate::config::{Activation, Architecture, ModelConfig, Norm, Position};
use crate::error::{ModelError, Result};
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
        let reader = TensorReader { checkpoint, config, prefix: detect_prefix(checkpoint, config) };
        let names = Names::of(config.architecture);
        let vocab_shape = [config.vocab_size, config.hidden_size];
        let embedding = reader.read(names.embedding, &vocab_shape)?;
        let position_embedding = match config.position {
            Position::Learned => {
                let shape = [config.max_positions, config.hidden_size];
                let tensor = reader.read("wpe.weight", &shape)?;
                Some(PackedMatrix::pack(&[MatrixSource::rows(tensor)])?)
            }
            Position::Rope(_) => None,
        };
        let lm_head = if config.ties_embeddings {
            None
        } else {
            let tensor = checkpoint.read_shaped("lm_head.weight", &vocab_shape)?;
            Some(PackedMatrix::pack(&[MatrixSource::rows(tensor)])?)
        };
        let layers = (0..config.n_layers)
            .map(|layer_idx| match config.architecture {
                Architecture::Gpt2 => reader.gpt2_layer(layer_idx),
                Architecture::Llama | Architecture::Mistral | Architecture::Qwen2 | Architecture::Qwen3 => {
                    reader.llama_layer(layer_idx)
                }
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            embedding: PackedMatrix::pack(&[MatrixSource::rows(embedding)])?,
            position_embedding,
            layers,
            final_norm: reader.norm(names.final_norm)?,
            lm_head,
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

/// Tensor names that differ between architectures, without the model's prefix.
struct Names {
    embedding: &'static str,
    final_norm: &'static str,
}

impl Names {
    fn of(architecture: Architecture) -> Self {
        match architecture {
            Architecture::Gpt2 => Self { embedding: "wte.weight", final_norm: "ln_f" },
            _ => Self { embedding: "embed_tokens.weight", final_norm: "norm" },
        }
    }
}

/// Checkpoints of the bare model lack the prefix that those of the causal model have.
fn detect_prefix(checkpoint: &Checkpoint, config: &ModelConfig) -> &'static str {
    let prefix = match config.architecture {
        Architecture::Gpt2 => "transformer.",
        _ => "model.",
    };
    let bare = Names::of(config.architecture).embedding;
    if checkpoint.tensor_info(bare).is_some() { "" } else { prefix }
}

/// Reads tensors by the names of one model.
struct TensorReader<'a> {
    checkpoint: &'a Checkpoint,
    config: &'a ModelConfig,
    prefix: &'static str,
}

impl TensorReader<'_> {
    fn read(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.checkpoint.read_shaped(&format!("{}{name}", self.prefix), shape)
    }

    /// A vector as f32, padded with zeros.
    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let mut values = self.read(name, &[len])?.to_f32();
        values.resize(padded(len), 0.0);
        Ok(values)
    }

    fn norm(&self, name: &str) -> Result<NormWeights> {
        let scale = self.vector(&format!("{name}.weight"), self.config.hidden_size)?;
        let shift = match self.config.norm {
            Norm::Rms { .. } => Vec::new(),
            Norm::Layer { .. } => self.vector(&format!("{name}.bias"), self.config.hidden_size)?,
        };
        Ok(NormWeights { scale, shift })
    }

    /// One linear of several tensors `[n_outputs, n_inputs]` with their biases.
    fn linear(&self, parts: &[(String, usize)], n_inputs: usize, has_bias: bool) -> Result<Linear> {
        let mut sources = Vec::with_capacity(parts.len());
        let mut bias = Vec::new();
        for (name, n_outputs) in parts {
            let tensor = self.read(&format!("{name}.weight"), &[*n_outputs, n_inputs])?;
            sources.push(MatrixSource::rows(tensor));
            if has_bias {
                bias.extend(self.vector(&format!("{name}.bias"), *n_outputs)?);
            }
        }
        Ok(Linear { matrix: PackedMatrix::pack(&sources)?, bias: has_bias.then_some(bias) })
    }

    fn llama_layer(&self, layer_idx: usize) -> Result<LayerWeights> {
        let config = self.config;
        let name = |suffix: &str| format!("layers.{layer_idx}.{suffix}");
        let query_width = config.n_query_heads * config.head_dim;
        let kv_width = config.n_kv_heads * config.head_dim;
        let qkv = [
            (name("self_attn.q_proj"), query_width),
            (name("self_attn.k_proj"), kv_width),
            (name("self_attn.v_proj"), kv_width),
        ];
        let up = match config.activation {
            Activation::SiluGated => vec![
                (name("mlp.gate_proj"), config.intermediate_size),
                (name("mlp.up_proj"), config.intermediate_size),
            ],
            Activation::GeluTanh => vec![(name("mlp.up_proj"), config.intermediate_size)],
        };
        let qk_norm = if config.has_qk_norm {
            let head_scale =
                |suffix: &str| Ok::<_, ModelError>(self.read(&name(suffix), &[config.head_dim])?.to_f32());
            Some((head_scale("self_attn.q_norm.weight")?, head_scale("self_attn.k_norm.weight")?))
        } else {
            None
        };
        Ok(LayerWeights {
            attention_norm: self.norm(&name("input_layernorm"))?,
            qkv: self.linear(&qkv, config.hidden_size, config.has_qkv_bias)?,
            qk_norm,
            output: self.linear(
                &[(name("self_attn.o_proj"), config.hidden_size)],
                query_width,
                config.has_output_bias,
            )?,
            mlp_norm: self.norm(&name("post_attention_layernorm"))?,
            up: self.linear(&up, config.hidden_size, config.has_mlp_bias)?,
            down: self.linear(
                &[(name("mlp.down_proj"), config.hidden_size)],
                config.intermediate_size,
                config.has_mlp_bias,
            )?,
        })
    }

    /// GPT-2 stores matrices with their inputs as rows, and queries, keys and values in one.
    fn gpt2_layer(&self, layer_idx: usize) -> Result<LayerWeights> {
        let config = self.config;
        let name = |suffix: &str| format!("h.{layer_idx}.{suffix}");
        let hidden = config.hidden_size;
        let columns = |suffix: &str, n_inputs: usize, n_outputs: usize| -> Result<Linear> {
            let tensor = self.read(&name(&format!("{suffix}.weight")), &[n_inputs, n_outputs])?;
            let bias = self.vector(&name(&format!("{suffix}.bias")), n_outputs)?;
            Ok(Linear { matrix: PackedMatrix::pack(&[MatrixSource::columns(tensor)])?, bias: Some(bias) })
        };
        let fused = self.read(&name("attn.c_attn.weight"), &[hidden, 3 * hidden])?;
        let fused_bias = self.read(&name("attn.c_attn.bias"), &[3 * hidden])?.to_f32();
        let mut qkv_bias = Vec::with_capacity(3 * padded(hidden));
        for part in fused_bias.chunks_exact(hidden) {
            qkv_bias.extend_from_slice(part);
            qkv_bias.resize(qkv_bias.len().next_multiple_of(padded(1)), 0.0);
        }
        let sources: Vec<_> = split_columns(&fused, 3).into_iter().map(MatrixSource::columns).collect();
        Ok(LayerWeights {
            attention_norm: self.norm(&name("ln_1"))?,
            qkv: Linear { matrix: PackedMatrix::pack(&sources)?, bias: Some(qkv_bias) },
            qk_norm: None,
            output: columns("attn.c_proj", hidden, hidden)?,
            mlp_norm: self.norm(&name("ln_2"))?,
            up: columns("mlp.c_fc", hidden, config.intermediate_size)?,
            down: columns("mlp.c_proj", config.intermediate_size, hidden)?,
        })
    }
}

/// Cuts a `[rows, n_parts * width]` tensor into `n_parts` tensors of `[rows, width]`.
fn split_columns(tensor: &Tensor, n_parts: usize) -> Vec<Tensor> {
    let (rows, columns) = (tensor.shape[0], tensor.shape[1]);
    let part_bytes = columns / n_parts * tensor.dtype.size();
    (0..n_parts)
        .map(|part| {
            let bytes: Vec<u8> = tensor
                .bytes
                .chunks_exact(n_parts * part_bytes)
                .flat_map(|row| &row[part * part_bytes..(part + 1) * part_bytes])
                .copied()
                .collect();
            Tensor { dtype: tensor.dtype, shape: vec![rows, columns / n_parts], bytes: bytes.into() }
        })
        .collect()
}
