//! The store of a node, as an engine uses it.

use std::collections::HashMap;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_memory::SocketAddress;
use kvik_node::{
    AttachOptions, NodeClient, NodeManager, NodeOptions, NodeServer, NodeSession, OpenChain, StoreConfig,
    open_store,
};
use kvik_store::{ChunkFormat, Retention, Space};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::chain::{Chain, chain_of, chain_of_keys, unpack};
use crate::client::Client;
use crate::copies::Transfer;
use crate::engine::{EngineOptions, retention_of, time_of};
use crate::error::{KvikError, StoreGoneError, exception_of, invalid};
use crate::job::{Job, Workers};
use crate::memory::EngineMemory;

/// The socket of a store in this process, in a folder of its own.
const SOCKET_NAME: &str = "store.sock";

/// A session with the store of this node; it outlives the daemon, and is attached again when the daemon is back.
///
/// Calls release Python's lock. While there is no daemon, lookups find nothing and jobs end with 0.
#[pyclass(frozen, module = "kvik")]
#[derive(Debug)]
pub(crate) struct Store {
    format: ChunkFormat,
    /// How it attaches.
    options: AttachOptions,
    /// Sessions of their own for lookups, loads and saves: none waits for the other.
    lookups: Arc<NodeSession>,
    loads: Arc<NodeSession>,
    saves: Arc<NodeSession>,
    /// Pins what is saved; it attaches with the first.
    manager: Arc<NodeManager>,
    workers: Mutex<Option<StoreWorkers>>,
    n_copy_threads: usize,
    /// The store of this process, where it has one; dropped after the sessions.
    own: Option<OwnStore>,
}

#[derive(Debug)]
struct StoreWorkers {
    lookups: Workers,
    loads: Workers,
    saves: Workers,
}

/// A store in this process, with a socket that only this user can reach.
#[derive(Debug)]
struct OwnStore {
    server: NodeServer,
    folder: tempfile::TempDir,
}

/// How much of a sequence the store has.
#[pyclass(frozen, get_all, module = "kvik")]
#[derive(Debug)]
pub(crate) struct Found {
    /// Chunks, from the first on.
    n_chunks: usize,
    /// Their tokens.
    n_tokens: usize,
    /// The slowest tier that has one of them, such as `ram` or `nvme`.
    slowest_tier: &'static str,
}

#[pymethods]
impl Store {
    /// Attaches to the store daemon at `socket`. A daemon that is not there yet is no error. With `idle_saves`, threads that
    /// save run where no other thread needs the processor: for engines that compute on it.
    #[staticmethod]
    #[pyo3(signature = (socket, *, model, layout, dtype, n_layers, token_layer_bytes, block_tokens, rank=0, n_ranks=1,
        token=None, timeout_s=10.0, n_copy_threads=None, idle_saves=false))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn attach(
        py: Python<'_>,
        socket: PathBuf,
        model: String,
        layout: String,
        dtype: &str,
        n_layers: u32,
        token_layer_bytes: u64,
        block_tokens: usize,
        rank: u16,
        n_ranks: u16,
        token: Option<&str>,
        timeout_s: f64,
        n_copy_threads: Option<usize>,
        idle_saves: bool,
    ) -> PyResult<Self> {
        let options = EngineOptions::try_new(
            (model, layout, dtype),
            (n_layers, token_layer_bytes, block_tokens, n_ranks),
            rank,
            token,
            timeout_s,
            n_copy_threads,
        )?;
        py.detach(|| Self::start(SocketAddress::Path(socket), options, None, idle_saves))
    }

    /// Opens a store in this process, with the settings of `store` in docs/configuration.md by their names.
    #[staticmethod]
    #[pyo3(signature = (*, model, layout, dtype, n_layers, token_layer_bytes, block_tokens, rank=0, n_ranks=1,
        ram="1GiB".to_owned(), nvme=None, remote=None, chunk_tokens=256, n_copy_threads=None))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn in_process(
        py: Python<'_>,
        model: String,
        layout: String,
        dtype: &str,
        n_layers: u32,
        token_layer_bytes: u64,
        block_tokens: usize,
        rank: u16,
        n_ranks: u16,
        ram: String,
        nvme: Option<String>,
        remote: Option<String>,
        chunk_tokens: usize,
        n_copy_threads: Option<usize>,
    ) -> PyResult<Self> {
        let options = EngineOptions::try_new(
            (model, layout, dtype),
            (n_layers, token_layer_bytes, block_tokens, n_ranks),
            rank,
            None,
            10.0,
            n_copy_threads,
        )?;
        let config =
            StoreConfig { ram, nvme, remote: remote.map(Into::into), chunk_tokens, ..StoreConfig::default() };
        py.detach(|| {
            let own = OwnStore::open(&config)?;
            let socket = own.socket();
            Self::start(socket, options, Some(own), false)
        })
    }

    /// Where other engines attach to a store in this process; `None` for the store of a daemon.
    #[getter]
    fn socket(&self) -> Option<PathBuf> {
        self.own.as_ref().map(|own| own.folder.path().join(SOCKET_NAME))
    }

    /// Whether a daemon serves this store now.
    #[getter]
    fn is_attached(&self) -> bool {
        self.sessions().into_iter().all(|session| session.space().is_some())
    }

    /// Why no daemon serves this store, or how the last call failed; `None` while one does.
    #[getter]
    fn last_error(&self) -> Option<String> {
        self.sessions().into_iter().find_map(|session| session.last_error())
    }

    /// Waits for a daemon; says whether there is one within `timeout_s` seconds.
    fn wait_attached(&self, py: Python<'_>, timeout_s: f64) -> bool {
        let timeout = Duration::try_from_secs_f64(timeout_s.max(0.0)).unwrap_or(Duration::MAX);
        let begin = Instant::now();
        let is_attached =
            |session: &NodeSession| session.wait_for_space(timeout.saturating_sub(begin.elapsed())).is_some();
        py.detach(|| self.sessions().into_iter().all(|session| is_attached(session)))
    }

    /// Tokens of a chunk; `None` while there is no daemon.
    #[getter]
    fn chunk_tokens(&self) -> Option<usize> {
        self.lookups.space().map(|space| space.chunk_tokens())
    }

    /// A managing connection for the chunks of this store: pins, prefetches, clears.
    fn client(&self) -> Client {
        Client::new(self.options.clone())
    }

    /// The chain of a sequence. `extras` has the first token and the bytes of whatever else the KV depends on, such as
    /// images; sequences with different salts share nothing.
    #[pyo3(signature = (tokens, *, salt=None, extras=Vec::new()))]
    fn chain(
        &self,
        py: Python<'_>,
        tokens: Vec<u32>,
        salt: Option<&str>,
        extras: Vec<(usize, Vec<u8>)>,
    ) -> PyResult<Chain> {
        let space = self.space()?;
        py.detach(|| chain_of(&space, &tokens, salt, extras))
    }

    /// The chunks that an engine has names of its own for, one key a chunk, such as hashes of all tokens before. A chunk is
    /// found by its key alone, whatever other keys it is asked for with.
    fn chain_of_keys(&self, py: Python<'_>, keys: Vec<PyBackedBytes>) -> PyResult<Chain> {
        let space = self.space()?;
        py.detach(|| chain_of_keys(&space, &keys))
    }

    /// The chain that `Chain.pack` gave; `None` where it was made for another store, or there is no daemon.
    fn unpack(&self, packed: &[u8]) -> Option<Chain> {
        unpack(&self.lookups.space()?, packed)
    }

    /// How much of a chain the store has, from its first chunk on. Waits for remote tiers as long as the store allows.
    fn lookup(&self, py: Python<'_>, chain: &Chain) -> Found {
        py.detach(|| {
            let found = self.lookups.run(|client| {
                if !client.space().names_as(chain.inner.space()) {
                    return Ok(Found::nothing());
                }
                let opened = client.open(&chain.inner)?;
                let n_chunks = n_whole_chunks(&opened);
                Ok(Found {
                    n_chunks,
                    n_tokens: n_chunks * client.space().chunk_tokens(),
                    slowest_tier: opened.slowest_tier().name(),
                })
            });
            found.unwrap_or_else(Found::nothing)
        })
    }

    /// Begins a lookup; the job's result is the number of tokens.
    fn start_lookup(&self, chain: &Chain) -> PyResult<Job> {
        let (session, chain) = (Arc::clone(&self.lookups), chain.inner.clone());
        let workers = self.workers.lock();
        Ok(workers.as_ref().ok_or_else(closed)?.lookups.submit(move || {
            let found = session.run(|client| {
                let is_named = client.space().names_as(chain.space());
                if !is_named {
                    return Ok(0);
                }
                Ok(n_whole_chunks(&client.open(&chain)?) * client.space().chunk_tokens())
            });
            found.unwrap_or(0)
        }))
    }

    /// Begins to read blocks of a chain, from its block `first_block` on, into `blocks` of an engine, as far as they are of whole
    /// chunks; the job's result is how many came, from the first on. Blocks behind those have any bytes. For memory of a GPU,
    /// `after` is a `CUevent` behind which they may be written; it must live until the job is done.
    #[pyo3(signature = (chain, first_block, memory, blocks, *, after=None))]
    fn start_load(
        &self,
        chain: &Chain,
        first_block: usize,
        memory: Py<EngineMemory>,
        blocks: Vec<u32>,
        after: Option<u64>,
    ) -> PyResult<Job> {
        let transfer = self.transfer(chain, first_block, memory, blocks, after)?;
        let mut distinct = transfer.blocks.clone();
        distinct.sort_unstable();
        distinct.dedup();
        if distinct.len() < transfer.blocks.len() {
            return Err(invalid("blocks", &"some twice", "each block once"));
        }
        let session = Arc::clone(&self.loads);
        let workers = self.workers.lock();
        let loads = &workers.as_ref().ok_or_else(closed)?.loads;
        Ok(loads.submit(move || run(&session, |client| transfer.load(client))))
    }

    /// Begins to write blocks of a chain, from its block `first_block` on, which begins a chunk. `blocks` are those of an engine
    /// from the start of the chain on; the job's result is how many of them are stored, those included that were there. For memory of a GPU, `after` is a
    /// `CUevent` behind which they are written; it must live until the job is done. With `pin_s` the chain is kept in memory for so many
    /// seconds. With `ttl_s` chunks that are written are not served any more after so many seconds, and stay in memory; with a
    /// `priority` of `low` they leave before others.
    #[pyo3(signature = (chain, first_block, memory, blocks, *, after=None, pin_s=None, ttl_s=None, priority="normal"))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn start_save(
        &self,
        chain: &Chain,
        first_block: usize,
        memory: Py<EngineMemory>,
        blocks: Vec<u32>,
        after: Option<u64>,
        pin_s: Option<f64>,
        ttl_s: Option<f64>,
        priority: &str,
    ) -> PyResult<Job> {
        let pin_time = pin_s.map(|pin_s| time_of("pin_s", pin_s)).transpose()?;
        let retention = retention_of(ttl_s, priority)?;
        let transfer = Transfer { retention, ..self.transfer(chain, 0, memory, blocks, after)? };
        let chunk_blocks = chain.inner.space().chunk_tokens() / self.format.block_tokens.get();
        if !first_block.is_multiple_of(chunk_blocks) {
            return Err(invalid("first_block", &first_block, &format!("a multiple of {chunk_blocks}")));
        }
        let (session, manager) = (Arc::clone(&self.saves), Arc::clone(&self.manager));
        let workers = self.workers.lock();
        let saves = &workers.as_ref().ok_or_else(closed)?.saves;
        Ok(saves.submit(move || {
            let n_stored = run(&session, |client| transfer.save(client, first_block / chunk_blocks));
            if let Some(pin_time) = pin_time.filter(|_| n_stored > 0)
                && let Err(error) = manager.pin_for(&transfer.chain, pin_time)
            {
                tracing::debug!(%error, "could not pin what was saved");
            }
            n_stored
        }))
    }

    /// Stores the KV of a chain from an array, without a copy before; returns the tokens that are stored, from the first on, those
    /// included that were there. Only whole chunks are stored. The array is in memory of the CPU, with `__dlpack__` or the buffer
    /// protocol: contiguous with one axis, layer by layer, or with axes of layers and tokens first.
    /// With `pin_s` the chain is kept in memory for so many seconds; `ttl_s` and `priority` as in `start_save`.
    #[pyo3(signature = (chain, array, *, pin_s=None, ttl_s=None, priority="normal"))]
    fn save(
        &self,
        py: Python<'_>,
        chain: &Chain,
        array: &Bound<'_, PyAny>,
        pin_s: Option<f64>,
        ttl_s: Option<f64>,
        priority: &str,
    ) -> PyResult<usize> {
        let Some((memory, blocks)) = self.memory_of(array, false)? else { return Ok(0) };
        let job = self.start_save(chain, 0, Py::new(py, memory)?, blocks, None, pin_s, ttl_s, priority)?;
        Ok(job.wait_or_stop(py)? * self.format.block_tokens.get())
    }

    /// Reads the KV of a chain into an array, as `save` takes it; returns the tokens that came, from the first on. Tokens of the array
    /// behind those have any bytes.
    fn load(&self, py: Python<'_>, chain: &Chain, out: &Bound<'_, PyAny>) -> PyResult<usize> {
        let Some((memory, blocks)) = self.memory_of(out, true)? else { return Ok(0) };
        let job = self.start_load(chain, 0, Py::new(py, memory)?, blocks, None)?;
        Ok(job.wait_or_stop(py)? * self.format.block_tokens.get())
    }

    /// Registers the store's memory with the GPU of `memory`, so that the first copies are fast too.
    fn prepare(&self, memory: Py<EngineMemory>) -> PyResult<Vec<Job>> {
        let workers = self.workers.lock();
        let StoreWorkers { loads, saves, .. } = workers.as_ref().ok_or_else(closed)?;
        let Some(gpu) = memory.get().gpu.clone() else { return Ok(Vec::new()) };
        let prepared = |session: &Arc<NodeSession>, workers: &Workers| {
            let (session, gpu) = (Arc::clone(session), Arc::clone(&gpu));
            workers.submit(move || {
                run(&session, |client| {
                    gpu.register(client);
                    Ok(1)
                })
            })
        };
        Ok(vec![prepared(&self.loads, loads), prepared(&self.saves, saves)])
    }

    /// Tells the eviction policies of a request with this chain, once for each.
    #[pyo3(signature = (chain, n_generated_tokens=None))]
    fn note_request(&self, chain: &Chain, n_generated_tokens: Option<u32>) -> PyResult<Job> {
        let (session, chain) = (Arc::clone(&self.saves), chain.inner.clone());
        let workers = self.workers.lock();
        Ok(workers.as_ref().ok_or_else(closed)?.saves.submit(move || {
            run(&session, |client| {
                if client.space().names_as(chain.space()) {
                    client.open(&chain)?.note_request(n_generated_tokens)?;
                }
                Ok(0)
            })
        }))
    }

    /// Forgets everything in the namespace of this engine, of all its ranks; how many chunks left each tier, by its name.
    fn clear(&self, py: Python<'_>) -> PyResult<HashMap<String, usize>> {
        let cleared = py.detach(|| NodeManager::new(self.options.clone()).clear(None, None));
        let cleared = cleared.map_err(|error| exception_of(&error))?;
        Ok(cleared.into_iter().map(|(tier, n_chunks)| (tier.to_string(), n_chunks)).collect())
    }

    /// Waits for jobs that run, cancels those that wait, and detaches.
    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            let workers = self.workers.lock().take();
            drop(workers);
            self.lookups.end();
            self.loads.end();
            self.saves.end();
            self.manager.close();
        });
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, py: Python<'_>, _kind: Py<PyAny>, _value: Py<PyAny>, _trace: Py<PyAny>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!("Store(is_attached={})", if self.is_attached() { "True" } else { "False" })
    }
}

impl Store {
    fn start(
        socket: SocketAddress,
        options: EngineOptions,
        own: Option<OwnStore>,
        idle_saves: bool,
    ) -> PyResult<Self> {
        let (format, n_copy_threads) = (options.format, options.n_copy_threads);
        let attach = options.attach_to(socket);
        let session = |is_patient| {
            let options = AttachOptions { is_patient, ..attach.clone() };
            NodeSession::start(options).map(Arc::new).map_err(|error| exception_of(&error))
        };
        let workers = |name, n_threads, is_idle| {
            Workers::start(name, n_threads, is_idle)
                .map_err(|error| KvikError::new_err(format!("start threads: {error}")))
        };
        let workers = StoreWorkers {
            lookups: workers("kvik-lookups", 1, false)?,
            loads: workers("kvik-loads", 2, false)?,
            saves: workers("kvik-saves", 1, idle_saves)?,
        };
        Ok(Self {
            format,
            lookups: session(false)?,
            loads: session(false)?,
            saves: session(idle_saves)?,
            manager: Arc::new(NodeManager::new(attach.clone()).with_timeout(attach.timeout)),
            options: attach,
            workers: Mutex::new(Some(workers)),
            n_copy_threads,
            own,
        })
    }

    fn sessions(&self) -> [&Arc<NodeSession>; 3] {
        [&self.lookups, &self.loads, &self.saves]
    }

    fn space(&self) -> PyResult<Space> {
        self.lookups.space().ok_or_else(|| StoreGoneError::new_err("there is no store daemon"))
    }

    /// The tokens of an array as blocks, all of them.
    fn memory_of(
        &self,
        array: &Bound<'_, PyAny>,
        is_written: bool,
    ) -> PyResult<Option<(EngineMemory, Vec<u32>)>> {
        let ChunkFormat { n_layers, token_layer_bytes, block_tokens, .. } = self.format;
        let (n_layers, token_layer_bytes) = (n_layers as usize, token_layer_bytes as usize);
        let memory =
            EngineMemory::of_tokens(array, n_layers, token_layer_bytes, block_tokens.get(), is_written)?;
        Ok(memory.map(|memory| {
            let blocks = (0..memory.n_blocks as u32).collect();
            (memory, blocks)
        }))
    }

    fn transfer(
        &self,
        chain: &Chain,
        first_block: usize,
        memory: Py<EngineMemory>,
        mut blocks: Vec<u32>,
        after: Option<u64>,
    ) -> PyResult<Transfer> {
        let engine = memory.get();
        let block_bytes = self.format.payload_bytes(self.format.block_tokens.get());
        if engine.block_tokens != self.format.block_tokens.get() || engine.block_bytes() != block_bytes {
            let given = format!("{} bytes for {} tokens", engine.block_bytes(), engine.block_tokens);
            let allowed = format!("{block_bytes} bytes for {} tokens", self.format.block_tokens);
            return Err(invalid("block of the memory", &given, &allowed));
        }
        if let Some(block) = blocks.iter().find(|block| **block as usize >= engine.n_blocks) {
            return Err(invalid("block", block, &format!("less than {}", engine.n_blocks)));
        }
        let chunk_tokens = chain.inner.space().chunk_tokens();
        let chunk_blocks = chunk_tokens / engine.block_tokens;
        let n_chain_blocks = chain.inner.n_tokens() / chunk_tokens * chunk_blocks;
        let end = first_block.saturating_add(blocks.len()).min(n_chain_blocks) / chunk_blocks * chunk_blocks;
        blocks.truncate(end.saturating_sub(first_block));
        // A transfer of nothing begins at the chain's start.
        let first_block = if blocks.is_empty() { 0 } else { first_block };
        let (chain, n_threads) = (chain.inner.clone(), self.n_copy_threads);
        let (memory, retention) = (Arc::new(memory), Retention::default());
        Ok(Transfer { chain, first_block, memory, blocks, n_threads, after, retention })
    }
}

fn run(session: &NodeSession, ask: impl FnMut(&NodeClient) -> kvik_node::Result<usize>) -> usize {
    session.run(ask).unwrap_or(0)
}

/// Chunks that were found, without a tail: jobs move whole chunks.
fn n_whole_chunks(opened: &OpenChain) -> usize {
    opened.n_found_tokens() / opened.chain().space().chunk_tokens()
}

fn closed() -> PyErr {
    StoreGoneError::new_err("the store is closed")
}

// === impl OwnStore ===

impl OwnStore {
    fn open(config: &StoreConfig) -> PyResult<Self> {
        let plan = config.resolve().map_err(|error| exception_of(&error))?;
        let plan = plan.ok_or_else(|| invalid("ram", &config.ram, "more than 0"))?;
        let store = open_store(config, &plan, None).map_err(|error| exception_of(&error))?;
        let folder = tempfile::Builder::new()
            .prefix("kvik-store-")
            // As the socket demands, whatever the process' mask is.
            .permissions(Permissions::from_mode(0o700))
            .tempdir()
            .map_err(|error| KvikError::new_err(format!("make a folder: {error}")))?;
        let options = NodeOptions::new(SocketAddress::Path(folder.path().join(SOCKET_NAME)), store);
        let server = NodeServer::start(options).map_err(|error| exception_of(&error))?;
        Ok(Self { server, folder })
    }

    fn socket(&self) -> SocketAddress {
        SocketAddress::Path(self.folder.path().join(SOCKET_NAME))
    }
}

impl Drop for OwnStore {
    fn drop(&mut self) {
        self.server.end();
    }
}

impl Found {
    fn nothing() -> Self {
        Self { n_chunks: 0, n_tokens: 0, slowest_tier: "ram" }
    }
}
