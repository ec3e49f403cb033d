//! How long calls take, in buckets of fixed width on a logarithmic scale.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Buckets for each doubling: a quantile is at most an eighth too large.
const SUB_BUCKETS: u64 = 8;
const SUB_BUCKET_BITS: u32 = SUB_BUCKETS.trailing_zeros();

/// As many as nanoseconds in 64 bits need.
const N_BUCKETS: usize = (64 - SUB_BUCKET_BITS as usize + 1) * SUB_BUCKETS as usize;

/// Counts durations without a lock.
#[derive(Debug)]
pub(crate) struct Histogram {
    counts: Box<[AtomicU64]>,
}

/// The counts of a moment.
#[derive(Debug, Clone)]
pub struct Latencies {
    counts: Box<[u64]>,
    n_calls: u64,
}

// === impl Histogram ===

impl Histogram {
    pub(crate) fn new() -> Self {
        Self { counts: (0..N_BUCKETS).map(|_| AtomicU64::new(0)).collect() }
    }

    pub(crate) fn record(&self, duration: Duration) {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        // Relaxed: counts are read for people, each by itself.
        self.counts[bucket_of(nanos)].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self) -> Latencies {
        let counts: Box<[u64]> = self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let n_calls = counts.iter().sum();
        Latencies { counts, n_calls }
    }
}

// === impl Latencies ===

impl Latencies {
    /// Calls that were timed.
    pub fn n_calls(&self) -> u64 {
        self.n_calls
    }

    /// What half of the calls took at most; zero if there were none.
    pub fn p50(&self) -> Duration {
        self.quantile(0.50)
    }

    /// What 99 of 100 calls took at most; zero if there were none.
    pub fn p99(&self) -> Duration {
        self.quantile(0.99)
    }

    /// What a share of the calls, from 0 to 1, took at most: up to an eighth too much, never too little.
    pub fn quantile(&self, share: f64) -> Duration {
        let rank = ((share * self.n_calls as f64).ceil() as u64).clamp(1, self.n_calls.max(1));
        let mut n_below = 0;
        for (bucket_idx, count) in self.counts.iter().enumerate() {
            n_below += count;
            if n_below >= rank {
                return Duration::from_nanos(upper_bound_of(bucket_idx));
            }
        }
        Duration::ZERO
    }
}

fn bucket_of(nanos: u64) -> usize {
    if nanos < SUB_BUCKETS {
        return nanos as usize;
    }
    let shift = nanos.ilog2() - SUB_BUCKET_BITS;
    (u64::from(shift) * SUB_BUCKETS + (nanos >> shift)) as usize
}

/// The largest number of nanoseconds in a bucket.
fn upper_bound_of(bucket_idx: usize) -> u64 {
    let bucket_idx = bucket_idx as u64;
    if bucket_idx < SUB_BUCKETS {
        return bucket_idx;
    }
    let shift = bucket_idx / SUB_BUCKETS - 1;
    let leading = SUB_BUCKETS + bucket_idx % SUB_BUCKETS;
    (leading << shift) + ((1 << shift) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_each_other_without_a_gap() {
        let mut last_bound = None;
        for bucket_idx in 0..N_BUCKETS {
            let bound = upper_bound_of(bucket_idx);
            assert_eq!(bucket_of(bound), bucket_idx);
            if let Some(last_bound) = last_bound {
                assert_eq!(bucket_of(last_bound + 1), bucket_idx);
            }
            last_bound = Some(bound);
        }
        assert_eq!(last_bound, Some(u64::MAX));
    }

    #[test]
    fn quantiles_are_at_most_an_eighth_too_large() {
        let histogram = Histogram::new();
        for micros in 1..=1000 {
            histogram.record(Duration::from_micros(micros));
        }
        let latencies = histogram.snapshot();
        assert_eq!(latencies.n_calls(), 1000);
        for (quantile, exact) in
            [(latencies.p50(), 500), (latencies.p99(), 990), (latencies.quantile(1.0), 1000)]
        {
            let exact = Duration::from_micros(exact);
            assert!(quantile >= exact && quantile <= exact.mul_f64(1.125), "{quantile:?} for {exact:?}");
        }
    }

    #[test]
    fn no_calls_have_no_quantiles() {
        assert_eq!(Histogram::new().snapshot().p99(), Duration::ZERO);
    }
}
