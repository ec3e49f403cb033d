//! The store of a node, as an engine uses it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvik_memory::SocketAddress;
use kvik_node::{AttachOptions, NodeManager, NodeSession, StoreConfig};
use kvik_store::{ChunkFormat, Space};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::chain::{Chain, chain_of, chain_of_keys, unpack};
use crate::client::Client;
use crate::copies::Transfer;
use crate::engine::{EngineOptions, retention_of, time_of};
use crate::error::{StoreGoneError, exception_of, invalid};
use crate::found::Found;
use crate::gpu::Gpu;
use crate::job::Job;
use crate::memory::EngineMemory;
use crate::own_store::OwnStore;
use crate::sessions::{Sessions, run};

/// A session with the store of this node; it outlives the daemon, and is attached again when the daemon is back.
///
/// Calls release Python's lock. While there is no daemon, lookups find nothing and jobs end with 0.
#[pyclass(frozen, module = "kvik")]
#[derive(Debug)]
pub(crate) struct Store {
    format: ChunkFormat,
    /// How it attaches.
    options: AttachOptions,
    sessions: Sessions,
    n_copy_threads: usize,
    /// The store of this process, where it has one; dropped after the sessions.
    own: Option<OwnStore>,
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
            Self::start(SocketAddress::Path(own.path()), options, Some(own), false)
        })
    }

    /// Where other engines attach to a store in this process; `None` for the store of a daemon.
    #[getter]
    fn socket(&self) -> Option<PathBuf> {
        self.own.as_ref().map(OwnStore::path)
    }

    /// Whether a daemon serves this store now.
    #[getter]
    fn is_attached(&self) -> bool {
        self.sessions.all().into_iter().all(|session| session.space().is_some())
    }

    /// Why no daemon serves this store, or how the last call failed; `None` while one does.
    #[getter]
    fn last_error(&self) -> Option<String> {
        self.sessions.all().into_iter().find_map(NodeSession::last_error)
    }

    /// Waits for a daemon; says whether there is one within `timeout_s` seconds.
    fn wait_attached(&self, py: Python<'_>, timeout_s: f64) -> bool {
        let timeout = Duration::try_from_secs_f64(timeout_s.max(0.0)).unwrap_or(Duration::MAX);
        let begin = Instant::now();
        let is_attached =
            |session: &NodeSession| session.wait_for_space(timeout.saturating_sub(begin.elapsed())).is_some();
        py.detach(|| self.sessions.all().into_iter().all(is_attached))
    }

    /// Tokens of a chunk; `None` while there is no daemon.
    #[getter]
    fn chunk_tokens(&self) -> Option<usize> {
        self.sessions.lookups().space().map(|space| space.chunk_tokens())
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
        unpack(&self.sessions.lookups().space()?, packed)
    }

    /// How much of a chain the store has, from its first chunk on. Waits for remote tiers as long as the store allows.
    fn lookup(&self, py: Python<'_>, chain: &Chain) -> Found {
        py.detach(|| {
            let found = self.sessions.lookups().run(|client| {
                if !client.space().names_as(chain.inner.space()) {
                    return Ok(Found::nothing());
                }
                Ok(Found::of(&client.open(&chain.inner)?))
            });
            found.unwrap_or_else(Found::nothing)
        })
    }

    /// Begins a lookup; the job's result is the number of tokens.
    fn start_lookup(&self, chain: &Chain) -> PyResult<Job> {
        let chain = chain.inner.clone();
        let found = Arc::<OnceLock<Found>>::default();
        let answer = Arc::clone(&found);
        let job = self.sessions.start_lookup(move |session| {
            run(session, |client| {
                if !client.space().names_as(chain.space()) {
                    return Ok(0);
                }
                let opened = client.open(&chain)?;
                Ok(answer.get_or_init(|| Found::of(&opened)).n_tokens)
            })
        })?;
        Ok(job.with_found(found))
    }

    /// Begins to read blocks of a chain, from its block `first_block` on, into `blocks` of an engine, as far as they are of whole
    /// chunks; the job's result is how many came, from the first on. Blocks behind those have any bytes. For memory of a GPU,
    /// `after` is a `CUevent` behind which they may be written; it must live until the job is done. With `by_layers` all blocks get
    /// their first layer first, and so on (`Job.wait_layers`); only for memory of the CPU. With `waiters_copy` too, the threads that
    /// wait for layers copy them: for an engine that computes on all processors.
    #[pyo3(signature = (chain, first_block, memory, blocks, *, after=None, by_layers=false, waiters_copy=false))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn start_load(
        &self,
        chain: &Chain,
        first_block: usize,
        memory: Py<EngineMemory>,
        blocks: Vec<u32>,
        after: Option<u64>,
        by_layers: bool,
        waiters_copy: bool,
    ) -> PyResult<Job> {
        if by_layers {
            self.check_layers(memory.get())?;
        } else if waiters_copy {
            return Err(invalid("waiters_copy", &true, "false without `by_layers`"));
        }
        let transfer = self.transfer(chain, first_block, memory, blocks, after)?;
        let mut distinct = transfer.blocks.clone();
        distinct.sort_unstable();
        distinct.dedup();
        if distinct.len() < transfer.blocks.len() {
            return Err(invalid("blocks", &"some twice", "each block once"));
        }
        if by_layers {
            let transfer = Arc::new(transfer);
            return self.sessions.start_layers(move |session, reporter| {
                run(session, |client| transfer.load_layers(client, reporter, waiters_copy))
            });
        }
        self.sessions.start_load(move |session| run(session, |client| transfer.load(client)))
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
        let manager = Arc::clone(self.sessions.manager());
        self.sessions.start_save(move |session| {
            let n_stored = run(session, |client| transfer.save(client, first_block / chunk_blocks));
            if let Some(pin_time) = pin_time.filter(|_| n_stored > 0)
                && let Err(error) = manager.pin_for(&transfer.chain, pin_time)
            {
                tracing::debug!(%error, "could not pin what was saved");
            }
            n_stored
        })
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
        let job = self.start_load(chain, 0, Py::new(py, memory)?, blocks, None, false, false)?;
        Ok(job.wait_or_stop(py)? * self.format.block_tokens.get())
    }

    /// Registers the store's memory with the GPU of `memory`, so that the first copies are fast too.
    fn prepare(&self, memory: Py<EngineMemory>) -> PyResult<Vec<Job>> {
        self.sessions.check_open()?;
        let Some(gpu) = memory.get().gpu.clone() else { return Ok(Vec::new()) };
        let registered = |gpu: Arc<Gpu>| {
            move |session: &NodeSession| {
                run(session, |client| {
                    gpu.register(client);
                    Ok(1)
                })
            }
        };
        let loads = self.sessions.start_load(registered(Arc::clone(&gpu)))?;
        Ok(vec![loads, self.sessions.start_save(registered(gpu))?])
    }

    /// Tells the eviction policies of a request with this chain, once for each.
    #[pyo3(signature = (chain, n_generated_tokens=None))]
    fn note_request(&self, chain: &Chain, n_generated_tokens: Option<u32>) -> PyResult<Job> {
        let chain = chain.inner.clone();
        self.sessions.start_save(move |session| {
            run(session, |client| {
                if client.space().names_as(chain.space()) {
                    client.open(&chain)?.note_request(n_generated_tokens)?;
                }
                Ok(0)
            })
        })
    }

    /// Forgets everything in the namespace of this engine, of all its ranks; how many chunks left each tier, by its name.
    fn clear(&self, py: Python<'_>) -> PyResult<HashMap<String, usize>> {
        let cleared = py.detach(|| NodeManager::new(self.options.clone()).clear(None, None));
        let cleared = cleared.map_err(|error| exception_of(&error))?;
        Ok(cleared.into_iter().map(|(tier, n_chunks)| (tier.to_string(), n_chunks)).collect())
    }

    /// Waits for jobs that run, cancels those that wait, and detaches.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.sessions.end());
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
        let sessions = Sessions::start(&attach, idle_saves)?;
        Ok(Self { format, options: attach, sessions, n_copy_threads, own })
    }

    fn space(&self) -> PyResult<Space> {
        self.sessions.lookups().space().ok_or_else(|| StoreGoneError::new_err("there is no store daemon"))
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

    /// Fails if layers of this memory cannot be loaded one after the other.
    fn check_layers(&self, memory: &EngineMemory) -> PyResult<()> {
        if memory.gpu.is_some() {
            return Err(invalid("by_layers", &true, "false for memory of a GPU"));
        }
        let n_layers = self.format.n_layers as usize;
        if !memory.pieces.len().is_multiple_of(n_layers) {
            let allowed = format!("as many for each of {n_layers} layers");
            return Err(invalid("pieces", &memory.pieces.len(), &allowed));
        }
        Ok(())
    }

    fn transfer(
        &self,
        chain: &Chain,
        first_block: usize,
        memory: Py<EngineMemory>,
        blocks: Vec<u32>,
        after: Option<u64>,
    ) -> PyResult<Transfer> {
        let transfer = Transfer::try_new(&self.format, chain.inner.clone(), first_block, memory, blocks)?;
        Ok(Transfer { n_threads: self.n_copy_threads, after, ..transfer })
    }
}
