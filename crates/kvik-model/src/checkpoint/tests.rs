use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

fn file_bytes(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}

fn two_tensors() -> (Value, Vec<u8>) {
    let header = json!({
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]},
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [8, 12]},
        "mask": {"dtype": "U8", "shape": [3], "data_offsets": [12, 15]},
    });
    let mut data = Vec::new();
    data.extend(1.5f32.to_le_bytes());
    data.extend((-2.0f32).to_le_bytes());
    data.extend(half::bf16::from_f32(0.5).to_le_bytes());
    data.extend(half::bf16::from_f32(3.0).to_le_bytes());
    data.extend([1, 1, 1]);
    (header, data)
}

fn reason_of(bytes: Vec<u8>) -> String {
    match Checkpoint::from_bytes("test", bytes).unwrap_err() {
        ModelError::InvalidWeights { reason, .. } => reason,
        other => panic!("{other}"),
    }
}

fn sharded_folder(index: &Value) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let (header, data) = two_tensors();
    fs::write(folder.path().join("one.safetensors"), file_bytes(&header.to_string(), &data)).unwrap();
    fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    folder
}

fn bundled_model() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/kvik-tiny"))
}

#[test]
fn tensors_are_read_from_memory_and_from_a_file_alike() {
    let (header, data) = two_tensors();
    let bytes = file_bytes(&header.to_string(), &data);
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("model.safetensors"), &bytes).unwrap();
    for checkpoint in
        [Checkpoint::from_bytes("test", bytes).unwrap(), Checkpoint::open(folder.path()).unwrap()]
    {
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(checkpoint.read("a").unwrap().to_f32(), [1.5, -2.0]);
        assert_eq!(checkpoint.read_shaped("b", &[2]).unwrap().to_f32(), [0.5, 3.0]);
        assert_eq!((checkpoint.total_bytes(), checkpoint.n_parameters()), (12, 4));
    }
}

#[test]
fn half_precision_is_converted_exactly() {
    let values = [0.0f32, -1.0, 65504.0, 5.960_464_5e-8];
    let bytes: Vec<u8> = values.iter().flat_map(|value| half::f16::from_f32(*value).to_le_bytes()).collect();
    let tensor = Tensor { dtype: WeightDtype::F16, shape: vec![4], bytes: bytes.into() };
    assert_eq!(tensor.to_f32(), values);
}

#[test]
fn the_bundled_model_is_opened() {
    let checkpoint = Checkpoint::open(&bundled_model()).unwrap();
    let embedding = checkpoint.read_shaped("model.embed_tokens.weight", &[4096, 256]).unwrap();
    assert_eq!(embedding.dtype, WeightDtype::BF16);
    assert!(embedding.to_f32().iter().all(|value| value.is_finite()));
    assert!(checkpoint.n_parameters() > 7_000_000);
}

#[test]
fn a_wrong_shape_names_tensor_and_both_shapes() {
    let (header, data) = two_tensors();
    let checkpoint = Checkpoint::from_bytes("test", file_bytes(&header.to_string(), &data)).unwrap();
    let error = checkpoint.read_shaped("a", &[2, 1]).unwrap_err().to_string();
    assert_eq!(error, "weights: a: the shape is [1, 2]; expected: [2, 1]");
    assert_eq!(checkpoint.read("c").unwrap_err().to_string(), "weights: c: the tensor is missing");
}

#[test]
fn another_dtype_is_an_error_only_when_read() {
    let (header, data) = two_tensors();
    let checkpoint = Checkpoint::from_bytes("test", file_bytes(&header.to_string(), &data)).unwrap();
    assert!(checkpoint.tensor_info("mask").is_none());
    let error = checkpoint.read("mask").unwrap_err().to_string();
    assert_eq!(error, "weights: mask: the dtype is U8; allowed: F32, F16, BF16");
}

#[test]
fn a_cut_or_lengthened_file_is_refused() {
    let (header, data) = two_tensors();
    let bytes = file_bytes(&header.to_string(), &data);
    for n_bytes in 0..bytes.len() {
        reason_of(bytes[..n_bytes].to_vec());
    }
    let mut longer = bytes;
    longer.push(0);
    assert!(reason_of(longer).contains("describes 15 bytes of data, the file has 16"));
}

#[test]
fn a_header_length_beyond_the_file_is_refused_before_it_is_read() {
    for claimed in [u64::MAX, 100_000_001, 1000] {
        let mut bytes = claimed.to_le_bytes().to_vec();
        bytes.extend_from_slice(b"{}");
        assert!(reason_of(bytes).contains(&format!("claims {claimed} bytes")));
    }
}

#[test]
fn wrong_headers_are_refused() {
    let overlapping = json!({
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    });
    let wrong_size = json!({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}});
    let backwards = json!({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}});
    let too_large = json!({"a": {"dtype": "F32", "shape": [u64::MAX, 2], "data_offsets": [0, 8]}});
    for header in [overlapping, wrong_size, backwards, too_large, json!([]), json!("text")] {
        let reason = reason_of(file_bytes(&header.to_string(), &[0; 12]));
        assert!(reason.contains("does not describe tensors"), "{reason}");
    }
    assert!(reason_of(file_bytes("{\"a\":", &[])).contains("does not describe tensors"));
}

#[test]
fn an_index_places_tensors_in_shards() {
    let folder = sharded_folder(&json!({"weight_map": {"b": "one.safetensors"}}));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["b"]);
    assert_eq!(checkpoint.read("b").unwrap().to_f32(), [0.5, 3.0]);
}

#[test]
fn an_index_that_lies_is_refused() {
    let open = |index: Value| Checkpoint::open(sharded_folder(&index).path()).unwrap_err().to_string();
    assert!(open(json!({"weight_map": {"c": "one.safetensors"}})).contains("which does not hold it"));
    assert!(open(json!({"weight_map": {"a": "two.safetensors"}})).contains("has no two.safetensors"));
    assert!(open(json!({"weight_map": {}})).contains("names no tensor"));
    assert!(open(json!({"weights": 1})).contains("cannot be read"));
    for name in ["../one.safetensors", "/one.safetensors", "x\\one.safetensors", "..", ".", ""] {
        assert!(open(json!({"weight_map": {"a": name}})).contains("a plain file name"), "{name}");
    }
}

#[test]
fn a_folder_without_weights_says_what_it_lacks() {
    let folder = tempfile::tempdir().unwrap();
    let error = Checkpoint::open(folder.path()).unwrap_err().to_string();
    assert!(error.ends_with("has no model.safetensors or model.safetensors.index.json"), "{error}");
}

proptest! {
    #[test]
    fn no_bytes_make_the_header_parser_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..64),
        file_len in any::<u64>(),
    ) {
        let _ = parse_header(&bytes, file_len);
    }

    #[test]
    fn a_changed_byte_is_refused_or_still_readable(position in 0usize..400, value in any::<u8>()) {
        let (header, data) = two_tensors();
        let mut bytes = file_bytes(&header.to_string(), &data);
        let position = position % bytes.len();
        bytes[position] = value;
        if let Ok(checkpoint) = Checkpoint::from_bytes("test", bytes) {
            for name in checkpoint.names() {
                let tensor = checkpoint.read(name).unwrap();
                prop_assert_eq!(tensor.to_f32().len(), tensor.shape.iter().product::<usize>());
            }
        }
    }
}

#[test]
fn the_fingerprint_tells_any_difference_of_what_can_be_read_and_no_other() {
    let (header, data) = two_tensors();
    let fingerprint = |header: &Value, data: &[u8]| {
        let checkpoint = Checkpoint::from_bytes("test", file_bytes(&header.to_string(), data)).unwrap();
        checkpoint.fingerprint().unwrap()
    };
    let original = fingerprint(&header, &data);
    let changed_header = |change: &dyn Fn(&mut Value)| {
        let mut changed = header.clone();
        change(&mut changed);
        fingerprint(&changed, &data)
    };
    let rename = |header: &mut Value, from: &str, to: &str| {
        let tensor = header.as_object_mut().unwrap().remove(from).unwrap();
        header[to] = tensor;
    };
    assert_ne!(changed_header(&|header| header["a"]["shape"] = json!([2, 1])), original);
    assert_ne!(changed_header(&|header| header["b"]["dtype"] = json!("F16")), original);
    assert_ne!(changed_header(&|header| rename(header, "b", "c")), original);
    for byte_idx in 0..12 {
        let mut changed = data.clone();
        changed[byte_idx] ^= 1;
        assert_ne!(fingerprint(&header, &changed), original, "byte {byte_idx}");
    }
    assert_eq!(changed_header(&|header| header["__metadata__"] = json!({"format": "np"})), original);
    assert_eq!(changed_header(&|header| rename(header, "mask", "other")), original);
}
