//! How fast a tier gives chunks, learned from its reads.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// What a new sample leaves of the weight of those before it: the last five or so decide.
const KEPT_WEIGHT: f64 = 0.8;

/// A tier that is always busy gives a sample this often.
const MAX_PERIOD: Duration = Duration::from_millis(250);

/// Sizes that differ by less than this part of their mean say nothing of what a read costs whatever its size.
const MIN_SPREAD: f64 = 0.1;

/// How fast a tier gives chunks: a read takes its latency and then its bytes, decoding and proof included.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TierSpeed {
    /// Bytes a second, of chunks as they lie in memory.
    pub bytes_per_s: f64,
    /// What a read takes before its first byte.
    pub latency_s: f64,
}

/// Measures the reads of a tier.
///
/// A sample is the time from a read until none is under way, and the bytes that came in it: reads at a time share what
/// the tier can do.
#[derive(Debug)]
pub struct SpeedMeter(Mutex<Meter>);

/// A read that is under way; dropping it ends it without bytes, also where it panics.
#[derive(Debug)]
pub struct MeasuredRead<M: Deref<Target = SpeedMeter>> {
    meter: M,
    n_bytes: u64,
}

#[derive(Debug)]
struct Meter {
    n_under_way: usize,
    began: Instant,
    n_bytes: u64,
    /// When a sample was taken last, or was to be.
    measured: Option<Instant>,
    fit: Fit,
}

/// Sums over samples, each with a weight, for a line of time over bytes.
#[derive(Debug, Default, Clone, Copy)]
struct Fit {
    weight: f64,
    bytes: f64,
    seconds: f64,
    bytes_squared: f64,
    bytes_seconds: f64,
}

impl TierSpeed {
    /// Seconds until `n_bytes` are there.
    pub fn seconds(&self, n_bytes: u64) -> f64 {
        self.latency_s + n_bytes as f64 / self.bytes_per_s
    }
}

impl Default for SpeedMeter {
    fn default() -> Self {
        Self(Mutex::new(Meter::new(Instant::now())))
    }
}

impl SpeedMeter {
    /// Runs a read that says how many bytes it brought.
    pub fn measure<T>(&self, read: impl FnOnce() -> T, n_bytes: impl FnOnce(&T) -> u64) -> T {
        let measured = MeasuredRead::begin(self);
        let result = read();
        measured.end(n_bytes(&result));
        result
    }

    /// Begins a read that another call ends.
    pub fn begin(self: &Arc<Self>) -> MeasuredRead<Arc<Self>> {
        MeasuredRead::begin(Arc::clone(self))
    }

    /// Whether nothing was measured for `max_age`: the caller should measure then. Another caller gets that answer after as much
    /// time again.
    pub fn claim_measurement(&self, max_age: Duration) -> bool {
        self.0.lock().claim(Instant::now(), max_age)
    }

    /// What was measured; `None` before the first read.
    pub fn speed(&self) -> Option<TierSpeed> {
        self.0.lock().fit.speed()
    }
}

impl<M: Deref<Target = SpeedMeter>> MeasuredRead<M> {
    fn begin(meter: M) -> Self {
        meter.0.lock().begin(Instant::now());
        Self { meter, n_bytes: 0 }
    }

    /// Ends the read, which brought so many bytes.
    pub fn end(mut self, n_bytes: u64) {
        self.n_bytes = n_bytes;
    }
}

impl<M: Deref<Target = SpeedMeter>> Drop for MeasuredRead<M> {
    fn drop(&mut self) {
        self.meter.0.lock().end(Instant::now(), self.n_bytes);
    }
}

impl Meter {
    fn new(now: Instant) -> Self {
        Self { n_under_way: 0, began: now, n_bytes: 0, measured: None, fit: Fit::default() }
    }

    fn claim(&mut self, now: Instant, max_age: Duration) -> bool {
        let is_due = self.measured.is_none_or(|measured| max_age <= now.saturating_duration_since(measured));
        if is_due {
            self.measured = Some(now);
        }
        is_due
    }

    fn begin(&mut self, now: Instant) {
        if self.n_under_way == 0 {
            self.began = now;
            self.n_bytes = 0;
        }
        self.n_under_way += 1;
    }

    fn end(&mut self, now: Instant, n_bytes: u64) {
        self.n_under_way = self.n_under_way.saturating_sub(1);
        self.n_bytes += n_bytes;
        let period = now.saturating_duration_since(self.began);
        if 0 < self.n_bytes && (self.n_under_way == 0 || MAX_PERIOD <= period) {
            self.fit.add(self.n_bytes as f64, period.as_secs_f64());
            self.measured = Some(now);
            self.began = now;
            self.n_bytes = 0;
        }
    }
}

impl Fit {
    fn add(&mut self, bytes: f64, seconds: f64) {
        for sum in [
            &mut self.weight,
            &mut self.bytes,
            &mut self.seconds,
            &mut self.bytes_squared,
            &mut self.bytes_seconds,
        ] {
            *sum *= KEPT_WEIGHT;
        }
        self.weight += 1.0;
        self.bytes += bytes;
        self.seconds += seconds;
        self.bytes_squared += bytes * bytes;
        self.bytes_seconds += bytes * seconds;
    }

    /// The line through the samples; through nothing where they are all alike or the line would begin below zero.
    fn speed(&self) -> Option<TierSpeed> {
        if self.weight <= 0.0 || self.bytes <= 0.0 {
            return None;
        }
        let (mean_bytes, mean_seconds) = (self.bytes / self.weight, self.seconds / self.weight);
        let variance = self.bytes_squared / self.weight - mean_bytes * mean_bytes;
        let covariance = self.bytes_seconds / self.weight - mean_bytes * mean_seconds;
        let is_spread = (MIN_SPREAD * mean_bytes).powi(2) < variance;
        let fitted = Some(covariance / variance).filter(|slope| is_spread && 0.0 < *slope);
        let latency_s = fitted.map_or(0.0, |slope| mean_seconds - slope * mean_bytes).max(0.0);
        // A clock that did not move is no infinite speed.
        let slope = ((mean_seconds - latency_s) / mean_bytes).max(1e-13);
        Some(TierSpeed { bytes_per_s: 1.0 / slope, latency_s })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn is_near(actual: f64, expected: f64) -> bool {
        (actual - expected).abs() <= 0.02 * expected.max(1e-6)
    }

    proptest! {
        #[test]
        fn reads_of_several_sizes_give_bandwidth_and_latency(
            bytes_per_s in 1e6_f64..1e10,
            latency_s in 0.0_f64..0.1,
            sizes in proptest::collection::vec(1_u64..64, 4..12),
        ) {
            let mut fit = Fit::default();
            for size in sizes.iter().chain(&[1, 40]) {
                let bytes = (size << 20) as f64;
                fit.add(bytes, latency_s + bytes / bytes_per_s);
            }
            let speed = fit.speed().unwrap();
            prop_assert!(is_near(speed.bytes_per_s, bytes_per_s), "{speed:?}");
            prop_assert!((speed.latency_s - latency_s).abs() < 1e-3, "{speed:?}");
        }

        #[test]
        fn any_samples_give_a_speed_that_times_can_be_taken_from(
            samples in proptest::collection::vec((1_u64..1 << 40, 0.0_f64..100.0), 1..20),
        ) {
            let mut fit = Fit::default();
            for (bytes, seconds) in samples {
                fit.add(bytes as f64, seconds);
            }
            let speed = fit.speed().unwrap();
            prop_assert!(speed.bytes_per_s.is_finite() && 0.0 < speed.bytes_per_s, "{speed:?}");
            prop_assert!(speed.latency_s.is_finite() && 0.0 <= speed.latency_s, "{speed:?}");
            prop_assert!(speed.seconds(u64::MAX).is_finite());
        }
    }

    #[test]
    fn a_tier_that_became_slow_is_known_to_be_after_a_few_reads() {
        let mut fit = Fit::default();
        for _ in 0..20 {
            fit.add(1e6, 0.001);
        }
        for _ in 0..10 {
            fit.add(1e6, 0.1);
        }
        let speed = fit.speed().unwrap();
        assert!(speed.bytes_per_s < 1.2e7, "{speed:?}");
    }

    #[test]
    fn reads_at_a_time_share_what_the_tier_can_do() {
        let start = Instant::now();
        let after = |ms| start + Duration::from_millis(ms);
        let mut meter = Meter::new(start);
        // Two reads of 1 MB overlap and take 20 ms together; nothing is read for a second.
        for at in [0, 1000] {
            meter.begin(after(at));
            meter.begin(after(at + 1));
            meter.end(after(at + 18), 1_000_000);
            meter.end(after(at + 20), 1_000_000);
        }
        let speed = meter.fit.speed().unwrap();
        assert!(is_near(speed.bytes_per_s, 1e8), "{speed:?}");
        // Reads that brought nothing say nothing.
        meter.begin(after(2000));
        meter.end(after(9000), 0);
        assert_eq!(meter.fit.speed().unwrap(), speed);
    }

    #[test]
    fn a_measurement_is_due_when_the_last_one_is_old_and_for_one_caller() {
        let start = Instant::now();
        let after = |s| start + Duration::from_secs(s);
        let max_age = Duration::from_secs(30);
        let mut meter = Meter::new(start);
        assert!(meter.claim(after(0), max_age) && !meter.claim(after(29), max_age));
        assert!(meter.claim(after(30), max_age));
        meter.begin(after(40));
        meter.end(after(41), 1_000_000);
        assert!(!meter.claim(after(70), max_age) && meter.claim(after(71), max_age));
    }
}
