//! How fast an engine was lately, in tokens a second.
//!
//! A measurement is forgotten after a while without another one. Otherwise one that says that a way does not pay would
//! stand for ever, since the way is then not taken and not measured again.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// How much the newest measurement counts.
const NEWEST_SHARE: f64 = 0.2;
/// How much it counts if it is slower and what made it slower may have been something else.
const SLOWER_SHARE: f64 = 0.05;
/// Fewest tokens of a measurement: fewer say more about what each request costs than about speed.
const MIN_TOKENS: u64 = 256;
/// Time after which a mean is forgotten if nothing was measured.
const MAX_AGE: Duration = Duration::from_mins(1);

/// A mean over measurements in which older ones count less and less.
#[derive(Debug, Default)]
pub(crate) struct Speed {
    /// Tokens a second, and when they were measured last.
    mean: Mutex<Option<(f64, Instant)>>,
}

impl Speed {
    /// Takes a measurement; one that says nothing about speed is left out.
    pub(crate) fn measure(&self, n_tokens: u64, time: Duration) {
        self.take(n_tokens, time, Instant::now(), |mean, newest| match mean {
            None => newest,
            Some(mean) => mean + NEWEST_SHARE * (newest - mean),
        });
    }

    /// Takes a measurement whose time may have other parts, such as waiting: a faster one holds, a slower one changes the mean a
    /// little. `assumed` is the mean before the first one.
    pub(crate) fn measure_at_best(&self, n_tokens: u64, time: Duration, assumed: f64) {
        self.take(n_tokens, time, Instant::now(), |mean, newest| {
            let mean = mean.unwrap_or(assumed);
            if mean < newest { newest } else { mean + SLOWER_SHARE * (newest - mean) }
        });
    }

    /// Tokens a second; `None` if nothing was measured lately.
    pub(crate) fn tokens_per_s(&self) -> Option<f64> {
        self.at(Instant::now())
    }

    fn take(&self, n_tokens: u64, time: Duration, now: Instant, join: impl FnOnce(Option<f64>, f64) -> f64) {
        if n_tokens < MIN_TOKENS || time.is_zero() {
            return;
        }
        let newest = n_tokens as f64 / time.as_secs_f64();
        let mean = self.at(now);
        *self.mean.lock() = Some((join(mean, newest), now));
    }

    fn at(&self, now: Instant) -> Option<f64> {
        let (mean, measured) = (*self.mean.lock())?;
        (now.saturating_duration_since(measured) < MAX_AGE).then_some(mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_speed_follows_its_measurements_and_leaves_out_what_says_nothing() {
        let speed = Speed::default();
        speed.measure(255, SECOND);
        speed.measure(1000, Duration::ZERO);
        assert_eq!(speed.tokens_per_s(), None);
        speed.measure(1000, SECOND);
        assert_eq!(speed.tokens_per_s(), Some(1000.0));
        speed.measure(2000, SECOND);
        assert_eq!(speed.tokens_per_s(), Some(1200.0));
        for _ in 0..100 {
            speed.measure(500, SECOND);
        }
        assert!((speed.tokens_per_s().unwrap() - 500.0).abs() < 1.0);
    }

    #[test]
    fn one_slow_measurement_among_others_changes_little_where_it_may_have_waited() {
        let speed = Speed::default();
        speed.measure_at_best(1000, SECOND, 10_000.0);
        assert_eq!(speed.tokens_per_s(), Some(9550.0));
        speed.measure_at_best(20_000, SECOND, 10_000.0);
        assert_eq!(speed.tokens_per_s(), Some(20_000.0));
        for _ in 0..200 {
            speed.measure_at_best(1000, SECOND, 10_000.0);
        }
        assert!((speed.tokens_per_s().unwrap() - 1000.0).abs() < 10.0);
    }

    #[test]
    fn a_speed_is_forgotten_when_it_is_old() {
        let speed = Speed::default();
        speed.measure(1000, SECOND);
        let now = Instant::now();
        assert_eq!(speed.at(now), Some(1000.0));
        assert_eq!(speed.at(now + MAX_AGE), None);
    }
}
