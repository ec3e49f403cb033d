//! The configuration of a gateway.
//!
//! Times are in milliseconds and sizes in bytes; the unit is part of a field's name. `listen`,
//! `tls`, `limits`, `backend_tls`, the tokens, `insecure`, `index`, `ui` and `tracing` take effect at the start
//! only, everything else also at a reload.

use std::path::PathBuf;
use std::time::Duration;

use kvik_index::placement::NAMED_FLOOR_TOKENS;
use kvik_indexer::IndexConfig;
use kvik_proto::coordinator::RingConfig;
use kvik_runtime::http::{ListenLimits, TlsServerConfig};
use kvik_runtime::secret::Secret;
use kvik_runtime::telemetry::TracingConfig;
use kvik_runtime::tls::TlsClientFiles;
use kvik_runtime::trust::TrustSettings;
use serde::{Deserialize, Serialize};

mod check;
mod disaggregation;
mod validation;

pub use disaggregation::{DisaggregationConfig, PdProtocol, Role};

/// Fields that a reload cannot change.
pub(crate) const FIXED_FIELDS: &[&str] = &[
    "admin_token",
    "backend_tls.",
    "cluster_token",
    "index.",
    "insecure",
    "limits.",
    "listen",
    "tls.",
    "tracing.",
    "ui.",
];

/// Everything that can be configured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayConfig {
    /// Address to listen on; port 0 takes a free one. Default: `127.0.0.1:8080`.
    pub listen: String,
    /// TLS towards clients. Default: none, plain HTTP.
    pub tls: TlsServerConfig,
    /// What clients may take of the listener.
    pub limits: ListenLimits,
    /// Base addresses of the coordinators, tried in turn. Default: none.
    pub coordinators: Vec<String>,
    /// Engines that speak the `OpenAI` API and do not register with a coordinator. Default: none.
    pub backends: Vec<BackendConfig>,
    /// TLS towards workers, backends and coordinators. Default: none, only `http://` works.
    pub backend_tls: TlsClientFiles,
    /// Token that all services of a cluster share, of 16 characters or more. Calls to workers and
    /// coordinators show it; other engines never see it.
    /// `KVIK_CLUSTER_TOKEN` in the environment sets it for every role. Default: none.
    pub cluster_token: Option<Secret>,
    /// File with the cluster token, less a line break at its end. Default: none.
    pub cluster_token_file: Option<PathBuf>,
    /// Token for `/index/...`.
    /// `KVIK_ADMIN_TOKEN` in the environment sets it for every role. Default: none; the cluster token is
    /// enough then, and without that a caller on loopback or with a client certificate.
    pub admin_token: Option<Secret>,
    /// File with the admin token, less a line break at its end. Default: none.
    pub admin_token_file: Option<PathBuf>,
    /// Whether to listen where other machines can connect without a cluster token or client
    /// certificates. Default: false; the gateway does not start then.
    pub insecure: bool,
    /// Keys that clients may show. Default: none; clients need no key.
    pub api_keys: Vec<ApiKeyConfig>,
    /// Whether the client's `Authorization` header goes on to the worker. Default: false.
    pub forward_authorization: bool,
    /// Whether answers name the worker in `x-kvik-worker`. Default: true.
    pub expose_worker: bool,
    /// Largest request body, in bytes. Default: 16 MiB.
    pub max_body_bytes: usize,
    /// How many requests run and wait.
    pub admission: AdmissionConfig,
    /// How long things may take.
    pub timeouts: TimeoutConfig,
    /// Time for answers to end when the gateway drains; below what the process manager allows (Kubernetes:
    /// `terminationGracePeriodSeconds`, 30 s). Default: 25 s.
    pub drain_grace_s: u64,
    /// When a request is tried on another worker.
    pub retry: RetryConfig,
    /// When a worker gets no more requests.
    pub breaker: BreakerConfig,
    /// How workers are asked for their health.
    pub health: HealthConfig,
    /// How requests are placed.
    pub routing: RoutingConfig,
    /// When prompts are computed on another engine than answers; see `role` and `pd` of backends.
    pub disaggregation: DisaggregationConfig,
    /// The global KV index.
    pub index: IndexConfig,
    /// The web page.
    pub ui: UiConfig,
    /// Where traces go. Default: nowhere.
    pub tracing: TracingConfig,
}

/// An engine given by its address.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackendConfig {
    /// Base address: `http://host:port`, without `/v1`.
    pub url: String,
    /// The model it serves. Default: what its `/v1/models` lists.
    #[serde(default)]
    pub model: Option<String>,
    /// Share of the ring relative to other backends, above 0 and at most 100. Default: 1.
    #[serde(default)]
    pub weight: Option<f64>,
    /// Which part of requests it takes: `prefill`, `decode` or `both`. One for `prefill` gets whole requests only while no
    /// other backend of the model is usable. Default: `both`.
    #[serde(default)]
    pub role: Role,
    /// How KV moves between it and other engines: `nixl_pull` and `p2p` (vLLM), `sglang`, `shared` (a store that all
    /// engines of the model read and write). Default: none, and it takes whole requests only.
    #[serde(default)]
    pub pd: Option<PdProtocol>,
    /// Host at which other engines reach it, with `pd: sglang` or `pd: p2p`. Default: the host of `url`.
    #[serde(default)]
    pub pd_host: Option<String>,
    /// Port at which other engines reach it: the bootstrap port with `pd: sglang` (default: 8998), the port of the P2P side channel
    /// with `pd: p2p` (default: 5710).
    #[serde(default)]
    pub pd_port: Option<u16>,
}

/// A key that clients may show as `Authorization: Bearer <key>`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApiKeyConfig {
    /// Whose key it is, for people.
    pub name: String,
    /// SHA-256 of the key, 64 hexadecimal digits: `printf %s KEY | sha256sum`.
    pub sha256: Secret,
}

/// The web page.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UiConfig {
    /// Whether the page is served at `/ui`, and the workers are asked for the figures that it shows. Default: true.
    pub enabled: bool,
}

/// How many requests run and wait.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdmissionConfig {
    /// Requests that run at once; more wait. Default: 1024.
    pub max_running: usize,
    /// Requests that wait; more are refused with 429. Default: 4096.
    pub max_waiting: usize,
    /// Bytes of the bodies of waiting requests; more are refused with 429. Default: 256 MiB.
    pub max_waiting_bytes: usize,
    /// Time that a request waits at most; then 503. Default: 30 000 ms.
    pub max_wait_ms: u64,
}

/// How long things may take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TimeoutConfig {
    /// A whole request, its answer's last byte included; the largest value that a client can ask for with
    /// `x-request-timeout-ms`. Default: 600 000 ms.
    pub request_ms: u64,
    /// From the request until the head of the answer, for streams; other answers begin only when
    /// they are complete and have the time of the whole request. Default: 60 000 ms.
    pub response_header_ms: u64,
    /// Silence within a stream, measured coarsely: up to twice this may pass. A client that does not read for this
    /// long counts as silent too; `limits.write_stall_ms` holds beside it. Default: 120 000 ms.
    pub stream_idle_ms: u64,
}

/// When a request is tried on another worker before the first byte of its answer, and when its answer goes on elsewhere
/// after it. The second needs workers of kvik.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetryConfig {
    /// Tries of one request, the first included, 1 to 10. Default: 2.
    pub max_attempts: u32,
    /// Retries for each request that arrives, 0 to 1. Default: 0.1.
    pub budget_ratio: f64,
    /// Retries that can be saved up. Default: 100.
    pub budget_burst: u32,
    /// Times that an answer goes on at another worker after its worker has failed, at most 100; 0: it ends with an error.
    /// Default: 3.
    pub max_continuations: u32,
    /// Time that an answer waits for another worker while none is usable, at most 600 000 ms. Default: 10 000 ms.
    pub continuation_wait_ms: u64,
}

/// When a worker gets no more requests. Failures are connection errors, answers 500 to 599
/// (503 with `Retry-After` excepted), missing answers and streams that break.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BreakerConfig {
    /// Failures in a row that open the breaker, at least 1. Default: 3.
    pub consecutive_failures: u32,
    /// Share of failures in a window that opens it, above 0 to 1. Default: 0.5.
    pub error_ratio: f64,
    /// Requests in a window before the share counts. Default: 20.
    pub min_requests: u32,
    /// Length of a window. Default: 10 000 ms.
    pub window_ms: u64,
    /// Time until the first probe; doubles with each opening in a row. Default: 1000 ms.
    pub open_ms: u64,
    /// Longest time until a probe. Default: 10 000 ms.
    pub max_open_ms: u64,
}

/// How workers are asked for their health.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HealthConfig {
    /// Time between two questions. Default: 1000 ms.
    pub interval_ms: u64,
    /// Time for an answer. Default: 2000 ms.
    pub timeout_ms: u64,
    /// Missing answers in a row, without a byte of any stream between them, after which a worker counts
    /// as unresponsive: it gets no requests and its answers end with an error. Default: 3.
    pub failures: u32,
    /// Time that members which a new coordinator does not know are kept while they answer.
    /// Default: 60 000 ms.
    pub retain_members_ms: u64,
}

/// How requests are placed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RoutingConfig {
    /// Tokens that a request without a limit of its own is expected to generate. Default: 256.
    pub default_max_tokens: u64,
    /// The ring when there is no coordinator; a coordinator's snapshot brings its own.
    pub ring: RingConfig,
    /// Whether the worker that has most of a prompt is preferred, as far as the index knows. Default: true.
    pub kv_aware: bool,
    /// The bound for requests whose prompt a worker has, as `ring.load_factor`, 0 or more. Default: 1; a worker that
    /// has the KV does a request in less time than its tokens say.
    pub kv_load_factor: f64,
    /// Time for tokenizing and looking up a prompt; then the ring decides. Default: 50 ms.
    pub max_lookup_ms: u64,
    /// Outstanding tokens up to which a worker of weight 1 keeps its named sequences (`seq_id`), whatever the others
    /// have to do; beyond that and beyond the bound they move. Default: 98 304, what an engine that computes 10 000
    /// tokens a second works off in ten seconds.
    pub named_floor_tokens: u64,
}

// === impl defaults ===

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8080".to_owned(),
            tls: TlsServerConfig::default(),
            limits: ListenLimits::default(),
            coordinators: Vec::new(),
            backends: Vec::new(),
            backend_tls: TlsClientFiles::default(),
            cluster_token: None,
            cluster_token_file: None,
            admin_token: None,
            admin_token_file: None,
            insecure: false,
            api_keys: Vec::new(),
            forward_authorization: false,
            expose_worker: true,
            max_body_bytes: 16 << 20,
            admission: AdmissionConfig::default(),
            timeouts: TimeoutConfig::default(),
            drain_grace_s: 25,
            retry: RetryConfig::default(),
            breaker: BreakerConfig::default(),
            health: HealthConfig::default(),
            routing: RoutingConfig::default(),
            disaggregation: DisaggregationConfig::default(),
            index: IndexConfig::default(),
            ui: UiConfig::default(),
            tracing: TracingConfig::default(),
        }
    }
}

impl Default for UiConfig {
    fn default() -> Self {
        Self { enabled: true }
    }
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        Self { max_running: 1024, max_waiting: 4096, max_waiting_bytes: 256 << 20, max_wait_ms: 30_000 }
    }
}

impl Default for TimeoutConfig {
    fn default() -> Self {
        Self { request_ms: 600_000, response_header_ms: 60_000, stream_idle_ms: 120_000 }
    }
}

impl Default for RetryConfig {
    fn default() -> Self {
        Self {
            max_attempts: 2,
            budget_ratio: 0.1,
            budget_burst: 100,
            max_continuations: 3,
            continuation_wait_ms: 10_000,
        }
    }
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self {
            consecutive_failures: 3,
            error_ratio: 0.5,
            min_requests: 20,
            window_ms: 10_000,
            open_ms: 1000,
            max_open_ms: 10_000,
        }
    }
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self { interval_ms: 1000, timeout_ms: 2000, failures: 3, retain_members_ms: 60_000 }
    }
}

impl Default for RoutingConfig {
    fn default() -> Self {
        Self {
            default_max_tokens: 256,
            ring: RingConfig::default(),
            kv_aware: true,
            kv_load_factor: 1.0,
            max_lookup_ms: 50,
            named_floor_tokens: NAMED_FLOOR_TOKENS,
        }
    }
}

impl GatewayConfig {
    /// What it says about trust.
    pub(crate) fn trust(&self) -> TrustSettings<'_> {
        TrustSettings {
            cluster_token: self.cluster_token.as_ref(),
            cluster_token_file: self.cluster_token_file.as_deref(),
            admin_token: self.admin_token.as_ref(),
            admin_token_file: self.admin_token_file.as_deref(),
            insecure: self.insecure,
        }
    }
}

/// Milliseconds of the configuration as a duration.
pub(crate) fn millis(value: u64) -> Duration {
    Duration::from_millis(value)
}

/// Whether two addresses are one backend.
pub(crate) fn same_url(left: &str, right: &str) -> bool {
    left.trim_end_matches('/') == right.trim_end_matches('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        GatewayConfig::default().validate().unwrap();
    }

    #[test]
    fn an_error_names_the_field_the_value_and_what_is_allowed() {
        let mut config = GatewayConfig::default();
        config.backends.push(BackendConfig { url: "ftp://x".to_owned(), ..BackendConfig::default() });
        let message = config.validate().unwrap_err().to_string();
        assert_eq!(message, "`backends[0].url` is ftp://x; allowed: http://host:port or https://host:port");
    }

    #[test]
    fn a_key_in_place_of_its_digest_is_not_repeated() {
        let mut config = GatewayConfig::default();
        config.api_keys.push(ApiKeyConfig { name: "me".to_owned(), sha256: "sk-secret".into() });
        assert!(!config.validate().unwrap_err().to_string().contains("sk-secret"));
    }

    #[test]
    fn unknown_fields_are_refused() {
        let outcome = serde_json::from_str::<GatewayConfig>(r#"{"retry":{"max_atempts":3}}"#);
        assert!(outcome.unwrap_err().to_string().contains("max_atempts"));
    }
}
