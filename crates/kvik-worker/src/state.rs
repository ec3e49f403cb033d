//! What the parts of a worker share.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use kvik_model::DeviceMonitor;
use kvik_node::KvLog;
use kvik_tokens::{AddSpecial, ChatMessage, ChatOptions, Tokenizer};
use kvik_types::Dtype;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::admission::Admission;
use crate::config::WorkerConfig;
use crate::engine_thread::EngineHandle;
use crate::error::Refusal;
use crate::metrics::WorkerMetrics;
use crate::moves::{Arrivals, PeerClient};
use crate::plan::BlendDefaults;
use crate::running::RunningRequests;
use crate::sequences::Sequences;
use crate::staging::Staging;
use crate::store::{ChunkWatch, KvStore};
use crate::store_admin::StoreAdmin;

/// Longest text, in bytes, that is tokenized on the thread that serves sockets: about a
/// millisecond of work.
const SHORT_TEXT_BYTES: usize = 16 << 10;

/// A worker.
#[derive(Debug)]
pub(crate) struct WorkerState {
    pub(crate) config: WorkerConfig,
    pub(crate) id: String,
    /// Unix time of the start, in seconds.
    pub(crate) started: u64,
    pub(crate) admission: Admission,
    /// Where other workers and gateways reach it.
    pub(crate) base: String,
    /// Calls other workers.
    pub(crate) peers: PeerClient,
    /// Cancelled when the worker takes nothing new.
    pub(crate) draining: CancellationToken,
    /// Cancelled when it has drained.
    pub(crate) drained: CancellationToken,
    /// Seconds until what still runs is ended.
    pub(crate) drain_grace: AtomicU64,
    loaded: OnceLock<Arc<Loaded>>,
    /// Makes ids of answers unique beyond this process.
    nonce: u64,
    n_ids: AtomicU64,
}

/// What exists once the model is loaded.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) engine: EngineHandle,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) metrics: WorkerMetrics,
    pub(crate) sequences: Sequences,
    pub(crate) running: Arc<RunningRequests>,
    /// Sequences on their way here.
    pub(crate) arrivals: Arrivals,
    /// The root of the engine's hashes, in hexadecimal digits: KV of another root never mixes with its own.
    pub(crate) root: String,
    /// Tokens whose KV the engine has room for.
    pub(crate) capacity_tokens: u64,
    /// Names the bytes of a block.
    pub(crate) layout: String,
    /// Bytes of one block in one layer.
    pub(crate) block_layer_bytes: usize,
    pub(crate) staging: Staging,
    /// The store below the engine, if there is one.
    pub(crate) store: Option<Arc<dyn KvStore>>,
    /// Tells the log which chunks the store has.
    pub(crate) chunk_watch: Mutex<Option<ChunkWatch>>,
    /// Its administration.
    pub(crate) store_admin: Option<StoreAdmin>,
    /// Tells what the device is doing, if that is a GPU and its driver knows.
    pub(crate) device: Option<Arc<DeviceMonitor>>,
    /// What is held, as it changes.
    pub(crate) kv_log: Arc<KvLog>,
    /// The name that clients ask for.
    pub(crate) model_name: String,
    /// Longest sequence, prompt and output together.
    pub(crate) max_tokens: usize,
    pub(crate) fingerprint: String,
    pub(crate) shape: KvShape,
    /// How prompts are put together where their requests do not say.
    pub(crate) blend: BlendDefaults,
}

/// The form of the model's KV.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KvShape {
    pub(crate) n_layers: usize,
    pub(crate) n_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) dtype: Dtype,
    pub(crate) vocab_size: usize,
}

impl WorkerState {
    pub(crate) fn new(config: WorkerConfig, id: String, base: String, peers: PeerClient) -> Self {
        let n_places = config.max_sequences + config.max_waiting;
        Self {
            id,
            base,
            peers,
            started: crate::clock::unix_seconds(),
            admission: Admission::new(n_places),
            draining: CancellationToken::new(),
            drained: CancellationToken::new(),
            drain_grace: AtomicU64::new(config.drain_grace_s),
            loaded: OnceLock::new(),
            nonce: random_seed(),
            n_ids: AtomicU64::new(0),
            config,
        }
    }

    /// Makes the worker ready.
    pub(crate) fn set_loaded(&self, loaded: Loaded) -> Arc<Loaded> {
        Arc::clone(self.loaded.get_or_init(|| Arc::new(loaded)))
    }

    /// The model and engine, whether or not something new is taken.
    pub(crate) fn loaded(&self) -> Result<&Arc<Loaded>, Refusal> {
        let loaded = self
            .loaded
            .get()
            .ok_or_else(|| Refusal::unavailable("the model is being loaded; try again later", 1))?;
        if loaded.engine.is_alive() { Ok(loaded) } else { Err(Refusal::engine_gone()) }
    }

    /// What exists once the model is loaded, also after the engine's end; `None` before.
    pub(crate) fn loaded_at_end(&self) -> Option<&Arc<Loaded>> {
        self.loaded.get()
    }

    /// The model and engine, for something new.
    pub(crate) fn ready(&self) -> Result<&Arc<Loaded>, Refusal> {
        if self.draining.is_cancelled() {
            return Err(Refusal::unavailable("the worker drains and takes nothing new; ask another one", 1));
        }
        self.loaded()
    }

    /// A new id that starts with `prefix`.
    pub(crate) fn new_id(&self, prefix: &str) -> String {
        // Relaxed: an opaque id needs uniqueness only.
        let n = self.n_ids.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}{:016x}{n:08x}", self.nonce)
    }
}

impl Loaded {
    /// The tokens of a text.
    pub(crate) async fn encode(
        self: &Arc<Self>,
        text: String,
        add_special: AddSpecial,
    ) -> Result<Vec<u32>, Refusal> {
        if text.len() <= SHORT_TEXT_BYTES {
            return Ok(self.tokenizer.encode(&text, add_special)?);
        }
        let tokenizer = Arc::clone(&self.tokenizer);
        let encoding = tokio::task::spawn_blocking(move || tokenizer.encode(&text, add_special));
        let tokens = encoding.await.map_err(|_| Refusal::failed("the text could not be tokenized"))?;
        Ok(tokens?)
    }

    /// The tokens of a conversation.
    pub(crate) async fn encode_chat(
        self: &Arc<Self>,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>, Refusal> {
        let text = self.render_chat(messages, add_generation_prompt)?;
        self.encode(text, AddSpecial::No).await
    }

    /// The text of a conversation.
    pub(crate) fn render_chat(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
    ) -> Result<String, Refusal> {
        if messages.is_empty() {
            return Err(Refusal::field("messages", "empty", "at least one message"));
        }
        let options = ChatOptions { add_generation_prompt, ..ChatOptions::default() };
        Ok(self.tokenizer.render_chat(messages, &options)?)
    }

    /// The text of one token, special ones as the vocabulary writes them.
    pub(crate) fn token_text(&self, token: u32) -> String {
        self.tokenizer.decode(&[token], false).unwrap_or_default()
    }

    /// Checks that the model asked for is the one here.
    pub(crate) fn check_model(&self, model: Option<&str>) -> Result<(), Refusal> {
        match model {
            Some(model) if model != self.model_name => Err(Refusal::unknown_model(model)),
            _ => Ok(()),
        }
    }

    /// Checks the length and the tokens of a prompt that the request calls `field`.
    pub(crate) fn check_prompt(&self, field: &str, tokens: &[u32]) -> Result<(), Refusal> {
        if tokens.is_empty() {
            return Err(Refusal::field(field, "empty", "at least one token"));
        }
        if self.max_tokens <= tokens.len() {
            return Err(Refusal::context_length(field, tokens.len(), self.max_tokens));
        }
        self.check_vocabulary(field, tokens)
    }

    pub(crate) fn check_vocabulary(&self, field: &str, tokens: &[u32]) -> Result<(), Refusal> {
        let vocab_size = self.shape.vocab_size;
        match tokens.iter().find(|&&token| vocab_size <= token as usize) {
            Some(token) => Err(Refusal::field(field, token, &format!("token ids below {vocab_size}"))),
            None => Ok(()),
        }
    }
}

/// A seed from the system's randomness.
pub(crate) fn random_seed() -> u64 {
    RandomState::new().hash_one(0_u8)
}
