//! The forward pass on an NVIDIA GPU.
//!
//! Weights and activations of products are of the checkpoint's type, sums and the residual stream f32. All kernels are kvik's own
//! and compiled when a model is loaded. Every sum has one fixed order: a product is one chain of matrix instructions over its
//! inputs whatever its shape, and attention merges the same chunks of positions in the same order for prompts and for decoding.
//! So rows are the same to the bit in any batch, as on the CPU. They are not the CPU's bits: KV of the two has different names.

mod activations;
#[cfg(feature = "cuda-tests")]
mod choice;
mod device;
mod files;
mod graphs;
mod import;
mod kernels;
mod lists;
mod load;
mod monitor;
mod pages;
mod pass;
mod pinned;
mod place;
mod products;
mod progress;
mod watch;
mod weights;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use kvik_types::Dtype;

use crate::checkpoint::WeightDtype;
use crate::config::ModelConfig;
use crate::error::{ModelError, Result};
use crate::paging::{BlockId, BlockMemory, ElasticMemory, MemoryGroup};

use super::checked::{check_sequences, plan_rows, spans_of};
use super::{
    Backend, BlockImport, BlockSource, ChosenToken, FileReads, KvImport, KvSharing, KvSize, LayerKv, Logits,
    PinnedKv, SegmentPart, SequenceRows, WantedLogits,
};
use activations::{Activations, CHOSEN_BYTES};
use device::{Buffer, Device};
use files::FileMover;
use graphs::{PassGraphs, PassShape};
use import::Importer;
use kernels::Kernels;
use lists::{ListShape, ListSizes, RowLists};
pub use monitor::{DeviceMonitor, DeviceUsage};
use pages::Pages;
use pass::Pass;
use pinned::PinnedBlocks;
use weights::ModelWeights;

/// Counts the changes of the bytes that a block has for given weights and tokens: of their order, and of any operation of the
/// forward pass.
const KV_VERSION: u32 = 1;

/// How the CUDA backend is set up.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CudaBackendOptions {
    /// Index of the device among those that the process can see. Default: 0.
    pub ordinal: u32,
    /// Memory of keys and values; with `memory`, the most that there can be. Default: 0.9 of the device.
    pub kv_size: KvSize,
    /// Memory that is shared with other engines, instead of memory of its own. Default: none.
    pub memory: Option<MemoryGroup>,
    /// Type in which keys and values are kept: f32, f16 or bf16. Default: bf16, which has the range of f32.
    pub kv_dtype: Dtype,
    /// Which engines may use its KV. Default: those that leave the same bytes.
    pub kv_sharing: KvSharing,
    /// Rows of the largest pass; buffers are made for so many. Default: 512.
    pub max_rows: usize,
    /// Folder in which compiled kernels are kept for the next start. Default: none.
    pub kernel_cache: Option<PathBuf>,
    /// Whether KV is read from files by the device itself. Default: off.
    pub file_reads: FileReads,
}

impl Default for CudaBackendOptions {
    fn default() -> Self {
        Self {
            ordinal: 0,
            kv_size: KvSize::Share(0.9),
            memory: None,
            kv_dtype: Dtype::BF16,
            kv_sharing: KvSharing::Exact,
            max_rows: 512,
            kernel_cache: None,
            file_reads: FileReads::Off,
        }
    }
}

/// Weights, keys and values on a GPU.
#[derive(Debug)]
pub struct CudaBackend {
    config: ModelConfig,
    kv_dtype: Dtype,
    weight_dtype: WeightDtype,
    kv_sharing: KvSharing,
    /// Until it is taken.
    memory: Option<ElasticMemory>,
    weights: ModelWeights,
    pages: Pages,
    activations: Activations,
    /// Of rotary positions.
    frequencies: Option<Buffer>,
    kernels: Kernels,
    /// Of rows that decode.
    graphs: PassGraphs,
    /// Copies KV that comes in.
    importer: Importer,
    /// Where the device moves KV between files and blocks.
    files: Option<Arc<FileMover>>,
    device: Arc<Device>,
}

impl CudaBackend {
    /// Names the bytes of a block of a model; see [`Backend::kv_layout`].
    pub(crate) fn kv_layout_of(
        config: &ModelConfig,
        (weights, kv_dtype): (WeightDtype, Dtype),
        sharing: KvSharing,
    ) -> String {
        let arithmetic = format!("kvik_paged_cuda_{KV_VERSION}");
        sharing.layout(config, kv_dtype, (&arithmetic, &format!("/weights={weights}")))
    }

    /// Bytes of the weights on the device.
    pub fn weight_bytes(&self) -> usize {
        self.weights.size_bytes()
    }

    /// Runs the rows through all layers, each when all `imports` have it. A pass of rows that decode and wait for none is recorded
    /// when its shape comes again, and started by one call from then on.
    fn pass(
        &mut self,
        sequences: &[SequenceRows<'_>],
        imports: &[&dyn KvImport],
        wanted: WantedLogits<'_>,
        logits: &mut Logits,
    ) -> Result<()> {
        let Some(lists) = self.prepare(sequences, Some(wanted))? else {
            logits.reset(0, self.config.vocab_size);
            return Ok(());
        };
        let mut graphs = std::mem::take(&mut self.graphs);
        let queue = || self.queue(lists, self.config.n_layers, imports, Some(wanted), |_| Ok(()));
        let chooses = matches!(wanted, WantedLogits::Tokens(_));
        let shape = PassShape { sizes: lists, chooses, n_moves: self.activations.n_moves() };
        let is_recorded = lists.is_decoding() && imports.is_empty();
        let graph = if is_recorded { graphs.find(&self.device, shape, queue) } else { None };
        let queued = match graph {
            // SAFETY: as for its kernels, which got the buffers that are there now: none has moved.
            Some(graph) => unsafe { graph.launch() },
            None => queue(),
        };
        self.graphs = graphs;
        self.fetch(queued, lists, wanted, logits)
    }

    /// Runs the rows through the first `n_layers` layers, without logits; `after` is called when a layer is queued.
    fn pass_layers(
        &mut self,
        sequences: &[SequenceRows<'_>],
        n_layers: usize,
        mut after: impl FnMut(&Self, usize) -> Result<()>,
    ) -> Result<()> {
        let Some(lists) = self.prepare(sequences, None)? else { return Ok(()) };
        let queued = self.queue(lists, n_layers, &[], None, |layer_idx| after(self, layer_idx));
        // What was queued must not run behind the caller's back.
        let ended = self.device.synchronize();
        queued.and(ended)
    }

    /// Makes room for a pass and writes its lists down; `None` where it has no rows.
    fn prepare(
        &mut self,
        sequences: &[SequenceRows<'_>],
        wanted: Option<WantedLogits<'_>>,
    ) -> Result<Option<ListSizes>> {
        check_sequences(&self.config, sequences)?;
        if sequences.iter().all(|sequence| sequence.tokens.is_empty()) {
            return Ok(None);
        }
        plan_rows(&spans_of(sequences), self.n_blocks())?;
        self.device.enter()?;
        let group = self.config.n_query_heads / self.config.n_kv_heads;
        let draws = match wanted {
            Some(WantedLogits::Tokens(draws)) => draws,
            Some(WantedLogits::Rows) | None => &[],
        };
        let shape = ListShape { group, many_queries: self.kernels.many_queries() };
        let lists = RowLists::new(sequences, draws, shape);
        let (activations, sizes) = (&mut self.activations, lists.sizes);
        if matches!(wanted, Some(WantedLogits::Tokens(_))) && draws.len() != sizes.n_logits {
            let allowed = format!("{}, one for each row of logits", sizes.n_logits);
            return Err(ModelError::request("draws", draws.len(), allowed));
        }
        activations.reserve_rows(&self.config, self.weight_dtype, sizes.n_rows)?;
        activations.put_lists(&lists.words)?;
        activations.reserve_partials(&self.config, sizes.n_chunks)?;
        if wanted.is_some() {
            activations.reserve_logits(&self.config, sizes.n_logits)?;
        }
        Ok(Some(sizes))
    }

    /// Queues what was prepared. Each layer is queued when the copies of `imports` have it; `after` is called behind it.
    fn queue(
        &self,
        lists: ListSizes,
        n_layers: usize,
        imports: &[&dyn KvImport],
        wanted: Option<WantedLogits<'_>>,
        mut after: impl FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        let pass = Pass {
            config: &self.config,
            kernels: &self.kernels,
            weights: &self.weights,
            activations: &self.activations,
            pages: &self.pages,
            lists,
            frequencies: self.frequencies.as_ref().map(Buffer::address),
        };
        pass.begin()?;
        for (layer_idx, layer) in self.weights.layers.iter().enumerate().take(n_layers) {
            for import in imports {
                // The thread that copies writes the blocks.
                import.take_layer(layer_idx, &mut |_, _| {});
            }
            pass.layer(layer_idx, layer)?;
            after(layer_idx)?;
        }
        match wanted {
            None => Ok(()),
            Some(WantedLogits::Rows) => pass.logits(),
            Some(WantedLogits::Tokens(_)) => pass.logits().and_then(|()| pass.choose_tokens()),
        }
    }

    /// Waits for what was queued and gives what is wanted of it on.
    fn fetch(
        &mut self,
        queued: Result<()>,
        lists: ListSizes,
        wanted: WantedLogits<'_>,
        logits: &mut Logits,
    ) -> Result<()> {
        // What was queued must not run behind the caller's back.
        let ended = self.device.synchronize();
        queued.and(ended)?;
        let vocab_size = self.config.vocab_size;
        match wanted {
            WantedLogits::Rows => logits.reset(lists.n_logits, vocab_size),
            WantedLogits::Tokens(draws) => {
                logits.reset_chosen(draws.iter().copied().zip(self.chosen(lists.n_logits)), vocab_size);
            }
        }
        self.fetch_rows(lists.n_logits, logits)
    }

    /// The tokens that a pass has chosen; it has ended.
    fn chosen(&self, n_logits: usize) -> impl Iterator<Item = ChosenToken> {
        let (words, _) = self.activations.chosen.bytes()[..n_logits * CHOSEN_BYTES].as_chunks::<4>();
        let (rows, _) = words.as_chunks::<2>();
        rows.iter().map(|[token, is_finite]| ChosenToken {
            token: u32::from_le_bytes(*token),
            is_finite: u32::from_le_bytes(*is_finite) != 0,
        })
    }

    /// Copies the rows of logits that are wanted.
    fn fetch_rows(&mut self, n_logits: usize, logits: &mut Logits) -> Result<()> {
        let row_bytes = self.config.vocab_size * 4;
        let wanted: Vec<usize> = (0..n_logits).filter(|&row_idx| logits.has_row(row_idx)).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let activations = &mut self.activations;
        for &row_idx in &wanted {
            let (address, offset) = (activations.logits.address(), row_idx * row_bytes);
            self.device.queue_read(
                address + offset as u64,
                &mut activations.host_logits,
                offset,
                row_bytes,
            )?;
        }
        self.device.synchronize()?;
        for row_idx in wanted {
            let (values, _) =
                activations.host_logits.bytes()[row_idx * row_bytes..][..row_bytes].as_chunks::<4>();
            for (target, bytes) in logits.row_mut(row_idx).iter_mut().zip(values) {
                *target = f32::from_le_bytes(*bytes);
            }
        }
        Ok(())
    }
}

impl Backend for CudaBackend {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn n_blocks(&self) -> usize {
        self.pages.n_blocks()
    }

    fn take_memory(&mut self) -> Option<Box<dyn BlockMemory>> {
        self.memory.take().map(|memory| Box::new(memory) as Box<dyn BlockMemory>)
    }

    fn forward(&mut self, sequences: &[SequenceRows<'_>], logits: &mut Logits) -> Result<()> {
        self.pass(sequences, &[], WantedLogits::Rows, logits)
    }

    fn forward_wanted(
        &mut self,
        sequences: &[SequenceRows<'_>],
        wanted: WantedLogits<'_>,
        logits: &mut Logits,
    ) -> Result<()> {
        self.pass(sequences, &[], wanted, logits)
    }

    fn forward_layers(&mut self, sequences: &[SequenceRows<'_>], n_layers: usize) -> Result<()> {
        self.pass_layers(sequences, n_layers, |_, _| Ok(()))
    }

    fn forward_watched(
        &mut self,
        sequence: SequenceRows<'_>,
        n_watched: usize,
        layers: Range<usize>,
        weights: &mut [f32],
    ) -> Result<()> {
        let n_layers = layers.end.min(self.config.n_layers);
        self.pass_layers(&[sequence], n_layers, |backend, layer_idx| {
            if layers.contains(&layer_idx) {
                backend.add_attention(sequence, n_watched, layer_idx, weights)?;
            }
            Ok(())
        })
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

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<()> {
        self.pages.copy_block(from, to)
    }

    fn kv_dtype(&self) -> Dtype {
        self.kv_dtype
    }

    fn export_kv(&self, layer_idx: usize, block_table: &[BlockId], n_tokens: usize) -> Result<LayerKv> {
        self.device.synchronize()?;
        self.pages.export(layer_idx, block_table, n_tokens)
    }

    fn import_kv(&mut self, layer_idx: usize, block_table: &[BlockId], kv: &LayerKv) -> Result<()> {
        let expected =
            kv.n_tokens * self.config.n_kv_heads * self.config.head_dim * self.kv_dtype.size_bytes();
        for (field, tensor) in [("k", &kv.keys), ("v", &kv.values)] {
            if tensor.len() != expected {
                let value = format!("{} bytes long", tensor.len());
                let allowed = format!("{expected} bytes for {} tokens", kv.n_tokens);
                return Err(ModelError::request(field, value, allowed));
            }
        }
        self.device.synchronize()?;
        self.pages.import(layer_idx, block_table, kv)
    }

    fn kv_layout(&self) -> String {
        Self::kv_layout_of(&self.config, (self.weight_dtype, self.kv_dtype), self.kv_sharing)
    }

    fn block_layer_bytes(&self) -> usize {
        self.pages.block_bytes()
    }

    fn export_block(&self, layer_idx: usize, block: BlockId, out: &mut [u8]) -> Result<()> {
        self.device.synchronize()?;
        self.pages.read_block(layer_idx, block, out)
    }

    fn pin_blocks(&mut self, blocks: &[BlockId]) -> Result<Box<dyn PinnedKv>> {
        // Copies beside the stream see what was queued before.
        self.device.synchronize()?;
        Ok(Box::new(PinnedBlocks::new(self.pages.addresses(), blocks, self.files.as_ref())))
    }

    fn import_block(&mut self, layer_idx: usize, block: BlockId, bytes: &[u8]) -> Result<()> {
        let expected = self.block_layer_bytes();
        if bytes.len() != expected {
            let value = format!("{} bytes long", bytes.len());
            return Err(ModelError::request("block", value, format!("{expected} bytes")));
        }
        self.pages.write_block(layer_idx, block, bytes)
    }

    fn import_blocks(&mut self, imports: &[BlockImport<'_>]) -> Result<()> {
        let expected = self.block_layer_bytes();
        if let Some(import) = imports.iter().find(|import| import.bytes.len() != expected) {
            let value = format!("{} bytes long", import.bytes.len());
            return Err(ModelError::request("block", value, format!("{expected} bytes")));
        }
        // What was queued may read the blocks' former contents.
        self.device.synchronize()?;
        self.importer.import(imports)
    }

    fn imports_beside_passes(&self) -> bool {
        true
    }

    fn max_file_section_bytes(&self) -> Option<usize> {
        self.importer.max_file_section_bytes()
    }

    fn start_import(
        &mut self,
        source: &Arc<dyn BlockSource>,
        blocks: &[(usize, BlockId)],
    ) -> Option<Box<dyn KvImport>> {
        // What was queued may read the blocks' former contents.
        self.device.synchronize().ok()?;
        self.importer.begin(Arc::clone(source), blocks.to_vec())
    }

    fn forward_arriving(
        &mut self,
        sequences: &[SequenceRows<'_>],
        imports: &[&dyn KvImport],
        wanted: WantedLogits<'_>,
        logits: &mut Logits,
    ) -> Result<()> {
        self.pass(sequences, imports, wanted, logits)
    }
}
