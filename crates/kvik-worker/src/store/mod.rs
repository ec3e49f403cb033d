//! The store below the engine: KV of ended sequences goes down, and comes back for later prompts.
//!
//! Parts: [`KvStore`] is what the engine's thread asks for, `local` a store in this process (`local_layers` reads it layer by layer), `daemon` that of a daemon on
//! this machine, whose bytes `daemon_chunks` copies if `daemon_planner` wants them; `segments` are parts of prompts in either of them; `transfer` takes KV out of the engine, `load` is a prompt's KV on its way, `planner` decides what of it is loaded,
//! `arriving` is what comes chunk by chunk while the engine computes, `layered` what comes layer by layer, `direct` what the device reads from files and `direct_write` what it writes to them, and `loader` reads where reading blocks, in `load_threads`.
//!
//! **Invariant:** nothing here can fail a request. What the store does not have, or does not give in time,
//! is computed; a store that panics is not asked again.

mod arriving;
mod daemon;
mod daemon_chunks;
mod daemon_planner;
mod direct;
mod direct_write;
mod job;
mod layered;
mod load;
mod load_threads;
mod loader;
mod local;
mod local_layers;
mod planner;
mod segments;
mod transfer;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvik_model::{BLOCK_TOKENS, Engine, KvSink};
use kvik_node::NodeWatch;
use kvik_store::{Chain, ChunkFormat, ChunkObserver, Observation, Space};
use kvik_types::{BlockSize, CacheSalt, TokenId};

use crate::config::StoreConfig;
use crate::error::{Result, WorkerError};

pub(crate) use daemon::DaemonStore;
pub(crate) use load::{ChunkTiers, Load, Loading, PromptKv};
pub(crate) use local::LocalStore;
pub(crate) use planner::{LoadRequest, Planned, Planner};
pub(crate) use segments::{SegmentLoad, SegmentLoading, SegmentStore};
pub(crate) use transfer::SinkCounts;

/// A store as the engine's thread uses it. No method but [`Self::close`] waits for disks, servers or other processes.
pub(crate) trait KvStore: fmt::Debug + Send + Sync {
    /// The chunks that a prompt may be loaded from; `None` while there is no store.
    fn loadable(&self, prompt: &[TokenId], salt: Option<&CacheSalt>) -> Option<Chain>;

    /// Begins to load the KV of a prompt behind the tokens that the engine has.
    fn load(&self, request: &LoadRequest) -> Loading;

    /// Tells what a pass of the engine took: `n_tokens` that looked at `n_attended` together.
    fn note_pass(&self, n_tokens: usize, n_attended: u64, seconds: f64) {
        let _ = (n_tokens, n_attended, seconds);
    }

    /// Takes the KV of ended sequences.
    ///
    /// # Errors
    /// If the operating system gives no thread.
    fn sink(&self) -> Result<Box<dyn KvSink>>;

    /// Where segments are kept.
    fn segments(&self) -> &SegmentStore;

    /// Where other nodes read the chunks of the store, `host:port`; `None` where they do not.
    fn peer_address(&self) -> Option<String> {
        None
    }

    /// Writes down what waits for that, as far as its time allows, and ends the store's threads.
    fn close(&self);
}

/// A worker's store.
#[derive(Debug, Clone)]
pub(crate) enum WorkerStore {
    /// In this process.
    Local(LocalStore),
    /// In a daemon.
    Daemon(Arc<DaemonStore>),
}

/// Keeps an observer informed of the chunks of a store.
#[derive(Debug)]
#[expect(dead_code, reason = "it is held, not read")]
pub(crate) enum ChunkWatch {
    Local(Observation),
    Daemon(NodeWatch),
}

/// Keeps the engine's thread alive if the store panics: from then on it has none.
#[derive(Debug, Clone, Default)]
struct PanicGuard(Arc<AtomicBool>);

impl WorkerStore {
    /// Opens the store of `config` for the KV of `engine`; `None` where there is to be none.
    ///
    /// A daemon that does not answer yet is no error: the worker goes on without it, and attaches when it comes.
    ///
    /// # Errors
    /// If the configuration is wrong or a local tier cannot be used.
    pub(crate) fn open(config: &StoreConfig, engine: &Engine) -> Result<Option<Self>> {
        let format = ChunkFormat {
            n_layers: engine.config().n_layers as u32,
            token_layer_bytes: (engine.block_layer_bytes() / BLOCK_TOKENS) as u64,
            n_ranks: 1,
            block_tokens: BlockSize::try_new(BLOCK_TOKENS).map_err(refused)?,
        };
        let priming = engine.segment_priming();
        if let Some(plan) = config.daemon()? {
            let store = DaemonStore::start(plan, engine.namespace(), format, priming)?;
            return Ok(Some(Self::Daemon(Arc::new(store))));
        }
        Ok(LocalStore::open(config, engine.namespace(), format, priming, engine.max_file_section_bytes())?
            .map(Self::Local))
    }

    /// Where chains are made; `None` where the daemon did not come in time.
    pub(crate) fn space(&self) -> Option<Space> {
        match self {
            Self::Local(store) => Some(store.space().clone()),
            Self::Daemon(store) => store.wait_for_space(),
        }
    }

    /// Tells `observer` which chunks of the model each tier has, now and from now on, until the watch is dropped. A daemon
    /// whose space is not known yet is waited for in the background: `on_space` is called with it, before the observer is.
    ///
    /// # Errors
    /// If the operating system gives no thread.
    pub(crate) fn watch(
        &self,
        space: Option<&Space>,
        on_space: impl FnOnce(&Space) + Send + 'static,
        observer: Arc<dyn ChunkObserver>,
    ) -> Result<ChunkWatch> {
        Ok(match self {
            Self::Local(store) => ChunkWatch::Local(store.observe(observer)),
            Self::Daemon(store) => ChunkWatch::Daemon(match space {
                Some(space) => store.watch(space.clone(), observer)?,
                None => store.watch_first(on_space, observer)?,
            }),
        })
    }

    /// What decides by the engine's speed whether chunks of slow tiers are loaded; `None` where that is not decided.
    pub(crate) fn planner(&self) -> Option<&Planner> {
        match self {
            Self::Local(store) => Some(store.planner()).filter(|_| store.plans_loads()),
            Self::Daemon(store) => store.planner(),
        }
    }

    /// The store as the engine uses it.
    pub(crate) fn for_engine(&self) -> Arc<dyn KvStore> {
        match self {
            Self::Local(store) => Arc::new(store.clone()),
            Self::Daemon(store) => Arc::clone(store) as _,
        }
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

/// The tokens of a prompt that may be loaded: the last one is computed in any case, because its logits are needed.
fn loadable_tokens(prompt: &[TokenId]) -> &[TokenId] {
    &prompt[..prompt.len().saturating_sub(1)]
}

/// A store that refuses what the worker asks of it was configured wrongly.
fn refused(error: impl fmt::Display) -> WorkerError {
    WorkerError::Store { reason: error.to_string() }
}
