//! The life of a worker: start, serve, end.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvik_model::{
    BLOCK_TOKENS, BackendOptions, DeviceMonitor, Engine, EngineOptions, Model, ModelError, TimedPass,
};
use kvik_node::{KEPT_BYTES, KvLog, LoggedChunks, StoreConfig};
use kvik_proto::client::{CoordinatorClient, HttpClient, TlsClientConfig, http_client};
use kvik_proto::kv_stream::BlockGroup;
use kvik_runtime::http::{listen, serve, tls_acceptor};
use kvik_runtime::hub::find_model;
use kvik_runtime::shutdown::Shutdown;
use kvik_runtime::telemetry::Tracer;
use kvik_runtime::tls::TlsClientPem;
use kvik_runtime::trust::Trust;
use kvik_store::Space;
use kvik_tokens::AddSpecial;
use kvik_types::TokenId;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::block_groups::{BLOCKS, CHUNKS};
use crate::config::WorkerConfig;
use crate::drain::Drain;
use crate::engine_thread::{EngineHandle, Patience};
use crate::error::{Result, WorkerError};
use crate::metrics::WorkerMetrics;
use crate::moves::{Arrivals, PeerClient, forget_tickets};
use crate::registration::Registration;
use crate::running::{RunningRequests, UnusedTickets};
use crate::sequences::Sequences;
use crate::staging::Staging;
use crate::state::{KvShape, Loaded, WorkerState, random_seed};
use crate::store::WorkerStore;
use crate::store_admin::StoreAdmin;
use crate::{api, clock, idle};

/// How long an engine computes before it serves: on a GPU long enough for passes of some thousand tokens, on a CPU for some hundred,
/// which are as fast there.
const GPU_WARM_UP_TIME: Duration = Duration::from_millis(200);
const CPU_WARM_UP_TIME: Duration = Duration::from_millis(50);

/// A model, its engine, and the store below it with the space of its chunks.
type LoadedEngine = (Model, Engine, Option<WorkerStore>, Option<Space>);

/// How a worker gets its engine; tests have engines that fail.
type LoadEngine = fn(&WorkerConfig, &Shutdown) -> Result<LoadedEngine>;

/// Starts workers.
#[derive(Debug)]
pub struct Worker;

/// A worker that serves.
#[derive(Debug)]
pub struct Running {
    address: SocketAddr,
    id: String,
    model_name: String,
    draining: CancellationToken,
    closed: CancellationToken,
    /// Why the engine ended, if not because it was told to.
    failure: Arc<OnceLock<String>>,
}

impl Worker {
    /// Listens, loads the model and registers with the coordinators; returns when the model is
    /// loaded. While it loads, `/health` answers and `/ready` says no.
    ///
    /// All tasks run on `shutdown`: the worker drains when it does and ends when it stops. It also drains when its engine
    /// fails; [`Running::outcome`] says so.
    ///
    /// # Errors
    /// If the configuration is wrong, the address is taken or the model cannot be loaded; nothing
    /// runs then.
    pub fn start(
        config: WorkerConfig,
        shutdown: &Shutdown,
    ) -> Pin<Box<dyn Future<Output = Result<Running>> + Send + '_>> {
        // Boxed, so that the worker is compiled with this crate and not again with each program that polls it.
        Box::pin(Self::run(config, shutdown, load_engine))
    }

    async fn run(config: WorkerConfig, shutdown: &Shutdown, load_engine: LoadEngine) -> Result<Running> {
        config.validate()?;
        let tls = tls_acceptor(&config.tls)?;
        let trust = Arc::new(config.trust().read(&config.tls)?);
        let clients = coordinator_clients(&config, &trust)?;
        let epoch = clock::unix_nanoseconds();
        let listener = listen(&config.listen).await?;
        let address = listener
            .local_addr()
            .map_err(|source| WorkerError::Io { what: format!("listen on {}", config.listen), source })?;
        trust.check_listener("listen", address, false)?;
        let host = host_name();
        let id = config.given_id().cloned().unwrap_or_else(|| format!("{host}-{}", address.port()));
        let base = config.advertise.clone().unwrap_or_else(|| {
            let scheme = if tls.is_some() { "https" } else { "http" };
            if address.ip().is_unspecified() {
                format!("{scheme}://{host}:{}", address.port())
            } else {
                format!("{scheme}://{address}")
            }
        });
        let tracer = Tracer::start(&config.tracing, "kvik-worker", &id, shutdown)?;
        let peers = PeerClient::new(http_clients(&config)?, trust.cluster_header());
        let address_of_worker = base.trim_end_matches('/').to_owned();
        let state = Arc::new(WorkerState::new(config, id.clone(), address_of_worker, peers));
        let (closing, closed) = (CancellationToken::new(), CancellationToken::new());
        // Of their own, because a worker may have to close them while the rest of the process goes on.
        let connections = Shutdown::new();
        let served = CancellationToken::new();
        let server = {
            let router = tracer.trace_requests(api::router(Arc::clone(&state), &trust));
            let (shutdown, closing) = (shutdown.clone(), closing.clone());
            let (connections, served) = (connections.clone(), served.clone());
            let limits = state.config.limits.clone();
            async move {
                tokio::select! {
                    () = serve(listener, router, tls, &limits, closing.cancelled_owned(), &connections) => {}
                    () = shutdown.stopping() => {}
                }
                connections.finish().await;
                served.cancel();
            }
        };
        shutdown.spawn(server);

        // Ends the server if anything below fails.
        let starting = closing.clone().drop_guard();
        let (loaded, thread, unused_tickets) = load(&state, epoch, shutdown, load_engine).await?;
        starting.disarm();

        let (loading, ended, server_ended) = (Arc::clone(&loaded), closed.clone(), served.clone());
        shutdown.spawn(async move {
            server_ended.cancelled().await;
            loading.engine.stop();
            let end = move || {
                // A thread that panicked has said so.
                let _ = thread.join();
                if let Some(admin) = &loading.store_admin {
                    admin.close();
                }
                drop(loading.chunk_watch.lock().take());
                if let Some(store) = &loading.store {
                    store.close();
                }
            };
            let _ = tokio::task::spawn_blocking(end).await;
            ended.cancel();
        });
        let (unregistered, coordinators) = (CancellationToken::new(), clients.clone());
        if clients.is_empty() {
            unregistered.cancel();
        } else {
            let registration = Registration::new(clients, &state, &loaded, epoch, base.trim_end_matches('/'));
            shutdown.spawn(registration.run(shutdown.clone(), unregistered.clone().drop_guard()));
        }
        shutdown.spawn(idle::end_idle(
            Arc::clone(&state),
            Arc::clone(&loaded),
            closing.clone(),
            shutdown.clone(),
        ));
        let forgetting =
            forget_tickets(state.peers.clone(), unused_tickets, closing.clone(), shutdown.clone());
        shutdown.spawn(forgetting);
        shutdown.spawn(drain_on_failure(Arc::clone(&state), loaded.engine.clone(), shutdown.clone()));
        let engine = loaded.engine.clone();
        let drain = Drain { engine, coordinators, unregistered, closing, connections, served };
        shutdown.spawn(drain.run(Arc::clone(&state), shutdown.clone()));
        tracing::info!(worker = %id, %address, model = %loaded.model_name, "worker serves");
        let model_name = loaded.model_name.clone();
        let failure = loaded.engine.failure();
        Ok(Running { address, id, model_name, draining: state.draining.clone(), closed, failure })
    }
}

impl Running {
    /// The address that is listened on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The worker's name.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The name that clients ask for the model under.
    pub fn model_name(&self) -> &str {
        &self.model_name
    }

    /// Takes nothing new from now on; the worker ends when its requests have.
    pub fn drain(&self) {
        self.draining.cancel();
    }

    /// Waits until the worker has ended. Cancel safe.
    pub async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// How the worker has ended.
    ///
    /// # Errors
    /// [`WorkerError::EngineFailed`] if its engine lost its device or panicked: a new process may be able to go on.
    pub fn outcome(&self) -> Result<()> {
        match self.failure.get() {
            None => Ok(()),
            Some(reason) => Err(WorkerError::EngineFailed { reason: reason.clone() }),
        }
    }
}

/// Drains the worker when its engine fails: it leaves its coordinator and ends, with nothing left to wait for.
async fn drain_on_failure(state: Arc<WorkerState>, engine: EngineHandle, shutdown: Shutdown) {
    tokio::select! {
        () = engine.ended() => {}
        () = shutdown.stopping() => return,
    }
    if let Some(reason) = engine.failure().get() {
        tracing::error!(worker = %state.id, reason, "the engine failed; the worker ends");
        state.draining.cancel();
    }
}

/// Loads the model and starts its engine, on threads that may block.
async fn load(
    state: &Arc<WorkerState>,
    epoch: u64,
    shutdown: &Shutdown,
    load_engine: LoadEngine,
) -> Result<(Arc<Loaded>, std::thread::JoinHandle<()>, UnusedTickets)> {
    let config = state.config.clone();
    let stopping = shutdown.clone();
    let loading = tokio::task::spawn_blocking(move || {
        let loaded = load_engine(&config, &stopping)?;
        Ok::<_, WorkerError>((loaded, device_monitor(&config)?))
    });
    let ((model, engine, store, space), device) = tokio::select! {
        loaded = loading => loaded.map_err(|_| WorkerError::Stopped)??,
        () = shutdown.stopping() => return Err(WorkerError::Stopped),
    };
    let config = &state.config;
    let model_name = config.served_model_name.clone().unwrap_or_else(|| model.name().to_owned());
    let metrics = WorkerMetrics::new(&model_name, &state.id);
    let shape = KvShape {
        n_layers: engine.config().n_layers,
        n_kv_heads: engine.config().n_kv_heads,
        head_dim: engine.config().head_dim,
        dtype: engine.kv_dtype(),
        vocab_size: engine.config().vocab_size,
    };
    let max_tokens = engine.max_sequence_tokens();
    let capacity_tokens = engine.capacity_tokens();
    let mut blend = config.blend()?;
    blend.selectors = blend.selectors.or_else(|| model.blend().cloned());
    let root = engine.namespace().seed().to_string();
    let (layout, block_layer_bytes) = (engine.kv_layout(), engine.block_layer_bytes());
    let groups = block_groups(&engine, space.as_ref());
    let kv_log = Arc::new(KvLog::new(state.id.clone(), epoch, model_name.clone(), groups, KEPT_BYTES));
    let store_admin = store.as_ref().map(StoreAdmin::new);
    let naming = Arc::clone(&kv_log);
    let on_space = move |space: &Space| naming.add_group(chunk_group(space));
    let observer = Arc::new(LoggedChunks::new(Arc::clone(&kv_log), CHUNKS));
    // Before the engine runs: what a disk kept from before is reported first.
    let chunk_watch =
        store.as_ref().map(|store| store.watch(space.as_ref(), on_space, observer)).transpose()?;
    let patience =
        Patience { slow_client: config.slow_client_timeout(), memory: config.memory.wait_timeout() };
    let (running, unused_tickets) = RunningRequests::new();
    let for_engine = store.as_ref().map(WorkerStore::for_engine);
    let (engine, thread) =
        EngineHandle::spawn(engine, for_engine.clone(), Arc::clone(&kv_log), metrics.clone(), patience)?;
    let loaded = Loaded {
        engine,
        tokenizer: Arc::clone(model.tokenizer()),
        metrics,
        sequences: Sequences::default(),
        running: Arc::new(running),
        arrivals: Arrivals::default(),
        root,
        capacity_tokens,
        layout,
        block_layer_bytes,
        staging: Staging::new(config.kv_staging_bytes),
        store: for_engine,
        chunk_watch: Mutex::new(chunk_watch),
        store_admin,
        device,
        kv_log,
        max_tokens,
        // Everything that decides the bits of an answer, given its request.
        fingerprint: format!("kvik-{}-{}", env!("CARGO_PKG_VERSION"), shape.dtype),
        model_name,
        shape,
        blend,
    };
    Ok((state.set_loaded(loaded), thread, unused_tickets))
}

/// What the keys of the blocks stand for that a worker holds.
fn block_groups(engine: &Engine, space: Option<&Space>) -> Vec<BlockGroup> {
    let root = engine.namespace().seed();
    let blocks = BlockGroup { number: BLOCKS, block_tokens: BLOCK_TOKENS as u32, root };
    std::iter::once(blocks).chain(space.map(chunk_group)).collect()
}

fn chunk_group(space: &Space) -> BlockGroup {
    BlockGroup { number: CHUNKS, block_tokens: space.chunk_tokens() as u32, root: space.root() }
}

fn load_engine(config: &WorkerConfig, shutdown: &Shutdown) -> Result<LoadedEngine> {
    let model = match &config.model {
        Some(given) => {
            let found = find_model(given, &config.hub, shutdown)?;
            Model::open(&found.folder)?.with_name(found.name)
        }
        None => Model::bundled()?,
    };
    let backend = config.backend(config.given_id().unwrap_or(&config.listen))?;
    let mut options = EngineOptions::default();
    options.max_batched_tokens = config.max_batched_tokens;
    options.max_sequences = config.max_sequences;
    options.segment_priming = segment_priming(config, &model)?;
    // Requests without a seed must differ from those of other workers and earlier lives.
    options.seed = random_seed();
    let mut engine = model.engine(&backend, options)?;
    check_segment_priming(config, &engine)?;
    let ordinal = match &backend {
        BackendOptions::Cpu(_) => None,
        BackendOptions::Cuda(cuda) => Some(cuda.ordinal),
    };
    let store = WorkerStore::open(&store_of_device(&config.store, ordinal), &engine)?;
    let space = store.as_ref().and_then(WorkerStore::space);
    warm_up(&mut engine, store.as_ref(), ordinal.is_some())?;
    Ok((model, engine, store, space))
}

/// Has an engine compute its first passes where that is of use: on a GPU, whose first pass loads programs, and before a store
/// that decides by the engine's speed what it loads.
fn warm_up(engine: &mut Engine, store: Option<&WorkerStore>, is_on_gpu: bool) -> Result<()> {
    let planner = store.and_then(WorkerStore::planner);
    if planner.is_none() && !is_on_gpu {
        return Ok(());
    }
    match engine.warm_up(if is_on_gpu { GPU_WARM_UP_TIME } else { CPU_WARM_UP_TIME }) {
        Ok(passes) => {
            for TimedPass { n_tokens, n_attended, seconds } in passes {
                planner.inspect(|planner| planner.note_pass(n_tokens, n_attended, seconds));
            }
            Ok(())
        }
        Err(error) if engine.lost_device().is_some() => Err(error.into()),
        Err(error) => {
            tracing::warn!(%error, "the engine could not compute its first passes; it serves without them");
            Ok(())
        }
    }
}

/// The settings of the store of an engine on the GPU `ordinal`, if it is on one: the copy engine reads and writes the memory
/// of the worker's own store by itself. That of a daemon is the daemon's.
fn store_of_device(config: &StoreConfig, ordinal: Option<u32>) -> StoreConfig {
    let mut config = config.clone();
    if config.daemon.is_none() {
        config.cuda_device = config.cuda_device.or(ordinal);
    }
    config
}

/// What watches the device of a worker on a GPU.
fn device_monitor(config: &WorkerConfig) -> Result<Option<Arc<DeviceMonitor>>> {
    Ok(match config.backend("")? {
        BackendOptions::Cpu(_) => None,
        BackendOptions::Cuda(cuda) => DeviceMonitor::open(cuda.ordinal).map(Arc::new),
    })
}

/// The tokens of the text that stands before segments.
fn segment_priming(config: &WorkerConfig, model: &Model) -> Result<Vec<TokenId>> {
    let text = config.blend_priming.as_deref().unwrap_or_default();
    Ok(model.tokenizer().encode(text, AddSpecial::No).map_err(ModelError::from)?)
}

/// A priming context beside which no segment has room would switch segments off without a word.
fn check_segment_priming(config: &WorkerConfig, engine: &Engine) -> Result<()> {
    let n_tokens = engine.segment_priming().len();
    if n_tokens < engine.max_sequence_tokens() {
        return Ok(());
    }
    Err(WorkerError::InvalidConfig {
        field: "blend_priming",
        value: format!("{n_tokens} tokens: {}", config.blend_priming.as_deref().unwrap_or_default()),
        allowed: "fewer tokens than a sequence may have",
    })
}

fn coordinator_clients(config: &WorkerConfig, trust: &Trust) -> Result<Vec<CoordinatorClient>> {
    if config.coordinators.is_empty() {
        return Ok(Vec::new());
    }
    let http = http_clients(config)?;
    let client =
        |base: &String| CoordinatorClient::new(http.clone(), base).with_header(trust.cluster_header());
    Ok(config.coordinators.iter().map(client).collect())
}

/// Calls other services of the cluster.
fn http_clients(config: &WorkerConfig) -> Result<HttpClient> {
    let TlsClientPem { authorities_pem, identity_pem } = config.coordinator_tls.read()?;
    Ok(http_client(&TlsClientConfig { authorities_pem, identity_pem })?)
}

/// The host's name, as the kernel tells it.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "worker".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests;
