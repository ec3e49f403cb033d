//! The store of a daemon on this machine.
//!
//! The worker has three sessions with it: one for loads, one for the KV of ended sequences and one for segments, so that none
//! waits for the others. A daemon that is gone costs hits; its sessions are attached again when it is back.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use kvik_model::{BLOCK_TOKENS, EndedSequence, KvSink};
use kvik_node::{AttachOptions, DaemonPlan, NodeClient, NodeError, NodeSession, NodeWatch};
use kvik_store::{Chain, ChunkFormat, ChunkObserver, Space};
use kvik_types::{CacheSalt, Namespace, TokenId};

use super::daemon_chunks::{read_chunks, read_layers, write_missing};
use super::daemon_planner::DaemonPlanner;
use super::job::Job;
use super::loader::{Loader, Read};
use super::planner::Planner;
use super::segments::{DaemonSegments, SegmentKind, SegmentStore};
use super::transfer::{SinkCounts, StoreSink};
use super::{KvStore, LoadRequest, Loading, PanicGuard, PromptKv, loadable_tokens};
use crate::error::Result;

/// Timeout of the first attachment: a worker that finds its daemon at the start tells the index of its chunks from the start.
const START_TIMEOUT: Duration = Duration::from_secs(2);

/// A store that a daemon has.
#[derive(Debug)]
pub(crate) struct DaemonStore {
    options: AttachOptions,
    loads: Arc<NodeSession>,
    writes: Arc<NodeSession>,
    loader: Loader<PromptKv>,
    segments: SegmentStore,
    load_timeout: Duration,
    panic_guard: PanicGuard,
    sink_counts: Arc<SinkCounts>,
    planner: Arc<DaemonPlanner>,
}

impl DaemonStore {
    /// Begins to attach, for chunks of `format` and for segments behind `priming`.
    ///
    /// # Errors
    /// If the operating system gives no thread.
    pub(super) fn start(
        plan: DaemonPlan,
        namespace: &Namespace,
        format: ChunkFormat,
        priming: &[TokenId],
    ) -> Result<Self> {
        let mut options = AttachOptions::new(plan.socket, namespace.clone(), format);
        options.token = plan.token;
        let loads = Arc::new(NodeSession::start(options.clone())?);
        let writes = Arc::new(NodeSession::start(options.clone())?);
        let panic_guard = PanicGuard::default();
        let planner = Arc::new(DaemonPlanner::new(plan.planner));
        let (session, guard, is_layerwise) = (Arc::clone(&loads), panic_guard.clone(), plan.is_layerwise);
        let (deciding, timeout) = (Arc::clone(&planner), plan.load_timeout);
        let read = move |job: &Job<PromptKv>, chain: &Chain, first_chunk: usize| {
            let read = |client: &NodeClient| {
                if is_layerwise {
                    read_layers(client, job, chain, first_chunk, Instant::now() + timeout).map(|()| None)
                } else {
                    read_chunks(client, job, chain, first_chunk, &deciding)
                }
            };
            guard.run(|| session.run(read)).flatten().flatten()
        };
        let read: Arc<Read<PromptKv>> = Arc::new(read);
        let kind = SegmentKind::new(namespace, format, priming)?;
        let segments = DaemonSegments::start(&options, kind, panic_guard.clone())?;
        let segments = SegmentStore::start(Arc::new(segments), plan.load_timeout, panic_guard.clone())?;
        Ok(Self {
            loads,
            writes,
            loader: Loader::start("loads", &read)?,
            segments,
            load_timeout: plan.load_timeout,
            panic_guard,
            sink_counts: Arc::default(),
            planner,
            options,
        })
    }

    /// Waits for the first attachment; `None` after the timeout.
    pub(super) fn wait_for_space(&self) -> Option<Space> {
        let space = self.loads.wait_for_space(START_TIMEOUT);
        if space.is_none() {
            tracing::warn!(
                "no store daemon at the start: its chunks are reported to the index when it comes"
            );
        }
        space
    }

    /// Tells `observer` which chunks of a space the daemon has.
    ///
    /// # Errors
    /// If the operating system gives no thread.
    pub(super) fn watch(&self, space: Space, observer: Arc<dyn ChunkObserver>) -> Result<NodeWatch> {
        Ok(NodeWatch::start(self.options.clone(), space, observer)?)
    }

    /// The same for the first daemon that comes, with whose space `on_space` is called before.
    ///
    /// # Errors
    /// If the operating system gives no thread.
    pub(super) fn watch_first(
        &self,
        on_space: impl FnOnce(&Space) + Send + 'static,
        observer: Arc<dyn ChunkObserver>,
    ) -> Result<NodeWatch> {
        Ok(NodeWatch::start_for_first(self.options.clone(), on_space, observer)?)
    }

    /// What knows the speed of the engine, where that decides whether chunks are loaded.
    pub(super) fn planner(&self) -> Option<&Planner> {
        self.planner.engine()
    }

    /// How it attaches.
    pub(crate) fn options(&self) -> &AttachOptions {
        &self.options
    }

    /// The session that reads.
    pub(crate) fn loads(&self) -> &NodeSession {
        &self.loads
    }

    /// The session that writes.
    pub(crate) fn writes(&self) -> &NodeSession {
        &self.writes
    }

    /// Sequences whose KV the sink did not take.
    pub(crate) fn sink_counts(&self) -> &SinkCounts {
        &self.sink_counts
    }
}

impl KvStore for DaemonStore {
    fn loadable(&self, prompt: &[TokenId], salt: Option<&CacheSalt>) -> Option<Chain> {
        Some(self.loads.space()?.salted_chain(loadable_tokens(prompt), salt))
    }

    fn load(&self, request: &LoadRequest) -> Loading {
        let (chain, first_chunk) = (&request.chain, request.first_chunk());
        if chain.n_tokens() <= request.n_matched_tokens || chain.n_chunks() <= first_chunk {
            return Loading::Nothing;
        }
        self.loader.load(chain, first_chunk, self.load_timeout)
    }

    fn note_pass(&self, n_tokens: usize, n_attended: u64, seconds: f64) {
        if let Some(planner) = self.planner.engine() {
            planner.note_pass(n_tokens, n_attended, seconds);
        }
    }

    fn sink(&self) -> Result<Box<dyn KvSink>> {
        let (session, guard) = (Arc::clone(&self.writes), self.panic_guard.clone());
        let copy = move |sequence: &EndedSequence, is_given_up: &AtomicBool| {
            guard.run(|| session.run(|client| copy(client, sequence, is_given_up)));
        };
        Ok(Box::new(StoreSink::start(Box::new(copy), Arc::clone(&self.sink_counts))?))
    }

    fn segments(&self) -> &SegmentStore {
        &self.segments
    }

    fn peer_address(&self) -> Option<String> {
        self.loads.peer_address()
    }

    fn close(&self) {
        self.segments.close();
        self.loads.end();
        self.writes.end();
    }
}

/// Copies a sequence into the daemon's arena, as far as there is room.
fn copy(client: &NodeClient, sequence: &EndedSequence, is_given_up: &AtomicBool) -> Result<(), NodeError> {
    let of_prompt = sequence.attachment().and_then(|attached| attached.downcast_ref::<Chain>());
    let chain = match of_prompt {
        // A daemon that came back may name chunks otherwise.
        Some(of_prompt) if client.space().names_as(of_prompt.space()) => {
            of_prompt.extended(sequence.tokens())
        }
        _ => client.space().salted_chain(sequence.tokens(), sequence.salt()),
    };
    if chain.n_chunks() == 0 {
        return Ok(());
    }
    let opened = client.open(&chain)?;
    opened.note_request(u32::try_from(sequence.n_generated_tokens()).ok())?;
    write_missing(&opened, is_given_up, |chunk_idx, payload| {
        let tokens = chain.tokens_of(chunk_idx);
        let blocks = tokens.start / BLOCK_TOKENS..tokens.end / BLOCK_TOKENS;
        if let Err(error) = sequence.read_blocks(blocks, payload) {
            tracing::warn!(%error, "failed to read KV of an ended sequence; it is not stored");
            return false;
        }
        true
    })
}
