//! KV between the memory of a GPU and that of the store, as an engine moves it.
//!
//! Chunks of a model with the KV of Llama-3-8B: 2 MiB for 16 tokens in bf16. A put copies the blocks of one chunk off the GPU, a get
//! all chunks of a prompt onto it; both from and to memory that is registered with the driver. What came back is compared.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use kvik_memory::vmm::cuda::PinnedCopies;
use kvik_model::{Backend, BlockId, BlockSource, CudaBackend, CudaBackendOptions, KvSize, ModelConfig};
use kvik_store::register_with_cuda;
use kvik_tier::{Arena, ArenaOptions, Lease};

use super::MIB;
use super::direction::Direction;
use crate::report::{Baseline, Goal, Measurement};

/// Blocks of a chunk: 16, 64 and 256 tokens.
const CHUNK_BLOCKS: [usize; 3] = [1, 4, 16];

/// Loads of long prompts reach this part of what a plain copy of pinned memory does.
const LOAD_GOAL: f64 = 0.9;

/// The KV of Llama-3-8B below a model that is small otherwise.
const CONFIG: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 1024,
    "intermediate_size": 1024, "num_hidden_layers": 32, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 1024, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": true, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 0
}"#;

/// Chunks of the store, layer by layer and in each block by block.
#[derive(Debug)]
struct Chunks {
    leases: Vec<Lease>,
    chunk_blocks: usize,
    block_bytes: usize,
}

impl BlockSource for Chunks {
    fn block(&self, layer_idx: usize, block_idx: usize) -> Option<&[u8]> {
        let chunk = self.leases.get(block_idx / self.chunk_blocks)?;
        let place = layer_idx * self.chunk_blocks + block_idx % self.chunk_blocks;
        chunk.get(place * self.block_bytes..(place + 1) * self.block_bytes)
    }
}

/// A GPU with blocks, and memory of the store that it reaches.
struct Device {
    backend: CudaBackend,
    arena: Arena,
    n_layers: usize,
    n_blocks: usize,
}

/// Measures both ways on the GPU with this index, with so many bytes a round.
///
/// # Errors
/// If there is no such GPU or it has no room, or bytes come back changed.
pub(super) fn measure(ordinal: u32, round_bytes: usize, n_rounds: usize) -> anyhow::Result<Vec<Measurement>> {
    let mut device = Device::open(ordinal, round_bytes)?;
    let mut pinned = PinnedCopies::open(ordinal, round_bytes).context("take pinned memory")?;
    let mut results = Vec::new();
    for chunk_blocks in CHUNK_BLOCKS {
        let mut rates = [Vec::new(), Vec::new()];
        let mut references = [Vec::new(), Vec::new()];
        // The first round takes memory for the first time.
        for round in 0..=n_rounds {
            let copies = [pinned.to_host()?, pinned.to_device()?];
            let times = device.round(chunk_blocks)?;
            if 0 < round {
                for place in 0..Direction::ALL.len() {
                    references[place].push(gb_s(round_bytes, copies[place]));
                    rates[place].push(gb_s(round_bytes, times[place]));
                }
            }
        }
        let chunk_mib = chunk_blocks * device.all_layers_bytes() / MIB;
        for ((direction, rates), references) in Direction::ALL.into_iter().zip(rates).zip(references) {
            // A request waits for loads alone.
            let goal = (direction == Direction::Get).then_some(Goal::RatioAtLeast(LOAD_GOAL));
            let baseline = Baseline::new("pinned copy", references);
            results.extend(
                Measurement::from_repeats(format!("gpu_{direction}_{chunk_mib}mib"), "GB/s", rates)
                    .map(|row| row.compared_with(baseline, goal)),
            );
        }
    }
    Ok(results)
}

impl Device {
    fn open(ordinal: u32, round_bytes: usize) -> anyhow::Result<Self> {
        let config = ModelConfig::from_json(CONFIG).context("read the shape of the model")?;
        let n_layers = config.n_layers;
        let block_bytes = 2 * config.n_kv_heads * config.head_dim * kvik_model::BLOCK_TOKENS * 2;
        let n_blocks = round_bytes / (block_bytes * n_layers);
        let mut options = CudaBackendOptions::default();
        options.ordinal = ordinal;
        // What is put, and what comes back.
        options.kv_size = KvSize::Blocks(2 * n_blocks);
        let backend = CudaBackend::random(config, 1, &options).context("open the GPU")?;
        let arena = Arena::new(ArenaOptions::new(2 * round_bytes as u64)).context("take memory")?;
        register_with_cuda(&arena, ordinal).context("register memory with the driver")?;
        let mut device = Self { backend, arena, n_layers, n_blocks };
        device.fill()?;
        Ok(device)
    }

    /// Bytes of a block in all layers.
    fn all_layers_bytes(&self) -> usize {
        self.n_layers * self.backend.block_layer_bytes()
    }

    /// Writes other bytes to every block that is put.
    fn fill(&mut self) -> anyhow::Result<()> {
        let mut bytes = vec![0; self.backend.block_layer_bytes()];
        for layer_idx in 0..self.n_layers {
            for block in 0..self.n_blocks {
                for (place, byte) in bytes.iter_mut().enumerate() {
                    *byte = (place * 31 + block * 7 + layer_idx) as u8;
                }
                self.backend.import_block(layer_idx, BlockId::new(block as u32), &bytes)?;
            }
        }
        Ok(())
    }

    /// How long it took to put all blocks, chunk by chunk, and to get them.
    fn round(&mut self, chunk_blocks: usize) -> anyhow::Result<[Duration; 2]> {
        let blocks: Vec<BlockId> = (0..self.n_blocks as u32).map(BlockId::new).collect();
        let pinned = self.backend.pin_blocks(&blocks)?;
        let chunk_bytes = chunk_blocks * self.all_layers_bytes();
        let begin = Instant::now();
        let mut leases = Vec::new();
        for first in (0..self.n_blocks).step_by(chunk_blocks) {
            let mut slot = self.arena.allocate(chunk_bytes).context("take memory for a chunk")?;
            pinned.read_blocks(0..self.n_layers, first..first + chunk_blocks, &mut slot)?;
            leases.push(slot.freeze());
        }
        let put = begin.elapsed();

        let source = Chunks { leases, chunk_blocks, block_bytes: self.backend.block_layer_bytes() };
        let source: Arc<dyn BlockSource> = Arc::new(source);
        let target_of = |block_idx: usize| BlockId::new((self.n_blocks + block_idx) as u32);
        let pairs: Vec<_> = (0..self.n_blocks).map(|block_idx| (block_idx, target_of(block_idx))).collect();
        let begin = Instant::now();
        let import = self.backend.start_import(&source, &pairs).context("begin a copy to the GPU")?;
        self.backend.finish_import(import)?;
        let get = begin.elapsed();
        self.compare(pairs.first().into_iter().chain(pairs.last()))?;
        Ok([put, get])
    }

    /// Compares what was put and what came back, in all layers.
    fn compare<'a>(&self, pairs: impl Iterator<Item = &'a (usize, BlockId)>) -> anyhow::Result<()> {
        let mut bytes =
            [vec![0; self.backend.block_layer_bytes()], vec![0; self.backend.block_layer_bytes()]];
        for &(block_idx, target) in pairs {
            for layer_idx in 0..self.n_layers {
                let [put, got] = &mut bytes;
                self.backend.export_block(layer_idx, BlockId::new(block_idx as u32), put)?;
                self.backend.export_block(layer_idx, target, got)?;
                ensure!(put == got, "block {block_idx} of layer {layer_idx} came back with other bytes");
            }
        }
        Ok(())
    }
}

fn gb_s(n_bytes: usize, time: Duration) -> f64 {
    n_bytes as f64 / 1e9 / time.as_secs_f64()
}
