//! The metrics of a worker: vLLM's names where they exist, so that its dashboards and the
//! autoscalers that read it work unchanged.
//!
//! All have the labels `model_name` and `engine`, which is the worker's id: the roles of one process
//! share a registry.
//!
//! | name | kind | meaning |
//! |---|---|---|
//! | `vllm:num_requests_running` | gauge | sequences in the batch |
//! | `vllm:num_requests_waiting` | gauge | sequences that wait for admission |
//! | `vllm:kv_cache_usage_perc` | gauge | held share of the KV blocks, 0 to 1 |
//! | `vllm:prefix_cache_queries_total` | counter | prompt tokens looked up |
//! | `vllm:prefix_cache_hits_total` | counter | of these, tokens whose KV was there |
//! | `vllm:prompt_tokens_total` | counter | prompt tokens of accepted requests |
//! | `vllm:generation_tokens_total` | counter | tokens chosen |
//! | `vllm:request_success_total{finished_reason}` | counter | outputs that ended |
//! | `vllm:num_preemptions_total` | counter | times a sequence gave its blocks back |
//! | `vllm:time_to_first_token_seconds` | histogram | from a request's arrival to its first token |
//! | `vllm:inter_token_latency_seconds` | histogram | between two tokens of an output |
//! | `vllm:e2e_request_latency_seconds` | histogram | from a request's arrival to its last token |
//! | `vllm:request_queue_time_seconds` | histogram | from a request's arrival to its first step |
//! | `vllm:request_prefill_time_seconds` | histogram | from a request's first step to its first token |
//! | `vllm:request_decode_time_seconds` | histogram | from a request's first token to its last |
//! | `kvik_worker_outstanding_tokens` | gauge | tokens left to compute |
//! | `kvik_worker_resident_sequences` | gauge | ended sequences whose KV stays |
//! | `kvik_worker_kv_blocks` | gauge | KV blocks that the worker has the memory of |
//! | `kvik_worker_kv_blocks_limit` | gauge | the most that it could have; more where memory is shared |
//! | `kvik_worker_kv_blocks_cached` | gauge | KV blocks that prompts can find, held by a sequence or not |
//! | `kvik_worker_kv_blocks_evicted_total` | counter | of such blocks, those whose place was taken |
//! | `kvik_worker_kv_blocks_given_back_total` | counter | blocks given back because other workers needed memory |
//! | `kvik_worker_computed_tokens_total` | counter | token rows computed |
//! | `kvik_worker_cached_tokens_total{tier}` | counter | prompt tokens whose KV was there: `engine`, `ram`, `nvme`, `peer`, `redis`, `object`, `lm`, `plugin` |
//! | `kvik_worker_steps_total` | counter | forward passes |
//! | `kvik_worker_cancelled_total{reason}` | counter | requests ended early: `client`, `slow_client`, `failure` |
//! | `kvik_worker_moves_total{outcome}` | counter | requests that were to go to another worker: `moved`, `stayed` |
//! | `kvik_worker_resumed_total{kv}` | counter | requests that came from another worker: KV `ahead` or `none` |
//! | `kvik_worker_refused_total{status}` | counter | requests that were refused |
//! | `kvik_store_tier_up{tier}` | gauge | 1 while a tier of the store reads and writes |
//! | `kvik_store_tier_chunks{tier}`, `_used_bytes`, `_capacity_bytes` | gauge | what a tier holds and may hold |
//! | `kvik_store_tier_operations_total{tier,operation,outcome}` | counter | items that a lower tier was asked, by what became of them, such as `corrupt` or `skipped` |
//! | `kvik_store_tier_calls_total{tier,operation}`, `_bytes_total` | counter | calls to a lower tier, and bytes that they stored or read |
//! | `kvik_store_tier_call_seconds{tier,operation,quantile}` | gauge | what half and 99 of 100 calls took at most, since the start |
//! | `kvik_store_indexed_chunks`, `kvik_store_index_bytes` | gauge | chunks that the store knows, and what knowing them takes |
//! | `kvik_store_copy_queue_bytes` | gauge | KV of ended sequences that is not copied into the store yet |
//! | `kvik_store_<count>_total` | counter | the counts of `GET /cache/stats`, such as `kvik_store_hit_tokens_ram_total` |
//! | `kvik_worker_device_memory_used_bytes`, `kvik_worker_device_memory_capacity_bytes` | gauge | memory of the GPU that all processes use, and all of it; only on a GPU, as its driver tells |
//! | `kvik_worker_device_utilization` | gauge | share of the last moments in which the GPU computed, 0 to 1, for whatever process; only on a GPU |
//! | `kvik_worker_registered` | gauge | 1 while a coordinator knows the worker |

use kvik_model::DeviceUsage;
use kvik_node::publish_store;
use kvik_proto::cache::CacheStats;
use kvik_proto::openai::CachedTiers;
use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use crate::snapshot::Snapshot;

/// Handles that are looked up once.
#[derive(Clone)]
pub(crate) struct WorkerMetrics {
    labels: [(&'static str, String); 2],
    running: Gauge,
    waiting: Gauge,
    kv_usage: Gauge,
    prefix_hits: Counter,
    prefix_queries: Counter,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    preemptions: Counter,
    outstanding_tokens: Gauge,
    residents: Gauge,
    kv_blocks: Gauge,
    kv_blocks_limit: Gauge,
    kv_blocks_cached: Gauge,
    kv_blocks_evicted: Counter,
    kv_blocks_given_back: Counter,
    computed_tokens: Counter,
    steps: Counter,
    pub(crate) first_token_seconds: Histogram,
    pub(crate) inter_token_seconds: Histogram,
    pub(crate) request_seconds: Histogram,
    pub(crate) queue_seconds: Histogram,
    pub(crate) prefill_seconds: Histogram,
    pub(crate) decode_seconds: Histogram,
    pub(crate) registered: Gauge,
}

impl std::fmt::Debug for WorkerMetrics {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("WorkerMetrics").field("labels", &self.labels).finish_non_exhaustive()
    }
}

impl WorkerMetrics {
    /// Looks the handles up; the process' recorder must be in place.
    pub(crate) fn new(model_name: &str, worker_id: &str) -> Self {
        let labels = [("model_name", model_name.to_owned()), ("engine", worker_id.to_owned())];
        Self {
            running: gauge!("vllm:num_requests_running", &labels),
            waiting: gauge!("vllm:num_requests_waiting", &labels),
            kv_usage: gauge!("vllm:kv_cache_usage_perc", &labels),
            prefix_hits: counter!("vllm:prefix_cache_hits_total", &labels),
            prefix_queries: counter!("vllm:prefix_cache_queries_total", &labels),
            prompt_tokens: counter!("vllm:prompt_tokens_total", &labels),
            generation_tokens: counter!("vllm:generation_tokens_total", &labels),
            preemptions: counter!("vllm:num_preemptions_total", &labels),
            outstanding_tokens: gauge!("kvik_worker_outstanding_tokens", &labels),
            residents: gauge!("kvik_worker_resident_sequences", &labels),
            kv_blocks: gauge!("kvik_worker_kv_blocks", &labels),
            kv_blocks_limit: gauge!("kvik_worker_kv_blocks_limit", &labels),
            kv_blocks_cached: gauge!("kvik_worker_kv_blocks_cached", &labels),
            kv_blocks_evicted: counter!("kvik_worker_kv_blocks_evicted_total", &labels),
            kv_blocks_given_back: counter!("kvik_worker_kv_blocks_given_back_total", &labels),
            computed_tokens: counter!("kvik_worker_computed_tokens_total", &labels),
            steps: counter!("kvik_worker_steps_total", &labels),
            first_token_seconds: histogram!("vllm:time_to_first_token_seconds", &labels),
            inter_token_seconds: histogram!("vllm:inter_token_latency_seconds", &labels),
            request_seconds: histogram!("vllm:e2e_request_latency_seconds", &labels),
            queue_seconds: histogram!("vllm:request_queue_time_seconds", &labels),
            prefill_seconds: histogram!("vllm:request_prefill_time_seconds", &labels),
            decode_seconds: histogram!("vllm:request_decode_time_seconds", &labels),
            registered: gauge!("kvik_worker_registered", &labels),
            labels,
        }
    }

    /// The engine's state after a step.
    pub(crate) fn snapshot(&self, snapshot: &Snapshot) {
        self.running.set(snapshot.n_running as f64);
        self.waiting.set(snapshot.n_waiting as f64);
        self.kv_usage.set(snapshot.kv_usage());
        self.outstanding_tokens.set(snapshot.outstanding_tokens as f64);
        self.residents.set(snapshot.n_residents as f64);
        self.kv_blocks.set(snapshot.pool.n_blocks as f64);
        self.kv_blocks_limit.set(snapshot.pool.limit_blocks as f64);
        self.kv_blocks_cached.set(snapshot.pool.n_registered as f64);
        self.kv_blocks_evicted.absolute(snapshot.pool.n_evicted);
        self.kv_blocks_given_back.absolute(snapshot.pool.n_given_back);
        self.prefix_hits.absolute(snapshot.stats.n_cached_tokens);
        self.generation_tokens.absolute(snapshot.stats.n_generated_tokens);
        self.preemptions.absolute(snapshot.stats.n_preemptions);
        self.computed_tokens.absolute(snapshot.stats.n_computed_tokens);
        self.steps.absolute(snapshot.stats.n_steps);
    }

    /// A request was accepted.
    pub(crate) fn accepted(&self, n_prompt_tokens: usize) {
        self.prompt_tokens.increment(n_prompt_tokens as u64);
        self.prefix_queries.increment(n_prompt_tokens as u64);
    }

    /// An output ended for `reason`.
    pub(crate) fn finished(&self, reason: &'static str) {
        self.count("vllm:request_success_total", "finished_reason", reason.to_owned());
    }

    /// A request ended early because of `reason`.
    pub(crate) fn cancelled(&self, reason: &'static str) {
        self.count("kvik_worker_cancelled_total", "reason", reason.to_owned());
    }

    /// A request was to go to another worker.
    pub(crate) fn moved(&self, has_moved: bool) {
        let outcome = if has_moved { "moved" } else { "stayed" }.to_owned();
        self.count("kvik_worker_moves_total", "outcome", outcome);
    }

    /// A request came from another worker, with its KV ahead of it or without.
    pub(crate) fn resumed(&self, has_kv: bool) {
        let kv = if has_kv { "ahead" } else { "none" }.to_owned();
        self.count("kvik_worker_resumed_total", "kv", kv);
    }

    /// A request was refused.
    pub(crate) fn refused(&self, status: u16) {
        self.count("kvik_worker_refused_total", "status", status.to_string());
    }

    /// The prompt of a request was admitted with cached tokens.
    pub(crate) fn cached(&self, tiers: CachedTiers) {
        let CachedTiers { engine, ram, nvme, peer, redis, object, lm, plugin } = tiers;
        let tiers = [
            ("engine", engine),
            ("ram", ram),
            ("nvme", nvme),
            ("peer", peer),
            ("redis", redis),
            ("object", object),
            ("lm", lm),
            ("plugin", plugin),
        ];
        for (tier, n_tokens) in tiers.into_iter().filter(|(_, n_tokens)| 0 < *n_tokens) {
            self.add("kvik_worker_cached_tokens_total", "tier", tier.to_owned(), n_tokens as u64);
        }
    }

    /// The state of the store below the engine.
    pub(crate) fn store(&self, stats: &CacheStats) {
        publish_store(&self.labels, stats);
    }

    /// What the device is doing; what it does not tell is not shown.
    pub(crate) fn device(&self, usage: DeviceUsage) {
        if let Some((used, capacity)) = usage.memory_bytes {
            gauge!("kvik_worker_device_memory_used_bytes", &self.labels).set(used as f64);
            gauge!("kvik_worker_device_memory_capacity_bytes", &self.labels).set(capacity as f64);
        }
        if let Some(busy) = usage.busy {
            gauge!("kvik_worker_device_utilization", &self.labels).set(busy);
        }
    }

    fn count(&self, name: &'static str, label: &'static str, value: String) {
        self.add(name, label, value, 1);
    }

    fn add(&self, name: &'static str, label: &'static str, value: String, n: u64) {
        let [model, engine] = self.labels.clone();
        let labels = [model, engine, (label, value)];
        counter!(name, &labels).increment(n);
    }
}
