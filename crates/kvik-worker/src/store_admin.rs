//! What people and tools may do with the store: the operations behind the admin API.
//!
//! All of them may wait for disks and servers; callers bring a thread that may block.

mod export;

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use kvik_node::{cache_stats, tier_reports};
use kvik_proto::cache::{
    CacheHealth, CacheStats, ClearResponse, LookupResponse, MoveResponse, PinResponse, PrefetchState,
    PrefetchStatus, StoreResponse, TierReport,
};
use kvik_store::{Chain, Clear, Prefetch, TierName};
use kvik_tier::TierKind;
use kvik_types::BlockHash;
use parking_lot::Mutex;

use crate::error::Refusal;
use crate::prompt::Prompt;
use crate::store::LocalStore;

/// Prefetches that are remembered; the oldest are forgotten, and with that cancelled.
const MAX_PREFETCHES: usize = 1024;

/// The store as its administrators see it.
#[derive(Debug)]
pub(crate) struct StoreAdmin {
    store: LocalStore,
    prefetches: Mutex<Prefetches>,
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
    slot: Arc<PrefetchSlot>,
    is_cancelled: bool,
}

/// Holds a prefetch while it loads; what it leases is released when it is done, whether or not a client asks.
#[derive(Debug, Default)]
struct PrefetchSlot(Mutex<Option<Prefetch>>);

impl StoreAdmin {
    pub(crate) fn new(store: LocalStore) -> Self {
        Self { store, prefetches: Mutex::default() }
    }

    /// Gives up all prefetches.
    pub(crate) fn close(&self) {
        self.prefetches.lock().remembered.clear();
    }

    /// Calls `visit` with each chunk of the model and the tiers that have it.
    pub(crate) fn visit_chunks(&self, visit: impl FnMut(BlockHash, &[TierKind])) {
        self.store.visit_chunks(visit);
    }

    fn chain(&self, prompt: &Prompt) -> Chain {
        self.store.chain(&prompt.tokens, prompt.salt.as_ref())
    }

    pub(crate) fn lookup(&self, prompt: &Prompt) -> LookupResponse {
        let found = self.store.store().lookup(&self.chain(prompt));
        LookupResponse {
            prompt_tokens: prompt.tokens.len(),
            cached_tokens: found.n_tokens,
            tiers: by_name(found.tokens_by_tier),
            chunk_tokens: self.store.chunk_tokens(),
        }
    }

    /// Begins to load a prompt's KV into memory, from one tier alone where one is named.
    ///
    /// # Errors
    /// If there is no such tier.
    pub(crate) fn prefetch(&self, prompt: &Prompt, tier: Option<&str>) -> Result<PrefetchStatus, Refusal> {
        let chain = self.chain(prompt);
        let store = self.store.store();
        let prefetch = match self.optional_tier(tier)? {
            None => store.prefetch(&chain, 0),
            Some(tier) => store.prefetch_from(&chain, 0, &tier).ok_or_else(|| self.unknown("tier", &tier))?,
        };
        let slot = PrefetchSlot::hold(prefetch);
        let mut prefetches = self.prefetches.lock();
        let id = prefetches.n_begun;
        prefetches.n_begun += 1;
        if prefetches.remembered.len() == MAX_PREFETCHES {
            prefetches.remembered.pop_front();
        }
        let remembered =
            RememberedPrefetch { id, n_prompt_tokens: prompt.tokens.len(), chain, slot, is_cancelled: false };
        let status = self.status(&remembered);
        prefetches.remembered.push_back(remembered);
        Ok(status)
    }

    pub(crate) fn prefetch_status(&self, id: &str) -> Result<PrefetchStatus, Refusal> {
        let mut prefetches = self.prefetches.lock();
        Ok(self.status(prefetches.find(id)?))
    }

    pub(crate) fn cancel_prefetch(&self, id: &str) -> Result<PrefetchStatus, Refusal> {
        let mut prefetches = self.prefetches.lock();
        let remembered = prefetches.find(id)?;
        remembered.is_cancelled |= remembered.slot.cancel();
        Ok(self.status(remembered))
    }

    /// Where a prefetch stands.
    fn status(&self, remembered: &RememberedPrefetch) -> PrefetchStatus {
        let state = match (remembered.slot.is_loading(), remembered.is_cancelled) {
            (true, _) => PrefetchState::Loading,
            (false, true) => PrefetchState::Cancelled,
            (false, false) => PrefetchState::Done,
        };
        let found = self.store.store().lookup_local(&remembered.chain);
        PrefetchStatus {
            id: remembered.id.to_string(),
            state,
            prompt_tokens: remembered.n_prompt_tokens,
            loaded_tokens: found.tokens_in(TierKind::Ram),
        }
    }

    pub(crate) fn pin(&self, prompt: &Prompt) -> PinResponse {
        PinResponse { tokens: self.store.store().pin(&self.chain(prompt)) }
    }

    /// Takes one pin away.
    ///
    /// # Errors
    /// If the prompt has none.
    pub(crate) fn unpin(&self, prompt: &Prompt) -> Result<PinResponse, Refusal> {
        let chain = self.chain(prompt);
        if self.store.store().unpin(&chain) {
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
        let chain = self.chain(prompt);
        let chunks = self.store.store().relocate(&chain, from_tier, to_tier, keeps_source);
        Ok(MoveResponse { chunks })
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
        let clear = Clear {
            namespace: prompt.is_none().then(|| self.store.namespace().clone()),
            chain: prompt.map(|prompt| self.chain(prompt)),
            tiers,
        };
        Ok(ClearResponse { chunks: by_name(self.store.store().clear(&clear).chunks) })
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
        export::write(&self.store, prompt, layer, self.optional_tier(tier)?.as_ref())
    }

    /// Stores what [`Self::retrieve`] gave here or elsewhere, of all layers; in one tier alone where one is named.
    ///
    /// # Errors
    /// If it is not that, or belongs to another model, type or layout, or if there is no such tier.
    pub(crate) fn store(&self, body: &[u8], tier: Option<&str>) -> Result<StoreResponse, Refusal> {
        export::read(&self.store, body, self.optional_tier(tier)?.as_ref())
    }

    pub(crate) fn health(&self) -> CacheHealth {
        let tiers = self.tiers();
        let is_up = tiers.iter().all(|tier| tier.state == "up");
        CacheHealth { status: if is_up { "ok" } else { "degraded" }.to_owned(), tiers }
    }

    pub(crate) fn stats(&self) -> CacheStats {
        let mut stats = cache_stats(self.store.store());
        let sink_counts = self.store.sink_counts();
        let own_counts = [
            ("copy_queue_bytes", sink_counts.lent_bytes() as u64),
            ("refused_sequences", sink_counts.n_refused()),
            ("given_up_sequences", sink_counts.n_given_up()),
        ];
        stats.counts.extend(own_counts.map(|(name, count)| (name.to_owned(), count)));
        stats
    }

    fn tiers(&self) -> Vec<TierReport> {
        tier_reports(self.store.store())
    }

    /// The tier of that name.
    fn tier(&self, field: &str, name: &str) -> Result<TierName, Refusal> {
        let mut tiers = self.store.store().tiers().iter();
        let known = tiers.find(|label| label.name.as_str() == name).map(|label| label.name.clone());
        known.ok_or_else(|| self.unknown(field, &name))
    }

    fn optional_tier(&self, name: Option<&str>) -> Result<Option<TierName>, Refusal> {
        name.map(|name| self.tier("tier", name)).transpose()
    }

    fn unknown(&self, field: &str, name: &dyn Display) -> Refusal {
        let names: Vec<&str> = self.store.store().tiers().iter().map(|label| label.name.as_str()).collect();
        Refusal::field(field, name, &names.join(", "))
    }
}

impl PrefetchSlot {
    fn hold(prefetch: Prefetch) -> Arc<Self> {
        let slot = Arc::new(Self::default());
        let ending = Arc::downgrade(&slot);
        prefetch.on_done(move || {
            if let Some(slot) = ending.upgrade() {
                slot.release_if_done();
            }
        });
        *slot.0.lock() = Some(prefetch);
        // It may have ended before it was here.
        slot.release_if_done();
        slot
    }

    /// Lets go of what a prefetch leases that has ended.
    fn release_if_done(&self) {
        let mut prefetch = self.0.lock();
        if let Some(done) = prefetch.take_if(|prefetch| prefetch.is_done()) {
            // Under the lock: a prefetch that does not load any more has put into memory what it loaded.
            drop(done.wait(Duration::ZERO));
        }
    }

    fn is_loading(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Gives up a prefetch that still loads; says whether it did.
    fn cancel(&self) -> bool {
        self.0.lock().take().is_some()
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
