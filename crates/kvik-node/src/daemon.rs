//! The life of a store daemon: start, serve, end.

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_runtime::http::{ListenLimits, listen, serve};
use kvik_runtime::shutdown::Shutdown;
use kvik_runtime::trust::Trust;
use kvik_tier::PeerAddress;
use kvik_tier::peer::PeerAdmission;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::api::router;
use crate::bandwidth::NodeBandwidth;
use crate::config::{DaemonConfig, PeerPlans, store_info};
use crate::error::{NodeError, Result};
use crate::lm::LmServer;
use crate::peers::{Discovery, IndexHints, Listed, Listing, PeerServer};
use crate::server::{NodeOptions, NodeServer, SUCCESSOR_TIMEOUT};
use crate::take_over::{StoreParts, TakeOverOptions, TenantOpener};
use crate::tenant::Tenant;

/// Time for a daemon that was taken over to end.
const ADDRESS_TIMEOUT: Duration = Duration::from_secs(30);

/// Time between two attempts to listen at its address.
const ADDRESS_RETRY: Duration = Duration::from_millis(20);

/// Starts store daemons.
#[derive(Debug)]
pub struct StoreDaemon;

/// A store daemon that serves.
#[derive(Debug)]
pub struct RunningDaemon {
    socket: PathBuf,
    metrics_address: Option<SocketAddr>,
    server: Arc<NodeServer>,
    remote: RemoteServers,
}

/// What serves clients on other machines.
#[derive(Debug, Clone, Default)]
struct RemoteServers {
    /// Other nodes, which read chunks.
    peers: Option<Arc<PeerServer>>,
    /// Clients of LMCache, which keep chunks of their own.
    lm: Option<Arc<LmServer>>,
}

impl StoreDaemon {
    /// Opens the tiers of all tenants and listens at the socket, and at the address of the metrics where there is one.
    ///
    /// Tasks run on `shutdown`, which drains when another daemon has taken over; the caller
    /// [finishes](RunningDaemon::finish) the daemon when it drains.
    ///
    /// # Errors
    /// If the configuration is wrong, a tier cannot be opened, or the socket or address is taken.
    pub async fn start(config: DaemonConfig, shutdown: &Shutdown) -> Result<RunningDaemon> {
        config.check_cluster()?;
        let trust = config.trust()?;
        let metrics_listener = match &config.metrics {
            Some(address) => Some(listen(address).await?),
            None => None,
        };
        let peer_listener = config.peer.listen()?;
        let lm_listener = config.lm.listen()?;
        let opener = Arc::new(ConfiguredOpener::try_new(&config, shutdown)?);
        let bound = peer_listener.as_ref().and_then(|(listener, _)| listener.local_addr().ok());
        *opener.peer_address.lock() = config.peer.advertised(bound)?;
        let (socket, opening) = (config.socket.clone(), Arc::clone(&opener));
        // A disk tier reads its segments first.
        let server = open(move || {
            let options = NodeOptions {
                socket: config.address(),
                tenants: config.open_tenants(&opening.peers, &opening.bandwidth)?,
                max_sessions: config.max_sessions,
                take_over_grace: config.take_over_grace(),
                successor_timeout: SUCCESSOR_TIMEOUT,
                opener: Some(opening),
                audit_log: config.audit_log.clone(),
            };
            NodeServer::start(options)
        });
        let server = server.await?;
        let remote = opener.serve_remote(&server, peer_listener, lm_listener).await?;
        RunningDaemon::new(
            socket,
            server,
            remote,
            metrics_listener.map(|listener| (listener, trust)),
            shutdown,
        )
    }

    /// Takes over from the daemon that listens at the socket, with all chunks in its memory; then as [`Self::start`].
    ///
    /// The addresses of the metrics and for peers may be those of the running daemon: they are taken when that one ends.
    ///
    /// # Errors
    /// As [`Self::start`], and if the running daemon refuses; it then goes on. An address that stays taken is no error,
    /// because the running daemon has ended by then: it is logged, and there are no metrics, or no peers are served.
    pub async fn take_over(config: DaemonConfig, shutdown: &Shutdown) -> Result<RunningDaemon> {
        let (metrics, trust) = (config.metrics.clone(), config.trust()?);
        let opener = Arc::new(ConfiguredOpener::try_new(&config, shutdown)?);
        let (socket, peer, lm) = (config.socket.clone(), config.peer.clone(), config.lm.clone());
        // What cannot work is refused before anything happens.
        config.check_cluster()?;
        lm.check_listener()?;
        // A port that is not known yet is sent to no engine: they attach before it is.
        let listening = peer.check_listener()?.filter(|address| address.port() != 0);
        *opener.peer_address.lock() = peer.advertised(listening)?;
        let opening = Arc::clone(&opener);
        let server = open(move || {
            NodeServer::take_over(TakeOverOptions {
                socket: config.address(),
                tenants: config.terms()?,
                max_sessions: config.max_sessions,
                take_over_grace: config.take_over_grace(),
                audit_log: config.audit_log.clone(),
                opener: opening,
            })
        });
        let server = server.await?;
        let metrics_listener = match &metrics {
            Some(address) => after_another("no metrics are served", async || listen(address).await).await,
            None => None,
        };
        let peer_listener = after_another("no peers are served", async || peer.listen()).await.flatten();
        let lm_listener =
            after_another("no clients of LMCache are served", async || lm.listen()).await.flatten();
        let remote = opener.serve_remote(&server, peer_listener, lm_listener).await?;
        RunningDaemon::new(
            socket,
            server,
            remote,
            metrics_listener.map(|listener| (listener, trust)),
            shutdown,
        )
    }
}

/// Opens the stores of a daemon as its configuration says.
#[derive(Debug)]
struct ConfiguredOpener {
    config: DaemonConfig,
    shutdown: Shutdown,
    peers: PeerPlans,
    /// What the tenants share of tiers with a bound.
    bandwidth: NodeBandwidth,
    /// What says which nodes are asked first.
    hints: Option<Arc<IndexHints>>,
    /// What engines receive: where other nodes read.
    peer_address: Mutex<Option<PeerAddress>>,
    /// In whose store clients of LMCache have their chunks; empty where none are served.
    lm_tenant: String,
    /// Gives the stores to others, once it is started.
    remote: Mutex<RemoteServers>,
}

impl ConfiguredOpener {
    fn try_new(config: &DaemonConfig, shutdown: &Shutdown) -> Result<Self> {
        let (config, shutdown) = (config.clone(), shutdown.clone());
        let client = config.index_client()?;
        let hints = client.map(|client| Arc::new(IndexHints::new(client, Handle::current())));
        let peers = config.peer_plans(hints.as_ref())?;
        let bandwidth = NodeBandwidth::default();
        let lm_tenant = if config.lm.listen.is_some() { config.lm_tenant()? } else { String::new() };
        let (peer_address, remote) = (Mutex::default(), Mutex::default());
        Ok(Self { config, shutdown, peers, bandwidth, hints, peer_address, lm_tenant, remote })
    }

    /// Serves the stores to other nodes and to clients of LMCache where there is a listener, and follows the nodes that
    /// are read from.
    async fn serve_remote(
        &self,
        server: &NodeServer,
        listener: Option<(std::net::TcpListener, PeerAdmission)>,
        lm_listener: Option<std::net::TcpListener>,
    ) -> Result<RemoteServers> {
        let lm = match lm_listener {
            Some(listener) => Some(Arc::new(LmServer::start(listener, &self.lm_tenant, &server.tenants())?)),
            None => None,
        };
        let peer_server = match listener {
            Some((listener, admission)) => {
                Some(Arc::new(PeerServer::start(listener, &server.tenants(), admission)?))
            }
            None => None,
        };
        let remote = RemoteServers { peers: peer_server.clone(), lm };
        self.remote.lock().clone_from(&remote);
        let tiers: Vec<_> = self.peers.values().map(|peers| Arc::clone(&peers.tier)).collect();
        if !tiers.is_empty() {
            let own = peer_server.as_ref().map(|peers| peers.address());
            let (names, keeps_names) = (self.config.peer.addresses()?, self.config.peer.tls.is_some());
            let listed = self.list(server, own)?;
            Discovery::new(names, (listed, self.hints.clone()), own, keeps_names, tiers)
                .start(&self.shutdown)
                .await;
        }
        Ok(remote)
    }
}

impl ConfiguredOpener {
    /// Has this node listed by the coordinators, where it listens; returns the other nodes of their list.
    fn list(
        &self,
        server: &NodeServer,
        listening: Option<SocketAddr>,
    ) -> Result<Option<watch::Receiver<Listed>>> {
        let clients = self.config.coordinator_clients()?;
        if clients.is_empty() {
            return Ok(None);
        }
        let memory_bytes =
            server.tenants().iter().map(|tenant| tenant.store.arena().stat().capacity_bytes).sum();
        let advertised = self.config.peer.advertised(listening)?;
        let own = advertised.map(|address| store_info(&address, memory_bytes));
        let (listing, listed) = Listing::new(clients, own);
        self.shutdown.spawn(listing.run(self.shutdown.clone()));
        Ok(Some(listed))
    }
}

impl TenantOpener for ConfiguredOpener {
    fn peer_address(&self) -> Option<String> {
        self.peer_address.lock().as_ref().map(ToString::to_string)
    }

    fn parts(&self, tenant: &str) -> Result<StoreParts> {
        self.config.parts_of(tenant, &self.peers, &self.bandwidth)
    }

    fn pausing(&self) {
        let RemoteServers { peers, lm } = self.remote.lock().clone();
        if let Some(peers) = peers {
            peers.pause();
        }
        if let Some(lm) = lm {
            lm.pause();
        }
    }

    fn resumed(&self, tenants: &[Tenant]) {
        let RemoteServers { peers, lm } = self.remote.lock().clone();
        if let Some(peers) = peers {
            peers.resume(tenants);
        }
        if let Some(lm) = lm {
            lm.resume(tenants);
        }
    }

    fn taken_over(&self) {
        self.shutdown.drain();
    }
}

/// Runs what opens stores where it may block.
async fn open(opening: impl FnOnce() -> Result<NodeServer> + Send + 'static) -> Result<Arc<NodeServer>> {
    let opened = tokio::task::spawn_blocking(opening).await;
    opened.map_err(|_| NodeError::Open { reason: "it was stopped".to_owned() })?.map(Arc::new)
}

/// Listens at an address that a daemon which ends may still have; `None`, and an error in the log, where that fails.
async fn after_another<T, E: Display>(
    consequence: &str,
    listen: impl AsyncFn() -> Result<T, E>,
) -> Option<T> {
    let deadline = Instant::now() + ADDRESS_TIMEOUT;
    loop {
        match listen().await {
            Ok(listener) => return Some(listener),
            Err(_) if Instant::now() < deadline => tokio::time::sleep(ADDRESS_RETRY).await,
            Err(error) => {
                tracing::error!(%error, "{consequence}");
                return None;
            }
        }
    }
}

impl RunningDaemon {
    fn new(
        socket: PathBuf,
        server: Arc<NodeServer>,
        remote: RemoteServers,
        http: Option<(TcpListener, Trust)>,
        shutdown: &Shutdown,
    ) -> Result<Self> {
        let mut metrics_address = None;
        if let Some((listener, trust)) = http {
            let address = listener.local_addr().map_err(NodeError::io("listen for metrics"))?;
            metrics_address = Some(address);
            let router = router(
                Arc::clone(&server),
                (remote.peers.clone(), remote.lm.clone()),
                &Arc::new(trust),
                shutdown,
            );
            let connections = shutdown.clone();
            shutdown.spawn(async move {
                let (closing, limits) = (connections.clone(), ListenLimits::default());
                serve(listener, router, None, &limits, closing.draining(), &connections).await;
            });
        }
        Ok(Self { socket, metrics_address, server, remote })
    }

    /// Where engines attach.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The address of the metrics, where they are served.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics_address
    }

    /// Where other nodes read chunks, if they do.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.remote.peers.as_ref().map(|peers| peers.address())
    }

    /// Where clients of LMCache have their chunks, if they do.
    pub fn lm_address(&self) -> Option<SocketAddr> {
        self.remote.lm.as_ref().map(|lm| lm.address())
    }

    /// The part that engines talk to.
    pub fn server(&self) -> &NodeServer {
        &self.server
    }

    /// Ends all sessions, writes what waits for lower tiers, and closes the stores.
    pub async fn finish(self) {
        let Self { server, remote, .. } = self;
        // A thread that panicked has said so.
        let _ = tokio::task::spawn_blocking(move || {
            if let Some(peers) = remote.peers {
                peers.end();
            }
            if let Some(lm) = remote.lm {
                lm.end();
            }
            server.end();
            for tenant in &*server.tenants() {
                tenant.store.close();
            }
        })
        .await;
    }
}
