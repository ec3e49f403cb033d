//! No bytes of a model folder make the engine panic: they load, or they give an error.

#![expect(clippy::unwrap_used, reason = "a helper that cannot go on fails its test")]

pub mod support;

use std::path::Path;

use kvik_model::{Checkpoint, CpuBackend, Model, ModelConfig, ModelError, Result, WeightDtype, parse_header};
use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

use support::schedule::whole;
use support::{backend_options, bundled_folder, fixture_folder};

const FIXTURES: [&str; 4] = ["llama_gqa", "gpt2", "qwen3", "mistral_sliding_window"];

fn config_text(fixture: &str) -> String {
    std::fs::read_to_string(fixture_folder(fixture).join("config.json")).unwrap()
}

fn weight_bytes(fixture: &str) -> Vec<u8> {
    std::fs::read(fixture_folder(fixture).join("model.safetensors")).unwrap()
}

/// Loads a model from the bytes of its files and, if that works, runs it.
fn load(config: &str, weights: Vec<u8>) -> Result<CpuBackend> {
    let config = ModelConfig::from_json(config)?;
    let checkpoint = Checkpoint::from_bytes("model.safetensors", weights)?;
    for name in checkpoint.names() {
        let tensor = checkpoint.read(name)?;
        assert_eq!(tensor.bytes.len(), tensor.dtype.size() * tensor.shape.iter().product::<usize>());
    }
    let mut backend = CpuBackend::load(config.clone(), &checkpoint, &backend_options(2))?;
    let n_tokens = 18.min(config.max_positions);
    whole(&mut backend, &vec![config.vocab_size as u32 - 1; n_tokens]);
    Ok(backend)
}

fn error_of(config: &str, weights: Vec<u8>) -> ModelError {
    match load(config, weights) {
        Ok(_) => panic!("the model loaded"),
        Err(error) => error,
    }
}

/// A safetensors file with the header changed by `change`, its data untouched.
fn with_header(fixture: &str, change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let bytes = weight_bytes(fixture);
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let mut header: Value = serde_json::from_slice(header).unwrap();
    change(&mut header);
    let header = header.to_string();
    let mut changed = (header.len() as u64).to_le_bytes().to_vec();
    changed.extend_from_slice(header.as_bytes());
    changed.extend_from_slice(data);
    changed
}

/// Values that break what expects a small positive number.
fn odd_values() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0..200_u64).prop_map(Value::from),
        prop::sample::select(vec![
            json!(0),
            json!(-1),
            json!(1),
            json!(1_u64 << 20),
            json!(1_u64 << 32),
            json!(u64::MAX),
            json!(1e300),
            json!(0.5),
            json!([]),
            json!([1, 2, 3]),
            json!({}),
            json!("64"),
            json!("silu"),
            json!({"rope_type": "llama3"}),
            json!({"rope_type": "linear", "factor": 0}),
        ]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn changed_bytes_of_the_weights_load_or_give_an_error(
        fixture in prop::sample::select(FIXTURES.to_vec()),
        // The header is the small front of the file; most changes should hit it.
        flips in prop::collection::vec((prop_oneof![3 => 0..4000_usize, 1 => 0..200_000_usize], 1..=255_u8), 0..6),
        kept in prop_oneof![3 => Just(None), 1 => (0..200_000_usize).prop_map(Some)],
    ) {
        let mut bytes = weight_bytes(fixture);
        for (place, flip) in flips {
            let place = place % bytes.len();
            bytes[place] ^= flip;
        }
        if let Some(kept) = kept {
            bytes.truncate(kept);
        }
        let _ = load(&config_text(fixture), bytes);
    }

    #[test]
    fn changed_bytes_of_the_config_load_or_give_an_error(
        fixture in prop::sample::select(FIXTURES.to_vec()),
        flips in prop::collection::vec((0..2000_usize, prop_oneof![b'0'..=b'9', 32..127_u8]), 1..5),
        kept in prop_oneof![5 => Just(None), 1 => (0..2000_usize).prop_map(Some)],
    ) {
        let mut text = config_text(fixture).into_bytes();
        for (place, byte) in flips {
            let place = place % text.len();
            text[place] = byte;
        }
        if let Some(kept) = kept {
            text.truncate(kept);
        }
        let text = String::from_utf8(text).unwrap();
        let _ = load(&text, weight_bytes(fixture));
    }

    #[test]
    fn changed_fields_of_the_config_load_or_give_an_error(
        fixture in prop::sample::select(FIXTURES.to_vec()),
        changes in prop::collection::vec((0..40_usize, odd_values()), 1..4),
    ) {
        let mut config: Value = serde_json::from_str(&config_text(fixture)).unwrap();
        let fields = config.as_object_mut().unwrap();
        let names: Vec<String> = fields.keys().cloned().collect();
        for (field, value) in changes {
            fields.insert(names[field % names.len()].clone(), value);
        }
        let _ = load(&config.to_string(), weight_bytes(fixture));
    }
}

#[test]
fn the_fixtures_load_as_they_are() {
    for fixture in FIXTURES {
        load(&config_text(fixture), weight_bytes(fixture)).unwrap();
    }
}

#[test]
fn a_config_of_a_larger_model_than_the_weights_is_refused_before_memory_is_taken() {
    // Each alone is allowed; together their KV would take petabytes.
    let mut config: Value = serde_json::from_str(&config_text("llama_gqa")).unwrap();
    for (field, value) in [
        ("num_hidden_layers", 1024),
        ("num_attention_heads", 4096),
        ("num_key_value_heads", 4096),
        ("head_dim", 1024),
        ("hidden_size", 4096),
    ] {
        config[field] = json!(value);
    }
    let config = ModelConfig::from_json(&config.to_string()).unwrap();
    let checkpoint = Checkpoint::from_bytes("small", weight_bytes("llama_gqa")).unwrap();
    let error = CpuBackend::load(config, &checkpoint, &backend_options(1 << 20)).unwrap_err();
    assert!(matches!(error, ModelError::InvalidWeights { .. }), "{error}");
}

#[test]
fn a_tensor_of_another_shape_is_refused_by_name() {
    for (name, shape) in [
        ("model.embed_tokens.weight", json!([32, 64])),
        ("model.layers.1.mlp.down_proj.weight", json!([48, 32])),
        ("model.norm.weight", json!([1, 32])),
    ] {
        let bytes = with_header("llama_gqa", |header| {
            let n_elements = |shape: &Value| -> u64 {
                shape.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).product()
            };
            assert_eq!(n_elements(&header[name]["shape"]), n_elements(&shape), "{name}");
            assert_ne!(header[name]["shape"], shape);
            header[name]["shape"] = shape;
        });
        let error = error_of(&config_text("llama_gqa"), bytes).to_string();
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn a_missing_tensor_is_named() {
    for name in ["model.norm.weight", "model.layers.0.self_attn.k_proj.weight"] {
        let bytes = with_header("llama_gqa", |header| {
            let place = header.as_object_mut().unwrap().remove(name).unwrap();
            header["unrelated"] = place;
        });
        let error = error_of(&config_text("llama_gqa"), bytes).to_string();
        assert!(error.contains(name) && error.contains("missing"), "{error}");
    }
}

#[test]
fn a_tensor_of_an_unknown_dtype_is_named() {
    let bytes = with_header("llama_gqa", |header| {
        header["model.norm.weight"]["dtype"] = json!("I32");
    });
    let error = error_of(&config_text("llama_gqa"), bytes).to_string();
    assert!(error.contains("model.norm.weight") && error.contains("I32"), "{error}");
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let bytes = weight_bytes("llama_gqa");
    for n_bytes in (0..bytes.len()).step_by(61).chain([1, 7, 8, 9, bytes.len() - 1]) {
        let error = Checkpoint::from_bytes("cut", bytes[..n_bytes].to_vec()).unwrap_err();
        assert!(matches!(error, ModelError::InvalidWeights { .. }), "{error}");
    }
}

#[test]
fn a_header_length_that_lies_is_refused() {
    let bytes = weight_bytes("llama_gqa");
    let true_len = u64::from_le_bytes(*bytes.first_chunk::<8>().unwrap());
    for lie in [0, 1, true_len - 1, true_len + 1, bytes.len() as u64, u64::MAX / 2, u64::MAX] {
        let mut bytes = bytes.clone();
        bytes[..8].copy_from_slice(&lie.to_le_bytes());
        let n_bytes = bytes.len() as u64;
        assert!(parse_header(&bytes, n_bytes).is_err(), "{lie}");
        assert!(Checkpoint::from_bytes("lie", bytes).is_err(), "{lie}");
    }
}

fn copy_of(folder: &Path) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        // Written anew: copying would keep the permissions of a read-only file.
        std::fs::write(copy.path().join(path.file_name().unwrap()), std::fs::read(&path).unwrap()).unwrap();
    }
    copy
}

#[test]
fn an_index_that_names_a_missing_shard_or_leaves_the_folder_is_refused() {
    let index_file = "model.safetensors.index.json";
    let source = fixture_folder("llama_sharded");
    Checkpoint::open(&source).unwrap();
    for shard in [
        "model-00009-of-00003.safetensors",
        "../model-00001-of-00003.safetensors",
        "/etc/passwd",
        "a/../model-00001-of-00003.safetensors",
        "",
        "..",
    ] {
        let folder = copy_of(&source);
        let path = folder.path().join(index_file);
        let mut index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        index["weight_map"]["model.norm.weight"] = json!(shard);
        std::fs::write(&path, index.to_string()).unwrap();
        let error = Checkpoint::open(folder.path()).unwrap_err();
        match (&error, shard) {
            (ModelError::MissingFile { what, .. }, "model-00009-of-00003.safetensors") => {
                assert_eq!(what, shard);
            }
            (ModelError::InvalidWeights { what, .. }, _) => assert_eq!(what, index_file),
            _ => panic!("{shard:?}: {error}"),
        }
    }
}

#[test]
fn a_folder_that_lacks_a_file_names_it() {
    for (file, named) in [
        ("config.json", "config.json"),
        ("tokenizer.json", "tokenizer.json"),
        ("model.safetensors", "model.safetensors"),
    ] {
        let folder = copy_of(&bundled_folder());
        Model::open(folder.path()).unwrap();
        std::fs::remove_file(folder.path().join(file)).unwrap();
        let error = Model::open(folder.path()).unwrap_err();
        assert!(error.to_string().contains(named), "{error}");
    }
    assert_eq!(WeightDtype::F32.size(), 4);
}
