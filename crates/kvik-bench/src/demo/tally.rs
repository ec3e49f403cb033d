//! What the requests of one run measured.

use std::time::Duration;

use serde_json::Value;

/// Where the tokens of prompts came from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tokens {
    /// All tokens of the prompts.
    pub n_prompt: u64,
    /// By the order of [`SOURCES`].
    pub by_source: [u64; SOURCES.len()],
}

/// Where KV comes from: the engine's own memory and the tiers of the store, nearest first.
pub const SOURCES: [&str; 4] = ["engine", "ram", "nvme", "remote"];

/// The tiers of a usage report that are remote.
const REMOTE_TIERS: [&str; 3] = ["peer", "redis", "object"];

/// One request.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// When it was sent, from the start of the run.
    pub at: Duration,
    /// Time to its first token.
    pub ttft: Duration,
    /// Where the tokens of its prompt came from.
    pub tokens: Tokens,
}

/// All requests of a run.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// Requests that were answered, in the order of their ends.
    pub samples: Vec<Sample>,
    /// Requests without a whole answer.
    pub n_failed: u64,
    /// When a worker was killed, from the start of the run.
    pub killed_at: Option<Duration>,
}

impl Tokens {
    /// Reads a usage report. Tokens that are reported as cached without a tier count as the engine's.
    pub(super) fn read(usage: &Value) -> Self {
        let details = &usage["prompt_tokens_details"];
        let by_tier = &details["cached_tokens_by_tier"];
        let n_tokens = |tier: &str| by_tier[tier].as_u64().unwrap_or(0);
        let n_remote = REMOTE_TIERS.iter().map(|tier| n_tokens(tier)).sum();
        let mut by_source = [n_tokens("engine"), n_tokens("ram"), n_tokens("nvme"), n_remote];
        if by_tier.is_null() {
            by_source[0] = details["cached_tokens"].as_u64().unwrap_or(0);
        }
        Self { n_prompt: usage["prompt_tokens"].as_u64().unwrap_or(0), by_source }
    }

    fn add(&mut self, other: Self) {
        self.n_prompt += other.n_prompt;
        for (sum, n_tokens) in self.by_source.iter_mut().zip(other.by_source) {
            *sum += n_tokens;
        }
    }

    /// The share of prompt tokens from each source, from 0 to 1.
    pub fn shares(&self) -> [f64; SOURCES.len()] {
        self.by_source.map(|n_tokens| n_tokens as f64 / (self.n_prompt.max(1)) as f64)
    }

    /// The share of prompt tokens that were not computed, from 0 to 1.
    pub fn hit_ratio(&self) -> f64 {
        self.shares().iter().sum()
    }
}

impl Tally {
    pub(super) fn add(&mut self, sample: Sample) {
        self.samples.push(sample);
    }

    /// The sum over all requests.
    pub fn tokens(&self) -> Tokens {
        let mut tokens = Tokens::default();
        for sample in &self.samples {
            tokens.add(sample.tokens);
        }
        tokens
    }

    /// The time to first token at `quantile` of all requests, in milliseconds; `None` without requests.
    pub fn ttft_ms(&self, quantile: f64) -> Option<f64> {
        quantile_ms(self.samples.iter().map(|sample| sample.ttft), quantile)
    }

    /// The median time to first token of the requests that were sent in each of `n_slices` of `duration`, in milliseconds.
    pub fn medians_ms(&self, duration: Duration, n_slices: usize) -> Vec<Option<f64>> {
        let slice = duration / n_slices.max(1) as u32;
        (0..n_slices as u32)
            .map(|idx| {
                let inside = self
                    .samples
                    .iter()
                    .filter(|sample| slice * idx <= sample.at && sample.at < slice * (idx + 1));
                quantile_ms(inside.map(|sample| sample.ttft), 0.5)
            })
            .collect()
    }
}

fn quantile_ms(times: impl Iterator<Item = Duration>, quantile: f64) -> Option<f64> {
    let mut times: Vec<Duration> = times.collect();
    times.sort_unstable();
    let place = (quantile * times.len().saturating_sub(1) as f64).round() as usize;
    times.get(place).map(|time| time.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn sample(at_ms: u64, ttft_ms: u64) -> Sample {
        let tokens = Tokens { n_prompt: 100, by_source: [50, 0, 25, 0] };
        Sample { at: Duration::from_millis(at_ms), ttft: Duration::from_millis(ttft_ms), tokens }
    }

    #[test]
    fn a_usage_report_tells_where_tokens_came_from() {
        let usage = json!({"prompt_tokens": 10, "prompt_tokens_details": {
            "cached_tokens": 8, "cached_tokens_by_tier": {"engine": 2, "nvme": 5, "object": 1}}});
        assert_eq!(Tokens::read(&usage), Tokens { n_prompt: 10, by_source: [2, 0, 5, 1] });
        let plain = json!({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 8}});
        assert_eq!(Tokens::read(&plain).by_source, [8, 0, 0, 0]);
        assert_eq!(Tokens::read(&json!(null)), Tokens::default());
    }

    #[test]
    fn shares_and_quantiles_are_over_all_requests() {
        let mut tally = Tally::default();
        for ttft_ms in [30, 10, 20] {
            tally.add(sample(0, ttft_ms));
        }
        assert!((tally.tokens().hit_ratio() - 0.75).abs() < 1e-9);
        assert_eq!(tally.ttft_ms(0.5), Some(20.0));
        assert_eq!(tally.ttft_ms(1.0), Some(30.0));
        assert_eq!(Tally::default().ttft_ms(0.5), None);
    }

    #[test]
    fn a_request_counts_in_the_slice_in_which_it_was_sent() {
        let mut tally = Tally::default();
        tally.add(sample(100, 3_000));
        tally.add(sample(1_000, 9));
        assert_eq!(tally.medians_ms(Duration::from_secs(3), 3), vec![Some(3_000.0), Some(9.0), None]);
    }
}
