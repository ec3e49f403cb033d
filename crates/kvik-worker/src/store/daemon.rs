//! The store of a daemon on this machine.
//!
//! The worker has two sessions with it: one for loads, one for the KV of ended sequences, so that neither waits for the
//! other. A daemon that is gone costs hits; its sessions are attached again when it is back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvik_model::{BLOCK_TOKENS, EndedSequence, KvSink};
use kvik_node::{AttachOptions, DaemonPlan, NodeClient, NodeError, NodeSession, NodeWatch};
use kvik_store::{Chain, ChunkFormat, ChunkObserver, Space};
use kvik_types::{CacheSalt, Namespace, TokenId};

use super::loader::{LoadJob, Loader, Read};
use super::transfer::{SinkCounts, StoreSink};
use super::{KvStore, LoadRequest, LoadedPrefix, Loading, PanicGuard, loadable_tokens};
use crate::error::Result;

/// Chunks that are written with one request: the daemon publishes some while the next are copied, and a sequence that is
/// given up ends soon.
const CHUNKS_A_WRITE: usize = 16;

/// Timeout of the first attachment: a worker that finds its daemon at the start tells the index of its chunks from the start.
const START_TIMEOUT: Duration = Duration::from_secs(2);

/// A store that a daemon has.
#[derive(Debug)]
pub(crate) struct DaemonStore {
    options: AttachOptions,
    loads: Arc<NodeSession>,
    writes: Arc<NodeSession>,
    loader: Loader,
    load_timeout: Duration,
    panic_guard: PanicGuard,
    sink_counts: Arc<SinkCounts>,
}

impl DaemonStore {
    /// Begins to attach.
    ///
    /// # Errors
    /// If the operating system gives no thread.
    pub(super) fn start(plan: DaemonPlan, namespace: &Namespace, format: ChunkFormat) -> Result<Self> {
        let mut options = AttachOptions::new(plan.socket, namespace.clone(), format);
        options.token = plan.token;
        let loads = Arc::new(NodeSession::start(options.clone())?);
        let writes = Arc::new(NodeSession::start(options.clone())?);
        let panic_guard = PanicGuard::default();
        let (session, guard, is_layerwise) = (Arc::clone(&loads), panic_guard.clone(), plan.is_layerwise);
        let read = move |job: &LoadJob, chain: &Chain, first_chunk: usize| {
            let read = |client: &NodeClient| {
                if is_layerwise {
                    read_layers(client, job, chain, first_chunk)
                } else {
                    read_chunks(client, job, chain, first_chunk)
                }
            };
            guard.run(|| session.run(read)).flatten().flatten()
        };
        let read: Arc<Read> = Arc::new(read);
        Ok(Self {
            loads,
            writes,
            loader: Loader::start("loads", &read)?,
            load_timeout: plan.load_timeout,
            panic_guard,
            sink_counts: Arc::default(),
            options,
        })
    }

    /// Waits for the first attachment; `None` after the timeout.
    pub(super) fn wait_for_space(&self) -> Option<Space> {
        let space = self.loads.wait_for_space(START_TIMEOUT);
        if space.is_none() {
            tracing::warn!("no store daemon at the start: the index is told of its chunks when it comes");
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

    fn sink(&self) -> Result<Box<dyn KvSink>> {
        let (session, guard) = (Arc::clone(&self.writes), self.panic_guard.clone());
        let copy = move |sequence: &EndedSequence, is_given_up: &AtomicBool| {
            guard.run(|| session.run(|client| copy(client, sequence, is_given_up)));
        };
        Ok(Box::new(StoreSink::start(Box::new(copy), Arc::clone(&self.sink_counts))?))
    }

    fn peer_address(&self) -> Option<String> {
        self.loads.peer_address()
    }

    fn close(&self) {
        self.loads.end();
        self.writes.end();
    }
}

/// Copies the chunks that the daemon has out of its arena.
fn read_chunks(
    client: &NodeClient,
    job: &LoadJob,
    chain: &Chain,
    first_chunk: usize,
) -> Result<Option<LoadedPrefix>, NodeError> {
    let lease = client.open(chain)?.retrieve(first_chunk)?;
    let mut chunks = Vec::with_capacity(lease.n_chunks());
    let mut payloads = Vec::with_capacity(lease.n_chunks());
    for place in 0..lease.n_chunks() {
        if !job.is_wanted() {
            return Ok(None);
        }
        let mut payload = vec![0; lease.payload_bytes(place)];
        lease.copy_out(place, 0, &mut payload)?;
        chunks.push((lease.token_range(place), lease.tier(place)));
        payloads.push(payload);
    }
    Ok(LoadedPrefix::from_copies(chunks, payloads, chain))
}

/// The same, layer by layer as they arrive.
fn read_layers(
    client: &NodeClient,
    job: &LoadJob,
    chain: &Chain,
    first_chunk: usize,
) -> Result<Option<LoadedPrefix>, NodeError> {
    let opened = client.open(chain)?;
    let tier = opened.slowest_tier();
    let mut layers = opened.retrieve_layers(first_chunk)?;
    let mut payloads: Vec<Vec<u8>> =
        (0..layers.n_chunks()).map(|place| vec![0; chain.payload_bytes(first_chunk + place)]).collect();
    let mut n_layers = 0;
    while job.is_wanted()
        && let Some(layer_idx) = layers.next_layer()?
    {
        for (place, payload) in payloads.iter_mut().take(layers.n_chunks()).enumerate() {
            let section_bytes = layers.section_bytes(place);
            layers.copy_out(place, &mut payload[layer_idx * section_bytes..][..section_bytes])?;
        }
        n_layers += 1;
    }
    if n_layers < chain.space().format().n_layers as usize {
        return Ok(None);
    }
    payloads.truncate(layers.n_chunks());
    let chunk_of = |place| (chain.tokens_of(first_chunk + place), tier);
    let chunks = (0..payloads.len()).map(chunk_of).collect();
    Ok(LoadedPrefix::from_copies(chunks, payloads, chain))
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
    let block_bytes = sequence.block_layer_bytes();
    let mut payload = Vec::new();
    let mut first_chunk = opened.n_found();
    while first_chunk < chain.n_chunks() && !is_given_up.load(Ordering::Relaxed) {
        let mut write = opened.write(first_chunk, CHUNKS_A_WRITE)?;
        let n_chunks = write.n_chunks();
        for place in (0..n_chunks).filter(|place| !write.is_present(*place)).collect::<Vec<_>>() {
            let first_block = chain.tokens_of(first_chunk + place).start / BLOCK_TOKENS;
            let n_blocks = chain.tokens_of(first_chunk + place).len() / BLOCK_TOKENS;
            payload.resize(write.payload_bytes(place), 0);
            let blocks = payload.chunks_exact_mut(block_bytes);
            for (idx, block) in blocks.enumerate() {
                sequence.read_block(idx / n_blocks, first_block + idx % n_blocks, block);
            }
            write.write_chunk(place, &payload)?;
        }
        write.finish()?;
        if n_chunks < CHUNKS_A_WRITE {
            break;
        }
        first_chunk += n_chunks;
    }
    Ok(())
}
