//! One file a verb, and what the verbs share: how a model is opened and how its engine is sized.

pub(crate) mod bench;
pub(crate) mod completions;
pub(crate) mod config;
pub(crate) mod demo;
pub(crate) mod engines;
pub(crate) mod epp;
pub(crate) mod eval;
pub(crate) mod generate;
pub(crate) mod man;
pub(crate) mod memory;
pub(crate) mod models;
pub(crate) mod roles;
pub(crate) mod service;
pub(crate) mod sim;
pub(crate) mod store;
pub(crate) mod top;
pub(crate) mod up;
pub(crate) mod version;

use std::io::{self, Write};
use std::path::Path;

use anyhow::Context;
use kvik_model::{BLOCK_TOKENS, DeviceName, Model, ModelConfig, ModelError};
use kvik_runtime::hub::{self, FoundModel, ModelHubConfig};
use kvik_runtime::shutdown::Shutdown;
use kvik_types::{ByteSize, Dtype};
use serde::{Deserialize, Serialize};

use service::Flags;

/// The settings of a worker that commands without a worker read too.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct HubSettings {
    hub: ModelHubConfig,
}

/// Opens the model folder, a model of a hub by its name, or the bundled model.
fn open_model(given: Option<&Path>) -> anyhow::Result<Model> {
    let Some(given) = given else { return Model::bundled().context("open the model") };
    let found = find_model(given)?;
    Model::open(&found.folder).map(|model| model.with_name(found.name)).context("open the model")
}

/// Finds the folder of a model, which is fetched if it is one of a hub and not here; the environment says from where.
fn find_model(given: &Path) -> anyhow::Result<FoundModel> {
    let settings = service::load::<HubSettings>("worker", None, Flags::default(), &[])?.value;
    hub::find_model(given, &settings.hub, &Shutdown::new()).context("open the model")
}

/// The type in which keys and values are kept where none is named: GPUs have half the memory traffic with bf16, whose range is
/// that of f32.
fn default_kv_dtype(device: DeviceName) -> Dtype {
    match device {
        DeviceName::Cpu => Dtype::F32,
        DeviceName::Cuda(_) => Dtype::BF16,
    }
}

/// Bytes of the keys and values of one token.
fn kv_bytes_per_token(config: &ModelConfig, kv_dtype: Dtype) -> u64 {
    config.kv_elements_per_token() as u64 * kv_dtype.size_bytes() as u64
}

/// Blocks that fit into the memory that this process may use, if that is known.
fn n_blocks_in_memory(config: &ModelConfig, kv_dtype: Dtype) -> Option<u64> {
    let block_bytes = kv_bytes_per_token(config, kv_dtype).checked_mul(BLOCK_TOKENS as u64)?;
    let n_bytes = Some(kvik_memory::machine::memory_bytes()).filter(|n_bytes| *n_bytes > 0);
    n_bytes?.checked_div(block_bytes)
}

/// Refuses more blocks than memory could hold: the allocation would end the process.
fn check_kv_blocks(config: &ModelConfig, kv_dtype: Dtype, n_blocks: usize) -> kvik_model::Result<()> {
    match n_blocks_in_memory(config, kv_dtype) {
        Some(n_possible) if n_possible < n_blocks as u64 => {
            let block = ByteSize(kv_bytes_per_token(config, kv_dtype) * BLOCK_TOKENS as u64);
            let allowed =
                format!("1 to {n_possible}, which fill the memory of this process with {block} each");
            Err(ModelError::request("kv_blocks", n_blocks, allowed))
        }
        _ => Ok(()),
    }
}

/// Prints `value` as one line of JSON on standard output.
fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_string(value).context("write JSON")?;
    text.push('\n');
    // Not through `anstream`: JSON has no styles, and its bytes must arrive as they are.
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context("write to standard output")
}
