//! The configuration of discovery in Kubernetes.

use std::fmt;
use std::path::PathBuf;

use kvik_runtime::secret::redacted_url;
use serde::{Deserialize, Serialize};

use super::api::{ApiAccess, Resource};
use crate::error::{IndexerError, Result};
use crate::sources::engine::{EngineConfig, EngineLimits};

/// Where a pod finds what speaks for it to the API server: `token` and `ca.crt`.
pub const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Engines that are found by the `EndpointSlices` of a service. Times are in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KubernetesConfig {
    /// The API server. Default: `https://kubernetes.default.svc`.
    pub api: String,
    /// The namespace of the engines. No default.
    pub namespace: String,
    /// The service whose endpoints are the engines; this or `label_selector`. Default: none.
    pub service: Option<String>,
    /// Labels of the `EndpointSlices`, as `kubectl --selector` takes them. Default: none.
    pub label_selector: Option<String>,
    /// The port on which engines publish: a number, or the name of a port of the service. Default: 5557.
    pub port: PortRef,
    /// The port on which they replay. Default: none.
    pub replay_port: Option<PortRef>,
    /// Data parallel ranks of an engine, from 1; rank `r` publishes on the port after `r` others. Default: 1.
    pub n_ranks: u16,
    /// Prefix of the topics that are subscribed to. Default: `kv@`.
    pub topic: String,
    /// What workers are called. Default: `pod`.
    pub worker: WorkerNaming,
    /// The model, as requests name it. Default: the model in the topic.
    pub model: Option<String>,
    /// File with the token that is shown to the API server, read anew for each request. Default: the pod's own.
    pub token_file: PathBuf,
    /// File with the authorities that sign the API server's certificate. Default: the pod's own.
    pub ca_file: PathBuf,
    /// First pause before an API server that failed is asked again; it doubles from there. Default: 500.
    pub retry_min_ms: u64,
    /// Longest pause. Default: 30000.
    pub retry_max_ms: u64,
    /// Engines that are listened to at most. Default: 1024.
    pub max_engines: usize,
    /// What listening to each may take.
    pub limits: EngineLimits,
}

/// A port by its number or its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PortRef {
    /// The number.
    Number(u16),
    /// The name that the service gives it.
    Name(String),
}

/// What a discovered worker is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerNaming {
    /// As its pod, or as its address where the endpoint has no pod.
    #[default]
    Pod,
    /// As its address.
    Address,
    /// As its messages say.
    Topic,
}

impl Default for KubernetesConfig {
    fn default() -> Self {
        Self {
            api: "https://kubernetes.default.svc".to_owned(),
            namespace: String::new(),
            service: None,
            label_selector: None,
            port: PortRef::Number(5557),
            replay_port: None,
            n_ranks: 1,
            topic: "kv@".to_owned(),
            worker: WorkerNaming::default(),
            model: None,
            token_file: format!("{SERVICE_ACCOUNT}/token").into(),
            ca_file: format!("{SERVICE_ACCOUNT}/ca.crt").into(),
            retry_min_ms: 500,
            retry_max_ms: 30_000,
            max_engines: 1024,
            limits: EngineLimits::default(),
        }
    }
}

impl KubernetesConfig {
    /// Checks it before it is used.
    ///
    /// # Errors
    /// [`IndexerError::Invalid`] with the first field that cannot be used.
    pub fn check(&self) -> Result<()> {
        let uri = self.api.parse::<http::Uri>().ok();
        let is_url = uri.is_some_and(|uri| {
            matches!(uri.scheme_str(), Some("http" | "https"))
                && uri.authority().is_some_and(|authority| !authority.as_str().contains('@'))
        });
        if !is_url {
            return Err(IndexerError::invalid(
                "api",
                redacted_url(&self.api),
                "https://host:port or http://host:port",
            ));
        }
        if !is_dns_name(&self.namespace) {
            return Err(IndexerError::invalid("namespace", &self.namespace, "the name of a namespace"));
        }
        match (&self.service, &self.label_selector) {
            (Some(service), None) if !is_dns_name(service) => {
                return Err(IndexerError::invalid("service", service, "the name of a service"));
            }
            (Some(_), None) => {}
            (None, Some(selector)) if !selector.is_empty() && selector.len() <= 4096 => {}
            (None, Some(selector)) => {
                return Err(IndexerError::invalid("label_selector", selector, "1 to 4096 bytes"));
            }
            _ => return Err(IndexerError::invalid("service", "", "one of `service` and `label_selector`")),
        }
        for (field, port) in [("port", Some(&self.port)), ("replay_port", self.replay_port.as_ref())] {
            let is_bad = |port: &PortRef| match port {
                PortRef::Number(number) => {
                    number.checked_add(self.n_ranks.saturating_sub(1)).is_none_or(|_| *number == 0)
                }
                PortRef::Name(name) => name.is_empty(),
            };
            if let Some(port) = port.filter(|port| is_bad(port)) {
                return Err(IndexerError::invalid(
                    field,
                    port,
                    "a port from 1 to 65535, for each rank, or its name",
                ));
            }
        }
        let at_least_one = [
            ("n_ranks", u64::from(self.n_ranks)),
            ("max_engines", self.max_engines as u64),
            ("retry_min_ms", self.retry_min_ms),
        ];
        for (field, value) in at_least_one {
            if value == 0 {
                return Err(IndexerError::invalid(field, "0", "1 or more"));
            }
        }
        // What remains is checked where it is used, here with an address that stands for any.
        self.engine("pod", 0, "tcp://engine:1".to_owned(), None).check()
    }

    /// The `EndpointSlices`.
    pub(super) fn resource(&self) -> Resource {
        let selector = match (&self.service, &self.label_selector) {
            (Some(service), _) => format!("kubernetes.io/service-name={service}"),
            (None, selector) => selector.clone().unwrap_or_default(),
        };
        let path = format!("/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices", self.namespace);
        Resource::with_labels(path, &selector)
    }

    /// How the API server is reached.
    pub(super) fn access(&self) -> ApiAccess {
        let Self { api, token_file, ca_file, .. } = self.clone();
        ApiAccess { api, token_file, ca_file }
    }

    /// The configuration of the source of one rank of an engine.
    pub(super) fn engine(
        &self,
        worker: &str,
        rank: u16,
        endpoint: String,
        replay_endpoint: Option<String>,
    ) -> EngineConfig {
        EngineConfig {
            endpoint,
            replay_endpoint,
            topic: self.topic.clone(),
            worker: (self.worker != WorkerNaming::Topic).then(|| worker.to_owned()),
            model: self.model.clone(),
            rank: u32::from(rank),
            limits: self.limits,
        }
    }
}

impl fmt::Display for PortRef {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(formatter),
            Self::Name(name) => name.fmt(formatter),
        }
    }
}

/// Whether a name has lower case letters, digits, dashes and dots only, as names of objects have.
pub fn is_dns_name(name: &str) -> bool {
    (1..=253).contains(&name.len())
        && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.'))
        && !name.starts_with(['-', '.'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_cannot_be_used_is_named() {
        let good = KubernetesConfig {
            namespace: "serving".to_owned(),
            service: Some("vllm".to_owned()),
            ..KubernetesConfig::default()
        };
        good.check().unwrap();
        let number = |port| PortRef::Number(port);
        let failures = [
            (KubernetesConfig { api: "kubernetes".to_owned(), ..good.clone() }, "api"),
            (KubernetesConfig { namespace: String::new(), ..good.clone() }, "namespace"),
            (KubernetesConfig { namespace: "../../secrets".to_owned(), ..good.clone() }, "namespace"),
            (KubernetesConfig { service: Some("a?b".to_owned()), ..good.clone() }, "service"),
            (KubernetesConfig { service: None, ..good.clone() }, "service"),
            (KubernetesConfig { label_selector: Some("a=b".to_owned()), ..good.clone() }, "service"),
            (KubernetesConfig { port: number(0), ..good.clone() }, "port"),
            (
                KubernetesConfig { replay_port: Some(number(65535)), n_ranks: 2, ..good.clone() },
                "replay_port",
            ),
            (KubernetesConfig { n_ranks: 0, ..good.clone() }, "n_ranks"),
            (KubernetesConfig { model: Some(String::new()), ..good }, "model"),
        ];
        for (config, wrong) in failures {
            match config.check() {
                Err(IndexerError::Invalid { field, .. }) => assert_eq!(field, wrong),
                other => panic!("{wrong}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_port_is_written_as_a_number_or_a_name() {
        let config: KubernetesConfig =
            serde_json::from_str(r#"{"port": 6000, "replay_port": "replay", "worker": "address"}"#).unwrap();
        assert_eq!(config.port, PortRef::Number(6000));
        assert_eq!(config.replay_port, Some(PortRef::Name("replay".to_owned())));
        assert_eq!(config.worker, WorkerNaming::Address);
    }
}
