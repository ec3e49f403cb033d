//! An engine on a device that fails when a test asks it to.

#[path = "../../../../tests/support/inner_backend.rs"]
mod inner_backend;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvik_model::{
    Backend, BlockId, CpuBackend, CpuBackendOptions, Engine, EngineOptions, LayerKv, Logits, Model,
    ModelError, PinnedKv, Result, SequenceRows,
};
use kvik_types::Dtype;

use self::inner_backend::by_inner;

/// The token whose pass panics.
pub(crate) const PANICS_ON: u32 = 4000;
/// The token whose pass is refused.
pub(crate) const FAILS_ON: u32 = 4001;
/// The token in whose pass the device is lost.
pub(crate) const LOSES_ON: u32 = 4002;

/// An engine of the bundled model on a [`Fragile`] device, and what makes that device fail from now on.
pub(crate) fn fragile_engine() -> (Model, Engine, Arc<AtomicBool>) {
    let model = Model::bundled().unwrap();
    let mut options = CpuBackendOptions::default();
    options.n_blocks = 64;
    options.n_threads = 1;
    let inner = CpuBackend::load(model.config().clone(), model.checkpoint(), &options).unwrap();
    let namespace = model.namespace(Dtype::F32).unwrap();
    let is_lost = Arc::new(AtomicBool::new(false));
    let backend = Box::new(Fragile { inner, is_lost: Arc::clone(&is_lost) });
    let tokenizer = Some(Arc::clone(model.tokenizer()));
    let engine = Engine::new(backend, tokenizer, &namespace, EngineOptions::default()).unwrap();
    (model, engine, is_lost)
}

/// The real backend, until a pass has a token that it does not like.
#[derive(Debug)]
pub(crate) struct Fragile {
    inner: CpuBackend,
    /// Whether no call works any more.
    is_lost: Arc<AtomicBool>,
}

impl Backend for Fragile {
    by_inner! {
        config n_blocks forward_layers forward_watched place_kv kv_dtype import_kv kv_layout block_layer_bytes
        import_block
    }

    fn forward(&mut self, sequences: &[SequenceRows<'_>], logits: &mut Logits) -> Result<()> {
        let has = |token: u32| sequences.iter().any(|rows| rows.tokens.contains(&token));
        assert!(!has(PANICS_ON), "as the test asks");
        if has(FAILS_ON) {
            return Err(ModelError::NotFinite { position: 0 });
        }
        if has(LOSES_ON) {
            self.is_lost.store(true, Ordering::Relaxed);
        }
        self.check()?;
        self.inner.forward(sequences, logits)
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<()> {
        self.check()?;
        self.inner.copy_block(from, to)
    }

    fn export_kv(&self, layer_idx: usize, block_table: &[BlockId], n_tokens: usize) -> Result<LayerKv> {
        self.check()?;
        self.inner.export_kv(layer_idx, block_table, n_tokens)
    }

    fn export_block(&self, layer_idx: usize, block: BlockId, out: &mut [u8]) -> Result<()> {
        self.check()?;
        self.inner.export_block(layer_idx, block, out)
    }

    fn pin_blocks(&mut self, blocks: &[BlockId]) -> Result<Box<dyn PinnedKv>> {
        self.check()?;
        self.inner.pin_blocks(blocks)
    }
}

impl Fragile {
    fn check(&self) -> Result<()> {
        if self.is_lost.load(Ordering::Relaxed) {
            let reason = "CUDA_ERROR_ECC_UNCORRECTABLE".to_owned();
            return Err(ModelError::Device { call: "cuStreamSynchronize", reason });
        }
        Ok(())
    }
}
