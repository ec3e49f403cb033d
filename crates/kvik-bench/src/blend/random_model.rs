//! A model with random weights, large enough that computing is what takes the time.

use std::path::Path;

use anyhow::Context as _;
use kvik_model::Model;
use serde_json::{Map, Value, json};

const HIDDEN: usize = 768;
const LAYERS: usize = 12;
const HEADS: usize = 12;
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 64;
const INTERMEDIATE: usize = 2048;
const VOCABULARY: usize = 4096;

/// Parameters in millions, for the name.
pub(super) const SIZE_NAME: &str = "80m";

/// Writes the folder of a Llama of 80 million parameters, with the bundled tokenizer.
pub(super) fn write(folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).context("make the model's folder")?;
    Model::write_bundled(folder).context("write the tokenizer")?;
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": 0,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).context("write the configuration")?;
    std::fs::write(folder.join("model.safetensors"), weights()).context("write the weights")
}

/// Weights of the size that trained ones have, so that nothing overflows.
fn weights() -> Vec<u8> {
    let mut tensors: Vec<(String, Vec<usize>)> =
        vec![("model.embed_tokens.weight".to_owned(), vec![VOCABULARY, HIDDEN])];
    for layer in 0..LAYERS {
        let parts = [
            ("input_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.k_proj", vec![KV_HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.v_proj", vec![KV_HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, HEADS * HEAD_DIM]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("mlp.gate_proj", vec![INTERMEDIATE, HIDDEN]),
            ("mlp.up_proj", vec![INTERMEDIATE, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, INTERMEDIATE]),
        ];
        tensors.extend(parts.map(|(part, shape)| (format!("model.layers.{layer}.{part}.weight"), shape)));
    }
    tensors.push(("model.norm.weight".to_owned(), vec![HIDDEN]));
    let (mut header, mut data) = (Map::new(), Vec::new());
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for (name, shape) in tensors {
        let start = data.len();
        for _ in 0..shape.iter().product() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let uniform = (state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5;
            let value = if shape.len() == 1 { 1.0 } else { uniform * 0.07 };
            // Truncated to bf16.
            data.extend_from_slice(&((value.to_bits() >> 16) as u16).to_le_bytes());
        }
        header.insert(name, json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, data.len()]}));
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend(data);
    file
}
