//! A prompt's KV on its way from the store to the engine.

use std::ops::Range;
use std::time::{Duration, Instant};

use kvik_model::{BLOCK_TOKENS, PrefixKv};
use kvik_store::{Chain, Layer, Prefetch, Retrieved, Store};
use kvik_tier::TierKind;

use super::job::JobHandle;

/// What came of the request to load.
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
    Job(JobHandle<LoadedPrefix>),
}

#[derive(Debug)]
enum Bytes {
    Whole(Retrieved),
    Layers(Vec<Layer>),
    /// Copies of whole chunks, layer 0 first.
    Copies {
        payloads: Vec<Vec<u8>>,
        n_layers: usize,
    },
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
    pub(super) fn of_job(job: JobHandle<LoadedPrefix>, timeout: Duration) -> Self {
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
        }
    }

    /// What has arrived by now.
    pub(crate) fn finish(self) -> Option<LoadedPrefix> {
        match self.source {
            Source::Whole(prefetch) => LoadedPrefix::from_chunks(prefetch.wait(Duration::ZERO)),
            Source::Job(job) => job.take(),
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

    /// What layers have brought; `None` without chunks.
    pub(super) fn from_layers(chunks: Vec<(Range<usize>, TierKind)>, layers: Vec<Layer>) -> Option<Self> {
        (!chunks.is_empty()).then_some(Self { chunks, bytes: Bytes::Layers(layers) })
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

    /// The tokens of each chunk and the tier it came from.
    pub(crate) fn chunks(&self) -> &[(Range<usize>, TierKind)] {
        &self.chunks
    }
}

impl PrefixKv for LoadedPrefix {
    fn there_until(&self, token: usize) -> usize {
        let first_token = self.chunks.first().map_or(0, |(tokens, _)| tokens.start);
        let end = self.chunks.last().map_or(0, |(tokens, _)| tokens.end);
        if first_token <= token { end } else { token }
    }

    fn block(&self, layer_idx: usize, block_idx: usize) -> Option<&[u8]> {
        let token = block_idx.checked_mul(BLOCK_TOKENS)?;
        let chunk_idx = self.chunks.partition_point(|(tokens, _)| tokens.end <= token);
        let (tokens, _) = self.chunks.get(chunk_idx)?;
        let section = match &self.bytes {
            Bytes::Whole(retrieved) => retrieved.chunks().get(chunk_idx)?.layer(0, layer_idx),
            Bytes::Layers(layers) => layers.get(layer_idx)?.section(chunk_idx, 0),
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
