//! The life of a store daemon: start, serve, end.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use kvik_runtime::http::{ListenLimits, listen, serve};
use kvik_runtime::shutdown::Shutdown;
use kvik_runtime::telemetry::render_metrics;
use tokio::net::TcpListener;

use crate::config::DaemonConfig;
use crate::error::{NodeError, Result};
use crate::metrics::DaemonMetrics;
use crate::server::{NodeOptions, NodeServer, SUCCESSOR_TIMEOUT};
use crate::take_over::{StoreParts, TakeOverOptions, TenantOpener};

/// Time for a daemon that was taken over to end.
const METRICS_TIMEOUT: Duration = Duration::from_secs(30);

/// Time between two attempts to listen at its address.
const METRICS_RETRY: Duration = Duration::from_millis(20);

/// Starts store daemons.
#[derive(Debug)]
pub struct StoreDaemon;

/// A store daemon that serves.
#[derive(Debug)]
pub struct RunningDaemon {
    socket: PathBuf,
    metrics_address: Option<SocketAddr>,
    server: Arc<NodeServer>,
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
        let metrics_listener = match &config.metrics {
            Some(address) => Some(listen(address).await?),
            None => None,
        };
        let opener = Arc::new(ConfiguredOpener { config: config.clone(), shutdown: shutdown.clone() });
        let socket = config.socket.clone();
        // A disk tier reads its segments first.
        let server = open(move || {
            let options = NodeOptions {
                socket: config.address(),
                tenants: config.open_tenants()?,
                max_sessions: config.max_sessions,
                take_over_grace: config.take_over_grace(),
                successor_timeout: SUCCESSOR_TIMEOUT,
                opener: Some(opener),
            };
            NodeServer::start(options)
        });
        let server = server.await?;
        RunningDaemon::new(socket, server, metrics_listener, shutdown)
    }

    /// Takes over from the daemon that listens at the socket, with all chunks in its memory; then as [`Self::start`].
    ///
    /// The address of the metrics may be that of the running daemon: it is taken when that one ends.
    ///
    /// # Errors
    /// As [`Self::start`], and if the running daemon refuses; it then goes on. An address of the metrics that stays taken
    /// is no error, because the running daemon has ended by then: it is logged, and there are no metrics.
    pub async fn take_over(config: DaemonConfig, shutdown: &Shutdown) -> Result<RunningDaemon> {
        let metrics = config.metrics.clone();
        let opener = Arc::new(ConfiguredOpener { config: config.clone(), shutdown: shutdown.clone() });
        let socket = config.socket.clone();
        let server = open(move || {
            NodeServer::take_over(TakeOverOptions {
                socket: config.address(),
                tenants: config.terms()?,
                max_sessions: config.max_sessions,
                take_over_grace: config.take_over_grace(),
                opener,
            })
        });
        let server = server.await?;
        let metrics_listener = match &metrics {
            Some(address) => listen_after(address).await,
            None => None,
        };
        RunningDaemon::new(socket, server, metrics_listener, shutdown)
    }
}

/// Opens the stores of a daemon as its configuration says.
#[derive(Debug)]
struct ConfiguredOpener {
    config: DaemonConfig,
    shutdown: Shutdown,
}

impl TenantOpener for ConfiguredOpener {
    fn parts(&self, tenant: &str) -> Result<StoreParts> {
        self.config.parts_of(tenant)
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
async fn listen_after(address: &str) -> Option<TcpListener> {
    let deadline = Instant::now() + METRICS_TIMEOUT;
    loop {
        match listen(address).await {
            Ok(listener) => return Some(listener),
            Err(_) if Instant::now() < deadline => tokio::time::sleep(METRICS_RETRY).await,
            Err(error) => {
                tracing::error!(%error, "no metrics are served");
                return None;
            }
        }
    }
}

impl RunningDaemon {
    fn new(
        socket: PathBuf,
        server: Arc<NodeServer>,
        metrics_listener: Option<TcpListener>,
        shutdown: &Shutdown,
    ) -> Result<Self> {
        let mut metrics_address = None;
        if let Some(listener) = metrics_listener {
            let address = listener.local_addr().map_err(NodeError::io("listen for metrics"))?;
            metrics_address = Some(address);
            let router = router(Arc::clone(&server));
            let connections = shutdown.clone();
            shutdown.spawn(async move {
                let (closing, limits) = (connections.clone(), ListenLimits::default());
                serve(listener, router, None, &limits, closing.draining(), &connections).await;
            });
        }
        Ok(Self { socket, metrics_address, server })
    }

    /// Where engines attach.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The address of the metrics, where they are served.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics_address
    }

    /// The part that engines talk to.
    pub fn server(&self) -> &NodeServer {
        &self.server
    }

    /// Ends all sessions, writes what waits for lower tiers, and closes the stores.
    pub async fn finish(self) {
        let server = self.server;
        // A thread that panicked has said so.
        let _ = tokio::task::spawn_blocking(move || {
            server.end();
            for tenant in &*server.tenants() {
                tenant.store.close();
            }
        })
        .await;
    }
}

fn router(server: Arc<NodeServer>) -> Router {
    let metrics = Arc::new(DaemonMetrics::new(server));
    let render = move || {
        metrics.update();
        std::future::ready(([(CONTENT_TYPE, "text/plain; version=0.0.4")], render_metrics()))
    };
    Router::new().route("/metrics", get(render)).route("/health", get(|| async { "ok\n" }))
}
