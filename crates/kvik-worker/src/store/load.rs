//! A prompt's KV on its way from the store to the engine.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_model::{BLOCK_TOKENS, BlockSource, PrefixKv};
use kvik_store::plan::Decision;
use kvik_store::{Chain, Inquiry, Prefetch, Retrieved, Store};
use kvik_tier::TierKind;

use super::PanicGuard;
use super::arriving::{ArrivingPrefix, TakenTokens};
use super::direct::{DirectPrefix, DirectReads};
use super::job::JobHandle;
use super::layered::LayeredPrefix;
use super::load_threads::LoadThreads;
use super::local_layers::begin_layers;
use super::planner::{LoadRequest, Planner};

/// What came of the request to load.
#[derive(Debug)]
pub(crate) enum Loading {
    /// The store has nothing that the engine does not have.
    Nothing,
    /// The request need not wait for it.
    Ready(PromptKv),
    /// It comes.
    Pending(Load),
}

/// Chunks that were asked for and have not all arrived. Dropping it gives up what has not begun.
#[derive(Debug)]
pub(crate) struct Load {
    deadline: Instant,
    source: Source,
}

/// KV for a request that goes into the engine.
#[derive(Debug)]
pub(crate) enum PromptKv {
    /// All of it is there.
    Loaded(LoadedPrefix),
    /// Some chunks come while the engine computes.
    Arriving(ArrivingPrefix),
    /// Some layers do.
    Layered(LayeredPrefix),
    /// The device reads some of it by itself.
    Direct(DirectPrefix),
}

/// The tokens that came from the store, by chunk, and the tier of each.
#[derive(Debug)]
pub(crate) enum ChunkTiers {
    /// Those that were there; the engine may have had some of them.
    Loaded(Vec<(Range<usize>, TierKind)>),
    /// Those that the engine took.
    Taken(TakenTokens),
}

/// Chunks that have arrived: a prefix of the prompt, from a chunk on.
#[derive(Debug)]
pub(crate) struct LoadedPrefix {
    /// The tokens of each chunk and where they came from.
    chunks: Vec<(Range<usize>, TierKind)>,
    bytes: Bytes,
}

#[derive(Debug)]
enum Source {
    Whole(Prefetch),
    Job(JobHandle<PromptKv>),
    Inquiry(Box<PlannedLoad>),
}

/// What decides how the KV of a request is loaded, and loads it.
#[derive(Debug)]
pub(super) struct LoadPlanner {
    pub(super) store: Store,
    pub(super) planner: Arc<Planner>,
    /// Read layer by layer; without them, chunks are read whole.
    pub(super) layer_threads: Option<Arc<LoadThreads>>,
    /// Where the device reads files by itself.
    pub(super) direct_reads: Option<Arc<DirectReads>>,
    pub(super) panic_guard: PanicGuard,
    pub(super) timeout: Duration,
}

/// A request for which tiers are asked what they have, before it is planned.
#[derive(Debug)]
struct PlannedLoad {
    planner: LoadPlanner,
    request: LoadRequest,
    inquiry: Inquiry,
}

#[derive(Debug)]
enum Bytes {
    Whole(Retrieved),
    /// Copies of whole chunks, layer 0 first.
    Copies {
        payloads: Vec<Vec<u8>>,
        n_layers: usize,
    },
}

/// Begins to load whole chunks.
pub(super) fn begin(
    store: &Store,
    chain: &Chain,
    first_chunk: usize,
    direct_reads: Option<&Arc<DirectReads>>,
    timeout: Duration,
) -> Loading {
    if let Some(reads) = direct_reads {
        // What must be asked of remote tiers first comes the usual way.
        let inquiry = store.inquire(chain, first_chunk);
        if inquiry.is_done()
            && let Some(prefix) = reads.begin(store, chain, first_chunk, &inquiry.places())
        {
            return Loading::Ready(PromptKv::Direct(prefix));
        }
    }
    let prefetch = store.prefetch(chain, first_chunk);
    if prefetch.is_done() {
        return match LoadedPrefix::from_chunks(prefetch.wait(Duration::ZERO)) {
            Some(prefix) => Loading::Ready(PromptKv::Loaded(prefix)),
            None => Loading::Nothing,
        };
    }
    Loading::Pending(Load { deadline: Instant::now() + timeout, source: Source::Whole(prefetch) })
}

// === impl LoadPlanner ===

impl LoadPlanner {
    /// Begins to load what a plan asks for, as soon as it is known where the chunks are.
    pub(super) fn begin(self, request: &LoadRequest) -> Loading {
        let inquiry = self.store.inquire(&request.chain, request.first_chunk());
        let deadline = Instant::now() + self.timeout;
        let planned = PlannedLoad { planner: self, request: request.clone(), inquiry };
        if planned.inquiry.is_done() {
            return planned.finish().map_or(Loading::Nothing, Loading::Ready);
        }
        Loading::Pending(Load { deadline, source: Source::Inquiry(Box::new(planned)) })
    }
}

// === impl PlannedLoad ===

impl PlannedLoad {
    /// Plans with what was found by now, and begins.
    fn finish(self) -> Option<PromptKv> {
        let LoadPlanner { store, planner, layer_threads, direct_reads, panic_guard, timeout } = &self.planner;
        let (request, places) = (&self.request, self.inquiry.places());
        if places.n_chunks() == 0 {
            return None;
        }
        let planned = planner.plan(store, request, &places);
        planner.count(&planned);
        if planned.plan.decision != Decision::Compute
            && let Some(reads) = direct_reads
            && let Some(prefix) = reads.begin(store, &request.chain, request.first_chunk(), &places)
        {
            return Some(PromptKv::Direct(prefix));
        }
        match (planned.plan.decision, layer_threads) {
            (Decision::Layers, Some(threads)) => {
                let layers = begin_layers(store, threads, panic_guard, request, &places, &planned, *timeout);
                if layers.is_some() {
                    return layers.map(PromptKv::Layered);
                }
            }
            // A tier that is not read any more would stay as slow as it was.
            (Decision::Compute, _) => store.measure_tiers(request.chain.space()),
            _ => {}
        }
        ArrivingPrefix::begin(store, planner, request, &places, planned, *timeout).map(PromptKv::Arriving)
    }
}

// === impl PromptKv ===

impl PromptKv {
    /// What the engine gets, and where its tokens come from.
    pub(crate) fn into_parts(self) -> (Arc<dyn PrefixKv>, ChunkTiers) {
        match self {
            Self::Loaded(prefix) => {
                let chunks = prefix.chunks.clone();
                (Arc::new(prefix), ChunkTiers::Loaded(chunks))
            }
            Self::Arriving(prefix) => {
                let taken = prefix.taken();
                (Arc::new(prefix), ChunkTiers::Taken(taken))
            }
            Self::Direct(prefix) => {
                let taken = prefix.taken();
                (Arc::new(prefix), ChunkTiers::Taken(taken))
            }
            Self::Layered(prefix) => {
                let taken = prefix.taken();
                (Arc::new(prefix), ChunkTiers::Taken(taken))
            }
        }
    }

    /// Calls `callback` whenever more has come or is lost.
    pub(crate) fn on_each(&self, callback: impl Fn() + Send + Sync + 'static) {
        if let Self::Arriving(prefix) = self {
            let callback: Arc<dyn Fn() + Send + Sync> = Arc::new(callback);
            prefix.on_each(&callback);
        }
    }
}

// === impl ChunkTiers ===

impl Default for ChunkTiers {
    fn default() -> Self {
        Self::Loaded(Vec::new())
    }
}

// === impl Load ===

impl Load {
    pub(super) fn of_job(job: JobHandle<PromptKv>, timeout: Duration) -> Self {
        Self { deadline: Instant::now() + timeout, source: Source::Job(job) }
    }

    /// When it is waited for no longer.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Calls `callback` once when nothing more will arrive, on another thread or at once.
    pub(crate) fn on_done(&self, callback: impl FnOnce() + Send + 'static) {
        match &self.source {
            Source::Whole(prefetch) => prefetch.on_done(callback),
            Source::Job(job) => job.on_done(Box::new(callback)),
            Source::Inquiry(planned) => planned.inquiry.on_done(callback),
        }
    }

    /// What has arrived by now, or comes while the engine computes.
    pub(crate) fn finish(self) -> Option<PromptKv> {
        match self.source {
            Source::Whole(prefetch) => {
                LoadedPrefix::from_chunks(prefetch.wait(Duration::ZERO)).map(PromptKv::Loaded)
            }
            Source::Job(job) => job.take(),
            Source::Inquiry(planned) => planned.finish(),
        }
    }
}

// === impl LoadedPrefix ===

impl LoadedPrefix {
    fn from_chunks(retrieved: Retrieved) -> Option<Self> {
        let chunks: Vec<_> =
            retrieved.chunks().iter().map(|chunk| (chunk.token_range(), chunk.tier())).collect();
        (!chunks.is_empty()).then_some(Self { chunks, bytes: Bytes::Whole(retrieved) })
    }

    /// Copies of whole chunks of a chain; `None` without chunks.
    pub(super) fn from_copies(
        chunks: Vec<(Range<usize>, TierKind)>,
        payloads: Vec<Vec<u8>>,
        chain: &Chain,
    ) -> Option<Self> {
        let n_layers = chain.space().format().n_layers as usize;
        (!chunks.is_empty()).then_some(Self { chunks, bytes: Bytes::Copies { payloads, n_layers } })
    }
}

impl BlockSource for LoadedPrefix {
    fn block(&self, layer_idx: usize, block_idx: usize) -> Option<&[u8]> {
        let token = block_idx.checked_mul(BLOCK_TOKENS)?;
        let chunk_idx = self.chunks.partition_point(|(tokens, _)| tokens.end <= token);
        let (tokens, _) = self.chunks.get(chunk_idx)?;
        let section = match &self.bytes {
            Bytes::Whole(retrieved) => retrieved.chunks().get(chunk_idx)?.layer(0, layer_idx),
            Bytes::Copies { payloads, n_layers } => {
                let payload = payloads.get(chunk_idx)?;
                let section_bytes = payload.len().checked_div(*n_layers)?;
                payload.get(layer_idx * section_bytes..(layer_idx + 1) * section_bytes)?
            }
        };
        let n_blocks = tokens.len() / BLOCK_TOKENS;
        let block_bytes = section.len().checked_div(n_blocks)?;
        let place = token.checked_sub(tokens.start)? / BLOCK_TOKENS;
        section.get(place * block_bytes..(place + 1) * block_bytes)
    }
}

impl PrefixKv for LoadedPrefix {
    fn there_until(&self, token: usize) -> usize {
        let first_token = self.chunks.first().map_or(0, |(tokens, _)| tokens.start);
        let end = self.chunks.last().map_or(0, |(tokens, _)| tokens.end);
        if first_token <= token { end } else { token }
    }
}
