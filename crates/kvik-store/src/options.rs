//! Settings of a store.

use std::sync::Arc;
use std::time::Duration;

use kvik_tier::CodedSpaces;
use kvik_types::{BlockSize, Namespace};

use crate::digest::DigestKey;
use crate::error::{Result, StoreError};
use crate::policy::PolicyKind;

/// Tokens of a chunk where nothing else is set.
const DEFAULT_CHUNK_TOKENS: usize = 256;

/// Settings of a [`Store`](crate::Store). [`Default`] gives the values that are named at each field.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Tokens of a full chunk. Default: 256.
    pub chunk_tokens: BlockSize,
    /// Whether a last chunk with fewer tokens is kept too. It is found again only by a sequence of exactly
    /// its length. Default: false.
    pub stores_tails: bool,
    /// What leaves when a local tier is full. Default: [`PolicyKind::Kvik`].
    pub policy: PolicyKind,
    /// Whether chunks that another node has too leave a full local tier before others that are hardly worth more.
    /// Default: true.
    pub spares_last_copy: bool,
    /// Part of the memory that a thread keeps free, so that stores need not evict. Default: 0.02.
    pub ram_free_share: f64,
    /// When chunks go to the lower tiers. Default: [`WriteBack::OnStore`].
    pub write_back: WriteBack,
    /// Bytes that may wait to be written to one lower tier; what is over is not written down. They stay in
    /// memory meanwhile. Default: a quarter of the memory.
    pub write_queue_bytes: Option<u64>,
    /// Bytes that may be asked of one lower tier and not have arrived; what is over shortens the hit.
    /// Default: half of the memory.
    pub load_in_flight_bytes: Option<u64>,
    /// Bytes that are handed to a lower tier in one call, at least one chunk; what a retrieve wants is shared
    /// among the threads in such pieces. Default: 8 MiB.
    pub batch_bytes: u64,
    /// Layers that are read before they are asked for. Default: 2.
    pub read_ahead_layers: usize,
    /// How long a retrieve waits for lower tiers. Default: 5 s.
    pub retrieve_timeout: Duration,
    /// How long a lookup waits for remote tiers; what was found by then counts. Default: 100 ms.
    pub lookup_timeout: Duration,
    /// How long closing waits for chunks that are still to be written down. Default: 5 s.
    pub close_timeout: Duration,
    /// Threads that read from one lower tier; one more writes. Default: 2.
    pub n_read_threads: usize,
    /// How fast the engine computes KV, in tokens a second: what a hit is worth. Default: 10000.
    pub prefill_tokens_per_s: f64,
    /// What keys the digests that prove a chunk's tokens. Stores with different keys do not read each other's
    /// chunks. Default: none, digests that need no secret.
    pub digest_key: Option<DigestKey>,
    /// What coded tiers learn the layouts of chunks from; the store tells it of every space. Default: none.
    pub coded_spaces: Option<Arc<CodedSpaces>>,
    /// The lossy codecs that tiers of the store may use, by their names. They are part of every namespace: what
    /// such a store has, no store without them has or finds. Default: none.
    pub lossy_codecs: Vec<String>,
}

/// When chunks go to the lower tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WriteBack {
    /// When they are stored.
    #[default]
    OnStore,
    /// When they are retrieved from memory for the first time: what is never used again is never written.
    OnReuse,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            chunk_tokens: default_chunk_tokens(),
            stores_tails: false,
            policy: PolicyKind::Kvik,
            spares_last_copy: true,
            ram_free_share: 0.02,
            write_back: WriteBack::OnStore,
            write_queue_bytes: None,
            load_in_flight_bytes: None,
            batch_bytes: 8 << 20,
            read_ahead_layers: 2,
            retrieve_timeout: Duration::from_secs(5),
            lookup_timeout: Duration::from_millis(100),
            close_timeout: Duration::from_secs(5),
            n_read_threads: 2,
            prefill_tokens_per_s: 10_000.0,
            digest_key: None,
            coded_spaces: None,
            lossy_codecs: Vec::new(),
        }
    }
}

impl StoreOptions {
    /// Time to compute a token at the start of a sequence.
    pub(crate) fn token_us(&self) -> f64 {
        1e6 / self.prefill_tokens_per_s
    }

    /// The namespace that stands for `namespace` in this store: another one where its chunks may be approximate.
    pub(crate) fn namespace_of(&self, namespace: &Namespace) -> Namespace {
        let suffixes = self.lossy_codecs.iter().flat_map(|name| ["+", name]);
        let layout = std::iter::once(namespace.layout.as_str()).chain(suffixes).collect();
        Namespace { layout, ..namespace.clone() }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        if !(0.0..=0.5).contains(&self.ram_free_share) {
            return Err(StoreError::invalid("ram_free_share", &self.ram_free_share, "0 to 0.5"));
        }
        if !(1..=64).contains(&self.n_read_threads) {
            return Err(StoreError::invalid("n_read_threads", &self.n_read_threads, "1 to 64"));
        }
        if !(self.prefill_tokens_per_s.is_finite() && self.prefill_tokens_per_s > 0.0) {
            let given = self.prefill_tokens_per_s;
            return Err(StoreError::invalid("prefill_tokens_per_s", &given, "more than 0"));
        }
        Ok(())
    }
}

fn default_chunk_tokens() -> BlockSize {
    match BlockSize::try_new(DEFAULT_CHUNK_TOKENS) {
        Ok(chunk_tokens) => chunk_tokens,
        Err(_) => unreachable!("the default is not zero"),
    }
}
