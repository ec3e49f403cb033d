//! GPT-2: learned positions, layer normalization, biases everywhere.

use serde_json::Value;

use super::fields::Fields;
use super::{
    Activation, Architecture, MAX_HEADS, MAX_HIDDEN_SIZE, MAX_INTERMEDIATE_SIZE, MAX_LAYERS, MAX_POSITIONS,
    MAX_VOCAB_SIZE, ModelConfig, Norm, Position,
};
use crate::error::Result;

/// The end of text of GPT-2's own vocabulary, used to start and to end a sequence.
const END_OF_TEXT: u32 = 50_256;

/// Reads the configuration of a GPT-2 model.
pub(super) fn read(fields: Fields<'_>) -> Result<ModelConfig> {
    let activation = fields.text("activation_function")?.unwrap_or("gelu_new");
    if !matches!(activation, "gelu_new" | "gelu_pytorch_tanh") {
        let allowed = "gelu_new or gelu_pytorch_tanh";
        return Err(fields.invalid("activation_function", &Value::from(activation), allowed));
    }
    // `reorder_and_upcast_attn` is not among these: it only raises the precision of scores, and
    // the engine computes them in f32 in any case.
    require_flag(fields, "scale_attn_weights", true)?;
    require_flag(fields, "scale_attn_by_inverse_layer_idx", false)?;
    require_flag(fields, "add_cross_attention", false)?;

    let hidden_size = fields.count("n_embd", MAX_HIDDEN_SIZE)?;
    let n_layers = fields.count("n_layer", MAX_LAYERS)?;
    let n_heads = fields.count("n_head", MAX_HEADS)?;
    if !hidden_size.is_multiple_of(n_heads) {
        let allowed = format!("a divisor of n_embd, which is {hidden_size}");
        return Err(fields.invalid("n_head", &Value::from(n_heads), allowed));
    }
    let mut eos_token_ids = fields.token_ids("eos_token_id")?;
    if !fields.contains("eos_token_id") {
        eos_token_ids.push(END_OF_TEXT);
    }
    let bos_token_id = match fields.token_id("bos_token_id")? {
        None if !fields.contains("bos_token_id") => Some(END_OF_TEXT),
        given => given,
    };
    Ok(ModelConfig {
        architecture: Architecture::Gpt2,
        hidden_size,
        intermediate_size: fields
            .optional_count("n_inner", MAX_INTERMEDIATE_SIZE)?
            .unwrap_or(4 * hidden_size),
        n_layers,
        n_query_heads: n_heads,
        n_kv_heads: n_heads,
        head_dim: hidden_size / n_heads,
        vocab_size: fields.count("vocab_size", MAX_VOCAB_SIZE)?,
        max_positions: fields.optional_count("n_positions", MAX_POSITIONS)?.unwrap_or(1024),
        norm: Norm::Layer {
            epsilon: fields.optional_number("layer_norm_epsilon", 0.0)?.unwrap_or(1e-5) as f32,
        },
        activation: Activation::GeluTanh,
        position: Position::Learned,
        has_qkv_bias: true,
        has_output_bias: true,
        has_mlp_bias: true,
        has_qk_norm: false,
        ties_embeddings: fields.flag("tie_word_embeddings", true)?,
        sliding_windows: vec![None; n_layers],
        eos_token_ids,
        bos_token_id,
    })
}

fn require_flag(fields: Fields<'_>, name: &str, required: bool) -> Result<()> {
    if fields.flag(name, required)? == required {
        return Ok(());
    }
    Err(fields.invalid(name, &Value::from(!required), required.to_string()))
}
