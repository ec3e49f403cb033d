//! How a model comes onto a GPU: kernels, weights, and the memory that is left for keys and values.

use std::sync::Arc;

use kvik_memory::vmm::Vmm;
use kvik_memory::vmm::cuda::CudaVmm;
use kvik_types::Dtype;

use crate::checkpoint::Checkpoint;
use crate::config::{ModelConfig, Position};
use crate::error::{ModelError, Result};
use crate::forward::KvSize;
use crate::paging::ElasticMemory;

use super::activations::Activations;
use super::device::{Buffer, Device};
use super::files::FileMover;
use super::graphs::PassGraphs;
use super::import::Importer;
use super::kernels::Kernels;
use super::pages::{self, Pages};
use super::weights::{ModelWeights, WeightSource};
use super::{CudaBackend, CudaBackendOptions};

/// Memory of the device that stays free when KV takes a share of it: for the driver, and for what grows with a pass.
const SPARE_BYTES: u64 = 1 << 30;

impl CudaBackend {
    /// Loads the weights of `checkpoint`.
    ///
    /// # Errors
    /// If there is no such device or it has too little memory, the kernels cannot be compiled, the weights do not fit `config`, or
    /// an option is out of its range.
    pub fn load(config: ModelConfig, checkpoint: &Checkpoint, options: &CudaBackendOptions) -> Result<Self> {
        Self::load_from(config, WeightSource::Checkpoint(checkpoint), options)
    }

    /// A model of these numbers with weights that look random, made on the device; for measurements.
    ///
    /// # Errors
    /// As [`CudaBackend::load`]; also for an architecture other than Llama's.
    pub fn random(config: ModelConfig, seed: u64, options: &CudaBackendOptions) -> Result<Self> {
        let has_extras =
            config.has_qkv_bias || config.has_output_bias || config.has_mlp_bias || config.has_qk_norm;
        if has_extras || matches!(config.position, Position::Learned) {
            return Err(ModelError::config(
                "architectures",
                config.architecture,
                "LlamaForCausalLM for random weights",
            ));
        }
        Self::load_from(config, WeightSource::Random { seed }, options)
    }

    fn load_from(
        config: ModelConfig,
        source: WeightSource<'_>,
        options: &CudaBackendOptions,
    ) -> Result<Self> {
        let kv_dtype = options.kv_dtype;
        if !matches!(kv_dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Err(ModelError::request("kv_dtype", kv_dtype, "f32, f16, bf16"));
        }
        let device = Device::open(options.ordinal)?;
        let weight_dtype = source.dtype();
        let cache = options.kernel_cache.as_deref();
        let kernels = Kernels::load(&device, &config, weight_dtype, kv_dtype, cache)?;
        let weights = ModelWeights::load(&device, &kernels, &config, source)?;
        let activations = Activations::new(&device, &config, weight_dtype, options.max_rows.max(1))?;
        let frequencies = match &config.position {
            Position::Rope(rope) => {
                let frequencies = rope.inverse_frequencies(config.head_dim);
                let bytes: Vec<u8> = frequencies.iter().flat_map(|value| value.to_le_bytes()).collect();
                Some(Buffer::holding(&device, &bytes)?)
            }
            Position::Learned => None,
        };
        let n_blocks = n_blocks(&device, &config, options)?;
        let (pages, memory) = match &options.memory {
            None => (Pages::new(&device, &config, kv_dtype, n_blocks)?, None),
            Some(group) => {
                let vmm =
                    CudaVmm::open(options.ordinal).map_err(|error| ModelError::Memory(Box::new(error)))?;
                let vmm: Arc<dyn Vmm> = Arc::new(vmm);
                let block_bytes = pages::block_bytes(&config, kv_dtype);
                let memory = ElasticMemory::open_on(vmm, group, config.n_layers, block_bytes, n_blocks)?;
                (Pages::on_pool(&device, &config, kv_dtype, memory.pool())?, Some(memory))
            }
        };
        let files = FileMover::open(&device, options.file_reads, cache)?.map(Arc::new);
        let importer = Importer::start(&device, &pages, files.clone())?;
        device.synchronize()?;
        tracing::info!(
            device = device.ordinal(),
            weight_bytes = weights.size_bytes(),
            kv_blocks = pages.n_blocks(),
            "the model is on the device"
        );
        Ok(Self {
            config,
            kv_dtype,
            weight_dtype,
            kv_sharing: options.kv_sharing,
            memory,
            weights,
            pages,
            activations,
            frequencies,
            kernels,
            graphs: PassGraphs::default(),
            importer,
            files,
            device,
        })
    }
}

/// Blocks that fit into the memory that `options` name.
fn n_blocks(device: &Device, config: &ModelConfig, options: &CudaBackendOptions) -> Result<usize> {
    let bytes_per_block = (pages::block_bytes(config, options.kv_dtype) * config.n_layers) as u64;
    let info = device.memory_info()?;
    let n_bytes = match options.kv_size {
        KvSize::Blocks(n_blocks) => return Ok(n_blocks),
        KvSize::Bytes(n_bytes) => n_bytes,
        KvSize::Share(share) => {
            if !(0.0 < share && share <= 1.0) {
                return Err(ModelError::request("kv_memory", share, "a share above 0 and at most 1"));
            }
            let used_bytes = info.total_bytes - info.free_bytes;
            let allowed_bytes = (info.total_bytes as f64 * share) as u64;
            allowed_bytes.saturating_sub(used_bytes).min(info.free_bytes.saturating_sub(SPARE_BYTES))
        }
    };
    let n_blocks = n_bytes / bytes_per_block;
    if n_blocks == 0 || (options.memory.is_none() && info.free_bytes < n_bytes) {
        let value = format!("{n_bytes} bytes");
        let allowed = format!(
            "at least {bytes_per_block} bytes, one block of 16 tokens, and at most the {} that are free on the device beside \
             the weights",
            info.free_bytes
        );
        return Err(ModelError::request("kv_memory", value, allowed));
    }
    Ok(n_blocks as usize)
}
