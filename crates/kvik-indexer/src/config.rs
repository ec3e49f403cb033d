//! The configuration of the index.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use kvik_index::holders::{CostModel, HolderIndex, TierWeights};
use kvik_runtime::secret::SecretUrl;
use kvik_tokens::{PoolConfig, PrefixStoreKind};
use kvik_types::{BlockSize, RedisUrl, RedisUrlError};
use serde::{Deserialize, Serialize};

use crate::backend::redis::RedisOptions;
use crate::error::{IndexerError, Result};
use crate::grpc::GrpcLimits;
use crate::hub::HubConfig;
use crate::score::ScorerKind;
use crate::sources::engine::EngineConfig;
use crate::sources::kubernetes::KubernetesConfig;

/// The word for the backend in this process' memory.
pub(crate) const MEMORY: &str = "memory";

/// Everything that can be configured. Times and sizes have their unit in their name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct IndexConfig {
    /// Whether there is an index at all. Default: true.
    pub enabled: bool,
    /// Where it is kept: `memory`, or the URL of a Redis or Valkey that several gateways share, such as
    /// `redis://host:6379` or `redis+cluster://host:6379`. Default: `memory`.
    pub backend: SecretUrl,
    /// Settings of a shared backend.
    pub redis: RedisConfig,
    /// Bytes of memory that the book of one model may take; beyond it the oldest leave. Default: 4 GiB.
    pub max_book_bytes: u64,
    /// Pairs of block and tier that one worker may have; more are dropped and counted. Default: 100 000 000.
    pub max_worker_blocks: u64,
    /// Folder in which books in memory are kept over a restart. Default: none.
    pub snapshot_folder: Option<PathBuf>,
    /// Time between two snapshots. Default: 60 s.
    pub snapshot_interval_s: u64,
    /// How workers are scored in routing, over gRPC and where a question names no scorer: `longest_prefix`,
    /// `highest_block_hit`, `coverage` or `cost`. Default: `longest_prefix`.
    pub scorer: String,
    /// What a block is worth in each tier, from 0 to 1, a faster tier never less than a slower one.
    pub tier_weights: WeightConfig,
    /// What work takes, for the scorer `cost`.
    pub costs: CostConfig,
    /// Values of `PYTHONHASHSEED` that engines run with. Default: none, engines run without.
    pub hash_seeds: Vec<String>,
    /// Tokens of a block for engines whose hashes cannot be computed. Default: 16.
    pub bridge_block_tokens: usize,
    /// How prompts become tokens.
    pub tokenizers: TokenizersConfig,
    /// Engines to listen to over `ZeroMQ`. Default: none. Workers of kvik are found without it.
    pub engines: Vec<EngineConfig>,
    /// Store daemons to listen to, for engines that keep KV there and cannot tell of it. Default: none. Workers of kvik tell
    /// of their store themselves.
    pub stores: Vec<StoreSourceConfig>,
    /// Engines to listen to that Kubernetes knows. Default: none.
    pub kubernetes: Vec<KubernetesConfig>,
    /// Address for gRPC (`indexer.v1.IndexerService`); port 0 takes a free one. It has the gateway's `tls`, and
    /// calls need a key of `api_keys`, or else the cluster token, where there are any. Default: none.
    pub grpc_listen: Option<String>,
    /// Bounds of gRPC.
    pub grpc: GrpcLimits,
}

/// A store daemon to listen to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreSourceConfig {
    /// Where the daemon serves HTTP (its `metrics`): `http://host:port`. No default.
    pub url: String,
    /// The workers whose KV it keeps, by the names that the index knows them by; a backend of a gateway has its address. No
    /// default.
    pub workers: Vec<String>,
    /// The model, as requests name it. No default.
    pub model: String,
    /// The model, as the engines name it to the daemon. Default: the last part of `model`'s path.
    pub store_model: Option<String>,
}

/// A Redis that is shared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RedisConfig {
    /// Longest time to connect. Default: 1000 ms.
    pub connect_ms: u64,
    /// Longest time of a lookup; then the ring decides. Default: 50 ms.
    pub lookup_ms: u64,
    /// Longest time of any other call. Default: 1000 ms.
    pub write_ms: u64,
    /// How long a block stays that is not stored again; 0 is for ever. Default: 86 400 s.
    pub block_ttl_s: u64,
    /// What all keys begin with. Default: `kvik`.
    pub key_prefix: String,
    /// Authorities to trust instead of those of the system, as a PEM file. Default: none.
    pub ca_file: Option<PathBuf>,
}

/// What a block is worth in each tier.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WeightConfig {
    /// In memory of the device. Default: 1.
    pub gpu: f64,
    /// In memory of the host. Default: 0.8.
    pub cpu: f64,
    /// On a disk of the host. Default: 0.5.
    pub disk: f64,
    /// On another machine. Default: 0.3.
    pub remote: f64,
}

/// What work takes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CostConfig {
    /// Tokens of a prompt that a worker computes in a second. Default: 10 000.
    pub prefill_tokens_per_s: f64,
    /// Bytes of KV of one token. Default: 131 072, an 8B model with grouped queries in 16 bits.
    pub token_bytes: u64,
    /// Bytes a second from memory of the host to the device. Default: 20e9.
    pub cpu_bytes_per_s: f64,
    /// Bytes a second from a disk of the host. Default: 3e9.
    pub disk_bytes_per_s: f64,
    /// Bytes a second from another machine. Default: 1e9.
    pub remote_bytes_per_s: f64,
    /// How much of a match counts while events of the worker are missing, from 0 to 1. Default: 0.9.
    pub unsure_credit: f64,
}

/// How prompts become tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TokenizersConfig {
    /// Folders with a `tokenizer.json` and what belongs to it, by the name of their model. Default: none.
    pub models: BTreeMap<String, PathBuf>,
    /// A folder in which the tokenizer of every other model is looked for, as `<root>/<model>/tokenizer.json`.
    /// Default: none.
    pub root: Option<PathBuf>,
    /// Tokenizers that are fetched from a model hub. Default: none.
    pub hub: HubConfig,
    /// Whether a request waits for the tokens of its prompt: `wait`, or `background`, in which it is placed by what is
    /// known of its beginning and its prompt is tokenized behind it for the next one. Default: `wait`.
    pub mode: TokenizeMode,
    /// Threads that tokenize. Default: 2.
    pub n_threads: usize,
    /// Prompts that may wait; more are placed without the index. Default: 1024.
    pub max_waiting: usize,
    /// Tokenizers that are kept in memory. Default: 20.
    pub max_tokenizers: usize,
    /// Where known prefixes are kept: `lru`, `trie` or `none`. Default: `lru`.
    pub prefix_store: PrefixStore,
    /// Memory for known prefixes, in bytes. Default: 256 MiB.
    pub prefix_store_bytes: usize,
}

/// Whether requests wait for tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenizeMode {
    /// A request waits for all tokens of its prompt, up to `routing.max_lookup_ms`.
    #[default]
    Wait,
    /// A request is placed by what is known of its prompt at once.
    Background,
}

/// Where known prefixes are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefixStore {
    /// Nowhere: every prompt is tokenized whole.
    None,
    /// A least recently used table of stretches of text.
    #[default]
    Lru,
    /// A trie of characters.
    Trie,
}

impl Default for IndexConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            backend: MEMORY.into(),
            redis: RedisConfig::default(),
            max_book_bytes: 4 << 30,
            max_worker_blocks: 100_000_000,
            snapshot_folder: None,
            snapshot_interval_s: 60,
            scorer: ScorerKind::default().name().to_owned(),
            tier_weights: WeightConfig::default(),
            costs: CostConfig::default(),
            hash_seeds: Vec::new(),
            bridge_block_tokens: 16,
            tokenizers: TokenizersConfig::default(),
            engines: Vec::new(),
            stores: Vec::new(),
            kubernetes: Vec::new(),
            grpc_listen: None,
            grpc: GrpcLimits::default(),
        }
    }
}

impl Default for RedisConfig {
    fn default() -> Self {
        let options = RedisOptions::default();
        Self {
            connect_ms: options.connect_timeout.as_millis() as u64,
            lookup_ms: options.lookup_timeout.as_millis() as u64,
            write_ms: options.write_timeout.as_millis() as u64,
            block_ttl_s: options.block_ttl.as_secs(),
            key_prefix: options.key_prefix,
            ca_file: None,
        }
    }
}

impl Default for WeightConfig {
    fn default() -> Self {
        Self { gpu: 1.0, cpu: 0.8, disk: 0.5, remote: 0.3 }
    }
}

impl Default for CostConfig {
    fn default() -> Self {
        Self {
            prefill_tokens_per_s: 10_000.0,
            token_bytes: 131_072,
            cpu_bytes_per_s: 20e9,
            disk_bytes_per_s: 3e9,
            remote_bytes_per_s: 1e9,
            unsure_credit: 0.9,
        }
    }
}

impl Default for TokenizersConfig {
    fn default() -> Self {
        let pool = PoolConfig::default();
        Self {
            models: BTreeMap::new(),
            root: None,
            hub: HubConfig::default(),
            mode: TokenizeMode::default(),
            n_threads: pool.n_threads,
            max_waiting: pool.max_waiting,
            max_tokenizers: pool.max_tokenizers,
            prefix_store: PrefixStore::Lru,
            prefix_store_bytes: pool.prefix_store_bytes,
        }
    }
}

impl StoreSourceConfig {
    fn check(&self) -> Result<()> {
        let rest = self.url.strip_prefix("http://").or_else(|| self.url.strip_prefix("https://"));
        if rest.is_none_or(str::is_empty) {
            return Err(IndexerError::invalid("url", &self.url, "http://host:port or https://host:port"));
        }
        if self.workers.is_empty() {
            return Err(IndexerError::invalid("workers", "[]", "one worker or more"));
        }
        let names = self.workers.iter().enumerate().map(|(index, name)| (format!("workers[{index}]"), name));
        let names = names.chain(std::iter::once(("model".to_owned(), &self.model)));
        for (field, name) in names {
            if name.is_empty() || name.len() > HolderIndex::MAX_NAME_BYTES {
                let allowed = format!("1 to {} bytes", HolderIndex::MAX_NAME_BYTES);
                return Err(IndexerError::invalid(&field, name, &allowed));
            }
        }
        Ok(())
    }
}

impl IndexConfig {
    /// Checks every value.
    ///
    /// # Errors
    /// [`IndexerError::Invalid`] names the first field that cannot be used.
    pub fn validate(&self) -> Result<()> {
        self.redis_url()?;
        self.scorer.parse::<ScorerKind>()?;
        self.weights()?;
        self.bridge_block_size()?;
        self.check_costs()?;
        let positive = [
            ("redis.connect_ms", self.redis.connect_ms),
            ("redis.lookup_ms", self.redis.lookup_ms),
            ("redis.write_ms", self.redis.write_ms),
            ("max_book_bytes", self.max_book_bytes),
            ("max_worker_blocks", self.max_worker_blocks),
            ("snapshot_interval_s", self.snapshot_interval_s),
            ("tokenizers.n_threads", self.tokenizers.n_threads as u64),
            ("tokenizers.max_waiting", self.tokenizers.max_waiting as u64),
            ("tokenizers.max_tokenizers", self.tokenizers.max_tokenizers as u64),
        ];
        if let Some((field, value)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(IndexerError::invalid(field, value, "1 or more"));
        }
        self.grpc.validate()?;
        self.tokenizers.hub.check().map_err(|error| error.below("tokenizers.hub"))?;
        for (index, engine) in self.engines.iter().enumerate() {
            engine.check().map_err(|error| error.below(&format!("engines[{index}]")))?;
        }
        for (index, store) in self.stores.iter().enumerate() {
            store.check().map_err(|error| error.below(&format!("stores[{index}]")))?;
        }
        for (index, service) in self.kubernetes.iter().enumerate() {
            service.check().map_err(|error| error.below(&format!("kubernetes[{index}]")))?;
        }
        Ok(())
    }

    /// Where the index is kept if not in memory.
    pub(crate) fn redis_url(&self) -> Result<Option<RedisUrl>> {
        if self.backend.expose() == MEMORY {
            return Ok(None);
        }
        self.backend.expose().parse().map(Some).map_err(|error: RedisUrlError| IndexerError::Invalid {
            field: "backend".to_owned(),
            value: error.reason.to_owned(),
            allowed: format!("`{MEMORY}`, or {}", RedisUrlError::ALLOWED),
        })
    }

    pub(crate) fn redis_options(&self) -> RedisOptions {
        RedisOptions {
            connect_timeout: Duration::from_millis(self.redis.connect_ms),
            lookup_timeout: Duration::from_millis(self.redis.lookup_ms),
            write_timeout: Duration::from_millis(self.redis.write_ms),
            block_ttl: Duration::from_secs(self.redis.block_ttl_s),
            key_prefix: self.redis.key_prefix.clone(),
            ca_file: self.redis.ca_file.clone(),
            ..RedisOptions::default()
        }
    }

    pub(crate) fn weights(&self) -> Result<TierWeights> {
        let WeightConfig { gpu, cpu, disk, remote } = self.tier_weights;
        let weights = [gpu, cpu, disk, remote];
        let is_falling = weights.windows(2).all(|pair| pair[0] >= pair[1]);
        let allowed = "0 to 1, a faster tier never less than a slower one";
        TierWeights::try_new(weights)
            .filter(|_| is_falling && gpu <= 1.0)
            .ok_or_else(|| IndexerError::invalid("tier_weights", format!("{weights:?}"), allowed))
    }

    pub(crate) fn cost_model(&self) -> CostModel {
        let costs = &self.costs;
        CostModel {
            prefill_token_s: 1.0 / costs.prefill_tokens_per_s,
            queued_token_s: 1.0 / costs.prefill_tokens_per_s,
            move_byte_s: [
                0.0,
                1.0 / costs.cpu_bytes_per_s,
                1.0 / costs.disk_bytes_per_s,
                1.0 / costs.remote_bytes_per_s,
            ],
            unsure_credit: costs.unsure_credit,
        }
    }

    pub(crate) fn bridge_block_size(&self) -> Result<BlockSize> {
        BlockSize::try_new(self.bridge_block_tokens)
            .map_err(|_| IndexerError::invalid("bridge_block_tokens", self.bridge_block_tokens, "1 or more"))
    }

    pub(crate) fn pool(&self) -> Result<PoolConfig> {
        let tokenizers = &self.tokenizers;
        // A folder that is named counts before what the hub has.
        let mut models = tokenizers.hub.folders()?;
        models.extend(tokenizers.models.clone());
        Ok(PoolConfig {
            n_threads: tokenizers.n_threads,
            max_waiting: tokenizers.max_waiting,
            models,
            root: tokenizers.root.clone(),
            max_tokenizers: tokenizers.max_tokenizers,
            prefix_store: match tokenizers.prefix_store {
                PrefixStore::None => PrefixStoreKind::None,
                PrefixStore::Lru => PrefixStoreKind::Lru,
                PrefixStore::Trie => PrefixStoreKind::Trie,
            },
            prefix_store_bytes: tokenizers.prefix_store_bytes,
            ..PoolConfig::default()
        })
    }

    fn check_costs(&self) -> Result<()> {
        let costs = &self.costs;
        let rates = [
            ("costs.prefill_tokens_per_s", costs.prefill_tokens_per_s),
            ("costs.cpu_bytes_per_s", costs.cpu_bytes_per_s),
            ("costs.disk_bytes_per_s", costs.disk_bytes_per_s),
            ("costs.remote_bytes_per_s", costs.remote_bytes_per_s),
        ];
        if let Some((field, rate)) = rates.iter().find(|(_, rate)| !rate.is_normal() || *rate < 0.0) {
            return Err(IndexerError::invalid(field, rate, "above 0"));
        }
        let credit = costs.unsure_credit;
        if !(0.0..=1.0).contains(&credit) {
            return Err(IndexerError::invalid("costs.unsure_credit", credit, "0 to 1"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(change: impl FnOnce(&mut IndexConfig)) -> String {
        let mut config = IndexConfig::default();
        change(&mut config);
        config.validate().unwrap_err().to_string()
    }

    #[test]
    fn the_defaults_are_valid_and_a_wrong_value_is_named_with_what_is_allowed() {
        IndexConfig::default().validate().unwrap();
        assert!(refusal(|config| config.backend = "mysql://x".into()).contains("`backend`"));
        let scorer = refusal(|config| config.scorer = "best".to_owned());
        assert!(scorer.contains("`scorer` is best") && scorer.contains("highest_block_hit"), "{scorer}");
        assert!(refusal(|config| config.tier_weights.cpu = 2.0).contains("`tier_weights`"));
        assert!(refusal(|config| config.tier_weights.gpu = f64::NAN).contains("`tier_weights`"));
        assert!(refusal(|config| config.bridge_block_tokens = 0).contains("`bridge_block_tokens`"));
        assert!(refusal(|config| config.costs.prefill_tokens_per_s = 0.0).contains("above 0"));
        assert!(refusal(|config| config.costs.unsure_credit = -0.1).contains("0 to 1"));
        assert!(refusal(|config| config.tokenizers.n_threads = 0).contains("`tokenizers.n_threads`"));
        for (url, workers, model, field) in [
            ("host:9400", &["w"][..], "m", "`stores[0].url`"),
            ("http://host:9400", &[], "m", "`stores[0].workers`"),
            ("http://host:9400", &["w", ""], "m", "`stores[0].workers[1]`"),
            ("http://host:9400", &["w"], "", "`stores[0].model`"),
        ] {
            let workers = workers.iter().map(|&worker| worker.to_owned()).collect();
            let (url, model) = (url.to_owned(), model.to_owned());
            let store = StoreSourceConfig { url, workers, model, store_model: None };
            assert!(refusal(|config| config.stores.push(store)).contains(field));
        }
        assert!(
            refusal(|config| config.engines.push(EngineConfig::default())).contains("`engines[0].endpoint`")
        );
    }
}
