//! The weights of a model in the device's memory.

use std::sync::Arc;

use crate::checkpoint::{Checkpoint, WeightDtype};
use crate::config::{Activation, ModelConfig};
use crate::error::{ModelError, Result};
use crate::forward::tensors::{LinearPart, NormTensors, TensorReader};
use crate::kernels::MatrixSource;

use super::device::{Buffer, Device, TensorMap};
use super::kernels::{Kernels, PackingArguments, weight_type};
use super::products::weight_map;

/// What the number of inputs of a matrix is rounded up to: two steps of the matrix instructions.
const INPUT_UNIT: usize = 32;

/// Outputs that gates and ups take in turns, so that both halves of a product meet in one thread.
const GATE_SPAN: usize = 8;

/// Where weights come from.
#[derive(Debug, Clone, Copy)]
pub(super) enum WeightSource<'a> {
    Checkpoint(&'a Checkpoint),
    /// Numbers that look random, made on the device; for measurements.
    Random {
        seed: u64,
    },
}

/// A matrix in tiles.
#[derive(Debug)]
pub(super) struct Matrix {
    buffer: Buffer,
    pub(super) n_outputs: usize,
    pub(super) n_padded_inputs: usize,
    /// For 16-bit weights.
    pub(super) map: Option<TensorMap>,
}

/// A matrix with its bias.
#[derive(Debug)]
pub(super) struct Linear {
    pub(super) matrix: Matrix,
    bias: Option<Buffer>,
}

/// Scale and shift of a normalization.
#[derive(Debug)]
pub(super) struct NormWeights {
    scale: Buffer,
    shift: Option<Buffer>,
}

/// One layer.
#[derive(Debug)]
pub(super) struct LayerWeights {
    pub(super) attention_norm: NormWeights,
    pub(super) qkv: Linear,
    /// Of queries and keys.
    pub(super) qk_norm: Option<(Buffer, Buffer)>,
    pub(super) output: Linear,
    pub(super) mlp_norm: NormWeights,
    pub(super) up: Linear,
    pub(super) down: Linear,
}

/// All weights.
#[derive(Debug)]
pub(super) struct ModelWeights {
    /// Also the output matrix where `lm_head` is `None`.
    pub(super) embedding: Matrix,
    pub(super) position_embedding: Option<Matrix>,
    pub(super) layers: Vec<LayerWeights>,
    pub(super) final_norm: NormWeights,
    pub(super) lm_head: Option<Matrix>,
}

/// The number of inputs with its padding.
pub(super) fn padded_inputs(n_inputs: usize) -> usize {
    n_inputs.next_multiple_of(INPUT_UNIT)
}

impl WeightSource<'_> {
    /// The type in which all matrices are kept: that of the checkpoint if all of them have the same, else f32, which holds every
    /// value of the others.
    pub(super) fn dtype(&self) -> WeightDtype {
        match self {
            Self::Random { .. } => WeightDtype::BF16,
            Self::Checkpoint(checkpoint) => {
                let infos = checkpoint.names().filter_map(|name| checkpoint.tensor_info(name));
                let mut dtypes = infos.filter(|info| info.shape.len() == 2).map(|info| info.dtype);
                let first = dtypes.next().unwrap_or(WeightDtype::F32);
                if dtypes.all(|dtype| dtype == first) { first } else { WeightDtype::F32 }
            }
        }
    }
}

/// Moves tensors to the device.
struct Loader<'a> {
    device: &'a Arc<Device>,
    kernels: &'a Kernels,
    dtype: WeightDtype,
}

/// Where the outputs of a part of a matrix go.
#[derive(Debug, Clone, Copy)]
struct Arrangement {
    span: usize,
    stride: usize,
    offset: usize,
}

impl ModelWeights {
    /// Reads the tensors of `source` into the device's memory.
    ///
    /// # Errors
    /// If a tensor is missing, has another shape than `config` asks for, cannot be read, or the device has no room for it.
    pub(super) fn load(
        device: &Arc<Device>,
        kernels: &Kernels,
        config: &ModelConfig,
        source: WeightSource<'_>,
    ) -> Result<Self> {
        let loader = Loader { device, kernels, dtype: source.dtype() };
        let weights = match source {
            WeightSource::Checkpoint(checkpoint) => loader.read(checkpoint, config),
            WeightSource::Random { seed } => loader.make(config, seed),
        }?;
        device.synchronize()?;
        Ok(weights)
    }

    /// The matrix that turns hidden states into logits.
    pub(super) fn output_matrix(&self) -> &Matrix {
        self.lm_head.as_ref().unwrap_or(&self.embedding)
    }

    /// Bytes of all matrices on the device.
    pub(super) fn size_bytes(&self) -> usize {
        let of_layer = |layer: &LayerWeights| {
            let linears = [&layer.qkv, &layer.output, &layer.up, &layer.down];
            linears.iter().map(|linear| linear.matrix.buffer.n_bytes()).sum::<usize>()
        };
        let matrices = [Some(&self.embedding), self.position_embedding.as_ref(), self.lm_head.as_ref()];
        matrices.into_iter().flatten().map(|matrix| matrix.buffer.n_bytes()).sum::<usize>()
            + self.layers.iter().map(of_layer).sum::<usize>()
    }
}

impl Matrix {
    pub(super) fn address(&self) -> u64 {
        self.buffer.address()
    }
}

impl Linear {
    /// 0 without.
    pub(super) fn bias_address(&self) -> u64 {
        self.bias.as_ref().map_or(0, Buffer::address)
    }
}

impl NormWeights {
    pub(super) fn scale_address(&self) -> u64 {
        self.scale.address()
    }

    /// 0 without.
    pub(super) fn shift_address(&self) -> u64 {
        self.shift.as_ref().map_or(0, Buffer::address)
    }
}

impl Loader<'_> {
    fn read(&self, checkpoint: &Checkpoint, config: &ModelConfig) -> Result<ModelWeights> {
        let reader = TensorReader::new(checkpoint, config);
        let alone = |source: MatrixSource| {
            Ok::<_, ModelError>(self.linear(&[LinearPart { source, bias: None }], false)?.matrix)
        };
        let mut layers = Vec::with_capacity(config.n_layers);
        for layer_idx in 0..config.n_layers {
            let tensors = reader.layer(layer_idx)?;
            let qk_norm = match &tensors.qk_norm {
                Some((queries, keys)) => Some((self.vector(queries)?, self.vector(keys)?)),
                None => None,
            };
            layers.push(LayerWeights {
                attention_norm: self.norm(&tensors.attention_norm)?,
                qkv: self.linear(&tensors.qkv, false)?,
                qk_norm,
                output: self.linear(&[tensors.output], false)?,
                mlp_norm: self.norm(&tensors.mlp_norm)?,
                up: self.linear(&tensors.up, config.activation == Activation::SiluGated)?,
                down: self.linear(&[tensors.down], false)?,
            });
        }
        Ok(ModelWeights {
            embedding: alone(reader.embedding()?)?,
            position_embedding: reader.position_embedding()?.map(alone).transpose()?,
            layers,
            final_norm: self.norm(&reader.final_norm()?)?,
            lm_head: reader.lm_head()?.map(alone).transpose()?,
        })
    }

    fn make(&self, config: &ModelConfig, seed: u64) -> Result<ModelWeights> {
        let mut next_seed = seed;
        let mut fill = |n_outputs: usize, n_inputs: usize| {
            let matrix = self.matrix(n_outputs, n_inputs)?;
            // A variance of one over the number of inputs keeps activations in their range.
            let range = (3.0 / n_inputs as f32).sqrt();
            next_seed += 1;
            let sizes = (n_outputs as i32, n_inputs as i32, matrix.n_padded_inputs as i32);
            // SAFETY: the matrix was made for these sizes; the loader waits for the stream before it gives the weights on.
            unsafe { self.kernels.queue_fill(matrix.address(), sizes, range, next_seed)? };
            Ok::<_, ModelError>(matrix)
        };
        let ones = || NormTensors { scale: vec![1.0; config.hidden_size], shift: None };
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let query_width = config.n_query_heads * config.head_dim;
        let kv_width = config.n_kv_heads * config.head_dim;
        let mut layers = Vec::with_capacity(config.n_layers);
        for _ in 0..config.n_layers {
            layers.push(LayerWeights {
                attention_norm: self.norm(&ones())?,
                qkv: Linear { matrix: fill(query_width + 2 * kv_width, hidden)?, bias: None },
                qk_norm: None,
                output: Linear { matrix: fill(hidden, query_width)?, bias: None },
                mlp_norm: self.norm(&ones())?,
                up: Linear { matrix: fill(gated_outputs(intermediate), hidden)?, bias: None },
                down: Linear { matrix: fill(hidden, intermediate)?, bias: None },
            });
        }
        let embedding = fill(config.vocab_size, hidden)?;
        let lm_head = if config.ties_embeddings { None } else { Some(fill(config.vocab_size, hidden)?) };
        Ok(ModelWeights {
            embedding,
            position_embedding: None,
            layers,
            final_norm: self.norm(&ones())?,
            lm_head,
        })
    }

    fn vector(&self, values: &[f32]) -> Result<Buffer> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Buffer::holding(self.device, &bytes)
    }

    fn norm(&self, tensors: &NormTensors) -> Result<NormWeights> {
        let shift = tensors.shift.as_deref().map(|shift| self.vector(shift)).transpose()?;
        Ok(NormWeights { scale: self.vector(&tensors.scale)?, shift })
    }

    /// An empty matrix.
    fn matrix(&self, n_outputs: usize, n_inputs: usize) -> Result<Matrix> {
        let n_padded_inputs = padded_inputs(n_inputs);
        let n_tiles = n_outputs.div_ceil(16);
        let buffer = Buffer::zeroed(self.device, n_tiles * 16 * n_padded_inputs * self.dtype.size())?;
        let map = match self.dtype {
            WeightDtype::F32 => None,
            WeightDtype::F16 | WeightDtype::BF16 => {
                Some(weight_map(buffer.address(), n_tiles, n_padded_inputs)?)
            }
        };
        Ok(Matrix { buffer, n_outputs, n_padded_inputs, map })
    }

    /// One linear of several parts: one behind the other, or gates and ups in turns.
    fn linear(&self, parts: &[LinearPart], is_gated: bool) -> Result<Linear> {
        let shapes = parts.iter().map(|part| part.source.shape()).collect::<Result<Vec<_>>>()?;
        let n_inputs = shapes.first().map_or(0, |shape| shape.1);
        let n_outputs = if is_gated {
            gated_outputs(shapes.first().map_or(0, |shape| shape.0))
        } else {
            shapes.iter().map(|shape| shape.0).sum()
        };
        let matrix = self.matrix(n_outputs, n_inputs)?;
        let has_bias = parts.iter().any(|part| part.bias.is_some());
        let mut bias = vec![0.0; if has_bias { n_outputs } else { 0 }];
        let mut offset = 0;
        for (part, shape) in parts.iter().zip(&shapes) {
            let arrangement = if is_gated {
                Arrangement { span: GATE_SPAN, stride: 2 * GATE_SPAN, offset }
            } else {
                Arrangement { span: shape.0, stride: shape.0, offset }
            };
            offset += if is_gated { GATE_SPAN } else { shape.0 };
            self.pack(&part.source, *shape, &matrix, arrangement)?;
            for (idx, value) in part.bias.iter().flatten().enumerate() {
                bias[idx / arrangement.span * arrangement.stride
                    + idx % arrangement.span
                    + arrangement.offset] = *value;
            }
        }
        Ok(Linear { matrix, bias: if has_bias { Some(self.vector(&bias)?) } else { None } })
    }

    fn pack(
        &self,
        source: &MatrixSource,
        shape: (usize, usize),
        matrix: &Matrix,
        arrangement: Arrangement,
    ) -> Result<()> {
        let staged = Buffer::holding(self.device, &source.tensor.bytes)?;
        let packing = PackingArguments {
            source: staged.address(),
            target: matrix.address(),
            source_type: weight_type(source.tensor.dtype),
            is_transposed: i32::from(source.is_transposed),
            n_outputs: shape.0 as i32,
            n_inputs: shape.1 as i32,
            n_padded: matrix.n_padded_inputs as i32,
            span: arrangement.span as i32,
            stride: arrangement.stride as i32,
            offset: arrangement.offset as i32,
        };
        // SAFETY: the source is as long as its shape says and lives until the stream was waited for; the matrix has room for all
        // outputs of all parts.
        unsafe { self.kernels.queue_pack(packing)? };
        self.device.synchronize()
    }
}

/// Outputs of gates and ups in turns: whole turns.
fn gated_outputs(n_features: usize) -> usize {
    n_features.div_ceil(GATE_SPAN) * 2 * GATE_SPAN
}
