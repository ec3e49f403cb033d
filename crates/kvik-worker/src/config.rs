//! The configuration of a worker.
//!
//! The unit of a time or size is part of its field's name.

mod device;
mod memory;

use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

use kvik_model::Selectors;
use kvik_node::BlendingPlan;
use kvik_proto::coordinator::WorkerRole;
use kvik_runtime::http::{InvalidLimit, ListenLimits, TlsServerConfig};
use kvik_runtime::hub::{HubError, ModelHubConfig};
use kvik_runtime::secret::{Secret, redacted_url};
use kvik_runtime::telemetry::TracingConfig;
use kvik_runtime::tls::TlsClientFiles;
use kvik_runtime::trust::TrustSettings;
use serde::{Deserialize, Serialize};

use crate::error::{Result, WorkerError};
use crate::plan::BlendDefaults;

pub use kvik_node::StoreConfig;
pub use memory::SharedMemoryConfig;

/// Everything that can be configured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkerConfig {
    /// Address to listen on; port 0 takes a free one. Default: `127.0.0.1:8082`.
    pub listen: String,
    /// Base address that gateways reach the worker at, such as `http://worker-0:8082`. Default: none,
    /// the address that is listened on, or the host's name if that is a wildcard.
    pub advertise: Option<String>,
    /// Name of the worker, unique among the live ones. Default: none, the host's name and the port.
    pub id: Option<String>,
    /// Folder of the model, or its name on a model hub: `owner/name` or `owner/name@revision`. Default: none, the model that the
    /// binary carries.
    pub model: Option<PathBuf>,
    /// Where models come from that are named and not a folder. Default: the Hugging Face hub and its cache.
    pub hub: ModelHubConfig,
    /// Name that clients ask for the model under. Default: none, the folder's name, or the name on the hub without a revision.
    pub served_model_name: Option<String>,
    /// Device that the model runs on: `cpu`, or `cuda:0` for the first NVIDIA GPU that the process can see. Default: `cpu`.
    pub device: String,
    /// Blocks of 16 tokens for keys and values; with `memory.ipc_name`, the most that there can be.
    /// Default: 0, which is 1024 on the CPU and what `kv_memory` says on a GPU.
    pub kv_blocks: usize,
    /// Memory for keys and values on a GPU: a size such as `40GiB`, or the share of the device that the worker uses in all, such
    /// as `0.9`, of which weights are taken first. Default: none, `0.9` on a GPU.
    pub kv_memory: Option<String>,
    /// Folder in which kernels that were compiled for a GPU are kept for the next start. Only the worker's user may write to it:
    /// its files are code. Default: none, they are compiled at every start, which takes seconds.
    pub kernel_cache: Option<PathBuf>,
    /// Memory for keys and values that is shared with other workers. Default: memory of its own.
    pub memory: SharedMemoryConfig,
    /// Where KV goes beyond the engine's memory. Default: nowhere.
    pub store: StoreConfig,
    /// Which tokens of reusable parts of a prompt are computed again where a request does not say, such as `none`, `first:16`
    /// or `deviation:0.15`. Default: none, what the model's settings say; without those, only requests that say it use
    /// segments.
    pub blend: Option<String>,
    /// Text that stands before a segment while it is computed, and is dropped afterwards. Segments of another text are not used.
    /// Default: none, segments are computed alone.
    pub blend_priming: Option<String>,
    /// Type in which keys and values are kept: `f32`, `f16` or `bf16`. Default: `auto`, which is `f32` on the CPU and `bf16` on a
    /// GPU.
    pub kv_dtype: String,
    /// Which workers of a model may use this one's KV: `exact` for those that compute it to the same bits, of the same kind of
    /// device; `dtype` for all with the same `kv_dtype`, also on a CPU and on a GPU, where answers may differ in nearly equal
    /// choices. All of them need the same value. Default: `exact`.
    pub kv_sharing: String,
    /// Threads that compute; 0 for the number of cores. Default: 0.
    pub threads: usize,
    /// Most token rows in one forward pass. Default: 512.
    pub max_batched_tokens: usize,
    /// Most sequences that are computed at a time. Default: 64.
    pub max_sequences: usize,
    /// Most outputs that wait for their turn; beyond, requests get 429. Default: 256.
    pub max_waiting: usize,
    /// Largest body of a request. Default: 67 108 864 bytes (64 MiB).
    pub body_limit_bytes: usize,
    /// Most KV that waits for its other layers, of all sequences together. Default: 268 435 456 bytes
    /// (256 MiB).
    pub kv_staging_bytes: usize,
    /// Time after which an output that waits for its client to read is ended. Default: 60 s.
    pub slow_client_timeout_s: u64,
    /// Time after which a stepped sequence, or KV that waits for its other layers, counts as
    /// abandoned. Default: 600 s.
    pub idle_timeout_s: u64,
    /// Time for running requests to finish when the worker drains; below what the process manager allows
    /// (Kubernetes: `terminationGracePeriodSeconds`, 30 s). Default: 25 s.
    pub drain_grace_s: u64,
    /// Base addresses of coordinators, tried in order. Default: none, the worker stands alone.
    pub coordinators: Vec<String>,
    /// Share of the ring relative to other workers. Default: 1.
    pub weight: f64,
    /// Which part of requests gateways send: `prefill` for long prompts, whose answers `decode` workers go on with, or `both`.
    /// Default: `both`.
    pub role: WorkerRole,
    /// Longest pause between two attempts to register with a coordinator; heartbeats pause for their interval at most. Default: 5000 ms.
    pub coordinator_backoff_ms: u64,
    /// TLS towards clients. Default: none, plain HTTP.
    pub tls: TlsServerConfig,
    /// What clients may take of the listener.
    pub limits: ListenLimits,
    /// TLS towards coordinators. Default: none, only `http://` works.
    pub coordinator_tls: TlsClientFiles,
    /// Token that all services of a cluster share, of 16 characters or more. Every call needs it but
    /// `/health`, `/ready` and `/metrics`, and calls to coordinators show it.
    /// `KVIK_CLUSTER_TOKEN` in the environment sets it for every role. Default: none.
    pub cluster_token: Option<Secret>,
    /// File with the cluster token, less a line break at its end. Default: none.
    pub cluster_token_file: Option<PathBuf>,
    /// Token for calls that change what the worker holds: `/drain`, `/kv/put`, `/cache/...`.
    /// `KVIK_ADMIN_TOKEN` in the environment sets it for every role. Default: none; the cluster token is
    /// enough then, and without that a caller on loopback or with a client certificate.
    pub admin_token: Option<Secret>,
    /// File with the admin token, less a line break at its end. Default: none.
    pub admin_token_file: Option<PathBuf>,
    /// Whether to listen where other machines can connect without a cluster token or client
    /// certificates. Default: false; the worker does not start then.
    pub insecure: bool,
    /// Where traces go. Default: nowhere.
    pub tracing: TracingConfig,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8082".to_owned(),
            advertise: None,
            id: None,
            model: None,
            hub: ModelHubConfig::default(),
            served_model_name: None,
            device: "cpu".to_owned(),
            kv_blocks: 0,
            kv_memory: None,
            kernel_cache: None,
            memory: SharedMemoryConfig::default(),
            store: StoreConfig::default(),
            blend: None,
            blend_priming: None,
            kv_dtype: "auto".to_owned(),
            kv_sharing: "exact".to_owned(),
            threads: 0,
            max_batched_tokens: 512,
            max_sequences: 64,
            max_waiting: 256,
            body_limit_bytes: 64 << 20,
            kv_staging_bytes: 256 << 20,
            slow_client_timeout_s: 60,
            idle_timeout_s: 600,
            drain_grace_s: 25,
            coordinators: Vec::new(),
            weight: 1.0,
            role: WorkerRole::default(),
            coordinator_backoff_ms: 5000,
            tls: TlsServerConfig::default(),
            limits: ListenLimits::default(),
            coordinator_tls: TlsClientFiles::default(),
            cluster_token: None,
            cluster_token_file: None,
            admin_token: None,
            admin_token_file: None,
            insecure: false,
            tracing: TracingConfig::default(),
        }
    }
}

impl WorkerConfig {
    /// Its name, under `id` or LMCache's name for it.
    pub(crate) fn given_id(&self) -> Option<&String> {
        self.id.as_ref().or(self.store.lmcache_instance_id.as_ref())
    }

    /// Checks all values.
    ///
    /// # Errors
    /// [`WorkerError::InvalidConfig`] for the first value that is not allowed.
    pub fn validate(&self) -> Result<()> {
        const BASE: &str = "http://host:port or https://host:port";
        self.limits.validate().map_err(|InvalidLimit { field, value, allowed }| {
            WorkerError::InvalidConfig { field, value, allowed }
        })?;
        if let Some(advertise) = &self.advertise {
            check(is_base_address(advertise), "advertise", &redacted_url(advertise), BASE)?;
        }
        for coordinator in &self.coordinators {
            check(is_base_address(coordinator), "coordinators", &redacted_url(coordinator), BASE)?;
        }
        let alias = &self.store.lmcache_instance_id;
        if let (Some(id), Some(alias)) = (&self.id, alias) {
            check(id == alias, "store.lmcache_instance_id", alias, "what `id` says, or nothing")?;
        }
        if self.store.enable_controller == Some(true) {
            let fits = !self.coordinators.is_empty();
            check(
                fits,
                "store.enable_controller",
                "true",
                "true together with `coordinators`, which govern the worker",
            )?;
        }
        for (field, name) in [
            ("id", &self.id),
            ("store.lmcache_instance_id", alias),
            ("served_model_name", &self.served_model_name),
        ] {
            if let Some(name) = name {
                let fits = (1..=256).contains(&name.len()) && !name.chars().any(char::is_control);
                check(fits, field, name, "1 to 256 bytes without control characters")?;
            }
        }
        self.hub.validate().map_err(|error| match error {
            HubError::InvalidConfig { field, value, allowed } => {
                WorkerError::InvalidConfig { field, value, allowed }
            }
            other => WorkerError::Hub(other),
        })?;
        self.backend("")?;
        self.blend()?;
        self.memory.validate()?;
        self.store.resolve()?;
        check(self.threads <= 1024, "threads", &self.threads, "0 to 1024")?;
        let rows = self.max_batched_tokens;
        check((1..=1 << 20).contains(&rows), "max_batched_tokens", &rows, "1 to 1048576")?;
        let sequences = self.max_sequences;
        check((1..=65536).contains(&sequences), "max_sequences", &sequences, "1 to 65536")?;
        check(self.max_waiting <= 1 << 20, "max_waiting", &self.max_waiting, "0 to 1048576")?;
        let body = self.body_limit_bytes;
        check(1024 <= body, "body_limit_bytes", &body, "at least 1024")?;
        for (field, seconds) in
            [("slow_client_timeout_s", self.slow_client_timeout_s), ("idle_timeout_s", self.idle_timeout_s)]
        {
            check((1..=86_400).contains(&seconds), field, &seconds, "1 to 86400 (a day)")?;
        }
        check(self.drain_grace_s <= 86_400, "drain_grace_s", &self.drain_grace_s, "0 to 86400 (a day)")?;
        check((0.001..=1000.0).contains(&self.weight), "weight", &self.weight, "0.001 to 1000")?;
        let backoff = self.coordinator_backoff_ms;
        check((10..=600_000).contains(&backoff), "coordinator_backoff_ms", &backoff, "10 to 600000")?;
        check(
            self.coordinator_tls.is_paired(),
            "coordinator_tls",
            "only one of `certificate` and `key`",
            "both or none",
        )
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

    /// What counts for requests that do not say how their prompt is put together.
    pub(crate) fn blend(&self) -> Result<BlendDefaults> {
        let parse = |text: &String| {
            text.parse::<Selectors>().map_err(|_| WorkerError::InvalidConfig {
                field: "blend",
                value: text.clone(),
                allowed: "none, all, first:TOKENS, random:RATIO, position:RATIO, deviation:RATIO[@LAYER] or attention:RATIO, \
                          several joined by +",
            })
        };
        let given = self.blend.as_ref().map(parse).transpose()?;
        let Some(BlendingPlan { selector, separator, min_tokens }) = self.store.blending()? else {
            return Ok(BlendDefaults { selectors: given, ..BlendDefaults::default() });
        };
        let selectors = Some(given.map_or_else(|| parse(&selector), Ok)?);
        Ok(BlendDefaults { selectors, separator: Some(separator), min_tokens })
    }

    pub(crate) fn slow_client_timeout(&self) -> Duration {
        Duration::from_secs(self.slow_client_timeout_s)
    }

    pub(crate) fn idle_timeout(&self) -> Duration {
        Duration::from_secs(self.idle_timeout_s)
    }

    pub(crate) fn coordinator_backoff(&self) -> Duration {
        Duration::from_millis(self.coordinator_backoff_ms)
    }
}

/// Says whether `address` is `http://host:port` or the same with TLS, without a path.
fn is_base_address(address: &str) -> bool {
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
    value: &(impl Display + ?Sized),
    allowed: &'static str,
) -> Result<()> {
    if fits {
        return Ok(());
    }
    Err(WorkerError::InvalidConfig { field, value: value.to_string(), allowed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_valid_and_reads_back() {
        let config = WorkerConfig::default();
        config.validate().unwrap();
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<WorkerConfig>(&text).unwrap(), config);
    }

    #[test]
    fn a_bad_value_is_refused_with_its_field_and_what_is_allowed() {
        let message = |change: fn(&mut WorkerConfig)| {
            let mut config = WorkerConfig::default();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        let too_many = "`kv_blocks` is 1073741825; allowed: 0 to 1073741824";
        assert_eq!(message(|config| config.kv_blocks = (1 << 30) + 1), too_many);
        assert_eq!(
            message(|config| config.kv_dtype = "fp8".into()),
            "`kv_dtype` is fp8; allowed: auto, f32, f16 or bf16"
        );
        assert_eq!(
            message(|config| config.kv_sharing = "all".into()),
            "`kv_sharing` is all; allowed: exact or dtype"
        );
        assert!(message(|config| config.coordinators = vec!["host:1".into()]).contains("`coordinators`"));
        assert!(message(|config| config.advertise = Some("http://h/x".into())).contains("`advertise`"));
        let login = message(|config| config.coordinators = vec!["http://u:canary@h:1".into()]);
        assert!(login.starts_with("`coordinators` is http://(hidden)@h:1; allowed: "), "{login}");
        assert!(message(|config| config.weight = f64::NAN).contains("`weight` is NaN"));
        assert!(message(|config| config.id = Some(String::new())).contains("`id`"));
        let both = |config: &mut WorkerConfig| {
            config.store.lmcache_instance_id = Some("a".to_owned());
            config.id = Some("b".to_owned());
        };
        assert!(message(both).contains("`store.lmcache_instance_id` is a; allowed: what `id` says"));
        let governed = |config: &mut WorkerConfig| config.store.enable_controller = Some(true);
        assert!(message(governed).contains("together with `coordinators`"));
        let mut config =
            WorkerConfig { coordinators: vec!["http://c:1".to_owned()], ..WorkerConfig::default() };
        config.store.lmcache_instance_id = Some("a".to_owned());
        governed(&mut config);
        config.validate().unwrap();
        assert_eq!(config.given_id().map(String::as_str), Some("a"));
        assert!(message(|config| config.memory.device_bytes = 1).contains("`memory.device_bytes` is 1"));
        assert!(message(|config| config.idle_timeout_s = 0).contains("a day"));
        assert!(message(|config| config.coordinator_tls.key = Some("k".into())).contains("both or none"));
    }

    #[test]
    fn an_unknown_field_is_refused() {
        let error = serde_json::from_str::<WorkerConfig>(r#"{"kv_block": 1}"#).unwrap_err();
        assert!(error.to_string().contains("unknown field `kv_block`"), "{error}");
    }
}
