//! The Llama family: rotary positions, RMS normalization, gated feed-forward.
//!
//! Llama, Mistral, Qwen2 and Qwen3 differ in biases, in the normalization of queries and keys,
//! in sliding windows, and in the defaults of fields that older files leave out.

use serde_json::Value;

use super::fields::Fields;
use super::{
    Activation, Architecture, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN_SIZE, MAX_INTERMEDIATE_SIZE, MAX_LAYERS,
    MAX_POSITIONS, MAX_VOCAB_SIZE, ModelConfig, Norm, Position, RopeConfig,
};
use crate::error::Result;

/// Values of fields that are not written, which differ between the architectures.
struct Defaults {
    /// `None`: as many as query heads.
    kv_heads: Option<usize>,
    /// `None`: `hidden_size / heads`.
    head_dim: Option<usize>,
    max_positions: usize,
    bos_token_id: Option<u32>,
    eos_token_id: Option<u32>,
}

impl Defaults {
    fn of(architecture: Architecture) -> Self {
        match architecture {
            Architecture::Mistral => Self {
                kv_heads: Some(8),
                head_dim: None,
                max_positions: 131_072,
                bos_token_id: Some(1),
                eos_token_id: Some(2),
            },
            Architecture::Qwen2 | Architecture::Qwen3 => Self {
                kv_heads: Some(32),
                head_dim: (architecture == Architecture::Qwen3).then_some(128),
                max_positions: 32_768,
                bos_token_id: None,
                eos_token_id: None,
            },
            Architecture::Llama | Architecture::Gpt2 => Self {
                kv_heads: None,
                head_dim: None,
                max_positions: 2048,
                bos_token_id: Some(1),
                eos_token_id: Some(2),
            },
        }
    }
}

/// Reads the configuration of a model of the Llama family.
pub(super) fn read(architecture: Architecture, fields: Fields<'_>) -> Result<ModelConfig> {
    let defaults = Defaults::of(architecture);
    let activation = fields.text("hidden_act")?.unwrap_or("silu");
    if !matches!(activation, "silu" | "swish") {
        return Err(fields.invalid("hidden_act", &Value::from(activation), "silu"));
    }
    let hidden_size = fields.count("hidden_size", MAX_HIDDEN_SIZE)?;
    let n_layers = fields.count("num_hidden_layers", MAX_LAYERS)?;
    let n_query_heads = fields.count("num_attention_heads", MAX_HEADS)?;
    // `null` means one key/value head a query head in every architecture; only a field that is
    // not written at all takes the default of the architecture.
    let n_kv_heads = match fields.optional_count("num_key_value_heads", MAX_HEADS)? {
        Some(n_kv_heads) => n_kv_heads,
        None if fields.contains("num_key_value_heads") => n_query_heads,
        None => defaults.kv_heads.unwrap_or(n_query_heads),
    };
    let head_dim = match fields.optional_count("head_dim", MAX_HEAD_DIM)?.or(defaults.head_dim) {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(n_query_heads) => hidden_size / n_query_heads,
        None => {
            let allowed =
                format!("given, because hidden_size {hidden_size} is no multiple of {n_query_heads}");
            return Err(fields.missing("head_dim", allowed));
        }
    };
    let max_positions =
        fields.optional_count("max_position_embeddings", MAX_POSITIONS)?.unwrap_or(defaults.max_positions);
    let has_attention_bias = match architecture {
        Architecture::Llama | Architecture::Qwen3 => fields.flag("attention_bias", false)?,
        _ => false,
    };
    let mut eos_token_ids = fields.token_ids("eos_token_id")?;
    if !fields.contains("eos_token_id") {
        eos_token_ids.extend(defaults.eos_token_id);
    }
    let bos_token_id = match fields.token_id("bos_token_id")? {
        None if !fields.contains("bos_token_id") => defaults.bos_token_id,
        given => given,
    };
    let epsilon = fields.optional_number("rms_norm_eps", 0.0)?.unwrap_or(1e-6) as f32;
    Ok(ModelConfig {
        architecture,
        hidden_size,
        intermediate_size: fields.count("intermediate_size", MAX_INTERMEDIATE_SIZE)?,
        n_layers,
        n_query_heads,
        n_kv_heads,
        head_dim,
        vocab_size: fields.count("vocab_size", MAX_VOCAB_SIZE)?,
        max_positions,
        norm: Norm::Rms { epsilon },
        activation: Activation::SiluGated,
        position: Position::Rope(RopeConfig::read(fields, max_positions)?),
        has_qkv_bias: has_attention_bias || architecture == Architecture::Qwen2,
        has_output_bias: has_attention_bias,
        has_mlp_bias: architecture == Architecture::Llama && fields.flag("mlp_bias", false)?,
        has_qk_norm: architecture == Architecture::Qwen3,
        ties_embeddings: fields.flag("tie_word_embeddings", false)?,
        sliding_windows: sliding_windows(architecture, fields, n_layers)?,
        eos_token_ids,
        bos_token_id,
    })
}

fn sliding_windows(
    architecture: Architecture,
    fields: Fields<'_>,
    n_layers: usize,
) -> Result<Vec<Option<usize>>> {
    /// The window of Mistral and Qwen where the field is not written.
    const DEFAULT_WINDOW: usize = 4096;
    let window = || -> Result<Option<usize>> {
        match fields.optional_count("sliding_window", MAX_POSITIONS)? {
            None if !fields.contains("sliding_window") => Ok(Some(DEFAULT_WINDOW)),
            given => Ok(given),
        }
    };
    match architecture {
        Architecture::Mistral => Ok(vec![window()?; n_layers]),
        Architecture::Qwen2 | Architecture::Qwen3 => {
            let window = if fields.flag("use_sliding_window", false)? { window()? } else { None };
            if let Some(layer_types) = fields.get("layer_types") {
                return windows_of_layer_types(fields, layer_types, window, n_layers);
            }
            // The first layers see everything: counted from 0, so 0 is a legal value here.
            let n_full_layers = match fields.get("max_window_layers") {
                None => 28,
                Some(value) => value
                    .as_u64()
                    .ok_or_else(|| fields.invalid("max_window_layers", value, "an integer of at least 0"))?,
            };
            Ok((0..n_layers).map(|layer_idx| window.filter(|_| layer_idx as u64 >= n_full_layers)).collect())
        }
        Architecture::Llama | Architecture::Gpt2 => Ok(vec![None; n_layers]),
    }
}

fn windows_of_layer_types(
    fields: Fields<'_>,
    layer_types: &Value,
    window: Option<usize>,
    n_layers: usize,
) -> Result<Vec<Option<usize>>> {
    let invalid = || {
        let allowed = format!("a list of {n_layers} times full_attention or sliding_attention");
        fields.invalid("layer_types", layer_types, allowed)
    };
    let names = layer_types.as_array().filter(|names| names.len() == n_layers).ok_or_else(invalid)?;
    let mut windows = Vec::with_capacity(n_layers);
    for name in names {
        windows.push(match name.as_str() {
            Some("full_attention") => None,
            Some("sliding_attention") => Some(window.ok_or_else(|| {
                fields.missing(
                    "sliding_window",
                    "a number, with use_sliding_window, for sliding_attention layers",
                )
            })?),
            _ => return Err(invalid()),
        });
    }
    Ok(windows)
}
