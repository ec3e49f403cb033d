//! The life of a picker.

use std::net::SocketAddr;
use std::sync::Arc;

use kvik_gateway::{Gateway, GatewayConfig};
use kvik_runtime::RuntimeError;
use kvik_runtime::http::{listen, tls_acceptor};
use kvik_runtime::shutdown::Shutdown;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::budget::BodyBudget;
use crate::config::EppConfig;
use crate::error::{EppError, Result};
use crate::health::Health;
use crate::metrics::Metrics;
use crate::pool;
use crate::server;
use crate::stream::Processor;

/// A picker that serves.
#[derive(Debug)]
pub struct Epp {
    gateway: kvik_gateway::Running,
    address: SocketAddr,
    finished: CancellationToken,
}

impl Epp {
    /// Starts a picker: what chooses workers as `gateway` says, the listener for data planes, and the watch of the `InferencePool` if one
    /// is named. All tasks run on `shutdown`; when it drains nothing new is accepted and open exchanges finish.
    ///
    /// # Errors
    /// If a configuration is not valid, an address is taken or a certificate cannot be used.
    pub async fn start(config: EppConfig, gateway: GatewayConfig, shutdown: &Shutdown) -> Result<Self> {
        config.validate()?;
        let tls = tls_acceptor(&config.tls)?;
        let listener = listen(&config.listen).await?;
        let address = listener
            .local_addr()
            .map_err(|source| RuntimeError::Listen { address: config.listen.clone(), source })?;
        check_listener(&config, address)?;
        let running = Gateway::start_picker(gateway, shutdown).await?;
        let (synced, is_synced) = watch::channel(config.pool.name.is_none());
        if config.pool.name.is_some() {
            shutdown.spawn(pool::run(
                config.pool.clone(),
                running.gateway().clone(),
                synced,
                shutdown.clone(),
            ));
        }
        let processor = Arc::new(Processor {
            picker: running.gateway().picker(),
            budget: Arc::new(BodyBudget::new(config.max_body_bytes_in_flight as usize)),
            max_fallbacks: config.max_fallbacks as usize,
            shows_token: config.send_cluster_token,
            is_conformance: config.conformance,
            metrics: Metrics::new(),
            shutdown: shutdown.clone(),
        });
        let health = Health::new(is_synced, shutdown.clone());
        let finished = CancellationToken::new();
        let (serving, guard) = (shutdown.clone(), finished.clone().drop_guard());
        shutdown.spawn(async move {
            server::serve(listener, tls, processor, health, config, serving).await;
            drop(guard);
        });
        tracing::info!(%address, "listening for data planes");
        Ok(Self { gateway: running, address, finished })
    }

    /// Where data planes reach it.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until it has drained: nothing is accepted and no exchange is open. Cancel safe.
    pub async fn finished(&self) {
        self.finished.cancelled().await;
    }

    /// What chooses workers, with its own address for `/metrics` and others.
    pub fn gateway(&self) -> &kvik_gateway::Running {
        &self.gateway
    }
}

/// Refuses to serve other machines that show nothing.
fn check_listener(config: &EppConfig, address: SocketAddr) -> Result<()> {
    if address.ip().to_canonical().is_loopback() || config.tls.client_authorities.is_some() {
        return Ok(());
    }
    if config.insecure {
        tracing::warn!(%address, "insecure: data planes of other machines are served without certificates");
        return Ok(());
    }
    Err(EppError::InvalidConfig {
        field: "listen".to_owned(),
        value: format!("{address}, which other machines can reach"),
        allowed: "an address of loopback; any address together with `tls.client_authorities`; or `insecure: true`, which serves \
            every data plane"
            .to_owned(),
    })
}
