//! The life of a gateway: start, reload, drain.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::HeaderMap;
use kvik_indexer::grpc::CallGuard;
use kvik_indexer::{Indexer, Tokenizer};
use kvik_proto::client::{TlsClientConfig, http_client};
use kvik_runtime::config::{self, FieldChange};
use kvik_runtime::http::{listen, serve, tls_acceptor};
use kvik_runtime::shutdown::Shutdown;
use kvik_runtime::telemetry::{self, Tracer};
use kvik_runtime::tls::TlsClientPem;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::api;
use crate::config::{BackendConfig, FIXED_FIELDS, GatewayConfig};
use crate::error::{GatewayError, Result};
use crate::management::Management;
use crate::picker::Picker;
use crate::state::Shared;
use crate::ui::collector;
use crate::upstream::breaker::State;
use crate::upstream::kv_listeners;
use crate::upstream::members::Origin;
use crate::upstream::probe;
use crate::upstream::watch;

/// Time between two looks at the configuration file.
const FILE_INTERVAL: Duration = Duration::from_secs(1);

/// Admits calls to the index by the keys and tokens of now.
struct GrpcGuard(Arc<Shared>);

impl CallGuard for GrpcGuard {
    fn admits(&self, headers: &HeaderMap) -> bool {
        self.0.view().keys.admits(&self.0.trust, headers)
    }
}

/// A handle on a gateway; clones are the same one.
#[derive(Debug, Clone)]
pub struct Gateway {
    shared: Arc<Shared>,
}

/// A gateway that serves.
#[derive(Debug)]
pub struct Running {
    gateway: Gateway,
    address: SocketAddr,
    finished: CancellationToken,
}

/// What a process serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Requests, and the index beside them.
    Gateway,
    /// The choice of workers for another data plane, and the index beside it.
    Picker,
    /// The index alone.
    Index,
}

/// A backend as the gateway sees it now.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerStatus {
    /// The worker's id or the engine's address.
    pub id: String,
    /// Estimated tokens of the requests it has from this gateway; of a stream that has begun, of its answer only.
    pub outstanding_tokens: u64,
    /// Whether its breaker lets requests through.
    pub is_usable: bool,
    /// `closed`, `half_open` or `open`.
    pub breaker: &'static str,
}

// === impl Gateway ===

impl Gateway {
    /// Starts a gateway: listens, follows the coordinators, asks backends for their health. All
    /// tasks run on `shutdown`; when it drains nothing new is accepted and open streams finish.
    ///
    /// # Errors
    /// If the configuration is not valid, the address is taken or a certificate cannot be used.
    pub fn start(
        config: GatewayConfig,
        shutdown: &Shutdown,
    ) -> Pin<Box<dyn Future<Output = Result<Running>> + Send + '_>> {
        // Boxed, so that the gateway is compiled with this crate and not again with each program that polls it.
        Box::pin(Self::run(config, shutdown, Role::Gateway, None))
    }

    /// Starts a gateway for models whose engines another part of this process manages; [`manage`](Self::manage) says
    /// which there are.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_managed(
        config: GatewayConfig,
        shutdown: &Shutdown,
        management: Management,
    ) -> Pin<Box<dyn Future<Output = Result<Running>> + Send + '_>> {
        Box::pin(Self::run(config, shutdown, Role::Gateway, Some(management)))
    }

    /// Starts the index alone: it learns from the configured engines and from the workers of the coordinators, answers
    /// `/v1/score`, `/index/*` and gRPC, and is ready without any backend. Of the configuration `listen`, `tls`,
    /// `coordinators`, `backend_tls`, `api_keys`, `max_body_bytes`, `index` and `tracing` count.
    ///
    /// # Errors
    /// As [`start`](Self::start), and if `index.enabled` is false.
    pub fn start_index(
        config: GatewayConfig,
        shutdown: &Shutdown,
    ) -> Pin<Box<dyn Future<Output = Result<Running>> + Send + '_>> {
        Box::pin(async move {
            if !config.index.enabled {
                return Err(GatewayError::InvalidConfig {
                    field: "index.enabled".to_owned(),
                    value: "false".to_owned(),
                    allowed: "true for a service that is the index alone".to_owned(),
                });
            }
            Self::run(config, shutdown, Role::Index, None).await
        })
    }

    /// Starts what chooses workers for another data plane: it knows workers, loads and the index as a gateway does, and serves no
    /// requests of clients. [`picker`](Self::picker) is asked; over HTTP there are `/ready`, `/route/explain` and what the index has.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_picker(
        config: GatewayConfig,
        shutdown: &Shutdown,
    ) -> Pin<Box<dyn Future<Output = Result<Running>> + Send + '_>> {
        Box::pin(Self::run(config, shutdown, Role::Picker, None))
    }

    async fn run(
        config: GatewayConfig,
        shutdown: &Shutdown,
        role: Role,
        management: Option<Management>,
    ) -> Result<Running> {
        config.validate()?;
        telemetry::start_metrics()?;
        let TlsClientPem { authorities_pem, identity_pem } = config.backend_tls.read()?;
        let http = http_client(&TlsClientConfig { authorities_pem, identity_pem })?;
        let tls = tls_acceptor(&config.tls)?;
        let trust = Arc::new(config.trust().read(&config.tls)?);
        let listener = listen(&config.listen).await?;
        let address = listener.local_addr().map_err(|source| kvik_runtime::RuntimeError::Listen {
            address: config.listen.clone(),
            source,
        })?;
        trust.check_listener("listen", address, !config.api_keys.is_empty())?;
        if !address.ip().to_canonical().is_loopback()
            && config.api_keys.is_empty()
            && config.tls.client_authorities.is_none()
        {
            tracing::warn!(%address, "every client is served; `api_keys` or `tls.client_authorities` chooses them");
        }
        let mut listeners = vec![("listen", address)];
        let mut grpc = None;
        if let Some(wanted) = config.index.grpc_listen.as_ref().filter(|_| config.index.enabled) {
            let listener = listen(wanted).await?;
            let at = listener
                .local_addr()
                .map_err(|source| kvik_runtime::RuntimeError::Listen { address: wanted.clone(), source })?;
            trust.check_listener("index.grpc_listen", at, !config.api_keys.is_empty())?;
            tracing::info!(address = %at, "the index listens for gRPC");
            listeners.push(("index.grpc_listen", at));
            grpc = Some(listener);
        }
        let tracer = Tracer::start(&config.tracing, "kvik-gateway", &address.to_string(), shutdown)?;
        let mut indexer = None;
        if config.index.enabled {
            indexer = Some(Indexer::start(&config.index, shutdown).await?);
        }
        let limits = config.limits.clone();
        let shared = Arc::new(Shared::new(
            config,
            http,
            (trust, listeners),
            indexer.clone(),
            management.as_ref().map(|management| Arc::clone(&management.readiness)),
            tracer,
            shutdown.clone(),
        ));
        for model in management.iter().flat_map(|management| &management.models) {
            shared.change_members(|book| book.manage(model, None));
        }
        if let Some(indexer) = indexer {
            if let Some(listener) = grpc {
                let guard = Arc::new(GrpcGuard(Arc::clone(&shared)));
                indexer.serve_grpc(listener, tls.clone(), guard, shutdown);
            }
            shutdown.spawn(kv_listeners::run(Arc::clone(&shared), indexer));
        }
        shutdown.spawn(watch::run(Arc::clone(&shared)));
        let router = match role {
            Role::Gateway => {
                shutdown.spawn(probe::run(Arc::clone(&shared)));
                if shared.view().config.ui.enabled {
                    shutdown.spawn(collector::run(Arc::clone(&shared)));
                }
                api::router(Arc::clone(&shared), management.as_ref())
            }
            Role::Picker => {
                shutdown.spawn(probe::run(Arc::clone(&shared)));
                api::picker_router(Arc::clone(&shared))
            }
            Role::Index => api::index_router(Arc::clone(&shared)),
        };
        let finished = CancellationToken::new();
        let (serving, guard) = (shutdown.clone(), finished.clone().drop_guard());
        shutdown.spawn(async move {
            serve(listener, router, tls, &limits, serving.draining(), &serving).await;
            drop(guard);
        });
        tracing::info!(%address, ?role, "listening");
        Ok(Running { gateway: Self { shared }, address, finished })
    }

    /// Checks `config` and puts it in place of the current one; members, loads and breakers stay.
    /// Returns and logs the fields that differ. Those that only count at the start keep their effect
    /// until then.
    ///
    /// # Errors
    /// If the configuration is not valid; nothing has changed then.
    pub fn reload(&self, config: GatewayConfig) -> Result<Vec<FieldChange>> {
        config.validate()?;
        let before = self.shared.view();
        // Keys may be what a listener was allowed for.
        if config.api_keys.is_empty() && !before.config.api_keys.is_empty() {
            for (field, address) in &self.shared.listeners {
                self.shared.trust.check_listener(field, *address, false)?;
            }
        }
        let changes = config::changes(&*before.config, &config)?;
        for change in &changes {
            let FieldChange { field, before, after } = change;
            let is_fixed = FIXED_FIELDS.iter().any(|fixed| field.starts_with(fixed));
            if is_fixed {
                tracing::warn!(%field, %before, %after, "changed in the configuration; takes effect after a restart");
            } else {
                tracing::info!(%field, %before, %after, "configuration changed");
            }
        }
        self.shared.replace_config(config);
        Ok(changes)
    }

    /// Calls `load` and reloads what it returns on each SIGHUP and, if a `file` is given, whenever
    /// that changes. A configuration that cannot be loaded is reported and the current one stays.
    pub fn reload_on_change<E>(
        &self,
        file: Option<PathBuf>,
        load: impl Fn() -> std::result::Result<GatewayConfig, E> + Send + Sync + 'static,
    ) where
        E: std::fmt::Display + Send + 'static,
    {
        let gateway = self.clone();
        let shutdown = self.shared.shutdown.clone();
        // Before the task runs: a change from now on is seen.
        let mut seen = file.as_deref().and_then(modified);
        self.shared.shutdown.spawn(async move {
            let mut hangup = signal(SignalKind::hangup()).ok();
            loop {
                tokio::select! {
                    () = next_hangup(hangup.as_mut()) => {}
                    () = tokio::time::sleep(FILE_INTERVAL), if file.is_some() => {
                        let now = file.as_deref().and_then(modified);
                        // A file that is gone is about to be replaced.
                        if now.is_none() || now == seen {
                            continue;
                        }
                        seen = now;
                    }
                    () = shutdown.stopping() => return,
                }
                match load().map_err(|error| error.to_string()) {
                    Err(error) => {
                        tracing::error!(%error, "failed to load the configuration; the current one stays");
                    }
                    Ok(config) => match gateway.reload(config) {
                        Err(error) => {
                            tracing::error!(%error, "failed to reload; the current configuration stays");
                        }
                        Ok(changes) => tracing::info!(n_changes = changes.len(), "configuration reloaded"),
                    },
                }
            }
        });
    }

    /// Serves `model`, at `url` while that is given; without one its requests wait for [`Readiness`](crate::Readiness). A backend that comes
    /// back at the same address begins anew: nothing that it did before counts against it.
    pub fn manage(&self, model: &str, url: Option<&str>) {
        self.shared.change_members(|book| book.manage(model, url));
    }

    /// Ends to serve a managed model.
    pub fn unmanage(&self, model: &str) {
        self.shared.change_members(|book| book.unmanage(model));
    }

    /// Replaces the engines that a program in this process has found; those of the configuration stay.
    pub fn set_discovered(&self, backends: &[BackendConfig]) {
        self.shared.change_members(|book| book.set_backends(Origin::Discovery, backends));
    }

    /// Chooses workers for requests that another data plane sends.
    pub fn picker(&self) -> Picker {
        Picker::new(Arc::clone(&self.shared))
    }

    /// Hands over the tokenizer of a model that `index.tokenizers` names none for.
    pub fn provide_tokenizer(&self, model: &str, tokenizer: Arc<Tokenizer>) {
        if let Some(indexer) = &self.shared.indexer {
            indexer.provide_tokenizer(model, tokenizer);
        }
    }

    /// The global KV index, for sources of events that the configuration does not name; `None` where it is switched off.
    pub fn indexer(&self) -> Option<&Arc<Indexer>> {
        self.shared.indexer.as_ref()
    }

    /// All backends, by id.
    pub fn workers(&self) -> Vec<WorkerStatus> {
        let backends = self.shared.read_members(crate::upstream::members::MemberBook::backends);
        let mut workers: Vec<WorkerStatus> = backends
            .iter()
            .map(|backend| WorkerStatus {
                id: backend.id.clone(),
                outstanding_tokens: backend.outstanding_tokens(),
                is_usable: backend.is_usable(),
                breaker: match backend.breaker_state() {
                    State::Closed => "closed",
                    State::HalfOpen => "half_open",
                    State::Open => "open",
                },
            })
            .collect();
        workers.sort_by(|left, right| left.id.cmp(&right.id));
        workers
    }

    /// Requests that wait for their turn.
    pub fn n_waiting(&self) -> usize {
        self.shared.admission.n_waiting()
    }
}

// === impl Running ===

impl Running {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A handle on it.
    pub fn gateway(&self) -> &Gateway {
        &self.gateway
    }

    /// Waits until it has drained: nothing is accepted and no connection is open. Cancel safe.
    pub async fn finished(&self) {
        self.finished.cancelled().await;
    }
}

fn modified(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

async fn next_hangup(hangup: Option<&mut tokio::signal::unix::Signal>) {
    match hangup {
        Some(hangup) => {
            hangup.recv().await;
        }
        None => std::future::pending().await,
    }
}
