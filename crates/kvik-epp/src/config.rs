//! The configuration of a picker: what is said to data planes, and which engines there are to choose from.
//!
//! How requests are placed, the index, the largest body and the address of `/metrics` are those of the section `gateway`. Everything
//! here takes effect at the start only.

use std::path::PathBuf;
use std::time::Duration;

use kvik_gateway::PdProtocol;
use kvik_indexer::sources::kubernetes::{ApiAccess, SERVICE_ACCOUNT, is_dns_name};
use kvik_runtime::http::TlsServerConfig;
use kvik_runtime::secret::redacted_url;
use serde::{Deserialize, Serialize};

use crate::error::{EppError, Result};

/// Most exchanges and connections that can be configured: more than one process can have.
const MAX_COUNT: u64 = 1_000_000;
/// Longest time that can be configured: a day.
const MAX_MS: u64 = 86_400_000;

/// Everything that can be configured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EppConfig {
    /// Address for gRPC (`envoy.service.ext_proc.v3.ExternalProcessor` and `grpc.health.v1.Health`); port 0 takes a free one.
    /// Default: `127.0.0.1:9002`.
    pub listen: String,
    /// TLS towards data planes. Default: none, plain HTTP/2.
    pub tls: TlsServerConfig,
    /// Whether to listen where other machines can connect without client certificates (`tls.client_authorities`). Default: false;
    /// the picker does not start then.
    pub insecure: bool,
    /// Whether the cluster token (section `gateway`) is put into requests for workers of kvik, which want it; data planes see it then. Not
    /// together with `insecure`. Default: false.
    pub send_cluster_token: bool,
    /// Requests that are under way at a time, 1 to 1 000 000; more are refused with `RESOURCE_EXHAUSTED`. Default: 16 384.
    pub max_exchanges: u64,
    /// Connections of data planes at a time, 1 to 1 000 000; more wait to be accepted. Default: 1024.
    pub max_connections: u64,
    /// Largest message of a data plane, 64 KiB to 1 GiB; a larger one is refused with `OUT_OF_RANGE`. With the body mode `BUFFERED` a
    /// message has a whole body. Default: 4 194 304 bytes (4 MiB).
    pub max_message_bytes: u64,
    /// Bytes of request bodies that wait for a choice, all together, 1 MiB to 1 TiB; a request beyond is answered with 503.
    /// Default: 268 435 456 bytes (256 MiB).
    pub max_body_bytes_in_flight: u64,
    /// Time for a TLS handshake. Default: 10 000 ms.
    pub handshake_ms: u64,
    /// Endpoints named behind the chosen one, for data planes that try them one after the other, at most 8. Default: 0; not every
    /// data plane can read a list.
    pub max_fallbacks: u64,
    /// Whether the header `test-epp-endpoint-selection` says which endpoint is chosen, as the conformance tests of the Gateway API
    /// Inference Extension want it. Default: false.
    pub conformance: bool,
    /// The `InferencePool` whose pods are the engines.
    pub pool: InferencePoolConfig,
}

/// The `InferencePool` whose pods are the engines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InferencePoolConfig {
    /// Its namespace and name, as `namespace/name`. Default: none; the engines are the `backends` and the workers of the
    /// `coordinators` of the section `gateway`.
    pub name: Option<String>,
    /// The API server of Kubernetes. Default: `https://kubernetes.default.svc`.
    pub api: String,
    /// File with the token that is shown to the API server, read anew for each request. Default: the pod's own.
    pub token_file: PathBuf,
    /// File with the authorities that sign the API server's certificate. Default: the pod's own.
    pub ca_file: PathBuf,
    /// First pause before an API server that failed is asked again, at least 1; it doubles from there. Default: 500 ms.
    pub retry_min_ms: u64,
    /// Longest pause. Default: 30 000 ms.
    pub retry_max_ms: u64,
    /// The model of all pods. Default: what `/v1/models` of each lists.
    pub model: Option<String>,
    /// Label of a pod that says which part of requests it takes: `prefill`, `decode` or `both`, and any other value for `both`.
    /// Default: `llm-d.ai/role`.
    pub role_label: String,
    /// How KV moves between the pods, as `pd` of a backend; `x-prefiller-host-port` then names the engine for the prompt where that
    /// pays. Default: none, and every pod takes whole requests.
    pub pd: Option<PdProtocol>,
    /// Where the pods publish KV events.
    pub kv_events: PoolEventsConfig,
}

/// Where the pods of a pool publish KV events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PoolEventsConfig {
    /// Port on which a pod publishes over `ZeroMQ`; the engine behind the n-th port of the pool publishes on the n-th port from this
    /// one. Default: none, and no pod is listened to.
    pub port: Option<u16>,
    /// Port on which it replays, counted in the same way. Default: none.
    pub replay_port: Option<u16>,
    /// Prefix of the topics that are subscribed to. Default: `kv@`.
    pub topic: String,
}

impl Default for EppConfig {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:9002".to_owned(),
            tls: TlsServerConfig::default(),
            insecure: false,
            send_cluster_token: false,
            max_exchanges: 16_384,
            max_connections: 1024,
            max_message_bytes: 4 << 20,
            max_body_bytes_in_flight: 256 << 20,
            handshake_ms: 10_000,
            max_fallbacks: 0,
            conformance: false,
            pool: InferencePoolConfig::default(),
        }
    }
}

impl Default for InferencePoolConfig {
    fn default() -> Self {
        Self {
            name: None,
            api: "https://kubernetes.default.svc".to_owned(),
            token_file: format!("{SERVICE_ACCOUNT}/token").into(),
            ca_file: format!("{SERVICE_ACCOUNT}/ca.crt").into(),
            retry_min_ms: 500,
            retry_max_ms: 30_000,
            model: None,
            role_label: "llm-d.ai/role".to_owned(),
            pd: None,
            kv_events: PoolEventsConfig::default(),
        }
    }
}

impl Default for PoolEventsConfig {
    fn default() -> Self {
        Self { port: None, replay_port: None, topic: "kv@".to_owned() }
    }
}

impl EppConfig {
    /// Checks every value.
    ///
    /// # Errors
    /// [`EppError::InvalidConfig`] names the first field that cannot be used.
    pub fn validate(&self) -> Result<()> {
        let bounds = [
            ("max_exchanges", self.max_exchanges, 1, MAX_COUNT),
            ("max_connections", self.max_connections, 1, MAX_COUNT),
            ("max_message_bytes", self.max_message_bytes, 64 << 10, 1 << 30),
            ("max_body_bytes_in_flight", self.max_body_bytes_in_flight, 1 << 20, 1 << 40),
            ("handshake_ms", self.handshake_ms, 1, MAX_MS),
            ("max_fallbacks", self.max_fallbacks, 0, 8),
            ("pool.retry_min_ms", self.pool.retry_min_ms, 1, MAX_MS),
            ("pool.retry_max_ms", self.pool.retry_max_ms, self.pool.retry_min_ms, MAX_MS),
        ];
        for (field, value, least, most) in bounds {
            check((least..=most).contains(&value), field, value, &format!("{least} to {most}"))?;
        }
        // Every caller would be told the token.
        let is_kept = !(self.send_cluster_token && self.insecure);
        check(is_kept, "send_cluster_token", true, "false together with `insecure`")?;
        self.pool.validate()
    }

    pub(crate) fn handshake_timeout(&self) -> Duration {
        Duration::from_millis(self.handshake_ms)
    }
}

impl InferencePoolConfig {
    /// Namespace and name of the configured pool; `None` without a pool.
    pub(crate) fn namespace_and_name(&self) -> Option<(&str, &str)> {
        self.name.as_ref()?.split_once('/')
    }

    pub(crate) fn access(&self) -> ApiAccess {
        let Self { api, token_file, ca_file, .. } = self.clone();
        ApiAccess { api, token_file, ca_file }
    }

    fn validate(&self) -> Result<()> {
        if let Some(name) = &self.name {
            let parts = self.namespace_and_name();
            let is_name = parts.is_some_and(|(namespace, name)| is_dns_name(namespace) && is_dns_name(name));
            check(is_name, "pool.name", name, "namespace/name of an InferencePool")?;
        }
        let is_url = self.api.parse::<http::Uri>().is_ok_and(|uri| {
            matches!(uri.scheme_str(), Some("http" | "https"))
                && uri.authority().is_some_and(|authority| !authority.as_str().contains('@'))
        });
        check(is_url, "pool.api", redacted_url(&self.api), "https://host:port or http://host:port")?;
        let is_moved_by_engines = self.pd != Some(PdProtocol::Kvik);
        check(is_moved_by_engines, "pool.pd", "kvik", "nixl_pull, p2p, shared or sglang")?;
        for (field, port) in [("port", self.kv_events.port), ("replay_port", self.kv_events.replay_port)] {
            check(port != Some(0), &format!("pool.kv_events.{field}"), 0, "1 to 65535")?;
        }
        Ok(())
    }
}

fn check(is_good: bool, field: &str, value: impl std::fmt::Display, allowed: &str) -> Result<()> {
    if is_good {
        return Ok(());
    }
    let (field, value, allowed) = (field.to_owned(), value.to_string(), allowed.to_owned());
    Err(EppError::InvalidConfig { field, value, allowed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_a_bad_value_is_named() {
        EppConfig::default().validate().unwrap();
        let refusal = |change: fn(&mut EppConfig)| {
            let mut config = EppConfig::default();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        let error = refusal(|config| config.max_message_bytes = 1000);
        assert_eq!(error, "`max_message_bytes` is 1000; allowed: 65536 to 1073741824");
        for (field, error) in [
            ("max_exchanges", refusal(|config| config.max_exchanges = 0)),
            ("max_fallbacks", refusal(|config| config.max_fallbacks = 9)),
            (
                "send_cluster_token",
                refusal(|config| (config.send_cluster_token, config.insecure) = (true, true)),
            ),
            ("pool.name", refusal(|config| config.pool.name = Some("vllm".to_owned()))),
            ("pool.name", refusal(|config| config.pool.name = Some("a/../secrets".to_owned()))),
            ("pool.api", refusal(|config| config.pool.api = "kubernetes".to_owned())),
            ("pool.pd", refusal(|config| config.pool.pd = Some(PdProtocol::Kvik))),
            ("pool.kv_events.port", refusal(|config| config.pool.kv_events.port = Some(0))),
            ("pool.retry_max_ms", refusal(|config| config.pool.retry_max_ms = 1)),
        ] {
            assert!(error.contains(&format!("`{field}`")), "{error}");
        }
    }
}
