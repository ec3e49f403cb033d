//! What `/metrics` of workers and of the gateway says, as figures that can be added and subtracted.

use std::collections::BTreeMap;

use serde::Serialize;

use super::exposition::{Sample, samples};

/// Figures by the name of a tier, or of something else that has several.
pub(super) type ByName = BTreeMap<String, f64>;

/// How a worker is now.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Gauges {
    /// Sequences in the batch.
    pub(super) running: f64,
    /// Sequences that wait for admission.
    pub(super) waiting: f64,
    /// Held share of the KV blocks, 0 to 1.
    pub(super) kv_usage: f64,
    /// KV blocks that the worker has the memory of; 0 where it does not say.
    pub(super) kv_blocks: f64,
    /// The most that it could have.
    pub(super) kv_blocks_limit: f64,
    /// KV blocks that prompts can find, held by a sequence or not; 0 where the worker does not say.
    pub(super) kv_blocks_cached: f64,
    /// The tiers of its store.
    pub(super) tiers: BTreeMap<String, TierGauges>,
}

/// How a tier is now.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct TierGauges {
    pub(super) is_up: bool,
    pub(super) chunks: f64,
    pub(super) used_bytes: f64,
    pub(super) capacity_bytes: f64,
}

/// What a worker has done since its start, or in a time.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Counts {
    /// Tokens of accepted prompts.
    pub(super) prompt_tokens: f64,
    /// Of these, tokens whose KV was there, by tier.
    pub(super) cached_tokens: ByName,
    /// Token rows computed.
    pub(super) computed_tokens: f64,
    /// Tokens chosen.
    pub(super) generated_tokens: f64,
    /// Outputs that ended.
    pub(super) ended_outputs: f64,
    /// Times a sequence gave its blocks back.
    pub(super) preemptions: f64,
    /// Bytes read from tiers below memory, by tier.
    pub(super) read_bytes: ByName,
    /// Bytes written to tiers.
    pub(super) written_bytes: ByName,
    /// Chunks evicted, by tier.
    pub(super) evicted_chunks: ByName,
    /// Blocks evicted from the engine.
    pub(super) evicted_blocks: f64,
    /// Requests that went to another worker.
    pub(super) moved_out: f64,
    /// Requests that came from another worker.
    pub(super) moved_in: f64,
}

/// What a worker says.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct WorkerFigures {
    pub(super) gauges: Gauges,
    pub(super) counts: Counts,
}

/// What the gateway itself has done since its start, and how it is now.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct GatewayFigures {
    /// Requests that ended well, and the others.
    pub(super) ok_requests: f64,
    pub(super) failed_requests: f64,
    /// Choices of a worker, by reason.
    pub(super) decisions: ByName,
    pub(super) queue_length: f64,
    pub(super) outstanding_requests: f64,
    pub(super) is_coordinator_connected: bool,
    pub(super) first_tokens: Buckets,
}

/// A histogram: for each upper bound, how many measurements were at most that.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Buckets(Vec<(f64, f64)>);

impl WorkerFigures {
    /// Reads the figures of a worker. `name` is that of a worker of kvik, which shares a registry with the other roles of its
    /// process; of other engines all samples count.
    pub(super) fn read(text: &str, name: Option<&str>) -> Self {
        let mut figures = Self::default();
        for sample in samples(text) {
            let is_its = name.is_none_or(|name| sample.label("engine").as_deref() == Some(name));
            if is_its && sample.value.is_finite() {
                figures.take(&sample);
            }
        }
        let Gauges { kv_blocks, kv_blocks_limit, .. } = &mut figures.gauges;
        *kv_blocks_limit = kv_blocks_limit.max(*kv_blocks);
        let cached = &mut figures.counts.cached_tokens;
        // Engines other than kvik's know one place only, and count it under another name.
        if name.is_none() && cached.is_empty() {
            cached.insert("engine".to_owned(), prefix_hits(text));
        }
        figures
    }

    fn take(&mut self, sample: &Sample<'_>) {
        let Self { gauges, counts } = self;
        let value = sample.value;
        let tier = || sample.label("tier").unwrap_or_default().into_owned();
        let by_tier = |figures: &mut ByName| *figures.entry(tier()).or_default() += value;
        match sample.name {
            "vllm:num_requests_running" => gauges.running += value,
            "vllm:num_requests_waiting" => gauges.waiting += value,
            "vllm:kv_cache_usage_perc" => gauges.kv_usage = gauges.kv_usage.max(value),
            "kvik_worker_kv_blocks" => gauges.kv_blocks += value,
            "kvik_worker_kv_blocks_cached" => gauges.kv_blocks_cached += value,
            "kvik_worker_kv_blocks_limit" => gauges.kv_blocks_limit += value,
            "kvik_store_tier_up" => gauges.tier(sample).is_up = value > 0.0,
            "kvik_store_tier_chunks" => gauges.tier(sample).chunks = value,
            "kvik_store_tier_used_bytes" => gauges.tier(sample).used_bytes = value,
            "kvik_store_tier_capacity_bytes" => gauges.tier(sample).capacity_bytes = value,
            "vllm:prompt_tokens_total" => counts.prompt_tokens += value,
            "kvik_worker_cached_tokens_total" => by_tier(&mut counts.cached_tokens),
            "kvik_worker_computed_tokens_total" => counts.computed_tokens += value,
            "vllm:generation_tokens_total" => counts.generated_tokens += value,
            "vllm:request_success_total" => counts.ended_outputs += value,
            "vllm:num_preemptions_total" => counts.preemptions += value,
            "kvik_worker_kv_blocks_evicted_total" => counts.evicted_blocks += value,
            "kvik_store_stored_bytes_total" => {
                *counts.written_bytes.entry("ram".to_owned()).or_default() += value;
            }
            "kvik_store_tier_bytes_total" => match sample.label("operation").as_deref() {
                Some("get") => by_tier(&mut counts.read_bytes),
                Some("put") => by_tier(&mut counts.written_bytes),
                _ => {}
            },
            "kvik_worker_moves_total" if sample.label("outcome").as_deref() == Some("moved") => {
                counts.moved_out += value;
            }
            "kvik_worker_resumed_total" => counts.moved_in += value,
            name => {
                let evicted = name.strip_prefix("kvik_store_evicted_chunks_");
                if let Some(tier) = evicted.and_then(|rest| rest.strip_suffix("_total")) {
                    *counts.evicted_chunks.entry(tier.to_owned()).or_default() += value;
                }
            }
        }
    }
}

fn prefix_hits(text: &str) -> f64 {
    let hits = samples(text).filter(|sample| sample.name == "vllm:prefix_cache_hits_total");
    hits.map(|sample| sample.value).filter(|value| value.is_finite()).sum()
}

impl Gauges {
    fn tier(&mut self, sample: &Sample<'_>) -> &mut TierGauges {
        self.tiers.entry(sample.label("tier").unwrap_or_default().into_owned()).or_default()
    }
}

impl GatewayFigures {
    /// Reads the figures of a gateway.
    pub(super) fn read(text: &str) -> Self {
        let mut figures = Self::default();
        for sample in samples(text) {
            let value = sample.value;
            match sample.name {
                "kvik_gateway_requests_total" => match sample.label("status").as_deref() {
                    Some(status) if status.starts_with('2') => figures.ok_requests += value,
                    _ => figures.failed_requests += value,
                },
                "kvik_gateway_rejected_total" => figures.failed_requests += value,
                "kvik_gateway_route_decisions_total" => {
                    let reason = sample.label("reason").unwrap_or_default().into_owned();
                    *figures.decisions.entry(reason).or_default() += value;
                }
                "kvik_gateway_queue_length" => figures.queue_length = value,
                "kvik_gateway_outstanding_requests" => figures.outstanding_requests = value,
                "kvik_gateway_coordinator_connected" => figures.is_coordinator_connected = value > 0.0,
                "kvik_gateway_ttft_seconds_bucket" => {
                    let bound = sample.label("le").and_then(|bound| bound.parse().ok());
                    figures.first_tokens.add(bound.unwrap_or(f64::INFINITY), value);
                }
                _ => {}
            }
        }
        figures
    }
}

impl Counts {
    /// What was done since `before`. A count that is lower than before is of a worker that has started again.
    pub(super) fn since(&self, before: &Self) -> Self {
        let one = |now: f64, before: f64| if before <= now { now - before } else { now };
        self.join(before, one)
    }

    /// Both together.
    pub(super) fn plus(&self, other: &Self) -> Self {
        let mut sum = self.join(other, |one, other| one + other);
        for (mine, theirs) in [
            (&mut sum.cached_tokens, &other.cached_tokens),
            (&mut sum.read_bytes, &other.read_bytes),
            (&mut sum.written_bytes, &other.written_bytes),
            (&mut sum.evicted_chunks, &other.evicted_chunks),
        ] {
            for (name, value) in theirs {
                mine.entry(name.clone()).or_insert(*value);
            }
        }
        sum
    }

    /// The same for each of `seconds`.
    pub(super) fn per_second(&self, seconds: f64) -> Self {
        self.join(&Self::default(), |count, _| count / seconds)
    }

    /// Joins each figure of this one with the same of the other, or 0.
    fn join(&self, other: &Self, join: impl Fn(f64, f64) -> f64) -> Self {
        let by_name = |one: &ByName, other: &ByName| {
            let join = |(name, value): (&String, &f64)| {
                (name.clone(), join(*value, other.get(name).copied().unwrap_or(0.0)))
            };
            one.iter().map(join).collect::<ByName>()
        };
        Self {
            prompt_tokens: join(self.prompt_tokens, other.prompt_tokens),
            cached_tokens: by_name(&self.cached_tokens, &other.cached_tokens),
            computed_tokens: join(self.computed_tokens, other.computed_tokens),
            generated_tokens: join(self.generated_tokens, other.generated_tokens),
            ended_outputs: join(self.ended_outputs, other.ended_outputs),
            preemptions: join(self.preemptions, other.preemptions),
            read_bytes: by_name(&self.read_bytes, &other.read_bytes),
            written_bytes: by_name(&self.written_bytes, &other.written_bytes),
            evicted_chunks: by_name(&self.evicted_chunks, &other.evicted_chunks),
            evicted_blocks: join(self.evicted_blocks, other.evicted_blocks),
            moved_out: join(self.moved_out, other.moved_out),
            moved_in: join(self.moved_in, other.moved_in),
        }
    }
}

impl Buckets {
    fn add(&mut self, bound: f64, count: f64) {
        if let Some((_, known)) = self.0.iter_mut().find(|(known, _)| known.total_cmp(&bound).is_eq()) {
            *known += count;
            return;
        }
        self.0.push((bound, count));
        self.0.sort_by(|one, other| one.0.total_cmp(&other.0));
    }

    /// What was measured since `before`.
    pub(super) fn since(&self, before: &Self) -> Self {
        let earlier = |bound: f64| {
            before
                .0
                .iter()
                .find(|(known, _)| known.total_cmp(&bound).is_eq())
                .map_or(0.0, |(_, count)| *count)
        };
        Self(self.0.iter().map(|(bound, count)| (*bound, (count - earlier(*bound)).max(0.0))).collect())
    }

    /// How many measurements there are.
    pub(super) fn count(&self) -> f64 {
        self.0.last().map_or(0.0, |(_, count)| *count)
    }

    /// The value that a `share` of the measurements is at most, as Prometheus estimates it: along a line within its bucket.
    /// `None` without measurements.
    pub(super) fn quantile(&self, share: f64) -> Option<f64> {
        let rank = share * self.count();
        if rank <= 0.0 {
            return None;
        }
        let (mut low, mut below) = (0.0, 0.0);
        for &(bound, count) in &self.0 {
            if rank <= count {
                // The last bucket has no upper bound.
                return Some(if bound.is_finite() {
                    low + (bound - low) * (rank - below) / (count - below)
                } else {
                    low
                });
            }
            (low, below) = (bound, count);
        }
        None
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "counts are whole numbers")]
mod tests {
    use super::*;

    const TEXT: &str = r#"
vllm:num_requests_running{model_name="m",engine="a"} 2
vllm:num_requests_running{model_name="m",engine="b"} 5
vllm:prompt_tokens_total{model_name="m",engine="a"} 100
kvik_worker_cached_tokens_total{model_name="m",engine="a",tier="ram"} 30
kvik_worker_cached_tokens_total{model_name="m",engine="a",tier="peer"} 20
kvik_store_tier_bytes_total{model_name="m",engine="a",tier="nvme",operation="get"} 1000
kvik_store_tier_bytes_total{model_name="m",engine="a",tier="nvme",operation="put"} 2000
kvik_store_evicted_chunks_ram_total{model_name="m",engine="a"} 7
kvik_store_tier_used_bytes{model_name="m",engine="a",tier="ram"} 4096
kvik_worker_moves_total{model_name="m",engine="a",outcome="moved"} 1
kvik_worker_moves_total{model_name="m",engine="a",outcome="stayed"} 9
vllm:prefix_cache_hits_total{engine="0"} 64
"#;

    #[test]
    fn a_worker_is_read_apart_from_the_others_of_its_process() {
        let figures = WorkerFigures::read(TEXT, Some("a"));
        assert_eq!((figures.gauges.running, figures.counts.prompt_tokens), (2.0, 100.0));
        assert_eq!(
            figures.counts.cached_tokens,
            ByName::from([("ram".to_owned(), 30.0), ("peer".to_owned(), 20.0)])
        );
        assert_eq!(figures.counts.read_bytes["nvme"], 1000.0);
        assert_eq!(figures.counts.written_bytes["nvme"], 2000.0);
        assert_eq!(figures.counts.evicted_chunks["ram"], 7.0);
        assert_eq!(figures.gauges.tiers["ram"].used_bytes, 4096.0);
        assert_eq!(figures.counts.moved_out, 1.0);
    }

    #[test]
    fn another_engine_counts_whole_and_its_hits_are_those_of_the_engine() {
        let figures = WorkerFigures::read(
            "vllm:num_requests_running{engine=\"0\"} 2\nvllm:num_requests_running{engine=\"1\"} 3\nvllm:prefix_cache_hits_total{engine=\"0\"} 64\n",
            None,
        );
        assert_eq!((figures.gauges.running, figures.counts.cached_tokens["engine"]), (5.0, 64.0));
    }

    #[test]
    fn differences_survive_a_restart_and_sums_keep_every_tier() {
        let read = |text: &str| WorkerFigures::read(text, Some("a")).counts;
        let (before, now) = (read(TEXT), read(&TEXT.replace("} 100", "} 140").replace("} 30", "} 5")));
        let done = now.since(&before);
        assert_eq!((done.prompt_tokens, done.cached_tokens["ram"], done.moved_out), (40.0, 5.0, 0.0));
        let mut other = Counts::default();
        other.cached_tokens.insert("nvme".to_owned(), 3.0);
        let sum = done.plus(&other);
        assert_eq!((sum.cached_tokens["nvme"], sum.cached_tokens["ram"]), (3.0, 5.0));
        assert_eq!(sum.per_second(2.0).prompt_tokens, 20.0);
    }

    #[test]
    fn quantiles_are_those_of_the_time_between() {
        let read = |a: u32, b: u32| {
            let text = format!(
                "kvik_gateway_ttft_seconds_bucket{{route=\"x\",le=\"0.1\"}} {a}\nkvik_gateway_ttft_seconds_bucket{{route=\"x\",le=\"0.5\"}} {b}\nkvik_gateway_ttft_seconds_bucket{{route=\"x\",le=\"+Inf\"}} {b}\nkvik_gateway_ttft_seconds_bucket{{route=\"y\",le=\"0.1\"}} 0\n"
            );
            GatewayFigures::read(&text).first_tokens
        };
        let (before, now) = (read(10, 10), read(10, 20));
        let between = now.since(&before);
        assert_eq!(between.count(), 10.0);
        assert!((between.quantile(0.5).unwrap() - 0.3).abs() < 1e-9);
        assert_eq!(now.since(&now).quantile(0.5), None);
    }
}
