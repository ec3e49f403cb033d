//! What all tests need.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use kvik_gateway::{BackendConfig, Gateway, GatewayConfig, Management, Running};
use kvik_proto::client::{HttpClient, TlsClientConfig, http_client};
use kvik_runtime::shutdown::Shutdown;
use serde_json::Value;
use tokio::time::Instant;

use crate::mock::MockWorker;

/// Far above what anything here takes, so that only a real fault fails.
const DEADLINE: Duration = Duration::from_secs(30);

/// Tests of one process start gateways at once and share one recorder.
static METRICS: std::sync::Once = std::sync::Once::new();

/// A gateway with its clients.
pub(crate) struct TestGateway {
    pub(crate) running: Running,
    pub(crate) shutdown: Shutdown,
    pub(crate) http: HttpClient,
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Whole {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl TestGateway {
    pub(crate) async fn start(config: GatewayConfig) -> Self {
        Self::start_at("127.0.0.1:0", config).await
    }

    pub(crate) async fn start_at(address: &str, mut config: GatewayConfig) -> Self {
        address.clone_into(&mut config.listen);
        let shutdown = Shutdown::new();
        METRICS.call_once(|| kvik_runtime::telemetry::start_metrics().unwrap());
        let running = Gateway::start(config, &shutdown).await.unwrap();
        Self { running, shutdown, http: http_client(&TlsClientConfig::default()).unwrap() }
    }

    /// A gateway for models that `management` makes ready.
    pub(crate) async fn start_managed(mut config: GatewayConfig, management: Management) -> Self {
        "127.0.0.1:0".clone_into(&mut config.listen);
        let shutdown = Shutdown::new();
        METRICS.call_once(|| kvik_runtime::telemetry::start_metrics().unwrap());
        let running = Gateway::start_managed(config, &shutdown, management).await.unwrap();
        Self { running, shutdown, http: http_client(&TlsClientConfig::default()).unwrap() }
    }

    /// A gateway in front of `workers` that knows their models.
    pub(crate) async fn before(workers: &[&MockWorker], change: impl FnOnce(&mut GatewayConfig)) -> Self {
        let mut config = config_for(workers);
        change(&mut config);
        let gateway = Self::start(config).await;
        gateway.wait_until_usable(workers.len()).await;
        gateway
    }

    pub(crate) async fn wait_until_usable(&self, n_workers: usize) {
        until("workers are usable", async || {
            let ready = self.get("/ready").await;
            serde_json::from_slice::<Value>(&ready.body).unwrap()["usable_backends"] == n_workers
        })
        .await;
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.running.address())
    }

    pub(crate) fn gateway(&self) -> &Gateway {
        self.running.gateway()
    }

    pub(crate) async fn get(&self, path: &str) -> Whole {
        whole(self.http.request(Request::get(self.url(path)).body(Full::default()).unwrap()).await.unwrap())
            .await
    }

    /// Sends and waits for the head of the answer.
    pub(crate) async fn open(&self, path: &str, headers: &[(&str, &str)], body: &str) -> Response<Incoming> {
        let mut request = Request::post(self.url(path)).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::copy_from_slice(body.as_bytes()))).unwrap();
        tokio::time::timeout(DEADLINE, self.http.request(request)).await.expect("an answer in time").unwrap()
    }

    pub(crate) async fn post(&self, path: &str, headers: &[(&str, &str)], body: &str) -> Whole {
        whole(self.open(path, headers, body).await).await
    }

    pub(crate) async fn complete(&self, body: &str) -> Whole {
        self.post("/v1/completions", &[], body).await
    }

    pub(crate) fn outstanding_tokens(&self) -> u64 {
        self.gateway().workers().iter().map(|worker| worker.outstanding_tokens).sum()
    }

    pub(crate) fn breaker(&self, worker: &MockWorker) -> &'static str {
        let workers = self.gateway().workers();
        workers.iter().find(|status| status.id == worker.url()).expect("the worker is known").breaker
    }

    pub(crate) async fn wait_for_breaker(&self, worker: &MockWorker, state: &str) {
        until(&format!("the breaker is {state}"), async || self.breaker(worker) == state).await;
    }
}

impl Drop for TestGateway {
    fn drop(&mut self) {
        self.shutdown.stop();
    }
}

impl Whole {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {:?}", self.body))
    }

    pub(crate) fn worker(&self) -> String {
        self.headers["x-kvik-worker"].to_str().unwrap().to_owned()
    }

    /// Checks that it is an error in `OpenAI`'s shape.
    #[track_caller]
    pub(crate) fn assert_error(&self, status: u16, code: Option<&str>) -> Value {
        assert_eq!(self.status.as_u16(), status, "{:?}", self.body);
        let error = self.json()["error"].clone();
        assert!(error["message"].is_string() && error["type"].is_string(), "{error}");
        assert_eq!(error["code"].as_str(), code, "{error}");
        assert!(error.as_object().unwrap().contains_key("param"));
        error
    }
}

/// The configuration for `workers`, with times that suit tests.
pub(crate) fn config_for(workers: &[&MockWorker]) -> GatewayConfig {
    let mut config = GatewayConfig::default();
    for worker in workers {
        config.backends.push(BackendConfig { url: worker.url(), ..BackendConfig::default() });
    }
    config.health.interval_ms = 100;
    config.breaker.open_ms = 100;
    config.breaker.max_open_ms = 200;
    config
}

pub(crate) async fn whole(response: Response<Incoming>) -> Whole {
    let (parts, body) = response.into_parts();
    let body = tokio::time::timeout(DEADLINE, body.collect()).await.expect("a whole body in time").unwrap();
    Whole { status: parts.status, headers: parts.headers, body: body.to_bytes() }
}

/// Waits until `condition` holds.
pub(crate) async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !condition().await {
        assert!(Instant::now() < deadline, "it never came that {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
