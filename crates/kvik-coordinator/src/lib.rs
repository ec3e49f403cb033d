//! The coordinator: the members, and the ring that gateways place requests on.
//!
//! Workers register and send heartbeats; gateways watch the snapshot that comes of it and route by
//! themselves, so a coordinator that is away stops no request. Parts:
//!
//! * `membership`: the members, workers and store daemons apart, as a state machine; the time is an argument;
//! * `state`: the current leader and what the next one must know, in memory, in etcd or in Kubernetes;
//! * `election`, `leader`, `mirror`: the tasks that keep the lead, own the membership while it is
//!   held, and follow another leader while it is not;
//! * `publish`: the snapshot held, with its ring; `api`: the calls;
//! * `rebalance`: moves running requests from full workers to others, if it is turned on.
//!
//! Invariants:
//!
//! * Only the leader changes the membership, and every change is written down before it is shown or
//!   answered. A term that is over can write nothing.
//! * Snapshots of one coordinator rise in `(term, version)` until it restarts. A restart of a coordinator without
//!   shared state is another incarnation.
//! * A watcher costs one snapshot, however slowly it reads.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use kvik_coordinator::{Coordinator, CoordinatorConfig};
//! use kvik_runtime::shutdown::Shutdown;
//!
//! let shutdown = Shutdown::new();
//! let config = CoordinatorConfig { listen: "127.0.0.1:0".to_owned(), ..CoordinatorConfig::default() };
//! let running = Coordinator::start(config, &shutdown).await?;
//! println!("coordinator at {}", running.base);
//! shutdown.finish().await;
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod api;
mod config;
mod election;
mod error;
mod leader;
mod membership;
mod metrics;
mod mirror;
mod publish;
mod rebalance;
mod state;

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::SystemTime;

use kvik_index::ring::MAX_VIRTUAL_NODES;
use kvik_proto::client::{HttpClient, TlsClientConfig, http_client};
use kvik_runtime::http::{listen, serve, tls_acceptor};
use kvik_runtime::shutdown::Shutdown;
use kvik_runtime::telemetry::Tracer;
use kvik_runtime::tls::TlsClientPem;
use kvik_runtime::trust::Trust;
use tokio::sync::{mpsc, watch};

pub use config::{
    CoordinatorConfig, EtcdConfig, KubernetesStateConfig, RebalanceConfig, StateBackendKind, StateConfig,
};
pub use error::{CoordinatorError, Result};

use crate::api::Api;
use crate::leader::{Leader, Settings};
use crate::publish::Publisher;
use crate::rebalance::{BalanceSettings, Rebalancer};
use crate::state::{EmbeddedState, EtcdState, KubernetesState, Role, StateBackend};

/// Calls that wait for the leader's task; more wait in their connections.
const MAX_WAITING_COMMANDS: usize = 1024;

/// A coordinator.
#[derive(Debug)]
pub struct Coordinator;

/// A coordinator that runs.
#[derive(Debug, Clone)]
pub struct Running {
    /// The address that it listens on.
    pub address: SocketAddr,
    /// The base address that it advertises: `advertise`, else `http://` and [`Running::address`].
    pub base: String,
}

impl Coordinator {
    /// Starts a coordinator; it listens when this returns. Its tasks belong to `shutdown`: it gives
    /// up its lead and closes when that drains.
    ///
    /// # Errors
    /// If the configuration is not valid, a file of it cannot be used, or the address cannot be
    /// listened on. An etcd or API server that cannot be reached is no error: the coordinator goes on trying.
    pub fn start(
        config: CoordinatorConfig,
        shutdown: &Shutdown,
    ) -> Pin<Box<dyn Future<Output = Result<Running>> + Send + '_>> {
        // Boxed, so that the coordinator is compiled with this crate and not again with each program that polls it.
        Box::pin(Self::run(config, shutdown))
    }

    async fn run(config: CoordinatorConfig, shutdown: &Shutdown) -> Result<Running> {
        config.validate()?;
        let trust = Arc::new(config.trust().read(&config.tls)?);
        let TlsClientPem { authorities_pem, identity_pem } = config.peer_tls.read()?;
        let http = http_client(&TlsClientConfig { authorities_pem, identity_pem })?;
        let acceptor = tls_acceptor(&config.tls)?;
        let listener = listen(&config.listen).await?;
        let address = listener.local_addr().map_err(|source| kvik_runtime::RuntimeError::Listen {
            address: config.listen.clone(),
            source,
        })?;
        trust.check_listener("listen", address, false)?;
        let scheme = if acceptor.is_some() { "https" } else { "http" };
        let base = config.advertise.clone().unwrap_or_else(|| format!("{scheme}://{address}"));
        let base = base.trim_end_matches('/').to_owned();

        metrics::describe();
        let tracer = Tracer::start(&config.tracing, "kvik-coordinator", &address.to_string(), shutdown)?;
        let api = match config.state.backend {
            StateBackendKind::Embedded => {
                spawn(EmbeddedState::new(SystemTime::now()), &config, http, &trust, &tracer, shutdown)
            }
            StateBackendKind::Etcd => {
                let backend = EtcdState::new(http.clone(), &config.state.etcd, base.clone())?;
                spawn(backend, &config, http, &trust, &tracer, shutdown)
            }
            StateBackendKind::Kubernetes => {
                let backend = KubernetesState::new(&config.state.kubernetes, base.clone())?;
                spawn(backend, &config, http, &trust, &tracer, shutdown)
            }
        };
        if config.state.backend == StateBackendKind::Embedded {
            // There is no election to wait for: the first call finds a leader. An error means that the
            // service ends already.
            let _ = api.publisher.subscribe().wait_for(Option::is_some).await;
        }
        let (router, server, limits) = (api::router(api, &tracer), shutdown.clone(), config.limits.clone());
        shutdown.spawn(async move {
            serve(listener, router, acceptor, &limits, server.draining(), &server).await;
        });
        tracing::info!(%address, %base, backend = ?config.state.backend, "coordinator listens");
        Ok(Running { address, base })
    }
}

/// Starts the tasks of a coordinator on `backend`.
fn spawn(
    backend: impl StateBackend,
    config: &CoordinatorConfig,
    http: HttpClient,
    trust: &Arc<Trust>,
    tracer: &Tracer,
    shutdown: &Shutdown,
) -> Api {
    let backend = Arc::new(backend);
    let publisher = Publisher::new();
    let (role_sender, role) = watch::channel(Role::Follower { leader: None });
    let (commands, command_receiver) = mpsc::channel(MAX_WAITING_COMMANDS);
    let settings = Settings {
        heartbeat_interval: config.heartbeat_interval(),
        slow_start: config.slow_start(),
        ring: config.ring,
    };
    let leader = Leader::new(Arc::clone(&backend), settings, role.clone(), publisher.clone());
    shutdown.spawn(leader.run(command_receiver, shutdown.clone()));
    shutdown.spawn(election::run(backend, role_sender, shutdown.clone()));
    if config.state.backend != StateBackendKind::Embedded {
        shutdown.spawn(mirror::run(
            http.clone(),
            Arc::clone(trust),
            role.clone(),
            publisher.clone(),
            shutdown.clone(),
        ));
    }
    if config.rebalance.enabled {
        let settings = BalanceSettings {
            load_factor: config.rebalance.load_factor,
            move_interval: config.rebalance.move_interval(),
            min_stay: config.rebalance.min_stay(),
        };
        let rebalancer = Rebalancer::new(
            settings,
            http.clone(),
            Arc::clone(trust),
            tracer.clone(),
            role.clone(),
            publisher.clone(),
        );
        shutdown.spawn(rebalancer.run(shutdown.clone()));
    }
    Api {
        publisher,
        commands,
        role,
        http,
        trust: Arc::clone(trust),
        heartbeat_interval_ms: config.heartbeat_interval_ms,
        max_weight: f64::from(MAX_VIRTUAL_NODES) / f64::from(config.ring.virtual_nodes),
        shutdown: shutdown.clone(),
    }
}
