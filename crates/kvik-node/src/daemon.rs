//! The life of a store daemon: start, serve, end.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use kvik_runtime::http::{ListenLimits, listen, serve};
use kvik_runtime::shutdown::Shutdown;
use kvik_runtime::telemetry::render_metrics;

use crate::config::DaemonConfig;
use crate::error::{NodeError, Result};
use crate::metrics::DaemonMetrics;
use crate::server::{NodeOptions, NodeServer};

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
    /// Tasks run on `shutdown`; the caller [finishes](RunningDaemon::finish) the daemon when that drains.
    ///
    /// # Errors
    /// If the configuration is wrong, a tier cannot be opened, or the socket or address is taken.
    pub async fn start(config: DaemonConfig, shutdown: &Shutdown) -> Result<RunningDaemon> {
        let metrics_listener = match &config.metrics {
            Some(address) => Some(listen(address).await?),
            None => None,
        };
        let socket = config.socket.clone();
        // A disk tier reads its segments first.
        let opening = move || {
            let options = NodeOptions {
                socket: config.address(),
                tenants: config.open_tenants()?,
                max_sessions: config.max_sessions,
                audit_log: config.audit_log.clone(),
            };
            NodeServer::start(options)
        };
        let opened = tokio::task::spawn_blocking(opening).await;
        let server = Arc::new(opened.map_err(|_| NodeError::Open { reason: "it was stopped".to_owned() })??);
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
        Ok(RunningDaemon { socket, metrics_address, server })
    }
}

impl RunningDaemon {
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
            for tenant in server.tenants() {
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
