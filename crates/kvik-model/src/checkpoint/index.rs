//! `model.safetensors.index.json`: which file of a split checkpoint holds which tensor.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use serde::Deserialize;

use crate::error::{ModelError, Result};

/// The file's name inside a model folder.
pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";

#[derive(Deserialize)]
struct IndexFile {
    weight_map: BTreeMap<String, String>,
}

/// Returns the tensors that each shard must hold, by the shard's file name.
///
/// A shard's name is a plain file name: an index cannot lead outside of its folder.
pub(super) fn parse_index(bytes: &[u8]) -> Result<BTreeMap<String, Vec<String>>> {
    let invalid = |reason: String| ModelError::weights(INDEX_FILE, reason);
    let index: IndexFile = serde_json::from_slice(bytes)
        .map_err(|error| invalid(format!("weight_map cannot be read: {error}")))?;
    if index.weight_map.is_empty() {
        return Err(invalid("weight_map names no tensor".to_owned()));
    }
    let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor_name, shard_name) in index.weight_map {
        if !is_plain_file_name(&shard_name) {
            return Err(invalid(format!(
                "tensor {tensor_name} is in {shard_name:?}; allowed: a plain file name"
            )));
        }
        shards.entry(shard_name).or_default().push(tensor_name);
    }
    Ok(shards)
}

fn is_plain_file_name(name: &str) -> bool {
    // The separators of every system are refused on every system.
    if name.contains(['/', '\\', '\0', ':']) {
        return false;
    }
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
}
