//! A picker in front of engines.

use std::time::Duration;

use kvik_epp::{Epp, EppConfig};
use kvik_gateway::{BackendConfig, GatewayConfig};
use kvik_runtime::shutdown::Shutdown;

use crate::data_plane::DataPlane;
use crate::engine::{Engine, MODEL};
use crate::poll::poll;

/// Far above what anything here takes, so that only a real fault fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Tests of one process start pickers at once and share one recorder.
static METRICS: std::sync::Once = std::sync::Once::new();

/// A picker with a data plane.
pub(crate) struct TestEpp {
    pub(crate) epp: Epp,
    pub(crate) shutdown: Shutdown,
    pub(crate) data_plane: DataPlane,
}

/// Pseudo random numbers, the same in every run.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Waits for something that must come.
pub(crate) async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("in time")
}

/// Starts the recorder that all pickers of this process share.
pub(crate) fn start_metrics() {
    METRICS.call_once(|| kvik_runtime::telemetry::start_metrics().unwrap());
}

/// Engines as backends.
pub(crate) fn backends(engines: &[Engine]) -> Vec<BackendConfig> {
    let backend = |engine: &Engine| BackendConfig {
        url: engine.url(),
        model: Some(MODEL.to_owned()),
        ..BackendConfig::default()
    };
    engines.iter().map(backend).collect()
}

impl TestEpp {
    /// A picker in front of `engines`.
    pub(crate) async fn before(
        engines: &[Engine],
        change: impl FnOnce(&mut EppConfig, &mut GatewayConfig),
    ) -> Self {
        let mut config = EppConfig { listen: "127.0.0.1:0".to_owned(), ..EppConfig::default() };
        let mut gateway = GatewayConfig { listen: "127.0.0.1:0".to_owned(), ..GatewayConfig::default() };
        gateway.backends = backends(engines);
        gateway.health.interval_ms = 100;
        change(&mut config, &mut gateway);
        start_metrics();
        let shutdown = Shutdown::new();
        let epp = Epp::start(config, gateway, &shutdown).await.unwrap();
        let data_plane = DataPlane::connect(epp.address()).await;
        Self { epp, shutdown, data_plane }
    }

    pub(crate) fn outstanding_tokens(&self) -> u64 {
        let workers = self.epp.gateway().gateway().workers();
        workers.iter().map(|worker| worker.outstanding_tokens).sum()
    }

    pub(crate) fn outstanding_at(&self, endpoint: &str) -> u64 {
        let workers = self.epp.gateway().gateway().workers();
        let worker = workers.iter().find(|worker| worker.id.ends_with(endpoint)).unwrap();
        worker.outstanding_tokens
    }

    /// Waits until no request is held.
    pub(crate) async fn idle(&self) {
        poll(PATIENCE, "all loads are back", async || (self.outstanding_tokens() == 0).then_some(())).await;
    }
}
