//! A prompt's KV on its way from the store to the engine.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvik_model::{BLOCK_TOKENS, PrefixKv};
use kvik_store::{Chain, Layer, Prefetch, Retrieved, Store};
use kvik_tier::TierKind;
use parking_lot::Mutex;

use crate::error::{Result, WorkerError};

/// What came of the wish to load.
#[derive(Debug)]
pub(crate) enum Loading {
    /// The store has nothing that the engine does not have.
    Nothing,
    /// It is all there.
    Ready(LoadedPrefix),
    /// It comes.
    Pending(Load),
}

/// Chunks that were asked for and have not all arrived. Dropping it gives up what has not begun.
#[derive(Debug)]
pub(crate) struct Load {
    deadline: Instant,
    source: Source,
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
    Layers(JobHandle),
}

/// The waiting side of a job; dropping it says that nobody waits any more.
#[derive(Debug)]
struct JobHandle(Arc<LayerJob>);

#[derive(Debug)]
enum Bytes {
    Whole(Retrieved),
    Layers(Vec<Layer>),
}

/// Begins to load whole chunks.
pub(super) fn begin(store: &Store, chain: &Chain, first_chunk: usize, timeout: Duration) -> Loading {
    let prefetch = store.prefetch(chain, first_chunk);
    if prefetch.is_done() {
        return match LoadedPrefix::from_chunks(prefetch.wait(Duration::ZERO)) {
            Some(prefix) => Loading::Ready(prefix),
            None => Loading::Nothing,
        };
    }
    Loading::Pending(Load { deadline: Instant::now() + timeout, source: Source::Whole(prefetch) })
}

// === impl Load ===

impl Load {
    /// When it is waited for no longer.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Calls `callback` once when nothing more will arrive, on another thread or at once.
    pub(crate) fn on_done(&self, callback: impl FnOnce() + Send + 'static) {
        match &self.source {
            Source::Whole(prefetch) => prefetch.on_done(callback),
            Source::Layers(handle) => handle.0.on_done(Box::new(callback)),
        }
    }

    /// What has arrived by now.
    pub(crate) fn finish(self) -> Option<LoadedPrefix> {
        match self.source {
            Source::Whole(prefetch) => LoadedPrefix::from_chunks(prefetch.wait(Duration::ZERO)),
            Source::Layers(handle) => handle.0.state.lock().prefix.take(),
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

    /// The tokens of each chunk and the tier it came from.
    pub(crate) fn chunks(&self) -> &[(Range<usize>, TierKind)] {
        &self.chunks
    }
}

impl PrefixKv for LoadedPrefix {
    fn first_token(&self) -> usize {
        self.chunks.first().map_or(0, |(tokens, _)| tokens.start)
    }

    fn n_tokens(&self) -> usize {
        self.chunks.last().map_or(0, |(tokens, _)| tokens.end - self.first_token())
    }

    fn block(&self, layer_idx: usize, block_idx: usize) -> Option<&[u8]> {
        let token = block_idx.checked_mul(BLOCK_TOKENS)?;
        let chunk_idx = self.chunks.partition_point(|(tokens, _)| tokens.end <= token);
        let (tokens, _) = self.chunks.get(chunk_idx)?;
        let section = match &self.bytes {
            Bytes::Whole(retrieved) => retrieved.chunks().get(chunk_idx)?.layer(0, layer_idx),
            Bytes::Layers(layers) => layers.get(layer_idx)?.section(chunk_idx, 0),
        };
        let n_blocks = tokens.len() / BLOCK_TOKENS;
        let block_bytes = section.len().checked_div(n_blocks)?;
        let place = token.checked_sub(tokens.start)? / BLOCK_TOKENS;
        section.get(place * block_bytes..(place + 1) * block_bytes)
    }
}

/// A thread that reads chains layer by layer.
#[derive(Debug)]
pub(super) struct LayerLoader {
    store: Store,
    /// `None` while the thread is being ended.
    jobs: Option<Sender<(Arc<LayerJob>, Chain, usize)>>,
    thread: Option<JoinHandle<()>>,
}

/// One chain that is read layer by layer.
#[derive(Default)]
struct LayerJob {
    state: Mutex<JobState>,
}

#[derive(Default)]
struct JobState {
    is_done: bool,
    /// Nobody waits for it any more.
    is_given_up: bool,
    prefix: Option<LoadedPrefix>,
    callback: Option<Box<dyn FnOnce() + Send>>,
}

impl LayerLoader {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the operating system gives none.
    pub(super) fn start(store: Store) -> Result<Self> {
        let (sender, receiver) = mpsc::channel();
        let reading = store.clone();
        let thread = std::thread::Builder::new()
            .name("kvik-layers".to_owned())
            .spawn(move || read_jobs(&reading, &receiver))
            .map_err(|source| WorkerError::Io { what: "start the thread of layers".to_owned(), source })?;
        Ok(Self { store, jobs: Some(sender), thread: Some(thread) })
    }

    /// Begins to load a chain, unless nobody has its first chunk.
    pub(super) fn load(&self, chain: &Chain, first_chunk: usize, timeout: Duration) -> Loading {
        let job = Arc::new(LayerJob::default());
        let Some(jobs) = &self.jobs else { return Loading::Nothing };
        let is_known = !self.store.tiers_of(chain, first_chunk).is_empty();
        if !is_known || jobs.send((Arc::clone(&job), chain.clone(), first_chunk)).is_err() {
            return Loading::Nothing;
        }
        Loading::Pending(Load { deadline: Instant::now() + timeout, source: Source::Layers(JobHandle(job)) })
    }
}

impl Drop for LayerLoader {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

fn read_jobs(store: &Store, jobs: &Receiver<(Arc<LayerJob>, Chain, usize)>) {
    while let Ok((job, chain, first_chunk)) = jobs.recv() {
        let prefix = job.is_wanted().then(|| read_layers(store, &job, &chain, first_chunk)).flatten();
        job.complete(prefix);
    }
}

fn read_layers(store: &Store, job: &LayerJob, chain: &Chain, first_chunk: usize) -> Option<LoadedPrefix> {
    // Asked first: what is read by layers does not stay in memory, so it is where it was.
    let tier_of = |chunk_idx| store.tiers_of(chain, chunk_idx).into_iter().min();
    let tiers: Vec<Option<TierKind>> = (first_chunk..chain.n_chunks()).map(tier_of).collect();
    let mut reader = store.retrieve_layers(chain, first_chunk);
    let mut layers = Vec::new();
    while job.is_wanted()
        && let Some(layer) = reader.next_layer()
    {
        layers.push(layer);
    }
    if layers.len() < chain.space().format().n_layers as usize {
        return None;
    }
    let chunks: Vec<_> = (first_chunk..first_chunk + reader.n_chunks())
        .zip(tiers)
        .map(|(chunk_idx, tier)| (chain.tokens_of(chunk_idx), tier.unwrap_or(TierKind::Ram)))
        .collect();
    (!chunks.is_empty()).then_some(LoadedPrefix { chunks, bytes: Bytes::Layers(layers) })
}

// === impl LayerJob ===

impl LayerJob {
    fn is_wanted(&self) -> bool {
        !self.state.lock().is_given_up
    }

    fn complete(&self, prefix: Option<LoadedPrefix>) {
        let callback = {
            let mut state = self.state.lock();
            state.is_done = true;
            state.prefix = prefix;
            state.callback.take()
        };
        if let Some(callback) = callback {
            callback();
        }
    }

    fn on_done(&self, callback: Box<dyn FnOnce() + Send>) {
        let mut state = self.state.lock();
        if !state.is_done {
            state.callback = Some(callback);
            return;
        }
        drop(state);
        callback();
    }
}

impl std::fmt::Debug for LayerJob {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("LayerJob")
            .field("is_done", &self.state.lock().is_done)
            .finish_non_exhaustive()
    }
}

impl Drop for JobHandle {
    fn drop(&mut self) {
        self.0.state.lock().is_given_up = true;
    }
}
