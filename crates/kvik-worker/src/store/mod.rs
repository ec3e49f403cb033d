//! The store below the engine: KV of ended sequences goes down, and comes back for later prompts.
//!
//! Parts: `tiers` puts the store together as configured, `transfer` is how KV leaves the engine and comes
//! back, `load` is a prompt's KV on its way, `layers` reads it layer by layer.
//!
//! **Invariant:** nothing here can fail a request. What the store does not have, or does not give in time,
//! is computed; a store that panics is not asked again.

mod job;
mod layers;
mod load;
mod tiers;
mod transfer;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvik_model::{BLOCK_TOKENS, Engine, KvSink};
use kvik_store::{Chain, ChunkFormat, ChunkObserver, Space, Store};
use kvik_tier::TierKind;
use kvik_types::{BlockHash, BlockSize, CacheSalt, Namespace, TokenId};

use crate::config::StoreConfig;
use crate::error::{Result, WorkerError};

use layers::LayerLoader;
pub(crate) use load::{Load, LoadedPrefix, Loading};
pub(crate) use transfer::SinkCounts;
use transfer::{StoreSink, Target};

/// A worker's store, with the place of its model in it. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct WorkerStore {
    store: Store,
    space: Space,
    namespace: Namespace,
    load_timeout: Duration,
    /// Reads layer by layer where that is wanted.
    layer_loader: Option<Arc<LayerLoader>>,
    panic_guard: PanicGuard,
    sink_counts: Arc<SinkCounts>,
}

/// Keeps the engine's thread alive if the store panics: from then on it has none.
#[derive(Debug, Clone, Default)]
struct PanicGuard(Arc<AtomicBool>);

impl WorkerStore {
    /// Opens the store of `config` for the KV of `engine`; `None` where there is to be none.
    ///
    /// # Errors
    /// If the configuration is wrong or a local tier cannot be used.
    pub(crate) fn open(config: &StoreConfig, engine: &Engine) -> Result<Option<Self>> {
        let Some(plan) = config.resolve()? else { return Ok(None) };
        let store = tiers::open(config, &plan)?;
        let namespace = Namespace { tenant: config.tenant.clone(), ..engine.namespace().clone() };
        let block_tokens = BlockSize::try_new(BLOCK_TOKENS).map_err(refused)?;
        let format = ChunkFormat {
            n_layers: engine.config().n_layers as u32,
            token_layer_bytes: (engine.block_layer_bytes() / BLOCK_TOKENS) as u64,
            n_ranks: 1,
            block_tokens,
        };
        let space = store.space(&namespace, format).map_err(refused)?;
        let layer_loader = if plan.is_layerwise { Some(Arc::new(LayerLoader::start(&store)?)) } else { None };
        Ok(Some(Self {
            store,
            space,
            namespace,
            load_timeout: plan.load_timeout,
            layer_loader,
            panic_guard: PanicGuard::default(),
            sink_counts: Arc::default(),
        }))
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    pub(crate) fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The chunks of a sequence of this model.
    pub(crate) fn chain(&self, tokens: &[TokenId], salt: Option<&CacheSalt>) -> Chain {
        self.space.salted_chain(tokens, salt)
    }

    /// Tokens of a full chunk.
    pub(crate) fn chunk_tokens(&self) -> usize {
        self.space.chunk_tokens()
    }

    /// The parent of the first chunk of every sequence without a salt.
    pub(crate) fn root(&self) -> BlockHash {
        self.space.root()
    }

    /// Tells `observer` which chunks of this model each tier has, now and from now on.
    pub(crate) fn observe(&self, observer: Arc<dyn ChunkObserver>) {
        self.store.observe(&self.space, observer);
    }

    /// Calls `visit` with each chunk of this model and the tiers that have it.
    pub(crate) fn visit_chunks(&self, visit: impl FnMut(BlockHash, &[TierKind])) {
        self.store.visit_chunks(&self.space, visit);
    }

    /// Takes the KV of ended sequences.
    ///
    /// # Errors
    /// If the operating system gives no thread.
    pub(crate) fn sink(&self) -> Result<Box<dyn KvSink>> {
        let target = Target {
            store: self.store.clone(),
            space: self.space.clone(),
            panic_guard: self.panic_guard.clone(),
        };
        Ok(Box::new(StoreSink::start(target, Arc::clone(&self.sink_counts))?))
    }

    /// Sequences whose KV the sink did not take.
    pub(crate) fn sink_counts(&self) -> &SinkCounts {
        &self.sink_counts
    }

    /// The chunks that a prompt may be loaded from.
    pub(crate) fn loadable(&self, prompt: &[TokenId], salt: Option<&CacheSalt>) -> Chain {
        // The last token is computed in any case, because its logits are needed.
        self.chain(&prompt[..prompt.len().saturating_sub(1)], salt)
    }

    /// Begins to load the KV of a prompt behind its first `n_matched` tokens, which the engine has.
    pub(crate) fn load(&self, chain: &Chain, n_matched: usize) -> Loading {
        self.panic_guard.run(|| self.begin_load(chain, n_matched)).unwrap_or(Loading::Nothing)
    }

    fn begin_load(&self, chain: &Chain, n_matched: usize) -> Loading {
        let first_chunk = n_matched / self.chunk_tokens();
        if chain.n_tokens() <= n_matched || chain.n_chunks() <= first_chunk {
            return Loading::Nothing;
        }
        match &self.layer_loader {
            Some(loader) => loader.load(chain, first_chunk, self.load_timeout),
            None => load::begin(&self.store, chain, first_chunk, self.load_timeout),
        }
    }

    /// Writes down what waits for that, as far as its time allows, and ends the store's threads.
    pub(crate) fn close(&self) {
        self.store.close();
    }
}

impl PanicGuard {
    /// What `ask` gives; `None` if it panics, or if anything did before.
    fn run<T>(&self, ask: impl FnOnce() -> T) -> Option<T> {
        // Relaxed: a thread that does not see it yet finds out for itself.
        if self.0.load(Ordering::Relaxed) {
            return None;
        }
        // What a panic leaves behind in the store is not looked at again on this thread.
        let outcome = catch_unwind(AssertUnwindSafe(ask)).ok();
        if outcome.is_none() {
            self.0.store(true, Ordering::Relaxed);
            tracing::error!("the KV store panicked; the worker goes on without it");
        }
        outcome
    }
}

/// A store that refuses what the worker asks of it was configured wrongly.
fn refused(error: impl std::fmt::Display) -> WorkerError {
    WorkerError::Store { reason: error.to_string() }
}
