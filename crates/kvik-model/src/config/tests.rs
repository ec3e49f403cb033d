use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

#[expect(clippy::needless_pass_by_value, reason = "callers build the value in place")]
fn llama(changes: Value) -> Value {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100,
    });
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    config
}

fn read(config: &Value) -> Result<ModelConfig> {
    ModelConfig::from_json(&config.to_string())
}

fn error_of(changes: Value) -> String {
    read(&llama(changes)).unwrap_err().to_string()
}

fn rope_of(changes: Value) -> RopeConfig {
    match read(&llama(changes)).unwrap().position {
        Position::Rope(rope) => rope,
        Position::Learned => panic!("a Llama model rotates"),
    }
}

fn assert_within_one_ulp(found: &[f32], expected_bits: &[u32]) {
    assert_eq!(found.len(), expected_bits.len());
    for (found, expected) in found.iter().zip(expected_bits) {
        assert!(found.to_bits().abs_diff(*expected) <= 1, "{found} is not {}", f32::from_bits(*expected));
    }
}

#[test]
fn the_bundled_model_is_read() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/kvik-tiny/config.json");
    let config = ModelConfig::from_json(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(config.architecture, Architecture::Llama);
    assert_eq!((config.n_query_heads, config.n_kv_heads, config.head_dim), (8, 4, 32));
    assert_eq!(config.kv_elements_per_token(), 8 * 2 * 4 * 32);
    assert!(config.ties_embeddings);
    assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![0], Some(1)));
}

#[test]
fn llama_fields_have_the_defaults_of_hugging_face() {
    let config = read(&llama(json!({}))).unwrap();
    assert_eq!((config.n_kv_heads, config.head_dim, config.max_positions), (4, 16, 2048));
    assert_eq!(config.norm, Norm::Rms { epsilon: 1e-6 });
    assert_eq!(config.position, Position::Rope(RopeConfig { theta: 10_000.0, scaling: RopeScaling::None }));
    assert!(
        !config.has_qkv_bias && !config.has_output_bias && !config.has_mlp_bias && !config.ties_embeddings
    );
    assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![2], Some(1)));
    assert_eq!(config.sliding_windows, vec![None; 3]);
}

#[test]
fn llama_attention_bias_covers_the_output_and_qwen2_bias_does_not() {
    let config = read(&llama(json!({"attention_bias": true, "mlp_bias": true}))).unwrap();
    assert!(config.has_qkv_bias && config.has_output_bias && config.has_mlp_bias);
    let config =
        read(&llama(json!({"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}))).unwrap();
    assert!(config.has_qkv_bias && !config.has_output_bias && !config.has_mlp_bias && !config.has_qk_norm);
}

#[test]
fn mistral_slides_in_all_layers_unless_the_window_is_null() {
    let mistral = |window: Value| {
        let changes = json!({"architectures": null, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": window});
        read(&llama(changes)).unwrap().sliding_windows
    };
    assert_eq!(mistral(json!(7)), vec![Some(7); 3]);
    assert_eq!(mistral(Value::Null), vec![None; 3]);
}

#[test]
fn qwen_slides_by_layer_count_or_by_layer_type() {
    let qwen = |changes: Value| {
        let mut config = llama(
            json!({"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2, "sliding_window": 9}),
        );
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        read(&config)
    };
    let config = qwen(json!({})).unwrap();
    assert!(config.has_qk_norm);
    assert_eq!(config.head_dim, 128);
    assert_eq!(config.sliding_windows, vec![None; 3]);
    let config = qwen(json!({"use_sliding_window": true, "max_window_layers": 1})).unwrap();
    assert_eq!(config.sliding_windows, vec![None, Some(9), Some(9)]);
    let layer_types = json!(["sliding_attention", "full_attention", "sliding_attention"]);
    let config = qwen(json!({"use_sliding_window": true, "layer_types": layer_types})).unwrap();
    assert_eq!(config.sliding_windows, vec![Some(9), None, Some(9)]);
    let error = qwen(json!({"layer_types": layer_types})).unwrap_err().to_string();
    assert!(error.contains("`sliding_window` is missing"), "{error}");
    let error = qwen(json!({"layer_types": ["full_attention"]})).unwrap_err().to_string();
    assert!(error.contains("a list of 3 times"), "{error}");
}

#[test]
fn gpt2_is_read_with_its_own_names() {
    let gpt2 = |changes: Value| {
        let mut config =
            json!({"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 60});
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        read(&config)
    };
    let config = gpt2(json!({"n_inner": null, "reorder_and_upcast_attn": true})).unwrap();
    assert_eq!((config.intermediate_size, config.head_dim, config.max_positions), (192, 12, 1024));
    assert_eq!((config.norm, config.position), (Norm::Layer { epsilon: 1e-5 }, Position::Learned));
    assert!(config.ties_embeddings && config.has_mlp_bias);
    // The default ids of GPT-2 lie outside this cut vocabulary.
    assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![], None));
    for (name, value) in [
        ("scale_attn_weights", json!(false)),
        ("scale_attn_by_inverse_layer_idx", json!(true)),
        ("add_cross_attention", json!(true)),
        ("activation_function", json!("relu")),
        ("n_head", json!(5)),
    ] {
        let error = gpt2(json!({ name: value })).unwrap_err().to_string();
        assert!(error.contains(&format!("`{name}` is {value}")), "{error}");
    }
}

#[test]
fn both_spellings_of_rope_give_the_same() {
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 8192.0,
    };
    let old = json!({"rope_theta": 500_000.0, "rope_scaling": {"type": "llama3", "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}});
    let new = json!({"rope_parameters": {"rope_theta": 500_000, "rope_type": "llama3", "factor": 8,
        "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}});
    assert_eq!(rope_of(old), RopeConfig { theta: 500_000.0, scaling: scaling.clone() });
    assert_eq!(rope_of(new), RopeConfig { theta: 500_000.0, scaling });
}

#[test]
fn unknown_rope_types_are_refused_with_the_allowed_ones() {
    for rope_type in ["dynamic", "yarn", "longrope"] {
        let error = error_of(json!({"rope_scaling": {"rope_type": rope_type, "factor": 2.0}}));
        assert!(
            error.contains("`rope_scaling.rope_type`") && error.contains("default, linear or llama3"),
            "{error}"
        );
    }
    assert!(error_of(json!({"partial_rotary_factor": 0.5})).contains("`partial_rotary_factor` is 0.5"));
    assert!(
        error_of(json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}))
            .contains("all layers")
    );
}

#[test]
fn default_frequencies_match_the_reference() {
    let rope = RopeConfig { theta: 10_000.0, scaling: RopeScaling::None };
    let expected = [
        0x3f80_0000,
        0x3f0f_f59a,
        0x3ea1_e89b,
        0x3e36_1887,
        0x3dcc_cccd,
        0x3d66_55c2,
        0x3d01_86e3,
        0x3c91_ad39,
        0x3c23_d70a,
        0x3bb8_449c,
        0x3b4f_3e38,
        0x3ae9_1528,
        0x3a83_126f,
        0x3a13_6a16,
        0x39a5_cb60,
        0x393a_7753,
    ];
    assert_within_one_ulp(&rope.inverse_frequencies(32), &expected);
}

#[test]
fn linear_frequencies_match_the_reference() {
    let rope = RopeConfig { theta: 1e6, scaling: RopeScaling::Linear { factor: 3.7 } };
    let expected = [
        0x3e8a_60dd,
        0x3d44_dc3f,
        0x3c0c_0772,
        0x3ac7_356a,
        0x398d_b310,
        0x3849_95c1,
        0x370f_63c7,
        0x35cb_fd5b,
    ];
    assert_within_one_ulp(&rope.inverse_frequencies(16), &expected);
}

#[test]
fn llama3_frequencies_match_the_reference() {
    let scaling = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 8192.0,
    };
    let expected = [
        0x3f80_0000,
        0x3f29_e1c6,
        0x3ee1_77bc,
        0x3e95_9ee3,
        0x3e46_93b0,
        0x3e03_c6a0,
        0x3dae_e4ad,
        0x3d68_1e67,
        0x3d1a_08c8,
        0x3ccc_6f49,
        0x3c87_a9c3,
        0x3c34_0d6d,
        0x3bee_f74f,
        0x3b9e_9402,
        0x3b52_7720,
        0x3aa9_279b,
        0x39e1_3620,
        0x38cb_98f7,
        0x37a3_418d,
        0x3758_ac81,
        0x370f_c8f8,
        0x36be_d4f4,
        0x367d_45c3,
        0x3628_126b,
        0x35df_10c4,
        0x3594_06cb,
        0x3544_7610,
        0x3502_5f34,
        0x34ad_07a7,
        0x3465_a54d,
        0x3418_64a7,
        0x33ca_41b0,
    ];
    assert_within_one_ulp(&RopeConfig { theta: 500_000.0, scaling }.inverse_frequencies(64), &expected);
}

#[test]
fn eos_may_be_one_id_a_list_or_null() {
    let eos = |value: Value| read(&llama(json!({"eos_token_id": value}))).unwrap().eos_token_ids;
    assert_eq!(eos(json!(5)), vec![5]);
    assert_eq!(eos(json!([5, 6])), vec![5, 6]);
    assert_eq!(eos(Value::Null), Vec::<u32>::new());
}

#[test]
fn wrong_values_name_field_value_and_allowed() {
    for (name, value) in [
        ("hidden_size", json!("64")),
        ("hidden_size", json!(0)),
        ("hidden_size", json!(-1)),
        ("hidden_size", json!(1 << 18)),
        ("num_hidden_layers", json!(1025)),
        ("vocab_size", json!(1.5)),
        ("head_dim", json!(15)),
        ("head_dim", json!(2048)),
        ("num_key_value_heads", json!(3)),
        ("rms_norm_eps", json!(-1e-6)),
        ("rms_norm_eps", json!(1e300)),
        ("rope_theta", json!(-1.0)),
        ("rope_theta", json!([])),
        ("hidden_act", json!("gelu")),
        ("attention_bias", json!(1)),
        ("eos_token_id", json!([1, "2"])),
        ("quantization_config", json!({"bits": 4})),
        ("rope_scaling", json!("linear")),
    ] {
        let error = error_of(json!({ name: value }));
        assert!(error.starts_with(&format!("config.json: `{name}` is {value}; allowed: ")), "{error}");
    }
    assert!(error_of(json!({"hidden_size": null})).contains("`hidden_size` is missing"));
}

#[test]
fn an_unknown_architecture_names_the_supported_ones() {
    let error = error_of(json!({"architectures": ["BertModel"]}));
    assert!(
        error.contains("`BertModel`") && error.contains("LlamaForCausalLM, MistralForCausalLM"),
        "{error}"
    );
    assert_eq!(Architecture::Gpt2.to_string(), "GPT2LMHeadModel");
}

fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0u64..64).prop_map(Value::from),
        "[a-z3]{0,8}".prop_map(Value::from),
        proptest::collection::vec(any::<u32>(), 0..4).prop_map(Value::from),
        any::<f64>().prop_map(|factor| json!({"rope_type": "llama3", "factor": factor})),
    ]
}

proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text in ".{0,200}") {
        let _ = ModelConfig::from_json(&text);
    }

    #[test]
    fn no_field_value_makes_the_reader_panic(
        field_idx in 0usize..13,
        value in any_value(),
        architecture in proptest::sample::select(&Architecture::ALL[..]),
    ) {
        let names = ["hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "n_embd", "n_head",
            "rope_scaling", "rope_parameters", "rope_theta", "layer_types", "sliding_window", "eos_token_id",
            "max_window_layers"];
        let mut config = llama(json!({"architectures": [architecture.class_name()], "n_embd": 64, "n_layer": 2,
            "n_head": 4, "use_sliding_window": true}));
        config[names[field_idx]] = value;
        if let Ok(config) = read(&config) {
            prop_assert_eq!(config.sliding_windows.len(), config.n_layers);
            prop_assert!(config.n_query_heads.is_multiple_of(config.n_kv_heads));
            prop_assert!(config.kv_elements_per_token() > 0);
            if let Position::Rope(rope) = &config.position {
                prop_assert!(rope.inverse_frequencies(config.head_dim).iter().all(|value| value.is_finite()));
            }
        }
    }
}
