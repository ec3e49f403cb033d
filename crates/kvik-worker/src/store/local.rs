//! A store in this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvik_model::{BLOCK_TOKENS, EndedSequence, KvSink};
use kvik_node::{PlannerMode, open_store};
use kvik_store::{Chain, ChunkFormat, ChunkObserver, FileWrite, Observation, Space, Store, Write};
use kvik_tier::TierKind;
use kvik_types::{BlockHash, CacheSalt, Namespace, TokenId};

use super::direct::DirectReads;
use super::direct_write::DirectWrites;
use super::job::Job;
use super::layered::{LayerBytes, layered};
use super::load::LoadPlanner;
use super::load_threads::LoadThreads;
use super::loader::{Loader, Read};
use super::local_layers::{n_layers, send_layers};
use super::planner::Planner;
use super::segments::{LocalSegments, SegmentKind, SegmentStore};
use super::transfer::{SinkCounts, StoreSink};
use super::{KvStore, LoadRequest, Loading, PanicGuard, PromptKv, load, loadable_tokens, refused};
use crate::config::StoreConfig;
use crate::error::Result;

/// A store of this process, with the place of a model in it. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct LocalStore {
    store: Store,
    space: Space,
    namespace: Namespace,
    load_timeout: Duration,
    layer_reads: LayerReads,
    /// Where the device reads files by itself.
    direct_reads: Option<Arc<DirectReads>>,
    /// Where the device writes files by itself.
    direct_writes: Option<Arc<DirectWrites>>,
    panic_guard: PanicGuard,
    segments: Arc<SegmentStore>,
    sink_counts: Arc<SinkCounts>,
    planner: Arc<Planner>,
    planner_mode: PlannerMode,
}

/// What is read layer by layer.
#[derive(Debug, Clone)]
enum LayerReads {
    Nothing,
    /// What a plan says.
    Planned(Arc<LoadThreads>),
    /// Everything.
    All(Arc<Loader<PromptKv>>),
}

impl LocalStore {
    /// Opens the store of `config` for chunks of `format` and for segments behind `priming`; `None` where there is to be none. A device
    /// that reads files by itself has a `max_file_section_bytes`.
    ///
    /// # Errors
    /// If the configuration is wrong or a local tier cannot be used.
    pub(super) fn open(
        config: &StoreConfig,
        namespace: &Namespace,
        format: ChunkFormat,
        priming: &[TokenId],
        max_file_section_bytes: Option<usize>,
    ) -> Result<Option<Self>> {
        let Some(plan) = config.resolve()? else { return Ok(None) };
        let store = open_store(config, &plan, None)?;
        let namespace = Namespace { tenant: config.tenant.clone(), ..namespace.clone() };
        let space = store.space(&namespace, format).map_err(refused)?;
        let plans = plan.planner == PlannerMode::Auto && !store.tier_states().is_empty();
        let layer_reads = if plan.is_layerwise {
            let reading = store.clone();
            let timeout = plan.load_timeout;
            let read = move |job: &Job<PromptKv>, chain: &Chain, first| {
                read_layers(&reading, job, chain, first, timeout);
                None
            };
            let read: Arc<Read<PromptKv>> = Arc::new(read);
            LayerReads::All(Arc::new(Loader::start("layers", &read)?))
        } else if plans {
            LayerReads::Planned(Arc::new(LoadThreads::start("layers")?))
        } else {
            LayerReads::Nothing
        };
        let panic_guard = PanicGuard::default();
        let segments = LocalSegments::open(&store, &SegmentKind::new(&namespace, format, priming)?)?;
        let segments = SegmentStore::start(Arc::new(segments), plan.load_timeout, panic_guard.clone())?;
        if plan.planner == PlannerMode::Auto {
            store.measure_tiers(&space);
        }
        Ok(Some(Self {
            store,
            space,
            namespace,
            load_timeout: plan.load_timeout,
            layer_reads,
            direct_reads: max_file_section_bytes.map(DirectReads::new),
            direct_writes: max_file_section_bytes.filter(|_| config.gpu_direct_writes).map(DirectWrites::new),
            panic_guard,
            segments: Arc::new(segments),
            sink_counts: Arc::default(),
            planner: Arc::default(),
            planner_mode: plan.planner,
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

    /// Where its chains are made.
    pub(crate) fn space(&self) -> &Space {
        &self.space
    }

    /// Tells `observer` which chunks of this model each tier has, now and from now on.
    pub(super) fn observe(&self, observer: Arc<dyn ChunkObserver>) -> Observation {
        self.store.observe(&self.space, observer)
    }

    /// Calls `visit` with each chunk of this model and the tiers that have it.
    pub(crate) fn visit_chunks(&self, visit: impl FnMut(BlockHash, &[TierKind])) {
        self.store.visit_chunks(&self.space, visit);
    }

    /// Whether it decides what is loaded from slow tiers, and has one.
    pub(super) fn plans_loads(&self) -> bool {
        self.planner_mode == PlannerMode::Auto && !self.store.tier_states().is_empty()
    }

    /// What decides whether chunks are loaded.
    pub(crate) fn planner(&self) -> &Planner {
        &self.planner
    }

    /// Whether it does.
    pub(crate) fn planner_mode(&self) -> PlannerMode {
        self.planner_mode
    }

    /// Whether chunks are read layer by layer; nothing is planned then.
    pub(crate) fn is_layerwise(&self) -> bool {
        matches!(self.layer_reads, LayerReads::All(_))
    }

    /// Sequences whose KV the sink did not take.
    pub(crate) fn sink_counts(&self) -> &SinkCounts {
        &self.sink_counts
    }

    fn begin_load(&self, request: &LoadRequest) -> Loading {
        let (chain, first_chunk) = (&request.chain, request.first_chunk());
        let has_all = chain.n_tokens() <= request.n_matched_tokens || chain.n_chunks() <= first_chunk;
        if has_all || self.planner_mode == PlannerMode::ComputeAll {
            return Loading::Nothing;
        }
        let threads = match &self.layer_reads {
            // A tier must be known to have its first chunk.
            LayerReads::All(_) if self.store.tiers_of(chain, first_chunk).is_empty() => {
                return Loading::Nothing;
            }
            LayerReads::All(loader) => return loader.load(chain, first_chunk, self.load_timeout),
            LayerReads::Planned(threads) => Some(Arc::clone(threads)),
            LayerReads::Nothing => None,
        };
        if self.planner_mode == PlannerMode::Auto {
            let planner = LoadPlanner {
                store: self.store.clone(),
                planner: Arc::clone(&self.planner),
                layer_threads: threads,
                direct_reads: self.direct_reads.clone(),
                panic_guard: self.panic_guard.clone(),
                timeout: self.load_timeout,
            };
            planner.begin(request)
        } else {
            load::begin(&self.store, chain, first_chunk, self.direct_reads.as_ref(), self.load_timeout)
        }
    }

    /// Copies a sequence chunk by chunk, as far as the store has room.
    fn copy(&self, sequence: &EndedSequence, is_given_up: &AtomicBool) {
        let of_prompt = sequence.attachment().and_then(|attached| attached.downcast_ref::<Chain>());
        let chain = match of_prompt {
            Some(of_prompt) => of_prompt.extended(sequence.tokens()),
            None => self.space.salted_chain(sequence.tokens(), sequence.salt()),
        };
        if chain.n_chunks() == 0 {
            return;
        }
        self.store.note_request(&chain, u32::try_from(sequence.n_generated_tokens()).ok());
        for chunk_idx in 0..chain.n_chunks() {
            if is_given_up.load(Ordering::Relaxed) {
                return;
            }
            let direct = self.direct_writes.as_ref();
            match direct.map(|direct| direct.store(&self.store, &chain, chunk_idx, sequence)) {
                Some(FileWrite::Stored | FileWrite::Present) => continue,
                Some(FileWrite::Refused) => return,
                Some(FileWrite::Elsewhere | FileWrite::Failed) | None => {}
            }
            let mut writer = match self.store.begin_write(&chain, chunk_idx, 0) {
                Write::Slot(writer) => writer,
                Write::Present => continue,
                Write::NoRoom | Write::NoParent | Write::Collision => return,
            };
            let tokens = chain.tokens_of(chunk_idx);
            let blocks = tokens.start / BLOCK_TOKENS..tokens.end / BLOCK_TOKENS;
            if let Err(error) = sequence.read_blocks(blocks, writer.payload_mut()) {
                // The chunk is not committed: what it has is not KV.
                tracing::warn!(%error, "failed to read KV of an ended sequence; it is not stored");
                return;
            }
            writer.commit();
        }
    }
}

impl KvStore for LocalStore {
    fn loadable(&self, prompt: &[TokenId], salt: Option<&CacheSalt>) -> Option<Chain> {
        Some(self.chain(loadable_tokens(prompt), salt))
    }

    fn load(&self, request: &LoadRequest) -> Loading {
        self.panic_guard.run(|| self.begin_load(request)).unwrap_or(Loading::Nothing)
    }

    fn note_pass(&self, n_tokens: usize, n_attended: u64, seconds: f64) {
        self.planner.note_pass(n_tokens, n_attended, seconds);
    }

    fn sink(&self) -> Result<Box<dyn KvSink>> {
        let target = self.clone();
        let copy = move |sequence: &EndedSequence, is_given_up: &AtomicBool| {
            target.panic_guard.run(|| target.copy(sequence, is_given_up));
        };
        Ok(Box::new(StoreSink::start(Box::new(copy), Arc::clone(&self.sink_counts))?))
    }

    fn segments(&self) -> &SegmentStore {
        &self.segments
    }

    fn close(&self) {
        self.segments.close();
        self.store.close();
    }
}

/// Reads all chunks that are found layer by layer: the job is done with the first layer, and the others follow.
fn read_layers(store: &Store, job: &Job<PromptKv>, chain: &Chain, first_chunk: usize, timeout: Duration) {
    let deadline = Instant::now() + timeout;
    // Asked first: what is read stays in memory.
    let tier_of = |chunk_idx| store.tiers_of(chain, chunk_idx).into_iter().min();
    let tiers: Vec<Option<TierKind>> = (first_chunk..chain.n_chunks()).map(tier_of).collect();
    let mut reader = store.retrieve_layers(chain, first_chunk);
    let Some(first) = reader.next_layer() else { return };
    let chunks: Vec<_> = (first_chunk..first_chunk + reader.n_chunks())
        .zip(tiers)
        .map(|(chunk_idx, tier)| (chain.tokens_of(chunk_idx), tier.unwrap_or(TierKind::Ram)))
        .collect();
    let (prefix, sender) = layered(chunks, n_layers(chain), deadline);
    sender.send(LayerBytes::Leased(first), reader.n_chunks());
    job.complete(Some(PromptKv::Layered(prefix)));
    send_layers(&mut reader, &sender);
}
