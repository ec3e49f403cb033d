//! The configuration of a coordinator.
//!
//! The unit of a time is part of its field's name.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kvik_index::ring::MAX_VIRTUAL_NODES;
use kvik_proto::coordinator::RingConfig;
use kvik_runtime::http::{InvalidLimit, ListenLimits, TlsServerConfig};
use kvik_runtime::secret::{Secret, redacted_url};
use kvik_runtime::telemetry::TracingConfig;
use kvik_runtime::tls::TlsClientFiles;
use kvik_runtime::trust::TrustSettings;
use serde::{Deserialize, Serialize};

use crate::error::{CoordinatorError, Result};

/// The longest time that a lead is kept for a leader that does not renew it.
pub(crate) const MAX_LEASE_DURATION_S: u64 = 60;

/// Everything that can be configured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CoordinatorConfig {
    /// Address to listen on; port 0 takes a free one. Default: `127.0.0.1:8081`.
    pub listen: String,
    /// Base address that the other coordinators reach this one at, such as
    /// `http://coordinator-0:8081`. Default: none, the address that is listened on.
    pub advertise: Option<String>,
    /// TLS towards workers, gateways and the other coordinators. Default: none, plain HTTP.
    pub tls: TlsServerConfig,
    /// What clients may take of the listener.
    pub limits: ListenLimits,
    /// TLS of the calls to the other coordinators, to workers and to etcd. Default: none, only `http://` works.
    pub peer_tls: TlsClientFiles,
    /// Token that all services of a cluster share, of 16 characters or more. Every call needs it but
    /// `/health`, `/ready` and `/metrics`, and calls to other coordinators and to workers show it.
    /// `KVIK_CLUSTER_TOKEN` in the environment sets it for every role. Default: none.
    pub cluster_token: Option<Secret>,
    /// File with the cluster token, less a line break at its end. Default: none.
    pub cluster_token_file: Option<PathBuf>,
    /// Token for draining workers.
    /// `KVIK_ADMIN_TOKEN` in the environment sets it for every role. Default: none; the cluster token is
    /// enough then, and without that a caller on loopback or with a client certificate.
    pub admin_token: Option<Secret>,
    /// File with the admin token, less a line break at its end. Default: none.
    pub admin_token_file: Option<PathBuf>,
    /// Whether to listen where other machines can connect without a cluster token or client
    /// certificates. Default: false; the coordinator does not start then.
    pub insecure: bool,
    /// Time between two heartbeats of a worker; one that misses three is gone. Default: 1000 ms.
    pub heartbeat_interval_ms: u64,
    /// Time in which a worker that joins others rises from a tenth of its weight to all of it; 0 for
    /// none. Default: 30 000 ms.
    pub slow_start_ms: u64,
    /// How the ring is built.
    pub ring: RingConfig,
    /// Whether running requests are moved from full workers to others, and how.
    pub rebalance: RebalanceConfig,
    /// Where the state is.
    pub state: StateConfig,
    /// Where its traces go.
    pub tracing: TracingConfig,
}

/// Whether running requests are moved from full workers to others, and how.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RebalanceConfig {
    /// Whether the leading coordinator moves running requests from full workers to others. Default: false.
    pub enabled: bool,
    /// A worker gives requests away when it has more than `1 + load_factor` times its share of the running and waiting
    /// sequences, until it is down to its share. Default: 0.25.
    pub load_factor: f64,
    /// Most moves that begin in a second, 0.01 to 100. Default: 2.
    pub max_moves_per_s: f64,
    /// Time that a request stays on a worker that it was moved to, in seconds. Default: 30 s.
    pub min_stay_s: u64,
}

/// Where the state is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StateConfig {
    /// `embedded`: in the memory of the only coordinator. `etcd`: in etcd, for any number of
    /// coordinators of which one leads. `kubernetes`: the same, in a Lease and two `ConfigMaps`. Default: `embedded`.
    pub backend: StateBackendKind,
    /// The etcd, for the backend `etcd`.
    pub etcd: EtcdConfig,
    /// The API server, for the backend `kubernetes`.
    pub kubernetes: KubernetesStateConfig,
}

/// A kind of state backend.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateBackendKind {
    /// In memory.
    #[default]
    Embedded,
    /// In etcd.
    Etcd,
    /// In the API server of Kubernetes.
    Kubernetes,
}

/// An etcd cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EtcdConfig {
    /// Base addresses of its members, tried in turn; their JSON gateway must be on, as it is by
    /// default. Default: `http://127.0.0.1:2379`.
    pub endpoints: Vec<String>,
    /// What all keys begin with; coordinators of one system share it. Default: `/kvik`.
    pub prefix: String,
    /// Time after which a leader that does not renew the lead has lost it, 2 to 60. Default: 3 s.
    pub session_ttl_s: u64,
    /// User that etcd knows, if it asks for one; it needs to read and write below the prefix.
    /// Default: none.
    pub username: Option<String>,
    /// File with the user's password, less a line break at its end. Default: none.
    pub password_file: Option<PathBuf>,
}

/// The API server of a Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KubernetesStateConfig {
    /// The API server. Default: `https://kubernetes.default.svc`.
    pub api: String,
    /// The namespace of the objects. Default: none, that of the pod.
    pub namespace: Option<String>,
    /// Name of the Lease, and what the names of the `ConfigMaps` begin with; coordinators of one system share it.
    /// Default: `kvik-coordinator`.
    pub name: String,
    /// Time after which a leader that does not renew its Lease has lost the lead, 3 to 60. Default: 6 s.
    pub lease_duration_s: u64,
    /// File with the token that is shown to the API server, read anew for each call. Default: the pod's own.
    pub token_file: PathBuf,
    /// File with the authorities that sign the API server's certificate. Default: the pod's own.
    pub ca_file: PathBuf,
    /// File with the namespace of the pod. Default: the pod's own.
    pub namespace_file: PathBuf,
}

// === impl defaults ===

impl Default for CoordinatorConfig {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8081".to_owned(),
            advertise: None,
            tls: TlsServerConfig::default(),
            limits: ListenLimits::default(),
            peer_tls: TlsClientFiles::default(),
            cluster_token: None,
            cluster_token_file: None,
            admin_token: None,
            admin_token_file: None,
            insecure: false,
            heartbeat_interval_ms: 1000,
            slow_start_ms: 30_000,
            ring: RingConfig::default(),
            rebalance: RebalanceConfig::default(),
            state: StateConfig::default(),
            tracing: TracingConfig::default(),
        }
    }
}

impl Default for RebalanceConfig {
    fn default() -> Self {
        Self { enabled: false, load_factor: 0.25, max_moves_per_s: 2.0, min_stay_s: 30 }
    }
}

impl Default for EtcdConfig {
    fn default() -> Self {
        Self {
            endpoints: vec!["http://127.0.0.1:2379".to_owned()],
            prefix: "/kvik".to_owned(),
            session_ttl_s: 3,
            username: None,
            password_file: None,
        }
    }
}

impl Default for KubernetesStateConfig {
    fn default() -> Self {
        let account = Path::new("/var/run/secrets/kubernetes.io/serviceaccount");
        Self {
            api: "https://kubernetes.default.svc".to_owned(),
            namespace: None,
            name: "kvik-coordinator".to_owned(),
            lease_duration_s: 6,
            token_file: account.join("token"),
            ca_file: account.join("ca.crt"),
            namespace_file: account.join("namespace"),
        }
    }
}

// === impl CoordinatorConfig ===

impl CoordinatorConfig {
    /// Checks all values.
    ///
    /// # Errors
    /// [`CoordinatorError::InvalidConfig`] for the first value that is not allowed.
    pub fn validate(&self) -> Result<()> {
        self.limits.validate().map_err(|InvalidLimit { field, value, allowed }| {
            CoordinatorError::InvalidConfig { field, value, allowed }
        })?;
        if let Some(advertise) = &self.advertise {
            check(
                is_base_address(advertise),
                "advertise",
                &redacted_url(advertise),
                "http://host:port or https://host:port",
            )?;
        }
        let interval = self.heartbeat_interval_ms;
        check((10..=60_000).contains(&interval), "heartbeat_interval_ms", &interval, "10 to 60000")?;
        let slow_start = self.slow_start_ms;
        check(slow_start <= 86_400_000, "slow_start_ms", &slow_start, "0 to 86400000 (a day)")?;
        let nodes = self.ring.virtual_nodes;
        check((1..=MAX_VIRTUAL_NODES).contains(&nodes), "ring.virtual_nodes", &nodes, "1 to 65536")?;
        let factor = self.ring.load_factor;
        check((0.0..=100.0).contains(&factor), "ring.load_factor", &factor, "0 to 100")?;
        self.rebalance.validate()?;
        check(self.peer_tls.is_paired(), "peer_tls", &"only one of `certificate` and `key`", "both or none")?;
        match self.state.backend {
            StateBackendKind::Embedded => Ok(()),
            StateBackendKind::Etcd => self.state.etcd.validate(),
            StateBackendKind::Kubernetes => self.state.kubernetes.validate(),
        }
    }

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

    pub(crate) fn heartbeat_interval(&self) -> Duration {
        Duration::from_millis(self.heartbeat_interval_ms)
    }

    pub(crate) fn slow_start(&self) -> Duration {
        Duration::from_millis(self.slow_start_ms)
    }
}

impl RebalanceConfig {
    fn validate(&self) -> Result<()> {
        let factor = self.load_factor;
        check((0.01..=100.0).contains(&factor), "rebalance.load_factor", &factor, "0.01 to 100")?;
        let rate = self.max_moves_per_s;
        check((0.01..=100.0).contains(&rate), "rebalance.max_moves_per_s", &rate, "0.01 to 100")?;
        let stay = self.min_stay_s;
        check((1..=86_400).contains(&stay), "rebalance.min_stay_s", &stay, "1 to 86400 (a day)")
    }

    /// The least time between the starts of two moves.
    pub(crate) fn move_interval(&self) -> Duration {
        Duration::from_secs_f64(1.0 / self.max_moves_per_s)
    }

    pub(crate) fn min_stay(&self) -> Duration {
        Duration::from_secs(self.min_stay_s)
    }
}

impl EtcdConfig {
    fn validate(&self) -> Result<()> {
        check(!self.endpoints.is_empty(), "state.etcd.endpoints", &"empty", "at least one address")?;
        for endpoint in &self.endpoints {
            let allowed = "http://host:port or https://host:port";
            check(is_base_address(endpoint), "state.etcd.endpoints", &redacted_url(endpoint), allowed)?;
        }
        let prefix = &self.prefix;
        let fits = prefix.starts_with('/') && !prefix.ends_with('/');
        check(fits, "state.etcd.prefix", prefix, "a path that begins and does not end with a slash")?;
        check(
            self.username.is_some() == self.password_file.is_some(),
            "state.etcd",
            &"only one of `username` and `password_file`",
            "both or none",
        )?;
        let ttl = self.session_ttl_s;
        check((2..=60).contains(&ttl), "state.etcd.session_ttl_s", &ttl, "2 to 60")
    }
}

impl KubernetesStateConfig {
    fn validate(&self) -> Result<()> {
        let allowed = "http://host:port or https://host:port";
        check(is_base_address(&self.api), "state.kubernetes.api", &redacted_url(&self.api), allowed)?;
        // They become part of paths.
        let allowed = "small letters, digits and hyphens, 1 to 50";
        let namespace = self.namespace.as_deref().unwrap_or("default");
        check(is_label(namespace), "state.kubernetes.namespace", &namespace, allowed)?;
        check(is_label(&self.name), "state.kubernetes.name", &self.name, allowed)?;
        let duration = self.lease_duration_s;
        let fits = (3..=MAX_LEASE_DURATION_S).contains(&duration);
        check(fits, "state.kubernetes.lease_duration_s", &duration, "3 to 60")
    }
}

/// Says whether `name` can name an object of Kubernetes, with room for more at its end.
fn is_label(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=50).contains(&name.len())
        && name.bytes().all(is_plain)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// Says whether `address` is `http://host:port` or the same with TLS, without a path.
pub(crate) fn is_base_address(address: &str) -> bool {
    address.parse::<http::Uri>().is_ok_and(|uri| {
        matches!(uri.scheme_str(), Some("http" | "https"))
            && uri.host().is_some_and(|host| !host.is_empty())
            && uri.path() == "/"
            && uri.query().is_none()
            // A login would be sent to no server, and be printed wherever the address is.
            && uri.authority().is_some_and(|authority| !authority.as_str().contains('@'))
    })
}

fn check(
    fits: bool,
    field: &'static str,
    value: &dyn std::fmt::Display,
    allowed: &'static str,
) -> Result<()> {
    if fits {
        return Ok(());
    }
    Err(CoordinatorError::InvalidConfig { field, value: value.to_string(), allowed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_valid() {
        CoordinatorConfig::default().validate().unwrap();
    }

    #[test]
    fn a_bad_value_is_refused_with_its_field_and_what_is_allowed() {
        let message = |change: fn(&mut CoordinatorConfig)| {
            let mut config = CoordinatorConfig::default();
            config.state.backend = StateBackendKind::Etcd;
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        assert_eq!(
            message(|config| config.heartbeat_interval_ms = 0),
            "`heartbeat_interval_ms` is 0; allowed: 10 to 60000"
        );
        assert!(
            message(|config| config.ring.load_factor = f64::NAN).starts_with("`ring.load_factor` is NaN")
        );
        assert!(message(|config| config.ring.virtual_nodes = 0).starts_with("`ring.virtual_nodes` is 0"));
        assert_eq!(
            message(|config| config.rebalance.max_moves_per_s = 0.0),
            "`rebalance.max_moves_per_s` is 0; allowed: 0.01 to 100"
        );
        assert!(message(|config| config.rebalance.load_factor = f64::NAN).contains("0.01 to 100"));
        assert!(message(|config| config.rebalance.min_stay_s = 0).contains("1 to 86400"));
        assert!(message(|config| config.state.etcd.session_ttl_s = 1).contains("2 to 60"));
        assert!(message(|config| config.state.etcd.prefix = "kvik/".into()).contains("kvik/"));
        assert!(message(|config| config.state.etcd.endpoints.clear()).contains("at least one"));
        let login = message(|config| config.state.etcd.endpoints = vec!["http://u:canary@h:1".into()]);
        assert!(login.starts_with("`state.etcd.endpoints` is http://(hidden)@h:1; allowed: "), "{login}");
        assert!(message(|config| config.state.etcd.username = Some("kvik".into())).contains("both or none"));
        assert!(message(|config| config.advertise = Some("host:1/path".into())).contains("`advertise`"));
        assert!(message(|config| config.peer_tls.key = Some("key.pem".into())).contains("both or none"));
    }

    #[test]
    fn a_bad_value_of_kubernetes_is_refused_only_where_it_is_used() {
        let message = |change: fn(&mut KubernetesStateConfig)| {
            let mut config = CoordinatorConfig::default();
            change(&mut config.state.kubernetes);
            config.validate().unwrap();
            config.state.backend = StateBackendKind::Kubernetes;
            config.validate().unwrap_err().to_string()
        };
        assert_eq!(
            message(|config| config.lease_duration_s = 2),
            "`state.kubernetes.lease_duration_s` is 2; allowed: 3 to 60"
        );
        assert!(message(|config| config.lease_duration_s = 61).contains("is 61;"));
        assert!(
            message(|config| config.name = "a/../b".into()).starts_with("`state.kubernetes.name` is a/../b;")
        );
        assert!(
            message(|config| config.namespace = Some(String::new())).contains("`state.kubernetes.namespace`")
        );
        let login = message(|config| config.api = "https://u:canary@h".into());
        assert!(login.starts_with("`state.kubernetes.api` is https://(hidden)@h; allowed: "), "{login}");
    }

    #[test]
    fn an_unknown_field_is_refused() {
        let error = serde_json::from_str::<CoordinatorConfig>(r#"{"state": {"etc": {}}}"#).unwrap_err();
        assert!(error.to_string().contains("unknown field `etc`"), "{error}");
    }
}
