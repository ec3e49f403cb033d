//! What people and tools may do with the store: the operations behind the admin API.
//!
//! [`StoreAdmin`] is the API's side. Below it is [`StoreOperations`], what a store must be able to do for it: `local` does it in
//! this process, `daemon` asks a daemon for it. All operations may wait for disks, servers and other processes; callers
//! bring a thread that may block.

mod compress;
mod daemon;
mod explain;
mod export;
mod local;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use kvik_proto::cache::{
    CacheHealth, CacheStats, ClearResponse, CompressRequest, CompressStatus, ExplainResponse, LookupResponse,
    MoveResponse, PinResponse, PrefetchState, PrefetchStatus, StoreResponse, TierReport,
};
use kvik_store::{Chain, Lookup, Retrieved, Space, Store, TierName};
use kvik_tier::TierKind;
use kvik_types::BlockHash;
use parking_lot::Mutex;

use crate::error::Refusal;
use crate::prompt::Prompt;
use crate::store::{SinkCounts, WorkerStore};

use compress::Compression;
use daemon::DaemonOperations;
pub(crate) use daemon::no_session;

/// Prefetches that are remembered; the oldest are forgotten, and with that cancelled.
const MAX_PREFETCHES: usize = 1024;

/// What a store does for its administrators. Each operation refuses only where the store cannot be asked.
pub(crate) trait StoreOperations: fmt::Debug + Send + Sync {
    /// Where chains are made.
    fn space(&self) -> Result<Space, Refusal>;

    /// How much of a chain is there.
    fn lookup(&self, chain: &Chain) -> Result<Lookup, Refusal>;

    /// The same without remote tiers.
    fn lookup_local(&self, chain: &Chain) -> Result<Lookup, Refusal>;

    /// Whether a prompt's KV would be loaded or computed now.
    fn explain(&self, prompt: &Prompt) -> Result<ExplainResponse, Refusal> {
        let _ = prompt;
        Err(Refusal::conflict("the store of a daemon is not planned: all its chunks are loaded", None))
    }

    /// Begins to load a chain into memory, from one tier alone where one is named. Dropping the prefetch may cancel it.
    fn prefetch(&self, chain: &Chain, tier: Option<&TierName>) -> Result<Box<dyn BegunPrefetch>, Refusal>;

    /// Keeps a chain in memory; returns the tokens that are kept.
    fn pin(&self, chain: &Chain) -> Result<usize, Refusal>;

    /// Takes one pin away; false where there is none.
    fn unpin(&self, chain: &Chain) -> Result<bool, Refusal>;

    /// Copies or moves a chain; returns the chunks that are in the new tier.
    fn relocate(
        &self,
        chain: &Chain,
        from: &TierName,
        to: &TierName,
        keeps_source: bool,
    ) -> Result<usize, Refusal>;

    /// Forgets a chain, or all of the model; returns how many chunks left each tier.
    fn clear(
        &self,
        chain: Option<&Chain>,
        tiers: Option<Vec<TierName>>,
    ) -> Result<Vec<(TierName, usize)>, Refusal>;

    /// The bytes of a chain's chunks, from the first on, as far as they are there, or as far as one tier has them.
    fn read(&self, chain: &Chain, tier: Option<&TierName>) -> Result<ReadChunks, Refusal>;

    /// Stores the chunks of a chain, in one tier alone where one is named; `sections` has the layers of each.
    fn write(
        &self,
        chain: &Chain,
        sections: &[Vec<&[u8]>],
        tier: Option<&TierName>,
    ) -> Result<StoreResponse, Refusal>;

    /// The state of each tier, memory first.
    fn tiers(&self) -> Result<Vec<TierReport>, Refusal>;

    /// What the store counted.
    fn stats(&self) -> Result<CacheStats, Refusal>;

    /// Whether the counts are those of this process, and are there without a wait.
    fn is_in_process(&self) -> bool;

    /// Sequences whose KV the worker did not hand to the store.
    fn sink_counts(&self) -> &SinkCounts;

    /// The store, if it is in this process.
    fn local(&self) -> Option<&Store> {
        None
    }

    /// What the planner has decided, by name.
    fn plan_counts(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Calls `visit` with each chunk of the model and the tiers that have it.
    fn visit_chunks(&self, visit: &mut dyn FnMut(BlockHash, &[TierKind])) -> Result<(), Refusal>;

    /// Ends what only the administration has.
    fn close(&self) {}
}

/// A prefetch that was begun.
pub(crate) trait BegunPrefetch: fmt::Debug + Send {
    /// Where it stands, given whether it was cancelled.
    fn state(&self, is_cancelled: bool) -> Result<PrefetchState, Refusal>;

    /// Gives it up; says whether it still loaded.
    fn cancel(&self) -> Result<bool, Refusal>;
}

/// Chunks that were read.
#[derive(Debug)]
pub(crate) enum ReadChunks {
    /// They lie in the store's memory.
    Leased(Retrieved),
    /// They were copied.
    Copied(Vec<Vec<u8>>),
}

/// The store as its administrators see it.
#[derive(Debug)]
pub(crate) struct StoreAdmin {
    store: Box<dyn StoreOperations>,
    prefetches: Mutex<Prefetches>,
    /// The last run over cold chunks.
    compression: Mutex<Option<Compression>>,
}

#[derive(Debug, Default)]
struct Prefetches {
    n_begun: u64,
    /// In the order in which they were begun.
    remembered: VecDeque<RememberedPrefetch>,
}

#[derive(Debug)]
struct RememberedPrefetch {
    id: u64,
    n_prompt_tokens: usize,
    chain: Chain,
    prefetch: Box<dyn BegunPrefetch>,
    is_cancelled: bool,
}

impl StoreAdmin {
    /// The administration of a worker's store.
    pub(crate) fn new(store: &WorkerStore) -> Self {
        let store: Box<dyn StoreOperations> = match store {
            WorkerStore::Local(store) => Box::new(store.clone()),
            WorkerStore::Daemon(store) => Box::new(DaemonOperations::new(store)),
        };
        Self { store, prefetches: Mutex::default(), compression: Mutex::default() }
    }

    /// Gives up all prefetches.
    pub(crate) fn close(&self) {
        self.compression.lock().take();
        self.store.close();
        self.prefetches.lock().remembered.clear();
    }

    /// Calls `visit` with each chunk of the model and the tiers that have it.
    ///
    /// # Errors
    /// If the store cannot be asked, as all operations.
    pub(crate) fn visit_chunks(&self, mut visit: impl FnMut(BlockHash, &[TierKind])) -> Result<(), Refusal> {
        self.store.visit_chunks(&mut visit)
    }

    fn chain(&self, prompt: &Prompt) -> Result<Chain, Refusal> {
        Ok(self.store.space()?.salted_chain(&prompt.tokens, prompt.salt.as_ref()))
    }

    pub(crate) fn lookup(&self, prompt: &Prompt) -> Result<LookupResponse, Refusal> {
        let chain = self.chain(prompt)?;
        let found = self.store.lookup(&chain)?;
        Ok(LookupResponse {
            prompt_tokens: prompt.tokens.len(),
            cached_tokens: found.n_tokens,
            tiers: by_name(found.tokens_by_tier),
            chunk_tokens: chain.space().chunk_tokens(),
        })
    }

    pub(crate) fn explain(&self, prompt: &Prompt) -> Result<ExplainResponse, Refusal> {
        self.store.explain(prompt)
    }

    /// Begins to load a prompt's KV into memory, from one tier alone where one is named.
    ///
    /// # Errors
    /// If there is no such tier.
    pub(crate) fn prefetch(&self, prompt: &Prompt, tier: Option<&str>) -> Result<PrefetchStatus, Refusal> {
        let tier = self.optional_tier(tier)?;
        let chain = self.chain(prompt)?;
        let prefetch = self.store.prefetch(&chain, tier.as_ref())?;
        let mut prefetches = self.prefetches.lock();
        let id = prefetches.n_begun;
        prefetches.n_begun += 1;
        if prefetches.remembered.len() == MAX_PREFETCHES {
            prefetches.remembered.pop_front();
        }
        let n_prompt_tokens = prompt.tokens.len();
        let remembered = RememberedPrefetch { id, n_prompt_tokens, chain, prefetch, is_cancelled: false };
        let status = self.status(&remembered)?;
        prefetches.remembered.push_back(remembered);
        Ok(status)
    }

    pub(crate) fn prefetch_status(&self, id: &str) -> Result<PrefetchStatus, Refusal> {
        let mut prefetches = self.prefetches.lock();
        self.status(prefetches.find(id)?)
    }

    pub(crate) fn cancel_prefetch(&self, id: &str) -> Result<PrefetchStatus, Refusal> {
        let mut prefetches = self.prefetches.lock();
        let remembered = prefetches.find(id)?;
        remembered.is_cancelled |= remembered.prefetch.cancel()?;
        self.status(remembered)
    }

    /// Where a prefetch stands.
    fn status(&self, remembered: &RememberedPrefetch) -> Result<PrefetchStatus, Refusal> {
        let state = remembered.prefetch.state(remembered.is_cancelled)?;
        let found = self.store.lookup_local(&remembered.chain)?;
        Ok(PrefetchStatus {
            id: remembered.id.to_string(),
            state,
            prompt_tokens: remembered.n_prompt_tokens,
            loaded_tokens: found.tokens_in(TierKind::Ram),
        })
    }

    pub(crate) fn pin(&self, prompt: &Prompt) -> Result<PinResponse, Refusal> {
        Ok(PinResponse { tokens: self.store.pin(&self.chain(prompt)?)? })
    }

    /// Takes one pin away.
    ///
    /// # Errors
    /// If the prompt has none.
    pub(crate) fn unpin(&self, prompt: &Prompt) -> Result<PinResponse, Refusal> {
        let chain = self.chain(prompt)?;
        if self.store.unpin(&chain)? {
            return Ok(PinResponse { tokens: chain.n_tokens() });
        }
        Err(Refusal::conflict("nothing of this prompt is pinned", Some("prompt")))
    }

    /// Copies or moves a prompt's KV.
    ///
    /// # Errors
    /// If a tier does not exist or is not configured.
    pub(crate) fn relocate(
        &self,
        prompt: &Prompt,
        from: &str,
        to: &str,
        keeps_source: bool,
    ) -> Result<MoveResponse, Refusal> {
        let (from_tier, to_tier) = (self.tier("from", from)?, self.tier("to", to)?);
        if from_tier == to_tier {
            return Err(Refusal::field("to", to, "another tier than `from`"));
        }
        let chain = self.chain(prompt)?;
        Ok(MoveResponse { chunks: self.store.relocate(&chain, &from_tier, &to_tier, keeps_source)? })
    }

    /// Forgets the KV of a prompt, or all of the model's.
    ///
    /// # Errors
    /// If a tier does not exist or is not configured.
    pub(crate) fn clear(
        &self,
        prompt: Option<&Prompt>,
        tiers: Option<&[String]>,
    ) -> Result<ClearResponse, Refusal> {
        let tiers = match tiers {
            None => None,
            Some(names) => {
                Some(names.iter().map(|name| self.tier("tiers", name)).collect::<Result<Vec<_>, _>>()?)
            }
        };
        let chain = prompt.map(|prompt| self.chain(prompt)).transpose()?;
        Ok(ClearResponse { chunks: by_name(self.store.clear(chain.as_ref(), tiers)?) })
    }

    /// Begins to code the cold chunks of a tier by another codec.
    ///
    /// # Errors
    /// If that is under way already, the store is a daemon's, or tier or codec cannot be used.
    pub(crate) fn compress(&self, request: &CompressRequest) -> Result<CompressStatus, Refusal> {
        let Some(store) = self.store.local() else {
            return Err(Refusal::conflict("the chunks of a daemon are not coded again from here", None));
        };
        let tier = self.tier("tier", request.tier.as_deref().unwrap_or(TierKind::Nvme.name()))?;
        let mut compression = self.compression.lock();
        if compression.as_ref().is_some_and(Compression::is_running) {
            return Err(Refusal::conflict("chunks are being coded again already", None));
        }
        let begun = Compression::start(store, tier, request)?;
        let status = begun.status();
        *compression = Some(begun);
        Ok(status)
    }

    /// How far the last run has come.
    pub(crate) fn compress_status(&self) -> CompressStatus {
        let idle = || CompressStatus { state: "idle".to_owned(), ..CompressStatus::default() };
        self.compression.lock().as_ref().map_or_else(idle, Compression::status)
    }

    /// Ends the run after the chunk that is being coded.
    pub(crate) fn cancel_compress(&self) -> CompressStatus {
        if let Some(compression) = &*self.compression.lock() {
            compression.cancel();
        }
        self.compress_status()
    }

    /// A prompt's KV as safetensors, of one layer or of all, and from one tier or from all.
    ///
    /// # Errors
    /// If there is no such layer or tier.
    pub(crate) fn retrieve(
        &self,
        prompt: &Prompt,
        layer: Option<usize>,
        tier: Option<&str>,
    ) -> Result<Vec<u8>, Refusal> {
        export::write(&*self.store, prompt, layer, self.optional_tier(tier)?.as_ref())
    }

    /// Stores what [`Self::retrieve`] gave here or elsewhere, of all layers; in one tier alone where one is named.
    ///
    /// # Errors
    /// If it is not that, or belongs to another model, type or layout, or if there is no such tier.
    pub(crate) fn store(&self, body: &[u8], tier: Option<&str>) -> Result<StoreResponse, Refusal> {
        export::read(&*self.store, body, self.optional_tier(tier)?.as_ref())
    }

    pub(crate) fn health(&self) -> Result<CacheHealth, Refusal> {
        let tiers = self.store.tiers()?;
        let is_up = tiers.iter().all(|tier| tier.state == "up");
        Ok(CacheHealth { status: if is_up { "ok" } else { "degraded" }.to_owned(), tiers })
    }

    pub(crate) fn stats(&self) -> Result<CacheStats, Refusal> {
        let mut stats = self.store.stats()?;
        let sink_counts = self.store.sink_counts();
        let own_counts = [
            ("copy_queue_bytes", sink_counts.lent_bytes() as u64),
            ("refused_sequences", sink_counts.n_refused()),
            ("given_up_sequences", sink_counts.n_given_up()),
        ];
        let plan_counts = self.store.plan_counts();
        let own_counts = own_counts.into_iter().chain(plan_counts);
        stats.counts.extend(own_counts.map(|(name, count)| (name.to_owned(), count)));
        Ok(stats)
    }

    /// The same where they are there without a wait. A daemon publishes its own.
    pub(crate) fn stats_in_process(&self) -> Option<CacheStats> {
        if self.store.is_in_process() { self.stats().ok() } else { None }
    }

    /// The tier of that name.
    fn tier(&self, field: &str, name: &str) -> Result<TierName, Refusal> {
        let configured = self.store.tiers()?;
        let known = TierName::try_new(name).ok();
        known.filter(|known| configured.iter().any(|report| report.tier == known.as_str())).ok_or_else(|| {
            let names: Vec<&str> = configured.iter().map(|report| report.tier.as_str()).collect();
            Refusal::field(field, name, &names.join(", "))
        })
    }

    fn optional_tier(&self, name: Option<&str>) -> Result<Option<TierName>, Refusal> {
        name.map(|name| self.tier("tier", name)).transpose()
    }
}

impl ReadChunks {
    pub(crate) fn n_chunks(&self) -> usize {
        match self {
            Self::Leased(retrieved) => retrieved.chunks().len(),
            Self::Copied(payloads) => payloads.len(),
        }
    }

    /// What the only rank has of a chunk: all its layers, one behind the other.
    fn payload(&self, chunk_idx: usize) -> &[u8] {
        match self {
            Self::Leased(retrieved) => retrieved.chunks()[chunk_idx].payload(0),
            Self::Copied(payloads) => &payloads[chunk_idx],
        }
    }
}

impl Prefetches {
    fn find(&mut self, id: &str) -> Result<&mut RememberedPrefetch, Refusal> {
        let known = self.remembered.iter_mut().find(|remembered| remembered.id.to_string() == id);
        known.ok_or_else(|| Refusal::not_found(format!("no prefetch is called {id}"), Some("id")))
    }
}

fn by_name(counts: Vec<(TierName, usize)>) -> BTreeMap<String, usize> {
    counts
        .into_iter()
        .filter(|(_, count)| 0 < *count)
        .map(|(tier, count)| (tier.to_string(), count))
        .collect()
}
