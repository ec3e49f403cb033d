//! What a model is, independent of how its `config.json` spells it.
//!
//! [`ModelConfig`] holds every number and choice the forward pass needs. One file an
//! architecture family reads `config.json` into it; nothing after this module looks at JSON.

use std::fmt;

use serde_json::Value;

use crate::error::{ModelError, Result};

mod fields;
mod gpt2;
mod llama;
mod rope;
#[cfg(test)]
mod tests;

pub use rope::{RopeConfig, RopeScaling};

use fields::Fields;

// Far above every model that exists, and low enough that no product of two or three of them
// overflows: a damaged file is refused here, before anything is allocated from its numbers.
const MAX_LAYERS: usize = 1024;
const MAX_HIDDEN_SIZE: usize = 1 << 17;
const MAX_INTERMEDIATE_SIZE: usize = 1 << 20;
const MAX_HEADS: usize = 1 << 12;
const MAX_HEAD_DIM: usize = 1024;
const MAX_VOCAB_SIZE: usize = 1 << 23;
const MAX_POSITIONS: usize = 1 << 28;

/// The architectures the engine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Architecture {
    /// `LlamaForCausalLM`.
    Llama,
    /// `MistralForCausalLM`.
    Mistral,
    /// `Qwen2ForCausalLM`.
    Qwen2,
    /// `Qwen3ForCausalLM`.
    Qwen3,
    /// `GPT2LMHeadModel`.
    Gpt2,
}

/// The normalization before each half of a layer and before the output matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Norm {
    /// Root mean square, scale only.
    Rms {
        /// Added to the mean square.
        epsilon: f32,
    },
    /// Mean and variance, scale and shift.
    Layer {
        /// Added to the variance.
        epsilon: f32,
    },
}

/// The nonlinearity of the feed-forward half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `down(silu(gate(x)) * up(x))`.
    SiluGated,
    /// `down(gelu_tanh(up(x)))`, the tanh approximation.
    GeluTanh,
}

/// How a token's position enters the model.
#[derive(Debug, Clone, PartialEq)]
pub enum Position {
    /// Rotation of queries and keys.
    Rope(RopeConfig),
    /// A learned vector added to the embedding.
    Learned,
}

/// Everything the forward pass needs to know about a model.
///
/// Guaranteed by construction from `config.json`: all counts are non-zero,
/// `n_query_heads` is a multiple of `n_kv_heads`, `sliding_windows` has one element a layer.
#[derive(Debug, Clone, PartialEq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each names one optional tensor, and all combinations exist"
)]
pub struct ModelConfig {
    /// The architecture, for messages and for the names of tensors.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward half.
    pub intermediate_size: usize,
    /// Number of layers.
    pub n_layers: usize,
    /// Number of query heads.
    pub n_query_heads: usize,
    /// Number of key/value heads.
    pub n_kv_heads: usize,
    /// Width of one head; `n_query_heads * head_dim` may differ from `hidden_size`.
    pub head_dim: usize,
    /// Number of rows of the embedding.
    pub vocab_size: usize,
    /// Longest sequence, prompt and output together, in tokens.
    pub max_positions: usize,
    /// The normalization.
    pub norm: Norm,
    /// The nonlinearity.
    pub activation: Activation,
    /// The position encoding.
    pub position: Position,
    /// Whether the query, key and value projections have a bias.
    pub has_qkv_bias: bool,
    /// Whether the attention output projection has a bias.
    pub has_output_bias: bool,
    /// Whether the feed-forward projections have a bias.
    pub has_mlp_bias: bool,
    /// Whether queries and keys are normalized per head before rotation (Qwen3).
    pub has_qk_norm: bool,
    /// Whether the output matrix is the embedding.
    pub ties_embeddings: bool,
    /// Per layer: a token sees itself and the `window - 1` tokens before it; `None`: all before it.
    pub sliding_windows: Vec<Option<usize>>,
    /// Tokens that end a sequence, from `config.json`.
    pub eos_token_ids: Vec<u32>,
    /// Token that starts a sequence, if the model has one.
    pub bos_token_id: Option<u32>,
}

// === impl Architecture ===

impl Architecture {
    /// Every architecture the engine runs.
    pub const ALL: [Self; 5] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3, Self::Gpt2];

    /// Returns the class name that `architectures` of `config.json` uses.
    pub fn class_name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Gpt2 => "GPT2LMHeadModel",
        }
    }

    /// Returns the name that `model_type` of `config.json` uses.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gpt2 => "gpt2",
        }
    }

    fn read(fields: Fields<'_>) -> Result<Self> {
        let class_name = match fields.get("architectures") {
            None => None,
            Some(value) => match value.as_array().map(Vec::as_slice) {
                Some([]) => None,
                Some([Value::String(class_name), ..]) => Some(class_name.as_str()),
                _ => return Err(fields.invalid("architectures", value, "a list of class names")),
            },
        };
        let model_type = fields.text("model_type")?;
        let (found, architecture) = match (class_name, model_type) {
            (Some(name), _) => (name, Self::ALL.into_iter().find(|known| known.class_name() == name)),
            (None, Some(name)) => (name, Self::ALL.into_iter().find(|known| known.model_type() == name)),
            (None, None) => return Err(fields.missing("architectures", Self::supported())),
        };
        architecture.ok_or_else(|| ModelError::UnsupportedArchitecture {
            found: found.chars().take(80).collect(),
            supported: Self::supported(),
        })
    }

    fn supported() -> String {
        Self::ALL.map(Self::class_name).join(", ")
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.class_name())
    }
}

// === impl ModelConfig ===

impl ModelConfig {
    /// Reads the text of a `config.json` as Hugging Face writes it.
    ///
    /// Fields the engine does not know are ignored; fields that would change the result in a
    /// way the engine does not compute are refused.
    pub fn from_json(text: &str) -> Result<Self> {
        let document: Value = serde_json::from_str(text).map_err(|error| {
            ModelError::config("(the whole file)", format!("not JSON: {error}"), "a JSON object")
        })?;
        let Value::Object(map) = &document else {
            return Err(ModelError::config("(the whole file)", "not a JSON object", "a JSON object"));
        };
        let fields = Fields::new(map, "");
        if let Some(value) = fields.get("quantization_config") {
            return Err(fields.invalid("quantization_config", value, "unquantized f32, f16 or bf16 weights"));
        }
        let mut config = match Architecture::read(fields)? {
            Architecture::Gpt2 => gpt2::read(fields)?,
            architecture => llama::read(architecture, fields)?,
        };
        config.check()?;
        // A token outside the embedding can be neither fed nor produced. Files with a cut
        // vocabulary keep the ids of the full one, so this is not an error.
        let vocab_size = config.vocab_size;
        config.eos_token_ids.retain(|id| (*id as usize) < vocab_size);
        config.bos_token_id = config.bos_token_id.filter(|id| (*id as usize) < vocab_size);
        Ok(config)
    }

    /// Returns the number of key and value elements that one token takes over all layers.
    pub fn kv_elements_per_token(&self) -> usize {
        self.n_layers * 2 * self.n_kv_heads * self.head_dim
    }

    /// Checks what depends on more than one field.
    fn check(&self) -> Result<()> {
        if !self.head_dim.is_multiple_of(2) || self.head_dim > MAX_HEAD_DIM {
            let allowed = format!("an even number from 2 to {MAX_HEAD_DIM}");
            return Err(ModelError::config("head_dim", self.head_dim, allowed));
        }
        if !self.n_query_heads.is_multiple_of(self.n_kv_heads) {
            let allowed = format!("a divisor of the {} query heads", self.n_query_heads);
            return Err(ModelError::config("num_key_value_heads", self.n_kv_heads, allowed));
        }
        let products: [&[usize]; 4] = [
            &[self.vocab_size, self.hidden_size, size_of::<f32>()],
            &[self.intermediate_size, self.hidden_size, size_of::<f32>()],
            &[self.n_query_heads, self.head_dim, self.hidden_size, size_of::<f32>()],
            &[self.n_layers, 2, self.n_kv_heads, self.head_dim, size_of::<f32>()],
        ];
        for factors in products {
            if factors.iter().try_fold(1usize, |product, factor| product.checked_mul(*factor)).is_none() {
                let allowed = "sizes whose product this machine can address";
                return Err(ModelError::config("hidden_size", self.hidden_size, allowed));
            }
        }
        Ok(())
    }
}
