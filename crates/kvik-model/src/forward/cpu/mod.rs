//! The forward pass on the CPU.
//!
//! All rows of a batch go through each layer together; only attention and the writing of keys
//! and values look at sequences. Activations are f32, in rows padded to the vector width whose
//! padding is always zero; the buffers are kept between passes.

mod pass;
mod place;
mod watch;
mod weights;

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use kvik_types::Dtype;

use crate::checkpoint::Checkpoint;
use crate::config::{ModelConfig, Position};
use crate::error::{ModelError, Result};
use crate::kernels::{Isa, KvElement, KvPages, PageShape, PinnedBlocks, RotaryTable, ThreadPool, padded};
use crate::paging::{BlockId, BlockMemory, ElasticMemory, MemoryGroup};

use super::checked::{check_sequences, plan_rows, spans_of};
use super::layer_import::LayerImport;
use super::{
    Backend, BlockSource, KvImport, KvSharing, LayerKv, Logits, PinnedKv, SegmentPart, SequenceRows,
    WantedLogits,
};
use pass::{Activations, Pass};
use watch::Watch;
use weights::ModelWeights;

/// Counts the changes of the bytes that a block has for given weights and tokens: of their order, and of any
/// operation of the forward pass, be it the order of two additions.
const KV_VERSION: u32 = 1;

/// How the CPU backend is set up.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CpuBackendOptions {
    /// Blocks of 16 tokens for keys and values; with `memory`, the most that there can be. Default: 1024.
    pub n_blocks: usize,
    /// Memory that is shared with other engines, instead of memory of its own. Default: none.
    pub memory: Option<MemoryGroup>,
    /// Type in which keys and values are kept: f32, f16 or bf16. Default: f32.
    pub kv_dtype: Dtype,
    /// Threads that compute. Default: the number of cores the process may use.
    pub n_threads: usize,
    /// Which engines may use its KV. Default: those that leave the same bytes.
    pub kv_sharing: KvSharing,
    /// Instruction set of the kernels; results do not depend on it. Default: the fastest.
    pub isa: Isa,
}

impl Default for CpuBackendOptions {
    fn default() -> Self {
        let n_threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            n_blocks: 1024,
            memory: None,
            kv_dtype: Dtype::F32,
            n_threads,
            kv_sharing: KvSharing::Exact,
            isa: Isa::detect(),
        }
    }
}

/// Keys and values, by element type.
#[derive(Debug)]
enum Pages {
    F32(KvPages<f32>),
    F16(KvPages<f16>),
    Bf16(KvPages<bf16>),
}

impl Pages {
    /// Writes a block of one layer; `bytes` has the length of one.
    fn import_block(&mut self, layer_idx: usize, block: BlockId, bytes: &[u8]) {
        match self {
            Self::F32(pages) => pages.import_block(layer_idx, block, bytes),
            Self::F16(pages) => pages.import_block(layer_idx, block, bytes),
            Self::Bf16(pages) => pages.import_block(layer_idx, block, bytes),
        }
    }
}

/// Pages of their own, or on the memory that `options` names.
fn make_pages<E: KvElement>(
    n_layers: usize,
    shape: PageShape,
    options: &CpuBackendOptions,
) -> Result<(KvPages<E>, Option<ElasticMemory>)> {
    let too_many = || ModelError::request("n_blocks", options.n_blocks, "as many blocks as memory holds");
    let Some(group) = &options.memory else {
        let pages = KvPages::try_new(n_layers, options.n_blocks, shape).ok_or_else(too_many)?;
        return Ok((pages, None));
    };
    let block_bytes = KvPages::<E>::block_bytes(shape);
    let memory = ElasticMemory::open(group, n_layers, block_bytes, options.n_blocks)?;
    let pages = KvPages::on_pool(memory.pool(), n_layers, shape).ok_or_else(too_many)?;
    Ok((pages, Some(memory)))
}

/// Weights, keys and values, and threads.
#[derive(Debug)]
pub struct CpuBackend {
    config: ModelConfig,
    weights: ModelWeights,
    pages: Pages,
    /// Until it is taken.
    memory: Option<ElasticMemory>,
    rotary: Option<RotaryTable>,
    activations: Activations,
    pool: ThreadPool,
    kv_sharing: KvSharing,
    isa: Isa,
}

impl CpuBackend {
    /// Loads the weights of `checkpoint`.
    ///
    /// # Errors
    /// If the weights do not fit `config`, or the KV dtype is not one of f32, f16 and bf16.
    pub fn load(config: ModelConfig, checkpoint: &Checkpoint, options: &CpuBackendOptions) -> Result<Self> {
        // First: it shows that the numbers of `config` are those of real tensors, from which the
        // size of the pages is then computed.
        let weights = ModelWeights::load(checkpoint, &config)?;
        let shape = PageShape { n_kv_heads: config.n_kv_heads, head_dim: config.head_dim };
        let n_layers = config.n_layers;
        let (pages, memory) = match options.kv_dtype {
            Dtype::F32 => {
                make_pages(n_layers, shape, options).map(|(pages, memory)| (Pages::F32(pages), memory))
            }
            Dtype::F16 => {
                make_pages(n_layers, shape, options).map(|(pages, memory)| (Pages::F16(pages), memory))
            }
            Dtype::BF16 => {
                make_pages(n_layers, shape, options).map(|(pages, memory)| (Pages::Bf16(pages), memory))
            }
            other => return Err(ModelError::request("kv_dtype", other, "f32, f16, bf16")),
        }?;
        let rotary = match &config.position {
            Position::Rope(rope) => Some(RotaryTable::new(rope.inverse_frequencies(config.head_dim))),
            Position::Learned => None,
        };
        Ok(Self {
            weights,
            pages,
            memory,
            rotary,
            activations: Activations::default(),
            pool: ThreadPool::new(options.n_threads),
            kv_sharing: options.kv_sharing,
            isa: options.isa,
            config,
        })
    }

    /// Names the bytes of a block of a model; see [`Backend::kv_layout`].
    pub(crate) fn kv_layout_of(config: &ModelConfig, kv_dtype: Dtype, sharing: KvSharing) -> String {
        sharing.layout(config, kv_dtype, (&format!("kvik_paged_{KV_VERSION}"), ""))
    }

    /// Bytes of the packed weights.
    pub fn weight_bytes(&self) -> usize {
        self.weights.size_bytes()
    }

    /// Runs the rows through the first `n_layers` layers.
    fn pass(
        &mut self,
        sequences: &[SequenceRows<'_>],
        n_layers: usize,
        mut watch: Option<Watch<'_>>,
        imports: &[&dyn KvImport],
        logits: Option<&mut Logits>,
    ) -> Result<()> {
        check_sequences(&self.config, sequences)?;
        if sequences.iter().all(|sequence| sequence.tokens.is_empty()) {
            if let Some(logits) = logits {
                logits.reset(0, self.config.vocab_size);
            }
            return Ok(());
        }
        let spans = spans_of(sequences);
        let plan = plan_rows(&spans, self.n_blocks())?;
        let n_rows = spans.iter().map(|span| span.n_rows).sum();
        self.activations.resize(&self.config, n_rows);
        self.embed(sequences);
        if let Some(rotary) = &mut self.rotary {
            rotary.prepare(spans.iter().flat_map(|span| {
                let first = span.first_position as u32;
                first..first + span.n_rows as u32
            }));
        }
        let mut pass = Pass {
            config: &self.config,
            activations: &mut self.activations,
            rotary: self.rotary.as_ref(),
            pool: &mut self.pool,
            isa: self.isa,
            plan: &plan,
            n_rows,
        };
        for (layer_idx, layer) in self.weights.layers.iter().enumerate().take(n_layers) {
            for import in imports {
                let pages = &mut self.pages;
                import.take_layer(layer_idx, &mut |block, bytes| pages.import_block(layer_idx, block, bytes));
            }
            match &mut self.pages {
                Pages::F32(pages) => pass.layer(layer_idx, layer, pages, watch.as_mut()),
                Pages::F16(pages) => pass.layer(layer_idx, layer, pages, watch.as_mut()),
                Pages::Bf16(pages) => pass.layer(layer_idx, layer, pages, watch.as_mut()),
            }
        }
        if let Some(logits) = logits {
            pass.logits(&self.weights, sequences, logits);
        }
        Ok(())
    }

    fn embed(&mut self, sequences: &[SequenceRows<'_>]) {
        let stride = padded(self.config.hidden_size);
        let mut rows = self.activations.hidden.chunks_exact_mut(stride);
        let mut position_row = vec![0.0; stride];
        for sequence in sequences {
            for (idx, &token) in sequence.tokens.iter().enumerate() {
                let Some(row) = rows.next() else { return };
                row.fill(0.0);
                self.weights.embedding.unpack_row(token as usize, row);
                if let Some(positions) = &self.weights.position_embedding {
                    positions.unpack_row(sequence.positions.get(idx), &mut position_row);
                    row.iter_mut().zip(&position_row).for_each(|(value, &position)| *value += position);
                }
            }
        }
    }
}

impl<E: KvElement> PinnedKv for PinnedBlocks<E> {
    fn read_block(&self, layer_idx: usize, block_idx: usize, out: &mut [u8]) -> Result<()> {
        self.export_block(layer_idx, block_idx, out);
        Ok(())
    }
}

impl Backend for CpuBackend {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn n_blocks(&self) -> usize {
        match &self.pages {
            Pages::F32(pages) => pages.n_blocks(),
            Pages::F16(pages) => pages.n_blocks(),
            Pages::Bf16(pages) => pages.n_blocks(),
        }
    }

    fn forward(&mut self, sequences: &[SequenceRows<'_>], logits: &mut Logits) -> Result<()> {
        self.pass(sequences, self.config.n_layers, None, &[], Some(logits))
    }

    fn forward_layers(&mut self, sequences: &[SequenceRows<'_>], n_layers: usize) -> Result<()> {
        self.pass(sequences, n_layers, None, &[], None)
    }

    fn forward_watched(
        &mut self,
        sequence: SequenceRows<'_>,
        n_watched: usize,
        layers: Range<usize>,
        weights: &mut [f32],
    ) -> Result<()> {
        let n_layers = layers.end.min(self.config.n_layers);
        let watch = Watch { sequence, n_watched, layers, weights };
        self.pass(&[sequence], n_layers, Some(watch), &[], None)
    }

    fn place_kv(
        &mut self,
        layer_idx: usize,
        block_table: &[BlockId],
        first_position: usize,
        turned_by: i64,
        part: SegmentPart<'_>,
    ) -> Result<()> {
        self.place(layer_idx, block_table, first_position, turned_by, part)
    }

    fn take_memory(&mut self) -> Option<Box<dyn BlockMemory>> {
        self.memory.take().map(|memory| Box::new(memory) as Box<dyn BlockMemory>)
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<()> {
        match &mut self.pages {
            Pages::F32(pages) => pages.copy_block(from, to),
            Pages::F16(pages) => pages.copy_block(from, to),
            Pages::Bf16(pages) => pages.copy_block(from, to),
        }
        Ok(())
    }

    fn kv_dtype(&self) -> Dtype {
        match &self.pages {
            Pages::F32(_) => Dtype::F32,
            Pages::F16(_) => Dtype::F16,
            Pages::Bf16(_) => Dtype::BF16,
        }
    }

    fn export_kv(&self, layer_idx: usize, block_table: &[BlockId], n_tokens: usize) -> Result<LayerKv> {
        let mut kv = LayerKv { n_tokens, ..LayerKv::default() };
        match &self.pages {
            Pages::F32(pages) => pages.export(layer_idx, block_table, n_tokens, &mut kv.keys, &mut kv.values),
            Pages::F16(pages) => pages.export(layer_idx, block_table, n_tokens, &mut kv.keys, &mut kv.values),
            Pages::Bf16(pages) => {
                pages.export(layer_idx, block_table, n_tokens, &mut kv.keys, &mut kv.values);
            }
        }
        Ok(kv)
    }

    fn import_kv(&mut self, layer_idx: usize, block_table: &[BlockId], kv: &LayerKv) -> Result<()> {
        let element_bytes = self.kv_dtype().size_bytes();
        let expected = kv.n_tokens * self.config.n_kv_heads * self.config.head_dim * element_bytes;
        for (field, tensor) in [("k", &kv.keys), ("v", &kv.values)] {
            if tensor.len() != expected {
                let value = format!("{} bytes long", tensor.len());
                return Err(ModelError::request(
                    field,
                    value,
                    format!("{expected} bytes for {} tokens", kv.n_tokens),
                ));
            }
        }
        let (n_tokens, keys, values) = (kv.n_tokens, &kv.keys, &kv.values);
        match &mut self.pages {
            Pages::F32(pages) => pages.import(layer_idx, block_table, n_tokens, keys, values),
            Pages::F16(pages) => pages.import(layer_idx, block_table, n_tokens, keys, values),
            Pages::Bf16(pages) => pages.import(layer_idx, block_table, n_tokens, keys, values),
        }
        Ok(())
    }

    fn kv_layout(&self) -> String {
        Self::kv_layout_of(&self.config, self.kv_dtype(), self.kv_sharing)
    }

    fn block_layer_bytes(&self) -> usize {
        match &self.pages {
            Pages::F32(pages) => pages.packed_block_bytes(),
            Pages::F16(pages) => pages.packed_block_bytes(),
            Pages::Bf16(pages) => pages.packed_block_bytes(),
        }
    }

    fn export_block(&self, layer_idx: usize, block: BlockId, out: &mut [u8]) -> Result<()> {
        match &self.pages {
            Pages::F32(pages) => pages.export_block(layer_idx, block, out),
            Pages::F16(pages) => pages.export_block(layer_idx, block, out),
            Pages::Bf16(pages) => pages.export_block(layer_idx, block, out),
        }
        Ok(())
    }

    fn pin_blocks(&mut self, blocks: &[BlockId]) -> Result<Box<dyn PinnedKv>> {
        Ok(match &mut self.pages {
            Pages::F32(pages) => Box::new(pages.pin(blocks)),
            Pages::F16(pages) => Box::new(pages.pin(blocks)),
            Pages::Bf16(pages) => Box::new(pages.pin(blocks)),
        })
    }

    fn import_block(&mut self, layer_idx: usize, block: BlockId, bytes: &[u8]) -> Result<()> {
        let expected = self.block_layer_bytes();
        if bytes.len() != expected {
            let value = format!("{} bytes long", bytes.len());
            return Err(ModelError::request("block", value, format!("{expected} bytes")));
        }
        self.pages.import_block(layer_idx, block, bytes);
        Ok(())
    }

    fn start_import(
        &mut self,
        source: &Arc<dyn BlockSource>,
        blocks: &[(usize, BlockId)],
    ) -> Option<Box<dyn KvImport>> {
        let (n_layers, block_bytes) = (self.config.n_layers, self.block_layer_bytes());
        Some(Box::new(LayerImport::new(Arc::clone(source), blocks.to_vec(), n_layers, block_bytes)))
    }

    fn forward_arriving(
        &mut self,
        sequences: &[SequenceRows<'_>],
        imports: &[&dyn KvImport],
        _wanted: WantedLogits<'_>,
        logits: &mut Logits,
    ) -> Result<()> {
        self.pass(sequences, self.config.n_layers, None, imports, Some(logits))
    }
}
