//! The tensors of a checkpoint as the parts of a model, by architecture and by their names.

use crate::checkpoint::{Checkpoint, Tensor};
use crate::config::{Activation, Architecture, ModelConfig, Norm, Position};
use crate::error::{ModelError, Result};
use crate::kernels::MatrixSource;

/// A matrix with its bias; several make one linear.
#[derive(Debug)]
pub(super) struct LinearPart {
    pub(super) source: MatrixSource,
    /// One number an output.
    pub(super) bias: Option<Vec<f32>>,
}

/// Scale and shift of a normalization.
#[derive(Debug)]
pub(super) struct NormTensors {
    pub(super) scale: Vec<f32>,
    pub(super) shift: Option<Vec<f32>>,
}

/// One layer.
#[derive(Debug)]
pub(super) struct LayerTensors {
    pub(super) attention_norm: NormTensors,
    /// Queries, keys and values.
    pub(super) qkv: Vec<LinearPart>,
    /// Per-head scales of queries and keys, `head_dim` long (Qwen3).
    pub(super) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    pub(super) output: LinearPart,
    pub(super) mlp_norm: NormTensors,
    /// Gate and up where the activation is gated, else up alone.
    pub(super) up: Vec<LinearPart>,
    pub(super) down: LinearPart,
}

/// Reads tensors by the names of one model.
#[derive(Debug)]
pub(super) struct TensorReader<'a> {
    checkpoint: &'a Checkpoint,
    config: &'a ModelConfig,
    prefix: &'static str,
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

impl<'a> TensorReader<'a> {
    /// A reader of the tensors of `checkpoint`.
    pub(super) fn new(checkpoint: &'a Checkpoint, config: &'a ModelConfig) -> Self {
        Self { checkpoint, config, prefix: detect_prefix(checkpoint, config) }
    }

    /// One row a token.
    ///
    /// # Errors
    /// If the tensor is missing, has another shape than `config` asks for, or cannot be read; also below.
    pub(super) fn embedding(&self) -> Result<MatrixSource> {
        let shape = [self.config.vocab_size, self.config.hidden_size];
        Ok(MatrixSource::rows(self.read(Names::of(self.config.architecture).embedding, &shape)?))
    }

    /// One row a position, where positions are learned.
    pub(super) fn position_embedding(&self) -> Result<Option<MatrixSource>> {
        match self.config.position {
            Position::Rope(_) => Ok(None),
            Position::Learned => {
                let shape = [self.config.max_positions, self.config.hidden_size];
                Ok(Some(MatrixSource::rows(self.read("wpe.weight", &shape)?)))
            }
        }
    }

    /// The matrix that gives logits, where it is not the embedding.
    pub(super) fn lm_head(&self) -> Result<Option<MatrixSource>> {
        if self.config.ties_embeddings {
            return Ok(None);
        }
        let shape = [self.config.vocab_size, self.config.hidden_size];
        Ok(Some(MatrixSource::rows(self.checkpoint.read_shaped("lm_head.weight", &shape)?)))
    }

    /// The normalization before the output matrix.
    pub(super) fn final_norm(&self) -> Result<NormTensors> {
        self.norm(Names::of(self.config.architecture).final_norm)
    }

    /// The tensors of one layer.
    pub(super) fn layer(&self, layer_idx: usize) -> Result<LayerTensors> {
        match self.config.architecture {
            Architecture::Gpt2 => self.gpt2_layer(layer_idx),
            Architecture::Llama | Architecture::Mistral | Architecture::Qwen2 | Architecture::Qwen3 => {
                self.llama_layer(layer_idx)
            }
        }
    }

    fn read(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.checkpoint.read_shaped(&format!("{}{name}", self.prefix), shape)
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        Ok(self.read(name, &[len])?.to_f32())
    }

    fn norm(&self, name: &str) -> Result<NormTensors> {
        let scale = self.vector(&format!("{name}.weight"), self.config.hidden_size)?;
        let shift = match self.config.norm {
            Norm::Rms { .. } => None,
            Norm::Layer { .. } => Some(self.vector(&format!("{name}.bias"), self.config.hidden_size)?),
        };
        Ok(NormTensors { scale, shift })
    }

    /// A tensor `[n_outputs, n_inputs]` with its bias.
    fn part(&self, name: &str, n_outputs: usize, n_inputs: usize, has_bias: bool) -> Result<LinearPart> {
        let tensor = self.read(&format!("{name}.weight"), &[n_outputs, n_inputs])?;
        let bias = if has_bias { Some(self.vector(&format!("{name}.bias"), n_outputs)?) } else { None };
        Ok(LinearPart { source: MatrixSource::rows(tensor), bias })
    }

    fn llama_layer(&self, layer_idx: usize) -> Result<LayerTensors> {
        let config = self.config;
        let name = |suffix: &str| format!("layers.{layer_idx}.{suffix}");
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let query_width = config.n_query_heads * config.head_dim;
        let kv_width = config.n_kv_heads * config.head_dim;
        let attention = |suffix: &str, width: usize| {
            self.part(&name(&format!("self_attn.{suffix}")), width, hidden, config.has_qkv_bias)
        };
        let mlp = |suffix: &str| {
            self.part(&name(&format!("mlp.{suffix}")), intermediate, hidden, config.has_mlp_bias)
        };
        let qk_norm = if config.has_qk_norm {
            let head_scale =
                |suffix: &str| Ok::<_, ModelError>(self.read(&name(suffix), &[config.head_dim])?.to_f32());
            Some((head_scale("self_attn.q_norm.weight")?, head_scale("self_attn.k_norm.weight")?))
        } else {
            None
        };
        Ok(LayerTensors {
            attention_norm: self.norm(&name("input_layernorm"))?,
            qkv: vec![
                attention("q_proj", query_width)?,
                attention("k_proj", kv_width)?,
                attention("v_proj", kv_width)?,
            ],
            qk_norm,
            output: self.part(&name("self_attn.o_proj"), hidden, query_width, config.has_output_bias)?,
            mlp_norm: self.norm(&name("post_attention_layernorm"))?,
            up: match config.activation {
                Activation::SiluGated => vec![mlp("gate_proj")?, mlp("up_proj")?],
                Activation::GeluTanh => vec![mlp("up_proj")?],
            },
            down: self.part(&name("mlp.down_proj"), hidden, intermediate, config.has_mlp_bias)?,
        })
    }

    /// GPT-2 stores matrices with their inputs as rows, and queries, keys and values in one.
    fn gpt2_layer(&self, layer_idx: usize) -> Result<LayerTensors> {
        let config = self.config;
        let name = |suffix: &str| format!("h.{layer_idx}.{suffix}");
        let hidden = config.hidden_size;
        let columns = |suffix: &str, n_inputs: usize, n_outputs: usize| -> Result<LinearPart> {
            let tensor = self.read(&name(&format!("{suffix}.weight")), &[n_inputs, n_outputs])?;
            let bias = self.vector(&name(&format!("{suffix}.bias")), n_outputs)?;
            Ok(LinearPart { source: MatrixSource::columns(tensor), bias: Some(bias) })
        };
        let fused = self.read(&name("attn.c_attn.weight"), &[hidden, 3 * hidden])?;
        let fused_bias = self.vector(&name("attn.c_attn.bias"), 3 * hidden)?;
        let qkv = split_columns(&fused, 3).into_iter().zip(fused_bias.chunks_exact(hidden));
        let qkv = qkv.map(|(tensor, bias)| LinearPart {
            source: MatrixSource::columns(tensor),
            bias: Some(bias.to_vec()),
        });
        Ok(LayerTensors {
            attention_norm: self.norm(&name("ln_1"))?,
            qkv: qkv.collect(),
            qk_norm: None,
            output: columns("attn.c_proj", hidden, hidden)?,
            mlp_norm: self.norm(&name("ln_2"))?,
            up: vec![columns("mlp.c_fc", hidden, config.intermediate_size)?],
            down: columns("mlp.c_proj", config.intermediate_size, hidden)?,
        })
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
